"""Which ids the grammars of a step's rows leave, as masks over the vocabulary, for whoever samples.

A row's allowed and banned ids take theirs out of what the grammar allows, each as long as something is left:
between them the grammar wins. Rows that nothing can be drawn for are told by place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shard_worker.executor import Bool, GrammarRow


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    rows: tuple[tuple[int, Bool], ...] = ()  # place among the k, [vocabulary] ids that may be drawn
    waiting_rows: tuple[int, ...] = ()
    refused_rows: tuple[tuple[int, str], ...] = ()


NO_MASKS = GrammarMasks()


def masks_of(grammars: Sequence[GrammarRow]) -> GrammarMasks:
    if not grammars:
        return NO_MASKS
    rows, waiting, refused = [], [], []
    for grammar in grammars:
        found = grammar.matcher.allowed(grammar.output_ids, grammar.length)
        if found is None:
            waiting.append(grammar.row)
        elif isinstance(found, str):
            refused.append((grammar.row, found))
        else:
            rows.append((grammar.row, _without(found, grammar)))
    return GrammarMasks(tuple(rows), tuple(waiting), tuple(refused))


def _without(mask: Bool, grammar: GrammarRow) -> Bool:
    if len(grammar.allowed):
        within = np.zeros_like(mask)
        within[grammar.allowed] = mask[grammar.allowed]
        mask = within if within.any() else mask
    if len(grammar.banned):
        left = mask.copy()
        left[grammar.banned] = False
        mask = left if left.any() else mask
    return mask

"""Grammars that some applications of a seed ask for, and what the oracle may draw under them."""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from chassis.grammars import Compiled, Vocabulary
from chassis.messages.card import parse_card
from chassis.messages.sampling import Grammar, GrammarKind
from shard_worker.executor import U32
from shard_worker.fake_model import EOS_ID, FakeConfig, card_of
from shard_worker.fake_vocabulary import choices_of
from shard_worker.grammar import Run

GRAMMARS = (
    Grammar(GrammarKind.REGEX, "[a-z ]{3,40}"),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "maxItems": 9}'),
    Grammar(GrammarKind.CHOICE, '["at the sea", "on the shore", "é"]'),
    Grammar(GrammarKind.LARK, 'start: ("a" | "bc" | / [d-k]+/)+'),
)


def draw_grammar(seed: int, client: int) -> Grammar | None:
    """In a fifth of the seeds, of every second client."""
    rng = random.Random(f"grammar {seed} {client}")
    if seed % 5 or rng.random() < 0.5:
        return None
    return rng.choice(GRAMMARS)


def compile_later(seed: int) -> Run:
    """Workers compile within some steps, or at once."""
    rng = random.Random(f"compiling {seed}")

    def run(work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(rng.choice((0.0, 0.003, 0.05)), work)

    return run


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(parse_card(card_of(FakeConfig())))


@cache
def compiled(grammar: Grammar) -> Compiled:
    return Compiled(grammar, vocabulary())


def choices_under(grammar: Grammar) -> Callable[[Sequence[int]], U32]:
    """What the fake model may draw behind an output; nothing behind its end."""

    def choices(ids: Sequence[int]) -> U32:
        if ids and ids[-1] == EOS_ID:
            return np.empty(0, np.uint32)
        following = compiled(grammar).begin()
        assert following.take(ids) is None
        mask = following.allowed()
        assert not isinstance(mask, str), mask
        return choices_of(mask)

    return choices

"""Pure. How many blocks admission leaves for running sequences to grow into.

Each is expected to go on as outputs did so far (`output_lengths`), and to give its blocks back when it ends.
So the memory that all need together rises for a while and falls again: what is left free is the peak of that,
with a margin for chance and for what is not known yet. Whoever is admitted counts as if it ran.

The margin, in standard deviations, is what it has to be: it grows by what preemptions lose, and fades.
"""

from collections.abc import Iterable
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

from batcher.output_lengths import OutputLengths
from batcher.sequence import Sequence
from chassis.ids import RequestId

F64 = NDArray[np.float64]
MOMENTS_PER_OCTAVE = 6
MARGIN, MARGIN_MIN, MARGIN_MAX = 1.0, 0.25, 3.0
GAIN = 20.0  # for losing as many tokens as the pool has
FADE = 0.001  # of what is above the least, a step
STALE_ROWS = 64  # after one step more for so many running sequences they are looked at anew
KEEP_STEPS = 8  # as many more while nobody leaves: each only went on as it was expected to


class GrowthReserve:
    def __init__(self, block_size_tokens: int) -> None:
        self._size = block_size_tokens
        self._lengths = OutputLengths()
        self._counted: dict[RequestId, int] = {}  # output ids that `_lengths` knows of those that run
        self._pool_tokens = 1
        self.margin = MARGIN
        self._stale = 0  # steps until the running are looked at anew, if somebody left
        self._changed = True  # somebody left since, or they were never looked at
        self._asked: tuple[object, ...] = ()  # of whom `_answer` is; (): of nobody
        self._answer = 0
        self._after: F64 = np.empty(0)  # moments ahead, in tokens that each has written by then
        self._mean: F64 = np.empty(0)  # tokens that the running need more then
        self._variance: F64 = np.empty(0)

    def open(self, num_blocks: int) -> None:
        """A pool of so many."""
        self._pool_tokens = num_blocks * self._size
        self._stale, self._changed = 0, True

    # ---- what is needed ----------------------------------------------------------------------------

    def blocks(self, running: Iterable[Sequence], head: Sequence) -> int:
        """To be left free if `head` comes to the running."""
        if self._is_old or head.growth_tokens > self._after[-1]:
            self._look(running, head)
        asked = (head.request.id, head.growth_tokens, head.num_tokens, len(head.blocks), head.cached_tokens)
        if asked != self._asked:
            mean, variance = self._grow([head])
            need = self._mean + mean + self.margin * np.sqrt(self._variance + variance)
            self._asked, self._answer = asked, max(0, ceil(float(need.max()) / self._size))
        return self._answer

    @property
    def _is_old(self) -> bool:
        return self._stale <= (0 if self._changed else -KEEP_STEPS)

    def joined(self, sequence: Sequence) -> None:
        """It runs now."""
        if not self._is_old:
            mean, variance = self._grow([sequence])
            self._mean += mean
            self._variance += variance
            self._asked = ()

    def _look(self, running: Iterable[Sequence], head: Sequence) -> None:
        size, found = self._size, list(running)
        self._count(found)
        longest = max(size, head.growth_tokens, *[s.growth_tokens for s in found])
        moments = np.arange(1 + ceil(MOMENTS_PER_OCTAVE * log2(longest / size)))
        later = np.minimum(size * 2.0 ** (moments / MOMENTS_PER_OCTAVE), longest)
        self._after = np.concatenate(([0.0], later))
        self._mean, self._variance = self._grow(found)
        self._stale, self._changed, self._asked = 1 + len(found) // STALE_ROWS, False, ()

    def _grow(self, sequences: list[Sequence]) -> tuple[F64, F64]:
        """Tokens of room that they need more from each moment to the next, and the variance of that."""
        moments = len(self._after)
        if not sequences:
            return np.zeros(moments), np.zeros(moments)
        size = self._size
        columns = np.array(
            [
                (
                    s.watch.length,
                    s.growth_tokens,
                    s.num_tokens,
                    max(len(s.blocks), -(-(s.num_tokens + 1) // size)),
                    s.cached_tokens or 0,
                    not s.request.limits.ignore_eos,
                )
                for s in sequences
            ],
            np.float64,
        )
        now, left, tokens, blocks, shared, may_end = columns.T[:, :, None]
        after = self._after[None, :]
        hazard, doubt = self._lengths.hazard(now)
        hazard_then, doubt_then = self._lengths.hazard(now + after)
        sure = np.maximum(0.0, hazard_then - hazard - self.margin * np.sqrt(doubt_then - doubt))
        lives = np.exp(-may_end * sure) * (after < left)
        until = np.minimum(np.append(self._after[1:], self._after[-1:])[None, :], left)
        grown = size * (np.ceil((tokens + until) / size) - blocks)
        freed = size * blocks - shared
        mean = lives * grown - (1.0 - lives) * freed
        variance = lives * (1.0 - lives) * (grown + freed) ** 2
        return mean.sum(0), variance.sum(0)

    # ---- what is learned ---------------------------------------------------------------------------

    def _count(self, running: list[Sequence]) -> None:
        may_end = [s for s in running if not s.request.limits.ignore_eos]
        if may_end:
            now = [s.watch.length for s in may_end]
            before = [self._counted.get(s.request.id, 0) for s in may_end]
            self._lengths.ran(np.array(before, np.float64), np.array(now, np.float64))
            self._counted.update(zip([s.request.id for s in may_end], now, strict=True))

    def left(self, sequence: Sequence) -> None:
        """It is over, whatever the reason."""
        if sequence.watch.length and not sequence.request.limits.ignore_eos:
            self._count([sequence])
            if sequence.growth_tokens > 0:
                self._lengths.ended(sequence.watch.length)
        self._counted.pop(sequence.request.id, None)
        self._changed = True

    def step(self) -> None:
        self._stale -= 1
        self.margin -= FADE * (self.margin - MARGIN_MIN)

    def preempted(self, num_tokens: int) -> None:
        """So many may be computed again."""
        self._stale, self._changed = 0, True
        self.margin = min(MARGIN_MAX, self.margin + GAIN * num_tokens / self._pool_tokens)

    def check(self) -> None:
        assert MARGIN_MIN <= self.margin <= MARGIN_MAX

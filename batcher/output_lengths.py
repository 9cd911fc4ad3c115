"""Pure. How long outputs get, learned from those that ran here.

Whether an output ends by itself soon depends on how long it is already: for each range of lengths it is
counted how many passed through and how many of them ended in it (a life table). So one that ran into its
limit counts for what it is, one that did not end before; and those that still run count as well: what is
short ends first, and would be believed first. Old counts fade. Before anything is known an output doubles
more likely than not, from `PRIOR_LEN` tokens on: limits say little, but something may always be long.
"""

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
RANGES_PER_OCTAVE = 8
FIRST_LEN = 4
LONGEST = 1 << 20
PRIOR_LEN = 64
DOUBLES = 0.75  # of those that are as long as that, and of those twice as long, and so on
PRIOR_WEIGHT = 2.0  # outputs that are as if they had been seen
MEMORY = 2048  # outputs after which a count has faded to a third
LEAST_WEIGHT = 1e-3  # to which a count fades: what is never seen would end as nothing over nothing
SURELY = 0.99  # ended, at most


class OutputLengths:
    def __init__(self) -> None:
        count = 1 + int(np.ceil(RANGES_PER_OCTAVE * np.log2(LONGEST / FIRST_LEN)))
        lengths = FIRST_LEN * 2.0 ** (np.arange(count) / RANGES_PER_OCTAVE)
        self._edges: F64 = np.concatenate(([0.0], lengths))
        self._width: F64 = np.diff(self._edges)
        doublings = np.diff(np.log2(self._edges + PRIOR_LEN))
        self._passed: F64 = np.full(count, PRIOR_WEIGHT)  # parts of a range add up
        self._ended: F64 = PRIOR_WEIGHT * (1.0 - DOUBLES**doublings)
        self._hazard: F64 = np.zeros(count + 1)
        self._doubt: F64 = np.zeros(count + 1)
        self._settle()

    def _settle(self) -> None:
        share = np.minimum(SURELY, self._ended / self._passed)
        np.cumsum(-np.log1p(-share), out=self._hazard[1:])
        np.cumsum(share / (1.0 - share) / self._passed, out=self._doubt[1:])  # Greenwood's formula

    def _reached(self, lengths: F64) -> F64:
        """How much of each range these outputs passed through."""
        parts: F64 = np.clip((lengths[:, None] - self._edges[:-1]) / self._width, 0.0, 1.0).sum(0)
        return parts

    def ran(self, before: F64, now: F64) -> None:
        """These outputs became longer, and did not end meanwhile; in tokens."""
        self._passed += self._reached(now) - self._reached(before)
        self._settle()

    def ended(self, length: int) -> None:
        """An output that ran to `length` tokens is over, though it might have gone on."""
        fade = np.where(self._passed > LEAST_WEIGHT, 1.0 - 1.0 / MEMORY, 1.0)
        self._passed *= fade
        self._ended *= fade
        place = min(int(np.searchsorted(self._edges, max(length, 1))) - 1, len(self._ended) - 1)
        self._ended[place] += 1.0
        self._passed[place] += max(0.0, (self._edges[place + 1] - length) / self._width[place])
        self._settle()

    def hazard(self, lengths: F64) -> tuple[F64, F64]:
        """One of `a` tokens gets to `b` with the chance exp(hazard(a) - hazard(b)); and the same of the
        variance with which that difference is known. Who ends in a range is taken to run to its end."""
        place = np.searchsorted(self._edges, lengths, side="right") - 1
        return self._hazard[place], self._doubt[place]

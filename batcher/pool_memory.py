"""Pure. What workers say of the KV memory behind a pool: its name, and who wrote it last."""

import hashlib
from typing import NamedTuple

from chassis.ids import Epoch


def pool_generation(stamps: tuple[str, ...], ranges: tuple[tuple[int, int], ...]) -> str:
    """Names the memory behind a pool's block ids: it changes whenever any of it is allocated anew."""
    parts = [f"{len(s)}:{s}:{first}:{end};" for s, (first, end) in zip(stamps, ranges, strict=True)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


class Writer(NamedTuple):
    """`epoch` 0: none, or it is not known; `attachment` 0: nobody heard of one in that epoch."""

    epoch: Epoch = Epoch(0)
    attachment: int = 0

    def joined(self, other: "Writer") -> "Writer":
        """Of two stages: of an epoch's attaches the newest may have had its blocks written."""
        return max(self, other) if self.epoch == other.epoch else Writer()

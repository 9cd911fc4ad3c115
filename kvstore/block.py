"""Pure. The blocks of one pool, counted: how many references each has, and which are free.

A block without references is free or, while the prefix index keeps it, cached: the index says which.
Free blocks are handed out last in, first out, lowest ids first in a new pool, so that a pool which is
never full touches little memory.
"""

from collections.abc import Mapping, Sequence

from chassis.ids import BlockId


class BlockTable:
    """References of blocks 0 to `num_blocks` - 1, and the stack of free ones."""

    __slots__ = ("free", "references")

    def __init__(self, num_blocks: int, held: Mapping[BlockId, int], cached: Sequence[BlockId]) -> None:
        """`held` counts the references of leased blocks; `cached` are kept without any."""
        assert num_blocks > 0
        self.references = [0] * num_blocks
        for block, count in held.items():
            assert count > 0
            self.references[block] = count
        kept = set(cached)
        assert kept.isdisjoint(held)
        self.free = [
            BlockId(b) for b in range(num_blocks - 1, -1, -1) if not self.references[b] and b not in kept
        ]

    def check(self, cached: Sequence[BlockId]) -> int:
        """Asserts that each block is in exactly one state; returns the number of leased ones."""
        assert all(count >= 0 for count in self.references), "negative reference count"
        free, kept = set(self.free), set(cached)
        assert len(free) == len(self.free), "a block is free twice"
        assert free.isdisjoint(kept), "a block is free and cached"
        assert not any(self.references[b] for b in free), "a free block has references"
        assert not any(self.references[b] for b in kept), "a cached block has references"
        leased = sum(1 for count in self.references if count)
        assert len(free) + leased + len(kept) == len(self.references), "a block is lost"
        return leased

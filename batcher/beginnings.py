"""Pure. Which chains the pool may hold, by their first blocks: a prompt that begins otherwise needs no match.

The batcher commits every block of its pool itself, so it knows them all, unless the pool came with content
or kvstore keeps some elsewhere. As many are remembered as the pool has blocks; one that was forgotten costs a
hit, never an answer.
"""

from chassis.ids import BlockHash


class Beginnings:
    def __init__(self) -> None:
        self._known: dict[BlockHash, None] = {}  # the latest used last
        self._whole = False  # the pool has no content that was not committed here
        self._elsewhere = False  # kvstore may have what the pool lacks

    def used(self, first: BlockHash, num_blocks: int) -> None:
        """The pool, of `num_blocks`, holds a chain that begins with this."""
        self._known.pop(first, None)
        self._known[first] = None
        if len(self._known) > num_blocks:  # the oldest was evicted long ago, or will be next
            del self._known[next(iter(self._known))]

    def attached(self, cached: int, tiers: bool = False) -> None:
        """The pool stands, with so many blocks of content that nobody holds, and perhaps with `tiers`."""
        self._whole = self._whole or cached == 0
        self._elsewhere = tiers

    def clear(self) -> None:
        """Another pool."""
        self._known.clear()
        self._whole = False

    def may_hold(self, first: BlockHash) -> bool:
        return self._elsewhere or not self._whole or first in self._known

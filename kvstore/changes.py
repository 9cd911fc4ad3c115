"""Pure. What changed in the pools since it was last taken: net, so that a content is named once.

Every commit counts as stored, of content that is held already too: who reads a pool piece by piece
(`Ledger.holdings`) would otherwise miss content that moved to a block of a piece read before.
While nobody wants to know, nothing is noted but that something was missed.
"""

from dataclasses import dataclass, field

from chassis.ids import BlockHash
from chassis.messages.kvstore import Attach


@dataclass(slots=True)
class PoolChanges:
    """`stored` by content with the parent, None where it was not told; `cleared`: all from before is void."""

    attach: Attach
    cleared: bool = False
    gone: bool = False
    stored: dict[BlockHash, BlockHash | None] = field(default_factory=dict)
    evicted: dict[BlockHash, None] = field(default_factory=dict)


class Changes:
    __slots__ = ("_pools", "missed", "wanted")

    def __init__(self) -> None:
        self.wanted = False
        self.missed = False  # something changed while it was not wanted
        self._pools: dict[str, PoolChanges] = {}

    def stored(self, attach: Attach, content: BlockHash, parent: BlockHash | None) -> None:
        if not self.wanted:
            self.missed = True
            return
        pool = self._of(attach)
        pool.evicted.pop(content, None)
        pool.stored[content] = parent

    def evicted(self, attach: Attach, content: BlockHash) -> None:
        if not self.wanted:
            self.missed = True
            return
        pool = self._of(attach)
        pool.stored.pop(content, None)
        pool.evicted[content] = None

    def cleared(self, attach: Attach, gone: bool = False) -> None:
        """Nothing is held, or the pool is no more."""
        if not self.wanted:
            self.missed = True
            return
        self._pools[attach.pool.generation] = PoolChanges(attach, cleared=True, gone=gone)

    def take(self) -> tuple[PoolChanges, ...]:
        if not self._pools:
            return ()
        taken = tuple(self._pools.values())
        self._pools.clear()
        return taken

    def _of(self, attach: Attach) -> PoolChanges:
        pool = self._pools.get(attach.pool.generation)
        if pool is None:
            pool = self._pools[attach.pool.generation] = PoolChanges(attach)
        elif pool.attach is not attach:
            pool.attach, pool.gone = attach, False
        return pool

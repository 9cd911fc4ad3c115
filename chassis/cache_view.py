"""Pure. What one kvstore holds, as a listener knows it from its messages: for routers, and for people.

Feed it every message of `subjects.cache_changes` and every reply to `question`; ask that again every
`ASK_AGAIN_S`, because the last message before a silence may be lost too. What is known is true as of one
number. After a gap in the numbers, or a reply that knows of changes which did not come, all is read anew.
It grows with the blocks of the pools and no further, since what is evicted is told.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from chassis.ids import BlockHash
from chassis.messages.cache import CacheChanges, Holdings, HoldingsQuestion, PoolTotals

ASK_AGAIN_S = 10.0


@dataclass(slots=True)
class PoolView:
    """`held`: contents and their parents."""

    namespace: str
    block_size_tokens: int
    held: dict[BlockHash, BlockHash | None] = field(default_factory=dict)
    unread_block: int | None = 0  # the first of the next piece; None: it is known whole


class CacheView:
    def __init__(self) -> None:
        self.number: int | None = None  # None: nothing is known
        self.pools: dict[str, PoolView] = {}
        self.losses = 0
        self._ahead = 0  # an earlier reply knew of this number, which had not come

    @property
    def whole(self) -> bool:
        return self.number is not None and all(pool.unread_block is None for pool in self.pools.values())

    def question(self) -> HoldingsQuestion:
        """What to ask next; once it is `whole`, whether that is still so."""
        for generation, pool in self.pools.items():
            if pool.unread_block is not None:
                return HoldingsQuestion(generation, pool.unread_block)
        return HoldingsQuestion()

    def heard(self, changes: CacheChanges) -> None:
        if self.number is None or changes.number <= self.number:
            return  # what is read later, or was read before, has it
        if changes.number > self.number + 1:
            self._lost()
            return
        self.number = changes.number
        generation = changes.pool.generation
        if changes.gone:
            self.pools.pop(generation, None)
            return
        pool = self.pools.get(generation)
        if pool is None or changes.cleared:
            pool = self.pools[generation] = PoolView(changes.namespace, changes.block_size_tokens)
            pool.unread_block = None  # all of it is told from here on
        for content, parent in changes.stored:
            if parent is not None or content not in pool.held:
                pool.held[content] = parent
        for content in changes.evicted:
            pool.held.pop(content, None)

    def answered(self, holdings: Holdings) -> None:
        if self.number is None:
            self.number, self._ahead = holdings.number, 0
            self.pools = {p.ref.generation: _unread(p) for p in holdings.pools}
        if holdings.number != self.number:
            if self.number < self._ahead:
                self._lost()  # there was time enough for it to come
            elif holdings.number > self.number:
                self._ahead = holdings.number
            return  # asked again
        pool = self.pools.get(holdings.generation)
        if pool is not None and pool.unread_block == holdings.first_block:
            pool.held.update((h.content, h.parent) for h in holdings.held)
            pool.unread_block = holdings.next_block

    def longest(self, generation: str, chain: Iterable[BlockHash]) -> int:
        """How many blocks of a chain the pool holds from its beginning."""
        pool, count = self.pools.get(generation), 0
        if pool is not None:
            for content in chain:
                if content not in pool.held:
                    break
                count += 1
        return count

    def _lost(self) -> None:
        self.losses += 1
        self.number = None
        self.pools.clear()


def _unread(pool: PoolTotals) -> PoolView:
    return PoolView(pool.namespace, pool.block_size_tokens)

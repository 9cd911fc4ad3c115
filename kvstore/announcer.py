"""Pure. Numbers what changed, for whoever listens, and answers who asks what is held.

A question is also a sign that somebody listens: without one for `INTEREST_S` nothing is noted nor built.
What was missed meanwhile, and what is more than a few messages at once, leaves a gap in the numbers, from
which a listener knows that it has to read the pools anew.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from chassis.ids import BlockHash, BootId
from chassis.messages.cache import (
    TIER_POOL,
    CacheChanges,
    Held,
    Holdings,
    HoldingsQuestion,
    PoolTotals,
    tier_of,
)
from kvstore.changes import PoolChanges
from kvstore.ledger import Ledger
from kvstore.pool import PIECE_BLOCKS

INTEREST_S = 30.0
CONTENTS_MAX = 1024  # of a message: 64 KiB
MESSAGES_MAX = 16  # of one call


class Shelf(Protocol):
    """A tier: `kvstore/catalog.py` has what it holds."""

    def totals(self) -> PoolTotals: ...

    def piece(self, first_place: int, count: int, now: float) -> tuple[tuple[Held, ...], int | None]: ...


class Announcer:
    def __init__(self, boot: BootId, ledger: Ledger, shelves: Sequence[Shelf] = ()) -> None:
        """`shelves`: the tiers below the pools."""
        self.number = 0  # of the last change
        self._shelves = {shelf.totals().ref.generation: shelf for shelf in shelves}
        self._boot = boot
        self._ledger = ledger
        self._until = float("-inf")

    def asked(self, question: HoldingsQuestion, now: float) -> Holdings:
        """Call it after the messages of all calls before."""
        changes = self._ledger.changes
        self._until = now + INTEREST_S
        if changes.missed:
            self.number += 1
        changes.wanted, changes.missed = True, False
        pools, held, following = self._ledger.holdings(question.generation, question.first_block, now)
        pools += tuple(shelf.totals() for shelf in self._shelves.values())
        tier, shelf = TIER_POOL, self._shelves.get(question.generation)
        if shelf is not None:
            tier = question.generation
            held, following = shelf.piece(question.first_block, PIECE_BLOCKS, now)
        return Holdings(
            self._boot, self.number, pools, question.generation, question.first_block, held, following, tier
        )

    def messages(self, now: float) -> tuple[CacheChanges, ...]:
        """What is to be told of the calls since the last time."""
        changes = self._ledger.changes
        taken = changes.take()
        if not taken:
            return ()
        if now > self._until:
            changes.wanted, changes.missed = False, True
            return ()
        told = tuple(islice(self._cut(taken), MESSAGES_MAX + 1))
        return told[:MESSAGES_MAX]  # if there is more, a number is missing

    def _cut(self, taken: tuple[PoolChanges, ...]) -> Iterator[CacheChanges]:
        for pool in taken:
            stored, evicted = list(pool.stored.items()), list(pool.evicted)
            first = True
            while first or stored or evicted:
                some = stored[:CONTENTS_MAX]
                rest = CONTENTS_MAX - len(some)
                yield self._message(pool, tuple(some), tuple(evicted[:rest]), first)
                del stored[:CONTENTS_MAX], evicted[:rest]
                first = False

    def _message(
        self,
        pool: PoolChanges,
        stored: tuple[tuple[BlockHash, BlockHash | None], ...],
        evicted: tuple[BlockHash, ...],
        first: bool,
    ) -> CacheChanges:
        self.number += 1
        attach = pool.attach
        return CacheChanges(
            boot=self._boot,
            number=self.number,
            pool=attach.pool,
            namespace=attach.namespace,
            block_size_tokens=attach.block_size_tokens,
            stored=stored,
            evicted=evicted,
            cleared=pool.cleared and first,
            gone=pool.gone,
            tier=tier_of(attach.pool),
        )

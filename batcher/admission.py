"""Pure. Who runs next: matching against the cache, and the budget of blocks.

Only the first of the order is admitted, so that nothing small passes it for ever. The few at the front
are matched ahead; the blocks of their cached prefixes are theirs while they wait, and are let go when
running sequences need room.
"""

from batcher.events import BlocksMatched, MatchBlocks
from batcher.lease import Lease
from batcher.policy import GrowthReserve
from batcher.running import Running
from batcher.sequence import Sequence, Status
from batcher.waiting import WaitingRoom
from chassis.ids import RequestId


class Admission:
    def __init__(
        self, lease: Lease, block_size_tokens: int, ahead_len: int, match_wait_s: float, prefix_cache: bool
    ) -> None:
        self._lease = lease
        self._block_size_tokens = block_size_tokens
        self._ahead_len = ahead_len
        self._match_wait_s = match_wait_s
        self._prefix_cache = prefix_cache
        self._asked: tuple[Sequence, ...] = ()
        self._asked_at = 0.0
        self._deferred_at: float | None = None  # since when somebody waits for blocks to be told
        self._holding: dict[RequestId, Sequence] = {}  # waiting, with blocks of a cached prefix
        self.waiting = WaitingRoom()
        self.reserve = GrowthReserve()

    def add(self, sequence: Sequence) -> None:
        """It holds no blocks."""
        sequence.status = Status.WAITING
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Out of the line; its blocks stay with it."""
        self.waiting.remove(sequence)
        self._holding.pop(sequence.request.id, None)

    # ---- the cache ---------------------------------------------------------------------------------

    def ask(self, now: float, places: int) -> MatchBlocks | None:
        """What kvstore is to match now for those that may soon be admitted. Not while running sequences
        lack blocks: what is let go for them must not be taken away again."""
        if not len(self.waiting):
            self._deferred_at = None
            return None
        if places <= 0 or not self._lease.can_match or self._lease.short:
            return None
        asked, chains, deferred = [], [], False
        for sequence in self.waiting.first(min(places, self._ahead_len)):
            if sequence.status is not Status.WAITING or not self._may_match(sequence):
                continue
            chain = tuple(sequence.chain(sequence.num_match_blocks)[: sequence.num_match_blocks])
            if now < self._defer_until(now) and self._lease.tells(chain, now):
                deferred = True
                continue
            sequence.status = Status.MATCHING
            asked.append(sequence)
            chains.append(chain)
        if not deferred:
            self._deferred_at = None
        elif self._deferred_at is None:
            self._deferred_at = now
        if not asked:
            return None
        self._asked = tuple(asked)
        self._asked_at = now
        return self._lease.match([s.request.id for s in asked], chains)

    def _defer_until(self, now: float) -> float:
        """A match before what was just computed is told would miss it; but kvstore may not answer."""
        since = now if self._deferred_at is None else self._deferred_at
        return since + self._match_wait_s

    def matched(self, event: BlocksMatched) -> None:
        answer = self._lease.matched(event)
        if answer is None:
            return
        for sequence, blocks in zip(self._asked, answer[1], strict=True):
            if sequence.status is not Status.MATCHING:
                self._lease.release(blocks, event.now)  # it ended, or did not wait for this
                continue
            sequence.status = Status.MATCHED if self._lease.attached else Status.WAITING
            if blocks:
                sequence.blocks.extend(blocks)
                sequence.num_committed = len(blocks)
                sequence.num_computed = sequence.num_proven = len(blocks) * self._block_size_tokens
                self._holding[sequence.request.id] = sequence
        self._asked = ()

    def void_calls(self) -> None:
        """A match on its way will not be answered."""
        self._deferred_at = None
        for sequence in self._asked:
            if sequence.status is Status.MATCHING:
                sequence.status = Status.WAITING
        self._asked = ()

    def let_go(self, now: float) -> bool:
        """Release what waiting sequences hold; they are matched again. False: they held nothing."""
        held = bool(self._holding)
        for sequence in self._holding.values():
            self._lease.release(sequence.blocks, now)
            forget_blocks(sequence)
            sequence.status = Status.WAITING
        self._holding.clear()
        return held

    def pool_gone(self) -> None:
        """All blocks are gone with their pool."""
        for sequence in self._holding.values():
            forget_blocks(sequence)
        self._holding.clear()
        for sequence in self.waiting.first(len(self.waiting)):
            sequence.status = Status.WAITING

    # ---- the budget --------------------------------------------------------------------------------

    def next(self, now: float, running: Running) -> Sequence | None:
        """The first of the order, if it may run now."""
        head = self.waiting.head
        if head is None or not self._known(head, now):
            return None
        lacking = self._blocks(head.num_tokens + 1) - len(head.blocks)
        for line in (running.prefilling.values(), running.alone):
            for sequence in line:
                lacking += max(0, self._blocks(sequence.num_tokens + 1) - len(sequence.blocks))
        if not self._lease.attached:
            return head if lacking <= self._lease.num_idle else None
        if len(running) == 0:
            return head
        growth = running.growth_tokens + head.growth_tokens
        reserve = self.reserve.blocks(growth, len(running), self._block_size_tokens)
        return head if lacking + reserve <= self._lease.available else None

    def _known(self, head: Sequence, now: float) -> bool:
        """What the cache has for it is known, or not worth waiting for."""
        match head.status:
            case Status.MATCHED:
                return True
            case Status.MATCHING:
                return now >= self._asked_at + self._match_wait_s
            case _:
                return not self._lease.attached or not self._may_match(head)

    def _may_match(self, sequence: Sequence) -> bool:
        return (
            self._prefix_cache
            and sequence.num_match_blocks > 0
            and self._lease.may_hold(sequence.chain(1)[0])
        )

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size_tokens)

    def wake_at(self, now: float) -> float | None:
        """When waiting for a match ends."""
        times = [self._asked_at] if self._asked else []
        if self._deferred_at is not None:
            times.append(self._deferred_at)
        ends = [at + self._match_wait_s for at in times]
        return min([end for end in ends if end > now], default=None)

    def check(self) -> None:
        self.waiting.check()
        self.reserve.check()
        for sequence in self._holding.values():
            assert sequence.status is Status.MATCHED and sequence.blocks
        for sequence in self.waiting.first(len(self.waiting)):
            assert not sequence.blocks or sequence.request.id in self._holding


def forget_blocks(sequence: Sequence) -> None:
    """It has no KV any more."""
    sequence.blocks.clear()
    sequence.num_committed = sequence.num_sent_blocks = 0
    sequence.fall_back(0)

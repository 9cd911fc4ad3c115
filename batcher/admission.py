"""Pure. Who runs next: matching against the cache, and the budget of blocks.

Only the first of the order is admitted, so that nothing small passes it for ever. The few at the front
are matched ahead; the blocks of their cached prefixes are theirs while they wait, and are let go when
running sequences need room. The batch class gives its places and blocks to any other that could run then.
"""

from batcher.deadlines import Deadlines
from batcher.door import Door, Refusal
from batcher.events import BlocksMatched, MatchBlocks
from batcher.gathering import Gathering
from batcher.growth import GrowthReserve
from batcher.lease import Lease
from batcher.pace import Pace
from batcher.queueing import Queueing
from batcher.running import Running
from batcher.sequence import Sequence, Status
from batcher.waiting import WaitingRoom, is_fresh
from chassis.ids import RequestId


class Admission:
    def __init__(
        self,
        lease: Lease,
        queueing: Queueing,
        block_size_tokens: int,
        sequences_max: int,
        ahead_len: int,
        match_wait_s: float,
        prefix_cache: bool,
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
        self.waiting = WaitingRoom(queueing)
        self.reserve = GrowthReserve(block_size_tokens)
        self.pace = Pace()
        self.timeouts = Deadlines(lambda sequence: is_fresh(sequence) and not sequence.place.delayed)
        self.door = Door(queueing, self.waiting, self.pace)
        self._gathering = Gathering(queueing, sequences_max)

    def refuses(self, sequence: Sequence, now: float) -> Refusal | None:
        """Whether a fresh one, not added yet, is not to wait at all."""
        limits = sequence.request.limits
        sequence.place.charge = self.pace.work(sequence.prompt_len, limits.max_tokens)
        return self.door.refuses(sequence, now)

    def add(self, sequence: Sequence) -> None:
        """It holds no blocks."""
        sequence.status = Status.WAITING
        self.waiting.add(sequence)
        if not sequence.claimed:
            self.timeouts.add(sequence, sequence.place.until)

    def timed_out(self, now: float) -> list[tuple[Sequence, Refusal]]:
        """Who waited longer than its queue policy allows, and is to be refused; who is to be delayed is."""
        refused = []
        while (sequence := self.timeouts.pop_passed(now)) is not None:
            refusal = self.door.timed_out(sequence)
            if refusal is None:
                self.waiting.delay(sequence)
            else:
                refused.append((sequence, refusal))
        return refused

    def remove(self, sequence: Sequence) -> None:
        """Out of the line; its blocks stay with it."""
        self.waiting.remove(sequence)
        self._holding.pop(sequence.request.id, None)
        self.timeouts.sweep(len(self.waiting))

    def took(self, sequence: Sequence) -> bool:
        """It runs. True: it was a lower priority's turn."""
        self._holding.pop(sequence.request.id, None)
        self.timeouts.sweep(len(self.waiting))
        self.pace.admitted(sequence.place.charge)
        self.reserve.joined(sequence)
        return self.waiting.took(sequence)

    def settle(self, sequence: Sequence) -> None:
        """It leaves: its tenant was charged by a guess."""
        self.reserve.left(sequence)
        done = sequence.num_tokens - (sequence.cached_tokens or 0)
        self.waiting.settle(sequence, done)

    @property
    def num_waiting_tokens(self) -> int:
        """Of all that wait, what the cache is not known to have."""
        return self.waiting.num_ids - sum([sequence.num_computed for sequence in self._holding.values()])

    # ---- the cache ---------------------------------------------------------------------------------

    def ask(self, now: float, running: Running) -> MatchBlocks | None:
        """What kvstore is to match now for those that may soon be admitted. Not while running sequences
        lack blocks, unless some would give theirs: what is let go must not be taken away again."""
        head = self.waiting.head
        if head is None:
            self._deferred_at = None
            return None
        takes = bool(running.batch) and not self.waiting.gives_way(head)
        places = running.places + (len(running.batch) if takes else 0)
        if places <= 0 or not self._lease.can_match or (self._lease.short and not takes):
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
                self._lease.release(blocks, event.now, sequence.keep)  # it ended, or did not wait for this
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
        self.pace.halted()

    def let_go(self, now: float) -> bool:
        """Release what waiting sequences hold; they are matched again. False: they held nothing."""
        held = bool(self._holding)
        for sequence in self._holding.values():
            self._lease.release(sequence.blocks, now, sequence.keep)
            forget_blocks(sequence)
            sequence.status = Status.WAITING
        self._holding.clear()
        return held

    def pool_gone(self) -> None:
        """All blocks are gone with their pool."""
        for sequence in self._holding.values():
            forget_blocks(sequence)
        self._holding.clear()
        for sequence in self.waiting:
            sequence.status = Status.WAITING

    # ---- the budget --------------------------------------------------------------------------------

    def next(self, now: float, running: Running) -> Sequence | None:
        """The first of the order, if it may run now."""
        head = self._ready(now, running)
        return head if head is not None and self._missing(head, running) <= 0 else None

    def _ready(self, now: float, running: Running) -> Sequence | None:
        """The first of the order, if it waits for nothing but places and blocks."""
        head = self.waiting.head
        if head is None or not self._known(head, now):
            return None
        oldest = self.waiting.oldest
        if head.claimed or oldest is None:
            return head
        kept = self._gathering.keeps(head, now, len(running), len(self.waiting), oldest.place.since)
        return None if kept else head

    def _missing(self, head: Sequence, running: Running) -> int:
        """Blocks that there are too few of for it to run; 0 or less: it may."""
        siblings = running.siblings
        lacking = len(siblings) + self._blocks(head.num_tokens + 1) - len(head.blocks)
        if (first := siblings.first_of(head)) is not None:
            lacking -= self._blocks(first.prompt_len) - len(head.blocks) - 1
        for sequence in running.prompts():
            if sequence.place.batch and not head.place.batch:
                continue  # it gives way when it comes to that
            lacking += max(0, self._blocks(sequence.num_tokens + 1) - len(sequence.blocks))
        if not self._lease.attached:
            return lacking - self._lease.num_idle
        if len(running) == 0:
            return 0
        missing = lacking - self._lease.available
        if missing > 0:
            return missing
        most = self._blocks(running.growth_tokens + head.growth_tokens) + len(running) + 1
        if missing + most <= 0:  # even if all of them write as much as they may
            return missing + most
        return missing + self.reserve.blocks(running, head)

    def yielding(self, now: float, running: Running) -> Sequence | None:
        """Who of the batch class gives its place and its blocks to the first of the order: the last that
        came. None: nobody, or it would not be enough."""
        if not running.batch:
            return None
        head = self._ready(now, running)
        if head is None or self.waiting.gives_way(head):
            return None
        missing = self._missing(head, running)
        if missing > 0 and missing > sum(len(sequence.blocks) for sequence in running.batch.values()):
            return None
        return max(running.batch.values(), key=lambda sequence: sequence.order)

    def planned(self, now: float) -> None:
        """Nobody else is admitted now."""
        head = self.waiting.head
        self.pace.planned(now, head is not None and self._known(head, now))

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
            and not sequence.uncached
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
        oldest = self.waiting.oldest
        if oldest is not None and (gathered := self._gathering.wake_at(oldest.place.since)) is not None:
            ends.append(gathered)
        return min([end for end in ends if end > now], default=None)

    def check(self) -> None:
        self.waiting.check()
        self.reserve.check()
        for sequence in self._holding.values():
            assert sequence.status is Status.MATCHED and sequence.blocks
        self.pace.check()
        self.timeouts.check()
        for sequence in self.waiting:
            assert not (sequence.blocks or sequence.num_computed) or sequence.request.id in self._holding


def forget_blocks(sequence: Sequence) -> None:
    """It has no KV any more."""
    sequence.blocks.clear()
    sequence.borrowed = False
    sequence.num_committed = sequence.num_sent_blocks = 0
    sequence.fall_back(0)

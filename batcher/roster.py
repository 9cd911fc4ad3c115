"""Pure. All sequences that have not ended: how they come, are seated, lose their place, and leave.

Each is either among the running, with a slot, or in the waiting room. What others are to hear of it is
left in `notes`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from batcher.admission import Admission, forget_blocks
from batcher.block_hash import BlockHasher, Extras
from batcher.deadlines import Deadlines
from batcher.end_order import EndOrder
from batcher.events import Admitted, Distrusted, Ended, TokensMade
from batcher.lease import Lease
from batcher.order import Order
from batcher.prompts import Prompts
from batcher.queueing import Place, Queueing
from batcher.running import Running
from batcher.sequence import Clock, Phase, Sequence, Status
from batcher.siblings import has_prompt, shared_len
from batcher.stops import Stops, advance
from chassis.ids import BlockId, RequestId
from chassis.messages.request import PROMPT_ERROR, Reason, Request, Timings, Usage

Note = Admitted | TokensMade | Ended | Distrusted


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a request had when it was stopped."""

    output_ids: tuple[int, ...]
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class RosterConfig:
    context_len_max: int
    namespace: bytes
    block_size_tokens: int
    age_steps_per_priority: int
    salt_by_tenant: bool
    queueing: Queueing


class Roster:
    def __init__(
        self, config: RosterConfig, stops: Stops, running: Running, admission: Admission, lease: Lease
    ) -> None:
        self._config = config
        self._stops = stops
        self._running = running
        self._admission = admission
        self._lease = lease
        self._order = Order(config.age_steps_per_priority)
        self._sequences: dict[RequestId, Sequence] = {}
        self._ends = EndOrder(config.queueing.preserve_ordering)
        self.deadlines = Deadlines()
        self.prompts = Prompts()
        self.capacity_tokens = 0  # of the pool
        self.steps = 0  # sent so far, with rows
        self.notes: list[Note] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sequences

    def __getitem__(self, request_id: RequestId) -> Sequence:
        return self._sequences[request_id]

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._sequences.get(request_id)

    def request_ids(self) -> tuple[RequestId, ...]:
        """In the order they came."""
        return tuple(self._sequences)

    def tables(self) -> Iterable[list[BlockId]]:
        return (sequence.blocks for sequence in self._sequences.values() if sequence.blocks)

    # ---- coming and leaving ------------------------------------------------------------------------

    def begin(
        self,
        request: Request,
        output_ids: tuple[int, ...],
        now: float,
        age_s: float,
        deadline: float | None,
        alone: bool,
    ) -> None:
        """One that is owned, for the first time or once more; what it was before is left."""
        known = self._sequences.get(request.id)
        if known is None:
            clock = Clock(now, 0.0, Phase.INTERRUPTED if output_ids else Phase.WAITING, interrupted_s=age_s)
        else:
            self.leave(known, now)
            clock = known.clock
            clock.enter(Phase.INTERRUPTED, now)
        self.add(request, output_ids, clock, now, deadline, claimed=True, alone=alone, before=known)

    def add(
        self,
        request: Request,
        output_ids: tuple[int, ...],
        clock: Clock,
        now: float,
        deadline: float | None,
        claimed: bool,
        alone: bool,
        before: Sequence | None = None,
    ) -> None:
        """Into the waiting room. Ends are judged on `output_ids` first; `before`: what it was until now."""
        assert request.id not in self._sequences, "a request came twice"
        config = self._config
        bound = request.sampling.grammar is not None
        watch = self._stops.watch(request.limits, len(request.prompt_ids), config.context_len_max, bound)
        end = advance(watch, output_ids)
        kept = output_ids if end is None else output_ids[: end.length]
        place = self._place(request, clock, now, deadline)
        sequence = Sequence(
            request,
            kept,
            watch,
            self.hasher(request),
            clock,
            before.order if before else self._order.key(place.level, self.steps, place.batch),
            deadline,
            claimed,
            alone,
            place,
        )
        if before is not None:
            sequence.carry_on(before)
        self.prompts.add(sequence)
        self._sequences[request.id] = sequence
        self._gone(request.id)
        refused = None if claimed else self._admission.refuses(sequence, now)
        self._admission.add(sequence)
        self.deadlines.add(sequence, deadline)
        if end is not None:
            self.end(sequence, end.reason, end.byte_cut, now)
        elif deadline is not None and deadline <= now:
            self.end(sequence, Reason.DEADLINE, None, now)
        elif refused is not None:
            self.end(sequence, refused.reason, None, now, refused.why, refused.retry_ms)
        if sequence.status is not Status.ENDED:
            self._ends.came(request.id, place.level)

    def _place(self, request: Request, clock: Clock, now: float, deadline: float | None) -> Place:
        queueing = self._config.queueing
        came = now - clock.queued_us / 1e6
        patient = came + queueing.patience_ms / 1e3
        wait_s = queueing.of(request.priority).timeout_s(request.queue_timeout_us)
        return Place(
            level=queueing.level(request.priority),
            batch=queueing.is_batch(request.priority),
            due=patient if deadline is None else min(deadline, patient),
            since=now,
            until=None if wait_s is None else came + wait_s,
        )

    def stop(self, request_id: RequestId, now: float) -> Stopped | None:
        """Nobody wants to hear of it any more. None: its end was told, or it never came."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.leave(sequence, now)
        untold = self._gone(request_id)
        if sequence is not None:
            return Stopped(sequence.output_ids, sequence.usage(), sequence.timings(now))
        return None if untold is None else Stopped(untold.output_ids, untold.usage, untold.timings)

    def _gone(self, request_id: RequestId) -> Ended | None:
        """Its end, if that was not told yet; those that waited for it are told."""
        untold, due = self._ends.gone(request_id)
        self.notes += due
        return untold

    def hasher(self, request: Request) -> BlockHasher:
        """Names the blocks of its tokens."""
        config = self._config
        extras = Extras(salt=request.tenant.encode() if config.salt_by_tenant else None)
        return BlockHasher(config.namespace, config.block_size_tokens, extras)

    def leave(self, sequence: Sequence, now: float) -> None:
        """Out of everything; steps in flight are ignored for it."""
        if sequence.status is Status.RUNNING:
            self.begin_siblings(now)  # while its blocks are there
            self._running.unseat(sequence)
            self.begin_siblings(now)
        else:
            self._admission.remove(sequence)
        self._admission.settle(sequence)
        self._lease.release(sequence.blocks, now, sequence.keep)
        sequence.blocks.clear()
        sequence.incarnation += 1
        sequence.status = Status.ENDED
        del self._sequences[sequence.request.id]
        self.prompts.forget(sequence.request.id)
        self.deadlines.sweep(len(self._sequences))

    def end(
        self,
        sequence: Sequence,
        reason: Reason,
        byte_cut: int | None,
        now: float,
        error: str = "",
        retry_ms: int = 0,
    ) -> None:
        self.leave(sequence, now)
        if reason in (Reason.STOP, Reason.LENGTH):
            self._admission.pace.ended(sequence, now)
        self.notes += self._ends.ended(
            Ended(
                now,
                sequence.request.id,
                reason,
                sequence.output_ids,
                byte_cut,
                sequence.usage(),
                sequence.timings(now),
                error,
                retry_ms,
            )
        )

    def end_overdue(self, now: float) -> None:
        while (sequence := self.deadlines.pop_passed(now)) is not None:
            self.end(sequence, Reason.DEADLINE, None, now)
        for sequence, refused in self._admission.timed_out(now):
            self.end(sequence, refused.reason, None, now, refused.why, refused.retry_ms)

    # ---- running and not ---------------------------------------------------------------------------

    def admit(self, now: float) -> None:
        """Seats whoever may run now."""
        admission, running = self._admission, self._running
        while True:
            while (head := admission.waiting.head) is not None and self._is_full(head):
                self._end_full(head, now)  # whatever runs: no room that they give would help
            head = admission.next(now, running) if running.places else None
            if head is not None:
                self._seat(head, now)
            elif (yielding := admission.yielding(now, running)) is not None:
                self._give_back(yielding, now)
            else:
                break
        admission.planned(now)
        self.begin_siblings(now)

    def _length_max(self, sequence: Sequence) -> int:
        """Of its output, in this pool."""
        room = min(self._config.context_len_max, self.capacity_tokens) - sequence.prompt_len
        return min(sequence.request.limits.max_tokens, room)

    def _is_full(self, sequence: Sequence) -> bool:
        """The whole pool has no room for its next token."""
        return self._length_max(sequence) <= sequence.watch.length

    def _end_full(self, sequence: Sequence, now: float) -> None:
        if sequence.watch.length:  # what was said stays; here is no room for more
            self.end(sequence, Reason.LENGTH, None, now)
            return
        error = f"{PROMPT_ERROR}{sequence.prompt_len} tokens, at most {self.capacity_tokens - 1} have room"
        error += f" in the KV memory of the pipeline, {self.capacity_tokens} with the output"
        self.end(sequence, Reason.FAILED, None, now, error)

    def _seat(self, sequence: Sequence, now: float) -> None:
        """From the head of the line into the running."""
        sequence.watch.length_max = self._length_max(sequence)
        if self._admission.took(sequence) and sequence.place.batch:  # its turn: as good as any other
            sequence.place.batch = False
            sequence.order = self._order.key(sequence.place.level, self.steps)
        first = self._running.siblings.first_of(sequence)
        if first is not None:
            self._lease.release(sequence.blocks, now, sequence.keep)  # it takes the other's
            forget_blocks(sequence)
        self._running.seat(sequence, waits=first is not None)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
        if sequence.num_tokens == sequence.prompt_len or sequence.clock.phase is Phase.WAITING:
            sequence.clock.enter(Phase.PREFILL, now)
        if not sequence.admitted:
            sequence.admitted = True
            self.notes.append(Admitted(now, sequence.request.id))

    def begin_siblings(self, now: float) -> None:
        """Whose prompt has come back, or lost who was to compute it."""
        while ready := self._running.siblings.ready():
            for sequence, first in ready:
                if first is None or not has_prompt(first):
                    self._running.begin(sequence)
                    break  # it is the first now
                self._share(first, sequence)
                self._running.begin(sequence)

    def _share(self, first: Sequence, sequence: Sequence) -> None:
        """`sequence` begins behind the prompt of `first`, with its blocks."""
        shared, size = shared_len(sequence), self._config.block_size_tokens
        full = shared // size
        blocks = first.blocks[: -(-shared // size)]
        self._lease.refs.share(blocks)
        sequence.blocks.extend(blocks)
        sequence.borrowed = len(blocks) > full
        sequence.num_committed = full
        sequence.num_computed = sequence.num_proven = shared
        if not sequence.num_written:
            sequence.cached_tokens = shared

    def back_to_waiting(self, sequence: Sequence, now: float) -> None:
        """It lost its place; what it has computed was given back or is gone."""
        self._running.unseat(sequence)
        forget_blocks(sequence)
        self.begin_siblings(now)
        sequence.claimed = True
        sequence.clock.enter(Phase.INTERRUPTED, now)
        self._admission.add(sequence)

    def preempt(self, sequence: Sequence, now: float) -> None:
        lost = sequence.num_computed - (sequence.cached_tokens or 0)  # less than none: it found less again
        self._admission.reserve.preempted(max(0, lost))
        self._give_back(sequence, now)

    def _give_back(self, sequence: Sequence, now: float) -> None:
        """Its place and its blocks; the cache keeps what it keeps."""
        sequence.preemptions += 1
        self._lease.release(sequence.blocks, now, sequence.keep)
        self.back_to_waiting(sequence, now)

    def distrust(self, sequence: Sequence, num_computed: int, now: float) -> None:
        """The blocks of its first tokens hold something else: it begins anew, without the cache."""
        blocks = sequence.blocks[: -(-num_computed // self._config.block_size_tokens)]
        self._lease.distrust(blocks, now)
        self._lease.release(sequence.blocks, now, sequence.keep)
        sequence.uncached = True
        if not sequence.num_written:
            sequence.cached_tokens = 0
        self.back_to_waiting(sequence, now)
        self.notes.append(Distrusted(now, sequence.request.id, len(blocks)))

    def defer(self, sequence: Sequence) -> None:
        """Nothing was drawn for it yet: it computes again what is not committed, and draws then."""
        self._running.withdraw(sequence)
        sequence.fall_back(sequence.num_committed * self._config.block_size_tokens)
        self._running.line_up(sequence)

    def check(self) -> None:
        self.deadlines.check()
        assert len(self._sequences) == len(self._running) + len(self._admission.waiting)
        self.prompts.check(self._sequences)
        self._ends.check()
        for sequence in self._sequences.values():
            sequence.check()

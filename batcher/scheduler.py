"""Pure. Which sequences run in which numbered step.

No phases: a sequence has tokens and computed tokens, and a step lets it catch up; prefill, chunked prefill,
decode and coming back after preemption are the same thing. Rules:
- a sequence has at most one sampling step in flight, and where they are sent ahead (`policy.runs_ahead`) one
  behind it; chunks of one prompt may follow each other;
- a row whose sequence is over, or has begun anew, when it comes back is a ghost. What it wrote harms nobody:
  its block has no known content there, for only what came back is committed; and whoever has the block next
  is in a later step, which the stage runs after it, and writes each place before reading it;
- decodes first, then prompts in order, under budgets of tokens, slots and blocks;
- a block is committed when the step that filled it has come back;
- the best of the running is never preempted.
Every call may leave notes for ownership and calls for kvstore; `take()` hands them over.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from batcher import policy
from batcher.admission import Admission, forget_blocks
from batcher.block_hash import NO_PARENT, BlockHasher, Extras
from batcher.composer import Composer, FlightRow, counts
from batcher.events import (
    Admitted,
    BlockEffect,
    BlockEvent,
    BlocksExchanged,
    BlocksMatched,
    Ended,
    PoolAttached,
    StepPlan,
    StepReturned,
    TokensMade,
)
from batcher.inflight import InFlight, StepStats
from batcher.lease import Lease
from batcher.prompts import Prompts
from batcher.running import Running
from batcher.sequence import Clock, Phase, Sequence, Status
from batcher.stops import End, Stops, advance
from batcher.waiting import Deadlines
from chassis.ids import BlockId, Epoch, RequestId
from chassis.messages.pipeline import SlotStart
from chassis.messages.request import Reason, Request, Timings, Usage
from chassis.messages.sampling import TokenLogprobs

Note = Admitted | TokensMade | Ended


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    context_len_max: int
    namespace: bytes  # block_hash.namespace(model digest, dtype, layout)
    block_size_tokens: int = 16
    step_tokens_max: int = 512
    sequences_max: int = 64  # running at once; also the number of slots
    waiting_len_max: int = 1024
    steps_in_flight_max: int | None = None  # None: see `policy.steps_in_flight`
    run_ahead: bool = True  # where it can be: see `policy.runs_ahead`
    lease_low_blocks: int = 16
    lease_high_blocks: int = 64
    match_ahead_len: int = 8  # waiting requests matched ahead of admission
    match_wait_ms: int = 250
    age_steps_per_priority: int = 64
    idle_step_ms: int = 1000
    step_deadline_min_ms: int = 5000
    step_deadline_factor: int = 8
    prefix_cache: bool = True
    salt_by_tenant: bool = True


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a request had when it was stopped."""

    output_ids: tuple[int, ...]
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Taken:
    """In order. Completions of `effects` come back through `handle_blocks`."""

    notes: tuple[Note, ...] = ()
    effects: tuple[BlockEffect, ...] = ()


class Scheduler:
    """One pipeline's schedule. Call `take()` after any of the calls below that is not a query."""

    def __init__(self, config: SchedulerConfig, stops: Stops) -> None:
        assert config.step_tokens_max >= 1 and config.sequences_max >= 1
        self._config = config
        self._stops = stops
        self._now = 0.0
        self._order = policy.Order(config.age_steps_per_priority)
        self._cost = policy.StepCost()
        self._lease = Lease(config.lease_low_blocks, config.lease_high_blocks)
        self._admission = Admission(
            self._lease,
            config.block_size_tokens,
            config.match_ahead_len,
            config.match_wait_ms / 1e3,
            config.prefix_cache,
        )
        self._flights: InFlight[FlightRow] = InFlight(
            config.step_deadline_min_ms / 1e3, config.step_deadline_factor
        )
        self._deadlines = Deadlines()
        self.prompts = Prompts()
        self._sequences: dict[RequestId, Sequence] = {}  # all that have not ended
        self._running = Running(config.sequences_max)
        self._composer = Composer(
            self._running,
            self._admission,
            self._lease,
            self._preempt,
            config.block_size_tokens,
            config.step_tokens_max,
        )
        self._formed = False
        self._capacity_tokens = 0
        self._sent_at = float("-inf")
        self._steps = 0
        self._notes: list[Note] = []

    # ---- requests ----------------------------------------------------------------------------------

    def add_waiting(self, request: Request, now: float, age_s: float, deadline: float | None) -> None:
        """A fresh request waits for admission (note `Admitted`). A passed deadline ends it (note `Ended`)."""
        self._now = now
        self._add(request, (), Clock(now, age_s, Phase.WAITING), deadline, claimed=False, alone=False)

    def run(
        self,
        request: Request,
        output_ids: tuple[int, ...],
        now: float,
        deadline: float | None,
        alone: bool = False,
        age_s: float = 0.0,
    ) -> None:
        """An owned request, or one that starts again; no `Admitted`. Ends are judged on `output_ids` first:
        if they are whole already, `Ended` is noted at once. `age_s`, of one that is new here, counts as
        interrupted."""
        self._now = now
        known = self._sequences.get(request.id)
        if known is None:
            clock = Clock(now, 0.0, Phase.INTERRUPTED if output_ids else Phase.WAITING, interrupted_s=age_s)
        else:
            self._leave(known, now)
            clock = known.clock
            clock.enter(Phase.INTERRUPTED, now)
        self._add(request, output_ids, clock, deadline, claimed=True, alone=alone, before=known)

    def _add(
        self,
        request: Request,
        output_ids: tuple[int, ...],
        clock: Clock,
        deadline: float | None,
        claimed: bool,
        alone: bool,
        before: Sequence | None = None,
    ) -> None:
        assert request.id not in self._sequences, "a request came twice"
        config = self._config
        watch = self._stops.watch(request.limits, len(request.prompt_ids), config.context_len_max)
        end = advance(watch, output_ids)
        kept = output_ids if end is None else output_ids[: end.length]
        extras = Extras(salt=request.tenant.encode() if config.salt_by_tenant else None)
        sequence = Sequence(
            request,
            kept,
            watch,
            BlockHasher(config.namespace, config.block_size_tokens, extras),
            clock,
            before.order if before else self._order.key(request.priority, self._steps),
            deadline,
            claimed,
            alone,
        )
        if before is not None:
            sequence.carry_on(before)
        self.prompts.add(sequence)
        self._sequences[request.id] = sequence
        self._admission.add(sequence)
        self._deadlines.add(sequence)
        if end is not None:
            self._end(sequence, end.reason, end.byte_cut, self._now)
        elif deadline is not None and deadline <= self._now:
            self._end(sequence, Reason.DEADLINE, None, self._now)

    def stop(self, request_id: RequestId, now: float) -> Stopped | None:
        """Forget the request; None if unknown (it had ended). No `Ended` is noted."""
        self._now = now
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._leave(sequence, now)
        return Stopped(sequence.output_ids, sequence.usage(), sequence.timings(now))

    def _leave(self, sequence: Sequence, now: float) -> None:
        """Out of everything; steps in flight are ignored for it."""
        if sequence.status is Status.RUNNING:
            self._running.unseat(sequence)
        else:
            self._admission.remove(sequence)
        self._lease.release(sequence.blocks, now)
        sequence.blocks.clear()
        sequence.incarnation += 1
        sequence.status = Status.ENDED
        del self._sequences[sequence.request.id]
        self.prompts.forget(sequence.request.id)
        self._deadlines.sweep(len(self._sequences))

    def _end(
        self, sequence: Sequence, reason: Reason, byte_cut: int | None, now: float, error: str = ""
    ) -> None:
        self._leave(sequence, now)
        self._notes.append(
            Ended(
                now,
                sequence.request.id,
                reason,
                sequence.output_ids,
                byte_cut,
                sequence.usage(),
                sequence.timings(now),
                error,
            )
        )

    # ---- running and not ---------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        while self._running.places:
            head = self._admission.next(now, self._running)
            if head is None:
                return
            self._seat(head, now)

    def _seat(self, sequence: Sequence, now: float) -> None:
        """From the head of the line into the running."""
        limits, context_len_max = sequence.request.limits, self._config.context_len_max
        room = min(context_len_max, self._capacity_tokens) - sequence.prompt_len
        sequence.watch.length_max = min(limits.max_tokens, room)
        if sequence.growth_tokens <= 0:
            if sequence.watch.length:  # what was said stays; here is no room for more
                self._end(sequence, Reason.LENGTH, None, now)
            else:
                error = f"a prompt of {sequence.prompt_len} tokens in a pool of {self._capacity_tokens}"
                self._end(sequence, Reason.FAILED, None, now, error)
            return
        self._admission.remove(sequence)
        self._running.seat(sequence)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
        if sequence.num_tokens == sequence.prompt_len or sequence.clock.phase is Phase.WAITING:
            sequence.clock.enter(Phase.PREFILL, now)
        if not sequence.admitted:
            sequence.admitted = True
            self._notes.append(Admitted(now, sequence.request.id))

    def _back_to_waiting(self, sequence: Sequence, now: float) -> None:
        """It lost its place; what it has computed was given back or is gone."""
        self._running.unseat(sequence)
        forget_blocks(sequence)
        sequence.claimed = True
        sequence.clock.enter(Phase.INTERRUPTED, now)
        self._admission.add(sequence)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        sequence.preemptions += 1
        self._lease.release(sequence.blocks, now)
        self._back_to_waiting(sequence, now)
        self._admission.reserve.preempted()

    # ---- pipeline ----------------------------------------------------------------------------------

    def form(self, epoch: Epoch, num_blocks: int, num_stages: int, pool_changed: bool, now: float) -> None:
        """A pipeline stands. `pool_changed`: its block pool holds nothing that this scheduler put there."""
        assert num_blocks >= 1 and num_stages >= 1
        self.unform(now)
        config = self._config
        self._capacity_tokens = num_blocks * config.block_size_tokens
        steps_max = policy.steps_in_flight(config.steps_in_flight_max, num_stages, config.run_ahead)
        self._flights.open(epoch, steps_max)
        self._running.runs_ahead = policy.runs_ahead(steps_max, num_stages, config.run_ahead)
        self._running.line_up_all()
        self._composer.open(steps_max, num_stages)
        self._lease.reset(num_blocks, pool_changed, now)
        if pool_changed:
            self._admission.pool_gone()
            for sequence in tuple(self._running):
                self._back_to_waiting(sequence, now)
        for sequence in self._running:
            if sequence.num_tokens == sequence.prompt_len:
                sequence.clock.enter(Phase.PREFILL, now)
        self._running.take_freed()  # an epoch starts with no slots taken
        self._sent_at = float("-inf")
        self._formed = True

    def unform(self, now: float) -> tuple[RequestId, ...]:
        """The pipeline is lost: its steps in flight are void. Returns the requests that were in them."""
        self._now = now
        if not self._formed:
            return ()
        self._formed = False
        held = dict.fromkeys(row[0].request.id for flight in self._flights.void() for row in flight.rows)
        self._lease.close()
        self._admission.void_calls()
        for sequence in self._running:
            sequence.fall_back(sequence.num_committed * self._config.block_size_tokens)
            sequence.clock.enter(Phase.INTERRUPTED, now)
        self._running.line_up_all()
        return tuple(request_id for request_id in held if request_id in self._sequences)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, counted as sent; None: nothing to do, or all places in flight are taken.
        Call until None."""
        self._now = now
        if not self._formed or self._flights.full:
            return None
        self._lease.begin(len(self._running))
        self._admit(now)
        flights = self._flights
        rows, carried = self._composer.compose(len(flights), flights.num_decoding, now)
        idle_s = self._config.idle_step_ms / 1e3
        if not rows and (len(flights) or now < self._sent_at + idle_s):
            return None
        num_tokens = sum([row[3] - row[2] for row in carried])
        num_samples = sum([row[4] for row in carried])
        number = flights.send(
            carried, num_tokens, num_samples, now, self._cost.predict(num_tokens), self._composer.decodes
        )
        self._sent_at = now
        flights.stats.ahead_rows += self._composer.num_ahead
        if rows:
            self._steps += 1
            self._admission.reserve.step()
        assert flights.epoch is not None
        return StepPlan(flights.epoch, number, rows, self._running.take_freed())

    def returned(self, event: StepReturned) -> bool:
        """False: not what was due next from this epoch's pipeline, which must be formed anew.
        Ghosts of other epochs are counted, and True."""
        now = self._now = event.now
        if not self._formed or event.epoch != self._flights.epoch:
            self._flights.stats.ghosts += 1
            return True
        due = self._flights.returned(event.number, len(event.token_ids), now)
        if due is None:
            return False
        flight, service_s = due
        self._cost.observe(flight.num_tokens, service_s)
        size = self._config.block_size_tokens
        running = self._running
        request_ids: list[RequestId] = []
        made: list[tuple[int, ...]] = []
        ended: list[tuple[Sequence, End]] = []
        numberless = self._numberless(flight.rows, event) if event.nan_places or event.prompts else {}
        token_ids = iter(event.token_ids)
        for sequence, incarnation, start, end, samples in flight.rows:
            token_id = next(token_ids) if samples else 0
            if sequence.incarnation != incarnation:
                self._flights.stats.ghost_rows += 1
                continue
            sequence.num_proven = end
            written = sequence.num_written
            if end > written:
                sequence.num_written = end
            if start < written:
                sequence.recomputed_tokens += min(end, written) - start
            if end >= (sequence.num_committed + 1) * size:
                self._commit(sequence, end // size, now)
            if not samples or sequence.request.id in numberless:
                continue
            sequence.ids.append(token_id)
            running.growth_tokens -= 1
            if sequence.clock.phase is not Phase.DECODE:
                sequence.clock.enter(Phase.DECODE, now)
            request_ids.append(sequence.request.id)
            made.append((token_id,))
            over = sequence.watch.push(token_id)
            if over is None:
                running.told(sequence)
            else:
                ended.append((sequence, over))
        if made:
            told = _told(flight.rows, event.logprobs) if event.logprobs else ()
            begun = self.prompts.begun(request_ids)
            self._notes.append(TokensMade(now, tuple(request_ids), tuple(made), told, begun))
        for sequence, found in ended:
            self._end(sequence, found.reason, found.byte_cut, now)
        for request_id, error in numberless.items():
            self._end(self._sequences[request_id], Reason.FAILED, None, now, error)
        return True

    def _numberless(self, rows: tuple[FlightRow, ...], event: StepReturned) -> dict[RequestId, str]:
        """Takes in what the step tells of prompts. Returns the requests that nothing can be drawn for, and
        why: they fail, and nobody else."""
        found = {}
        answered = self.prompts.learn([row[0] if counts(row) else None for row in rows], event.prompts)
        for request_id in answered:
            found[request_id] = "NaN logits: the model's numbers for its prompt are none"
        sampling = [row for row in rows if row[4]]
        for sequence, *_ in [sampling[place] for place in event.nan_places if counts(sampling[place])]:
            what = f"output token {sequence.watch.length}"
            found[sequence.request.id] = f"NaN logits: the model's numbers for {what} are none"
        return found

    def _commit(self, sequence: Sequence, num_blocks: int, now: float) -> None:
        if not self._config.prefix_cache:
            return
        hashes = sequence.chain(num_blocks)
        for index in range(sequence.num_committed, num_blocks):
            parent = hashes[index - 1] if index else NO_PARENT
            later = index * self._config.block_size_tokens >= sequence.prompt_len
            self._lease.commit(sequence.blocks[index], hashes[index], parent, now, later)
        sequence.num_committed = num_blocks

    def overdue(self, now: float) -> bool:
        """The oldest step in flight has passed its deadline: the pipeline hangs."""
        deadline = self._flights.deadline()
        return deadline is not None and now >= deadline

    # ---- blocks and time ---------------------------------------------------------------------------

    def handle_blocks(self, event: BlockEvent) -> None:
        self._now = event.now
        match event:
            case BlocksMatched():
                self._admission.matched(event)
            case BlocksExchanged():
                self._lease.exchanged(event)
            case PoolAttached():
                self._lease.attached_anew(event)

    def tick(self, now: float) -> None:
        """Time passed. Call it at `wake_at()`, then `plan`."""
        self._now = now
        while (sequence := self._deadlines.pop_passed(now)) is not None:
            self._end(sequence, Reason.DEADLINE, None, now)

    def wake_at(self) -> float | None:
        """When `tick` and `plan` next have something to do, if nothing else happens before."""
        times = [self._deadlines.next()]
        if self._formed:
            times += [self._lease.wake_at(), self._admission.wake_at(self._now), self._flights.deadline()]
            if not len(self._flights):
                times.append(max(self._now, self._sent_at + self._config.idle_step_ms / 1e3))
        return min((time for time in times if time is not None), default=None)

    def take(self) -> Taken:
        """What the calls since the last one left."""
        effects: list[BlockEffect] = []
        if self._formed:
            match = self._admission.ask(self._now, self._running.places)  # it may hasten a call
            effects = self._lease.calls(self._now)
            if match is not None:
                effects.append(match)
        if not effects and not self._notes:
            return NOTHING
        taken = Taken(tuple(self._notes), tuple(effects))
        self._notes.clear()
        return taken

    # ---- queries -----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def num_wanted(self) -> int:
        """Requests that the waiting room still has places for."""
        return max(0, self._config.waiting_len_max - self.num_waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def stats(self) -> StepStats:
        return self._flights.stats

    @property
    def formed(self) -> bool:
        return self._formed

    @property
    def runnable(self) -> bool:
        """Something runs or is in flight: if no step comes back in time, the pipeline hangs."""
        return bool(self._running) or len(self._flights) > 0

    def request(self, request_id: RequestId) -> Request:
        """Of one that it holds."""
        return self._sequences[request_id].request

    def slot_start(self, request_id: RequestId, start: int) -> SlotStart:
        """What a fresh row of one that it holds says of its sampling; `start`: its first position."""
        return self._sequences[request_id].slot_start(start)

    def request_ids(self) -> tuple[RequestId, ...]:
        """All it holds, in the order they came."""
        return tuple(self._sequences)

    @property
    def lease_waits(self) -> bool:
        """Something for kvstore is not yet settled."""
        return self._lease.unsettled

    def tables(self) -> Iterable[list[BlockId]]:
        return (sequence.blocks for sequence in self._sequences.values() if sequence.blocks)

    def check(self) -> None:
        self._admission.check()
        self._flights.check()
        self._deadlines.check()
        self._cost.check()
        self._lease.check(self.tables())
        assert len(self._sequences) == len(self._running) + self.num_waiting
        self._running.check()
        self._composer.check()
        self.prompts.check(self._sequences)
        sampling = Counter(row[0].request.id for row in self._flights.rows() if counts(row) and row[4])
        for sequence in self._sequences.values():
            sequence.check()
            unknown = max(0, sequence.num_computed - sequence.num_tokens + 1)
            assert sampling[sequence.request.id] == unknown, "a sampling step too many, or one lost"


def _told(
    rows: Iterable[FlightRow], logprobs: tuple[tuple[int, TokenLogprobs], ...]
) -> tuple[tuple[RequestId, TokenLogprobs], ...]:
    """Of the rows that still count, by request."""
    sampling = [row for row in rows if row[4]]
    return tuple(
        (sampling[place][0].request.id, entry)
        for place, entry in logprobs
        if sampling[place][0].incarnation == sampling[place][1]
    )


NOTHING = Taken()

"""Pure. Which sequences run in which numbered step.

No phases: a sequence has tokens and computed tokens, and a step lets it catch up; prefill, chunked prefill,
decode and coming back after preemption are the same thing. Rules:
- a sequence has at most one sampling step in flight, and where they are sent ahead (`spread.runs_ahead`) one
  behind it; chunks of one prompt may follow each other;
- a row whose sequence is over, or has begun anew, when it comes back is a ghost. What it wrote harms nobody:
  its block has no known content there, for only what came back is committed; and whoever has the block next
  is in a later step, which the stage runs after it, and writes each place before reading it. kvstore gets
  the block only when that step has come back (`idle_blocks`);
- decodes first, then prompts in order, under budgets of tokens, slots and blocks;
- a block is committed when the step that filled it has come back;
- the best of the running is never preempted.
Every call may leave notes for ownership and calls for kvstore; `take()` hands them over.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from batcher.admission import Admission
from batcher.balance import Balance
from batcher.chunks import ChunkRules
from batcher.composer import Composer, FlightRow, counts, load_of
from batcher.events import (
    BlockEffect,
    BlockEvent,
    BlocksExchanged,
    BlocksMatched,
    PoolAttached,
    PoolMoves,
    StepPlan,
    StepReturned,
)
from batcher.harvest import Harvest
from batcher.inflight import InFlight, StepStats
from batcher.lease import Lease
from batcher.placement import Busy
from batcher.prompts import Prompts
from batcher.roster import Note, Roster, RosterConfig
from batcher.roster import Stopped as Stopped
from batcher.running import Running
from batcher.scheduler_config import SchedulerConfig as SchedulerConfig
from batcher.sequence import Clock, Phase, Status
from batcher.spare_room import SpareRoom
from batcher.step_cost import StepCost
from batcher.stops import Stops
from batcher.work import busy
from chassis.ids import BlockHash, BlockId, Epoch, RequestId
from chassis.messages.pipeline import SlotStart
from chassis.messages.request import Request


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
        self._now = 0.0
        self._cost = StepCost()
        self._lease = Lease(config.lease_low_blocks, config.lease_high_blocks)
        size = config.block_size_tokens
        self._admission = Admission(
            self._lease,
            config.queueing,
            size,
            config.sequences_max,
            config.match_ahead_len,
            config.match_wait_ms / 1e3,
            config.prefix_cache,
        )
        self._flights: InFlight[FlightRow] = InFlight(
            config.step_deadline_min_ms / 1e3, config.step_deadline_factor
        )
        self._running = Running(config.sequences_max, config.prefix_cache)
        named = RosterConfig(
            config.context_len_max,
            config.namespace,
            size,
            config.age_steps_per_priority,
            config.salt_by_tenant,
            config.queueing,
        )
        self._roster = Roster(named, stops, self._running, self._admission, self._lease)
        self._harvest = Harvest(self._roster, self._running, self._lease, size, config.prefix_cache)
        rules = ChunkRules(config.step_tokens_max, size, config.max_step_ms, config.slowdown_max)
        self.balance = Balance(rules, config.steps_in_flight_max, config.run_ahead, config.sequences_max)
        share = config.queueing.batch_share
        self._composer = Composer(
            self.balance,
            self._running,
            self._admission,
            self._lease,
            self._roster.preempt,
            size,
            config.step_tokens_max,
            config.queueing.max_batch_size or config.sequences_max,
            SpareRoom(self._cost.predict, self._admission.pace, share, lambda: self.balance.cost.all.decode),
        )
        self._formed = False
        self._sent_at = float("-inf")
        self._goes_on = False  # there was more to compute when the last step came back

    # ---- requests ----------------------------------------------------------------------------------

    def add_waiting(self, request: Request, now: float, age_s: float, deadline: float | None) -> None:
        """A fresh request waits for admission (note `Admitted`). A passed deadline ends it (note `Ended`)."""
        self._now = now
        clock = Clock(now, age_s, Phase.WAITING)
        self._roster.add(request, (), clock, now, deadline, claimed=False, alone=False)

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
        self._roster.begin(request, output_ids, now, age_s, deadline, alone)

    def stop(self, request_id: RequestId, now: float) -> Stopped | None:
        """Forget the request; None if unknown (it had ended). No `Ended` is noted."""
        self._now = now
        return self._roster.stop(request_id, now)

    # ---- pipeline ----------------------------------------------------------------------------------

    def form(self, epoch: Epoch, num_blocks: int, num_stages: int, pool_changed: bool, now: float) -> None:
        """A pipeline stands. `pool_changed`: its block pool holds nothing that this scheduler put there."""
        assert num_blocks >= 1 and num_stages >= 1
        self.unform(now)
        config = self._config
        self._roster.capacity_tokens = num_blocks * config.block_size_tokens
        self.balance.open(num_stages)
        self._flights.open(epoch, self.balance.spread.steps_max)
        self._running.runs_ahead = self.balance.spread.runs_ahead
        self._running.line_up_all()
        self._composer.open(num_stages)
        self._lease.reset(num_blocks, pool_changed, now)
        self._admission.reserve.open(num_blocks)
        if pool_changed:
            self._admission.pool_gone()
            for sequence in tuple(self._running):
                self._roster.back_to_waiting(sequence, now)
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
        return tuple(request_id for request_id in held if request_id in self._roster)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, counted as sent; None: nothing to do, or all places in flight are taken.
        Call until None."""
        self._now = now
        if not self._formed or len(self._flights) >= self._composer.places:
            return None
        self._lease.begin(len(self._running))
        self._roster.admit(now)
        flights = self._flights
        rows, carried = self._composer.compose(len(flights), flights.num_decoding, now)
        idle_s = self._config.idle_step_ms / 1e3
        if not rows and (len(flights) or now < self._sent_at + idle_s):
            return None
        load, samples = load_of(carried), sum([row[4] for row in carried])
        tokens, follows = load.prompt_tokens + load.decodes, len(flights) > 0 or self._goes_on
        predicted_s, decodes = self._cost.predict(tokens), self._composer.decodes
        number = flights.send(carried, tokens, samples, now, predicted_s, decodes, load, follows)
        self._lease.step_sent(number)
        self._sent_at = now
        flights.stats.ahead_rows += self._composer.num_ahead
        if rows:
            self._roster.steps += 1
            self._admission.reserve.step()
        assert flights.epoch is not None
        return StepPlan(flights.epoch, number, rows, self._running.take_freed(), self._composer.copies.pairs)

    def returned(self, event: StepReturned) -> bool:
        """False: not what was due next from this epoch's pipeline, which must be formed anew.
        Ghosts of other epochs are counted, and True."""
        now = self._now = event.now
        if not self._formed or event.epoch != self._flights.epoch:
            self._flights.stats.ghosts += 1
            return True
        due = self._flights.returned(event.number, len(event.token_ids), now)
        if due is None or any(row >= len(due[0].rows) for row in event.void_rows):
            return False
        flight, service_s = due
        self._lease.step_returned(event.number, now)
        self._cost.observe(flight.num_tokens, service_s)
        if event.timings and flight.rows:
            self.balance.returned(flight, event, service_s)
        self._flights.stats.ghost_rows += self._harvest.gather(flight.rows, event)
        self._goes_on = len(self._running) > 0
        return True

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
            case PoolMoves():
                self._lease.doubt(event.now, 0.0)

    def tick(self, now: float) -> None:
        """Time passed. Call it at `wake_at()`, then `plan`."""
        self._now = now
        self._roster.end_overdue(now)

    def wake_at(self) -> float | None:
        """When `tick` and `plan` next have something to do, if nothing else happens before."""
        times = [self._roster.deadlines.next(), self._admission.timeouts.next()]
        if self._formed:
            times += [self._lease.wake_at(), self._admission.wake_at(self._now), self._flights.deadline()]
            if not len(self._flights):
                times.append(max(self._now, self._sent_at + self._config.idle_step_ms / 1e3))
        return min((time for time in times if time is not None), default=None)

    def take(self) -> Taken:
        """What the calls since the last one left."""
        effects: list[BlockEffect] = []
        if self._formed:
            match = self._admission.ask(self._now, self._running)  # it may hasten a call
            effects = self._lease.calls(self._now)
            if match is not None:
                effects.append(match)
        notes = self._roster.notes
        if not effects and not notes:
            return NOTHING
        taken = Taken(tuple(notes), tuple(effects))
        notes.clear()
        return taken

    # ---- queries -----------------------------------------------------------------------------------

    @property
    def prompts(self) -> Prompts:
        return self._roster.prompts

    @property
    def block_size_tokens(self) -> int:
        return self._config.block_size_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    def full(self, priority: int) -> bool:
        """No more of a priority may wait."""
        return self._admission.door.full(priority)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def stats(self) -> StepStats:
        return self._flights.stats

    @property
    def runnable(self) -> bool:
        """Something runs or is in flight: if no step comes back in time, the pipeline hangs."""
        return bool(self._running) or len(self._flights) > 0

    def waits(self, request_id: RequestId) -> bool:
        sequence = self._roster.get(request_id)
        return sequence is not None and sequence.status is not Status.RUNNING

    def chain(self, request_id: RequestId) -> tuple[BlockHash, ...]:
        """Of one that waits: the blocks of its prompt that a cache may hold."""
        sequence = self._roster.get(request_id)
        if sequence is None or not self._config.prefix_cache:
            return ()
        return tuple(sequence.chain(sequence.num_match_blocks)[: sequence.num_match_blocks])

    def chain_of(self, request: Request) -> tuple[BlockHash, ...]:
        """The same of one that does not wait here yet; as if nothing of its prompt were asked for."""
        if not self._config.prefix_cache:
            return ()
        hashes: list[BlockHash] = []
        count = (len(request.prompt_ids) - 1) // self._config.block_size_tokens
        self._roster.hasher(request).extend(hashes, request.prompt_ids, count)
        return tuple(hashes)

    def busy(self) -> Busy:
        """Costs time in all that run."""
        balance = self.balance
        return busy(self._running, self._admission, balance.cost, self._config.sequences_max, balance.work)

    def request(self, request_id: RequestId) -> Request:
        """Of one that it holds."""
        return self._roster[request_id].request

    def slot_start(self, request_id: RequestId, start: int) -> SlotStart:
        """What a fresh row of one that it holds says of its sampling; `start`: its first position."""
        return self._roster[request_id].slot_start(start)

    def digest(self, request_id: RequestId, num_ids: int) -> int:
        """What the first ids of one that it holds amount to."""
        return self._roster[request_id].digest(num_ids)

    def request_ids(self) -> tuple[RequestId, ...]:
        """All it holds, in the order they came."""
        return self._roster.request_ids()

    @property
    def lease_waits(self) -> bool:
        """Something for kvstore is not yet settled."""
        return self._lease.unsettled

    @property
    def fence(self) -> int:
        return self._lease.fence

    @property
    def usage(self) -> tuple[int, int]:
        """Blocks of the pool that tables name, and all."""
        return len(self._lease.refs) - self._lease.num_idle, self._lease.num_blocks

    def tables(self) -> Iterable[list[BlockId]]:
        """Of those that hold blocks."""
        return self._roster.tables()

    def check(self) -> None:
        self._admission.check()
        self._flights.check(self._config.step_tokens_max)
        self._cost.check()
        self.balance.check()
        self._lease.check(self._roster.tables())
        self._running.check()
        self._composer.check()
        self._roster.check()
        sampling = Counter(row[0].request.id for row in self._flights.rows() if counts(row) and row[4])
        for request_id in self._roster.request_ids():
            sequence = self._roster[request_id]
            unknown = max(0, sequence.num_computed - sequence.num_tokens + 1)
            assert sampling[request_id] == unknown, "a sampling step too many, or one lost"


NOTHING = Taken()

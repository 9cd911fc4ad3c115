"""Deliberate bugs, each one rule of the protocol broken from the outside: the simulation must find every one.

`python -m tests.sim --bug NAME --seeds 300` looks for seeds that find it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from batcher import events as e
from batcher.account import Account
from batcher.actions import Actions
from batcher.audience import Audience
from batcher.block_copies import BlockCopies
from batcher.chunks import Budget
from batcher.core import Core
from batcher.formation import Stood
from batcher.holding import Holding
from batcher.prompts import PromptSoFar
from batcher.records import Records
from batcher.scheduler import Scheduler
from batcher.tenure import Tenure
from chassis.bus import Bus
from chassis.ids import BlockHash, BlockId
from chassis.messages.chunk import Part
from chassis.messages.kvstore import Exchange, Exchanged
from chassis.messages.request import Record, Terminal
from chassis.trace import Span, Tracer
from gateway.jobs.events import Ack
from gateway.jobs.holding import Holding as JobHolding
from gateway.jobs.runner import JobFront
from gateway.serving import Serving
from gateway.spans import RequestTrace
from gateway.stream import Fit, Held
from kvstore.moves import Moves, Restore
from kvstore.pool import Pool
from shard_worker.contents import Contents
from shard_worker.executor import StepInputs
from shard_worker.grammar import OutputMatcher
from shard_worker.last_sampled import LastSampled
from shard_worker.stamps import Stamps
from tests.sim.scaling_bugs import SCALING_BUGS

Bug = tuple[type[Any], str, Any]


def ack_before_the_terminal_record() -> Bug:
    write = Actions._write_terminal

    def broken(self: Actions) -> None:
        self.turn.out.append(e.Ack(self.token))
        write(self)

    return Actions, "_write_terminal", broken


def receipt_after_the_acknowledgement() -> Bug:
    """What is acknowledged comes to nobody who would write it, if that fails."""

    def broken(self: Actions, record: Terminal, leaves_as: str) -> None:
        self.leave(leaves_as, ack=True)
        self.turn.out.append(e.WriteReceipt(self.id, 0, record))

    return Actions, "_settle_up", broken


def receipts_of_what_it_knows_itself() -> Bug:
    """Not of the record: another who wrote it may have known more, or less."""
    settle = Actions._settle_up

    def broken(self: Actions, record: Terminal, leaves_as: str) -> None:
        self.why = self.why or record.reason
        settle(self, self.terminal(self.turn.boot, self.turn.now), leaves_as)

    return Actions, "_settle_up", broken


class _Unfenced:
    """A bus that writes whatever the last record is."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def append(self, *args: Any, expected_seq: int | None = None, **more: Any) -> Any:
        return await self._bus.append(*args, **more)

    def append_then(self, *args: Any, expected_seq: int | None = None, **more: Any) -> None:
        self._bus.append_then(*args, **more)


def records_written_without_reading() -> Bug:
    make = Records.__init__

    def broken(self: Records, bus: Bus, *args: Any) -> None:
        make(self, _Unfenced(bus), *args)

    return Records, "__init__", broken


def minimum_not_raised() -> Bug:
    def broken(self: Serving, stream: Any, attempt: Any, boot: Any) -> None:
        self._table.own(stream, boot)

    return Serving, "_raise", broken


def fenced_batcher_goes_on() -> Bug:
    verified = Tenure._on_verified

    def broken(self: Tenure, record: Record | None, seq: int) -> None:
        if isinstance(record, Terminal) or (record is not None and record.boot == self.turn.boot):
            verified(self, record, seq)
        else:
            self.expected_seq = max(seq, self.expected_seq)
            self._proceed()

    return Tenure, "_on_verified", broken


def gaps_are_taken_for_the_next_part() -> Bug:
    take = Held.take

    def broken(self: Held, part: Part) -> tuple[Fit, tuple[int, ...]]:
        if part.first_index <= len(self):
            return take(self, part)
        self.append(part.ids)
        return Fit.CONTINUES, part.ids

    return Held, "take", broken


def finish_before_the_record() -> Bug:
    write = Actions._write_terminal

    def broken(self: Actions) -> None:
        write(self)
        assert isinstance(self.writing, Terminal)
        self._finish(self.writing)

    return Actions, "_write_terminal", broken


def block_committed_before_its_step_returned() -> Bug:
    plan = Scheduler.plan

    def broken(self: Scheduler, now: float) -> e.StepPlan | None:
        planned = plan(self, now)
        for row in planned.rows if planned is not None else ():
            sequence, end = self._roster[row.request_id], row.start + len(row.token_ids)
            size = self._config.block_size_tokens
            if end >= (sequence.num_committed + 1) * size:
                self._harvest.commit(sequence, end // size, now)
        return planned

    return Scheduler, "plan", broken


def prompts_pass_over_their_budget() -> Bug:
    def broken(self: Budget, start: int, wanted: int) -> int:
        return wanted

    return Budget, "chunk", broken


def tokens_of_ghosts_are_told() -> Bug:
    returned = Scheduler.returned

    def broken(self: Scheduler, event: e.StepReturned) -> bool:
        flight = self._flights.oldest
        if flight is not None:
            flight.rows = tuple((row[0], row[0].incarnation, *row[2:]) for row in flight.rows)
        return returned(self, event)

    return Scheduler, "returned", broken


def steps_ahead_take_what_another_slot_sampled() -> Bug:
    known = LastSampled.known

    def broken(self: LastSampled, inputs: StepInputs) -> StepInputs:
        if inputs.ahead is not None:
            inputs = replace(inputs, ahead=replace(inputs.ahead, slots=inputs.ahead.slots[::-1]))
        return known(self, inputs)

    return LastSampled, "known", broken


def cached_prefixes_hide_what_is_asked_of_prompts() -> Bug:
    return PromptSoFar, "num_covered", property(lambda self: len(self.ids))


def what_is_told_of_prompts_is_dropped() -> Bug:
    def broken(self: Holding, told: object) -> None:
        self.prompt = None

    return Holding, "learn_prompt", broken


def prefixes_kept_over_a_generation() -> Bug:
    formation = Core._formation

    def broken(self: Core, effects: list[Any], now: float) -> None:
        kept = [replace(f, intact=True) if isinstance(f, Stood) else f for f in effects]
        for effect in kept:
            if isinstance(effect, Stood) and self._generation is not None:
                self._generation = effect.generation
        formation(self, kept, now)

    return Core, "_formation", broken


def blocks_released_twice() -> Bug:
    exchange = Pool.exchange

    def broken(self: Pool, call: Exchange) -> Exchanged:
        free = self.table.free
        exchange(self, replace(call, lease_count=0))
        free += [block for block in call.releases if block in free]
        return exchange(self, replace(call, commits=(), releases=(), keeps=(), bad=()))

    return Pool, "exchange", broken


def count_of_a_gateway_never_stops() -> Bug:
    def broken(self: Audience, gateway: Any, held_len: int) -> None:
        self.next_index[gateway] = held_len

    return Audience, "join", broken


def releases_forgotten() -> Bug:
    exchange = Pool.exchange

    def broken(self: Pool, call: Exchange) -> Exchanged:
        return exchange(self, replace(call, releases=(), keeps=()))

    return Pool, "exchange", broken


def blocks_are_not_proven() -> Bug:
    def broken(self: Stamps, rows: object, block_tables: object) -> None:
        pass

    return Stamps, "_prove", broken


def memory_is_not_compared() -> Bug:
    def broken(self: Contents, kept: object, checksums: object) -> list[int]:
        return []

    return Contents, "changed", broken


def restored_before_it_is_there() -> Bug:
    original = Moves._take

    def broken(self: Moves, chain: Sequence[BlockHash], known: Sequence[BlockId | None]) -> Restore:
        restore = original(self, chain, known)
        for move in restore.moves:
            for block, content, origin in zip(move.blocks, move.contents, move.origins, strict=True):
                self.pool.fill(block, content, origin.parent)
        return restore

    return Moves, "_take", broken


def copies_are_forgotten() -> Bug:
    return BlockCopies, "pairs", property(lambda self: ())


def job_acknowledged_before_its_answer() -> Bug:
    write = JobHolding._write

    def broken(self: JobHolding, held: Any) -> None:
        self._out.append(Ack(held.token))
        write(self, held)

    return JobHolding, "_write", broken


def jobs_end_with_their_gateway() -> Bug:
    told = JobFront._told

    def broken(self: JobFront, call: Any, first: Any) -> Any:
        return told(self, replace(call, job=False), first)

    return JobFront, "_told", broken


class _Unlinked:
    """A tracer that records spans without their links."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracer, name)

    def record(self, span: Span) -> None:
        self._tracer.record(span._replace(links=()))


def steps_do_not_know_their_requests() -> Bug:
    record = Account._step_span

    def broken(self: Account, *args: Any, **more: Any) -> None:
        tracer, self._tracer = self._tracer, _Unlinked(self._tracer)
        try:
            record(self, *args, **more)
        finally:
            self._tracer = tracer

    return Account, "_step_span", broken


def spans_without_their_root() -> Bug:
    done = RequestTrace.done

    def broken(self: RequestTrace, client: Any, error: BaseException | None) -> None:
        if client.end is None:
            done(self, client, error)

    return RequestTrace, "done", broken


def grammars_begin_anew_with_every_fresh_row() -> Bug:
    """What an output had before is not replayed."""
    take = OutputMatcher.allowed

    def broken(self: OutputMatcher, output_ids: Sequence[int], length: int) -> Any:
        if self.taken == 0 and length > 1:
            self.taken = length - 1
        return take(self, output_ids, length)

    return OutputMatcher, "allowed", broken


def what_waits_for_its_grammar_is_told() -> Bug:
    returned = Scheduler.returned

    def broken(self: Scheduler, event: e.StepReturned) -> bool:
        return returned(self, replace(event, waiting_places=()))

    return Scheduler, "returned", broken


BUGS: dict[str, Callable[[], Bug]] = {
    bug.__name__: bug
    for bug in (
        ack_before_the_terminal_record,
        receipt_after_the_acknowledgement,
        receipts_of_what_it_knows_itself,
        records_written_without_reading,
        minimum_not_raised,
        fenced_batcher_goes_on,
        gaps_are_taken_for_the_next_part,
        finish_before_the_record,
        block_committed_before_its_step_returned,
        prompts_pass_over_their_budget,
        tokens_of_ghosts_are_told,
        steps_ahead_take_what_another_slot_sampled,
        cached_prefixes_hide_what_is_asked_of_prompts,
        what_is_told_of_prompts_is_dropped,
        prefixes_kept_over_a_generation,
        blocks_released_twice,
        count_of_a_gateway_never_stops,
        releases_forgotten,
        blocks_are_not_proven,
        memory_is_not_compared,
        restored_before_it_is_there,
        copies_are_forgotten,
        grammars_begin_anew_with_every_fresh_row,
        what_waits_for_its_grammar_is_told,
        job_acknowledged_before_its_answer,
        jobs_end_with_their_gateway,
        steps_do_not_know_their_requests,
        spans_without_their_root,
        *SCALING_BUGS,
    )
}


@contextmanager
def injected(name: str) -> Iterator[None]:
    """Production code has the bug while this lasts."""
    owner, attribute, broken = BUGS[name]()
    whole = vars(owner)[attribute]
    setattr(owner, attribute, broken)
    try:
        yield
    finally:
        setattr(owner, attribute, whole)

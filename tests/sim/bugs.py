"""Deliberate bugs, each one rule of the protocol broken from the outside: the simulation must find every one.

`python -m tests.sim --bug NAME --seeds 300` looks for seeds that find it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from batcher import events as e
from batcher.account import Account
from batcher.actions import Actions
from batcher.audience import Audience
from batcher.core import Core
from batcher.formation import Stood
from batcher.holding import Holding
from batcher.prompts import PromptSoFar
from batcher.records import Records
from batcher.scheduler import Scheduler
from batcher.tenure import Tenure
from chassis.bus import Bus
from chassis.messages.chunk import Part
from chassis.messages.kvstore import Exchange, Exchanged
from chassis.messages.request import Record, Terminal
from chassis.trace import Span, Tracer
from gateway.serving import Serving
from gateway.spans import RequestTrace
from gateway.stream import Fit, Held
from kvstore.ledger import Pool
from shard_worker.executor import StepInputs
from shard_worker.last_sampled import LastSampled

Bug = tuple[type[Any], str, Any]


def ack_before_the_terminal_record() -> Bug:
    write = Actions._write_terminal

    def broken(self: Actions) -> None:
        self.turn.out.append(e.Ack(self.token))
        write(self)

    return Actions, "_write_terminal", broken


class _Unfenced:
    """A bus that writes whatever the last record is."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def append(self, *args: Any, expected_seq: int | None = None, **more: Any) -> Any:
        return await self._bus.append(*args, **more)


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
            sequence, end = self._sequences[row.request_id], row.start + len(row.token_ids)
            size = self._config.block_size_tokens
            if end >= (sequence.num_committed + 1) * size:
                self._commit(sequence, end // size, now)
        return planned

    return Scheduler, "plan", broken


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
        return exchange(self, replace(call, commits=(), releases=()))

    return Pool, "exchange", broken


def count_of_a_gateway_never_stops() -> Bug:
    def broken(self: Audience, gateway: Any, held_len: int) -> None:
        self.next_index[gateway] = held_len

    return Audience, "join", broken


def releases_forgotten() -> Bug:
    exchange = Pool.exchange

    def broken(self: Pool, call: Exchange) -> Exchanged:
        return exchange(self, replace(call, releases=()))

    return Pool, "exchange", broken


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


BUGS: dict[str, Callable[[], Bug]] = {
    bug.__name__: bug
    for bug in (
        ack_before_the_terminal_record,
        records_written_without_reading,
        minimum_not_raised,
        fenced_batcher_goes_on,
        gaps_are_taken_for_the_next_part,
        finish_before_the_record,
        block_committed_before_its_step_returned,
        tokens_of_ghosts_are_told,
        steps_ahead_take_what_another_slot_sampled,
        cached_prefixes_hide_what_is_asked_of_prompts,
        what_is_told_of_prompts_is_dropped,
        prefixes_kept_over_a_generation,
        blocks_released_twice,
        count_of_a_gateway_never_stops,
        releases_forgotten,
        steps_do_not_know_their_requests,
        spans_without_their_root,
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

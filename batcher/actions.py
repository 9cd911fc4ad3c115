"""Pure. What a tenure can do: the action column of table 2.1 of the ownership protocol, without its guards.

Each action changes the holding and says what it wants done; none looks at an event.
"""

from dataclasses import dataclass, field

from batcher import events as e
from batcher.audience import Parts
from batcher.holding import Holding, State
from chassis.ids import Attempt, BootId, GatewayId
from chassis.messages.chunk import Finish, Part
from chassis.messages.request import Claim, Reason, Record, Terminal


@dataclass(frozen=True, slots=True)
class OwnershipConfig:
    held_len_max: int = 2048  # waiting and running requests together
    progress_period_s: float = 0.25
    progress_len_max: int = 256  # tokens of one Progress
    progress_at_once_max: int = 64  # above it they are spread over the period
    ack_wait_s: float = 1.0  # the broker's: who sleeps longer may have lost what it held
    owner_wait_s: float = 0.2
    takeover_wait_s: float = 0.2  # answers are collected for so long
    takeover_rounds: int = 2
    count_min_s: float = 10.0  # without a gateway, unless one said that its client left
    count_ask_period_s: float = 2.0
    retry_min_s: float = 0.1
    retry_max_s: float = 1.0
    leave_wait_s: float = 1.0  # a drain waits so long for one write
    nak_delay_s: float = 0.25
    deaths_alone: int = 2
    deaths_failed: int = 3


@dataclass(slots=True)
class Turn:
    """What the handling of one event shares: whose it is, when, and what it wants done."""

    boot: BootId
    config: OwnershipConfig
    now: float = 0.0
    calls: int = 0
    out: list[e.OwnershipEffect] = field(default_factory=list)

    def drop(self, what: str) -> None:
        """An event without a row."""
        self.out.append(e.Count(f"ownership.dropped.{what}"))

    def send(self, parts: dict[GatewayId, list[Part]]) -> None:
        for gateway, its_parts in parts.items():
            self.out.append(e.SendParts(gateway, tuple(its_parts)))

    def call(self) -> int:
        self.calls += 1
        return self.calls


@dataclass(slots=True)
class Actions(Holding):
    turn: Turn = field(kw_only=True)

    # ---- the scheduler ------------------------------------------------------------------------------

    def _wait(self) -> None:
        if self.is_late(self.turn.now):
            self.why = Reason.DEADLINE
        if self.why is not None:
            self._write_terminal()
            return
        self.live = True
        age_s = self.age_s + self.turn.now - self.delivered_at
        self.turn.out.append(e.Enqueue(self.request, age_s, self.deadline, self.given))
        self._enter(State.WAITING)

    def _stop(self) -> None:
        if self.live:
            self.live = False
            self.turn.out.append(e.Stop(self.id))

    def _run(self) -> None:
        self.live = True
        if self.admitted_at is None:
            self.admitted_at, self.taken_over = self.turn.now, True
        alone = self.deaths >= self.turn.config.deaths_alone
        self.turn.out.append(e.Run(self.request, tuple(self.ids), self.deadline, alone))

    def _send_parts(self) -> None:
        parts: Parts = {}
        self._serve(self.attempt, parts)
        self.turn.send(parts)

    def _serve(self, attempt: Attempt, parts: Parts) -> None:
        self.audience.serve(self.id, attempt, self.ids, self.digest, parts, self.logprobs, self.prompt)

    # ---- the log ------------------------------------------------------------------------------------

    def _claim(self) -> None:
        attempt = Attempt(max(self.seen_attempt + 1, self.wanted))
        deaths = self.worker_deaths, self.batcher_deaths
        self._write(State.CLAIMING, Claim(attempt, self.turn.boot, self.request.body_digest, *deaths))

    def _write_terminal(self) -> None:
        self._stop()
        self._write(State.WRITING, self.terminal(self.turn.boot, self.turn.now))

    def _write(self, state: State, record: Record) -> None:
        self.writing = record
        self._enter(state, self.turn.call())
        self.turn.out.append(e.Append(self.id, self.call, record, self.expected_seq))

    def _read(self, state: State) -> None:
        self._enter(state, self.turn.call())
        self.turn.out.append(e.ReadLast(self.id, self.call))

    def _read_after(self, state: State, failures: int) -> None:
        if failures == 0:
            self._read(state)
            return
        self._enter(state, timer_at=self.turn.now + self._retry_s(failures))

    def _retry_s(self, failures: int) -> float:
        config = self.turn.config
        return min(config.retry_min_s * 2.0 ** min(failures - 1, 10), config.retry_max_s)

    # ---- the gateways -------------------------------------------------------------------------------

    def _takeover(self) -> None:
        self.takeover_round = 0
        self.audience.settle()
        self._ask_takeover()

    def _ask_takeover(self) -> None:
        self.takeover_round += 1
        self._enter(State.TAKEOVER, timer_at=self.turn.now + self.turn.config.takeover_wait_s)
        self.turn.out.append(e.AskTakeover(self.id, self.attempt))

    def _count(self, least_s: float, ask_after_s: float) -> None:
        self.audience.count(self._window_ends(least_s), self.turn.now + ask_after_s)

    def _window_ends(self, least_s: float) -> float:
        return self.turn.now + max(least_s, self.request.resume_window_ms / 1000)

    # ---- the end ------------------------------------------------------------------------------------

    def _condemn(self) -> None:
        self.why, self.poison = Reason.FAILED, True
        self.error = f"ended after {self.worker_deaths} worker and {self.batcher_deaths} batcher deaths"

    def _finish(self, record: Terminal) -> None:
        """The terminal record is stored: tell the streams; the rest follows its receipt."""
        if self.poison:
            deaths = self.worker_deaths, self.batcher_deaths
            self.turn.out.append(e.DeadLetter(self.request, record, *deaths))
        if tuple(self.ids) != record.output_ids:
            self._stop()
            self.force(record.output_ids)
            self.learn(record.logprobs, record.prompt)
        finish = Finish(
            request_id=self.id,
            attempt=record.attempt,
            length=len(record.output_ids),
            digest=self.digest,
            reason=record.reason,
            byte_cut=record.byte_cut,
            usage=record.usage,
            timings=record.timings,
            error=record.error,
            retry_ms=record.retry_ms,
        )
        rest: Parts = {}
        self._serve(record.attempt, rest)
        for gateway in self.audience.next_index:
            self.turn.out.append(e.SendParts(gateway, tuple(rest.get(gateway, ())), (finish,)))
        self._settle_up(record, "done")

    def _settle_up(self, record: Terminal, leaves_as: str) -> None:
        """Its receipt is written before the acknowledgement: whoever it comes to next would write it else."""
        self._stop()
        self.stored, self.why, self.leaves_as = record, record.reason, leaves_as
        self._write_receipt()

    def _write_receipt(self) -> None:
        assert self.stored is not None
        self._enter(State.FINISHING, self.turn.call())
        self.turn.out.append(e.WriteReceipt(self.id, self.call, self.stored))

    def _leave_claim(self) -> None:
        """Says in the log that this boot lets go, so that its silence is not taken for death."""
        if self.state is State.RUNNING:
            self._send_parts()  # what waits for its interval need not be made again
        deaths = self.worker_deaths, self.batcher_deaths
        left = Claim(self.attempt, self.turn.boot, self.request.body_digest, *deaths, left=True)
        self._write(State.LEAVING, left)
        self.timer_at = self.turn.now + self.turn.config.leave_wait_s

    def _give_back(self) -> None:
        self.leave("drained")
        self.turn.out.append(e.Nak(self.token))

    def leave(self, why: str, ack: bool = False) -> None:
        self._stop()
        if ack:
            self.turn.out.append(e.Ack(self.token))
        self.turn.out.append(e.Closed(self.id, why))
        self._enter(State.NONE)

    def _enter(self, state: State, call: int = 0, timer_at: float | None = None) -> None:
        self.state, self.call, self.timer_at = state, call, timer_at

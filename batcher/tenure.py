"""Pure. One request's time at this batcher: the rows of table 2.1 of the ownership protocol.

Every write expects the sequence of the last record read or written; every doubt (refused, timed out,
redelivered, slept) is settled by reading. No part leaves before its claim is stored or while the record
is being read again; nothing is finished or acknowledged before the terminal record is stored or read, nor
acknowledged before its receipt is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from batcher import events as e
from batcher.audience import Parts
from batcher.holding import State, end_of
from batcher.neighbours import Neighbours
from chassis.ids import Attempt
from chassis.messages.ownership import Attach, AttachKind, CancelAsk, Detached, Refused, longest
from chassis.messages.request import Cancel, Claim, Reason, Record, Terminal
from chassis.messages.sampling import TokenLogprobs


@dataclass(slots=True)
class Tenure(Neighbours):
    """Ends in state NONE: whoever keeps it then forgets it."""

    # ---- deliveries and time -----------------------------------------------------------------------

    def begin(self, count: int) -> None:
        if self.request.gateway:
            self.audience.next_index[self.request.gateway] = 0
        if count == 1:
            self._wait()
        else:
            self._read(State.READING)

    def on_redelivered(self, event: e.Delivered) -> None:
        self.token = event.token
        if self.state is State.RUNNING:
            self._read(State.VERIFYING)

    def on_pause(self, slept_s: float) -> None:
        """The process slept, or the pipeline stood still: what was held may be another's by now."""
        self.audience.count_anew(self.turn.now, slept_s)
        match self.state:
            case State.RUNNING | State.TAKEOVER:
                self._read(State.VERIFYING)
            case State.ASKING:
                self._read(State.READING)

    def on_time(self) -> None:
        now, audience = self.turn.now, self.audience
        if self.timer_at is not None and self.timer_at <= now:
            self._on_state_timer()
        elif self.is_late(now):
            self._end(Reason.DEADLINE)
        elif self.state is State.RUNNING:
            if audience.count_ends is not None and audience.count_ends <= now:
                self._end(Reason.CANCELLED)
            elif audience.ask_at is not None and audience.ask_at <= now:
                audience.ask_at = now + self.turn.config.count_ask_period_s
                self.turn.out.append(e.AskTakeover(self.id, self.attempt))

    def _on_state_timer(self) -> None:
        match self.state:
            case State.ASKING:
                self._owner_silent(answered=False)
            case State.TAKEOVER:
                if self.audience.answers or self.takeover_round >= self.turn.config.takeover_rounds:
                    self._settle_takeover()
                else:
                    self._ask_takeover()
            case State.READING | State.VERIFYING:
                self._read(self.state)
            case State.LEAVING:
                self._give_back()
            case State.FINISHING:
                self._write_receipt()
            case _:
                raise AssertionError(f"no timer in {self.state}")

    def on_drain(self) -> None:
        """What is owned is left in the log first, for a bounded time; then the message goes back."""
        match self.state:
            case State.TAKEOVER | State.RUNNING | State.VERIFYING:
                self._stop()
                self._leave_claim()
            case State.CLAIMING:
                self._stop()
                self._enter(State.LEAVING, self.call, self.turn.now + self.turn.config.leave_wait_s)
            case State.LEAVING:
                pass
            case _:
                self._give_back()

    # ---- the scheduler -----------------------------------------------------------------------------

    def on_admitted(self) -> None:
        if self.state is not State.WAITING:
            self.turn.drop("admitted")
            return
        self.admitted_at = self.turn.now
        self._claim()

    def on_tokens(self, ids: tuple[int, ...], parts: Parts, told: TokenLogprobs | None = None) -> None:
        """The rest of the step's requests add to the same `parts`."""
        if not self.live or self.state is State.WAITING:
            self.turn.drop("tokens")
            return
        self.extend(ids, self.turn.now, told)
        if self.state is State.RUNNING and self.audience.waits(len(self.ids), self.request.stream_interval):
            self._serve(self.attempt, parts)

    def on_ended(self, event: e.Ended) -> None:
        if not self.live:
            self.turn.drop("ended")
            return
        assert tuple(self.ids) == event.output_ids[: len(self.ids)], "the end contradicts the tokens made"
        self.live = False
        self.extend(event.output_ids[len(self.ids) :], self.turn.now)
        self.ended, self.why, self.error = event, event.reason, event.error
        match self.state:
            case State.WAITING:
                self._write_terminal()
            case State.RUNNING:
                self._send_parts()
                self._write_terminal()

    def on_worker_death(self) -> None:
        if not self.live or self.state is State.WAITING:
            self.turn.drop("worker_death")
            return
        self.worker_deaths += 1
        if self.deaths >= self.turn.config.deaths_alone:
            self._stop()  # it must not die in company again: the takeover after its claim runs it alone
        if self.state is State.RUNNING:
            self._proceed()

    def _end(self, why: Reason) -> None:
        """Deadline, cancel, the count's end. Where the log is unclear it waits until that is settled."""
        match self.state:
            case State.WAITING | State.RUNNING:
                self.why = why
                self._write_terminal()
            case State.CLAIMING | State.TAKEOVER | State.VERIFYING | State.LEAVING if self.why is None:
                self.why = why
                self._stop()
            case State.READING | State.ASKING if why is Reason.DEADLINE:
                self.why = why
            case _:
                self.turn.drop(why.value)

    # ---- the log -----------------------------------------------------------------------------------

    def on_write_done(self, event: e.WriteDone) -> None:
        if self.call != event.call:
            self.turn.drop("write_done")
            return
        record, self.writing = self.writing, None
        if self.state is State.LEAVING:
            self._on_left(record, event)
            return
        self.failures = self.failures + 1 if event.outcome is e.Write.UNKNOWN else 0
        if self.state is State.FINISHING:
            self._on_receipt(event.outcome)
            return
        if event.outcome is not e.Write.STORED:
            self._on_not_stored()
        elif isinstance(record, Claim):
            first = self.expected_seq == 0
            self.take(record, event.seq)
            if first:
                self._proceed()
            else:
                self._takeover()
        else:
            assert isinstance(record, Terminal)
            self._finish(record)

    def _on_left(self, record: Record | None, event: e.WriteDone) -> None:
        """A claim that was under way when the drain came is left once it is known."""
        if event.outcome is e.Write.STORED and isinstance(record, Claim) and not record.left:
            self.take(record, event.seq)
            self._leave_claim()
        else:
            self._give_back()

    def _on_receipt(self, outcome: e.Write) -> None:
        if outcome is e.Write.UNKNOWN:
            self._enter(State.FINISHING, timer_at=self.turn.now + self._retry_s(self.failures))
        else:  # stored, or there already
            self.leave(self.leaves_as, ack=True)

    def _on_not_stored(self) -> None:
        """The first doubt is settled at once; a broker that goes on not answering is given time."""
        if self.state is State.CLAIMING:
            self._stop()
            self.lose_claim()
        self._read_after(State.VERIFYING if self.claimed else State.READING, max(0, self.failures - 1))

    def on_read_done(self, event: e.ReadDone) -> None:
        if self.call != event.call:
            self.turn.drop("read_done")
        elif event.failed:
            self.failures += 1
            self._read_after(self.state, self.failures)
        elif self.state is State.READING:
            self._on_read(event.record, event.seq)
        else:
            self._on_verified(event.record, event.seq)

    def _on_read(self, record: Record | None, seq: int) -> None:
        self.expected_seq = seq
        match record:
            case None:
                self._wait()
            case Terminal():
                self._on_terminal(record)
            case Claim() if record.boot == self.turn.boot:
                self.take(record, seq)
                if record.left:
                    self._claim()
                else:
                    self._takeover()
            case Claim() if record.body_digest not in (b"", self.request.body_digest):
                self.leave("another body", ack=True)  # a copy under another subject; its client is refused
            case Cancel() if record.boot in ("", self.turn.boot):
                self.seen_attempt, self.why = record.attempt, end_of(record)
                if record.boot:
                    self.attempt = record.attempt
                self._write_terminal()
            case Claim() | Cancel():
                self.named, self.seen_attempt = record, record.attempt
                self._enter(State.ASKING, self.turn.call(), self.turn.now + self.turn.config.owner_wait_s)
                cancelled = isinstance(record, Cancel)
                self.turn.out.append(
                    e.AskOwner(self.id, self.call, record.boot, record.attempt, self.token, cancelled)
                )

    def _on_verified(self, record: Record | None, seq: int) -> None:
        match record:
            case Claim() if record.boot == self.turn.boot and seq >= self.expected_seq:
                self.take(record, seq)
                if self.wanted > self.attempt or record.left:
                    self._claim()
                else:
                    self._proceed()
            case Cancel() if record.boot == self.turn.boot:
                self.expected_seq, self.seen_attempt, self.why = seq, record.attempt, end_of(record)
                self._write_terminal()
            case Terminal():
                self._on_terminal(record)
            case _:
                self.turn.out.append(e.Count("ownership.fenced"))
                self.leave("fenced")

    def _on_terminal(self, record: Terminal) -> None:
        if record.boot == self.turn.boot:
            self._finish(record)
        else:
            self._settle_up(record, "ended elsewhere")

    def _proceed(self) -> None:
        """My claim is the last record: run on, or do what became due while that was unclear."""
        self._send_parts()
        if self.why is None and self.deaths >= self.turn.config.deaths_failed:
            self._condemn()
        if self.why is not None:
            self._write_terminal()
        elif self.worker_deaths > self.worker_deaths_claimed:
            self._claim()
        elif not self.live:
            self._takeover()
        else:
            self._enter(State.RUNNING)

    # ---- gateways ----------------------------------------------------------------------------------

    def on_takeover_answered(self, event: e.TakeoverAnswered) -> None:
        """While a count runs the question is repeated, so RUNNING knows answers too: a yes attaches."""
        too_long = event.ids is not None and not self.fits(event.ids)
        if self.attempt != event.attempt or too_long or self.state not in (State.TAKEOVER, State.RUNNING):
            self.turn.drop("takeover_answer")
        elif event.ids is None:
            self._on_minimum(event.minimum or Attempt(0))
        elif self.state is State.TAKEOVER:
            self.learn_prompt(event.prompt)
            self.audience.answered(event.gateway, event.ids, event.logprobs)
        elif self._join(Attach(self.id, event.attempt, event.gateway, event.ids)) is AttachKind.ATTACHED:
            self.learn(event.logprobs, event.prompt)
            self._send_parts()

    def _settle_takeover(self) -> None:
        """The longest answer is the output so far, unless what this claim's boot made goes on from it."""
        answers, told = self.audience.settle()
        ids = longest(list(answers.values()))
        if not self.starts_with(ids):
            self._stop()
            self.force(ids)
        self.learn(told.get(ids, ()))
        for gateway, held in answers.items():
            self.audience.join(gateway, len(held))
        if not answers and self.request.gateway:
            self._count(self.turn.config.count_min_s, self.turn.config.count_ask_period_s)
        if self.why is None and not self.live and self.deaths < self.turn.config.deaths_failed:
            self._run()
        self._proceed()

    def on_heard(self, message: Attach | CancelAsk | Detached | Refused, reply: int | None) -> None:
        match message:
            case Attach():
                kind = self._attach(message)
                if reply is not None:
                    self.turn.out.append(e.AnswerAttach(reply, kind))
                if self.state is State.RUNNING:
                    self._send_parts()
            case CancelAsk():
                self._end(end_of(message))
            case Detached() if self.state in (State.RUNNING, State.VERIFYING):
                self.audience.leave(message.gateway, self._window_ends(0.0), self.turn.now)
            case Refused() if self.state is State.RUNNING and self.attempt == message.attempt:
                self._on_refused(message)
            case _:
                self.turn.drop(type(message).__name__.lower())

    def _attach(self, message: Attach) -> AttachKind:
        """Of who read the claim under which the gateways are being asked it is a yes."""
        if self.state is State.TAKEOVER and message.attempt == self.attempt and self.fits(message.held):
            self.audience.answered(message.gateway, message.held)
            return AttachKind.ATTACHED
        known = self.claimed and self.state in (State.RUNNING, State.VERIFYING, State.WRITING)
        if not known or message.attempt > self.attempt:
            self.turn.drop("attach")
            return AttachKind.UNKNOWN
        return self._join(message)

    def _join(self, message: Attach) -> AttachKind:
        held = message.held
        if not self.starts_with(held):
            if self.state is not State.RUNNING:
                self.turn.drop("attach")
                return AttachKind.UNKNOWN
            if self.forced or not self.fits(held):
                self.turn.out.append(e.Count("ownership.diverged"))
                return AttachKind.DIVERGED
            self._force_output(held)
        self.audience.join(message.gateway, len(held))
        return AttachKind.ATTACHED

    def _force_output(self, ids: Sequence[int]) -> None:
        """A witness downstream holds other ids: go on from those, once per attempt."""
        self.forced = True
        self._stop()
        self.force(ids)
        self._run()

    def _on_minimum(self, minimum: Attempt) -> None:
        """A gateway has seen a later attempt, or this one of another boot: the log knows why."""
        if minimum < self.attempt:
            self.turn.drop("minimum")
            return
        self.wanted = Attempt(max(self.wanted, minimum + 1))
        self._read(State.VERIFYING)

    def _on_refused(self, message: Refused) -> None:
        if message.minimum is not None:
            self._on_minimum(message.minimum)
        elif message.differs is None:
            ends = self._window_ends(self.turn.config.count_min_s)
            self.audience.leave(message.gateway, ends, self.turn.now)
        elif self.starts_with(message.differs):
            self.turn.drop("refused")
        else:
            self._join(Attach(self.id, message.attempt, message.gateway, message.differs))

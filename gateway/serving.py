"""Pure. The rows of OPEN: parts, takeover questions, the end, finding the owner, cancels and departures."""

from chassis.errors import Code
from chassis.ids import Attempt, BootId
from chassis.messages.chunk import Finish, Part
from chassis.messages.ownership import (
    AttachKind,
    CancelAsk,
    Detached,
    Refused,
    TakeoverAnswer,
    TakeoverQuestion,
)
from chassis.messages.request import PROMPT_ERROR, Cancel, Claim, Reason, Terminal
from chassis.messages.sampling import GRAMMAR_ERROR, UNTOLD, TokenLogprobs, recorded
from gateway.events import (
    AskOwner,
    AttachAnswered,
    Count,
    End,
    MessageRead,
    Pass,
    ReadMessage,
    RecordRead,
    Tell,
)
from gateway.stream import Fit, Probe, Said, State, Stream
from gateway.table import RETRY_MS, StreamTable

DEADLINE_GRACE_S = 1.0
END_GRACE_S = 30.0  # from a cancel to its end, before the client is told that none came
LOST_LOOKS = 4  # at least `lost_check_s` apart, without a sign of life between: nobody has the request


class Serving:
    def __init__(self, table: StreamTable) -> None:
        self._table = table

    def open(self, stream: Stream, attempt: Attempt, boot: BootId | None) -> None:
        request = stream.request
        assert request is not None
        stream.state, stream.call, stream.give_up_at = State.OPEN, 0, None
        if request.timeout_ms and stream.deadline_at is None:
            stream.deadline_at = self._table.now + request.timeout_ms / 1000 + DEADLINE_GRACE_S
        self._table.accept(stream, request.model, request.limits.stop)
        if boot is not None and not stream.below(attempt, boot):
            self._raise(stream, attempt, boot)
        self._table.own(stream, stream.min_boot)
        stream.check_at = self._table.now + self.check_interval(stream)
        if stream.owner is not None:
            self._ask(stream, Probe.NAMED)
        self._table.arm(stream)
        kept, stream.kept = stream.kept, []
        for said in kept:
            if self._table.streams.get(stream.id) is stream:
                self.replay(stream, said)
        if self._table.streams.get(stream.id) is not stream:
            return
        if stream.gone:
            self.leave(stream)
        elif stream.cancel_wanted:
            self.cancel(stream, stream.cancel_wanted)

    def replay(self, stream: Stream, said: Said | TakeoverQuestion) -> None:
        match said:
            case TakeoverQuestion():
                self.answer_takeover(stream, said)
            case Said(boot, Part() as part):
                self.part(stream, boot, part)
            case Said(boot, Finish() as finish):
                self.finish(stream, boot, finish)

    def part(self, stream: Stream, boot: BootId, part: Part) -> None:
        if stream.below(part.attempt, boot):
            old = Refused(stream.id, self._table.gateway, part.attempt, minimum=stream.min_attempt)
            self._table.out += (Tell(boot, "", old), Count("old part"))
            return
        self._raise(stream, part.attempt, boot)
        first_index = len(stream.held)
        fit, fresh = stream.held.take(part)
        match fit:
            case Fit.CONTINUES:
                stream.check_at = self._table.now + self.check_interval(stream)
                if fresh:
                    logprobs = part.logprobs[-len(fresh) :]
                    if logprobs:
                        stream.held.tell(first_index, logprobs)
                    prompt = None if first_index else part.prompt
                    if prompt is not None:
                        stream.held.prompt = prompt
                    self._table.out.append(Pass(stream.client, first_index, fresh, logprobs, prompt))
            case Fit.DIFFERS:
                differs = Refused(stream.id, self._table.gateway, part.attempt, differs=stream.held.ids)
                self._table.out += (Tell(boot, "", differs), Count("differing part"))
            case Fit.GAP:
                self._table.out.append(Count("gap"))
                if stream.probe is Probe.IDLE:
                    self._ask(stream, Probe.ASKING)

    def _raise(self, stream: Stream, attempt: Attempt, boot: BootId) -> None:
        stream.min_attempt, stream.min_boot = attempt, boot
        stream.absences = 0
        self._table.own(stream, boot)

    def answer_takeover(self, stream: Stream, q: TakeoverQuestion) -> None:
        if stream.below(q.attempt, q.boot):
            answer = TakeoverAnswer(stream.id, self._table.gateway, q.attempt, None, stream.min_attempt)
        else:
            self._raise(stream, q.attempt, q.boot)
            self._table.owners.hear(self._table.now, q.boot)
            held, told = stream.held, stream.held.logprobs
            if len(recorded(told)) < len(told):
                told = ()  # no message holds them all, and the ids decide
            gateway = self._table.gateway
            answer = TakeoverAnswer(stream.id, gateway, q.attempt, held.ids, None, told, held.prompt)
        self._table.out.append(Tell(q.boot, "", answer))

    def finish(self, stream: Stream, boot: BootId, finish: Finish) -> None:
        length = len(stream.held)
        whole = finish.length == length or (finish.length < length and finish.reason is not Reason.STOP)
        if whole and stream.held.digest_at(finish.length) == finish.digest:
            self._end(stream, finish, finish.length)
        elif stream.probe is not Probe.READING:  # the record has what is missing, or differs
            self._probe_read(stream)

    def terminal(self, stream: Stream, terminal: Terminal) -> None:
        if stream.joined and terminal.tenant != stream.tenant:
            self._table.refuse_unknown(stream)
            return
        if self._table.refuse_other(stream, terminal.body_digest):
            return
        ids = terminal.output_ids
        self._table.accept(stream, terminal.model, terminal.stop)
        if stream.held.fits(ids):
            first_index = len(stream.held)
            if len(ids) > first_index:
                stream.held.append(ids[first_index:])
                logprobs = _of_the_rest(terminal, first_index)
                prompt = None if first_index else terminal.prompt
                self._table.out.append(Pass(stream.client, first_index, ids[first_index:], logprobs, prompt))
            self._end(stream, terminal, len(ids))
        elif terminal.reason is not Reason.STOP and stream.held.begins_with(ids):
            self._end(stream, terminal, len(ids))
        else:
            self._table.out.append(Count("diverged"))
            self._table.fail(stream, Code.ABORTED, f"request {stream.id}: diverged from its stored result")

    def _end(self, stream: Stream, how: Finish | Terminal, length: int) -> None:
        if how.reason is Reason.FAILED:
            asked = how.error.startswith((GRAMMAR_ERROR, PROMPT_ERROR))
            code = Code.INVALID_ARGUMENT if asked else Code.INTERNAL
            self._table.fail(stream, code, f"request {stream.id}: {how.error or 'failed'}")
        elif how.reason is Reason.REFUSED or (how.reason is Reason.DEADLINE and how.error):
            code = Code.UNAVAILABLE if how.reason is Reason.REFUSED else Code.DEADLINE_EXCEEDED
            self._table.fail(stream, code, f"request {stream.id}: {how.error}", how.retry_ms or None)
        else:
            self._table.drop(stream)
            self._table.out.append(
                End(stream.client, how.reason, length, how.byte_cut, how.usage, how.timings, how.attempt)
            )
        self._table.out += self._table.cancels.forget(stream.id)

    def _ask(self, stream: Stream, probe: Probe) -> None:
        assert stream.owner is not None
        stream.probe, stream.call = probe, self._table.call()
        if stream.cancelling:
            self._tell_cancel(stream)
        self._table.out.append(
            AskOwner(stream.id, stream.call, stream.owner, stream.min_attempt, stream.held.ids)
        )

    def _probe_read(self, stream: Stream) -> None:
        stream.probe = Probe.READING
        self._table.read(stream)

    def answered(self, e: AttachAnswered) -> None:
        stream = self._table.awaiting(e.request_id, e.call)
        if stream is None or stream.state is not State.OPEN:
            return
        match e.kind:
            case AttachKind.ATTACHED:
                stream.absences = 0
                if stream.owner is not None:
                    self._table.owners.hear(e.now, stream.owner)
                self._check_in(stream, self.check_interval(stream))
            case AttachKind.DIVERGED:  # it will end, and its record tell
                stream.absences = 0
                self._check_in(stream, self._table.limits.cancel_check_s)
                self._table.own(stream, None)
            case _ if stream.probe is Probe.ASKING:
                self._probe_read(stream)
            case _:
                self._probe_message(stream)

    def probed_record(self, stream: Stream, e: RecordRead) -> None:
        if e.failed:
            stream.absences = 0  # a broker that does not answer says nothing
            self._check_in(stream, self._table.limits.cancel_check_s)
            return
        match e.record:
            case Terminal() as terminal:
                self.terminal(stream, terminal)
            case Claim(body_digest=digest) if self._table.refuse_other(stream, digest):
                pass  # two were stored under one key, and the other one runs
            case Claim() | Cancel() as record if record.boot:
                self._table.own(stream, record.boot)
                self._ask(stream, Probe.NAMED)
            case Cancel(reason=reason):
                self.never_began(stream, reason)
            case _:
                self._table.own(stream, None)
                self._probe_message(stream)

    def never_began(self, stream: Stream, reason: str) -> None:
        """A cancel is stored that follows no record: nobody claims it, so it ends with nothing, whenever
        somebody comes to write that down."""
        if reason == "deadline":
            self._table.fail(stream, Code.DEADLINE_EXCEEDED, f"request {stream.id}: nobody began it in time")
        else:
            self._table.fail(stream, Code.CANCELLED, f"request {stream.id}: cancelled before it began")

    def _probe_message(self, stream: Stream) -> None:
        """No owner was found. While its message is there, somebody will be given it."""
        if stream.cancelling or self._table.now < stream.look_at:
            self._check_in(stream, self._search_interval(stream))
            return
        stream.look_at = self._table.now + self._table.limits.lost_check_s
        stream.probe, stream.call = Probe.MESSAGE, self._table.call()
        self._table.out.append(ReadMessage(stream.id, stream.call))

    def probed_message(self, stream: Stream, e: MessageRead) -> None:
        gone = e.request is None and not e.failed
        stream.absences = stream.absences + 1 if gone else 0
        if stream.absences >= LOST_LOOKS and not stream.cancelling:
            self._table.out.append(Count("request lost"))
            lost = f"request {stream.id}: lost, its message is gone and nobody owns it; send it again"
            self._table.fail(stream, Code.UNAVAILABLE, lost, RETRY_MS)
            return
        self._check_in(stream, self._search_interval(stream))

    def _search_interval(self, stream: Stream) -> float:
        """Until an owner is looked for again, after none was found."""
        limits = self._table.limits
        if stream.owner is not None:  # named by the record
            return limits.cancel_check_s
        interval = self.check_interval(stream)
        return min(interval, limits.lost_check_s) if stream.absences else interval

    def check_interval(self, stream: Stream) -> float:
        limits = self._table.limits
        if stream.cancelling:
            return limits.cancel_check_s
        return limits.join_check_s if stream.uninvited and stream.owner is None else limits.quiet_check_s

    def _check_in(self, stream: Stream, delay_s: float) -> None:
        """The search for the owner ends here; the next one starts no later than this."""
        stream.probe, stream.call = Probe.IDLE, 0
        stream.check_at = self._table.now + delay_s
        self._table.arm(stream)

    def look(self, stream: Stream) -> None:
        if stream.probe is not Probe.IDLE:
            return
        if stream.owner is not None:
            self._ask(stream, Probe.ASKING)
            return
        if stream.cancelling:
            self._tell_cancel(stream)
        self._probe_read(stream)

    def cancel(self, stream: Stream, reason: str) -> None:
        assert stream.request is not None
        if not stream.cancelling:
            stream.cancelling, stream.cancel_wanted = True, reason
            stream.give_up_at = self._table.now + END_GRACE_S
            stream.check_at = self._table.now + self._table.limits.cancel_check_s
            self._table.arm(stream)
            model = stream.request.model
            self._table.out += self._table.cancels.start(
                self._table.now, stream.id, stream.owner, model, reason
            )

    def _tell_cancel(self, stream: Stream) -> None:
        assert stream.request is not None
        ask = CancelAsk(stream.id, stream.cancel_wanted)
        self._table.out.append(Tell(stream.owner, stream.request.model, ask))

    def leave(self, stream: Stream) -> None:
        request = stream.request
        assert request is not None
        if request.resume_window_ms and not stream.cancelling:
            detached = Detached(stream.id, self._table.gateway)
            self._table.out.append(Tell(stream.owner, request.model, detached))
        elif not stream.cancelling:
            self._table.out += self._table.cancels.start(
                self._table.now, stream.id, stream.owner, request.model, "disconnect"
            )
        self._table.drop(stream)


def _of_the_rest(terminal: Terminal, first_index: int) -> tuple[TokenLogprobs, ...]:
    """One for each output id from `first_index` on, or none; a record keeps only so many."""
    if not terminal.logprobs:
        return ()
    kept = terminal.logprobs[first_index:]
    return (*kept, *(UNTOLD,) * (len(terminal.output_ids) - first_index - len(kept)))

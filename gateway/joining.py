"""Pure. The rows of PUBLISHING and ATTACHING: how a client's stream comes to be open."""

from chassis.errors import Code
from chassis.ids import Attempt
from chassis.messages.ownership import TakeoverQuestion
from chassis.messages.request import Cancel, Claim, Terminal
from gateway.events import (
    Count,
    Fail,
    MessageRead,
    Publish,
    Published,
    PublishRequest,
    ReadMessage,
    RecordRead,
    Resume,
    Submit,
)
from gateway.serving import DEADLINE_GRACE_S, Serving
from gateway.stream import Probe, Said, State, Stream
from gateway.table import RETRY_MS, StreamTable, not_found, other_body


class Joining:
    def __init__(self, table: StreamTable, serving: Serving) -> None:
        self._table = table
        self._serving = serving

    def submit(self, e: Submit) -> None:
        request = e.request
        known = self._table.streams.get(request.id)
        first = known.request if known is not None else None
        if known is not None and first is not None and first.body_digest != request.body_digest:
            if known.state is State.OPEN:
                self._table.out.append(other_body(e.client))  # whoever was first keeps the stream
            else:  # it may be the one whose body is another
                self._again(e.client, "client_key: another call comes with it just now")
            return
        if known is not None and first is None and not known.gone:  # its body is not read yet
            self._again(e.client, "request: another call resumes it")
            return
        stream = Stream(e.client, request.id, request.tenant, request, ())
        if self._table.add(stream):
            stream.call = self._table.call()
            self._table.out.append(PublishRequest(stream.call, request))

    def _again(self, client: int, why: str) -> None:
        self._table.out.append(Fail(client, Code.UNAVAILABLE, why, RETRY_MS))

    def resume(self, e: Resume) -> None:
        known = self._table.streams.get(e.request_id)
        if known is not None and known.tenant != e.tenant:
            self._table.out.append(not_found(e.client, e.request_id))
            return
        stream = Stream(e.client, e.request_id, e.tenant, None, e.ids)
        if self._table.add(stream):
            self._attach(stream)

    def published(self, e: Published) -> None:
        stream = self._table.awaiting(e.request_id, e.call)
        if stream is None or stream.state is not State.PUBLISHING:
            return
        match e.outcome:
            case Publish.STORED if not stream.keyed:
                self._serving.open(stream, Attempt(0), None)
            case Publish.STORED | Publish.DUPLICATE | Publish.TAKEN:
                stream.stored = e.outcome is Publish.STORED
                self._attach(stream)
            case Publish.FULL:
                self._table.fail(stream, Code.UNAVAILABLE, "queue: full", RETRY_MS)
            case Publish.REFUSED:
                self._table.fail(stream, Code.UNAVAILABLE, "bus: not available", RETRY_MS)
            case Publish.TOO_LARGE:
                self._table.fail(
                    stream, Code.INVALID_ARGUMENT, "request: larger than a message of the bus may be"
                )
            case Publish.TIMEOUT:
                request = stream.request
                assert request is not None
                self._table.fail(stream, Code.UNAVAILABLE, "bus: no answer in time", RETRY_MS)
                if not request.keyed:  # a keyed retry attaches to what may still arrive
                    self._table.out += self._table.cancels.write_now(
                        self._table.now, stream.id, request.model, "unavailable"
                    )

    def _attach(self, stream: Stream) -> None:
        stream.state = State.ATTACHING
        stream.give_up_at = self._table.now + self._table.limits.attach_timeout_s
        self._table.arm(stream)
        self._table.read(stream)

    def attaching_record(self, stream: Stream, e: RecordRead) -> None:
        if e.failed:
            self._read_later(stream)
            return
        record = e.record
        if isinstance(record, Claim | Terminal) and self._table.refuse_other(stream, record.body_digest):
            return
        match record:
            case Terminal():
                self._serving.terminal(stream, record)
            case Claim() if not stream.joined:
                self._serving.open(stream, record.attempt, record.boot)
            case None if stream.stored:
                self._serving.open(stream, Attempt(0), None)
            case _:  # the message proves the tenant and the body, and holds what the text needs
                stream.read, stream.call = record, self._table.call()
                self._table.out.append(ReadMessage(stream.id, stream.call))

    def message(self, e: MessageRead) -> None:
        if self._table.cancels.awaits(e.request_id, e.call):
            self._table.out += self._table.cancels.on_message(e)
            return
        stream = self._table.awaiting(e.request_id, e.call)
        if stream is not None and stream.state is State.OPEN and stream.probe is Probe.MESSAGE:
            self._serving.probed_message(stream, e)
            return
        if stream is None or stream.state is not State.ATTACHING:
            return
        record, stream.read = stream.read, None
        if e.failed:
            self._read_later(stream)
        elif e.request is None and record is not None:
            self._read_later(stream)  # acknowledged meanwhile: the terminal record is there
        elif e.request is None and not stream.none_seen:
            stream.none_seen = True
            self._read_later(stream)  # both reads may have been a little behind
        elif e.request is None and stream.joined:
            self._table.refuse_unknown(stream)
        elif e.request is None:  # the broker knows it all the same: it said so when it was published
            self._table.fail(stream, Code.UNAVAILABLE, "request: stored, but cannot be read yet", RETRY_MS)
        elif self._may_join(stream, e):
            attempt, boot = (record.attempt, record.boot or None) if record else (Attempt(0), None)
            self._serving.open(stream, attempt, boot)
            still = self._table.streams.get(stream.id) is stream
            if isinstance(record, Cancel) and record.follows_none and still:
                self._serving.never_began(stream, record.reason)

    def _may_join(self, stream: Stream, e: MessageRead) -> bool:
        request = e.request
        assert request is not None
        if request.tenant != stream.tenant:
            self._table.refuse_unknown(stream)
            return False
        if self._table.refuse_other(stream, request.body_digest):
            return False
        if not stream.joined:
            return True
        if e.vocab_size is None:
            self._table.fail(stream, Code.UNAVAILABLE, f"model {request.model}: not served now", RETRY_MS)
            return False
        if any(token_id >= e.vocab_size for token_id in stream.held.ids):
            self._table.fail(
                stream, Code.INVALID_ARGUMENT, f"output_ids: below {e.vocab_size}, the vocabulary"
            )
            return False
        stream.request = request
        if request.timeout_ms:
            stream.deadline_at = self._table.now - e.age_s + request.timeout_ms / 1000 + DEADLINE_GRACE_S
        return True

    def _read_later(self, stream: Stream) -> None:
        stream.call = 0
        stream.check_at = self._table.now + self._table.limits.read_retry_s
        self._table.arm(stream)

    def proven(self, stream: Stream, what: Said | TakeoverQuestion) -> None:
        """Word of a request that is not open yet: it was stored."""
        if stream.state is State.PUBLISHING and not stream.keyed:
            stream.kept.append(what)
            self._serving.open(stream, Attempt(0), None)
            return
        if not stream.keep(what):
            self._table.out.append(Count("kept too many"))
        if stream.state is State.PUBLISHING:
            self._attach(stream)

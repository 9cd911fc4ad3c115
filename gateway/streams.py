"""Pure. Every client stream of one gateway: PROTOCOL.md, table 2.2, row by row.

Rules: a part is taken only if it continues the ids held and is of no older owner; a takeover question raises
the minimum in the step that answers it; a stream ends only by what the terminal record says, or by an error;
CLOSED is to be forgotten. What no row names is dropped. A completion whose call is not awaited is a ghost.
"""

from chassis.errors import Code
from chassis.ids import GatewayId
from chassis.messages.ownership import Refused, TakeoverQuestion
from chassis.messages.request import Cancel, Terminal
from gateway.events import (
    AttachAnswered,
    CancelHeard,
    CancelWanted,
    CancelWritten,
    ChunkArrived,
    ClientGone,
    Count,
    Effect,
    Event,
    LetGo,
    MessageRead,
    Published,
    RecordRead,
    Resume,
    Submit,
    TakeoverAsked,
    Tell,
    Tick,
)
from gateway.joining import Joining
from gateway.serving import Serving
from gateway.stream import Probe, Said, State, Stream
from gateway.table import RETRY_MS, StreamLimits, StreamTable

__all__ = ["StreamLimits", "Streams"]


class Streams:
    def __init__(self, gateway: GatewayId, limits: StreamLimits | None = None) -> None:
        self._table = StreamTable(gateway, limits or StreamLimits())
        self._serving = Serving(self._table)
        self._joining = Joining(self._table, self._serving)

    def __len__(self) -> int:
        return len(self._table.streams)

    @property
    def idle(self) -> bool:
        """Nothing open and no cancel under way."""
        return not self._table.streams and not len(self._table.cancels)

    def handle(self, event: Event) -> list[Effect]:
        """One step. Effects are to be performed in order."""
        table = self._table
        table.out, table.now = [], event.now
        match event:
            case ChunkArrived():
                self._chunk(event)
            case TakeoverAsked(_, question):
                self._takeover(question)
            case Submit():
                self._joining.submit(event)
            case Resume():
                self._joining.resume(event)
            case Published():
                self._joining.published(event)
            case RecordRead():
                self._record(event)
            case MessageRead():
                self._joining.message(event)
            case AttachAnswered():
                self._serving.answered(event)
            case CancelWritten():
                self._cancel_written(event)
            case CancelWanted():
                self._cancel_wanted(event)
            case ClientGone():
                self._gone(event)
            case LetGo():
                self._let_go()
            case Tick():
                self._tick()
        return table.out

    def next_timer(self) -> float | None:
        """When a Tick is due, at the latest."""
        table = self._table
        times = (table.owners.next_timer(), table.cancels.next_timer(), table.next_wake())
        return min([t for t in times if t is not None], default=None)

    def check(self) -> None:
        """What holds after every event."""
        self._table.check()

    def _record(self, e: RecordRead) -> None:
        if self._table.cancels.awaits(e.request_id, e.call):
            effects, end = self._table.cancels.on_record(e)
            self._table.out += effects
            stream = self._table.streams.get(e.request_id)
            if stream is not None and stream.state is State.OPEN:
                match end:
                    case Terminal():
                        self._serving.terminal(stream, end)
                    case Cancel():
                        self._serving.never_began(stream, end.reason)
            return
        stream = self._table.awaiting(e.request_id, e.call)
        if stream is None:
            return
        if stream.state is State.ATTACHING:
            self._joining.attaching_record(stream, e)
        elif stream.state is State.OPEN and stream.probe is Probe.READING:
            self._serving.probed_record(stream, e)

    def _cancel_written(self, e: CancelWritten) -> None:
        if not self._table.cancels.awaits(e.request_id, e.call):
            return
        effects, ends = self._table.cancels.on_written(e)
        self._table.out += effects
        stream = self._table.streams.get(e.request_id)
        if ends and stream is not None and stream.state is State.OPEN:
            self._serving.never_began(stream, stream.cancel_wanted)

    def _chunk(self, e: ChunkArrived) -> None:
        chunk = e.chunk
        if self._table.owners.hear_chunk(e.now, chunk.boot, chunk.number):
            self._table.out.append(Count("chunk lost"))
        for part in chunk.parts:
            stream = self._table.streams.get(part.request_id)
            if stream is None:
                refused = Refused(part.request_id, self._table.gateway, part.attempt)
                self._table.out.append(Tell(chunk.boot, "", refused))
            elif stream.state is State.OPEN:
                self._serving.part(stream, chunk.boot, part)
            else:
                self._joining.proven(stream, Said(chunk.boot, part))
        for finish in chunk.finishes:
            stream = self._table.streams.get(finish.request_id)
            if stream is None:
                continue
            if stream.state is State.OPEN:
                self._serving.finish(stream, chunk.boot, finish)
            else:
                self._joining.proven(stream, Said(chunk.boot, finish))

    def _takeover(self, question: TakeoverQuestion) -> None:
        stream = self._table.streams.get(question.request_id)
        if stream is None:
            return
        if stream.state is State.OPEN:
            self._serving.answer_takeover(stream, question)
        else:
            self._joining.proven(stream, question)

    def _cancel_wanted(self, e: CancelWanted) -> None:
        stream = self._table.streams.get(e.request_id)
        if stream is None:
            self._table.out += self._table.cancels.start_by_id(
                e.now, e.request_id, e.tenant, "client", e.reply
            )
            return
        if stream.tenant != e.tenant:
            self._table.out.append(CancelHeard(e.reply, False))
            return
        stream.cancel_wanted = "client"
        if stream.state is State.OPEN:
            self._serving.cancel(stream, "client")
        self._table.out.append(CancelHeard(e.reply, True))

    def _gone(self, e: ClientGone) -> None:
        stream = self._table.streams.get(e.request_id)
        if stream is None or stream.client != e.client:
            return
        stream.gone = True
        if stream.state is State.OPEN:
            self._serving.leave(stream)

    def _let_go(self) -> None:
        """As if this gateway died, but the clients know at once: owners give them time to resume."""
        for stream in list(self._table.streams.values()):
            if stream.state is State.PUBLISHING and not stream.keyed and stream.request is not None:
                self._table.out += self._table.cancels.write_now(
                    self._table.now, stream.id, stream.request.model, "unavailable"
                )
            self._table.fail(stream, Code.UNAVAILABLE, "gateway: stopping; resume at another", 0)

    def _tick(self) -> None:
        for _, request_ids in self._table.owners.silent(self._table.now):
            for request_id in request_ids:
                if (stream := self._table.streams.get(request_id)) is not None and stream.state is State.OPEN:
                    self._serving.look(stream)
        while (due := self._table.pop_due()) is not None:
            self._wake(due)
            if self._table.streams.get(due.id) is due:
                self._table.arm(due)
        self._table.out += self._table.cancels.tick(self._table.now)

    def _wake(self, stream: Stream) -> None:
        now = self._table.now
        if stream.give_up_at is not None and stream.give_up_at <= now:
            self._give_up(stream)
            return
        if stream.deadline_at is not None and stream.deadline_at <= now:
            stream.deadline_at = None
            if stream.state is State.OPEN:
                self._serving.cancel(stream, "deadline")
            else:
                stream.cancel_wanted = stream.cancel_wanted or "deadline"
        if stream.check_at is not None and stream.check_at <= now:
            if stream.state is State.ATTACHING:
                stream.check_at = None
                self._table.read(stream)
            else:
                stream.check_at = now + self._serving.check_interval(stream)
                self._serving.look(stream)

    def _give_up(self, stream: Stream) -> None:
        if stream.state is State.ATTACHING:
            self._table.fail(stream, Code.UNAVAILABLE, "bus: the request's record cannot be read", RETRY_MS)
        elif stream.cancel_wanted == "deadline":
            self._table.fail(stream, Code.DEADLINE_EXCEEDED, f"{stream.id}: no end after its deadline")
        else:
            self._table.fail(stream, Code.CANCELLED, f"{stream.id}: cancelled; its end is not confirmed yet")

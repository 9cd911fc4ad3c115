"""Pure. What the rows of the stream table stand on: the streams, their owners and timers, the effects.

Nothing here decides; `joining` and `serving` do.
"""

import heapq
import itertools
from dataclasses import dataclass

from chassis.errors import Code
from chassis.ids import BootId, GatewayId, RequestId
from gateway.cancels import Cancels
from gateway.events import Accept, Effect, Fail, ReadRecord
from gateway.owners import Owners
from gateway.stream import Stream

RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class StreamLimits:
    len_max: int = 4096
    quiet_check_s: float = 10.0  # an open stream without a part asks this often, whatever its owner does
    join_check_s: float = 1.0  # while an owner to be does not know that we wait for it
    cancel_check_s: float = 1.0
    lost_check_s: float = 5.0  # a request without an owner: whether its message is there
    read_retry_s: float = 0.25
    attach_timeout_s: float = 10.0


class StreamTable:
    def __init__(self, gateway: GatewayId, limits: StreamLimits) -> None:
        self.gateway = gateway
        self.limits = limits
        self.streams: dict[RequestId, Stream] = {}
        self.owners = Owners()
        self._calls = itertools.count(1)
        self.cancels = Cancels(self.call)
        self.heap: list[tuple[float, int, RequestId]] = []
        self.out: list[Effect] = []
        self.now = 0.0

    def add(self, stream: Stream) -> bool:
        """The newest call has the stream; what an older one witnessed here stays the minimum."""
        old = self.streams.get(stream.id)
        if old is None and len(self.streams) >= self.limits.len_max:
            full = Fail(stream.client, Code.UNAVAILABLE, "gateway: too many open streams", RETRY_MS)
            self.out.append(full)
            return False
        if old is not None:
            stream.min_attempt, stream.min_boot = old.min_attempt, old.min_boot
            self.fail(old, Code.ABORTED, f"request {old.id}: another call has its stream now")
        self.streams[stream.id] = stream
        return True

    def call(self) -> int:
        return next(self._calls)

    def awaiting(self, request_id: RequestId, call: int) -> Stream | None:
        stream = self.streams.get(request_id)
        return stream if stream is not None and stream.call == call else None

    def fail(self, stream: Stream, code: Code, message: str, retry_ms: int | None = None) -> None:
        self.drop(stream)
        self.out.append(Fail(stream.client, code, message, retry_ms))

    def drop(self, stream: Stream) -> None:
        if self.streams.get(stream.id) is stream:
            del self.streams[stream.id]
        self.own(stream, None)

    def own(self, stream: Stream, boot: BootId | None) -> None:
        if stream.owner != boot:
            self.owners.move(self.now, stream.id, stream.owner, boot)
            stream.owner = boot

    def arm(self, stream: Stream) -> None:
        wakes_at = stream.wakes_at()
        if wakes_at is not None and (stream.due is None or wakes_at < stream.due):
            stream.due = wakes_at
            heapq.heappush(self.heap, (wakes_at, stream.client, stream.id))

    def is_armed(self, entry: tuple[float, int, RequestId]) -> bool:
        stream = self.streams.get(entry[2])
        return stream is not None and stream.due == entry[0] and stream.client == entry[1]

    def accept(self, stream: Stream, model: str, stop: tuple[bytes, ...]) -> None:
        if not stream.accepted:
            stream.accepted = True
            held = stream.held.ids
            self.out.append(Accept(stream.client, stream.id, model, stop, held, stream.request))

    def read(self, stream: Stream) -> None:
        stream.call = self.call()
        self.out.append(ReadRecord(stream.id, stream.call))

    def refuse_unknown(self, stream: Stream) -> None:
        """One answer for what is not there and for what is another tenant's."""
        self.drop(stream)
        self.out.append(not_found(stream.client, stream.id))

    def differs(self, stream: Stream, digest: bytes) -> bool:
        """Whether a body under this id is another than the client's own."""
        request = stream.request
        return not stream.joined and request is not None and digest not in (b"", request.body_digest)

    def refuse_other(self, stream: Stream, digest: bytes) -> bool:
        """Ends a stream whose id belongs to another body."""
        if not self.differs(stream, digest):
            return False
        self.drop(stream)
        self.out.append(other_body(stream.client))
        return True

    def next_wake(self) -> float | None:
        while self.heap and not self.is_armed(self.heap[0]):
            heapq.heappop(self.heap)
        return self.heap[0][0] if self.heap else None

    def pop_due(self) -> Stream | None:
        """The next stream whose timer is due, disarmed."""
        while self.heap and self.heap[0][0] <= self.now:
            entry = heapq.heappop(self.heap)
            if self.is_armed(entry):
                stream = self.streams[entry[2]]
                stream.due = None
                return stream
        return None

    def check(self) -> None:
        assert len(self.streams) <= self.limits.len_max
        self.owners.check()
        self.cancels.check()
        for request_id, stream in self.streams.items():
            stream.check()
            assert stream.id == request_id
            if stream.owner is not None:
                assert request_id in self.owners.streams_of(stream.owner)


def other_body(client: int) -> Fail:
    return Fail(client, Code.ALREADY_EXISTS, "client_key: used before with another request")


def not_found(client: int, request_id: RequestId) -> Fail:
    return Fail(client, Code.NOT_FOUND, f"request_id: {request_id[:64]!r} is not known")

"""What the core's effects mean on the bus: one method per effect that completes, none of which ever raises
for what the world does. A call's outcome is an event; what is unclear is said to be unclear.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from chassis import log, subjects
from chassis.bus import Appended, Bus
from chassis.errors import (
    BusError,
    BusUnavailable,
    MessageTooLarge,
    StreamFull,
    SubjectTaken,
    WrongSequence,
)
from chassis.ids import GatewayId
from chassis.messages import BadMessage
from chassis.messages.ownership import Attach, AttachKind, build_to_batcher, parse_attach_answer
from chassis.messages.request import Record, build_record, build_request, parse_request
from chassis.record_log import last_record
from gateway.config import Config
from gateway.events import (
    AskOwner,
    AttachAnswered,
    CancelWritten,
    MessageRead,
    Publish,
    Published,
    PublishRequest,
    ReadMessage,
    ReadRecord,
    RecordRead,
    Tell,
    Write,
    WriteCancel,
)

Then = Callable[[Published], None]


class BusCalls:
    def __init__(
        self,
        bus: Bus,
        gateway: GatewayId,
        config: Config,
        wall_ns: Callable[[], int],
        vocab_size: Callable[[str], int | None],
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._config = config
        self._wall_ns = wall_ns
        self._vocab_size = vocab_size
        self._publishing = 0  # under way
        self._unpublished: deque[tuple[PublishRequest, Then]] = deque()
        self._calling = asyncio.Semaphore(config.calls_at_once_max)
        self.untold = 0  # words that the bus did not take

    def tell(self, effect: Tell) -> None:
        subject = subjects.batchers(effect.model) if effect.boot is None else subjects.owner(effect.boot)
        try:
            self._bus.publish(subject, build_to_batcher(effect.message))
        except BusError:
            self.untold += 1

    def publish(self, effect: PublishRequest, then: Then) -> None:
        """`then` is told what came of it. Of streams there are only so many, so only so many wait here."""
        self._unpublished.append((effect, then))
        self._publish_some()

    def _publish_some(self) -> None:
        while self._unpublished and self._publishing < self._config.publishes_at_once_max:
            effect, then = self._unpublished.popleft()
            request = effect.request
            self._publishing += 1
            try:
                self._bus.append_then(
                    subjects.request(request.model, request.priority, request.id),
                    build_request(request),
                    partial(self._published, effect, then),
                    message_id=request.id,
                    headers=_headers(request.trace_parent),
                    timeout_s=self._config.publish_timeout_s,
                )
            except BusError as error:
                self._publishing -= 1
                then(_published(effect, error))

    def _published(self, effect: PublishRequest, then: Then, found: Appended | BusError) -> None:
        self._publishing -= 1
        then(_published(effect, found))
        self._publish_some()

    async def read_record(self, effect: ReadRecord) -> RecordRead:
        record: Record | None = None
        seq, failed = 0, False
        async with self._calling:
            try:
                timeout_s = self._config.read_timeout_s
                record, seq = await last_record(self._bus, effect.request_id, timeout_s)
            except BusError:
                failed = True
        return RecordRead(_now(), effect.request_id, effect.call, record, seq, failed)

    async def read_message(self, effect: ReadMessage) -> MessageRead:
        request, age_s, failed = None, 0.0, False
        async with self._calling:
            try:
                subject = subjects.request_anywhere(effect.request_id)
                stored = await self._bus.last(subjects.REQUESTS, subject, self._config.read_timeout_s)
                if stored is not None:
                    request = parse_request(stored.data)
                    age_s = max(0.0, (self._wall_ns() - stored.stored_at_ns) / 1e9)
            except BusError:
                failed = True
            except BadMessage as error:  # somebody else's garbage under this subject: not a request
                log.warning("bad message", request_id=effect.request_id, error=str(error))
        vocab_size = self._vocab_size(request.model) if request is not None else None
        return MessageRead(_now(), effect.request_id, effect.call, request, age_s, vocab_size, failed)

    async def ask_owner(self, effect: AskOwner) -> AttachAnswered:
        kind: AttachKind | None = None
        attach = Attach(effect.request_id, effect.attempt, self._gateway, effect.held)
        async with self._calling:
            try:
                answer = await self._bus.request(
                    subjects.owner(effect.boot),
                    build_to_batcher(attach),
                    self._config.attach_answer_timeout_s,
                )
                kind = parse_attach_answer(answer.data)
            except (BusError, BadMessage):
                pass  # no answer: the record tells
        return AttachAnswered(_now(), effect.request_id, effect.call, kind)

    async def write_cancel(self, effect: WriteCancel) -> CancelWritten:
        async with self._calling:
            try:
                await self._bus.append(
                    subjects.result(effect.request_id),
                    build_record(effect.record),
                    expected_seq=effect.expected_seq,
                    timeout_s=self._config.publish_timeout_s,
                )
                outcome = Write.STORED
            except WrongSequence:
                outcome = Write.REFUSED
            except BusError:
                outcome = Write.UNKNOWN
        return CancelWritten(_now(), effect.request_id, effect.call, outcome)


def _published(effect: PublishRequest, found: Appended | BusError) -> Published:
    return Published(_now(), effect.request.id, effect.call, _outcome(found))


def _outcome(found: Appended | BusError) -> Publish:
    match found:
        case Appended(duplicate=duplicate):
            return Publish.DUPLICATE if duplicate else Publish.STORED
        case SubjectTaken():
            return Publish.TAKEN
        case StreamFull():
            return Publish.FULL
        case MessageTooLarge():
            return Publish.TOO_LARGE
        case BusUnavailable():
            return Publish.REFUSED
        case _:
            return Publish.TIMEOUT


def _now() -> float:
    return asyncio.get_running_loop().time()


def _headers(trace_parent: bytes) -> dict[str, str]:
    """W3C trace context, for whoever reads the stream with another client."""
    if len(trace_parent) != 25:
        return {}
    text = trace_parent.hex()
    return {"traceparent": f"00-{text[:32]}-{text[32:48]}-{text[48:]}"}

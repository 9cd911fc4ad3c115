"""Takes kept spans out of the ring: to the TRACES stream always, to a sink (OTLP) when there is one.

A request's spans go to its own subject, one segment per process and flush. A step belongs to many requests,
so its spans go once to the subject of its run of `STEPS_PER_SUBJECT` steps, where requests' `shoal.steps`
attributes point. Losing a segment loses an explanation, never an answer: all bounds here drop and count.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from chassis import log, subjects
from chassis.bus import Bus, Message, Subscription
from chassis.errors import BusError
from chassis.ids import Epoch, RequestId
from chassis.messages import BadMessage
from chassis.messages.trace import build_keep, build_segment, parse_keep
from chassis.trace import Span, SpanRing, parse_step_key

STEPS_PER_SUBJECT = 64
FLUSH_INTERVAL_S = 0.25
SEGMENT_SPANS_MAX = 32  # encoded in one go: a worker's loop must not stand still for long
PENDING_LEN_MAX = 4096  # segments that wait for the bus
SEGMENTS_AT_ONCE = 32  # of which the broker answers for the last
_KEYS_PER_WORD = 4096


class SpanSink(Protocol):
    async def send(self, spans: Sequence[Span]) -> None:
        """Best effort, bounded; never raises."""

    async def close(self) -> None: ...


class Exporter:
    """One per process; `run` beside the service, `flush` once more at the end."""

    def __init__(
        self, ring: SpanRing, bus: Bus, service: str, boot: str = "", sink: SpanSink | None = None
    ) -> None:
        self.dropped = 0  # segments
        self._ring = ring
        self._bus = bus
        self._service = service
        self._boot = boot
        self._sink = sink
        self._pending: deque[tuple[str, Sequence[Span]]] = deque()

    async def run(self) -> None:
        """Until cancelled."""
        subscription = await self._listen()
        try:
            while True:
                await asyncio.sleep(FLUSH_INTERVAL_S)
                await self.flush()
                self._ring.tick()
        finally:
            await subscription.close()

    async def flush(self) -> None:
        """Announces and stores what was kept; what the bus refuses now waits for the next flush."""
        spans, announce = self._ring.take()
        try:
            for start in range(0, len(announce), _KEYS_PER_WORD):
                self._bus.publish(subjects.KEEP, build_keep(announce[start : start + _KEYS_PER_WORD]))
        except BusError as error:
            log.debug("kept keys not announced", error=str(error))
        self._pending.extend(self._segments(spans))
        while len(self._pending) > PENDING_LEN_MAX:
            self._pending.popleft()
            self.dropped += 1
        if spans and self._sink is not None:
            await self._sink.send(spans)
        await self._store()

    async def close(self) -> None:
        if self._sink is not None:
            await self._sink.close()

    async def _listen(self) -> Subscription:
        while True:
            try:
                return await self._bus.subscribe(subjects.KEEP, self._on_keep)
            except BusError as error:
                log.warning("cannot hear which traces are kept", error=str(error))
            await asyncio.sleep(1.0)

    def _on_keep(self, message: Message) -> None:
        try:
            self._ring.keep_told(parse_keep(message.data))
        except BadMessage as error:
            log.warning("bad message dropped", subject=message.subject, error=str(error))

    def _segments(self, spans: Iterable[Span]) -> list[tuple[str, Sequence[Span]]]:
        by_subject: dict[str, list[Span]] = {}
        for span in spans:
            by_subject.setdefault(subject_of(span.key), []).append(span)
        return [
            (subject, some[start : start + SEGMENT_SPANS_MAX])
            for subject, some in by_subject.items()
            for start in range(0, len(some), SEGMENT_SPANS_MAX)
        ]

    async def _store(self) -> None:
        """In order; stops at the first trouble, and begins there again at the next flush: a reader may find a
        segment twice."""
        while self._pending and self._bus.connected:
            some = [self._pending.popleft() for _ in range(min(SEGMENTS_AT_ONCE, len(self._pending)))]
            if not await self._send(some):
                self._pending.extendleft(reversed(some))
                return

    async def _send(self, segments: Sequence[tuple[str, Sequence[Span]]]) -> bool:
        """The broker takes in order what comes over one connection: its answer to the last is for all."""
        *others, (last, last_spans) = segments
        try:
            for subject, spans in others:
                self._bus.publish(subject, build_segment(self._service, self._boot, spans))
            await self._bus.append(last, build_segment(self._service, self._boot, last_spans))
        except BusError as error:
            log.debug("trace segments not stored", subject=last, error=str(error))
            return False
        return True


def subject_of(key: str) -> str:
    """Where the spans of a key are stored."""
    step = parse_step_key(key)
    if step is None:
        return subjects.trace(RequestId(key))
    epoch, number = step
    return subjects.step_traces(Epoch(epoch), number // STEPS_PER_SUBJECT)

"""The bus over a JetStream broker, put together from its parts.

What carries the messages is a `Wire`; opening, closing and counting are its owner's. A broker that comes back
may have lost its store: what was ensured once is ensured again after every reconnect.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from chassis import jetstream as js
from chassis import log
from chassis.bus import (
    Appended,
    Appending,
    Delivery,
    Entry,
    EntryHandler,
    Handler,
    Headers,
    Lag,
    Message,
    Stored,
    Subscription,
)
from chassis.errors import BusError, LayoutDrift
from chassis.ids import AckToken
from chassis.jetstream_client import CALL_TIMEOUT_S, JetStream, Wire
from chassis.jetstream_objects import Objects
from chassis.jetstream_pull import Pulls
from chassis.jetstream_scan import scan
from chassis.jetstream_watch import Watches
from chassis.stream_layout import ConsumerLayout, StreamLayout
from chassis.subjects import LAYOUT, consumers

ENSURE_RETRY_S = 1.0


class JetStreamBus:
    """All of `chassis.bus.Bus` but `connected` and `close`."""

    def __init__(self, wire: Wire, replicas: int) -> None:
        self._wire = wire
        self._jetstream = JetStream(wire, replicas)
        self._pulls = Pulls(wire)
        self._watches = Watches(wire, self._jetstream)
        self._objects = Objects(wire, self._jetstream)
        self._streams: dict[str, StreamLayout] = {}  # what was ensured
        self._models: dict[str, None] = {}  # whose consumers were
        self._consumers: dict[str, ConsumerLayout] = {}  # others that were, by name
        self._reconnected = asyncio.Event()

    def on_connected(self) -> None:
        self._watches.on_connected()
        self._reconnected.set()

    async def keep_layout(self) -> None:
        """Belongs into a task of the bus."""
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            try:
                await self._jetstream.ensure_streams(tuple(self._streams.values()))
                for model in tuple(self._models):
                    await self._jetstream.ensure_consumers(consumers(model))
                await self._jetstream.ensure_consumers(tuple(self._consumers.values()))
            except LayoutDrift as error:
                log.error("the broker's layout has changed", error=str(error))
            except BusError as error:
                log.warning("the broker's layout is not sure", error=str(error))
                self._reconnected.set()
                await asyncio.sleep(ENSURE_RETRY_S)

    async def ensure_streams(self, layout: Sequence[StreamLayout] = LAYOUT) -> None:
        await self._jetstream.ensure_streams(layout)
        self._streams.update({stream.name: stream for stream in layout})

    async def ensure_consumers(self, model: str) -> None:
        await self._jetstream.ensure_consumers(consumers(model))
        self._models[model] = None

    async def ensure_consumer(self, layout: ConsumerLayout) -> None:
        await self._jetstream.ensure_consumers((layout,))
        self._consumers[layout.name] = layout

    def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        self._wire.send(subject, data, "", headers)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Message:
        return await self._wire.call(subject, data, timeout_s)

    def reply(self, to: Message, data: bytes) -> None:
        if to.reply is not None:
            self._wire.send(to.reply, data)

    async def subscribe(self, subject: str, handler: Handler, pending_len_max: int = 65536) -> Subscription:
        return await self._wire.listen(subject, handler)

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        expected_seq: int | None = None,
        message_id: str | None = None,
        headers: Headers | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Appended:
        return await self._jetstream.append(subject, data, expected_seq, message_id, headers, timeout_s)

    def append_then(
        self,
        subject: str,
        data: bytes,
        done: Appending,
        *,
        expected_seq: int | None = None,
        message_id: str | None = None,
        headers: Headers | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._jetstream.append_then(subject, data, done, expected_seq, message_id, headers, timeout_s)

    async def last(self, stream: str, subject: str, timeout_s: float = CALL_TIMEOUT_S) -> Stored | None:
        return await self._jetstream.last(stream, subject, timeout_s)

    async def fetch(self, stream: str, consumer: str, count_max: int, wait_s: float) -> Sequence[Delivery]:
        return await self._pulls.fetch(stream, consumer, count_max, wait_s)

    async def lag(self, stream: str, consumer: str) -> Lag:
        return await self._jetstream.lag(stream, consumer)

    def ack(self, token: AckToken) -> None:
        self._wire.send(token, js.ACK)

    def progress(self, token: AckToken) -> None:
        if self._wire.connected:  # kept until a reconnect it would be worthless, and one of thousands
            self._wire.send(token, js.PROGRESS)

    def nak(self, token: AckToken, delay_s: float = 0.0) -> None:
        self._wire.send(token, js.nak(delay_s))

    async def read(self, stream: str, subject: str, start_seq: int, count_max: int) -> Sequence[Stored]:
        return await self._jetstream.read(stream, subject, start_seq, count_max)

    def scan(self, stream: str, subject: str, since_ns: int = 0) -> AsyncGenerator[Stored, None]:
        return scan(self._wire, self._jetstream, stream, subject, since_ns)

    async def stored_bytes(self, stream: str) -> int:
        return await self._jetstream.stored_bytes(stream)

    async def purge(self, stream: str, subject: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        await self._jetstream.purge(stream, subject, timeout_s)

    async def entry(self, key: str) -> Entry | None:
        return await self._jetstream.entry(key)

    async def put_entry(self, key: str, value: bytes, revision: int | None = None) -> int:
        return await self._jetstream.put_entry(key, value, revision)

    async def delete_entry(self, key: str) -> None:
        await self._jetstream.delete_entry(key)

    async def watch(self, prefix: str, handler: EntryHandler) -> Subscription:
        return await self._watches.open(prefix, handler)

    async def entries(self, prefix: str) -> Sequence[Entry]:
        return await self._jetstream.entries(prefix)

    async def put_object(self, name: str, data: bytes) -> None:
        await self._objects.put(name, data)

    async def object(self, name: str) -> bytes | None:
        return await self._objects.get(name)

"""The bus of one process over a `MemoryBroker` (see there for the rules).

A handle stands for a process: `kill` takes it away as a SIGKILL would, `close` as a clean exit.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from chassis.agenda import Act
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
from chassis.errors import BusError, BusUnavailable, MessageTooLarge, NoResponders
from chassis.habits import Habits, Settle
from chassis.ids import AckToken
from chassis.memory_broker import (
    MESSAGE_LEN_MAX,
    CoreSubscription,
    MemoryBroker,
    Watch,
)
from chassis.memory_calls import CALL_TIMEOUT_S, Calls, resolve
from chassis.memory_deliveries import Waiter
from chassis.registry_view import RegistryView
from chassis.stream_layout import ConsumerLayout, StreamLayout
from chassis.subjects import LAYOUT, consumers

__all__ = ["Habits", "MemoryBroker", "MemoryBus"]

FETCH_GRACE_S = 0.25  # beyond `wait_s`, for an answer that is under way
UNSENT_LEN_MAX = 65536  # messages kept while disconnected


class MemoryBus:
    """Implements `chassis.bus.Bus`."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.name = name
        self.dropped = 0  # messages above the bound while disconnected
        self._broker = broker
        self._link = broker.connect(name, self._on_lost, self._on_connected)
        self._calls = Calls(broker, self._link, name)
        self._fetches: dict[int, asyncio.Future[list[Delivery] | None]] = {}
        self._strays: dict[tuple[str, str], deque[Delivery]] = {}
        self._watches: list[RegistryView] = []
        self._unsent: list[tuple[str, Message] | tuple[Settle, AckToken, float]] = []
        self._changed = asyncio.Event()
        self._serial = 0

    @property
    def connected(self) -> bool:
        return self._link.connected

    async def ensure_streams(self, layout: Sequence[StreamLayout] = LAYOUT) -> None:
        await self._calls.call("ensure", "", lambda: self._broker.ensure_streams(layout))

    async def ensure_consumers(self, model: str) -> None:
        def ensure() -> None:
            for wanted in consumers(model):
                self._broker.ensure_consumer(wanted)

        await self._calls.call("ensure", model, ensure)

    async def ensure_consumer(self, layout: ConsumerLayout) -> None:
        await self._calls.call("ensure", layout.name, lambda: self._broker.ensure_consumer(layout))

    # core messages

    def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        _check_size(data, headers)
        self._publish(Message(subject, data, None, headers or {}))

    def _publish(self, message: Message) -> None:
        if self._link.connected:
            self._broker.send(self._link, 0.0, lambda: self._broker.publish(self.name, message))
        else:
            self._keep(("publish", message))

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Message:
        _check_size(data, None)
        self._calls.require()
        self._serial += 1
        inbox = f"_INBOX.{self.name}.{self._serial}"
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        subscription = CoreSubscription(self._link, inbox, lambda message: resolve(answer, message))

        def ask() -> None:
            if self._broker.has_listener(subject):
                self._broker.publish(self.name, Message(subject, data, inbox, {}))
            else:
                refusal = NoResponders(subject)
                self._broker.answer(self._link, 0.0, lambda: resolve(answer, refusal))

        self._broker.subscribe(subscription)
        self._broker.send(self._link, 0.0, ask)
        try:
            reply = await self._calls.answered(answer, timeout_s, subject)
        finally:
            self._broker.unsubscribe(subscription)
        assert isinstance(reply, Message)
        return reply

    def reply(self, to: Message, data: bytes) -> None:
        if to.reply is not None:
            self.publish(to.reply, data)

    async def subscribe(self, subject: str, handler: Handler, pending_len_max: int = 65536) -> Subscription:
        subscription = CoreSubscription(self._link, subject, handler)
        await self._calls.call("subscribe", subject, lambda: self._broker.subscribe(subscription))
        return _Closing(lambda: self._broker.unsubscribe(subscription))

    # streams

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
        _check_size(data, headers)
        stored = self.name, subject, data, headers or {}, expected_seq, message_id
        append = partial(self._broker.append, *stored)
        return await self._calls.call("append", subject, append, timeout_s)

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
        _check_size(data, headers)
        stored = self.name, subject, data, headers or {}, expected_seq, message_id
        self._calls.then("append", subject, partial(self._broker.append, *stored), timeout_s, done)

    async def last(self, stream: str, subject: str, timeout_s: float = CALL_TIMEOUT_S) -> Stored | None:
        return await self._calls.call(
            "last", subject, lambda: self._broker.last(self.name, stream, subject), timeout_s
        )

    async def read(self, stream: str, subject: str, start_seq: int, count_max: int) -> Sequence[Stored]:
        return await self._calls.call(
            "read", subject, lambda: self._broker.read(stream, subject, start_seq, count_max)
        )

    async def scan(self, stream: str, subject: str, since_ns: int = 0) -> AsyncGenerator[Stored, None]:
        for stored in await self.read(stream, subject, 1, 1 << 62):
            if stored.stored_at_ns >= since_ns:
                yield stored

    async def stored_bytes(self, stream: str) -> int:
        return await self._calls.call("info", stream, lambda: self._broker.stream(stream).num_bytes)

    async def purge(self, stream: str, subject: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        await self._calls.call("purge", subject, lambda: self._broker.purge(stream, subject), timeout_s)

    async def fetch(self, stream: str, consumer: str, count_max: int, wait_s: float) -> Sequence[Delivery]:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while True:
            strays = self._strays.get((stream, consumer))
            if strays:
                return [strays.popleft() for _ in range(min(count_max, len(strays)))]
            await self._connected_until(until_s)
            found = await self._fetch_once(stream, consumer, count_max, until_s)
            if found is not None:
                return found

    async def _fetch_once(
        self, stream: str, consumer: str, count_max: int, until_s: float
    ) -> list[Delivery] | None:
        """None when the connection was lost meanwhile."""
        answer: asyncio.Future[list[Delivery] | None] = asyncio.get_running_loop().create_future()
        refusal: list[BusError] = []
        fate = self._broker.habits.call(self.name, "fetch", consumer)

        def arrived(deliveries: list[Delivery]) -> None:
            if not answer.done():
                answer.set_result(deliveries)
            elif deliveries:  # the fetch was cancelled or timed out: kept for the next
                self._strays.setdefault((stream, consumer), deque()).extend(deliveries)

        waiter = Waiter(self._link, count_max, until_s, fate.back_s, arrived)

        def ask() -> None:
            try:
                self._broker.deliveries.wait(stream, consumer, waiter)
            except BusError as error:
                refusal.append(error)
                self._broker.answer(self._link, fate.back_s, lambda: arrived([]))

        self._serial += 1
        serial = self._serial
        self._fetches[serial] = answer
        self._broker.send(self._link, fate.there_s, ask)
        try:
            async with asyncio.timeout_at(until_s + FETCH_GRACE_S):
                found = await answer
        except TimeoutError:
            return []
        finally:
            del self._fetches[serial]
        if refusal:
            raise refusal[0]
        return found

    async def lag(self, stream: str, consumer: str) -> Lag:
        return await self._calls.call("lag", consumer, lambda: self._broker.lag(stream, consumer))

    def ack(self, token: AckToken) -> None:
        self._settle(Settle.ACK, token)

    def progress(self, token: AckToken) -> None:
        self._settle(Settle.PROGRESS, token)

    def nak(self, token: AckToken, delay_s: float = 0.0) -> None:
        self._settle(Settle.NAK, token, delay_s)

    def _settle(self, kind: Settle, token: AckToken, delay_s: float = 0.0) -> None:
        if not self._link.connected:
            if kind is not Settle.PROGRESS:  # one that arrives after a reconnect is worthless
                self._keep((kind, token, delay_s))
            return
        subject = self._broker.deliveries.subject_of(token)
        travel_s = self._broker.habits.settle_delay_s(self.name, kind, subject)
        self._broker.send(self._link, travel_s, lambda: self._broker.deliveries.settle(kind, token, delay_s))

    # registry

    async def entry(self, key: str) -> Entry | None:
        return await self._calls.call("entry", key, lambda: self._broker.entry(self.name, key))

    async def put_entry(self, key: str, value: bytes, revision: int | None = None) -> int:
        _check_size(value, None)
        return await self._calls.call("put_entry", key, lambda: self._broker.put_entry(key, value, revision))

    async def delete_entry(self, key: str) -> None:
        await self._calls.call("delete_entry", key, lambda: self._broker.put_entry(key, None, None))

    async def entries(self, prefix: str) -> Sequence[Entry]:
        return await self._calls.call("entries", prefix, lambda: self._broker.entries(prefix))

    async def watch(self, prefix: str, handler: EntryHandler) -> Subscription:
        view = RegistryView(prefix, handler)
        watch = Watch(self._link, prefix, view.on_entry)

        def begin() -> tuple[list[Entry], int]:
            self._broker.watch(watch)
            return self._broker.entries(prefix), self._broker.registry_revision

        view.on_present(*await self._calls.call("watch", prefix, begin))
        self._watches.append(view)

        def end() -> None:
            view.closed = True
            self._broker.unwatch(watch)
            self._watches.remove(view)

        return _Closing(end)

    # objects

    async def put_object(self, name: str, data: bytes) -> None:
        await self._calls.call("put_object", name, lambda: self._broker.put_object(name, data))

    async def object(self, name: str) -> bytes | None:
        return await self._calls.call("object", name, lambda: self._broker.objects.get(name))

    # the handle

    async def close(self) -> None:
        if self._link.open:
            await asyncio.sleep(0)
            self.kill()

    def kill(self) -> None:
        """Nothing comes or goes any more; what was sent is still under way."""
        if not self._link.open:
            return
        self._broker.disconnect(self._link)
        gone = BusUnavailable(f"{self.name} is closed")
        self._calls.end(gone)
        for fetch in self._fetches.values():
            if not fetch.done():
                fetch.set_result(None)
        self._changed.set()

    def _on_lost(self) -> None:
        for fetch in self._fetches.values():
            if not fetch.done():
                fetch.set_result(None)
        self._changed.set()

    def _on_connected(self) -> None:
        self._changed.set()
        unsent, self._unsent = self._unsent, []
        for item in unsent:
            if len(item) == 2:
                self._publish(item[1])
            else:
                self._settle(*item)
        for view in self._watches:
            view.on_present(self._broker.entries(view.prefix), self._broker.registry_revision)

    def _keep(self, item: tuple[str, Message] | tuple[Settle, AckToken, float]) -> None:
        if self._link.open and len(self._unsent) < UNSENT_LEN_MAX:
            self._unsent.append(item)
        else:
            self.dropped += 1

    async def _connected_until(self, until_s: float) -> None:
        try:
            async with asyncio.timeout_at(until_s):
                while self._link.open and not self._link.connected:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        self._calls.require()


class _Closing:
    def __init__(self, close: Act) -> None:
        self._close = close
        self._closed = False

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close()


def _check_size(data: bytes, headers: Headers | None) -> None:
    size = len(data) + sum(len(k) + len(v) + 4 for k, v in (headers or {}).items())
    if size > MESSAGE_LEN_MAX:
        raise MessageTooLarge(f"{size} bytes, at most {MESSAGE_LEN_MAX}")

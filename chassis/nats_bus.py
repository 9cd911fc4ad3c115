"""The bus over NATS: the client library (`chassis/nats_client.py`), and what it needs around it.

Rules: the connection is sought for ever, anew even when the library gives up; what is sent and forgotten
leaves at once, or goes through one bounded queue, in order; what waits for an answer fails at once when the
connection is lost, and may still have happened, because the library sends its buffer after a reconnect.
Handlers are called as their messages are read.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import nats.errors
from nats.aio.subscription import Subscription as NatsSubscription

from chassis.answers import Answers, Done
from chassis.bus import Handler, Headers, Message, Subscription
from chassis.config import without_user
from chassis.errors import BusError, BusTimeout, BusUnavailable, MessageTooLarge
from chassis.jetstream_bus import JetStreamBus
from chassis.jetstream_client import CALL_TIMEOUT_S
from chassis.nats_access import access_of
from chassis.nats_client import LeanClient
from chassis.nats_wire import build_publish, size_of

CONNECT_TIMEOUT_S = 5.0
RECONNECT_WAIT_S = 0.1
PING_INTERVAL_S = 2
PINGS_UNANSWERED_MAX = 2
OUTGOING_BYTES_MAX = 32 << 20
LIBRARY_BYTES_MAX = 16 << 20
FLUSH_TIMEOUT_S = 1.0


@dataclass(slots=True)
class Counters:
    """Since the bus was opened."""

    dropped_out: int = 0  # messages above the outgoing bound, or unsent at the end
    errors: int = 0  # what the library reported
    disconnects: int = 0


@dataclass(frozen=True, slots=True)
class _Outgoing:
    subject: str
    data: bytes
    reply: str
    headers: dict[str, str] | None


class _Listener:
    def __init__(self, connection: "_Connection", subject: str, handler: Handler) -> None:
        self.subject = subject
        self.handler = handler
        self.subscription: NatsSubscription | None = None
        self._connection = connection

    async def close(self) -> None:
        await self._connection.unlisten(self)


class _Connection:
    """Implements `jetstream_client.Wire`."""

    def __init__(self, url: str, name: str) -> None:
        self.counters = Counters()
        self.on_connected: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self.last_error: Exception | None = None
        self._access = access_of(url, name)
        self._where = without_user(", ".join(self._access.servers))
        self._name = name
        self._client = LeanClient(self._deliver)
        self._up = False  # all subscriptions are known to the broker again
        self._closing = False
        self._inbox = ""
        self._serial = 0
        self._answers = Answers()
        self._listeners: dict[_Listener, None] = {}
        self._by_number: dict[int, _Listener] = {}  # of the subscription, at the client in use
        self._outgoing: deque[_Outgoing] = deque()
        self._outgoing_bytes = 0
        self._to_send = asyncio.Event()
        self._changed = asyncio.Event()
        self._given_up = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._client.is_connected and not self._closing

    # opening and losing

    async def dial(self, timeout_s: float) -> None:
        """Raises BusUnavailable."""
        client = LeanClient(self._deliver)
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    list(self._access.servers),
                    **self._access.options,
                    name=self._name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_lost,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    connect_timeout=2,
                    ping_interval=PING_INTERVAL_S,
                    max_outstanding_pings=PINGS_UNANSWERED_MAX,
                    pending_size=LIBRARY_BYTES_MAX,
                    flush_timeout=FLUSH_TIMEOUT_S,
                )
        except TimeoutError:
            await client.close()
            why = f": {self.last_error}" if self.last_error else ""
            raise BusUnavailable(f"no NATS server at {self._where} after {timeout_s:g} s{why}") from None
        except (nats.errors.Error, OSError, ValueError) as error:
            raise BusUnavailable(f"no NATS server at {self._where}: {error}") from error
        self._client = client
        self._by_number.clear()
        if not self._inbox:
            self._inbox = client.new_inbox()
            self._listeners[_Listener(self, f"{self._inbox}.*", self._answers.hear)] = None
        try:
            for listener in tuple(self._listeners):
                await self._subscribe(listener)
            await self._barrier()
        except (BusTimeout, BusUnavailable, nats.errors.Error) as error:
            await client.close()  # half of what is listened to would be worse than nothing
            raise BusUnavailable(f"no NATS server at {self._where}: {error}") from error
        self._on_up()

    async def keep_dialled(self) -> None:
        """Dials anew when the library has closed the connection for good, as it does on some errors."""
        while True:
            await self._given_up.wait()
            self._given_up.clear()
            while not self._client.is_connected:
                try:
                    await self.dial(CONNECT_TIMEOUT_S)
                except (BusUnavailable, BusTimeout):
                    await asyncio.sleep(RECONNECT_WAIT_S)

    def _on_up(self) -> None:
        self._up = True
        self._changed.set()
        self._to_send.set()
        self.on_connected()

    async def _on_reconnected(self) -> None:
        self._on_up()

    async def _on_lost(self) -> None:
        self._up = False
        self.counters.disconnects += 1
        self.on_lost()
        self._answers.lose()

    async def _on_closed(self) -> None:
        if not self._closing:
            await self._on_lost()
            self._given_up.set()

    async def _on_error(self, error: Exception) -> None:
        self.last_error = error
        self.counters.errors += 1

    async def connected_until(self, until_s: float) -> None:
        try:
            async with asyncio.timeout_at(until_s):
                while not self.connected and not self._closing:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        self._require()

    def _require(self) -> None:
        if not self.connected:
            raise BusUnavailable("closed" if self._closing else "not connected")

    async def close(self) -> None:
        self._closing = True
        self._changed.set()
        self._answers.lose()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                while self._outgoing and self._client.is_connected:
                    await self._send_one()
        except TimeoutError:
            pass
        self.counters.dropped_out += len(self._outgoing)
        self._outgoing.clear()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._client.close()
        except (TimeoutError, OSError, nats.errors.Error):
            pass

    # sending

    def send(self, subject: str, data: bytes, reply: str = "", headers: Headers | None = None) -> None:
        size = self._check_size(data, headers)
        if self._closing:
            raise BusUnavailable("closed")
        if self._outgoing_bytes + size > OUTGOING_BYTES_MAX:
            self.counters.dropped_out += 1
            return
        if not self._outgoing and self._write(subject, data, reply, headers):
            return
        self._outgoing.append(_Outgoing(subject, data, reply, dict(headers) if headers else None))
        self._outgoing_bytes += size
        self._to_send.set()

    def _write(self, subject: str, data: bytes, reply: str, headers: Headers | None) -> bool:
        """False: the library has to send it, behind what it holds."""
        if not self._up:
            return False
        message = build_publish(subject, data, reply, headers)
        return bool(message) and self._client.write(message)

    async def send_outgoing(self) -> None:
        """Hands queued messages to the library."""
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            while self._outgoing and self._client.is_connected:
                await self._send_one()

    async def _send_one(self) -> None:
        item = self._outgoing.popleft()
        self._outgoing_bytes -= size_of(item.data, item.headers)
        try:
            await self._client.publish(item.subject, item.data, item.reply, item.headers)
        except nats.errors.Error as error:
            self.last_error = error
            self.counters.dropped_out += 1

    def _check_size(self, data: bytes, headers: Headers | None) -> int:
        size, size_max = size_of(data, headers), self._client.max_payload
        if size > size_max:
            raise MessageTooLarge(f"{size} bytes, at most {size_max}")
        return size

    # answers

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    def _next_inbox(self) -> str:
        self._serial += 1
        return f"{self._inbox}.{self._serial}"

    async def call(
        self, subject: str, data: bytes, timeout_s: float, headers: Headers | None = None
    ) -> Message:
        self._check_size(data, headers)
        self._require()
        inbox = self._next_inbox()
        answer = self._answers.future(inbox, subject, timeout_s)
        try:
            if not self._write(subject, data, inbox, headers):
                async with asyncio.timeout(timeout_s):
                    await self._client.publish(subject, data, inbox, dict(headers) if headers else None)
            found = await answer
        except TimeoutError:
            raise BusTimeout(subject) from None
        except nats.errors.Error as error:
            raise BusUnavailable(f"{subject}: {error}") from error
        finally:
            self._answers.forget(inbox)
        if isinstance(found, BusError):
            raise found
        return found

    def ask(self, subject: str, data: bytes, timeout_s: float, headers: Headers | None, done: Done) -> None:
        self._check_size(data, headers)
        self._require()
        inbox = self._next_inbox()
        self._answers.expect(inbox, subject, timeout_s, done)
        if not self._write(subject, data, inbox, headers):
            self.send(subject, data, inbox, headers)

    # subscriptions

    async def listen(self, subject: str, handler: Handler) -> Subscription:
        self._require()
        listener = _Listener(self, subject, handler)
        self._listeners[listener] = None
        try:
            await self._subscribe(listener)
            await self._barrier()
        except BaseException:
            await self.unlisten(listener)
            raise
        return listener

    async def _subscribe(self, listener: _Listener) -> None:
        subscription = await self._client.subscribe(listener.subject)
        listener.subscription = subscription
        self._by_number[subscription._id] = listener

    def _deliver(self, number: int, message: Message) -> None:
        listener = self._by_number.get(number)
        if listener is None:
            return
        try:
            listener.handler(message)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"a handler of {listener.subject} raised", "exception": error}
            )

    async def _barrier(self) -> None:
        """Returns once the broker has read what was sent before."""
        inbox = self._next_inbox()
        answer = self._answers.future(inbox, "the broker", CALL_TIMEOUT_S)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._client.publish(inbox)
                found = await answer
        except TimeoutError:
            raise BusTimeout("no answer from the broker") from None
        except nats.errors.Error as error:
            raise BusUnavailable(str(error)) from error
        finally:
            self._answers.forget(inbox)
        if isinstance(found, BusError):
            raise found

    async def unlisten(self, listener: _Listener) -> None:
        self._listeners.pop(listener, None)
        subscription, listener.subscription = listener.subscription, None
        if subscription is not None:
            if self._by_number.get(subscription._id) is listener:
                del self._by_number[subscription._id]
            try:
                await subscription.unsubscribe()
            except nats.errors.Error:
                pass  # closed with its connection


class NatsBus(JetStreamBus):
    """Implements `chassis.bus.Bus`. Made by `connect`."""

    def __init__(self, url: str, name: str, replicas: int) -> None:
        self._connection = _Connection(url, name)
        super().__init__(self._connection, replicas)
        self._connection.on_connected = self.on_connected
        self._connection.on_lost = self._pulls.on_lost
        self._group = asyncio.TaskGroup()
        self._leave = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, timeout_s: float) -> None:
        """Raises BusUnavailable. A crash of the bus's own tasks cancels the task that opened it."""
        await self._connection.dial(timeout_s)
        await self._leave.enter_async_context(self._group)
        for what, work in (
            ("send", self._connection.send_outgoing()),
            ("dial", self._connection.keep_dialled()),
            ("watch", self._watches.run()),
            ("layout", self.keep_layout()),
        ):
            self._tasks.append(self._group.create_task(work, name=f"bus {what}"))

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def counters(self) -> Counters:
        return self._connection.counters

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await self._leave.aclose()
        if self.connected:
            for token in self._pulls.give_back():
                self.nak(token)
        await self._connection.close()


async def connect(
    url: str, name: str = "shoal", *, replicas: int = 1, timeout_s: float = CONNECT_TIMEOUT_S
) -> NatsBus:
    """A connected bus. `url`: as `chassis/nats_access.py` says. Raises BusUnavailable, saying why."""
    bus = NatsBus(url, name, replicas)
    await bus.open(timeout_s)
    return bus

"""Watching the registry: a short-lived ordered consumer per watch, made again whenever in doubt.

In doubt: after every reconnect, on a gap in the consumer's count, when its heartbeat is missing. Making it
again delivers what is present, so a watcher may be told the same entry twice, and is told what went.
"""

import asyncio

from chassis import jetstream as js
from chassis.bus import Entry, EntryHandler, Message, Stored, Subscription
from chassis.errors import BusError, BusTimeout
from chassis.jetstream_client import JetStream, Wire, as_entry
from chassis.registry_view import RegistryView
from chassis.subjects import REGISTRY, registry_filter

HEARTBEAT_S = 2.0
SILENCE_MAX_S = 5.0
BEGIN_TIMEOUT_S = 2.0
RETRY_S = 0.1
LOOK_S = 1.0


class Watches:
    """`run` belongs into a task of the bus."""

    def __init__(self, wire: Wire, jetstream: JetStream) -> None:
        self._wire = wire
        self._jetstream = jetstream
        self._watches: list[_Watch] = []
        self._connections = 0
        self._in_doubt = asyncio.Event()

    async def open(self, prefix: str, handler: EntryHandler) -> Subscription:
        watch = _Watch(prefix, handler, self)
        connections = self._connections
        try:
            await watch.begin(self._wire, self._jetstream)
        except BaseException:
            await watch.end()
            raise
        self._watches.append(watch)
        if self._connections != connections:
            watch.in_doubt = True
            self.doubt()
        return watch

    def doubt(self) -> None:
        self._in_doubt.set()

    def on_connected(self) -> None:
        self._connections += 1
        for watch in self._watches:
            watch.in_doubt = True
        self.doubt()

    def remove(self, watch: "_Watch") -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._in_doubt.wait()
            except TimeoutError:
                pass
            self._in_doubt.clear()
            for watch in list(self._watches):
                if watch.in_doubt or loop.time() - watch.heard_s > SILENCE_MAX_S:
                    try:
                        await watch.begin(self._wire, self._jetstream)
                    except BusError:
                        self._in_doubt.set()
            if self._in_doubt.is_set():
                await asyncio.sleep(RETRY_S)


class _Watch:
    def __init__(self, prefix: str, handler: EntryHandler, watches: Watches) -> None:
        self.in_doubt = False
        self.heard_s = 0.0
        self._prefix = prefix
        self._view = RegistryView(prefix, handler)
        self._watches = watches
        self._listener: Subscription | None = None
        self._serial = 0  # of the consumer's last delivery
        self._first: list[Entry] | None = None  # what is present, while it arrives
        self._whole: asyncio.Future[None] | None = None
        self._last_revision = 0

    async def begin(self, wire: Wire, jetstream: JetStream) -> None:
        """Makes the consumer and hands over what is present. Raises BusError; may be tried again."""
        await self.end()
        self.in_doubt = False
        try:
            await self._begin(wire, jetstream)
        except BusError:
            self.in_doubt = True
            raise

    async def _begin(self, wire: Wire, jetstream: JetStream) -> None:
        self.heard_s = asyncio.get_running_loop().time()
        self._serial, self._last_revision = 0, 0
        self._first = []
        self._whole = whole = asyncio.get_running_loop().create_future()
        inbox = wire.new_inbox()
        self._listener = await wire.listen(inbox, self._on_message)
        name = "w-" + inbox.rpartition(".")[2]
        config = js.watch_config(name, registry_filter(self._prefix), inbox, HEARTBEAT_S)
        answer = await jetstream.api(
            f"CONSUMER.CREATE.{REGISTRY}.{name}", {"stream_name": REGISTRY, "config": config}
        )
        if isinstance(answer, js.Refused):
            raise js.refusal(self._prefix, answer)
        if answer["num_pending"] + answer["delivered"]["consumer_seq"] == 0 and not whole.done():
            whole.set_result(None)
        try:
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                await whole
        except TimeoutError:
            raise BusTimeout(f"watching {self._prefix}") from None
        # Handed over here, or by the message that completed it: in either case before what follows.
        self._hand_over()

    def _hand_over(self) -> None:
        if self._first is not None:
            first, self._first = self._first, None
            self._view.on_present(first, self._last_revision)

    def _on_message(self, message: Message) -> None:
        self.heard_s = asyncio.get_running_loop().time()
        parts = js.parse_token(message.reply) if message.reply else None
        if parts is None:
            told = message.headers.get("Nats-Last-Consumer")
            if told is not None and told != str(self._serial):
                self._lose()
            return
        if parts.serial != self._serial + 1:
            self._lose()
            return
        self._serial = parts.serial
        self._last_revision = parts.seq
        stored = Stored(message.subject, message.data, parts.seq, parts.stored_at_ns, message.headers)
        self._on_entry(as_entry(stored))
        if parts.pending == 0 and self._whole is not None:
            self._hand_over()
            if not self._whole.done():
                self._whole.set_result(None)

    def _on_entry(self, entry: Entry) -> None:
        if not entry.key.startswith(self._prefix):
            return
        if self._first is None:
            self._view.on_entry(entry)
        elif entry.value is not None:
            self._first.append(entry)

    def _lose(self) -> None:
        self.in_doubt = True
        self._watches.doubt()

    async def end(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()  # without a listener the broker drops the consumer

    async def close(self) -> None:
        self._view.closed = True
        self._watches.remove(self)
        await self.end()

"""A message broker in memory, for the one-process deployment and the simulation.

Rules: one event loop, no threads, no chance of its own: the same calls at the same times do the same.
Nothing is delivered inside the call that caused it, and handlers run in the context of who subscribed, so
that they log as their own service. What is stored stays within the layout's bounds. Faults come from `Habits`
and from `stop`, `start`, `restart`, `cut`, `heal` and `redeliver`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, fields

from chassis.agenda import Act, Agenda
from chassis.bus import Appended, Entry, Handler, Headers, Lag, Message, Stored
from chassis.errors import BusError, BusUnavailable, LayoutDrift, StreamFull
from chassis.habits import Habits
from chassis.memory_deliveries import Deliveries, Link
from chassis.memory_streams import MemoryConsumer, MemoryStream
from chassis.stream_layout import ConsumerLayout, StreamLayout
from chassis.subjects import CARDS, LAYOUT, REGISTRY, matches, registry_key, registry_subject

MESSAGE_LEN_MAX = 1 << 20
HELD_LEN_MAX = 1 << 16  # of a handle, while it can't reach the broker
DELETED: Headers = {"KV-Operation": "DEL"}


@dataclass(slots=True, eq=False)
class CoreSubscription:
    link: Link
    subject: str
    handler: Handler
    context: Context = field(default_factory=copy_context)


@dataclass(slots=True, eq=False)
class Watch:
    link: Link
    prefix: str
    handler: Callable[[Entry], None]
    due_s: float = 0.0
    context: Context = field(default_factory=copy_context)


class MemoryBroker:
    def __init__(
        self,
        habits: Habits | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        layout: Sequence[StreamLayout] = LAYOUT,
    ) -> None:
        self.habits = habits or Habits()
        self.agenda = Agenda()
        self.up = True
        self.streams: dict[str, MemoryStream] = {}
        self.objects: dict[str, bytes] = {}
        self.links: dict[str, Link] = {}
        self.lost = 0  # messages that a handle sent while too many were waiting
        self._wall_ns = wall_ns
        self._subscriptions: dict[CoreSubscription, None] = {}
        self._watches: list[Watch] = []
        self.deliveries = Deliveries(self.habits, self.agenda, self.streams, self.answer)
        self.ensure_streams(layout)

    # handles

    def connect(self, name: str, on_lost: Act, on_connected: Act) -> Link:
        assert name not in self.links, f"two handles named {name}"
        link = self.links[name] = Link(name, on_lost, on_connected, connected=self.up)
        return link

    def disconnect(self, link: Link) -> None:
        """The handle is gone: nothing more goes to it; what it sent is still under way."""
        link.open = link.connected = False
        link.held.clear()
        del self.links[link.name]
        self._subscriptions = {s: None for s in self._subscriptions if s.link is not link}
        self._watches = [w for w in self._watches if w.link is not link]
        self.deliveries.forget(link)

    def send(self, link: Link, delay_s: float | None, act: Act) -> None:
        """From a handle to the broker."""
        if delay_s is None:
            return
        if not link.cut:
            self.agenda.after(delay_s, lambda: self._arrive(act))
        elif len(link.held) < HELD_LEN_MAX:
            link.held.append((delay_s, act))
        else:
            self.lost += 1

    def _arrive(self, act: Act) -> None:
        if self.up:
            act()

    def answer(self, link: Link, delay_s: float | None, act: Act) -> None:
        """From the broker to a handle."""
        if delay_s is not None:
            self.agenda.after(delay_s, lambda: act() if link.open and not link.cut else None)

    # faults

    def stop(self) -> None:
        """Dies. What it stored stays; what it was doing is gone."""
        assert self.up
        self.up = False
        self.deliveries.stop()
        for link in self.links.values():
            if link.open and not link.cut:
                self._lose(link)

    def start(self) -> None:
        assert not self.up
        self.up = True
        habit = self.habits.restart()
        for stream in self.streams.values():
            if habit.forgets_ids:
                stream.forget_ids()
        self.deliveries.start(habit)
        for link in self.links.values():
            self._reconnect(link)

    def restart(self, down_s: float) -> None:
        """Dies and is back after a while."""
        self.stop()
        self.agenda.after(down_s, self.start)

    def cut(self, name: str) -> None:
        """Parts a handle from the broker, both ways; it learns of it only later."""
        link = self.links.get(name)
        if link is None or link.cut:
            return
        link.cut = True
        link.cut_serial += 1
        serial = link.cut_serial

        def notice() -> None:
            if link.cut and link.cut_serial == serial and link.connected:
                self._lose(link)

        self.agenda.after(self.habits.cut_notice_s(name), notice)

    def heal(self, name: str) -> None:
        link = self.links.get(name)
        if link is None or not link.cut:
            return
        link.cut = False
        held, link.held = link.held, []
        if link.connected and not self.up:
            self._lose(link)
        if link.connected or self.habits.survives_cut(name):
            for delay_s, act in held:
                self.send(link, delay_s, act)
        if link.connected:
            link.on_connected()  # for what it missed
        else:
            self._reconnect(link)

    def redeliver(self, stream: str, consumer: str) -> None:
        """Gives everything held to the next who asks, as an election may."""
        self.streams[stream].consumers[consumer].take_back_all(forget_counts=False)
        self.deliveries.pump(stream, consumer)

    def _lose(self, link: Link) -> None:
        link.connected = False
        link.on_lost()

    def _reconnect(self, link: Link) -> None:
        def connected() -> None:
            if link.open and not link.cut and self.up and not link.connected:
                link.connected = True
                link.on_connected()

        self.agenda.after(self.habits.reconnect_delay_s(link.name), connected)

    # core messages

    def subscribe(self, subscription: CoreSubscription) -> None:
        self._subscriptions[subscription] = None

    def unsubscribe(self, subscription: CoreSubscription) -> None:
        self._subscriptions.pop(subscription, None)

    def has_listener(self, subject: str) -> bool:
        return any(s.link.connected and matches(s.subject, subject) for s in self._subscriptions)

    def publish(self, sender: str, message: Message) -> None:
        """Streams that take the subject store it too, as a broker does."""
        self._route(sender, message)
        stream = self._stream_of(message.subject)
        if stream is not None:
            try:
                self._store(stream, message.subject, message.data, message.headers, None, None)
            except BusError:
                return  # nobody waits for the answer

    def _route(self, sender: str, message: Message) -> None:
        for subscription in self._subscriptions:
            if subscription.link.connected and matches(subscription.subject, message.subject):
                delay_s = self.habits.core_delay_s(sender, subscription.link.name, message.subject)
                self.answer(subscription.link, delay_s, _delivery(self, subscription, message))

    def is_subscribed(self, subscription: CoreSubscription) -> bool:
        return subscription in self._subscriptions

    # streams

    def ensure_streams(self, layout: Sequence[StreamLayout]) -> None:
        for wanted in layout:
            stream = self.streams.get(wanted.name)
            if stream is None:
                self.streams[wanted.name] = MemoryStream(wanted)
            else:
                _compare(stream.layout, wanted)

    def ensure_consumer(self, wanted: ConsumerLayout) -> None:
        stream = self.stream(wanted.stream)
        consumer = stream.consumers.get(wanted.name)
        if consumer is None:
            stream.consumers[wanted.name] = MemoryConsumer(wanted, stream)
        else:
            _compare(consumer.layout, wanted)

    def stream(self, name: str) -> MemoryStream:
        stream = self.streams.get(name)
        if stream is None:
            raise BusUnavailable(f"no stream {name}")
        return stream

    def _stream_of(self, subject: str) -> MemoryStream | None:
        return next((s for s in self.streams.values() if s.takes(subject)), None)

    def append(
        self,
        sender: str,
        subject: str,
        data: bytes,
        headers: Headers,
        expected_seq: int | None,
        message_id: str | None,
    ) -> Appended:
        stream = self._stream_of(subject)
        if stream is None:
            raise BusUnavailable(f"no stream takes {subject}")
        self._route(sender, Message(subject, data, None, headers))
        return self._store(stream, subject, data, headers, expected_seq, message_id)

    def _store(
        self,
        stream: MemoryStream,
        subject: str,
        data: bytes,
        headers: Headers,
        expected_seq: int | None,
        message_id: str | None,
    ) -> Appended:
        now_s, wall_ns = self.now_s, self._wall_ns()
        appended = stream.append(subject, data, headers, expected_seq, message_id, now_s, wall_ns)
        if not appended.duplicate:
            for name in stream.consumers:
                self.deliveries.pump(stream.layout.name, name)
        return appended

    def last(self, sender: str, stream: str, subject: str) -> Stored | None:
        behind = self.habits.records_behind(sender, subject)
        return self.stream(stream).last(subject, self.now_s, behind)

    def read(self, stream: str, subject: str, start_seq: int, count_max: int) -> list[Stored]:
        return self.stream(stream).read(subject, start_seq, count_max, self.now_s)

    def lag(self, stream: str, consumer: str) -> Lag:
        """Raises BusUnavailable."""
        found = self.stream(stream).consumers.get(consumer)
        if found is None:
            raise BusUnavailable(f"no consumer {consumer} of {stream}")
        return found.lag

    def purge(self, stream: str, subject: str) -> None:
        self.stream(stream).purge(subject)

    # registry

    def put_entry(self, key: str, value: bytes | None, revision: int | None) -> int:
        stream, subject = self.streams[REGISTRY], registry_subject(key)
        if revision == 0:
            last = stream.last(subject, self.now_s)
            revision = last.seq if last is not None and last.headers == DELETED else 0
        headers = DELETED if value is None else {}
        seq = self._store(stream, subject, value or b"", headers, revision, None).seq
        entry = Entry(key, value, seq)
        for watch in self._watches:
            if key.startswith(watch.prefix) and watch.link.connected:
                self._tell(watch, entry)
        return seq

    def _tell(self, watch: Watch, entry: Entry) -> None:
        delay_s = self.habits.watch_delay_s(watch.link.name, entry.key)
        watch.due_s = max(watch.due_s, self.now_s + delay_s)
        self.answer(watch.link, watch.due_s - self.now_s, lambda: watch.context.run(watch.handler, entry))

    def entry(self, sender: str, key: str) -> Entry | None:
        subject = registry_subject(key)
        behind = self.habits.records_behind(sender, subject)
        stored = self.streams[REGISTRY].last(subject, self.now_s, behind)
        return None if stored is None or stored.headers == DELETED else _entry(stored)

    def entries(self, prefix: str) -> list[Entry]:
        stream = self.streams[REGISTRY]
        stream.expire(self.now_s)
        found = (_entry(stored) for stored in stream.messages() if stored.headers != DELETED)
        return [entry for entry in found if entry.key.startswith(prefix)]

    @property
    def registry_revision(self) -> int:
        return self.streams[REGISTRY].last_seq

    def watch(self, watch: Watch) -> None:
        self._watches.append(watch)

    def unwatch(self, watch: Watch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    # objects

    def put_object(self, name: str, data: bytes) -> None:
        """Raises StreamFull."""
        cards = self.streams.get(CARDS)
        bytes_max = cards.layout.bytes_max if cards is not None else 0
        others = sum(len(other) for key, other in self.objects.items() if key != name)
        if 0 < bytes_max < others + len(data):
            raise StreamFull(f"{CARDS}: {name} of {len(data)} bytes")
        self.objects[name] = data

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def check(self) -> None:
        """Invariants."""
        for stream in self.streams.values():
            stream.check()


def _entry(stored: Stored) -> Entry:
    return Entry(registry_key(stored.subject), stored.data, stored.seq)


def _delivery(broker: MemoryBroker, subscription: CoreSubscription, message: Message) -> Act:
    def deliver() -> None:
        if broker.is_subscribed(subscription):
            subscription.context.run(subscription.handler, message)

    return deliver


def _compare(found: StreamLayout | ConsumerLayout, wanted: StreamLayout | ConsumerLayout) -> None:
    different = [
        f"{f.name} is {getattr(found, f.name)!r}, not {getattr(wanted, f.name)!r}"
        for f in fields(wanted)
        if f.name != "loss_window" and getattr(found, f.name) != getattr(wanted, f.name)
    ]
    if different:
        raise LayoutDrift(f"{wanted.name}: " + "; ".join(different))

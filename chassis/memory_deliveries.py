"""Who gets which message of the memory broker, for how long, and what settles it.

A delivery is due again when its time is over; one reminder per delivery sees to that.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chassis.agenda import Act, Agenda
from chassis.bus import Delivery
from chassis.errors import BusUnavailable
from chassis.habits import Habits, Restart, Settle
from chassis.ids import AckToken
from chassis.jetstream import parse_token
from chassis.memory_streams import MemoryConsumer, MemoryStream


@dataclass(slots=True, eq=False)
class Link:
    """The broker's end of one handle."""

    name: str
    on_lost: Act
    on_connected: Act
    connected: bool = True  # as the handle sees it
    open: bool = True
    cut: bool = False
    cut_serial: int = 0
    held: list[tuple[float, Act]] = field(default_factory=list)  # sent into a partition


@dataclass(slots=True, eq=False)
class Waiter:
    """A fetch that waits for messages."""

    link: Link
    count_max: int
    until_s: float
    back_s: float | None
    answer: Callable[[list[Delivery]], None]


class Deliveries:
    """`send` carries an answer to a handle after a delay (None: lost)."""

    def __init__(
        self,
        habits: Habits,
        agenda: Agenda,
        streams: Mapping[str, MemoryStream],
        send: Callable[[Link, float | None, Act], None],
    ) -> None:
        self._habits = habits
        self._agenda = agenda
        self._streams = streams
        self._send = send
        self._up = True
        self._waiters: dict[tuple[str, str], list[Waiter]] = {}

    def stop(self) -> None:
        self._up = False
        self._waiters.clear()

    def start(self, habit: Restart) -> None:
        self._up = True
        for stream in self._streams.values():
            for consumer in stream.consumers.values():
                if habit.redelivers_all:
                    consumer.take_back_all(forget_counts=habit.forgets_counts)
                for seq in consumer.held():
                    consumer.progress(seq, _now_s() + consumer.layout.ack_wait_s)
                    self._remind(stream, consumer, seq)

    def forget(self, link: Link) -> None:
        for key, waiters in self._waiters.items():
            self._waiters[key] = [w for w in waiters if w.link is not link]

    def wait(self, stream: str, consumer: str, waiter: Waiter) -> None:
        """Answers the waiter once, with messages or, when its time is over, with none."""
        if stream not in self._streams or consumer not in self._streams[stream].consumers:
            raise BusUnavailable(f"no consumer {consumer} of {stream}")
        self._waiters.setdefault((stream, consumer), []).append(waiter)
        self.pump(stream, consumer)

        def expire() -> None:
            waiters = self._waiters.get((stream, consumer), [])
            if waiter in waiters:
                waiters.remove(waiter)
                self._send(waiter.link, waiter.back_s, lambda: waiter.answer([]))

        self._agenda.after(max(0.0, waiter.until_s - _now_s()), expire)

    def pump(self, stream_name: str, consumer_name: str) -> None:
        stream = self._streams[stream_name]
        consumer = stream.consumers[consumer_name]
        stream.expire(_now_s())
        waiters = self._waiters.get((stream_name, consumer_name), [])
        while waiters and consumer.has_any:
            deliveries = self._give(stream, consumer, waiters[0].count_max)
            if not deliveries:
                return
            waiter = waiters.pop(0)
            self._send(waiter.link, waiter.back_s, _answer(waiter, deliveries))

    def _give(self, stream: MemoryStream, consumer: MemoryConsumer, count_max: int) -> list[Delivery]:
        deliveries: list[Delivery] = []
        layout = consumer.layout
        while len(deliveries) < count_max:
            given = consumer.give(_now_s(), layout.ack_wait_s)
            if given is None:
                break
            message = given.message
            wait_s = self._habits.ack_wait_s(layout.name, message.subject, layout.ack_wait_s)
            consumer.progress(message.seq, _now_s() + wait_s)
            token = f"$JS.ACK.{layout.stream}.{layout.name}.{given.count}.{message.seq}.{given.serial}.0.0"
            count = self._habits.count(message.subject, given.count)
            deliveries.append(Delivery(message, AckToken(token), count))
            self._remind(stream, consumer, message.seq)
        return deliveries

    def _remind(self, stream: MemoryStream, consumer: MemoryConsumer, seq: int) -> None:
        serial = consumer.last_serial(seq)
        due_s = consumer.due_s(seq)
        assert due_s is not None

        def remind() -> None:
            if not self._up or consumer.last_serial(seq) != serial:
                return
            if consumer.take_back(seq, _now_s()):
                self.pump(stream.layout.name, consumer.layout.name)
            elif consumer.due_s(seq) is not None:
                self._remind(stream, consumer, seq)

        self._agenda.after(max(0.0, due_s - _now_s()), remind)

    def settle(self, kind: Settle, token: AckToken, delay_s: float) -> None:
        delivery = parse_token(token)
        stream = self._streams.get(delivery.stream) if delivery is not None else None
        if delivery is None or stream is None:
            return
        consumer, message = stream.consumers.get(delivery.consumer), stream.get(delivery.seq)
        if consumer is None or message is None:
            return
        seq = delivery.seq
        newest = consumer.last_serial(seq) == delivery.serial
        if not self._habits.honours(kind, message.subject, newest):
            return
        match kind:
            case Settle.ACK:
                consumer.ack(seq)
            case Settle.PROGRESS:
                consumer.progress(seq, _now_s() + consumer.layout.ack_wait_s)
            case Settle.NAK if consumer.due_s(seq) is not None:
                consumer.progress(seq, _now_s() + delay_s)
                if not consumer.take_back(seq, _now_s()):
                    self._remind(stream, consumer, seq)
        self.pump(delivery.stream, delivery.consumer)

    def subject_of(self, token: AckToken) -> str:
        """Of the message a token stands for; empty when it is not stored any more."""
        delivery = parse_token(token)
        stream = self._streams.get(delivery.stream) if delivery is not None else None
        message = stream.get(delivery.seq) if delivery is not None and stream is not None else None
        return "" if message is None else message.subject


def _answer(waiter: Waiter, deliveries: list[Delivery]) -> Act:
    return lambda: waiter.answer(deliveries)


def _now_s() -> float:
    return asyncio.get_running_loop().time()

"""Fetching from durable consumers: one short request at a time, asked again when the connection returns.

A request is answered as soon as anything is there. Deliveries name their stream's subject, not the request
they answer: all of a consumer's wait in one queue, and what comes after its fetch was cancelled or timed
out goes to the next fetch, while the broker still counts it as ours.
"""

import asyncio
from collections import deque

from chassis import jetstream as js
from chassis.bus import Delivery, Message, Stored, Subscription
from chassis.errors import BusUnavailable
from chassis.ids import AckToken
from chassis.jetstream_client import Wire
from chassis.stream_layout import ACK_WAIT_S

GRACE_S = 0.25  # beyond the time the broker was told, for its answer to travel
RETRY_S = 0.02
ARRIVED_MAX = 65536
FRESH_S = ACK_WAIT_S / 2

_NO_MESSAGES = "404"
_TIMED_OUT = "408"
_REQUESTS_PENDING = "Requests Pending"
_LOST = "lost"


class Pulls:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._channels: dict[tuple[str, str], _Channel] = {}

    async def fetch(self, stream: str, consumer: str, count_max: int, wait_s: float) -> list[Delivery]:
        """Raises BusUnavailable when at the end there was no broker, stream or consumer."""
        assert count_max > 0
        until_s = asyncio.get_running_loop().time() + wait_s
        channel = self._channels.get((stream, consumer))
        if channel is None:
            channel = self._channels[stream, consumer] = _Channel(self._wire, stream, consumer)
        return await channel.fetch(count_max, until_s)

    def on_lost(self) -> None:
        for channel in self._channels.values():
            channel.end(_LOST)

    def give_back(self) -> list[AckToken]:
        """Tokens of what nobody will fetch any more."""
        return [token for channel in self._channels.values() for token in channel.give_back()]


class _Channel:
    """All that comes from one consumer."""

    def __init__(self, wire: Wire, stream: str, consumer: str) -> None:
        self._wire = wire
        self._place = f"{stream}.{consumer}"
        self._listener: Subscription | None = None
        self._inbox = wire.new_inbox()
        self._arrived: deque[tuple[float, Delivery]] = deque(maxlen=ARRIVED_MAX)
        self._turn = asyncio.Lock()  # one request at a time
        self._serial = 0
        self._wanted = 0  # until the request is answered in full
        self._status = ""  # the broker's last word on the request
        self._description = ""
        self._ended = asyncio.Event()

    async def fetch(self, count_max: int, until_s: float) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        async with self._turn:
            while True:
                if found := self._take(count_max):
                    return found
                await self._wire.connected_until(until_s)
                if self._listener is None:
                    self._listener = await self._wire.listen(f"{self._inbox}.*", self._on_message)
                await self._ask(count_max, until_s)
                if found := self._take(count_max):
                    return found
                over = self._status == _TIMED_OUT and self._description != _REQUESTS_PENDING
                if over or loop.time() >= until_s:
                    if self._status not in ("", _LOST, _NO_MESSAGES, _TIMED_OUT):
                        raise BusUnavailable(f"{self._place}: {self._description} ({self._status})")
                    return []
                await asyncio.sleep(min(RETRY_S, max(0.0, until_s - loop.time())))

    async def _ask(self, count_max: int, until_s: float) -> None:
        """One request, until the broker has answered it, its time is over or the connection is lost."""
        wait_s = max(0.0, until_s - asyncio.get_running_loop().time())
        request: dict[str, int | bool] = {"batch": count_max, "no_wait": True}
        if wait_s >= 0.001:
            request["expires"] = round(wait_s * 1e9)  # with no_wait: until anything is there
        self._serial += 1
        self._wanted, self._status, self._description = count_max, "", ""
        self._ended.clear()
        api = f"{js.API}.CONSUMER.MSG.NEXT.{self._place}"
        self._wire.send(api, js.encode(request), f"{self._inbox}.{self._serial}")
        try:
            async with asyncio.timeout(wait_s + GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            pass

    def _on_message(self, message: Message) -> None:
        delivery = as_delivery(message)
        if delivery is not None:
            self._arrived.append((asyncio.get_running_loop().time(), delivery))
            self._wanted -= 1
            if self._wanted == 0:
                self._ended.set()
        elif message.subject == f"{self._inbox}.{self._serial}":
            status = message.headers.get("Status", "")
            if status != "100":
                self.end(status, message.headers.get("Description", "no consumer, or no leader"))

    def end(self, status: str, description: str = "") -> None:
        self._status, self._description = status, description
        self._ended.set()

    def _take(self, count_max: int) -> list[Delivery]:
        """Without those that the broker may have given to another meanwhile."""
        taken: list[Delivery] = []
        fresh_s = asyncio.get_running_loop().time() - FRESH_S
        while self._arrived and len(taken) < count_max:
            at_s, delivery = self._arrived.popleft()
            if at_s > fresh_s:
                taken.append(delivery)
        return taken

    def give_back(self) -> list[AckToken]:
        tokens = [delivery.token for _, delivery in self._arrived]
        self._arrived.clear()
        return tokens


def as_delivery(message: Message) -> Delivery | None:
    """None when it is a status of the broker."""
    parts = js.parse_token(message.reply) if message.reply else None
    if parts is None or message.reply is None:
        return None
    stored = Stored(message.subject, message.data, parts.seq, parts.stored_at_ns, message.headers)
    return Delivery(stored, AckToken(message.reply), parts.count)

"""Chunks to gateways: one per gateway and turn, numbered, and an empty one where it would get quiet.

Gateways that attach anew may be owed whole outputs in one turn: what would be too much for a message of the
bus goes out as several chunks.
"""

from collections.abc import Iterable, Sequence

from batcher.events import SendParts
from chassis import log, subjects
from chassis.bus import Bus
from chassis.errors import BusError
from chassis.ids import BootId, GatewayId
from chassis.messages.chunk import Chunk, Finish, Part, build_chunk

BEAT_S = 0.2
GATEWAYS_MAX = 4096  # numbers are remembered of so many
CHUNK_BYTES_MAX = 1 << 19  # of a chunk with several parts; the broker takes twice as much


class Outbox:
    def __init__(self, boot: BootId, bus: Bus) -> None:
        self._boot = boot
        self._bus = bus
        self._open: dict[GatewayId, tuple[list[Part], list[Finish]]] = {}
        self._numbers: dict[GatewayId, int] = {}
        self._sent_at: dict[GatewayId, float] = {}

    def add(self, effect: SendParts) -> None:
        parts, finishes = self._open.setdefault(effect.gateway, ([], []))
        parts.extend(effect.parts)
        finishes.extend(effect.finishes)

    def flush(self, now: float, served: Iterable[GatewayId]) -> None:
        """Sends what gathered; a served gateway that heard nothing for `BEAT_S` gets an empty chunk."""
        for gateway in served:
            if gateway not in self._open and now >= self._beat_at(gateway):
                self._open[gateway] = ([], [])
        for gateway, (parts, finishes) in self._open.items():
            self._send(gateway, parts, finishes)
            self._sent_at[gateway] = now
        self._open.clear()
        while len(self._numbers) > GATEWAYS_MAX:
            oldest = next(iter(self._numbers))
            del self._numbers[oldest], self._sent_at[oldest]

    def _send(self, gateway: GatewayId, parts: Sequence[Part], finishes: Sequence[Finish]) -> None:
        number = self._numbers.get(gateway, 0) + 1
        data = build_chunk(Chunk(self._boot, number, tuple(parts), tuple(finishes)))
        if len(data) > CHUNK_BYTES_MAX and len(parts) > 1:
            half = len(parts) // 2
            self._send(gateway, parts[:half], ())
            self._send(gateway, parts[half:], finishes)
            return
        if len(data) > CHUNK_BYTES_MAX and any(part.logprobs for part in parts):
            self._send(gateway, [part._replace(logprobs=()) for part in parts], finishes)  # ids come first
            return
        self._numbers.pop(gateway, None)
        self._numbers[gateway] = number  # the most recently used stands last
        try:
            self._bus.publish(subjects.chunks(gateway), data)
        except BusError as error:  # as if it were lost on its way: the terminal record tells the gateway
            log.error("chunk not sent", gateway=gateway, error=str(error))

    def next_beat(self, served: Iterable[GatewayId]) -> float | None:
        return min(map(self._beat_at, served), default=None)

    def _beat_at(self, gateway: GatewayId) -> float:
        return self._sent_at.get(gateway, -BEAT_S) + BEAT_S

"""Chunks to gateways: one per gateway and turn, numbered, and an empty one where it would get quiet."""

from collections.abc import Iterable

from batcher.events import SendParts
from chassis import subjects
from chassis.bus import Bus
from chassis.ids import BootId, GatewayId
from chassis.messages.request import Chunk, Finish, Part, build_chunk

BEAT_S = 0.2
GATEWAYS_MAX = 4096  # numbers are remembered of so many


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
            number = self._numbers.pop(gateway, 0) + 1
            self._numbers[gateway] = number  # the most recently used stands last
            self._sent_at[gateway] = now
            chunk = Chunk(self._boot, number, tuple(parts), tuple(finishes))
            self._bus.publish(subjects.chunks(gateway), build_chunk(chunk))
        self._open.clear()
        while len(self._numbers) > GATEWAYS_MAX:
            oldest = next(iter(self._numbers))
            del self._numbers[oldest], self._sent_at[oldest]

    def next_beat(self, served: Iterable[GatewayId]) -> float | None:
        return min(map(self._beat_at, served), default=None)

    def _beat_at(self, gateway: GatewayId) -> float:
        return self._sent_at.get(gateway, -BEAT_S) + BEAT_S

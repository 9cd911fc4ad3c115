"""Pure. Which batcher serves which of our streams, and when each was last heard.

A live batcher with open parts sends each gateway a chunk at least every 200 ms, so silence and lost chunks
are facts about a batcher, judged once for all its streams.
"""

from dataclasses import dataclass, field

from chassis.ids import BootId, RequestId

SILENCE_S = 1.0
DOUBT_S = 0.05  # for a chunk that was overtaken to arrive
OWNERS_LEN_MAX = 256


@dataclass(slots=True)
class Owner:
    heard_at: float
    asked_at: float = float("-inf")
    last_number: int = 0
    doubt_at: float | None = None  # when to act on a lost chunk
    streams: dict[RequestId, None] = field(default_factory=dict)

    @property
    def due(self) -> float:
        silence = max(self.heard_at, self.asked_at) + SILENCE_S
        return silence if self.doubt_at is None else min(silence, self.doubt_at)


class Owners:
    def __init__(self) -> None:
        self._owners: dict[BootId, Owner] = {}

    def hear_chunk(self, now: float, boot: BootId, number: int) -> bool:
        """Notes a chunk; True when those between it and the last one are missing."""
        owner = self._owners.get(boot)
        if owner is None:
            owner = self._add(now, boot)
            owner.last_number = number
            return False
        owner.heard_at = now
        lost = number > owner.last_number + 1
        if number > owner.last_number or number == 1:
            owner.last_number = number
        if lost and owner.streams:
            owner.doubt_at = now + DOUBT_S
        return lost

    def hear(self, now: float, boot: BootId) -> None:
        owner = self._owners.get(boot)
        if owner is not None:
            owner.heard_at = now

    def move(self, now: float, request_id: RequestId, before: BootId | None, after: BootId | None) -> None:
        if before is not None and before in self._owners:
            self._owners[before].streams.pop(request_id, None)
        if after is not None:
            owner = self._owners.get(after) or self._add(now, after)
            if not owner.streams:
                owner.heard_at = max(owner.heard_at, now)  # it owed us no chunks until now
            owner.streams[request_id] = None

    def silent(self, now: float) -> list[tuple[BootId, list[RequestId]]]:
        """Batchers gone quiet, or of whom a chunk was lost, with their streams; each once a second."""
        found = []
        for boot, owner in self._owners.items():
            if owner.streams and owner.due <= now:
                owner.asked_at, owner.doubt_at = now, None
                found.append((boot, list(owner.streams)))
        return found

    def next_timer(self) -> float | None:
        return min([owner.due for owner in self._owners.values() if owner.streams], default=None)

    def streams_of(self, boot: BootId) -> list[RequestId]:
        owner = self._owners.get(boot)
        return list(owner.streams) if owner is not None else []

    def check(self) -> None:
        # more than the bound only while every one of them serves a stream
        assert len(self._owners) <= OWNERS_LEN_MAX or all(o.streams for o in self._owners.values())

    def _add(self, now: float, boot: BootId) -> Owner:
        if len(self._owners) >= OWNERS_LEN_MAX:
            idle = [b for b, owner in self._owners.items() if not owner.streams]
            for b in idle[: len(idle) // 2 + 1]:
                del self._owners[b]
        owner = self._owners[boot] = Owner(now)
        return owner

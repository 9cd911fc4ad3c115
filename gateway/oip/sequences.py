"""Sequences of requests that carry a conversation on: each sees what was said before it, as one text.

They live at the gateway that began them, in memory, while they are used: Triton's clients, too, send a
sequence to one server. Its requests take turns in the order they came. What fails leaves no trace in it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from chassis.errors import Code, Status
from gateway.admission import invalid
from gateway.oip.asking import Wanted

SEQUENCES_MAX = 1024
TEXT_MAX = 64 * 1024 * 1024  # characters of all
TURNS_MAX = 64  # that wait in one sequence
RETRY_MS = 1000


@dataclass(slots=True)
class Sequence:
    text: str = ""
    used_s: float = 0.0
    turns: int = 0  # under way and waiting
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sequences:
    """`owner` of each: whoever may go on with it. Idle for `idle_s`, a sequence is forgotten."""

    def __init__(self, idle_s: float, now: Callable[[], float]) -> None:
        self._idle_s = idle_s
        self._now = now
        self._by: dict[tuple[Hashable, str], Sequence] = {}

    def __len__(self) -> int:
        return len(self._by)

    @asynccontextmanager
    async def turn(self, owner: Hashable, wanted: Wanted) -> AsyncIterator[Sequence]:
        """Raises Status."""
        key = owner, wanted.id
        sequence = self._found(key, wanted)
        sequence.turns += 1
        try:
            async with sequence.lock:
                if wanted.start:
                    sequence.text = ""
                yield sequence
                if wanted.end and self._by.get(key) is sequence:
                    del self._by[key]
        finally:
            sequence.turns -= 1
            sequence.used_s = self._now()
            if not sequence.text and not sequence.turns and self._by.get(key) is sequence:
                del self._by[key]  # it never began

    def _found(self, key: tuple[Hashable, str], wanted: Wanted) -> Sequence:
        now = self._now()
        for other in [k for k, s in self._by.items() if not s.turns and now - s.used_s > self._idle_s]:
            del self._by[other]
        sequence = self._by.get(key)
        if sequence is None:
            if not wanted.start:
                raise invalid(
                    f"sequence_id: {wanted.id!r} is not under way here; its first says sequence_start"
                )
            if len(self._by) >= SEQUENCES_MAX:
                raise Status(Code.UNAVAILABLE, f"sequence_id: {SEQUENCES_MAX} are under way", RETRY_MS)
            if sum(len(s.text) for s in self._by.values()) > TEXT_MAX:
                raise Status(
                    Code.UNAVAILABLE, "sequence_id: those under way fill the memory for them", RETRY_MS
                )
            sequence = self._by[key] = Sequence(used_s=now)
        if sequence.turns >= TURNS_MAX:
            raise Status(Code.UNAVAILABLE, f"sequence_id: {TURNS_MAX} requests of it wait", RETRY_MS)
        return sequence

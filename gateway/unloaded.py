"""Models that somebody unloaded: every gateway refuses requests for them until they are loaded again.

Each is a registry entry, which all gateways that know of it write again before it expires, so that it lives
as long as any gateway does. They write over the revision they saw, so that one who did not hear yet of a load
can't undo it.
"""

from chassis import subjects
from chassis.bus import Bus, Entry, Subscription
from chassis.errors import WrongSequence

UNLOADED_MAX = 1024
PRESENT = b"1"


class Unloaded:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._revisions: dict[str, int] = {}  # by key

    def __contains__(self, model: str) -> bool:
        return subjects.unloaded_key(model) in self._revisions

    async def watch(self) -> Subscription:
        """Raises BusError."""
        return await self._bus.watch(subjects.UNLOADED, self._on_entry)

    async def refresh(self) -> None:
        """What expired is forgotten, and what is left lives on. Raises BusError."""
        before = set(self._revisions)
        present = {
            e.key: e.revision for e in await self._bus.entries(subjects.UNLOADED) if e.value is not None
        }
        for key in before - present.keys():
            self._revisions.pop(key, None)
        for key, revision in present.items():
            try:
                self._revisions[key] = await self._bus.put_entry(key, PRESENT, revision)
            except WrongSequence:  # loaded by now, or another gateway was first
                self._take(key, await self._bus.entry(key))

    async def add(self, model: str) -> None:
        """Raises BusError."""
        key = subjects.unloaded_key(model)
        self._revisions[key] = await self._bus.put_entry(key, PRESENT)

    async def remove(self, model: str) -> None:
        """Raises BusError."""
        key = subjects.unloaded_key(model)
        await self._bus.delete_entry(key)
        self._revisions.pop(key, None)

    def _on_entry(self, entry: Entry) -> None:
        self._take(entry.key, entry)

    def _take(self, key: str, entry: Entry | None) -> None:
        if entry is None or entry.value is None:
            self._revisions.pop(key, None)
        elif key in self._revisions or len(self._revisions) < UNLOADED_MAX:
            self._revisions[key] = entry.revision

"""What an autoscaler told last, in the registry: one that starts anew goes on from there.

Else it would tell only those that take work by then, and so take away what is still coming. The entry expires
with the registry's others, half a minute after the last word.
"""

import asyncio
from collections.abc import Callable

import orjson

from chassis import log, subjects
from chassis.bus import Bus
from chassis.errors import BusError
from chassis.insist import insist
from shoal.autoscale.policy import PIPELINES_MAX

LOOK_S = 0.5


class Memory:
    def __init__(self, bus: Bus, model: str) -> None:
        self._bus = bus
        self._key = subjects.scale_key(model)

    async def recall(self) -> int:
        """Pipelines; 0: nobody told of late, or something that is no number of them."""
        entry = await insist(lambda: self._bus.entry(self._key))
        try:
            told = orjson.loads(entry.value or b"") if entry is not None else None
        except orjson.JSONDecodeError:
            told = None
        count = told.get("pipelines") if isinstance(told, dict) else None
        return count if type(count) is int and 0 <= count <= PIPELINES_MAX else 0

    async def keep(self, count: Callable[[], int | None]) -> None:
        """Until cancelled. None: nothing is told yet."""
        loop = asyncio.get_running_loop()
        kept, kept_at = None, float("-inf")
        while True:
            now = count()
            if now is not None and (now != kept or loop.time() >= kept_at + subjects.REGISTRY_REFRESH_S):
                try:
                    await self._bus.put_entry(self._key, orjson.dumps({"pipelines": now}))
                    kept, kept_at = now, loop.time()
                except BusError as error:
                    log.debug("what is told is not kept", error=str(error))
            await asyncio.sleep(LOOK_S)

"""Pulls requests off the bus, the highest priority first, never more than there is room for.

One long poll per priority; a lower one starts only when every higher one waits in vain. When the waiting
room is full nobody polls. Each poll may bring a little more than the room that was left when it began:
the bound is exceeded by at most one delivery per priority.
"""

import asyncio
from collections.abc import Callable

from batcher.config import Config
from chassis import log, subjects
from chassis.bus import Bus, Delivery
from chassis.errors import BusError

QUIET_AFTER_S = 0.02  # a poll that found nothing at once
BACKOFF_S = 0.1


class Fetcher:
    def __init__(self, config: Config, bus: Bus, model: str, deliver: Callable[[Delivery], None]) -> None:
        self._config = config
        self._bus = bus
        self._model = model
        self._deliver = deliver
        self._room = 0
        self._open = False
        self._stopped = False
        self._quiet = [False] * len(subjects.PRIORITIES)
        self._changed = asyncio.Event()

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        return [group.create_task(self._fetch(p), name=f"fetch {p}") for p in subjects.PRIORITIES]

    def room(self, accepting: bool, room: int) -> None:
        """What the core says after each turn."""
        self._room = room
        if accepting != self._open or (accepting and room > 0):
            self._open = accepting
            self._changed.set()

    def stop(self) -> None:
        self._stopped = True

    def _may_fetch(self, priority: int) -> bool:
        return self._open and not self._stopped and self._room > 0 and all(self._quiet[:priority])

    async def _fetch(self, priority: int) -> None:
        loop = asyncio.get_running_loop()
        consumer = subjects.consumer_name(self._model, priority)
        while True:
            while not self._may_fetch(priority):
                self._changed.clear()
                await self._changed.wait()
            share = self._room // len(subjects.PRIORITIES)
            count = max(1, min(self._config.fetch_len_max, share))
            quiet = loop.call_later(QUIET_AFTER_S, self._is_quiet, priority)
            try:
                deliveries = await self._bus.fetch(
                    subjects.REQUESTS, consumer, count, self._config.fetch_wait_ms / 1000
                )
            except BusError as error:
                log.debug("fetch failed", priority=priority, error=str(error))
                await asyncio.sleep(BACKOFF_S)
                continue
            finally:
                quiet.cancel()
            self._quiet[priority] = len(deliveries) < count
            self._room -= len(deliveries)
            for delivery in deliveries:
                self._deliver(delivery)
            self._changed.set()

    def _is_quiet(self, priority: int) -> None:
        self._quiet[priority] = True
        self._changed.set()

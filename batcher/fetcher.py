"""Pulls requests off the bus, the highest priority first, never more than there is room for.

One long poll per priority; `turns` says when, so that no priority starves in the stream. When the waiting
room is full nobody polls. Polls under way are counted, but each may ask for one at least: the bound of the
waiting room is exceeded by at most one delivery per priority.
"""

import asyncio
from collections.abc import Callable

from batcher.config import Config
from batcher.turns import Turns
from chassis import log, subjects
from chassis.bus import Bus, Delivery
from chassis.errors import BusError

QUIET_AFTER_S = 0.02  # a poll that found nothing at once
GATHER_S = 0.003  # while there is enough to do: a poll costs as much as several requests
BACKOFF_S = 0.1


class Fetcher:
    def __init__(self, config: Config, bus: Bus, model: str, deliver: Callable[[Delivery], None]) -> None:
        self._config = config
        self._bus = bus
        self._model = model
        self._deliver = deliver
        self._room = 0
        self._open = False
        self._busy = False
        self._stopped = False
        self._turns = Turns(len(subjects.PRIORITIES), config.overtakes_max, config.fetch_len_max)
        self._changed = asyncio.Event()

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        return [group.create_task(self._fetch(p), name=f"fetch {p}") for p in subjects.PRIORITIES]

    def room(self, accepting: bool, room: int, busy: bool = False) -> None:
        """What the core says after each turn. `busy`: nobody waits for what comes next."""
        self._room, self._busy = room, busy
        if accepting and not self._open:
            self._turns.begin()
        if accepting != self._open or (accepting and room > 0):
            self._open = accepting
            self._changed.set()

    def stop(self) -> None:
        self._stopped = True

    def _ask(self, priority: int) -> int:
        return self._turns.ask(priority, self._room) if self._open and not self._stopped else 0

    async def _fetch(self, priority: int) -> None:
        loop = asyncio.get_running_loop()
        consumer = subjects.consumer_name(self._model, priority)
        while True:
            while not (count := self._ask(priority)):
                self._changed.clear()
                await self._changed.wait()
            quiet = loop.call_later(QUIET_AFTER_S, self._is_quiet, priority)
            try:
                deliveries = await self._bus.fetch(
                    subjects.REQUESTS, consumer, count, self._config.fetch_wait_ms / 1000
                )
            except BusError as error:
                log.debug("fetch failed", priority=priority, error=str(error))
                self._turns.failed(priority)
                self._changed.set()
                await asyncio.sleep(BACKOFF_S)
                continue
            finally:
                quiet.cancel()
            self._turns.came(priority, len(deliveries))
            self._room -= len(deliveries)
            for delivery in deliveries:
                self._deliver(delivery)
            self._changed.set()
            if self._busy and 0 < len(deliveries) < count:
                await asyncio.sleep(GATHER_S)

    def _is_quiet(self, priority: int) -> None:
        self._turns.is_quiet(priority)
        self._changed.set()

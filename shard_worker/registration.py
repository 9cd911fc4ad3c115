"""What the registry says of a worker and its model, kept true while the worker lives.

The model's card lies in the object store before anything names it. Entries expire, so everything is
written again every few seconds, and at once when the worker becomes free or taken.
"""

import asyncio
from collections.abc import Callable

from chassis import log, subjects
from chassis.bus import Bus
from chassis.errors import BusError
from chassis.messages.card import card_digest
from chassis.messages.registry import ModelEntry, WorkerEntry, build_model, build_worker
from shard_worker.executor import ModelFacts

RETRY_S = 0.5


class Registration:
    def __init__(self, bus: Bus, facts: ModelFacts, entry: Callable[[], WorkerEntry]) -> None:
        self._bus = bus
        self._facts = facts
        self._entry = entry
        self._changed = asyncio.Event()
        self._published = False
        self._revision = 0  # of the entry written last
        self._writing = asyncio.Lock()  # what was withdrawn is not written again
        self._withdrawn = False

    def changed(self) -> None:
        self._changed.set()

    async def keep(self) -> None:
        while not self._withdrawn:
            self._changed.clear()
            wait_s = subjects.REGISTRY_REFRESH_S
            try:
                async with self._writing:
                    await self._write()
            except BusError as error:
                log.warning("registry out of reach", error=str(error))
                self._published = False  # a bus that comes back may have forgotten
                wait_s = RETRY_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def withdraw(self) -> None:
        """Nobody shall choose this worker any more; lasts."""
        self._withdrawn = True
        self._changed.set()
        try:
            async with self._writing:
                await self._bus.delete_entry(subjects.worker_key(self._entry().boot))
        except BusError as error:
            log.warning("entry not withdrawn; it expires", error=str(error))

    async def _write(self) -> None:
        if self._withdrawn:
            return
        facts = self._facts
        digest = card_digest(facts.card)
        if not self._published:
            name = subjects.card_object(digest)
            if await self._bus.object(name) is None:
                await self._bus.put_object(name, facts.card)
            self._published = True
        await self._bus.put_entry(
            subjects.model_key(facts.name), build_model(ModelEntry(facts.name, facts.digest, digest))
        )
        entry = self._entry()
        revision = await self._bus.put_entry(subjects.worker_key(entry.boot), build_worker(entry))
        if revision <= self._revision:  # revisions only grow: this is another store, without the card
            self._published = False
            self._changed.set()
        self._revision = revision

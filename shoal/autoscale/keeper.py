"""Keeps a model known while no worker of it lives, so that its first request can wake one.

Workers write their model's entry into the registry, and it expires with the last of them: gateways would then
refuse its requests. It is written again over the revision that was seen, and only while nobody else does, so
that a worker that comes with another version of the model is never undone. Its card lies in the object store
for good.
"""

import asyncio

from chassis import log, subjects
from chassis.bus import Bus, Entry, Subscription
from chassis.errors import BusError, WrongSequence

QUIET_S = 1.5 * subjects.REGISTRY_REFRESH_S  # after which no worker writes it


class Keeper:
    def __init__(self, bus: Bus, model: str) -> None:
        self._bus = bus
        self._key = subjects.model_key(model)
        self._value: bytes | None = None
        self._revision = 0
        self._seen_at = 0.0

    @property
    def knows(self) -> bool:
        """It has seen an entry, hence can keep it."""
        return self._value is not None

    async def watch(self) -> Subscription:
        """Raises BusError."""
        return await self._bus.watch(self._key, self._seen)

    def _seen(self, entry: Entry) -> None:
        if entry.key == self._key and entry.value is not None:
            self._value, self._revision = entry.value, entry.revision
            self._seen_at = asyncio.get_running_loop().time()

    async def keep(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.1, self._seen_at + QUIET_S - loop.time()) if self.knows else QUIET_S)
            if self._value is None or loop.time() < self._seen_at + QUIET_S:
                continue
            try:
                await self._write(self._value)
            except BusError as error:
                log.debug("model not kept", key=self._key, error=str(error))
                await asyncio.sleep(1.0)

    async def _write(self, value: bytes) -> None:
        try:
            revision = await self._bus.put_entry(self._key, value, self._revision)
        except WrongSequence:  # expired, or a worker came
            entry = await self._bus.entry(self._key)
            if entry is not None:
                self._seen(entry)
                return
            revision = await self._bus.put_entry(self._key, value, 0)
        self._revision, self._seen_at = revision, asyncio.get_running_loop().time()

"""What the registry says of a worker and its model, kept true while the worker lives.

The model's card lies in the object store before anything names it. Entries expire, so everything is
written again every few seconds, and at once when the worker becomes free or taken.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from chassis import log, subjects
from chassis.bus import Bus, Entry
from chassis.config import ConfigError
from chassis.errors import BusError
from chassis.messages import BadMessage
from chassis.messages.card import card_digest
from chassis.messages.registry import (
    ModelEntry,
    WorkerEntry,
    build_model,
    build_worker,
    parse_worker,
)
from shard_worker.executor import ModelFacts

RETRY_S = 0.5


class Registration:
    def __init__(
        self, bus: Bus, facts: ModelFacts, entry: Callable[[], WorkerEntry], same_model: bool = False
    ) -> None:
        """`same_model`: nothing is written where others serve a model of this name that differs."""
        self._bus = bus
        self._facts = facts
        self._entry = entry
        self._changed = asyncio.Event()
        self._published = False
        self._revision = 0  # of the entry written last
        self._writing = asyncio.Lock()  # what was withdrawn is not written again
        self._withdrawn = False
        self._unchecked = same_model

    def take(self, facts: ModelFacts) -> None:
        """Instead of those it was made with, before anything is written."""
        self._facts = facts

    def changed(self) -> None:
        self._changed.set()

    async def keep(self) -> None:
        """Raises ConfigError."""
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
        if self._unchecked:
            await self._check_same()
            self._unchecked = False
        digest = card_digest(facts.card)
        if not self._published:
            name = subjects.card_object(digest)
            if await self._bus.object(name) is None:
                await self._bus.put_object(name, facts.card)
            self._published = True
        await self._bus.put_entry(
            subjects.model_key(facts.name), build_model(ModelEntry(facts.name, facts.digest, digest))
        )
        entry = replace(
            self._entry(),
            layer_us=facts.layer_us,
            layers_max=facts.layers_max,
            head_layers=facts.head_layers,
            ends_layers=facts.ends_layers,
        )
        revision = await self._bus.put_entry(subjects.worker_key(entry.boot), build_worker(entry))
        if revision <= self._revision:  # revisions only grow: this is another store, without the card
            self._published = False
            self._changed.set()
        self._revision = revision

    async def _check_same(self) -> None:
        """Raises ConfigError where somebody serves a model of this name that is not this one: there can be no
        pipeline with both. BusError."""
        facts = self._facts
        for entry in await self._bus.entries(subjects.WORKERS):
            other = _parsed(entry)
            if other is not None and other.model == facts.name and other.model_digest != facts.digest:
                raise ConfigError(
                    f"model {facts.name} differs from the one others serve: {facts.digest[:12]} here, "
                    f"{other.model_digest[:12]} at {other.rpc_address}: other weights, dtype, quantize or "
                    f"context_len. Who is gone is remembered for {subjects.REGISTRY_TTL_S:g} s"
                )


def _parsed(entry: Entry) -> WorkerEntry | None:
    try:
        return parse_worker(entry.value) if entry.value is not None else None
    except BadMessage:
        return None

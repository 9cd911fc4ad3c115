"""The batcher's side of the registry: its model's card, the workers there are, epochs, its own entry."""

import asyncio
import hashlib
from collections.abc import Callable

from batcher.formation import EpochWritten, WorkersSeen, WriteEpoch
from chassis import log, subjects
from chassis.bus import Bus, Entry
from chassis.errors import BusError
from chassis.ids import BootId, Epoch
from chassis.insist import insist
from chassis.messages import BadMessage
from chassis.messages.card import ModelCard, parse_card
from chassis.messages.registry import (
    BatcherEntry,
    EpochEntry,
    ModelEntry,
    WorkerEntry,
    build_batcher,
    build_epoch,
    parse_epoch,
    parse_model,
    parse_worker,
)

CARD_RETRY_S = 0.2
WITHDRAWN_MAX = 64


class ModelGone(Exception):
    """Nobody serves this batcher's model any more, but others do another: it has to start anew."""


class Served:
    """The models there are, as the registry says, that have a worker: an entry outlives who wrote it."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._models: dict[str, ModelEntry] = {}
        self._workers: dict[str, tuple[str, str]] = {}  # name and digest of its model, by key
        self.changed = asyncio.Event()

    def on_model(self, entry: Entry) -> None:
        try:
            model = None if entry.value is None else parse_model(entry.value)
        except BadMessage:
            return
        self._models.pop(entry.key, None)
        if model is not None and self._wanted in ("", model.name):
            self._models[entry.key] = model
            self.changed.set()

    def on_worker(self, entry: Entry) -> None:
        self._workers.pop(entry.key, None)
        try:
            worker = None if entry.value is None else parse_worker(entry.value)
        except BadMessage:
            return
        if worker is not None:
            self._workers[entry.key] = (worker.model, worker.model_digest)
            self.changed.set()

    def cards(self) -> list[str]:
        """Their digests."""
        workers = set(self._workers.values())
        return [m.card_digest for m in self._models.values() if (m.name, m.digest) in workers]


async def await_card(bus: Bus, wanted: str) -> ModelCard:
    """The card of the model named (empty: of any), as soon as a worker has published it."""
    served = Served(wanted)
    models = await insist(lambda: bus.watch(subjects.MODELS, served.on_model))
    workers = await insist(lambda: bus.watch(subjects.WORKERS, served.on_worker))
    try:
        while True:
            await served.changed.wait()
            served.changed.clear()
            cards = served.cards()
            for digest in cards:
                try:
                    data = await bus.object(subjects.card_object(digest))
                    if data is not None and hashlib.sha256(data).hexdigest() == digest:
                        return parse_card(data)
                except (BusError, BadMessage) as error:
                    log.warning("a card can't be read", digest=digest, error=str(error))
            if cards:
                log.warning("a model without its card", digests=cards)
                served.changed.set()
                await asyncio.sleep(CARD_RETRY_S)
    finally:
        await models.close()
        await workers.close()


class Members:
    def __init__(
        self,
        bus: Bus,
        boot: BootId,
        card: ModelCard,
        tell: Callable[[WorkersSeen | EpochWritten], None],
        count: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._boot = boot
        self._card = card
        self._tell = tell
        self._count = count
        self._workers: dict[str, tuple[WorkerEntry, int]] = {}
        self._withdrawn: dict[str, None] = {}  # boots, the newest last
        self._others: dict[str, str] = {}  # names of the models of workers that have another

    # ---- workers

    async def watch(self) -> None:
        await self._bus.watch(subjects.WORKERS, self._seen)

    def _seen(self, entry: Entry) -> None:
        boot = entry.key.removeprefix(subjects.WORKERS)
        if entry.value is None:
            self._others.pop(boot, None)
            if self._workers.pop(boot, None) is None:
                return
            self._withdrawn[boot] = None
            if len(self._withdrawn) > WITHDRAWN_MAX:
                del self._withdrawn[next(iter(self._withdrawn))]
        else:
            try:
                worker = parse_worker(entry.value)
            except BadMessage:
                self._count("garbage entry")
                return
            if worker.model != self._card.name or worker.model_digest != self._card.model_digest:
                self._others[boot] = worker.model
                return
            if worker.num_layers != self._card.num_layers or worker.boot != boot:
                self._count("garbage entry")
                return
            self._workers[boot] = (worker, entry.revision)
        self._tell_workers()

    async def review(self) -> None:
        """Expiry is not announced: forget whom the registry no longer names."""
        try:
            entries = await self._bus.entries(subjects.WORKERS)
        except BusError:
            return
        present = {e.key.removeprefix(subjects.WORKERS) for e in entries}
        self._others = {boot: model for boot, model in self._others.items() if boot in present}
        gone = [boot for boot in self._workers if boot not in present]
        for boot in gone:
            del self._workers[boot]
        if gone:
            self._tell_workers()

    def gone(self, any_other: bool) -> bool:
        """Whether no worker has this model, but some have another of its name, or any other."""
        others = set(self._others.values())
        return not self._workers and (bool(others) if any_other else self._card.name in others)

    def _tell_workers(self) -> None:
        now = asyncio.get_running_loop().time()
        self._tell(WorkersSeen(now, tuple(self._workers.values()), tuple(self._withdrawn)))

    # ---- epochs

    async def write_epoch(self, effect: WriteEpoch) -> None:
        epoch: Epoch | None = None
        try:
            epoch = await self._next_epoch(effect.above)
        except BusError as error:
            log.warning("no epoch", error=str(error))
        self._tell(EpochWritten(asyncio.get_running_loop().time(), effect.call, epoch))

    async def _next_epoch(self, above: Epoch) -> Epoch:
        """Raises WrongSequence when another batcher was quicker.

        An expired key is made anew first: its revision is above all that the bucket ever gave, so the
        epoch is new even to those who remember.
        """
        key = subjects.epoch_key(self._card.name)
        entry = await self._bus.entry(key)
        if entry is None or entry.value is None:
            value = build_epoch(EpochEntry(above, self._boot))
            known, revision = above, await self._bus.put_entry(key, value, entry.revision if entry else 0)
        else:
            known, revision = self._known_epoch(entry.value) or above, entry.revision
        epoch = Epoch(max(above, known, revision) + 1)
        await self._bus.put_entry(key, build_epoch(EpochEntry(epoch, self._boot)), revision)
        return epoch

    def _known_epoch(self, value: bytes) -> Epoch | None:
        """None for nonsense, which then counts no more than an expired key."""
        try:
            return parse_epoch(value).epoch
        except BadMessage:
            self._count("garbage entry")
            return None

    # ---- its own entry

    async def put_entry(self, entry: BatcherEntry) -> None:
        try:
            await self._bus.put_entry(subjects.batcher_key(self._boot), build_batcher(entry))
        except BusError as error:
            log.warning("registry entry not written", error=str(error))

    async def delete_entry(self) -> None:
        try:
            await self._bus.delete_entry(subjects.batcher_key(self._boot))
        except BusError as error:
            log.warning("registry entry not deleted", error=str(error))

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
    WorkerEntry,
    build_batcher,
    build_epoch,
    parse_epoch,
    parse_model,
    parse_worker,
)

CARD_RETRY_S = 0.2
WITHDRAWN_MAX = 64


async def await_card(bus: Bus, wanted: str) -> ModelCard:
    """The card of the model named (empty: of any), as soon as a worker has published it."""
    seen = asyncio.Event()
    digests: dict[str, str] = {}

    def on_entry(entry: Entry) -> None:
        if entry.value is None:
            return
        try:
            model = parse_model(entry.value)
        except BadMessage:
            return
        if not wanted or model.name == wanted:
            digests[model.name] = model.card_digest
            seen.set()

    watching = await insist(lambda: bus.watch(subjects.MODELS, on_entry))
    try:
        while True:
            await seen.wait()
            for digest in list(digests.values()):
                try:
                    data = await bus.object(subjects.card_object(digest))
                    if data is not None and hashlib.sha256(data).hexdigest() == digest:
                        return parse_card(data)
                except (BusError, BadMessage) as error:
                    log.warning("a card can't be read", digest=digest, error=str(error))
            log.warning("a model without its card", models=sorted(digests))
            await asyncio.sleep(CARD_RETRY_S)
    finally:
        await watching.close()


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

    # ---- workers

    async def watch(self) -> None:
        await self._bus.watch(subjects.WORKERS, self._seen)

    def _seen(self, entry: Entry) -> None:
        boot = entry.key.removeprefix(subjects.WORKERS)
        if entry.value is None:
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
        gone = [boot for boot in self._workers if boot not in present]
        for boot in gone:
            del self._workers[boot]
        if gone:
            self._tell_workers()

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

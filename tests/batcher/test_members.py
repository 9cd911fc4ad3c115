"""The registry as a batcher uses it: a new epoch whatever stands there."""

import asyncio
from dataclasses import replace

import pytest

from batcher.formation import EpochWritten, WorkersSeen, WriteEpoch
from batcher.members import Members
from chassis import subjects
from chassis.ids import BootId, Epoch
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.card import parse_card
from chassis.messages.registry import EpochEntry, WorkerEntry, build_epoch, build_worker, parse_epoch
from shard_worker.fake_model import FakeConfig, card_of
from tests.sim.loop import run

CARD = parse_card(card_of(FakeConfig()))
KEY = subjects.epoch_key(CARD.name)


def test_who_has_other_layers_or_another_name_is_no_worker_of_the_model() -> None:
    """Layers are shared out by what their entries say: a lie would have the batcher count for hours."""
    fits = WorkerEntry(
        BootId("w"), CARD.name, CARD.model_digest, "r", "tcp://h:1", Epoch(0), True, CARD.num_layers
    )
    odd = {"w": fits, "x": replace(fits, boot=BootId("x"), num_layers=1 << 31), "y": fits}

    async def main() -> None:
        broker = MemoryBroker()
        bus = MemoryBus(broker, "batcher")
        await bus.ensure_streams()
        told: list[EpochWritten | WorkersSeen] = []
        counts: list[str] = []
        await Members(bus, BootId("me"), CARD, told.append, counts.append).watch()
        for name, entry in odd.items():
            await bus.put_entry(subjects.worker_key(BootId(name)), build_worker(entry))
        await asyncio.sleep(1)
        assert counts == ["garbage entry"] * 2
        (seen,) = told
        assert isinstance(seen, WorkersSeen) and [worker for worker, _ in seen.workers] == [fits]
        bus.kill()

    run(main())


@pytest.mark.parametrize(
    "found",
    [
        None,
        build_epoch(EpochEntry(Epoch(40), BootId("b"))),
        b"",
        b"\xff" * 20,
        build_epoch(EpochEntry(Epoch((1 << 64) - 1), BootId("b"))),
    ],
)
def test_an_epoch_is_new_whatever_stands_there(found: bytes | None) -> None:
    """What a stranger wrote would otherwise keep pipelines from forming until it expires."""

    async def main() -> None:
        broker = MemoryBroker()
        bus = MemoryBus(broker, "batcher")
        await bus.ensure_streams()
        if found is not None:
            await bus.put_entry(KEY, found)
        told: list[EpochWritten | WorkersSeen] = []
        counts: list[str] = []
        members = Members(bus, BootId("me"), CARD, told.append, counts.append)
        await members.write_epoch(WriteEpoch(1, Epoch(7)))
        (written,) = told
        assert isinstance(written, EpochWritten) and written.epoch is not None
        assert (41 if found == build_epoch(EpochEntry(Epoch(40), BootId("b"))) else 8) == written.epoch
        entry = await bus.entry(KEY)
        assert entry is not None and entry.value is not None
        assert parse_epoch(entry.value) == EpochEntry(written.epoch, BootId("me"))
        bus.kill()

    run(main())

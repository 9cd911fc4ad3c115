"""What a worker keeps written, over a bus that forgets."""

import asyncio
from dataclasses import replace

import pytest

from chassis.bus import Entry
from chassis.config import ConfigError
from chassis.ids import BootId, Epoch
from chassis.messages.registry import WorkerEntry, build_worker
from shard_worker.executor import ModelFacts
from shard_worker.fake_model import FakeConfig, FakeExecutor
from shard_worker.registration import Registration
from tests.sim.loop import run


class Bus:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.revision = 0

    def lose_everything(self) -> None:
        self.objects.clear()
        self.revision = 0

    async def object(self, name: str) -> bytes | None:
        return self.objects.get(name)

    async def put_object(self, name: str, data: bytes) -> None:
        self.objects[name] = data

    async def put_entry(self, key: str, value: bytes) -> int:
        self.revision += 1
        return self.revision


def test_the_card_is_published_again_in_a_store_that_lost_it() -> None:
    """Entries are refreshed anyhow; without the card they name a model that nobody new can serve."""

    async def main() -> None:
        bus = Bus()
        facts: ModelFacts = FakeExecutor(FakeConfig(), lambda seconds: None).facts
        entry = WorkerEntry(BootId("w"), facts.name, facts.digest, "rpc", "mem", Epoch(0), True, 4)
        registration = Registration(bus, facts, lambda: entry)  # type: ignore[arg-type]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            keeping = group.create_task(registration.keep())
            await asyncio.sleep(12)
            assert list(bus.objects.values()) == [facts.card]
            bus.lose_everything()  # between two refreshes: no write fails
            await asyncio.sleep(6)
            assert list(bus.objects.values()) == [facts.card]
            before = bus.revision
            await asyncio.sleep(4.9)
            assert bus.revision - before <= 2, "written no more often than before"
            keeping.cancel()

    run(main())


class Others(Bus):
    """Where another worker is."""

    def __init__(self, *entries: WorkerEntry) -> None:
        super().__init__()
        self._entries = entries

    async def entries(self, prefix: str) -> list[Entry]:
        garbage = Entry(f"{prefix}x", b"\xff\xff", 1)
        return [garbage, *(Entry(f"{prefix}{e.boot}", build_worker(e), 2) for e in self._entries)]


@pytest.mark.parametrize(
    ("digest", "name", "same_model", "refused"),
    [
        ("other", "fake", True, True),
        ("other", "fake", False, False),
        ("other", "m", True, False),
        ("", "", True, False),
    ],
)
def test_a_model_that_differs_from_the_one_others_serve(
    digest: str, name: str, same_model: bool, refused: bool
) -> None:
    async def main() -> None:
        facts: ModelFacts = FakeExecutor(FakeConfig(), lambda seconds: None).facts
        entry = WorkerEntry(BootId("w"), facts.name, facts.digest, "rpc", "mem", Epoch(0), True, 4)
        other = replace(
            entry, boot=BootId("o"), model=name or facts.name, model_digest=digest or facts.digest
        )
        bus = Others(other)
        registration = Registration(bus, facts, lambda: entry, same_model)  # type: ignore[arg-type]
        keeping = asyncio.create_task(registration.keep())
        await asyncio.sleep(1.0)
        assert keeping.done() is refused
        assert bool(bus.revision) is not refused
        if refused:
            with pytest.raises(ConfigError, match=r"model fake differs from the one others serve: .* at rpc"):
                await keeping
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    run(main())

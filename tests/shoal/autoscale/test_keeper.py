"""The model's entry while it has no workers, on the virtual clock."""

import asyncio

from chassis import subjects
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.registry import ModelEntry, build_model, parse_model
from shoal.autoscale.keeper import Keeper
from tests.sim.loop import run

KEY = subjects.model_key("m")
FIRST, SECOND = (build_model(ModelEntry("m", "d", card)) for card in ("c1", "c2"))


async def card_of(bus: MemoryBus) -> str | None:
    entry = await bus.entry(KEY)
    return None if entry is None or entry.value is None else parse_model(entry.value).card_digest


def test_it_outlives_its_workers_and_never_undoes_a_new_one() -> None:
    async def main() -> None:
        broker = MemoryBroker()
        bus, worker = MemoryBus(broker, "keeper"), MemoryBus(broker, "worker")
        await bus.ensure_streams()
        keeper = Keeper(bus, "m")
        await keeper.watch()
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(keeper.keep())
            assert not keeper.knows
            await worker.put_entry(KEY, FIRST)
            await asyncio.sleep(200)
            assert keeper.knows and await card_of(worker) == "c1"
            await worker.put_entry(KEY, SECOND)
            await asyncio.sleep(200)
            assert await card_of(worker) == "c2"
            broker.stop()  # for longer than entries live
            await asyncio.sleep(100)
            broker.start()
            await asyncio.sleep(20)
            assert await card_of(worker) == "c2"
            keeping.cancel()
        await asyncio.sleep(2 * subjects.REGISTRY_TTL_S)
        assert await card_of(worker) is None
        bus.kill()
        worker.kill()

    run(main())


def test_it_writes_nothing_while_workers_do() -> None:
    async def main() -> None:
        broker = MemoryBroker()
        bus, worker = MemoryBus(broker, "keeper"), MemoryBus(broker, "worker")
        await bus.ensure_streams()
        keeper = Keeper(bus, "m")
        await keeper.watch()
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(keeper.keep())
            revisions = []
            for _ in range(20):
                revisions.append(await worker.put_entry(KEY, FIRST))
                await asyncio.sleep(subjects.REGISTRY_REFRESH_S)
            assert revisions == list(range(revisions[0], revisions[0] + 20))
            keeping.cancel()
        bus.kill()
        worker.kill()

    run(main())

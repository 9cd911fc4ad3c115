"""An autoscaler that starts anew, on the virtual clock: it tells no less than the one before it did."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from chassis import subjects
from chassis.ids import BootId, RequestId
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.load import build_load
from chassis.ports import Ports
from shoal.autoscale.config import Config
from shoal.autoscale.memory import Memory
from shoal.autoscale.meters import PIPELINES_WANTED
from shoal.autoscale.service import Autoscaler
from tests.shoal.autoscale.test_scaler import IDLE
from tests.sim.loop import run

CONFIG = Config(model="m", pipelines_min=1, pipelines_max=6, down_after_s=20.0)


def wall_ns() -> int:
    return int(1e9 * asyncio.get_running_loop().time())


def wanted(service: Autoscaler) -> float | None:
    for family in service.metrics():
        if family.name == PIPELINES_WANTED:
            ((_, value),) = family.samples
            assert isinstance(value, float | int)
            return value
    return None


class World:
    def __init__(self) -> None:
        self.broker = MemoryBroker(wall_ns=wall_ns)
        self.bus = MemoryBus(self.broker, "batchers")
        self.ready = 1
        self.waiting = 0

    async def tell(self) -> None:
        tenths = 0
        while True:
            for i in range(self.ready):
                load = replace(
                    IDLE,
                    boot=BootId(f"p{i}"),
                    waiting=self.waiting,
                    pending_tokens=100 * self.waiting,
                    oldest_wait_s=3.0 if self.waiting else 0.0,
                    work_s=0.01 * tenths,
                    work_tokens=10 * tenths,
                )
                self.bus.publish(subjects.loads("m"), build_load(load))
            tenths += 10 if self.waiting else 1
            await asyncio.sleep(1)

    @asynccontextmanager
    async def autoscaler(self) -> AsyncIterator[Autoscaler]:
        bus = MemoryBus(self.broker, "autoscaler")
        unused: Any = None
        service = Autoscaler(CONFIG, Ports(bus, unused, unused, unused, lambda: "a", wall_ns, wall_ns))
        running = asyncio.create_task(service.run())
        yield service
        await service.drain()
        await running
        bus.kill()


def scene(play: Any) -> None:
    async def main() -> None:
        world = World()
        await world.bus.ensure_streams()
        await world.bus.append(subjects.request("m", 5, RequestId("r")), b"x")
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(world.tell())
            await play(world)
            telling.cancel()
        world.bus.kill()

    run(main())


@pytest.mark.parametrize("away_s", [1, 20])
def test_it_tells_no_less_while_those_come_that_were_asked_for(away_s: float) -> None:
    async def play(world: World) -> None:
        world.waiting = 50
        async with world.autoscaler() as first:
            await asyncio.sleep(30)
            most = wanted(first)
            assert most is not None and most >= 3
        world.waiting = 0
        await asyncio.sleep(away_s)
        async with world.autoscaler() as second:
            while wanted(second) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            for _ in range(100):
                assert wanted(second) == most, "the others are still coming"
                await asyncio.sleep(1)
            world.ready = round(most)
            await asyncio.sleep(90)
            assert wanted(second) == 1

    scene(play)


def test_one_that_never_comes_holds_up_nobody_for_ever() -> None:
    async def play(world: World) -> None:
        world.waiting = 50
        async with world.autoscaler() as service:
            await asyncio.sleep(30)
            most = wanted(service)
            assert most is not None and most >= 3
            world.waiting, world.ready = 0, round(most) - 1
            await asyncio.sleep(500)
            assert wanted(service) == most, "it may still come"
            await asyncio.sleep(300)
            assert wanted(service) == 1

    scene(play)


def test_what_is_no_word_of_an_autoscaler_counts_for_nothing() -> None:
    async def play(world: World) -> None:
        memory = Memory(world.bus, "m")
        assert await memory.recall() == 0
        for value in (
            b"",
            b"\xff",
            b"[]",
            b"{}",
            b'{"pipelines":-1}',
            b'{"pipelines":true}',
            b'{"pipelines":1e9}',
        ):
            await world.bus.put_entry(subjects.scale_key("m"), value)
            assert await memory.recall() == 0
        await world.bus.put_entry(subjects.scale_key("m"), b'{"pipelines":3}')
        assert await memory.recall() == 3

    scene(play)

"""The autoscaler's shell on the virtual clock: a broker in memory, batchers that only tell, a stream."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from chassis import subjects
from chassis.ids import BootId, RequestId
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.load import PipelineLoad, build_load
from shoal.autoscale.policy import Rules
from shoal.autoscale.scaler import Scaler
from tests.sim.loop import run

IDLE = PipelineLoad(BootId("a"), "g", True, 0.0, 8, 0.1, 0.001, 0.01)


class Made:
    """Pipelines that are there at once, and tell what `load` says as long as they are."""

    def __init__(self, bus: MemoryBus, count: int) -> None:
        self.bus = bus
        self.boots = [f"p{i}" for i in range(count)]
        self.load = IDLE
        self.settled = True
        self.silent = False
        self.most = count
        self._made = count

    @property
    def count(self) -> int:
        return len(self.boots)

    def grow(self, count: int) -> None:
        for _ in range(count):
            self.boots.append(f"p{self._made}")
            self._made += 1
        self.most = max(self.most, self.count)

    def shrink(self) -> None:
        self.boots.pop()

    async def tell(self) -> None:
        while True:
            for boot in () if self.silent else self.boots:
                self.bus.publish(subjects.loads("m"), build_load(replace(self.load, boot=BootId(boot))))
            await asyncio.sleep(0.5)


class Rig:
    def __init__(self, rules: Rules, count: int) -> None:
        self.broker = MemoryBroker(wall_ns=lambda: int(1e9 * asyncio.get_running_loop().time()))
        self.bus = MemoryBus(self.broker, "scaler")
        self.made = Made(MemoryBus(self.broker, "batchers"), count)
        self.said: list[str] = []
        self.scaler = Scaler(
            self.bus,
            "m",
            rules,
            lambda _: self.made,
            lambda: int(1e9 * asyncio.get_running_loop().time()),
            self.said.append,
        )

    async def ask(self, name: str, priority: int = 5) -> None:
        await self.bus.append(subjects.request("m", priority, RequestId(name)), b"x")

    async def end(self, priority: int = 5) -> None:
        consumer = subjects.consumer_name("m", priority)
        for delivery in await self.bus.fetch(subjects.REQUESTS, consumer, 100, 0.1):
            self.bus.ack(delivery.token)


def scene(rules: Rules, count: int, play: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        rig = Rig(rules, count)
        await rig.bus.ensure_streams()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(rig.made.tell()), group.create_task(rig.scaler.run())]
            await asyncio.sleep(5)
            await play(rig)
            for task in tasks:
                task.cancel()
        rig.bus.kill()
        rig.made.bus.kill()

    run(main())


def test_it_goes_to_zero_and_the_first_request_wakes_one() -> None:
    async def play(rig: Rig) -> None:
        await asyncio.sleep(40)
        assert rig.made.count == 0
        await rig.ask("r1")
        await asyncio.sleep(0.6)
        assert rig.made.count == 1
        assert any("0 -> 1" in said for said in rig.said), rig.said
        await asyncio.sleep(60)
        assert rig.made.count == 1  # it has not ended
        await rig.end()
        await asyncio.sleep(60)
        assert rig.made.count == 0

    scene(Rules(pipelines_min=0, pipelines_max=3, down_after_s=20.0), 1, play)


def test_work_of_the_batch_class_wakes_one_and_no_more() -> None:
    async def play(rig: Rig) -> None:
        await asyncio.sleep(40)
        assert rig.made.count == 0
        for i in range(200):
            await rig.ask(f"r{i}", priority=9)
        await asyncio.sleep(60)
        assert rig.made.most == 1 and rig.made.count == 1

    scene(Rules(pipelines_min=0, pipelines_max=8, down_after_s=20.0), 1, play)


def test_what_waits_in_batchers_makes_it_grow_within_bounds() -> None:
    async def play(rig: Rig) -> None:
        rig.made.load = replace(
            IDLE, waiting=50, pending_tokens=5000, oldest_wait_s=3.0, work_s=1.0, work_tokens=1000
        )
        await rig.ask("r")
        for second in range(30):
            rig.made.load = replace(rig.made.load, work_s=1.0 + second, work_tokens=1000 * (1 + second))
            await asyncio.sleep(1)
        assert rig.made.count == 4

    scene(Rules(pipelines_max=4), 1, play)


def test_without_a_bus_nothing_changes() -> None:
    async def play(rig: Rig) -> None:
        rig.broker.stop()
        await asyncio.sleep(300)
        assert rig.made.count == 3
        rig.broker.start()
        await asyncio.sleep(10)
        assert rig.made.count == 3
        await asyncio.sleep(100)
        assert rig.made.count == 1

    scene(Rules(pipelines_min=1, pipelines_max=4, down_after_s=20.0), 3, play)


def test_after_a_short_absence_of_the_bus_what_runs_does_not_seem_to_wait() -> None:
    """Batchers are heard a little later than the stream."""

    async def play(rig: Rig) -> None:
        for i in range(64):
            await rig.ask(f"r{i}")
        consumer = subjects.consumer_name("m", 5)
        held = await rig.made.bus.fetch(subjects.REQUESTS, consumer, 100, 0.1)
        assert len(held) == 64  # they run
        rig.made.load = replace(IDLE, running=32, waiting=1, pending_tokens=400)
        for second in range(20):
            rig.made.load = replace(rig.made.load, work_s=0.5 * second, work_tokens=500 * second)
            await asyncio.sleep(1)
        rig.made.load = replace(rig.made.load, waiting=0, pending_tokens=0)
        assert rig.made.most == 2
        rig.made.silent = True
        rig.broker.stop()
        await asyncio.sleep(3)
        rig.broker.start()
        await asyncio.sleep(2)
        rig.made.silent = False
        await asyncio.sleep(10)
        assert rig.made.most == 2, rig.said

    scene(Rules(pipelines_min=1, pipelines_max=8, down_after_s=20.0), 2, play)


def test_somebody_elses_change_is_where_it_goes_on_from() -> None:
    async def play(rig: Rig) -> None:
        rig.made.grow(2)
        await asyncio.sleep(10)
        assert rig.made.count == 3
        await asyncio.sleep(60)
        assert rig.made.count == 1
        rig.made.grow(9)
        await asyncio.sleep(2)
        assert rig.made.count == 4  # the bounds hold for all

    scene(Rules(pipelines_max=4, down_after_s=20.0), 1, play)


def test_garbage_on_its_subject_is_nothing() -> None:
    async def play(rig: Rig) -> None:
        for data in (b"", b"\xff" * 40, b"x"):
            rig.bus.publish(subjects.loads("m"), data)
        await asyncio.sleep(5)
        assert rig.made.count == 1 and rig.scaler.signals is not None and rig.scaler.signals.ready == 1

    scene(Rules(pipelines_max=4), 1, play)


def test_a_start_is_measured() -> None:
    async def play(rig: Rig) -> None:
        await asyncio.sleep(40)
        await rig.ask("r")
        await asyncio.sleep(5)
        assert rig.scaler.starts.measured == 1 and rig.scaler.starts.start_s <= 1.1

    scene(Rules(pipelines_min=0, pipelines_max=2, down_after_s=20.0), 1, play)

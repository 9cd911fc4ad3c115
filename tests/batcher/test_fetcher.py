"""Fetching over the in-memory bus: order, fairness, room."""

import asyncio
from collections import Counter

from batcher.config import Config
from batcher.fetcher import Fetcher
from chassis import subjects
from chassis.bus import Delivery
from chassis.ids import RequestId
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from tests.sim.loop import run


class Bench:
    def __init__(self, **settings: int) -> None:
        self.bus = MemoryBus(MemoryBroker(), "batcher")
        self.fetcher = Fetcher(Config(**settings), self.bus, "m", self._deliver)  # type: ignore[arg-type]
        self.taken: list[int] = []

    def _deliver(self, delivery: Delivery) -> None:
        said = subjects.parse_request(delivery.message.subject)
        assert said is not None
        self.taken.append(said.priority)
        self.bus.ack(delivery.token)

    async def backlog(self, **counts: int) -> None:
        await self.bus.ensure_streams()
        await self.bus.ensure_consumers("m")
        for name, count in counts.items():
            for number in range(count):
                subject = subjects.request("m", int(name[1:]), RequestId(f"{name}-{number}"))
                await self.bus.append(subject, b"x")

    async def fetch(self, seconds: float, room: int) -> None:
        """As the core would: what was fetched is taken from the room, which empties as fast as it fills."""
        async with asyncio.TaskGroup() as group:
            tasks = self.fetcher.start(group)
            loop = asyncio.get_running_loop()
            until = loop.time() + seconds
            while loop.time() < until:
                self.fetcher.room(True, room)
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()


def test_a_low_priority_is_fetched_under_a_higher_backlog_that_never_ends() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.backlog(p0=600, p5=2, p9=2)
        await bench.fetch(5.0, room=20)
        firsts = {priority: bench.taken.index(priority) for priority in (0, 5, 9)}
        assert firsts[0] == 0
        assert firsts[5] <= 5 * 16 + 2 and firsts[9] <= 9 * 16 + 2, firsts
        assert Counter(bench.taken) == {0: 600, 5: 2, 9: 2}

    run(main())


def test_one_low_request_takes_no_part_in_the_fetching_of_the_next() -> None:
    async def main() -> None:
        bench = Bench(overtakes_max=4)
        await bench.backlog(p4=40, p5=8)
        await bench.fetch(5.0, room=20)
        assert sorted(bench.taken[:2]) == [4, 5], "one of each at the beginning"
        assert bench.taken[2:27] == [*[4] * 4, 5] * 5

    run(main())


def test_nothing_is_fetched_without_room() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.backlog(p0=40, p9=40)
        await bench.fetch(5.0, room=0)
        assert bench.taken == []

    run(main())


def test_a_lone_request_of_a_low_priority_is_fetched_at_once() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.backlog(p9=1)
        await bench.fetch(0.01, room=20)
        assert bench.taken == [9]

    run(main())

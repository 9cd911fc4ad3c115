"""The virtual loop keeps its own promises: jumps, order, deadlock, no threads."""

import asyncio
import contextvars

import pytest

from tests.sim.loop import Deadlock, Spin, run
from tests.sim.pause import CURRENT, Sleeper, task_factory


def test_time_jumps_and_order_is_that_of_the_timers() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        await asyncio.gather(wait("late", 3600), wait("early", 0.5), wait("middle", 60))
        return seen

    seen = [(name, round(at, 6)) for name, at in run(main())]
    assert seen == [("early", 0.5), ("middle", 60.0), ("late", 3600.0)]


def test_timeouts_are_virtual() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(1000.0)


def test_deadlock_is_said() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())


def test_going_round_without_waiting_is_said() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - this is the fault
            await asyncio.sleep(0)

    with pytest.raises(Spin):
        run(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(lambda: None)

    with pytest.raises(RuntimeError, match="no threads"):
        run(main())


def test_a_stopped_node_stands_still_while_the_world_goes_on() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []
        loop.set_task_factory(task_factory)  # type: ignore[arg-type]
        sleeper = Sleeper()

        async def beat(name: str) -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                seen.append((name, loop.time()))

        async def node() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(beat("node"))

        context = contextvars.copy_context()
        context.run(CURRENT.set, sleeper)
        inside = loop.create_task(node(), context=context)
        outside = loop.create_task(beat("world"))
        await asyncio.sleep(1.5)
        sleeper.stop()
        await asyncio.sleep(10)
        sleeper.wake()
        await asyncio.gather(inside, outside)
        return seen

    seen = [(name, round(at, 6)) for name, at in run(main())]
    assert [t for name, t in seen if name == "world"] == [1.0, 2.0, 3.0]
    assert [t for name, t in seen if name == "node"] == [1.0, 11.5, 12.5]

"""The virtual loop keeps its own promises: jumps, order, deadlock, no threads."""

import asyncio

import pytest

from tests.sim.loop import Deadlock, run


def test_time_jumps_and_order_is_that_of_the_timers() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        await asyncio.gather(wait("late", 3600), wait("early", 0.5), wait("middle", 60))
        return seen

    assert run(main()) == [("early", 0.5), ("middle", 60.0), ("late", 3600.0)]


def test_timeouts_are_virtual() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == 1000.0


def test_deadlock_is_said() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(lambda: None)

    with pytest.raises(RuntimeError, match="no threads"):
        run(main())

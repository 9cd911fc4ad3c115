"""Where executors block: one at a time, in order, errors to the caller, cancelled callers or not."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from shard_worker.compute import Compute, ComputeThread, InlineCompute


def run(make: Callable[[], Compute], body: Callable[[Compute], Awaitable[None]]) -> None:
    async def main() -> None:
        compute = make()
        try:
            async with asyncio.timeout(5):
                await body(compute)
        finally:
            await compute.close()

    asyncio.run(main())


BOTH = pytest.mark.parametrize("make", [InlineCompute, ComputeThread, lambda: InlineCompute(lambda: 0.001)])


@BOTH
def test_calls_run_in_order(make: Callable[[], Compute]) -> None:
    async def body(compute: Compute) -> None:
        seen: list[int] = []

        def work(i: int) -> int:
            seen.append(i)
            return i

        results = await asyncio.gather(*(compute.call(partial(work, i)) for i in range(20)))
        assert seen == results == list(range(20))

    run(make, body)


@BOTH
def test_errors_go_to_the_caller(make: Callable[[], Compute]) -> None:
    def fail() -> None:
        raise MemoryError("full")

    async def body(compute: Compute) -> None:
        with pytest.raises(MemoryError, match="full"):
            await compute.call(fail)
        assert await compute.call(lambda: 5) == 5

    run(make, body)


def test_the_loop_turns_while_the_thread_works() -> None:
    async def body(compute: Compute) -> None:
        here = threading.get_ident()
        release = threading.Event()
        working = asyncio.ensure_future(compute.call(lambda: (release.wait(5), threading.get_ident())))
        await asyncio.sleep(0.02)
        assert not working.done()
        release.set()
        waited, there = await working
        assert waited and there != here

    run(ComputeThread, body)


@BOTH
def test_what_was_begun_runs_in_order(make: Callable[[], Compute]) -> None:
    async def body(compute: Compute) -> None:
        seen: list[int] = []
        begun = [compute.begin(partial(seen.append, i)) for i in range(5)]
        for one in begun:
            await one
        assert seen == list(range(5))
        compute.begin(partial(seen.append, 5))  # nobody waits for it, and nothing complains

    run(make, body)


def test_the_thread_goes_on_without_the_loop() -> None:
    async def body(compute: Compute) -> None:
        done = threading.Event()
        begun = [compute.begin(lambda: time.sleep(0.01)), compute.begin(done.set)]
        assert done.wait(5), "the loop has not turned"
        for one in begun:
            await one

    run(ComputeThread, body)


def test_a_cancelled_caller_does_not_overtake() -> None:
    """The next call waits for what still runs: memory is not loaded anew under a step."""

    async def body(compute: Compute) -> None:
        release = threading.Event()
        seen: list[str] = []

        def wait() -> None:
            release.wait(5)
            seen.append("first")

        first = asyncio.ensure_future(compute.call(wait))
        await asyncio.sleep(0.02)
        first.cancel()
        second = asyncio.ensure_future(compute.call(lambda: seen.append("second")))
        await asyncio.sleep(0.02)
        assert seen == []
        release.set()
        await second
        assert seen == ["first", "second"]

    run(ComputeThread, body)


def test_close_ends_the_thread() -> None:
    before = threading.active_count()

    async def body(compute: Compute) -> None:
        await compute.call(lambda: time.sleep(0.01))
        assert threading.active_count() == before + 1

    run(ComputeThread, body)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threading.active_count() == before

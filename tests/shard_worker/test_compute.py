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


class Half:
    """Work on a device that ends when it is told to."""

    def __init__(self, seen: list[str], name: str, ended: threading.Event | None = None) -> None:
        self.seen, self.name, self.ended = seen, name, ended

    def __call__(self) -> "Half":
        self.seen.append(f"{self.name} begins")
        return self

    def ready(self) -> bool:
        return self.ended is None or self.ended.is_set()

    def finish(self) -> str:
        if self.ended is not None and not self.ended.wait(5):
            raise TimeoutError(self.name)
        self.seen.append(f"{self.name} ends")
        return self.name


@BOTH
def test_halves_end_in_order_with_their_results(make: Callable[[], Compute]) -> None:
    async def body(compute: Compute) -> None:
        seen: list[str] = []
        begun = [compute.ahead(Half(seen, name)) for name in "abcd"]
        assert [await one for one in begun] == list("abcd")
        assert [s for s in seen if s.endswith("ends")] == [f"{name} ends" for name in "abcd"]

    run(make, body)


def test_the_next_begins_before_the_last_has_ended() -> None:
    async def body(compute: Compute) -> None:
        seen: list[str] = []
        a, b, c = threading.Event(), threading.Event(), threading.Event()
        begun = [compute.ahead(Half(seen, n, e)) for n, e in (("a", a), ("b", b), ("c", c))]
        while len(seen) < 2:  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0)
        assert seen == ["a begins", "b begins"]  # and no third before one of them ends
        a.set()
        assert await begun[0] == "a"
        b.set()
        c.set()
        assert (await begun[1], await begun[2]) == ("b", "c")

    run(ComputeThread, body)


def test_other_calls_wait_until_nothing_is_left() -> None:
    async def body(compute: Compute) -> None:
        seen: list[str] = []
        ended = threading.Event()
        half = compute.ahead(Half(seen, "a", ended))
        call = asyncio.ensure_future(compute.call(partial(seen.append, "load")))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert seen == ["a begins"]
        ended.set()
        await call
        assert seen == ["a begins", "a ends", "load"] and await half == "a"

    run(ComputeThread, body)


def test_errors_of_either_half_go_to_the_caller() -> None:
    def fails() -> Half:
        raise MemoryError("full")

    async def body(compute: Compute) -> None:
        class Lost(Half):
            def finish(self) -> str:
                raise RuntimeError("device lost")

        begun: list[Awaitable[str]] = [compute.ahead(fails), compute.ahead(Lost([], "a"))]
        with pytest.raises(MemoryError, match="full"):
            await begun[0]
        with pytest.raises(RuntimeError, match="device lost"):
            await begun[1]
        assert await compute.ahead(Half([], "b")) == "b"

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


def test_a_device_that_cannot_be_asked_ends_its_call_not_the_thread() -> None:
    class Gone(Half):
        def ready(self) -> bool:
            raise RuntimeError("device lost")

        def finish(self) -> str:
            raise RuntimeError("device lost")

    async def body(compute: Compute) -> None:
        with pytest.raises(RuntimeError, match="device lost"):
            await compute.ahead(Gone([], "a"))
        assert await compute.ahead(Half([], "b")) == "b"

    run(ComputeThread, body)


def test_close_ends_the_thread() -> None:
    threads: list[threading.Thread] = []

    async def body(compute: Compute) -> None:
        threads.append(await compute.call(threading.current_thread))

    run(ComputeThread, body)
    (thread,) = threads
    assert thread is not threading.current_thread()
    thread.join(5)
    assert not thread.is_alive()

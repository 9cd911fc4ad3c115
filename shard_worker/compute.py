"""Where an executor's blocking calls run: one thread beside the event loop, or inline in virtual time.

Rules: calls run one at a time, in the order they were made; a cancelled caller does not stop a call that
has begun, and the next one still waits for it. What `begin` was given may run at once, and the thread goes on
to the next without the loop.
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0


class Compute(Protocol):
    def begin(self, work: Callable[[], T]) -> Awaitable[T]:
        """Runs `work` now or when it is awaited, which must be in order; what it raises is raised there."""

    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work`; what it raises is raised here."""

    async def close(self) -> None:
        """Waits for the call that runs, within a limit."""


class _Later(Generic[T]):
    """Begins when it is awaited; nothing is left behind if it never is."""

    def __init__(self, compute: "InlineCompute", work: Callable[[], T]) -> None:
        self._compute = compute
        self._work = work

    def __await__(self) -> Generator[Any, None, T]:
        return self._compute.call(self._work).__await__()


class InlineCompute:
    """For the simulation and tests: runs in the loop's thread after a delay that is given."""

    def __init__(self, delay_s: Callable[[], float] | None = None) -> None:
        self._delay_s = delay_s
        self._turn = asyncio.Lock()

    def begin(self, work: Callable[[], T]) -> Awaitable[T]:
        return _Later(self, work)

    async def call(self, work: Callable[[], T]) -> T:
        async with self._turn:
            if self._delay_s is not None:
                await asyncio.sleep(self._delay_s())
            return work()

    async def close(self) -> None:
        return None


class ComputeThread:
    """A thread of its own, so that nothing else ever waits in its queue."""

    def __init__(self, name: str = "compute", calls_max: int = 64) -> None:
        self._calls_max = calls_max
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[], T]) -> T:
        return await self.begin(work)

    def begin(self, work: Callable[[], T]) -> Awaitable[T]:
        if self._calls.qsize() >= self._calls_max:
            raise queue.Full
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # goes to the caller, whatever it is
                _tell(loop, _fail, future, error)
            else:
                _tell(loop, _resolve, future, result)

        self._calls.put(run)
        return future

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.call(lambda: None)  # everything before it is over
        except (TimeoutError, queue.Full):
            return  # the thread is a daemon: the process can end without it
        self._calls.put(None)

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()


def _tell(loop: asyncio.AbstractEventLoop, do: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(do, *args)
    except RuntimeError:  # the loop is closed: nobody waits
        pass


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

"""Where an executor's blocking calls run: one thread beside the event loop, or inline in virtual time.

Rules: calls run one at a time, in the order they were made; a cancelled caller does not stop a call that
has begun, and the next one still waits for it.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0


class Compute(Protocol):
    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work`; what it raises is raised here."""

    async def close(self) -> None:
        """Waits for the call that runs, within a limit."""


class InlineCompute:
    """For the simulation and tests: runs in the loop's thread after a delay that is given."""

    def __init__(self, delay_s: Callable[[], float] | None = None) -> None:
        self._delay_s = delay_s
        self._turn = asyncio.Lock()

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
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(calls_max)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # goes to the caller, whatever it is
                _tell(loop, _fail, future, error)
            else:
                _tell(loop, _resolve, future, result)

        self._calls.put_nowait(run)
        return await future

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.call(lambda: None)  # everything before it is over
        except (TimeoutError, queue.Full):
            return  # the thread is a daemon: the process can end without it
        self._calls.put_nowait(None)

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

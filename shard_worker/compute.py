"""Where an executor's blocking calls run: one thread beside the event loop, or inline in virtual time.

Rules: calls run one at a time, in the order they were made; a cancelled caller does not stop a call that
has begun, and the next one still waits for it. What `begin` was given may run at once, and the thread goes on
to the next without the loop. With `ahead` the next may even begin before the last is finished, for a device
that goes on by itself; every other call waits until nothing is left unfinished.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
UNFINISHED_MAX = 2  # one that the device works on, the next one behind it
POLL_S = 50e-6  # for new work, while a device works
CLOSE_TIMEOUT_S = 5.0


class Unfinished(Protocol[T_co]):
    """What a device works on."""

    def ready(self) -> bool:
        """Whether `finish` would return at once."""

    def finish(self) -> T_co: ...


class Compute(Protocol):
    def begin(self, work: Callable[[], T]) -> Awaitable[T]:
        """Runs `work` now or when it is awaited, which must be in order; what it raises is raised there."""

    def ahead(self, work: Callable[[], Unfinished[T]]) -> Awaitable[T]:
        """The same of work in two halves, between which that of another call may begin."""

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

    def ahead(self, work: Callable[[], Unfinished[T]]) -> Awaitable[T]:
        return _Later(self, lambda: work().finish())

    async def call(self, work: Callable[[], T]) -> T:
        async with self._turn:
            if self._delay_s is not None:
                await asyncio.sleep(self._delay_s())
            return work()

    async def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Left:
    """The second half of a call."""

    ready: Callable[[], bool]
    finish: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[], _Left | None]
    alone: bool  # nothing may be left of others


class ComputeThread:
    """A thread of its own, so that nothing else ever waits in its queue."""

    def __init__(self, name: str = "compute", calls_max: int = 64) -> None:
        self._calls_max = calls_max
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._left: deque[_Left] = deque()  # at most UNFINISHED_MAX
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[], T]) -> T:
        return await self.begin(work)

    def begin(self, work: Callable[[], T]) -> Awaitable[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = self._future(loop)

        def run() -> None:
            _answer(loop, future, work)

        self._calls.put(_Call(run, alone=True))
        return future

    def ahead(self, work: Callable[[], Unfinished[T]]) -> Awaitable[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = self._future(loop)

        def run() -> _Left | None:
            try:
                left = work()
            except BaseException as error:
                _tell(loop, _fail, future, error)
                return None
            return _Left(left.ready, lambda: _answer(loop, future, left.finish))

        self._calls.put(_Call(run, alone=False))
        return future

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.call(lambda: None)  # everything before it is over
        except (TimeoutError, queue.Full):
            return  # the thread is a daemon: the process can end without it
        self._calls.put(None)

    def _future(self, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[T]":
        """Raises queue.Full."""
        if self._calls.qsize() >= self._calls_max:
            raise queue.Full
        return loop.create_future()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            while call.alone and self._left:
                self._left.popleft().finish()
            left = call.run()
            if left is not None:
                self._left.append(left)

    def _next(self) -> _Call | None:
        """Finishes what is ready, and what there is no more room for, until there is a call."""
        while self._left:
            if len(self._left) >= UNFINISHED_MAX or _may_finish(self._left[0]):
                self._left.popleft().finish()
                continue
            try:
                return self._calls.get(timeout=POLL_S)
            except queue.Empty:
                pass
        return self._calls.get()


def _may_finish(left: _Left) -> bool:
    try:
        return left.ready()
    except Exception:  # the device is lost: `finish` tells the caller, and the thread lives
        return True


def _answer(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[T]", work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # goes to the caller, whatever it is
        _tell(loop, _fail, future, error)
    else:
        _tell(loop, _resolve, future, result)


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

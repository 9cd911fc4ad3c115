"""An asyncio loop whose clock is virtual: it jumps to the next timer instead of sleeping.

Ready callbacks run in order, timers in the order of their times and then of asking. A loop with nothing to
do and no timer is a deadlock, one that goes round without time passing a spin, and both are said. There
are no files, signals or threads.
"""

import asyncio
import contextvars
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from heapq import heappop, heappush
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

TURNS_MAX = 100_000  # without time passing


class Deadlock(Exception):
    """Nothing is ready and nothing ever will be."""


class Spin(Exception):
    """Something goes round and round without waiting."""


class _Handle:
    """A callback that waits for its turn."""

    __slots__ = ("_when", "act", "args", "context")

    def __init__(
        self, act: Callable[..., Any], args: Any, context: contextvars.Context | None, when: float
    ) -> None:
        self.act: Callable[..., Any] | None = act
        self.args = args
        self.context = contextvars.copy_context() if context is None else context
        self._when = when

    def cancel(self) -> None:
        self.act = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.act is None

    def when(self) -> float:
        return self._when


class SimLoop(asyncio.AbstractEventLoop):
    """What tasks, futures, locks and timeouts ask of a loop, and no more."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._asked = 0
        self._turns = 0
        self._factory: Any = None
        self._handler: Any = None
        self._running = self._closed = False
        self._generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()

    # ---- callbacks

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        handle = _Handle(callback, args, context, self._now)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        handle = _Handle(callback, args, context, when)
        self._asked += 1
        heappush(self._timers, (when, self._asked, handle))
        return handle

    def _turn(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2].act is None:
            heappop(timers)
        self._turns += 1
        if not ready:
            if not timers:
                raise Deadlock("every task waits for something that nobody will do")
            if timers[0][0] > self._now:
                self._now, self._turns = timers[0][0], 0
        if self._turns > TURNS_MAX:
            self._turns = 0
            raise Spin(f"{TURNS_MAX} turns at {self._now:.6f} s")
        while timers and timers[0][0] <= self._now:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.act is None:
                continue
            try:
                handle.context.run(handle.act, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"{handle.act} raised", "exception": error})

    # ---- running

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.add, finalizer=self._finalize)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            while not task.done():
                self._turn()
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        return task.result()

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())

    async def shutdown_asyncgens(self) -> None:
        for generator in list(self._generators):
            await generator.aclose()

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def get_debug(self) -> bool:
        return False

    # ---- tasks

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[Any]":
        if self._factory is None:
            return asyncio.Task(coro, loop=self, name=name, context=context)
        task: asyncio.Task[Any] = self._factory(self, coro, context=context)
        if name is not None:
            task.set_name(name)
        return task

    def set_task_factory(self, factory: Any) -> None:
        self._factory = factory

    def get_task_factory(self) -> Any:
        return self._factory

    def run_in_executor(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no threads on a virtual clock")

    # ---- what nobody caught

    def set_exception_handler(self, handler: Any) -> None:
        self._handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._handler is not None:
            self._handler(self, context)
        else:
            sys.stderr.write(f"{context['message']}: {context.get('exception')!r}\n")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end in virtual time; tasks it left behind are an error."""
    loop = SimLoop()  # type: ignore[abstract]  # files, signals and threads are refused
    try:
        result: T = loop.run_until_complete(main)
        left = [t for t in asyncio.all_tasks(loop) if not t.done()]
        if left:
            raise AssertionError(f"tasks left behind: {left}")
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        pending = asyncio.all_tasks(loop)
        if pending:
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

"""An asyncio loop whose clock is virtual: it jumps to the next timer instead of sleeping.

Only public seams are used: a selector that never touches the system, and `time()`. A loop with nothing
to do and no timer is a deadlock, and says so. Threads are refused.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready and nothing ever will be."""


class Spin(Exception):
    """Something goes round and round without waiting."""


RESOLUTION_S = 1e-9
TURNS_MAX = 100_000  # without time passing


class _VirtualSelector(selectors.BaseSelector):
    """No file is ever ready; waiting moves the clock to just after the timer, not short of it by rounding."""

    def __init__(self) -> None:
        self.now = 0.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("every task waits for something that nobody will do")
        self._turns += 1
        if timeout > 0:
            self.now += timeout + RESOLUTION_S
            if timeout > 1e-4:
                self._turns = 0
        if self._turns > TURNS_MAX:
            self._turns = 0
            raise Spin(f"{TURNS_MAX} turns at {self.now:.6f} s")
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class SimLoop(asyncio.SelectorEventLoop):
    """Deterministic: ready callbacks in order, timers by their virtual time, no I/O, no threads."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no threads on a virtual clock")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end in virtual time; tasks it left behind are an error."""
    loop = SimLoop()
    try:
        result = loop.run_until_complete(main)
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

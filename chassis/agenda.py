"""Deterministic timers on the running loop: acts happen in order of time, then in the order of asking.

The loop's own timers do not keep the order of equal times. One agenda belongs to one loop.
"""

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush

CLOCK_GRAIN_S = 1e-6

Act = Callable[[], None]


class Agenda:
    """What happens later, in order of time and then of asking."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Act]] = []
        self._serial = 0
        self._timer: asyncio.Handle | None = None
        self._timer_s = 0.0

    def after(self, delay_s: float, act: Act) -> None:
        loop = asyncio.get_running_loop()
        self._serial += 1
        when_s = loop.time() + delay_s
        heappush(self._heap, (when_s, self._serial, act))
        if self._timer is None or when_s < self._timer_s:
            self._arm(loop)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._heap[0][0]
        if self._timer_s <= loop.time():
            self._timer = loop.call_soon(self._run)
        else:
            self._timer = loop.call_at(self._timer_s, self._run)

    def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        until_s, newest = loop.time() + CLOCK_GRAIN_S, self._serial
        while self._heap and self._heap[0][0] <= until_s and self._heap[0][1] <= newest:
            act = heappop(self._heap)[2]
            try:
                act()
            except Exception as error:
                loop.call_exception_handler({"message": "a handler of the bus raised", "exception": error})
        if self._heap:
            self._arm(loop)

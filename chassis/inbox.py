"""The one way into a core: a bounded queue that one task empties as a batch.

Rules: anybody on the loop may put; one task drains; a full inbox refuses (the caller decides what that
means) and counts. A drain always lets the loop turn once, so that a busy inbox starves nobody and what
arrived together is seen together. Who asks for calm is given more at once: until then only what is urgent
ends its wait.
"""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")
TIMER_GRAIN_S = 1e-3  # of the loop's timers


class InboxFull(Exception):
    """The inbox holds `len_max` items."""


class Inbox(Generic[T]):
    def __init__(self, len_max: int) -> None:
        assert len_max > 0
        self.len_max = len_max
        self.refused = 0  # items turned away, ever
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._until: float | None = None  # the drain that waits wants to be woken then
        self._timer: asyncio.TimerHandle | None = None  # left alone by those who wait longer, as most do
        self._timer_at = 0.0
        self._calm_until = 0.0  # of the drain that waits
        self._urgent = False  # something of what is here

    def __len__(self) -> int:
        return len(self._items)

    def put_nowait(self, item: T) -> None:
        """Raises InboxFull."""
        if not self.offer(item):
            raise InboxFull

    def offer(self, item: T, urgent: bool = True) -> bool:
        """False when full: the item is not taken. `urgent`: no calm keeps it."""
        if len(self._items) >= self.len_max:
            self.refused += 1
            return False
        self._items.append(item)
        self._urgent = self._urgent or urgent
        if self._waiter is not None and not self._waiter.done():
            if urgent or not self._calm_until:
                self._waiter.set_result(None)
            else:
                self._wait_until(asyncio.get_running_loop(), self._calm_until)
        return True

    def wake(self) -> None:
        """Ends a waiting drain, even without an item."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self, until: float | None = None, calm_until: float = 0.0) -> list[T]:
        """All items, in order; waits for the first one or for the loop's clock to reach `until`. With items
        that are not urgent it waits until `calm_until`, so that more come along.

        Empty only at `until` or after `wake`. A cancelled drain loses nothing.
        """
        assert self._waiter is None, "one task drains an inbox"
        loop = asyncio.get_running_loop()
        now = loop.time()
        calm = calm_until > now and not self._urgent
        if (self._items and not calm) or (until is not None and until <= now):
            await asyncio.sleep(0)
        else:
            waiter = self._waiter = loop.create_future()
            self._calm_until = calm_until if calm else 0.0
            if until is not None:
                self._wait_until(loop, until)
            if self._items:
                self._wait_until(loop, calm_until)
            try:
                await waiter
            finally:
                self._waiter = self._until = None
        items, self._items, self._urgent = self._items, [], False
        return items

    def _wait_until(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """At the latest."""
        if self._until is None or at < self._until:
            self._until = at
            if self._timer is None or at < self._timer_at:
                self._arm(loop, at)

    def _arm(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = loop.call_at(at, self._on_time, loop), at

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._until is None:
            return
        now = loop.time()
        if now >= self._until:
            self.wake()
        else:  # it was set for somebody else, or came early
            self._arm(loop, max(self._until, now + TIMER_GRAIN_S))

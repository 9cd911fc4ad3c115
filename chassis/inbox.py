"""The one way into a core: a bounded queue that one task empties as a batch.

Rules: anybody on the loop may put; one task drains; a full inbox refuses (the caller decides what that
means) and counts. A drain always lets the loop turn once, so that a busy inbox starves nobody and what
arrived together is seen together.
"""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class InboxFull(Exception):
    """The inbox holds `len_max` items."""


class Inbox(Generic[T]):
    def __init__(self, len_max: int) -> None:
        assert len_max > 0
        self.len_max = len_max
        self.refused = 0  # items turned away, ever
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put_nowait(self, item: T) -> None:
        """Raises InboxFull."""
        if not self.offer(item):
            raise InboxFull

    def offer(self, item: T) -> bool:
        """False when full: the item is not taken."""
        if len(self._items) >= self.len_max:
            self.refused += 1
            return False
        self._items.append(item)
        self.wake()
        return True

    def wake(self) -> None:
        """Ends a waiting drain, even without an item."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self, until: float | None = None) -> list[T]:
        """All items, in order; waits for the first one or for the loop's clock to reach `until`.

        Empty only at `until` or after `wake`. A cancelled drain loses nothing.
        """
        assert self._waiter is None, "one task drains an inbox"
        loop = asyncio.get_running_loop()
        if self._items or (until is not None and until <= loop.time()):
            await asyncio.sleep(0)
        else:
            waiter = self._waiter = loop.create_future()
            timer = None if until is None else loop.call_at(until, self.wake)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        items, self._items = self._items, []
        return items

"""What every link keeps, whatever carries it: the peer's free slots, frames that arrived, whether it is gone.

Rules: a credit is taken before a frame is written; arrived frames never exceed the slots offered, so the
queue is bounded by the window; once shut, everything that waits or asks raises LinkClosed.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from chassis.errors import LinkClosed
from chassis.transport.interface import HEADER_BYTES_MAX, Frame

F = TypeVar("F", bound=Frame)


def check_size(header: bytes, payload_bytes: int, slot_bytes: int) -> None:
    """Raises ValueError for a frame that the peer has said it can't take; the link stays."""
    if len(header) > HEADER_BYTES_MAX or payload_bytes > slot_bytes:
        raise ValueError(f"frame of {len(header)} + {payload_bytes} bytes is larger than the peer's slots")


class Waiters:
    """Tasks that wait for something to change; each looks again when it is woken."""

    def __init__(self) -> None:
        self._futures: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.wake_one()  # the wake-up was ours; somebody else can use it
            raise
        finally:
            if future in self._futures:
                self._futures.remove(future)

    def wake_one(self) -> None:
        while self._futures:
            future = self._futures.popleft()
            if not future.done():
                future.set_result(None)
                return

    def wake_all(self) -> None:
        while self._futures:
            self.wake_one()


class Flow(Generic[F]):
    """One end of a link. `credits` are free slots of the peer, `slots` our own."""

    def __init__(self, credits: int, slots: int) -> None:
        self.credits = credits
        self.closed: str | None = None  # why
        self._slots = slots
        self._frames: deque[F] = deque()
        self._senders = Waiters()
        self._receivers = Waiters()

    def check_open(self) -> None:
        if self.closed is not None:
            raise LinkClosed(self.closed)

    async def take_credit(self, timeout_s: float) -> None:
        """Waits for a free slot of the peer. Raises LinkClosed, TimeoutError."""
        self.check_open()
        if self.credits == 0:
            async with asyncio.timeout(timeout_s):
                while self.credits == 0:
                    await self._senders.wait()
                    self.check_open()
        self.credits -= 1

    def take_credit_now(self) -> bool:
        """Raises LinkClosed."""
        self.check_open()
        if self.credits == 0:
            return False
        self.credits -= 1
        return True

    def add_credits(self, count: int) -> None:
        self.credits += count
        for _ in range(count):
            self._senders.wake_one()

    async def take_frame(self) -> F:
        self.check_open()
        while not self._frames:
            await self._receivers.wait()
            self.check_open()
        return self._frames.popleft()

    def put_frame(self, frame: F) -> None:
        assert len(self._frames) < self._slots, "a frame without a slot"
        self._frames.append(frame)
        self._receivers.wake_one()

    def shut(self, why: str) -> None:
        """Frames that nobody received are dropped: gone is gone."""
        if self.closed is None:
            self.closed = why
            self._frames.clear()
            self._senders.wake_all()
            self._receivers.wake_all()

"""Where calls to files block: one thread, so that they follow each other and the loop never waits."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Io(Protocol):
    async def call(self, work: Callable[[], T]) -> T:
        """Raises what it raises. What has begun is done, even if nobody waits for it any more."""

    def close(self) -> None:
        """Waits for what has begun."""


class IoThread:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvstore-io")

    async def call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class InlineIo:
    """On the loop itself, for tests and the simulation; `delay_s` says how long a call takes."""

    def __init__(self, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self._delay_s = delay_s

    async def call(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self._delay_s())
        return work()

    def close(self) -> None:
        return None

"""Calls on the bus that a service cannot do without while it starts: repeated while the bus is away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from chassis import log
from chassis.errors import BusError

RETRY_S = 0.5

T = TypeVar("T")


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """What `call` returns once it succeeds; until cancelled. Anything but a BusError is raised."""
    while True:
        try:
            return await call()
        except BusError as error:
            log.warning("the bus is away while starting", error=str(error))
        await asyncio.sleep(RETRY_S)

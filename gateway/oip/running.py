"""The calls of one request, side by side: their events go to one place, and the first failure ends all."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from chassis.errors import Status
from chassis.messages.gateway import GenerateCall, GenerateEvent
from chassis.trace import TraceContext
from gateway.front import Front

Take = Callable[[int, GenerateEvent], Awaitable[None]]


async def each_event(
    front: Front, calls: Sequence[GenerateCall], trace: TraceContext | None, take: Take
) -> None:
    """`take` gets each with the number of its call. Raises Status, and what `take` raises."""
    if len(calls) == 1:
        await _one(front, 0, calls[0], trace, take)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for number, call in enumerate(calls):
                group.create_task(_one(front, number, call, trace, take))
    except BaseExceptionGroup as several:
        statuses, _ = several.split(Status)
        first: BaseException = several if statuses is None else statuses
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


async def _one(front: Front, number: int, call: GenerateCall, trace: TraceContext | None, take: Take) -> None:
    async with aclosing(front.generate(call, trace)) as events:
        async for event in events:
            await take(number, event)

"""A batcher that answers whatever is asked, at once: for clients that ask a great deal."""

import asyncio

from chassis.messages.request import Reason, Request
from chassis.messages.sampling import TokenLogprobs
from tests.gateway.rig import ScriptedBatcher

TEXT = b"Well: \xc3\xbc."


def answer_all(group: asyncio.TaskGroup, batcher: ScriptedBatcher) -> list[asyncio.Task[None]]:
    """Of every priority, until cancelled."""
    return [group.create_task(_answer(batcher, priority)) for priority in range(10)]


async def _answer(batcher: ScriptedBatcher, priority: int) -> None:
    while True:
        job = await batcher.take(priority)
        ids = TEXT[: job.request.limits.max_tokens]
        batcher.send(job, *ids, told=told(job.request, len(ids)))
        await batcher.end(job, Reason.LENGTH if len(ids) < len(TEXT) else Reason.STOP)


def told(request: Request, count: int) -> tuple[TokenLogprobs, ...]:
    top = request.sampling.logprobs
    if top is None:
        return ()
    return (TokenLogprobs(-1.0, 2, tuple(range(top)), tuple(-0.5 * i for i in range(top))),) * count

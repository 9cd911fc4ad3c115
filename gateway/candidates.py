"""`best_of`: of several candidates the best are told, best first, when all have ended.

Which those are only the ends tell. Until then the candidates are slow readers (`gateway/clients.py`): what
comes is kept there, bounded by their tokens, and is text only once it is told.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from chassis.messages.gateway import Finished, GenerateEvent
from chassis.messages.request import Reason
from gateway.clients import Client

WHOLE = (Reason.STOP, Reason.LENGTH)


def ranked(clients: Sequence[Client]) -> list[Client]:
    """Best first, of candidates that have ended: whole before cut off, then by log probability per token (of
    the model alone, so that lengths can be compared), then as they were numbered."""
    return sorted(clients, key=_standing)


def _standing(client: Client) -> tuple[bool, bool, float]:
    mean = client.mean_logprob
    return client.end is None or client.end.reason not in WHOLE, mean is None, -(mean or 0.0)


async def best_events(
    clients: Sequence[Client], ready: asyncio.Event, n: int, logprobs: bool
) -> AsyncGenerator[GenerateEvent, None]:
    """Of candidates that share `ready`. `logprobs`: they are told too. Raises Status once one fails."""
    first = clients[0]
    if (opening := first.opening) is not None:
        yield opening  # its id cancels all
    while True:
        await ready.wait()
        ready.clear()
        for event in first.take_prompt():
            yield event
        if (status := next((c.status for c in clients if c.status is not None), None)) is not None:
            raise status
        if all(client.over for client in clients):
            break
    generated = sum([client.end.usage.output_tokens for client in clients if client.end is not None])
    for choice, client in enumerate(ranked(clients)[:n]):
        client.chosen(choice, logprobs)
        for told in client.take():
            yield replace(told, generated_tokens=generated) if isinstance(told, Finished) else told

"""A client that leaves ends what is done for it.

The connection itself says so (`gateway/http_protocol.py`): a task that waits for that word would cost each
request as much as reading its body.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

T = TypeVar("T")
PRESENCE = "shoal.presence"  # in a request's scope


class Presence:
    """Of who sent one request."""

    __slots__ = ("_gone", "_task")

    def __init__(self) -> None:
        self._gone = False
        self._task: asyncio.Task[Any] | None = None  # to be cancelled

    def leave(self) -> None:
        if not self._gone:
            self._gone = True
            if self._task is not None:
                self._task.cancel()

    async def lasts(self, work: Coroutine[Any, Any, T]) -> T | None:
        """As `while_there`."""
        if self._gone:
            work.close()
            return None
        task = self._task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            return await work
        except asyncio.CancelledError:
            if self._gone and task.cancelling() == before + 1:
                return None
            raise
        finally:
            self._task = None
            if self._gone:
                task.uncancel()


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work gives, or raises; None when the client leaves, which cancels it. The request's body has
    been read."""
    presence = request.scope.get(PRESENCE)
    if isinstance(presence, Presence):
        return await presence.lasts(work)
    return await _watched(request.receive, work)


class _Left(Exception):
    """The client is gone."""


async def _watched(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The same behind another server."""
    given: list[T] = []
    raised: list[Exception] = []
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(receive))
            try:
                given.append(await work)
            except Exception as error:
                raised.append(error)
            watching.cancel()
    except* _Left:
        pass
    if raised:
        raise raised[0]
    return given[0] if given else None


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise _Left

"""Stopping a node's tasks dead, as SIGSTOP does: nothing of it runs until it wakes; the world goes on.

A task factory wraps every coroutine of a node: before each turn it waits while the node sleeps. The
node is found in a context variable, which child tasks inherit.
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any


class Sleeper:
    """Whether a node is stopped."""

    def __init__(self) -> None:
        self._awake: asyncio.Future[None] | None = None

    @property
    def stopped(self) -> bool:
        return self._awake is not None

    def stop(self) -> None:
        if self._awake is None:
            self._awake = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        awake, self._awake = self._awake, None
        if awake is not None:
            awake.set_result(None)

    @property
    def awake(self) -> "asyncio.Future[None]":
        assert self._awake is not None
        return self._awake


CURRENT: ContextVar[Sleeper | None] = ContextVar("node", default=None)


@types.coroutine
def _gated(coroutine: Coroutine[Any, Any, Any], sleeper: Sleeper) -> Generator[Any, Any, Any]:
    value: Any = None
    error: BaseException | None = None
    while True:
        while sleeper.stopped:
            try:
                yield from asyncio.shield(sleeper.awake).__await__()
            except asyncio.CancelledError as cancelled:
                error = cancelled
                break
        try:
            wanted = coroutine.throw(error) if error is not None else coroutine.send(value)
        except StopIteration as end:
            return end.value
        value, error = None, None
        try:
            value = yield wanted
        except BaseException as thrown:
            error = thrown


def task_factory(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
) -> "asyncio.Task[Any]":
    context = options.get("context")
    sleeper = CURRENT.get() if context is None else context.get(CURRENT)
    if sleeper is None:
        return asyncio.Task(coroutine, loop=loop, **options)
    task: asyncio.Task[Any] = asyncio.Task(_gated(coroutine, sleeper), loop=loop, **options)
    task.add_done_callback(lambda _: coroutine.close())  # it may have ended before its first turn
    return task

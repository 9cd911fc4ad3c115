"""Calls of one handle to a `MemoryBroker`: what is asked, when it arrives, who is told."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from chassis.errors import BusError, BusTimeout, BusUnavailable
from chassis.memory_broker import MemoryBroker
from chassis.memory_deliveries import Link

CALL_TIMEOUT_S = 2.0

T = TypeVar("T")


class Calls:
    def __init__(self, broker: MemoryBroker, link: Link, name: str) -> None:
        self._broker = broker
        self._link = link
        self._name = name
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._serial = 0

    def require(self) -> None:
        """Raises BusUnavailable."""
        if not self._link.connected:
            raise BusUnavailable("closed" if not self._link.open else "not connected")

    async def call(
        self, what: str, subject: str, act: Callable[[], T], timeout_s: float = CALL_TIMEOUT_S
    ) -> T:
        self.require()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(what, subject, act, answer)
        result: T = await self.answered(answer, timeout_s, subject)
        return result

    def then(
        self,
        what: str,
        subject: str,
        act: Callable[[], T],
        timeout_s: float,
        done: Callable[[T | BusError], None],
    ) -> None:
        """The same; `done` is called with what came of it."""
        self.require()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        serial = self._expect(answer)
        timer = loop.call_later(timeout_s, resolve, answer, BusTimeout(subject))

        def answered(answer: asyncio.Future[Any]) -> None:
            timer.cancel()
            del self._pending[serial]
            done(answer.result())

        answer.add_done_callback(answered)
        self._send(what, subject, act, answer)

    async def answered(self, answer: asyncio.Future[Any], timeout_s: float, subject: str) -> Any:
        serial = self._expect(answer)
        try:
            async with asyncio.timeout(timeout_s):
                result = await answer
        except TimeoutError:
            raise BusTimeout(subject) from None
        finally:
            del self._pending[serial]
        if isinstance(result, BusError):
            raise result
        return result

    def end(self, error: BusError) -> None:
        """Whoever waits is told this."""
        for answer in self._pending.values():
            resolve(answer, error)

    def _expect(self, answer: asyncio.Future[Any]) -> int:
        self._serial += 1
        self._pending[self._serial] = answer
        return self._serial

    def _send(self, what: str, subject: str, act: Callable[[], object], answer: asyncio.Future[Any]) -> None:
        fate = self._broker.habits.call(self._name, what, subject)

        def perform() -> None:
            result: object
            try:
                result = act()
            except BusError as error:
                result = error
            self._broker.answer(self._link, fate.back_s, lambda: resolve(answer, result))

        self._broker.send(self._link, fate.there_s, perform)


def resolve(answer: asyncio.Future[Any], result: object) -> None:
    if not answer.done():
        answer.set_result(result)

"""Who waits for which answer on a connection, and for how long: without a task or a timer for each.

Whoever asks is told once: the answer, or the BusError that stands for it. Those that wait equally long stand
in one line with one timer, as they came.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chassis.bus import Message
from chassis.errors import BusError, BusTimeout, NoResponders

Done = Callable[[Message | BusError], None]


@dataclass(slots=True)
class _Line:
    waiting: deque[tuple[float, str]] = field(default_factory=deque)  # until when, and the inbox
    timer: asyncio.TimerHandle | None = None


class Answers:
    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Done, str]] = {}  # by inbox: whom to tell, and what was asked
        self._lines: dict[float, _Line] = {}  # by how long they wait: a service knows only few such times

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, inbox: str, subject: str, timeout_s: float, done: Done) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[inbox] = done, subject
        line = self._lines.get(timeout_s)
        if line is None:
            line = self._lines[timeout_s] = _Line()
        until = loop.time() + timeout_s
        line.waiting.append((until, inbox))
        if line.timer is None:
            line.timer = loop.call_at(until, self._expire, loop, line, timeout_s)

    def future(self, inbox: str, subject: str, timeout_s: float) -> asyncio.Future[Message | BusError]:
        answer: asyncio.Future[Message | BusError] = asyncio.get_running_loop().create_future()

        def done(found: Message | BusError) -> None:
            if not answer.done():
                answer.set_result(found)

        self.expect(inbox, subject, timeout_s, done)
        return answer

    def forget(self, inbox: str) -> None:
        """Nobody wants to know any more."""
        self._waiting.pop(inbox, None)

    def hear(self, message: Message) -> None:
        found = self._waiting.pop(message.subject, None)
        if found is None:
            return
        done, subject = found
        if not message.data and message.headers.get("Status") == "503":
            done(NoResponders(subject))
        else:
            done(message)

    def lose(self) -> None:
        """The connection is lost: what was asked may have happened."""
        waiting, self._waiting = self._waiting, {}
        for done, subject in waiting.values():
            done(BusTimeout(f"{subject}: the connection was lost"))

    def _expire(self, loop: asyncio.AbstractEventLoop, line: _Line, timeout_s: float) -> None:
        now, line.timer = loop.time(), None
        while line.waiting:
            until, inbox = line.waiting[0]
            if until > now and inbox in self._waiting:
                line.timer = loop.call_at(until, self._expire, loop, line, timeout_s)
                return
            line.waiting.popleft()
            if (found := self._waiting.pop(inbox, None)) is not None:
                found[0](BusTimeout(found[1]))
        self._lines.pop(timeout_s, None)

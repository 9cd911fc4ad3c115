"""The course of one answer: which calls are open for it, and which follow when one is lost.

The same for blocking and asynchronous streams: it opens and cancels calls, and never waits. Choices that are
resumed have a call each; all are opened at once, so that none of them is without a client, and read in turn.
"""

from collections.abc import Callable
from typing import Any

from shoal.client.errors import ShoalError, Unavailable
from shoal.client.events import Event
from shoal.client.lines import Lines
from shoal.client.reading import Ask, Reading, Whole
from shoal.client.retry import Retry, Tries
from shoal.client.wire import build_resume, event_of


class Course:
    def __init__(
        self,
        lines: Lines,
        whole: Any,
        reading: Reading,
        retry: Retry | None,
        now_s: float,
        timeout_s: float | None,
        chance: Callable[[], float],
    ) -> None:
        self.reading = reading
        self._lines = lines
        self._whole = whole  # the request; None: only the rest is asked for
        self._tries = Tries(retry, len(lines), now_s, timeout_s)
        self._chance = chance
        self._asks = reading.begin()
        self._line = 0
        self._open: list[tuple[int | None, Any]] = []

    def call(self, now_s: float) -> Any:
        """What is read now. Raises DeadlineExceeded."""
        if not self._open:
            left_s = self._tries.left_s(now_s)
            self._line = self._lines.now
            self._open = [self._ask(ask, left_s) for ask in self._asks]
        return self._open[0][1]

    def take(self, message: Any) -> Event | None:
        """What is new in a message of that call. Raises Diverged."""
        event = event_of(message)
        new = None if event is None else self.reading.take(event, self._open[0][0])
        if new is not None:
            self._tries.progress()
        return new

    def ended(self, now_s: float) -> float:
        """That call has no more; how long to wait before the next is asked for. Raises ShoalError."""
        self._open.pop(0)
        if self._open or self.reading.over:
            return 0.0
        return self.lost(Unavailable("UNAVAILABLE", "the stream ended before the answer"), now_s)

    def lost(self, error: ShoalError, now_s: float) -> float:
        """How long to wait before the rest is asked for. Raises the error if there is to be no other try."""
        error.request_id = self.reading.request_id
        self.leave()
        self._open = []
        self._lines.failed(self._line)
        wait_s = self._tries.wait_s(error, now_s, self._chance())
        self._asks = self.reading.lost(error)
        return wait_s

    def leave(self) -> None:
        """Cancels what is open; from any thread."""
        for _, call in self._open:
            call.cancel()

    def _ask(self, ask: Ask, left_s: float | None) -> tuple[int | None, Any]:
        stub, metadata = self._lines.stub(self._line), self._lines.metadata
        if isinstance(ask, Whole):
            return None, stub.Generate(self._whole, timeout=left_s, metadata=metadata)
        request = build_resume(ask.request_id, ask.ids)
        return ask.choice, stub.Resume(request, timeout=left_s, metadata=metadata)

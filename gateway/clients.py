"""One client's stream on its way out: what the core passed on and the client has not taken yet.

A slow reader blocks nobody: what it does not take is added to its next delta. The buffer is bounded by the
request's tokens. Text is made when the client takes it, in the client's own task.
"""

import asyncio
from collections.abc import AsyncGenerator

from chassis.errors import Status
from chassis.ids import RequestId
from chassis.messages.gateway import Accepted, Delta, Finished, GenerateEvent
from gateway.detokenizer import OutputText
from gateway.events import Accept, End


class Client:
    __slots__ = (
        "_accept",
        "_end",
        "_first_index",
        "_ids",
        "_ready",
        "_status",
        "_text",
        "first_delta_at",
        "number",
        "request_id",
        "taken",
    )

    def __init__(self, number: int, request_id: RequestId) -> None:
        self.number = number
        self.request_id = request_id
        self.taken = 0  # output ids the client took
        self.first_delta_at: float | None = None
        self._accept: Accept | None = None
        self._text: OutputText | None = None
        self._ids: list[int] = []
        self._first_index = 0
        self._end: End | None = None
        self._status: Status | None = None
        self._ready = asyncio.Event()

    @property
    def over(self) -> bool:
        """The core has no more to say to it."""
        return self._end is not None or self._status is not None

    @property
    def accepted(self) -> Accept | None:
        return self._accept

    @property
    def end(self) -> End | None:
        return self._end

    # the core's side
    def accept(self, accept: Accept, text: OutputText) -> None:
        text.feed(accept.held)  # the client has their text
        self._accept, self._text, self._first_index = accept, text, len(accept.held)
        self._ready.set()

    def pass_on(self, first_index: int, ids: tuple[int, ...]) -> None:
        if not self._ids:
            self._first_index = first_index
        self._ids.extend(ids)
        self._ready.set()

    def finish(self, end: End) -> None:
        self._end = end
        self._ready.set()

    def fail(self, status: Status) -> None:
        if not self.over:
            self._status = status
            self._ready.set()

    # the client's side
    async def events(self) -> AsyncGenerator[GenerateEvent, None]:
        """Until the end. Raises Status."""
        loop = asyncio.get_running_loop()
        told = False
        while True:
            await self._ready.wait()
            self._ready.clear()  # whatever comes while the client takes an event sets it again
            if self._accept is not None and not told:
                told = True
                yield self._accepted(self._accept)
            end = self._end
            if self._ids:
                if self.first_delta_at is None:
                    self.first_delta_at = loop.time()
                yield self._delta()
            if end is not None:
                text = self._last_text(end)
                if text:
                    yield Delta(text, (), self._first_index)
                yield Finished(end.reason, end.usage, end.timings)
                return
            if self._status is not None and not self._ids:
                raise self._status

    def _accepted(self, accept: Accept) -> Accepted:
        request = accept.request
        if request is not None:
            return Accepted(self.request_id, len(request.prompt_ids), request.seed)
        prompt_tokens = self._end.usage.prompt_tokens if self._end is not None else 0
        return Accepted(self.request_id, prompt_tokens, 0)

    def _delta(self) -> Delta:
        assert self._text is not None, "ids before accepted"
        ids, self._ids = tuple(self._ids), []
        self.taken += len(ids)
        first_index, self._first_index = self._first_index, self._first_index + len(ids)
        return Delta(self._text.feed(ids), ids, first_index)

    def _last_text(self, end: End) -> str:
        """Goes without ids: who resumes with all ids, because it missed the end, gets it again."""
        assert self._text is not None
        return self._text.end((), end.byte_cut)

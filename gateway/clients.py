"""One client's stream on its way out: what the core passed on and the client has not taken yet.

A slow reader blocks nobody: what it does not take is added to its next delta. The buffer is bounded by the
request's tokens. Text is made when the client takes it, in the client's own task.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from chassis.errors import Status
from chassis.ids import RequestId
from chassis.messages.gateway import Accepted, Delta, Finished, GenerateEvent, IdLogprobs, TopLogprob
from chassis.messages.sampling import UNTOLD, TokenLogprobs
from gateway.detokenizer import OutputText
from gateway.events import Accept, End


class Client:
    """`ready` is set when there may be something to take; choices of one call share it."""

    __slots__ = (
        "_accept",
        "_end",
        "_first_index",
        "_ids",
        "_logprobs",
        "_ready",
        "_status",
        "_text",
        "_told",
        "choice",
        "done",
        "first_delta_at",
        "number",
        "request_id",
        "taken",
    )

    def __init__(
        self, number: int, request_id: RequestId, choice: int = 0, ready: asyncio.Event | None = None
    ) -> None:
        self.number = number
        self.request_id = request_id
        self.choice = choice
        self.done = False  # the client took its end
        self.taken = 0  # output ids the client took
        self.first_delta_at: float | None = None
        self._accept: Accept | None = None
        self._text: OutputText | None = None
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._told = False  # the client took Accepted
        self._first_index = 0
        self._end: End | None = None
        self._status: Status | None = None
        self._ready = ready or asyncio.Event()

    @property
    def over(self) -> bool:
        """The core has no more to say to it."""
        return self._end is not None or self._status is not None

    @property
    def failed(self) -> bool:
        return self._status is not None

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

    def pass_on(
        self, first_index: int, ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> None:
        if not self._ids:
            self._first_index = first_index
        if logprobs:
            self._pad_logprobs()
            self._logprobs.extend(logprobs)
        self._ids.extend(ids)
        self._ready.set()

    def _pad_logprobs(self, length: int | None = None) -> None:
        """Ids that nobody told of, because a record kept no more."""
        missing = (len(self._ids) if length is None else length) - len(self._logprobs)
        self._logprobs.extend((UNTOLD,) * missing)

    def finish(self, end: End) -> None:
        self._end = end
        self._ready.set()

    def fail(self, status: Status) -> None:
        if not self.over:
            self._status = status
            self._ready.set()

    # the client's side
    def take(self) -> Iterator[GenerateEvent]:
        """What there is by now. Raises Status."""
        if self._accept is not None and not self._told:
            self._told = True
            yield self._accepted(self._accept)
        end = self._end
        if self._ids:
            if self.first_delta_at is None:
                self.first_delta_at = asyncio.get_running_loop().time()
            yield self._delta()
        if end is not None:
            text = self._last_text(end)
            if text:
                yield Delta(text, (), self._first_index, choice=self.choice)
            self.done = True
            yield Finished(end.reason, end.usage, end.timings, self.choice)
        elif self._status is not None and not self._ids:
            raise self._status

    def events(self) -> AsyncGenerator[GenerateEvent, None]:
        """Until the end. Raises Status."""
        return events_of((self,), self._ready)

    async def answered(self) -> None:
        """Returns once it is accepted, or failed."""
        while self._accept is None and not self.over:
            await self._ready.wait()
            self._ready.clear()
        self._ready.set()  # nothing is taken yet

    def _accepted(self, accept: Accept) -> Accepted:
        request = accept.request
        if request is not None:
            return Accepted(self.request_id, len(request.prompt_ids), request.seed, self.choice)
        prompt_tokens = self._end.usage.prompt_tokens if self._end is not None else 0
        return Accepted(self.request_id, prompt_tokens, 0, self.choice)

    def _delta(self) -> Delta:
        assert self._text is not None, "ids before accepted"
        ids, self._ids = tuple(self._ids), []
        self.taken += len(ids)
        first_index, self._first_index = self._first_index, self._first_index + len(ids)
        entries: tuple[IdLogprobs, ...] = ()
        if self._logprobs:
            self._pad_logprobs(len(ids))
            told, self._logprobs = self._logprobs, []
            entries = tuple(_entries(ids, told, self._text.token_bytes))
        return Delta(self._text.feed(ids), ids, first_index, entries, self.choice)

    def _last_text(self, end: End) -> str:
        """Goes without ids: who resumes with all ids, because it missed the end, gets it again."""
        assert self._text is not None
        return self._text.end((), end.byte_cut)


async def events_of(clients: Sequence[Client], ready: asyncio.Event) -> AsyncGenerator[GenerateEvent, None]:
    """Until the last one's end; whatever comes while an event is taken sets `ready` again. Raises Status."""
    left = list(clients)
    while left:
        await ready.wait()
        ready.clear()
        for client in tuple(left):
            for event in client.take():
                yield event
            if client.done:
                left.remove(client)


def _entries(
    ids: Sequence[int], told: Sequence[TokenLogprobs], token_bytes: Callable[[int], bytes]
) -> Iterator[IdLogprobs]:
    for token_id, entry in zip(ids, told, strict=True):
        top = tuple(
            TopLogprob(other, logprob, token_bytes(other))
            for other, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        )
        yield IdLogprobs(entry.logprob, entry.rank, token_bytes(token_id), top)

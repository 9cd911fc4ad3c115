"""One client's stream on its way out: what the core passed on and the client has not taken yet.

A slow reader blocks nobody: what it does not take is added to its next delta, up to what a message may hold.
So is what comes before its interval is full, if it asked for one.
The buffer is bounded by the request's tokens. Text is made when the client takes it, in its own task.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from math import fsum

from chassis.errors import Status
from chassis.ids import RequestId
from chassis.messages.gateway import Accepted, Delta, Finished, GenerateEvent, IdLogprobs, PromptLogprobs
from chassis.messages.sampling import UNTOLD, PromptTold, TokenLogprobs
from gateway.detokenizer import OutputText
from gateway.event_sizes import entries_of, fitting
from gateway.events import Accept, End
from gateway.line import Waiting


class Client:
    """`ready` is set when there may be something to take; choices of one call share it."""

    __slots__ = (
        "_accept",
        "_end",
        "_first_index",
        "_ids",
        "_interval",
        "_logprobs",
        "_prompt",
        "_ready",
        "_status",
        "_text",
        "_told",
        "_waiting",
        "choice",
        "done",
        "first_delta_at",
        "number",
        "request_id",
        "taken",
    )

    def __init__(
        self,
        number: int,
        request_id: RequestId,
        choice: int = 0,
        ready: asyncio.Event | None = None,
        interval: int = 0,
        waiting: Waiting | None = None,
    ) -> None:
        """`interval`: ids of a delta, at least, but of the first and the last. `waiting`: its place in the
        line for a first token."""
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
        self._prompt: PromptTold | None = None
        self._told = False  # the client took Accepted
        self._first_index = 0
        self._interval = interval
        self._end: End | None = None
        self._status: Status | None = None
        self._ready = ready or asyncio.Event()
        self._waiting = waiting

    @property
    def over(self) -> bool:
        """The core has no more to say to it."""
        return self._end is not None or self._status is not None

    @property
    def failed(self) -> bool:
        return self._status is not None

    @property
    def opening(self) -> Accepted | None:
        """What `take` begins with."""
        return self._accepted(self._accept) if self._accept is not None else None

    @property
    def status(self) -> Status | None:
        return self._status

    @property
    def mean_logprob(self) -> float | None:
        """Of the ids not taken yet, those that somebody told of. None: of none."""
        told = [entry.logprob for entry in self._logprobs if entry.rank]
        return fsum(told) / len(told) if told else None

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
        self,
        first_index: int,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt: PromptTold | None = None,
    ) -> None:
        if not self._ids:
            self._first_index = first_index
        self.leave_line(began=True)
        if prompt is not None:
            self._prompt = prompt
        if logprobs:
            self._pad_logprobs()
            self._logprobs.extend(logprobs)
        self._ids.extend(ids)
        if self._due:
            self._ready.set()

    @property
    def _due(self) -> bool:
        """Whether there are ids for a delta."""
        held = len(self._ids)
        return held > 0 and (held >= self._interval or self.first_delta_at is None or self.over)

    def _pad_logprobs(self, length: int | None = None) -> None:
        """Ids that nobody told of, because a record kept no more."""
        missing = (len(self._ids) if length is None else length) - len(self._logprobs)
        self._logprobs.extend((UNTOLD,) * missing)

    def leave_line(self, began: bool = False) -> None:
        """It waits for a first token no longer."""
        if self._waiting is not None:
            self._waiting.ends(asyncio.get_running_loop().time(), began)
            self._waiting = None

    def finish(self, end: End) -> None:
        self._end = end
        self.leave_line()
        self._ready.set()

    def fail(self, status: Status) -> None:
        if not self.over:
            self._status = status
            self._ready.set()

    def chosen(self, choice: int, logprobs: bool) -> None:
        """A candidate becomes this choice; `logprobs`: what was told of its ids is the client's."""
        self.choice = choice
        if not logprobs:
            self._logprobs.clear()

    # the client's side
    def take(self) -> Iterator[GenerateEvent]:
        """What there is by now. Raises Status."""
        if self._accept is not None and not self._told:
            self._told = True
            yield self._accepted(self._accept)
        yield from self.take_prompt()
        end = self._end  # no ids follow it
        while self._due:
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

    def take_prompt(self) -> Iterator[PromptLogprobs]:
        """What is told of the prompt, if that has come."""
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            yield from self._prompt_logprobs(prompt)

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
        count = fitting(self._ids, self._logprobs, self._text.token_bytes)
        ids, self._ids = tuple(self._ids[:count]), self._ids[count:]
        self.taken += len(ids)
        first_index, self._first_index = self._first_index, self._first_index + len(ids)
        entries: tuple[IdLogprobs, ...] = ()
        if self._logprobs:
            self._pad_logprobs(len(ids))
            told, self._logprobs = self._logprobs[: len(ids)], self._logprobs[len(ids) :]
            entries = entries_of(ids, told, self._text.token_bytes)
        return Delta(self._text.feed(ids), ids, first_index, entries, self.choice)

    def _prompt_logprobs(self, prompt: PromptTold) -> Iterator[PromptLogprobs]:
        assert self._text is not None, "told before accepted"
        ids, told, token_bytes, taken = prompt.ids, prompt.entries, self._text.token_bytes, 0
        while taken < len(ids):
            until = taken + fitting(ids[taken:], told[taken:], token_bytes)
            entries = entries_of(ids[taken:until], told[taken:until], token_bytes)
            yield PromptLogprobs(ids[taken:until], 1 + taken, entries, self.choice)
            taken = until

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

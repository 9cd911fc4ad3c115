"""A chat: the turns so far, and the next answer to them.

The user's turn and the answer are added when the answer has ended, however it ended; of one that failed or
was left nothing is added, so that it can be asked again.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from shoal.client.asynchronous import AsyncClient, AsyncStream
from shoal.client.blocking import Client, Stream
from shoal.client.errors import InvalidArgument
from shoal.client.events import Delta, Event, Finished
from shoal.client.params import Params


class History:
    """The turns; a system turn stays first."""

    def __init__(self, params: Params | None = None, system: str = "") -> None:
        """Raises InvalidArgument: a chat has one answer a turn."""
        self.params = params or Params()
        if (self.params.n or 1) > 1:
            raise InvalidArgument("INVALID_ARGUMENT", f"n: {self.params.n}; 1 in a conversation")
        self.turns: list[tuple[str, str]] = [("system", system)] if system else []

    def asked(self, text: str) -> tuple[list[tuple[str, str]], Params]:
        """The prompt of the next answer. A client key names one answer, so each turn has its own of it."""
        key = self.params.client_key
        params = replace(self.params, client_key=f"{key}.{len(self.turns)}") if key else self.params
        return [*self.turns, ("user", text)], params

    def answered(self, text: str, pieces: list[str]) -> None:
        self.turns += [("user", text), ("assistant", "".join(pieces))]

    def system(self, text: str) -> None:
        """Another system prompt from here on; empty: none."""
        self.turns[: self._head] = [("system", text)] if text else []

    def reset(self) -> None:
        """Forgets all but the system prompt."""
        del self.turns[self._head :]

    @property
    def _head(self) -> int:
        return int(bool(self.turns) and self.turns[0][0] == "system")

    def undo(self) -> str | None:
        """Forgets the last exchange; what the user had said, None if there is none."""
        if len(self.turns) < 2 or self.turns[-1][0] != "assistant":
            return None
        (_, text), _ = self.turns[-2:]
        del self.turns[-2:]
        return text


class Conversation(History):
    def __init__(self, client: Client, params: Params | None = None, system: str = "") -> None:
        super().__init__(params, system)
        self._client = client
        self._under_way: Stream | None = None

    def stream(self, text: str, *, timeout_s: float | None = None) -> Iterator[Event]:
        """The events of the next answer. Raises ShoalError."""
        prompt, params = self.asked(text)
        pieces: list[str] = []
        with self._client.generate(prompt, params, timeout_s=timeout_s) as events:
            self._under_way = events
            for event in events:
                if isinstance(event, Delta):
                    pieces.append(event.text)
                elif isinstance(event, Finished):
                    self.answered(text, pieces)
                    self._under_way = None
                yield event

    def say(self, text: str, *, timeout_s: float | None = None) -> str:
        """The next answer, whole. Raises ShoalError."""
        for _ in self.stream(text, timeout_s=timeout_s):
            pass
        return self.turns[-1][1]

    def cancel(self) -> None:
        """Ends the answer under way, if there is one, from any thread. Raises ShoalError."""
        if self._under_way is not None:
            self._under_way.cancel()


class AsyncConversation(History):
    def __init__(self, client: AsyncClient, params: Params | None = None, system: str = "") -> None:
        super().__init__(params, system)
        self._client = client
        self._under_way: AsyncStream | None = None

    async def stream(self, text: str, *, timeout_s: float | None = None) -> AsyncIterator[Event]:
        """The events of the next answer. Raises ShoalError."""
        prompt, params = self.asked(text)
        pieces: list[str] = []
        async with self._client.generate(prompt, params, timeout_s=timeout_s) as events:
            self._under_way = events
            async for event in events:
                if isinstance(event, Delta):
                    pieces.append(event.text)
                elif isinstance(event, Finished):
                    self.answered(text, pieces)
                    self._under_way = None
                yield event

    async def say(self, text: str, *, timeout_s: float | None = None) -> str:
        """The next answer, whole. Raises ShoalError."""
        async for _ in self.stream(text, timeout_s=timeout_s):
            pass
        return self.turns[-1][1]

    async def cancel(self) -> None:
        """Ends the answer under way, if there is one. Raises ShoalError."""
        if self._under_way is not None:
            await self._under_way.cancel()

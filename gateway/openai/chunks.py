"""Pure. Streams: each event of the gateway becomes the bytes of the server-sent events that tell it.

What most chunks share is written once a choice; a chunk of text alone costs one string in JSON.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from chassis.errors import Status
from chassis.messages.gateway import Accepted, Delta, Finished, GenerateEvent, IdLogprobs, PromptLogprobs
from gateway.openai.body import Circumstances
from gateway.openai.call import Asked
from gateway.openai.errors import in_openai_words
from gateway.openai.gathered import Spent, finish_reason
from gateway.openai.logprobs import TextLogprobs, chat_logprobs
from gateway.openai.prompt import Prompt
from gateway.openai.tools import ToolAnswer
from gateway.tool_calls.reading import Read

DONE = b"data: [DONE]\n\n"


class Chunks:
    """Of one answer. A kind of answer says how it begins a choice and what holds its text."""

    kind = ""
    prefix = ""

    def __init__(self, asked: Asked, where: Circumstances, prompts: Sequence[Prompt]) -> None:
        self._asked = asked
        self._where = where
        self._prompts = prompts
        self._spent = Spent()
        self._open: dict[int, tuple[bytes, bytes]] = {}  # by index, what stands around its text
        self._shared: dict[str, Any] = {}
        self._plain = asked.logprobs is None and not asked.token_ids
        self.request_id = ""

    def take(self, place: int, event: GenerateEvent) -> bytes:
        """The events of one prompt; may be nothing. Raises Status for what was cut off."""
        match event:
            case Delta(text):
                index = place * self._asked.n + event.choice
                opening = b"" if index in self._open else self._begin(place, index)
                if self._asked.drop_output:
                    return opening
                if self._plain:
                    if not text:
                        return opening
                    before, after = self._open[index]
                    return opening + before + orjson.dumps(text) + after
                return opening + self._detailed(index, event)
            case Finished(reason):
                index = place * self._asked.n + event.choice
                opening = b"" if index in self._open else self._begin(place, index)
                self._spent.add(event)
                word = "length" if self._asked.drop_output else finish_reason(reason)
                return opening + self._chunk(self._choice(index, "", finish=word))
            case Accepted(request_id):
                self._accepted(request_id)
            case PromptLogprobs():
                return self._prompt_told(place, event)
        return b""

    def end(self) -> bytes:
        """What follows the last choice's end."""
        if not self._asked.include_usage:
            return DONE
        return self._chunk(None, self._spent.told(self._asked.drop_output)) + DONE

    def failed(self, status: Status) -> bytes:
        """The last that is said of a stream that broke."""
        return sse(in_openai_words(status, self._asked.chat)[1])

    def _accepted(self, request_id: str) -> None:
        if not self.request_id:
            self.request_id = request_id
            self._shared = {
                "id": f"{self.prefix}-{request_id}",
                "object": self.kind,
                "created": self._where.created_s,
                "model": self._where.model,
                "system_fingerprint": None,
            }

    def _begin(self, place: int, index: int) -> bytes:
        around = self._chunk(self._choice(index, "\x00"))
        marker = orjson.dumps("\x00")
        before, _, after = around.partition(marker)
        self._open[index] = (before, after)
        return self._opening(place, index)

    def _detailed(self, index: int, event: Delta) -> bytes:
        if not event.text and not event.ids:
            return b""
        choice = self._choice(index, event.text, self._logprobs(index, event.logprobs))
        if self._asked.token_ids:
            choice["token_ids"] = event.ids
        return self._chunk(choice)

    def _chunk(
        self, choice: dict[str, Any] | None, usage: dict[str, object] | None = None, **more: object
    ) -> bytes:
        chunk = self._shared | {"choices": [] if choice is None else [choice]} | more
        if self._asked.include_usage:
            chunk["usage"] = usage
        return sse(chunk)

    # what the kinds differ in
    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        raise AssertionError("a kind's")

    def _opening(self, place: int, index: int) -> bytes:
        raise AssertionError("a kind's")

    def _logprobs(self, index: int, entries: Sequence[IdLogprobs]) -> dict[str, Any] | None:
        raise AssertionError("a kind's")

    def _prompt_told(self, place: int, event: PromptLogprobs) -> bytes:
        return b""


class ChatChunks(Chunks):
    kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, asked: Asked, where: Circumstances, prompts: Sequence[Prompt]) -> None:
        super().__init__(asked, where, prompts)
        self._reading: dict[int, ToolAnswer] = {}  # by choice, where functions may be called

    def take(self, place: int, event: GenerateEvent) -> bytes:
        if self._asked.tools is None or not isinstance(event, Delta | Finished):
            return super().take(place, event)
        index = event.choice
        opening = b"" if index in self._open else self._begin(place, index)
        reading = self._reading.get(index) or self._reading.setdefault(index, ToolAnswer(self._asked.tools))
        if isinstance(event, Delta):
            return opening + self._read(index, reading, reading.reader.feed(event.text), event)
        self._spent.add(event)
        last = self._read(index, reading, reading.reader.end())
        word = reading.word(finish_reason(event.reason))
        return opening + last + self._chunk(self._choice(index, "", finish=word))

    def _read(self, index: int, answer: ToolAnswer, read: list[Read], event: Delta | None = None) -> bytes:
        """What was read, and what is told of each id of `event` beside."""
        delta = answer.delta(read, self.request_id, index)
        logprobs = None if event is None else self._logprobs(index, event.logprobs)
        ids = event.ids if event is not None and self._asked.token_ids else ()
        if not (delta or logprobs or ids):
            return b""
        choice = self._choice(index, "", logprobs) | {"delta": delta}
        return self._chunk(choice | {"token_ids": ids} if ids else choice)

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        delta = {} if finish is not None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _opening(self, place: int, index: int) -> bytes:
        choice = self._choice(index, "")
        choice["delta"] = {"role": "assistant", "content": "", "refusal": None}
        if not self._asked.token_ids:
            return self._chunk(choice)
        return self._chunk(choice, prompt_token_ids=self._prompts[place].ids)

    def _logprobs(self, index: int, entries: Sequence[IdLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(entries) if self._asked.logprobs is not None and entries else None


class TextChunks(Chunks):
    kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, asked: Asked, where: Circumstances, prompts: Sequence[Prompt]) -> None:
        super().__init__(asked, where, prompts)
        self._told: dict[int, TextLogprobs] = {}

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _opening(self, place: int, index: int) -> bytes:
        """Nothing, or the prompt again. With its log probabilities it is said as these come."""
        asked, prompt = self._asked, self._prompts[place]
        if not asked.echo and not asked.token_ids:
            return b""
        choice = self._choice(index, prompt.text if asked.echo else "")
        if asked.echo and asked.logprobs is not None:
            choice["logprobs"] = self._lists(index).lists([prompt.first])
        if asked.token_ids:
            choice["prompt_token_ids"] = prompt.ids
        return self._chunk(choice)

    def _prompt_told(self, place: int, event: PromptLogprobs) -> bytes:
        if not self._asked.echo or self._asked.logprobs is None:
            return b""
        index = place * self._asked.n + event.choice
        opening = b"" if index in self._open else self._begin(place, index)
        return opening + self._chunk(self._choice(index, "", self._logprobs(index, event.logprobs)))

    def _logprobs(self, index: int, entries: Sequence[IdLogprobs]) -> dict[str, Any] | None:
        if self._asked.logprobs is None or not entries:
            return None
        return self._lists(index).lists(list(entries))

    def _lists(self, index: int) -> TextLogprobs:
        assert self._asked.logprobs is not None
        return self._told.setdefault(index, TextLogprobs(self._asked.logprobs))


def sse(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"

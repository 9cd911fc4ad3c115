"""Bodies of OpenAI's API answered without HTTP: what its endpoints and queue jobs share.

`answer` never raises for what a client did: its failures are statuses and bodies too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from chassis import log
from chassis.errors import Code, Status
from chassis.messages.gateway import GenerateCall, GenerateEvent
from chassis.trace import TraceContext
from gateway.access.caller import Caller
from gateway.admission import STREAM_INTERVAL_MAX
from gateway.front import Front
from gateway.openai.body import Circumstances, chat_body, text_body
from gateway.openai.call import Asked, chat_asked, completion_asked, in_form, parse_body
from gateway.openai.errors import BadField, in_openai_words
from gateway.openai.gathered import Gathered
from gateway.openai.prompt import Prompt, prompt_of, wants_ids, wants_text_of_ids
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.openai.structured import renamed

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
KEY_BYTES_MAX = 240

Take = Callable[[int, GenerateEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Terms:
    """What comes beside a body."""

    client_key: str = ""
    time_left_ms: int | None = None
    priority: int | None = None  # in place of the body's
    trace: TraceContext | None = None


NO_TERMS = Terms()


async def answer(
    front: Front, who: Caller, url: str, body: dict[str, Any], created_s: int, terms: Terms = NO_TERMS
) -> tuple[int, dict[str, Any]]:
    """HTTP status and body, as over HTTP, for the two endpoints above. A stream is refused."""
    try:
        asked = asked_of(url, body)
        if asked.stream:
            raise BadField("stream", "not here: the answer is one body")
        return 200, await Answering(front, who, asked, created_s, terms).whole()
    except Status as status:
        return in_openai_words(status, chat=url == CHAT)
    except Exception as error:
        log.exception("answer failed", error)
        return in_openai_words(Status(Code.INTERNAL, "gateway: internal error"), chat=url == CHAT)


def asked_of(url: str, body: dict[str, Any]) -> Asked:
    """Raises Status."""
    match url:
        case "/v1/chat/completions":
            return chat_asked(parse_body(body, ChatRequest))
        case "/v1/completions":
            return completion_asked(parse_body(body, CompletionRequest))
        case _:
            raise BadField("url", f"{CHAT} or {COMPLETIONS}")


class Answering:
    """One body's calls, on their way."""

    def __init__(self, front: Front, who: Caller, asked: Asked, created_s: int, terms: Terms) -> None:
        self._front = front
        asked = asked if asked.tools is None else in_form(asked, self._tool_form(who, asked.calls[0].model))
        self.asked = asked
        self._terms = terms
        self._calls = [self._call(who, call, place) for place, call in enumerate(asked.calls)]
        self.where = Circumstances(asked.calls[0].model or self._only_model(who), created_s)
        self.request_id = ""

    async def prepare(self) -> list[Prompt]:
        """Prompts, as far as the answer is to say something of them. Raises Status."""
        return [await self._prepare(place) for place in range(len(self._calls))]

    async def whole(self) -> dict[str, Any]:
        """The answer's body. Raises Status."""
        prompts = await self.prepare()
        answers = [Gathered() for _ in prompts]

        async def take(place: int, event: GenerateEvent) -> None:
            answers[place].take(event)

        await self.each_event(take)
        self.request_id = answers[0].request_id
        if self.asked.chat:
            return chat_body(self.asked, self.where, prompts[0], answers[0])
        return text_body(self.asked, self.where, prompts, answers)

    async def each_event(self, take: Take) -> None:
        """With the place of its prompt; those of several come as they may. Raises Status."""
        if len(self._calls) == 1:
            await self._events(0, take)
            return
        failed: list[Status] = []
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(len(self._calls)):
                    group.create_task(self._events(place, take))
        except* Status as several:
            failed = [error for error in several.exceptions if isinstance(error, Status)]
        if failed:
            raise failed[0]

    async def _events(self, place: int, take: Take) -> None:
        try:
            async with aclosing(self._front.generate(self._calls[place], self._terms.trace)) as events:
                async for event in events:
                    await take(place, event)
        except Status as status:
            raise renamed(status, self.asked.grammar_field) from None

    def _call(self, who: Caller, call: GenerateCall, place: int) -> GenerateCall:
        terms = self._terms
        key = terms.client_key
        if len(key.encode(errors="replace")) > KEY_BYTES_MAX:
            raise BadField("Idempotency-Key", f"at most {KEY_BYTES_MAX} bytes")
        return replace(
            call,
            tenant=who.tenant,
            key=who.key,
            client_key=f"{key}/{place}" if key and place else key,
            time_left_ms=terms.time_left_ms,
            priority=call.priority if terms.priority is None else terms.priority,
            stream_interval=0 if self.asked.stream else STREAM_INTERVAL_MAX,  # of a whole, nobody sees pieces
        )

    async def _prepare(self, place: int) -> Prompt:
        asked, call = self.asked, self._calls[place]
        ids: tuple[int, ...] = call.token_ids or ()
        tokens: tuple[bytes, ...] = ()
        if wants_ids(asked, call) and call.token_ids is None:
            ids = await self._front.tokenize(call)
            self._calls[place] = replace(call, chat=None, prompt=None, token_ids=ids)
        if wants_text_of_ids(asked, call):
            tokens = await self._front.detokenize(self._calls[place])
        return prompt_of(call, ids, tokens)

    def _tool_form(self, who: Caller, model: str) -> str:
        """Of a model that is not there any: the call will say so."""
        forms = [m.tool_form for m in self._front.list_models(who) if not model or m.name == model]
        return forms[0] if len(forms) == 1 else "hermes"

    def _only_model(self, who: Caller) -> str:
        models = self._front.list_models(who)
        return models[0].name if len(models) == 1 else ""

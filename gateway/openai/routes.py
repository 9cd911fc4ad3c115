"""The endpoints of OpenAI's API over HTTP.

Who calls comes first, then the body. The answer of a stream begins with the first token, so that what is
refused, or fails while it waits, has its own status.
"""

from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from chassis import log
from chassis.errors import Code, Status
from chassis.messages.gateway import ModelInfo
from gateway.access.caller import Caller, bearer
from gateway.admission import not_served
from gateway.config import Config
from gateway.front import Front
from gateway.http_body import parse_object, read_body
from gateway.http_errors import error_body, retry_headers
from gateway.http_presence import while_there
from gateway.openai.answer import CHAT, COMPLETIONS, Answering, Terms, asked_of
from gateway.openai.errors import BadField, in_openai_words
from gateway.openai.sse import EventStream
from gateway.traceparent import caller_of

NS_PER_S = 1_000_000_000
TIMEOUT_HEADER = "x-shoal-timeout-ms"


def routes(front: Front, config: Config, wall_ns: Callable[[], int]) -> list[BaseRoute]:
    models = ModelList(front, wall_ns() // NS_PER_S)
    return [
        Route(CHAT, Generation(front, config, wall_ns, CHAT), methods=["POST"]),
        Route(COMPLETIONS, Generation(front, config, wall_ns, COMPLETIONS), methods=["POST"]),
        Route("/v1/models", models.all),
        Route("/v1/models/{name:path}", models.one),
    ]


class Generation:
    """One of the two endpoints that generate."""

    def __init__(self, front: Front, config: Config, wall_ns: Callable[[], int], url: str) -> None:
        self._front = front
        self._config = config
        self._wall_ns = wall_ns
        self._url = url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answering = await self._answering(request)
            if answering.asked.stream:
                await while_there(request, EventStream(answering, send).run())
                return
            body = await while_there(request, answering.whole())
            if body is None:
                return  # nobody is there to hear it
            response = json_response(200, body, {"x-request-id": answering.request_id})
        except ClientDisconnect:
            return
        except Status as status:
            response = refusal(status, chat=self._url == CHAT)
        except Exception as error:
            log.exception("http call failed", error)
            response = refusal(Status(Code.INTERNAL, "gateway: internal error"))
        await response(scope, receive, send)

    async def _answering(self, request: Request) -> Answering:
        """Raises Status and ClientDisconnect."""
        who = caller_at(self._front, request)
        check_json(request)
        config = self._config
        data = await read_body(request, config.http_body_bytes_max, config.http_body_timeout_s)
        asked = asked_of(self._url, parse_object(data))
        headers = request.headers
        terms = Terms(
            client_key=headers.get("idempotency-key", ""),
            time_left_ms=_time_left_ms(headers.get(TIMEOUT_HEADER)),
            trace=caller_of(headers.get("traceparent")),
        )
        return Answering(self._front, who, asked, self._wall_ns() // NS_PER_S, terms)


class ModelList:
    """What is served. `since_s`: nobody keeps when a model came to be; it is when this gateway did."""

    def __init__(self, front: Front, since_s: int) -> None:
        self._front = front
        self._since_s = since_s

    async def all(self, request: Request) -> Response:
        try:
            who = caller_at(self._front, request)
            data = [self._told(model) for model in self._front.list_models(who)]
        except Status as status:
            return refusal(status)
        return json_response(200, {"object": "list", "data": data})

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            served = self._front.list_models(caller_at(self._front, request))
            for model in served:
                if model.name == name:
                    return json_response(200, self._told(model))
            raise not_served("model", name, [model.name for model in served])
        except Status as status:
            return refusal(status)

    def _told(self, model: ModelInfo) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._since_s,
            "owned_by": "shoal",
            "max_model_len": model.context_len_max,
        }


# ---- what every endpoint does ----------------------------------------------------------------------


def caller_at(front: Front, request: Request) -> Caller:
    """Raises Status."""
    return front.authenticate(bearer(request.headers.get("authorization")))


def check_json(request: Request) -> None:
    """A page elsewhere can make a browser post text without asking, but not JSON. Raises Status."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise WrongType(f"content-type: {kind[:100]!r}; send application/json")


class WrongType(Status):
    """HTTP 415."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_ARGUMENT, message)


def json_response(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def refusal(status: Status, chat: bool = False) -> Response:
    if isinstance(status, WrongType):
        return json_response(415, error_body(415, status.message))
    number, body = in_openai_words(status, chat)
    headers = retry_headers(status)
    if number == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(number, body, headers)


def _time_left_ms(text: str | None) -> int | None:
    """Raises Status."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:12]) <= 0xFFFFFFFF and len(text) <= 10):
        raise BadField(TIMEOUT_HEADER, f"{text[:20]!r}; whole milliseconds, 1 to {0xFFFFFFFF}")
    return int(text)

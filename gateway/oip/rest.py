"""The REST door of the Open Inference Protocol, with Triton's generate endpoints.

Who calls comes first, then the body. Failures are `{"error": text}` with their status; on a stream they are
an event once the first one is out.
"""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from chassis import log
from chassis.errors import Code, Status
from chassis.messages import BadMessage
from chassis.messages.open_inference import InferRequest, InferResponse
from gateway.access.caller import Caller, bearer
from gateway.config import Config
from gateway.http_body import parse_object, read_body
from gateway.http_errors import http_status, retry_headers
from gateway.http_presence import while_there
from gateway.oip.rest_models import config_body, index_body, metadata_body, server_body, statistics_body
from gateway.oip.rest_tensors import (
    JSON_LENGTH,
    generate_answer,
    generate_request,
    infer_answer,
    infer_request,
)
from gateway.oip.server import Server, Terms
from gateway.traceparent import caller_of

MODEL = "/v2/models/{name:path}"  # names have slashes
VERSIONED = "/versions/{version}"
Work = Callable[[Request, Caller], Awaitable[Response]]


def routes(server: Server, config: Config) -> list[BaseRoute]:
    door = _Door(server, config)
    generating = _Generating(door)
    found: list[BaseRoute] = [
        Route("/v2", door.open(door.server_metadata)),
        Route("/v2/health/live", door.open(door.live)),
        Route("/v2/health/ready", door.open(door.ready)),
        Route("/v2/models/stats", door.guarded(door.statistics)),
        Route("/v2/repository/index", door.guarded(door.index), methods=["POST"]),
        Route("/v2/repository/models/{name:path}/load", door.guarded(door.load), methods=["POST"]),
        Route("/v2/repository/models/{name:path}/unload", door.guarded(door.unload), methods=["POST"]),
        Route("/v2/{memory:str}sharedmemory/status", door.guarded(door.no_regions)),
        Route(
            "/v2/{rest:path}sharedmemory/{more:path}", door.guarded(door.no_memory), methods=["GET", "POST"]
        ),
        Route("/v2/trace/setting", door.guarded(door.settings), methods=["GET", "POST"]),
        Route("/v2/logging", door.guarded(door.settings), methods=["GET", "POST"]),
    ]
    both = (MODEL + VERSIONED, MODEL)  # the longer first: the first that fits is taken
    for model in both:
        found += [
            Route(f"{model}/ready", door.guarded(door.model_ready)),
            Route(f"{model}/config", door.guarded(door.config)),
            Route(f"{model}/stats", door.guarded(door.statistics)),
            Route(f"{model}/infer", door.guarded(door.infer), methods=["POST"]),
            Route(f"{model}/generate", door.guarded(door.generate), methods=["POST"]),
            Route(f"{model}/generate_stream", generating, methods=["POST"]),
        ]
    return [*found, *(Route(model, door.guarded(door.metadata)) for model in both)]


class _Door:
    def __init__(self, server: Server, config: Config) -> None:
        self.server = server
        self._config = config

    def open(self, work: Work) -> Callable[[Request], Awaitable[Response]]:
        """For everybody: what load balancers ask."""

        async def endpoint(request: Request) -> Response:
            return await work(request, Caller(""))

        return endpoint

    def guarded(self, work: Work) -> Callable[[Request], Awaitable[Response]]:
        """For who may come in."""

        async def endpoint(request: Request) -> Response:
            try:
                return await work(request, self.who(request))
            except ClientDisconnect:
                raise
            except Exception as error:
                return refusal(error)

        return endpoint

    def who(self, request: Request) -> Caller:
        """Raises Status."""
        origin = request.headers.get("origin")
        if origin is not None and _host(origin) != request.headers.get("host"):
            raise Status(Code.PERMISSION_DENIED, f"origin: {origin[:100]}; pages of other sites may not call")
        return self.server.who(bearer(request.headers.get("authorization")))

    async def body(self, request: Request) -> bytes:
        return await read_body(request, self._config.http_body_bytes_max, self._config.http_body_timeout_s)

    # ---- what is told ------------------------------------------------------------------------------

    async def server_metadata(self, request: Request, who: Caller) -> Response:
        return _json(server_body(self.server.description()))

    async def live(self, request: Request, who: Caller) -> Response:
        return _json({"live": True})

    async def ready(self, request: Request, who: Caller) -> Response:
        return _json({"ready": self.server.ready}, 200 if self.server.ready else 503)

    async def model_ready(self, request: Request, who: Caller) -> Response:
        name, version = _model(request)
        ready = self.server.model_ready(name, version, who)
        if self.server.ready and not ready:
            self.server.model(name, version, who)  # one that is none will not become ready
        return _json({"name": name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request, who: Caller) -> Response:
        return _json(metadata_body(self.server.model(*_model(request), who)))

    async def config(self, request: Request, who: Caller) -> Response:
        return _json(config_body(self.server.model(*_model(request), who)))

    async def statistics(self, request: Request, who: Caller) -> Response:
        return _json(statistics_body(await self.server.statistics(*_model(request), who)))

    async def index(self, request: Request, who: Caller) -> Response:
        data = await self.body(request)
        asked = parse_object(data) if data else {}
        return _json(index_body(self.server.index("", asked.get("ready") is True, who)))

    async def load(self, request: Request, who: Caller) -> Response:
        await self.server.load("", request.path_params["name"], await self._parameters(request), who)
        return _json({})

    async def unload(self, request: Request, who: Caller) -> Response:
        await self.server.unload("", request.path_params["name"], await self._parameters(request), who)
        return _json({})

    async def _parameters(self, request: Request) -> tuple[str, ...]:
        data = await self.body(request)
        found = (parse_object(data) if data else {}).get("parameters") or {}
        if not isinstance(found, dict):
            raise BadMessage("parameters: an object")
        return tuple(sorted(found))

    async def no_regions(self, request: Request, who: Caller) -> Response:
        return _json([])

    async def no_memory(self, request: Request, who: Caller) -> Response:
        if request.url.path.endswith("/unregister"):
            return _json({})  # there is none
        raise Status(Code.UNIMPLEMENTED, "shared memory: not offered; send tensors in the request")

    async def settings(self, request: Request, who: Caller) -> Response:
        if request.method == "POST" and parse_object(await self.body(request) or b"{}"):
            raise Status(
                Code.UNIMPLEMENTED, "settings: are the services' configuration; none can be set here"
            )
        return _json({})

    # ---- inference ---------------------------------------------------------------------------------

    async def infer(self, request: Request, who: Caller) -> Response:
        data = await self.body(request)
        head_len = request.headers.get(JSON_LENGTH)
        if head_len is not None and not (_is_len(head_len) and int(head_len) <= len(data)):
            raise BadMessage(f"{JSON_LENGTH}: {head_len[:20]!r}; up to {len(data)}, the body's")
        head = data if head_len is None else data[: int(head_len)]
        asked, binary = infer_request(*_model(request), parse_object(head), data[len(head) :])
        answer = await while_there(request, self.server.infer(asked, terms_of(request, who)))
        if answer is None:
            raise ClientDisconnect
        body, json_len = infer_answer(answer, binary)
        if json_len is None:
            return Response(body, media_type="application/json")
        return Response(body, 200, {JSON_LENGTH: str(json_len)}, "application/octet-stream")

    async def generate(self, request: Request, who: Caller) -> Response:
        asked = generate_request(*_model(request), parse_object(await self.body(request)))
        answer = await while_there(request, self.server.infer(asked, terms_of(request, who)))
        if answer is None:
            raise ClientDisconnect
        return Response(generate_answer(answer), media_type="application/json")


class _Generating:
    """`generate_stream`: one event a piece."""

    def __init__(self, door: _Door) -> None:
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        events = _Events(send)
        try:
            who = self._door.who(request)
            asked = generate_request(*_model(request), parse_object(await self._door.body(request)))
            await while_there(request, self._run(asked, terms_of(request, who), events))
        except ClientDisconnect:
            return
        except Exception as error:
            response = refusal(error)
            if not events.begun:
                await response(scope, receive, send)
                return
            await events.emit(bytes(response.body))
            await events.end()

    async def _run(self, asked: InferRequest, terms: Terms, events: "_Events") -> None:
        async def emit(response: InferResponse) -> None:
            await events.emit(generate_answer(response))

        await self._door.server.stream(asked, terms, emit, default=True)
        await events.end()


class _Events:
    """Server-sent events; the head goes out with the first."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send

    async def emit(self, data: bytes) -> None:
        begun, self.begun = self.begun, True
        if not begun:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        message: Message = {
            "type": "http.response.body",
            "body": b"data: " + data + b"\n\n",
            "more_body": True,
        }
        await self._send(message)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def terms_of(request: Request, who: Caller) -> Terms:
    return Terms(who, None, caller_of(request.headers.get("traceparent")))


def _model(request: Request) -> tuple[str, str]:
    return request.path_params.get("name", ""), request.path_params.get("version", "")


def _is_len(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 12


def _host(origin: str) -> str:
    """Empty: it is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def refusal(error: Exception) -> Response:
    match error:
        case Status():
            status = error
        case BadMessage():
            status = Status(Code.INVALID_ARGUMENT, f"request: {error}")
        case _:
            log.exception("http call failed", error)
            status = Status(Code.INTERNAL, "gateway: internal error")
    headers = retry_headers(status)
    if status.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    response = _json({"error": status.message}, http_status(status))
    response.headers.update(headers)
    return response

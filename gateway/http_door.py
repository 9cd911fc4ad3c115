"""The HTTP doors: one listener of the gateway's own event loop, with the routes of every protocol behind it.

Each protocol's package has `routes(front, config)`. What a door does not answer itself (a path that is
nobody's, a method, a crash) is answered here in its protocol's shape. Of requests only crashes are logged.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import orjson
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Message, Receive, Scope, Send

from chassis import log
from chassis.errors import Code, Status
from gateway.batches import description as batches
from gateway.config import Config
from gateway.front import Front
from gateway.http_errors import error_body, http_status, retry_headers
from gateway.http_host import stranger
from gateway.http_protocol import protocol_class
from gateway.oip import description as inference
from gateway.openai import description as openai
from gateway.openai.routes import routes as openai_routes
from gateway.openapi import description
from gateway.page import routes as page_routes

GRACE_S = 1  # for answers under way, when stopping
BACKLOG = 1024
KEEPALIVE_PROBES = 3


@asynccontextmanager
async def serve(
    front: Front, config: Config, wall_ns: Callable[[], int], others: Sequence[BaseRoute] = ()
) -> AsyncIterator[str]:
    """Listens while the context lasts; gives the address. Raises OSError when it cannot."""
    listener = listen(config)
    host, port = listener.getsockname()[:2]
    app = Door([*routes(front, config, wall_ns), *others], config.http_is_private)
    server = _Server(_settings(app, config))
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([listener]), name="http")
        try:
            yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        finally:
            server.should_exit = True
            await asyncio.wait({serving})


def routes(front: Front, config: Config, wall_ns: Callable[[], int]) -> list[BaseRoute]:
    """Of those that need no more than this. They are tried in order: what is asked for most comes first."""
    return [*openai_routes(front, config, wall_ns), *_health_routes(front), _description(), *page_routes()]


def _description() -> Route:
    """Of all that is behind the door, made once."""
    described = orjson.dumps(description(openai.part(), batches.part(), inference.part()))

    async def openapi(request: Request) -> Response:
        return Response(described, media_type="application/json")

    return Route("/openapi.json", openapi)


def _health_routes(front: Front) -> list[BaseRoute]:
    """Alive, and ready to accept requests."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        return JSONResponse({"ready": front.ready}, 200 if front.ready else 503)

    return [Route("/health", health), Route("/ready", ready)]


class Door:
    """The ASGI application."""

    def __init__(self, routes: list[BaseRoute], private: bool = False) -> None:
        """`private`: for this machine alone, whatever other name for it a page has."""
        self._router = Router(routes, redirect_slashes=False)
        self._private = private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        scope["app"] = self  # what has no route is raised
        try:
            if self._private and (name := stranger(scope["headers"])):
                raise Status(
                    Code.PERMISSION_DENIED, f"host: {name!r}; without keys only localhost is answered"
                )
            await self._router(scope, receive, sending)
        except ClientDisconnect:
            pass
        except Exception as error:
            response = _answer_to(error, scope["path"])
            if started:
                raise  # the connection is closed before the answer's end
            await response(scope, receive, send)


def _answer_to(error: Exception, path: str) -> Response:
    match error:
        case Status():
            status = http_status(error)
            return JSONResponse(_told(path, status, error.message), status, retry_headers(error))
        case HTTPException():
            match error.status_code:
                case 404:
                    message = f"there is nothing at {path[:200]}"
                case 405:
                    takes = (error.headers or {}).get("Allow", "")
                    message = f"{error.detail}: {path[:200]} takes {', '.join(sorted(takes.split(', ')))}"
                case _:
                    message = error.detail
            told = _told(path, error.status_code, message)
            return JSONResponse(told, error.status_code, error.headers)
        case _:
            log.exception("http call failed", error)
            return JSONResponse(_told(path, 500, "gateway: internal error"), 500)


def _told(path: str, status: int, message: str) -> dict[str, object]:
    """In the Open Inference Protocol's shape where the path is its, else in OpenAI's."""
    return {"error": message} if (path + "/").startswith("/v2/") else error_body(status, message)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's."""
        yield


def _settings(door: Door, config: Config) -> uvicorn.Config:
    for name in ("uvicorn", "python_multipart"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # garbage that comes in is no news
    return uvicorn.Config(
        door,
        http=protocol_class(
            config.http_connections_max, config.http_head_bytes_max, config.http_head_timeout_s
        ),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        log_level="critical",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.http_keepalive_s,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=config.tls_certificate_file or None,
        ssl_keyfile=config.tls_key_file or None,
        ssl_ca_certs=config.tls_client_ca_file or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.tls_client_ca_file else ssl.CERT_NONE,
    )


def listen(config: Config) -> socket.socket:
    """A socket at `http_address`, whose connections notice a peer that takes nothing. Raises OSError."""
    host, _, port = config.http_address.rpartition(":")
    host = host.strip("[]")
    try:
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError("host:port")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's algorithm off only where the protocol is named; it costs 40 ms an answer
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, int(port)))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, ValueError) as error:
        raise OSError(f"cannot listen on {config.http_address!r}: {error}") from error
    listener.setblocking(False)
    patience_s = max(KEEPALIVE_PROBES, config.http_write_timeout_s)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probing = {
        "TCP_KEEPIDLE": patience_s // KEEPALIVE_PROBES,
        "TCP_KEEPINTVL": patience_s // KEEPALIVE_PROBES,
        "TCP_KEEPCNT": KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": patience_s * 1000,
    }
    for name, value in probing.items():
        if (option := getattr(socket, name, None)) is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
    return listener

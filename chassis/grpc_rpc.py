"""Remote calls over gRPC, without generated stubs: a `Method` names the path and both message classes.

Rules: one channel per address, opened on first use, the least recently used closed above a bound; a lost
connection fails its calls at once and is tried again within a second; nothing is retried here, because
only the caller knows whether a call may happen twice. A peer that stops answering is noticed by pings.
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # the library's chatter is no JSON; read when it is loaded

import grpc
import grpc.aio

from chassis import log
from chassis.errors import RpcError, RpcRejected, RpcUnavailable
from chassis.messages import BadMessage, parse
from chassis.rpc import MESSAGE_BYTES_MAX, UNAVAILABLE_CODES, Handlers, Method, Rep, Req

CHANNELS_MAX = 64
RPC_NAME = "service.shoal.internal"
CONCURRENT_CALLS_MAX = 1024  # in one server's handlers; more are refused with RESOURCE_EXHAUSTED


def _message_options(bytes_max: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", bytes_max),
        ("grpc.max_receive_message_length", bytes_max),
    ]


PING_OPTIONS = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),  # keepalive's own timeout alone notices no frozen peer
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS = [
    *PING_OPTIONS,
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else a process shares one connection's backoff
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),  # also the time one attempt may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *PING_OPTIONS,
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a lottery
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
]


@dataclass(frozen=True, slots=True)
class RpcTls:
    """PEM bytes of one authority's certificate and of ours, for both sides of a call: each proves itself.

    Addresses change and the registry is not trusted with names: certificates are of `RPC_NAME`, wherever they
    are used."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    @classmethod
    def of_folder(cls, folder: Path) -> "RpcTls":
        """Raises OSError."""
        return cls(*((folder / name).read_bytes() for name in ("ca.pem", "service.pem", "service.key")))


class GrpcServer:
    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    async def close(self, grace_s: float = 0.5) -> None:
        await self._server.stop(grace_s)


class GrpcRpc:
    """An `Rpc` of the running loop."""

    def __init__(self, message_bytes_max: int = MESSAGE_BYTES_MAX, tls: RpcTls | None = None) -> None:
        self._message_bytes_max = message_bytes_max
        self._tls = tls
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._calls_of: dict[grpc.aio.Channel, int] = {}  # open calls; a busy channel is not closed
        self._servers: list[GrpcServer] = []
        self._closed = False

    async def serve(self, address: str, handlers: Handlers) -> GrpcServer:
        """Listens on `host:port` (port 0: any). Raises OSError when that is not possible."""
        assert not self._closed
        server = grpc.aio.server(
            options=[*SERVER_OPTIONS, *_message_options(self._message_bytes_max)],
            maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX,
        )
        services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        for method, handler in handlers.items():
            _, service, name = method.path.split("/")
            services.setdefault(service, {})[name] = grpc.unary_unary_rpc_method_handler(
                _servicer(method, handler),
                response_serializer=method.reply.SerializeToString,
            )
        for service, methods in services.items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        try:
            port = self._add_port(server, address)
        except RuntimeError as error:
            await server.stop(None)
            raise OSError(f"cannot listen on {address}: {error}") from None
        await server.start()
        host, _, _ = address.rpartition(":")
        served = GrpcServer(server, f"{host}:{port}")
        self._servers.append(served)
        return served

    async def call(self, address: str, method: Method[Req, Rep], request: Req, timeout_s: float) -> Rep:
        assert isinstance(request, method.request)
        if self._closed:
            raise RpcUnavailable("closed")
        channel = self._channel(address)
        self._calls_of[channel] = self._calls_of.get(channel, 0) + 1
        try:
            reply = await channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.reply.FromString,
            )(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error(address, error) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # Closing a channel cancels its calls; the caller's own cancellation goes on upwards.
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise RpcUnavailable("closed") from None
            raise
        finally:
            self._calls_of[channel] -= 1
            await self._close_idle()
        assert isinstance(reply, method.reply)
        return reply

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._dial(address)
        self._channels.move_to_end(address)
        return channel

    def _dial(self, address: str) -> grpc.aio.Channel:
        options = [*CHANNEL_OPTIONS, *_message_options(self._message_bytes_max)]
        if (tls := self._tls) is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
        options.append(("grpc.ssl_target_name_override", RPC_NAME))
        return grpc.aio.secure_channel(address, credentials, options=options)

    def _add_port(self, server: grpc.aio.Server, address: str) -> int:
        if (tls := self._tls) is None:
            return int(server.add_insecure_port(address))
        credentials = grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)], tls.ca, require_client_auth=True
        )
        return int(server.add_secure_port(address, credentials))

    async def _close_idle(self) -> None:
        if len(self._channels) <= CHANNELS_MAX:
            return
        for address, channel in list(self._channels.items()):
            if not self._calls_of.get(channel):
                del self._channels[address]
                self._calls_of.pop(channel, None)
                await channel.close()
                return

    async def close(self) -> None:
        """Ends this process's servers and calls."""
        self._closed = True
        servers, self._servers = self._servers, []
        for server in servers:
            await server.close(0.0)
        channels, self._channels = list(self._channels.values()), OrderedDict()
        for channel in channels:
            await channel.close()


def _servicer(
    method: Method[Any, Any], handler: Callable[[Any], Awaitable[Any]]
) -> Callable[[Any, Any], Awaitable[Any]]:
    """Turns a handler's refusals into statuses; what it did not mean to raise is logged and INTERNAL.

    Requests are parsed here and not by gRPC, which calls garbage UNKNOWN.
    """

    async def serve(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            request = parse(method.request, data)
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{method.path}: {error}")
        try:
            reply = await handler(request)
        except RpcRejected as error:
            await context.abort(grpc.StatusCode[error.code], error.message)
        except Exception as error:
            log.exception("rpc handler failed", error, method=method.path)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__} in {method.path}")
        assert isinstance(reply, method.reply)
        return reply

    return serve


def _error(address: str, error: grpc.aio.AioRpcError) -> RpcError:
    code, details = error.code().name, error.details() or ""
    if code in UNAVAILABLE_CODES:
        return RpcUnavailable(f"{address}: {code} {details}")
    return RpcRejected(code, details)

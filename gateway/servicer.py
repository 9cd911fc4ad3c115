"""The gRPC door: shoal.v1.Inference, health and reflection over the gateway's internal API.

Messages are parsed here and not by gRPC, so that garbage is INVALID_ARGUMENT and says why. The call's own
deadline counts; a client that leaves, or a connection that pings no more, ends the stream it was reading.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from chassis import log
from chassis.errors import Code, Status
from chassis.messages import BadMessage
from chassis.messages.gateway import (
    GenerateEvent,
    build_cancel_reply,
    build_event,
    build_models,
    build_tokens,
    parse_cancel,
    parse_generate,
    parse_list_models,
    parse_resume,
    parse_tokenize,
)
from chassis.trace import TraceContext
from chassis.wire import gateway_pb2
from gateway.access.caller import Caller, bearer
from gateway.config import Config
from gateway.front import Front
from gateway.traceparent import caller_of

INFERENCE = gateway_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
HEALTH_CHECK_S = 0.5
METADATA_BYTES_MAX = 16 * 1024
PENDING_MAX = 1 << 16  # calls that came and were not looked at yet, of all connections
GRACE_S = 0.5
MESSAGE_LEN_MAX = 2000  # of an error, which travels in a header

Context = Any  # grpc.aio.ServicerContext; its package has no types


@dataclass(frozen=True, slots=True)
class OtherService:
    """Of another protocol, on the same server."""

    name: str
    handlers: grpc.GenericRpcHandler


@asynccontextmanager
async def serve(front: Front, config: Config, others: Sequence[OtherService] = ()) -> AsyncIterator[str]:
    """Listens while the context lasts; gives the address. Raises OSError when it cannot."""
    names = (INFERENCE, *(other.name for other in others))
    server = grpc.aio.server(
        options=_options(config), maximum_concurrent_rpcs=config.streams_len_max + config.streams_len_max // 4
    )
    server.add_generic_rpc_handlers(
        (
            InferenceServicer(front).handlers(),
            _health_handlers(front, names),
            *(other.handlers for other in others),
        )
    )
    reflection.enable_server_reflection((*names, HEALTH, reflection.SERVICE_NAME), server)
    host, _, _ = config.grpc_address.rpartition(":")
    try:
        port = _add_port(server, config)
    except (RuntimeError, OSError) as error:
        raise OSError(f"cannot listen on {config.grpc_address}: {error}") from error
    await server.start()
    try:
        yield f"{host}:{port}" if host != "unix" else config.grpc_address
    finally:
        await server.stop(GRACE_S)


def _add_port(server: grpc.aio.Server, config: Config) -> int:
    """Raises RuntimeError, OSError."""
    if not config.tls_key_file:
        return int(server.add_insecure_port(config.grpc_address))
    pair = (Path(config.tls_key_file).read_bytes(), Path(config.tls_certificate_file).read_bytes())
    ca = Path(config.tls_client_ca_file).read_bytes() if config.tls_client_ca_file else None
    credentials = grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)
    return int(server.add_secure_port(config.grpc_address, credentials))


def _options(config: Config) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.max_send_message_length", config.message_bytes_max),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX // 2),  # beyond it some are refused
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),  # all
        ("grpc.max_concurrent_streams", config.streams_per_connection_max),
        # from a thousand on gRPC would cancel some at random: it is the gateway who refuses, with a reason
        ("grpc.server.max_pending_requests", PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
        ("grpc.keepalive_time_ms", config.keepalive_interval_ms),
        ("grpc.keepalive_timeout_ms", config.keepalive_timeout_ms),
        ("grpc.http2.ping_timeout_ms", config.keepalive_timeout_ms),  # the one that notices a frozen client
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.so_reuseport", 0),  # a taken port is an error, not a lottery
    ]


class InferenceServicer:
    def __init__(self, front: Front) -> None:
        self._front = front

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            INFERENCE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(_streaming(self._generate)),
                "Resume": grpc.unary_stream_rpc_method_handler(_streaming(self._resume)),
                "Cancel": grpc.unary_unary_rpc_method_handler(answering(self._cancel)),
                "ListModels": grpc.unary_unary_rpc_method_handler(answering(self._list_models)),
                "Tokenize": grpc.unary_unary_rpc_method_handler(answering(self._tokenize)),
            },
        )

    def _generate(self, data: bytes, context: Context) -> AsyncGenerator[GenerateEvent, None]:
        who, call = self._who(context), parse_generate(data)
        left_s = context.time_remaining()
        left_ms = None if left_s is None else max(1, int(left_s * 1000))
        return self._front.generate(
            replace(call, tenant=who.tenant, key=who.key, time_left_ms=left_ms), trace_of(context)
        )

    def _resume(self, data: bytes, context: Context) -> AsyncGenerator[GenerateEvent, None]:
        who, (request_id, output_ids) = self._who(context), parse_resume(data)
        return self._front.resume(request_id, output_ids, who.tenant, trace_of(context), who.key)

    async def _cancel(self, data: bytes, context: Context) -> bytes:
        who = self._who(context)
        await self._front.cancel(parse_cancel(data), who.tenant)
        return build_cancel_reply()

    async def _list_models(self, data: bytes, context: Context) -> bytes:
        who = self._who(context)
        parse_list_models(data)
        return build_models(self._front.list_models(who))

    async def _tokenize(self, data: bytes, context: Context) -> bytes:
        who, call = self._who(context), parse_tokenize(data)
        call = replace(call, tenant=who.tenant, key=who.key)
        return build_tokens(await self._front.tokenize(call))

    def _who(self, context: Context) -> Caller:
        return self._front.authenticate(bearer(metadata_of(context, "authorization")))


def _streaming(
    stream: Callable[[bytes, Context], AsyncGenerator[GenerateEvent, None]],
) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
    async def handler(data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            async with aclosing(stream(data, context)) as events:
                async for event in events:
                    yield build_event(event)
        except Exception as error:
            await refuse(context, error)

    return handler


def answering(
    answer: Callable[[bytes, Context], Awaitable[bytes]],
) -> Callable[[bytes, Context], Awaitable[bytes]]:
    async def handler(data: bytes, context: Context) -> bytes:
        try:
            return await answer(data, context)
        except Exception as error:
            await refuse(context, error)

    return handler


async def refuse(context: Context, error: Exception) -> NoReturn:
    """Ends a call with what the user is to know."""
    match error:
        case Status():
            status = error
        case BadMessage():
            status = Status(Code.INVALID_ARGUMENT, f"request: {error}")
        case _:
            log.exception("call failed", error)
            status = Status(Code.INTERNAL, "gateway: internal error")
    hint = () if status.retry_ms is None else (("retry-after-ms", str(status.retry_ms)),)
    await context.abort(grpc.StatusCode[status.code.value], status.message[:MESSAGE_LEN_MAX], hint)
    raise AssertionError("abort returns never")


def trace_of(context: Context) -> TraceContext | None:
    return caller_of(metadata_of(context, "traceparent"))


def metadata_of(context: Context, name: str) -> str | None:
    """The first of this name, if it is text."""
    values = (value for key, value in context.invocation_metadata() or () if key == name)
    first = next(values, None)
    return first if isinstance(first, str) else None


# ---- health ----------------------------------------------------------------------------------------


def _health_handlers(front: Front, names: Sequence[str]) -> grpc.GenericRpcHandler:
    """grpc.health.v1, asked rather than told: the answer is the gateway's readiness at that moment."""

    def status_of(service: str) -> "health_pb2.HealthCheckResponse.ServingStatus.ValueType | None":
        if service not in ("", *names):
            return None
        response = health_pb2.HealthCheckResponse
        return response.SERVING if front.ready else response.NOT_SERVING

    async def check(
        request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = status_of(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service: unknown")
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(
        request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = -1
        while True:
            status = status_of(request.service)
            if status is None:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(HEALTH_CHECK_S)

    parse, build = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
    return grpc.method_handlers_generic_handler(
        HEALTH,
        {
            "Check": grpc.unary_unary_rpc_method_handler(check, parse, build),
            "Watch": grpc.unary_stream_rpc_method_handler(watch, parse, build),
        },
    )

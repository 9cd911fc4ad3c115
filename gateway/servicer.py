"""The gRPC door: shoal.v1.Inference, health and reflection over the gateway's internal API.

Messages are parsed here and not by gRPC, so that garbage is INVALID_ARGUMENT and says why. The call's own
deadline counts; a client that leaves, or a connection that pings no more, ends the stream it was reading.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from chassis import log
from chassis.errors import Code, Status
from chassis.messages import BadMessage
from chassis.messages.gateway import (
    GenerateCall,
    GenerateEvent,
    ModelInfo,
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
from gateway.config import Config

INFERENCE = gateway_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
HEALTH_CHECK_S = 0.5
GRACE_S = 0.5
MESSAGE_LEN_MAX = 2000  # of an error, which travels in a header

Context = Any  # grpc.aio.ServicerContext; its package has no types
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Front(Protocol):
    """What a front door needs of the gateway."""

    @property
    def ready(self) -> bool: ...

    def generate(
        self, call: GenerateCall, caller: TraceContext | None = None
    ) -> AsyncGenerator[GenerateEvent, None]: ...

    def resume(
        self,
        request_id: str,
        output_ids: tuple[int, ...],
        tenant: str = "",
        caller: TraceContext | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]: ...

    async def cancel(self, request_id: str, tenant: str = "") -> None: ...

    async def tokenize(self, call: GenerateCall) -> tuple[int, ...]: ...

    def list_models(self) -> list[ModelInfo]: ...


@asynccontextmanager
async def serve(front: Front, config: Config) -> AsyncIterator[str]:
    """Listens while the context lasts; gives the address. Raises OSError when it cannot."""
    server = grpc.aio.server(
        options=_options(config), maximum_concurrent_rpcs=config.streams_len_max + config.streams_len_max // 4
    )
    server.add_generic_rpc_handlers((InferenceServicer(front, config).handlers(), _health_handlers(front)))
    reflection.enable_server_reflection((INFERENCE, HEALTH, reflection.SERVICE_NAME), server)
    host, _, _ = config.grpc_address.rpartition(":")
    try:
        port = server.add_insecure_port(config.grpc_address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {config.grpc_address}: {error}") from error
    await server.start()
    try:
        yield f"{host}:{port}" if host != "unix" else config.grpc_address
    finally:
        await server.stop(GRACE_S)


def _options(config: Config) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.max_send_message_length", config.message_bytes_max),
        ("grpc.max_concurrent_streams", config.streams_per_connection_max),
        ("grpc.keepalive_time_ms", config.keepalive_interval_ms),
        ("grpc.keepalive_timeout_ms", config.keepalive_timeout_ms),
        ("grpc.http2.ping_timeout_ms", config.keepalive_timeout_ms),  # the one that notices a frozen client
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.so_reuseport", 0),  # a taken port is an error, not a lottery
    ]


class InferenceServicer:
    def __init__(self, front: Front, config: Config) -> None:
        self._front = front
        self._tenant = config.tenant

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            INFERENCE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(_streaming(self._generate)),
                "Resume": grpc.unary_stream_rpc_method_handler(_streaming(self._resume)),
                "Cancel": grpc.unary_unary_rpc_method_handler(_answering(self._cancel)),
                "ListModels": grpc.unary_unary_rpc_method_handler(_answering(self._list_models)),
                "Tokenize": grpc.unary_unary_rpc_method_handler(_answering(self._tokenize)),
            },
        )

    def _generate(self, data: bytes, context: Context) -> AsyncGenerator[GenerateEvent, None]:
        call = parse_generate(data)
        left_s = context.time_remaining()
        left_ms = None if left_s is None else max(1, int(left_s * 1000))
        return self._front.generate(
            replace(call, tenant=self._tenant, time_left_ms=left_ms), _caller(context)
        )

    def _resume(self, data: bytes, context: Context) -> AsyncGenerator[GenerateEvent, None]:
        request_id, output_ids = parse_resume(data)
        return self._front.resume(request_id, output_ids, self._tenant, _caller(context))

    async def _cancel(self, data: bytes) -> bytes:
        await self._front.cancel(parse_cancel(data), self._tenant)
        return build_cancel_reply()

    async def _list_models(self, data: bytes) -> bytes:
        parse_list_models(data)
        return build_models(self._front.list_models())

    async def _tokenize(self, data: bytes) -> bytes:
        return build_tokens(await self._front.tokenize(replace(parse_tokenize(data), tenant=self._tenant)))


def _streaming(
    stream: Callable[[bytes, Context], AsyncGenerator[GenerateEvent, None]],
) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
    async def handler(data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            async with aclosing(stream(data, context)) as events:
                async for event in events:
                    yield build_event(event)
        except Exception as error:
            await _abort(context, error)

    return handler


def _answering(
    answer: Callable[[bytes], Awaitable[bytes]],
) -> Callable[[bytes, Context], Awaitable[bytes]]:
    async def handler(data: bytes, context: Context) -> bytes:
        try:
            return await answer(data)
        except Exception as error:
            await _abort(context, error)

    return handler


async def _abort(context: Context, error: Exception) -> NoReturn:
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


def _caller(context: Context) -> TraceContext | None:
    """The client's W3C trace context, if it sent one."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str) and (found := _TRACEPARENT.fullmatch(value)):
            flags = int(found[3], 16) & 1  # other bits say how the id was made
            return TraceContext.decode(bytes.fromhex(found[1] + found[2]) + bytes([flags]))
    return None


# ---- health ----------------------------------------------------------------------------------------


def _health_handlers(front: Front) -> grpc.GenericRpcHandler:
    """grpc.health.v1, asked rather than told: the answer is the gateway's readiness at that moment."""

    def status_of(service: str) -> "health_pb2.HealthCheckResponse.ServingStatus.ValueType | None":
        if service not in ("", INFERENCE):
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

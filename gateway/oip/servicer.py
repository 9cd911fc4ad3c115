"""The gRPC door of the Open Inference Protocol, on the same server as our own.

On a stream requests run side by side, each in a task: one that fails is told so and leaves the others alone.
When the client cancels the stream, all of its requests end; when it says it sends no more, they go on.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from chassis import log
from chassis.errors import Code, Status
from chassis.messages import BadMessage
from chassis.messages.open_inference import (
    InferFailure,
    InferResponse,
    build_infer,
    build_stream_failure,
    build_stream_infer,
    parse_infer,
    parse_infer_id,
)
from chassis.messages.open_inference_models import (
    build_config,
    build_index,
    build_live,
    build_metadata,
    build_model_statistics,
    build_nothing,
    build_ready,
    build_server,
    parse_empty,
    parse_index,
    parse_load,
    parse_log_settings,
    parse_model,
    parse_settings,
)
from gateway.access.caller import Caller, bearer
from gateway.config import Config
from gateway.oip.asking import VERSION
from gateway.oip.server import FINAL, Server, Terms
from gateway.servicer import Context, OtherService, answering, metadata_of, refuse, trace_of

SERVICE = "inference.GRPCInferenceService"
NO_MEMORY = "shared memory: not offered; send tensors in the request"
NO_SETTINGS = "settings: are the services' configuration; none can be set here"
Answer = Callable[[bytes, Caller], Awaitable[bytes]]


def service(server: Server, config: Config) -> OtherService:
    return OtherService(SERVICE, InferenceProtocolServicer(server, config.stream_requests_max).handlers())


class InferenceProtocolServicer:
    def __init__(self, server: Server, stream_requests_max: int) -> None:
        self._server = server
        self._stream_requests_max = stream_requests_max

    def handlers(self) -> grpc.GenericRpcHandler:
        simple: dict[str, Answer] = {
            "ModelMetadata": self._metadata,
            "ModelConfig": self._config,
            "ModelReady": self._model_ready,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "TraceSetting": _settings(parse_settings),
            "LogSettings": _settings(parse_log_settings),
        }
        for kind in ("System", "Cuda"):
            simple[f"{kind}SharedMemoryStatus"] = _nothing
            simple[f"{kind}SharedMemoryUnregister"] = _nothing
            simple[f"{kind}SharedMemoryRegister"] = _no_memory
        methods = {
            name: grpc.unary_unary_rpc_method_handler(answering(self._asked(answer)))
            for name, answer in simple.items()
        }
        for name, told in (
            ("ServerLive", self._live),
            ("ServerReady", self._ready),
            ("ServerMetadata", self._server_metadata),
        ):
            methods[name] = grpc.unary_unary_rpc_method_handler(answering(told))
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(answering(self._infer))
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _asked(self, answer: Answer) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """By somebody who may."""

        async def handler(data: bytes, context: Context) -> bytes:
            return await answer(data, self._who(context))

        return handler

    def _who(self, context: Context) -> Caller:
        return self._server.who(bearer(metadata_of(context, "authorization")))

    def _terms(self, context: Context, who: Caller) -> Terms:
        left_s = context.time_remaining()
        left_ms = None if left_s is None else max(1, int(left_s * 1000))
        return Terms(who, left_ms, trace_of(context))

    # ---- what is told ------------------------------------------------------------------------------

    async def _live(self, data: bytes, context: Context) -> bytes:
        parse_empty(data)
        return build_live()

    async def _ready(self, data: bytes, context: Context) -> bytes:
        parse_empty(data)
        return build_ready(self._server.ready)

    async def _server_metadata(self, data: bytes, context: Context) -> bytes:
        parse_empty(data)
        return build_server(self._server.description())

    async def _model_ready(self, data: bytes, who: Caller) -> bytes:
        return build_ready(self._server.model_ready(*parse_model(data), who))

    async def _metadata(self, data: bytes, who: Caller) -> bytes:
        return build_metadata(self._server.model(*parse_model(data), who))

    async def _config(self, data: bytes, who: Caller) -> bytes:
        return build_config(self._server.model(*parse_model(data), who))

    async def _statistics(self, data: bytes, who: Caller) -> bytes:
        return build_model_statistics(await self._server.statistics(*parse_model(data), who), VERSION)

    async def _index(self, data: bytes, who: Caller) -> bytes:
        return build_index(self._server.index(*parse_index(data), who))

    async def _load(self, data: bytes, who: Caller) -> bytes:
        await self._server.load(*parse_load(data), who)
        return build_nothing()

    async def _unload(self, data: bytes, who: Caller) -> bytes:
        await self._server.unload(*parse_load(data), who)
        return build_nothing()

    # ---- inference ---------------------------------------------------------------------------------

    async def _infer(self, data: bytes, context: Context) -> bytes:
        terms = self._terms(context, self._who(context))
        request = parse_infer(data)
        return build_infer(await self._server.infer(request, terms), request.raw)

    async def _stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        try:
            who = self._who(context)
        except Status as status:
            await refuse(context, status)
        stream = _Stream(self._server, context, self._terms(context, who))
        async with asyncio.TaskGroup() as group:
            async for data in requests:
                if stream.under_way < self._stream_requests_max:
                    stream.under_way += 1
                    group.create_task(stream.answer(data))
                    continue
                limit = f"{stream.under_way} requests under way; at most {self._stream_requests_max}"
                full = Status(Code.UNAVAILABLE, f"stream: {limit}", 1000)
                await stream.fail("", parse_infer_id(data), full)


class _Stream:
    """One ModelStreamInfer."""

    def __init__(self, server: Server, context: Context, terms: Terms) -> None:
        self.under_way = 0
        self._server = server
        self._context = context
        self._terms = terms
        self._writing = asyncio.Lock()  # one message at a time

    async def answer(self, data: bytes) -> None:
        model, request_id = "", ""
        try:
            request = parse_infer(data)
            model, request_id = request.model, request.id

            async def emit(response: InferResponse) -> None:
                await self._write(build_stream_infer(response, request.raw))

            await self._server.stream(request, self._terms, emit)
        except Status as status:
            await self.fail(model, request_id, status)
        except BadMessage as error:
            bad = Status(Code.INVALID_ARGUMENT, f"request: {error}")
            await self.fail(model, parse_infer_id(data), bad)
        except Exception as error:
            log.exception("call failed", error)
            await self.fail(model, request_id, Status(Code.INTERNAL, "gateway: internal error"))
        finally:
            self.under_way -= 1

    async def fail(self, model: str, request_id: str, status: Status) -> None:
        about: dict[str, bool | int | str] = {FINAL: True, "status": status.code.value}
        if status.retry_ms is not None:
            about["retry_after_ms"] = status.retry_ms
        await self._write(build_stream_failure(InferFailure(model, request_id, status.message, about)))

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            await self._context.write(data)


async def _nothing(data: bytes, who: Caller) -> bytes:
    return build_nothing()


async def _no_memory(data: bytes, who: Caller) -> bytes:
    raise Status(Code.UNIMPLEMENTED, NO_MEMORY)


def _settings(parse: Callable[[bytes], bool]) -> Answer:
    async def answer(data: bytes, who: Caller) -> bytes:
        if parse(data):
            raise Status(Code.UNIMPLEMENTED, NO_SETTINGS)
        return build_nothing()

    return answer

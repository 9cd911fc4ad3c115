"""The Python client: a thin, typed way to call a gateway over gRPC, with and without asyncio.

A stream begins with Accepted (keep its request id: it resumes the request at any gateway), goes on with
Delta (behind PromptLogprobs, if asked for) and ends with Finished; leaving the loop early cancels the request
unless it has a resume window.
Nothing is retried here. Every failure is a ShoalError with the gateway's own words.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2

from chassis.wire import gateway_pb2 as pb
from chassis.wire import gateway_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
_CALL_TIMEOUT_S = 30.0
_ERROR_LEN_MAX = 200
_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class ShoalError(Exception):
    """What the gateway, or the way to it, said. `code` is a gRPC status name."""

    def __init__(self, code: str, message: str, retry_ms: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_ms = retry_ms


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: str
    prompt_tokens: int
    seed: int
    choice: int = 0  # of `Params.n`


class TopLogprob(NamedTuple):
    id: int
    logprob: float
    token: bytes


class TokenLogprobs(NamedTuple):
    """Of one id, by the model alone. `rank` 1 is the likeliest, 0 not known."""

    logprob: float
    rank: int
    token: bytes
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """`text` is whole code points and may be empty; `first_index` counts output ids from 0."""

    text: str
    ids: tuple[int, ...]
    first_index: int
    logprobs: tuple[TokenLogprobs, ...] = ()  # one an id, with `Params.top_logprobs`
    choice: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A piece of what is told of the prompt, before the first Delta; `first_index` counts its ids from 0, and
    nothing is told of the first."""

    ids: tuple[int, ...]
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]  # one an id
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    reason: str  # stop, length, cancelled, deadline
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queued_us: int
    prefill_us: int
    decode_us: int
    choice: int = 0


Event = Accepted | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Params:
    """How to generate; None and 0 leave the choice to the gateway, as in `gateway.proto`."""

    model: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int | None = None
    timeout_ms: int = 0
    resume_window_s: int = 0
    client_key: str = ""
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same of the prompt; of several choices the first is told
    n: int | None = None  # choices: the events of all come in one stream
    stream_interval: int = 0  # output ids of a delta at least, but of the first and the last


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    digest: str
    context_len_max: int
    vocab_size: int
    chat: bool


Messages = Sequence[tuple[str, str]]  # (role, content)
Prompt = str | Messages | Sequence[int]  # raw text, a chat, or token ids


def build_generate(prompt: Prompt, params: Params) -> pb.GenerateRequest:
    """The request for a raw prompt (str), a chat ((role, content) pairs) or token ids (ints).

    Raises ShoalError for a value that the message cannot carry."""
    request = pb.GenerateRequest()
    for param in fields(params):
        value = getattr(params, param.name)
        if value is not None:
            _set(request, param.name, value)
    if isinstance(prompt, str):
        _set(request, "prompt", prompt)
    elif prompt and isinstance(prompt[0], tuple):
        _chat(request.chat, prompt)  # type: ignore[arg-type]
    else:
        _set(request.token_ids, "ids", prompt, "token_ids")
        request.token_ids.SetInParent()
    return request


def _chat(chat: pb.Chat, messages: Messages) -> None:
    for i, (role, content) in enumerate(messages):
        turn = chat.turns.add()
        _set(turn, "role", role, f"chat.turns[{i}].role")
        _set(turn, "content", content, f"chat.turns[{i}].content")


def _set(message: Any, name: str, value: Any, called: str = "") -> None:
    """Raises ShoalError, as the gateway would say it, for what has no place in the field."""
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, str) or not isinstance(value, Sequence):
            setattr(message, name, value)
        else:
            getattr(message, name).extend(value)
    except UnicodeEncodeError:
        raise ShoalError("INVALID_ARGUMENT", f"{called or name}: not valid Unicode") from None
    except ValueError:
        bits = 64 if message.DESCRIPTOR.fields_by_name[name].type == FieldDescriptor.TYPE_UINT64 else 32
        limit = f"{called or name}: {value}; 0 to {2**bits - 1}"
        raise ShoalError("INVALID_ARGUMENT", limit[:_ERROR_LEN_MAX]) from None


def _resume(request_id: str, output_ids: Sequence[int]) -> pb.ResumeRequest:
    request = pb.ResumeRequest()
    _set(request, "request_id", request_id)
    _set(request, "output_ids", output_ids)
    return request


def _cancel(request_id: str) -> pb.CancelRequest:
    request = pb.CancelRequest()
    _set(request, "request_id", request_id)
    return request


def _tokenize(text: str | Messages, model: str) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest()
    _set(request, "model", model)
    if isinstance(text, str):
        _set(request, "prompt", text)
    else:
        _chat(request.chat, text)
        request.chat.SetInParent()
    return request


def _event(message: pb.GenerateEvent) -> Event | None:
    """None for a kind of a later version."""
    match message.WhichOneof("event"):
        case "accepted":
            a = message.accepted
            return Accepted(a.request_id, a.prompt_tokens, a.seed, message.choice)
        case "prompt_logprobs":
            p = message.prompt_logprobs
            return PromptLogprobs(
                tuple(p.ids), p.first_index, tuple(map(_logprobs, p.logprobs)), message.choice
            )
        case "delta":
            d = message.delta
            logprobs = tuple(map(_logprobs, d.logprobs)) if d.logprobs else ()
            return Delta(d.text, tuple(d.ids), d.first_index, logprobs, message.choice)
        case "finished":
            f = message.finished
            return Finished(
                f.reason,
                f.prompt_tokens,
                f.cached_tokens,
                f.output_tokens,
                f.queued_us,
                f.prefill_us,
                f.decode_us,
                message.choice,
            )
        case _:
            return None


def _logprobs(m: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple(TopLogprob(t.id, t.logprob, t.token) for t in m.top)
    return TokenLogprobs(m.logprob, m.rank, m.token, top)


def _error(error: Any) -> ShoalError:
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    hints = [value for key, value in metadata if key == "retry-after-ms"]
    retry_ms = int(hints[0]) if hints and str(hints[0]).isdigit() else None
    return ShoalError(error.code().name, error.details() or "", retry_ms)


def _model(m: pb.Model) -> Model:
    return Model(m.name, m.digest, m.context_len_max, m.vocab_size, m.chat)


class Client:
    """Blocking. Usable from several threads; close it, or use it in a `with`."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = pb_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(self, prompt: Prompt, params: Params | None = None) -> Iterator[Event]:
        """Raises ShoalError, on the first event or later."""
        return self._events(self._stub.Generate(build_generate(prompt, params or Params())))

    def resume(self, request_id: str, output_ids: Sequence[int]) -> Iterator[Event]:
        """What comes after the output ids already held. Raises ShoalError."""
        return self._events(self._stub.Resume(_resume(request_id, output_ids)))

    def cancel(self, request_id: str) -> None:
        self._call(self._stub.Cancel, _cancel(request_id))

    def models(self) -> list[Model]:
        return [_model(m) for m in self._call(self._stub.ListModels, pb.ListModelsRequest()).models]

    def tokenize(self, text: str | Messages, model: str = "") -> list[int]:
        return list(self._call(self._stub.Tokenize, _tokenize(text, model)).ids)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _error(error) from None

    def _events(self, call: Any) -> Iterator[Event]:
        try:
            for message in call:
                if (event := _event(message)) is not None:
                    yield event
        except grpc.RpcError as error:
            raise _error(error) from None
        finally:
            call.cancel()


class AsyncClient:
    """The same for asyncio. Close it, or use it in an `async with`."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = pb_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(self, prompt: Prompt, params: Params | None = None) -> AsyncIterator[Event]:
        """Raises ShoalError, on the first event or later."""
        return self._events(self._stub.Generate(build_generate(prompt, params or Params())))

    def resume(self, request_id: str, output_ids: Sequence[int]) -> AsyncIterator[Event]:
        """What comes after the output ids already held. Raises ShoalError."""
        return self._events(self._stub.Resume(_resume(request_id, output_ids)))

    async def serving(self) -> bool:
        """Whether the gateway says that it is healthy. Raises ShoalError when it says nothing."""
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        reply = await self._call(check, health_pb2.HealthCheckRequest())
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def cancel(self, request_id: str) -> None:
        await self._call(self._stub.Cancel, _cancel(request_id))

    async def models(self) -> list[Model]:
        reply = await self._call(self._stub.ListModels, pb.ListModelsRequest())
        return [_model(m) for m in reply.models]

    async def tokenize(self, text: str | Messages, model: str = "") -> list[int]:
        return list((await self._call(self._stub.Tokenize, _tokenize(text, model))).ids)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None

    async def _events(self, call: Any) -> AsyncIterator[Event]:
        try:
            async for message in call:
                if (event := _event(message)) is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None
        finally:
            call.cancel()

"""What the Open Inference Protocol does, whether it came over gRPC or REST."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from chassis.errors import Code, Status
from chassis.messages.gateway import Delta, GenerateEvent, ModelInfo
from chassis.messages.open_inference import InferRequest, InferResponse
from chassis.messages.open_inference_models import IndexEntry, ModelDescription, ServerDescription
from chassis.messages.request import Reason
from chassis.messages.statistics import ModelStatistics
from chassis.trace import TraceContext
from gateway.access.caller import Caller
from gateway.admission import PRIORITY_MAX, STREAM_INTERVAL_MAX, invalid, not_served
from gateway.config import Config
from gateway.front import Front
from gateway.model_control import Control
from gateway.oip.asking import INPUTS, VERSION, Asked, asked_of, check_version
from gateway.oip.outputs import OUTPUTS, Pieces, Row, Rows, tensors_of
from gateway.oip.running import each_event
from gateway.oip.sequences import Sequences

EXTENSIONS = (
    "sequence",
    "sequence(string_id)",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
PLATFORM = "shoal"
FINAL = "triton_final_response"
UNLOADED = "unloaded"

Emit = Callable[[InferResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one request: whose it is, and until when."""

    who: Caller
    time_left_ms: int | None = None
    trace: TraceContext | None = None


class Server:
    def __init__(self, front: Front, control: Control, config: Config) -> None:
        self._front = front
        self._control = control
        self._default_priority = config.default_priority
        self._sequences = Sequences(config.sequence_idle_s, asyncio.get_running_loop().time)

    def who(self, token: str | None) -> Caller:
        """Raises Status."""
        return self._front.authenticate(token)

    # ---- what is told ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._front.ready

    def description(self) -> ServerDescription:
        try:
            number = version("shoal")
        except PackageNotFoundError:
            number = "unknown"  # it runs from its sources
        return ServerDescription("shoal", number, EXTENSIONS)

    def model_ready(self, name: str, version: str, who: Caller) -> bool:
        found = any(model.name == name for model in self._front.list_models(who))
        return self._front.ready and found and version in ("", VERSION)

    def model(self, name: str, version: str, who: Caller) -> ModelDescription:
        """Raises Status."""
        info = self._info(name, version, who)
        facts = {
            "context_len_max": str(info.context_len_max),
            "vocab_size": str(info.vocab_size),
            "digest": info.digest,
        }
        return ModelDescription(
            name=info.name,
            version=VERSION,
            platform=PLATFORM,
            inputs=INPUTS,
            outputs=OUTPUTS,
            parameters=tuple(sorted(facts.items())),
            priority_levels=PRIORITY_MAX + 1,
            default_priority_level=self._default_priority + 1,
        )

    def _info(self, name: str, version: str, who: Caller) -> ModelInfo:
        models = self._control.models(who)
        for present in models:
            if present.info.name == name:
                check_version(name, version)
                return present.info
        raise not_served("model", name, [present.info.name for present in models])

    async def statistics(self, name: str, version: str, who: Caller) -> list[ModelStatistics]:
        """Of all, if none is named. Raises Status."""
        if name:
            return [await self._control.statistics(self._info(name, version, who).name)]
        return [await self._control.statistics(present.info.name) for present in self._control.models(who)]

    def index(self, repository: str, ready_only: bool, who: Caller) -> list[IndexEntry]:
        """Raises Status."""
        _check_repository(repository)
        return [
            IndexEntry(present.info.name, VERSION, "READY")
            if present.loaded
            else IndexEntry(present.info.name, VERSION, "UNAVAILABLE", UNLOADED)
            for present in self._control.models(who)
            if present.loaded or not ready_only
        ]

    async def load(self, repository: str, name: str, parameters: tuple[str, ...], who: Caller) -> None:
        """Raises Status."""
        _check_repository(repository)
        if parameters:
            raise invalid(f"parameters: {parameters[0][:100]}; none: models are configured at their workers")
        await self._control.load(name, who)

    async def unload(self, repository: str, name: str, parameters: tuple[str, ...], who: Caller) -> None:
        """Raises Status."""
        _check_repository(repository)
        if unknown := [key for key in parameters if key != "unload_dependents"]:
            raise invalid(f"parameters: {unknown[0][:100]}; only unload_dependents")
        await self._control.unload(name, who)

    # ---- inference ---------------------------------------------------------------------------------

    async def infer(self, request: InferRequest, terms: Terms) -> InferResponse:
        """The whole answer, whether or not a stream is asked for. Raises Status."""
        async with self._turn(request, self._asked(request, terms), terms) as (asked, said):
            return await self._whole(request, asked, terms, said)

    async def stream(self, request: InferRequest, terms: Terms, emit: Emit, default: bool = False) -> None:
        """In pieces if it says so; `default` is for who doesn't. The last is marked. Raises Status."""
        async with self._turn(request, self._asked(request, terms), terms) as (asked, said):
            if default if asked.stream is None else asked.stream:
                await self._pieces(request, asked, terms, said, emit)
                return
            response = await self._whole(request, asked, terms, said)
        await emit(replace(response, parameters={FINAL: True}))

    @asynccontextmanager
    async def _turn(
        self, request: InferRequest, asked: Asked, terms: Terms
    ) -> AsyncIterator[tuple[Asked, list[str]]]:
        """In its sequence, if it has one: behind all that was said in it. The list is told the answer."""
        said: list[str] = []
        if asked.sequence is None:
            yield asked, said
            return
        owner = terms.who.tenant, terms.who.key, self._name(request, terms)
        async with self._sequences.turn(owner, asked.sequence) as sequence:
            (call,) = asked.calls
            prompt = sequence.text + (call.prompt or "")
            yield replace(asked, calls=(replace(call, prompt=prompt),)), said
            sequence.text = "".join([prompt, *said])

    async def _pieces(
        self, request: InferRequest, asked: Asked, terms: Terms, said: list[str], emit: Emit
    ) -> None:
        if asked.with_input:
            raise invalid("exclude_input_in_output: false; only where the whole answer comes at once")
        pieces = Pieces(len(asked.calls), asked.choices, asked.outputs)
        name = self._name(request, terms)

        async def take(prompt: int, event: GenerateEvent) -> None:
            if isinstance(event, Delta):
                said.append(event.text)
            told = pieces.take(prompt, event)
            if told is not None:
                await emit(InferResponse(name, VERSION, asked.id, told, {FINAL: pieces.over}))

        await each_event(self._front, asked.calls, terms.trace, take)

    def _asked(self, request: InferRequest, terms: Terms) -> Asked:
        asked = asked_of(request)
        who = terms.who
        calls = [
            replace(
                call,
                tenant=who.tenant,
                key=who.key,
                time_left_ms=terms.time_left_ms,
                client_key=f"{call.client_key}/{i}" if call.client_key and i else call.client_key,
            )
            for i, call in enumerate(asked.calls)
        ]
        return replace(asked, calls=tuple(calls))

    async def _whole(
        self, request: InferRequest, asked: Asked, terms: Terms, said: list[str]
    ) -> InferResponse:
        rows = Rows(len(asked.calls), asked.choices)

        async def take(prompt: int, event: GenerateEvent) -> None:
            if isinstance(event, Delta):
                said.append(event.text)
            rows.take(prompt, event)

        calls = [replace(call, stream_interval=STREAM_INTERVAL_MAX) for call in asked.calls]
        await each_event(self._front, calls, terms.trace, take)
        for row in rows.all:
            _check_end(row)
            if asked.with_input:
                row.text.insert(0, asked.calls[row.prompt].prompt or "")
        outputs = tensors_of(rows.all, asked.outputs)
        return InferResponse(self._name(request, terms), VERSION, asked.id, outputs)

    def _name(self, request: InferRequest, terms: Terms) -> str:
        if request.model:
            return request.model
        served = self._front.list_models(terms.who)
        return served[0].name if len(served) == 1 else ""


def _check_repository(name: str) -> None:
    if name:
        raise invalid(f"repository_name: {name[:100]!r}; there is one, without a name")


def _check_end(row: Row) -> None:
    """Half an answer is none, where nobody sees why it ends. Raises Status."""
    reason = row.end.reason if row.end is not None else None
    match reason:
        case Reason.STOP | Reason.LENGTH:
            return
        case Reason.DEADLINE:
            raise Status(Code.DEADLINE_EXCEEDED, f"deadline: passed after {len(row.ids)} tokens")
        case Reason.CANCELLED:
            raise Status(Code.CANCELLED, f"cancelled after {len(row.ids)} tokens")
        case _:
            raise Status(Code.INTERNAL, "gateway: the answer has no end")

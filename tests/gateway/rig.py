"""A gateway over the in-memory bus, a model of bytes, and a batcher that does as it is told."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from chassis import subjects
from chassis.bus import Message
from chassis.habits import Habits
from chassis.ids import Attempt, BootId, GatewayId, RequestId
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.memory_rpc import MemoryRpcNetwork
from chassis.messages.card import ModelCard, TokenBytes, build_card, card_digest
from chassis.messages.chunk import (
    Chunk,
    Finish,
    Part,
    build_chunk,
    extend_digest,
)
from chassis.messages.gateway import Accepted, Delta, Finished, GenerateCall, GenerateEvent
from chassis.messages.ownership import (
    Attach,
    AttachKind,
    ToBatcher,
    build_attach_answer,
    parse_to_batcher,
)
from chassis.messages.registry import ModelEntry, build_model
from chassis.messages.request import (
    Claim,
    Reason,
    Request,
    Terminal,
    Usage,
    build_record,
    parse_request,
)
from chassis.messages.sampling import TokenLogprobs
from chassis.ports import Ports
from chassis.trace import SpanRing
from chassis.transport.memory import MemoryNetwork
from gateway.config import Config
from gateway.service import Gateway

EOS = 256
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
T = TypeVar("T")


def byte_tokenizer_json() -> bytes:
    """A byte-level BPE tokenizer without merges: one token a byte, and an end."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    names = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    vocab = {names[b]: b for b in range(256)} | {"<|im_end|>": EOS}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": EOS, "content": "<|im_end|>", "single_word": False, "lstrip": False, "rstrip": False}
    bpe = {"type": "BPE", "vocab": vocab, "merges": []}
    whole = {"added_tokens": [end | {"normalized": False, "special": True}], "pre_tokenizer": level}
    return json.dumps(whole | {"decoder": level, "model": bpe}).encode()


def byte_card(name: str = "bytes", **changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "name": name,
        "model_digest": "d1",
        "config_json": "{}",
        "vocab_size": 257,
        "num_layers": 1,
        "context_len_max": 4096,
        "eos_ids": (EOS,),
        "tokenizer_json": byte_tokenizer_json(),
        "chat_template": CHATML,
        "bos_token": "",
        "eos_token": "<|im_end|>",
        "token_bytes": TokenBytes.of([*(bytes([b]) for b in range(256)), b""]),
    }
    return ModelCard(**(fields | changes))


def run(main: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
    async def timed() -> T:
        async with asyncio.timeout(timeout_s):
            return await main

    return asyncio.run(timed())


async def until(done: Callable[[], Any], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not done():  # noqa: ASYNC110 - a test watches from outside
            await asyncio.sleep(0.001)


@dataclass(slots=True)
class Job:
    """A request that the scripted batcher holds."""

    request: Request
    token: Any
    record_seq: int = 0
    ids: list[int] = field(default_factory=list)


class ScriptedBatcher:
    """Claims what it fetches; sends parts, finishes and records when the test says so."""

    def __init__(self, bus: MemoryBus, boot: str = "batcher1", model: str = "bytes") -> None:
        self.bus = bus
        self.boot = BootId(boot)
        self.model = model
        self.heard: list[ToBatcher] = []
        self.answers: dict[RequestId, AttachKind] = {}
        self._numbers: dict[GatewayId, int] = {}

    async def start(self) -> None:
        await self.bus.ensure_consumers(self.model)
        await self.bus.subscribe(subjects.owner(self.boot), self._hear)
        await self.bus.subscribe(subjects.batchers(self.model), self._hear)

    def _hear(self, message: Message) -> None:
        said = parse_to_batcher(message.data)
        self.heard.append(said)
        if isinstance(said, Attach):
            kind = self.answers.get(said.request_id, AttachKind.UNKNOWN)
            self.bus.reply(message, build_attach_answer(kind))

    async def take(self, priority: int = 5, claim: bool = True) -> Job:
        consumer = subjects.consumer_name(self.model, priority)
        while True:
            found = await self.bus.fetch(subjects.REQUESTS, consumer, 1, 0.5)
            if found:
                job = Job(parse_request(found[0].message.data), found[0].token)
                if claim:
                    await self.claim(job)
                return job

    async def claim(self, job: Job, attempt: int = 1) -> None:
        record = build_record(Claim(Attempt(attempt), self.boot, job.request.body_digest))
        appended = await self.bus.append(subjects.result(job.request.id), record, expected_seq=job.record_seq)
        job.record_seq = appended.seq

    def send(
        self,
        job: Job,
        *ids: int,
        to: GatewayId | None = None,
        finish: Finish | None = None,
        told: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        gateway = to or job.request.gateway
        first_index = len(job.ids)
        job.ids += ids
        part = Part(job.request.id, Attempt(1), first_index, ids, extend_digest(0, job.ids), told)
        number = self._numbers[gateway] = self._numbers.get(gateway, 0) + 1
        chunk = Chunk(self.boot, number, (part,) if ids else (), (finish,) if finish else ())
        self.bus.publish(subjects.chunks(gateway), build_chunk(chunk))

    async def end(
        self,
        job: Job,
        reason: Reason = Reason.STOP,
        *,
        byte_cut: int | None = None,
        tell: bool = True,
        error: str = "",
        told: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        request = job.request
        usage = Usage(len(request.prompt_ids), 0, len(job.ids))
        terminal = Terminal(
            Attempt(1),
            self.boot,
            reason,
            tuple(job.ids),
            byte_cut,
            usage,
            error=error,
            tenant=request.tenant,
            body_digest=request.body_digest,
            model=request.model,
            stop=request.limits.stop,
            logprobs=told,
        )
        subject = subjects.result(request.id)
        await self.bus.append(subject, build_record(terminal), expected_seq=job.record_seq)
        digest = extend_digest(0, job.ids)
        if tell:
            finish = Finish(
                request.id, Attempt(1), len(job.ids), digest, reason, byte_cut, usage, error=error
            )
            self.send(job, finish=finish)
        self.bus.ack(job.token)


class Rig:
    def __init__(self, habits: Habits | None = None) -> None:
        self.broker = MemoryBroker(habits)
        self.network = MemoryRpcNetwork(lambda: 0.0)
        self.ring = MemoryNetwork()
        self.tracer = SpanRing()
        self._ids = itertools.count(1)
        self._handles = itertools.count(1)

    def bus(self, name: str) -> MemoryBus:
        return MemoryBus(self.broker, f"{name}.{next(self._handles)}")

    def ports(self, name: str) -> Ports:
        return Ports(
            bus=self.bus(name),
            rpc=self.network.rpc(name),
            transport=self.ring.transport(name),
            tracer=self.tracer,
            new_id=lambda: f"{name}{next(self._ids):06d}",
            new_seed=lambda: 4242,
            wall_ns=time.time_ns,
        )

    async def serve_model(self, card: ModelCard) -> None:
        bus = self.bus("worker")
        data = build_card(card)
        digest = card_digest(data)
        await bus.put_object(subjects.card_object(digest), data)
        await bus.put_entry(
            subjects.model_key(card.name), build_model(ModelEntry(card.name, card.model_digest, digest))
        )

    @asynccontextmanager
    async def gateway(self, name: str = "gw1", **settings: Any) -> AsyncIterator[Gateway]:
        """Runs until the block ends; its crash is the test's."""
        service = Gateway(Config(**({"grpc_address": "", "http_address": ""} | settings)), self.ports(name))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(service.run())
            await until(lambda: service._standing or task.done())
            try:
                yield service
            finally:
                task.cancel()

    @asynccontextmanager
    async def standing(self, **settings: Any) -> AsyncIterator[tuple[Gateway, ScriptedBatcher]]:
        """A gateway that serves the byte model, and its batcher."""
        await self.serve_model(byte_card())
        batcher = ScriptedBatcher(self.bus("batcher1"))
        await batcher.start()
        async with self.gateway(**settings) as gateway:
            await until(lambda: gateway.ready)
            yield gateway, batcher


class Reader:
    """A client in a task of its own: collects what it is given."""

    def __init__(self, stream: AsyncIterator[GenerateEvent]) -> None:
        self.events: list[GenerateEvent] = []
        self.error: BaseException | None = None
        self._task = asyncio.get_running_loop().create_task(self._read(stream))

    async def _read(self, stream: Any) -> None:
        try:
            async for event in stream:
                self.events.append(event)
        except Exception as error:
            self.error = error
        finally:
            await stream.aclose()

    @property
    def request_id(self) -> RequestId:
        accepted = self.events[0]
        assert isinstance(accepted, Accepted)
        return accepted.request_id

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta))

    @property
    def ids(self) -> list[int]:
        ids: list[int] = []
        for event in self.events:
            if isinstance(event, Delta):
                assert not event.ids or event.first_index == self.first_index + len(ids)
                ids += event.ids
        return ids

    first_index = 0

    @property
    def finished(self) -> Finished | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished) else None

    async def accepted(self) -> RequestId:
        await until(lambda: self.events or self.error)
        if self.error is not None:
            raise self.error
        return self.request_id

    async def done(self) -> None:
        """Raises what the stream ended with."""
        await self._task
        if self.error is not None:
            raise self.error

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


def call(prompt: str = "hi", **changes: Any) -> GenerateCall:
    return GenerateCall(**({"prompt": prompt, "tenant": "t"} | changes))

"""The gateway as a service, and what front doors call.

A front door (gRPC here; others may stand beside it) calls `generate`, `resume`, `cancel`, `tokenize` and
`list_models`, and knows nothing of the bus. Leaving a stream early is how a disconnect is said.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from chassis import log, subjects
from chassis.bus import Handler, Subscription
from chassis.errors import BusError, Code, Status
from chassis.ids import BootId, GatewayId, RequestId
from chassis.messages.gateway import (
    Accepted,
    Delta,
    Finished,
    GenerateCall,
    GenerateEvent,
    ModelInfo,
    Turn,
)
from chassis.messages.registry import GatewayEntry, build_gateway
from chassis.messages.request import Request
from chassis.ports import Ports
from chassis.trace import TraceContext
from gateway.admission import (
    CallLimits,
    admit,
    check_call,
    check_input,
    check_request_id,
    choice_id,
    invalid,
    of_choice,
    request_id_of,
)
from gateway.cancels import FULL
from gateway.clients import Client, events_of
from gateway.config import Config
from gateway.events import CancelHeard, CancelWanted, ClientGone, LetGo, Resume, Submit
from gateway.models import Model, Models
from gateway.sampling import CHOICES_MAX, BadWords, forms_of
from gateway.spans import GENERATE, RESUME, RequestTrace
from gateway.stream_loop import RETRY_MS, StreamLoop
from gateway.tokenizer import Encoder

__all__ = [
    "Accepted",
    "Delta",
    "Finished",
    "Gateway",
    "GenerateCall",
    "GenerateEvent",
    "ModelInfo",
    "Turn",
]

RETRY_S = 0.5
ERRANDS_WAIT_S = 3.0  # for cancels under way, when stopping


class Gateway:
    def __init__(self, config: Config, ports: Ports) -> None:
        self.boot = BootId(ports.new_id())
        self._config = config
        self._ports = ports
        self._encoder = Encoder(config.inline_encode_bytes_max)
        self._models = Models(ports.bus, self._encoder, config.models_len_max, config.card_fetch_timeout_s)
        self._streams = StreamLoop(GatewayId(self.boot), config, ports, self._models)
        self._numbers = itertools.count(1)
        self._choices: dict[RequestId, int] = {}  # of calls being answered, by the first's id
        self._standing = False
        self._draining = False
        self._drained = asyncio.Event()
        self._address = ""

    # ---- life --------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Requests are accepted."""
        return self._standing and not self._draining and self._models.ready and self._ports.bus.connected

    @property
    def address(self) -> str:
        """Of the gRPC server; empty when there is none."""
        return self._address

    @property
    def counts(self) -> dict[str, int]:
        return self._streams.counts

    async def run(self) -> None:
        """Serves until cancelled or drained."""
        try:
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                streams = self._streams
                await self._subscribe(stack, subjects.chunks(GatewayId(self.boot)), streams.on_chunk)
                await self._subscribe(stack, subjects.TAKEOVER, streams.on_takeover)
                tasks = [group.create_task(streams.run(group), name="core")]
                tasks.append(group.create_task(self._models.run(), name="models"))
                self._standing = True
                await self._open_doors(stack)
                tasks.append(group.create_task(self._register(), name="registry"))
                stack.callback(self._fall)
                await self._drained.wait()
                for task in tasks:
                    task.cancel()
        finally:
            self._fall()
            self._encoder.close()

    async def drain(self) -> None:
        """No new requests; open streams get `drain_wait_s` to end, then are told to resume elsewhere."""
        self._draining = True
        if self._standing:
            loop, streams = asyncio.get_running_loop(), self._streams
            try:
                await self._ports.bus.delete_entry(subjects.gateway_key(self.boot))
            except BusError as error:
                log.debug("registry entry not deleted", error=str(error))
            await streams.until(lambda: not streams.open_len, loop.time() + self._config.drain_wait_s)
            streams.put(LetGo(loop.time()))
            await streams.until(lambda: streams.idle, loop.time() + ERRANDS_WAIT_S)
        self._drained.set()

    def check(self) -> None:
        """What holds between events."""
        self._streams.check()

    def _fall(self) -> None:
        self._standing = False
        self._streams.abandon()

    async def _subscribe(self, stack: AsyncExitStack, subject: str, handler: Handler) -> None:
        while True:
            try:
                bus = self._ports.bus
                subscription = await bus.subscribe(subject, handler, self._config.inbox_len_max)
                stack.push_async_callback(_close, subscription)
                return
            except BusError as error:
                log.warning("cannot subscribe", subject=subject, error=str(error))
            await asyncio.sleep(RETRY_S)

    async def _open_doors(self, stack: AsyncExitStack) -> None:
        if self._config.grpc_address:
            from gateway.servicer import serve  # the simulation has no gRPC

            self._address = await stack.enter_async_context(serve(self, self._config))
            log.info("listening", grpc_address=self._address)

    async def _register(self) -> None:
        address = self._config.advertise_address or self._address
        value = build_gateway(GatewayEntry(self.boot, address))
        while not self._draining:
            try:
                await self._ports.bus.put_entry(subjects.gateway_key(self.boot), value)
            except BusError as error:
                log.debug("registry entry not refreshed", error=str(error))
            await asyncio.sleep(subjects.REGISTRY_REFRESH_S)

    # ---- what front doors call ---------------------------------------------------------------------

    async def generate(
        self, call: GenerateCall, caller: TraceContext | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, deltas, Finished. Raises Status."""
        start_ns, start_s = self._ports.wall_ns(), asyncio.get_running_loop().time()
        self._check_door()
        check_call(call, self._limits)
        choices = call.n or 1
        self._check_door(choices)
        model = await self._models.find(call.model)
        prompt_ids = await self._prompt_ids(call, model)
        bad_words = await self._bad_words(call, model) if call.bad_words else ()
        if call.client_key:
            request_id = request_id_of(call.tenant, call.client_key)
        else:
            request_id = RequestId(self._ports.new_id())
        traces = [
            self._trace(GENERATE, choice_id(request_id, choice), caller, start_ns, start_s)
            for choice in range(choices)
        ]
        first = admit(
            call,
            model.facts,
            prompt_ids,
            request_id=request_id,
            gateway=GatewayId(self.boot),
            fresh_seed=self._ports.new_seed(),
            bad_words=bad_words,
        )
        requests = [of_choice(first, i, trace.context.encode()) for i, trace in enumerate(traces)]
        for request, trace in zip(requests, traces, strict=True):
            trace.asked(request, "chat" if call.chat is not None else "text_completion")
        async with aclosing(self._submit(requests, traces, call.stream_interval)) as events:
            async for event in events:
                yield event

    async def _submit(
        self, requests: list[Request], traces: list[RequestTrace], interval: int
    ) -> AsyncGenerator[GenerateEvent, None]:
        """One stream of all choices. The others follow once the first is accepted: what refuses it (a full
        stream, another body under its key) would refuse them too."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        clients: list[Client] = []
        async with AsyncExitStack() as stack:
            self._choices[requests[0].id] = len(requests)
            stack.callback(self._choices.pop, requests[0].id, None)
            for choice, (request, trace) in enumerate(zip(requests, traces, strict=True)):
                clients.append(
                    await stack.enter_async_context(self._client(request.id, trace, choice, ready, interval))
                )
                self._streams.put(Submit(loop.time(), clients[-1].number, request))
                if choice == 0 and len(requests) > 1:
                    await clients[0].answered()
                    if clients[0].failed:
                        break
            async with aclosing(events_of(clients, ready)) as events:
                async for event in events:
                    yield event

    async def resume(
        self,
        request_id: str,
        output_ids: tuple[int, ...],
        tenant: str = "",
        caller: TraceContext | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """The rest of a request after the ids the client holds. Raises Status."""
        self._check_door()
        start_ns, start_s = self._ports.wall_ns(), asyncio.get_running_loop().time()
        checked = check_request_id(request_id)
        if not self._models.ready:
            raise Status(Code.UNAVAILABLE, "model: none is served yet", RETRY_MS)
        longest = self._models.context_len_max - 1  # each id costs the one task a microsecond or two
        if len(output_ids) > longest:
            raise invalid(f"output_ids: {len(output_ids)}; at most {longest}, the longest context less one")
        trace = self._trace(RESUME, checked, caller, start_ns, start_s)
        async with self._client(checked, trace) as client, aclosing(client.events()) as events:
            now = asyncio.get_running_loop().time()
            self._streams.put(Resume(now, client.number, checked, tenant, output_ids))
            async for event in events:
                yield event

    async def cancel(self, request_id: str, tenant: str = "") -> None:
        """Returns once it is under way or over, of all choices if it is the first's. Raises Status."""
        self._check_standing()
        checked = check_request_id(request_id)
        here = self._choices.get(checked)  # elsewhere: one after the other, until there is none
        if not await self._cancel(checked, tenant):
            raise Status(Code.NOT_FOUND, f"request_id: {request_id!r} is not known")
        for choice in range(1, here or CHOICES_MAX):
            if not await self._cancel(choice_id(checked, choice), tenant) and here is None:
                return

    async def _cancel(self, checked: RequestId, tenant: str) -> bool:
        """Whether it is known. Raises Status."""
        cancels = self._streams.cancels
        if len(cancels) >= self._config.streams_len_max:
            raise Status(Code.UNAVAILABLE, FULL, RETRY_MS)
        loop, reply = asyncio.get_running_loop(), next(self._numbers)
        heard: asyncio.Future[CancelHeard] = loop.create_future()
        cancels[reply] = heard
        try:
            self._streams.put(CancelWanted(loop.time(), checked, tenant, reply))
            answer = await heard
        finally:
            del cancels[reply]
        if answer.failed:
            raise Status(Code.UNAVAILABLE, answer.failed, RETRY_MS)
        return answer.found

    async def tokenize(self, call: GenerateCall) -> tuple[int, ...]:
        """The prompt of a call in tokens, as `generate` would have it. Raises Status."""
        self._check_standing()
        check_input(call, self._limits)
        return await self._prompt_ids(call, await self._models.find(call.model))

    def list_models(self) -> list[ModelInfo]:
        return [
            ModelInfo(
                model.name,
                model.card.model_digest,
                model.card.context_len_max,
                model.card.vocab_size,
                model.template is not None,
            )
            for model in self._models.served()
        ]

    @property
    def _limits(self) -> CallLimits:
        c = self._config
        return CallLimits(c.prompt_bytes_max, c.chat_turns_len_max, c.timeout_s_max, c.resume_window_s_max)

    def _check_standing(self) -> None:
        if not self._standing:
            raise Status(Code.UNAVAILABLE, "gateway: not running", RETRY_MS)

    def _check_door(self, choices: int = 1) -> None:
        self._check_standing()
        if self._draining:
            raise Status(Code.UNAVAILABLE, "gateway: draining", 0)
        if len(self._streams.clients) + choices > self._config.streams_len_max:
            raise Status(Code.UNAVAILABLE, "gateway: too many open streams", RETRY_MS)

    async def _prompt_ids(self, call: GenerateCall, model: Model) -> tuple[int, ...]:
        if call.token_ids is not None:
            return call.token_ids
        if model.tokenizer is None:
            raise invalid(f"input: model {model.name} has no tokenizer; give token_ids")
        if call.prompt is not None:
            return await self._encoder.encode(model.tokenizer, call.prompt, add_bos=True)
        if model.template is None:
            raise invalid(f"chat: model {model.name} has no chat template; give a prompt")
        text = model.template.render(call.chat or (), self._ports.wall_ns())
        return await self._encoder.encode(model.tokenizer, text, add_bos=False)

    async def _bad_words(self, call: GenerateCall, model: Model) -> BadWords:
        """In ids, all their forms. Raises Status."""
        if model.tokenizer is None:
            raise invalid(f"bad_words: model {model.name} has no tokenizer")
        forms = forms_of(call.bad_words)
        encoded = [await self._encoder.encode(model.tokenizer, form, add_bos=False) for form in forms]
        size = model.card.vocab_size  # tokenizers may know more: those are never drawn
        return tuple(dict.fromkeys(ids for ids in encoded if ids and max(ids) < size))

    def _trace(
        self, name: str, request_id: RequestId, caller: TraceContext | None, start_ns: int, start_s: float
    ) -> RequestTrace:
        return RequestTrace(
            self._ports.tracer,
            self._ports.wall_ns,
            name,
            request_id,
            caller,
            start_ns=start_ns,
            start_s=start_s,
        )

    @asynccontextmanager
    async def _client(
        self,
        request_id: RequestId,
        trace: RequestTrace,
        choice: int = 0,
        ready: asyncio.Event | None = None,
        interval: int = 0,
    ) -> AsyncIterator[Client]:
        client = Client(next(self._numbers), request_id, choice, ready, interval)
        streams = self._streams
        streams.clients[client.number] = client
        streams.traces[request_id] = trace
        error: BaseException | None = None
        try:
            yield client
        except BaseException as e:
            error = e
            raise
        finally:
            del streams.clients[client.number]
            if streams.traces.get(request_id) is trace:
                del streams.traces[request_id]
            if not client.over and self._standing:
                streams.put(ClientGone(asyncio.get_running_loop().time(), client.number, request_id))
            streams.nudge()
            trace.done(client, error)


async def _close(subscription: Subscription) -> None:
    try:
        await subscription.close()
    except BusError as error:
        log.debug("subscription not closed", error=str(error))

"""The gateway as a service, and what front doors call.

A front door (gRPC here; others may stand beside it) calls `generate`, `resume`, `cancel`, `tokenize` and
`list_models`, and knows nothing of the bus. Leaving a stream early is how a disconnect is said.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

from chassis import log, subjects
from chassis.bus import Handler, Subscription
from chassis.errors import BusError, Code, Status
from chassis.ids import BootId, GatewayId, RequestId
from chassis.messages.gateway import GenerateCall, GenerateEvent, ModelInfo
from chassis.messages.registry import GatewayEntry, build_gateway
from chassis.messages.request import Request
from chassis.metrics import Family
from chassis.ports import Ports
from chassis.trace import TraceContext
from gateway.access.access import Access
from gateway.access.caller import Caller
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
from gateway.cancel_calls import CancelCalls
from gateway.candidates import best_events
from gateway.clients import Client, events_of
from gateway.config import Config
from gateway.doors import Addresses, open_doors
from gateway.events import ClientGone, LetGo, Resume, Submit
from gateway.grammar import Grammars
from gateway.jobs.intake import Intake, intake_of
from gateway.line import Lines
from gateway.meters import Meters
from gateway.model_control import ModelControl
from gateway.models import Model, Models
from gateway.prompts import ids_of_bad_words, ids_of_prompt
from gateway.sampling import candidates_of, check_ids, picks
from gateway.spans import GENERATE, RESUME, RequestTrace
from gateway.stream_loop import RETRY_MS, StreamLoop
from gateway.tokenizer import Encoder

RETRY_S = 0.5
JOBS_WAIT_S = 3.0  # for answers that are being written, when stopping
ERRANDS_WAIT_S = 3.0  # for cancels under way, when stopping


class Gateway:
    def __init__(self, config: Config, ports: Ports) -> None:
        self.boot = BootId(ports.new_id())
        self._config = config
        self._ports = ports
        self._access = Access(config, ports, self.boot)
        self._encoder = Encoder(config.inline_encode_bytes_max)
        self._models = Models(ports.bus, self._encoder, config.models_len_max, config.card_fetch_timeout_s)
        self._control = ModelControl(ports.bus, self._models, self._access, config.operators)
        self._grammars = Grammars(config.grammar_timeout_s)
        self._streams = StreamLoop(GatewayId(self.boot), config, ports, self._models)
        self._meters = Meters()
        self._numbers = itertools.count(1)
        self._lines = Lines(config.wait_max_ms)
        self._cancels = CancelCalls(self._streams, self._numbers, config.streams_len_max)
        self._jobs: Intake | None = intake_of(self, config, ports)
        self._standing = False
        self._draining = False
        self._drained = asyncio.Event()
        self._addresses = Addresses()

    # ---- life --------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Requests are accepted."""
        return self._standing and not self._draining and self._models.ready and self._ports.bus.connected

    @property
    def address(self) -> str:
        """Of the gRPC server; empty when there is none."""
        return self._addresses.grpc

    @property
    def http_address(self) -> str:
        """The same of HTTP."""
        return self._addresses.http

    @property
    def counts(self) -> dict[str, int]:
        return self._streams.counts

    def metrics(self) -> Iterable[Family]:
        return self._meters.families(self._streams.gauges, self.counts)

    async def run(self) -> None:
        """Serves until cancelled or drained."""
        try:
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                streams = self._streams
                await self._subscribe(stack, subjects.chunks(GatewayId(self.boot)), streams.on_chunk)
                await self._subscribe(stack, subjects.TAKEOVER, streams.on_takeover)
                tasks = [group.create_task(streams.run(group), name="core")]
                tasks.append(group.create_task(self._models.run(), name="models"))
                tasks.append(group.create_task(self._access.run(), name="access"))
                self._standing = True
                self._addresses = await open_doors(stack, self, self._control, self._config, self._ports)
                tasks.append(group.create_task(self._register(), name="registry"))
                if self._jobs is not None:
                    tasks.append(group.create_task(self._jobs.run(), name="jobs"))
                stack.callback(self._fall)
                await self._drained.wait()
                for task in tasks:
                    task.cancel()
        finally:
            self._fall()
            self._encoder.close()
            self._grammars.close()

    async def drain(self) -> None:
        """No new requests; open streams get `drain_wait_s` to end, then are told to resume elsewhere."""
        self._draining = True
        if self._standing:
            loop, streams = asyncio.get_running_loop(), self._streams
            try:
                await self._ports.bus.delete_entry(subjects.gateway_key(self.boot))
            except BusError as error:
                log.debug("registry entry not deleted", error=str(error))
            if self._jobs is not None:
                await self._jobs.drain(JOBS_WAIT_S)
            await streams.until(lambda: not streams.open_len, loop.time() + self._config.drain_wait_s)
            streams.put(LetGo(loop.time()))
            await streams.until(lambda: streams.idle, loop.time() + ERRANDS_WAIT_S)
            await self._access.give_back()
        self._drained.set()

    def check(self) -> None:
        """What holds between events."""
        self._streams.check()
        if self._jobs is not None:
            self._jobs.check()

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

    async def _register(self) -> None:
        address = self._config.advertise_address or self.address
        value = build_gateway(GatewayEntry(self.boot, address))
        while not self._draining:
            try:
                await self._ports.bus.put_entry(subjects.gateway_key(self.boot), value)
            except BusError as error:
                log.debug("registry entry not refreshed", error=str(error))
            await asyncio.sleep(subjects.REGISTRY_REFRESH_S)

    # ---- what front doors call ---------------------------------------------------------------------

    def authenticate(self, token: str | None) -> Caller:
        """Raises Status (UNAUTHENTICATED)."""
        return self._access.who(token)

    async def generate(
        self, call: GenerateCall, caller: TraceContext | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, deltas, Finished. Raises Status."""
        if call.job and call.key:
            call = replace(call, key=self._access.job_key(call.tenant, call.key))
        async with AsyncExitStack() as stack:
            with self._meters.door():
                requests, traces = await self._admitted(call, caller)
                hold = await stack.enter_async_context(self._access.hold(call, requests[0], len(requests)))
            prompt_tokens = len(requests[0].prompt_ids)
            events = await stack.enter_async_context(aclosing(self._submit(call, requests, traces)))
            async for event in events:
                hold.saw(event, prompt_tokens)
                yield event

    async def _admitted(
        self, call: GenerateCall, caller: TraceContext | None
    ) -> tuple[list[Request], list[RequestTrace]]:
        """One of each a choice. Raises Status."""
        start_ns, start_s = self._ports.wall_ns(), asyncio.get_running_loop().time()
        self._check_door()
        check_call(call, self._limits)
        choices = candidates_of(call)
        self._check_door(choices)
        model = await self._model(call)
        priority = call.priority
        if priority is None:
            priority = self._access.rights.priority(call.key, self._config.default_priority)
        if not call.job:
            self._lines.check(model.name, priority, start_s)
        if call.grammar is not None:
            await self._grammars.check(call.grammar, model)
        prompt_ids = await ids_of_prompt(call, model, self._encoder, self._ports.wall_ns())
        bad_words = await ids_of_bad_words(call, model, self._encoder) if call.bad_words else ()
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
            priority_default=priority,
        )
        requests = [of_choice(first, i, trace.context.encode()) for i, trace in enumerate(traces)]
        for request, trace in zip(requests, traces, strict=True):
            trace.asked(request, "chat" if call.chat is not None else "text_completion")
        return requests, traces

    async def _submit(
        self, call: GenerateCall, requests: list[Request], traces: list[RequestTrace]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """One stream of all choices. The others follow once the first is accepted: what refuses it (a full
        stream, another body under its key) would refuse them too."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        clients: list[Client] = []
        async with AsyncExitStack() as stack:
            stack.enter_context(self._cancels.answering(requests[0].id, len(requests)))
            for choice, (request, trace) in enumerate(zip(requests, traces, strict=True)):
                now = loop.time()
                waiting = self._lines.enter(request.model, request.priority, now)
                client = Client(next(self._numbers), request.id, choice, ready, call.stream_interval, waiting)
                clients.append(await stack.enter_async_context(self._attended(client, trace)))
                self._streams.put(Submit(now, client.number, request))
                if choice == 0 and len(requests) > 1:
                    await clients[0].answered()
                    if clients[0].failed:
                        break
            if picks(call):
                told = best_events(clients, ready, call.n or 1, call.top_logprobs is not None)
            else:
                told = events_of(clients, ready)
            async with aclosing(told) as events:
                async for event in events:
                    yield event

    async def resume(
        self,
        request_id: str,
        output_ids: tuple[int, ...],
        tenant: str = "",
        caller: TraceContext | None = None,
        key: str = "",
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
        async with (
            self._access.hold_resumed(key) as hold,
            self._attended(Client(next(self._numbers), checked), trace) as client,
            aclosing(client.events()) as events,
        ):
            now = asyncio.get_running_loop().time()
            self._streams.put(Resume(now, client.number, checked, tenant, output_ids))
            async for event in events:
                hold.saw(event)
                yield event

    async def cancel(self, request_id: str, tenant: str = "") -> None:
        """Returns once it is under way or over, of all choices if it is the first's. Raises Status."""
        self._check_standing()
        await self._cancels.cancel(request_id, tenant)

    async def tokenize(self, call: GenerateCall) -> tuple[int, ...]:
        """The prompt of a call in tokens, as `generate` would have it. Raises Status."""
        self._check_standing()
        check_input(call, self._limits)
        model = await self._model(call)
        await self._access.spend_request(call.key)
        return await ids_of_prompt(call, model, self._encoder, self._ports.wall_ns())

    async def detokenize(self, call: GenerateCall) -> tuple[bytes, ...]:
        """The bytes of each of its token ids. Raises Status."""
        card, ids = (await self._model(call)).card, call.token_ids or ()
        check_ids(call, card.name, card.vocab_size)
        return tuple([card.token_bytes[i] for i in ids])

    def list_models(self, who: Caller | None = None) -> list[ModelInfo]:
        return [m.info for m in self._models.served() if self.may_use(who or Caller(""), m.name)]

    def may_use(self, who: Caller, model: str) -> bool:
        return self._access.rights.may_use(who.key, model)

    async def _model(self, call: GenerateCall) -> Model:
        """Of a call that may be made. Raises Status."""
        self._access.check_call(call)
        rights, ours = self._access.rights, bool(call.job)
        model = await self._models.find(call.model, lambda name: ours or rights.may_use(call.key, name))
        if not ours:
            rights.check_model(call.key, model.name)
        return model

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

    def _trace(
        self, name: str, request_id: RequestId, caller: TraceContext | None, start_ns: int, start_s: float
    ) -> RequestTrace:
        ports = self._ports
        return RequestTrace(
            ports.tracer, ports.wall_ns, name, request_id, caller, start_ns=start_ns, start_s=start_s
        )

    @asynccontextmanager
    async def _attended(self, client: Client, trace: RequestTrace) -> AsyncIterator[Client]:
        """What it is told comes from the core while the context lasts."""
        streams, request_id = self._streams, client.request_id
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
            client.leave_line()
            streams.nudge()
            trace.done(client, error, self._meters)


async def _close(subscription: Subscription) -> None:
    try:
        await subscription.close()
    except BusError as error:
        log.debug("subscription not closed", error=str(error))

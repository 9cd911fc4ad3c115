"""The one task that touches the core: it brings events in order and performs what they decide.

Calls to the bus are tasks of the service's group and end in an event. What comes from the bus may fill the
inbox only so far, so that a flood of it takes nothing from the clients.
"""

import asyncio
from collections.abc import Callable

from chassis import log, subjects
from chassis.bus import Message
from chassis.errors import Code, Status
from chassis.ids import GatewayId, RequestId
from chassis.inbox import Inbox
from chassis.messages import BadMessage
from chassis.messages.card import ModelCard
from chassis.messages.chunk import parse_chunk
from chassis.messages.ownership import parse_takeover_question
from chassis.ports import Ports
from gateway.bus_calls import BusCalls
from gateway.clients import Client
from gateway.config import Config
from gateway.detokenizer import OutputText
from gateway.events import (
    Accept,
    AskOwner,
    CancelHeard,
    ChunkArrived,
    ClientGone,
    Count,
    Effect,
    End,
    Event,
    Fail,
    Pass,
    Published,
    PublishRequest,
    ReadMessage,
    ReadRecord,
    TakeoverAsked,
    Tell,
    Tick,
    WriteCancel,
)
from gateway.models import Models
from gateway.spans import RequestTrace
from gateway.streams import StreamLimits, Streams

RETRY_MS = 1000

Call = ReadRecord | ReadMessage | AskOwner | WriteCancel


class StreamLoop:
    def __init__(self, gateway: GatewayId, config: Config, ports: Ports, models: Models) -> None:
        self.counts: dict[str, int] = {}  # of rare kinds: ghosts, gaps, refusals, garbage
        self.clients: dict[int, Client] = {}
        self.traces: dict[RequestId, RequestTrace] = {}
        self.cancels: dict[int, asyncio.Future[CancelHeard]] = {}
        self._config = config
        self._ports = ports
        self._models = models
        self._core = Streams(gateway, StreamLimits(len_max=config.streams_len_max))
        # what must not be lost (completions, departures) has room beyond what the bus may fill
        self._inbox: Inbox[Event] = Inbox(config.inbox_len_max + 8 * config.streams_len_max)
        self._calls = BusCalls(ports.bus, gateway, config, ports.wall_ns, self._vocab_size)
        self._turned = asyncio.Event()

    @property
    def open_len(self) -> int:
        return len(self._core)

    @property
    def gauges(self) -> dict[str, float]:
        """By the names that scrapers are told."""
        return {"shoal_gateway_streams_open": len(self._core), "shoal_gateway_clients": len(self.clients)}

    @property
    def idle(self) -> bool:
        """No stream, no cancel under way, no client."""
        return self._core.idle and not self.clients

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Until cancelled."""
        loop, timer = asyncio.get_running_loop(), self._core.next_timer()
        while True:
            for event in await self._inbox.drain(timer):
                self._perform(group, self._core.handle(event))
            timer = self._core.next_timer()
            if timer is not None and timer <= (now := loop.time()):
                self._perform(group, self._core.handle(Tick(now)))
                timer = self._core.next_timer()
            self._turned.set()

    def put(self, event: Event) -> None:
        """Raises InboxFull, which its size rules out."""
        self._inbox.put_nowait(event)

    async def until(self, done: Callable[[], bool], deadline: float) -> None:
        """Returns when `done` holds after a turn of the core, or at the deadline on the loop's clock."""
        try:
            async with asyncio.timeout_at(deadline):
                while not done():
                    self._turned.clear()
                    await self._turned.wait()
        except TimeoutError:
            pass

    def nudge(self) -> None:
        """A client left: whoever waits for the last one looks again."""
        self._turned.set()

    def abandon(self) -> None:
        """Whoever still waits learns that this gateway is gone."""
        gone = Status(Code.UNAVAILABLE, "gateway: stopped; resume at another", 0)
        for client in self.clients.values():
            client.fail(gone)
        for waiting in self.cancels.values():
            if not waiting.done():
                waiting.set_exception(gone)

    def check(self) -> None:
        """What holds between events."""
        self._core.check()

    # ---- from the bus ------------------------------------------------------------------------------

    def on_chunk(self, message: Message) -> None:
        try:
            chunk = parse_chunk(message.data)
        except BadMessage as error:
            self._bad(message, error)
            return
        self._take(ChunkArrived(asyncio.get_running_loop().time(), chunk))

    def on_takeover(self, message: Message) -> None:
        try:
            question = parse_takeover_question(message.data)
        except BadMessage as error:
            self._bad(message, error)
            return
        self._take(TakeoverAsked(asyncio.get_running_loop().time(), question))

    def _take(self, event: Event) -> None:
        if len(self._inbox) >= self._config.inbox_len_max or not self._inbox.offer(event):
            self._count("inbox full")

    def _bad(self, message: Message, error: BadMessage) -> None:
        self._count("bad message")
        log.warning("bad message dropped", subject=message.subject, error=str(error))

    def _count(self, what: str, amount: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + amount

    # ---- effects -----------------------------------------------------------------------------------

    def _perform(self, group: asyncio.TaskGroup, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Pass(number, first_index, ids, logprobs, prompt):
                    if (client := self.clients.get(number)) is not None:
                        client.pass_on(first_index, ids, logprobs, prompt)
                case Tell():
                    self._calls.tell(effect)
                case Accept():
                    self._accept(effect)
                case End(number):
                    if (client := self.clients.get(number)) is not None:
                        client.finish(effect)
                case Fail(number, code, message, retry_ms):
                    if (client := self.clients.get(number)) is not None:
                        client.fail(Status(code, message, retry_ms))
                case CancelHeard(reply):
                    if (waiting := self.cancels.get(reply)) is not None and not waiting.done():
                        waiting.set_result(effect)
                case Count(what, amount):
                    self._count(what, amount)
                case PublishRequest():
                    self._publish(effect)
                case _:
                    group.create_task(self._complete(effect), name=type(effect).__name__)

    async def _complete(self, effect: Call) -> None:
        match effect:
            case ReadRecord():
                self.put(await self._calls.read_record(effect))
            case ReadMessage():
                self.put(await self._calls.read_message(effect))
            case AskOwner():
                self.put(await self._calls.ask_owner(effect))
            case WriteCancel():
                self.put(await self._calls.write_cancel(effect))

    def _publish(self, effect: PublishRequest) -> None:
        request = effect.request
        start_ns = self._ports.wall_ns()

        def done(published: Published) -> None:
            if (trace := self.traces.get(request.id)) is not None:
                subject = subjects.request(request.model, request.priority, request.id)
                trace.published(start_ns, self._ports.wall_ns(), published.outcome.value, subject)
            self.put(published)

        self._calls.publish(effect, done)

    def _accept(self, effect: Accept) -> None:
        client = self.clients.get(effect.client)
        if client is None:
            return
        model = self._models.known(effect.model)
        if model is None:
            client.fail(Status(Code.UNAVAILABLE, f"model {effect.model}: its card is not here", RETRY_MS))
            self.put(ClientGone(asyncio.get_running_loop().time(), effect.client, effect.request_id))
            return
        client.accept(effect, _text(effect, model.card))
        if (trace := self.traces.get(effect.request_id)) is not None:
            trace.accepted(effect.request)

    def _vocab_size(self, name: str) -> int | None:
        model = self._models.known(name)
        return model.card.vocab_size if model is not None else None


def _text(accept: Accept, card: ModelCard) -> OutputText:
    """Of a request whose message is gone only the end is passed on, cut where it must be."""
    limits = accept.request.limits if accept.request is not None else None
    stop_ids: tuple[int, ...] = ()
    if limits is not None:
        stop_ids = limits.stop_token_ids + (() if limits.ignore_eos else card.eos_ids)
    return OutputText(
        card.token_bytes,
        accept.stop,
        strip_leading_space=card.strip_leading_space,
        stop_ids=stop_ids,
        min_tokens=limits.min_tokens if limits is not None else 0,
    )

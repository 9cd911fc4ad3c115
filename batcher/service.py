"""The batcher's shell: brings the world to the core as events and performs what it decides.

One inbox, one task that touches the core. Calls that wait (bus, rpc, kvstore) run as tasks of the one
group; each has at most one per request or pool, and comes back as an event.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from batcher import events as ev
from batcher.account import Account
from batcher.arrivals import Arrivals
from batcher.assembly import make_core, ring_config
from batcher.config import Config
from batcher.core import Effect, Event, Interrupted
from batcher.fetcher import Fetcher
from batcher.formation import CloseLinks, FormStage, PipelineLost, Stood, WorkersSeen, WriteEpoch
from batcher.kvstore_client import KvstoreClient, Pool
from batcher.members import Members, ModelGone, await_card
from batcher.meters import families
from batcher.outbox import BEAT_S, Outbox
from batcher.records import Records
from batcher.ring import Ring, step_header
from batcher.statistics import Statistics
from chassis import log, subjects
from chassis.bus import Message
from chassis.config import ConfigError
from chassis.ids import BootId, GatewayId, RequestId
from chassis.inbox import Inbox
from chassis.insist import insist
from chassis.messages.kvstore import StageAddress
from chassis.messages.load import build_load
from chassis.messages.ownership import (
    TakeoverQuestion,
    build_attach_answer,
    build_owner_answer,
    build_takeover_question,
)
from chassis.messages.registry import BatcherEntry
from chassis.messages.statistics import build_statistics
from chassis.messages.step_result import StepResult
from chassis.metrics import Family
from chassis.ports import Ports
from chassis.recorder import Recorder

MANY = 16  # requests held
CALM_S = 0.002
URGENT = (ev.StepReturned, PipelineLost, WorkersSeen)  # what stages wait for


class Batcher:
    def __init__(self, config: Config, ports: Ports) -> None:
        self.boot = BootId(ports.new_id())
        self._config = config
        self._ports = ports
        self._bus = ports.bus
        self._inbox: Inbox[Event] = Inbox(config.inbox_len_max)
        self._statistics = Statistics()
        self._account = Account(self.boot, ports.tracer, self._statistics.token_gap_s)
        timeout_s = config.bus_timeout_ms / 1000
        self._records = Records(
            ports.bus,
            self.boot,
            self._account,
            self._statistics,
            ports.wall_ns,
            timeout_s,
            self._tell,
            self._spawn,
        )
        self._outbox = Outbox(self.boot, self._bus)
        self._gateways: tuple[GatewayId, ...] = ()
        self._gateways_until = 0.0
        self._settling: list[ev.Ack | ev.Nak] = []
        self._starting = asyncio.timeout(None)
        self._fetcher: Fetcher | None = None  # once it serves
        self._idle = asyncio.Event()  # draining, and nothing is held
        self._let_go = asyncio.Event()  # the core has let go of what was held
        self._drained = asyncio.Event()
        self._recorder = Recorder(Path(config.record_steps)) if config.record_steps else None
        self._draining = False
        self.counts: dict[str, int] = {}
        self._perform: dict[type[Any], Callable[[Any], None]] = {
            ev.Append: self._records.append,
            ev.WriteReceipt: self._records.write_receipt,
            ev.ReadLast: lambda e: self._spawn(self._records.read(e)),
            ev.AskOwner: lambda e: self._spawn(self._records.ask_owner(e)),
            ev.AskTakeover: self._ask_takeover,
            ev.AnswerOwner: lambda e: self._arrivals.answer(e.reply, build_owner_answer(e.mine)),
            ev.AnswerAttach: lambda e: self._arrivals.answer(e.reply, build_attach_answer(e.kind)),
            ev.SendParts: self._outbox.add,
            ev.Ack: self._settling.append,
            ev.Nak: self._settling.append,
            ev.Progress: self._progress,
            ev.Admitted: lambda e: self._account.admitted(e.request_id, ports.wall_ns()),
            ev.DeadLetter: lambda e: self._spawn(self._records.dead_letter(e)),
            ev.Count: self._count,
            ev.Distrusted: self._distrusted,
            ev.Give: lambda e: self._spawn(self._records.give(e)),
            ev.TellLoad: self._tell_load,
            ev.LocateBlocks: lambda e: self._spawn(self._locate(e)),
            ev.Closed: lambda e: self._account.closed(e.request_id, e.why, ports.wall_ns()),
            ev.MatchBlocks: lambda e: self._spawn(self._blocks(e)),
            ev.ExchangeBlocks: lambda e: self._spawn(self._blocks(e)),
            ev.AttachPool: lambda e: self._spawn(self._blocks(e)),
            WriteEpoch: lambda e: self._spawn(self._members.write_epoch(e)),
            FormStage: lambda e: self._spawn(self._form(e)),
            CloseLinks: lambda e: self._ring.close(e.epoch),
            Stood: self._stood,
            Interrupted: self._interrupted,
        }

    # ---- life

    async def run(self) -> None:
        try:
            async with self._starting:
                card = await await_card(self._bus, self._config.model)
                await insist(lambda: self._bus.ensure_consumers(card.name))
        except TimeoutError:
            return  # drained before there was anything to serve
        if card.num_layers < self._config.num_stages:
            raise ConfigError(
                f"num_stages: {self._config.num_stages}; model {card.name} has {card.num_layers} layers"
            )
        self._card = card
        self._arrivals = Arrivals(
            self._bus,
            self.boot,
            card,
            self._account,
            self._records,
            self._ports.wall_ns,
            self._tell,
            self._count_one,
            self._spawn,
        )
        self._fetcher = fetcher = Fetcher(self._config, self._bus, card.name, self._arrivals.deliver)
        self._members = Members(self._bus, self.boot, card, self._tell, self._count_one)
        self._core = make_core(self._config, self.boot, card)
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._ring = Ring(
                self._ports, self.boot, ring_config(self._config), group, self._tell, self._on_result
            )
            self._kvstore = KvstoreClient(self._ports, self._tell, self._config.kvstore_timeout_ms / 1000)
            await self._ring.listen()
            for subject in (subjects.owner(self.boot), subjects.batchers(card.name)):
                await insist(partial(self._bus.subscribe, subject, self._arrivals.heard))
            await insist(partial(self._bus.subscribe, subjects.loads(card.name), self._arrivals.load_heard))
            statistics = subjects.statistics(self.boot)
            await insist(partial(self._bus.subscribe, statistics, self._tell_statistics))
            await insist(partial(self._kvstore.start, group))
            await insist(self._members.watch)
            tasks = [
                group.create_task(self._decide(fetcher), name="decide"),
                group.create_task(self._refresh(), name="registry"),
                *fetcher.start(group),
            ]
            log.info("batcher runs", model=card.name, stages=self._config.num_stages)
            await self._drained.wait()
            for task in tasks:
                task.cancel()
            self._ring.close(self._core.formation.epoch)
            self._kvstore.close()
        if self._recorder is not None:
            self._recorder.close()
        await self._members.delete_entry()

    async def drain(self) -> None:
        """Takes nothing new, finishes what runs as far as time allows, gives the rest back."""
        self._draining = True
        loop = asyncio.get_running_loop()
        if self._fetcher is None:
            self._starting.reschedule(loop.time())
            return
        self._fetcher.stop()
        self._arrivals.closed = True
        until = loop.time() + self._config.drain_timeout_ms / 1000
        self._tell(ev.Tick(loop.time()))  # a turn: perhaps nothing is held
        try:
            async with asyncio.timeout_at(until):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drained with requests left", held=len(self._core.ownership))
        self._tell(ev.Drain(loop.time()))
        await self._let_go.wait()
        self._drained.set()

    # ---- seen from outside

    @property
    def ready(self) -> bool:
        """Its pipeline stands, and it takes what comes."""
        return self._fetcher is not None and self._core.accepting and not self._draining

    def metrics(self) -> Iterable[Family]:
        if self._fetcher is None:
            return ()
        now = asyncio.get_running_loop().time()
        return families(self._core, self._statistics, self.boot, self._card.name, self.counts, now)

    # ---- the one task that touches the core

    async def _decide(self, fetcher: Fetcher) -> None:
        loop = asyncio.get_running_loop()
        while True:
            until = self._next_wake()
            calm_until = loop.time() + CALM_S if self._busy else 0.0
            items = await self._inbox.drain(until, calm_until)
            now = loop.time()
            if until is not None and now >= until:
                self._do(self._core.handle(ev.Tick(now, gap_s=now - until)))
            for item in items:
                self._do(self._core.handle(item))
            plans, effects = self._core.plans(now)
            self._do(effects)
            for plan in plans:
                self._send(plan)
            self._outbox.flush(now, self._served(now))
            self._settle()
            if self._draining and not len(self._core.ownership):
                self._idle.set()
                if self._core.draining:
                    self._let_go.set()
            fetcher.room(
                self._core.accepting and not self._draining,
                self._config.waiting_len_max - self._core.num_waiting,
                self._busy,
            )

    @property
    def _busy(self) -> bool:
        """Many are held, and the stages have work. Then what is no step's result waits for company: a turn
        costs as much as several events."""
        return self._core.scheduler.num_in_flight > 0 and len(self._core.ownership) >= MANY

    def _next_wake(self) -> float | None:
        times = (self._core.next_timer(), self._outbox.next_beat(self._gateways))
        return min([t for t in times if t is not None], default=None)

    def _served(self, now: float) -> tuple[GatewayId, ...]:
        """Looked up now and then: it takes a walk over all that is held."""
        if now >= self._gateways_until:
            self._gateways_until = now + BEAT_S / 2
            self._gateways = self._core.ownership.gateways()
        return self._gateways

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._perform[type(effect)](effect)

    def _send(self, plan: ev.StepPlan) -> None:
        now_ns = self._ports.wall_ns()
        trace_parent = self._account.sent(plan, now_ns)
        self._statistics.sent(plan.epoch, plan.number, len(plan.rows), now_ns)
        scheduler = self._core.scheduler
        asks, attachment = scheduler.prompts.asks(plan), max(self._kvstore.attachment, scheduler.fence)
        header = step_header(plan, scheduler.slot_start, trace_parent, asks, scheduler.digest, attachment)
        if self._recorder is not None:
            self._recorder.write(header)
        self._ring.send(plan.epoch, header)

    def _settle(self) -> None:
        """Acks follow the finish frames that went out with the turn's chunks."""
        for effect in self._settling:
            match effect:
                case ev.Ack():
                    self._bus.ack(effect.token)
                case ev.Nak():
                    self._bus.nak(effect.token, effect.delay_s)
        self._settling.clear()

    def _tell(self, event: Event) -> None:
        if not self._inbox.offer(event, urgent=type(event) in URGENT):
            self._count(ev.Count("inbox full"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._group.create_task(work)

    def _count(self, effect: ev.Count) -> None:
        self.counts[effect.what] = self.counts.get(effect.what, 0) + effect.amount

    def _distrusted(self, effect: ev.Distrusted) -> None:
        self._count(ev.Count("void rows"))
        log.warning("blocks hold other content", request=effect.request_id, blocks=effect.num_blocks)
        cause = f"{effect.num_blocks} blocks did not hold what they should: computed anew"
        self._account.computed_anew(effect.request_id, cause, self._ports.wall_ns())

    def _count_one(self, what: str) -> None:
        self._count(ev.Count(what))

    # ---- what comes in

    def _on_result(self, result: StepResult) -> None:
        now_ns = self._ports.wall_ns()
        self._account.returned(result.epoch, result.number, result.timings, now_ns)
        self._statistics.returned(result.epoch, result.number, result.timings, now_ns)

    # ---- what goes out

    def _tell_statistics(self, question: Message) -> None:
        told = self._statistics.tell(self.boot, self._card.name, self._core.scheduler.balance.use)
        self._bus.reply(question, build_statistics(told))

    def _ask_takeover(self, effect: ev.AskTakeover) -> None:
        question = TakeoverQuestion(effect.request_id, effect.attempt, self.boot)
        self._bus.publish(subjects.TAKEOVER, build_takeover_question(question))

    def _tell_load(self, effect: ev.TellLoad) -> None:
        self._bus.publish(subjects.loads(self._card.name), build_load(effect.load))

    def _progress(self, effect: ev.Progress) -> None:
        for token in effect.tokens:
            self._bus.progress(token)

    # ---- pipeline and blocks

    async def _form(self, effect: FormStage) -> None:
        self._tell(await self._ring.form(effect))

    def _stood(self, effect: Stood) -> None:
        self._kvstore.open(
            Pool(
                generation=effect.generation,
                epoch=effect.epoch,
                intact=effect.intact,
                prior_epoch=effect.prior_epoch,
                prior_attachment=effect.prior_attachment,
                worker_stamps=effect.stamps,
                num_blocks=effect.num_blocks,
                block_size_tokens=self._config.block_size_tokens,
                namespace=self._card.model_digest,
                stages=tuple(
                    StageAddress(s.worker.transport_address, range(s.first_layer, s.end_layer))
                    for s in effect.stages
                ),
            )
        )
        log.info(
            "pipeline stands",
            epoch=effect.epoch,
            num_blocks=effect.num_blocks,
            layers=[f"{s.worker.boot}:{s.first_layer}-{s.end_layer}" for s in effect.stages],
        )
        self._spawn(self._put_entry())

    def _interrupted(self, effect: Interrupted) -> None:
        log.warning("pipeline lost", epoch=effect.epoch, cause=effect.cause, held=len(effect.request_ids))
        self._account.interrupted(effect.request_ids, effect.epoch, effect.cause, self._ports.wall_ns())

    async def _blocks(self, effect: ev.BlockEffect) -> None:
        asking: tuple[RequestId, ...] = ()
        if isinstance(effect, ev.MatchBlocks):
            asking = effect.request_ids
        for request_id in asking:
            self._account.began(request_id, "kv_match", self._ports.wall_ns())
        answer = await self._kvstore.call(effect, [self._account.reference(r) for r in asking])
        for index, request_id in enumerate(asking):
            found = len(answer.blocks[index]) if isinstance(answer, ev.BlocksMatched) and answer.blocks else 0
            self._account.ended(request_id, "kv_match", self._ports.wall_ns(), **{"shoal.blocks_hit": found})
        self._tell(answer)

    async def _locate(self, effect: ev.LocateBlocks) -> None:
        found = await self._kvstore.locate(effect.chains, effect.generations)
        now = asyncio.get_running_loop().time()
        self._tell(ev.BlocksLocated(now, effect.call, effect.request_ids, found))

    async def _refresh(self) -> None:
        while True:
            await self._put_entry()
            await asyncio.sleep(subjects.REGISTRY_REFRESH_S)
            await self._members.review()
            chosen = (
                not self._config.model and not self._core.formation.epoch
            )  # by what was there at the start
            if not len(self._core.ownership) and self._members.gone(any_other=chosen):
                raise ModelGone(f"nobody serves this {self._card.name} any more, and others another model")

    async def _put_entry(self) -> None:
        core = self._core
        await self._members.put_entry(
            BatcherEntry(
                boot=self.boot,
                model=self._card.name,
                epoch=core.formation.epoch,
                standing=core.standing,
                pool_generation=self._kvstore.generation,
                running=core.scheduler.num_running,
                waiting=core.num_waiting,
            )
        )

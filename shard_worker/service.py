"""A shard worker's shell: links, the Form call, the registry and the step path around a `Stage`.

Everything runs on one loop and `Stage.handle` never awaits, so events enter the core one at a time in
the order they happen; its effects are performed before the next one. Each link has a task that reads it:
that is how steps come in and how a lost peer is noticed.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from chassis import log
from chassis.config import ConfigError
from chassis.errors import LinkClosed, RpcRejected
from chassis.ids import BootId, Epoch
from chassis.messages import BadMessage
from chassis.messages.addresses import advertised, names_no_host
from chassis.messages.forming import (
    FORM,
    Form,
    FormAnswer,
    FormAsk,
    Formed,
    FormRefusal,
    build_formed,
    parse_form,
)
from chassis.messages.pipeline import Hello, LinkKind, build_hello, copied_blocks, parse_hello, read_step
from chassis.messages.registry import WorkerEntry
from chassis.ports import Ports
from chassis.rpc import Server
from chassis.transport.interface import Frame, Link, LinkOptions
from shard_worker import events as ev
from shard_worker.compute import Compute, InlineCompute
from shard_worker.config import Config
from shard_worker.executor import Executor, LoadFailed, StageSpec
from shard_worker.grammar import Grammars
from shard_worker.inputs import MakeTables, TableLimits, Tables, portable_tables
from shard_worker.link_memory import LinkMemory, takes_direct
from shard_worker.prompt_asks import with_asks
from shard_worker.registration import Registration
from shard_worker.runner import Job, Place, StepRunner
from shard_worker.stage import Phase, Stage, StageConfig
from shard_worker.stamps import MakeStamps, Stamps
from shard_worker.tier_links import TierLinks

OUTGOING_SLOTS = 1  # the next stage says nothing to us


class _Drained(Exception):
    """Ends the task group of a worker that has let go of everything."""


class ShardWorker:
    """`run` serves until cancelled or drained. `compute`: where executors' calls block; `copies`: pages'."""

    def __init__(
        self,
        config: Config,
        ports: Ports,
        executor: Executor,
        compute: Compute | None = None,
        make_tables: MakeTables = portable_tables,
        make_stamps: MakeStamps = Stamps,
        copies: Compute | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.boot = BootId(ports.new_id())
        self.counts: dict[str, int] = {}  # ghosts and offences, by kind
        self._config = config
        self._ports = ports
        self._executor = executor
        self._memory = LinkMemory(executor, config.gpudirect)
        self._compute: Compute = compute or InlineCompute()
        self._make_tables, self._make_stamps = make_tables, make_stamps
        self._stamps: Stamps | None = None  # of the KV memory; None: nothing is proven
        self._facts = facts = executor.facts
        self._grammars = grammars or Grammars(facts.card)
        self._slot_bytes = config.slot_mb << 20
        self._stage = Stage(
            StageConfig(
                boot=self.boot,
                model_digest=facts.digest,
                num_layers=facts.num_layers,
                step_tokens_max=self._slot_bytes // facts.activation_bytes,
                links_max=config.links_max,
                free_after_s=config.free_after_ms / 1000,
            )
        )
        copies = copies or InlineCompute()
        self._runner = StepRunner(executor, self._compute, ports, self._step_failed, copies)
        self._tiers = TierLinks(executor, copies, self._spawn, self._count, self._runner)
        self._registration = Registration(ports.bus, facts, self._entry, config.same_model)
        self._tables: Tables | None = None
        self._place: Place | None = None
        self._links: dict[int, Link] = {}
        self._last_id = 0  # of links and calls
        self._answers: dict[int, asyncio.Future[Formed]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._server: Server | None = None
        self._moved = asyncio.Event()  # the stage's next time has changed
        self._drained = asyncio.Event()
        self._transport_address = self._rpc_address = ""

    @property
    def stage(self) -> Stage:
        return self._stage

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    await self._serve(group)
                finally:
                    self._group = None  # from here on nothing new starts
        except* _Drained:
            log.info("drained")
        finally:
            self._close_links()
            self._answer_all("stopping")
            if self._server is not None:
                await self._server.close()
            await self._compute.close()
            await self._tiers.close()

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        options = self._memory.receiving(self._options(self._config.slots, self._slot_bytes))
        try:
            address = await self._ports.transport.listen(self._config.listen, self._accept, options)
        except ValueError as error:
            raise ConfigError(f"[shard_worker] listen: {error}") from None
        self._server = await self._ports.rpc.serve(self._config.rpc_listen, {FORM: self._asked})
        self._transport_address = advertised(address, self._config.advertise_host)
        self._rpc_address = advertised(self._server.address, self._config.advertise_host)
        log.info("listening", transport=self._transport_address, rpc=self._rpc_address)
        if names_no_host(self._transport_address) or names_no_host(self._rpc_address):
            log.warning("others can't dial this from another host", transport=self._transport_address)
        group.create_task(self._registration.keep(), name="registration")
        for name, task in self._runner.tasks().items():
            group.create_task(task, name=name)
        group.create_task(self._keep_time(), name="time")
        await self._drained.wait()
        raise _Drained

    async def drain(self) -> None:
        """Takes no new epoch; waits, within a limit, until the batcher lets go of the one it has."""
        self._handle(ev.Drain(self._now()))
        await self._registration.withdraw()
        give_up_at = self._now() + self._config.drain_wait_ms / 1000
        while self._stage.phase is not Phase.FREE and self._now() < give_up_at:
            self._moved.clear()
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._moved.wait()
            except TimeoutError:
                log.warning("drained while in use", epoch=self._stage.last_epoch)
        self._drained.set()

    # ---- events in, effects out

    def _handle(self, event: ev.Event) -> None:
        for effect in self._stage.handle(event):
            self._perform(effect)
        self._moved.set()

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.CloseLink():
                link = self._links.pop(effect.link, None)
                if link is not None:
                    link.close()
            case ev.Load():
                self._spawn(self._load(effect.call, effect.form), "load")
            case ev.Dial():
                self._spawn(self._dial(effect.call, effect.form), "dial")
            case ev.Answer():
                answer = self._answers.pop(effect.call, None)
                if answer is not None and not answer.done():
                    answer.set_result(self._tiers.with_prior(effect.formed))
            case ev.Stood():
                self._stand(effect)
            case ev.Broke():
                self._runner.stop()
                self._tiers.end()
                self._tables = self._place = None
                log.warning("epoch ended", epoch=effect.epoch, cause=effect.cause)
            case ev.Announce():
                self._registration.changed()
            case ev.Count():
                self._count(effect.what)
            case ev.Execute():
                raise AssertionError("only a step that arrives is executed")

    def _stand(self, effect: ev.Stood) -> None:
        form, num_blocks, next_link = effect.form, effect.num_blocks, self._links[effect.next_link]
        limits = TableLimits(
            slots_max=form.slots_max,
            block_size_tokens=form.block_size_tokens,
            num_blocks=num_blocks,
            context_len_max=self._facts.context_len_max,
            step_tokens_max=form.step_tokens_max,
            vocab_size=self._grammars.vocab_size,
            whole=form.num_stages == 1,
            matcher_of=self._grammars.matcher,
        )
        # a frame each, until computed
        self._tables = self._make_tables(limits, form.last, self._config.slots)
        if self._stamps is not None:
            self._stamps.begin(form.epoch, form.slots_max)
        direct = takes_direct(next_link)
        self._place = Place(form.epoch, form.stage, form.last, next_link, self._stamps, num_blocks, direct)
        self._runner.stand(self._place)
        self._tiers.stand(form, num_blocks, self._stamps)
        log.info(
            "stage stands",
            epoch=form.epoch,
            stage=form.stage,
            layers=[form.first_layer, form.end_layer],
            blocks=num_blocks,
            next=form.next_address,
            transport=next_link.kind,
            gpudirect=direct,
        )

    def _step_failed(self, epoch: Epoch, cause: str) -> None:
        self._handle(ev.StepFailed(self._now(), epoch, cause))

    # ---- links

    def _accept(self, link: Link) -> None:
        try:
            hello = parse_hello(link.hello)
        except BadMessage:
            hello = None
        if hello is None or self._group is None:
            link.close()
        elif hello.kind is LinkKind.TIER:
            self._tiers.accept(link, hello)
        else:
            self._handle(ev.LinkUp(self._now(), self._add(link), hello))

    def _add(self, link: Link) -> int:
        self._last_id += 1
        self._links[self._last_id] = link
        self._spawn(self._read(self._last_id, link), "link")
        return self._last_id

    async def _read(self, link_id: int, link: Link) -> None:
        try:
            while True:
                self._frame(link_id, await link.receive())
        except LinkClosed:
            pass
        finally:
            link.close()
        self._links.pop(link_id, None)
        self._handle(ev.LinkDown(self._now(), link_id))

    def _frame(self, link_id: int, frame: Frame) -> None:
        """The step path's entry: from bytes to a job, within 200 us."""
        now, received_ns = self._now(), self._ports.wall_ns()
        try:
            step = read_step(frame.header)
            effects = self._stage.handle(ev.StepArrived(now, link_id, step.epoch, step.number))
            if effects == [ev.Execute()]:
                assert self._tables is not None and self._place is not None
                if step.attachment > self._tiers.attachment:
                    self._tiers.rise(step.attachment)
                laid_out, asks = self._tables.take(step), step.prompt_asks
                inputs = with_asks(laid_out, asks, self._grammars.vocab_size) if asks else laid_out
                self._check_payload(self._place, len(inputs.token_ids), frame)
                copies = copied_blocks(step, self._place.num_blocks) if step.copies else None
                self._runner.put(Job(self._place, step, inputs, frame, received_ns, now, copies))
                return
            for effect in effects:
                self._perform(effect)
            self._moved.set()
        except BadMessage as error:
            self._handle(ev.BadFrame(now, link_id, str(error)))
        frame.release()

    def _check_payload(self, place: Place, num_tokens: int, frame: Frame) -> None:
        wanted = 0 if place.stage == 0 else num_tokens * self._facts.activation_bytes
        given = (frame.direct or frame.payload).nbytes
        if given != wanted:
            raise BadMessage(f"step: {given} bytes of activations, not {wanted}")

    # ---- forming

    async def _asked(self, request: FormAsk) -> FormAnswer:
        try:
            form = parse_form(request)
        except BadMessage as error:
            raise RpcRejected("INVALID_ARGUMENT", str(error)) from None
        self._last_id += 1
        call = self._last_id
        answer = self._answers[call] = asyncio.get_running_loop().create_future()
        try:
            self._handle(ev.FormAsked(self._now(), call, form))
            return build_formed(await answer)
        finally:
            self._answers.pop(call, None)

    async def _load(self, call: int, form: Form) -> None:
        spec = StageSpec(
            stage=form.stage,
            num_stages=form.num_stages,
            first_layer=form.first_layer,
            end_layer=form.end_layer,
            block_size_tokens=form.block_size_tokens,
            slots_max=form.slots_max,
            step_tokens_max=form.step_tokens_max,
        )
        layers = range(form.first_layer, form.end_layer)
        try:
            async with asyncio.timeout(self._config.device_wait_ms / 1000):
                await self._compute.call(lambda: None)  # behind whatever the device still does
        except TimeoutError:
            error = "the device does not answer"
            log.warning(error, epoch=form.epoch, waited_ms=self._config.device_wait_ms)
            self._handle(ev.LoadDone(self._now(), call, layers, error=error))
            return
        try:
            loaded = await self._compute.call(lambda: self._memory.load(spec))
        except LoadFailed as failed:
            self._handle(ev.LoadDone(self._now(), call, layers, error=str(failed)))
        except Exception as failed:  # the device's: this epoch fails, the worker lives
            log.exception("load failed", failed, epoch=form.epoch)
            self._handle(ev.LoadDone(self._now(), call, layers, error=f"{type(failed).__name__}: {failed}"))
        else:
            if loaded.kv_allocated and (rate := self._config.verify_stamps):
                self._stamps = self._make_stamps(loaded.num_blocks, form.block_size_tokens, rate)
                self._stamps.watch(self._config.verify_contents)
            self._handle(ev.LoadDone(self._now(), call, layers, loaded.num_blocks, loaded.kv_allocated))

    async def _dial(self, call: int, form: Form) -> None:
        kind = LinkKind.RESULT if form.last else LinkKind.RING
        hello = build_hello(Hello(form.epoch, form.stage, self.boot, kind))
        timeout_s, options = self._config.dial_timeout_ms / 1000, self._options(OUTGOING_SLOTS, 0)
        try:
            link = await self._ports.transport.dial(
                form.next_address, hello, self._memory.sending(options), timeout_s
            )
        except (LinkClosed, ValueError) as error:
            log.warning("next stage out of reach", address=form.next_address, error=str(error))
            self._handle(ev.Dialled(self._now(), call, None))
        else:
            self._handle(ev.Dialled(self._now(), call, self._add(link)))

    # ---- the rest

    async def _keep_time(self) -> None:
        while True:
            self._moved.clear()
            try:
                async with asyncio.timeout_at(self._stage.free_at):
                    await self._moved.wait()
            except TimeoutError:
                self._handle(ev.Tick(self._now()))

    def _entry(self) -> WorkerEntry:
        return WorkerEntry(
            boot=self.boot,
            model=self._facts.name,
            model_digest=self._facts.digest,
            rpc_address=self._rpc_address,
            transport_address=self._transport_address,
            last_epoch=self._stage.last_epoch,
            free=self._stage.free,
            num_layers=self._facts.num_layers,
            preferred_stage=self._config.preferred_stage,
            wish=self._config.wish,
            head_cost_layers=self._facts.head_cost_layers,
            loaded=self._stage.loaded,
        )

    def _options(self, slots: int, slot_bytes: int) -> LinkOptions:
        return LinkOptions(slots, slot_bytes, self._config.send_timeout_ms / 1000)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None:
            work.close()
        else:
            self._group.create_task(work, name=name)

    def _answer_all(self, cause: str) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(Formed(FormRefusal.FAILED, self._stage.last_epoch, error=cause))

    def _close_links(self) -> None:
        for link in list(self._links.values()):
            link.close()

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

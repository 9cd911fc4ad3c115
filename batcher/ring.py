"""The batcher's links: it dials every worker, sends steps to the first stage, hears results from the last.

One epoch at a time. Whatever happens to a link is told as an event; nothing here decides. What an old
epoch still says is ignored and counted.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress

from batcher.events import StepPlan, StepReturned
from batcher.formation import FormStage, PipelineLost, StageFormed
from chassis import log
from chassis.config import ConfigError
from chassis.errors import LinkClosed, RpcError
from chassis.ids import BootId, Epoch, RequestId
from chassis.messages import BadMessage
from chassis.messages.addresses import advertised, names_no_host
from chassis.messages.forming import FORM, Form, Formed, FormRefusal, build_form, parse_formed
from chassis.messages.pipeline import (
    BATCHER_STAGE,
    FLAG_FRESH,
    FLAG_SAMPLES,
    Hello,
    LinkKind,
    PromptAsk,
    SlotStart,
    build_hello,
    build_step,
    parse_hello,
)
from chassis.messages.registry import WorkerEntry
from chassis.messages.step_result import StepResult, parse_result
from chassis.ports import Ports
from chassis.transport.interface import Link, LinkOptions

CONTROL_OPTIONS = LinkOptions(slots=4, slot_bytes=4096)
RESULT_OPTIONS = LinkOptions(slots=16, slot_bytes=1 << 16)


@dataclass(frozen=True, slots=True)
class RingConfig:
    listen: str
    block_size_tokens: int
    slots_max: int
    step_tokens_max: int
    form_timeout_s: float
    dial_timeout_s: float = 2.0
    queue_len_max: int = 128
    advertise_host: str = ""  # how the last stage reaches us; empty: as we listen


def step_header(
    plan: StepPlan,
    start_of: Callable[[RequestId, int], SlotStart],
    trace_parent: bytes,
    prompt_asks: Sequence[PromptAsk] = (),
    digest_of: Callable[[RequestId, int], int] | None = None,
    attachment: int = 0,
) -> bytes:
    """The wire form of a plan: its rows turned into columns. `start_of` and `digest_of`: of a request at the
    first position of a fresh row. Without digests workers prove nothing."""
    if not plan.rows:
        return build_step(plan.epoch, plan.number, freed_slots=plan.freed_slots, trace_parent=trace_parent)
    request_ids, slots, starts, token_ids, samples, output_index, blocks, fresh = zip(*plan.rows, strict=True)
    begun: Sequence[SlotStart] = ()
    digests: Sequence[int] = ()
    if any(fresh):
        begins = tuple(compress(zip(request_ids, starts, strict=True), fresh))
        begun = [start_of(*begin) for begin in begins]
        digests = [digest_of(*begin) for begin in begins] if digest_of is not None else ()
    return build_step(
        plan.epoch,
        plan.number,
        slots=slots,
        num_tokens=list(map(len, token_ids)),
        starts=starts,
        flags=[FLAG_SAMPLES * s | FLAG_FRESH * f for s, f in zip(samples, fresh, strict=True)],
        output_index=output_index,
        token_ids=list(chain.from_iterable(token_ids)),
        table_lens=list(map(len, blocks)),
        table=list(chain.from_iterable(blocks)),
        fresh=begun,
        freed_slots=plan.freed_slots,
        trace_parent=trace_parent,
        prompt_asks=prompt_asks,
        digests=digests,
        copies=plan.copies,
        attachment=attachment,
    )


class Ring:
    def __init__(
        self,
        ports: Ports,
        boot: BootId,
        config: RingConfig,
        group: asyncio.TaskGroup,
        tell: Callable[[PipelineLost | StepReturned], None],
        on_result: Callable[[StepResult], None],
    ) -> None:
        self._ports = ports
        self._boot = boot
        self._config = config
        self._group = group
        self._tell = tell
        self._on_result = on_result
        self._address = ""
        self._epoch = Epoch(0)
        self._closed = Epoch(0)  # the newest of those that are over
        self._links: list[Link] = []
        self._steps: asyncio.Queue[bytes] = asyncio.Queue(config.queue_len_max)
        self._unsent = 0  # steps queued or in sending
        self._first: Link | None = None  # to the first stage
        self._sender: asyncio.Task[None] | None = None
        self.ghosts = 0  # frames and links of other epochs

    async def listen(self) -> None:
        """Raises ConfigError for an address that is none; else as the transport's `listen`."""
        listen = self._config.listen
        try:
            bound = await self._ports.transport.listen(listen, self._accept, RESULT_OPTIONS)
        except ValueError as error:
            raise ConfigError(f"[batcher] listen: {error}") from None
        self._address = advertised(bound, self._config.advertise_host)
        log.info("listening", transport=self._address)
        if names_no_host(self._address):
            log.warning("the last stage can't dial this from another host", transport=self._address)

    # ---- forming

    async def form(self, want: FormStage) -> StageFormed:
        """Has the stage's worker form, once all workers are reached: none is taken from its rest for a dead
        neighbour's sake. Refusals and silence come back as a StageFormed too.
        """
        loop = asyncio.get_running_loop()
        if want.epoch > self._epoch:
            self.close(self._epoch)
            self._epoch = want.epoch
        stage = asked = want.stages[want.index]
        try:
            if want.index == 0:
                for asked in want.stages:
                    link = await self._reach(want.epoch, asked.worker)
                    if asked is stage:
                        self._start_sender(link)
                asked = stage
            reply = await self._form(want)
        except (LinkClosed, RpcError, BadMessage, ValueError) as error:  # ValueError: its address is none
            boot = asked.worker.boot
            log.warning("stage not formed", worker=boot, epoch=want.epoch, error=str(error))
            return StageFormed(loop.time(), want.call, None, cause=str(error), blamed=boot)
        if reply.refusal is not None:
            log.warning(
                "stage refused", worker=stage.worker.boot, epoch=want.epoch,
                refusal=reply.refusal.value, error=reply.error,
            )  # fmt: skip
            away = reply.refusal is FormRefusal.NEXT_AWAY
            return StageFormed(
                loop.time(),
                want.call,
                None,
                last_epoch=reply.last_epoch,
                cause=reply.refusal.value,
                next_away=away and want.index + 1 < len(want.stages),
            )
        return StageFormed(
            loop.time(),
            want.call,
            reply.kv_stamp,
            reply.num_blocks,
            prior_epoch=reply.prior_epoch,
            prior_attachment=reply.prior_attachment,
        )

    async def _reach(self, epoch: Epoch, worker: WorkerEntry) -> Link:
        hello = build_hello(Hello(epoch, BATCHER_STAGE, self._boot, LinkKind.CONTROL))
        link = await self._ports.transport.dial(
            worker.transport_address, hello, CONTROL_OPTIONS, self._config.dial_timeout_s
        )
        if not self._wanted(epoch):
            link.close()
            raise LinkClosed("the epoch has moved on")
        self._links.append(link)
        self._group.create_task(self._watch(link, epoch, worker.boot), name="control link")
        return link

    async def _form(self, want: FormStage) -> Formed:
        worker = want.stages[want.index].worker
        last = want.index + 1 == len(want.stages)
        following = self._address if last else want.stages[want.index + 1].worker.transport_address
        stage = want.stages[want.index]
        request = Form(
            epoch=want.epoch,
            batcher_boot=self._boot,
            model_digest=worker.model_digest,
            stage=want.index,
            num_stages=len(want.stages),
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
            next_address=following,
            block_size_tokens=self._config.block_size_tokens,
            slots_max=self._config.slots_max,
            step_tokens_max=self._config.step_tokens_max,
        )
        reply = await self._ports.rpc.call(
            worker.rpc_address, FORM, build_form(request), self._config.form_timeout_s
        )
        return parse_formed(reply)

    def close(self, epoch: Epoch) -> None:
        """Everything of this epoch and older ones."""
        if epoch < self._epoch:
            return
        self._closed = epoch
        if self._sender is not None:
            self._sender.cancel()
            self._sender = self._first = None
        for link in self._links:
            link.close()
        self._links.clear()
        while not self._steps.empty():
            self._steps.get_nowait()
        self._unsent = 0

    def _wanted(self, epoch: Epoch) -> bool:
        return epoch == self._epoch and epoch > self._closed

    # ---- steps and results

    def send(self, epoch: Epoch, header: bytes) -> None:
        """Sends a step, or queues it for a credit; steps of an epoch that is gone are dropped."""
        if epoch != self._epoch or self._first is None:
            self.ghosts += 1
            return
        try:
            if not self._unsent and self._first.send_now(header):
                return
        except LinkClosed:
            return  # the link's watcher tells
        self._steps.put_nowait(header)  # bounded by the steps in flight
        self._unsent += 1

    def _start_sender(self, link: Link) -> None:
        self._first = link
        self._sender = self._group.create_task(self._send_all(link), name="steps")

    async def _send_all(self, link: Link) -> None:
        while True:
            header = await self._steps.get()
            try:
                await link.send(header)
            except LinkClosed:
                return  # as above
            self._unsent -= 1

    async def _watch(self, link: Link, epoch: Epoch, worker: str) -> None:
        """A worker says nothing on this link but its end."""
        try:
            while True:
                (await link.receive()).release()
        except LinkClosed:
            pass
        link.close()
        if epoch == self._epoch and link in self._links:
            self._links.remove(link)
            self._lost(epoch, BootId(worker), "link to worker closed")

    def _accept(self, link: Link) -> None:
        try:
            hello = parse_hello(link.hello)
        except BadMessage:
            hello = None
        if hello is None or hello.kind is not LinkKind.RESULT or not self._wanted(hello.epoch):
            self.ghosts += 1
            link.close()
            return
        self._links.append(link)
        self._group.create_task(self._receive(link, hello.epoch, hello.boot), name="results")

    async def _receive(self, link: Link, epoch: Epoch, worker: BootId) -> None:
        loop = asyncio.get_running_loop()
        cause = "link from the last stage closed"
        try:
            while True:
                frame = await link.receive()
                header = frame.header
                frame.release()
                result = parse_result(header)
                if result.epoch != self._epoch:
                    self.ghosts += 1
                    continue
                self._on_result(result)
                self._tell(_returned(result, loop.time()))
        except LinkClosed:
            pass
        except BadMessage as error:
            cause = str(error)
        link.close()
        if epoch == self._epoch and link in self._links:
            self._links.remove(link)
            self._lost(epoch, worker, cause)

    def _lost(self, epoch: Epoch, worker: BootId, cause: str) -> None:
        self._tell(PipelineLost(asyncio.get_running_loop().time(), epoch, worker, cause))


def _returned(result: StepResult, now: float) -> StepReturned:
    return StepReturned(
        now,
        result.epoch,
        result.number,
        result.token_ids,
        result.logprobs,
        result.prompts,
        result.nan_places,
        result.void_rows,
        result.timings,
        result.waiting_places,
        result.refusals,
    )

"""The step path of a stage: what arrived is computed in order, and sent on while the next one computes.

A step is begun when it arrives, behind those that are, so that the device goes from one to the next without
the loop. Two tasks: compute waits for the device, and sends what needs no waiting; send waits with the rest
for the peer's credit. Rules: a step is begun only with a free buffer for what it gives, so that at most
`_BUFFERS` are begun and not sent; one that is not computed yet holds its transport slot, so that the sender's
credits bound what arrives. An output is copied once, on the compute side, because the executor reuses it; a
direct link reads it where it is, before its buffer is free. After a step that failed none of its epoch is
computed. What a step wrote is stamped, and its rows are proven (`stamps.py`), before anything of it is sent;
blocks that rows take over are compared before that, too.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from chassis import log
from chassis.errors import LinkClosed
from chassis.ids import Epoch
from chassis.messages.pipeline import PackedStep, StageTiming, add_timing
from chassis.messages.step_result import build_result
from chassis.ports import Ports
from chassis.trace import Span, TraceContext, step_key
from chassis.transport.interface import DirectLink, Frame, Link
from chassis.transport.registered import MemoryRange
from shard_worker.block_sums import BlockSums
from shard_worker.compute import Compute, Unfinished
from shard_worker.contents import Written
from shard_worker.executor import U32, AheadExecutor, Executor, StepInputs, StepOutput
from shard_worker.stamps import Stamps
from shard_worker.told import NOTHING_TOLD, told_of

JOBS_MAX = 64  # more than any link has slots
_BUFFERS = 3  # one in sending, one queued, one being filled; a device keeps as many
_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a stage stands in one epoch."""

    epoch: Epoch
    stage: int
    last: bool
    next_link: Link
    stamps: Stamps | None = None  # None: nothing is proven
    num_blocks: int = 0
    stays: bool = False  # activations go out from the device's memory, as they are


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    place: Place
    step: PackedStep
    inputs: StepInputs
    frame: Frame
    received_ns: int  # wall clock
    received_at: float  # loop time
    copies: tuple[U32, U32] | None = None  # of blocks, from and to, before the rows


# What a step gives: activations, or token ids and, if there is more to tell, it all. None: its epoch ended.
Given = tuple[memoryview | MemoryRange, U32, StepOutput | None] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    job: Job
    begun_at: float  # loop time; its turn may come later
    written: Written | None  # None: contents are not compared
    given: Awaitable[Given]


@dataclass(frozen=True, slots=True, eq=False)
class _Computing:
    """`Unfinished`."""

    ready: Callable[[], bool]
    finish: Callable[[], Given]


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    job: Job
    payload: memoryview | MemoryRange
    token_ids: U32
    told: StepOutput | None
    void_rows: tuple[int, ...]
    wait_ns: int
    compute_ns: int


class StepRunner:
    def __init__(
        self,
        executor: Executor,
        compute: Compute,
        ports: Ports,
        failed: Callable[[Epoch, str], None],
        copies: Compute,
    ) -> None:
        """`copies`: where memory is read beside steps."""
        self._executor = executor
        self._ahead = executor if isinstance(executor, AheadExecutor) else None
        self._compute = compute
        self._ports = ports
        self._failed = failed
        self.sums = BlockSums(executor, copies)
        self._place: Place | None = None
        self._broken: Place | None = None  # a step of it has failed
        self._jobs: deque[Job] = deque()  # at most JOBS_MAX
        self._begun: asyncio.Queue[_Begun] = asyncio.Queue(_BUFFERS)
        self._writing: dict[Job, None] = {}  # begun, and not stamped yet
        self._outputs: asyncio.Queue[_Output] = asyncio.Queue(_BUFFERS)
        self._unsent = 0  # outputs that are queued or in sending
        self._buffers = [bytearray() for _ in range(_BUFFERS)]
        self._free = _BUFFERS  # buffers that no step has which was begun and is not sent
        self._turn = 0
        self._ended_at = 0.0  # loop time of the step computed last
        self._send_ns = 0  # of the previous step
        self.num_steps = self.compute_ns = self.wait_ns = 0  # of steps computed
        self.dropped = 0  # jobs and outputs of an epoch that ended
        self.num_void_rows = 0  # that were found here

    def stand(self, place: Place) -> None:
        self._place = place

    def stop(self) -> None:
        """Nothing of the epoch is computed or sent any more; what runs is dropped when it ends."""
        self._place = None

    @property
    def idle_s(self) -> float:
        """Since when nothing is computed or waits to be."""
        under_way = self._jobs or self._free < _BUFFERS
        return 0.0 if under_way else asyncio.get_running_loop().time() - self._ended_at

    def writes(self, block: int, block_size_tokens: int) -> bool:
        """Whether a step that was begun, and whose blocks are not stamped yet, writes into this one."""
        return any(
            bool((job.inputs.kv_slots // block_size_tokens == block).any())
            or (job.copies is not None and block in job.copies[1])
            for job in self._writing
        )

    def put(self, job: Job) -> None:
        """Begins it at once if there is a buffer for what it gives."""
        assert len(self._jobs) < JOBS_MAX, "more steps than slots"
        self._jobs.append(job)
        self._begin()

    def _begin(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._free and self._jobs:
            job = self._jobs.popleft()
            if job.place is not self._place:
                self.dropped += 1
                job.frame.release()
                continue
            self._free -= 1
            self._writing[job] = None
            written = _announced(job)
            if self._ahead is not None:
                given = self._compute.ahead(partial(self._start, self._ahead, job))
            else:
                given = self._compute.begin(partial(self._run, job))
            self._begun.put_nowait(_Begun(job, now, written, given))

    def _done_with_buffer(self) -> None:
        self._free += 1
        if self._jobs:
            self._begin()

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """That whoever owns it runs, by name."""
        return {
            "compute": self.compute_steps(),
            "send": self.send_outputs(),
            "checksums": self.sums.take_all(),
        }

    async def compute_steps(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = await self._begun.get()
            job = begun.job
            try:
                given = await begun.given
                changed = () if given is None else await self._changed_rows(job)
            except Exception as error:  # the device's; the epoch ends, the worker lives
                log.exception("step failed", error, epoch=job.step.epoch, step=job.step.number)
                del self._writing[job]
                self._failed(job.step.epoch, f"step {job.step.number}: {type(error).__name__}: {error}")
                _forget(job)
                self._done_with_buffer()
                continue
            finally:
                job.frame.release()
            begun_at, self._ended_at = max(begun.begun_at, self._ended_at), loop.time()
            del self._writing[job]
            if given is None or job.place is not self._place:
                self.dropped += 1
                _forget(job)
                self._done_with_buffer()
                continue
            void_rows = self._proved(begun, given[1], changed)
            wait_ns, compute_ns = _ns(begun_at - job.received_at), _ns(self._ended_at - begun_at)
            self.num_steps += 1
            self.wait_ns += wait_ns
            self.compute_ns += compute_ns
            output = _Output(job, *given, void_rows, wait_ns, compute_ns)
            if self._unsent or not self._send_now(output):
                self._unsent += 1
                self._outputs.put_nowait(output)

    async def send_outputs(self) -> None:
        while True:
            output = await self._outputs.get()
            if output.job.place is self._place:
                await self._send(output)
            else:
                self.dropped += 1
            self._unsent -= 1
            self._done_with_buffer()

    def _send_now(self, output: _Output) -> bool:
        """False: the other task has to wait with it."""
        link, begun_at = output.job.place.next_link, asyncio.get_running_loop().time()
        if isinstance(output.payload, MemoryRange):
            return False
        try:
            if not link.send_now(self._header(output), output.payload):
                return False
        except LinkClosed:
            pass  # whoever reads that link says so
        except ValueError as error:
            self._failed(output.job.step.epoch, str(error))
        else:
            self._sent(output, begun_at)
        self._done_with_buffer()
        return True

    async def _send(self, output: _Output) -> None:
        link, begun_at = output.job.place.next_link, asyncio.get_running_loop().time()
        try:
            if not isinstance(output.payload, MemoryRange):
                await link.send(self._header(output), output.payload)
            elif isinstance(link, DirectLink):
                await link.send_direct(self._header(output), output.payload)
        except LinkClosed:
            pass  # as above
        except ValueError as error:
            self._failed(output.job.step.epoch, str(error))
        else:
            self._sent(output, begun_at)

    def _sent(self, output: _Output, begun_at: float) -> None:
        self._send_ns = _ns(asyncio.get_running_loop().time() - begun_at)
        self._record(output, self._send_ns)

    def _run(self, job: Job) -> Given:
        """On the compute thread. An empty step passes through here too: it proves that the thread turns."""
        if self._ended(job) or not len(job.inputs.token_ids):
            return self._passed(job)
        self._copy_blocks(job)
        return self._given(job, partial(self._executor.run, job.inputs, job.frame.payload))

    def _start(self, executor: AheadExecutor, job: Job) -> Unfinished[Given]:
        """The same in two halves."""
        if self._ended(job) or not len(job.inputs.token_ids):
            return _Computing(lambda: True, partial(self._passed, job))
        try:
            self._copy_blocks(job)
            entering = job.frame.direct or job.frame.payload
            under_way = executor.begin(job.inputs, entering, job.place.stays)
        except BaseException:
            self._broken = job.place
            raise
        return _Computing(under_way.ready, partial(self._given, job, under_way.result))

    def _copy_blocks(self, job: Job) -> None:
        if job.copies is not None:
            self._executor.copy_blocks(*job.copies)

    def _ended(self, job: Job) -> bool:
        return job.place is not self._place or job.place is self._broken

    def _passed(self, job: Job) -> Given:
        """Of a step that nothing is computed for."""
        return None if self._ended(job) else (_NOTHING, job.inputs.token_ids, None)

    def _given(self, job: Job, compute: Callable[[], StepOutput]) -> Given:
        try:
            output = compute()
        except BaseException:
            self._broken = job.place  # those behind it have begun
            raise
        if job.place is self._broken:  # the one before it failed after this one had begun
            return None
        if output.direct is not None:
            return output.direct, output.token_ids, None
        size = output.activations.nbytes
        if not size:
            return _NOTHING, output.token_ids, output if output.tells else None
        self._turn = (self._turn + 1) % _BUFFERS
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = bytearray(size)
        copy = memoryview(self._buffers[self._turn])[:size]
        copy[:] = output.activations.cast("B")
        return copy, output.token_ids, None

    async def _changed_rows(self, job: Job) -> tuple[int, ...]:
        """Those that go on from a block whose memory has changed, ascending."""
        step, stamps = job.step, job.place.stamps
        if stamps is None or stamps.contents is None or not step.fresh:
            return ()
        reused = stamps.contents.reused(step, job.inputs.block_tables, job.copies)
        blocks = dict.fromkeys(block for of_row in reused.values() for block in of_row)
        changed = await self.sums.changed(stamps, list(blocks))
        return tuple(row for row, of_row in reused.items() if not set(changed).isdisjoint(of_row))

    def _proved(self, begun: _Begun, sampled: U32, changed: tuple[int, ...]) -> tuple[int, ...]:
        """The rows of a step that was computed that nothing is to come of. `changed`: those found so far."""
        job = begun.job
        step, stamps = job.step, job.place.stamps
        if stamps is None or not step.flags:
            return step.void_rows
        if job.copies is not None:
            stamps.copy(*job.copies)
        known = step._replace(void_rows=tuple(sorted({*step.void_rows, *changed}))) if changed else step
        void_rows = stamps.note(known, job.inputs.block_tables, sampled)
        if begun.written is not None and stamps.contents is not None:
            filled = stamps.contents.choose(begun.written, stamps.blocks["fill"])
            self.sums.take(stamps.contents, begun.written.turn, filled)
        if len(void_rows) > len(step.void_rows):
            self.num_void_rows += len(void_rows) - len(step.void_rows)
            log.warning(
                "blocks do not hold what they should", epoch=step.epoch, step=step.number, rows=void_rows
            )
        return void_rows

    def _header(self, output: _Output) -> bytes:
        job, step = output.job, output.job.step
        timing = StageTiming(
            job.place.stage, job.received_ns, output.wait_ns, output.compute_ns, self._send_ns
        )
        if job.place.last:
            timings = (*step.timings, timing)
            told = NOTHING_TOLD if output.told is None else told_of(step, output.told)
            ids, void_rows = output.token_ids, output.void_rows
            return build_result(step.epoch, step.number, ids, timings, *told[:3], void_rows, *told[3:])
        return add_timing(job.frame.header, timing, output.void_rows)

    def _record(self, output: _Output, send_ns: int) -> None:
        job = output.job
        parent = TraceContext.decode(job.step.trace_parent)
        if parent is None:
            return
        tracer = self._ports.tracer
        tracer.record(
            Span(
                key=step_key(job.step.epoch, job.step.number),
                name="shard_worker.step",
                context=TraceContext(parent.trace_id, tracer.new_span_id(), parent.sampled),
                parent=parent.span_id,
                start_ns=job.received_ns,
                end_ns=job.received_ns + output.wait_ns + output.compute_ns + send_ns,
                attributes={
                    "shoal.stage": job.place.stage,
                    "shoal.tokens": len(job.inputs.token_ids),
                    "shoal.rows": len(job.inputs.context_lens),
                    "shoal.wait_ns": output.wait_ns,
                    "shoal.compute_ns": output.compute_ns,
                    "shoal.send_ns": send_ns,
                },
            )
        )


def _announced(job: Job) -> Written | None:
    """It is about to be begun: what it writes holds something else from now on."""
    stamps = job.place.stamps
    if stamps is None or stamps.contents is None or not job.step.flags:
        return None
    return stamps.contents.begun(job.inputs.kv_slots, job.copies)


def _forget(job: Job) -> None:
    """It was begun, perhaps, and nobody hears of it: its blocks hold nothing known."""
    if job.place.stamps is not None and job.step.flags:
        job.place.stamps.void(job.step, job.inputs.block_tables)
        if job.copies is not None:
            job.place.stamps.forget(job.copies[1])


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))

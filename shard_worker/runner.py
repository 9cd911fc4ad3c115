"""The step path of a stage: what arrived is computed in order, and sent on while the next one computes.

Two tasks with a queue of one between them: compute waits for the executor, send for the peer's credit.
What arrived and is not computed yet holds its transport slot, so the sender's credits bound the first
queue. An output is copied once, on the compute side, because the executor reuses it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from chassis import log
from chassis.errors import LinkClosed
from chassis.ids import Epoch
from chassis.messages.pipeline import PackedStep, StageTiming, add_timing, build_result
from chassis.messages.sampling import TokenLogprobs
from chassis.ports import Ports
from chassis.trace import Span, TraceContext, step_key
from chassis.transport.interface import Frame, Link
from shard_worker.compute import Compute
from shard_worker.executor import U32, Executor, LogprobColumns, StepInputs

JOBS_MAX = 64  # more than any link has slots
_BUFFERS = 3  # one in sending, one queued, one being filled


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a stage stands in one epoch."""

    epoch: Epoch
    stage: int
    last: bool
    next_link: Link


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    place: Place
    step: PackedStep
    inputs: StepInputs
    frame: Frame
    received_ns: int  # wall clock
    received_at: float  # loop time


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    job: Job
    payload: memoryview
    token_ids: U32
    logprobs: LogprobColumns | None
    wait_ns: int
    compute_ns: int


class StepRunner:
    def __init__(
        self, executor: Executor, compute: Compute, ports: Ports, failed: Callable[[Epoch, str], None]
    ) -> None:
        self._executor = executor
        self._compute = compute
        self._ports = ports
        self._failed = failed
        self._place: Place | None = None
        self._jobs: asyncio.Queue[Job] = asyncio.Queue(JOBS_MAX)
        self._outputs: asyncio.Queue[_Output] = asyncio.Queue(1)
        self._buffers = [bytearray() for _ in range(_BUFFERS)]
        self._turn = 0
        self._send_ns = 0  # of the previous step
        self.dropped = 0  # jobs and outputs of an epoch that ended

    def stand(self, place: Place) -> None:
        self._place = place

    def stop(self) -> None:
        """Nothing of the epoch is computed or sent any more; what runs is dropped when it ends."""
        self._place = None

    def put(self, job: Job) -> None:
        self._jobs.put_nowait(job)

    async def compute_steps(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            job = await self._jobs.get()
            if job.place is not self._place:
                self.dropped += 1
                job.frame.release()
                continue
            begun_at = loop.time()
            try:
                payload, token_ids, logprobs = await self._compute.call(partial(self._run, job))
            except Exception as error:  # the device's; the epoch ends, the worker lives
                log.exception("step failed", error, epoch=job.step.epoch, step=job.step.number)
                self._failed(job.step.epoch, f"step {job.step.number}: {type(error).__name__}: {error}")
                continue
            finally:
                job.frame.release()
            ended_at = loop.time()
            if job.place is not self._place:
                self.dropped += 1
                continue
            wait_ns, compute_ns = _ns(begun_at - job.received_at), _ns(ended_at - begun_at)
            await self._outputs.put(_Output(job, payload, token_ids, logprobs, wait_ns, compute_ns))

    async def send_outputs(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            output = await self._outputs.get()
            job, place = output.job, output.job.place
            if place is not self._place:
                self.dropped += 1
                continue
            begun_at = loop.time()
            timing = StageTiming(
                place.stage, job.received_ns, output.wait_ns, output.compute_ns, self._send_ns
            )
            try:
                await place.next_link.send(self._header(output, timing), output.payload)
            except LinkClosed:
                continue  # whoever reads that link says so
            except ValueError as error:
                self._failed(job.step.epoch, str(error))
                continue
            self._send_ns = _ns(loop.time() - begun_at)
            self._record(output, self._send_ns)

    def _run(self, job: Job) -> tuple[memoryview, U32, LogprobColumns | None]:
        """On the compute thread. An empty step passes through here too: it proves that the thread turns."""
        if not len(job.inputs.token_ids):
            return memoryview(b""), job.inputs.token_ids, None
        output = self._executor.run(job.inputs, job.frame.payload)
        size = output.activations.nbytes
        if not size:
            return memoryview(b""), output.token_ids, output.logprobs
        self._turn = (self._turn + 1) % _BUFFERS
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = bytearray(size)
        copy = memoryview(self._buffers[self._turn])[:size]
        copy[:] = output.activations.cast("B")
        return copy, output.token_ids, None

    def _header(self, output: _Output, timing: StageTiming) -> bytes:
        step = output.job.step
        if output.job.place.last:
            told = () if output.logprobs is None else _entries(output.logprobs)
            timings = (*step.timings, timing)
            return build_result(step.epoch, step.number, output.token_ids, timings, told)
        return add_timing(output.job.frame.header, timing)

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


def _entries(columns: LogprobColumns) -> list[tuple[int, TokenLogprobs]]:
    ends = columns.top_lens.cumsum()
    ids, logprobs = columns.top_ids.tolist(), columns.top_logprobs.tolist()
    return [
        (place, TokenLogprobs(logprob, rank, tuple(ids[begin:end]), tuple(logprobs[begin:end])))
        for place, logprob, rank, begin, end in zip(
            columns.places.tolist(),
            columns.logprobs.tolist(),
            columns.ranks.tolist(),
            (ends - columns.top_lens).tolist(),
            ends.tolist(),
            strict=True,
        )
    ]


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))

"""The pipeline without Shoal around it: the same workers, layout and steps, driven by a loop.

It takes the batcher's place on the ring and sends the recorded steps as fast as their own order allows:
a step leaves when the steps that sampled its sequences' last tokens have come back, and no more steps are
in flight than the batcher had. What Shoal needs beyond this time is the pipeline tax.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chassis.ids import BootId, Epoch
from chassis.messages.forming import FORM, Form, build_form, parse_formed
from chassis.messages.pipeline import (
    BATCHER_STAGE,
    FLAG_SAMPLES,
    Hello,
    LinkKind,
    build_hello,
    parse_step,
)
from chassis.messages.registry import WorkerEntry
from chassis.messages.step_result import parse_result
from chassis.recorder import read_frames
from chassis.rpc import Rpc
from chassis.transport.interface import Link, LinkOptions, Transport
from chassis.wire import pipeline_pb2 as pb

BOOT = BootId("baredriver")


@dataclass(frozen=True, slots=True)
class Recorded:
    header: bytes
    after: int  # index, over all runs, of the step that must have come back first; -1: none
    sampled: int  # tokens it yields


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages as the batcher had formed them."""

    stages: Sequence[tuple[WorkerEntry, int, int]]  # worker, first layer, end layer
    block_size_tokens: int
    slots_max: int
    step_tokens_max: int


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    tokens: int
    steps: int


def load(path: Path, epoch: int) -> list[list[Recorded]]:
    """A recording's steps, renumbered into `epoch`, in runs: an empty step (an idle second) parts them.

    Steps of earlier epochs than the recording's last are left out.
    """
    frames = list(read_frames(path))
    last_epoch = parse_step(frames[-1]).epoch
    runs: list[list[Recorded]] = [[]]
    last_sampling: dict[int, int] = {}  # slot -> index of the step that last sampled it
    index = 0
    for frame in frames:
        step = parse_step(frame)
        if step.epoch != last_epoch:
            continue
        if not len(step.slots):
            if runs[-1]:
                runs.append([])
            continue
        slots = step.slots.tolist()
        after = max((last_sampling.get(s, -1) for s in slots), default=-1)
        sampling = [s for s, f in zip(slots, step.flags.tolist(), strict=True) if f & FLAG_SAMPLES]
        last_sampling.update(dict.fromkeys(sampling, index))
        message = pb.Step.FromString(frame)
        message.epoch, message.step = epoch, index + 1
        message.ClearField("trace_parent")
        runs[-1].append(Recorded(message.SerializeToString(), after, len(sampling)))
        index += 1
    return [r for r in runs if r]


class BareDriver:
    def __init__(self, rpc: Rpc, transport: Transport) -> None:
        self._rpc = rpc
        self._transport = transport
        self._links: list[Link] = []
        self._result: asyncio.Future[Link] | None = None
        self._returned = 0  # over all runs of this epoch

    async def form(self, layout: Layout, epoch: int) -> None:
        self._result = asyncio.get_running_loop().create_future()
        options = LinkOptions(slots=8, slot_bytes=1 << 16)
        address = await self._transport.listen("tcp://127.0.0.1:0", self._accept, options)
        following = [w.transport_address for w, _, _ in layout.stages[1:]] + [address]
        for index, (worker, first, end) in enumerate(layout.stages):
            hello = build_hello(Hello(Epoch(epoch), BATCHER_STAGE, BOOT, LinkKind.CONTROL))
            self._links.append(
                await self._transport.dial(worker.transport_address, hello, LinkOptions(), 5.0)
            )
            request = Form(
                epoch=Epoch(epoch),
                batcher_boot=BOOT,
                model_digest=worker.model_digest,
                stage=index,
                num_stages=len(layout.stages),
                first_layer=first,
                end_layer=end,
                next_address=following[index],
                block_size_tokens=layout.block_size_tokens,
                slots_max=layout.slots_max,
                step_tokens_max=layout.step_tokens_max,
            )
            formed = parse_formed(await self._rpc.call(worker.rpc_address, FORM, build_form(request), 60.0))
            assert formed.refusal is None, f"stage {index}: {formed.refusal} {formed.error}"

    def _accept(self, link: Link) -> None:
        assert self._result is not None
        if not self._result.done():
            self._result.set_result(link)

    async def drive(self, steps: Sequence[Recorded], in_flight_max: int) -> Run:
        """One run, after those before it in the same recording."""
        assert self._result is not None
        result_link = await asyncio.wait_for(self._result, 5.0)
        first = self._returned
        sent = 0
        start = time.perf_counter()
        while self._returned - first < len(steps):
            while (
                sent < len(steps)
                and first + sent - self._returned < in_flight_max
                and steps[sent].after < self._returned
            ):
                await self._links[0].send(steps[sent].header)
                sent += 1
            frame = await result_link.receive()
            result = parse_result(frame.header)
            frame.release()
            self._returned += 1
            assert result.number == self._returned, "results out of order"
        seconds = time.perf_counter() - start
        return Run(seconds, sum(s.sampled for s in steps), len(steps))

    def close(self) -> None:
        for link in self._links:
            link.close()

"""The step path alone: it computes while it sends, never hands out a buffer twice, drops ended epochs."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from chassis.errors import LinkClosed
from chassis.ids import Epoch
from chassis.messages import pipeline as p
from chassis.messages.request import Sampling
from chassis.ports import Ports
from chassis.trace import SpanRing
from chassis.transport.interface import Frame
from chassis.transport.nixl_agent import Region
from chassis.transport.registered import MemoryRange
from shard_worker.compute import Compute, ComputeThread, InlineCompute
from shard_worker.executor import U32, Loaded, ModelFacts, StageSpec, StepInputs, StepOutput, StepUnderWay
from shard_worker.inputs import SlotTables, TableLimits
from shard_worker.runner import Job, Place, StepRunner
from shard_worker.stamps import Stamp, Stamps
from tests.sim.loop import run as run_virtual


class Arrived:
    def __init__(self, header: bytes) -> None:
        self.header = header
        self.payload = memoryview(b"")
        self.direct: MemoryRange | None = None
        self.released = 0

    def release(self) -> None:
        self.released += 1


class SlowLink:
    """Looks at the payload only at the end of a send, as a network card does. Quick: nothing has to wait."""

    hello = b""
    kind = "slow"

    def __init__(self, send_s: float) -> None:
        self.send_s = send_s
        self.quick = False
        self.sent: list[tuple[bytes, bytes]] = []
        self.closed = False

    async def send(self, header: bytes, payload: bytes | memoryview = b"") -> None:
        if self.closed:
            raise LinkClosed("closed")
        await asyncio.sleep(self.send_s)
        self.sent.append((header, bytes(payload)))

    def send_now(self, header: bytes, payload: bytes | memoryview = b"") -> bool:
        if self.quick:
            self.sent.append((header, bytes(payload)))
        return self.quick

    async def receive(self) -> Frame:
        raise LinkClosed("nothing")

    def close(self) -> None:
        self.closed = True


class SlowDirectLink(SlowLink):
    """Reads the device's memory at the end of a send."""

    takes_direct = True

    async def send_direct(self, header: bytes, payload: MemoryRange) -> None:
        assert isinstance(payload.memory, Region)
        view = payload.memory.view[payload.offset : payload.offset + payload.nbytes]
        await self.send(header, view)


class Counting:
    """An executor that reuses one output buffer, as real ones do."""

    facts = ModelFacts("m", "d", 1, 0.0, 1, 64, b"")
    pages = None

    def __init__(self) -> None:
        self.runs = 0
        self.copied: list[tuple[int, list[int], list[int]]] = []  # after so many runs, from, to
        self.fails_at = 0
        self._output = bytearray(4)

    def load(self, spec: StageSpec) -> Loaded:
        return Loaded(1, False)

    def copy_blocks(self, sources: U32, targets: U32) -> None:
        self.copied.append((self.runs, sources.tolist(), targets.tolist()))

    def run(self, inputs: StepInputs, activations: memoryview) -> StepOutput:
        self.runs += 1
        if self.runs == self.fails_at:
            raise RuntimeError("device lost")
        self._output[:] = bytes([self.runs]) * 4
        return StepOutput(memoryview(self._output), np.empty(0, np.uint32))


class OnDevice(Counting):
    """Begins steps that end later, in one output buffer for each."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.log: list[str] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.pool = Region(4096)
        self.entered: list[memoryview | MemoryRange] = []

    def begin(
        self, inputs: StepInputs, activations: memoryview | MemoryRange, stays: bool = False
    ) -> StepUnderWay:
        self.begun += 1
        self.entered.append(activations)
        self.log.append(f"{self.begun} begins")
        return _UnderWay(self, self.begun, stays)

    def slots_on(self, num_bytes: int) -> Region:
        return Region(num_bytes)

    def sends_from(self) -> Region:
        return self.pool


class _UnderWay:
    def __init__(self, device: OnDevice, number: int, stays: bool) -> None:
        self.device, self.number, self.stays = device, number, stays

    def ready(self) -> bool:
        return self.device.may_end.is_set()

    def result(self) -> StepOutput:
        assert self.device.may_end.wait(5)
        self.device.log.append(f"{self.number} ends")
        output = self.device.run(None, memoryview(b""))  # type: ignore[arg-type]
        if not self.stays:
            return output
        at = MemoryRange(self.device.pool, self.number % 3 * 256, 4)  # that of the third step before
        self.device.pool.view[at.offset : at.offset + 4] = output.activations
        return StepOutput(memoryview(b""), output.token_ids, direct=at)


class Rig:
    def __init__(
        self,
        send_s: float,
        compute_s: float,
        kind: type[Counting] = Counting,
        threaded: bool = False,
        direct: bool = False,
    ) -> None:
        self.link = SlowDirectLink(send_s) if direct else SlowLink(send_s)
        self.executor = kind()
        self.compute: Compute = ComputeThread() if threaded else InlineCompute(lambda: compute_s)
        self.failures: list[tuple[int, str]] = []
        tracer = SpanRing(first_span_id=1)
        unused: list[object] = [None]
        ports = Ports(unused[0], unused[0], unused[0], tracer, str, int, int)  # type: ignore[arg-type]
        self.runner = StepRunner(
            self.executor,
            self.compute,
            ports,
            lambda epoch, cause: self.failures.append((epoch, cause)),
            InlineCompute(),
        )
        self.place = Place(Epoch(1), 0, False, self.link, stays=direct)
        self.runner.stand(self.place)
        self.tables = SlotTables(TableLimits(4, 4, 8, 32, 8))
        self.frames: list[Arrived] = []

    def put(self, number: int, copies: tuple[tuple[int, int], ...] = ()) -> None:
        fresh = [p.SlotStart(Sampling(), 0)] if number == 1 else []
        header = p.build_step(
            1, number, slots=[0], num_tokens=[1], starts=[0], flags=[2 if fresh else 0], output_index=[0],
            token_ids=[number], table_lens=[len(fresh)], table=[0] * len(fresh), fresh=fresh, copies=copies,
        )  # fmt: skip
        frame, step = Arrived(header), p.read_step(header)
        self.frames.append(frame)
        now = asyncio.get_running_loop().time()
        copied = p.copied_blocks(step, 8) if copies else None
        self.runner.put(Job(self.place, step, self.tables.take(step), frame, 0, now, copied))


def run(rig: Rig, body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(rig.runner.compute_steps()),
                group.create_task(rig.runner.send_outputs()),
            ]
            await body()
            for task in tasks:
                task.cancel()

    run_virtual(main())


def test_computing_and_sending_overlap() -> None:
    rig = Rig(send_s=0.01, compute_s=0.01)

    async def body() -> None:
        for number in range(1, 11):
            rig.put(number)
        await asyncio.sleep(0.115)  # ten of each, and one turn to begin with

    run(rig, body)
    assert [payload for _, payload in rig.link.sent] == [bytes([i]) * 4 for i in range(1, 11)]
    assert [p.parse_step(header).number for header, _ in rig.link.sent] == list(range(1, 11))
    timings = [p.parse_step(header).timings[0] for header, _ in rig.link.sent]
    # in whole microseconds, since the virtual clock wakes a nanosecond late
    assert [t.send_ns // 1000 for t in timings] == [0, *[10_000] * 9]
    assert all(t.compute_ns // 1000 == 10_000 for t in timings)
    assert [t.wait_ns // 1000 for t in timings] == [i * 10_000 for i in range(10)]
    assert all(f.released == 1 for f in rig.frames)


def test_a_slow_peer_holds_back_and_spoils_nothing() -> None:
    rig = Rig(send_s=0.1, compute_s=0.001)

    async def body() -> None:
        for number in range(1, 9):
            rig.put(number)
        await asyncio.sleep(0.05)
        assert rig.executor.runs == 3  # one sending, one queued, one waiting to be
        await asyncio.sleep(1)

    run(rig, body)
    assert [payload for _, payload in rig.link.sent] == [bytes([i]) * 4 for i in range(1, 9)]


def test_an_ended_epoch_is_dropped_wherever_it_is() -> None:
    rig = Rig(send_s=0.1, compute_s=0.01)

    async def body() -> None:
        for number in range(1, 7):
            rig.put(number)
        await asyncio.sleep(0.045)
        rig.link.close()
        rig.runner.stop()
        await asyncio.sleep(1)

    run(rig, body)
    assert len(rig.link.sent) == 1 and rig.runner.dropped == 5
    assert all(f.released == 1 for f in rig.frames) and rig.failures == []


def test_what_needs_no_waiting_is_sent_where_it_was_computed() -> None:
    rig = Rig(send_s=1.0, compute_s=0.01)
    rig.link.quick = True

    async def body() -> None:
        for number in range(1, 7):
            rig.put(number)
        await asyncio.sleep(0.035)
        assert len(rig.link.sent) == 3
        rig.link.quick = False
        await asyncio.sleep(0.1)
        assert len(rig.link.sent) == 3 and rig.executor.runs == 6, "the last three wait to be sent"
        rig.link.quick = True
        await asyncio.sleep(3)

    run(rig, body)
    assert [payload for _, payload in rig.link.sent] == [bytes([i]) * 4 for i in range(1, 7)]
    assert all(f.released == 1 for f in rig.frames) and rig.failures == []


def test_what_a_direct_link_reads_is_not_overwritten_before() -> None:
    rig = Rig(send_s=1.0, compute_s=0, kind=OnDevice, direct=True)
    rig.link.quick = True
    slot = MemoryRange(Region(4096), 0, 4)

    async def body() -> None:
        for number in range(1, 8):
            rig.put(number)
            rig.frames[-1].direct = slot if number > 1 else None
        await asyncio.sleep(0.5)
        assert rig.executor.runs == 3, "as many as the device keeps"
        await asyncio.sleep(9)

    run(rig, body)
    assert [payload for _, payload in rig.link.sent] == [bytes([i]) * 4 for i in range(1, 8)]
    assert isinstance(rig.executor, OnDevice) and rig.executor.entered[1:] == [slot] * 6
    assert all(f.released == 1 for f in rig.frames) and rig.failures == []


def test_a_device_begins_a_step_before_the_last_has_ended() -> None:
    rig = Rig(send_s=0, compute_s=0, kind=OnDevice, threaded=True)
    device = rig.executor
    assert isinstance(device, OnDevice)

    async def main() -> None:
        async with asyncio.TaskGroup() as group, asyncio.timeout(5):
            tasks = [
                group.create_task(rig.runner.compute_steps()),
                group.create_task(rig.runner.send_outputs()),
            ]
            device.may_end.clear()
            for number in range(1, 6):
                rig.put(number)
            while len(device.log) < 2:  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0.001)
            assert device.log == ["1 begins", "2 begins"]
            device.may_end.set()
            while len(rig.link.sent) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            await rig.compute.close()

    asyncio.run(main())
    assert [payload for _, payload in rig.link.sent] == [bytes([i]) * 4 for i in range(1, 6)]
    assert all(f.released == 1 for f in rig.frames) and rig.failures == []


@pytest.mark.parametrize("threaded", [False, True])
def test_what_began_behind_a_failed_step_is_dropped(threaded: bool) -> None:
    rig = Rig(send_s=0, compute_s=0, kind=OnDevice, threaded=threaded)
    rig.executor.fails_at = 2

    async def main() -> None:
        async with asyncio.TaskGroup() as group, asyncio.timeout(5):
            tasks = [
                group.create_task(rig.runner.compute_steps()),
                group.create_task(rig.runner.send_outputs()),
            ]
            for number in range(1, 7):
                rig.put(number)
            while rig.runner.dropped < 4:  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            await rig.compute.close()

    asyncio.run(main())
    assert len(rig.link.sent) == 1 and rig.failures == [(1, "step 2: RuntimeError: device lost")]
    assert rig.runner.dropped == 4 and all(f.released == 1 for f in rig.frames)


def test_after_a_failed_step_none_is_computed() -> None:
    rig = Rig(send_s=0.001, compute_s=0.01)
    rig.executor.fails_at = 2

    async def body() -> None:
        for number in range(1, 7):
            rig.put(number)
        await asyncio.sleep(1)

    run(rig, body)
    assert rig.executor.runs == 2 and len(rig.link.sent) == 1
    assert rig.failures == [(1, "step 2: RuntimeError: device lost")]
    assert rig.runner.dropped == 4 and all(f.released == 1 for f in rig.frames)


def test_blocks_are_copied_right_before_the_rows_of_their_step() -> None:
    rig = Rig(send_s=0.001, compute_s=0.01)

    async def body() -> None:
        rig.put(1)
        rig.put(2, copies=((5, 6), (5, 7)))
        rig.put(3)
        await asyncio.sleep(0.1)

    run(rig, body)
    assert rig.executor.runs == 3
    assert rig.executor.copied == [(1, [5, 5], [6, 7])]


def test_of_what_a_failed_step_copied_nothing_is_known() -> None:
    rig = Rig(send_s=0.001, compute_s=0.01)
    rig.executor.fails_at = 2
    stamps, stamp = Stamps(8, 4), Stamp(0, 7, 0, 4)
    stamps.begin(Epoch(1), 4)
    for block in (4, 5, 6):
        stamps.put(block, stamp)
    rig.place = Place(Epoch(1), 0, False, rig.link, stamps)
    rig.runner.stand(rig.place)

    async def body() -> None:
        rig.put(1)
        rig.put(2, copies=((4, 5),))
        await asyncio.sleep(0.1)

    run(rig, body)
    assert rig.executor.copied == [(1, [4], [5])] and rig.failures
    assert [stamps.get(block).fill for block in (4, 5, 6)] == [4, 0, 4]


def test_a_step_under_way_writes_into_its_blocks_until_they_are_stamped() -> None:
    rig = Rig(send_s=0.001, compute_s=0.01)
    rig.executor.fails_at = 3
    found: list[list[int]] = []

    async def body() -> None:
        def look() -> None:
            found.append([block for block in range(8) if rig.runner.writes(block, 8)])

        for number, copies in ((1, ()), (2, ((5, 6),)), (3, ())):
            rig.put(number, copies)
            look()
            await asyncio.sleep(0.02)
            look()

    run(rig, body)
    assert found == [[0], [], [0, 6], [], [0], []]

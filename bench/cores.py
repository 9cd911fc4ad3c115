"""What one step costs in each service beside the device's work: the budgets of ARCHITECTURE.md, measured.

No process, no socket: the cores, and the code between them and the wire, on prepared input. Processor time.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

from batcher import events as ev
from batcher.account import Account
from batcher.block_hash import namespace
from batcher.core import Core
from batcher.formation import EpochWritten, Formation, FormationConfig, FormStage, StageFormed, WorkersSeen
from batcher.outbox import Outbox
from batcher.ownership import Ownership
from batcher.ring import step_header
from batcher.scheduler import Scheduler, SchedulerConfig
from batcher.stops import Stops
from bench.results_file import Sample, table, write
from chassis.ids import AckToken, Attempt, BlockId, BootId, Epoch, GatewayId, RequestId
from chassis.messages.card import TokenBytes
from chassis.messages.chunk import (
    EMPTY_DIGEST,
    Chunk,
    Part,
    build_chunk,
    extend_digest,
    parse_chunk,
)
from chassis.messages.gateway import Delta, build_event
from chassis.messages.pipeline import StageTiming, read_step
from chassis.messages.registry import WorkerEntry
from chassis.messages.request import Limits, Request, Sampling
from chassis.trace import SpanRing
from gateway.detokenizer import OutputText
from gateway.events import ChunkArrived, Pass, Publish, Published, PublishRequest, Submit
from gateway.streams import Streams
from shard_worker.fake_model import EOS_ID, TOKEN_BYTES
from shard_worker.inputs import MakeTables, TableLimits, portable_tables
from shard_worker.native.library import native
from shard_worker.native.stamps import native_stamps
from shard_worker.native.tables import native_tables
from shard_worker.stamps import MakeStamps, Stamps

GATEWAY = GatewayId("gw")
MODEL_DIGEST = "d"


class _Drop:
    """A bus that takes everything."""

    def publish(self, subject: str, data: bytes, headers: object = None) -> None:
        return None


def _worker(boot: str) -> WorkerEntry:
    return WorkerEntry(
        boot=BootId(boot), model="fake", model_digest=MODEL_DIGEST, rpc_address="r", transport_address="t",
        last_epoch=Epoch(0), free=True, num_layers=8,
    )  # fmt: skip


class Pipe:
    """A core whose outside answers at once: the log stores, kvstore leases, workers sample token 97."""

    def __init__(self, sequences: int) -> None:
        scheduler = Scheduler(
            SchedulerConfig(context_len_max=1 << 16, namespace=namespace(MODEL_DIGEST, "", "paged")),
            Stops(TOKEN_BYTES, (EOS_ID,)),
        )
        formation = Formation(BootId("me"), FormationConfig(num_stages=2))
        self.core = Core(Ownership(BootId("me")), scheduler, formation, 15.0)
        self.account = Account(BootId("me"), SpanRing())
        self.outbox = Outbox(BootId("me"), _Drop())  # type: ignore[arg-type]
        self.now = 0.0
        self.headers: list[bytes] = []
        self._next_block = 0
        self._seq = 0
        workers = tuple((_worker(f"w{i}"), 1) for i in range(2))
        self._feed(WorkersSeen(self.now, workers))
        for i in range(sequences):
            self.account.delivered(_request(i), 0, 0, 1)
            self._feed(ev.Delivered(self.now, _request(i), AckToken(f"t{i}"), 1, 0.0, b""))

    def _feed(self, *events: object) -> None:
        pending = list(events)
        while pending:
            for effect in self.core.handle(pending.pop(0)):  # type: ignore[arg-type]
                pending.extend(self._answer(effect))

    def _answer(self, effect: object) -> list[object]:
        match effect:
            case ev.SendParts():
                self.outbox.add(effect)
            case ev.Append():
                self._seq += 1
                return [ev.WriteDone(self.now, effect.request_id, effect.call, ev.Write.STORED, self._seq)]
            case ev.WriteReceipt():
                return [ev.WriteDone(self.now, effect.request_id, effect.call, ev.Write.STORED, 0)]
            case ev.AttachPool():
                return [ev.PoolAttached(self.now, effect.call, 60_000, 0)]
            case ev.MatchBlocks():
                return [ev.BlocksMatched(self.now, effect.call, ((),) * len(effect.request_ids))]
            case ev.ExchangeBlocks():
                blocks = tuple(BlockId(self._next_block + i) for i in range(effect.lease))
                self._next_block += effect.lease
                return [ev.BlocksExchanged(self.now, effect.call, blocks, 50_000, 0)]
            case FormStage():
                return [StageFormed(self.now, effect.call, f"stamp{effect.index}", 60_000)]
            case _ if type(effect).__name__ == "WriteEpoch":
                return [EpochWritten(self.now, effect.call, Epoch(7))]  # type: ignore[attr-defined]
        return []

    def step(self) -> int:
        """Plan what can go, send it, hear it back; returns its rows."""
        self.now += 0.01
        now_ns = round(self.now * 1e9)
        plans, effects = self.core.plans(self.now)
        for effect in effects:
            self._feed(*self._answer(effect))
        rows = 0
        for plan in plans:
            rows += len(plan.rows)
            scheduler = self.core.scheduler
            header = step_header(
                plan, scheduler.slot_start, self.account.sent(plan, now_ns), digest_of=scheduler.digest
            )
            if len(self.headers) < 4096:
                self.headers.append(header)
            sampled = tuple(97 for row in plan.rows if row.samples)
            timings = tuple(StageTiming(i, now_ns - 9_000_000, 10_000, 4_000_000, 1_000) for i in range(2))
            self.account.returned(plan.epoch, plan.number, timings, now_ns)
            self._feed(ev.StepReturned(self.now, plan.epoch, plan.number, sampled, timings=timings))
        self.outbox.flush(self.now, (GATEWAY,))
        return rows


def _request(i: int) -> Request:
    return Request(
        id=RequestId(f"r{i:04d}"), tenant="t", gateway=GATEWAY, model="fake",
        prompt_ids=tuple((i * 31 + j) % 200 for j in range(128)), seed=i, sampling=Sampling(1.0),
        limits=Limits(max_tokens=8_000, ignore_eos=True),
    )  # fmt: skip


def _time(what: Callable[[], int], steps: int, rounds: int) -> tuple[float, ...]:
    """Microseconds per full step, one value a round."""
    values = []
    for _ in range(rounds):
        start, done = time.process_time(), 0
        for _ in range(steps):
            done += bool(what())
        values.append(1e6 * (time.process_time() - start) / max(done, 1))
    return tuple(values)


def batcher_step(sequences: int) -> tuple[Sample, list[bytes]]:
    pipe = Pipe(sequences)
    for _ in range(50):  # prefill
        pipe.step()
    values = []
    for _ in range(5):
        start, steps = time.process_time(), 0
        for _ in range(300):
            before = len(pipe.headers)
            pipe.step()
            steps += max(1, len(pipe.headers) - before)
        values.append(1e6 * (time.process_time() - start) / steps)
    return Sample(tuple(values), "us"), pipe.headers


_LIMITS = TableLimits(
    slots_max=64,
    block_size_tokens=16,
    num_blocks=60_000,
    context_len_max=1 << 16,
    step_tokens_max=512,
    vocab_size=512,
    whole=True,
)


def worker_step(headers: list[bytes], make_tables: MakeTables) -> Sample:
    tables = make_tables(_LIMITS, True, 4)
    parsed = iter(headers)

    def one() -> int:
        header = next(parsed, None)
        if header is None:
            return 0
        tables.take(read_step(header))
        return 1

    for _ in range(60):
        one()
    return Sample(_time(one, 200, 3), "us")


def worker_stamps(headers: list[bytes], make_stamps: MakeStamps) -> Sample:
    """What it takes to stamp and prove a step that was computed."""
    tables = portable_tables(_LIMITS, True, 4)
    stamps = make_stamps(_LIMITS.num_blocks, _LIMITS.block_size_tokens, 1.0)
    stamps.begin(Epoch(7), _LIMITS.slots_max)
    packed = list(map(read_step, headers))
    steps = iter([(step, tables.take(step)) for step in packed])
    void = 0

    def one() -> int:
        nonlocal void
        found = next(steps, None)
        if found is None:
            return 0
        step, inputs = found
        sampled = np.full(len(inputs.sample_rows), 97, np.uint32)
        void += len(stamps.note(step, inputs.block_tables, sampled))
        return 1

    for _ in range(60):
        one()
    values = _time(one, 200, 3)
    assert not void, "what was computed is not proven"
    return Sample(values, "us")


def gateway_chunk(streams: int = 16) -> Sample:
    """Per stream and chunk: from the chunk's bytes to each client's event as bytes, without gRPC's write."""
    core = Streams(GATEWAY)
    table_of_bytes = TokenBytes.of(TOKEN_BYTES)
    texts = [OutputText(table_of_bytes) for _ in range(streams)]
    requests = [_request(i) for i in range(streams)]
    for i, request in enumerate(requests):
        for effect in core.handle(Submit(0.0, i, request)):
            if isinstance(effect, PublishRequest):
                core.handle(Published(0.0, request.id, effect.call, Publish.STORED))
    digests = [EMPTY_DIGEST] * streams
    number = 0

    def one() -> int:
        nonlocal number
        for i in range(streams):
            digests[i] = extend_digest(digests[i], (97,))
        parts = tuple(Part(r.id, Attempt(1), number, (97,), digests[i]) for i, r in enumerate(requests))
        number += 1
        data = build_chunk(Chunk(BootId("b1"), number, parts, ()))
        start = time.process_time()
        passed = 0
        for effect in core.handle(ChunkArrived(number * 0.01, parse_chunk(data))):
            if isinstance(effect, Pass):
                text = texts[effect.client].feed(effect.ids)
                build_event(Delta(text, effect.ids, effect.first_index))
                passed += 1
        spent.append(time.process_time() - start)
        assert passed == streams
        return passed

    values = []
    for _ in range(5):
        spent: list[float] = []
        for _ in range(300):
            one()
        values.append(1e6 * sum(spent) / (300 * streams))
    return Sample(tuple(values), "us")


def main() -> None:
    values: dict[str, Sample] = {}
    rows = [["what", "per step"]]
    for sequences in (1, 16, 64):
        sample, headers = batcher_step(sequences)
        rows.append([f"batcher, {sequences} sequences", str(sample)])
        if sequences == 16:
            values["batcher.step_us"] = sample
            library = native()
            for name, make, how in (
                ("worker.step_us", native_tables(library) if library else portable_tables, ""),
                ("worker.step_portable_us", portable_tables, " without compiled code"),
            ):
                values[name] = worker_step(headers, make)
                rows.append([f"worker, 16 sequences: parse and lay out{how}", str(values[name])])
            for name, stamps, how in (
                ("worker.stamps_us", native_stamps(library) if library else Stamps, ""),
                ("worker.stamps_portable_us", Stamps, " without compiled code"),
            ):
                values[name] = worker_stamps(headers, stamps)
                rows.append([f"worker, 16 sequences: stamp and prove{how}", str(values[name])])
    values["gateway.chunk_us"] = gateway_chunk()
    rows.append(["gateway, a stream and chunk, gRPC's write excluded", str(values["gateway.chunk_us"])])
    sys.stdout.write(table(rows) + "\n")
    write("cores", values)


if __name__ == "__main__":
    main()

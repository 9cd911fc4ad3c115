"""The pipeline tax: workloads through gRPC against the bare driver on the same workers, in pairs.

Each round starts a batcher that records its steps, runs the workloads through the gateway, stops the
batcher and replays what it recorded. Rounds follow each other, so both sides see the same machine.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import load
from bench.bare_driver import BareDriver, Layout, Run
from bench.bare_driver import load as load_recording
from bench.client_loop import SERVICES_ENV
from bench.load import WORKLOADS, Result, Workload
from bench.quiet import resident_mb, watch_others
from bench.results_file import Sample, table, write
from chassis import nats_bus, subjects
from chassis.bus import Bus
from chassis.grpc_rpc import GrpcRpc
from chassis.messages.registry import WorkerEntry, parse_worker
from chassis.transport.tcp import SocketTransport
from shoal.client import AsyncClient
from shoal.launcher import Deployment, Plan
from shoal.ledger import Ledger
from shoal.why import collect

BETWEEN_S = 2.5  # an empty step falls between two workloads
WARM_UP = Workload("warm-up", 4, 64, 8)


@dataclass(frozen=True, slots=True)
class Setting:
    model: str = "smollm2"
    stages: int = 2
    rounds: int = 5
    dtype: str = "bfloat16"
    slots_max: int = 64
    step_tokens_max: int = 512
    workloads: tuple[str, ...] = ("W1", "W2", "W3", "W4")


@dataclass(slots=True)
class Round:
    shoal: dict[str, Result] = field(default_factory=dict)
    bare: dict[str, Run] = field(default_factory=dict)
    ledgers: list[Ledger] = field(default_factory=list)
    others_cores: float = 0.0


def _flags(setting: Setting, recording: Path) -> dict[str, tuple[str, ...]]:
    worker = () if setting.model == "fake" else ("--dtype", setting.dtype)
    batcher = (
        "--record-steps", str(recording),
        "--running-len-max", str(setting.slots_max),
        "--step-tokens-max", str(setting.step_tokens_max),
    )  # fmt: skip
    return {"shard_worker": worker, "batcher": batcher}


async def _workers(bus: Bus) -> list[WorkerEntry]:
    entries = await bus.entries(subjects.WORKERS)
    workers = [parse_worker(e.value) for e in entries if e.value is not None]
    return sorted(workers, key=lambda w: w.loaded.start)


async def _through_shoal(shoal: Deployment, setting: Setting, seed: int, into: Round) -> None:
    async with AsyncClient(shoal.address, retry=None) as client:
        vocab_size = (await client.models())[0].vocab_size
        await load.run(client, WARM_UP, seed, vocab_size)
        bus = await nats_bus.connect(shoal.nats_url, name="bench")
        try:
            for name in setting.workloads:
                await asyncio.sleep(BETWEEN_S)
                result = await load.run(client, WORKLOADS[name], seed, vocab_size)
                into.shoal[name] = result
                if name == "W1":
                    story = await collect(bus, result.seen[0].request_id, wait_s=5.0)
                    book = story.ledger()
                    if book is not None:
                        into.ledgers.append(book)
            await asyncio.sleep(BETWEEN_S)
        finally:
            await bus.close()


async def _bare(shoal: Deployment, setting: Setting, recording: Path, into: Round) -> None:
    bus = await nats_bus.connect(shoal.nats_url, name="bench")
    rpc, transport = GrpcRpc(), SocketTransport()
    driver = BareDriver(rpc, transport)
    try:
        workers = await _workers(bus)
        epoch = max(w.last_epoch for w in workers) + 1000
        runs = load_recording(recording, epoch)
        assert len(runs) == len(setting.workloads) + 1, f"{len(runs)} runs recorded"
        layout = Layout(
            [(w, w.loaded.start, w.loaded.stop) for w in workers],
            block_size_tokens=16,
            slots_max=setting.slots_max,
            step_tokens_max=setting.step_tokens_max,
        )
        await driver.form(layout, epoch)
        in_flight = setting.stages if setting.stages > 1 else 2
        for name, steps in zip(("warm-up", *setting.workloads), runs, strict=True):
            run = await driver.drive(steps, in_flight)
            if name != "warm-up":
                into.bare[name] = run
    finally:
        driver.close()
        await transport.close()
        await rpc.close()
        await bus.close()


async def measure(setting: Setting) -> tuple[list[Round], dict[str, float]]:
    """All rounds, and the resident megabytes of the services after the last W3."""
    rounds: list[Round] = []
    memory: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        recording = Path(folder) / "steps"
        plan = Plan(
            model=setting.model,
            stages=setting.stages,
            run_dir=Path(folder) / "run",
            flags=_flags(setting, recording),
            env=SERVICES_ENV,
        )
        async with Deployment(plan) as shoal:
            for number in range(setting.rounds):
                one = Round()
                if number:
                    await shoal.relaunch("batcher")
                    await shoal.wait_ready()
                with watch_others() as others:
                    await _through_shoal(shoal, setting, time.time_ns() & 0xFFFFFF, one)
                    pids = shoal.pids()
                    memory = {n: resident_mb(pids[n]) for n in ("gateway", "batcher", "kvstore")}
                    await shoal.retire("batcher")
                    await asyncio.sleep(1.0)  # the workers notice that they are free
                    await _bare(shoal, setting, recording, one)
                one.others_cores = others.cores
                rounds.append(one)
                sys.stderr.write(f"round {number + 1}: others used {others.cores:.2f} cores\n")
    return rounds, memory


def _row(setting: Setting, name: str, rounds: Sequence[Round]) -> tuple[list[str], dict[str, Sample]]:
    shoal = [r.shoal[name] for r in rounds]
    bare = [r.bare[name] for r in rounds]
    output = WORKLOADS[name].concurrent * WORKLOADS[name].output_tokens
    rates = Sample(tuple(output / s.seconds for s in shoal), "tokens/s")
    bare_rates = Sample(tuple(output / b.seconds for b in bare), "tokens/s")
    ratios = Sample(tuple(b.seconds / s.seconds for s, b in zip(shoal, bare, strict=True)), "ratio")
    ttft = Sample(tuple(sorted(s.ttft_ms)[len(s.ttft_ms) // 2] for s in shoal), "ms")
    key = f"tax.{name.lower()}"
    values = {
        f"{key}.ratio": ratios,
        f"{key}.tokens_per_s": rates,
        f"{key}.bare_tokens_per_s": bare_rates,
        f"{key}.ttft_ms": ttft,
    }
    if name == "W2":
        values[f"{key}.ratio.goal"] = ratios
    return [name, str(rates), str(bare_rates), str(ratios), str(ttft)], values


def added_ms(ledger: Ledger) -> float:
    """Until the first token: everything but the stages' computing."""
    assert ledger.first_us is not None
    compute = sum(row.us for row in ledger.first_rows if row.inner and row.name == "compute")
    return (ledger.first_us - compute) / 1000


async def main(setting: Setting) -> None:
    rounds, memory = await measure(setting)
    values: dict[str, Sample] = {}
    rows = [["workload", "Shoal tokens/s", "bare tokens/s", "Shoal / bare", "first token p50"]]
    for name in setting.workloads:
        row, more = _row(setting, name, rounds)
        rows.append(row)
        values |= more
    sys.stdout.write(table(rows) + "\n")
    ledgers = [ledger for r in rounds for ledger in r.ledgers]
    if ledgers:
        values["tax.w1.ttft_added_ms"] = Sample(tuple(map(added_ms, ledgers)), "ms")
        values["ledger.sum_error"] = Sample(
            tuple(abs(lg.unaccounted_us) / lg.total_us for lg in ledgers), "ratio"
        )
    for name, megabytes in memory.items():
        values[f"memory.{name}_mb"] = Sample((megabytes,), "MB")
    for name in ("tax.w1.ttft_added_ms", "ledger.sum_error", *(f"memory.{n}_mb" for n in memory)):
        if name in values:
            sys.stdout.write(f"{name}: {values[name]}\n")
    notes = {
        "model": setting.model,
        "stages": setting.stages,
        "dtype": setting.dtype,
        "others_cores": [round(r.others_cores, 2) for r in rounds],
    }
    write("tax", values, notes)

"""What one process takes: until its first token, in memory, and W1's speed beside `shoal up` with one stage.

`start`: from the start of the command to the first token that its client sees, beside what `import torch`
and loading the model take by themselves, each in a fresh process, in turns. `memory`: resident after loading,
after a thousand requests and after another thousand. `speed`: W1, in turns with a deployment of one stage of
as many threads.
"""

import asyncio
import json
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import load
from bench.client_loop import SERVICES_ENV
from bench.load import W1, Workload
from bench.quiet import watch_others
from bench.results_file import Sample, table, write
from shoal.client import AsyncClient
from shoal.launcher import Deployment, Plan, model_flags, read_state

ROOT = Path(__file__).resolve().parent.parent
SMALL = Workload("small", 8, 64, 16)
FIRST = Workload("first", 1, 16, 1)
REQUESTS = 1_000

# What a worker does until it could compute, without the services around it.
_LOAD = """
import json, sys, time
began = time.perf_counter()
import torch
torch_s = time.perf_counter() - began
from chassis import config
from shard_worker.__main__ import build_executor
from shard_worker.config import Config
from shard_worker.executor import StageSpec
import shard_worker.torch_executor
began = time.perf_counter()
executor = build_executor(config.load(Config, "shard_worker", None, {}, sys.argv[1:]))
executor.load(StageSpec(0, 1, 0, executor.facts.num_layers, 16, 64, 512))
json.dump({"torch_s": torch_s, "load_s": time.perf_counter() - began}, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class Setting:
    model: str = "smollm2"
    quantize: str = "int4"
    dtype: str = "bfloat16"  # of keys and values
    threads: int = 2
    rounds: int = 5
    parts: tuple[str, ...] = ("start", "memory", "speed")


@dataclass(slots=True)
class Found:
    values: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str) -> None:
        self.values.setdefault(f"single.{name}", []).append((value, unit))

    def samples(self) -> dict[str, Sample]:
        return {name: Sample(tuple(v for v, _ in some), some[0][1]) for name, some in self.values.items()}


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process, in MB of 10^6 bytes: all that is resident, and what of it is not pages of files."""

    resident: float
    anonymous: float

    @staticmethod
    def of(pid: int) -> "Memory":
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
        return Memory(kib["VmRSS"] * 1024 / 1e6, kib["RssAnon"] * 1024 / 1e6)


@asynccontextmanager
async def serving(setting: Setting, folder: Path) -> AsyncIterator[tuple[Process, AsyncClient]]:
    words = ["serve", "--single", "--model", setting.model, "--quantize", setting.quantize]
    words += [
        "--dtype",
        setting.dtype,
        "--threads",
        str(setting.threads),
        "--port",
        "0",
        "--http-port",
        "0",
        "--run-dir",
        str(folder),
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shoal", *words), cwd=ROOT, stdin=DEVNULL, stderr=PIPE
    )
    assert process.stderr is not None
    try:
        while b"serving gRPC" not in (line := await process.stderr.readline()):
            if not line:
                raise RuntimeError("it did not stand")
        addresses = read_state(folder)["addresses"]
        assert isinstance(addresses, list)
        async with AsyncClient(str(addresses[0]), retry=None) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def alone(setting: Setting) -> dict[str, float]:
    """Seconds of `import torch`, and of loading."""
    flags = [*model_flags(setting.model), "--quantize", setting.quantize, "--dtype", setting.dtype]
    flags += ["--threads", str(setting.threads)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LOAD, *flags, "--no-measure-costs"), cwd=ROOT, stdin=DEVNULL, stdout=PIPE
    )
    out, _ = await process.communicate()
    seconds: dict[str, float] = json.loads(out)
    return seconds


async def start(setting: Setting, folder: Path, found: Found) -> None:
    seconds = await alone(setting)
    began = time.perf_counter()
    async with serving(setting, folder) as (_, client):
        stands_s = time.perf_counter() - began
        await load.run(client, FIRST, 1, 1024)
        first_s = time.perf_counter() - began
    found.add("import_torch_s", seconds["torch_s"], "s")
    found.add("load_s", seconds["load_s"], "s")
    found.add("stands_s", stands_s, "s")
    found.add("first_token_s", first_s, "s")
    found.add("first_token_added_s", first_s - seconds["torch_s"] - seconds["load_s"], "s")


async def memory(setting: Setting, folder: Path, found: Found) -> None:
    async with serving(setting, folder) as (process, client):
        vocab_size = (await client.models())[0].vocab_size
        for when in ("loaded", "after_1000", "after_2000"):
            if when != "loaded":
                for number in range(REQUESTS // SMALL.concurrent):
                    await load.run(client, SMALL, hash((when, number)) & 0xFFFF, vocab_size)
            now = Memory.of(process.pid)
            found.add(f"{when}_rss_mb", now.resident, "MB")
            found.add(f"{when}_anon_mb", now.anonymous, "MB")


async def speed(setting: Setting, folder: Path, found: Found) -> None:
    """In turns, both standing, the idle one waiting for work."""
    plan = Plan(
        model=setting.model,
        quantize=setting.quantize,
        dtype=setting.dtype,
        stages=1,
        threads=setting.threads,
        run_dir=folder / "up",
        env=SERVICES_ENV,
    )
    async with (
        serving(setting, folder / "single") as (_, client),
        Deployment(plan) as up,
        AsyncClient(up.address, retry=None) as other,
    ):
        vocab_size = (await client.models())[0].vocab_size
        for number in range(setting.rounds + 1):
            rates = []
            for who in (client, other):
                result = await load.run(who, W1, time.time_ns() & 0xFFFFFF, vocab_size)
                rates.append((result.tokens_per_s, result.ttft_ms[0]))
            if number:  # the first turns warm up
                for name, (rate, first_ms) in zip(("w1", "up_w1"), rates, strict=True):
                    found.add(f"{name}_tokens_per_s", rate, "tokens/s")
                    found.add(f"{name}_first_ms", first_ms, "ms")
                found.add("w1_ratio", rates[0][0] / rates[1][0], "ratio")


async def main(setting: Setting) -> None:
    found = Found()
    with TemporaryDirectory() as name, watch_others() as others:
        folder = Path(name)
        if "start" in setting.parts:
            for _ in range(setting.rounds):
                await start(setting, folder, found)
        if "memory" in setting.parts:
            await memory(setting, folder, found)
        if "speed" in setting.parts:
            await speed(setting, folder, found)
    samples = found.samples()
    sys.stdout.write(table([["what", "measured"], *([n, str(s)] for n, s in samples.items())]) + "\n")
    notes = {
        "model": setting.model,
        "quantize": setting.quantize,
        "dtype": setting.dtype,
        "threads": setting.threads,
    }
    write("single", samples, notes | {"others_cores": round(others.cores, 2)})

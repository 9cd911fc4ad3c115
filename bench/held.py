"""Load held: many small requests with bursts, and many streams at once, over a model that costs nothing.

One gateway, one batcher, one stage, HTTP; clients in a process of their own (`bench/http_load.py`). Of
interest is what Shoal's own processes take, so the answer is in requests per second and core that they use
(NATS apart), and in what they add to the time between two tokens of a stream.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.http_load import Arrivals, Streams
from bench.quiet import watch_others
from bench.results_file import Sample, percentile, table, write
from shoal.launcher import Deployment, Plan

_TICKS = os.sysconf("SC_CLK_TCK")
AFTER_BURST_S = 3.0  # what a burst leaves behind is not the steady part
NULL_STEP_US = 10_000  # a step of a model that computes elsewhere: it waits, and takes no core
STEP_COST_US = 20_000
TICK_MS = STEP_COST_US / 1000


@dataclass(frozen=True, slots=True)
class Setting:
    rounds: int = 3
    rate_per_s: float = 450.0  # what two cores hold beside the broker and the clients, with room for bursts
    seconds: float = 60.0
    bursts_at_s: Sequence[float] = (20.0, 40.0)
    prompt_tokens: int = 16
    output_tokens: int = 4
    open_max: int = 512  # at the gateway, which refuses what a burst brings beyond
    streams: int = 256
    stream_tokens: int = 300


@dataclass(frozen=True, slots=True)
class Held:
    answered: int
    refused: int  # 503 with a hint
    wrong: int
    p50_ms: float  # of the steady part
    p99_ms: float
    cpu_s: Mapping[str, float]  # by process

    @property
    def own_s(self) -> float:
        return sum(s for name, s in self.cpu_s.items() if name != "nats")

    @property
    def per_core(self) -> float:
        """Requests answered per second of a core."""
        return self.answered / self.own_s


def cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    found = {}
    for name, pid in pids.items():
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text[text.rindex(")") + 2 :].split()
        found[name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


async def _load(plan: Arrivals | Streams) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.http_load", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate(json.dumps(asdict(plan)).encode())
    assert process.returncode == 0, f"the clients ended with {process.returncode}"
    seen: dict[str, Any] = json.loads(out)
    return seen


async def hold(shoal: Deployment, setting: Setting, seed: int) -> Held:
    host, port = shoal.http_addresses[0].rsplit(":", 1)
    before = cpu_s(shoal.pids())
    seen = await _load(
        Arrivals(
            host,
            int(port),
            setting.rate_per_s,
            setting.seconds,
            setting.prompt_tokens,
            setting.output_tokens,
            bursts_at_s=setting.bursts_at_s,
            seed=seed,
        )
    )
    after = cpu_s(shoal.pids())
    statuses: list[int] = seen["statuses"]
    steady = [
        1000 * latency
        for due, latency, status in zip(seen["due_s"], seen["latency_s"], statuses, strict=True)
        if status == 200 and not any(at <= due < at + 1.0 + AFTER_BURST_S for at in setting.bursts_at_s)
    ]
    refused = min(statuses.count(503), seen["retry_after"])
    answered = statuses.count(200)
    return Held(
        answered,
        refused,
        len(statuses) - answered - refused,
        percentile(steady, 0.5),
        percentile(steady, 0.99),
        {name: after[name] - before[name] for name in after},
    )


async def spread_ms(shoal: Deployment, setting: Setting, seed: int) -> tuple[float, float]:
    """(median, p99 less p50) of the time between two tokens."""
    host, port = shoal.http_addresses[0].rsplit(":", 1)
    seen = await _load(
        Streams(host, int(port), setting.streams, setting.prompt_tokens, setting.stream_tokens, seed)
    )
    assert all(n >= setting.stream_tokens for n in seen["events"]), "a stream lacks tokens"
    gaps: list[float] = seen["ms"]
    return percentile(gaps, 0.5), percentile(gaps, 0.99) - percentile(gaps, 0.5)


def _plan(folder: str, setting: Setting, step_cost_us: int) -> Plan:
    flags = {
        "shard_worker": ("--fake-step-cost-us", str(step_cost_us)),
        "batcher": ("--running-len-max", str(setting.streams)),
        "gateway": ("--streams-len-max", str(setting.open_max)),
    }
    return Plan(model="fake", run_dir=Path(folder), stages=1, flags=flags)


async def measure(setting: Setting) -> tuple[list[Held], list[tuple[float, float]]]:
    held: list[Held] = []
    spreads: list[tuple[float, float]] = []
    with TemporaryDirectory() as folder:
        async with Deployment(_plan(folder, setting, NULL_STEP_US)) as shoal:
            for number in range(setting.rounds):
                held.append(await hold(shoal, setting, number))
                sys.stderr.write(f"round {number + 1}: {held[-1]}\n")
    with TemporaryDirectory() as folder:
        async with Deployment(_plan(folder, setting, STEP_COST_US)) as shoal:
            for number in range(setting.rounds):
                spreads.append(await spread_ms(shoal, setting, number))
                sys.stderr.write(f"round {number + 1}: {spreads[-1]}\n")
    return held, spreads


async def main(setting: Setting) -> None:
    with watch_others() as others:
        held, spreads = await measure(setting)
    values = {
        "held.per_core": Sample(tuple(h.per_core for h in held), "requests/s"),
        "held.p50_ms": Sample(tuple(h.p50_ms for h in held), "ms"),
        "held.p99_ms": Sample(tuple(h.p99_ms for h in held), "ms"),
        "held.refused": Sample(tuple(float(h.refused) for h in held), ""),
        "held.wrong": Sample(tuple(float(h.wrong) for h in held), ""),
        "held.tick_ms": Sample(tuple(p50 for p50, _ in spreads), "ms"),
        "held.spread_ms": Sample(tuple(spread for _, spread in spreads), "ms"),
    }
    for name in held[0].cpu_s:
        values[f"held.{name}_us"] = Sample(tuple(1e6 * h.cpu_s[name] / h.answered for h in held), "us")
    sys.stdout.write(table([["quantity", "value"], *([n, str(v)] for n, v in values.items())]) + "\n")
    sys.stdout.write(f"others used {others.cores:.2f} cores\n")
    notes = {"rate_per_s": setting.rate_per_s, "seconds": setting.seconds, "streams": setting.streams}
    write("held", values, notes | {"others_cores": round(others.cores, 2)})

"""A burst of ten times the load on a deployment that grows and shrinks by itself.

Requests come by chance at a rate that does not wait for answers: little, ten times as much, little again. Of
the fake model, whose steps take time but no core, several pipelines are needed; of SmolLM2 as many as the
machine has cores, each of one stage and one thread. Of interest: how long after the burst began a pipeline
that was not there takes work, how often the number went up again once it had settled, and what share of the
later requests of the burst was answered as they came.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.load import Seen, ask
from bench.results_file import FOLDER, Sample, percentile, table, write
from chassis import nats_bus
from shoal.autoscale.local import LocalPipelines
from shoal.autoscale.policy import Rules
from shoal.autoscale.scaler import Scaler
from shoal.autoscale_words import model_of
from shoal.client import AsyncClient
from shoal.launcher import Deployment, Plan

TIMES = 10  # how much more comes in the burst
LOOK_S = 0.25
SETTLE_S = 25.0  # from the burst's beginning
PATIENCE_S = 30.0  # for the last answers


@dataclass(frozen=True, slots=True)
class Case:
    """`rate`: requests a second before and after the burst."""

    name: str
    plan: Plan
    rate: float
    prompt_tokens: int
    output_tokens: int
    pipelines_max: int
    before_s: float = 10.0
    burst_s: float = 45.0
    after_s: float = 30.0
    down_after_s: float = 10.0
    ttft_objective_ms: int = 2000

    @property
    def end_s(self) -> float:
        return self.before_s + self.burst_s + self.after_s

    def rate_at(self, t: float) -> float:
        return self.rate * (TIMES if self.before_s <= t < self.before_s + self.burst_s else 1)


@dataclass(slots=True)
class Ran:
    case: Case
    seen: list[Seen] = field(default_factory=list)
    numbers: list[tuple[float, int, int]] = field(default_factory=list)  # when, wanted, taking work
    failed: int = 0

    @property
    def answered(self) -> list[Seen]:
        return [s for s in self.seen if s.finished_s]

    @property
    def new_capacity_s(self) -> float:
        """From the burst's beginning until one more takes work."""
        began = self.case.before_s
        there = [ready for t, _, ready in self.numbers if t <= began][-1]
        return next(t for t, _, ready in self.numbers if t > began and ready > there) - began

    @property
    def swings(self) -> int:
        """How often the number went up again after it had settled."""
        late = [wanted for t, wanted, _ in self.numbers if t >= self.case.before_s + SETTLE_S]
        return sum(b > a for a, b in zip(late, late[1:], strict=False))

    def qps_share(self, since: float, until: float) -> float:
        """Answers over requests that came."""
        came = sum(since <= s.sent_s < until for s in self.seen)
        return sum(since <= s.finished_s < until for s in self.answered) / came

    def ttft_ms(self, since: float, until: float) -> list[float]:
        return [1000 * (s.arrivals_s[0] - s.sent_s) for s in self.answered if since <= s.sent_s < until]


def cases() -> list[Case]:
    fake = Plan(
        model="fake",
        stages=1,
        flags={"shard_worker": ("--fake-step-cost-us", "20000"), "batcher": ("--running-len-max", "8")},
    )
    smollm2 = Plan(model="smollm2", stages=1, quantize="keep", flags={"batcher": ("--running-len-max", "16")})
    return [
        Case("fake", fake, rate=4.0, prompt_tokens=16, output_tokens=20, pipelines_max=6),
        Case("smollm2", smollm2, rate=1.2, prompt_tokens=32, output_tokens=40, pipelines_max=2),
    ]


@asynccontextmanager
async def _scaled(shoal: Deployment, case: Case) -> AsyncIterator[Scaler]:
    bus = await nats_bus.connect(shoal.nats_url, name="bench")
    rules = Rules(
        pipelines_max=case.pipelines_max,
        ttft_objective_ms=case.ttft_objective_ms,
        down_after_s=case.down_after_s,
    )
    try:
        async with asyncio.TaskGroup() as group:
            pipelines = LocalPipelines(shoal, group, _say)
            scaler = Scaler(bus, await model_of(shoal), rules, lambda _: pipelines, time.time_ns, _say)
            scaling = group.create_task(scaler.run())
            yield scaler
            scaling.cancel()
    finally:
        await bus.close()


def _say(text: str) -> None:
    sys.stdout.write(f"  {text}\n")


async def play(case: Case, seed: int) -> Ran:
    ran = Ran(case)
    with TemporaryDirectory() as folder:
        plan = Plan(**{**{f: getattr(case.plan, f) for f in case.plan.__slots__}, "run_dir": Path(folder)})
        async with Deployment(plan) as shoal, AsyncClient(shoal.address, retry=None) as client:
            vocab_size = (await client.models())[0].vocab_size
            async with _scaled(shoal, case) as scaler:
                start = time.perf_counter()
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(_watch(ran, scaler, start))
                    await _come(ran, client, vocab_size, start, seed)
                    watching.cancel()
    return ran


async def _watch(ran: Ran, scaler: Scaler, start: float) -> None:
    while True:
        if scaler.decision is not None and scaler.signals is not None:
            now = time.perf_counter() - start
            ran.numbers.append((now, scaler.decision.pipelines, scaler.signals.ready))
        await asyncio.sleep(LOOK_S)


async def _come(ran: Ran, client: AsyncClient, vocab_size: int, start: float, seed: int) -> None:
    """All that comes; returns when all have their answers."""
    case, rng = ran.case, random.Random(seed)

    async def one(prompt: list[int]) -> None:
        try:
            ran.seen.append(await ask(client, prompt, case.output_tokens, start))
        except Exception as error:
            ran.failed += 1
            _say(f"failed: {error}")

    async with asyncio.timeout(case.end_s + PATIENCE_S), asyncio.TaskGroup() as group:
        due = 0.0
        while True:
            due += rng.expovariate(case.rate_at(due))
            if due >= case.end_s:
                break
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            low = min(1000, vocab_size // 2)
            prompt = [rng.randrange(low, vocab_size) for _ in range(case.prompt_tokens)]
            group.create_task(one(prompt))


# ---- the plot --------------------------------------------------------------------------------------

WIDTH, HEIGHT, GAP, BUCKET_S = 340, 110, 46, 2.0


def _buckets(ran: Ran, times: list[float]) -> list[tuple[float, float]]:
    """Per second, by the middle of each bucket."""
    end = max([ran.case.end_s, *times])
    counts = [0] * (int(end / BUCKET_S) + 1)
    for t in times:
        counts[int(t / BUCKET_S)] += 1
    return [((i + 0.5) * BUCKET_S, n / BUCKET_S) for i, n in enumerate(counts)]


def _ttfts(ran: Ran) -> list[tuple[float, float]]:
    """Seconds: the slowest twentieth of those that came in each bucket."""
    found: list[tuple[float, float]] = []
    for i in range(int(ran.case.end_s / BUCKET_S)):
        waited = ran.ttft_ms(i * BUCKET_S, (i + 1) * BUCKET_S)
        if waited:
            found.append(((i + 0.5) * BUCKET_S, percentile(waited, 0.95) / 1000))
    return found


def _steps(points: list[tuple[float, int]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for t, n in points:
        if out and out[-1][1] != n:
            out.append((t, out[-1][1]))
        out.append((t, float(n)))
    return out


Line = tuple[str, str, list[tuple[float, float]]]


def _panel(title: str, left: float, top: float, end_s: float, case: Case, lines: list[Line]) -> Iterator[str]:
    most = max([value for _, _, points in lines for _, value in points] + [1.0]) * 1.1

    def x(t: float) -> float:
        return left + min(t, end_s) / end_s * WIDTH

    def y(value: float) -> float:
        return top + HEIGHT * (1 - value / most)

    began, over = x(case.before_s), x(case.before_s + case.burst_s)
    yield f'<rect x="{began:.1f}" y="{top}" width="{over - began:.1f}" height="{HEIGHT}" fill="#f2f2f2"/>'
    yield f'<text x="{left}" y="{top - 6}">{title}</text>'
    for value in (0.0, most / 2.2, most / 1.1):
        yield f'<path d="M{left} {y(value):.1f}h{WIDTH}" stroke="#ddd"/>'
        yield f'<text x="{left - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    for index, (name, colour, points) in enumerate(lines):
        path = " ".join(f"{x(t):.1f},{y(value):.1f}" for t, value in points if t <= end_s)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        yield f'<text x="{left + 190 + 80 * index}" y="{top - 6}" fill="{colour}">{name}</text>'


def plot(rans: list[Ran]) -> str:
    """An SVG: a column for each case; the burst is shaded, the axis is seconds."""
    parts: list[str] = []
    for column, ran in enumerate(rans):
        case, left = ran.case, GAP + column * (WIDTH + GAP + 20)
        end_s = case.end_s + 5
        came, done = (
            _buckets(ran, [getattr(s, name) for s in ran.answered]) for name in ("sent_s", "finished_s")
        )
        wanted = _steps([(t, n) for t, n, _ in ran.numbers])
        ready = _steps([(t, n) for t, _, n in ran.numbers])
        panels: list[tuple[str, list[Line]]] = [
            (f"{case.name}: requests a second", [("came", "#999", came), ("answered", "#1b9e77", done)]),
            ("first token, p95, s", [("", "#7570b3", _ttfts(ran))]),
            ("pipelines", [("wanted", "#d95f02", wanted), ("take work", "#1b9e77", ready)]),
        ]
        for row, (title, lines) in enumerate(panels):
            parts += _panel(title, left, 30 + row * (HEIGHT + GAP), end_s, case, lines)
        for t in range(0, int(end_s) + 1, 20):
            at = left + t / end_s * WIDTH
            parts.append(f'<text x="{at:.1f}" y="{30 + 2 * (HEIGHT + GAP) + HEIGHT + 16}">{t}</text>')
    width, height = GAP + len(rans) * (WIDTH + GAP + 20), 30 + 3 * (HEIGHT + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def told(ran: Ran) -> dict[str, Sample]:
    case, name = ran.case, f"autoscale.{ran.case.name}"
    burst_end = case.before_s + case.burst_s
    late = (case.before_s + SETTLE_S, burst_end)
    return {
        f"{name}.new_capacity_s": Sample((ran.new_capacity_s,), "s"),
        f"{name}.swings": Sample((float(ran.swings),), "times"),
        f"{name}.qps_share": Sample((ran.qps_share(*late),), "ratio"),
        f"{name}.failed": Sample((float(ran.failed),), "requests"),
        f"{name}.ttft_p95_before_ms": Sample((percentile(ran.ttft_ms(0, case.before_s), 0.95),), "ms"),
        f"{name}.ttft_p95_settled_ms": Sample((percentile(ran.ttft_ms(*late), 0.95),), "ms"),
        f"{name}.pipelines_most": Sample((float(max(n for _, n, _ in ran.numbers)),), "pipelines"),
        f"{name}.pipelines_last": Sample((float(ran.numbers[-1][1]),), "pipelines"),
    }


async def main(names: list[str], seed: int = 1) -> None:
    keep([await play(case, seed) for case in cases() if case.name in names])


def keep(rans: list[Ran]) -> None:
    """Prints, draws, writes."""
    values = {name: sample for ran in rans for name, sample in told(ran).items()}
    sys.stdout.write(table([["what", "value"], *([name, str(s)] for name, s in values.items())]) + "\n")
    (FOLDER / "autoscale.svg").write_text(plot(rans))
    notes = {
        ran.case.name: {"rate": ran.case.rate, "times": TIMES, "requests": len(ran.seen)} for ran in rans
    }
    write("autoscale", values, notes)

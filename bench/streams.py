"""What idle streams cost: sixteen active ones alone, and beside 984 that wait in the queue of one gateway.

An idle stream is an accepted request of the lowest priority; the active ones have taken every place in the
batch. Both halves of a round measure the same stretch of the active streams' lengths. The gaps are taken
where the client hears the tokens, so the queue's cost to batcher and broker counts too.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.client_loop import SERVICES_ENV
from bench.load import Seen, Workload, draw_prompts, listen
from bench.quiet import resident_mb, watch_others
from bench.results_file import Sample, table, write
from chassis import nats_bus
from chassis.bus import Bus
from shoal.client import AsyncClient
from shoal.launcher import Deployment, Plan

ACTIVE, IDLE = 16, 984
LOAD = Workload("streams", ACTIVE, 16, 3000)
STEP_COST_US = "10000"
BEFORE_S = 2.0  # active alone, before anything is measured
SETTLE_S = 2.0
WINDOW_TOKENS = 250
GATHER_TIMEOUT_S = 60.0
IDLE_PRIORITY = 9


@dataclass(slots=True)
class Half:
    gaps_ms: list[float]
    before_mb: float  # of the gateway, with the active streams
    gateway_mb: float  # with all

    @property
    def p99_ms(self) -> float:
        return sorted(self.gaps_ms)[int(0.99 * len(self.gaps_ms))]


class _Crowd:
    """Streams whose answers nobody waits for; leaving the block hangs up."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address, retry=None)
        self._tasks: list[asyncio.Task[None]] = []
        self.seen: list[Seen] = []

    async def __aenter__(self) -> "_Crowd":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def ask(self, prompts: Sequence[Sequence[int]], priority: int) -> None:
        start = time.perf_counter()
        for prompt in prompts:
            seen = Seen()
            asking = listen(self._client, prompt, LOAD.output_tokens, start, seen, priority)
            self.seen.append(seen)
            self._tasks.append(asyncio.create_task(asking))

    async def until_all(self, tokens: int) -> None:
        """Accepted, and this many tokens. Raises what a stream raised."""
        async with asyncio.timeout(GATHER_TIMEOUT_S):
            while not all(s.request_id and len(s.ids) >= tokens for s in self.seen):
                for task in self._tasks:
                    if task.done():
                        task.result()
                        raise AssertionError("a stream ended early")
                await asyncio.sleep(0.02)


async def _half(shoal: Deployment, idle: int, seed: int, first_token: int | None) -> tuple[Half, int]:
    """The window begins at `first_token`, or when the idle ones are there; returns where it began."""
    async with AsyncExitStack() as stack:
        active = await stack.enter_async_context(_Crowd(shoal.address))
        active.ask(draw_prompts(LOAD, seed, 512), 0)
        await active.until_all(1)
        await asyncio.sleep(BEFORE_S)
        before_mb = resident_mb(shoal.pids()["gateway"])
        if idle:
            crowd = await stack.enter_async_context(_Crowd(shoal.address))
            crowd.ask([[i % 256] for i in range(idle)], IDLE_PRIORITY)
            await crowd.until_all(0)
            await asyncio.sleep(SETTLE_S)
        begin = first_token or max(len(s.ids) for s in active.seen)
        await active.until_all(begin + WINDOW_TOKENS)
        if idle:
            assert not any(s.ids for s in crowd.seen), "an idle stream has begun"
        gateway_mb = resident_mb(shoal.pids()["gateway"])
        gaps_ms = [
            1000 * (b - a)
            for s in active.seen
            for a, b in zip(
                s.arrivals_s[begin : begin + WINDOW_TOKENS],
                s.arrivals_s[begin + 1 : begin + WINDOW_TOKENS],
                strict=False,
            )
        ]
    return Half(gaps_ms, before_mb, gateway_mb), begin


async def _until_empty(bus: Bus) -> None:
    """Every request of the last half is settled."""
    async with asyncio.timeout(GATHER_TIMEOUT_S):
        while await bus.read("REQUESTS", "shoal.req.>", 1, 1):  # noqa: ASYNC110 - a stream has no such event
            await asyncio.sleep(0.1)


async def measure(rounds: int) -> tuple[list[tuple[Half, Half]], float]:
    """(alone, beside idle ones) of each round, and others' cores."""
    pairs: list[tuple[Half, Half]] = []
    flags = {
        "shard_worker": ("--fake-step-cost-us", STEP_COST_US),
        "batcher": ("--running-len-max", str(ACTIVE)),
    }
    with TemporaryDirectory() as folder, watch_others() as others:
        async with Deployment(
            Plan(model="fake", run_dir=Path(folder), flags=flags, env=SERVICES_ENV)
        ) as shoal:
            bus = await nats_bus.connect(shoal.nats_url, name="bench")
            for number in range(rounds):
                crowded, begin = await _half(shoal, IDLE, number, None)
                await _until_empty(bus)
                alone, _ = await _half(shoal, 0, number, begin)
                await _until_empty(bus)
                pairs.append((alone, crowded))
                sys.stderr.write(f"round {number + 1}: {alone.p99_ms:.1f} ms, {crowded.p99_ms:.1f} ms\n")
            await bus.close()
    return pairs, others.cores


async def main(rounds: int) -> None:
    pairs, cores = await measure(rounds)
    ratios = Sample(tuple(crowded.p99_ms / alone.p99_ms for alone, crowded in pairs), "ratio")
    before_mb = pairs[0][1].before_mb  # what the first crowd took is kept for the next
    stream_kb = Sample(tuple(1024 * (crowded.gateway_mb - before_mb) / IDLE for _, crowded in pairs), "KB")
    values = {"gateway.itl_p99_ratio": ratios, "gateway.stream_kb": stream_kb}
    sys.stdout.write(table([["quantity", "value"], *([n, str(v)] for n, v in values.items())]) + "\n")
    write("streams", values, {"active": ACTIVE, "idle": IDLE, "others_cores": round(cores, 2)})

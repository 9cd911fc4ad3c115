"""What interactive streams notice of other work: real services, one stage of two threads, bfloat16, gRPC.

- `prompt`: sixteen streams decode; then a prompt of 4,000 tokens comes. The time between two tokens at the
  99th percentile while that prompt is computed, over that just before.
- `batch`: small chats come at random; with and without a line of batch work that never ends. Their first
  token and the time between tokens at the 99th percentile.
The client shares the cores with the stage, in both halves of a round.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.client_loop import SERVICES_ENV
from bench.load import Seen, listen
from bench.quiet import watch_others
from bench.results_file import Sample, percentile, table, write
from shoal.client import AsyncClient
from shoal.launcher import Deployment, Plan

LOW, HIGH = 1000, 40_000  # of the ids drawn: no special token
BATCH_PRIORITY = 9
WARM_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Setting:
    model: str = "smollm2"
    rounds: int = 5
    streams: int = 16
    stream_prompt_tokens: int = 64
    stream_output_tokens: int = 1500
    before_s: float = 4.0
    long_prompt_tokens: int = 4000
    chats_per_s: float = 2.0
    chats_s: float = 40.0
    chat_prompt_tokens: int = 48
    chat_output_tokens: int = 16
    batch_running: int = 32
    batch_prompt_tokens: int = 128
    batch_output_tokens: int = 128


@dataclass(slots=True)
class Noticed:
    """By who asked, milliseconds."""

    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    batch_tokens: int = 0  # of requests that ended while chats came
    chats_s: float = 0.0


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(LOW, HIGH) for _ in range(length)]


def gaps_ms(seen: Seen, begin_s: float, end_s: float) -> list[float]:
    """Between tokens of which the later one came within these times."""
    pairs = zip(seen.arrivals_s, seen.arrivals_s[1:], strict=False)
    return [1000 * (b - a) for a, b in pairs if begin_s <= b < end_s]


@asynccontextmanager
async def background(work: Sequence[asyncio.Task[None]]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def beside_prompt(client: AsyncClient, setting: Setting, seed: int) -> tuple[float, float, float]:
    """(p99 without, p99 with, the prompt's first token), milliseconds."""
    rng, start = random.Random(seed), time.perf_counter()
    streams = [Seen() for _ in range(setting.streams)]
    tasks = [
        asyncio.create_task(
            listen(client, draw(rng, setting.stream_prompt_tokens), setting.stream_output_tokens, start, seen)
        )
        for seen in streams
    ]
    async with background(tasks):
        while min(len(seen.ids) for seen in streams) < WARM_TOKENS:  # noqa: ASYNC110 - heard token by token
            await asyncio.sleep(0.05)
        calm_s = time.perf_counter() - start
        await asyncio.sleep(setting.before_s)
        asked_s = time.perf_counter() - start
        long = Seen()
        await listen(client, draw(rng, setting.long_prompt_tokens), 1, start, long)
        assert not any(task.done() for task in tasks), "a stream ended too early"
        told_s = long.arrivals_s[0]
    without = [gap for seen in streams for gap in gaps_ms(seen, calm_s, asked_s)]
    within = [gap for seen in streams for gap in gaps_ms(seen, asked_s, told_s)]
    return percentile(without, 0.99), percentile(within, 0.99), 1000 * (told_s - asked_s)


async def _batch_line(client: AsyncClient, setting: Setting, seed: int, noticed: Noticed) -> None:
    """One place in a line that never ends."""
    rng, start = random.Random(seed), time.perf_counter()
    while True:
        seen = Seen()
        prompt = draw(rng, setting.batch_prompt_tokens)
        await listen(client, prompt, setting.batch_output_tokens, start, seen, BATCH_PRIORITY, interval=16)
        noticed.batch_tokens += len(seen.ids)


async def chats(client: AsyncClient, setting: Setting, seed: int, batch: bool) -> Noticed:
    rng, noticed = random.Random(seed), Noticed()
    lines = [
        asyncio.create_task(_batch_line(client, setting, 1000 * seed + i, noticed))
        for i in range(setting.batch_running if batch else 0)
    ]
    async with background(lines):
        await asyncio.sleep(3.0)
        start, seen, noticed.batch_tokens = time.perf_counter(), list[Seen](), 0
        async with asyncio.TaskGroup() as group:
            due = rng.expovariate(setting.chats_per_s)
            while due < setting.chats_s:
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                seen.append(Seen())
                prompt = draw(rng, setting.chat_prompt_tokens)
                group.create_task(listen(client, prompt, setting.chat_output_tokens, start, seen[-1]))
                due += rng.expovariate(setting.chats_per_s)
        noticed.chats_s = time.perf_counter() - start
    assert not any(task.done() and not task.cancelled() for task in lines), "batch work ended"
    for each in seen:
        noticed.first_ms.append(1000 * (each.arrivals_s[0] - each.sent_s))
        noticed.gaps_ms += gaps_ms(each, 0.0, float("inf"))
    return noticed


@asynccontextmanager
async def _deployment(setting: Setting) -> AsyncIterator[AsyncClient]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        plan = Plan(
            model=setting.model,
            dtype="bfloat16",
            stages=1,
            threads=2,
            run_dir=Path(folder),
            flags={"batcher": ("--running-len-max", "64"), "shard_worker": ("--kv-memory-mb", "2048")},
            env=SERVICES_ENV,
        )
        shoal = await stack.enter_async_context(Deployment(plan))
        client = AsyncClient(shoal.address)
        stack.push_async_callback(client.close)
        yield client


async def _prompts(setting: Setting) -> dict[str, Sample]:
    found = []
    async with _deployment(setting) as client:
        for number in range(setting.rounds + 1):  # the first one warms up: costs are learnt
            found.append(await beside_prompt(client, setting, number))
            without, within, first = found[-1]
            sys.stderr.write(
                f"prompt: {without:.1f} ms, {within:.1f} beside it, first token {first:.0f} ms\n"
            )
    found = found[1:]
    return {
        "beside.prompt.p99_ms": Sample(tuple(without for without, _, _ in found), "ms"),
        "beside.prompt.ratio": Sample(tuple(within / without for without, within, _ in found), "ratio"),
        "beside.prompt.first_ms": Sample(tuple(first for _, _, first in found), "ms"),
    }


async def _batches(setting: Setting) -> dict[str, Sample]:
    pairs: list[tuple[Noticed, Noticed]] = []
    async with _deployment(setting) as client:
        await chats(client, setting, 99, True)
        for number in range(setting.rounds):
            alone = await chats(client, setting, number, False)
            pairs.append((alone, await chats(client, setting, number, True)))
            sys.stderr.write(f"batch: round {number + 1}\n")
    values = {}
    for name in ("first", "gaps"):
        halves = [[getattr(half, f"{name}_ms") for half in pair] for pair in pairs]
        for share in (0.5, 0.99):
            ratios = tuple(percentile(b, share) / percentile(a, share) for a, b in halves)
            values[f"beside.batch.{name}_p{round(100 * share)}"] = Sample(ratios, "ratio")
    values["beside.batch.tokens_per_s"] = Sample(
        tuple(b.batch_tokens / b.chats_s for _, b in pairs), "tokens/s"
    )
    firsts = [sum((pair[i].first_ms for pair in pairs), []) for i in (0, 1)]
    values["beside.batch.first_p99_all"] = Sample(
        (percentile(firsts[1], 0.99) / percentile(firsts[0], 0.99),), "ratio"
    )
    return values


async def main(setting: Setting, parts: Sequence[str]) -> None:
    values: dict[str, Sample] = {}
    with watch_others() as others:
        if "prompt" in parts:
            values |= await _prompts(setting)
        if "batch" in parts:
            values |= await _batches(setting)
    sys.stdout.write(table([["quantity", "value"], *([n, str(v)] for n, v in values.items())]) + "\n")
    sys.stdout.write(f"others used {others.cores:.2f} cores\n")
    notes = {"model": setting.model, "streams": setting.streams, "others_cores": round(others.cores, 2)}
    write("beside", values, notes)

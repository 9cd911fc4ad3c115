"""What it is worth to bring a conversation's blocks back: first tokens restored or computed, by length.

Through the whole system, one stage of two threads. Each round asks prompts of every length anew (computed),
fills the pool with others until nothing of them is left in it, and asks them again (restored from kvstore's
memory); then kvstore is killed, whose disk is all that is left of both, and they are asked once more
(restored from disk, as far as the system has not kept the file in memory). Before it what moving blocks costs
by itself (`bench/tier_links.py`).
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.client_loop import SERVICES_ENV
from bench.load import Workload, ask, run
from bench.quiet import watch_others
from bench.results_file import Sample, table, write
from bench.tier_links import measure_speed, plain_tier, steady_gaps_ms, streams_beside
from chassis import nats_bus, subjects
from chassis.bus import Bus
from chassis.errors import RpcError
from chassis.grpc_rpc import GrpcRpc
from chassis.messages import kvstore as messages
from chassis.messages.registry import parse_kvstore, parse_worker
from shoal.client import AsyncClient, Delta, Finished, Params
from shoal.launcher import Deployment, Plan

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
POOL_BLOCKS = 600  # the longest and those that push it out
STREAMS = Workload("sixteen", 16, 128, 128)
HOW = ("computed", "memory", "disk")
RELEASED_S = 0.25  # a batcher tells ten times a second
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Setting:
    model: str = "smollm2"
    dtype: str = "bfloat16"
    rounds: int = 3


@dataclass(slots=True)
class Found:
    ttft_ms: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    saved_mb_s: list[float] = field(default_factory=list)
    loaded_mb_s: list[float] = field(default_factory=list)
    gaps_ms: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # median and p99 of a run
    beside_mb_s: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)


def _plan(setting: Setting, folder: Path, tiers: bool) -> Plan:
    tier_flags: tuple[str, ...] = ("--host-bytes", str(2 << 30), "--restore-min-tokens", "16")
    tier_flags += ("--disk-bytes", str(4 << 30), "--disk-dir", str(folder / "disk"))
    tier_flags += ("--restore-wait-ms", "240")
    return Plan(
        model=setting.model,
        dtype=setting.dtype,
        stages=1,
        threads=2,
        run_dir=folder / "run",
        flags={
            "kvstore": tier_flags if tiers else (),
            "shard_worker": ("--num-blocks", str(POOL_BLOCKS)),
        },
        env=SERVICES_ENV,
    )


async def _first_token(client: AsyncClient, prompt: Sequence[int]) -> tuple[float, int]:
    """In ms, and how many of the prompt's tokens were not computed."""
    begun, first_ms, cached = time.perf_counter(), 0.0, 0
    async for event in client.generate(prompt, Params(temperature=0.0, max_tokens=1, ignore_eos=True)):
        match event:
            case Delta():
                first_ms = first_ms or 1000 * (time.perf_counter() - begun)
            case Finished():
                cached = event.cached_tokens
    return first_ms, cached


async def _stats(bus: Bus, rpc: GrpcRpc) -> list[messages.Stats]:
    found = []
    for entry in await bus.entries(subjects.KVSTORES):
        if entry.value is not None:
            address = parse_kvstore(entry.value).rpc_address
            try:
                reply = await rpc.call(address, messages.STATS, messages.build_stats_question(""), 2.0)
                found.append(messages.parse_stats(reply))
            except RpcError:
                pass  # the entry of one that is gone
    return found


class Whole:
    """A deployment with tiers, and what is asked of it."""

    def __init__(
        self, shoal: Deployment, client: AsyncClient, bus: Bus, rpc: GrpcRpc, vocab_size: int
    ) -> None:
        self._shoal, self._client, self._bus, self._rpc = shoal, client, bus, rpc
        self._vocab_size = vocab_size

    def draw(self, seed: int, length: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(1000, self._vocab_size) for _ in range(length)]

    async def rested(self) -> None:
        """Blocks are released by now, and nothing waits to be saved."""
        await asyncio.sleep(RELEASED_S)
        async with asyncio.timeout(PATIENCE_S):
            while any(s.tiers["backlog"] for s in await _stats(self._bus, self._rpc)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # it tells nobody

    async def round(self, seed: int, into: Found) -> None:
        prompts = {length: self.draw(seed + length, length) for length in LENGTHS}
        for length, prompt in prompts.items():
            await self._ask("computed", length, prompt, into)
            await self.rested()
        await self._push_out(seed)
        for length, prompt in prompts.items():
            await self._ask("memory", length, prompt, into)
            await self.rested()
        self._shoal.kill("kvstore")
        async with asyncio.timeout(PATIENCE_S):  # another has the pool, of which it knows nothing
            while not any(s.total for s in await _stats(self._bus, self._rpc)):
                await _first_token(self._client, self.draw(seed, 20))
        await asyncio.sleep(0.5)
        for length, prompt in prompts.items():
            await self._ask("disk", length, prompt, into)
            await self.rested()

    async def _ask(self, how: str, length: int, prompt: Sequence[int], into: Found) -> None:
        ttft_ms, cached = await _first_token(self._client, prompt)
        expected = 0 if how == "computed" else (length - 1) // 16 * 16
        if cached != expected:
            sys.stderr.write(f"{how} {length}: {cached} tokens cached, not {expected}: left out\n")
            return
        into.ttft_ms.setdefault((how, length), []).append(ttft_ms)

    async def _push_out(self, seed: int) -> None:
        for number in range(2):
            await _first_token(self._client, self.draw(seed + 7 + number, POOL_BLOCKS * 16 // 2 + 512))
            await self.rested()


async def _links(setting: Setting, folder: Path, found: Found) -> None:
    async with (
        Deployment(_plan(setting, folder, tiers=False)) as shoal,
        AsyncClient(shoal.address, retry=None) as client,
    ):
        vocab_size = (await client.models())[0].vocab_size
        await ask(client, list(range(2000, 6096)), 2, time.perf_counter())
        bus = await nats_bus.connect(shoal.nats_url, name="bench")
        entries = await bus.entries(subjects.WORKERS)
        (worker,) = [parse_worker(e.value) for e in entries if e.value is not None]
        await bus.close()
        seed = time.time_ns() & 0xFFFFFF
        async with plain_tier(worker) as tier:
            await run(client, STREAMS, seed, vocab_size)
            for number in range(setting.rounds):
                with watch_others() as others:
                    speed, calls = await measure_speed(tier, POOL_BLOCKS)
                    found.saved_mb_s.append(speed.saved_mb_s)
                    found.loaded_mb_s.append(speed.loaded_mb_s)
                    for who in ("alone", "saving") if number % 2 else ("saving", "alone"):
                        seed += 1
                        some = calls if who == "saving" else ()
                        result, mb_s = await streams_beside(client, tier, some, STREAMS, seed, vocab_size)
                        gaps = steady_gaps_ms(result)
                        pair = (gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100])
                        found.gaps_ms.setdefault(who, []).append(pair)
                        if some:
                            found.beside_mb_s.append(mb_s)
                found.others_cores.append(round(others.cores, 2))


async def _whole(setting: Setting, folder: Path, found: Found) -> None:
    async with (
        Deployment(_plan(setting, folder, tiers=True)) as shoal,
        AsyncClient(shoal.address, retry=None) as client,
    ):
        bus, rpc = await nats_bus.connect(shoal.nats_url, name="bench"), GrpcRpc()
        try:
            whole = Whole(shoal, client, bus, rpc, (await client.models())[0].vocab_size)
            seed = time.time_ns() & 0xFFFFFF
            await _first_token(client, whole.draw(seed, 512))
            for number in range(setting.rounds):
                with watch_others() as others:
                    await whole.round(seed + 10_000 * (number + 1), found)
                found.others_cores.append(round(others.cores, 2))
        finally:
            await rpc.close()
            await bus.close()


def values_of(found: Found) -> tuple[dict[str, Sample], list[list[str]]]:
    values: dict[str, Sample] = {}
    rows = [["tokens", *HOW]]
    for length in LENGTHS:
        cells = [str(length)]
        for how in HOW:
            times = found.ttft_ms.get((how, length), [])
            cells.append(str(Sample(tuple(times), "ms")) if times else "")
            if times:
                values[f"tiers.ttft_{how}_{length}_ms"] = Sample(tuple(times), "ms")
        rows.append(cells)
    for name, numbers in (
        ("saved", found.saved_mb_s),
        ("loaded", found.loaded_mb_s),
        ("saved_beside", found.beside_mb_s),
    ):
        if numbers:
            values[f"tiers.{name}_mb_s"] = Sample(tuple(numbers), "MB/s")
    for who, pairs in found.gaps_ms.items():
        values[f"tiers.gap_{who}_ms"] = Sample(tuple(p for p, _ in pairs), "ms")
        values[f"tiers.gap_p99_{who}_ms"] = Sample(tuple(p for _, p in pairs), "ms")
    return values, rows


async def main(setting: Setting, parts: Sequence[str] = ("links", "whole")) -> None:
    found = Found()
    for name, part in (("links", _links), ("whole", _whole)):
        if name in parts:
            with TemporaryDirectory() as folder:
                await part(setting, Path(folder), found)
    values, rows = values_of(found)
    sys.stdout.write(table(rows) + "\n")
    for name, sample in values.items():
        if "ttft" not in name:
            sys.stdout.write(f"{name}: {sample}\n")
    notes = {"model": setting.model, "dtype": setting.dtype, "others_cores": found.others_cores}
    write("tiers", values, notes)

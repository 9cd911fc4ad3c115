"""The row `peers`: Shoal and the peers in turns on the same cores, round after round, as ratios.

All contestants of a dtype stand loaded and warm; in each round every one takes its turn at the same new
prompts. A round in which others used the cores is taken again, a few times; if it never gets quiet, nothing
is reported. A contestant that can't run here is reported with its error and left out.
"""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.client_loop import run
from bench.load import WORKLOADS, Workload, draw_prompts
from bench.peers import weights
from bench.peers.contestants import Contestant, Peer, Shoal, ShoalSetting
from bench.peers.conversation import Failed, Load, Loaded, Ran
from bench.peers.turns import (
    Figures,
    Noisy,
    Turn,
    best,
    complete,
    decode_tokens_per_s,
    figures,
    is_noisy,
    joined,
    order,
)
from bench.quiet import watch_others
from bench.results_file import Sample, table, write
from shard_worker.bounds import Bounds
from shard_worker.bounds import measure as measure_bounds

VOCAB_SIZE = 49152
LOOK_S = 2.0  # how long the cores are watched to call them quiet
WARM_UP_TOKENS = 4
WARM_UP_SEED = 999_999
# a turn of the shortest workload is several requests, one after another: ticks of 10 ms must not decide
REPEATS = {"W4": 4}
MAIN_ROW = "bfloat16"  # its quantities have no dtype in their names


@dataclass(frozen=True, slots=True)
class Setting:
    rows: tuple[str, ...] = tuple(weights.ROWS)
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    contestants: tuple[str, ...] = ("shoal", "vllm", "transformers", "llamacpp", "openvino")
    rounds: int = 5
    repeats_max: int = 3  # of a noisy round
    quiet_wait_s: float = 60.0  # before each, for the others to leave
    threads: int = 2
    waiting: str = "passive"
    worker_flags: tuple[str, ...] = ()  # more of Shoal's
    sequences_max: int = 64
    cache_mb: int = 2048


@dataclass(slots=True)
class Row:
    """What came of one dtype."""

    dtype: str
    loaded: dict[str, Loaded] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    bounds: list[Bounds] = field(default_factory=list)
    weights_bytes: int = 0  # that Shoal reads for a token
    rounds: dict[str, list[dict[str, Turn]]] = field(default_factory=dict)  # by workload
    repeated: int = 0


def _contestant(setting: Setting, row: str, name: str, folder: Path) -> Contestant:
    """Raises Failed when its weights can't be made."""
    form = weights.ROWS[row][name]
    path = str(form.weights())
    if name == "shoal":
        flags = (*form.flags, *setting.worker_flags)
        sizes = (setting.threads, setting.sequences_max, setting.cache_mb)
        return Shoal(ShoalSetting(path, 1, *sizes, worker_flags=flags))
    load = Load(path, form.dtype, setting.threads, setting.sequences_max, cache_mb=setting.cache_mb)
    return Peer(name, load, setting.waiting, folder, {})


async def take_turn(contestant: Contestant, workload: Workload, seed: int) -> Ran:
    """New prompts; what they share is there before. Raises Failed."""
    runs = []
    for part in range(REPEATS.get(workload.name, 1)):
        prompts = draw_prompts(workload, seed * 1000 + part, VOCAB_SIZE)
        if workload.shared_tokens:
            await contestant.run([prompts[0][: workload.shared_tokens]], 1)
        runs.append(await contestant.run(prompts, workload.output_tokens))
    ran = joined(runs)
    if not complete(ran, workload, len(runs)):
        counts = [t.tokens for t in ran.requests]
        raise Failed(f"{workload.name}: {counts} tokens instead of {workload.output_tokens} each")
    return ran


async def warm_up(contestant: Contestant, workloads: Sequence[Workload]) -> None:
    """The same shapes once, so that nothing is compiled or taken later. Raises Failed."""
    for workload in workloads:
        prompts = draw_prompts(workload, WARM_UP_SEED, VOCAB_SIZE)
        await contestant.run(prompts, min(workload.output_tokens, WARM_UP_TOKENS))


async def take_round(
    contestants: Mapping[str, Contestant], workload: Workload, number: int, seed: int
) -> dict[str, Turn]:
    """A turn of each, in this round's order. Raises Failed."""
    turns: dict[str, Turn] = {}
    for name in order(list(contestants), number):
        contestant = contestants[name]
        try:
            await contestant.resume()
            with watch_others(contestant.root_pid) as others:
                ran = await take_turn(contestant, workload, seed)
        except Failed as error:
            raise Failed(f"{name}: {error}") from error
        finally:
            contestant.pause()
        turns[name] = Turn(name, ran, others.cores)
    return {name: turns[name] for name in contestants}


async def until_quiet(wait_s: float) -> None:
    """Until nobody else uses the cores. Raises Noisy."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + wait_s
    while True:
        with watch_others() as others:
            await asyncio.sleep(LOOK_S)
        if not is_noisy(others.cores, LOOK_S):
            return
        if loop.time() >= give_up_at:
            raise Noisy(f"others use {others.cores:.2f} cores, for {wait_s:g} s already")


async def quiet_round(
    contestants: Mapping[str, Contestant],
    workload: Workload,
    number: int,
    repeats_max: int,
    quiet_wait_s: float,
) -> tuple[dict[str, Turn], int]:
    """The first quiet one, and how many were not. Raises Noisy and Failed."""
    for attempt in range(repeats_max + 1):
        await until_quiet(quiet_wait_s)
        turns = await take_round(contestants, workload, number, number * 100 + attempt)
        noisy = [t for t in turns.values() if t.noisy]
        if not noisy:
            return turns, attempt
        said = ", ".join(f"{t.others_cores:.2f} beside {t.contestant}" for t in noisy)
        sys.stderr.write(f"{workload.name}, round {number + 1}: others used cores: {said}\n")
    raise Noisy(f"{workload.name}: others used the cores in {repeats_max + 1} tries of round {number + 1}")


async def quiet_bounds(threads: int, repeats_max: int, quiet_wait_s: float) -> Bounds:
    """Raises Noisy."""
    for _ in range(repeats_max + 1):
        await until_quiet(quiet_wait_s)
        begun = time.perf_counter()
        with watch_others() as others:
            bounds = measure_bounds(threads)
        if not is_noisy(others.cores, time.perf_counter() - begun):
            return bounds
    raise Noisy(f"others used {others.cores:.2f} cores while the machine's bounds were measured")


async def _stand(setting: Setting, row: Row, folder: Path) -> dict[str, Contestant]:
    """All that can run, warm and stopped; why the others can't is noted."""
    standing: dict[str, Contestant] = {}
    for name in (n for n in setting.contestants if n in weights.ROWS[row.dtype]):
        sys.stderr.write(f"{row.dtype}: {name} ...\n")
        try:
            contestant = _contestant(setting, row.dtype, name, folder)
        except Failed as error:
            row.failed[name] = str(error)
            continue
        try:
            row.loaded[name] = await contestant.start()
            await warm_up(contestant, [WORKLOADS[w] for w in setting.workloads])
            contestant.pause()
            standing[name] = contestant
        except Failed as error:
            row.failed[name] = str(error)
            row.loaded.pop(name, None)
            sys.stderr.write(f"{row.dtype}: {name} does not run: {error}\n")
            await contestant.stop()
    return standing


async def measure(setting: Setting, dtype: str) -> Row:
    """Raises Noisy, and Failed when one that stood gives up or Shoal is not among them."""
    row = Row(dtype)
    standing: dict[str, Contestant] = {}
    with TemporaryDirectory() as folder:
        try:
            standing = await _stand(setting, row, Path(folder))
            if setting.contestants[0] not in standing or len(standing) < 2:
                raise Failed(f"nobody to compare: {row.failed}")
            for number in range(setting.rounds):
                limits = (setting.repeats_max, setting.quiet_wait_s)
                row.bounds.append(await quiet_bounds(setting.threads, *limits))
                for name in setting.workloads:
                    turns, tries = await quiet_round(standing, WORKLOADS[name], number, *limits)
                    row.rounds.setdefault(name, []).append(turns)
                    row.repeated += tries
                sys.stderr.write(f"{dtype}: round {number + 1} of {setting.rounds}\n")
        finally:
            for contestant in standing.values():
                await contestant.stop()
    return row


def values_of(row: Row) -> tuple[dict[str, Sample], list[list[str]]]:
    """Named quantities, and a table. Raises Noisy."""
    prefix = "peers" if row.dtype == MAIN_ROW else f"peers.{row.dtype}"
    values: dict[str, Sample] = {}
    lines = []
    for name, rounds in row.rounds.items():
        found = figures(WORKLOADS[name], rounds)
        key = f"{prefix}.{name.lower()}"
        for contestant, rates in found.rates.items():
            values[f"{key}.{contestant}_tokens_per_s"] = Sample(rates, "tokens/s")
            values[f"{key}.{contestant}_ttft_ms"] = Sample(found.ttfts_ms[contestant], "ms")
            ratios = found.ratios.get(contestant)
            if ratios is not None:
                values[f"{key}.ratio_{contestant}"] = Sample(ratios, "ratio")
            shown = "" if ratios is None else str(values[f"{key}.ratio_{contestant}"])
            rate, ttft = (str(values[f"{key}.{contestant}_{q}"]) for q in ("tokens_per_s", "ttft_ms"))
            lines.append([row.dtype, name, contestant, rate, ttft, shown])
        if found.ratios:
            values[f"{key}.ratio_best"] = Sample(best(found), "ratio")
        if name == "W1":
            values |= _bandwidth(row, key, found, rounds)
    return values, lines


def _bandwidth(row: Row, key: str, found: Figures, rounds: Sequence[Mapping[str, Turn]]) -> dict[str, Sample]:
    """One stream against reading its weights once a token, as fast as this machine reads."""
    bound = [b.read_bytes_per_s / row.weights_bytes for b in row.bounds] if row.weights_bytes else []
    values = {
        "peers.bounds.read_gb_per_s": Sample(tuple(b.read_bytes_per_s / 1e9 for b in row.bounds), "GB/s")
    }
    for arithmetic in ("float32", "bfloat16"):
        flops = [rate / 1e9 for b in row.bounds if (rate := b.products_per_s(arithmetic)) is not None]
        if flops:
            values[f"peers.bounds.{arithmetic}_gflops"] = Sample(tuple(flops), "GFLOP/s")
    if not bound:
        return values
    values[f"{key}.bandwidth_tokens_per_s"] = Sample(tuple(bound), "tokens/s")
    for name, rates in found.rates.items():
        shares = tuple(rate / b for rate, b in zip(rates, bound, strict=True))
        values[f"{key}.{name}_bandwidth_ratio"] = Sample(shares, "ratio")
        decode = [decode_tokens_per_s(r[name].ran) for r in rounds]
        if None not in decode:
            steady = tuple(float(d or 0.0) for d in decode)
            values[f"{key}.{name}_decode_tokens_per_s"] = Sample(steady, "tokens/s")
    return values


def notes_of(setting: Setting, row: Row) -> dict[str, Any]:
    turns = [t for rounds in row.rounds.values() for one in rounds for t in one.values()]
    return {
        "dtype": row.dtype,
        "rounds": setting.rounds,
        "rounds_repeated": row.repeated,
        "threads": setting.threads,
        "waiting": setting.waiting,
        "contestants": {
            name: {
                "version": loaded.version,
                "load_s": round(loaded.seconds, 1),
                "note": "; ".join(n for n in (loaded.note, weights.ROWS[row.dtype][name].note) if n),
            }
            for name, loaded in row.loaded.items()
        },
        "failed": row.failed,
        "weights_bytes": row.weights_bytes,
        "others_cores_max": round(max((t.others_cores for t in turns), default=0.0), 3),
    }


def main(setting: Setting) -> int:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: setting.threads])
    code = 0
    for dtype in setting.rows:
        try:
            row = run(measure(setting, dtype))
            row.weights_bytes = weights.token_bytes(dtype)
            values, lines = values_of(row)
        except (Noisy, Failed) as error:
            sys.stdout.write(f"{dtype}: nothing to report: {error}\n")
            code = 1
            continue
        head = ["dtype", "workload", "who", "tokens/s", "first token", "Shoal over it"]
        sys.stdout.write(table([head, *lines]) + "\n")
        for name, why in row.failed.items():
            sys.stdout.write(f"{dtype}: {name} does not run here: {why}\n")
        write("peers", values, notes_of(setting, row))
    return code

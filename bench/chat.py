"""W6: what the prefix cache is to a conversation, turn by turn: time to first token with and without it.

Ten turns through the whole system, one stage of two threads. With and without take turns, on the same
deployment: without, every prompt begins with a token of its own, so that nothing of it is ever found.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.load import W6, Chat, converse
from bench.quiet import watch_others
from bench.results_file import Sample, table, write
from shoal.client import AsyncClient
from shoal.launcher import Deployment, Plan

WARM_UP = Chat("warm-up", 2, 64, 8)
KNOWN, UNKNOWN = "with", "without"


@dataclass(frozen=True, slots=True)
class Setting:
    model: str = "smollm2"
    dtype: str = "bfloat16"
    rounds: int = 3
    chat: Chat = W6


@dataclass(slots=True)
class Turns:
    """Times to first token in ms, by turn, one list a round."""

    ttft_ms: dict[str, list[list[float]]] = field(default_factory=lambda: {KNOWN: [], UNKNOWN: []})
    others_cores: list[float] = field(default_factory=list)


def ratios(turns: Turns) -> tuple[float, ...]:
    """Of the last turn, without over with: one a round, of neighbours."""
    pairs = zip(turns.ttft_ms[UNKNOWN], turns.ttft_ms[KNOWN], strict=True)
    return tuple(without[-1] / known[-1] for without, known in pairs)


def slopes(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """How much longer the last turn took than the second, the first that can find anything."""
    return tuple(ttfts[-1] / ttfts[1] for ttfts in rounds)


async def measure(setting: Setting) -> Turns:
    turns = Turns()
    with TemporaryDirectory() as folder:
        plan = Plan(
            model=setting.model,
            dtype=None if setting.model == "fake" else setting.dtype,
            stages=1,
            threads=2,
            run_dir=Path(folder),
            restart=False,
        )
        async with Deployment(plan) as shoal, AsyncClient(shoal.address, retry=None) as client:
            vocab_size = (await client.models())[0].vocab_size
            seed = time.time_ns() & 0xFFFFFF
            for known in (True, False):
                await converse(client, WARM_UP, seed, vocab_size, known)
            for number in range(setting.rounds):
                with watch_others() as others:
                    for known in (True, False) if number % 2 else (False, True):
                        seed += 1
                        heard = await converse(client, setting.chat, seed, vocab_size, known)
                        said = [1000 * (s.arrivals_s[0] - s.sent_s) for s in heard]
                        turns.ttft_ms[KNOWN if known else UNKNOWN].append(said)
                turns.others_cores.append(round(others.cores, 2))
                sys.stderr.write(f"round {number + 1}: others used {others.cores:.2f} cores\n")
    return turns


def values_of(turns: Turns) -> tuple[dict[str, Sample], list[list[str]]]:
    values = {
        "chat.w6.ttft_ratio": Sample(ratios(turns), "ratio"),
        "chat.w6.ttft_slope": Sample(slopes(turns.ttft_ms[KNOWN]), "ratio"),
    }
    rows = [["turn", f"first token {KNOWN}", f"first token {UNKNOWN}"]]
    for turn in range(len(turns.ttft_ms[KNOWN][0])):
        cells = [str(turn + 1)]
        for who in (KNOWN, UNKNOWN):
            sample = Sample(tuple(ttfts[turn] for ttfts in turns.ttft_ms[who]), "ms")
            cells.append(str(sample))
            if turn + 1 in (1, 2, len(turns.ttft_ms[KNOWN][0])):
                values[f"chat.w6.turn{turn + 1}_{who}_ms"] = sample
        rows.append(cells)
    return values, rows


def main(setting: Setting) -> None:
    turns = asyncio.run(measure(setting))
    values, rows = values_of(turns)
    sys.stdout.write(table(rows) + "\n")
    for name in ("chat.w6.ttft_ratio", "chat.w6.ttft_slope"):
        sys.stdout.write(f"{name}: {values[name]}\n")
    over_all = {who: median(t for r in rounds for t in r) for who, rounds in turns.ttft_ms.items()}
    sys.stdout.write(
        f"median over all turns: {over_all[KNOWN]:.1f} ms with, {over_all[UNKNOWN]:.1f} without\n"
    )
    notes = {"model": setting.model, "dtype": setting.dtype, "others_cores": turns.others_cores}
    write("chat", values, notes)

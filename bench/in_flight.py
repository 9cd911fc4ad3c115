"""Real services, two stages of one core: steps in flight as they are chosen against every fixed number.

In turns, as `bench/stages.py` takes them; both stages and all services share two cores, so that a stage that
waits leaves its core to others, and the numbers lie nearer together than on machines of their own.
"""

import os
import sys
from statistics import median

from bench.client_loop import run
from bench.load import Workload
from bench.peers.contestants import Contestant, Shoal, ShoalSetting
from bench.peers.conversation import Failed
from bench.peers.match import quiet_round, warm_up
from bench.peers.turns import Figures, Noisy, Turn, figures
from bench.results_file import Sample, table, write

SEQUENCES = (8, 64)
PROMPT_TOKENS = OUTPUT_TOKENS = 64
NUMBERS = (1, 2, 3)
CHOSEN = "chosen"
REPEATS_MAX = 2
QUIET_WAIT_S = 20.0


def workload(sequences: int) -> Workload:
    return Workload(f"F{sequences}", sequences, PROMPT_TOKENS, OUTPUT_TOKENS)


def _contestants(model: str) -> dict[str, Contestant]:
    def shoal(number: int, name: str) -> Contestant:
        flags = ("--steps-in-flight", str(number), "--step-tokens-max", "512")
        worker = ("--dtype", "bfloat16")
        sizes = {"sequences_max": max(SEQUENCES), "cache_mb": 256}
        return Shoal(ShoalSetting(model, 2, 1, **sizes, worker_flags=worker, batcher_flags=flags), name)

    return {CHOSEN: shoal(0, CHOSEN), **{str(n): shoal(n, str(n)) for n in NUMBERS}}


async def measure(model: str, rounds: int) -> dict[int, list[dict[str, Turn]]]:
    """Raises Noisy and Failed."""
    found: dict[int, list[dict[str, Turn]]] = {}
    contestants = _contestants(model)
    try:
        for contestant in contestants.values():
            await contestant.start()
            await warm_up(contestant, [workload(n) for n in SEQUENCES])
        for number in range(rounds):
            for sequences in SEQUENCES:
                turns, _ = await quiet_round(
                    contestants, workload(sequences), number, REPEATS_MAX, QUIET_WAIT_S
                )
                found.setdefault(sequences, []).append(turns)
            sys.stderr.write(f"round {number + 1} of {rounds}\n")
    finally:
        for contestant in contestants.values():
            await contestant.stop()
    return found


def best_fixed(found: Figures) -> str:
    """The number with the highest median. The highest of each round is above what any number gives."""
    return max(found.ratios, key=lambda number: median(found.rates[number]))


def main(model: str, rounds: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    try:
        found = run(measure(model, rounds))
        made = {n: figures(workload(n), turns) for n, turns in found.items()}
    except (Noisy, Failed) as error:
        sys.stdout.write(f"nothing to report: {error}\n")
        return
    values: dict[str, Sample] = {}
    rows = [["sequences", "chosen", *(f"{number} in flight" for number in NUMBERS), "of the best"]]
    for sequences, figure in made.items():
        share = Sample(figure.ratios[best_fixed(figure)], "ratio")
        values[f"in_flight.chosen.b{sequences}"] = share
        for name, rates in figure.rates.items():
            values[f"in_flight.b{sequences}.{name}"] = Sample(rates, "tokens/s")
        rows.append(
            [str(sequences), *(str(Sample(r, "tokens/s")) for r in figure.rates.values()), str(share)]
        )
    sys.stdout.write(table(rows) + "\n")
    write("in_flight", values, {"dtype": "bfloat16", "prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS})

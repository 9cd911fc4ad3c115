"""What a second stage costs on the same two cores: two stages of one thread against one stage of two.

At several numbers of sequences in all, in turns. Beside it what the machine's bounds allow each of them: two
stages read every weight once for each half of the sequences, one stage once for all of them, so that the
bound of their ratio rises from a half, where memory decides, to one, where products do.
"""

import os
import sys
from collections.abc import Mapping

from bench.client_loop import run
from bench.load import Workload
from bench.peers import weights
from bench.peers.contestants import Contestant, Shoal, ShoalSetting
from bench.peers.conversation import Failed
from bench.peers.match import quiet_bounds, quiet_round, warm_up
from bench.peers.turns import Noisy, Turn, figures
from bench.results_file import Sample, table, write
from shard_worker.bounds import Bounds

BATCHES = (16, 32, 64, 128, 256, 512)
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32
CACHE_MB = 2048
REPEATS_MAX = 3
QUIET_WAIT_S = 60.0
ONE, TWO = "one", "two"


def workload(batch: int) -> Workload:
    return Workload(f"B{batch}", batch, PROMPT_TOKENS, OUTPUT_TOKENS)


def bound_tokens_per_s(
    bounds: Bounds, weights_bytes: int, weight_bytes: int, batch: int, stages: int
) -> float:
    """Decoding, from reading the weights and multiplying by them alone; `weight_bytes`: of one weight.

    A stage has its share of the cores and of the memory's speed; a step of it is one microbatch.
    """
    rows = batch / stages
    read_s = weights_bytes / stages / (bounds.read_bytes_per_s / stages)
    rate = bounds.products_per_s("bfloat16")
    if rate is None:
        return rows / read_s
    flops = 2 * weights_bytes / weight_bytes * rows
    return rows / max(read_s, flops / stages / (rate / stages))


def _contestants(model: str) -> dict[str, Contestant]:
    flags = ("--dtype", "bfloat16")
    sequences_max = max(BATCHES)
    batcher = ("--step-tokens-max", str(sequences_max))
    sizes = {"sequences_max": sequences_max, "cache_mb": CACHE_MB}
    return {
        TWO: Shoal(ShoalSetting(model, 2, 1, **sizes, worker_flags=flags, batcher_flags=batcher), TWO),
        ONE: Shoal(ShoalSetting(model, 1, 2, **sizes, worker_flags=flags, batcher_flags=batcher), ONE),
    }


async def measure(model: str, rounds: int) -> tuple[dict[int, list[dict[str, Turn]]], list[Bounds]]:
    """Raises Noisy and Failed."""
    found: dict[int, list[dict[str, Turn]]] = {}
    bounds: list[Bounds] = []
    contestants = _contestants(model)
    try:
        for contestant in contestants.values():
            await contestant.start()
            await warm_up(contestant, [workload(BATCHES[-1])])
        for number in range(rounds):
            limits = (REPEATS_MAX, QUIET_WAIT_S)
            bounds.append(await quiet_bounds(2, *limits))
            for batch in BATCHES:
                turns, _ = await quiet_round(contestants, workload(batch), number, *limits)
                found.setdefault(batch, []).append(turns)
            sys.stderr.write(f"round {number + 1} of {rounds}\n")
    finally:
        for contestant in contestants.values():
            await contestant.stop()
    return found, bounds


def values_of(
    found: Mapping[int, list[dict[str, Turn]]], bounds: list[Bounds], weights_bytes: int, weight_bytes: int
) -> tuple[dict[str, Sample], list[list[str]]]:
    values: dict[str, Sample] = {}
    rows = [["sequences", "two stages", "one stage", "ratio", "bound of the ratio", "bound of one"]]
    for batch, rounds in found.items():
        key = f"stages.b{batch}"
        figure = figures(workload(batch), rounds)
        limits = {
            stages: tuple(bound_tokens_per_s(b, weights_bytes, weight_bytes, batch, stages) for b in bounds)
            for stages in (1, 2)
        }
        some = {
            f"{key}.two_tokens_per_s": Sample(figure.rates[TWO], "tokens/s"),
            f"{key}.one_tokens_per_s": Sample(figure.rates[ONE], "tokens/s"),
            f"{key}.ratio": Sample(figure.ratios[ONE], "ratio"),
            f"{key}.ratio_bound": Sample(
                tuple(b / a for a, b in zip(limits[1], limits[2], strict=True)), "ratio"
            ),
            f"{key}.one_bound_tokens_per_s": Sample(limits[1], "tokens/s"),
        }
        values |= some
        rows.append([str(batch), *map(str, some.values())])
    return values, rows


def main(rounds: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    try:
        model = weights.hf_folder("bfloat16")
        found, bounds = run(measure(str(model), rounds))
        values, rows = values_of(found, bounds, weights.token_bytes("bfloat16"), 2)
    except (Noisy, Failed) as error:
        sys.stdout.write(f"nothing to report: {error}\n")
        return
    sys.stdout.write(table(rows) + "\n")
    write("stages", values, {"dtype": "bfloat16", "prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS})

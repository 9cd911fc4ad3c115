"""What a step costs a worker, by what is in it: the figures that `bench/virtual_pipeline.py` computes with.

A real worker's executor, alone on one thread, runs steps of decodes and of chunks at several contexts, once
with half of the layers and once with all and the head. `python -m bench.step_costs --model FILE` prints the
least processor time of several runs, since others may be busy: of steps at a short context by their tokens,
and what positions of context add.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import fmean

from shard_worker.executor import StageSpec
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.torch_executor import NO_BYTES, EngineConfig, TorchExecutor

BLOCK = 16
REPEATS = 9
ROWS = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = (16, 32, 64, 128, 256, 512)
SHORT, LONG = 64, 1024
START = 3072


def seconds(executor: TorchExecutor, probes: Sequence[ProbeRow]) -> float:
    inputs = probe_inputs(probes, BLOCK)
    executor.run(inputs, NO_BYTES)
    values = []
    for _ in range(REPEATS):
        begun = time.process_time()
        executor.run(inputs, NO_BYTES)
        values.append(time.process_time() - begun)
    return min(values)


def decodes(executor: TorchExecutor, rows: int, context: int) -> float:
    blocks = -(-(context + 1) // BLOCK)
    return seconds(
        executor, [ProbeRow([97 + i], context, range(i * blocks, (i + 1) * blocks)) for i in range(rows)]
    )


def chunk(executor: TorchExecutor, tokens: int, start: int) -> float:
    ids = [97 + i % 100 for i in range(tokens)]
    return seconds(executor, [ProbeRow(ids, start, range(-(-(start + tokens) // BLOCK)))])


def measure(model: str, dtype: str, stages: int) -> None:
    executor = TorchExecutor(EngineConfig(model=model, dtype=dtype, threads=1, kv_memory_mb=1536))
    layers = executor.facts.num_layers // stages
    executor.load(StageSpec(0, stages, 0, layers, BLOCK, max(ROWS), max(CHUNKS)))
    short = {rows: decodes(executor, rows, SHORT) for rows in ROWS}
    long = {rows: decodes(executor, rows, LONG) for rows in ROWS if rows <= 32}
    read_s = fmean([(long[n] - short[n]) / (n * (LONG - SHORT)) for n in long])
    begun = {tokens: chunk(executor, tokens, 0) for tokens in CHUNKS}
    far = {tokens: chunk(executor, tokens, START) for tokens in CHUNKS}
    attended_s = fmean([(far[n] - begun[n]) / (n * START) for n in CHUNKS if n >= 64])
    say = sys.stdout.write
    say(f"{layers} layers of {executor.facts.num_layers}{', head' if stages == 1 else ''}\n")
    say(f"  decodes, context {SHORT}: { {n: round(1e3 * s, 3) for n, s in short.items()} }\n")
    say(f"  chunks from 0: { {n: round(1e3 * s, 3) for n, s in begun.items()} }\n")
    say(f"  us a position: decodes {1e6 * read_s:.4f}, chunks {1e6 * attended_s:.4f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    for stages in (2, 1):
        measure(args.model, args.dtype, stages)


if __name__ == "__main__":
    main()

"""How near the packed products come to what the machine can do: memory read at few rows, products at many, of
float32, bfloat16 or 8-bit integers as the candidate multiplies them.

One thread, its processor time: being preempted does not count, a shared memory bus still does. Each shape has
copies of its matrix that together fall out of the caches, used in turn, as the layers of a model are. All
formats, and torch's float32 product, run in each round; medians over rounds.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.quiet import watch_others
from bench.results_file import Sample, table, write
from shard_worker.bounds import ARITHMETIC
from shard_worker.bounds import functions as bound_functions
from shard_worker.model.stage_weights import F32, U8, WeightFormat
from shard_worker.native import library
from shard_worker.native.linear import PackedMatrix

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))  # inputs, outputs: SmolLM2 135M's
ROWS = (1, 4, 8, 16, 48, 64, 512)
ROWS_HEAD_MAX = 64  # of the largest shape: no step samples more
BLOCKS = {  # inputs and bytes of a block in a row of a file
    WeightFormat.F32: (1, 4),
    WeightFormat.BF16: (1, 2),
    WeightFormat.F16: (1, 2),
    WeightFormat.Q8_0: (32, 34),
    WeightFormat.Q4_0: (32, 18),
    WeightFormat.Q4_1: (32, 20),
    WeightFormat.Q5_0: (32, 22),
    WeightFormat.Q4_K: (256, 144),
    WeightFormat.Q6_K: (256, 210),
}
COLD_BYTES = 64 << 20  # of copies: twice a large shared cache
READ_BYTES = 256 << 20
MULTIPLY_ROUNDS = 2_000_000
ROUND_S = 0.015  # of one timing, at least three calls
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one thread."""

    read_gb_s: Sample
    gflop_s: Mapping[str, Sample]  # by arithmetic


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    bytes: int  # of one matrix
    arithmetic: str
    calls: Callable[[F32, F32], Sequence[Callable[[], object]]]  # (x, y) -> one a copy
    close: Callable[[], None]


def bounds(native: ctypes.CDLL) -> Bounds:
    read, multiply = bound_functions(native)
    pool = native.shoal_pool_create(1)
    data, sums = np.ones(READ_BYTES // 4, np.float32), np.ones(64, np.float32)
    rates: list[float] = []
    multiplied: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        start = time.thread_time()
        count = read(pool, library.address(data), data.size, library.address(sums))
        rates.append(4e-9 * count / (time.thread_time() - start))
        for name, arithmetic in ARITHMETIC.items():
            sums[:] = 1e-3
            start = time.thread_time()
            if count := multiply(pool, arithmetic, MULTIPLY_ROUNDS, library.address(sums)):
                multiplied.setdefault(name, []).append(2e-9 * count / (time.thread_time() - start))
    native.shoal_pool_destroy(pool)
    peaks = {name: Sample(tuple(values), "GFLOP/s") for name, values in multiplied.items()}
    return Bounds(Sample(tuple(rates), "GB/s"), peaks)


def rows_of(format: WeightFormat, outputs: int, inputs: int) -> U8:
    """Bytes of a matrix of small numbers: which does not matter, that none is a NaN does."""
    random = np.random.default_rng(0)
    if format is WeightFormat.F32:
        return random.standard_normal((outputs, inputs), np.float32).view(np.uint8)
    block, size = BLOCKS[format]
    return random.integers(0, 32, (outputs, inputs // block * size), np.uint8)  # halves of small exponents


def torch_candidate(inputs: int, outputs: int) -> Candidate:
    weights = [torch.randn(outputs, inputs) for _ in range(COLD_BYTES // (inputs * outputs * 4) + 1)]

    def calls(x: F32, y: F32) -> Sequence[Callable[[], object]]:
        return [partial(torch.nn.functional.linear, torch.from_numpy(x), weight) for weight in weights]

    return Candidate("torch f32", inputs * outputs * 4, "float32", calls, weights.clear)


def packed_candidates(
    native: ctypes.CDLL, format: WeightFormat, inputs: int, outputs: int
) -> list[Candidate]:
    """The format in f32 arithmetic, and with activations rounded to bfloat16 or 8 bits where that differs."""
    rows = rows_of(format, outputs, inputs)
    matrices = [PackedMatrix(native, format, rows, inputs) for _ in range(COLD_BYTES // rows.nbytes + 1)]
    scratch = matrices[0].scratch(max(ROWS))

    def calls(how: Mapping[str, Any], x: F32, y: F32) -> Sequence[Callable[[], object]]:
        return [matrix.call(x, y, scratch, **how) for matrix in matrices]

    def close() -> None:
        for matrix in matrices:
            matrix.close()
        matrices.clear()

    size, name = matrices[0].bytes, format.value
    found = [Candidate(name, size, "float32", partial(calls, {}), close)]
    if matrices[0].rounds_bf16:
        how = partial(calls, {"bf16": True})
        found.append(Candidate(f"{name} by bf16", size, "bfloat16", how, matrices.clear))
    if BLOCKS[format][0] > 1:
        how = partial(calls, {"int8": True})
        found.append(Candidate(f"{name} int8", size, "int8", how, matrices.clear))
    return found


def usec(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds a call, the calls taking turns."""
    start, done = time.thread_time(), 0
    while True:
        calls[done % len(calls)]()
        done += 1
        if (spent := time.thread_time() - start) > ROUND_S and done >= 3:
            return 1e6 * spent / done


def measure(
    candidates: Sequence[Candidate], inputs: int, outputs: int, row_counts: Sequence[int]
) -> dict[tuple[str, int], Sample]:
    """(name, m) -> microseconds of a call, of each round."""
    x = np.random.default_rng(1).standard_normal((max(row_counts), inputs), np.float32)
    y = np.empty((max(row_counts), outputs), np.float32)
    found: dict[tuple[str, int], list[float]] = {}
    for m in row_counts:
        prepared = [(candidate.name, candidate.calls(x[:m], y[:m])) for candidate in candidates]
        for round_number in range(ROUNDS + 1):  # the first warms up
            for name, calls in prepared:
                value = usec(calls)
                if round_number:
                    found.setdefault((name, m), []).append(value)
    return {key: Sample(tuple(values), "us") for key, values in found.items()}


def line(limit: Bounds, shape: tuple[int, int], candidate: Candidate, m: int, sample: Sample) -> list[str]:
    inputs, outputs = shape
    gflop_s = 2e-3 * inputs * outputs * m / sample.median
    gb_s = 1e-3 * candidate.bytes / sample.median
    return [
        f"{inputs} x {outputs}",
        candidate.name,
        str(m),
        f"{sample.median:.1f}",
        f"{gflop_s:.1f}",
        f"{gflop_s / peak.median:.0%}" if (peak := limit.gflop_s.get(candidate.arithmetic)) else "",
        f"{gb_s:.1f}",
        f"{gb_s / limit.read_gb_s.median:.0%}",
    ]


def main() -> None:
    native = library.native()
    if native is None:
        sys.stdout.write("no compiler here, nothing to measure\n")
        return
    torch.set_num_threads(1)
    with watch_others() as others:
        limit = bounds(native)
        values = {"gemm.read_gb_s": limit.read_gb_s}
        values |= {f"gemm.{name}_gflop_s": peak for name, peak in limit.gflop_s.items()}
        lines = [["inputs x outputs", "weights", "m", "us", "GFLOP/s", "of peak", "GB/s", "of read"]]
        for inputs, outputs in SHAPES:
            candidates = [torch_candidate(inputs, outputs)]
            for format, (block, _) in BLOCKS.items():
                if inputs % block == 0:
                    candidates += packed_candidates(native, format, inputs, outputs)
            row_counts = [m for m in ROWS if outputs < 10_000 or m <= ROWS_HEAD_MAX]
            found = measure(candidates, inputs, outputs, row_counts)
            for candidate in candidates:
                for m in row_counts:
                    sample = found[candidate.name, m]
                    key = candidate.name.replace(" ", "_")
                    values[f"gemm.{inputs}x{outputs}.{key}.m{m}_us"] = sample
                    lines.append(line(limit, (inputs, outputs), candidate, m, sample))
                candidate.close()
    isa = native.shoal_linear_isa().decode()
    peaks = ", ".join(f"{name} {peak}" for name, peak in limit.gflop_s.items())
    sys.stdout.write(f"{table(lines)}\nread {limit.read_gb_s}, peak {peaks}, {isa}, ")
    sys.stdout.write(f"others used {others.cores:.2f} cores\n")
    write("gemm", values, {"threads": 1, "isa": isa, "others_cores": round(others.cores, 2)})


if __name__ == "__main__":
    main()

"""How near the packed products come to what the machine can do: memory read at few rows, multiply-adds at many.

One thread. Each shape has as many copies of its matrix as it takes to fall out of the caches, used in turn, as the
layers of a model are; torch's float32 product runs in the same rounds. Medians over rounds.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bench.quiet import watch_others
from bench.results_file import Sample, table, write
from shard_worker.model.stage_weights import F32, U8, WeightFormat
from shard_worker.native import library
from shard_worker.native.linear import PackedMatrix

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))  # inputs, outputs: SmolLM2 135M's
ROWS = (1, 4, 8, 16, 48, 64, 512)
ROWS_HEAD = (1, 4, 8, 16, 64)
FORMATS = (
    WeightFormat.F32, WeightFormat.BF16, WeightFormat.F16, WeightFormat.Q8_0, WeightFormat.Q4_0,
    WeightFormat.Q4_1, WeightFormat.Q5_0, WeightFormat.Q4_K, WeightFormat.Q6_K,
)  # fmt: skip
BLOCK_BYTES = {  # inputs, bytes of a block in a file's row
    WeightFormat.F32: (1, 4), WeightFormat.BF16: (1, 2), WeightFormat.F16: (1, 2), WeightFormat.Q8_0: (32, 34),
    WeightFormat.Q4_0: (32, 18), WeightFormat.Q4_1: (32, 20), WeightFormat.Q5_0: (32, 22),
    WeightFormat.Q4_K: (256, 144), WeightFormat.Q6_K: (256, 210),
}  # fmt: skip
COLD_BYTES = 64 << 20  # of copies: twice a large shared cache
READ_BYTES = 256 << 20
ROUND_S = 0.02  # of one timing
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one thread."""

    read_gb_s: Sample
    gflop_s: Sample


def bounds(native: ctypes.CDLL) -> Bounds:
    native.shoal_bounds_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    native.shoal_bounds_multiply.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    native.shoal_bounds_read.restype = native.shoal_bounds_multiply.restype = ctypes.c_int64
    pool = native.shoal_pool_create(1)
    data, sums = np.ones(READ_BYTES // 4, np.float32), np.ones(64, np.float32)
    read, multiplied = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        count = native.shoal_bounds_read(pool, library.address(data), data.size, library.address(sums))
        read.append(4e-9 * count / (time.perf_counter() - start))
        sums[:] = 1e-3
        start = time.perf_counter()
        count = native.shoal_bounds_multiply(pool, 2_000_000, library.address(sums))
        multiplied.append(2e-9 * count / (time.perf_counter() - start))
    native.shoal_pool_destroy(pool)
    return Bounds(Sample(tuple(read), "GB/s"), Sample(tuple(multiplied), "GFLOP/s"))


def rows_of(format: WeightFormat, outputs: int, inputs: int) -> U8:
    """Bytes of a matrix of small numbers: of what numbers does not matter, that they are no NaN does."""
    random = np.random.default_rng(0)
    if format is WeightFormat.F32:
        return random.standard_normal((outputs, inputs), np.float32).view(np.uint8)
    block, size = BLOCK_BYTES[format]
    rows = random.integers(0, 32, (outputs, inputs // block * size), np.uint8)  # no half has a large exponent
    return rows


def usec(run: Callable[[int], object]) -> float:
    """Microseconds a call, of calls with ascending numbers over a round."""
    run(0)
    start, calls = time.perf_counter(), 0
    while True:
        run(calls)
        calls += 1
        if (spent := time.perf_counter() - start) > ROUND_S and calls >= 3:
            return 1e6 * spent / calls


def candidates(
    native: ctypes.CDLL, inputs: int, outputs: int, formats: tuple[WeightFormat, ...]
) -> Iterator[tuple[str, int, Callable[[F32, F32, int], object], Callable[[], None]]]:
    """(name, bytes of a matrix, run(x, y, number of the call), free)."""
    count = COLD_BYTES // (inputs * outputs * 4) + 1
    weights = [torch.randn(outputs, inputs) for _ in range(count)]

    def run_torch(x: F32, y: F32, i: int) -> object:
        return torch.nn.functional.linear(torch.from_numpy(x), weights[i % len(weights)])

    yield "torch f32", inputs * outputs * 4, run_torch, weights.clear
    for format in formats:
        if inputs % BLOCK_BYTES[format][0]:
            continue
        rows = rows_of(format, outputs, inputs)
        matrices = [
            PackedMatrix(native, format, rows, inputs) for _ in range(COLD_BYTES // rows.nbytes + 1)
        ]
        scratch = matrices[0].scratch(max(ROWS))

        def run(
            x: F32, y: F32, i: int, int8: bool = False, own: list[PackedMatrix] = matrices, room: U8 = scratch
        ) -> object:
            return own[i % len(own)].run(x, int8=int8, scratch=room, out=y)

        def run_int8(x: F32, y: F32, i: int, run: Callable[..., object] = run) -> object:
            return run(x, y, i, True)

        def free(own: list[PackedMatrix] = matrices) -> None:
            for matrix in own:
                matrix.close()
            own.clear()

        quantised = BLOCK_BYTES[format][0] > 1
        yield format.value, matrices[0].bytes, run, (lambda: None) if quantised else free
        if quantised:
            yield f"{format.value} int8", matrices[0].bytes, run_int8, free


def measure_shape(
    native: ctypes.CDLL, inputs: int, outputs: int, formats: tuple[WeightFormat, ...], rows: tuple[int, ...]
) -> dict[tuple[str, int], tuple[int, list[float]]]:
    """(name, m) -> bytes of the matrix, microseconds of each round."""
    found: dict[tuple[str, int], tuple[int, list[float]]] = {}
    x: NDArray[np.float32] = np.random.default_rng(1).standard_normal((max(rows), inputs), np.float32)
    y = np.empty((max(rows), outputs), np.float32)
    for name, size, run, free in candidates(native, inputs, outputs, formats):
        for m in rows:
            found[name, m] = size, [usec(lambda i, m=m: run(x[:m], y[:m], i)) for _ in range(ROUNDS)]  # type: ignore[misc]
        free()
    return found


def main(
    native: ctypes.CDLL | None = None,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    formats: tuple[WeightFormat, ...] = FORMATS,
    rows_measured: tuple[int, ...] = ROWS,
    keep: bool = True,
) -> None:
    native = native or library.native()
    if native is None:
        sys.stdout.write("no compiler here, nothing to measure\n")
        return
    torch.set_num_threads(1)
    with watch_others() as others:
        limit = bounds(native)
        values = {"gemm.read_gb_s": limit.read_gb_s, "gemm.peak_gflop_s": limit.gflop_s}
        lines = [["inputs x outputs", "weights", "m", "us", "GFLOP/s", "of peak", "GB/s", "of read"]]
        for inputs, outputs in shapes:
            rows = tuple(m for m in rows_measured if outputs < 10_000 or m in ROWS_HEAD)
            for (name, m), (size, usecs) in measure_shape(native, inputs, outputs, formats, rows).items():
                sample = Sample(tuple(usecs), "us")
                gflop_s = 2e-3 * inputs * outputs * m / sample.median
                gb_s = 1e-3 * size / sample.median
                values[f"gemm.{inputs}x{outputs}.{name.replace(' ', '_')}.m{m}_us"] = sample
                lines.append(
                    [
                        f"{inputs} x {outputs}", name, str(m), f"{sample.median:.1f}", f"{gflop_s:.1f}",
                        f"{gflop_s / limit.gflop_s.median:.0%}", f"{gb_s:.1f}", f"{gb_s / limit.read_gb_s.median:.0%}",
                    ]
                )  # fmt: skip
    sys.stdout.write(f"{table(lines)}\nread {limit.read_gb_s}, peak {limit.gflop_s}, ")
    sys.stdout.write(f"{native.shoal_linear_isa().decode()}, others used {others.cores:.2f} cores\n")
    if keep:
        notes = {"threads": 1, "isa": native.shoal_linear_isa().decode(), "others_cores": others.cores}
        write("gemm", values, notes)


if __name__ == "__main__":
    main()

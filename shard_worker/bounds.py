"""What this machine can do at most, measured: the bounds that a step's time is held against.

Memory read a second, from an array far larger than the caches, and products multiplied and added a second, by
arithmetic. The best of several passes counts: a bound is what nothing disturbed. Without the compiled code
numpy reads, with one thread, and there is no bound of products.
"""

import ctypes
import time
from collections.abc import Callable, Mapping
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial

import numpy as np

from shard_worker.native.library import address, native

READ_BYTES = 512 << 20
READ_PASSES = 5
MULTIPLY_ROUNDS = 4_000_000
MULTIPLY_PASSES = 3
_LANES = 8
_THREADS_MAX = 256


ARITHMETIC = {"float32": 0, "bfloat16": 1, "int8": 2}  # enum shoal_multiply


@dataclass(frozen=True, slots=True)
class Bounds:
    threads: int
    read_bytes_per_s: float
    flops_per_s: Mapping[str, float]  # by arithmetic, as far as instructions take it; an addition counts too

    def products_per_s(self, arithmetic: str) -> float | None:
        """Flops; None: not known. bfloat16 is multiplied as float32 where nothing else can."""
        found = self.flops_per_s.get(arithmetic)
        return self.flops_per_s.get("float32") if found is None and arithmetic == "bfloat16" else found


def measure(threads: int) -> Bounds:
    data = np.ones(READ_BYTES // 4, np.float32)
    library = native()
    if library is None:
        return Bounds(1, READ_BYTES / _best(READ_PASSES, lambda: data.sum()), {})
    read, multiply = functions(library)
    pool = library.shoal_pool_create(threads)
    assert pool, f"no pool of {threads} threads"
    try:
        sums = np.ones((_THREADS_MAX, _LANES), np.float32)
        done = int(read(pool, address(data), data.size, address(sums)))  # warm
        seconds = _best(READ_PASSES, lambda: read(pool, address(data), data.size, address(sums)))
        flops = {}
        for name, arithmetic in ARITHMETIC.items():
            sums[:] = 1.0
            products = int(multiply(pool, arithmetic, MULTIPLY_ROUNDS // 10, address(sums))) * 10
            if products:
                call = partial(multiply, pool, arithmetic, MULTIPLY_ROUNDS, address(sums))
                flops[name] = 2 * products / _best(MULTIPLY_PASSES, call)
    finally:
        library.shoal_pool_destroy(pool)
    return Bounds(threads, 4 * done / seconds, flops)


def functions(library: ctypes.CDLL) -> tuple[Callable[..., int], Callable[..., int]]:
    """Of `bounds.h`: read, multiply."""
    read, multiply = library.shoal_bounds_read, library.shoal_bounds_multiply
    read.restype = multiply.restype = c_int64
    read.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
    multiply.argtypes = [c_void_p, c_int, c_int64, c_void_p]
    return read, multiply


def _best(passes: int, what: Callable[[], object]) -> float:
    taken = []
    for _ in range(passes):
        begun = time.perf_counter()
        what()
        taken.append(time.perf_counter() - begun)
    return min(taken)

"""Rows of quantised blocks in compiled code: the bits that `formats` makes in numpy, several times faster."""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from shard_worker.model.stage_weights import U8, StoredMatrix, WeightFormat
from shard_worker.native.library import FORMATS, address, native_if_built

_ARGUMENTS: list[Any] = [c_int, c_void_p, c_int64, c_int, c_void_p, c_int]
GROUP = 32
_NOT_FINITE = 1


@cache
def compiled() -> ctypes.CDLL | None:
    """Looked for once: nothing is compiled for this alone."""
    return native_if_built()


def quantized_rows(
    library: ctypes.CDLL, matrix: StoredMatrix, format: WeightFormat, row_bytes: int, threads: int
) -> U8 | None:
    """[outputs, row_bytes]; None where compiled code makes no such rows.

    Raises ValueError on numbers that integers can't stand for.
    """
    make = library.shoal_quantise
    make.restype, make.argtypes = c_int, _ARGUMENTS
    values = np.ascontiguousarray(matrix.rows)
    out = np.empty((matrix.outputs, row_bytes), np.uint8)
    groups = matrix.outputs * (matrix.inputs // GROUP)
    result = make(FORMATS[matrix.format], address(values), groups, FORMATS[format], address(out), threads)
    if result == _NOT_FINITE:
        raise ValueError("not finite, or too large")
    return out if result == 0 else None

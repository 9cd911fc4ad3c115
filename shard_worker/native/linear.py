"""One packed matrix from Python, for tests and measurements: a stage calls `linear.h` within its own step."""

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shard_worker.model.stage_weights import F32, U8, WeightFormat
from shard_worker.native.library import FORMATS, address

_RUN = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int, c_int, c_void_p]
_SIGNATURES = {
    "shoal_linear_run": (None, _RUN),
    "shoal_linear_run_bf16": (None, _RUN),
    "shoal_linear_run_int8": (None, _RUN),
    "shoal_linear_run_pairs": (None, _RUN),
    "shoal_linear_pair_stride": (c_int64, [c_int64]),
    "shoal_linear_rounds_bf16": (c_int, [c_void_p]),
    "shoal_linear_dequantize_row": (None, [c_void_p, c_int64, c_void_p]),
}


class PackedMatrix:
    """y = x W^T. Raises ValueError where shoal_linear_create answers NULL. `close` frees it."""

    def __init__(self, library: ctypes.CDLL, format: WeightFormat, rows: U8, inputs: int) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self.outputs, self.inputs = len(rows), inputs
        rows = np.ascontiguousarray(rows)
        self.handle = library.shoal_linear_create(
            FORMATS[format], address(rows), self.outputs, inputs, rows.shape[1]
        )
        if not self.handle:
            raise ValueError(
                f"no {format.name} matrix of {self.outputs} x {inputs} in {rows.shape[1]} bytes a row"
            )

    def close(self) -> None:
        self._library.shoal_linear_destroy(self.handle)

    @property
    def bytes(self) -> int:
        return int(self._library.shoal_linear_bytes(self.handle))

    @property
    def rounds_bf16(self) -> bool:
        """Whether `bf16` does: else it is exact."""
        return bool(self._library.shoal_linear_rounds_bf16(self.handle))

    def scratch(self, rows_max: int) -> U8:
        return np.empty(self._library.shoal_linear_scratch_bytes(self.handle, rows_max), np.uint8)

    def run(
        self,
        x: F32,
        *,
        bias: F32 | None = None,
        int8: bool = False,
        bf16: bool = False,
        parts: int = 1,
        scratch: U8 | None = None,
        out: F32 | None = None,
    ) -> F32:
        """x [m, inputs] -> [m, outputs], the parts one after the other. x is rounded to `int8` or `bf16`."""
        y = np.empty((len(x), self.outputs), np.float32) if out is None else out
        room = self.scratch(len(x)) if scratch is None else scratch
        for part in range(parts):
            self.call(x, y, room, bias=bias, int8=int8, bf16=bf16, part=part, parts=parts)()
        return y

    def run_pairs(self, x: NDArray[np.uint16], *, bias: F32 | None = None, parts: int = 1) -> F32:
        """Of bits of bfloat16, [m, inputs], the parts one after the other; only where `rounds_bf16`."""
        words = np.full((len(x), 2 * self._library.shoal_linear_pair_stride(self.inputs)), 0xFFFF, np.uint16)
        words[:, : -(-self.inputs // 4) * 4] = 0
        words[:, : self.inputs] = x
        y, room = np.empty((len(x), self.outputs), np.float32), self.scratch(len(x))
        for part in range(parts):
            self._library.shoal_linear_run_pairs(
                self.handle, address(words), words.shape[1] // 2, len(x), address(y),
                self.outputs, address(bias), part, parts, address(room),
            )  # fmt: skip
        return y

    def call(
        self,
        x: F32,
        y: F32,
        scratch: U8,
        *,
        bias: F32 | None = None,
        int8: bool = False,
        bf16: bool = False,
        part: int = 0,
        parts: int = 1,
    ) -> Callable[[], None]:
        """A part of y = x W^T for repeated calls; the caller keeps the arrays alive."""
        name = "shoal_linear_run" + ("_int8" if int8 else "_bf16" if bf16 else "")
        return partial(
            getattr(self._library, name), self.handle, address(x), self.inputs, len(x), address(y),
            self.outputs, address(bias), part, parts, address(scratch),
        )  # fmt: skip

    def row(self, index: int) -> NDArray[np.float32]:
        out = np.empty(self.inputs, np.float32)
        self._library.shoal_linear_dequantize_row(self.handle, index, address(out))
        return out

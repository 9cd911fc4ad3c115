"""Reads safetensors files (github.com/huggingface/safetensors): a JSON header, then tensors end to end.

Memory-mapped, so that a stage reads its own rows only. Every length is checked before it is used; a file
that is cut off, damaged or says two things at once is `LoadFailed`. Nothing is ever unpickled.
"""

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shard_worker.executor import LoadFailed
from shard_worker.model.stage_weights import U8

HEADER_BYTES_MAX = 100_000_000  # as the format's own library has it
DIMS_MAX = 8
LENGTH = struct.Struct("<Q")
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    dtype: str  # as the format names it
    shape: tuple[int, ...]
    offset: int  # in the file
    num_bytes: int


class SafetensorsFile:
    """`tensors`: what lies where. The file stays mapped."""

    def __init__(self, path: Path) -> None:
        """Raises LoadFailed."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise LoadFailed(f"{path}: can't be read: {error}") from None
        self.tensors = self._placed(self._read_header())

    def let_go(self) -> None:
        """Of pages: they are read again when they are looked at."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def bytes_of(self, name: str) -> U8:
        """Flat, a view of the file where numbers lie as processors read them, at multiples of their size."""
        info = self.tensors[name]
        view = np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)
        return view if info.offset % ITEM_BYTES[info.dtype] == 0 else view.copy()

    def _fail(self, why: str) -> LoadFailed:
        return LoadFailed(f"{self.path}: not a whole safetensors file: {why}")

    def _read_header(self) -> dict[str, object]:
        size = len(self._map)
        if size < LENGTH.size:
            raise self._fail(f"{size} bytes")
        length = LENGTH.unpack_from(self._map)[0]
        if length > min(HEADER_BYTES_MAX, size - LENGTH.size):
            raise self._fail(f"a header of {length} bytes in a file of {size}")
        self._data_start = LENGTH.size + length
        try:
            header = json.loads(self._map[LENGTH.size : self._data_start], object_pairs_hook=_no_twins)
        except (ValueError, RecursionError) as error:
            raise self._fail(f"its header can't be read: {error}") from None
        if not isinstance(header, dict):
            raise self._fail("its header is not a JSON object")
        header.pop("__metadata__", None)
        return header

    def _placed(self, header: dict[str, object]) -> dict[str, TensorInfo]:
        """Tensors follow each other without gap or overlap, from the header to the file's end."""
        infos = {name: self._info(name, entry) for name, entry in header.items()}
        end = self._data_start
        for name, info in sorted(infos.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if info.offset != end:
                raise self._fail(f"{name} begins at byte {info.offset}, what is before it ends at {end}")
            end += info.num_bytes
        if end != len(self._map):
            raise self._fail(f"its tensors end at byte {end} of {len(self._map)}")
        return infos

    def _info(self, name: str, entry: object) -> TensorInfo:
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
                pass
            case _:
                raise self._fail(f"{name} is not described by dtype, shape and data_offsets")
        if dtype not in ITEM_BYTES:
            raise LoadFailed(f"{self.path}: {name} is stored as {dtype[:40]}, which is not known")
        sizes = [size for size in shape if type(size) is int and 0 <= size <= len(self._map)]
        if len(sizes) != len(shape) or len(shape) > DIMS_MAX:
            raise self._fail(f"{name} has an impossible shape")
        if not 0 <= start <= stop or stop - start != math.prod(sizes) * ITEM_BYTES[dtype]:
            raise self._fail(f"{name} is {stop - start} bytes, not what its shape {sizes} says")
        return TensorInfo(dtype, tuple(sizes), self._data_start + start, stop - start)


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found

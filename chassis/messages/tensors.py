"""Pure. Tensors of the Open Inference Protocol: their elements as values, raw or in typed fields.

In raw form numbers are little-endian, and each element of BYTES stands behind its length in four bytes.
Values are bool, int, float and bytes.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from chassis.messages import BadMessage, check

ELEMENTS_MAX = 1 << 20
DIMS_MAX = 8
Value = bool | int | float | bytes

_FORMATS = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
DATATYPES = (*_FORMATS, "BYTES")


@dataclass(frozen=True, slots=True)
class Tensor:
    """`values` in row-major order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Value, ...]


def count_of(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many elements a tensor has. Raises BadMessage."""
    check(
        datatype in DATATYPES,
        f"input {name[:100]!r}: datatype {datatype[:20]!r}; one of {', '.join(DATATYPES)}",
    )
    check(len(shape) <= DIMS_MAX, f"input {name[:100]!r}: {len(shape)} dimensions; at most {DIMS_MAX}")
    check(
        all(0 <= n <= ELEMENTS_MAX for n in shape),
        f"input {name[:100]!r}: shape {list(shape)}: 0 to {ELEMENTS_MAX}",
    )
    count = prod(shape)
    check(count <= ELEMENTS_MAX, f"input {name[:100]!r}: {count} elements; at most {ELEMENTS_MAX}")
    return count


def from_raw(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Tensor:
    """Raises BadMessage."""
    count = count_of(name, datatype, shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, tuple(shape), tuple(_texts(name, count, raw)))
    layout = struct.Struct(f"<{count}{_FORMATS[datatype]}")
    check(
        len(raw) == layout.size,
        f"input {name[:100]!r}: {len(raw)} bytes; {layout.size} for shape {list(shape)} of {datatype}",
    )
    return Tensor(name, datatype, tuple(shape), layout.unpack(raw))


def _texts(name: str, count: int, raw: bytes) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    for _ in range(count):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if at + 4 > len(raw) or end > len(raw):
            raise BadMessage(
                f"input {name[:100]!r}: element {len(found)} of {count} ends beyond its {len(raw)} bytes"
            )
        found.append(raw[at + 4 : end])
        at = end
    check(at == len(raw), f"input {name[:100]!r}: {len(raw) - at} bytes behind its {count} elements")
    return found


def to_raw(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        return b"".join(len(v).to_bytes(4, "little") + v for v in tensor.values if isinstance(v, bytes))
    return struct.pack(f"<{len(tensor.values)}{_FORMATS[tensor.datatype]}", *tensor.values)

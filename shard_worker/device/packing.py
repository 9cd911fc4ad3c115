"""Pure. All columns of a step in one buffer, so that one copy takes them to the device.

Fields lie one after another, each from a multiple of 16 bytes on. What depends on the number of sampling rows
comes last: places of the others are fixed by the step's shape, and a recorded step finds them again.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shard_worker.executor import I32, U8, StepInputs
from shard_worker.uniforms import uniforms

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: int
    rows: int
    width: int  # blocks of a table; 0: tables stay behind
    decodes: int
    samples: int


@dataclass(frozen=True, slots=True)
class Field:
    dtype: str  # numpy's name
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    kv_slots: Field  # [T] int64
    token_ids: Field  # [T] int32
    positions: Field  # [T] int32
    row_starts: Field  # [n] int32
    context_lens: Field  # [n] int32
    decode_order: Field  # [decodes] int32: rows of one token
    block_tables: Field  # [n, width] int32
    uniforms: Field  # [k] float64, from here on of sampling rows
    sample_tokens: Field  # [k] int64: places among the tokens
    temperature: Field  # [k] float32
    top_p: Field  # [k] float32
    top_k: Field  # [k] int32

    @property
    def num_bytes(self) -> int:
        return self.top_k.end


@lru_cache(256)
def layout_of(sizes: Sizes) -> Layout:
    fields: list[Field] = []
    for dtype, shape in (
        ("int64", (sizes.tokens,)),
        ("int32", (sizes.tokens,)),
        ("int32", (sizes.tokens,)),
        ("int32", (sizes.rows,)),
        ("int32", (sizes.rows,)),
        ("int32", (sizes.decodes,)),
        ("int32", (sizes.rows, sizes.width)),
        ("float64", (sizes.samples,)),
        ("int64", (sizes.samples,)),
        ("float32", (sizes.samples,)),
        ("float32", (sizes.samples,)),
        ("int32", (sizes.samples,)),
    ):
        offset = -(-fields[-1].end // ALIGNMENT) * ALIGNMENT if fields else 0
        fields.append(Field(dtype, shape, offset))
    return Layout(*fields)


def sizes_of(inputs: StepInputs, num_decodes: int, width: int, samples: bool) -> Sizes:
    """`samples`: whether this stage does."""
    num_samples = len(inputs.sample_rows) if samples else 0
    return Sizes(len(inputs.token_ids), len(inputs.context_lens), width, num_decodes, num_samples)


def pack(inputs: StepInputs, order: I32, sizes: Sizes, into: U8) -> Layout:
    """Fills in `into` from its beginning. `order`: that of `decode_order`."""
    layout = layout_of(sizes)
    assert layout.num_bytes <= len(into) and len(order) == sizes.decodes
    _put(into, layout.kv_slots, inputs.kv_slots)
    _put(into, layout.token_ids, inputs.token_ids)
    _put(into, layout.positions, inputs.positions)
    _put(into, layout.row_starts, inputs.row_offsets[:-1])
    _put(into, layout.context_lens, inputs.context_lens)
    _put(into, layout.decode_order, order)
    if sizes.width:
        tables = inputs.block_tables[:, : sizes.width]
        field_of(into, layout.block_tables)[:, : tables.shape[1]] = tables
    if sizes.samples:
        _put(into, layout.uniforms, uniforms(inputs.seeds, inputs.output_index))
        ends = inputs.row_offsets[inputs.sample_rows + 1]
        _put(into, layout.sample_tokens, ends.astype(np.int64) - 1)
        _put(into, layout.temperature, inputs.temperature)
        _put(into, layout.top_p, inputs.top_p)
        _put(into, layout.top_k, inputs.top_k)
    return layout


def field_of(buffer: U8, field: Field) -> NDArray[np.generic]:
    """The field of a packed buffer, not copied."""
    return buffer[field.offset : field.end].view(field.dtype).reshape(field.shape)


def _put(into: U8, field: Field, values: NDArray[np.generic]) -> None:
    field_of(into, field)[:] = values

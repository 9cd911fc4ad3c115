"""Pure. What a step reads of paged KV, as the columns and plans that kernels on a device want.

Nothing here knows a device: columns are numpy, a plan is sizes and places. A step of decodes alone may be
padded to a fixed number of rows and to a fixed width of tables, so that it can be recorded once and replayed:
a padding row is a sequence of one token in a scrap block that no sequence owns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shard_worker.executor import I32, StepInputs

Number = TypeVar("Number", bound=np.generic)
PADDING_BLOCKS = 4  # decodes share a call while the shortest is at most this and half of itself shorter


@dataclass(frozen=True, slots=True)
class PageColumns:
    """Rows' pages one after another (compressed sparse rows), as FlashInfer takes them."""

    query_offsets: I32  # [n + 1]: tokens of row i are [query_offsets[i], query_offsets[i + 1])
    page_offsets: I32  # [n + 1]: the same of `pages`
    pages: I32  # block ids
    last_page_lens: I32  # [n]: tokens in each row's last page, 1 to block size
    context_lens: I32  # [n]


def page_columns(inputs: StepInputs, block_size_tokens: int) -> PageColumns:
    blocks = blocks_of(inputs.context_lens, block_size_tokens)
    offsets = np.zeros(len(blocks) + 1, np.int32)
    np.cumsum(blocks, out=offsets[1:])
    widest = int(blocks.max())
    inside = np.arange(widest) < blocks[:, None]
    return PageColumns(
        query_offsets=inputs.row_offsets,
        page_offsets=offsets,
        pages=inputs.block_tables[:, :widest][inside],
        last_page_lens=inputs.context_lens - (blocks - 1) * np.int32(block_size_tokens),
        context_lens=inputs.context_lens,
    )


def blocks_of(context_lens: I32, block_size_tokens: int) -> I32:
    return -(-context_lens // np.int32(block_size_tokens))


def widest_of(inputs: StepInputs, block_size_tokens: int) -> int:
    """Blocks of the longest row."""
    return int(blocks_of(inputs.context_lens, block_size_tokens).max())


def only_decodes(inputs: StepInputs) -> bool:
    """Whether every row has one token: then token i is row i."""
    return len(inputs.token_ids) == len(inputs.context_lens)


# ---- gathering: for attention that reads copies of pages -----------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [first, end) of the decode order, whose visible blocks are at most `width`."""

    first: int
    end: int
    width: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of several tokens [first, end) of the step; it sees its blocks [first_block, end_block)."""

    row: int
    first: int
    end: int
    first_block: int
    end_block: int
    context_len: int


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """What a step reads under one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def decode_order(inputs: StepInputs) -> I32:
    """Rows of one token, the shortest contexts first: neighbours can share a call."""
    rows = np.flatnonzero(np.diff(inputs.row_offsets) == 1)
    return rows[np.argsort(inputs.context_lens[rows], kind="stable")].astype(np.int32)


def gather_plan(
    inputs: StepInputs, order: I32, block_size_tokens: int, window: int | None = None
) -> GatherPlan:
    """`order`: that of `decode_order`, the same for every window."""
    ends = blocks_of(inputs.context_lens, block_size_tokens).astype(np.int64)
    starts = np.zeros(len(ends), np.int64)
    if window is not None:
        first_positions = inputs.context_lens - np.diff(inputs.row_offsets)
        starts = np.maximum(first_positions.astype(np.int64) - window + 1, 0) // block_size_tokens
    chunks = tuple(
        Chunk(
            row,
            int(inputs.row_offsets[row]),
            int(inputs.row_offsets[row + 1]),
            int(starts[row]),
            int(ends[row]),
            int(inputs.context_lens[row]),
        )
        for row in np.flatnonzero(np.diff(inputs.row_offsets) > 1).tolist()
    )
    return GatherPlan(tuple(_groups((ends - starts)[order].tolist())), chunks)


def _groups(blocks: Sequence[int]) -> list[DecodeGroup]:
    """Neighbours together while padding stays small, so that one long row does not widen all the others."""
    groups: list[DecodeGroup] = []
    first, low, high = 0, 0, 0
    for i, count in enumerate(blocks):
        if i > first and max(high, count) > min(low, count) * 3 // 2 + PADDING_BLOCKS:
            groups.append(DecodeGroup(first, i, high))
            first = i
        low = count if i == first else min(low, count)
        high = count if i == first else max(high, count)
    if blocks:
        groups.append(DecodeGroup(first, len(blocks), high))
    return groups


# ---- padding: for steps that are recorded ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of decodes alone, padded. `width`: blocks of a table; 0: tables aren't looked at."""

    rows: int
    width: int


def decode_shape(
    inputs: StepInputs, block_size_tokens: int, rows: Sequence[int], widths: Sequence[int]
) -> StepShape | None:
    """The smallest of the ascending sizes that the step fits into; None: it fits into none, or has chunks.

    `widths`: empty where attention takes tables of any width.
    """
    if not only_decodes(inputs):
        return None
    fitting = [size for size in rows if size >= len(inputs.context_lens)]
    if not fitting:
        return None
    if not widths:
        return StepShape(fitting[0], 0)
    widest = widest_of(inputs, block_size_tokens)
    wide = [size for size in widths if size >= widest]
    return StepShape(fitting[0], wide[0]) if wide else None


def padded(inputs: StepInputs, shape: StepShape, block_size_tokens: int, scrap_block: int) -> StepInputs:
    """The same step with so many rows; what is added reads and writes the scrap block. Sampling stays."""
    assert only_decodes(inputs)
    count, more = len(inputs.context_lens), shape.rows - len(inputs.context_lens)
    assert more >= 0
    width = shape.width or widest_of(inputs, block_size_tokens)
    tables = np.full((shape.rows, width), scrap_block, np.int32)
    kept = min(width, inputs.block_tables.shape[1])
    tables[:count, :kept] = inputs.block_tables[:, :kept]
    return replace(
        inputs,
        token_ids=_filled(inputs.token_ids, more, 0),
        positions=_filled(inputs.positions, more, 0),
        row_offsets=np.arange(shape.rows + 1, dtype=np.int32),
        context_lens=_filled(inputs.context_lens, more, 1),
        kv_slots=_filled(inputs.kv_slots, more, scrap_block * block_size_tokens),
        block_tables=tables,
    )


def scrap_step(rows: int, block_size_tokens: int, scrap_block: int) -> StepInputs:
    """Decodes of padding alone: what is recorded with, before any sequence is there. Nothing samples."""
    none = np.empty(0)
    return StepInputs(
        token_ids=np.zeros(rows, np.uint32),
        positions=np.zeros(rows, np.int32),
        row_offsets=np.arange(rows + 1, dtype=np.int32),
        context_lens=np.ones(rows, np.int32),
        kv_slots=np.full(rows, scrap_block * block_size_tokens, np.int64),
        block_tables=np.full((rows, 1), scrap_block, np.int32),
        sample_rows=none.astype(np.int32),
        temperature=none.astype(np.float32),
        top_k=none.astype(np.int32),
        top_p=none.astype(np.float32),
        seeds=none.astype(np.uint64),
        output_index=none.astype(np.int32),
    )


def shape_plan(shape: StepShape, block_size_tokens: int, window: int | None = None) -> GatherPlan:
    """Of any step that was padded to this shape."""
    width = shape.width
    if window is not None:
        width = min(width, (window - 2) // block_size_tokens + 2)  # a window may begin inside a block
    return GatherPlan((DecodeGroup(0, shape.rows, width),), ())


def _filled(column: NDArray[Number], more: int, value: int) -> NDArray[Number]:
    return np.concatenate((column, np.full(more, value, column.dtype)))


def sizes_up_to(largest: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of the ascending sizes that make sense below a limit: the last one covers it."""
    below = [size for size in sizes if size < largest]
    above = [size for size in sizes if size >= largest]
    return (*below, *above[:1])

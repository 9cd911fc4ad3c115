"""Attention for the CPU in plain torch: decodes of like length in one call, prefill chunks row by row.

Query heads that share a KV head are rows of one product: keys and values are never expanded. Blocks are
copied together only where a table is scattered; a row whose blocks follow each other is read in place.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from shard_worker.attention.interface import LayerKv
from shard_worker.executor import StepInputs

PADDING_BLOCKS = 4  # decodes share a call while the shortest is at most this and half of itself shorter


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Rows of one token whose contexts are about equally long."""

    tokens: torch.Tensor  # [n] their places among the step's tokens
    pages: torch.Tensor | slice  # block ids, n * width of them
    width: int  # blocks per row
    beyond: torch.Tensor | None  # [n, 1, 1, width * block_size] bias: -inf past a row's end


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens."""

    first: int
    end: int
    pages: torch.Tensor | slice
    context: int
    visible: torch.Tensor | None  # [tokens, context]; None: the chunk is the whole context


class CpuAttention:
    def step(self, inputs: StepInputs, block_size_tokens: int) -> "CpuStep":
        return CpuStep(inputs, block_size_tokens)


class CpuStep:
    def __init__(self, inputs: StepInputs, block_size_tokens: int) -> None:
        self._write_slots = torch.from_numpy(inputs.kv_slots)
        lens = np.diff(inputs.row_offsets)
        self._chunks = [_chunk(inputs, row, block_size_tokens) for row in np.flatnonzero(lens > 1).tolist()]
        decodes = np.flatnonzero(lens == 1)
        self._decodes = [
            _decodes(inputs, rows, block_size_tokens)
            for rows in _by_length(decodes, inputs.context_lens, block_size_tokens)
        ]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        num_tokens, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        write = self._write_slots
        kv.keys.view(kv_heads, -1, head_dim).index_copy_(1, write, k.transpose(0, 1))
        # A value that overflowed would reach the block's next owner through 0 * inf in masked places.
        v = v.nan_to_num()
        kv.values.view(kv_heads, -1, head_dim).index_copy_(1, write, v.transpose(0, 1))
        out = q.new_empty(num_tokens, heads, head_dim)
        for chunk in self._chunks:
            keys = _pages(kv.keys, chunk.pages)[:, : chunk.context]
            values = _pages(kv.values, chunk.pages)[:, : chunk.context]
            mixed = F.scaled_dot_product_attention(
                q[chunk.first : chunk.end].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=chunk.visible,
                is_causal=chunk.visible is None,
                enable_gqa=True,
            )
            out[chunk.first : chunk.end] = mixed[0].transpose(0, 1)
        for group in self._decodes:
            n = len(group.tokens)
            shape = (kv_heads, n, -1, head_dim)
            keys = _pages(kv.keys, group.pages).view(shape).transpose(0, 1)
            values = _pages(kv.values, group.pages).view(shape).transpose(0, 1)
            queries = q.index_select(0, group.tokens).view(n, kv_heads, heads // kv_heads, head_dim)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.beyond)
            out.index_copy_(0, group.tokens, mixed.reshape(n, heads, head_dim))
        return out.view(num_tokens, heads * head_dim)


def _pages(cache: torch.Tensor, pages: torch.Tensor | slice) -> torch.Tensor:
    """[kv_heads, slots of those pages, head_dim]; a view when they follow each other."""
    chosen = cache[:, pages] if isinstance(pages, slice) else cache.index_select(1, pages)
    return chosen.view(cache.shape[0], -1, cache.shape[3])


def _as_pages(blocks: NDArray[np.int32]) -> torch.Tensor | slice:
    flat = blocks.reshape(-1)
    if len(flat) == 1 or bool((np.diff(flat) == 1).all()):
        return slice(int(flat[0]), int(flat[-1]) + 1)
    return torch.from_numpy(flat.astype(np.int64))


def _chunk(inputs: StepInputs, row: int, block_size_tokens: int) -> _Chunk:
    first, end = int(inputs.row_offsets[row]), int(inputs.row_offsets[row + 1])
    context = int(inputs.context_lens[row])
    num_blocks = -(-context // block_size_tokens)
    visible = None
    if context > end - first:
        visible = torch.arange(context) <= torch.from_numpy(inputs.positions[first:end])[:, None]
    return _Chunk(first, end, _as_pages(inputs.block_tables[row, :num_blocks]), context, visible)


def _by_length(
    rows: NDArray[np.int64], context_lens: NDArray[np.int32], block_size_tokens: int
) -> list[NDArray[np.int64]]:
    """Groups in which padding stays small, so that one long row does not widen all the others."""
    if not len(rows):
        return []
    blocks = -(-context_lens[rows] // block_size_tokens)
    order = np.argsort(blocks, kind="stable")
    rows, blocks = rows[order], blocks[order]
    groups, start = [], 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or blocks[i] > blocks[start] + blocks[start] // 2 + PADDING_BLOCKS:
            groups.append(rows[start:i])
            start = i
    return groups


def _decodes(inputs: StepInputs, rows: NDArray[np.int64], block_size_tokens: int) -> _Decodes:
    contexts = inputs.context_lens[rows]
    blocks = -(-contexts // block_size_tokens)
    width = int(blocks.max())
    # Past its length a row reads its own first block again: any block does, for its scores are masked.
    inside = np.arange(width) < blocks[:, None]
    tables = inputs.block_tables[rows, :width]
    tables = np.where(inside, tables, tables[:, :1])
    beyond = None
    if (contexts < width * block_size_tokens).any():
        past = np.arange(width * block_size_tokens) >= contexts[:, None]
        beyond = torch.from_numpy(np.where(past, np.float32(-np.inf), np.float32(0)))[:, None, None]
    return _Decodes(
        tokens=torch.from_numpy(inputs.row_offsets[rows].astype(np.int64)),
        pages=_as_pages(tables),
        width=width,
        beyond=beyond,
    )

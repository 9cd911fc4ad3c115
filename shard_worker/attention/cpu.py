"""Attention for the CPU in plain torch: decodes of like length in one call, prefill chunks row by row.

Query heads that share a KV head are rows of one product: keys and values are never expanded. Blocks are
copied together only where a table is scattered; a row whose blocks follow each other is read in place.
Blocks that lie wholly before a row's window are not read.
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
    hidden: (
        torch.Tensor | None
    )  # [n, 1, 1, width * block_size] bias: -inf past a row's end, before its window


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens."""

    first: int
    end: int
    pages: torch.Tensor | slice
    context: int  # tokens in those pages
    visible: torch.Tensor | None  # [tokens, context]; None: the chunk is the whole context


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a step reads under one window."""

    chunks: list[_Chunk]
    decodes: list[_Decodes]


class CpuAttention:
    def step(self, inputs: StepInputs, block_size_tokens: int) -> "CpuStep":
        return CpuStep(inputs, block_size_tokens)


class CpuStep:
    def __init__(self, inputs: StepInputs, block_size_tokens: int) -> None:
        self._inputs, self._block_size = inputs, block_size_tokens
        self._write_slots = torch.from_numpy(inputs.kv_slots)
        self._plans: dict[int | None, _Plan] = {}  # a model has one window or two

    def _plan(self, window: int | None) -> _Plan:
        if window not in self._plans:
            self._plans[window] = _planned(self._inputs, self._block_size, window)
        return self._plans[window]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKv,
        *,
        scale: float,
        softcap: float = 0.0,
        window: int | None = None,
    ) -> torch.Tensor:
        num_tokens, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        write = self._write_slots
        kv.keys.view(kv_heads, -1, head_dim).index_copy_(1, write, k.transpose(0, 1).to(kv.keys.dtype))
        # A value that overflowed would reach the block's next owner through 0 * inf in masked places.
        v = v.nan_to_num().to(kv.values.dtype)
        kv.values.view(kv_heads, -1, head_dim).index_copy_(1, write, v.transpose(0, 1))
        out = q.new_empty(num_tokens, heads, head_dim)
        plan = self._plan(window)
        for chunk in plan.chunks:
            keys = _pages(kv.keys, chunk.pages)[:, : chunk.context].to(q.dtype)
            values = _pages(kv.values, chunk.pages)[:, : chunk.context].to(q.dtype)
            queries = q[chunk.first : chunk.end].transpose(0, 1)
            mixed = _mixed(queries[None], keys[None], values[None], chunk.visible, scale, softcap)
            out[chunk.first : chunk.end] = mixed[0].transpose(0, 1)
        for group in plan.decodes:
            n = len(group.tokens)
            shape = (kv_heads, n, -1, head_dim)
            keys = _pages(kv.keys, group.pages).view(shape).transpose(0, 1).to(q.dtype)
            values = _pages(kv.values, group.pages).view(shape).transpose(0, 1).to(q.dtype)
            queries = q.index_select(0, group.tokens).view(n, kv_heads, heads // kv_heads, head_dim)
            mixed = _mixed_decodes(queries, keys, values, group.hidden, scale, softcap)
            out.index_copy_(0, group.tokens, mixed.reshape(n, heads, head_dim))
        return out.view(num_tokens, heads * head_dim)


def _mixed(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """[1, heads, tokens, head_dim] over [1, kv_heads, context, head_dim]; no `visible`: causal."""
    if not softcap:
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, is_causal=visible is None, enable_gqa=True, scale=scale
        )
    heads, num_tokens, head_dim = q.shape[1:]
    kv_heads = keys.shape[1]
    if visible is None:
        visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    hidden = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    grouped = q.reshape(1, kv_heads, -1, head_dim)  # a group's heads one after another
    mixed = _capped(grouped, keys, values, hidden.repeat(heads // kv_heads, 1), scale, softcap)
    return mixed.view(1, heads, num_tokens, head_dim)


def _mixed_decodes(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """[n, kv_heads, heads of a group, head_dim] over [n, kv_heads, context, head_dim]."""
    if hidden is not None:
        hidden = hidden.to(q.dtype)
    if not softcap:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=hidden, scale=scale)
    return _capped(q, keys, values, hidden, scale, softcap)


def _capped(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    scores = torch.tanh(q @ keys.transpose(-1, -2) * (scale / softcap)) * softcap
    if hidden is not None:
        scores = scores + hidden
    return scores.softmax(dim=-1) @ values


def _pages(cache: torch.Tensor, pages: torch.Tensor | slice) -> torch.Tensor:
    """[kv_heads, slots of those pages, head_dim]; a view when they follow each other."""
    chosen = cache[:, pages] if isinstance(pages, slice) else cache.index_select(1, pages)
    return chosen.view(cache.shape[0], -1, cache.shape[3])


def _as_pages(blocks: NDArray[np.int32]) -> torch.Tensor | slice:
    flat = blocks.reshape(-1)
    if len(flat) == 1 or bool((np.diff(flat) == 1).all()):
        return slice(int(flat[0]), int(flat[-1]) + 1)
    return torch.from_numpy(flat.astype(np.int64))


def _planned(inputs: StepInputs, block_size_tokens: int, window: int | None) -> _Plan:
    lens = np.diff(inputs.row_offsets)
    starts = np.zeros(len(lens), np.int64)  # the first block that a row's first token sees
    if window is not None:
        first_positions = inputs.context_lens - lens
        starts = np.maximum(first_positions - window + 1, 0) // block_size_tokens
    chunks = [
        _chunk(inputs, row, int(starts[row]), block_size_tokens, window)
        for row in np.flatnonzero(lens > 1).tolist()
    ]
    rows = np.flatnonzero(lens == 1)
    blocks = -(-inputs.context_lens[rows] // block_size_tokens) - starts[rows]
    decodes = [
        _decodes(inputs, rows[group], starts[rows[group]], block_size_tokens, window)
        for group in _by_length(blocks)
    ]
    return _Plan(chunks, decodes)


def _chunk(inputs: StepInputs, row: int, start: int, block_size_tokens: int, window: int | None) -> _Chunk:
    first, end = int(inputs.row_offsets[row]), int(inputs.row_offsets[row + 1])
    total = int(inputs.context_lens[row])
    num_blocks = -(-total // block_size_tokens)
    visible = None
    if total > end - first or (window is not None and window < total):
        at = torch.arange(start * block_size_tokens, total)
        positions = torch.from_numpy(inputs.positions[first:end])[:, None]
        visible = at <= positions
        if window is not None:
            visible &= at > positions - window
    pages = _as_pages(inputs.block_tables[row, start:num_blocks])
    return _Chunk(first, end, pages, total - start * block_size_tokens, visible)


def _by_length(blocks: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Groups in which padding stays small, so that one long row does not widen all the others."""
    if not len(blocks):
        return []
    order = np.argsort(blocks, kind="stable")
    blocks = blocks[order]
    groups, start = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or blocks[i] > blocks[start] + blocks[start] // 2 + PADDING_BLOCKS:
            groups.append(order[start:i])
            start = i
    return groups


def _decodes(
    inputs: StepInputs,
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    block_size_tokens: int,
    window: int | None,
) -> _Decodes:
    """`starts`: the block at which each row's reading begins."""
    contexts = inputs.context_lens[rows]
    blocks = -(-contexts // block_size_tokens) - starts
    width = int(blocks.max())
    # Past its length a row reads its own first block again: any block does, for its scores are masked.
    inside = np.arange(width) < blocks[:, None]
    columns = np.where(inside, starts[:, None] + np.arange(width), starts[:, None])
    tables = inputs.block_tables[rows[:, None], columns]
    at = starts[:, None] * block_size_tokens + np.arange(width * block_size_tokens)
    unseen = at >= contexts[:, None]
    if window is not None:
        unseen |= at < contexts[:, None] - window
    hidden = None
    if unseen.any():
        hidden = torch.from_numpy(np.where(unseen, np.float32(-np.inf), np.float32(0)))[:, None, None]
    return _Decodes(
        tokens=torch.from_numpy(inputs.row_offsets[rows].astype(np.int64)),
        pages=_as_pages(tables),
        width=width,
        hidden=hidden,
    )

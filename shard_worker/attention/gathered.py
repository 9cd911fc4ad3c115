"""Attention over copies of pages in plain torch, on any device: what serves where there are no better
kernels.

Decodes of like length share a call, prefill chunks go row by row. Pages wholly before a window are not
read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from shard_worker.attention.device import DeviceColumns, Writer, by_page
from shard_worker.attention.interface import LayerKv, StepAttention
from shard_worker.attention.pages import (
    Chunk,
    DecodeGroup,
    GatherPlan,
    StepShape,
    decode_order,
    gather_plan,
    shape_plan,
    widest_of,
)
from shard_worker.executor import I32, StepInputs


class GatheredAttention:
    reads_tables = True

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def step(self, inputs: StepInputs, block_size_tokens: int) -> StepAttention:
        """As every attention; a stage, which has the columns on the device already, goes the other way."""
        order = decode_order(inputs)
        tables = inputs.block_tables[:, : widest_of(inputs, block_size_tokens)]
        columns = DeviceColumns(
            self._there(inputs.kv_slots),
            self._there(inputs.positions),
            self._there(inputs.row_offsets[:-1]),
            self._there(inputs.context_lens),
            self._there(order),
            self._there(np.ascontiguousarray(tables)),
        )
        return self.plan(inputs, order, block_size_tokens).over(columns)

    def _there(self, column: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(column).to(self._device)

    def hold(self, num_blocks: int, rows: Sequence[int]) -> None:
        return None

    def fits(self, inputs: StepInputs, shape: StepShape) -> bool:
        return True

    def plan(
        self, inputs: StepInputs, order: I32, block_size_tokens: int, shape: StepShape | None = None
    ) -> "GatheredPlan":
        return GatheredPlan(inputs, order, block_size_tokens, shape)


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    inputs: StepInputs
    order: I32
    block_size_tokens: int
    shape: StepShape | None

    def under(self, window: int | None) -> GatherPlan:
        if self.shape is not None:
            return shape_plan(self.shape, self.block_size_tokens, window)
        return gather_plan(self.inputs, self.order, self.block_size_tokens, window)

    def over(self, columns: DeviceColumns) -> "GatheredStep":
        return GatheredStep(self, columns)


@dataclass(frozen=True, slots=True)
class _Read:
    """What n rows of t tokens read together, on the device."""

    tokens: torch.Tensor | slice  # n * t places among the step's tokens
    pages: torch.Tensor  # [n * width] block ids
    rows: int
    visible: torch.Tensor  # [n, 1, 1, context] or [t, context]: which scores count


class GatheredStep:
    def __init__(self, plan: GatheredPlan, columns: DeviceColumns) -> None:
        self._plan, self._columns, self._block_size = plan, columns, plan.block_size_tokens
        self._writer = Writer(columns, plan.block_size_tokens)
        self._reads: dict[int | None, tuple[list[_Read], list[_Read]]] = {}  # by window, for all its layers

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
        self._writer.write(kv, k, v)
        num_tokens, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        out = q.new_empty(num_tokens, heads, head_dim)
        if window not in self._reads:
            self._reads[window] = self._read(window)
        decodes, chunks = self._reads[window]
        for read in decodes:
            # The heads of a group are rows of one product: keys and values are never expanded.
            queries = q[read.tokens].view(read.rows, kv_heads, heads // kv_heads, head_dim)
            mixed = _mixed(queries, *_pages(kv, read, q.dtype), read.visible, scale, softcap)
            out[read.tokens] = mixed.reshape(read.rows, heads, head_dim)
        for read in chunks:
            queries = q[read.tokens].transpose(0, 1)[None]
            mixed = _mixed(queries, *_pages(kv, read, q.dtype), read.visible, scale, softcap)
            out[read.tokens] = mixed[0].transpose(0, 1)
        return out.view(num_tokens, heads * head_dim)

    def _read(self, window: int | None) -> tuple[list[_Read], list[_Read]]:
        plan = self._plan.under(window)
        return [self._decodes(g, window) for g in plan.groups], [self._chunk(c, window) for c in plan.chunks]

    def _decodes(self, group: DecodeGroup, window: int | None) -> _Read:
        columns, size = self._columns, self._block_size
        rows = columns.decode_order[group.first : group.end].long()
        contexts = columns.context_lens[rows].long()[:, None]
        starts = torch.zeros_like(contexts)  # the first block that is seen
        if window is not None:
            starts = (contexts - window).clamp(min=0).div(size, rounding_mode="floor")
        blocks = starts + torch.arange(group.width, device=rows.device)
        # Past its end a row reads its first block again: any block does, for its scores don't count.
        blocks = torch.where(blocks * size < contexts, blocks, starts)
        pages = columns.block_tables[rows].gather(1, blocks).view(-1).long()
        at = starts * size + torch.arange(group.width * size, device=rows.device)
        visible = at < contexts
        if window is not None:
            visible &= at >= contexts - window
        tokens = columns.row_starts[rows].long()
        return _Read(tokens, pages, group.end - group.first, visible[:, None, None])

    def _chunk(self, chunk: Chunk, window: int | None) -> _Read:
        columns, size = self._columns, self._block_size
        pages = columns.block_tables[chunk.row, chunk.first_block : chunk.end_block].long()
        at = torch.arange(chunk.first_block * size, chunk.end_block * size, device=pages.device)
        positions = columns.positions[chunk.first : chunk.end, None]
        visible = at <= positions
        if window is not None:
            visible &= at > positions - window
        return _Read(slice(chunk.first, chunk.end), pages, 1, visible)


def _pages(kv: LayerKv, read: _Read, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each [n, kv_heads, width * block_size, head_dim]."""
    keys, values = (
        by_page(cache)[read.pages].reshape(read.rows, -1, cache.shape[0], cache.shape[3]).transpose(1, 2)
        for cache in (kv.keys, kv.values)
    )
    return keys.to(dtype), values.to(dtype)


def _mixed(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """[n, heads, tokens, head_dim] over [n, kv_heads, context, head_dim]."""
    n, heads, num_tokens, head_dim = q.shape
    kv_heads = keys.shape[1]
    if not softcap:
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, enable_gqa=heads != kv_heads, scale=scale
        )
    grouped = q.reshape(n, kv_heads, -1, head_dim)  # a group's heads one after another
    scores = grouped @ keys.transpose(-1, -2)
    scores = (torch.tanh(scores * (scale / softcap)) * softcap).view(n, heads, num_tokens, -1)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    mixed = weights.view(n, kv_heads, -1, weights.shape[-1]) @ values
    return mixed.view(n, heads, num_tokens, head_dim)

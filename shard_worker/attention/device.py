"""Attention on a device, in two moves: `plan` looks at a step on the host, once; `over` begins its device
part.

What comes after `over` runs on the device alone, waits for nothing, and can be recorded when the step was
padded to a fixed shape: a replay then sees new columns in the same places, after a new `plan`. Pages lie as
[num_blocks, block_size, kv_heads, head_dim], which `LayerKv` shows in its own order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shard_worker.attention.interface import LayerKv, StepAttention
from shard_worker.attention.pages import StepShape
from shard_worker.executor import I32, StepInputs


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model's layers ask of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of q and of the pages
    block_size_tokens: int
    scale: float
    softcap: float
    windows: tuple[int | None, ...]  # the different ones


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """A step's columns on the device."""

    kv_slots: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int32
    row_starts: torch.Tensor  # [n] int32: each row's first token
    context_lens: torch.Tensor  # [n] int32
    decode_order: torch.Tensor  # int32 rows of one token, as `pages.decode_order`
    block_tables: torch.Tensor  # [n, width] int32; width 0 where attention has pages of its own


class StepPlan(Protocol):
    def over(self, columns: DeviceColumns) -> StepAttention: ...


class DeviceAttention(Protocol):
    @property
    def reads_tables(self) -> bool:
        """Whether it looks at `DeviceColumns.block_tables`, which then have a fixed width when recorded."""

    def hold(self, num_blocks: int, rows: Sequence[int]) -> None:
        """Sizes of the pool and of padded steps; what was planned before is void."""

    def fits(self, inputs: StepInputs, shape: StepShape) -> bool:
        """Whether a step of decodes can be padded to that shape and recorded."""

    def plan(
        self, inputs: StepInputs, order: I32, block_size_tokens: int, shape: StepShape | None = None
    ) -> StepPlan:
        """`order`: as `pages.decode_order`. `shape`: what the step was padded to, if it is to be recorded."""


def allocate(shape: AttentionShape, num_layers: int, num_blocks: int, device: torch.device) -> list[LayerKv]:
    """All zeros, so that whatever a mask hides is a number."""

    def pages() -> torch.Tensor:
        size = (num_blocks, shape.block_size_tokens, shape.num_kv_heads, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=device).permute(2, 0, 1, 3)

    return [LayerKv(pages(), pages()) for _ in range(num_layers)]


def block_bytes(shape: AttentionShape, num_layers: int) -> int:
    """Of one block in all layers."""
    tokens = 2 * num_layers * shape.block_size_tokens
    return tokens * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


def by_page(cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block_size, kv_heads, head_dim] of what `LayerKv` holds."""
    return cache.permute(1, 2, 0, 3)


class Writer:
    """Puts a step's keys and values into their slots."""

    def __init__(self, columns: DeviceColumns, block_size_tokens: int) -> None:
        self._blocks = columns.kv_slots.div(block_size_tokens, rounding_mode="floor")
        self._places = columns.kv_slots - self._blocks * block_size_tokens

    def write(self, kv: LayerKv, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]. No infinity is stored: what a mask hides is multiplied all the same,
        by 0, and may lie in a block that another sequence owned."""
        at = self._blocks, self._places
        by_page(kv.keys)[at] = k.to(kv.keys.dtype).nan_to_num()
        by_page(kv.values)[at] = v.to(kv.values.dtype).nan_to_num()

"""Attention over paged KV: everything it needs comes in as an argument; there is no global context.

Prefill chunks and decodes share one call: tokens lie one after another, row by row, with no padding.
A row's result may not depend on which rows share the call, beyond rounding (1e-5 in float32).
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from shard_worker.executor import StepInputs


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's cache, in pages. Slot s is [:, s // block_size, s % block_size].

    Its type may be narrower than that of q, k and v.
    """

    keys: torch.Tensor  # [kv_heads, num_blocks, block_size, head_dim]
    values: torch.Tensor  # the same


class StepAttention(Protocol):
    """One step's attention, prepared once and used by every layer."""

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
        """Writes k and v into their slots, then each token attends to its row's cache up to itself.

        q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim], rotated already. Query head h reads KV head
        h // (heads / kv_heads). A score is s = q k scale, then softcap * tanh(s / softcap) unless softcap
        is 0. With a window a token sees itself and the window - 1 before it. Returns [T, heads * head_dim].
        """


class Attention(Protocol):
    """A way to compute attention on some device."""

    def step(self, inputs: StepInputs, block_size_tokens: int) -> StepAttention:
        """Prepares a step of at least one token; reads no table entry past a row's length."""

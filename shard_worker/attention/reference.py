"""The attention that the others are measured against: row by row, in float32, plain torch, on any device."""

import numpy as np
import torch

from shard_worker.attention.interface import LayerKv
from shard_worker.executor import StepInputs


class ReferenceAttention:
    def step(self, inputs: StepInputs, block_size_tokens: int) -> "ReferenceStep":
        return ReferenceStep(inputs, block_size_tokens)


class ReferenceStep:
    def __init__(self, inputs: StepInputs, block_size_tokens: int) -> None:
        self._write_slots = torch.from_numpy(inputs.kv_slots)
        self._positions = torch.from_numpy(inputs.positions)
        self._rows: list[tuple[int, int, torch.Tensor]] = []
        for row, context in enumerate(inputs.context_lens.tolist()):
            at = np.arange(context, dtype=np.int64)
            blocks = inputs.block_tables[row, at // block_size_tokens].astype(np.int64)
            slots = torch.from_numpy(blocks * block_size_tokens + at % block_size_tokens)
            self._rows.append((int(inputs.row_offsets[row]), int(inputs.row_offsets[row + 1]), slots))

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
        keys = kv.keys.view(kv_heads, -1, head_dim)
        values = kv.values.view(kv_heads, -1, head_dim)
        write = self._write_slots.to(q.device)
        keys.index_copy_(1, write, k.transpose(0, 1).to(keys.dtype))
        values.index_copy_(1, write, v.transpose(0, 1).to(values.dtype))
        out = q.new_empty(num_tokens, heads * head_dim)
        for first, end, slots in self._rows:
            grouped = q[first:end].view(end - first, kv_heads, heads // kv_heads, head_dim).float()
            row_keys = keys[:, slots.to(q.device)].float()
            row_values = values[:, slots.to(q.device)].float()
            scores = torch.einsum("tkgd,ksd->kgts", grouped, row_keys) * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            at = torch.arange(len(slots), device=q.device)
            position = self._positions[first:end, None].to(q.device)
            scores.masked_fill_(at > position, -torch.inf)
            if window is not None:
                scores.masked_fill_(at <= position - window, -torch.inf)
            mixed = torch.einsum("kgts,ksd->tkgd", scores.softmax(dim=-1), row_values)
            out[first:end] = mixed.reshape(end - first, heads * head_dim).to(q.dtype)
        return out

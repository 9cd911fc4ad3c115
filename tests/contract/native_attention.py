"""The compiled stage's attention behind the others' interface: pages are put into its order and back."""

import ctypes
from types import SimpleNamespace

import numpy as np
import torch

from shard_worker.attention.interface import LayerKv
from shard_worker.executor import StepInputs
from shard_worker.kv_tensors import KvForm, allocate
from shard_worker.native import library as native


class NativeAttention:
    def __init__(self, threads: int, isa: bytes | None = None) -> None:
        library = native.native()
        assert library is not None, "no compiled code"
        self.library, self.pool, self.isa = library, library.shoal_pool_create(threads), isa

    def step(self, inputs: StepInputs, block_size_tokens: int) -> "NativeStep":
        return NativeStep(self, inputs, block_size_tokens)


class NativeStep:
    def __init__(self, attention: NativeAttention, inputs: StepInputs, block_size_tokens: int) -> None:
        self.attention, self.inputs, self.block_size = attention, inputs, block_size_tokens

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
        kv_heads, num_blocks = kv.keys.shape[:2]
        form = KvForm(kv.keys.dtype, paged=True)
        heads_of = SimpleNamespace(num_kv_heads=kv_heads, head_dim=head_dim)
        pages = allocate(heads_of, 1, num_blocks, self.block_size, form)[0]
        pages.keys.fill_(torch.nan)  # what pads a block is never used
        # In words of n: keys [.., dims, positions, n], values [.., positions, dims, n].
        n, shape = form.per_word, (kv_heads, num_blocks, self.block_size)
        assert self.block_size % n == 0
        keys = pages.keys.transpose(2, 3)[:, :, : self.block_size]
        values = pages.values.transpose(3, 4)
        keys.copy_(kv.keys.view(*shape, head_dim // n, n))
        values.copy_(kv.values.view(kv_heads, num_blocks, self.block_size // n, n, head_dim))
        qkv = torch.cat([q, k, v], dim=1).float().contiguous()
        out = torch.empty(num_tokens, heads * head_dim)
        config = native.StageConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            score_scale=scale,
            score_softcap=softcap,
            narrow=kv.keys.dtype == torch.bfloat16,
        )
        assert not self.attention.library.shoal_linear_use_isa(self.attention.isa)
        self.units: int = self.attention.library.shoal_attention(
            self.attention.pool,
            ctypes.byref(self._step()),
            pages.keys.data_ptr(),
            ctypes.byref(config),
            self.block_size,
            window or 0,
            qkv.data_ptr(),
            out.data_ptr(),
        )
        assert self.units > 0 and not self.attention.library.shoal_linear_use_isa(None)
        kv.keys.copy_(keys.reshape(kv.keys.shape))
        kv.values.copy_(values.reshape(kv.values.shape))
        return out.to(q.dtype)

    def _step(self) -> native.Step:
        inputs = self.inputs
        self.tables = np.ascontiguousarray(inputs.block_tables)
        return native.Step(
            num_tokens=len(inputs.positions),
            num_rows=len(inputs.context_lens),
            positions=native.address(inputs.positions),
            row_offsets=native.address(inputs.row_offsets),
            kv_slots=native.address(inputs.kv_slots),
            block_tables=native.address(self.tables),
            table_stride=self.tables.shape[1],
        )

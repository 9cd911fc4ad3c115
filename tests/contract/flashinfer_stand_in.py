"""What stands in for FlashInfer where there is no device: the same calls, answered by a plain computation.

It holds callers to the library's rules: plans in pages' columns, buffers of fixed sizes in recorded wrappers,
types and options only in plans.
"""

from typing import Any

import torch

from shard_worker.attention.cuda import FlashInferAttention
from shard_worker.attention.device import AttentionShape, DeviceColumns
from shard_worker.attention.interface import LayerKv
from shard_worker.attention.pages import decode_order
from shard_worker.executor import StepInputs

CPU = torch.device("cpu")
OPTIONS = {"sm_scale", "logits_soft_cap", "window_left", "q_data_type", "kv_data_type"}


class _Wrapper:
    def plan_pages(
        self, offsets: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, **options: Any
    ) -> None:
        assert set(options) == OPTIONS
        assert offsets.dtype == pages.dtype == last.dtype == torch.int32
        assert len(offsets) == len(last) + 1 and int(offsets[-1]) == len(pages)
        assert int(last.min()) >= 1 and int(last.max()) <= self.page_size
        self.offsets, self.pages, self.last, self.options = offsets, pages, last, options

    page_size: int
    heads: tuple[int, int, int]
    queries: torch.Tensor

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert q.is_contiguous() and tuple(q.shape[1:]) == (self.heads[0], self.heads[2])
        assert kv[0].shape[1:] == (self.page_size, self.heads[1], self.heads[2])
        assert q.dtype == self.options["q_data_type"] and kv[0].dtype == self.options["kv_data_type"]
        out = torch.empty_like(q)
        for row in range(len(self.last)):
            first, end = self.queries[row : row + 2].tolist()
            begin, upto = self.offsets[row : row + 2].tolist()
            context = (upto - begin - 1) * self.page_size + int(self.last[row])
            keys, values = (c[self.pages[begin:upto].long()].flatten(0, 1)[:context].double() for c in kv)
            out[first:end] = self._row(q[first:end].double(), keys, values).to(q.dtype)
        return out

    def _row(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group, (count, context) = self.heads[0] // self.heads[1], (len(q), len(keys))
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, keys) * self.options["sm_scale"]
        cap = self.options["logits_soft_cap"]
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        at, position = torch.arange(context), torch.arange(context - count, context)[:, None]
        hidden = at > position
        if self.options["window_left"] >= 0:
            hidden |= at < position - self.options["window_left"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, values)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(
        self,
        queries: torch.Tensor,
        offsets: torch.Tensor,
        pages: torch.Tensor,
        last: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal and queries.dtype == torch.int32 and len(queries) == len(offsets)
        self.queries, self.heads, self.page_size = queries, (heads, kv_heads, head_dim), page_size
        self.plan_pages(offsets, pages, last, **options)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        workspace: torch.Tensor,
        layout: str,
        use_tensor_cores: bool,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        assert layout == "NHD"
        self.fixed = use_cuda_graph
        self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer

    def plan(
        self,
        offsets: torch.Tensor,
        pages: torch.Tensor,
        last: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self.queries = torch.arange(len(last) + 1)
        self.heads, self.page_size = (heads, kv_heads, head_dim), page_size
        self.plan_pages(offsets, pages, last, **options)
        if not self.fixed:
            return
        for buffer, given in zip(self.buffers, (offsets, pages, last), strict=True):
            assert buffer is not None and len(given) <= len(buffer)
            buffer[: len(given)] = given
        whole, _, lasts = self.buffers
        assert whole is not None and lasts is not None
        assert (len(offsets), len(last)) == (len(whole), len(lasts)), (
            "another number of rows than was recorded"
        )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.fixed:  # what a replay would read
            offsets, pages, last = self.buffers
            assert offsets is not None and pages is not None and last is not None
            self.offsets, self.pages, self.last = offsets, pages, last
        return super().run(q, kv)


class StandIn:
    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper


class FlashInferOnStandIn:
    """Behind the interface of the others: what is planned is known when it is attended."""

    def step(self, inputs: StepInputs, block_size_tokens: int) -> "FlashInferOnStandIn":
        made = FlashInferOnStandIn()
        made.inputs, made.block_size = inputs, block_size_tokens
        return made

    inputs: StepInputs
    block_size: int

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
        heads, head_dim = q.shape[1:]
        shape = AttentionShape(
            heads, k.shape[1], head_dim, q.dtype, self.block_size, scale, softcap, (window,)
        )
        attention = FlashInferAttention(shape, CPU, StandIn())
        order = decode_order(self.inputs)
        none = torch.empty(0, dtype=torch.int32)
        columns = DeviceColumns(torch.from_numpy(self.inputs.kv_slots), none, none, none, none, none)
        step = attention.plan(self.inputs, order, self.block_size).over(columns)
        return step.attend(q, k, v, kv, scale=scale, softcap=softcap, window=window)


def flashinfer_on_stand_in(
    shape: AttentionShape, device: torch.device
) -> tuple[FlashInferAttention, str | None]:
    return FlashInferAttention(shape, device, StandIn()), None

"""FlashInfer's kernels over pages, and the choice between them and plain torch.

A step is planned once for each of the model's windows and run in every layer: decodes alone by the decode
kernel, all else by the prefill kernel, for which a decode is a chunk of one. Planning copies the page
columns to the device by itself, in the lane that computes. A recorded step keeps wrappers of its own, whose
buffers stay in place; they are planned anew before each replay. All share one workspace: they run one after
another. A plan lies in pinned memory of its wrapper until the lane has copied it, so the next plan waits
for that.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shard_worker.attention.device import AttentionShape, DeviceAttention, DeviceColumns, Writer, by_page
from shard_worker.attention.gathered import GatheredAttention
from shard_worker.attention.interface import LayerKv
from shard_worker.attention.pages import (
    PageColumns,
    StepShape,
    blocks_of,
    only_decodes,
    page_columns,
)
from shard_worker.executor import I32, StepInputs

WORKSPACE_BYTES = 128 << 20  # as its documentation recommends
WRAPPER_BYTES = 8 << 20  # that each takes for its plans
HEAD_DIMS = (64, 128, 256)
DECODE_GROUPS = (
    1,
    2,
    3,
)  # query heads of a KV head for which the kernel without tensor cores is the faster one
CAPABILITY_MIN = (8, 0)
LAYOUT = "NHD"


def lacks(shape: AttentionShape, device: torch.device) -> str | None:
    """Why FlashInfer can't compute this; None: it may."""
    if device.type != "cuda":
        return "there is no CUDA device"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels don't take {shape.dtype}"
    if shape.head_dim not in HEAD_DIMS:
        return f"its kernels have no heads of {shape.head_dim}"
    if torch.cuda.get_device_capability(device) < CAPABILITY_MIN:
        return "its kernels need a device of capability 8.0"
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # a library for another CUDA fails in many ways
        return f"flashinfer can't be imported: {type(error).__name__}: {error}"
    return None


def best(shape: AttentionShape, device: torch.device) -> tuple[DeviceAttention, str | None]:
    """The fastest that works here, and why it is not FlashInfer if it isn't."""
    reason = lacks(shape, device)
    if reason is None:
        attention = FlashInferAttention(shape, device)
        try:
            attention.try_out()
        except Exception as error:  # kernels are compiled at first use, which needs a compiler
            reason = f"its kernels don't run: {type(error).__name__}: {error}"
        else:
            return attention, None
    return GatheredAttention(device), reason


class FlashInferAttention:
    reads_tables = False

    def __init__(self, shape: AttentionShape, device: torch.device, library: Any = None) -> None:
        """`library`: flashinfer."""
        self._library = library or importlib.import_module("flashinfer")
        self.shape, self._device = shape, device
        workspace_bytes = WORKSPACE_BYTES if device.type == "cuda" else 0
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._prefills: dict[int | None, Any] = {}
        self._decodes: dict[int | None, Any] = {}
        self._replayed: dict[tuple[int, int | None], Any] = {}  # by rows and window
        self._pages: torch.Tensor | None = None  # of all padded steps: one runs at a time
        self._copied: torch.cuda.Event | None = None

    def hold(self, num_blocks: int, rows: Sequence[int]) -> None:
        self._replayed.clear()
        self._pages = self._numbers(num_blocks + max(rows))

    def fits(self, inputs: StepInputs, shape: StepShape) -> bool:
        """Sequences that share blocks can have more pages together than there are blocks."""
        assert self._pages is not None, "fits before hold"
        blocks = blocks_of(inputs.context_lens, self.shape.block_size_tokens)
        return int(blocks.sum()) + shape.rows - len(blocks) <= len(self._pages)

    def plan(
        self, inputs: StepInputs, order: I32, block_size_tokens: int, shape: StepShape | None = None
    ) -> "FlashInferPlan":
        assert block_size_tokens == self.shape.block_size_tokens
        if self._copied is not None:
            self._copied.synchronize()
        columns = page_columns(inputs, block_size_tokens)
        if shape is not None or only_decodes(inputs):
            wrappers = {w: self._decode(columns, w, shape) for w in self.shape.windows}
        else:
            wrappers = {w: self._prefill(columns, w) for w in self.shape.windows}
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._device))
        return FlashInferPlan(self.shape, wrappers)

    def _numbers(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)

    def _prefill(self, columns: PageColumns, window: int | None) -> Any:
        if window not in self._prefills:
            self._prefills[window] = self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, LAYOUT
            )
        wrapper = self._prefills[window]
        wrapper.plan(
            torch.from_numpy(columns.query_offsets),
            torch.from_numpy(columns.page_offsets),
            torch.from_numpy(columns.pages),
            torch.from_numpy(columns.last_page_lens),
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            self.shape.block_size_tokens,
            causal=True,
            **self._options(window),
        )
        return wrapper

    def _decode(self, columns: PageColumns, window: int | None, shape: StepShape | None) -> Any:
        if shape is None:
            if window not in self._decodes:
                self._decodes[window] = self._decode_wrapper()
            wrapper = self._decodes[window]
        else:
            key = shape.rows, window
            if key not in self._replayed:
                self._replayed[key] = self._replayed_wrapper(shape.rows)
            wrapper = self._replayed[key]
        wrapper.plan(
            torch.from_numpy(columns.page_offsets),
            torch.from_numpy(columns.pages),
            torch.from_numpy(columns.last_page_lens),
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            self.shape.block_size_tokens,
            **self._options(window),
        )
        return wrapper

    def _decode_wrapper(self, **buffers: Any) -> Any:
        group = self.shape.num_heads // self.shape.num_kv_heads
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=group not in DECODE_GROUPS, **buffers
        )

    def _replayed_wrapper(self, rows: int) -> Any:
        return self._decode_wrapper(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self._numbers(rows + 1),
            paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=self._numbers(rows),
        )

    def _options(self, window: int | None) -> dict[str, Any]:
        """A window of w tokens is the token itself and w - 1 to its left."""
        return {
            "sm_scale": self.shape.scale,
            "logits_soft_cap": self.shape.softcap or None,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": self.shape.dtype,
            "kv_data_type": self.shape.dtype,
        }

    def try_out(self) -> None:
        """One chunk and one decode in a block of its own; raises what the library does."""
        shape, size = self.shape, self.shape.block_size_tokens
        pages = (
            torch.zeros(
                (1, size, shape.num_kv_heads, shape.head_dim), dtype=shape.dtype, device=self._device
            ),
        ) * 2
        for count in (1, min(2, size)):
            columns = PageColumns(
                query_offsets=np.array([0, count], np.int32),
                page_offsets=np.array([0, 1], np.int32),
                pages=np.zeros(1, np.int32),
                last_page_lens=np.array([count], np.int32),
                context_lens=np.array([count], np.int32),
            )
            q = torch.zeros((count, shape.num_heads, shape.head_dim), dtype=shape.dtype, device=self._device)
            for window in shape.windows:
                wrapper = (
                    self._decode(columns, window, None) if count == 1 else self._prefill(columns, window)
                )
                wrapper.run(q, pages)
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    shape: AttentionShape
    wrappers: dict[int | None, Any]  # planned, by window

    def over(self, columns: DeviceColumns) -> "FlashInferStep":
        return FlashInferStep(self, columns)


class FlashInferStep:
    def __init__(self, plan: FlashInferPlan, columns: DeviceColumns) -> None:
        self._plan = plan
        self._writer = Writer(columns, plan.shape.block_size_tokens)

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
        assert (scale, softcap) == (self._plan.shape.scale, self._plan.shape.softcap), "planned otherwise"
        self._writer.write(kv, k, v)
        mixed: torch.Tensor = self._plan.wrappers[window].run(
            q.contiguous(), (by_page(kv.keys), by_page(kv.values))
        )
        return mixed.reshape(q.shape[0], -1)

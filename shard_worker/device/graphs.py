"""Steps of decodes alone, recorded once per padded shape and replayed: one launch instead of hundreds.

What is recorded reads its columns and activations from buffers that stay in place and leaves its results in
tensors of its own; all recordings share one pool of memory, since one replays at a time. A recorder without a
device runs the work each time, so that padding and buffers are the same where nothing can be recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from shard_worker.attention.pages import StepShape, decode_shape, sizes_up_to
from shard_worker.device.staging import Lane
from shard_worker.executor import StepInputs

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (16, 64, 256)  # blocks of a table, where attention reads tables; longer contexts are not recorded
RECORDINGS_MAX = len(ROWS) * len(WIDTHS)
WARM_UPS = 2  # libraries set themselves up in their first calls, which can't be recorded


@dataclass(frozen=True, slots=True)
class Output:
    hidden: torch.Tensor  # [rows, hidden_size]
    logits: torch.Tensor | None  # [rows, vocab_size], on the last stage


class Recorder(Protocol):
    def run(self, shape: StepShape, work: Callable[[], Output]) -> Output:
        """Does the work of that shape, in the computing lane. What it gives stays until the next run."""


class PlainRecorder:
    """Records nothing."""

    def run(self, shape: StepShape, work: Callable[[], Output]) -> Output:
        return work()


class CudaRecorder:
    def __init__(self, lane: Lane) -> None:
        assert lane.stream is not None
        self._lane = lane
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[StepShape, tuple[torch.cuda.CUDAGraph, Output]] = {}

    def run(self, shape: StepShape, work: Callable[[], Output]) -> Output:
        known = self._recorded.get(shape)
        if known is None:
            if len(self._recorded) >= RECORDINGS_MAX:
                return work()
            known = self._record(work)
            self._recorded[shape] = known
        graph, output = known
        graph.replay()
        return output

    def _record(self, work: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        for _ in range(WARM_UPS):  # writes the same keys and values again: nothing is changed by it
            work()
        graph = torch.cuda.CUDAGraph()
        stream = self._lane.stream
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = work()
        return graph, output


def recorder_for(lane: Lane) -> Recorder:
    return PlainRecorder() if lane.stream is None else CudaRecorder(lane)


class Shapes:
    """Which padded shape a step gets."""

    def __init__(self, step_tokens_max: int, num_blocks: int, with_tables: bool) -> None:
        self.rows = sizes_up_to(step_tokens_max, ROWS)
        self.widths = sizes_up_to(num_blocks, WIDTHS) if with_tables else ()

    @property
    def rows_max(self) -> int:
        return self.rows[-1]

    @property
    def width_max(self) -> int:
        return self.widths[-1] if self.widths else 0

    def of(self, inputs: StepInputs, block_size_tokens: int) -> StepShape | None:
        """None: the step is run as it comes."""
        return decode_shape(inputs, block_size_tokens, self.rows, self.widths)

"""What the executor asks of a stage's layers, whoever computes them: torch, compiled code, a library's model.

A stage is made once for a layer range and is given memory before its first run, and anew when the KV pool or
the limits change. Calls come from one thread at a time. Shapes: T tokens of a step, k of them for the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from shard_worker.attention.interface import LayerKv
from shard_worker.executor import I64, StepInputs

NO_BYTES = memoryview(b"")
Total = Callable[[torch.Tensor], torch.Tensor]  # rows in float32 to their sum over ranks, in place


@dataclass(frozen=True, slots=True)
class StageMemory:
    kv: list[LayerKv]  # one for each of the stage's layers
    block_size_tokens: int
    step_tokens_max: int


class Stage(Protocol):
    def attach(self, memory: StageMemory) -> None:
        """Buffers for steps of up to `step_tokens_max` are made here, so that a run allocates none."""

    def release(self) -> None:
        """Lets go of that memory, so that other memory can be taken before it is attached."""

    def run(self, inputs: StepInputs, activations: memoryview, wanted: I64 | None = None) -> memoryview:
        """One step of at least one token through all layers, writing its keys and values.

        `activations`: the previous stage's output, [T * hidden_size] of the stored type; empty on the first.
        `wanted`: tokens whose logits may be asked for, rising; None: all. The last stage may spare others its
        last layer's end.
        Returns the same for the next stage, until the next run; empty on the last, which keeps its hidden
        rows for `logits`.
        """

    def logits(self, tokens: I64) -> torch.Tensor:
        """[k, vocab_size] of the last run's tokens at these places, until the next; on the last stage."""

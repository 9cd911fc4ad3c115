"""Takes what a layer is made of out of a checkpoint, in the form that stages run: `stage_weights`.

Matrices stay as they are stored, norms and biases become float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shard_worker.model.config import ModelConfig
from shard_worker.model.stage_weights import F32, Linear, StoredMatrix


class TensorSource(Protocol):
    """What families need of a checkpoint (`weights.Checkpoint`): Hugging Face's names, rows are outputs."""

    @property
    def config(self) -> ModelConfig: ...

    def matrix(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        """As it is stored, of exactly this shape. Raises LoadFailed."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor of exactly this shape. Raises LoadFailed."""


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Reads tensors whose names begin with `prefix`. Methods raise LoadFailed."""

    checkpoint: TensorSource
    prefix: str

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        return self.checkpoint.matrix(f"{self.prefix}{name}.weight", (outputs, inputs))

    def linear(self, parts: Sequence[tuple[str, int]], inputs: int, biased: bool = False) -> Linear:
        """One map out of those of (name, outputs), which have the same input."""
        matrices = tuple(self.matrix(name, outputs, inputs) for name, outputs in parts)
        bias = None
        if biased:
            bias = np.concatenate([self.vector(f"{name}.bias", outputs) for name, outputs in parts])
        return Linear(matrices, bias)

    def norm(self, name: str, size: int, offset: float = 0.0) -> F32:
        """`offset`: what the family adds to the stored weight."""
        weight = self.vector(f"{name}.weight", size)
        return weight + np.float32(offset) if offset else weight

    def vector(self, name: str, size: int) -> F32:
        tensor = self.checkpoint.tensor(f"{self.prefix}{name}", (size,))
        return np.ascontiguousarray(tensor.to(torch.float32).numpy())

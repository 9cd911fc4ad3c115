"""Takes what a layer is made of out of a checkpoint, in the form that stages run: `stage_weights`.

Matrices stay as they are stored, norms and biases become float32.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from shard_worker.executor import LoadFailed
from shard_worker.model.config import ModelConfig
from shard_worker.model.stage_weights import F32, Linear, StoredMatrix


class TensorSource(Protocol):
    """What families need of a checkpoint (`weights.Checkpoint`): Hugging Face's names, rows are outputs."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def names_under(self, prefix: str) -> list[str]:
        """Of all tensors whose names begin so."""

    def matrix(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        """As it is stored, of exactly this shape. Raises LoadFailed."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor of exactly this shape. Raises LoadFailed."""


class TensorReader:
    """Reads tensors whose names begin with `prefix`, and remembers which. Methods raise LoadFailed."""

    def __init__(self, checkpoint: TensorSource, prefix: str) -> None:
        self.checkpoint, self.prefix = checkpoint, prefix
        self.read: set[str] = set()

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        full = f"{self.prefix}{name}.weight"
        self.read.add(full)
        return self.checkpoint.matrix(full, (outputs, inputs))

    def linear(self, parts: Sequence[tuple[str, int]], inputs: int, biased: bool = False) -> Linear:
        """One map out of those of (name, outputs), which have the same input."""
        matrices = tuple(self.matrix(name, outputs, inputs) for name, outputs in parts)
        bias = None
        if biased:
            bias = np.concatenate([self._vector(f"{name}.bias", outputs) for name, outputs in parts])
        return Linear(matrices, bias)

    def norm(self, name: str, size: int) -> F32:
        """What a norm scales by: the stored weight, plus one where the family says so."""
        return self._vector(f"{name}.weight", size) + np.float32(self.checkpoint.config.norm_offset)

    def _vector(self, name: str, size: int) -> F32:
        full = f"{self.prefix}{name}"
        self.read.add(full)
        tensor = self.checkpoint.tensor(full, (size,))
        values: F32 = np.ascontiguousarray(tensor.to(torch.float32).numpy())
        if not np.isfinite(values).all():
            raise LoadFailed(f"{self.checkpoint.path}: {full} holds what is no number")
        return values

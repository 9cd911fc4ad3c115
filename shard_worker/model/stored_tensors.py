"""Torch's view of stored matrices: float formats are the same memory, packed ones are expanded."""

import warnings

import torch

from shard_worker.formats import dequantize
from shard_worker.model.stage_weights import StoredMatrix, WeightFormat

FLOATS = {
    WeightFormat.F32: torch.float32,
    WeightFormat.BF16: torch.bfloat16,
    WeightFormat.F16: torch.float16,
}


def tensor_of(matrix: StoredMatrix) -> torch.Tensor:
    """[outputs, inputs]; not to be written to: it may be a view of a file."""
    if matrix.format not in FLOATS:
        return torch.from_numpy(dequantize(matrix))
    with warnings.catch_warnings():
        # Torch has no read-only tensors, and warns where one would be right.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(matrix.rows).view(FLOATS[matrix.format])

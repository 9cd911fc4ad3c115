"""The KV memory of a stage: for each of its layers, keys and values in pages of one pool.

The same block id means the same page in every layer. Memory is taken whole, when the stage is formed;
the system maps its pages as they are first written.
"""

from dataclasses import dataclass

import numpy as np
import torch

from shard_worker.attention.interface import LayerKv
from shard_worker.model.config import ModelConfig

NUMPY_OF = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.float16}
LANES = 8  # positions of a vector, where keys lie by column


@dataclass(frozen=True, slots=True)
class KvForm:
    """How a stage wants its pages: the type, and whether keys lie by row, as values do, or by column.

    By column a block's keys are [head_dim, positions], with positions rounded up to whole vectors.
    """

    dtype: torch.dtype
    key_columns: bool = False

    def key_positions(self, block_size_tokens: int) -> int:
        return -(-block_size_tokens // LANES) * LANES if self.key_columns else block_size_tokens


def bytes_per_block(config: ModelConfig, num_layers: int, block_size_tokens: int, form: KvForm) -> int:
    """Of a stage with that many layers."""
    positions = block_size_tokens + form.key_positions(block_size_tokens)
    return num_layers * config.num_kv_heads * positions * config.head_dim * form.dtype.itemsize


def allocate(
    config: ModelConfig, num_layers: int, num_blocks: int, block_size_tokens: int, form: KvForm
) -> list[LayerKv]:
    """One LayerKv per layer, all zeros."""
    shape = (config.num_kv_heads, num_blocks, block_size_tokens, config.head_dim)
    key_shape = shape
    if form.key_columns:
        key_shape = (*shape[:2], config.head_dim, form.key_positions(block_size_tokens))

    def pages(shape: tuple[int, ...]) -> torch.Tensor:
        # numpy's zeros come from the system untouched; torch would write every page now.
        return torch.from_numpy(np.zeros(shape, NUMPY_OF[form.dtype])).view(form.dtype)

    return [LayerKv(pages(key_shape), pages(shape)) for _ in range(num_layers)]

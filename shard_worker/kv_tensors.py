"""The KV memory of a stage: for each of its layers, keys and values in pages of one pool.

The same block id means the same page in every layer. Memory is taken whole, when the stage is formed;
the system maps its pages as they are first written.
"""

import numpy as np
import torch

from shard_worker.attention.interface import LayerKv
from shard_worker.model.config import ModelConfig

NUMPY_OF = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.float16}


def bytes_per_block(config: ModelConfig, num_layers: int, block_size_tokens: int, dtype: torch.dtype) -> int:
    """Of a stage with that many layers."""
    return 2 * num_layers * config.num_kv_heads * block_size_tokens * config.head_dim * dtype.itemsize


def allocate(
    config: ModelConfig, num_layers: int, num_blocks: int, block_size_tokens: int, dtype: torch.dtype
) -> list[LayerKv]:
    """One LayerKv per layer, all zeros."""
    shape = (config.num_kv_heads, num_blocks, block_size_tokens, config.head_dim)

    def pages() -> torch.Tensor:
        # numpy's zeros come from the system untouched; torch would write every page now.
        return torch.from_numpy(np.zeros(shape, NUMPY_OF[dtype])).view(dtype)

    return [LayerKv(pages(), pages()) for _ in range(num_layers)]

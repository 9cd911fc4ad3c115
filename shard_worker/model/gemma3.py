"""Gemma 3 (text): Gemma 2 with norms over query and key heads instead of capped scores.

Of six layers five see a window and turn with a rope of their own, the sixth sees all.
"""

from dataclasses import replace

from shard_worker.model import gemma2
from shard_worker.model.config import ModelConfig
from shard_worker.model.stage_weights import LayerWeights, Rope
from shard_worker.model.tensors import TensorReader


def layer_weights(reader: TensorReader, config: ModelConfig, rope: Rope, window: int | None) -> LayerWeights:
    """Raises LoadFailed."""
    return replace(
        gemma2.layer_weights(reader, config, rope, window),
        q_norm=reader.norm("self_attn.q_norm", config.head_dim),
        k_norm=reader.norm("self_attn.k_norm", config.head_dim),
    )

"""Qwen3: Llama with a norm over each query and key head before they turn."""

from dataclasses import replace

from shard_worker.model import llama
from shard_worker.model.config import ModelConfig
from shard_worker.model.stage_weights import LayerWeights, Rope
from shard_worker.model.tensors import TensorReader


def layer_weights(reader: TensorReader, config: ModelConfig, rope: Rope, window: int | None) -> LayerWeights:
    """Raises LoadFailed."""
    return replace(
        llama.layer_weights(reader, config, rope, window),
        q_norm=reader.norm("self_attn.q_norm", config.head_dim),
        k_norm=reader.norm("self_attn.k_norm", config.head_dim),
    )

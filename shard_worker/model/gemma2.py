"""Gemma 2: Llama with norms after attention and MLP too, capped scores, every other layer windowed.

Norms scale by 1 + weight; the reader adds the one.
"""

from dataclasses import replace

from shard_worker.model import llama
from shard_worker.model.config import ModelConfig
from shard_worker.model.stage_weights import LayerWeights, Rope
from shard_worker.model.tensors import TensorReader


def layer_weights(reader: TensorReader, config: ModelConfig, rope: Rope, window: int | None) -> LayerWeights:
    """Raises LoadFailed."""
    return replace(
        llama.layer_weights(reader, config, rope, window),
        post_attention_norm=reader.norm("post_attention_layernorm", config.hidden_size),
        mlp_norm=reader.norm("pre_feedforward_layernorm", config.hidden_size),
        post_mlp_norm=reader.norm("post_feedforward_layernorm", config.hidden_size),
    )

"""Phi-3: Llama whose files hold Q, K and V as one matrix, and gate and up as another."""

from shard_worker.model.config import ModelConfig
from shard_worker.model.stage_weights import LayerWeights, Rope
from shard_worker.model.tensors import TensorReader


def layer_weights(reader: TensorReader, config: ModelConfig, rope: Rope, window: int | None) -> LayerWeights:
    """Raises LoadFailed."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return LayerWeights(
        attention_norm=reader.norm("input_layernorm", hidden),
        qkv=reader.linear([("self_attn.qkv_proj", q_size + 2 * kv_size)], hidden),
        out=reader.linear([("self_attn.o_proj", hidden)], q_size),
        mlp_norm=reader.norm("post_attention_layernorm", hidden),
        gate_up=reader.linear([("mlp.gate_up_proj", 2 * inner)], hidden),
        down=reader.linear([("mlp.down_proj", hidden)], inner),
        rope=rope,
        window=window,
    )

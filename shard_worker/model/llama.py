"""The Llama family: Llama, SmolLM2, and Mistral, whose layers may see a window only.

Q, K and V are one product, gate and up another. Qwen2 is the same with biases on Q, K and V.
"""

from shard_worker.model.config import ModelConfig
from shard_worker.model.stage_weights import LayerWeights, Rope
from shard_worker.model.tensors import TensorReader


def layer_weights(reader: TensorReader, config: ModelConfig, rope: Rope, window: int | None) -> LayerWeights:
    """Raises LoadFailed."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = [("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)]
    gate_up = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
    return LayerWeights(
        attention_norm=reader.norm("input_layernorm", hidden),
        qkv=reader.linear(qkv, hidden, config.qkv_bias),
        out=reader.linear([("self_attn.o_proj", hidden)], q_size, config.out_bias),
        mlp_norm=reader.norm("post_attention_layernorm", hidden),
        gate_up=reader.linear(gate_up, hidden, config.mlp_bias),
        down=reader.linear([("mlp.down_proj", hidden)], inner, config.mlp_bias),
        rope=rope,
        window=window,
    )

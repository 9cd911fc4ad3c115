"""A model whose weights are 4-bit already, with weights that are not, and the same function.

What is on a grid of sixteen levels loses nothing when it is put on such a grid again, so the packaged model
would say of every format that it is free. Here each channel between two matrices, or between a norm and a
matrix, is scaled by a factor near one on one side and by its inverse on the other: the same numbers come out
but for rounding, from weights of the same spread that lie anywhere.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from chassis.messages.card import parse_card
from shard_worker.model.stage_weights import F32
from shard_worker.torch_executor import EngineConfig, TorchExecutor

SPREAD = 0.25  # of the factors' logarithms


def write(model: str, folder: Path) -> None:
    """A Llama as a Hugging Face directory in float32."""
    executor = TorchExecutor(EngineConfig(model))
    checkpoint, config = executor.checkpoint, executor.checkpoint.config
    assert config.family == "llama" and config.tied_head and not config.qkv_bias
    assert config.rope is not None and config.rope.scaling is None
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads_a_group = config.num_heads // config.num_kv_heads
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def read(name: str, *shape: int) -> F32:
        numbers: F32 = checkpoint.tensor(name, shape).float().numpy()
        return numbers

    tensors = {
        "model.embed_tokens.weight": read("model.embed_tokens.weight", config.vocab_size, hidden),
        "model.norm.weight": read("model.norm.weight", hidden),
    }
    draw = np.random.default_rng(1)

    def factors(size: int) -> F32:
        return np.exp(draw.uniform(-SPREAD, SPREAD, size)).astype(np.float32)

    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        into, values, into_mlp, channels = factors(hidden), factors(kv_size), factors(hidden), factors(inner)
        # every query head of a group reads the same values
        mixed = np.repeat(values.reshape(config.num_kv_heads, 1, head_dim), heads_a_group, 1).reshape(-1)
        scaled = {
            "self_attn.q_proj": (q_size, hidden, None, into),
            "self_attn.k_proj": (kv_size, hidden, None, into),
            "self_attn.v_proj": (kv_size, hidden, values, into),
            "self_attn.o_proj": (hidden, q_size, None, mixed),
            "mlp.gate_proj": (inner, hidden, None, into_mlp),
            "mlp.up_proj": (inner, hidden, channels, into_mlp),
            "mlp.down_proj": (hidden, inner, None, channels),
        }
        for name, (outputs, inputs, rows, columns) in scaled.items():
            weight = read(f"{prefix}{name}.weight", outputs, inputs) / columns
            tensors[f"{prefix}{name}.weight"] = weight if rows is None else weight * rows[:, None]
        for name, factor in (("input_layernorm", into), ("post_attention_layernorm", into_mlp)):
            tensors[f"{prefix}{name}.weight"] = read(f"{prefix}{name}.weight", hidden) * factor
    save_file(
        {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "head_dim": head_dim,
                "vocab_size": config.vocab_size,
                "max_position_embeddings": config.context_len_max,
                "rms_norm_eps": config.rms_eps,
                "rope_theta": config.rope.theta,
                "tie_word_embeddings": True,
            }
        )
    )
    (folder / "tokenizer.json").write_bytes(parse_card(executor.facts.card).tokenizer_json)

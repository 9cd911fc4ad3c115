"""A model whose weights are 4-bit already, with weights that are not, and the same function.

What is on a grid of sixteen levels loses nothing when it is put on such a grid again, so the packaged model
would say of every format that it is free. Here norm gains are folded into the matrices behind them, and the
channels between V and the output, and between up and down, are scaled to balance: the same numbers come out
but for rounding, from weights that lie anywhere.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from chassis.messages.card import parse_card
from shard_worker.model.stage_weights import F32
from shard_worker.torch_executor import EngineConfig, TorchExecutor


def write(model: str, folder: Path) -> None:
    """A Llama as a Hugging Face directory in float32."""
    executor = TorchExecutor(EngineConfig(model))
    checkpoint, config = executor.checkpoint, executor.checkpoint.config
    assert config.family == "llama" and config.tied_head and not config.qkv_bias
    assert config.rope is not None and config.rope.scaling is None
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def read(name: str, *shape: int) -> F32:
        numbers: F32 = checkpoint.tensor(name, shape).float().numpy()
        return numbers

    tensors = {
        "model.embed_tokens.weight": read("model.embed_tokens.weight", config.vocab_size, hidden),
        "model.norm.weight": read("model.norm.weight", hidden),
    }
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        gain = read(f"{prefix}input_layernorm.weight", hidden)
        q, k, v = (
            read(f"{prefix}self_attn.{name}_proj.weight", size, hidden) * gain
            for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size))
        )
        out = read(f"{prefix}self_attn.o_proj.weight", hidden, q_size)
        grouped = out.reshape(hidden, config.num_kv_heads, -1, head_dim)
        scale = _balance(v, np.sqrt(np.square(grouped).mean((0, 2))).reshape(-1))
        grouped = grouped / scale.reshape(config.num_kv_heads, 1, head_dim)
        gain = read(f"{prefix}post_attention_layernorm.weight", hidden)
        gate, up = (read(f"{prefix}mlp.{name}_proj.weight", inner, hidden) * gain for name in ("gate", "up"))
        down = read(f"{prefix}mlp.down_proj.weight", hidden, inner)
        inner_scale = _balance(up, np.sqrt(np.square(down).mean(0)))
        tensors |= {
            f"{prefix}input_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}self_attn.q_proj.weight": q,
            f"{prefix}self_attn.k_proj.weight": k,
            f"{prefix}self_attn.v_proj.weight": v * scale[:, None],
            f"{prefix}self_attn.o_proj.weight": grouped.reshape(hidden, q_size),
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up * inner_scale[:, None],
            f"{prefix}mlp.down_proj.weight": down / inner_scale,
        }
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


def _balance(rows: F32, columns: F32) -> F32:
    """What to scale rows by, and columns behind them by its inverse, so that both are equally large."""
    size = np.sqrt(np.square(rows).mean(1))
    scale: F32 = np.sqrt(columns / np.maximum(size, 1e-12)).astype(np.float32)
    return np.where(np.isfinite(scale) & (scale > 0), scale, np.float32(1))

"""Pure. GGUF's names of tensors, for the Hugging Face names that families ask for (gguf-py, tensor_mapping).

The same name may mean different norms in different architectures: `ffn_norm` stands before the MLP
everywhere, but what Hugging Face calls it differs.
"""

OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_MLP = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_LLAMA = {**_ATTENTION, "post_attention_layernorm": "ffn_norm", **_MLP}
_GEMMA2 = {
    **_ATTENTION,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **_MLP,
}
INSIDE: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_HEAD_NORMS},
    "gemma2": _GEMMA2,
    "gemma3": {**_GEMMA2, **_HEAD_NORMS},
    "phi3": {
        "input_layernorm": "attn_norm",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
}
INTERLEAVED = ("llama",)  # whose Q and K llama.cpp stores as pairs, for its rotary kernel


def gguf_name(architecture: str, name: str) -> str:
    """Of a Hugging Face name; one that nobody knows is given back with its layer's prefix."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, inside = name.split(".", 3)
    module, kind = inside.rsplit(".", 1)
    return f"blk.{layer}.{INSIDE[architecture].get(module, module)}.{kind}"


def hf_name(architecture: str, name: str) -> str:
    """The other way, of a tensor in a layer: `blk.3.attn_q.weight`."""
    _, _, within = name.partition(".")
    layer, _, inside = within.partition(".")
    module, _, kind = inside.rpartition(".")
    back = {gguf: hf for hf, gguf in INSIDE[architecture].items()}
    return f"model.layers.{layer}.{back.get(module, module)}.{kind}"

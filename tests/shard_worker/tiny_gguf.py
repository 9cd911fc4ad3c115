"""Writes a small model of transformers as GGUF, as llama.cpp's converter would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from tokenizers import Tokenizer

from shard_worker.gguf_names import gguf_name

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permutation of Q and K: the two halves of a head become pairs."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(
    model: Any,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tokenizer: Path | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> None:
    config = model.config
    writer = GGUFWriter(path, ARCHITECTURES[config.model_type])
    _add_sizes(writer, config)
    if config.model_type.startswith("gemma"):
        _add_gemma(writer, config)
    if config.model_type == "phi3":
        _add_phi3(writer, config)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = _stored(config, name, tensor.float().numpy())
        stored = GGMLQuantizationType.F32 if weight.ndim == 1 else kind
        own = gguf_name(ARCHITECTURES[config.model_type], name)
        writer.add_tensor(own, packed(weight, stored), raw_dtype=stored)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def packed(weight: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows of bytes. Q4_K, which gguf only reads, has one scale and offset a block here."""
    if kind is not GGMLQuantizationType.Q4_K:
        return quantize(weight, kind)
    blocks = weight.reshape(-1, 256).astype(np.float32)
    largest = np.float32(63)  # of scales, which are all alike
    low = np.minimum(blocks.min(1), 0)
    steps = np.stack(((blocks.max(1) - low) / 15 / largest, -low / largest), 1).astype(np.float16)
    scale, offset = (steps.astype(np.float32) * largest).T[:, :, None]
    codes = np.clip(np.round((blocks + offset) / np.maximum(scale, 1e-9)), 0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    scales = np.full((len(blocks), 12), 255, np.uint8)
    return np.concatenate((steps.view(np.uint8), scales, nibbles), 1).reshape(len(weight), -1)


def _stored(config: Any, name: str, weight: np.ndarray) -> np.ndarray:
    if config.model_type in ("llama", "mistral"):
        if "q_proj" in name:
            return interleave(weight, config.num_attention_heads)
        if "k_proj" in name:
            return interleave(weight, config.num_key_value_heads)
    if config.model_type.startswith("gemma") and "norm" in name:
        return weight + 1
    return weight


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.model_type != "phi3":
        writer.add_rope_dimension_count(head_dim)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_gemma(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_phi3(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] == "longrope":
        ratio = config.max_position_embeddings / config.original_max_position_embeddings
        writer.add_rope_scaling_attn_factors(
            np.sqrt(1 + np.log(ratio) / np.log(config.original_max_position_embeddings))
        )
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def _add_tokenizer(writer: GGUFWriter, path: Path, vocab_size: int) -> None:
    vocab = Tokenizer.from_file(str(path)).get_vocab()
    tokens = [f"<unused{i}>" for i in range(vocab_size)]
    tokens[258] = "ab"
    types = [5] * vocab_size
    for piece, i in vocab.items():
        tokens[i], types[i] = piece, 3 if piece.startswith("<") and len(piece) > 1 else 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{{ messages[0]['content'] }}")

"""Writes a small Llama of transformers as GGUF, as llama.cpp's converter would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer

from shard_worker.gguf_names import gguf_name


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
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        if "q_proj" in name:
            weight = interleave(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = interleave(weight, config.num_key_value_heads)
        stored = GGMLQuantizationType.F32 if weight.ndim == 1 else kind
        writer.add_tensor(gguf_name("llama", name), quantize(weight, stored), raw_dtype=stored)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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

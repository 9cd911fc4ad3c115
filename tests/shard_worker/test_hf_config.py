"""A configuration is understood or refused: nothing that would change the numbers is passed over."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shard_worker.executor import LoadFailed
from shard_worker.model.config import ModelConfig
from shard_worker.model.families import stage_weights
from shard_worker.model.hf_config import config_from_hf
from shard_worker.model.rope import LongRope, RopeConfig, YarnRope, rope_of, yarn_attention_factor
from shard_worker.weights import open_checkpoint
from tests.shard_worker import tiny_models

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
LONG = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def config(model_type: str = "llama", **changes: Any) -> ModelConfig:
    return config_from_hf(LLAMA | {"model_type": model_type} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"num_key_value_heads": 4}, "6 heads don't divide into 4 KV heads"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_layers = 0"),
        ({"head_dim": 7}, "rotary size 7"),
        ({"rms_norm_eps": 2}, "norm epsilon 2.0"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"sliding_window": 16}, "sliding_window has no meaning in llama"),
        ({"rms_norm_eps": None, "vocab_size": True}, "vocab_size is True"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor = 0.0 is not positive"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is None"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type dynamic changes"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary embeddings have no meaning"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embeddings have no meaning"),
        ({"model_type": "phi3", "partial_rotary_factor": 4.0}, "partial_rotary_factor = 4.0"),
        ({"rope_parameters": 5}, "rope_parameters is not an object"),
        ({"rope_theta": -1}, "rope_theta = -1.0 is not positive"),
        ({"model_type": "mistral", "sliding_window": -3}, "a window of -3 tokens"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 6}, "layer_types has no meaning"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 6}, "layer_types is not a list"),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 6},
            "sliding_attention without sliding_window",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention"] * 5},
            "5 layer types for 6 layers",
        ),
        ({"model_type": "gemma2", "final_logit_softcapping": -1.0}, "a soft cap of -1.0"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "looks ahead"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters of gemma3"),
        ({"model_type": "phi3", "rope_scaling": LONG | {"short_factor": [1.0]}}, "rope factors don't fit"),
        ({"model_type": "phi3", "rope_scaling": LONG | {"long_factor": None}}, "long_factor is not a list"),
    ],
    ids=str,
)
def test_what_we_would_get_wrong_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadFailed, match=message):
        config_from_hf(LLAMA | changes)


def test_no_more_of_a_head_turns_than_there_is() -> None:
    """Whichever file says so: compiled code would turn what lies behind it."""
    with pytest.raises(LoadFailed, match="rotary size 16 in heads of 8"):
        replace(config("phi3"), rope=RopeConfig(1e4, 16))


@pytest.mark.parametrize("extra", ["self_attn.q_proj.bias", "self_attn.q_norm.weight", "mlp.scale"])
def test_a_tensor_that_the_family_does_not_know_is_refused(tmp_path: Path, extra: str) -> None:
    tiny_models.make_small(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.2.{extra}"
    save_file(tensors | {name: tensors["model.norm.weight"].clone()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    stage_weights(checkpoint, 0, 2)
    with pytest.raises(LoadFailed, match=f"{name} has no meaning in a layer of llama"):
        stage_weights(checkpoint, 2, 4)


@pytest.mark.parametrize("extra", ["lm_head.bias", "model.embed_positions.weight", "vision_tower.x"])
def test_so_is_one_outside_of_the_layers(tmp_path: Path, extra: str) -> None:
    tiny_models.make_small(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {extra: torch.ones(80)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadFailed, match=f"{extra} has no meaning in llama"):
        stage_weights(open_checkpoint(tmp_path), 1, 2)


def test_what_old_files_keep_beside_the_weights_is_not_minded(tmp_path: Path) -> None:
    tiny_models.make_small(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {name: tensors["model.norm.weight"].clone()}, tmp_path / "model.safetensors")
    assert len(stage_weights(open_checkpoint(tmp_path), 0, 4).layers) == 4


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"]
)
def test_keys_left_out_mean_what_transformers_takes_them_for(model_type: str) -> None:
    left_out = ("model_type", "max_position_embeddings", "num_key_value_heads")
    sizes = {key: value for key, value in LLAMA.items() if key not in left_out}
    sizes |= {"num_attention_heads": 32, "hidden_size": 512, "num_hidden_layers": 30}
    theirs = tiny_models.transformers().AutoConfig.for_model(model_type, **(sizes | {"pad_token_id": 0}))
    ours = config_from_hf(sizes | {"model_type": model_type})
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.head_dim, ours.num_kv_heads) == (head_dim, theirs.num_key_value_heads)
    assert (ours.rms_eps, ours.tied_head) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.context_len_max == theirs.max_position_embeddings
    kinds = getattr(theirs, "layer_types", None)
    window = theirs.sliding_window if model_type != "llama" else None
    if kinds is None:
        windows = [window] * 30
    else:
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [ours.window_of(i) for i in range(30)] == windows
    if model_type.startswith("gemma"):
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
        assert ours.final_softcap == (theirs.final_logit_softcapping or 0.0)
        assert ours.attention_softcap == (theirs.attn_logit_softcapping or 0.0)


def test_gemma3_of_before_the_new_names(tmp_path: Path) -> None:
    """What the published files say: bases beside the scaling, which holds for layers without a window."""
    made = config(
        "gemma3_text",
        rope_theta=5e5,
        rope_local_base_freq=2e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
    )
    assert made.rope is not None and made.windowed_rope == RopeConfig(2e3, 256)
    assert made.rope.theta == 5e5 and made.rope.scaling is not None
    assert [w is None for w in made.windows] == [False, False, True] * 2
    assert np.allclose(rope_of(made.rope, 256).frequencies[0], 1 / 8)


def test_yarn_scales_attention_by_the_logarithm_of_its_factor() -> None:
    assert yarn_attention_factor(YarnRope(1.0, 32)) == 1.0
    assert yarn_attention_factor(YarnRope(4.0, 32)) == pytest.approx(1 + 0.1 * np.log(4))


def test_longrope_serves_one_set_of_factors() -> None:
    """By default the short one, within the original context; the long one when a longer context is asked."""
    made = config("phi3", rope_scaling=LONG, original_max_position_embeddings=64)
    assert made.rope is not None and isinstance(made.rope.scaling, LongRope)
    assert made.context_len_max == 64
    short, long = rope_of(made.rope, 64), rope_of(made.rope, 65)
    assert np.allclose(short.frequencies / long.frequencies, 2.0)
    assert not made.serving(64).stretched and made.serving(65).stretched
    assert made.serving(0) == made and made.serving(256).context_len_max == 256
    for context_len in (1, 257):
        with pytest.raises(LoadFailed, match="this model serves 2 to 256 tokens"):
            made.serving(context_len)
    assert short.scale == long.scale == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)


def test_layer_params_count_the_matrices(tmp_path: Path) -> None:
    for model_type in ("qwen3", "gemma3_text", "phi3"):
        path = tmp_path / model_type
        model = tiny_models.make_small(path, model_type)
        layer = [p for p in model.model.layers[1].parameters() if p.ndim == 2]
        raw = json.loads((path / "config.json").read_text())
        assert config_from_hf(raw).layer_params == sum(p.numel() for p in layer)

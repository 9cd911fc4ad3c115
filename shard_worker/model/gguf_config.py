"""Pure. Reads a model's configuration from GGUF metadata (gguf-py's constants name the keys).

What the metadata doesn't say, llama.cpp's code does: which layers of Gemma see a window, what their rope's
base is, how Gemma's scores are scaled. Everything that would change the numbers is understood or refused.
"""

import math
from collections.abc import Mapping

from shard_worker.executor import LoadFailed
from shard_worker.model.config import ModelConfig
from shard_worker.model.rope import FactorsRope, LinearRope, LongRope, RopeConfig, RopeScaling, YarnRope
from shard_worker.model.settings import Settings, number, positive, whole
from shard_worker.model.stage_weights import Activation

# Architecture -> family.
ARCHITECTURES = {
    "llama": "llama",  # and Mistral
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
PLAIN, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (PLAIN, LONG, SHORT)  # frequencies' divisors, kept as tensors
Factors = Mapping[str, tuple[float, ...]]  # of those that the file has

WINDOWED_THETA = 10_000.0  # Gemma 3's layers with a window
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62  # these scale scores by the head's share of the hidden size


def config_from_gguf(
    metadata: Settings, *, vocab_size: int, tied_head: bool, factors: Factors
) -> ModelConfig:
    """`factors`: the tensors of FACTOR_TENSORS that the file has. Raises LoadFailed."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise LoadFailed(f"GGUF: architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    family, prefix = ARCHITECTURES[architecture], f"{architecture}."
    keys: dict[str, object] = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    if keys.get("expert_count"):
        raise LoadFailed("GGUF: mixture-of-experts models can't be served yet")
    heads, hidden = whole(keys, "attention.head_count"), whole(keys, "embedding_length")
    head_dim = whole(keys, "attention.key_length", hidden // max(1, heads))
    if whole(keys, "attention.value_length", head_dim) != head_dim:
        raise LoadFailed("GGUF: keys and values of different size can't be served")
    num_layers, gemma = whole(keys, "block_count"), family.startswith("gemma")
    rope = _rope(family, keys, head_dim, factors)
    windowed_rope = RopeConfig(positive(keys, "rope.freq_base_swa", WINDOWED_THETA), head_dim)
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=whole(keys, "attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=whole(keys, "feed_forward_length"),
        vocab_size=vocab_size,
        context_len_max=_context_len(keys, rope),
        context_len_limit=whole(keys, "context_length"),
        rms_eps=number(keys, "attention.layer_norm_rms_epsilon"),
        rope=rope,
        windowed_rope=windowed_rope if family == "gemma3_text" else None,
        windows=_windows(family, keys, num_layers),
        tied_head=tied_head,
        qkv_bias=family == "qwen2",
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_scale=_attention_scale(family, num_layers, hidden // max(1, heads), head_dim),
        attention_softcap=number(keys, "attn_logit_softcapping", 50.0) if family == "gemma2" else 0.0,
        final_softcap=number(keys, "final_logit_softcapping", _final_softcap(family)) if gemma else 0.0,
    )


def _final_softcap(family: str) -> float:
    return 30.0 if family == "gemma2" else 0.0


def _attention_scale(family: str, num_layers: int, share: int, head_dim: int) -> float:
    if (family, num_layers) in (("gemma2", GEMMA2_27B_LAYERS), ("gemma3_text", GEMMA3_27B_LAYERS)):
        return 1 / math.sqrt(share)
    return 1 / math.sqrt(head_dim) if family.startswith("gemma") else 0.0


def _windows(family: str, keys: Settings, num_layers: int) -> tuple[int | None, ...]:
    window = whole(keys, "attention.sliding_window", 0)
    match family:
        case "gemma2" | "gemma3_text":
            window = window or 4096
            pattern = 2 if family == "gemma2" else 6
            pattern = whole(keys, "attention.sliding_window_pattern", pattern)
            if pattern < 1:
                raise LoadFailed(f"GGUF: attention.sliding_window_pattern {pattern}")
            return tuple(window if (i + 1) % pattern else None for i in range(num_layers))
        case "phi3" | "llama" if window:
            return (window,) * num_layers
        case _ if window:
            raise LoadFailed(f"GGUF: attention.sliding_window has no meaning in {family}")
        case _:
            return ()


def _context_len(keys: Settings, rope: RopeConfig) -> int:
    context_len = whole(keys, "context_length")
    if isinstance(rope.scaling, LongRope):
        return min(context_len, rope.scaling.original_context_len)
    return context_len


# ---- rope -------------------------------------------------------------------------------------------


def _rope(family: str, keys: Settings, head_dim: int, factors: Factors) -> RopeConfig:
    rotary_dim = whole(keys, "rope.dimension_count", head_dim)
    if rotary_dim != head_dim and family != "phi3":
        raise LoadFailed(f"GGUF: partial rotary embeddings have no meaning in {family}")
    theta = positive(keys, "rope.freq_base", 10_000.0)
    return RopeConfig(theta, rotary_dim, _scaling(family, keys, factors))


def _scaling(family: str, keys: Settings, factors: Factors) -> RopeScaling:
    kind = keys.get("rope.scaling.type", "none")
    if LONG in factors or SHORT in factors:
        if family != "phi3" or kind not in ("none", "longrope"):
            raise LoadFailed(f"GGUF: {LONG} has no meaning in {family} with rope scaling {kind!r}")
        return _longrope(keys, factors)
    match kind:
        case "none" if PLAIN in factors:
            return FactorsRope(factors[PLAIN])
        case "none":
            return None
        case "linear" if PLAIN not in factors:
            return LinearRope(positive(keys, "rope.scaling.factor"))
        case "yarn" if PLAIN not in factors:
            for key in ("attn_factor", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
                if keys.get(f"rope.scaling.{key}") is not None:
                    raise LoadFailed(f"GGUF: rope.scaling.{key} can't be served")
            return YarnRope(
                factor=positive(keys, "rope.scaling.factor"),
                original_context_len=whole(keys, "rope.scaling.original_context_length"),
                beta_fast=positive(keys, "rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=positive(keys, "rope.scaling.yarn_beta_slow", 1.0),
            )
        case _:
            raise LoadFailed(f"GGUF: rope scaling {kind!r} can't be served")


def _longrope(keys: Settings, factors: Factors) -> LongRope:
    if LONG not in factors or SHORT not in factors:
        raise LoadFailed(f"GGUF: one of {LONG} and {SHORT} is missing")
    context_len = whole(keys, "context_length")
    original = whole(keys, "rope.scaling.original_context_length", context_len)
    if original < 2:
        raise LoadFailed(f"GGUF: rope.scaling.original_context_length = {original}")
    ratio = context_len / original
    magnitude = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return LongRope(
        short_factors=factors[SHORT],
        long_factors=factors[LONG],
        original_context_len=original,
        attention_factor=positive(keys, "rope.scaling.attn_factor", magnitude),
    )

"""Pure. Reads a Hugging Face config.json, old and new forms. What it leaves out is as transformers has it.

Everything that would change the numbers is either understood or refused.
"""

import math
from collections.abc import Mapping

from shard_worker.executor import LoadFailed
from shard_worker.model.config import ModelConfig
from shard_worker.model.rope import (
    LinearRope,
    Llama3Rope,
    LongRope,
    RopeConfig,
    RopeScaling,
    YarnRope,
    yarn_magnitude,
)
from shard_worker.model.settings import Settings, flag, number, numbers, positive, section, whole
from shard_worker.model.stage_weights import Activation

# model_type -> what transformers takes for keys that a file leaves out.
DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    "gemma2": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "head_dim": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "head_dim": 256,
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
}
GEMMAS = ("gemma2", "gemma3_text")
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
SLIDING, FULL = "sliding_attention", "full_attention"
THETA, GEMMA3_THETA = 10_000.0, 1_000_000.0


def config_from_hf(raw: Settings) -> ModelConfig:
    """`raw`: the parsed config.json. Raises LoadFailed."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in DEFAULTS:
        raise LoadFailed(f"config.json: model_type {family!r} is not one of {', '.join(DEFAULTS)}")
    if raw.get("quantization_config"):
        raise LoadFailed("config.json: quantised weights (quantization_config) can't be read yet")
    raw = DEFAULTS[family] | dict(raw)
    gemma = family in GEMMAS
    if flag(raw, "use_bidirectional_attention"):
        raise LoadFailed("config.json: use_bidirectional_attention: what looks ahead can't be served")
    if family == "gemma3_text" and raw.get("attn_logit_softcapping") is not None:
        raise LoadFailed("config.json: attn_logit_softcapping has no meaning in gemma3_text")
    heads, hidden = whole(raw, "num_attention_heads"), whole(raw, "hidden_size")
    head_dim = whole(raw, "head_dim", hidden // max(1, heads))
    num_layers = whole(raw, "num_hidden_layers")
    rope, windowed_rope = _ropes(family, raw, head_dim)
    attention_bias = family in ("llama", "qwen3", *GEMMAS) and flag(raw, "attention_bias")
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=whole(raw, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=whole(raw, "intermediate_size"),
        vocab_size=whole(raw, "vocab_size"),
        context_len_max=_context_len(raw, rope),
        context_len_limit=whole(raw, "max_position_embeddings"),
        rms_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=rope,
        windowed_rope=windowed_rope,
        windows=_windows(family, raw, num_layers),
        tied_head=flag(raw, "tie_word_embeddings", gemma),
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=family == "llama" and flag(raw, "mlp_bias"),
        activation=_activation(raw, gemma),
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_scale=positive(raw, "query_pre_attn_scalar", 256.0) ** -0.5 if gemma else 0.0,
        attention_softcap=number(raw, "attn_logit_softcapping", 0.0) if family == "gemma2" else 0.0,
        final_softcap=number(raw, "final_logit_softcapping", 0.0) if gemma else 0.0,
        norm_offset=1.0 if gemma else 0.0,
    )


def eos_ids_from_hf(*raws: Mapping[str, object]) -> tuple[int, ...]:
    """The ids that end an answer: the first file that names any decides."""
    for raw in raws:
        match raw.get("eos_token_id"):
            case bool() | None:
                continue
            case int(one):
                return (one,)
            case list(several):
                return tuple(i for i in several if isinstance(i, int))
    return ()


def _context_len(raw: Settings, rope: RopeConfig) -> int:
    context_len = whole(raw, "max_position_embeddings")
    if isinstance(rope.scaling, LongRope):
        return min(context_len, rope.scaling.original_context_len)
    return context_len


def _activation(raw: Settings, gemma: bool) -> Activation:
    name = raw.get("hidden_activation") if gemma else raw.get("hidden_act")
    name = name or ("gelu_pytorch_tanh" if gemma else "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise LoadFailed(f"config.json: activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


# ---- windows ----------------------------------------------------------------------------------------


def _windows(family: str, raw: Settings, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer, or nothing when none has one. Raises LoadFailed."""
    kinds, window = raw.get("layer_types"), raw.get("sliding_window")
    if family in ("llama", "mistral", "phi3"):
        if kinds is not None and family != "llama":
            raise LoadFailed(f"config.json: layer_types has no meaning in {family}")
        if not window:
            return ()
        if family == "llama":
            raise LoadFailed("config.json: sliding_window has no meaning in llama")
        return (whole(raw, "sliding_window"),) * num_layers
    if family in ("qwen2", "qwen3") and not flag(raw, "use_sliding_window"):
        window = None
    if kinds is None:
        kinds = _default_kinds(family, raw, num_layers, window is not None)
    if not isinstance(kinds, list) or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise LoadFailed(f"config.json: layer_types is not a list of {SLIDING} and {FULL}")
    if SLIDING not in kinds:
        return ()
    if window is None:
        raise LoadFailed(f"config.json: {SLIDING} without sliding_window")
    return tuple(whole(raw, "sliding_window") if kind == SLIDING else None for kind in kinds)


def _default_kinds(family: str, raw: Settings, num_layers: int, has_window: bool) -> list[str]:
    if family in GEMMAS:
        pattern = 2 if family == "gemma2" else whole(raw, "sliding_window_pattern", 6)
        if pattern < 1:
            raise LoadFailed(f"config.json: sliding_window_pattern {pattern}")
        return [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    first = whole(raw, "max_window_layers", 28)
    return [SLIDING if has_window and i >= first else FULL for i in range(num_layers)]


# ---- rope -------------------------------------------------------------------------------------------


def _ropes(family: str, raw: Settings, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Of all layers, or of those without a window and those with one. Raises LoadFailed.

    Old files have rope_theta beside rope_scaling, new ones both in rope_parameters; Gemma 3 has them for
    each kind of layer, or rope_local_base_freq for those with a window.
    """
    new, old = section(raw, "rope_parameters"), section(raw, "rope_scaling")
    settings = dict(old or new)
    if family != "gemma3_text":
        settings.setdefault("rope_theta", number(raw, "rope_theta", THETA))
        return _rope(family, raw, settings, head_dim), None
    full, sliding = dict(section(new, FULL)), dict(section(new, SLIDING))
    full |= old
    full.setdefault("rope_theta", number(raw, "rope_theta", GEMMA3_THETA))
    sliding.setdefault("rope_theta", number(raw, "rope_local_base_freq", THETA))
    if new.keys() - {FULL, SLIDING}:
        raise LoadFailed(f"config.json: rope_parameters of gemma3_text has more than {FULL} and {SLIDING}")
    return _rope(family, raw, full, head_dim), _rope(family, raw, sliding, head_dim)


def _rope(family: str, raw: Settings, settings: Settings, head_dim: int) -> RopeConfig:
    share = number(settings, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    if share != 1.0 and family != "phi3":
        raise LoadFailed(f"config.json: partial rotary embeddings have no meaning in {family}")
    if not 0 < share <= 1:
        raise LoadFailed(f"config.json: partial_rotary_factor = {share}")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if family == "phi3" and kind in ("su", "yarn"):  # what its first files called it
        kind = "longrope"
    context_len = whole(raw, "max_position_embeddings")
    # transformers lets the outer key win where a file has both.
    original = whole(raw, "original_max_position_embeddings", 0) or whole(
        settings, "original_max_position_embeddings", context_len
    )
    if original < 2:
        raise LoadFailed(f"config.json: original_max_position_embeddings = {original}")
    scaling: RopeScaling
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearRope(positive(settings, "factor"))
        case "llama3":
            scaling = Llama3Rope(
                factor=positive(settings, "factor"),
                low_freq_factor=positive(settings, "low_freq_factor"),
                high_freq_factor=positive(settings, "high_freq_factor"),
                original_context_len=original,
            )
        case "yarn":
            scaling = _yarn(settings, original)
        case "longrope":
            scaling = _longrope(settings, original, context_len)
        case "dynamic":
            raise LoadFailed(
                "config.json: rope type dynamic changes its frequencies as a sequence grows, "
                "so that keys in the cache would no longer fit: it can't be served"
            )
        case _:
            raise LoadFailed(
                f"config.json: rope type {kind!r} is not one of default, linear, llama3, yarn, longrope"
            )
    return RopeConfig(positive(settings, "rope_theta"), int(head_dim * share), scaling)


def _yarn(settings: Settings, original: int) -> YarnRope:
    factor = positive(settings, "factor")
    attention_factor = None
    if settings.get("attention_factor") is not None:
        attention_factor = positive(settings, "attention_factor")
    elif number(settings, "mscale", 0.0) and number(settings, "mscale_all_dim", 0.0):
        attention_factor = yarn_magnitude(factor, positive(settings, "mscale")) / yarn_magnitude(
            factor, positive(settings, "mscale_all_dim")
        )
    return YarnRope(
        factor=factor,
        original_context_len=original,
        beta_fast=positive(settings, "beta_fast", 32.0),
        beta_slow=positive(settings, "beta_slow", 1.0),
        truncate=flag(settings, "truncate", True),
        attention_factor=attention_factor,
    )


def _longrope(settings: Settings, original: int, context_len: int) -> LongRope:
    factor = positive(settings, "factor", context_len / original)
    attention_factor = 1.0
    if settings.get("attention_factor") is not None:
        attention_factor = positive(settings, "attention_factor")
    elif factor > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(
        short_factors=numbers(settings, "short_factor"),
        long_factors=numbers(settings, "long_factor"),
        original_context_len=original,
        attention_factor=attention_factor,
    )

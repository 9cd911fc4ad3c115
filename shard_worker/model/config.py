"""Pure. What a model is made of, read from a Hugging Face configuration or from GGUF metadata.

Everything that would change the numbers is either understood or refused: no key that matters is skipped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shard_worker.executor import LoadFailed

LLAMA_LIKE = ("llama", "mistral", "qwen2")
SIZE_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Low frequencies divided by `factor`, high ones kept, smooth between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class FactorsRope:
    """Each frequency divided by a factor of its own, as GGUF stores it."""

    factors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | FactorsRope | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_len_max: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = None
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            value = getattr(self, name)
            if not 0 < value <= SIZE_MAX:
                raise LoadFailed(f"model configuration: {name} = {value} is outside 1 to {SIZE_MAX}")
        if not 0 < self.intermediate_size <= SIZE_MAX or not 2 <= self.context_len_max <= SIZE_MAX:
            raise LoadFailed("model configuration: intermediate_size or context length is out of range")
        if self.num_heads % self.num_kv_heads:
            raise LoadFailed(
                f"model configuration: {self.num_heads} heads don't divide into {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise LoadFailed(f"model configuration: head size {self.head_dim} is odd")
        if not (0 < self.rms_eps < 1 and 0 < self.rope_theta < math.inf):
            raise LoadFailed("model configuration: norm epsilon or rope base is out of range")

    @property
    def layer_params(self) -> int:
        """Weights of one layer's matrices."""
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.hidden_size * (attention + 3 * self.intermediate_size)


def inverse_frequencies(config: ModelConfig) -> list[float]:
    """Radians per position of each of the head_dim / 2 rotations."""
    half = config.head_dim // 2
    plain = [config.rope_theta ** (-i / half) for i in range(half)]
    match config.rope_scaling:
        case None:
            return plain
        case LinearRope(factor):
            return [f / factor for f in plain]
        case FactorsRope(factors):
            return [f / factor for f, factor in zip(plain, factors, strict=True)]
        case Llama3Rope() as scaling:
            return [_llama3_frequency(f, scaling) for f in plain]


def _llama3_frequency(frequency: float, scaling: Llama3Rope) -> float:
    turns = scaling.original_context_len * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


# ---- Hugging Face -----------------------------------------------------------------------------------


def config_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """`raw`: the parsed config.json. Raises LoadFailed."""
    family = raw.get("model_type")
    if family not in LLAMA_LIKE:
        raise LoadFailed(f"config.json: model_type {family!r} is not one of {', '.join(LLAMA_LIKE)}")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise LoadFailed(f"config.json: hidden_act {raw['hidden_act']!r} is not silu")
    if raw.get("quantization_config"):
        raise LoadFailed("config.json: quantised weights (quantization_config) can't be read yet")
    heads = _int(raw, "num_attention_heads")
    hidden = _int(raw, "hidden_size")
    context = _int(raw, "max_position_embeddings", 2048)
    _refuse_window(raw, context)
    theta, scaling = _rope_from_hf(raw)
    attention_bias = _bool(raw, "attention_bias", False)
    return ModelConfig(
        family=str(family),
        hidden_size=hidden,
        num_layers=_int(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_int(raw, "num_key_value_heads", heads),
        head_dim=_int(raw, "head_dim", hidden // max(1, heads)),
        intermediate_size=_int(raw, "intermediate_size"),
        vocab_size=_int(raw, "vocab_size"),
        context_len_max=context,
        rms_eps=_float(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_head=_bool(raw, "tie_word_embeddings", False),
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=_bool(raw, "mlp_bias", False),
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


def _refuse_window(raw: Mapping[str, object], context: int) -> None:
    window = raw.get("sliding_window")
    used = raw.get("use_sliding_window", True)
    if isinstance(window, int) and window and used and window < context:
        raise LoadFailed(
            f"config.json: sliding_window {window} below the context of {context} can't be served"
        )


def _rope_from_hf(raw: Mapping[str, object]) -> tuple[float, RopeScaling]:
    """Old files have rope_theta beside rope_scaling, new ones both in rope_parameters."""
    for key in ("rope_parameters", "rope_scaling"):
        if raw.get(key) is not None and not isinstance(raw[key], Mapping):
            raise LoadFailed(f"config.json: {key} is not an object")
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    settings: Mapping[str, object] = (
        new if isinstance(new, Mapping) else old if isinstance(old, Mapping) else {}
    )
    theta = _float(settings if "rope_theta" in settings else raw, "rope_theta", 10000.0)
    if (
        _float(settings, "partial_rotary_factor", 1.0) != 1.0
        or _float(raw, "partial_rotary_factor", 1.0) != 1.0
    ):
        raise LoadFailed("config.json: partial rotary embeddings can't be served")
    kind = settings.get("rope_type", settings.get("type", "default"))
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearRope(_positive(settings, "factor"))
        case "llama3":
            return theta, Llama3Rope(
                factor=_positive(settings, "factor"),
                low_freq_factor=_positive(settings, "low_freq_factor"),
                high_freq_factor=_positive(settings, "high_freq_factor"),
                original_context_len=_int(settings, "original_max_position_embeddings"),
            )
        case _:
            raise LoadFailed(f"config.json: rope type {kind!r} is not one of default, linear, llama3")


# ---- GGUF -------------------------------------------------------------------------------------------


def config_from_gguf(
    metadata: Mapping[str, object], *, vocab_size: int, tied_head: bool, rope_factors: Sequence[float] | None
) -> ModelConfig:
    """`rope_factors`: the file's rope_freqs tensor. Raises LoadFailed."""
    arch = metadata.get("general.architecture")
    if arch != "llama":
        raise LoadFailed(f"GGUF: architecture {arch!r} is not llama")
    if metadata.get("llama.expert_count"):
        raise LoadFailed("GGUF: mixture-of-experts models can't be served yet")
    heads = _int(metadata, "llama.attention.head_count")
    hidden = _int(metadata, "llama.embedding_length")
    head_dim = _int(metadata, "llama.attention.key_length", hidden // max(1, heads))
    if _int(metadata, "llama.attention.value_length", head_dim) != head_dim:
        raise LoadFailed("GGUF: keys and values of different size can't be served")
    if _int(metadata, "llama.rope.dimension_count", head_dim) != head_dim:
        raise LoadFailed("GGUF: partial rotary embeddings can't be served")
    return ModelConfig(
        family="llama",
        hidden_size=hidden,
        num_layers=_int(metadata, "llama.block_count"),
        num_heads=heads,
        num_kv_heads=_int(metadata, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=_int(metadata, "llama.feed_forward_length"),
        vocab_size=vocab_size,
        context_len_max=_int(metadata, "llama.context_length"),
        rms_eps=_float(metadata, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=_float(metadata, "llama.rope.freq_base", 10000.0),
        rope_scaling=_rope_from_gguf(metadata, head_dim, rope_factors),
        tied_head=tied_head,
    )


def _rope_from_gguf(
    metadata: Mapping[str, object], head_dim: int, factors: Sequence[float] | None
) -> RopeScaling:
    kind = metadata.get("llama.rope.scaling.type", "none")
    match kind:
        case "none" if factors is None:
            return None
        case "none":
            assert factors is not None
            if len(factors) != head_dim // 2 or not all(f > 0 for f in factors):
                raise LoadFailed("GGUF: rope_freqs doesn't fit the head size")
            return FactorsRope(tuple(factors))
        case "linear" if factors is None:
            return LinearRope(_positive(metadata, "llama.rope.scaling.factor"))
        case _:
            raise LoadFailed(f"GGUF: rope scaling {kind!r} can't be served")


# ---- values of a dictionary from outside ------------------------------------------------------------


def _int(raw: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise LoadFailed(f"model configuration: {key} is {value!r}, not a whole number")
    return value


def _float(raw: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise LoadFailed(f"model configuration: {key} is {value!r}, not a number")
    return float(value)


def _positive(raw: Mapping[str, object], key: str) -> float:
    value = _float(raw, key)
    if not 0 < value < math.inf:
        raise LoadFailed(f"model configuration: {key} = {value} is not positive")
    return value


def _bool(raw: Mapping[str, object], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LoadFailed(f"model configuration: {key} is {value!r}, not true or false")
    return value

"""Pure. Rotary position embeddings: how fast each pair of a head turns, for every way of stretching contexts.

Formulas are those of transformers (modeling_rope_utils.py). A model serves one set of frequencies, so that
what the cache holds never changes its meaning. Longrope has two, and transformers computes a sequence anew
with the long ones once it outgrows the original context. Here a model serves up to the original length with
the short ones, and gives transformers' numbers; who asks for a longer context (`context_len`) has the long
ones for every sequence, which are transformers' numbers for those that are longer than the original.
"""

import math
from dataclasses import dataclass

import numpy as np

from shard_worker.executor import LoadFailed
from shard_worker.model.stage_weights import Rope


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
class YarnRope:
    """Pairs that turn rarely are stretched, quick ones kept, a ramp between (Peng et al., 2023)."""

    factor: float
    original_context_len: int
    beta_fast: float = 32.0  # turns within the original context, above which a pair is kept
    beta_slow: float = 1.0  # below which it is stretched
    truncate: bool = True  # the ramp's ends to whole pairs
    attention_factor: float | None = None  # of cosine and sine; None: after the factor


@dataclass(frozen=True, slots=True)
class LongRope:
    """Each frequency divided by a factor of its own, from one of two sets (Phi-3)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context_len: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class FactorsRope:
    """Each frequency divided by a factor of its own, as GGUF stores it."""

    factors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | YarnRope | LongRope | FactorsRope | None


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    rotary_dim: int  # of each head: the first so many
    scaling: RopeScaling = None

    def __post_init__(self) -> None:
        """Raises LoadFailed."""
        if not 1 < self.theta < math.inf or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise LoadFailed(f"model configuration: rope base {self.theta} or rotary size {self.rotary_dim}")
        sets: tuple[tuple[float, ...], ...] = ()
        match self.scaling:
            case LongRope():
                sets = (self.scaling.short_factors, self.scaling.long_factors)
            case FactorsRope():
                sets = (self.scaling.factors,)
        for factors in sets:
            if len(factors) != self.rotary_dim // 2 or not all(0 < f < math.inf for f in factors):
                raise LoadFailed(
                    f"model configuration: rope factors don't fit a rotary size of {self.rotary_dim}"
                )


def rope_of(config: RopeConfig, context_len_max: int) -> Rope:
    """Frequencies and scale, for a model that serves contexts of that length."""
    half = config.rotary_dim // 2
    plain = [config.theta ** (-i / half) for i in range(half)]
    scale = 1.0
    match config.scaling:
        case None:
            chosen = plain
        case LinearRope(factor):
            chosen = [f / factor for f in plain]
        case FactorsRope(factors):
            chosen = [f / factor for f, factor in zip(plain, factors, strict=True)]
        case Llama3Rope() as scaling:
            chosen = [_llama3_frequency(f, scaling) for f in plain]
        case YarnRope() as scaling:
            chosen, scale = _yarn(plain, config, scaling), yarn_attention_factor(scaling)
        case LongRope() as scaling:
            long = context_len_max > scaling.original_context_len
            factors = scaling.long_factors if long else scaling.short_factors
            chosen = [f / factor for f, factor in zip(plain, factors, strict=True)]
            scale = scaling.attention_factor
    return Rope(np.array(chosen, np.float32), scale)


def _llama3_frequency(frequency: float, scaling: Llama3Rope) -> float:
    turns = scaling.original_context_len * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def yarn_attention_factor(scaling: YarnRope) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return yarn_magnitude(scaling.factor, 1.0)


def yarn_magnitude(factor: float, weight: float) -> float:
    """What attention is scaled by when contexts are stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(plain: list[float], config: RopeConfig, scaling: YarnRope) -> list[float]:
    def pair_of(turns: float) -> float:
        """Which pair turns so often within the original context."""
        ratio = scaling.original_context_len / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
    return [f / scaling.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

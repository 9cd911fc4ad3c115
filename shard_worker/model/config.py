"""Pure. What a model is made of, whichever file says so: `hf_config` and `gguf_config` read it.

Everything that would change the numbers is either understood or refused: no key that matters is skipped.
"""

import math
from dataclasses import dataclass, replace

from shard_worker.executor import LoadFailed
from shard_worker.model.rope import LongRope, RopeConfig
from shard_worker.model.stage_weights import Activation

SIZE_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str  # whose file describes the layers
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_len_max: int
    rms_eps: float = 1e-6
    rope: RopeConfig | None = None  # None: who runs the layers knows (`transformers_stage`)
    windowed_rope: RopeConfig | None = None  # of layers with a window; None: the same
    windows: tuple[int | None, ...] = ()  # of each layer; empty: no layer has one
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    attention_softcap: float = 0.0  # 0: off
    final_softcap: float = 0.0
    norm_offset: float = 0.0  # what norms add to the stored weight
    params_per_layer: int | None = None  # None: after the sizes
    context_len_limit: int | None = None  # what may be asked for; None: context_len_max

    def __post_init__(self) -> None:
        """Raises LoadFailed."""
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
        for rope in (self.rope, self.windowed_rope):
            if rope is not None and rope.rotary_dim > self.head_dim:
                raise LoadFailed(
                    f"model configuration: rotary size {rope.rotary_dim} in heads of {self.head_dim}"
                )
        if not 0 < self.rms_eps < 1:
            raise LoadFailed(f"model configuration: norm epsilon {self.rms_eps} is out of range")
        for softcap in (self.attention_softcap, self.final_softcap):
            if not 0 <= softcap < math.inf:
                raise LoadFailed(f"model configuration: a soft cap of {softcap}")
        if self.windows and len(self.windows) != self.num_layers:
            raise LoadFailed(
                f"model configuration: {len(self.windows)} layer types for {self.num_layers} layers"
            )
        for window in self.windows:
            if window is not None and window < 1:
                raise LoadFailed(f"model configuration: a window of {window} tokens")

    @property
    def layer_params(self) -> int:
        """Weights of one layer's matrices."""
        if self.params_per_layer is not None:
            return self.params_per_layer
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    def serving(self, context_len: int) -> "ModelConfig":
        """The same model for contexts of that length; 0: of its own. Raises LoadFailed."""
        limit = self.context_len_limit or self.context_len_max
        if not context_len:
            return self
        if not 2 <= context_len <= limit:
            raise LoadFailed(f"context_len {context_len}: this model serves 2 to {limit} tokens")
        return replace(self, context_len_max=context_len)

    @property
    def stretched(self) -> bool:
        """Whether it calculates with the long ones of its rope's two sets: then it is another model."""
        scaling = self.rope.scaling if self.rope is not None else None
        return isinstance(scaling, LongRope) and self.context_len_max > scaling.original_context_len

    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

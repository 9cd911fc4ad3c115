"""Pure. What one stage computes, whoever computes it: matrices as they are stored, norms, options.

A family (one file each) turns a checkpoint's tensors into this; the torch stage and the native one run it.
What a family can fold into numbers is folded: a norm that scales by (1 + w) comes as that sum in float32.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class WeightFormat(Enum):
    """How a row of a matrix lies in memory. The quantised ones are GGUF's blocks, byte for byte."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q4_K = "q4_k"
    Q6_K = "q6_k"


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """y = x W^T with W of [outputs, inputs]. `rows` may be a view of the model's file."""

    format: WeightFormat
    rows: U8  # [outputs, bytes of a row], C order
    inputs: int
    plain: bool = False  # never packed: its numbers are of blocks that were cut through

    @property
    def outputs(self) -> int:
        return int(self.rows.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """Matrices with the same input; their outputs follow each other. Formats may differ."""

    matrices: tuple[StoredMatrix, ...]
    bias: F32 | None = None  # [all outputs]

    @property
    def outputs(self) -> int:
        return sum(matrix.outputs for matrix in self.matrices)

    @property
    def inputs(self) -> int:
        return self.matrices[0].inputs


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Pairs (i, i + rotary_dim / 2) of the first `rotary_dim` of each head turn; the rest is kept."""

    frequencies: F32  # [rotary_dim / 2] radians per position
    scale: float = 1.0  # of cosine and sine (yarn, longrope)

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Norms are float32 [hidden_size], those of q and k [head_dim]; None: there is none."""

    attention_norm: F32
    qkv: Linear  # outputs: query heads, then key heads, then value heads
    out: Linear
    mlp_norm: F32
    gate_up: Linear  # outputs: gate, then up
    down: Linear
    rope: Rope
    q_norm: F32 | None = None  # over each head, before the rotation
    k_norm: F32 | None = None
    post_attention_norm: F32 | None = None  # of what attention adds to the residual
    post_mlp_norm: F32 | None = None
    window: int | None = None  # a token sees itself and the window - 1 before it; None: all


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    norm: F32
    linear: Linear
    softcap: float = 0.0  # logits = softcap * tanh(logits / softcap); 0: off


@dataclass(frozen=True, slots=True, eq=False)
class StageWeights:
    """Layers [first_layer, end_layer). `embedding` on the first stage, `head` on the last."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    first_layer: int
    layers: tuple[LayerWeights, ...]
    embedding: StoredMatrix | None = None  # [vocab_size, hidden_size]
    embedding_scale: float = 1.0
    head: HeadWeights | None = None
    activation: Activation = Activation.SILU  # of gate, times up
    attention_scale: float = 0.0  # of scores; 0: head_dim ** -0.5
    attention_softcap: float = 0.0  # of scores, before the mask; 0: off

    @property
    def end_layer(self) -> int:
        return self.first_layer + len(self.layers)

    @property
    def score_scale(self) -> float:
        return self.attention_scale or float(self.head_dim**-0.5)

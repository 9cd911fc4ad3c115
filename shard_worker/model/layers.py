"""The parts that families are built of: linear maps that suit the processor, norms, rotary embeddings.

`dtype` is what weights and activations between stages are stored in; `compute` is what is calculated in.
They differ where a processor has no bfloat16 arithmetic: torch's is then several times slower than float32.
"""

import platform
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PREPACK_ROWS = 16  # batch size that oneDNN lays prepacked weights out for


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: torch.dtype
    compute: torch.dtype


def precision_of(dtype: torch.dtype) -> Precision:
    if dtype == torch.bfloat16 and not has_bf16():
        return Precision(dtype, torch.float32)
    return Precision(dtype, dtype)


@cache
def has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 matrices natively."""
    if platform.machine() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Linear(Protocol):
    """y = x W^T + b, for x of [rows, inputs] in the compute type."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainLinear:
    """Torch's own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PrepackedLinear:
    """oneDNN with the weight laid out for its kernels once, instead of at every call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PREPACK_ROWS)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class WidenedLinear:
    """bfloat16 weights on a processor without bfloat16 products: float32 beside them for more than one row.

    One row is bound by memory, so that half the bytes are less time; more rows are bound by arithmetic.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.narrow = PlainLinear(weight, bias)
        self.wide = _best(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return self.narrow(x.to(self.narrow.weight.dtype)).float()
        return self.wide(x)


def linear(weight: torch.Tensor, bias: torch.Tensor | None, precision: Precision) -> Linear:
    """`weight`: [outputs, inputs], any float type."""
    weight = weight.to(precision.dtype).contiguous()
    bias = None if bias is None else bias.to(precision.dtype)
    if precision.compute != precision.dtype:
        return WidenedLinear(weight, bias)
    return _best(weight, bias) if precision.dtype == torch.bfloat16 else PlainLinear(weight, bias)


def _best(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return PrepackedLinear(weight, bias) if prepacking_works(weight.dtype) else PlainLinear(weight, bias)


@cache
def prepacking_works(dtype: torch.dtype) -> bool:
    """The operators are private to torch: they count only where they give what F.linear gives."""
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(48, 64, generator=generator), torch.randn(5, 64, generator=generator)
    bias = torch.randn(48, generator=generator)
    try:
        packed = PrepackedLinear(weight.to(dtype), bias.to(dtype))(x.to(dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(packed.float(), F.linear(x, weight, bias), atol=0.5 if dtype.itemsize < 4 else 1e-4)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32 whatever x is; `weight` is float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a step's tokens, each [T, 1, rotary_dim], the sign of the halves folded in."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, heads, head_dim], rotated as pairs (i, i + rotary_dim / 2); what lies past them is kept."""
        rotary_dim = self.cos.shape[-1]
        if rotary_dim < x.shape[-1]:
            return torch.cat((self(x[..., :rotary_dim]), x[..., rotary_dim:]), -1)
        return torch.addcmul(x * self.cos, x.roll(rotary_dim // 2, -1), self.sin)


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, compute: torch.dtype, scale: float = 1.0
) -> Rotation:
    """`positions`: [T]; `frequencies`: [rotary_dim / 2] float32. Angles are float32, as everyone's are."""
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return Rotation(
        torch.cat((cos, cos), -1)[:, None].to(compute), torch.cat((-sin, sin), -1)[:, None].to(compute)
    )

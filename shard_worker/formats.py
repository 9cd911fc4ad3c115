"""The formats of stored matrices in numpy: rows of blocks from numbers and back, and what a stage keeps.

The reference for every kernel: a row means what `dequantize` gives. `prepared` decides what a stage holds in
memory. Nothing quantised twice gets better: what comes in as few bits as are asked for stays as it is.
"""

import hashlib
import os
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks
from numpy.typing import NDArray

from shard_worker.executor import LoadFailed
from shard_worker.model.stage_weights import F32, U8, Linear, StageWeights, StoredMatrix, WeightFormat
from shard_worker.native.quantize import compiled, quantized_rows

Quantize = Literal["none", "int8", "int4", "keep"]
QUANTIZE: tuple[str, ...] = get_args(Quantize)

KIND_OF = {format: GGMLQuantizationType[format.name] for format in WeightFormat}
FORMAT_OF = {kind: format for format, kind in KIND_OF.items()}
DTYPE_FORMATS = {"float32": WeightFormat.F32, "bfloat16": WeightFormat.BF16}
BITS = {"int8": 8, "int4": 4}
OUTSIDE_BITS_MIN = 8  # of embedding and head, which every token goes through alone
INT_FORMATS = {8: WeightFormat.Q8_0, 4: WeightFormat.Q4_1}

Bits = np.unsignedinteger[Any]
_HALF = (np.uint16, np.uint16(0x7C00))
# The type that its numbers' bits are read as, the exponent in them, and where in a block they lie.
EXPONENTS: dict[WeightFormat, tuple[type[Bits], Bits, tuple[int, ...]]] = {
    WeightFormat.F32: (np.uint32, np.uint32(0x7F800000), ()),
    WeightFormat.BF16: (np.uint16, np.uint16(0x7F80), ()),
    WeightFormat.F16: (*_HALF, ()),
    WeightFormat.Q8_0: (*_HALF, (0,)),
    WeightFormat.Q4_0: (*_HALF, (0,)),
    WeightFormat.Q4_1: (*_HALF, (0, 2)),
    WeightFormat.Q5_0: (*_HALF, (0,)),
    WeightFormat.Q4_K: (*_HALF, (0, 2)),
    WeightFormat.Q6_K: (*_HALF, (208,)),
}
CHUNK_NUMBERS = 1 << 16  # looked at together, so that what is made of them stays in the processor's cache

GROUP = 32  # weights that share a scale, in the formats that are made here
WEIGHT_MAX = 6e4  # scales are float16
NO_INTEGERS = "weights are not finite, or too large to be quantised"
CHUNK_GROUPS = 4096  # quantised at a time, so that the work stays in the processor's cache
Q4_0_STEPS = (-7.0, -7.4, -7.7, -8.0, -8.3, -8.7, 7.4, 8.0)  # where the largest may fall
Q4_1_STEPS = (13.0, 13.6, 14.2, 14.6, 15.0, 15.4)  # how many of them the range may span


def row_bytes(format: WeightFormat, inputs: int) -> int:
    """Bytes of a row of `inputs` weights. Raises ValueError where the format has no such rows."""
    block_len, block_bytes = GGML_QUANT_SIZES[KIND_OF[format]]
    if inputs % block_len:
        raise ValueError(f"{format.value} has blocks of {block_len} weights, a row has {inputs}")
    return inputs // block_len * block_bytes


def bits_per_weight(format: WeightFormat) -> float:
    block_len, block_bytes = GGML_QUANT_SIZES[KIND_OF[format]]
    return 8 * block_bytes / block_len


def is_packed(format: WeightFormat) -> bool:
    """Whether it has fewer than 16 bits a weight: integers with scales."""
    return bits_per_weight(format) < 16


# ---- what a stage keeps -----------------------------------------------------------------------------


def prepared(matrix: StoredMatrix, dtype: str, quantize: str = "none", min_bits: int = 4) -> StoredMatrix:
    """The matrix as a stage holds it.

    `quantize` none: in `dtype`, expanded where it was packed; keep: what is packed stays packed, the rest in
    `dtype`; int8, int4: in so many bits, or more where `min_bits` says so (embedding and head: 8), unless it
    is packed in as few already. A row that doesn't divide into groups of 32 is kept in `dtype`, as is what
    was cut out of such groups.
    Raises LoadFailed on weights that no integers can stand for.
    """
    return convert(matrix, kept_format(matrix, dtype, quantize, min_bits))


def kept_format(matrix: StoredMatrix, dtype: str, quantize: str, min_bits: int = 4) -> WeightFormat:
    """That of the matrix once prepared."""
    assert quantize in QUANTIZE and dtype in DTYPE_FORMATS
    if matrix.plain:
        return DTYPE_FORMATS[dtype]
    packed = is_packed(matrix.format)
    if quantize == "keep" and packed:
        return matrix.format
    if quantize in BITS and matrix.inputs % GROUP == 0:
        bits = max(BITS[quantize], min_bits)
        return matrix.format if packed and bits_per_weight(matrix.format) < bits + 1 else INT_FORMATS[bits]
    return DTYPE_FORMATS[dtype]


def kept_bytes(weights: StageWeights, dtype: str, quantize: str) -> int:
    """Memory of a stage's matrices once prepared; of one that is embedding and head both, once."""

    def of(matrix: StoredMatrix, min_bits: int = 4) -> int:
        return matrix.outputs * row_bytes(kept_format(matrix, dtype, quantize, min_bits), matrix.inputs)

    inside = [
        matrix
        for layer in weights.layers
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        for matrix in linear.matrices
    ]
    outside = [] if weights.embedding is None else [weights.embedding]
    if weights.head is not None:
        outside += [m for m in weights.head.linear.matrices if m is not weights.embedding]
    return sum(map(of, inside)) + sum(of(matrix, OUTSIDE_BITS_MIN) for matrix in outside)


def packs_some(weights: StageWeights, dtype: str, quantize: str) -> bool:
    """Whether any matrix in the layers is packed once prepared."""
    return any(
        is_packed(kept_format(matrix, dtype, quantize))
        for layer in weights.layers
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        for matrix in linear.matrices
    )


def prepared_stage(weights: StageWeights, dtype: str, quantize: str) -> StageWeights:
    """All of a stage's matrices, prepared at once. A stage that lays weights out anew prepares them one by
    one instead: so the expanded ones needn't be in memory together. Raises LoadFailed.
    """

    def linear(stored: Linear, min_bits: int = 4) -> Linear:
        matrices = tuple(prepared(m, dtype, quantize, min_bits) for m in stored.matrices)
        return replace(stored, matrices=matrices)

    embedding, head = weights.embedding, weights.head
    tied = head is not None and embedding is not None and head.linear.matrices[0] is embedding
    if embedding is not None:
        embedding = prepared(embedding, dtype, quantize, OUTSIDE_BITS_MIN)
    if head is not None:
        outputs = Linear((embedding,)) if tied and embedding else linear(head.linear, OUTSIDE_BITS_MIN)
        head = replace(head, linear=outputs)
    layers = tuple(
        replace(
            layer,
            qkv=linear(layer.qkv),
            out=linear(layer.out),
            gate_up=linear(layer.gate_up),
            down=linear(layer.down),
        )
        for layer in weights.layers
    )
    return replace(weights, embedding=embedding, head=head, layers=layers)


def digest_as_kept(digest: str, quantize: str) -> str:
    """Names the weights that are computed with: stages that keep them differently are of different models."""
    if quantize == "none":
        return digest
    return hashlib.sha256(f"{digest} {quantize}".encode()).hexdigest()


def convert(matrix: StoredMatrix, format: WeightFormat) -> StoredMatrix:
    """The same matrix in another format; itself where it has that format. Raises LoadFailed."""
    if matrix.format is format:
        return matrix
    if is_packed(format) and (library := compiled()) is not None:
        plain = stored(dequantize(matrix), WeightFormat.F32) if is_packed(matrix.format) else matrix
        width, threads = row_bytes(format, matrix.inputs), len(os.sched_getaffinity(0))
        try:
            rows = quantized_rows(library, plain, format, width, threads)
        except ValueError:
            raise LoadFailed(NO_INTEGERS) from None
        if rows is not None:
            return StoredMatrix(format, rows, matrix.inputs)
    return stored(dequantize(matrix), format)


def stored(values: F32, format: WeightFormat) -> StoredMatrix:
    """[outputs, inputs] numbers in a format. Raises LoadFailed when it can't hold them."""
    return StoredMatrix(format, quantize_rows(values, format), values.shape[1])


def is_finite(matrix: StoredMatrix) -> bool:
    """Whether all its numbers are numbers: of packed ones, whether scales and offsets are."""
    dtype, mask, places = EXPONENTS[matrix.format]
    block_bytes = GGML_QUANT_SIZES[KIND_OF[matrix.format]][1]
    fields: list[NDArray[Bits]]
    if is_packed(matrix.format):
        blocks = matrix.rows.reshape(-1, block_bytes)
        fields = [blocks[:, at : at + 2].copy().view(dtype) for at in places]
    else:
        fields = [np.require(matrix.rows, requirements=("C", "A")).view(dtype)]
    flat = [field.reshape(-1) for field in fields]
    return not any(
        (part[at : at + CHUNK_NUMBERS] & mask == mask).any()
        for part in flat
        for at in range(0, len(part), CHUNK_NUMBERS)
    )


# ---- to numbers -------------------------------------------------------------------------------------


def dequantize(matrix: StoredMatrix) -> F32:
    """[outputs, inputs] in float32."""
    return numbers_of(matrix.rows, KIND_OF[matrix.format])


def numbers_of(packed: U8, kind: GGMLQuantizationType) -> F32:
    """[rows, weights of a row] of any of GGUF's kinds. Raises NotImplementedError where none can read it."""
    match kind:
        case GGMLQuantizationType.F32:
            return np.require(packed.view(np.float32), requirements="A")
        case GGMLQuantizationType.F16:
            return packed.view(np.float16).astype(np.float32)
        case GGMLQuantizationType.BF16:
            return (packed.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        case GGMLQuantizationType.Q4_0 | GGMLQuantizationType.Q4_1 | GGMLQuantizationType.Q8_0:
            return _expand(packed, kind)
        case _:
            with np.errstate(all="ignore"):
                return np.ascontiguousarray(dequantize_blocks(packed, kind), dtype=np.float32)


def _expand(packed: U8, kind: GGMLQuantizationType) -> F32:
    """What gguf gives for the commonest kinds, in a third of the time: no temporary arrays."""
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    rows = packed.shape[0]
    blocks = packed.reshape(-1, block_bytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    out = np.empty((len(blocks), block_len), np.float32)
    if kind == GGMLQuantizationType.Q8_0:
        out[:] = blocks[:, 2:].view(np.int8)
    else:
        nibbles = blocks[:, block_bytes - block_len // 2 :]
        out[:, : block_len // 2] = nibbles & 15
        out[:, block_len // 2 :] = nibbles >> 4
    with np.errstate(all="ignore"):
        if kind == GGMLQuantizationType.Q4_0:
            out -= 8
        out *= scale
        if kind == GGMLQuantizationType.Q4_1:
            out += blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    return out.reshape(rows, -1)


# ---- from numbers -----------------------------------------------------------------------------------


def quantize_rows(values: F32, format: WeightFormat) -> U8:
    """[outputs, inputs] numbers as rows of bytes. F32, F16, BF16, Q8_0, Q4_0 and Q4_1 can be made.

    Raises LoadFailed on numbers that integers can't stand for, ValueError on rows of a wrong length.
    """
    outputs, inputs = values.shape
    width = row_bytes(format, inputs)
    values = np.ascontiguousarray(values, dtype=np.float32)
    match format:
        case WeightFormat.F32:
            return values.view(np.uint8)
        case WeightFormat.F16:
            with np.errstate(over="ignore"):
                return values.astype(np.float16).view(np.uint8)
        case WeightFormat.BF16:
            return _bfloat16(values).view(np.uint8)
        case WeightFormat.Q8_0 | WeightFormat.Q4_0 | WeightFormat.Q4_1:
            return _grouped(values.reshape(-1, GROUP), format).reshape(outputs, width)
        case _:
            raise ValueError(f"{format.value} is read here, not made")


def _bfloat16(values: F32) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    if np.isnan(values).any():
        rounded = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16)


def _grouped(groups: F32, format: WeightFormat) -> U8:
    """[groups, 32] numbers to [groups, bytes of a block]."""
    make = {WeightFormat.Q8_0: _q8_0, WeightFormat.Q4_0: _q4_0, WeightFormat.Q4_1: _q4_1}[format]
    out = np.empty((len(groups), GGML_QUANT_SIZES[KIND_OF[format]][1]), np.uint8)
    for start in range(0, len(groups), CHUNK_GROUPS):
        chunk = groups[start : start + CHUNK_GROUPS]
        if not np.abs(chunk).max() <= WEIGHT_MAX:
            raise LoadFailed(NO_INTEGERS)
        columns = np.ascontiguousarray(chunk.T)
        if len(chunk) == 1:
            columns = columns.repeat(2, axis=1)  # a lone column numpy sums up in another order
        out[start : start + CHUNK_GROUPS] = make(columns).T[: len(chunk)]
    return out


def _q8_0(x: F32) -> U8:
    """x of [32, n], to [34, n]: the scale that fits the rounded numbers best, or that of the largest."""
    scale = _float16(np.abs(x).max(0) / np.float32(127))
    levels = _levels(x, _inverse(scale), -127, 127)
    fitted = _float16(_fitted(x, levels))
    again = _levels(x, _inverse(fitted), -127, 127)
    better = _error(x, again * fitted) < _error(x, levels * scale)
    scale, levels = np.where(better, fitted, scale), np.where(better, again, levels)
    return np.concatenate((_bytes16(scale), levels.astype(np.int8).view(np.uint8)))


def _q4_0(x: F32) -> U8:
    """x of [32, n], to [18, n]. The largest weight tries several places among the levels -8 to 7."""
    high, low = x.max(0), x.min(0)
    inverse = _inverse(np.where(-low > high, low, high))
    best, scale = np.full(x.shape[1], -1, np.float32), np.zeros(x.shape[1], np.float32)
    for step in Q4_0_STEPS:
        levels = _levels(x, np.float32(step) * inverse, -8, 7)
        product, square = _dot(x, levels), _dot(levels, levels)
        fit = product * _inverse(square)
        gain = product * fit  # what the error shrinks by
        scale = np.where(gain > best, fit, scale)
        best = np.maximum(gain, best)
    scale = _float16(scale)
    levels = _levels(x, _inverse(scale), -8, 7)
    return np.concatenate((_bytes16(scale), _nibbles(levels + 8)))


def _q4_1(x: F32) -> U8:
    """x of [32, n], to [20, n]. Levels 0 to 15 over several ranges; scale and offset fit the levels best."""
    low = x.min(0)
    mean = x.mean(0)
    inverse = _inverse(x.max(0) - low)
    above, around = x - low, x - mean
    best, scale, offset = np.full(x.shape[1], -1, np.float32), np.zeros_like(low), low
    for step in Q4_1_STEPS:
        levels = _levels(above, np.float32(step) * inverse, 0, 15)
        middle = levels.mean(0)
        levels -= middle
        product, square = _dot(around, levels), _dot(levels, levels)
        fit = product * _inverse(square)
        gain = product * fit
        better = gain > best
        scale = np.where(better, fit, scale)
        offset = np.where(better, mean - fit * middle, offset)
        best = np.maximum(gain, best)
    scale, offset = _float16(scale), _float16(offset)
    levels = _levels(x - offset, _inverse(scale), 0, 15)
    return np.concatenate((_bytes16(scale), _bytes16(offset), _nibbles(levels)))


def _levels(x: F32, inverse: F32, lowest: int, highest: int) -> F32:
    levels = x * inverse
    np.rint(levels, out=levels)
    return np.clip(levels, lowest, highest, out=levels)


def _fitted(x: F32, levels: F32) -> F32:
    """The scales with the least squared error."""
    return _dot(x, levels) * _inverse(_dot(levels, levels))


def _error(x: F32, y: F32) -> F32:
    difference = x - y
    return _dot(difference, difference)


def _dot(a: F32, b: F32) -> F32:
    """Of the columns."""
    sums: F32 = np.einsum("ij,ij->j", a, b)
    return sums


def _inverse(values: F32) -> F32:
    """1 / values, and 0 where that is none."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / values
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _float16(values: F32) -> F32:
    """Rounded to what float16 holds."""
    return values.astype(np.float16).astype(np.float32)


def _bytes16(values: F32) -> U8:
    """[n] to [2, n]."""
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2).T


def _nibbles(levels: F32) -> U8:
    """[32, n] of 0 to 15, to [16, n]: the first half in the low bits."""
    whole = levels.astype(np.uint8)
    return whole[: GROUP // 2] | (whole[GROUP // 2 :] << np.uint8(4))

"""Cuts a stage's weights to what one rank has of them: rows by outputs, columns by inputs.

Rows are views of the file, so that a rank reads its own ones only. Columns are copied, packed in the groups
that the whole matrix has: every weight is the number that it is to one rank. Where a cut goes through a
group, the rank's part of that matrix is expanded and stays so. A bias on what ranks sum up is the first
one's. The embedding is not of the result: ranks look rows up by themselves (`stage.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from shard_worker.executor import LoadFailed
from shard_worker.formats import KIND_OF, convert, dequantize, is_finite, is_packed, kept_format
from shard_worker.model.stage_weights import LayerWeights, Linear, StageWeights, StoredMatrix, WeightFormat
from shard_worker.ranks.shares import Share


def packed_unit(weights: StageWeights) -> int:
    """The longest block of weights with scales of their own among what is cut by inner outputs."""
    return max(_block(m.format)[0] for layer in weights.layers for m in layer.down.matrices)


def rank_weights(
    weights: StageWeights, share: Share, first: bool, dtype: str = "float32", quantize: str = "none"
) -> StageWeights:
    """`first`: of the rank whose biases count; `dtype`, `quantize`: as the stage will keep them.

    Raises LoadFailed on weights that no integers can stand for.
    """

    def layer(index: int, whole: LayerWeights) -> LayerWeights:
        try:
            return _layer(whole, weights, share, first, (dtype, quantize))
        except LoadFailed as error:
            raise LoadFailed(f"layer {index}: {error}") from None

    head = weights.head
    if head is not None:
        head = replace(head, linear=rows(head.linear, [share.vocabulary]))
    return replace(
        weights,
        num_heads=len(share.heads),
        num_kv_heads=len(share.kv_heads),
        intermediate_size=len(share.inner),
        vocab_size=len(share.vocabulary),
        layers=tuple(layer(*whole) for whole in enumerate(weights.layers, weights.first_layer)),
        embedding=None,
        head=head,
        attention_scale=weights.score_scale,
    )


def rows(linear: Linear, wanted: Sequence[range]) -> Linear:
    """These outputs, one range after another."""
    found: list[StoredMatrix] = []
    for outputs in wanted:
        at = 0
        for matrix in linear.matrices:
            first, end = max(outputs.start - at, 0), min(outputs.stop - at, matrix.outputs)
            if first < end:
                found.append(StoredMatrix(matrix.format, matrix.rows[first:end], matrix.inputs))
            at += matrix.outputs
    bias = None
    if linear.bias is not None:
        bias = np.concatenate([linear.bias[outputs.start : outputs.stop] for outputs in wanted])
    return Linear(tuple(found), bias)


def columns(linear: Linear, wanted: range, biased: bool, kept_as: tuple[str, str]) -> Linear:
    """What these inputs give. Raises LoadFailed."""
    matrices = tuple(_columns(m, wanted, kept_format(m, *kept_as)) for m in linear.matrices)
    return Linear(matrices, linear.bias if biased else None)


def refuse_what_is_no_number(weights: StageWeights, path: object) -> None:
    """Raises LoadFailed."""
    for index, layer in enumerate(weights.layers, weights.first_layer):
        for name in ("qkv", "out", "gate_up", "down"):
            linear: Linear = getattr(layer, name)
            if not all(map(is_finite, linear.matrices)):
                raise LoadFailed(f"{path}: {name} of layer {index} holds what is no number")
    if weights.head is not None and not all(map(is_finite, weights.head.linear.matrices)):
        raise LoadFailed(f"{path}: the head holds what is no number")


def _layer(
    layer: LayerWeights, weights: StageWeights, share: Share, first: bool, kept_as: tuple[str, str]
) -> LayerWeights:
    return replace(
        layer,
        qkv=rows(layer.qkv, qkv_outputs(weights, share)),
        out=columns(layer.out, mixed(weights, share), first, kept_as),
        gate_up=rows(layer.gate_up, gate_up_outputs(weights, share)),
        down=columns(layer.down, share.inner, first, kept_as),
    )


def qkv_outputs(weights: StageWeights, share: Share) -> list[range]:
    dim, keys, values = weights.head_dim, weights.num_heads, weights.num_heads + weights.num_kv_heads
    places = ((share.heads, 0), (share.kv_heads, keys), (share.kv_heads, values))
    return [range((at + heads.start) * dim, (at + heads.stop) * dim) for heads, at in places]


def mixed(weights: StageWeights, share: Share) -> range:
    """What attention gives: inputs of the product after it."""
    return range(share.heads.start * weights.head_dim, share.heads.stop * weights.head_dim)


def gate_up_outputs(weights: StageWeights, share: Share) -> list[range]:
    own, inner = share.inner, weights.intermediate_size
    return [own, range(inner + own.start, inner + own.stop)]


def cut_through(wanted: range, format: WeightFormat) -> bool:
    """Whether these inputs begin or end within a block."""
    length, _ = _block(format)
    return wanted.start % length != 0 or wanted.stop % length != 0


def _block(format: WeightFormat) -> tuple[int, int]:
    """Weights and bytes of the pieces that rows of this format are made of."""
    length, size = GGML_QUANT_SIZES[KIND_OF[format]]
    return int(length), int(size)


def _columns(matrix: StoredMatrix, wanted: range, kept: WeightFormat) -> StoredMatrix:
    """`kept`: how the whole matrix would be. Raises LoadFailed."""
    unit = max(_block(matrix.format)[0], _block(kept)[0])
    first, end = wanted.start // unit * unit, -(-wanted.stop // unit) * unit
    covering = _whole_blocks(matrix, range(first, end))
    if is_packed(kept):
        covering = convert(covering, kept)
    own = range(wanted.start - first, wanted.stop - first)
    if not cut_through(own, covering.format):
        return _whole_blocks(covering, own)
    numbers = np.ascontiguousarray(dequantize(covering)[:, own.start : own.stop])
    return StoredMatrix(WeightFormat.F32, numbers.view(np.uint8), len(own), plain=True)


def _whole_blocks(matrix: StoredMatrix, inputs: range) -> StoredMatrix:
    length, size = _block(matrix.format)
    first, end = inputs.start // length * size, inputs.stop // length * size
    return StoredMatrix(matrix.format, np.ascontiguousarray(matrix.rows[:, first:end]), len(inputs))

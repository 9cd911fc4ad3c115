"""How much memory one rank's share of the weights takes, and so how many layers it has room for.

Sizes alone say it, nothing is read. The embedding takes none: its rows are looked up in the file.
"""

from shard_worker.formats import DTYPE_FORMATS, OUTSIDE_BITS_MIN, kept_format, row_bytes
from shard_worker.model.stage_weights import LayerWeights, Linear, StageWeights, StoredMatrix
from shard_worker.ranks.shares import Share
from shard_worker.ranks.split import cut_through, gate_up_outputs, mixed, qkv_outputs, rows
from shard_worker.room import Room


def room_of_share(weights: StageWeights, share: Share, dtype: str, quantize: str, bound: int) -> Room:
    """`weights`: all layers and the head; `bound`: bytes that this rank's may take, 0: there is none."""
    if not bound:
        return Room(0)
    layers, head = share_bytes(weights, share, dtype, quantize)
    layer = layers / len(weights.layers)
    return Room(max(1, int(bound / layer)), head / layer, head / layer)


def share_bytes(weights: StageWeights, share: Share, dtype: str, quantize: str) -> tuple[int, int]:
    """Of the layers, and of the head, as the rank holds them."""

    def held(linear: Linear, min_bits: int = 4) -> int:
        return sum(
            m.outputs * row_bytes(kept_format(m, dtype, quantize, min_bits), m.inputs)
            for m in linear.matrices
        )

    def cut(matrix: StoredMatrix, wanted: range) -> int:
        format = kept_format(matrix, dtype, quantize)
        if cut_through(wanted, format):
            format = DTYPE_FORMATS[dtype]
        return matrix.outputs * row_bytes(format, len(wanted))

    def of_layer(layer: LayerWeights) -> int:
        return (
            held(rows(layer.qkv, qkv_outputs(weights, share)))
            + held(rows(layer.gate_up, gate_up_outputs(weights, share)))
            + sum(cut(m, mixed(weights, share)) for m in layer.out.matrices)
            + sum(cut(m, share.inner) for m in layer.down.matrices)
        )

    head = weights.head
    of_head = 0 if head is None else held(rows(head.linear, [share.vocabulary]), OUTSIDE_BITS_MIN)
    return sum(map(of_layer, weights.layers)), of_head

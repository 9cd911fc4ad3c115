"""Pure. Pages of a block in neighbouring layers, as they lie in host memory and on their way, with proof."""

from collections.abc import Sequence
from dataclasses import dataclass

from chassis.ids import BlockHash
from chassis.messages.tier import checksums


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """`sums` has one checksum a layer, of `data` in as many equal pages; `stamp` is the worker's."""

    space: int
    layers: range
    sums: tuple[int, ...]
    stamp: bytes
    data: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    @property
    def page_bytes(self) -> int:
        return len(self.data) // len(self.layers)

    def proves(self, content: BlockHash) -> bool:
        """Whether all of it is what was saved, of this content."""
        return (
            len(self.sums) == len(self.layers)
            and not len(self.data) % len(self.layers)
            and checksums(self.space, content, self.layers, self.data) == self.sums
        )


def joined(pieces: Sequence[Pages], layers: range) -> Pages | None:
    """These layers of pieces that cover them, in order of layers; None where their pages differ in size, or
    stages that saved them say different things of the block: then some hold another content."""
    first = pieces[0]
    if len(pieces) == 1 and first.layers == layers:
        return first
    size = first.page_bytes
    stamps = {piece.stamp for piece in pieces}
    if any(piece.page_bytes != size for piece in pieces) or len(stamps - {b""}) > 1:
        return None
    data: list[memoryview] = []
    sums: list[int] = []
    layer = layers.start
    for piece in pieces:
        stop = min(piece.layers.stop, layers.stop)
        begin, end = layer - piece.layers.start, stop - piece.layers.start
        data.append(memoryview(piece.data)[begin * size : end * size])
        sums += piece.sums[begin:end]
        layer = stop
    stamp = first.stamp if len(stamps) == 1 else b""  # nobody vouches for all of it
    return Pages(first.space, layers, tuple(sums), stamp, b"".join(data))

"""Contents of blocks on their way between kvstore's tiers and workers; `proto/tier.proto` has the order.

A page is a block in one layer, as the stage keeps it: bytes that only the same `layout` can read. Its
checksum is seeded with what it is, so that a page in the wrong place is as wrong as one with a flipped bit.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages import BadMessage, check, parse
from chassis.messages.kvstore import pack_ids, parse_column, parse_ids
from chassis.wire import tier_pb2 as pb

CALL_BLOCKS_MAX = 64  # of one call
STAMP_BYTES_MAX = 64
PAGE_BYTES_MAX = 1 << 26
_LAYOUT_LEN_MAX = 256
_LAYERS_MAX = 4096
_U64 = (1 << 64) - 1
_LAYER_STEP = 0x9E3779B97F4A7C15  # so that neighbouring layers' seeds have nothing in common

OLD_EPOCH = "old_epoch"
OLD_ATTACHMENT = "old_attachment"


@dataclass(frozen=True, slots=True)
class TierStage:
    """What a stage holds, and in which layout; `page_bytes`: of a block in one layer."""

    epoch: Epoch
    layers: range
    layout: str
    page_bytes: int


@dataclass(frozen=True, slots=True)
class _Call:
    """`blocks` and `contents` pair up; no block comes twice."""

    epoch: Epoch
    attachment: int
    call: int
    blocks: tuple[BlockId, ...]
    contents: tuple[BlockHash, ...]


class SaveBlocks(_Call):
    """Read them: each block is sent as `TierContent`."""

    __slots__ = ()


class LoadBlocks(_Call):
    """Write them: each block follows as `TierContent`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TierContent:
    """One block's pages in the layers from `first_layer` on, one a checksum; they are the frame's payload."""

    call: int
    index: int  # of the block, in the call
    first_layer: int
    checksums: tuple[int, ...]
    stamp: bytes = b""  # opaque to kvstore

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + len(self.checksums))


@dataclass(frozen=True, slots=True)
class TierDone:
    """`error` empty: done but for the blocks at `refused`, whose content was not what it had to be."""

    call: int
    error: str = ""
    refused: tuple[int, ...] = ()


TierMessage = TierStage | SaveBlocks | LoadBlocks | TierContent | TierDone


def seed_of(layout: str) -> int:
    """Once a layout; for `checksums`."""
    return xxhash.xxh3_64_intdigest(layout.encode())


def checksums(seed: int, content: BlockHash, layers: range, pages: bytes | memoryview) -> tuple[int, ...]:
    """One a layer, of pages of equal size that lie one after another. `seed`: `seed_of` their layout."""
    view = memoryview(pages).cast("B")
    size, rest = divmod(len(view), len(layers))
    assert not rest, "pages of unequal size"
    base = seed ^ int.from_bytes(content[:8], "little")
    return tuple(
        [
            xxhash.xxh3_64_intdigest(view[at : at + size], (base + layer * _LAYER_STEP) & _U64)
            for layer, at in zip(layers, range(0, len(view), size), strict=True)
        ]
    )


def pack_checksums(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def parse_checksums(data: bytes) -> tuple[int, ...]:
    check(not len(data) % 8, f"checksums: {len(data)} bytes")
    return struct.unpack(f"<{len(data) // 8}Q", data)


def build_tier(message: TierMessage) -> bytes:
    """A frame's header."""
    match message:
        case TierStage(epoch, layers, layout, page_bytes):
            stage = pb.TierStage(
                epoch=epoch,
                first_layer=layers.start,
                end_layer=layers.stop,
                layout=layout,
                page_bytes=page_bytes,
            )
            return pb.TierMessage(stage=stage).SerializeToString()
        case SaveBlocks():
            save = pb.SaveBlocks()
            _fill(save, message)
            return pb.TierMessage(save=save).SerializeToString()
        case LoadBlocks():
            load = pb.LoadBlocks()
            _fill(load, message)
            return pb.TierMessage(load=load).SerializeToString()
        case TierContent(call, index, first_layer, sums, stamp):
            content = pb.TierContent(
                call=call, index=index, first_layer=first_layer, checksums=pack_checksums(sums), stamp=stamp
            )
            return pb.TierMessage(content=content).SerializeToString()
        case TierDone(call, error, refused):
            done = pb.TierDone(call=call, error=error, refused=pack_ids(refused))
            return pb.TierMessage(done=done).SerializeToString()
    raise AssertionError("no message of tiers")


def parse_tier(header: bytes) -> TierMessage:
    """Raises BadMessage."""
    m = parse(pb.TierMessage, header)
    match m.WhichOneof("kind"):
        case "stage":
            return _parse_stage(m.stage)
        case "save":
            return SaveBlocks(*_parse_call(m.save))
        case "load":
            return LoadBlocks(*_parse_call(m.load))
        case "content":
            return _parse_content(m.content)
        case "done":
            check(m.done.call > 0, "done: call 0")
            return TierDone(m.done.call, m.done.error, parse_ids("refused", m.done.refused))
    raise BadMessage("tier: of no kind")


def _fill(m: pb.SaveBlocks | pb.LoadBlocks, call: _Call) -> None:
    m.epoch, m.attachment, m.call = call.epoch, call.attachment, call.call
    m.blocks, m.contents = pack_ids(call.blocks), b"".join(call.contents)


def _parse_call(
    m: pb.SaveBlocks | pb.LoadBlocks,
) -> tuple[Epoch, int, int, tuple[BlockId, ...], tuple[BlockHash, ...]]:
    blocks = parse_ids("blocks", m.blocks)
    contents = tuple(parse_column("contents", m.contents, len(blocks)))
    check(m.epoch > 0 and m.call > 0, "tier: epoch and call start at 1")
    check(0 < len(blocks) <= CALL_BLOCKS_MAX, f"tier: {len(blocks)} blocks in a call")
    check(_distinct(blocks), "tier: a block twice in a call")
    return Epoch(m.epoch), m.attachment, m.call, blocks, contents


def _parse_stage(m: pb.TierStage) -> TierStage:
    check(m.epoch > 0, "stage: epoch 0")
    check(m.first_layer < m.end_layer <= _LAYERS_MAX, f"stage: layers {m.first_layer} to {m.end_layer}")
    check(0 < len(m.layout) <= _LAYOUT_LEN_MAX, "stage: layout")
    check(0 < m.page_bytes <= PAGE_BYTES_MAX, f"stage: pages of {m.page_bytes} bytes")
    return TierStage(Epoch(m.epoch), range(m.first_layer, m.end_layer), m.layout, m.page_bytes)


def _parse_content(m: pb.TierContent) -> TierContent:
    sums = parse_checksums(m.checksums)
    check(m.call > 0 and bool(sums), "content: call or pages missing")
    check(m.first_layer + len(sums) <= _LAYERS_MAX, "content: layers")
    check(len(m.stamp) <= STAMP_BYTES_MAX, f"content: a stamp of {len(m.stamp)} bytes")
    return TierContent(m.call, m.index, m.first_layer, sums, m.stamp)


def _distinct(blocks: Iterable[BlockId]) -> bool:
    listed = tuple(blocks)
    return len(dict.fromkeys(listed)) == len(listed)

"""Pure. Records of contents in a segment, a file that only grows: each says what it is and proves it.

A record is a head (fields, checksums of its pages, stamp, and a checksum of all that), then its pages. So the
heads alone, read in order, say what a segment holds: they are the journal. Where a head is not whole, what
follows is found by the next magic whose head is; a record that the file ends in was torn by a crash.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from chassis.ids import BlockHash
from chassis.messages.tier import STAMP_BYTES_MAX
from kvstore.catalog import Origin
from kvstore.content import Pages

_MAGIC = b"kv\x93\x01"  # with the version of this format
_FIELDS = struct.Struct("<4sHHIHHQ32s32s")
# magic, stamp length, tokens of a block, page bytes, first layer, number of layers, space, content, parent
_SUM = struct.Struct("<Q")
_NOT_TOLD = b"\xff" * 32
HEAD_BYTES_MAX = _FIELDS.size + 8 * 4096 + STAMP_BYTES_MAX + _SUM.size


@dataclass(frozen=True, slots=True)
class Head:
    content: BlockHash
    origin: Origin
    space: int
    layers: range
    page_bytes: int
    sums: tuple[int, ...]
    stamp: bytes
    head_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the whole record."""
        return self.head_bytes + self.page_bytes * len(self.layers)


@dataclass(slots=True)
class Damage:
    """What a scan or read came upon."""

    torn: int = 0  # records that the file ends in
    broken: int = 0  # places where a record should begin and none does
    wrong: int = 0  # records whose pages are not what was written


def build_head(content: BlockHash, origin: Origin, pages: Pages) -> bytes:
    """The pages follow it."""
    head = _FIELDS.pack(
        _MAGIC,
        len(pages.stamp),
        origin.block_size_tokens,
        pages.page_bytes,
        pages.layers.start,
        len(pages.layers),
        pages.space,
        content,
        origin.parent or _NOT_TOLD,
    )
    head += struct.pack(f"<{len(pages.sums)}Q", *pages.sums) + pages.stamp
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def parse_head(data: bytes | memoryview, at: int = 0) -> Head | None:
    """None: none begins here."""
    if len(data) - at < _FIELDS.size:
        return None
    magic, stamp_len, size, page_bytes, first, count, space, content, parent = _FIELDS.unpack_from(data, at)
    end = at + _FIELDS.size + 8 * count + stamp_len
    if magic != _MAGIC or not count or not page_bytes or end + _SUM.size > len(data):
        return None
    if xxhash.xxh3_64_intdigest(data[at:end]) != _SUM.unpack_from(data, end)[0]:
        return None
    sums = struct.unpack_from(f"<{count}Q", data, at + _FIELDS.size)
    stamp = bytes(data[end - stamp_len : end])
    origin = Origin(None if parent == _NOT_TOLD else BlockHash(parent), size)
    layers = range(first, first + count)
    head_bytes = end + _SUM.size - at
    return Head(BlockHash(content), origin, space, layers, page_bytes, sums, stamp, head_bytes)


def scan(data: memoryview, damage: Damage) -> Iterator[tuple[int, Head]]:
    """Where each record begins, and its head."""
    at = 0
    while at < len(data):
        head = parse_head(data, at)
        if head is not None and at + head.num_bytes <= len(data):
            yield at, head
            at += head.num_bytes
            continue
        found = _next_whole(data, at + 1)
        if head is not None and found is None:
            damage.torn += 1
        else:
            damage.broken += 1
        if found is None:
            return
        at = found


def parse_record(data: bytes, content: BlockHash, damage: Damage) -> Pages | None:
    """What was read where this content's record should be. None: it is not, or not whole."""
    head = parse_head(memoryview(data))
    if head is None or head.content != content or head.num_bytes != len(data):
        damage.broken += 1
        return None
    pages = Pages(head.space, head.layers, head.sums, head.stamp, data[head.head_bytes :])
    if not pages.proves(content):
        damage.wrong += 1
        return None
    return pages


def _next_whole(data: memoryview, at: int) -> int | None:
    """The next place where a whole record begins."""
    step = 1 << 20
    while at < len(data):
        window = bytes(data[at : at + step + len(_MAGIC) - 1])
        found = window.find(_MAGIC)
        while found >= 0:
            head = parse_head(data, at + found)
            if head is not None and at + found + head.num_bytes <= len(data):
                return at + found
            found = window.find(_MAGIC, found + 1)
        at += step
    return None

"""Pure. What the two ends of a NIXL link say: notifications, and messages of the control connection.

A notification announces one frame: its number, its slot, the lengths of header and payload; a small frame is
in it, a larger one was written into the slot before. A control message is an 8-byte prefix (kind, length) and
its body. `Offer` carries what a peer needs to write here. Raises BadWire for anything else.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

BODY_BYTES_MAX = 1 << 20
WHY_BYTES_MAX = 500
SLOTS_MAX = 1024
PREFIX = struct.Struct("<HBxI")  # magic, kind, length of the body
_MAGIC = 0x51B0  # with the version of this format in its last digit
_NOTE = struct.Struct("<BxHIQQ")  # kind, slot, header length, payload length, number
_OFFER = struct.Struct("<QQQHHI")  # slot_bytes, pid, pid namespace, slots, name length, metadata length
_SLOT = struct.Struct("<QQ")  # address, capacity
_GROW = struct.Struct("<HxxIQ")  # slot, length of what follows, capacity
_NUMBER = struct.Struct("<H")


class BadWire(Exception):
    """The peer does not speak this format."""


class Said(IntEnum):
    """Kinds of control messages."""

    OFFER = 1
    CREDIT = 2  # slots that are free again
    RING = 3  # a frame comes after silence: look
    READY = 8  # data of yours has passed
    GROW = 4  # a frame is larger than this slot
    GREW = 5  # the slot's new place
    CLOSING = 6  # and why
    LET_GO = 7  # nothing will be written any more


class Noted(IntEnum):
    """Kinds of notifications."""

    HELLO = 1  # data passes in this direction
    INLINE = 2
    WRITTEN = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot lies in the receiver's memory."""

    address: int
    capacity: int  # bytes


@dataclass(frozen=True, slots=True)
class Offer:
    name: str  # of the agent, never used before
    metadata: bytes
    places: tuple[Place, ...]
    slot_bytes: int  # largest payload
    pid: int
    pid_namespace: int  # 0: not known


@dataclass(frozen=True, slots=True)
class Note:
    kind: Noted
    number: int = 0
    slot: int = 0
    header_len: int = 0
    payload_len: int = 0
    body: bytes = b""  # of an inline frame: header and payload


@dataclass(frozen=True, slots=True)
class Grew:
    slot: int
    place: Place
    metadata: bytes


def build_note(note: Note) -> bytes:
    return _NOTE.pack(note.kind, note.slot, note.header_len, note.payload_len, note.number) + note.body


def parse_note(data: bytes) -> Note:
    if len(data) < _NOTE.size:
        raise BadWire(f"a notification of {len(data)} bytes")
    kind, slot, header_len, payload_len, number = _NOTE.unpack_from(data)
    body = data[_NOTE.size :]
    inline = kind == Noted.INLINE
    if kind not in iter(Noted) or len(body) != (header_len + payload_len if inline else 0):
        raise BadWire(f"a notification of kind {kind} with {len(body)} bytes")
    return Note(Noted(kind), number, slot, header_len, payload_len, body)


def build_said(kind: Said, body: bytes = b"") -> bytes:
    return PREFIX.pack(_MAGIC, kind, len(body)) + body


def parse_prefix(data: bytes | bytearray) -> tuple[Said, int]:
    """(kind, length of the body)."""
    magic, kind, body_len = PREFIX.unpack_from(data)
    if magic != _MAGIC or kind not in iter(Said) or body_len > BODY_BYTES_MAX:
        raise BadWire(f"prefix: kind {kind}, {body_len} bytes")
    return Said(kind), body_len


def build_offer(offer: Offer) -> bytes:
    name = offer.name.encode()
    fixed = _OFFER.pack(
        offer.slot_bytes, offer.pid, offer.pid_namespace, len(offer.places), len(name), len(offer.metadata)
    )
    places = b"".join(_SLOT.pack(place.address, place.capacity) for place in offer.places)
    return fixed + places + name + offer.metadata


def parse_offer(body: bytes) -> Offer:
    if len(body) < _OFFER.size:
        raise BadWire("offer")
    slot_bytes, pid, pid_namespace, slots, name_len, metadata_len = _OFFER.unpack_from(body)
    names_at = _OFFER.size + slots * _SLOT.size
    if not 0 < slots <= SLOTS_MAX or not name_len or len(body) != names_at + name_len + metadata_len:
        raise BadWire("offer")
    places = tuple(Place(*_SLOT.unpack_from(body, _OFFER.size + i * _SLOT.size)) for i in range(slots))
    name = body[names_at : names_at + name_len]
    if not name.isascii():
        raise BadWire("offer: name")
    return Offer(name.decode(), body[names_at + name_len :], places, slot_bytes, pid, pid_namespace)


def build_slots(slots: list[int]) -> bytes:
    return b"".join(_NUMBER.pack(slot) for slot in slots)


def parse_slots(body: bytes) -> list[int]:
    if not body or len(body) % _NUMBER.size:
        raise BadWire("slots")
    return [slot for (slot,) in _NUMBER.iter_unpack(body)]


def build_grow(slot: int, capacity: int) -> bytes:
    return _GROW.pack(slot, 0, capacity)


def parse_grow(body: bytes) -> tuple[int, int]:
    """(slot, bytes that it must hold)."""
    if len(body) != _GROW.size:
        raise BadWire("grow")
    slot, _, capacity = _GROW.unpack(body)
    return slot, capacity


def build_grew(grew: Grew) -> bytes:
    fixed = _GROW.pack(grew.slot, len(grew.metadata), grew.place.capacity)
    return fixed + _SLOT.pack(grew.place.address, grew.place.capacity) + grew.metadata


def parse_grew(body: bytes) -> Grew:
    if len(body) < _GROW.size + _SLOT.size:
        raise BadWire("grew")
    slot, metadata_len, _ = _GROW.unpack_from(body)
    place = Place(*_SLOT.unpack_from(body, _GROW.size))
    metadata = body[_GROW.size + _SLOT.size :]
    if len(metadata) != metadata_len:
        raise BadWire("grew")
    return Grew(slot, place, metadata)

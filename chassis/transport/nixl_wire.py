"""Pure. What the two ends of a NIXL link say: notifications, and messages of the control connection.

A notification announces one frame: its number, its slot, the lengths of header and payload; a small frame is
in it, a larger one was written into the slot before. The payload of a direct frame lies in the slot's second
place, where the peer computes; a notification of its own says that it is there. A control message is an
8-byte prefix (kind, length) and its body. `Offer` carries what a peer needs to write here. Raises BadWire
for anything else.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

BODY_BYTES_MAX = 1 << 20
WHY_BYTES_MAX = 500
SLOTS_MAX = 1024
PREFIX = struct.Struct("<HBxI")  # magic, kind, length of the body
_MAGIC = 0x51B1  # with the version of this format in its last digit
_NOTE = struct.Struct("<BxHIQQ")  # kind, slot, header length, payload length, number
# slot_bytes, pid, pid namespace, slots, name length, metadata length, device (-1: the host), direct slots
_OFFER = struct.Struct("<QQQHHIhH")
_SLOT = struct.Struct("<QQ")  # address, capacity
_GROW = struct.Struct("<H?xIQ")  # slot, whether its direct place, length of what follows, capacity
_NUMBER = struct.Struct("<H")
_HOST = -1


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
    DIRECT_INLINE = 4  # as INLINE, but the payload is direct
    DIRECT_WRITTEN = 5
    DIRECT_PAYLOAD = 6  # it is there


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot lies in the receiver's memory."""

    address: int
    capacity: int  # bytes
    device: int | None = None  # the GPU it lies in; None: the host


@dataclass(frozen=True, slots=True)
class Offer:
    name: str  # of the agent, never used before
    metadata: bytes
    places: tuple[Place, ...]
    slot_bytes: int  # largest payload
    pid: int
    pid_namespace: int  # 0: not known
    direct: tuple[Place, ...] = ()  # the slots' second places, all on one device, if there are any


@dataclass(frozen=True, slots=True)
class Note:
    kind: Noted
    number: int = 0
    slot: int = 0
    header_len: int = 0
    payload_len: int = 0
    body: bytes = b""  # of an inline frame: header, and its payload unless that is direct


@dataclass(frozen=True, slots=True)
class Grew:
    slot: int
    place: Place
    metadata: bytes
    direct: bool = False  # its second place; of `place` the device is not told again


def build_note(note: Note) -> bytes:
    return _NOTE.pack(note.kind, note.slot, note.header_len, note.payload_len, note.number) + note.body


def parse_note(data: bytes) -> Note:
    if len(data) < _NOTE.size:
        raise BadWire(f"a notification of {len(data)} bytes")
    kind, slot, header_len, payload_len, number = _NOTE.unpack_from(data)
    body = data[_NOTE.size :]
    inline = {Noted.INLINE: header_len + payload_len, Noted.DIRECT_INLINE: header_len}.get(kind, 0)
    if kind not in iter(Noted) or len(body) != inline:
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
    device = offer.direct[0].device if offer.direct else None
    fixed = _OFFER.pack(
        offer.slot_bytes,
        offer.pid,
        offer.pid_namespace,
        len(offer.places),
        len(name),
        len(offer.metadata),
        _HOST if device is None else device,
        len(offer.direct),
    )
    every = (*offer.places, *offer.direct)
    places = b"".join(_SLOT.pack(place.address, place.capacity) for place in every)
    return fixed + places + name + offer.metadata


def parse_offer(body: bytes) -> Offer:
    if len(body) < _OFFER.size:
        raise BadWire("offer")
    fixed = _OFFER.unpack_from(body)
    slot_bytes, pid, pid_namespace, slots, name_len, metadata_len, device, direct = fixed
    names_at = _OFFER.size + (slots + direct) * _SLOT.size
    if not 0 < slots <= SLOTS_MAX or not name_len or len(body) != names_at + name_len + metadata_len:
        raise BadWire("offer")
    if direct not in (0, slots) or device < _HOST:
        raise BadWire(f"offer: {direct} direct slots of {slots} on device {device}")
    every = list(_SLOT.iter_unpack(body[_OFFER.size : names_at]))
    places = tuple(Place(*place) for place in every[:slots])
    on = None if device == _HOST else device
    second = tuple(Place(address, capacity, on) for address, capacity in every[slots:])
    name = body[names_at : names_at + name_len]
    if not name.isascii():
        raise BadWire("offer: name")
    return Offer(name.decode(), body[names_at + name_len :], places, slot_bytes, pid, pid_namespace, second)


def build_slots(slots: list[int]) -> bytes:
    return b"".join(_NUMBER.pack(slot) for slot in slots)


def parse_slots(body: bytes) -> list[int]:
    if not body or len(body) % _NUMBER.size:
        raise BadWire("slots")
    return [slot for (slot,) in _NUMBER.iter_unpack(body)]


def build_grow(slot: int, capacity: int, direct: bool = False) -> bytes:
    return _GROW.pack(slot, direct, 0, capacity)


def parse_grow(body: bytes) -> tuple[int, int, bool]:
    """(slot, bytes that it must hold, whether in its direct place)."""
    if len(body) != _GROW.size:
        raise BadWire("grow")
    slot, direct, _, capacity = _GROW.unpack(body)
    return slot, capacity, direct


def build_grew(grew: Grew) -> bytes:
    fixed = _GROW.pack(grew.slot, grew.direct, len(grew.metadata), grew.place.capacity)
    return fixed + _SLOT.pack(grew.place.address, grew.place.capacity) + grew.metadata


def parse_grew(body: bytes) -> Grew:
    if len(body) < _GROW.size + _SLOT.size:
        raise BadWire("grew")
    slot, direct, metadata_len, _ = _GROW.unpack_from(body)
    place = Place(*_SLOT.unpack_from(body, _GROW.size))
    metadata = body[_GROW.size + _SLOT.size :]
    if len(metadata) != metadata_len:
        raise BadWire("grew")
    return Grew(slot, place, metadata, direct)

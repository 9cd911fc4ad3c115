"""The memory of a NIXL link: slots of ours that the peer writes into, slots of the peer's that we do.

Rules: a slot is lent, or holds one frame, or is owed to the peer; frames are handed out in the order of their
numbers, whatever order notifications come in; whatever a peer may not do is BadWire. A slot grows by a new
place; the old one stays registered until the link is closed, so that no address ever has two registrations.
A slot may have a second, direct place, in memory that the owner computes with (`LinkOptions.slots_on`): then
header and payload come apart, and the frame is there when both are.
"""

from collections.abc import Callable
from dataclasses import dataclass

from chassis.transport.interface import HEADER_BYTES_MAX, LinkOptions
from chassis.transport.nixl_agent import Region
from chassis.transport.nixl_wire import BadWire, Note, Noted, Offer, Place
from chassis.transport.registered import Memory, MemoryRange

SLOT_BYTES_FIRST = 256 << 10
_GROWTH = 4
_APART = frozenset({Noted.DIRECT_INLINE, Noted.DIRECT_WRITTEN, Noted.DIRECT_PAYLOAD})
_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Arrived:
    header: bytes
    slot: int
    payload: memoryview
    direct: MemoryRange | None = None


@dataclass(slots=True)
class _Parts:
    """Of a frame that comes apart."""

    slot: int
    payload_len: int
    header: bytes | None = None
    payload: MemoryRange | None = None


class NixlFrame:
    def __init__(self, arrived: Arrived, release: Callable[[int], None]) -> None:
        self._arrived = arrived
        self._release = release
        self._released = False

    @property
    def header(self) -> bytes:
        return self._arrived.header

    @property
    def payload(self) -> memoryview:
        return self._arrived.payload

    @property
    def direct(self) -> MemoryRange | None:
        return self._arrived.direct

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._release(self._arrived.slot)


class Incoming:
    """Ours. `regions`: all that is registered, earlier places too."""

    def __init__(self, options: LinkOptions) -> None:
        self._payload_max = options.slot_bytes
        self._capacity_max = HEADER_BYTES_MAX + options.slot_bytes
        self._slots = [Region(min(SLOT_BYTES_FIRST, self._capacity_max)) for _ in range(options.slots)]
        self.regions: list[Memory] = list(self._slots)
        self._direct: list[MemoryRange] = []
        self._make_direct = options.slots_on
        self._lent = set(range(options.slots))
        self._owed: list[int] = []
        self._owed_max = max(1, options.slots // 2)
        self._next_number = 0
        self._early: dict[int, Arrived] = {}
        self._parts: dict[int, _Parts] = {}

    def open_direct(self) -> Memory | None:
        """All second places, in one piece; None: none are wanted. Raises whatever the device does."""
        if self._make_direct is None or not self._payload_max:
            return None
        size = min(SLOT_BYTES_FIRST, self._payload_max)
        pool = self._make_direct(size * len(self._slots))
        self._direct = [MemoryRange(pool, i * size, size) for i in range(len(self._slots))]
        self.regions.append(pool)
        return pool

    def close_direct(self) -> None:
        """They can't be registered."""
        self._direct = []

    @property
    def direct_places(self) -> tuple[Place, ...]:
        return tuple(Place(at.address, at.nbytes, at.memory.device) for at in self._direct)

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(Place(region.address, region.capacity) for region in self._slots)

    def take(self, note: Note) -> list[Arrived]:
        """What can be handed out now. Raises BadWire."""
        number, slot, parts = note.number, note.slot, self._parts.get(note.number)
        if slot != parts.slot if parts is not None else slot not in self._lent:
            raise BadWire("a frame without a slot")
        if note.header_len > HEADER_BYTES_MAX or note.payload_len > self._payload_max:
            raise BadWire(f"a frame of {note.header_len} + {note.payload_len} bytes")
        if number in self._early or not 0 <= number - self._next_number < len(self._slots):
            raise BadWire(f"frame {number}, not {self._next_number}")
        arrived = self._whole(note, parts) if note.kind not in _APART else self._joined(note, parts)
        self._lent.discard(slot)
        if arrived is None:
            return []
        self._early[number] = arrived
        ready = []
        while (due := self._early.pop(self._next_number, None)) is not None:
            ready.append(due)
            self._next_number += 1
        return ready

    def _whole(self, note: Note, parts: _Parts | None) -> Arrived:
        if parts is not None:
            raise BadWire(f"frame {note.number} comes whole and apart")
        data = self._data(note, note.header_len + note.payload_len)
        return Arrived(bytes(data[: note.header_len]), note.slot, data[note.header_len :])

    def _joined(self, note: Note, parts: _Parts | None) -> Arrived | None:
        """None: the other part is to come."""
        if not self._direct or note.payload_len > self._direct[note.slot].nbytes:
            raise BadWire("a payload larger than its direct place")
        if parts is None:
            parts = self._parts[note.number] = _Parts(note.slot, note.payload_len)
        of_payload = note.kind is Noted.DIRECT_PAYLOAD
        if (
            note.payload_len != parts.payload_len
            or (parts.payload if of_payload else parts.header) is not None
        ):
            raise BadWire(f"parts of frame {note.number} do not fit")
        if of_payload:
            place = self._direct[note.slot]
            parts.payload = MemoryRange(place.memory, place.offset, note.payload_len)
        else:
            parts.header = bytes(self._data(note, note.header_len))
        if parts.header is None or parts.payload is None:
            return None
        del self._parts[note.number]
        return Arrived(parts.header, note.slot, _NOTHING, parts.payload)

    def _data(self, note: Note, size: int) -> memoryview:
        if note.body or not size:
            return memoryview(note.body)
        if size > self._slots[note.slot].capacity:
            raise BadWire("a frame larger than its slot")
        return self._slots[note.slot].view[:size]

    def release(self, slot: int) -> list[int]:
        """The slots that are the peer's again: together, for half of them at a time."""
        self._owed.append(slot)
        if len(self._owed) < self._owed_max:
            return []
        owed, self._owed = self._owed, []
        self._lent.update(owed)
        return owed

    def forget(self) -> None:
        """The link is over: frames that are still out keep what they need."""
        self._slots, self.regions, self._direct = [], [], []
        self._early.clear()
        self._parts.clear()

    def grow_direct(self, slot: int, size: int) -> Memory:
        """The same of its second place. Raises BadWire, and whatever the device does."""
        make, fits = self._make_direct, 0 <= slot < len(self._direct)
        if make is None or not fits or slot not in self._lent:
            raise BadWire(f"slot {slot} has no direct place to grow")
        if not self._direct[slot].nbytes < size <= self._payload_max:
            raise BadWire(f"the direct place of slot {slot} can't grow to {size} bytes")
        pool = make(min(_grown(size, self._direct[slot].nbytes), self._payload_max))
        self._direct[slot] = MemoryRange(pool, 0, pool.capacity)
        self.regions.append(pool)
        return pool

    def grow(self, slot: int, size: int) -> Region:
        """A larger place for a slot that the peer has. Raises BadWire."""
        if slot not in self._lent or not self._slots[slot].capacity < size <= self._capacity_max:
            raise BadWire(f"slot {slot} can't grow to {size} bytes")
        wanted = min(_grown(size, self._slots[slot].capacity), self._capacity_max)
        region = self._slots[slot] = Region(wanted)
        self.regions.append(region)
        return region


def _grown(size: int, before: int) -> int:
    return max(1 << (size - 1).bit_length(), _GROWTH * before)


@dataclass(slots=True)
class Staging:
    """Our copy of what goes into a slot of the peer's. `busy` is set by the loop, cleared by the poller."""

    region: Region
    busy: bool = False
    wanted: bool = False  # the peer has freed the slot, and we have not sent it again


class Outgoing:
    """The peer's. A slot is free, or spent on a frame until the peer frees it and our write is seen done."""

    def __init__(self) -> None:
        self.slot_bytes = 0
        self._places: list[Place] = []
        self._direct: list[Place] = []
        self._free: list[int] = []
        self._spent: set[int] = set()
        self._growing: set[tuple[int, bool]] = set()
        self._stagings: dict[int, Staging] = {}
        self.regions: list[Memory] = []  # all that we write from
        self._number = 0

    def begin(self, offer: Offer) -> int:
        """Returns how many slots there are."""
        self.slot_bytes = offer.slot_bytes
        self._places, self._direct = list(offer.places), list(offer.direct)
        self._free = list(range(len(offer.places)))
        return len(offer.places)

    @property
    def takes_direct(self) -> bool:
        return bool(self._direct)

    def place(self, slot: int, direct: bool = False) -> Place:
        return (self._direct if direct else self._places)[slot]

    def fits(self, size: int) -> bool:
        """Whether a free slot takes it as it is."""
        return any(self._places[slot].capacity >= size for slot in self._free)

    def spend(self, size: int, direct: int = 0) -> int:
        """A slot that takes it, else any; `direct`: bytes in its second place. A credit says it is there."""
        fitting = (
            slot
            for slot in reversed(self._free)
            if self._places[slot].capacity >= size and not (direct and self._direct[slot].capacity < direct)
        )
        slot = next(fitting, self._free[-1])
        self._free.remove(slot)
        self._spent.add(slot)
        return slot

    def forget(self) -> None:
        """The link is over, and nothing of ours is written any more."""
        self._stagings.clear()
        self.regions = []

    def next_number(self) -> int:
        self._number += 1
        return self._number - 1

    def staging(self, slot: int, size: int) -> tuple[Staging, bool]:
        """Memory to write from, and whether it is new, to be registered."""
        staging = self._stagings.get(slot)
        if staging is not None and staging.region.capacity >= size:
            return staging, False
        staging = Staging(Region(max(1 << (size - 1).bit_length(), SLOT_BYTES_FIRST)))
        self._stagings[slot] = staging
        self.regions.append(staging.region)
        return staging, True

    def growing(self, slot: int, direct: bool) -> None:
        self._growing.add((slot, direct))

    def grew(self, slot: int, place: Place, direct: bool) -> None:
        """Raises BadWire."""
        places = self._direct if direct else self._places
        if (slot, direct) not in self._growing or place.capacity < places[slot].capacity:
            raise BadWire(f"slot {slot} grew unasked")
        self._growing.remove((slot, direct))
        places[slot] = Place(place.address, place.capacity, places[slot].device)

    def credited(self, slot: int) -> bool:
        """The peer freed a slot. False: our write to it is not seen done yet. Raises BadWire."""
        if slot not in self._spent or not self._growing.isdisjoint({(slot, False), (slot, True)}):
            raise BadWire(f"slot {slot} is not in use")
        staging = self._stagings.get(slot)
        if staging is not None:
            if staging.wanted:
                raise BadWire(f"slot {slot} is freed twice")
            staging.wanted = True
            if staging.busy:
                return False
        self.free(slot)
        return True

    def written(self, slot: int) -> bool:
        """The poller saw a write done. Whether the slot is free by that."""
        staging = self._stagings[slot]
        if not staging.wanted or staging.busy:
            return False  # told twice
        self.free(slot)
        return True

    def free(self, slot: int) -> None:
        if slot in self._stagings:
            self._stagings[slot].wanted = False
        self._spent.remove(slot)
        self._free.append(slot)

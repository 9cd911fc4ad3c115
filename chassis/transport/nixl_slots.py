"""The memory of a NIXL link: slots of ours that the peer writes into, slots of the peer's that we do.

Rules: a slot is lent, or holds one frame, or is owed to the peer; frames are handed out in the order of their
numbers, whatever order notifications come in; whatever a peer may not do is BadWire. A slot grows by a new
place; the old one stays registered until the link is closed, so that no address ever has two registrations.
"""

from collections.abc import Callable
from dataclasses import dataclass

from chassis.transport.interface import HEADER_BYTES_MAX, LinkOptions
from chassis.transport.nixl_agent import Region
from chassis.transport.nixl_wire import BadWire, Note, Noted, Offer, Place

SLOT_BYTES_FIRST = 256 << 10
_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Arrived:
    header: bytes
    slot: int
    payload: memoryview


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
        self.regions = list(self._slots)
        self._lent = set(range(options.slots))
        self._owed: list[int] = []
        self._owed_max = max(1, options.slots // 2)
        self._next_number = 0
        self._early: dict[int, Arrived] = {}

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(Place(region.address, region.capacity) for region in self._slots)

    def take(self, note: Note) -> list[Arrived]:
        """What can be handed out now. Raises BadWire."""
        number, slot = note.number, note.slot
        size = note.header_len + note.payload_len
        if slot not in self._lent:
            raise BadWire("a frame without a slot")
        if note.header_len > HEADER_BYTES_MAX or note.payload_len > self._payload_max:
            raise BadWire(f"a frame of {note.header_len} + {note.payload_len} bytes")
        if number in self._early or not 0 <= number - self._next_number < len(self._slots):
            raise BadWire(f"frame {number}, not {self._next_number}")
        if note.kind is Noted.WRITTEN:
            if size > self._slots[slot].capacity:
                raise BadWire("a frame larger than its slot")
            data = self._slots[slot].view[:size]
        else:
            data = memoryview(note.body)
        self._lent.remove(slot)
        self._early[number] = Arrived(bytes(data[: note.header_len]), slot, data[note.header_len :])
        ready = []
        while (arrived := self._early.pop(self._next_number, None)) is not None:
            ready.append(arrived)
            self._next_number += 1
        return ready

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
        self._slots, self.regions = [], []
        self._early.clear()

    def grow(self, slot: int, size: int) -> Region:
        """A larger place for a slot that the peer has. Raises BadWire."""
        if slot not in self._lent or not self._slots[slot].capacity < size <= self._capacity_max:
            raise BadWire(f"slot {slot} can't grow to {size} bytes")
        wanted = max(1 << (size - 1).bit_length(), _GROWTH * self._slots[slot].capacity)
        region = self._slots[slot] = Region(min(wanted, self._capacity_max))
        self.regions.append(region)
        return region


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
        self._free: list[int] = []
        self._spent: set[int] = set()
        self._growing: set[int] = set()
        self._stagings: dict[int, Staging] = {}
        self.regions: list[Region] = []  # all that we write from
        self._number = 0

    def begin(self, offer: Offer) -> int:
        """Returns how many slots there are."""
        self.slot_bytes = offer.slot_bytes
        self._places = list(offer.places)
        self._free = list(range(len(offer.places)))
        return len(offer.places)

    def place(self, slot: int) -> Place:
        return self._places[slot]

    def fits(self, size: int) -> bool:
        """Whether a free slot takes it as it is."""
        return any(self._places[slot].capacity >= size for slot in self._free)

    def spend(self, size: int) -> int:
        """A slot that takes it, else any. A credit says that there is one."""
        fitting = (slot for slot in reversed(self._free) if self._places[slot].capacity >= size)
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

    def growing(self, slot: int) -> None:
        self._growing.add(slot)

    def grew(self, slot: int, place: Place) -> None:
        """Raises BadWire."""
        if slot not in self._growing or place.capacity < self._places[slot].capacity:
            raise BadWire(f"slot {slot} grew unasked")
        self._growing.remove(slot)
        self._places[slot] = place

    def credited(self, slot: int) -> bool:
        """The peer freed a slot. False: our write to it is not seen done yet. Raises BadWire."""
        if slot not in self._spent or slot in self._growing:
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

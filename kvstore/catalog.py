"""Pure. Which contents a tier holds, in which layouts and layers, and which go first: the longest unused.

A content has pieces: what one stage sent of it, pages of neighbouring layers in one layout (`space`, the
seed of its name). Another split of the layers is served from as many pieces as it takes. Contents have
places, by which a listener reads them piece by piece while others come and go.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from chassis.ids import BlockHash, Epoch
from chassis.messages.cache import Held, PoolTotals
from chassis.messages.kvstore import KEEP_DEFAULT, Attach, PoolRef
from kvstore.changes import Changes


class Piece(Protocol):
    @property
    def space(self) -> int: ...

    @property
    def layers(self) -> range: ...

    @property
    def num_bytes(self) -> int: ...


P = TypeVar("P", bound=Piece)
PIECES_MAX = 64  # of a content; more splits than that are no use to anybody


class Origin(NamedTuple):
    """Where a content stands in its prompt. `parent` None: not told."""

    parent: BlockHash | None
    block_size_tokens: int


@dataclass(slots=True)
class Entry(Generic[P]):
    origin: Origin
    place: int
    used_at: float
    pieces: list[P] = field(default_factory=list)


def tier_attach(tier: str, block_size_tokens: int = 0) -> Attach:
    """A tier is told of like a pool: its generation is the tier's name."""
    return Attach(PoolRef(tier, Epoch(0), 0), (), 0, block_size_tokens, "")


class Catalog(Generic[P]):
    def __init__(self, tier: str, bytes_max: int, changes: Changes) -> None:
        self.num_bytes = 0
        self.bytes_max = bytes_max  # whoever puts sees to it
        self._attach = tier_attach(tier)
        self._changes = changes
        self._held: OrderedDict[BlockHash, Entry[P]] = OrderedDict()  # the longest unused first
        self._places: list[BlockHash | None] = []
        self._free_places: list[int] = []

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, content: BlockHash) -> bool:
        return content in self._held

    def origin(self, content: BlockHash) -> Origin | None:
        entry = self._held.get(content)
        return None if entry is None else entry.origin

    def has(self, content: BlockHash, space: int, layers: range) -> bool:
        entry = self._held.get(content)
        return entry is not None and bool(cover(entry.pieces, space, layers))

    def pieces(self, content: BlockHash, space: int, layers: range) -> Sequence[P]:
        """Whose layers together are at least these, in order of layers; none, if they are not all here."""
        entry = self._held.get(content)
        return () if entry is None else cover(entry.pieces, space, layers)

    def put(self, content: BlockHash, origin: Origin, piece: P, now: float) -> tuple[P, ...]:
        """Returns the pieces that are worth nothing now: they say less of the same."""
        entry = self._held.get(content)
        if entry is None:
            entry = self._held[content] = Entry(origin, self._place(content), now)
            if origin.block_size_tokens != self._attach.block_size_tokens:
                self._attach = tier_attach(self._attach.pool.generation, origin.block_size_tokens)
            self._changes.stored(self._attach, content, origin.parent)
        else:
            self._held.move_to_end(content)
            entry.used_at = now
            if entry.origin.parent is None:
                entry.origin = origin
        old = [p for p in entry.pieces if p.space == piece.space and _within(p.layers, piece.layers)]
        if len(entry.pieces) - len(old) >= PIECES_MAX:
            old.append(next(p for p in entry.pieces if p not in old))
        entry.pieces = [p for p in entry.pieces if p not in old]
        entry.pieces.append(piece)
        self.num_bytes += piece.num_bytes - sum(p.num_bytes for p in old)
        return tuple(old)

    def used(self, contents: Iterable[BlockHash], now: float) -> None:
        """Of a chain, the head last, so that it stays longest."""
        for content in contents:
            entry = self._held.get(content)
            if entry is not None:
                self._held.move_to_end(content)
                entry.used_at = now

    def evict(self) -> tuple[BlockHash, Entry[P]]:
        """The longest unused."""
        content = next(iter(self._held))
        entry = self.forget(content)
        assert entry is not None
        return content, entry

    def forget(self, content: BlockHash) -> Entry[P] | None:
        entry = self._held.pop(content, None)
        if entry is not None:
            self.num_bytes -= sum(p.num_bytes for p in entry.pieces)
            self._places[entry.place] = None
            self._free_places.append(entry.place)
            self._changes.evicted(self._attach, content)
        return entry

    def drop(self, content: BlockHash, piece: P) -> None:
        """One piece of it; with the last one the content goes."""
        entry = self._held.get(content)
        if entry is None or piece not in entry.pieces:
            return
        if len(entry.pieces) == 1:
            self.forget(content)
            return
        entry.pieces.remove(piece)
        self.num_bytes -= piece.num_bytes

    def clear(self) -> None:
        self._changes.cleared(self._attach)
        self._held.clear()
        self._places.clear()
        self._free_places.clear()
        self.num_bytes = 0

    def _place(self, content: BlockHash) -> int:
        if self._free_places:
            place = self._free_places.pop()
            self._places[place] = content
            return place
        self._places.append(content)
        return len(self._places) - 1

    # ---- for listeners

    def totals(self) -> PoolTotals:
        ref, size, count = self._attach.pool, self._attach.block_size_tokens, len(self._held)
        return PoolTotals(ref, "", size, count, 0, 0, count, self.num_bytes, self.bytes_max)

    def piece(self, first_place: int, count: int, now: float) -> tuple[tuple[Held, ...], int | None]:
        """What `count` places hold, and where the next ones begin."""
        held = []
        for content in self._places[first_place : first_place + count]:
            if content is not None:
                entry = self._held[content]
                unused_ms = max(0, round(1000 * (now - entry.used_at)))
                held.append(Held(content, entry.origin.parent, 0, 0, KEEP_DEFAULT, unused_ms))
        following = first_place + count
        return tuple(held), following if following < len(self._places) else None

    def __iter__(self) -> Iterator[BlockHash]:
        """The longest unused first."""
        return iter(self._held)

    def check(self) -> None:
        assert self.num_bytes == sum(p.num_bytes for e in self._held.values() for p in e.pieces)
        assert all(e.pieces for e in self._held.values()), "a content without a piece"
        assert all(self._places[e.place] == content for content, e in self._held.items())
        assert len(self._places) == len(self._held) + len(self._free_places), "a place is lost"
        assert all(self._places[place] is None for place in self._free_places)


def cover(pieces: Sequence[P], space: int, layers: range) -> tuple[P, ...]:
    """As few as it takes, in order of layers; empty: they do not cover all."""
    found: list[P] = []
    layer = layers.start
    while layer < layers.stop:
        best = max(
            (p for p in pieces if p.space == space and layer in p.layers),
            key=lambda p: p.layers.stop,
            default=None,
        )
        if best is None:
            return ()
        found.append(best)
        layer = best.layers.stop
    return tuple(found)


def _within(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop

"""Pure. Contents in kvstore's own memory: so many bytes, and the longest unused goes first."""

from collections.abc import Iterable

from chassis.ids import BlockHash
from chassis.messages.cache import TIER_HOST
from kvstore.catalog import Catalog, Origin
from kvstore.changes import Changes
from kvstore.content import Pages, joined


class HostTier:
    def __init__(self, bytes_max: int, changes: Changes) -> None:
        self.bytes_max = bytes_max
        self.evictions = 0
        self.catalog: Catalog[Pages] = Catalog(TIER_HOST, bytes_max, changes)

    def put(self, content: BlockHash, origin: Origin, pages: Pages, now: float) -> None:
        """What does not fit at all is not taken."""
        if pages.num_bytes > self.bytes_max:
            return
        self.catalog.put(content, origin, pages, now)
        while self.catalog.num_bytes > self.bytes_max:
            self.catalog.evict()
            self.evictions += 1

    def has(self, content: BlockHash, space: int, layers: range) -> bool:
        return self.catalog.has(content, space, layers)

    def get(self, content: BlockHash, space: int, layers: range) -> Pages | None:
        pieces = self.catalog.pieces(content, space, layers)
        return joined(pieces, layers) if pieces else None

    def used(self, contents: Iterable[BlockHash], now: float) -> None:
        self.catalog.used(contents, now)

    def forget(self, content: BlockHash) -> None:
        self.catalog.forget(content)

    def check(self) -> None:
        self.catalog.check()
        assert self.catalog.num_bytes <= self.bytes_max

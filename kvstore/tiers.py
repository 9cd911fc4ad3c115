"""The tiers below the pools, host memory over disk, as one: what is saved goes into both, what is read comes
from the nearer. What a worker refuses, or proves wrong, is in neither any more.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from chassis.ids import BlockHash
from kvstore.catalog import Origin
from kvstore.content import Pages
from kvstore.disk_tier import DiskTier
from kvstore.host_tier import HostTier


@dataclass(slots=True)
class TierTally:
    """Blocks, but for failures: those are calls."""

    saved: int = 0
    restored: int = 0
    refused: int = 0
    failed_saves: int = 0
    failed_restores: int = 0
    late_restores: int = 0  # matches that waited no longer


class Tiers:
    def __init__(self, host: HostTier, disk: DiskTier | None) -> None:
        self.host = host
        self.disk = disk
        self.tally = TierTally()

    def knows(self, content: BlockHash) -> bool:
        """In whichever layout and layers."""
        return content in self.host.catalog or (self.disk is not None and content in self.disk.catalog)

    def has(self, content: BlockHash, space: int, layers: range) -> bool:
        if self.host.has(content, space, layers):
            return True
        return self.disk is not None and self.disk.has(content, space, layers)

    def put(self, content: BlockHash, origin: Origin, pieces: Sequence[Pages], now: float) -> None:
        for pages in pieces:
            self.host.put(content, origin, pages, now)
            if self.disk is not None:
                self.disk.put(content, origin, pages)
        self.tally.saved += 1

    async def get(self, content: BlockHash, space: int, layers: range) -> Pages | None:
        found = self.host.get(content, space, layers)
        if found is None and self.disk is not None:
            origin = self.disk.origin(content)
            found = await self.disk.get(content, space, layers)
            if found is not None and origin is not None:
                self.host.put(content, origin, found, asyncio.get_running_loop().time())
        if found is None and self.has(content, space, layers):
            self.refused(content)  # its pieces do not belong together
        return found

    def used(self, contents: Sequence[BlockHash], now: float) -> None:
        """The beginning of a chain."""
        self.host.used(reversed(contents), now)
        if self.disk is not None:
            self.disk.used(reversed(contents), now)

    def refused(self, content: BlockHash) -> None:
        """A worker found that it is not what it should be."""
        self.tally.refused += 1
        self.forget(content)

    def forget(self, content: BlockHash) -> None:
        self.host.forget(content)
        if self.disk is not None:
            self.disk.forget(content)

    def check(self) -> None:
        self.host.check()
        if self.disk is not None:
            self.disk.check()

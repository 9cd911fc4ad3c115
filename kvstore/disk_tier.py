"""Contents on a disk: so many bytes in segments, of which the oldest goes as a whole. It survives restarts.

`Segments` is the state and what is done to it, on the I/O thread alone; `DiskTier` is what the loop knows of
it: which contents are there, and the line of those that wait to be written. Nothing is synced: a crash of the
machine loses the last records, and the checksums tell. A disk that fails is left alone for a while.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from chassis import log
from chassis.ids import BlockHash
from chassis.messages.cache import TIER_DISK
from kvstore.catalog import Catalog, Origin
from kvstore.changes import Changes
from kvstore.content import Pages, joined
from kvstore.io_thread import Io
from kvstore.segment import Damage, Head, build_head, parse_record, scan
from kvstore.segment_files import Files

SEGMENTS = 16  # of a full tier
SEGMENT_BYTES_MIN = 1 << 16
BATCH_BYTES_MAX = 8 << 20  # written by one call
LINE_BYTES_MAX = 128 << 20  # waiting to be written
PAUSE_S = 30.0  # after a failure


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies."""

    segment: int
    offset: int
    length: int
    space: int
    layers: range

    @property
    def num_bytes(self) -> int:
        return self.length


T = TypeVar("T")
Written = tuple[BlockHash, Origin, Place]
Waiting = tuple[BlockHash, Origin, Pages]


class Segments:
    """Blocking; all but the constructor may raise OSError. `gone`: segments whose records are void."""

    def __init__(self, files: Files, bytes_max: int) -> None:
        self.damage = Damage()
        self.gone: list[int] = []
        self._files = files
        self._bytes_max = bytes_max
        self._segment_bytes = max(SEGMENT_BYTES_MIN, bytes_max // SEGMENTS)
        self._lengths: dict[int, int] = {}  # by segment, the oldest first
        self._last = 0  # no number comes twice

    def open(self) -> list[Written]:
        """What is there from before, the oldest first."""
        found: list[Written] = []
        for number in self._files.open():
            self._last = number
            data = self._files.whole(number)
            end = 0
            try:
                for offset, head in scan(data, self.damage):
                    found.append((head.content, head.origin, _place(number, offset, head)))
                    end = offset + head.num_bytes
            finally:
                data.release()
            if end:
                self._lengths[number] = end
            else:
                self._files.remove(number)
        while sum(self._lengths.values()) > self._bytes_max:
            self.drop_oldest()
        return found

    def append(self, batch: list[Waiting]) -> list[Written]:
        """Where they lie now; what has no room even so is left out."""
        written: list[Written] = []
        for content, origin, pages in batch:
            head = build_head(content, origin, pages)
            length = len(head) + pages.num_bytes
            while self._lengths and sum(self._lengths.values()) + length > self._bytes_max:
                self.drop_oldest()
            if self._lengths.get(self._last, self._segment_bytes) + length > self._segment_bytes:
                self._last += 1
            offset = self._lengths.get(self._last, 0)
            self._files.write(self._last, offset, [head, pages.data])
            self._lengths[self._last] = offset + length
            written.append((content, origin, Place(self._last, offset, length, pages.space, pages.layers)))
        return written

    def read(self, content: BlockHash, places: Iterable[Place]) -> list[Pages | None]:
        """None: it is not there any more, or damaged."""
        found = []
        for place in places:
            data = self._files.read(place.segment, place.offset, place.length)
            found.append(parse_record(data, content, self.damage))
        return found

    def drop_oldest(self) -> None:
        if self._lengths:
            number = next(iter(self._lengths))
            del self._lengths[number]
            self.gone.append(number)
            self._files.remove(number)

    def close(self) -> None:
        self._files.close()


class DiskTier:
    def __init__(self, files: Files, bytes_max: int, io: Io, changes: Changes) -> None:
        self.bytes_max = bytes_max
        self.evictions = 0
        self.failures = 0
        self.left_out = 0  # contents that were not written
        self.catalog: Catalog[Place] = Catalog(TIER_DISK, bytes_max, changes)
        self.segments = Segments(files, bytes_max)
        self._io = io
        self._full = False
        self._by_segment: dict[int, dict[tuple[BlockHash, Place], None]] = {}
        self._line: deque[Waiting] = deque()
        self._line_bytes = 0
        self._filled = asyncio.Event()

    async def run(self, now: float) -> None:
        """Learns what is there, then writes what comes, until cancelled. Without the folder: OSError."""
        for written in await self._io.call(self.segments.open):
            self._note(written, now)
        self._forget_gone()
        log.info("disk tier", contents=len(self.catalog), num_bytes=self.catalog.num_bytes)
        loop = asyncio.get_running_loop()
        while True:
            await self._filled.wait()
            batch = self._batch()
            if batch and not await self._write(batch, loop.time()):
                self._line.clear()
                self._line_bytes = 0
                await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        await self._io.call(self.segments.close)
        self._io.close()

    async def flush(self) -> None:
        """Writes what waits, once `run` has ended."""
        while batch := self._batch():
            if not await self._write(batch, asyncio.get_running_loop().time()):
                return

    @property
    def idle(self) -> bool:
        return not self._line

    def put(self, content: BlockHash, origin: Origin, pages: Pages) -> None:
        """It is written soon; not, where too much waits already."""
        if self.catalog.has(content, pages.space, pages.layers):
            return
        if self._line_bytes + pages.num_bytes > LINE_BYTES_MAX or 2 * pages.num_bytes > self.bytes_max:
            self.left_out += 1
            return
        self._line.append((content, origin, pages))
        self._line_bytes += pages.num_bytes
        self._filled.set()

    def has(self, content: BlockHash, space: int, layers: range) -> bool:
        return self.catalog.has(content, space, layers)

    def origin(self, content: BlockHash) -> Origin | None:
        return self.catalog.origin(content)

    async def get(self, content: BlockHash, space: int, layers: range) -> Pages | None:
        """None: not here, or damaged; what is damaged is forgotten."""
        places = self.catalog.pieces(content, space, layers)
        if not places:
            return None
        try:
            found = await self._io.call(lambda: self.segments.read(content, places))
        except OSError as error:
            log.warning("disk tier can't be read", error=str(error))
            self.failures += 1
            found = [None] * len(places)
        whole = [pages for pages in found if pages is not None]
        for place, pages in zip(places, found, strict=True):
            if pages is None:
                self._forget(content, place)
        return joined(whole, layers) if len(whole) == len(places) else None

    def forget(self, content: BlockHash) -> None:
        """Whatever is known of it here is no use; its records stay until their segments go."""
        entry = self.catalog.forget(content)
        for place in () if entry is None else entry.pieces:
            self._by_segment.get(place.segment, {}).pop((content, place), None)

    def used(self, contents: Iterable[BlockHash], now: float) -> None:
        self.catalog.used(contents, now)

    def check(self) -> None:
        self.catalog.check()
        noted = sum(map(len, self._by_segment.values()))
        assert self.catalog.num_bytes == sum(p.length for s in self._by_segment.values() for _, p in s)
        assert noted >= len(self.catalog) and self.catalog.num_bytes <= self.bytes_max

    def _batch(self) -> list[Waiting]:
        batch, size = [], 0
        while self._line and size < BATCH_BYTES_MAX:
            waiting = self._line.popleft()
            size += waiting[2].num_bytes
            batch.append(waiting)
        self._line_bytes -= size
        if not self._line:
            self._filled.clear()
        return batch

    async def _write(self, batch: list[Waiting], now: float) -> bool:
        """A full disk has room again once the oldest segment is gone; False: it fails for all that."""
        written = await self._try(lambda: self.segments.append(batch))
        if written is None and self._full:
            await self._try(self.segments.drop_oldest)
            written = await self._try(lambda: self.segments.append(batch))
        for entry in written or ():
            self._note(entry, now)
        self._forget_gone()
        if written is not None:
            return True
        self.left_out += len(batch)
        return False

    async def _try(self, work: Callable[[], T]) -> T | None:
        """None: it failed."""
        self._full = False
        try:
            return await self._io.call(work)
        except OSError as error:
            log.warning("disk tier can't be written", error=str(error))
            self.failures += 1
            self._full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return None

    def _note(self, written: Written, now: float) -> None:
        content, origin, place = written
        for old in self.catalog.put(content, origin, place, now):
            self._by_segment[old.segment].pop((content, old), None)
        self._by_segment.setdefault(place.segment, {})[content, place] = None

    def _forget_gone(self) -> None:
        gone, self.segments.gone = self.segments.gone, []
        for number in gone:
            for content, place in self._by_segment.pop(number, {}):
                self.catalog.drop(content, place)
                self.evictions += 1

    def _forget(self, content: BlockHash, place: Place) -> None:
        self._by_segment.get(place.segment, {}).pop((content, place), None)
        self.catalog.drop(content, place)


def _place(segment: int, offset: int, head: Head) -> Place:
    return Place(segment, offset, head.num_bytes, head.space, head.layers)

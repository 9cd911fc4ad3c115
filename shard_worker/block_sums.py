"""Reads KV memory for `contents.py`: on the copies' thread, beside the steps.

Checksums of what was filled are taken by a task that nobody waits for; with too many to take, the rest has
none. What rows go on from is compared before anything of their step is sent.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import xxhash

from chassis import log
from shard_worker.compute import Compute
from shard_worker.contents import Contents
from shard_worker.executor import Executor, Pages
from shard_worker.stamps import Stamps

TAKES_MAX = 64
BUFFER_BYTES = 1 << 20  # what is read at once, if it is more than one block: it stays in the cache

_Take = tuple[Contents, int, list[int], Pages]  # the turn that wrote the blocks


class BlockSums:
    def __init__(self, executor: Executor, copies: Compute) -> None:
        self._executor = executor
        self._copies = copies
        self._takes: asyncio.Queue[_Take] = asyncio.Queue(TAKES_MAX)
        self.num_changed = 0  # blocks that were found changed

    def take(self, contents: Contents, turn: int, blocks: list[int]) -> None:
        """Some time soon, if there is room; of blocks that nobody is going to write unannounced."""
        pages = self._executor.pages
        if blocks and pages is not None and not self._takes.full():
            self._takes.put_nowait((contents, turn, blocks, pages))

    async def take_all(self) -> None:
        while True:
            contents, turn, blocks, pages = await self._takes.get()
            try:
                checksums = await self._copies.call(partial(checksums_of, pages, blocks))
            except Exception as error:  # the device's: its steps fail too, and the worker lives
                log.exception("no checksums of blocks", error)
            else:
                contents.keep(turn, blocks, checksums)

    async def changed(self, stamps: Stamps, blocks: Sequence[int]) -> list[int]:
        """Those that hold something else than was written there: nothing is known of them any more."""
        contents, pages = stamps.contents, self._executor.pages
        if contents is None or pages is None or not (kept := contents.kept(blocks)):
            return []
        checksums = await self._copies.call(partial(checksums_of, pages, [entry.block for entry in kept]))
        changed = contents.changed(kept, checksums)
        if changed:
            self.num_changed += len(changed)
            stamps.blocks["fill"][changed] = 0
            log.warning("memory of blocks has changed by itself", blocks=changed)
        return changed


def checksums_of(pages: Pages, blocks: Sequence[int]) -> list[int]:
    """Over the pages of each block, in all layers of the stage."""
    form = pages.form
    at_once = min(len(blocks), max(1, BUFFER_BYTES // form.block_bytes))
    into = np.empty((at_once, form.num_layers, form.page_bytes), np.uint8)
    sums: list[int] = []
    for first in range(0, len(blocks), at_once):
        part = blocks[first : first + at_once]
        pages.read(part, into[: len(part)])
        sums.extend(xxhash.xxh3_64_intdigest(block.data) for block in into[: len(part)])
    return sums

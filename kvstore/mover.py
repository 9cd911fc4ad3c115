"""Moves contents between the workers of one pipeline and the tiers: the links of an epoch, and the calls.

The decisions are `kvstore/moves.py`'s. Links outlive an attach of the same epoch; moves do not.
"""

import asyncio
from collections.abc import Callable, Sequence

from chassis import log
from chassis.ids import BlockHash
from kvstore.content import Pages
from kvstore.moves import Move, Moves, Restore
from kvstore.stage_link import CallFailed, Doubt, StageLink
from kvstore.tiers import Tiers

Chain = tuple[BlockHash, ...]
LOADS_MAX = 2  # calls at once: while one is written, the next is read
SAVE_RETRY_S = 1.0


class Mover:
    def __init__(self, links: Sequence[StageLink], tiers: Tiers, moved: Callable[[], None]) -> None:
        """`moved` is called when contents have moved."""
        self._links = tuple(links)
        self._tiers = tiers
        self._moved = moved
        self._moves: Moves | None = None
        self._group: asyncio.TaskGroup | None = None
        self._loads = asyncio.Semaphore(LOADS_MAX)
        self._wanted = asyncio.Event()  # something may be to be saved
        self._progress = asyncio.Event()  # a restore went on or ended

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for link in self._links:
                    group.create_task(link.run(), name="stage link")
                await self._save()
        finally:
            self._group = None
            self.attached(None)

    def attached(self, moves: Moves | None) -> None:
        if self._moves is not None:
            self._moves.void = True
        self._moves = moves
        self._wanted.set()
        self._went_on()

    @property
    def moves(self) -> Moves | None:
        return self._moves

    @property
    def ready(self) -> bool:
        return all(link.kept is not None for link in self._links)

    @property
    def wrong(self) -> int:
        return sum(link.wrong for link in self._links)

    def _whole(self, content: BlockHash) -> bool:
        return all(self._tiers.has(content, link.space, link.layers) for link in self._links)

    # ---- saving

    def learn(self) -> None:
        """After each call to the pool."""
        if self._moves is not None:
            for content in self._moves.learn():
                self._tiers.forget(content)
            if self._moves.backlog:
                self._wanted.set()

    async def _save(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while (moves := self._moves) is not None and moves.backlog:
                if not self.ready:
                    await self._changed()
                    continue
                move = moves.next_save(self._whole)
                if move is not None and not await self._save_one(moves, move):
                    await asyncio.sleep(SAVE_RETRY_S)

    async def _save_one(self, moves: Moves, move: Move) -> bool:
        attachment, now = moves.pool.ref.attachment, asyncio.get_running_loop().time
        calls = (link.save(attachment, move) for link in self._links)
        try:
            answers = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            good = moves.saved(move, now())
        found: list[dict[int, list[Pages]]] = []
        for answer in answers:
            if isinstance(answer, CallFailed):
                log.debug("blocks not saved", error=str(answer))
                self._tiers.tally.failed_saves += 1
                return False
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        for index in good:
            if all(index in got for got in found):
                pieces = [pages for got in found for pages in got[index]]
                self._tiers.put(move.contents[index], move.origins[index], pieces, now())
        self._moved()
        return True

    async def _changed(self) -> None:
        """Until a link came or went, or there is another attach."""
        link = next(link for link in self._links if link.kept is None)
        link.changed.clear()
        await link.changed.wait()

    # ---- restoring

    async def prepare(self, chains: Sequence[Sequence[BlockHash]], wait_s: float) -> None:
        """Restores what these chains begin with; returns when that is done, or after so long."""
        moves, loop = self._moves, asyncio.get_running_loop()
        until = loop.time() + wait_s
        if moves is not None and not self.ready and any(self._known(moves, chain) for chain in chains):
            await self._opened(until)
        left = [tuple(chain) for chain in chains]  # one restore each: what failed is computed
        while moves is self._moves and moves is not None and self.ready and not moves.pool.doubtful:
            left = self._begin(moves, left)
            if not any(moves.under_way(chain) for chain in chains):
                return
            self._progress.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._progress.wait()
            except TimeoutError:
                self._tiers.tally.late_restores += 1
                return

    def _known(self, moves: Moves, chain: Sequence[BlockHash]) -> bool:
        """Whether the tiers have the first content that the pool lacks, in whichever layout."""
        found = len(moves.pool.index.find(chain))
        return found < len(chain) and self._tiers.knows(chain[found])

    async def _opened(self, until: float) -> None:
        """Waits for links that are dialled for the first time: a pool's first prompts come just then."""
        try:
            async with asyncio.timeout_at(until):
                for link in self._links:
                    await link.tried.wait()
        except TimeoutError:
            pass

    def _begin(self, moves: Moves, chains: Sequence[Chain]) -> list[Chain]:
        """Returns those of which nothing is under way."""
        now, left = asyncio.get_running_loop().time(), []
        for chain in chains:
            restore = moves.restore(chain, self._whole)
            if restore is None or self._group is None:
                left.append(chain)
                continue
            self._tiers.used(chain[: len(restore.held)], now)
            for move in restore.moves:
                self._group.create_task(self._load(moves, restore, move), name="restore")
        return left

    async def _load(self, moves: Moves, restore: Restore, move: Move) -> None:
        now = asyncio.get_running_loop().time
        async with self._loads:
            good: Sequence[int] = ()
            try:
                if not moves.void:
                    good = await self._load_one(moves, move)
            except Doubt as error:
                log.warning("contents in doubt", error=str(error), blocks=len(move.blocks))
                self._tiers.tally.failed_restores += 1
                moves.doubt(restore, move)
            except CallFailed as error:
                log.debug("contents not restored", error=str(error))
                self._tiers.tally.failed_restores += 1
                moves.restored(restore, move, (), now())
            else:
                moves.restored(restore, move, good, now())
                self._tiers.tally.restored += len(good)
                self._moved()
        self._went_on()

    async def _load_one(self, moves: Moves, move: Move) -> Sequence[int]:
        """Which of its contents are in their blocks now, on all stages."""
        found: dict[int, list[Pages]] = {}
        for index, content in enumerate(move.contents):
            pages = [await self._tiers.get(content, link.space, link.layers) for link in self._links]
            there = [p for p in pages if p is not None]
            if len(there) == len(pages):
                found[index] = there
        if not found or moves.void:
            return ()
        places = list(found)
        part = move.only(places)
        attachment = moves.pool.ref.attachment
        calls = [
            link.load(attachment, part, [found[i][stage] for i in places])
            for stage, link in enumerate(self._links)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failures = [a for a in answers if isinstance(a, BaseException)]
        for failure in sorted(failures, key=lambda f: (isinstance(f, CallFailed), not isinstance(f, Doubt))):
            raise failure  # what is no failure of a call first, then doubt
        refused = {i for a in answers if not isinstance(a, BaseException) for i in a}
        for i in sorted(refused):
            self._tiers.refused(part.contents[i])
        return [place for i, place in enumerate(places) if i not in refused]

    def _went_on(self) -> None:
        self._progress.set()

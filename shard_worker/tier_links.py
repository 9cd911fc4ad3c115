"""The links on which kvstores read and write a stage's blocks: pages go past the steps, on their own thread.

Each link has three tasks: one reads it, one ends what was written, one serves saves. Pages are copied on the
thread `copies`, so that neither the loop nor the compute thread waits for them. Rules: whether a call may go
on is asked under the lock that a write holds, so that the last write of a kvstore is over when the step is
taken that ends its right, when its link is closed here, and when it is answered on a newer one; what was read
is sent only if the right still stands afterwards. Saves are in no hurry: while steps run they take a share of
the time, loads what they need.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from chassis import log
from chassis.errors import LinkClosed, let_go
from chassis.ids import BootId
from chassis.messages import BadMessage
from chassis.messages.forming import Form, Formed
from chassis.messages.pipeline import Hello
from chassis.messages.tier import (
    LoadBlocks,
    SaveBlocks,
    TierContent,
    TierDone,
    TierStage,
    build_tier,
    checksums,
    parse_tier,
    seed_of,
)
from chassis.transport.interface import Frame, Link
from shard_worker.compute import Compute
from shard_worker.executor import U8, Executor, Pages
from shard_worker.runner import StepRunner
from shard_worker.stamps import Stamps
from shard_worker.tier_calls import CALLS_MAX, Call, Fence, LinkCalls, Piece, pack_stamp, parse_stamp

LINKS_MAX = 4  # one kvstore, and those that it succeeds
READ_BYTES_MAX = 1 << 20  # at once; at least a block
FRAME_BYTES_MAX = 1 << 22  # at least a page
FRAMES_MAX = 64  # more than any link has slots
SAVE_SHARE = 1 / 8  # of the time, while steps run: a save is in no hurry
IDLE_S = 0.05  # longer without a step: nobody is held up
REST_S_MAX = 0.1


@dataclass(frozen=True, slots=True)
class _Stage:
    """Where the worker stands, for tiers."""

    stage: TierStage
    num_blocks: int
    block_size_tokens: int
    stamps: Stamps | None


@dataclass(frozen=True, slots=True)
class _Write:
    piece: Piece
    frame: Frame
    stamp: bytes
    good: Awaitable[bool | None]  # None: its call may not go on


class TierLinks:
    def __init__(
        self,
        executor: Executor,
        copies: Compute,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        count: Callable[[str], None],
        steps: StepRunner,
    ) -> None:
        """`spawn`: a task of the worker."""
        self._executor = executor
        self._copies = copies
        self._spawn = spawn
        self._count = count
        self._steps = steps
        self._fence = Fence()
        self._lock = threading.Lock()  # of the fence and of writes
        self._stage: _Stage | None = None
        self._links: list[_Served] = []  # the oldest first

    @property
    def attachment(self) -> int:
        """The newest that is known; only the loop changes it."""
        return self._fence.attachment

    def with_prior(self, formed: Formed) -> Formed:
        """And as of which attach the KV memory is."""
        if formed.refusal is not None:
            return formed
        return replace(formed, prior_attachment=self._fence.prior_attachment)

    def stand(self, form: Form, num_blocks: int, stamps: Stamps | None) -> None:
        with self._lock:
            self._fence.stand(form.epoch)
        pages = self._executor.pages
        if pages is None:
            return
        layers = range(form.first_layer, form.end_layer)
        stage = TierStage(form.epoch, layers, pages.form.layout, pages.form.page_bytes)
        self._stage = _Stage(stage, num_blocks, form.block_size_tokens, stamps)

    def end(self) -> None:
        """Nothing of the epoch is read or written any more."""
        with self._lock:
            self._fence.end()
        self._stage = None
        while self._links:
            self._links.pop().close()

    async def close(self) -> None:
        self.end()
        await self._copies.close()

    def rise(self, attachment: int) -> None:
        """Nothing of older ones is written when this returns."""
        with self._lock:
            self._fence.rise(attachment)

    def accept(self, link: Link, hello: Hello) -> None:
        stage = self._stage
        if stage is None or hello.epoch != stage.stage.epoch:
            self._count("ghost_link")
            link.close()
            return
        for older in [served for served in self._links if served.boot == hello.boot]:
            older.close()
        if len(self._links) >= LINKS_MAX:
            self._count("evicted_link")
            self._links[0].close()
        served = _Served(self, link, hello.boot, stage)
        self._links.append(served)
        self._spawn(served.serve(), "tier link")

    def shut(self, served: "_Served") -> None:
        """Nothing of its calls is written when this returns."""
        with self._lock:
            served.open = False
        if served in self._links:
            self._links.remove(served)

    # ---- for the links

    async def read(
        self, stage: _Stage, call: Call, indices: Sequence[int], into: U8
    ) -> list[tuple[int, ...]]:
        """The pages of some of the call's blocks, and their checksums; none: it may not go on."""
        found = await self._copies.call(partial(self._read, stage.stage, call, indices, into))
        return [] if self._fence.refusal(call) else found

    def _read(self, stage: TierStage, call: Call, indices: Sequence[int], into: U8) -> list[tuple[int, ...]]:
        pages = self._pages(call)
        if pages is None:
            return []
        pages.read([call.blocks[i] for i in indices], into)
        seed = seed_of(stage.layout)
        return [
            checksums(seed, call.contents[index], stage.layers, block.data)
            for index, block in zip(indices, into, strict=True)
        ]

    def write(
        self, served: "_Served", piece: Piece, content: TierContent, payload: memoryview
    ) -> Awaitable[bool | None]:
        """False: it is not what it had to be; None: its call may not go on."""
        return self._copies.begin(partial(self._write, served, piece, content, payload))

    def _write(
        self, served: "_Served", piece: Piece, content: TierContent, payload: memoryview
    ) -> bool | None:
        stage = served.stage.stage
        sums = checksums(seed_of(stage.layout), piece.content, content.layers, payload)
        if sums != content.checksums:
            return False
        shape = (1, piece.num_layers, stage.page_bytes)
        with self._lock:
            pages = None if self._fence.refusal(piece.call) else self._executor.pages
            if pages is None or not served.open:
                return None
            if (stamps := served.stage.stamps) is not None:
                (stamps.forget if piece.begins else stamps.partly)(piece.block)
            pages.write([piece.block], np.frombuffer(payload, np.uint8).reshape(shape), piece.first_layer)
        return True

    def _pages(self, call: Call) -> Pages | None:
        with self._lock:
            return None if self._fence.refusal(call) else self._executor.pages

    async def rest(self, worked_s: float) -> None:
        """After work on a save, so that it takes its share of the time only."""
        if self._steps.idle_s < IDLE_S:
            await asyncio.sleep(min(worked_s * (1 / SAVE_SHARE - 1), REST_S_MAX))

    def is_written(self, block: int, block_size_tokens: int) -> bool:
        """By a step under way, which was told of a block that is not its own: its stamp is of before."""
        return self._steps.writes(block, block_size_tokens)

    def refusal(self, call: Call) -> str:
        return self._fence.refusal(call)

    def restored(self, stamps: Stamps, block: int) -> None:
        """Its content came and is right."""
        if (contents := stamps.contents) is not None:
            written = contents.restored(block)
            self._steps.sums.take(contents, written.turn, contents.choose(written, stamps.blocks["fill"]))

    async def compare(self, stamps: Stamps | None, blocks: Sequence[int]) -> None:
        """Nothing is known any more of those that have changed, before they get checksums of a tier."""
        if stamps is not None:
            await self._steps.sums.changed(stamps, blocks)


class _Served:
    """One link."""

    def __init__(self, links: TierLinks, link: Link, boot: BootId, stage: _Stage) -> None:
        self.boot = boot
        self.stage = stage
        self.open = True  # changes under the lock
        self._links = links
        self._link = link
        self._calls = LinkCalls(stage.stage, stage.num_blocks)
        self._saves: asyncio.Queue[SaveBlocks] = asyncio.Queue(CALLS_MAX)
        self._writes: asyncio.Queue[_Write] = asyncio.Queue(FRAMES_MAX)

    async def serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive(), name="tier receive")
                group.create_task(self._end_writes(), name="tier writes")
                group.create_task(self._serve_saves(), name="tier saves")
        except* LinkClosed as errors:
            let_go(errors)
        except* BadMessage as errors:
            log.warning("tier link said something bad", error=str(errors.exceptions[0]))
            let_go(errors)
        except* Exception as errors:  # the device's: the link goes, the worker lives
            log.exception("tier link failed", errors)
            let_go(errors)
        finally:
            self.close()

    def close(self) -> None:
        self._links.shut(self)
        self._link.close()

    async def _say(
        self, message: TierStage | TierContent | TierDone, payload: memoryview | bytes = b""
    ) -> None:
        await self._link.send(build_tier(message), payload)

    async def _receive(self) -> None:
        await self._say(self.stage.stage)
        while True:
            frame = await self._link.receive()
            message = parse_tier(frame.header)
            match message:
                case SaveBlocks() | LoadBlocks():
                    frame.release()
                    await self._open(message)
                case TierContent():
                    self._place(message, frame)
                case _:
                    raise BadMessage("tier: a worker is called, and calls nobody")

    async def _open(self, call: Call) -> None:
        error = self._links.refusal(call)
        if not error:
            if call.attachment > self._links.attachment:
                self._links.rise(call.attachment)
            error = self._calls.open(call)
        if error:
            await self._say(TierDone(call.call, error))
        elif isinstance(call, SaveBlocks):
            self._saves.put_nowait(call)

    def _place(self, content: TierContent, frame: Frame) -> None:
        piece = self._calls.placed(content, frame.payload.nbytes)
        if piece is None:
            frame.release()
            return
        good = self._links.write(self, piece, content, frame.payload)
        self._writes.put_nowait(_Write(piece, frame, content.stamp, good))

    async def _end_writes(self) -> None:
        while True:
            write = await self._writes.get()
            try:
                good = await write.good
            finally:
                write.frame.release()
            piece, call = write.piece, write.piece.call
            error = self._links.refusal(call)
            if good is None or error:
                if self._calls.close(call):
                    await self._say(TierDone(call.call, error))
                continue
            good = good and self._proven(write.stamp)
            if self._calls.written(piece, good, write.stamp):
                self._stamp(piece, write.stamp)
            done = self._calls.done(call)
            if done is not None:
                await self._say(done)

    def _proven(self, data: bytes) -> bool:
        """Whether it can be shown later what the block holds, where that is asked."""
        stamp = parse_stamp(data)
        whole = stamp is not None and stamp.fill == self.stage.block_size_tokens
        return whole or self.stage.stamps is None

    def _stamp(self, piece: Piece, data: bytes) -> None:
        stamps, stamp = self.stage.stamps, parse_stamp(data)
        if stamps is not None and stamp is not None and stamps.restored(piece.block, stamp):
            self._links.restored(stamps, piece.block)

    # ---- saves

    async def _serve_saves(self) -> None:
        stage = self.stage.stage
        block_bytes = len(stage.layers) * stage.page_bytes
        at_once = max(1, READ_BYTES_MAX // block_bytes)
        buffer = np.empty((at_once, len(stage.layers), stage.page_bytes), np.uint8)
        while True:
            call = await self._saves.get()
            refused: list[int] = []
            error = ""
            for first in range(0, len(call.blocks), at_once):
                indices = range(first, min(first + at_once, len(call.blocks)))
                if not await self._save(call, indices, buffer[: len(indices)], refused):
                    error = self._links.refusal(call)
                    break
            self._calls.close(call)
            await self._say(TierDone(call.call, error, tuple(refused)))

    async def _save(self, call: SaveBlocks, indices: range, into: U8, refused: list[int]) -> bool:
        """False: the call may not go on."""
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        await self._links.compare(self.stage.stamps, [call.blocks[index] for index in indices])
        sums = await self._links.read(self.stage, call, indices, into)
        stamps = [self._stamp_of(call.blocks[index]) for index in indices]  # now: blocks may soon be others'
        for index, of_block, stamp, pages in zip(indices, sums, stamps, into, strict=False):
            if stamp is None:
                refused.append(index)
            else:
                await self._send(call, index, of_block, stamp, pages)
        await self._links.rest(loop.time() - begun_at)
        return bool(sums)

    def _stamp_of(self, block: int) -> bytes | None:
        """None: it is not known what the block holds, and nobody could use it."""
        stamps = self.stage.stamps
        if stamps is None:
            return b""
        if self._links.is_written(block, self.stage.block_size_tokens):
            return None
        stamp = stamps.get(block)
        return pack_stamp(stamp) if stamp.fill == self.stage.block_size_tokens else None

    async def _send(
        self, call: SaveBlocks, index: int, sums: tuple[int, ...], stamp: bytes, pages: U8
    ) -> None:
        stage = self.stage.stage
        at_once = max(1, FRAME_BYTES_MAX // stage.page_bytes)
        for first in range(0, len(sums), at_once):
            part = sums[first : first + at_once]
            content = TierContent(call.call, index, stage.layers.start + first, part, stamp)
            await self._say(content, pages[first : first + at_once].reshape(-1).data)

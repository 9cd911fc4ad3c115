"""What moving blocks costs where they lie: bytes a second off a worker and back, and what streams notice.

A kvstore's link without a kvstore, to the worker of a running deployment: it saves what a prompt left in the
pool, and loads the same content into the same blocks. Streams decode with nothing beside them, and while
saves follow each other without a pause.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import cycle

from bench.load import Result, Workload, run
from chassis.ids import BlockHash, BlockId, BootId, Epoch
from chassis.messages.pipeline import BATCHER_STAGE, Hello, LinkKind, build_hello
from chassis.messages.registry import WorkerEntry
from chassis.messages.tier import (
    LoadBlocks,
    SaveBlocks,
    TierContent,
    TierDone,
    TierMessage,
    TierStage,
    build_tier,
    parse_tier,
)
from chassis.transport.interface import Link, LinkOptions
from chassis.transport.tcp import SocketTransport
from shoal.client import AsyncClient

CALL_BLOCKS = 16
OPTIONS = LinkOptions(slots=4, slot_bytes=1 << 26, send_timeout_s=30.0)
NEWEST = (1 << 64) - 1  # attachment: nobody else moves blocks here


@dataclass(frozen=True, slots=True)
class Kept:
    """A block's content in all layers of the stage."""

    block: BlockId
    message: TierContent
    pages: bytes


class PlainTier:
    """One worker's link."""

    def __init__(self, link: Link, epoch: Epoch) -> None:
        self.moved_bytes = 0
        self._link = link
        self._epoch = epoch
        self._calls = 0

    async def hear(self) -> tuple[TierMessage, bytes]:
        frame = await self._link.receive()
        message, payload = parse_tier(frame.header), bytes(frame.payload)
        frame.release()
        self.moved_bytes += len(payload)
        return message, payload

    async def save(self, blocks: Sequence[int]) -> list[Kept]:
        """Of blocks whose content is known to the worker."""
        call = await self._begin(SaveBlocks, blocks)
        kept = []
        while not isinstance((heard := await self.hear())[0], TierDone):
            message, pages = heard
            assert isinstance(message, TierContent) and message.call == call
            kept.append(Kept(BlockId(blocks[message.index]), message, pages))
        return kept

    async def load(self, kept: Sequence[Kept]) -> None:
        call = await self._begin(LoadBlocks, [one.block for one in kept])
        for index, one in enumerate(kept):
            await self._link.send(build_tier(replace(one.message, call=call, index=index)), one.pages)
            self.moved_bytes += len(one.pages)
        done, _ = await self.hear()
        assert isinstance(done, TierDone) and not done.error and not done.refused, done

    async def _begin(self, kind: type[SaveBlocks | LoadBlocks], blocks: Sequence[int]) -> int:
        self._calls += 1
        ids = tuple(map(BlockId, blocks))
        contents = tuple(BlockHash(block.to_bytes(32, "little")) for block in ids)
        await self._link.send(build_tier(kind(self._epoch, NEWEST, self._calls, ids, contents)))
        return self._calls


@asynccontextmanager
async def plain_tier(worker: WorkerEntry) -> AsyncIterator[PlainTier]:
    transport = SocketTransport()
    hello = Hello(worker.last_epoch, BATCHER_STAGE, BootId("bench"), LinkKind.TIER)
    link = await transport.dial(worker.transport_address, build_hello(hello), OPTIONS)
    try:
        tier = PlainTier(link, worker.last_epoch)
        stage, _ = await tier.hear()
        assert isinstance(stage, TierStage)
        yield tier
    finally:
        link.close()
        await transport.close()


@dataclass(frozen=True, slots=True)
class Speed:
    saved_mb_s: float
    loaded_mb_s: float
    num_blocks: int


async def measure_speed(tier: PlainTier, num_blocks: int) -> tuple[Speed, list[list[int]]]:
    """Of an idle worker; and the blocks that hold something, by call."""
    kept: list[list[Kept]] = []
    tier.moved_bytes, begun = 0, time.perf_counter()
    for first in range(0, num_blocks, CALL_BLOCKS):
        found = await tier.save(range(first, min(first + CALL_BLOCKS, num_blocks)))
        kept += [found] if found else []
    saved = tier.moved_bytes / (time.perf_counter() - begun) / 1e6
    tier.moved_bytes, begun = 0, time.perf_counter()
    for some in kept:
        await tier.load(some)
    loaded = tier.moved_bytes / (time.perf_counter() - begun) / 1e6
    return Speed(saved, loaded, sum(map(len, kept))), [[one.block for one in some] for some in kept]


def steady_gaps_ms(result: Result) -> list[float]:
    """Between deltas, once all streams have begun: what comes before are prompts."""
    begun = max(s.arrivals_s[0] for s in result.seen)
    return sorted(
        1000 * (later - earlier)
        for s in result.seen
        for earlier, later in zip(s.arrivals_s, s.arrivals_s[1:], strict=False)
        if earlier >= begun
    )


async def streams_beside(
    client: AsyncClient,
    tier: PlainTier,
    calls: Sequence[Sequence[int]],
    workload: Workload,
    seed: int,
    vocab_size: int,
) -> tuple[Result, float]:
    """While these calls are repeated (none: nothing beside them). And how many MB a second were saved."""
    over = asyncio.Event()

    async def save() -> None:
        for blocks in cycle(calls):
            if over.is_set():
                return
            await tier.save(blocks)

    tier.moved_bytes, begun = 0, time.perf_counter()
    async with asyncio.TaskGroup() as group:
        group.create_task(save())
        result = await run(client, workload, seed, vocab_size)
        over.set()
    return result, tier.moved_bytes / (time.perf_counter() - begun) / 1e6

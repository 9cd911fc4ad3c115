"""A stage's worker as kvstore's tiers meet it: pages of blocks, the fence, and every way to fail."""

import asyncio
from dataclasses import dataclass, field

from chassis.errors import LinkClosed
from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages.pipeline import LinkKind, parse_hello
from chassis.messages.tier import (
    OLD_ATTACHMENT,
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
from chassis.transport.interface import Frame, Link, LinkOptions, Transport

PAGE = 32


def page_of(content: BlockHash, layer: int) -> bytes:
    """What a layer computes for a content."""
    return (content[:16] + bytes([layer])).ljust(PAGE, b".")


@dataclass
class FakeStage:
    layers: range
    layout: str = "fake"
    epoch: Epoch = Epoch(1)
    fence: int = 0
    memory: dict[tuple[BlockId, int], bytes] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    hold: asyncio.Event | None = None  # answers wait for it
    flip_saved: bool = False
    flip_loaded: bool = False
    error: str = ""
    late_s: float = 0.0  # before it says what it holds
    saves: int = 0
    loads: int = 0

    async def listen(self, transport: Transport, address: str) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        await transport.listen(address, self._accept, LinkOptions())

    def _accept(self, link: Link) -> None:
        hello = parse_hello(link.hello)
        if hello.kind is not LinkKind.TIER or hello.epoch != self.epoch:
            link.close()
            return
        self.links.append(link)
        self._tasks.append(asyncio.get_running_loop().create_task(self._serve(link)))

    def close(self) -> None:
        for link in self.links:
            link.close()
        for task in self._tasks:
            task.cancel()

    def compute(self, block: BlockId, content: BlockHash) -> None:
        """A step fills a block."""
        for layer in self.layers:
            self.memory[block, layer] = page_of(content, layer)

    def holds(self, block: BlockId, content: BlockHash) -> bool:
        return all(self.memory.get((block, layer)) == page_of(content, layer) for layer in self.layers)

    async def _serve(self, link: Link) -> None:
        await asyncio.sleep(self.late_s)
        await link.send(build_tier(TierStage(self.epoch, self.layers, self.layout, PAGE)))
        loading: dict[int, LoadBlocks] = {}
        refused: dict[int, list[int]] = {}
        try:
            while True:
                frame = await link.receive()
                match message := parse_tier(frame.header):
                    case SaveBlocks():
                        await self._save(link, message)
                    case LoadBlocks():
                        self.loads += 1
                        loading[message.call], refused[message.call] = message, []
                        if self.error or message.attachment < self.fence:
                            await link.send(build_tier(TierDone(message.call, self.error or OLD_ATTACHMENT)))
                    case TierContent():
                        if self.hold is not None:
                            await self.hold.wait()
                        call = loading[message.call]
                        if not self._write(call, message, frame):
                            refused[message.call].append(message.index)
                        if message.index == len(call.blocks) - 1:
                            await link.send(
                                build_tier(TierDone(message.call, "", tuple(refused[message.call])))
                            )
                frame.release()
        except LinkClosed:
            pass

    def _write(self, call: LoadBlocks, message: TierContent, frame: Frame) -> bool:
        content, data = call.contents[message.index], bytes(frame.payload)
        if self.flip_loaded:
            data = bytes([data[0] ^ 1]) + data[1:]
        assert message.layers == self.layers
        if checksums(seed_of(self.layout), content, message.layers, data) != message.checksums:
            return False
        assert message.stamp == b"stamp of " + content[:8]
        for i, layer in enumerate(message.layers):
            self.memory[call.blocks[message.index], layer] = data[i * PAGE : (i + 1) * PAGE]
        return True

    async def _save(self, link: Link, call: SaveBlocks) -> None:
        self.saves += 1
        if self.hold is not None:
            await self.hold.wait()
        if self.error or call.attachment < self.fence:
            await link.send(build_tier(TierDone(call.call, self.error or OLD_ATTACHMENT)))
            return
        for index, (block, content) in enumerate(zip(call.blocks, call.contents, strict=True)):
            data = b"".join(self.memory[block, layer] for layer in self.layers)
            sums = checksums(seed_of(self.layout), content, self.layers, data)
            if self.flip_saved:
                data = data[:-1] + bytes([data[-1] ^ 128])
            stamp = b"stamp of " + content[:8]
            message = TierContent(call.call, index, self.layers.start, sums, stamp)
            await link.send(build_tier(message), data)
        await link.send(build_tier(TierDone(call.call)))

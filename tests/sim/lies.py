"""What a pipeline is told that is not so, while the faults last: blocks that kvstore names, headers of steps
on their way to a stage, what workers believe of their own memory, and what is in it. No answer may be made
of it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chassis.ids import BlockId
from chassis.messages import kvstore as messages
from chassis.messages.pipeline import FLAG_FRESH
from chassis.transport.interface import Frame
from chassis.wire import pipeline_pb2 as pb
from kvstore.service import KvStore
from shard_worker.inputs import SlotTables
from shard_worker.service import ShardWorker
from tests.sim.world import World


class Liar:
    """The dice of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"lies {world.options.seed}")

    def lies(self, part: float = 1.0) -> bool:
        """Now, about this; `part` of as often as the seed lies."""
        options, calm = self._world.options, self._world.habits.calm
        return not calm and options.lies > 0 and self._rng.random() < options.lies * part

    def number(self, limit: int) -> int:
        return self._rng.randrange(limit)

    def another(self, blocks: Sequence[int]) -> tuple[BlockId, ...]:
        """One of them is not the right one."""
        changed = list(map(BlockId, blocks))
        changed[self.number(len(changed))] = BlockId(self.number(self._world.options.num_blocks))
        return tuple(changed)

    def told(self, what: str, deadly: bool = False) -> None:
        self._world.num_deaths += deadly  # as for its peers
        self._world.note(f"lie: {what}")


class LyingKvStore(KvStore):
    liar: Liar

    def _match(self, request: Any) -> Any:
        reply: Any = super()._match(request)
        found = messages.parse_matched(reply, len(request.chains))
        if any(found) and self.liar.lies():
            found = tuple(self.liar.another(blocks) if blocks else blocks for blocks in found)
            self.liar.told(f"{self.boot} finds {found}")
        return messages.build_matched(found)

    def _exchange(self, request: Any) -> Any:
        reply: Any = super()._exchange(request)
        done = messages.parse_exchanged(reply)
        if done.leased and self.liar.lies(0.2):
            done = replace(done, leased=self.liar.another(done.leased))
            self.liar.told(f"{self.boot} leases {done.leased}")
            return messages.build_exchanged(done)
        return reply


class _Changed:
    """A frame with another header."""

    def __init__(self, frame: Frame, header: bytes) -> None:
        self.header, self.payload, self.release = header, frame.payload, frame.release
        self.direct = frame.direct


class DeceivedWorker(ShardWorker):
    liar: Liar

    def _frame(self, link_id: int, frame: Frame) -> None:
        step = pb.Step.FromString(frame.header)
        if step.table and self.liar.lies(0.5):
            blocks = memoryview(step.table).cast("I").tolist()
            step.table = b"".join(block.to_bytes(4, "little") for block in self.liar.another(blocks))
            self.liar.told(f"{self.boot} is sent the blocks {memoryview(step.table).cast('I').tolist()}")
            frame = _Changed(frame, step.SerializeToString())
        elif self.liar.lies(0.02):
            step.epoch += self.liar.number(5) - 2
            self.liar.told(f"{self.boot} is sent a step of epoch {step.epoch}", deadly=True)
            frame = _Changed(frame, step.SerializeToString())
        self._flip(step)
        super()._frame(link_id, frame)
        if self._stamps is not None and self.liar.lies(0.2):
            stamps = self._stamps.blocks
            field = ("begin", "end", "epoch", "index", "fill")[self.liar.number(5)]
            block = self.liar.number(len(stamps))
            stamps[field][block] ^= 1 << self.liar.number(16)
            self.liar.told(f"{self.boot} believes {stamps[block].tolist()} of block {block}")

    def _flip(self, step: pb.Step) -> None:
        """A bit of a block with a checksum that a row takes over and nobody else has: running rows do not
        look again at their own memory."""
        stamps, tables = self._stamps, self._tables
        if stamps is None or stamps.contents is None or not step.table:
            return
        assert isinstance(tables, SlotTables)
        table, first, taken = memoryview(step.table).cast("I").tolist(), 0, list[int]()
        columns = (memoryview(column).cast("I").tolist() for column in (step.starts, step.table_lens))
        for flags, start, table_len in zip(step.flags, *columns, strict=True):
            if flags & FLAG_FRESH:
                taken += table[first : first + start // stamps.block_size_tokens]
            first += table_len
        others = tables._tables[tables._known]
        alone = [b for b in taken if stamps.contents.has(b) and table.count(b) == 1 and b not in others]
        pages = self._executor.pages
        if not alone or pages is None or not self.liar.lies(8):  # there are few
            return
        block, layer = alone[self.liar.number(len(alone))], self.liar.number(pages.form.num_layers)
        page = np.empty((1, 1, pages.form.page_bytes), np.uint8)
        pages.read([block], page, layer)
        page[0, 0, self.liar.number(pages.form.page_bytes)] ^= 1 << self.liar.number(8)
        pages.write([block], page, layer)
        self.liar.told(f"{self.boot} has another bit in block {block}")


def lying(world: World, kind: type[Any]) -> Callable[..., Any]:
    """`kind`, with the world's liar."""
    liar = Liar(world)

    def make(*args: Any, **more: Any) -> Any:
        made = kind(*args, **more)
        made.liar = liar
        return made

    return make

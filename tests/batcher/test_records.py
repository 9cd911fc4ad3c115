"""Receipts whose write had no answer: the counters move once for each that this batcher stored."""

import asyncio
from typing import Any

import pytest

from batcher import events as ev
from batcher.account import Account
from batcher.records import Records
from batcher.statistics import Statistics
from chassis import subjects
from chassis.habits import Fate, Habits
from chassis.ids import Attempt, BootId, RequestId
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.request import Reason, Terminal, Usage
from chassis.trace import SpanRing
from tests.sim.loop import run

END = Terminal(Attempt(1), BootId("b0"), Reason.STOP, (1, 2), usage=Usage(3, 0, 2), tenant="t", model="m")


class Silent(Habits):
    """Appends are done, or not, and their answers lost."""

    fate = Fate()

    def call(self, sender: str, what: str, subject: str) -> Fate:
        return self.fate if what == "append" else Fate()


class Writer:
    def __init__(self, broker: MemoryBroker, boot: str, group: asyncio.TaskGroup) -> None:
        self.told: asyncio.Queue[Any] = asyncio.Queue()
        self.statistics = Statistics()
        account = Account(BootId(boot), SpanRing(1), self.statistics.token_gap_s)
        self._records = Records(
            MemoryBus(broker, boot),
            BootId(boot),
            account,
            self.statistics,
            lambda: 0,
            0.5,
            self.told.put_nowait,
            lambda work: [group.create_task(work)].clear(),
        )

    async def write(self) -> ev.Write:
        self._records.write_receipt(ev.WriteReceipt(RequestId("r"), 1, END))
        done: ev.WriteDone = await self.told.get()
        return done.outcome


@pytest.mark.parametrize(
    ("fate", "by_other", "mine"),
    [(Fate(0.0, None), False, 1), (Fate(None), True, 0), (Fate(None), False, 1)],
    ids=["stored, its answer lost", "lost, and another stored it", "lost"],
)
def test_a_receipt_in_doubt_counts_where_it_was_stored(fate: Fate, by_other: bool, mine: int) -> None:
    async def main() -> None:
        habits = Silent()
        broker = MemoryBroker(habits)
        async with asyncio.TaskGroup() as group:
            writer, other = Writer(broker, "b0", group), Writer(broker, "b1", group)
            habits.fate = fate
            assert await writer.write() is ev.Write.UNKNOWN
            habits.fate = Fate()
            if by_other:
                await other.write()
            await writer.write()
            assert await writer.write() is ev.Write.REFUSED
        assert len(list(broker.streams[subjects.USAGE].messages())) == 1
        assert writer.statistics._output_tokens == 2 * mine

    run(main())

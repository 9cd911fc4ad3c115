"""The one way into a core: batches, bounds, deadlines."""

import asyncio

import pytest

from chassis.inbox import Inbox, InboxFull
from tests.sim.loop import run


def test_a_drain_takes_all_in_order() -> None:
    async def go() -> None:
        inbox: Inbox[int] = Inbox(10)
        for item in (1, 2, 3):
            inbox.put_nowait(item)
        assert await inbox.drain() == [1, 2, 3]
        assert len(inbox) == 0

    run(go())


def test_a_full_inbox_refuses_and_counts() -> None:
    async def go() -> None:
        inbox: Inbox[int] = Inbox(2)
        inbox.put_nowait(1)
        assert inbox.offer(2)
        assert not inbox.offer(3)
        with pytest.raises(InboxFull):
            inbox.put_nowait(4)
        assert inbox.refused == 2
        assert await inbox.drain() == [1, 2]

    run(go())


def test_a_drain_waits_for_an_item_or_its_time() -> None:
    async def go() -> None:
        loop = asyncio.get_running_loop()
        inbox: Inbox[str] = Inbox(2)
        start = loop.time()
        assert await inbox.drain(until=start + 5) == []
        assert loop.time() == pytest.approx(start + 5)
        loop.call_later(2, inbox.offer, "x")
        assert await inbox.drain(until=start + 100) == ["x"]
        assert loop.time() == pytest.approx(start + 7)
        assert await inbox.drain(until=start) == []  # long past
        loop.call_later(1, inbox.wake)
        assert await inbox.drain() == []
        assert loop.time() == pytest.approx(start + 8)

    run(go())


def test_a_cancelled_drain_loses_nothing() -> None:
    async def go() -> None:
        inbox: Inbox[str] = Inbox(2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await inbox.drain()
        inbox.put_nowait("kept")
        assert await inbox.drain() == ["kept"]

    run(go())


def test_a_busy_inbox_lets_others_run() -> None:
    async def go() -> None:
        inbox: Inbox[int] = Inbox(2)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(other())
            for item in range(10):
                inbox.put_nowait(item)
                await inbox.drain()
            assert turns >= 9
            task.cancel()

    run(go())


def test_a_timer_set_for_an_earlier_time_wakes_nobody_too_soon() -> None:
    async def go() -> None:
        loop, inbox = asyncio.get_running_loop(), Inbox[int](4)
        early, late = loop.time() + 0.02, loop.time() + 0.05
        inbox.offer(1)
        assert await inbox.drain(early) == [1]
        loop.call_soon(inbox.offer, 2)
        assert await inbox.drain(early) == [2]
        assert await inbox.drain(late) == [] and loop.time() >= late
        loop.call_later(0.01, inbox.offer, 3)
        assert await inbox.drain(None) == [3], "without a time only an item wakes"
        before = loop.time() + 0.01
        assert await inbox.drain(before) == [] and loop.time() >= before

    run(go())


def test_in_calm_what_is_not_urgent_waits_for_company() -> None:
    async def go() -> None:
        loop = asyncio.get_running_loop()
        inbox: Inbox[str] = Inbox(9)
        start = loop.time()
        loop.call_at(start + 1.0, inbox.offer, "a", False)
        loop.call_at(start + 2.0, inbox.offer, "b", False)
        assert await inbox.drain(start + 9.0, start + 3.0) == ["a", "b"]
        assert loop.time() == start + 3.0
        inbox.offer("c", False)  # it came while the last ones were looked at
        assert await inbox.drain(None, start + 5.0) == ["c"]
        assert loop.time() == start + 5.0
        loop.call_at(start + 8.0, inbox.offer, "d", False)  # the calm is over by then
        assert await inbox.drain(None, start + 6.0) == ["d"]
        assert loop.time() == start + 8.0

    run(go())


def test_what_is_urgent_ends_the_calm_and_so_does_time() -> None:
    async def go() -> None:
        loop = asyncio.get_running_loop()
        inbox: Inbox[str] = Inbox(9)
        start = loop.time()
        inbox.offer("a", False)
        loop.call_at(start + 1.0, inbox.offer, "b")
        assert await inbox.drain(None, start + 5.0) == ["a", "b"]
        assert loop.time() == start + 1.0
        inbox.offer("c")
        assert await inbox.drain(None, start + 5.0) == ["c"]  # was urgent before anybody waited
        inbox.offer("d", False)
        assert await inbox.drain(start + 2.0, start + 5.0) == ["d"]
        assert loop.time() == start + 2.0
        assert await inbox.drain(start + 3.0, start + 5.0) == []
        assert loop.time() == start + 3.0
        inbox.offer("e", False)
        assert await inbox.drain() == ["e"] and loop.time() == start + 3.0

    run(go())

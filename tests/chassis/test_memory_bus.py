"""Every bad habit that the ownership protocol allows a broker can be had from the one in memory."""

import asyncio

import pytest

from chassis import subjects
from chassis.bus import Delivery, Entry
from chassis.errors import BusTimeout, BusUnavailable, NoResponders, WrongSequence
from chassis.habits import Fate, Habits, Restart, Settle
from chassis.ids import RequestId
from chassis.memory_bus import MemoryBroker, MemoryBus
from chassis.subjects import REQUESTS, RESULTS
from tests.sim.loop import run

CONSUMER = subjects.consumer_name("m", 5)
REQUEST = subjects.request("m", 5, RequestId("r"))
RESULT = subjects.result(RequestId("r"))


class Scripted(Habits):
    """Perfect but for what a test sets."""

    def __init__(self) -> None:
        self.core: dict[tuple[str, str], float | None] = {}
        self.calls: dict[str, Fate] = {}
        self.settles: dict[Settle, float | None] = {}
        self.honour_old = True
        self.wait_s: float | None = None
        self.told_count: int | None = None
        self.behind = 0
        self.after_restart = Restart()
        self.survives = True

    def core_delay_s(self, sender: str, receiver: str, subject: str) -> float | None:
        return self.core.get((sender, receiver), 0.0)

    def call(self, sender: str, what: str, subject: str) -> Fate:
        return self.calls.get(what, Fate())

    def settle_delay_s(self, sender: str, kind: Settle, subject: str) -> float | None:
        return self.settles.get(kind, 0.0)

    def honours(self, kind: Settle, subject: str, newest: bool) -> bool:
        return newest or self.honour_old

    def ack_wait_s(self, consumer: str, subject: str, ack_wait_s: float) -> float:
        return ack_wait_s if self.wait_s is None else self.wait_s

    def count(self, subject: str, count: int) -> int:
        return count if self.told_count is None else self.told_count

    def records_behind(self, sender: str, subject: str) -> int:
        return self.behind

    def restart(self) -> Restart:
        return self.after_restart

    def survives_cut(self, name: str) -> bool:
        return self.survives


class Rig:
    def __init__(self) -> None:
        self.habits = Scripted()
        self.broker = MemoryBroker(self.habits, wall_ns=lambda: 7)
        self.a = MemoryBus(self.broker, "a")
        self.b = MemoryBus(self.broker, "b")

    async def deliver(self, bus: MemoryBus, wait_s: float = 5.0) -> Delivery:
        (delivery,) = await bus.fetch(REQUESTS, CONSUMER, 1, wait_s)
        return delivery


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1000)


async def rig() -> Rig:
    made = Rig()
    await made.a.ensure_consumers("m")
    return made


def test_core_messages_are_delayed_and_lost_per_pair() -> None:
    async def story() -> None:
        r = await rig()
        c = MemoryBus(r.broker, "c")
        heard: list[tuple[str, bytes, int]] = []
        await r.b.subscribe("x", lambda m: heard.append(("b", m.data, now_ms())))
        await c.subscribe("x", lambda m: heard.append(("c", m.data, now_ms())))
        r.habits.core = {("a", "b"): 0.5, ("a", "c"): None}
        r.a.publish("x", b"1")
        await asyncio.sleep(1)
        r.habits.core = {("a", "b"): 0.5}
        r.a.publish("x", b"2")
        await asyncio.sleep(0.1)
        r.habits.core = {}
        r.a.publish("x", b"3")  # overtakes
        await asyncio.sleep(1)
        assert heard == [
            ("b", b"1", 500),
            ("c", b"2", 1000),
            ("b", b"3", 1100),
            ("c", b"3", 1100),
            ("b", b"2", 1500),
        ]

    run(story())


def test_an_append_may_be_stored_though_its_answer_is_lost() -> None:
    async def story() -> None:
        r = await rig()
        r.habits.calls["append"] = Fate(0.0, None)
        with pytest.raises(BusTimeout):
            await r.a.append(RESULT, b"1", expected_seq=0)
        assert now_ms() == 2000
        last = await r.a.last(RESULTS, RESULT)
        assert last is not None and last.data == b"1"

    run(story())


def test_an_append_may_be_stored_after_its_time_out_or_never() -> None:
    async def story() -> None:
        r = await rig()
        r.habits.calls["append"] = Fate(5.0)
        with pytest.raises(BusTimeout):
            await r.a.append(RESULT, b"late", expected_seq=0)
        assert await r.a.last(RESULTS, RESULT) is None
        await asyncio.sleep(3.5)
        assert await r.a.last(RESULTS, RESULT) is not None
        r.habits.calls["append"] = Fate(None)
        with pytest.raises(BusTimeout):
            await r.a.append(RESULT, b"never")
        await asyncio.sleep(60)
        last = await r.a.last(RESULTS, RESULT)
        assert last is not None and last.data == b"late"

    run(story())


def test_a_late_conditional_write_still_loses() -> None:
    async def story() -> None:
        r = await rig()
        r.habits.calls["append"] = Fate(1.0)
        late = asyncio.create_task(r.a.append(RESULT, b"late", expected_seq=0))
        await asyncio.sleep(0.5)
        r.habits.calls.clear()
        await r.b.append(RESULT, b"first", expected_seq=0)
        with pytest.raises(WrongSequence):
            await late

    run(story())


def test_an_ack_may_be_lost_and_a_delivery_comes_early_with_any_count() -> None:
    async def story() -> None:
        r = await rig()
        await r.a.append(REQUEST, b"")
        r.habits.settles[Settle.ACK] = None
        r.habits.wait_s, r.habits.told_count = 0.1, 1
        first = await r.deliver(r.a)
        r.a.ack(first.token)
        again = await r.deliver(r.b)
        assert (now_ms(), first.count, again.count) == (100, 1, 1)
        assert first.token != again.token

    run(story())


@pytest.mark.parametrize("honoured", [True, False])
def test_old_tokens_hold_and_settle_only_where_honoured(honoured: bool) -> None:
    async def story() -> None:
        r = await rig()
        r.habits.honour_old = honoured
        await r.a.append(REQUEST, b"")
        old = await r.deliver(r.a)
        await asyncio.sleep(1.1)
        new = await r.deliver(r.b)
        for _ in range(3):  # the old holder goes on
            await asyncio.sleep(0.5)
            r.a.progress(old.token)
        third = await r.b.fetch(REQUESTS, CONSUMER, 1, 0.2)
        assert len(third) == (0 if honoured else 1)
        r.a.ack(old.token)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (await r.a.last(REQUESTS, REQUEST) is None) == honoured
        newest = third[0] if third else new
        r.b.ack(newest.token)
        await asyncio.sleep(0.1)
        assert await r.a.last(REQUESTS, REQUEST) is None

    run(story())


def test_a_restart_may_deliver_everything_again_with_the_old_count_and_forget_ids() -> None:
    async def story() -> None:
        r = await rig()
        r.habits.after_restart = Restart(redelivers_all=True, forgets_counts=True, forgets_ids=True)
        await r.a.append(REQUEST, b"", message_id="id")
        first = await r.deliver(r.a)
        r.broker.restart(0.3)
        assert not r.a.connected
        with pytest.raises(BusUnavailable):
            await r.a.append(RESULT, b"")
        again = await r.deliver(r.b)
        assert now_ms() == 350
        assert (first.count, again.count) == (1, 1)
        r.b.ack(first.token)
        await asyncio.sleep(0.1)
        assert not (await r.a.append(REQUEST, b"", message_id="id")).duplicate

    run(story())


def test_a_perfect_restart_keeps_what_is_held() -> None:
    async def story() -> None:
        r = await rig()
        await r.a.append(REQUEST, b"", message_id="id")
        first = await r.deliver(r.a)
        r.broker.restart(0.3)
        await asyncio.sleep(0.5)
        assert await r.b.fetch(REQUESTS, CONSUMER, 1, 0.5) == []
        r.b.ack(first.token)
        await asyncio.sleep(0.1)
        assert (await r.a.append(REQUEST, b"", message_id="id")).duplicate

    run(story())


def test_an_election_redelivers_to_anyone() -> None:
    async def story() -> None:
        r = await rig()
        await r.a.append(REQUEST, b"")
        first = await r.deliver(r.a)
        r.broker.redeliver(REQUESTS, CONSUMER)
        assert (await r.deliver(r.b)).message == first.message
        assert now_ms() == 0

    run(story())


def test_reads_may_be_stale() -> None:
    async def story() -> None:
        r = await rig()
        await r.a.append(RESULT, b"1")
        await r.a.append(RESULT, b"2")
        r.habits.behind = 1
        stale = await r.a.last(RESULTS, RESULT)
        assert stale is not None and stale.data == b"1"
        with pytest.raises(WrongSequence):  # but a decision meets the truth
            await r.a.append(RESULT, b"3", expected_seq=stale.seq)

    run(story())


@pytest.mark.parametrize("survives", [True, False])
def test_a_partition_is_noticed_late_and_its_messages_may_arrive_when_it_heals(survives: bool) -> None:
    async def story() -> None:
        r = await rig()
        r.habits.survives = survives
        heard: list[bytes] = []
        seen: list[Entry] = []
        await r.b.subscribe("x", lambda m: heard.append(m.data))
        await r.a.subscribe("y", lambda m: heard.append(m.data))
        await r.a.watch("worker.", seen.append)
        r.broker.cut("a")
        assert r.a.connected
        r.a.publish("x", b"into the dark")
        r.b.publish("y", b"lost")
        await r.b.put_entry("worker.b", b"1")
        with pytest.raises(BusTimeout):
            await r.a.append(RESULT, b"")
        await asyncio.sleep(3)
        assert not r.a.connected
        r.a.publish("x", b"kept by the client")
        with pytest.raises(BusUnavailable):
            await r.a.append(RESULT, b"")
        assert heard == [] and seen == []
        r.broker.heal("a")
        await asyncio.sleep(0.1)
        assert r.a.connected
        assert heard == [b"into the dark"] * survives + [b"kept by the client"]
        assert (await r.b.last(RESULTS, RESULT) is not None) == survives
        assert [e.key for e in seen] == ["worker.b"]

    run(story())


def test_a_delivery_into_a_partition_comes_back() -> None:
    async def story() -> None:
        r = await rig()
        lost = asyncio.create_task(r.a.fetch(REQUESTS, CONSUMER, 1, 2.0))
        await asyncio.sleep(0.1)
        r.broker.cut("a")
        await r.b.append(REQUEST, b"")
        again = await r.deliver(r.b)
        assert (again.count, now_ms()) == (2, 1100)
        assert await lost == []

    run(story())


def test_a_killed_handle_is_gone_at_once() -> None:
    async def story() -> None:
        r = await rig()
        heard: list[bytes] = []
        await r.a.subscribe("x", lambda m: heard.append(m.data))
        fetching = asyncio.create_task(r.a.fetch(REQUESTS, CONSUMER, 1, 60.0))
        asking = asyncio.create_task(r.a.request("x", b"", 60.0))
        await asyncio.sleep(0.1)
        r.a.publish("y", b"under way")
        r.a.kill()
        for task in (fetching, asking):
            with pytest.raises(BusUnavailable):
                await task
        assert now_ms() == 100
        with pytest.raises(NoResponders):
            await r.b.request("x", b"", 1.0)
        await r.b.append(REQUEST, b"")
        assert (await r.deliver(r.b)).count == 1  # not given to the dead
        r.a.publish("x", b"from beyond")
        assert heard == [b""]
        r.broker.cut("a")  # nobody there: nothing happens
        r.broker.heal("a")

    run(story())


def test_the_same_calls_do_the_same() -> None:
    async def story() -> list[object]:
        r = await rig()
        log: list[object] = []
        await r.b.subscribe(">", lambda m: log.append((now_ms(), m.subject, m.data)))
        for i in range(20):
            r.a.publish(f"x.{i % 3}", bytes([i]))
            log.append(await r.a.append(subjects.result(RequestId(f"r{i}")), b""))
            if i == 10:
                r.broker.restart(0.1)
                await asyncio.sleep(0.2)
        return log

    assert run(story()) == run(story())

"""One contract for every bus: the in-memory one must not promise or refuse what the real one does not.

The in-memory one runs on a virtual clock, where times are exact; a server's are held by the order of events.
"""

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from chassis import job_subjects, subjects
from chassis.bus import Appended, Bus, Entry, Lag, Message
from chassis.errors import (
    BusTimeout,
    BusUnavailable,
    LayoutDrift,
    MessageTooLarge,
    NoResponders,
    StreamFull,
    SubjectTaken,
    WrongSequence,
)
from chassis.ids import AckToken, RequestId
from chassis.memory_bus import MemoryBroker, MemoryBus
from chassis.nats_bus import NatsBus, connect
from chassis.stream_layout import ACK_WAIT_S, Discard, Retention, StreamLayout
from chassis.subjects import LAYOUT, REGISTRY, REQUESTS, RESULTS
from shoal.nats_server import NatsServer
from tests.sim.loop import run as virtual_run

MODEL = "some/model v1.5"
CONSUMER = subjects.consumer_name(MODEL, 5)
SMALL = StreamLayout(
    "SMALL",
    ("small.>",),
    Retention.LIMITS,
    Discard.NEW,
    msgs_max=3,
    bytes_max=0,
    age_max_s=0,
    loss_window="none",
)
LAST = replace(SMALL, name="LAST", subjects=("last.>",), msgs_max=0, bytes_max=2000, msgs_per_subject_max=1)
SHORT_REGISTRY = tuple(
    replace(s, age_max_s=1.0, duplicate_window_s=1.0) if s.name == REGISTRY else s for s in LAYOUT
)


@dataclass(frozen=True, slots=True)
class World:
    """A broker, and how to get another handle on it."""

    open: Callable[[str], Awaitable[Bus]]
    exact: bool  # its time is the loop's, and passes only where somebody waits

    async def bus(self, name: str = "a") -> Bus:
        return await self.open(name)

    def took(self, begun_s: float, wanted_s: float) -> bool:
        """Whether what began then has taken so long: no less, and no more on a virtual clock."""
        spent_s = asyncio.get_running_loop().time() - begun_s
        return wanted_s - 0.01 < spent_s and (not self.exact or spent_s < wanted_s + 0.05)


@contextlib.asynccontextmanager
async def world_of(kind: str, folder: Path, layout: Sequence[StreamLayout]) -> AsyncIterator[World]:
    opened: list[Bus] = []
    server = NatsServer(folder)
    broker = MemoryBroker(layout=layout)

    async def open_bus(name: str) -> Bus:
        bus: Bus = await connect(server.url, name) if kind == "nats" else MemoryBus(broker, name)
        opened.append(bus)
        return bus

    if kind == "nats":
        await server.start()
    try:
        first = await open_bus("set-up")
        await first.ensure_streams(layout)
        await first.ensure_consumers(MODEL)
        yield World(open_bus, kind == "memory")
        broker.check()
    finally:
        for bus in opened:
            await bus.close()
        server.kill()


Case = Callable[[World], Awaitable[None]]


def contract(case: Case, layout: Sequence[StreamLayout] = (*LAYOUT, SMALL)) -> Callable[[str, Path], None]:
    @pytest.mark.parametrize("kind", ["memory", "nats"])
    def test(kind: str, tmp_path: Path) -> None:
        async def run() -> None:
            async with asyncio.timeout(20), world_of(kind, tmp_path, layout) as world:
                await case(world)

        (virtual_run if kind == "memory" else asyncio.run)(run())

    return test


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what it looks at has no event
            await asyncio.sleep(0.005)


def request(name: str, priority: int = 5) -> str:
    return subjects.request(MODEL, priority, RequestId(name))


def result(name: str) -> str:
    return subjects.result(RequestId(name))


# core messages


async def wildcards(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    one: list[Message] = []
    rest: list[Message] = []
    first = await b.subscribe("x.*.z", one.append)
    await b.subscribe("x.>", rest.append)
    a.publish("x.1.z", b"1", {"traceparent": "00-ab"})
    a.publish("x.1", b"2")
    a.publish("x", b"3")
    await until(lambda: len(rest) == 2)
    assert [(m.subject, m.data) for m in rest] == [("x.1.z", b"1"), ("x.1", b"2")]
    assert [(m.subject, m.data, dict(m.headers)) for m in one] == [("x.1.z", b"1", {"traceparent": "00-ab"})]
    assert one[0].reply is None
    await first.close()
    a.publish("x.2.z", b"4")
    a.publish("x.end", b"5")
    await until(lambda: rest[-1].data == b"5")
    assert len(one) == 1


test_wildcards = contract(wildcards)


async def order(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    got: list[bytes] = []
    await b.subscribe("o", lambda m: got.append(m.data))
    sent = [str(i).encode() for i in range(2000)]
    for data in sent:
        a.publish("o", data)
    await until(lambda: len(got) == len(sent))
    assert got == sent


test_one_senders_messages_keep_their_order = contract(order)


async def questions(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    await b.subscribe("q", lambda m: b.reply(m, b"re " + m.data))
    silent: list[Message] = []
    subscription = await b.subscribe("silent", silent.append)
    assert (await a.request("q", b"x", 2.0)).data == b"re x"
    with pytest.raises(NoResponders):
        await a.request("nobody", b"x", 2.0)
    with pytest.raises(BusTimeout):
        await a.request("silent", b"x", 0.1)
    await subscription.close()
    with pytest.raises(NoResponders):
        for _ in range(50):  # the broker hears of it a little later
            with contextlib.suppress(BusTimeout):
                await a.request("silent", b"x", 0.05)
    b.reply(Message("q", b"", None), b"nobody asked")  # does nothing


test_questions = contract(questions)


async def a_raising_handler(world: World) -> None:
    a = await world.bus("a")
    raised: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
    got: list[bytes] = []

    def handler(message: Message) -> None:
        if message.data == b"bad":
            raise ZeroDivisionError
        got.append(message.data)

    await a.subscribe("h", handler)
    a.publish("h", b"bad")
    a.publish("h", b"good")
    await until(lambda: got == [b"good"])
    assert [type(e) for e in raised] == [ZeroDivisionError]


test_a_raising_handler_is_reported_and_does_not_end_the_subscription = contract(a_raising_handler)


# streams


async def expected_sequence(world: World) -> None:
    a = await world.bus()
    first = await a.append(result("r"), b"1", expected_seq=0)
    assert not first.duplicate
    with pytest.raises(WrongSequence):
        await a.append(result("r"), b"2", expected_seq=0)
    other = await a.append(result("s"), b"other", expected_seq=0)
    with pytest.raises(WrongSequence):  # the subject's, not the stream's
        await a.append(result("r"), b"2", expected_seq=other.seq)
    second = await a.append(result("r"), b"2", expected_seq=first.seq)
    assert second.seq > other.seq > first.seq
    with pytest.raises(WrongSequence):
        await a.append(result("never"), b"2", expected_seq=1)
    outcomes = await asyncio.gather(
        *(a.append(result("race"), str(i).encode(), expected_seq=0) for i in range(8)), return_exceptions=True
    )
    assert sum(not isinstance(o, BaseException) for o in outcomes) == 1
    assert all(isinstance(o, WrongSequence) for o in outcomes if isinstance(o, BaseException))


test_expected_sequence = contract(expected_sequence)


async def append_then(world: World) -> None:
    """What `append` returns or raises is told, of each once and in its own time."""
    a = await world.bus()
    told: asyncio.Queue[tuple[int, object]] = asyncio.Queue()

    def begin(number: int, subject: str, expected_seq: int | None = None) -> None:
        a.append_then(
            subject, b"x", lambda found: told.put_nowait((number, found)), expected_seq=expected_seq
        )

    begin(0, result("r"), 0)
    begin(1, result("r"), 0)
    begin(2, request("r"))
    begin(3, request("r"))
    begin(4, "nowhere.x")
    assert told.empty(), "told before it was asked"
    async with asyncio.timeout(5):
        found = dict([await told.get() for _ in range(5)])
    assert isinstance(found[0], Appended) and isinstance(found[1], WrongSequence)
    assert isinstance(found[2], Appended) and isinstance(found[3], SubjectTaken)
    assert isinstance(found[4], BusUnavailable)
    last = await a.last(RESULTS, result("r"))
    assert last is not None and last.seq == found[0].seq
    with pytest.raises(MessageTooLarge):
        a.append_then(result("r"), bytes(2 << 20), lambda found: told.put_nowait((5, found)))
    assert told.empty()


test_append_then = contract(append_then)


async def last_record(world: World) -> None:
    a = await world.bus()
    assert await a.last(RESULTS, result("r")) is None
    await a.append(result("r"), b"old")
    data = bytes(range(256))
    stored = await a.append(result("r"), data, headers={"traceparent": "00-ab"})
    await a.append(result("s"), b"other")
    last = await a.last(RESULTS, result("r"))
    assert last is not None
    assert (last.subject, last.data, last.seq) == (result("r"), data, stored.seq)
    assert last.headers["traceparent"] == "00-ab"
    assert last.stored_at_ns > 1_600_000_000_000_000_000
    both = await a.read(RESULTS, "shoal.res.*", 1, 100)
    assert [(m.subject, m.data) for m in both] == [
        (result("r"), b"old"),
        (result("r"), data),
        (result("s"), b"other"),
    ]
    assert [m.data for m in await a.read(RESULTS, result("r"), stored.seq, 100)] == [data]
    assert [m.data for m in await a.read(RESULTS, result("r"), 1, 1)] == [b"old"]
    with pytest.raises(BusUnavailable):
        await a.last("NO-SUCH-STREAM", result("r"))


test_last_record = contract(last_record)


async def scan(world: World) -> None:
    a = await world.bus()
    assert [m async for m in a.scan(RESULTS, "shoal.res.*")] == []
    for i in range(2500):  # more than two batches
        await a.append(result(f"r{i % 2}"), str(i).encode())
    found = [m async for m in a.scan(RESULTS, "shoal.res.*")]
    assert [m.data for m in found] == [str(i).encode() for i in range(2500)]
    assert found == list(await a.read(RESULTS, "shoal.res.*", 1, 2500))
    odd = [m.data async for m in a.scan(RESULTS, result("r1"))]
    assert odd == [str(i).encode() for i in range(1, 2500, 2)]
    late = [m async for m in a.scan(RESULTS, "shoal.res.*", found[1234].stored_at_ns)]
    assert late == [m for m in found if m.stored_at_ns >= found[1234].stored_at_ns]
    first = a.scan(RESULTS, "shoal.res.*")
    async with contextlib.aclosing(first):
        assert (await anext(first)).data == b"0"
    with pytest.raises(BusUnavailable):
        assert [m async for m in a.scan("NO-SUCH-STREAM", "x")]


test_scan = contract(scan)


async def one_per_subject(world: World) -> None:
    a = await world.bus()
    await a.append(request("r"), b"1")
    with pytest.raises(SubjectTaken):
        await a.append(request("r"), b"2")
    await a.append(request("s"), b"3")
    (delivery, _) = await a.fetch(REQUESTS, CONSUMER, 2, 2.0)
    a.ack(delivery.token)
    await eventually_none(a, REQUESTS, request("r"))
    await a.append(request("r"), b"4")  # free again


test_one_per_subject = contract(one_per_subject)


async def eventually_none(bus: Bus, stream: str, subject: str) -> None:
    async with asyncio.timeout(5):
        while await bus.last(stream, subject) is not None:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.005)


async def full(world: World) -> None:
    a = await world.bus()
    for i in range(3):
        await a.append("small.x", str(i).encode())
    with pytest.raises(StreamFull):
        await a.append("small.x", b"4")
    with pytest.raises(BusUnavailable):
        await a.append("nowhere.x", b"")


test_full = contract(full)


async def full_keeps_the_last(world: World) -> None:
    """What is refused for its size takes nothing away from its subject."""
    a = await world.bus()
    kept = [await a.append(subject, bytes(600)) for subject in ("last.a", "last.b")]
    for size in (1800, 3000):  # above the room that is left, and above all there is
        with pytest.raises(StreamFull):
            await a.append("last.a", bytes(size), expected_seq=kept[0].seq)
        last = await a.last("LAST", "last.a")
        assert last is not None and (last.seq, len(last.data)) == (kept[0].seq, 600)
    newer = await a.append("last.a", bytes(601), expected_seq=kept[0].seq)
    last = await a.last("LAST", "last.a")
    assert last is not None and (last.seq, len(last.data)) == (newer.seq, 601)


test_full_keeps_the_last = contract(full_keeps_the_last, (*LAYOUT, LAST))


async def duplicates(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    first = await a.append(request("r"), b"1", message_id="r")
    again = await b.append(request("r"), b"1", message_id="r")
    assert (again.seq, again.duplicate) == (first.seq, True)
    (delivery,) = await a.fetch(REQUESTS, CONSUMER, 10, 2.0)
    a.ack(delivery.token)
    await eventually_none(a, REQUESTS, request("r"))
    late = await b.append(request("r"), b"1", message_id="r")  # known although it is gone
    assert (late.seq, late.duplicate) == (first.seq, True)


test_duplicates = contract(duplicates)


async def too_large(world: World) -> None:
    a = await world.bus()
    most = 1 << 20
    with pytest.raises(MessageTooLarge):
        await a.append(result("r"), bytes(most + 1))
    with pytest.raises(MessageTooLarge):
        await a.append(result("r"), bytes(most - 5), headers={"name": "value"})
    with pytest.raises(MessageTooLarge):
        a.publish("x", bytes(most + 1))
    with pytest.raises(MessageTooLarge):
        await a.request("x", bytes(most + 1), 1.0)
    assert a.connected
    await a.append(result("r"), b"z" * most)
    last = await a.last(RESULTS, result("r"))
    assert last is not None and last.data == b"z" * most


test_too_large = contract(too_large)


async def lag(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    assert await b.lag(REQUESTS, CONSUMER) == Lag(0, 0)
    for name in ("r1", "r2", "r3"):
        await a.append(request(name), b"1")
    await a.append(request("other", 6), b"1")
    assert await b.lag(REQUESTS, CONSUMER) == Lag(3, 0)
    first, second = await a.fetch(REQUESTS, CONSUMER, 2, 2.0)
    assert await b.lag(REQUESTS, CONSUMER) == Lag(1, 2)
    a.nak(second.token, 30.0)  # it is somebody's still
    a.ack(first.token)
    await eventually_none(a, REQUESTS, request("r1"))
    assert await b.lag(REQUESTS, CONSUMER) == Lag(1, 1)
    with pytest.raises(BusUnavailable):
        await b.lag(REQUESTS, "nobody")


test_lag = contract(lag)


async def fetching(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    begun_s = asyncio.get_running_loop().time()
    assert await a.fetch(REQUESTS, CONSUMER, 10, 0.15) == []
    assert world.took(begun_s, 0.15)
    assert await a.fetch(REQUESTS, CONSUMER, 10, 0.0) == []
    waiting = asyncio.create_task(a.fetch(REQUESTS, CONSUMER, 10, 5.0))
    await asyncio.sleep(0.05)
    stored = await b.append(request("r"), b"body", headers={"traceparent": "00-ab"})
    (delivery,) = await waiting
    assert (delivery.message.subject, delivery.message.data) == (request("r"), b"body")
    assert (delivery.message.seq, delivery.count) == (stored.seq, 1)
    assert delivery.message.headers["traceparent"] == "00-ab"
    assert delivery.message.stored_at_ns > 1_600_000_000_000_000_000
    for i in range(5):
        await b.append(request(f"n{i}"), b"")
    await b.append(request("other", priority=0), b"")
    some = await a.fetch(REQUESTS, CONSUMER, 3, 1.0)
    more = await b.fetch(REQUESTS, CONSUMER, 10, 1.0)
    assert [d.message.subject for d in (*some, *more)] == [request(f"n{i}") for i in range(5)]
    assert len(some) == 3
    (high,) = await b.fetch(REQUESTS, subjects.consumer_name(MODEL, 0), 10, 1.0)
    assert high.message.subject == request("other", priority=0)
    with pytest.raises(BusUnavailable):
        await a.fetch(REQUESTS, "no-such-consumer", 1, 0.1)


test_fetching = contract(fetching)


async def redelivery(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    await a.append(request("kept"), b"")
    await a.append(request("left"), b"")
    begun_s = asyncio.get_running_loop().time()
    kept, left = await a.fetch(REQUESTS, CONSUMER, 10, 1.0)

    async def keep() -> None:
        while True:
            a.progress(kept.token)
            await asyncio.sleep(0.2)

    keeping = asyncio.create_task(keep())
    (again,) = await b.fetch(REQUESTS, CONSUMER, 10, 5.0)
    keeping.cancel()
    assert (again.message.subject, again.message.seq, again.count) == (request("left"), left.message.seq, 2)
    assert world.took(begun_s, ACK_WAIT_S)
    # Any process may settle any delivery, with the token alone; an old token still counts.
    b.ack(kept.token)
    a.ack(left.token)
    await eventually_none(a, REQUESTS, request("kept"))
    await eventually_none(a, REQUESTS, request("left"))
    assert await b.fetch(REQUESTS, CONSUMER, 10, 1.2) == []
    b.ack(kept.token)  # settled already: nothing happens


test_redelivery = contract(redelivery)


async def giving_back(world: World) -> None:
    """At once, or after the delay: before one that was held as long and is merely left."""
    a, b = await world.bus("a"), await world.bus("b")
    loop = asyncio.get_running_loop()
    await a.append(request("r"), b"")
    await a.append(request("left"), b"")
    delivery, left = await a.fetch(REQUESTS, CONSUMER, 2, 1.0)
    begun_s = loop.time()
    a.progress(left.token)
    a.nak(delivery.token)
    (again,) = await b.fetch(REQUESTS, CONSUMER, 1, 5.0)
    assert (again.message.subject, again.count) == (request("r"), 2) and world.took(begun_s, 0.0)
    begun_s = loop.time()
    b.progress(left.token)
    b.nak(again.token, 0.3)
    (third,) = await a.fetch(REQUESTS, CONSUMER, 1, 5.0)
    assert (third.message.subject, third.count) == (request("r"), 3) and world.took(begun_s, 0.3)


test_giving_back = contract(giving_back)


async def cancelled_fetch(world: World) -> None:
    a = await world.bus()
    waiting = asyncio.create_task(a.fetch(REQUESTS, CONSUMER, 10, 5.0))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await a.append(request("r"), b"")
    (delivery,) = await a.fetch(REQUESTS, CONSUMER, 10, 3.0)
    assert delivery.message.subject == request("r")


test_a_cancelled_fetch_loses_nothing = contract(cancelled_fetch)


async def two_fetches(world: World) -> None:
    """Of one consumer by one process, at once."""
    a = await world.bus()
    waiting = [asyncio.create_task(a.fetch(REQUESTS, CONSUMER, 1, 2.0)) for _ in range(2)]
    await asyncio.sleep(0.05)
    await a.append(request("r"), b"")
    await a.append(request("s"), b"")
    got = [delivery.message.subject for task in waiting for delivery in await task]
    assert sorted(got) == [request("r"), request("s")]
    begun_s = asyncio.get_running_loop().time()
    both = [a.fetch(REQUESTS, subjects.consumer_name(MODEL, 1), 1, 0.2) for _ in range(2)]
    assert await asyncio.gather(*both) == [[], []]
    assert world.took(begun_s, 0.2)


test_two_fetches = contract(two_fetches)


async def many_held(world: World) -> None:
    a = await world.bus()
    await asyncio.gather(*(a.append(request(f"r{i}"), b"") for i in range(300)))
    tokens: list[AckToken] = []
    while len(tokens) < 300:
        tokens += [d.token for d in await a.fetch(REQUESTS, CONSUMER, 300, 1.0)]
    assert len(set(tokens)) == 300
    for _ in range(5):
        for token in tokens:
            a.progress(token)
        await asyncio.sleep(0.25)
    assert await a.fetch(REQUESTS, CONSUMER, 300, 0.1) == []
    for token in tokens:
        a.ack(token)
    await eventually_none(a, REQUESTS, "shoal.req.>")


test_many_held = contract(many_held)


async def layout(world: World) -> None:
    a = await world.bus()
    await a.ensure_streams((*LAYOUT, SMALL))
    await a.ensure_consumers(MODEL)
    with pytest.raises(LayoutDrift, match="REQUESTS.*max.*5"):
        await a.ensure_streams([replace(LAYOUT[0], msgs_max=5)])


test_a_drifted_layout_is_refused = contract(layout)


async def jobs(world: World) -> None:
    """One job a subject while it waits, one answer a subject for ever."""
    a, b = await world.bus("a"), await world.bus("b")
    await a.ensure_consumer(job_subjects.CONSUMER)
    await b.ensure_consumer(job_subjects.CONSUMER)
    with pytest.raises(LayoutDrift, match="jobs|ack_wait"):
        await a.ensure_consumer(replace(job_subjects.CONSUMER, ack_wait_s=3.0))
    name = job_subjects.JobName("", "q", "k/1")
    await a.append(job_subjects.job(name), b"body", headers={"Shoal-Timeout-Ms": "5"})
    with pytest.raises(SubjectTaken):
        await b.append(job_subjects.job(name), b"body")
    (delivery,) = await b.fetch(subjects.JOBS, job_subjects.CONSUMER.name, 10, 2.0)
    assert delivery.message.headers["Shoal-Timeout-Ms"] == "5"
    answer = job_subjects.answer(name)
    await b.append(answer, b"first", expected_seq=0)
    with pytest.raises((WrongSequence, SubjectTaken)):
        await a.append(answer, b"second", expected_seq=0)
    with pytest.raises(SubjectTaken):
        await a.append(answer, b"by somebody who expects nothing")
    b.ack(delivery.token)
    stored = await a.last(subjects.ANSWERS, answer)
    assert stored is not None and stored.data == b"first"
    await eventually_none(a, subjects.JOBS, job_subjects.job(name))


test_a_job_and_its_answer = contract(jobs)


# registry


async def registry(world: World) -> None:
    a = await world.bus()
    assert await a.entry("worker.a") is None
    first = await a.put_entry("worker.a", b"1", 0)
    with pytest.raises(WrongSequence):
        await a.put_entry("worker.a", b"2", 0)
    second = await a.put_entry("worker.b", b"2")
    assert second > first  # one count for the whole bucket
    with pytest.raises(WrongSequence):
        await a.put_entry("worker.a", b"3", second)
    third = await a.put_entry("worker.a", b"3", first)
    assert await a.entry("worker.a") == Entry("worker.a", b"3", third)
    assert sorted(e.key for e in await a.entries("worker.")) == ["worker.a", "worker.b"]
    assert await a.entries("work") == await a.entries("")
    assert await a.entries("batcher.") == []
    await a.delete_entry("worker.a")
    assert await a.entry("worker.a") is None
    assert [e.key for e in await a.entries("")] == ["worker.b"]
    with pytest.raises(WrongSequence):
        await a.put_entry("worker.a", b"4", third)
    again = await a.put_entry("worker.a", b"5", 0)
    assert await a.entry("worker.a") == Entry("worker.a", b"5", again)
    assert await a.put_entry("worker.empty", b"", 0) > again
    empty = await a.entry("worker.empty")
    assert empty is not None and empty.value == b""


test_registry = contract(registry)


async def watching(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    await a.put_entry("worker.a", b"old")
    now = await a.put_entry("worker.a", b"1")
    await a.put_entry("batcher.a", b"1")
    await a.put_entry("worker.gone", b"1")
    await a.delete_entry("worker.gone")
    seen: list[Entry] = []
    empty: list[Entry] = []
    exact: list[Entry] = []
    watching = await b.watch("worker.", seen.append)
    await b.watch("kvstore.", empty.append)
    await b.watch("worker.bb", exact.append)
    assert seen == [Entry("worker.a", b"1", now)]
    second = await a.put_entry("worker.b", b"2")
    third = await a.put_entry("worker.bb", b"3", 0)
    await a.delete_entry("worker.b")
    await a.put_entry("kvstore.a", b"1")
    await until(lambda: len(seen) == 4 and len(empty) == 1)
    assert seen[1:3] == [Entry("worker.b", b"2", second), Entry("worker.bb", b"3", third)]
    assert (seen[3].key, seen[3].value) == ("worker.b", None)
    assert exact == [Entry("worker.bb", b"3", third)]
    await watching.close()
    await a.put_entry("worker.c", b"4")
    await a.put_entry("kvstore.b", b"1")
    await until(lambda: len(empty) == 2)
    assert len(seen) == 4


test_watching = contract(watching)


async def expiry(world: World) -> None:
    a = await world.bus()
    await a.put_entry("worker.dies", b"1", 0)
    old = await a.put_entry("worker.stays", b"1", 0)
    async with asyncio.timeout(5):
        while await a.entry("worker.dies") is not None:
            await a.put_entry("worker.stays", b"2")
            await asyncio.sleep(0.1)
    assert [e.key for e in await a.entries("")] == ["worker.stays"]
    with pytest.raises(WrongSequence):
        await a.put_entry("worker.stays", b"3", old)
    assert await a.put_entry("worker.dies", b"2", 0) > old  # as if it had never been there


test_entries_expire = contract(expiry, SHORT_REGISTRY)


# objects


async def objects(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    data = b"".join(hashlib.sha256(bytes([i])).digest() * 32_000 for i in range(5)) + b"odd"  # 5 MB
    name = subjects.card_object(hashlib.sha256(data).hexdigest())
    assert await b.object(name) is None
    await a.put_object(name, data)
    await b.put_object(name, data)
    assert await b.object(name) == data
    await a.put_object("small", b"")
    assert await a.object("small") == b""


test_objects = contract(objects)


async def closing(world: World) -> None:
    a, b = await world.bus("a"), await world.bus("b")
    got: list[bytes] = []
    await b.subscribe("c", lambda m: got.append(m.data))
    a.publish("c", b"last words")
    await a.close()
    await until(lambda: got == [b"last words"])
    assert not a.connected
    with pytest.raises(BusUnavailable):
        await a.append(result("r"), b"")
    with pytest.raises(BusUnavailable):
        await a.fetch(REQUESTS, CONSUMER, 1, 0.1)
    await a.close()


test_closing = contract(closing)


# a broker that dies


Story = Callable[[NatsServer, NatsBus, NatsBus], Awaitable[None]]


def with_server(story: Story) -> Callable[[Path], None]:
    def test(tmp_path: Path) -> None:
        async def run() -> None:
            server = NatsServer(tmp_path)
            await server.start()
            try:
                a, b = await connect(server.url, "a"), await connect(server.url, "b")
                try:
                    await a.ensure_streams()
                    await a.ensure_consumers(MODEL)
                    async with asyncio.timeout(20):
                        await story(server, a, b)
                finally:
                    await asyncio.gather(a.close(), b.close())
            finally:
                server.kill()

        asyncio.run(run())

    return test


async def crash(server: NatsServer, *buses: Bus, down_s: float = 0.3) -> None:
    server.kill()
    await asyncio.sleep(down_s)
    assert not any(bus.connected for bus in buses)
    await server.start()


async def appends_over_a_crash(server: NatsServer, a: NatsBus, b: NatsBus) -> None:
    acknowledged: dict[str, int] = {}
    failures: list[Exception] = []
    over = False

    async def write(bus: Bus, writer: int) -> None:
        n = 0
        while not over:
            name = f"{writer}-{n}"
            try:
                stored = await bus.append(result(name), name.encode(), message_id=name)
            except (BusTimeout, BusUnavailable) as error:
                failures.append(error)
                await asyncio.sleep(0.02)
                continue
            acknowledged[name] = stored.seq
            n += 1

    async with asyncio.TaskGroup() as group:
        for i in range(8):
            group.create_task(write((a, b)[i % 2], i))
        await until(lambda: len(acknowledged) > 200)
        before = len(acknowledged)
        await crash(server, a, b)
        await until(lambda: len(acknowledged) > before + 200)
        over = True
    assert failures
    stored = {m.data.decode(): m.seq for m in await a.read(RESULTS, "shoal.res.>", 1, 100_000)}
    assert {name: stored.get(name) for name in acknowledged} == acknowledged
    assert len(set(stored.values())) == len(stored)


test_no_acknowledged_append_is_lost_in_a_crash = with_server(appends_over_a_crash)


async def all_goes_on(server: NatsServer, a: NatsBus, b: NatsBus) -> None:
    heard: list[bytes] = []
    seen: list[Entry] = []
    # the sender itself hears: another connection may come back later and miss it, as core messages are
    await a.subscribe("x.*", lambda m: heard.append(m.data))
    await b.subscribe("q", lambda m: b.reply(m, b"yes"))
    revision = await a.put_entry("worker.a", b"1")
    await b.watch("worker.", seen.append)
    await a.append(request("held"), b"")
    (held,) = await b.fetch(REQUESTS, CONSUMER, 10, 1.0)
    waiting = asyncio.create_task(b.fetch(REQUESTS, subjects.consumer_name(MODEL, 0), 10, 15.0))
    asking = asyncio.create_task(a.request("nobody-answers", b"", 10.0))
    await b.subscribe("nobody-answers", lambda m: None)
    server.kill()
    await until(lambda: not a.connected and not b.connected)
    with pytest.raises((BusTimeout, NoResponders)):  # at once, not after ten seconds
        await asking
    with pytest.raises(BusUnavailable):
        await a.append(result("r"), b"")
    with pytest.raises(BusUnavailable):
        await a.fetch(REQUESTS, CONSUMER, 1, 0.1)
    a.publish("x.1", b"sent while down")
    await server.start()
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await until(lambda: a.connected and b.connected)
    await a.put_entry("worker.b", b"2")
    await a.append(request("new", priority=0), b"")
    (new,) = await waiting
    assert new.message.subject == request("new", priority=0)
    (again,) = await b.fetch(REQUESTS, CONSUMER, 10, 5.0)
    assert again.message.seq == held.message.seq
    b.ack(again.token)
    await eventually_none(a, REQUESTS, request("held"))
    assert (await a.request("q", b"", 2.0)).data == b"yes"
    await until(lambda: heard == [b"sent while down"])
    await until(lambda: any(e.key == "worker.b" for e in seen))
    assert seen[0] == Entry("worker.a", b"1", revision)
    assert loop.time() - started_s < 5.0


test_all_goes_on_after_a_crash = with_server(all_goes_on)


async def an_empty_store(server: NatsServer, a: NatsBus, b: NatsBus) -> None:
    """Whatever the broker lost is lost, but what comes after it finds its streams and consumers again."""
    await a.append(request("lost"), b"")
    await a.append(result("lost"), b"")
    server.kill()
    await until(lambda: not a.connected and not b.connected)
    shutil.rmtree(server.folder / "store")
    await server.start()
    waiting = asyncio.create_task(b.fetch(REQUESTS, CONSUMER, 10, 15.0))
    await until(lambda: a.connected)
    while True:
        try:
            await a.append(request("new"), b"")
            break
        except (BusTimeout, BusUnavailable):
            await asyncio.sleep(0.02)
    (new,) = await waiting
    assert new.message.subject == request("new")
    assert await a.last(RESULTS, result("lost")) is None
    await a.put_entry("worker.a", b"1")


test_a_broker_with_an_empty_store_is_laid_out_anew = with_server(an_empty_store)


async def a_watch_tells_what_went(server: NatsServer, a: NatsBus, b: NatsBus) -> None:
    """What was deleted while a watcher could not see it."""
    seen: list[Entry] = []
    await a.put_entry("worker.a", b"1")
    await a.put_entry("worker.b", b"1")
    await b.watch("worker.", seen.append)
    client = b._connection._client
    await client.force_reconnect()
    await a.delete_entry("worker.a")
    await until(lambda: any(e.key == "worker.a" and e.value is None for e in seen))
    await a.put_entry("worker.c", b"1")
    await until(lambda: seen[-1].key == "worker.c")


test_a_watch_tells_what_went = with_server(a_watch_tells_what_went)


async def given_up(server: NatsServer, a: NatsBus, b: NatsBus) -> None:
    """The library closes itself for good on some errors of the server."""
    heard: list[bytes] = []
    await a.subscribe("x", lambda m: heard.append(m.data))
    await a._connection._client.close()
    await until(lambda: a.connected)
    b.publish("x", b"1")
    await until(lambda: heard == [b"1"])
    await a.append(request("r"), b"")
    (delivery,) = await a.fetch(REQUESTS, CONSUMER, 1, 2.0)
    a.ack(delivery.token)
    await eventually_none(b, REQUESTS, request("r"))


test_a_connection_the_library_gave_up_is_made_anew = with_server(given_up)


async def half_made(server: NatsServer, a: NatsBus, b: NatsBus) -> None:
    """A new connection over which the subscriptions could not be confirmed is not taken."""
    heard: list[bytes] = []
    await a.subscribe("x", lambda m: heard.append(m.data))
    connection, failures = a._connection, 1
    confirm = connection._barrier

    async def fail_once() -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise BusTimeout("no answer from the broker")
        await confirm()

    connection._barrier = fail_once  # type: ignore[method-assign]
    await connection._client.close()
    await until(lambda: connection._up)
    assert not failures
    b.publish("x", b"1")
    await until(lambda: heard == [b"1"])


test_a_connection_half_made_is_not_taken = with_server(half_made)


def test_no_server_is_said_clearly() -> None:
    async def run() -> None:
        with pytest.raises(BusUnavailable, match="no NATS server at nats://127.0.0.1:1 .*"):
            await connect("nats://127.0.0.1:1", timeout_s=0.3)

    asyncio.run(run())

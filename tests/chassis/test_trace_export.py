"""From ring to stream, between processes, over a broker that fails."""

import asyncio
from collections.abc import Sequence

from chassis import subjects
from chassis.bus import Stored
from chassis.ids import Epoch, RequestId
from chassis.memory_bus import MemoryBroker, MemoryBus
from chassis.messages.trace import parse_segment
from chassis.trace import Span, SpanRing, TraceContext, step_context, step_key
from chassis.trace_export import PENDING_LEN_MAX, Exporter, subject_of
from tests.sim.loop import run

CONTEXT = TraceContext(b"\x01" * 16, b"\x02" * 8)


def span(key: str, name: str) -> Span:
    return Span(key, name, CONTEXT, None, 1, 2, {})


async def stored(bus: MemoryBus, subject: str) -> list[tuple[str, str]]:
    """(service, span name), in the order of storing."""
    messages: Sequence[Stored] = await bus.read(subjects.TRACES, subject, 1, 1000)
    segments = [parse_segment(m.data) for m in messages]
    return [(s.service, span.name) for s in segments for span in s.spans]


def test_all_processes_store_what_one_of_them_keeps() -> None:
    async def go() -> None:
        broker = MemoryBroker(wall_ns=lambda: 0)
        bus = MemoryBus(broker, "tool")
        rings = {name: SpanRing(100) for name in ("batcher", "gateway")}
        exporters = [Exporter(ring, MemoryBus(broker, name), name) for name, ring in rings.items()]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(exporter.run()) for exporter in exporters]
            await asyncio.sleep(1)
            rings["batcher"].record(span("r1", "batcher.request"))
            rings["batcher"].record(span(step_key(7, 65), "batcher.step"))
            rings["gateway"].record(span("r1", "gateway.publish"))
            rings["gateway"].record(span("r2", "gateway.publish"))
            rings["batcher"].keep(["r1", step_key(7, 65)])
            await asyncio.sleep(1)
            rings["gateway"].record(span("r1", "gateway.generate"))  # it ends after the word came
            await asyncio.sleep(1)
            for task in tasks:
                task.cancel()
        assert sorted(await stored(bus, subjects.trace(RequestId("r1")))) == [
            ("batcher", "batcher.request"),
            ("gateway", "gateway.generate"),
            ("gateway", "gateway.publish"),
        ]
        assert await stored(bus, subjects.trace(RequestId("r2"))) == []
        assert await stored(bus, subjects.step_traces(Epoch(7), 1)) == [("batcher", "batcher.step")]

    run(go())


def test_what_the_bus_refuses_waits_within_a_bound() -> None:
    async def go() -> None:
        broker = MemoryBroker(wall_ns=lambda: 0)
        bus = MemoryBus(broker, "b")
        ring = SpanRing(10_000)
        exporter = Exporter(ring, bus, "b")
        broker.stop()
        for index in range(PENDING_LEN_MAX + 10):
            ring.record(span(f"r{index}", "batcher.request"))
            ring.keep([f"r{index}"])
        await exporter.flush()
        assert exporter.dropped == 10
        broker.start()
        await asyncio.sleep(5)
        await exporter.flush()
        assert await stored(bus, subjects.trace(RequestId("r9"))) == []
        assert len(await bus.read(subjects.TRACES, "shoal.trace.*", 1, 10_000)) == PENDING_LEN_MAX

    run(go())


def test_garbage_on_the_keep_subject_harms_nobody() -> None:
    async def go() -> None:
        broker = MemoryBroker(wall_ns=lambda: 0)
        bus = MemoryBus(broker, "x")
        ring = SpanRing(10)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(Exporter(ring, MemoryBus(broker, "b"), "b").run())
            await asyncio.sleep(1)
            bus.publish(subjects.KEEP, b"\xff\xff\xff")
            await asyncio.sleep(1)
            assert not task.done()
            task.cancel()

    run(go())


def test_a_sink_gets_the_same_spans() -> None:
    class Sink:
        def __init__(self) -> None:
            self.spans: list[Span] = []

        async def send(self, spans: Sequence[Span]) -> None:
            self.spans.extend(spans)

        async def close(self) -> None: ...

    async def go() -> None:
        sink = Sink()
        ring = SpanRing(10)
        exporter = Exporter(ring, MemoryBus(MemoryBroker(wall_ns=lambda: 0), "b"), "b", sink=sink)
        ring.record(span("r", "batcher.request"))
        ring.keep(["r"])
        await exporter.flush()
        assert sink.spans == [span("r", "batcher.request")]

    run(go())


def test_steps_share_subjects() -> None:
    assert subject_of(step_key(7, 63)) == subjects.step_traces(Epoch(7), 0)
    assert subject_of(step_key(7, 64)) == subjects.step_traces(Epoch(7), 1)
    assert step_context("b", 7, 64).trace_id != step_context("b", 7, 65).trace_id

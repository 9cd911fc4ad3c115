"""A request's story, told from what the streams hold."""

import asyncio
from typing import Any

import pytest

from chassis import subjects
from chassis.ids import Attempt, BootId, RequestId
from chassis.memory_bus import MemoryBroker, MemoryBus
from chassis.messages.request import Cancel, Claim, Reason, Record, Terminal, Timings, Usage, build_record
from chassis.messages.trace import build_segment
from chassis.trace import REQUESTS, STEPS, Span, TraceContext, encode_steps, step_context, step_key
from chassis.trace_export import subject_of
from shoal.why import Story, collect, render, request_id_of
from tests.sim.loop import run

MS = 1_000_000
TRACE = b"\x01" * 16
ID = RequestId("01request")


def context(number: int) -> TraceContext:
    return TraceContext(TRACE, number.to_bytes(8, "big"))


def span(number: int, parent: int | None, name: str, start: int, end: int, **attributes: Any) -> Span:
    up = None if parent is None else parent.to_bytes(8, "big")
    return Span(ID, name, context(number), up, start * MS, end * MS, attributes)


def step(number: int, start: int, end: int, error: str | None = None) -> list[Span]:
    key, root = step_key(7, number), step_context("b", 7, number)
    attributes: dict[str, Any] = {REQUESTS: f"{ID},other", "shoal.stage.0.compute_us": 1000}
    child = TraceContext(root.trace_id, bytes([9] * 7 + [number]))
    return [
        Span(key, "batcher.step", root, None, start * MS, end * MS, attributes, (context(2),), error),
        Span(key, "shard_worker.step", child, root.span_id, start * MS, end * MS, {"shoal.stage": 0}),
    ]


GATEWAY = [span(1, None, "gateway.generate", 0, 50), span(5, 1, "gateway.publish", 1, 3)]
BATCHER = [
    span(2, 1, "batcher.request", 2, 49, **{"gen_ai.response.finish_reasons": "stop"}),
    span(3, 2, "batcher.prefill", 4, 14, **{STEPS: encode_steps([(7, 63)])}),
    span(4, 2, "batcher.decode", 14, 46, **{STEPS: encode_steps([(7, 64), (7, 65)])}),
    span(6, 2, "batcher.finish", 46, 48),
]
TIMINGS = Timings(queued_us=1000, waiting_us=1000, prefill_us=10_000, decode_us=32_000, preemptions=1)
END = Terminal(Attempt(2), BootId("bootb"), Reason.STOP, (5, 6), usage=Usage(9, 4, 2), timings=TIMINGS)
RECORDS = (Claim(Attempt(1), BootId("boota")), Claim(Attempt(2), BootId("bootb"), batcher_deaths=1), END)
LEFT = Claim(Attempt(1), BootId("b"), left=True)


async def store(bus: MemoryBus, records: tuple[Record, ...], *services: tuple[str, list[Span]]) -> None:
    for record in records:
        await bus.append(subjects.result(ID), build_record(record))
    for service, spans in services:
        for one in spans:
            await bus.append(subject_of(one.key), build_segment(service, "boot", [one]))


def told(records: tuple[Record, ...], *services: tuple[str, list[Span]]) -> tuple[Story, str]:
    async def go() -> tuple[Story, str]:
        bus = MemoryBus(MemoryBroker(wall_ns=lambda: 48 * MS), "why")
        await store(bus, records, *services)
        story = await collect(bus, ID)
        return story, render(story)

    return run(go())


def whole() -> tuple[Story, str]:
    steps = [*step(63, 4, 14), *step(64, 15, 25), *step(65, 26, 46), *step(66, 47, 48)]
    return told(RECORDS, ("gateway", GATEWAY), ("batcher", BATCHER), ("batcher", steps))


def test_a_whole_story_has_a_connected_tree_and_its_own_steps() -> None:
    story, _ = whole()
    assert story.orphans() == []
    assert sorted({s.key for s in story.steps}) == [step_key(7, n) for n in (63, 64, 65)], (
        "66 was not its own"
    )
    book = story.ledger()
    assert book is not None
    assert book.total_us == 50_000
    assert abs(book.unaccounted_us) <= book.total_us // 100


def test_the_text_says_what_happened() -> None:
    _, text = whole()
    lines = text.splitlines()
    assert lines[0] == f"request {ID}: stop, 9 prompt tokens (4 cached), 2 made"
    assert "total 50.00 ms" in lines
    tree = [line for line in lines if "gateway." in line or "batcher." in line]
    assert [line.split()[0] for line in tree] == [
        "gateway.generate",
        "gateway.publish",
        "batcher.request",
        "batcher.prefill",
        "batcher.decode",
        "batcher.finish",
    ]
    depths = [len(line) - len(line.lstrip()) for line in tree]
    assert depths == [2, 4, 4, 6, 6, 6]
    assert "2 steps: 7:64-65, 2 of them kept" in text
    assert "shared its steps with 1 other requests\n  other  3 steps" in text
    assert "attempt 2 claimed by batcher bootb, after 1 batcher deaths" in text
    assert "1 preemptions, 0 tokens computed again" in text


def test_an_orphan_is_pointed_out() -> None:
    story, text = told((), ("gateway", GATEWAY), ("batcher", BATCHER[1:]))
    assert [s.name for s in story.orphans()] == ["batcher.prefill", "batcher.decode", "batcher.finish"]
    assert text.count("its parent is missing") == 3


@pytest.mark.parametrize("ended", [True, False])
def test_a_gateway_that_died_is_named_for_its_missing_root(ended: bool) -> None:
    """Its publish may have been written before; the root never was."""
    spans = (("gateway", [GATEWAY[1]]), ("batcher", BATCHER), ("batcher", step(63, 4, 14)))
    story, text = told(RECORDS if ended else RECORDS[:2], *spans)
    assert story.orphans() == [] and "missing" not in text
    lines = text.splitlines()
    start = lines.index("spans (start, duration)")
    root = "its gateway died" if ended else "its gateway died, or still serves it"
    assert lines[start + 1] == f"  gateway.generate  (not written: {root})"
    tree = [line for line in lines[start + 1 :] if line.lstrip().startswith(("gateway.", "batcher."))]
    assert [(len(line) - len(line.lstrip()), line.split()[0]) for line in tree] == [
        (2, "gateway.generate"),
        (4, "gateway.publish"),
        (4, "batcher.request"),
        (6, "batcher.prefill"),
        (6, "batcher.decode"),
        (6, "batcher.finish"),
    ]
    book = story.ledger()
    assert (book is not None) == ended


def test_who_resumes_a_dead_gateways_request_stands_below_its_call() -> None:
    resumed = span(7, 1, "gateway.resume", 20, 50)
    story, text = told(RECORDS, ("gateway", [resumed]), ("batcher", BATCHER))
    assert story.orphans() == []
    lines = [line for line in text.splitlines() if "gateway." in line]
    assert [line.split()[0] for line in lines] == ["gateway.generate", "gateway.resume"]
    assert lines[1].startswith("    gateway.resume")


def test_a_lost_step_and_a_cancel_are_told() -> None:
    records = (Claim(Attempt(1), BootId("b")), LEFT, Cancel(Attempt(1), BootId("b"), "client left"))
    _, text = told(records, ("batcher", BATCHER), ("batcher", step(63, 4, 14, error="stage 1 died")))
    assert "attempt 1 claimed by batcher b" in text
    assert "left by batcher b, which drained, in attempt 1" in text
    assert "cancel written after attempt 1: client left" in text
    assert "step:7:63 was lost: stage 1 died" in text
    assert f"request {ID}: not ended" in text


def test_nothing_known_is_said() -> None:
    _, text = told(())
    assert text.startswith(f"Nothing is known of request {ID}")


def test_garbage_in_the_stream_is_passed_over() -> None:
    async def go() -> Story:
        bus = MemoryBus(MemoryBroker(wall_ns=lambda: 0), "why")
        await bus.append(subjects.trace(ID), b"\xff\xff")
        await store(bus, (), ("gateway", GATEWAY))
        return await collect(bus, ID)

    assert len(run(go()).spans) == 2


def test_it_waits_for_spans_on_their_way() -> None:
    async def go() -> tuple[Story, float]:
        bus = MemoryBus(MemoryBroker(wall_ns=lambda: 0), "why")
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(collect(bus, ID, wait_s=10))
            await asyncio.sleep(1)
            await store(bus, RECORDS, ("gateway", GATEWAY), ("batcher", [*BATCHER, *step(63, 4, 14)]))
        return waiting.result(), loop.time()

    story, took_s = run(go())
    assert len(story.spans) == 6
    assert 1 <= took_s == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "batch_req_"])
def test_ids_of_openais_answers_are_understood(prefix: str) -> None:
    assert request_id_of(f"{prefix}01m8qtkkpqdcw3x40tt6pfcr0x") == "01m8qtkkpqdcw3x40tt6pfcr0x"

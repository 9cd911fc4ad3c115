"""What the ring keeps, and what of it reaches the stream."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.messages import BadMessage
from chassis.messages.trace import build_keep, build_segment, parse_keep, parse_segment
from chassis.trace import (
    ATTEMPT,
    Span,
    SpanRing,
    TraceContext,
    decode_steps,
    encode_steps,
    parse_step_key,
    step_context,
    step_key,
)

SUMMARY = SpanRing.SUMMARIES[0]
CONTEXT = TraceContext(b"\x01" * 16, b"\x02" * 8)


def span(
    key: str, name: str = "batcher.queue", ms: int = 1, error: str | None = None, attempt: int = 1
) -> Span:
    return Span(key, name, CONTEXT, None, 1_000, 1_000 + ms * 1_000_000, {ATTEMPT: attempt}, (), error)


def names(ring: SpanRing) -> list[tuple[str, str]]:
    return [(s.key, s.name) for s in ring.take()[0]]


# ---- the ring --------------------------------------------------------------------------------------


def test_what_is_not_kept_never_leaves() -> None:
    ring = SpanRing(10)
    ring.record(span("a"))
    ring.keep(["b"])
    assert ring.take() == ([], ["b"])


def test_keep_looks_back_and_ahead() -> None:
    ring = SpanRing(10, lookahead_ticks=2)
    ring.record(span("a", "batcher.queue"))
    ring.record(span("b"))
    ring.keep(["a"])
    ring.record(span("a", "gateway.generate"))
    assert names(ring) == [("a", "batcher.queue"), ("a", "gateway.generate")]
    ring.tick()
    ring.record(span("a", "late"))
    assert names(ring) == [("a", "late")]
    ring.tick()
    ring.record(span("a", "too late"))
    assert names(ring) == []


def test_the_oldest_key_falls_out() -> None:
    ring = SpanRing(3)
    for key in ("a", "b", "c", "d"):
        ring.record(span(key))
    ring.keep(["a", "b", "d"])
    assert names(ring) == [("b", "batcher.queue"), ("d", "batcher.queue")]


def test_a_key_is_announced_once_and_not_when_told() -> None:
    ring = SpanRing(10)
    ring.keep(["a", "step:1:1"])
    ring.keep(["b", "step:1:1"])
    ring.keep_told(["c"])
    ring.record(span("c"))
    spans, announced = ring.take()
    assert announced == ["a", "step:1:1", "b"]
    assert [s.key for s in spans] == ["c"]


def test_only_a_share_is_kept_but_trouble_always_and_a_summary_of_all() -> None:
    ring = SpanRing(10_000, keep_ratio=0.25, slow_ms=500)
    for index in range(400):
        ring.record(span(f"r{index}"))
        ring.record(span(f"r{index}", SUMMARY))
        ring.keep([f"r{index}", f"step:1:{index}"])
    spans, announced = ring.take()
    assert [s.key for s in spans if s.name == SUMMARY] == [f"r{i}" for i in range(400)]
    requests = [key for key in announced if not key.startswith("step:")]
    assert 60 < len(requests) < 140
    assert len(announced) == 2 * len(requests), "the steps of a request go with it"
    for index, bad in enumerate(
        (
            span("slow", SUMMARY, ms=500),
            span("failed", "batcher.prefill", error="died"),
            span("again", SUMMARY, attempt=2),
        )
    ):
        ring = SpanRing(10, keep_ratio=0.0, slow_ms=500)
        ring.record(bad)
        ring.keep([bad.key])
        assert ring.take() == ([bad], [bad.key]), index


def test_every_bound_holds() -> None:
    ring = SpanRing(5, lookahead_ticks=1)
    ring.keep([f"k{i}" for i in range(8)])
    assert ring.dropped == 3
    for _ in range(9):
        ring.record(span("k0"))
    assert len(ring.take()[0]) == 5
    assert ring.dropped == 3 + 4


def test_span_ids_differ_and_are_never_zero() -> None:
    ring = SpanRing(first_span_id=0)
    ids = {ring.new_span_id() for _ in range(1000)}
    assert len(ids) == 1000 and bytes(8) not in ids
    assert all(len(i) == 8 for i in ids)


# ---- steps -----------------------------------------------------------------------------------------


def test_steps_as_text() -> None:
    assert encode_steps([(8, 1), (7, 43), (7, 42), (7, 45), (7, 42)]) == "7:42-43,45;8:1"
    assert encode_steps([]) == ""
    assert decode_steps("7:42-43,45;8:1") == [(7, 42), (7, 43), (7, 45), (8, 1)]


@given(st.sets(st.tuples(st.integers(1, 3), st.integers(1, 60))))
@settings(deadline=None, derandomize=True)
def test_steps_survive_their_text(steps: set[tuple[int, int]]) -> None:
    assert decode_steps(encode_steps(steps)) == sorted(steps)


@pytest.mark.parametrize("text", ["7", "x:1", "7:1-x", "7:", "7:1-99999999"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_steps(text)


def test_a_steps_ids_are_the_same_everywhere() -> None:
    assert step_context("boot", 7, 42) == step_context("boot", 7, 42)
    assert step_context("boot", 7, 42).trace_id != step_context("boot", 7, 43).trace_id
    assert parse_step_key(step_key(7, 42)) == (7, 42)
    assert parse_step_key("01arz3ndektsv4rrffq69g5fav") is None


# ---- messages --------------------------------------------------------------------------------------


def test_a_segment_survives_the_wire() -> None:
    whole = Span(
        key="r",
        name="batcher.decode",
        context=CONTEXT,
        parent=b"\x03" * 8,
        start_ns=1_700_000_000_000_000_000,
        end_ns=1_700_000_000_000_000_123,
        attributes={"text": "x", "integer": -5, "real": 0.5, "flag": True, "zero": 0, "empty": ""},
        links=(step_context("b", 1, 2),),
        error="",
    )
    segment = parse_segment(build_segment("batcher", "boot", [whole, span("r")]))
    assert (segment.service, segment.boot) == ("batcher", "boot")
    assert segment.spans == (whole, span("r"))


def test_keep_survives_the_wire() -> None:
    keys = ["a", "b", "step:7:1", "step:7:2", "step:9:1"]
    assert parse_keep(build_keep(keys)) == keys


@given(st.binary(max_size=60))
@settings(deadline=None, derandomize=True)
def test_garbage_is_refused_or_harmless(data: bytes) -> None:
    for parse in (parse_segment, parse_keep):
        try:
            parse(data)
        except BadMessage:
            pass


def test_a_trace_context_is_25_bytes() -> None:
    assert TraceContext.decode(CONTEXT.encode()) == CONTEXT
    assert TraceContext.decode(b"") is None
    assert TraceContext.decode(bytes(25)) is None
    assert TraceContext.decode(CONTEXT.encode() + b"\x00") is None

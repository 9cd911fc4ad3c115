"""What a bus in memory may forget, and what it must not."""

from dataclasses import replace

import pytest

from chassis import subjects
from chassis.edge_layout import EDGE_LAYOUT, MIB, is_live
from chassis.errors import StreamFull, WrongSequence
from chassis.ids import RequestId
from chassis.memory_streams import MemoryConsumer, MemoryStream
from chassis.stream_layout import StreamLayout
from chassis.subjects import LAYOUT, REQUESTS, RESULTS

MODEL = "some/model v1.5"


def layout(name: str) -> StreamLayout:
    return next(one for one in EDGE_LAYOUT if one.name == name)


def two_streams(results_max: int) -> tuple[MemoryStream, MemoryStream]:
    requests = MemoryStream(layout(REQUESTS))
    for wanted in subjects.consumers(MODEL):
        requests.consumers[wanted.name] = MemoryConsumer(wanted, requests)
    results = MemoryStream(replace(layout(RESULTS), msgs_max=results_max))
    results.pinned = lambda subject: is_live(requests, subject)
    return requests, results


def put(stream: MemoryStream, subject: str, expected_seq: int | None = None) -> int:
    return stream.append(subject, b"x", {}, expected_seq, None, 0.0, 0).seq


def test_every_stream_has_bounds_that_fit_into_a_small_machine() -> None:
    assert [one.name for one in EDGE_LAYOUT] == [one.name for one in LAYOUT]
    for own, usual in zip(EDGE_LAYOUT, LAYOUT, strict=True):
        assert 0 < own.msgs_max <= 4096 and 0 < own.bytes_max <= 64 * MIB
        assert (own.subjects, own.retention, own.age_max_s) == (
            usual.subjects,
            usual.retention,
            usual.age_max_s,
        )
    kept = [one for one in EDGE_LAYOUT if one.name != subjects.CARDS]
    assert sum(one.bytes_max + 1024 * one.msgs_max for one in kept) <= 100 * MIB


def test_logs_of_requests_that_ended_make_room() -> None:
    requests, results = two_streams(4)
    live = RequestId("live")
    put(requests, subjects.request(MODEL, 3, live))
    claim = put(results, subjects.result(live), 0)
    for i in range(20):
        put(results, subjects.result(RequestId(f"ended{i}")), 0)
        results.check()
    assert [m.subject for m in results.messages()] == [
        subjects.result(RequestId(name)) for name in ("live", "ended17", "ended18", "ended19")
    ]
    terminal = put(results, subjects.result(live), claim)  # its owner still ends it
    with pytest.raises(WrongSequence):
        put(results, subjects.result(live), claim)
    last = results.last(subjects.result(live), 0.0)
    assert last is not None and last.seq == terminal


def test_nothing_that_lives_makes_room() -> None:
    requests, results = two_streams(2)
    for name in ("a", "b"):
        put(requests, subjects.request(MODEL, 0, RequestId(name)))
        put(results, subjects.result(RequestId(name)), 0)
    with pytest.raises(StreamFull, match="forget nothing"):
        put(results, subjects.result(RequestId("c")), 0)
    requests.purge(subjects.request(MODEL, 0, RequestId("a")))  # it has ended
    put(results, subjects.result(RequestId("c")), 0)
    assert not results.holds(subjects.result(RequestId("a")))

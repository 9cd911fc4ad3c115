"""Pipeline messages survive the wire, and bytes that are not well-formed are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.ids import BootId, Epoch
from chassis.messages import BadMessage, forming
from chassis.messages import pipeline as p
from chassis.messages import step_result as r
from chassis.messages.request import Sampling
from chassis.wire import pipeline_pb2 as pb

PARAMS = Sampling(temperature=0.5, top_k=7, top_p=0.25)


def step_bytes(**changed: object) -> bytes:
    columns: dict[str, object] = {
        "slots": [4, 2],
        "num_tokens": [3, 1],
        "starts": [0, 9],
        "flags": [p.FLAG_FRESH, p.FLAG_SAMPLES],
        "output_index": [0, 5],
        "token_ids": [10, 11, 12, 13],
        "table_lens": [2, 0],
        "table": [7, 8],
        "fresh": [p.SlotStart(PARAMS, (1 << 64) - 1)],
        "freed_slots": [3],
    }
    return p.build_step(5, 1, **(columns | changed))  # type: ignore[arg-type]


def test_step_round_trip() -> None:
    step = p.parse_step(step_bytes(trace_parent=b"x" * 25))
    assert (step.epoch, step.number, step.trace_parent) == (5, 1, b"x" * 25)
    assert step.slots.tolist() == [4, 2] and step.slots.dtype == np.dtype("<u4")
    assert step.num_tokens.tolist() == [3, 1] and step.starts.tolist() == [0, 9]
    assert step.flags.tolist() == [2, 1] and step.output_index.tolist() == [0, 5]
    assert step.token_ids.tolist() == [10, 11, 12, 13]
    assert step.table_lens.tolist() == [2, 0] and step.table.tolist() == [7, 8]
    assert step.freed_slots.tolist() == [3]
    assert step.fresh == (p.SlotStart(PARAMS, (1 << 64) - 1),)
    assert not step.slots.flags.writeable and not step.slots.flags.owndata


def test_empty_step() -> None:
    step = p.parse_step(p.build_step(1, 1))
    assert len(step.slots) == len(step.token_ids) == 0 and step.fresh == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": [1, 2, 3]},
        {"num_tokens": [4, 0]},
        {"num_tokens": [4]},
        {"starts": [1, 2, 3]},
        {"starts": [0, (1 << 31) - 1]},
        {"flags": [2]},
        {"flags": [2, 8]},
        {"flags": [2, 3]},
        {"output_index": []},
        {"table_lens": [2, 1]},
        {"table_lens": [2]},
        {"table": []},
        {"fresh": []},
        {"trace_parent": b"short"},
    ],
)
def test_columns_that_do_not_add_up(changed: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        p.parse_step(step_bytes(**changed))


def test_sums_do_not_wrap() -> None:
    with pytest.raises(BadMessage):
        p.parse_step(step_bytes(table_lens=[0xFFFFFFFF, 3], table=[1, 2]))


@pytest.mark.parametrize("field", ["slots", "token_ids", "freed_slots", "table"])
def test_column_of_odd_bytes(field: str) -> None:
    m = pb.Step.FromString(step_bytes())
    setattr(m, field, getattr(m, field) + b"\0")
    with pytest.raises(BadMessage):
        p.parse_step(m.SerializeToString())


def test_copies_of_blocks_travel() -> None:
    step = p.read_step(step_bytes(copies=[(3, 5), (3, 6)]))
    sources, targets = p.copied_blocks(step, 7)
    assert (sources.tolist(), targets.tolist()) == ([3, 3], [5, 6])


@pytest.mark.parametrize("copies", [[(3, 7)], [(7, 3)], [(1, 3), (2, 3)], [(1, 3), (3, 4)], [(3, 3)]])
def test_copies_that_cannot_be_are_refused(copies: list[tuple[int, int]]) -> None:
    step = p.read_step(step_bytes(copies=copies))
    with pytest.raises(BadMessage):
        p.copied_blocks(step, 7)


def test_copies_without_rows_are_refused() -> None:
    step = p.read_step(p.build_step(1, 1, copies=[(3, 5)]))
    with pytest.raises(BadMessage, match="without rows"):
        p.copied_blocks(step, 7)


def test_step_numbers_start_at_one() -> None:
    with pytest.raises(BadMessage):
        p.parse_step(p.build_step(0, 1))
    with pytest.raises(BadMessage):
        p.parse_step(p.build_step(1, 0))


def test_timings_are_appended_to_the_header() -> None:
    first, second = p.StageTiming(0, 1, 2, 3, 4), p.StageTiming(1, 1 << 62, 6, 7, 8)
    header = p.add_timing(p.add_timing(step_bytes(), first), second)
    step = p.parse_step(header)
    assert step.timings == (first, second)
    assert step.token_ids.tolist() == [10, 11, 12, 13]


def test_result_round_trip() -> None:
    timing = p.StageTiming(1, 5, 6, 7, 8)
    result = r.parse_result(r.build_result(3, 9, np.array([1, 511], np.uint32), [timing]))
    assert (result.epoch, result.number) == (3, 9)
    assert result.token_ids == (1, 511) and result.timings == (timing,)


@pytest.mark.parametrize("kind", list(p.LinkKind))
def test_hello_round_trip(kind: p.LinkKind) -> None:
    hello = p.Hello(Epoch(7), p.BATCHER_STAGE, BootId("b1"), kind)
    assert p.parse_hello(p.build_hello(hello)) == hello


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff",
        pb.Hello(epoch=1, boot="b", kind="spy").SerializeToString(),
        pb.Hello(epoch=1, kind="ring").SerializeToString(),
        pb.Hello(boot="b", kind="ring").SerializeToString(),
    ],
)
def test_bad_hello(data: bytes) -> None:
    with pytest.raises(BadMessage):
        p.parse_hello(data)


FORM = forming.Form(Epoch(4), BootId("b"), "digest", 1, 2, 4, 8, "mem://b", 16, 32, 256)


def test_form_round_trip() -> None:
    assert forming.parse_form(forming.build_form(FORM)) == FORM


@pytest.mark.parametrize(
    "field, value",
    [
        ("epoch", 0),
        ("batcher_boot", ""),
        ("stage", 2),
        ("end_layer", 4),
        ("next_address", ""),
        ("slots_max", 0),
        ("block_size_tokens", 0),
        ("step_tokens_max", 0),
    ],
)
def test_bad_form(field: str, value: object) -> None:
    m = forming.build_form(FORM)
    setattr(m, field, value)
    with pytest.raises(BadMessage):
        forming.parse_form(m)


def test_formed_round_trip() -> None:
    yes = forming.Formed(None, Epoch(4), "w.1", 99, prior_epoch=Epoch(3), prior_attachment=12)
    no = forming.Formed(forming.FormRefusal.IN_USE, Epoch(9), error="busy")
    assert forming.parse_formed(forming.build_formed(yes)) == yes
    assert forming.parse_formed(forming.build_formed(no)) == no
    with pytest.raises(BadMessage):
        forming.parse_formed(pb.FormReply(formed=False, refusal="mood"))
    with pytest.raises(BadMessage):
        forming.parse_formed(pb.FormReply(formed=True))


@given(st.binary(max_size=200))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_garbage_is_refused_or_well_formed(data: bytes) -> None:
    for parse in (p.parse_step, r.parse_result, p.parse_hello):
        try:
            parse(data)
        except BadMessage:
            continue

"""Slot tables against a plain model of dictionaries, and steps that must be refused whole."""

import copy
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.messages import BadMessage
from chassis.messages import pipeline as p
from chassis.messages.sampling import Sampling, Shaping
from shard_worker.executor import StepInputs
from shard_worker.inputs import SlotTables, TableLimits

BLOCK = 4
LIMITS = TableLimits(
    slots_max=6, block_size_tokens=BLOCK, num_blocks=50, context_len_max=30, step_tokens_max=64, vocab_size=99
)
PARAMS = Sampling(0.5, 3, 0.75)


def build(rows: list[dict[str, Any]], freed: list[int] | None = None) -> p.Step:
    """Rows of slot, start, ids, blocks, fresh (a SlotStart or None), samples, index."""
    return p.parse_step(
        p.build_step(
            1,
            1,
            slots=[r["slot"] for r in rows],
            num_tokens=[len(r["ids"]) for r in rows],
            starts=[r["start"] for r in rows],
            flags=[(2 if r.get("fresh") else 0) | (1 if r.get("samples") else 0) for r in rows],
            output_index=[r.get("index", 0) for r in rows],
            token_ids=[i for r in rows for i in r["ids"]],
            table_lens=[len(r.get("blocks", [])) for r in rows],
            table=[b for r in rows for b in r.get("blocks", [])],
            fresh=[r["fresh"] for r in rows if r.get("fresh")],
            freed_slots=freed or [],
        )
    )


def started(tables: SlotTables) -> None:
    tables.apply(
        build(
            [
                {"slot": 2, "start": 0, "ids": [7, 8, 9], "blocks": [5], "fresh": p.SlotStart(PARAMS, 11)},
                {"slot": 4, "start": 8, "ids": [1], "blocks": [9, 10, 11], "fresh": p.SlotStart(PARAMS, 12)},
            ]
        )
    )


def test_a_mixed_step() -> None:
    tables = SlotTables(LIMITS)
    started(tables)
    greedy = p.SlotStart(Sampling(0.0, 0, 1.0), (1 << 64) - 1)
    inputs = tables.apply(
        build(
            [
                {"slot": 4, "start": 9, "ids": [20], "samples": True, "index": 3},
                {"slot": 0, "start": 4, "ids": [30, 31], "blocks": [1, 2], "fresh": greedy, "samples": True},
                {"slot": 2, "start": 3, "ids": [40, 41, 42], "blocks": [6]},
            ]
        )
    )
    assert inputs.token_ids.tolist() == [20, 30, 31, 40, 41, 42]
    assert inputs.positions.tolist() == [9, 4, 5, 3, 4, 5] and inputs.positions.dtype == np.int32
    assert inputs.row_offsets.tolist() == [0, 1, 3, 6] and inputs.row_offsets.dtype == np.int32
    assert inputs.context_lens.tolist() == [10, 6, 6]
    assert inputs.kv_slots.tolist() == [11 * 4 + 1, 2 * 4, 2 * 4 + 1, 5 * 4 + 3, 6 * 4, 6 * 4 + 1]
    assert inputs.kv_slots.dtype == np.int64
    assert inputs.block_tables.tolist() == [[9, 10, 11], [1, 2, 0], [5, 6, 0]]
    assert inputs.sample_rows.tolist() == [0, 1] and inputs.output_index.tolist() == [3, 0]
    assert inputs.temperature.tolist() == [0.5, 0.0] and inputs.top_k.tolist() == [3, 0]
    assert inputs.top_p.tolist() == [0.75, 1.0]
    assert inputs.seeds.tolist() == [12, (1 << 64) - 1]


def test_an_empty_step() -> None:
    inputs = SlotTables(LIMITS).apply(build([]))
    assert len(inputs.token_ids) == 0 and inputs.row_offsets.tolist() == [0]
    assert inputs.block_tables.shape == (0, 0)


def test_what_is_handed_out_stays() -> None:
    tables = SlotTables(LIMITS)
    started(tables)
    inputs = tables.apply(build([{"slot": 2, "start": 3, "ids": [1], "samples": True}]))
    before = copy.deepcopy(inputs)
    fresh = p.SlotStart(Sampling(0.0, 0, 1.0), 0)
    tables.apply(build([{"slot": 2, "start": 0, "ids": [1], "blocks": [40], "fresh": fresh}], freed=[2]))
    assert inputs.block_tables.tolist() == before.block_tables.tolist() == [[5]]
    assert inputs.seeds.tolist() == before.seeds.tolist() == [11]


BAD: list[tuple[str, list[dict[str, Any]], list[int]]] = [
    ("unknown slot", [{"slot": 1, "start": 0, "ids": [1], "blocks": [1]}], []),
    ("freed and used", [{"slot": 2, "start": 3, "ids": [1]}], [2]),
    ("slot out of range", [{"slot": 6, "start": 0, "ids": [1]}], []),
    ("slot twice", [{"slot": 2, "start": 3, "ids": [1]}] * 2, []),
    ("freed slot out of range", [{"slot": 2, "start": 3, "ids": [1]}], [6]),
    ("no block", [{"slot": 2, "start": 3, "ids": [1, 2]}], []),
    ("block out of range", [{"slot": 2, "start": 3, "ids": [1, 2], "blocks": [50]}], []),
    ("token out of range", [{"slot": 2, "start": 3, "ids": [99]}], []),
    ("hole", [{"slot": 4, "start": 10, "ids": [1]}], []),
    ("table too long", [{"slot": 2, "start": 3, "ids": [1], "blocks": list(range(20, 28))}], []),
    ("too many tokens", [{"slot": 2, "start": 0, "ids": [1] * 65, "blocks": [20, 21, 22]}], []),
]


@pytest.mark.parametrize("name, rows, freed", BAD)
def test_bad_steps_change_nothing(name: str, rows: list[dict[str, Any]], freed: list[int]) -> None:
    tables = SlotTables(LIMITS)
    started(tables)
    with pytest.raises(BadMessage):
        tables.apply(build([{"slot": 4, "start": 9, "ids": [3], "blocks": [30]}, *rows], [0, *freed]))
    again = tables.apply(
        build([{"slot": 2, "start": 3, "ids": [1]}, {"slot": 4, "start": 9, "ids": [1], "blocks": [31]}])
    )
    assert again.block_tables.tolist() == [[5, 0, 0, 0], [9, 10, 11, 31]]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Steps that a correct batcher could send, over a pool of random block ids."""
    state: dict[int, tuple[int, int]] = {}  # slot -> (blocks, computed)
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        freed = [s for s in sorted(state) if draw(st.integers(0, 4)) == 0]
        for slot in freed:
            del state[slot]
        rows = []
        for slot in draw(st.lists(st.integers(0, 5), unique=True, max_size=6)):
            fresh = slot not in state
            blocks, computed = state.get(slot, (0, draw(st.integers(0, 8)) if fresh else 0))
            count = draw(st.integers(1, 6))
            if computed + count > 28:
                continue
            needed = -(-(computed + count) // BLOCK)
            added = draw(st.integers(max(0, needed - blocks), min(8, needed + 1) - blocks))
            state[slot] = (blocks + added, computed + count)
            rows.append(
                {
                    "slot": slot,
                    "start": computed,
                    "ids": draw(st.lists(st.integers(0, 98), min_size=count, max_size=count)),
                    "blocks": draw(st.lists(st.integers(0, 49), min_size=added, max_size=added)),
                    "fresh": p.SlotStart(PARAMS, draw(st.integers(0, (1 << 64) - 1))) if fresh else None,
                    "samples": draw(st.booleans()),
                    "index": draw(st.integers(0, 1000)),
                }
            )
        steps.append((rows, freed))
    return steps


@given(histories())
@settings(deadline=None, derandomize=True, max_examples=80)
def test_tables_follow_a_plain_model(history: list[tuple[list[dict[str, Any]], list[int]]]) -> None:
    tables = SlotTables(LIMITS)
    plain: dict[int, tuple[list[int], int]] = {}
    for rows, freed in history:
        for slot in freed:
            del plain[slot]
        inputs = tables.apply(build(rows, freed))
        tables.check()
        for row in rows:
            if row["fresh"]:
                plain[row["slot"]] = ([], row["fresh"].seed)
            plain[row["slot"]][0].extend(row["blocks"])
        assert_layout(inputs, rows, plain)


def assert_layout(
    inputs: StepInputs, rows: list[dict[str, Any]], plain: dict[int, tuple[list[int], int]]
) -> None:
    for i, row in enumerate(rows):
        table = plain[row["slot"]][0]
        assert inputs.block_tables[i].tolist()[: len(table)] == table
        assert not inputs.block_tables[i, len(table) :].any()
        begin, end = inputs.row_offsets[i], inputs.row_offsets[i + 1]
        assert inputs.token_ids[begin:end].tolist() == row["ids"]
        positions = list(range(row["start"], row["start"] + len(row["ids"])))
        assert inputs.positions[begin:end].tolist() == positions
        assert inputs.kv_slots[begin:end].tolist() == [
            table[q // BLOCK] * BLOCK + q % BLOCK for q in positions
        ]
        assert inputs.context_lens[i] == positions[-1] + 1
    sampling = [(i, row) for i, row in enumerate(rows) if row["samples"]]
    assert inputs.sample_rows.tolist() == [i for i, _ in sampling]
    assert inputs.seeds.tolist() == [plain[row["slot"]][1] for _, row in sampling]
    assert inputs.output_index.tolist() == [row["index"] for _, row in sampling]


def test_a_step_costs_little() -> None:
    """16 sequences: parse and lay out within the budget of 200 us, with room for a busy machine."""
    tables = SlotTables(TableLimits(64, 16, 4096, 2048, 512))
    blocks = [list(range(i * 8, i * 8 + 8)) for i in range(16)]
    fresh = p.SlotStart(PARAMS, 1)
    rows = [{"slot": i, "start": 0, "ids": [1] * 20, "blocks": blocks[i], "fresh": fresh} for i in range(16)]
    tables.apply(build(rows))
    data = p.build_step(
        1, 2, slots=range(16), num_tokens=[1] * 16, starts=[20] * 16, flags=[1] * 16,
        output_index=[1] * 16, token_ids=[1] * 16, table_lens=[0] * 16,
    )  # fmt: skip
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        tables.apply(p.parse_step(data))
        times.append(time.perf_counter() - begin)
    assert min(times) < 400e-6, f"{min(times) * 1e6:.0f} us"


SHAPED = Sampling(1.0, shaping=Shaping(repetition_penalty=1.5, frequency_penalty=0.5, bad_words=((5, 6),)))
PROMPT, OUTPUT = [1, 2, 1, 3, 4, 4, 9], [2, 7, 7, 5]


def shaped_start(start: int, sampling: Sampling = SHAPED) -> p.SlotStart:
    return p.SlotStart(sampling, 3, len(PROMPT), tuple((PROMPT + OUTPUT)[:start]), 9, (8,))


def shaped(begin: int, chunk: int) -> StepInputs:
    """The step that samples after PROMPT and OUTPUT, of a slot that started at `begin`, in chunks."""
    tables, ids = SlotTables(LIMITS), PROMPT + OUTPUT
    inputs = None
    for start in range(begin, len(ids), chunk):
        fresh = {"fresh": shaped_start(start), "blocks": [1, 2, 3]} if start == begin else {}
        row = {"slot": 2, "start": start, "ids": ids[start : start + chunk], **fresh}
        samples = {"samples": True, "index": len(OUTPUT)} if start + chunk >= len(ids) else {}
        plain = {"slot": 0, "start": 0, "ids": [1], "blocks": [9], "fresh": p.SlotStart(PARAMS, 1)}
        inputs = tables.apply(build([{**plain, "samples": True}, {**row, **samples}]))
        tables.check()
    assert inputs is not None
    return inputs


def test_what_was_said_counts_the_same_however_it_came() -> None:
    whole = shaped(0, 64).shaping
    assert whole is not None and whole.rows.tolist() == [1] and whole.penalty_rows.tolist() == [1]
    counts = dict(zip(whole.seen_ids.tolist(), whole.seen_counts.tolist(), strict=True))
    assert counts == {1: 0, 2: 1, 3: 0, 4: 0, 9: 0, 7: 2, 5: 1}
    assert sorted(whole.banned_ids.tolist()) == [6, 8], "after 5, and before min_tokens"
    for begin in range(len(PROMPT + OUTPUT)):
        for chunk in (1, 2, 3, 64):
            other = shaped(begin, chunk).shaping
            assert other is not None
            found = dict(zip(other.seen_ids.tolist(), other.seen_counts.tolist(), strict=True))
            assert found == counts and other.banned_ids.tolist() == whole.banned_ids.tolist()


def test_plain_steps_know_nothing_of_shapes() -> None:
    tables = SlotTables(LIMITS)
    started(tables)
    assert tables.shapes.by_slot == {}
    row = {"slot": 2, "start": 3, "ids": [1], "samples": True}
    assert tables.apply(build([row])).shaping is None
    tables.apply(build([{"slot": 1, "start": 0, "ids": [1], "blocks": [2], "fresh": shaped_start(0)}]))
    assert tables.apply(build([{**row, "start": 4, "blocks": [3]}])).shaping is None, "it is not in this step"
    tables.apply(build([], freed=[1]))
    assert tables.shapes.by_slot == {}


def test_a_slot_that_starts_anew_forgets_its_shape() -> None:
    tables = SlotTables(LIMITS)
    fresh = {"slot": 1, "start": 0, "ids": [1], "blocks": [2], "samples": True}
    assert tables.apply(build([{**fresh, "fresh": shaped_start(0)}])).shaping is not None
    assert tables.apply(build([{**fresh, "fresh": p.SlotStart(PARAMS, 1)}])).shaping is None


def test_only_the_last_stage_keeps_shapes() -> None:
    tables = SlotTables(LIMITS, samples=False)
    row = {"slot": 1, "start": 0, "ids": [1], "blocks": [2], "fresh": shaped_start(0), "samples": True}
    assert tables.apply(build([row])).shaping is None and tables.shapes.by_slot == {}


@pytest.mark.parametrize(
    "start",
    [
        p.SlotStart(SHAPED, 0),  # no prompt length
        p.SlotStart(SHAPED, 0, 7, (1,)),  # not the ids before its first position
        p.SlotStart(Sampling(shaping=Shaping(allowed_ids=(99,))), 0),
        p.SlotStart(Sampling(shaping=Shaping(logit_bias=((99, 1.0),))), 0),
        p.SlotStart(Sampling(shaping=Shaping(bad_words=((99,),))), 0),
        p.SlotStart(Sampling(), 0, min_tokens=1, stop_ids=(99,)),
    ],
)
def test_a_start_that_cannot_be_followed_changes_nothing(start: p.SlotStart) -> None:
    tables = SlotTables(LIMITS)
    started(tables)
    before = copy.deepcopy(tables.__dict__)
    with pytest.raises(BadMessage):
        tables.apply(build([{"slot": 3, "start": 0, "ids": [1, 2], "blocks": [7], "fresh": start}]))
    assert tables.shapes.by_slot == before["shapes"].by_slot == {} and not tables._known[3]


def test_who_follows_the_ids_does_not_see_one_twice() -> None:
    tables = SlotTables(LIMITS)
    row = {"slot": 1, "start": 0, "ids": [1, 2], "blocks": [2]}
    tables.apply(build([{**row, "fresh": shaped_start(0)}]))
    with pytest.raises(BadMessage):
        tables.apply(build([{"slot": 1, "start": 1, "ids": [2]}]))
    tables.apply(build([{"slot": 1, "start": 2, "ids": [1]}]))

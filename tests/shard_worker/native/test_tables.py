"""Slot tables in compiled code give what those in numpy give, or refuse in the same words."""

import gc
import tracemalloc
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.messages import BadMessage
from chassis.messages import pipeline as p
from chassis.messages.sampling import Sampling, Shaping
from shard_worker.executor import StepInputs
from shard_worker.inputs import SlotTables, TableLimits, Tables
from shard_worker.native import library
from shard_worker.native.tables import NativeTables

BLOCK = 4
LIMITS = TableLimits(
    slots_max=5, block_size_tokens=BLOCK, num_blocks=40, context_len_max=30, step_tokens_max=24, vocab_size=99
)
PLAIN = Sampling(0.5, 3, 0.75)
SHAPED = Sampling(1.0, (1 << 32) - 1, shaping=Shaping(frequency_penalty=0.5, bad_words=((5, 6),)))
COLUMNS = (
    "slots", "num_tokens", "starts", "output_index", "token_ids", "table_lens", "table", "freed_slots",
)  # fmt: skip


def compiled(limits: TableLimits = LIMITS, samples: bool = True, layouts: int = 4) -> NativeTables:
    found = library.native()
    if found is None:
        pytest.skip("there is no compiled code")
    return NativeTables(limits, found, samples, layouts)


@st.composite
def starts(draw: st.DrawFn, start: int) -> p.SlotStart:
    seed = draw(st.integers(0, (1 << 64) - 1))
    match draw(st.integers(0, 9)):
        case 0:
            return p.SlotStart(
                SHAPED, seed, 3, tuple([7] * draw(st.sampled_from((start, start, 1)))), 2, (8,)
            )
        case 1:
            return p.SlotStart(Sampling(logprobs=2), seed)
        case _:
            return p.SlotStart(PLAIN, seed)


@st.composite
def steps(draw: st.DrawFn) -> list[p.PackedStep]:
    """Most go on as they should; some name what is not there, or have a byte or a value too many."""
    at: dict[int, tuple[int, int]] = {}  # slot -> blocks, computed
    made = []
    for number in range(1, draw(st.integers(2, 9))):
        freed = [slot for slot in sorted(at) if draw(st.integers(0, 5)) == 0]
        for slot in freed:
            del at[slot]
        rows = []
        for slot in draw(st.lists(st.integers(0, 4), unique=True, max_size=5)):
            fresh = slot not in at or draw(st.integers(0, 9)) == 0
            blocks, computed = (0, draw(st.integers(0, 6))) if fresh else at[slot]
            begin = max(0, computed - draw(st.sampled_from((0, 0, 0, 1))))
            count = draw(st.integers(1, 6))
            added = max(0, -(-(begin + count) // BLOCK) - blocks) + draw(st.sampled_from((0, 0, 1)))
            at[slot] = (blocks + added, begin + count)
            row = {"slot": slot, "start": begin, "count": count, "added": added}
            if draw(st.integers(0, 3)) == 0:  # most of these follow a row that sampled
                row |= {"count": 1, "open": True}
                at[slot] = (blocks + added, begin + 1)
            rows.append(row | ({"fresh": draw(starts(begin))} if fresh else {}))
        made.append(_spoilt(draw, _packed(draw, number, rows, freed)))
    return made


def _packed(draw: st.DrawFn, number: int, rows: list[dict[str, Any]], freed: list[int]) -> p.PackedStep:
    def ids(count: int, end: int) -> list[int]:
        return draw(st.lists(st.integers(0, end - 1), min_size=count, max_size=count))

    return p.read_step(
        p.build_step(
            1,
            number,
            slots=[r["slot"] for r in rows],
            num_tokens=[r["count"] for r in rows],
            starts=[r["start"] for r in rows],
            flags=[(2 if "fresh" in r else 0) | (draw(st.integers(0, 3)) > 0) for r in rows],
            output_index=ids(len(rows), 1 << 32),
            token_ids=[i for r in rows for i in ([p.LAST_SAMPLED] if "open" in r else ids(r["count"], 99))],
            table_lens=[r["added"] for r in rows],
            table=ids(sum(r["added"] for r in rows), 40),
            fresh=[r["fresh"] for r in rows if "fresh" in r],
            freed_slots=freed,
        )
    )


def _spoilt(draw: st.DrawFn, step: p.PackedStep) -> p.PackedStep:
    if draw(st.integers(0, 3)):
        return step
    name = draw(st.sampled_from(COLUMNS))
    column = bytearray(getattr(step, name))
    values = np.frombuffer(column, np.uint32)
    match draw(st.integers(0, 4)):
        case 0:
            column = bytearray(column + bytes(draw(st.integers(1, 4))))
        case 1:
            column = column[: -draw(st.integers(1, 4))]
        case 2:
            return step._replace(flags=bytes(draw(st.integers(0, 5)) for _ in step.flags))
        case _ if len(values):
            place = draw(st.integers(0, len(values) - 1))
            odd = (0, 4, 5, 39, 40, 98, 99, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, int(values[0]))
            values[place] = draw(st.sampled_from(odd))
    changed: dict[str, Any] = {name: bytes(column)}
    return step._replace(**changed)


def outcome(tables: Tables, step: p.PackedStep) -> StepInputs | str:
    try:
        return tables.take(step)
    except BadMessage as error:
        return str(error)


def same(one: object, other: object) -> bool:
    """Columns with the same numbers of the same types."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if hasattr(one, "__dataclass_fields__"):
        names = [f.name for f in fields(one) if f.name != "compiled"]  # type: ignore[arg-type]
        return type(one) is type(other) and all(same(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if callable(one) and callable(other):  # what the sampling of open ids wants, once these are known
        return same(one(np.full(5, 6, np.uint32)), other(np.full(5, 6, np.uint32)))
    return one == other


@given(steps(), st.booleans(), st.sampled_from((True, True, False)))
@settings(deadline=None, derandomize=True, max_examples=250)
def test_the_same_as_in_numpy(history: list[p.PackedStep], samples: bool, whole: bool) -> None:
    limits = replace(LIMITS, whole=whole)
    reference, tables = SlotTables(limits, samples), compiled(limits, samples)
    for step in history:
        wanted, found = outcome(reference, step), outcome(tables, step)
        reference.check()
        assert same(wanted, found), (wanted, found)
        if isinstance(found, StepInputs):
            assert isinstance(found.compiled, library.Step)
            assert found.compiled.num_tokens == len(found.token_ids)
            assert found.compiled.kv_slots == library.address(found.kv_slots)
            assert found.compiled.table_stride == found.block_tables.shape[1]


def decode(number: int, position: int, rows: int = 4, **columns: Any) -> p.PackedStep:
    return p.read_step(
        p.build_step(
            1, number, slots=range(rows), num_tokens=[1] * rows, starts=[position] * rows, flags=[1] * rows,
            output_index=[position] * rows, token_ids=[position] * rows, table_lens=[0] * rows,
        )
    )._replace(**columns)  # fmt: skip


def started(tables: Tables, rows: int = 4) -> None:
    fresh = [p.SlotStart(PLAIN, slot) for slot in range(rows)]
    first = p.build_step(
        1, 1, slots=range(rows), num_tokens=[1] * rows, starts=[0] * rows, flags=[2] * rows,
        output_index=[0] * rows, token_ids=[0] * rows, table_lens=[7] * rows, table=list(range(7)) * rows,
        fresh=fresh,
    )  # fmt: skip
    tables.take(p.read_step(first))


def test_what_is_handed_out_stays_until_its_layout_comes_round() -> None:
    tables = compiled(layouts=3)
    started(tables)
    first = tables.take(decode(2, 1))
    refused = decode(3, 2, slots=bytes(16))
    for number in (3, 4):
        assert outcome(tables, refused) == "step: slot out of range or named twice"
        tables.take(decode(number, number - 1))
    assert first.positions.tolist() == [1] * 4, "what is refused takes no layout"
    tables.take(decode(5, 4))
    assert first.positions.tolist() == [4] * 4


def test_steps_take_no_memory() -> None:
    tables = compiled(TableLimits(64, 16, 4096, 2048, 512))
    rows = 32
    fresh = p.build_step(
        1, 1, slots=range(rows), num_tokens=[1] * rows, starts=[0] * rows, flags=[2] * rows,
        output_index=[0] * rows, token_ids=[0] * rows, table_lens=[128] * rows, table=[9] * 128 * rows,
        fresh=[p.SlotStart(PLAIN, 1)] * rows,
    )  # fmt: skip
    tables.take(p.read_step(fresh))
    history = [decode(n, n, rows) for n in range(1, 200)]
    for step in history[:10]:
        tables.take(step)
    gc.collect()
    tracemalloc.start()
    try:
        for step in history[10:]:
            tables.take(step)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2000 and most < 8000, "no more than the few numbers of a call"

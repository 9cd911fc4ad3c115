"""Columns and plans that kernels on a device read: against the rows written out."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_worker.attention.pages import (
    DecodeGroup,
    StepShape,
    decode_order,
    decode_shape,
    gather_plan,
    only_decodes,
    padded,
    page_columns,
    scrap_step,
    shape_plan,
    sizes_up_to,
)
from shard_worker.device.packing import Sizes, field_of, layout_of, pack, sizes_of
from shard_worker.executor import StepInputs
from shard_worker.probe import ProbeRow, probe_inputs

BLOCK = 4


def step(rows: Sequence[tuple[int, int]]) -> StepInputs:
    """Of (start, tokens), each in blocks of its own."""
    free = iter(np.random.default_rng(len(rows)).permutation(4000).tolist())
    made = []
    for start, count in rows:
        blocks = [next(free) for _ in range(-(-(start + count) // BLOCK))]
        made.append(ProbeRow(list(range(start, start + count)), start, blocks))
    return probe_inputs(made, BLOCK)


def test_columns_by_hand() -> None:
    inputs = step([(0, 3), (7, 1), (4, 9)])
    tables = inputs.block_tables
    columns = page_columns(inputs, BLOCK)
    assert columns.query_offsets.tolist() == [0, 3, 4, 13]
    assert columns.page_offsets.tolist() == [0, 1, 3, 7]
    assert columns.pages.tolist() == [tables[0, 0], *tables[1, :2], *tables[2, :4]]
    assert columns.last_page_lens.tolist() == [3, 4, 1]
    assert columns.context_lens.tolist() == [3, 8, 13]
    kinds = {columns.page_offsets.dtype, columns.pages.dtype, columns.last_page_lens.dtype}
    assert kinds == {np.dtype(np.int32)}


some_rows = st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 1, 2, 7])), min_size=1, max_size=9)
windows = st.one_of(st.none(), st.integers(1, 70))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(rows=some_rows)
def test_pages_hold_exactly_the_context(rows: list[tuple[int, int]]) -> None:
    inputs = step(rows)
    columns = page_columns(inputs, BLOCK)
    for i, (start, count) in enumerate(rows):
        begin, end = columns.page_offsets[i : i + 2]
        assert columns.pages[begin:end].tolist() == inputs.block_tables[i, : end - begin].tolist()
        assert (end - begin - 1) * BLOCK + columns.last_page_lens[i] == start + count
        assert 1 <= columns.last_page_lens[i] <= BLOCK


@settings(deadline=None, derandomize=True, max_examples=80)
@given(rows=some_rows, window=windows)
def test_every_token_is_planned_once_with_all_it_sees(
    rows: list[tuple[int, int]], window: int | None
) -> None:
    inputs = step(rows)
    order = decode_order(inputs)
    plan = gather_plan(inputs, order, BLOCK, window)
    assert sorted([c.row for c in plan.chunks] + order.tolist()) == list(range(len(rows)))
    for chunk in plan.chunks:
        start, count = rows[chunk.row]
        assert inputs.row_offsets[chunk.row : chunk.row + 2].tolist() == [chunk.first, chunk.end]
        first_seen = 0 if window is None else max(0, start - window + 1)
        assert chunk.first_block * BLOCK <= first_seen < chunk.first_block * BLOCK + BLOCK
        assert chunk.end_block == -(-(start + count) // BLOCK)
    covered = [range(g.first, g.end) for g in plan.groups]
    assert [i for r in covered for i in r] == list(range(len(order)))
    for group in plan.groups:
        widths = [_visible_blocks(rows[row], window) for row in order[group.first : group.end]]
        assert group.width == max(widths)
        assert group.width <= min(widths) * 3 // 2 + 4


def _visible_blocks(row: tuple[int, int], window: int | None) -> int:
    end = row[0] + 1
    first = 0 if window is None else max(0, end - window)
    return -(-end // BLOCK) - first // BLOCK


def test_one_long_row_does_not_widen_the_others() -> None:
    plan = gather_plan(inputs := step([(400, 1), (3, 1), (9, 1)]), decode_order(inputs), BLOCK)
    assert plan.groups == (DecodeGroup(0, 2, 3), DecodeGroup(2, 3, 101))


def test_a_shape_is_the_smallest_that_fits() -> None:
    rows, widths = (1, 2, 4, 8), (4, 16)
    assert decode_shape(step([(3, 1)]), BLOCK, rows, widths) == StepShape(1, 4)
    assert decode_shape(step([(3, 1)] * 3), BLOCK, rows, widths) == StepShape(4, 4)
    assert decode_shape(step([(3, 1), (16, 1)]), BLOCK, rows, widths) == StepShape(2, 16)
    assert decode_shape(step([(3, 1), (64, 1)]), BLOCK, rows, widths) is None
    assert decode_shape(step([(3, 1), (64, 1)]), BLOCK, rows, ()) == StepShape(2, 0)
    assert decode_shape(step([(3, 1)] * 9), BLOCK, rows, widths) is None
    assert decode_shape(step([(3, 1), (0, 2)]), BLOCK, rows, widths) is None
    assert sizes_up_to(5, rows) == (1, 2, 4, 8) and sizes_up_to(4, rows) == (1, 2, 4)
    assert sizes_up_to(100, rows) == rows


@pytest.mark.parametrize("shape", [StepShape(3, 0), StepShape(4, 5), StepShape(8, 16)])
def test_padding_adds_rows_in_the_scrap_block(shape: StepShape) -> None:
    inputs = step([(3, 1), (17, 1), (0, 1)])
    more = padded(inputs, shape, BLOCK, scrap_block=9000)
    assert only_decodes(more) and len(more.context_lens) == shape.rows
    for name in ("token_ids", "positions", "context_lens", "kv_slots"):
        column, given = getattr(more, name), getattr(inputs, name)
        assert column.dtype == given.dtype and column[:3].tolist() == given.tolist()
    assert more.block_tables[:3, :5].tolist() == inputs.block_tables.tolist()
    assert more.block_tables.shape == (shape.rows, shape.width or 5)
    assert more.kv_slots[3:].tolist() == [9000 * BLOCK] * (shape.rows - 3)
    assert more.context_lens[3:].tolist() == [1] * (shape.rows - 3)
    assert (more.block_tables[3:] == 9000).all()
    assert more.sample_rows.tolist() == inputs.sample_rows.tolist()
    columns = page_columns(more, BLOCK)
    assert columns.pages.tolist() == page_columns(inputs, BLOCK).pages.tolist() + [9000] * (shape.rows - 3)


@pytest.mark.parametrize("window", [None, 1, 4, 5, 6, 30])
def test_a_shape_has_room_for_every_window_within_it(window: int | None) -> None:
    shape = StepShape(1, 8)
    (group,) = shape_plan(shape, BLOCK, window).groups
    assert (group.first, group.end) == (0, 1)
    assert max(_visible_blocks((start, 1), window) for start in range(8 * BLOCK)) == group.width


def test_a_scrap_step_is_padding_alone() -> None:
    inputs = scrap_step(4, BLOCK, 77)
    assert only_decodes(inputs) and not len(inputs.sample_rows)
    assert page_columns(inputs, BLOCK).pages.tolist() == [77] * 4


# ---- one buffer ---------------------------------------------------------------------------------------


def test_a_packed_step_is_read_back() -> None:
    inputs = step([(3, 1), (17, 4), (0, 2), (5, 1)])
    order = decode_order(inputs)
    sizes = sizes_of(inputs, len(order), width=4, samples=True)
    assert sizes == Sizes(8, 4, 4, 2, 4)
    into = np.full(layout_of(sizes).num_bytes + 100, 0xAA, np.uint8)
    layout = pack(inputs, order, sizes, into)
    assert (into[layout.num_bytes :] == 0xAA).all()

    def read(name: str) -> list[object]:
        found: list[object] = field_of(into, getattr(layout, name)).tolist()
        return found

    for name in ("kv_slots", "token_ids", "positions", "context_lens", "temperature", "top_p", "top_k"):
        assert read(name) == getattr(inputs, name).tolist()
    assert read("row_starts") == [0, 1, 5, 7]
    assert read("decode_order") == [0, 3]
    assert read("block_tables") == inputs.block_tables[:, :4].tolist()
    assert read("sample_tokens") == [0, 4, 6, 7]
    assert all(0 <= float(str(u)) < 1 for u in read("uniforms"))


def test_fields_are_apart_and_places_before_sampling_do_not_move() -> None:
    few, many = layout_of(Sizes(5, 3, 2, 1, 0)), layout_of(Sizes(5, 3, 2, 1, 3))
    names = [f for f in many.__slots__ if not f.startswith("_")]
    fields = [getattr(many, name) for name in names]
    assert all(a.end <= b.offset for a, b in zip(fields, fields[1:], strict=False))
    assert all(f.offset % 16 == 0 for f in fields)
    for name in names[: names.index("uniforms") + 1]:
        assert getattr(few, name).offset == getattr(many, name).offset


def test_tables_may_stay_behind() -> None:
    inputs = step([(3, 1)])
    sizes = sizes_of(inputs, 1, width=0, samples=False)
    layout = pack(inputs, decode_order(inputs), sizes, np.zeros(layout_of(sizes).num_bytes, np.uint8))
    assert layout.block_tables.num_bytes == 0 and layout.num_bytes == layout.uniforms.offset

"""Every attention gives what a dense computation gives, for any mix of rows, whoever shares the step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_worker.attention.cpu import CpuAttention
from shard_worker.attention.gathered import GatheredAttention
from shard_worker.attention.interface import Attention, LayerKv
from shard_worker.attention.reference import ReferenceAttention
from shard_worker.executor import StepInputs
from shard_worker.native import library
from tests.contract.flashinfer_stand_in import FlashInferOnStandIn
from tests.contract.native_attention import NativeAttention

torch.set_num_threads(1)  # more would spin against whatever else runs here
HEADS, KV_HEADS, HEAD_DIM, BLOCK, NUM_BLOCKS = 6, 2, 8, 4, 64
TOLERANCE = 1e-5
IMPLEMENTATIONS: list[Attention] = [
    ReferenceAttention(),
    CpuAttention(),
    GatheredAttention(),
    FlashInferOnStandIn(),
]
if library.native() is not None:
    IMPLEMENTATIONS += [NativeAttention(threads=2), NativeAttention(threads=2, isa=b"portable")]
every = pytest.mark.parametrize("attention", IMPLEMENTATIONS, ids=lambda a: type(a).__name__)
Row = tuple[int, int, list[int]]  # start, tokens, table


def inputs_of(rows: Sequence[Row]) -> StepInputs:
    counts = np.array([count for _, count, _ in rows])
    positions = np.concatenate([np.arange(start, start + count) for start, count, _ in rows])
    # Past a row's length stands a block that no one may read.
    tables = np.full((len(rows), max(len(t) for *_, t in rows) + 1), 0, np.int32)
    for i, (*_, table) in enumerate(rows):
        tables[i, : len(table)] = table
    row_of = np.repeat(np.arange(len(rows)), counts)
    nothing = np.empty(0)
    return StepInputs(
        token_ids=np.zeros(len(positions), np.uint32),
        positions=positions.astype(np.int32),
        row_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=np.array([s + c for s, c, _ in rows], np.int32),
        kv_slots=tables[row_of, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        block_tables=tables,
        sample_rows=nothing.astype(np.int32),
        temperature=nothing.astype(np.float32),
        top_k=nothing.astype(np.int32),
        top_p=nothing.astype(np.float32),
        seeds=nothing.astype(np.uint64),
        output_index=nothing.astype(np.int32),
    )


class Case:
    """Rows with tables in no order, and a cache that holds noise wherever no row has written."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        seed: int,
        scattered: bool = True,
        *,
        scale: float = HEAD_DIM**-0.5,
        softcap: float = 0.0,
        window: int | None = None,
    ) -> None:
        self.scale, self.softcap, self.window = scale, softcap, window
        draw = torch.Generator().manual_seed(seed)
        blocks = np.arange(1, NUM_BLOCKS)
        if scattered:
            blocks = np.random.default_rng(seed).permutation(blocks)
        free = blocks.tolist()
        self.rows: list[Row] = []
        for start, count in shapes:
            needed = -(-(start + count) // BLOCK)
            self.rows.append((start, count, free[:needed]))
            free = free[needed:]
        self.keys = [torch.randn(KV_HEADS, s + c, HEAD_DIM, generator=draw) for s, c in shapes]
        self.values = [torch.randn(KV_HEADS, s + c, HEAD_DIM, generator=draw) for s, c in shapes]
        self.queries = [torch.randn(c, HEADS, HEAD_DIM, generator=draw) for _, c in shapes]
        self.noise = torch.randn(2, KV_HEADS, NUM_BLOCKS, BLOCK, HEAD_DIM, generator=draw) * 50

    def cache(self) -> LayerKv:
        keys, values = self.noise[0].clone(), self.noise[1].clone()
        keys[:, 0], values[:, 0] = torch.nan, torch.nan
        for (start, _, table), row_keys, row_values in zip(self.rows, self.keys, self.values, strict=True):
            slots = torch.tensor(
                [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(start)], dtype=torch.long
            )
            keys.view(KV_HEADS, -1, HEAD_DIM)[:, slots] = row_keys[:, :start]
            values.view(KV_HEADS, -1, HEAD_DIM)[:, slots] = row_values[:, :start]
        return LayerKv(keys, values)

    def attend(self, attention: Attention, kv: LayerKv, which: Sequence[int]) -> list[torch.Tensor]:
        rows = [self.rows[i] for i in which]
        new = [(self.rows[i][0], self.keys[i], self.values[i]) for i in which]
        out = attention.step(inputs_of(rows), BLOCK).attend(
            torch.cat([self.queries[i] for i in which]),
            torch.cat([keys[:, start:].transpose(0, 1) for start, keys, _ in new]),
            torch.cat([values[:, start:].transpose(0, 1) for start, _, values in new]),
            kv,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
        )
        return list(torch.split(out, [count for _, count, _ in rows]))

    def dense(self, i: int) -> torch.Tensor:
        start, count, _ = self.rows[i]
        out = torch.empty(count, HEADS, HEAD_DIM, dtype=torch.float64)
        for head in range(HEADS):
            keys = self.keys[i][head // (HEADS // KV_HEADS)].double()
            values = self.values[i][head // (HEADS // KV_HEADS)].double()
            scores = self.queries[i][:, head].double() @ keys.T * self.scale
            if self.softcap:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            scores += torch.full_like(scores, -torch.inf).triu(start + 1)
            if self.window is not None:
                scores += torch.full_like(scores, -torch.inf).tril(start - self.window)
            out[:, head] = scores.softmax(-1) @ values
        return out.view(count, -1)


MIXED = [(0, 1), (0, 7), (5, 1), (12, 9), (3, 1), (30, 1), (8, 4), (63, 1), (15, 1), (16, 1), (4, 8)]


@every
@pytest.mark.parametrize("scattered", [True, False])
def test_equals_dense_for_prefill_chunks_and_decodes_together(attention: Attention, scattered: bool) -> None:
    case = Case(MIXED, 1, scattered)
    for i, out in enumerate(case.attend(attention, case.cache(), range(len(MIXED)))):
        torch.testing.assert_close(out.double(), case.dense(i), atol=TOLERANCE, rtol=0)


OPTIONS = [
    {"window": 1},
    {"window": 5},
    {"window": 16},
    {"window": 40, "softcap": 2.0},
    {"softcap": 0.5, "scale": 1.0},
    {"scale": 0.11},
]


@every
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_dense_with_window_softcap_and_scale(attention: Attention, options: dict[str, Any]) -> None:
    case = Case(MIXED, 2, **options)
    for i, out in enumerate(case.attend(attention, case.cache(), range(len(MIXED)))):
        torch.testing.assert_close(out.double(), case.dense(i), atol=TOLERANCE, rtol=0)


@every
def test_a_row_does_not_depend_on_who_shares_the_step(attention: Attention) -> None:
    case = Case(MIXED, 2)
    together = case.attend(attention, case.cache(), range(len(MIXED)))
    for i, out in enumerate(together):
        alone = case.attend(attention, case.cache(), [i])[0]
        torch.testing.assert_close(out, alone, atol=TOLERANCE, rtol=0)


@every
def test_writes_its_slots_and_nothing_else(attention: Attention) -> None:
    case = Case(MIXED, 3)
    before, after = case.cache(), case.cache()
    case.attend(attention, after, range(len(MIXED)))
    expected = LayerKv(before.keys.clone(), before.values.clone())
    for (start, count, table), keys, values in zip(case.rows, case.keys, case.values, strict=True):
        for i in range(start, start + count):
            expected.keys[:, table[i // BLOCK], i % BLOCK] = keys[:, i]
            expected.values[:, table[i // BLOCK], i % BLOCK] = values[:, i]
    torch.testing.assert_close(after.keys, expected.keys, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(after.values, expected.values, atol=0, rtol=0, equal_nan=True)


@every
def test_a_prompt_in_chunks_is_the_prompt_at_once(attention: Attention) -> None:
    case = Case([(0, 23)], 4)
    whole = case.attend(attention, case.cache(), [0])[0]
    kv, table, parts = case.cache(), case.rows[0][2], []
    for start, end in [(0, 5), (5, 6), (6, 16), (16, 23)]:
        part = Case([(start, end - start)], 4)
        part.rows = [(start, end - start, table)]
        part.keys, part.values = [case.keys[0][:, :end]], [case.values[0][:, :end]]
        part.queries = [case.queries[0][start:end]]
        parts += part.attend(attention, kv, [0])
    torch.testing.assert_close(torch.cat(parts), whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS[1:], ids=lambda a: type(a).__name__)
def test_an_overflowed_value_does_not_reach_the_next_owner_of_its_block(attention: Attention) -> None:
    case = Case([(0, 4)], 5)
    kv = case.cache()
    case.values[0][0, 3, 0] = torch.inf
    case.attend(attention, kv, [0])
    heir = Case([(0, 1)], 6)
    heir.rows = [(0, 1, case.rows[0][2])]
    out = heir.attend(attention, kv, [0])[0]
    torch.testing.assert_close(out.double(), heir.dense(0), atol=TOLERANCE, rtol=0)


shapes = st.lists(st.tuples(st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 5, 9])), min_size=1, max_size=8)


@every
@settings(deadline=None, derandomize=True, max_examples=30)
@given(shapes=shapes, seed=st.integers(0, 1000), scattered=st.booleans())
def test_any_mix_of_rows_is_dense(
    attention: Attention, shapes: list[tuple[int, int]], seed: int, scattered: bool
) -> None:
    case = Case(shapes, seed, scattered)
    for i, out in enumerate(case.attend(attention, case.cache(), range(len(shapes)))):
        torch.testing.assert_close(out.double(), case.dense(i), atol=TOLERANCE, rtol=0)


@every
def test_bfloat16(attention: Attention) -> None:
    case = Case(MIXED, 7)
    kv = case.cache()
    kv = LayerKv(kv.keys.bfloat16(), kv.values.bfloat16())
    case.queries = [q.bfloat16() for q in case.queries]
    case.keys, case.values = [k.bfloat16() for k in case.keys], [v.bfloat16() for v in case.values]
    for i, out in enumerate(case.attend(attention, kv, range(len(MIXED)))):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), case.dense(i), atol=0.05, rtol=0.02)

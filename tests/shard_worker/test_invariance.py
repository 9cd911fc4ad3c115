"""The compiled stage gives a sequence the same bits whoever shares its steps, cut, resumed or cached at will.

It has no other mode: every sum runs in one order that depends on the model and the position alone. Compared
are the logits of every token, and so, through the layers after it, each hidden state and each key and value
that was stored.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from shard_worker.executor import StepInputs
from shard_worker.kv_tensors import allocate
from shard_worker.model.stage import NO_BYTES, StageMemory
from shard_worker.native import library
from shard_worker.native_stage import NativeStage
from tests.shard_worker import random_stage

BLOCK, NUM_BLOCKS, STEP_TOKENS, LEN = 8, 700, 400, 34
KINDS = {
    "float32": ("float32", "none", None),
    "bfloat16": ("bfloat16", "none", None),
    "int4": ("bfloat16", "int4", None),
    "portable bfloat16": ("bfloat16", "none", b"portable"),
}
every = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.skipif(library.native() is None, reason="no compiler here")


@pytest.fixture(scope="module", autouse=True)
def isa_again() -> Iterator[None]:
    yield
    if (compiled := library.native()) is not None:
        compiled.shoal_linear_use_isa(None)


@dataclass
class Tokens:
    """A sequence in the cache: what it holds, where, and how far it is computed."""

    ids: NDArray[np.uint32]
    table: list[int] = field(default_factory=list)
    computed: int = 0


class Pipeline:
    """Stages one after another over one pool of blocks; gives the logits of every token of a step."""

    def __init__(self, kind: str, ends: tuple[int, ...] = (3,), threads: int = 2) -> None:
        compiled = library.native()
        assert compiled is not None
        dtype, quantize, isa = KINDS[kind]
        assert not compiled.shoal_linear_use_isa(isa)  # until the next pipeline is made
        self.stages = []
        for weights in random_stage.split(random_stage.model(), ends):
            stage = NativeStage(weights, compiled, dtype=dtype, quantize=quantize, threads=threads)
            kv = allocate(weights, len(weights.layers), NUM_BLOCKS, BLOCK, stage.kv_form)
            stage.attach(StageMemory(kv, BLOCK, STEP_TOKENS))
            self.stages.append(stage)
        self.free = np.random.default_rng(5).permutation(NUM_BLOCKS).tolist()

    def step(self, rows: Sequence[tuple[Tokens, int]]) -> list[NDArray[np.uint32]]:
        """For each (sequence, number of its next tokens): the bits of their logits, [tokens, vocabulary]."""
        for sequence, count in rows:
            while len(sequence.table) * BLOCK < sequence.computed + count:
                sequence.table.append(self.free.pop())
        inputs = step_inputs(rows)
        carried = NO_BYTES
        for stage in self.stages:
            carried = stage.run(inputs, carried)
        logits = self.stages[-1].logits(np.arange(len(inputs.token_ids))).numpy().view(np.uint32).copy()
        for sequence, count in rows:
            sequence.computed += count
        return np.split(logits, inputs.row_offsets[1:-1])

    def run(self, sequence: Tokens, counts: Sequence[int]) -> NDArray[np.uint32]:
        return np.concatenate([self.step([(sequence, count)])[0] for count in counts])

    def forget(self, sequence: Tokens) -> None:
        self.free = sequence.table[::-1] + self.free
        sequence.table, sequence.computed = [], 0


def step_inputs(rows: Sequence[tuple[Tokens, int]]) -> StepInputs:
    counts = np.array([count for _, count in rows])
    starts = np.array([sequence.computed for sequence, _ in rows])
    tables = np.zeros((len(rows), max(len(sequence.table) for sequence, _ in rows)), np.int32)
    for i, (sequence, _) in enumerate(rows):
        tables[i, : len(sequence.table)] = sequence.table
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    row_of = np.repeat(np.arange(len(rows)), counts)
    nothing = np.empty(0)
    return StepInputs(
        token_ids=np.concatenate([s.ids[s.computed : s.computed + count] for s, count in rows]),
        positions=positions.astype(np.int32),
        row_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=(starts + counts).astype(np.int32),
        kv_slots=tables[row_of, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        block_tables=tables,
        sample_rows=nothing.astype(np.int32),
        temperature=nothing.astype(np.float32),
        top_k=nothing.astype(np.int32),
        top_p=nothing.astype(np.float32),
        seeds=nothing.astype(np.uint64),
        output_index=nothing.astype(np.int32),
    )


def ids(seed: int, count: int = LEN) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, random_stage.VOCAB, count).astype(np.uint32)


@cache
def alone(kind: str, count: int = LEN) -> NDArray[np.uint32]:
    """Token by token, by one thread, in one stage, with nobody beside it."""
    return Pipeline(kind, threads=1).run(Tokens(ids(1, count)), [1] * count)


def cut(count: int, chunk: int) -> list[int]:
    return [min(chunk, count - at) for at in range(0, count, chunk)]


@every
def test_any_chunks(kind: str) -> None:
    pipeline = Pipeline(kind)
    for chunk in range(2, LEN + 1):
        sequence = Tokens(ids(1))
        np.testing.assert_array_equal(pipeline.run(sequence, cut(LEN, chunk)), alone(kind))
        pipeline.forget(sequence)


@every
def test_chunks_that_are_shared_out_by_rows(kind: str) -> None:
    """Steps of many tokens take another way through a stage."""
    pipeline = Pipeline(kind)
    for chunk in (64, 127, 128, 129, 200, 300):
        sequence = Tokens(ids(1, 300))
        np.testing.assert_array_equal(pipeline.run(sequence, cut(300, chunk)), alone(kind, 300))
        pipeline.forget(sequence)


@every
@pytest.mark.parametrize("threads", [2, 3])
def test_a_long_context_that_is_shared_out(kind: str, threads: int) -> None:
    """Where there are fewer heads than threads would like, each takes pieces of the context."""
    pipeline = Pipeline(kind, threads=threads)
    sequence, other = Tokens(ids(1, 300)), Tokens(ids(2, 300))
    pipeline.run(other, [270])
    got = [pipeline.run(sequence, [250])]
    got += [pipeline.step([(sequence, 1)])[0] for _ in range(30)]
    got += [pipeline.step([(other, 1), (sequence, 1)])[1] for _ in range(20)]
    np.testing.assert_array_equal(np.concatenate(got), alone(kind, 300))


@every
@pytest.mark.parametrize("block", [1, 40, 1000])
def test_pieces_of_contexts_in_blocks_of_any_size(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of positions do not cross blocks, pieces do; the last block is hardly begun now and then."""
    monkeypatch.setattr(sys.modules[__name__], "BLOCK", block)
    by_one = Pipeline(kind, threads=1).run(Tokens(ids(1, 450)), [1] * 450)
    counts = [395, *[1] * 10, 30, *[1] * 15]
    np.testing.assert_array_equal(Pipeline(kind).run(Tokens(ids(1, 450)), counts), by_one)


def neighbours(count: int, seed: int) -> Iterator[tuple[Tokens, int]]:
    """Rows in the middle of their lives: decodes and chunks."""
    draw = np.random.default_rng(seed)
    for i in range(count):
        yield Tokens(ids(100 + i, 60)), int(draw.choice([1, 1, 1, 2, 7]))


@every
@pytest.mark.parametrize("batch", [2, 3, 7, 16, 33, 64])
def test_any_batch(kind: str, batch: int) -> None:
    pipeline = Pipeline(kind)
    sequence, others = Tokens(ids(1)), [row for row, _ in neighbours(batch - 1, 0)]
    got, turn = [], 0
    while sequence.computed < LEN:
        count = min([1, 1, 5, 1, 9][turn % 5], LEN - sequence.computed)
        beside = [(other, n) for other, (_, n) in zip(others, neighbours(batch - 1, turn), strict=True)]
        beside = [(other, n) for other, n in beside if other.computed + n <= 60]
        place = turn % (len(beside) + 1)
        rows = [*beside[:place], (sequence, count), *beside[place:]]
        got.append(pipeline.step(rows)[place])
        turn += 1
    np.testing.assert_array_equal(np.concatenate(got), alone(kind))


@every
@pytest.mark.parametrize("ends", [(3,), (1, 3), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_stages_and_threads(kind: str, ends: tuple[int, ...], threads: int) -> None:
    pipeline = Pipeline(kind, ends, threads)
    np.testing.assert_array_equal(pipeline.run(Tokens(ids(1)), cut(LEN, 13)), alone(kind))


@every
def test_a_hit_at_every_block(kind: str) -> None:
    """The first blocks are those that another sequence filled, in chunks of its own."""
    pipeline = Pipeline(kind)
    for block in range(1, LEN // BLOCK + 1):
        hit = block * BLOCK
        other = Tokens(np.concatenate([ids(1)[:hit], ids(2)]))
        pipeline.run(other, cut(len(other.ids), 3 + block))
        sequence = Tokens(ids(1), other.table[:block], hit)
        np.testing.assert_array_equal(pipeline.run(sequence, cut(LEN - hit, 4)), alone(kind)[hit:])


@every
def test_a_resume_at_every_token(kind: str) -> None:
    """The cache is lost; what was there is computed again at once, elsewhere, and then goes on."""
    pipeline = Pipeline(kind, threads=1)
    for token in range(1, LEN):
        sequence = Tokens(ids(1))
        pipeline.run(sequence, cut(token, 1 + token // 4))
        pipeline.forget(sequence)
        got = pipeline.run(sequence, [token, 1, *cut(LEN - token - 1, 7)])
        np.testing.assert_array_equal(got, alone(kind))
        pipeline.forget(sequence)


def test_the_bits_say_something() -> None:
    """Other ids, other types and other weights give others; else all of the above would prove nothing."""
    kinds = [alone(kind).view(np.float32) for kind in KINDS]
    assert all(np.isfinite(logits).all() and logits.std() > 0.1 for logits in kinds)
    assert not any(np.array_equal(a, b) for i, a in enumerate(kinds) for b in kinds[:i])
    changed = ids(1).copy()
    changed[0] += 1
    other = Pipeline("float32").run(Tokens(changed), [LEN]).view(np.float32)
    assert (other != kinds[0]).any(axis=1).all()

"""Sequences that begin with the same blocks pass over them together; each has the bits that it has alone."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shard_worker.attention.interface import LayerKv
from shard_worker.native import library
from tests.contract.native_attention import NativeAttention, NativeStep
from tests.contract.test_attention import BLOCK, HEAD_DIM, HEADS, KV_HEADS, inputs_of
from tests.shard_worker import test_invariance
from tests.shard_worker.test_invariance import Pipeline, Tokens, cut, every, ids

pytestmark = pytest.mark.skipif(library.native() is None, reason="no compiler here")
STEPS = 6
PATTERNS = [(8, 2, 0), (16, 1, 1), (16, 3, 2), (40, 2, 3), (1, 2, 4)]


@pytest.fixture(scope="module", autouse=True)
def isa_again() -> Iterator[None]:
    yield
    if (compiled := library.native()) is not None:
        compiled.shoal_linear_use_isa(None)


def family(draw: np.random.Generator, pipeline: Pipeline, count: int, longest: int) -> list[Tokens]:
    """Prompts of which most begin with an earlier one's blocks, computed up to the last STEPS tokens."""
    made: list[Tokens] = []
    block = test_invariance.BLOCK
    for number in range(count):
        own = ids(1000 + number, int(draw.integers(STEPS + 1, longest)))
        sequence = Tokens(own)
        if made and draw.random() < 0.8:
            parent = made[draw.integers(len(made))]
            hit = int(draw.integers(0, parent.computed // block + 1))
            sequence = Tokens(
                np.concatenate([parent.ids[: hit * block], own]), parent.table[:hit], hit * block
            )
        pipeline.run(sequence, cut(len(sequence.ids) - STEPS - sequence.computed, int(draw.integers(9, 90))))
        made.append(sequence)
    return made


def alone(kind: str, sequence: Tokens) -> NDArray[np.uint32]:
    """The last STEPS tokens' logits, token by token, with nobody beside it."""
    before = len(sequence.ids) - STEPS
    return Pipeline(kind, threads=1).run(Tokens(sequence.ids), [*cut(before, 400), *[1] * STEPS])[before:]


@every
@pytest.mark.parametrize(
    ("block", "threads", "seed"), [(8, 2, 0), (16, 1, 1), (16, 3, 2), (40, 2, 3), (1, 2, 4)]
)
def test_any_pattern_of_prefixes(
    kind: str, block: int, threads: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some share three blocks and others seven, or all; decodes, and now and then a chunk among them."""
    monkeypatch.setattr(test_invariance, "BLOCK", block)
    monkeypatch.setattr(test_invariance, "NUM_BLOCKS", 5000 // block + 40)
    draw = np.random.default_rng(seed)
    expected_of = Pipeline(kind, threads=threads)
    sequences = family(draw, expected_of, 13, 300)
    got: list[list[NDArray[np.uint32]]] = [[] for _ in sequences]
    while left := [i for i, sequence in enumerate(sequences) if sequence.computed < len(sequence.ids)]:
        chosen = draw.permutation([i for i in left if draw.random() < 0.8] or left)
        rows = [(sequences[i], 1) for i in chosen]
        if draw.random() < 0.3:
            rows[0] = (rows[0][0], len(rows[0][0].ids) - rows[0][0].computed)
        for i, logits in zip(chosen, expected_of.step(rows), strict=True):
            got[i].append(logits)
    for sequence, parts in zip(sequences, got, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), alone(kind, sequence))


@every
def test_one_prefix_longer_than_a_piece(kind: str) -> None:
    """As where many ask about one document; tokens whose logits alone are wanted end in a group too."""
    pipeline = Pipeline(kind)
    document = Tokens(ids(1, 395 + STEPS))
    pipeline.run(document, [395])
    blocks = 392 // test_invariance.BLOCK
    asking = [document]
    for number in range(15):
        own = np.concatenate([document.ids[:392], ids(50 + number, 3 + number % 5 + STEPS)])
        asking.append(Tokens(own, document.table[:blocks], 392))
    got = [pipeline.step([(one, len(one.ids) - STEPS - one.computed) for one in asking[1:]])]
    got = [pipeline.step([(one, 1) for one in asking]) for _ in range(STEPS)]
    for i in (0, 1, 7, 15):
        np.testing.assert_array_equal(np.concatenate([step[i] for step in got]), alone(kind, asking[i]))


def units(tables: list[list[int]], start: int, threads: int = 1) -> int:
    """Of a step of decodes, each at `start`."""
    step = NativeStep(NativeAttention(threads), inputs_of([(start, 1, table) for table in tables]), BLOCK)
    q, k, v = (torch.randn(len(tables), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    blocks = 1 + max(max(table) for table in tables)
    kv = LayerKv(*(torch.zeros(KV_HEADS, blocks, BLOCK, HEAD_DIM) for _ in range(2)))
    step.attend(q, k, v, kv, scale=1.0)
    return step.units


def test_who_shares_is_a_unit_together() -> None:
    """One a head for sixteen sequences, rather than one a sequence; a tile is four blocks here."""
    shared, count = list(range(1, 9)), 16

    def of(common: int) -> list[list[int]]:
        return [[*shared[:common], *range(10 + 9 * i, 19 + 9 * i - common)] for i in range(count)]

    start = 9 * BLOCK - 1
    assert units(of(0), start) == count
    assert units(of(3), start) == count
    assert units(of(4), start) == units(of(8), start) == KV_HEADS
    assert units(of(8)[:8] + of(0)[8:], start) == KV_HEADS + 8
    assert units(of(8), start, threads=4) == 2 * KV_HEADS  # no thread idles


def test_sharers_need_not_stand_side_by_side() -> None:
    one, other = list(range(1, 5)), list(range(5, 9))
    tables = [[*(one if i % 2 else other), 10 + i] for i in range(16)]
    assert units(tables, 5 * BLOCK - 1) == 2 * KV_HEADS

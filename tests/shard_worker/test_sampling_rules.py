"""Every sampling parameter against one plain reference in double precision, in the frozen order.

A row's state comes the way it does in service: a slot that starts, steps that bring ids, columns.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.messages.pipeline import SlotStart
from chassis.messages.sampling import Sampling, Shaping
from shard_worker import sampler
from shard_worker.executor import StepInputs
from shard_worker.sampler import SamplingColumns
from shard_worker.shaping import SlotShape, columns
from shard_worker.uniforms import uniforms

torch.set_num_threads(1)
VOCAB = 12
LOGITS = [0.5, 2.0, -1.0, 3.0, 2.5, -1.5, 2.5, 1.0, 0.0, -0.5, 1.5, 0.25]


class Row:
    """One request at one output index."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int] = (1, 2, 1),
        output: Sequence[int] = (),
        min_tokens: int = 0,
        stop_ids: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        self.sampling, self.prompt, self.output = sampling, tuple(prompt), tuple(output)
        self.min_tokens, self.stop_ids, self.seed = min_tokens, stop_ids, seed

    @property
    def shaping(self) -> Shaping:
        return self.sampling.shaping or Shaping()

    def shape(self, fresh_at: int = 0, vocab: int = VOCAB) -> SlotShape:
        """As if the slot had started at this position, and the rest had come by in steps."""
        ids = (*self.prompt, *self.output)
        follows = self.shaping.follows
        start = SlotStart(
            self.sampling,
            self.seed,
            prompt_len=len(self.prompt) if follows else 0,
            before=ids[:fresh_at] if follows else (),
            min_tokens=self.min_tokens,
            stop_ids=self.stop_ids,
        )
        shape = SlotShape(start, vocab)
        for i in range(fresh_at, len(ids), 2):
            shape.follow(ids[i : i + 2])
        return shape

    @property
    def shaped(self) -> bool:
        return self.sampling.shaping is not None or self.sampling.logprobs is not None or self.min_tokens > 0


def columns_for(rows: Sequence[Row], fresh_at: int = 0, vocab: int = VOCAB) -> SamplingColumns:
    index = np.array([len(row.output) for row in rows], np.int32)
    shapes = [(i, row.shape(fresh_at, vocab)) for i, row in enumerate(rows) if row.shaped]
    return SamplingColumns(
        np.array([row.sampling.temperature for row in rows], np.float32),
        np.array([row.sampling.top_k for row in rows], np.int32),
        np.array([row.sampling.top_p for row in rows], np.float32),
        np.array([row.seed for row in rows], np.uint64),
        index,
        columns(shapes, index) if shapes else None,
    )


def inputs_for(rows: Sequence[Row], vocab: int = VOCAB) -> StepInputs:
    c, n = columns_for(rows, vocab=vocab), len(rows)
    none = np.zeros(n, np.int32)
    return StepInputs(
        token_ids=np.zeros(n, np.uint32),
        positions=none,
        row_offsets=np.arange(n + 1, dtype=np.int32),
        context_lens=none + 1,
        kv_slots=np.zeros(n, np.int64),
        block_tables=np.zeros((n, 1), np.int32),
        sample_rows=np.arange(n, dtype=np.int32),
        temperature=c.temperature,
        top_k=c.top_k,
        top_p=c.top_p,
        seeds=c.seeds,
        output_index=c.output_index,
        shaping=c.shaping,
    )


# ---- the reference: one token at a time, in the module's words ---------------------------------------


def plain_bans(row: Row, vocab: int) -> set[int]:
    bans = set()
    for word in row.shaping.bad_words:
        before = word[:-1]
        if len(row.output) >= len(before) and row.output[len(row.output) - len(before) :] == before:
            bans.add(word[-1])
    if len(row.output) < row.min_tokens:
        bans |= set(row.stop_ids)
    allowed = set(row.shaping.allowed_ids or range(vocab))
    return bans if allowed - bans else set()


def plain_logits(logits: Sequence[float], row: Row) -> list[float]:
    s, x = row.shaping, list(logits)
    for token, bias in s.logit_bias:
        x[token] += bias
    for token in range(len(x)):
        if s.allowed_ids and token not in s.allowed_ids:
            x[token] = -math.inf
    for token in plain_bans(row, len(x)):
        x[token] = -math.inf
    for token in set(row.prompt) | set(row.output):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(row.output):
        x[token] -= s.frequency_penalty * row.output.count(token) + s.presence_penalty
    return x


def normal(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total for value in values]


def plain_nucleus(p: list[float], keys: list[float], mass: float) -> list[float]:
    """The smallest keys first, until their tokens reach the mass; equals stay together."""
    reached, least = 0.0, 0.0
    for key, value in sorted((k, v) for k, v in zip(keys, p, strict=True) if v > 0):
        reached, least = reached + value, key
        if reached >= mass:
            break
    return normal([v if v > 0 and k <= least else 0.0 for k, v in zip(keys, p, strict=True)])


def plain_probabilities(logits: Sequence[float], row: Row) -> list[float]:
    s, x = row.sampling, plain_logits(logits, row)
    top = max(x)
    if s.temperature == 0:
        first = x.index(top)
        return [1.0 if i == first else 0.0 for i in range(len(x))]
    x = [(value - top) / s.temperature for value in x]
    if 0 < s.top_k < len(x):
        least = sorted(x, reverse=True)[s.top_k - 1]
        x = [value if value >= least else -math.inf for value in x]
    p = normal([math.exp(value) for value in x])
    if s.top_p < 1:
        p = plain_nucleus(p, [-value for value in p], s.top_p)
    if row.shaping.min_p > 0:
        p = normal([value if value >= row.shaping.min_p * max(p) else 0.0 for value in p])
    if row.shaping.typical_p < 1:
        entropy = -math.fsum(value * math.log(value) for value in p if value > 0)
        keys = [abs(-math.log(value) - entropy) if value > 0 else math.inf for value in p]
        p = plain_nucleus(p, keys, row.shaping.typical_p)
    return p


def plain_draw(p: list[float], u: float) -> int:
    mass = 0.0
    for token, value in enumerate(p):
        mass += value
        if mass > u:
            return token
    return max(i for i, value in enumerate(p) if value > 0)


def plain_token(logits: Sequence[float], row: Row) -> int:
    u = uniforms(np.array([row.seed], np.uint64), np.array([len(row.output)], np.int32))[0]
    return plain_draw(plain_probabilities(logits, row), float(u))


def support(row: Row, logits: Sequence[float] = LOGITS) -> set[int]:
    return {i for i, value in enumerate(plain_probabilities(logits, row)) if value > 0}


def drawn(rows: Sequence[Row], logits: Any = None, fresh_at: int = 0) -> list[int]:
    given = torch.tensor([LOGITS] * len(rows)) if logits is None else logits
    return [int(token) for token in sampler.sample(given, columns_for(rows, fresh_at, given.shape[1]))]


# ---- the frozen order -------------------------------------------------------------------------------

ORDER = [
    # bias before the penalty: a logit that the bias makes negative is multiplied, not divided
    (
        Row(
            Sampling(0.0, shaping=Shaping(logit_bias=((3, -3.5),), repetition_penalty=2.0)), prompt=[3, 4, 6]
        ),
        1,
    ),
    # bias does not bring back what is not allowed
    (Row(Sampling(0.0, shaping=Shaping(logit_bias=((3, 50.0),), allowed_ids=(1, 7)))), 1),
    # penalties before temperature and filters: the second best is now the best
    (Row(Sampling(0.0, shaping=Shaping(presence_penalty=1.0)), output=[3]), 4),
    (Row(Sampling(1.0, 1, shaping=Shaping(frequency_penalty=0.3)), output=[3, 3]), 4),
    # a ban before min_tokens is over, and none after
    (Row(Sampling(0.0), min_tokens=2, stop_ids=(3,), output=[1]), 4),
    (Row(Sampling(0.0), min_tokens=2, stop_ids=(3,), output=[1, 1]), 3),
    # bad words end where their beginning stands, in the output alone
    (Row(Sampling(0.0, shaping=Shaping(bad_words=((8, 3),))), output=[8]), 4),
    (Row(Sampling(0.0, shaping=Shaping(bad_words=((8, 3),))), prompt=[8], output=[]), 3),
    (Row(Sampling(0.0, shaping=Shaping(bad_words=((3,),)))), 4),
    # bans that leave nothing are void
    (Row(Sampling(0.0, shaping=Shaping(allowed_ids=(3,), bad_words=((3,),)))), 3),
    (Row(Sampling(0.0, shaping=Shaping(allowed_ids=(3,))), min_tokens=5, stop_ids=(3,)), 3),
    # ties: the lowest id
    (Row(Sampling(0.0, shaping=Shaping(bad_words=((3,),)))), 4),
    (Row(Sampling(0.0, shaping=Shaping(logit_bias=((0, 2.5),)))), 0),
]


@pytest.mark.parametrize(("row", "token"), ORDER, ids=range(len(ORDER)))
def test_golden_order_of_logits(row: Row, token: int) -> None:
    assert token in support(row)
    assert drawn([row]) == [plain_token(LOGITS, row)]


FILTERS = [
    (Sampling(1.0, 4, 1.0, Shaping(min_p=0.5)), {3, 4, 6}),
    (Sampling(1.0, 0, 1.0, Shaping(min_p=0.35)), {1, 3, 4, 6}),
    (Sampling(0.5, 0, 1.0, Shaping(min_p=0.35)), {3, 4, 6}),  # temperature first
    (Sampling(1.0, 0, 0.6, Shaping(min_p=0.1)), {3, 4, 6}),  # after top-p
    (Sampling(1.0, 0, 1.0, Shaping(typical_p=0.3)), {4, 6}),  # the best is not typical
    (Sampling(1.0, 0, 1.0, Shaping(typical_p=0.5)), {1, 3, 4, 6}),
    (Sampling(1.0, 0, 1.0, Shaping(typical_p=0.5, min_p=0.5)), {4, 6}),  # of what min-p left
    (Sampling(1.0, 0, 1.0, Shaping(typical_p=0.01)), {4, 6}),  # equals stay together
    (Sampling(1.0, 3, 1.0, Shaping(repetition_penalty=1.5)), {3, 4, 6}),
]


@pytest.mark.parametrize(("sampling", "kept"), FILTERS, ids=range(len(FILTERS)))
def test_golden_order_of_filters(sampling: Sampling, kept: set[int]) -> None:
    assert support(Row(sampling)) == kept
    found = set(drawn([Row(sampling, seed=seed) for seed in range(400)]))
    assert found == kept


GOLDEN_ROWS = [
    Row(
        Sampling(
            0.9,
            8,
            0.95,
            Shaping(
                min_p=0.05,
                typical_p=0.9,
                repetition_penalty=1.2,
                presence_penalty=0.3,
                frequency_penalty=0.2,
                logit_bias=((0, 1.0), (5, 2.0)),
                allowed_ids=(0, 1, 3, 4, 5, 6, 7, 10),
                bad_words=((6,), (4, 10)),
            ),
        ),
        output=[4] * (i % 4),
        min_tokens=2,
        stop_ids=(3,),
        seed=i,
    )
    for i in range(24)
]
GOLDEN_TOKENS = [1, 7, 1, 3]  # of the first four; the rest by the reference


def test_golden_tokens_of_everything_at_once() -> None:
    found = drawn(GOLDEN_ROWS)
    assert found == [plain_token(LOGITS, row) for row in GOLDEN_ROWS]
    assert found[:4] == GOLDEN_TOKENS


# ---- against the reference --------------------------------------------------------------------------

tokens = st.integers(0, VOCAB - 1)
shapings = st.builds(
    Shaping,
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    typical_p=st.sampled_from([1.0, 0.7, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.75, 2.0]), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    allowed_ids=st.lists(tokens, max_size=5).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
any_rows = st.builds(
    Row,
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
        top_k=st.sampled_from([0, 2, 5]),
        top_p=st.sampled_from([1.0, 0.8, 0.3]),
        shaping=st.none() | shapings,
    ),
    prompt=st.lists(tokens, min_size=1, max_size=6),
    output=st.lists(tokens, max_size=8),
    min_tokens=st.sampled_from([0, 3]),
    stop_ids=st.lists(tokens, max_size=3).map(tuple),
    seed=st.integers(0, (1 << 64) - 1),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(any_rows, min_size=1, max_size=6), st.integers(0, 3))
def test_any_rows_are_drawn_as_the_reference_says(rows: list[Row], fresh: int) -> None:
    logits = torch.tensor([[value + 0.01 * i for value in LOGITS] for i in range(len(rows))])
    together = sampler.sample(logits.clone(), columns_for(rows)).tolist()
    for i, row in enumerate(rows):
        assert plain_probabilities(logits[i].tolist(), row)[together[i]] > 0
    assert together == [plain_token(logits[i].tolist(), row) for i, row in enumerate(rows)]
    fresh_at = min(fresh, *(len(row.prompt) + len(row.output) for row in rows))
    assert sampler.sample(logits.clone(), columns_for(rows, fresh_at)).tolist() == together
    for i, row in enumerate(rows):
        alone = sampler.sample(logits[i : i + 1].clone(), columns_for([row])).tolist()
        assert alone == [together[i]]


DISTRIBUTIONS = [
    Sampling(1.0, 0, 1.0, Shaping(min_p=0.08)),
    Sampling(1.3, 0, 1.0, Shaping(typical_p=0.8)),
    Sampling(0.8, 20, 0.95, Shaping(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3)),
    Sampling(1.0, 0, 0.9, Shaping(logit_bias=((2, 2.0), (9, -1.0)), bad_words=((4,), (3, 6)))),
    Sampling(1.1, 0, 1.0, Shaping(allowed_ids=tuple(range(0, 40, 3)))),
]


@pytest.mark.parametrize("sampling", DISTRIBUTIONS, ids=range(len(DISTRIBUTIONS)))
def test_distributions_are_the_reference(sampling: Sampling) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(4)) * 2
    draws, prompt, output = 3_000, (5, 6, 7, 30), (3, 5, 5, 3)
    rows = [Row(sampling, prompt, output, seed=seed) for seed in range(draws)]
    plain = np.array(plain_probabilities(logits.tolist(), rows[0]))
    found = sampler.sample(logits.expand(draws, -1).clone(), columns_for(rows, vocab=40))
    counts = np.bincount(found, minlength=40)
    assert counts[plain == 0].sum() == 0
    kept = plain > 0
    chi_square = ((counts[kept] - draws * plain[kept]) ** 2 / (draws * plain[kept])).sum()
    degrees = kept.sum() - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


# ---- log probabilities ------------------------------------------------------------------------------


def test_log_probabilities_are_of_the_models_own_logits() -> None:
    plain = [value - math.log(math.fsum(math.exp(v) for v in LOGITS)) for value in LOGITS]
    rows = [
        Row(Sampling(0.0)),
        Row(Sampling(0.7, 2, shaping=Shaping(bad_words=((3,),)), logprobs=5), seed=3),
        Row(Sampling(0.0, logprobs=0)),
        Row(Sampling(0.0, shaping=Shaping(logit_bias=((5, 90.0),)), logprobs=20)),
    ]
    answer = sampler.output(torch.tensor([LOGITS] * 4), inputs_for(rows))
    found = answer.logprobs
    assert found is not None and found.places.tolist() == [1, 2, 3]
    chosen = answer.token_ids.tolist()
    assert chosen[0] == chosen[2] == 3 and chosen[1] in (4, 6) and chosen[3] == 5
    assert found.logprobs.tolist() == pytest.approx([plain[i] for i in chosen[1:]], abs=1e-6)
    assert found.ranks.tolist() == [2, 1, 12]  # equals share the better rank
    assert found.top_lens.tolist() == [5, 0, 12]
    ranking = sorted(range(12), key=lambda i: (-LOGITS[i], i))
    assert found.top_ids.tolist() == ranking[:5] + ranking
    assert found.top_logprobs.tolist() == pytest.approx([plain[i] for i in ranking[:5] + ranking], abs=1e-6)


def test_log_probabilities_change_no_token() -> None:
    rows = [Row(Sampling(1.2), seed=seed) for seed in range(20)]
    asking = [Row(replace(row.sampling, logprobs=3), seed=row.seed) for row in rows]
    logits = torch.tensor([LOGITS] * 20)
    assert sampler.output(logits, inputs_for(asking)).token_ids.tolist() == drawn(rows)


# ---- who uses none pays nothing ---------------------------------------------------------------------


def test_rows_that_use_none_pass_none_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a plain row was shaped")

    plain = [Row(Sampling(1.0, 3, 0.9), seed=1), Row(Sampling(0.0))]
    inputs = inputs_for(plain)
    assert inputs.shaping is None
    for name in ("_bias", "_mask", "_penalise", "keep_shapes", "logprobs", "_index"):
        monkeypatch.setattr(sampler, name, never)
    logits = torch.tensor([LOGITS] * 2)
    answer = sampler.output(logits, inputs)
    assert len(answer.token_ids) == 2 and answer.logprobs is None
    assert logits.tolist() == [LOGITS] * 2


def test_a_row_that_only_uses_min_p_leaves_logits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("logits were changed")

    for name in ("_bias", "_mask", "_penalise"):
        monkeypatch.setattr(sampler, name, never)
    assert drawn([Row(Sampling(1.0, shaping=Shaping(min_p=0.9)))]) == [3]


def test_a_repetition_penalty_next_to_nothing_leaves_a_distribution() -> None:
    shaping = Shaping(repetition_penalty=1e-45)
    for top_p in (0.9, 1.0):
        row = Row(Sampling(1.0, top_p=top_p, shaping=shaping), prompt=[3, 4])
        assert drawn([row])[0] in (3, 4)


def test_logits_of_a_native_engine_are_not_copied() -> None:
    given = np.array([LOGITS] * 2, np.float32)
    rows = [Row(Sampling(0.0, shaping=Shaping(bad_words=((3,),)))), Row(Sampling(0.0))]
    assert sampler.sample(given, columns_for(rows)).tolist() == [4, 3]
    assert np.isneginf(given[0, 3]) and given[1, 3] == 3.0, "changed in place, and only where it must be"
    assert sampler.sample(given, columns_for([Row(Sampling(0.9), seed=s) for s in (1, 2)])).shape == (2,)


# ---- what nobody asks for costs nothing -------------------------------------------------------------


def calls_of(rows: Sequence[Row]) -> dict[str, int]:
    """How often which function of the sampler and of shaping is called for a step's rows."""
    inputs, logits, counts = inputs_for(rows), torch.tensor([LOGITS] * len(rows)), Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name in WATCHED and not frame.f_code.co_name.startswith("__"):
            counts[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        sampler.output(logits, inputs)
    finally:
        sys.setprofile(None)
    return dict(counts)


WATCHED = ("shard_worker.sampler", "shard_worker.shaping", "shard_worker.prompt_asks")
PLAIN = {"output": 1, "columns_of": 1, "drawn": 1, "_largest": 1}


def test_rows_that_ask_for_nothing_pass_no_code_of_it() -> None:
    """A count of calls, whatever the number of rows."""
    for rows in (1, 16):
        assert calls_of([Row(Sampling(0.0))] * rows) == PLAIN
        drawing = PLAIN | {"_tensor": 1, "weights": 1, "_draw": 1, "draw": 1}
        assert calls_of([Row(Sampling(0.7, 5, 0.9))] * rows) == drawing
    shaped = calls_of([Row(Sampling(0.7, 5, 0.9, Shaping(min_p=0.1)))])
    assert shaped.keys() - drawing.keys() == {"keep_shapes", "_index"}, "the count sees what is used"

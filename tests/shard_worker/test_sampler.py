"""The order of operations is frozen; each row is drawn from its own distribution, by itself."""

import math

import numpy as np
import pytest
import torch

from shard_worker import sampler
from shard_worker.sampler import SamplingColumns, sample
from shard_worker.uniforms import uniforms

torch.set_num_threads(1)  # more would spin against whatever else runs here
MASK = (1 << 64) - 1
GOLDEN_UNIFORMS = [4727170, 16508839, 1566611, 14844321, 9220241, 532902]
GOLDEN_LOGITS = [0.0, 1.0, 1.0, 3.0, 2.5, -1.0, 2.5, 0.5]
GOLDEN_TOKENS = [3, 3, 4, 6, 7, 4, 3, 4, 3, 3, 3, 6, 6, 6, 3, 4]


def columns(*rows: tuple[float, int, float, int, int]) -> SamplingColumns:
    """Rows of (temperature, top_k, top_p, seed, output index)."""
    temperature, top_k, top_p, seeds, index = zip(*rows, strict=True)
    return SamplingColumns(
        np.array(temperature, np.float32),
        np.array(top_k, np.int32),
        np.array(top_p, np.float32),
        np.array(seeds, np.uint64),
        np.array(index, np.int32),
    )


def plain_uniform(seed: int, index: int) -> float:
    x = seed ^ (0x9E3779B97F4A7C15 * (index + 1) & MASK)
    for _ in range(2):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        x ^= x >> 31
    return (x >> 40) / 2**24


def plain_probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The definition in the module's words, one token at a time."""
    x = [value / temperature for value in logits]
    if 0 < top_k < len(x):
        least = sorted(x, reverse=True)[top_k - 1]
        x = [value if value >= least else -math.inf for value in x]
    top = max(x)
    weights = [math.exp(value - top) for value in x]
    p = [w / math.fsum(weights) for w in weights]
    if top_p < 1:
        mass, least = 0.0, 0.0
        for value in sorted(p, reverse=True):
            mass, least = mass + value, value
            if mass >= top_p:
                break
        p = [value if value >= least else 0.0 for value in p]
    return [value / math.fsum(p) for value in p]


def plain_draw(p: list[float], u: float) -> int:
    mass = 0.0
    for token, value in enumerate(p):
        mass += value
        if mass > u:
            return token
    raise AssertionError


def test_uniforms_are_the_frozen_hash() -> None:
    seeds = [0, 1, 2, 12345, 2**63, MASK]
    index = [0, 1, 7, 4095, 2**31 - 1, 3]
    drawn = uniforms(np.array(seeds, np.uint64), np.array(index, np.int32))
    assert drawn.tolist() == [plain_uniform(s, i) for s, i in zip(seeds, index, strict=True)]
    assert [int(u * 2**24) for u in drawn] == GOLDEN_UNIFORMS


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, 0, 1.0, {0, 1, 2, 3, 4, 5, 6, 7}),
        (1.0, 2, 1.0, {3, 4, 6}),  # the two that are equal stay together
        (1.0, 0, 0.38, {3, 4, 6}),
        (1.0, 0, 0.37, {3}),
        (1.0, 3, 0.45, {3}),  # top-p counts what top-k left
        (1.0, 3, 0.46, {3, 4, 6}),
        (2.0, 0, 0.37, {3, 4, 6}),  # temperature first: flatter, so one token is not enough
        (0.1, 0, 0.98, {3}),
        (1e-6, 0, 1.0, {3}),
        (1.0, 100, 1.0, {0, 1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_golden_order(temperature: float, top_k: int, top_p: float, kept: set[int]) -> None:
    one = columns((temperature, top_k, top_p, 0, 0))
    p = sampler.weights(torch.tensor([GOLDEN_LOGITS]), one.temperature, one.top_k, one.top_p)[0]
    plain = plain_probabilities(GOLDEN_LOGITS, temperature, top_k, top_p)
    assert {i for i, value in enumerate(plain) if value > 0} == kept
    assert {i for i, value in enumerate(p.tolist()) if value > 0} == kept
    assert (p / p.sum()).tolist() == pytest.approx(plain, abs=1e-6)


def test_golden_tokens() -> None:
    rows = [(1.0, 0, 1.0, seed, 3) for seed in range(8)] + [(0.8, 5, 0.9, 9, i) for i in range(8)]
    drawn = sample(torch.tensor([GOLDEN_LOGITS] * 16), columns(*rows)).tolist()
    assert drawn == [
        plain_draw(plain_probabilities(GOLDEN_LOGITS, t, k, p), plain_uniform(s, i)) for t, k, p, s, i in rows
    ]
    assert drawn == GOLDEN_TOKENS


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (1.7, 0, 0.8), (0.6, 4, 0.95)])
def test_distribution_is_the_plain_one(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(4)) * 2
    draws = 3_000
    many = columns(*((temperature, top_k, top_p, seed, seed % 7) for seed in range(draws)))
    counts = np.bincount(sample(logits.expand(draws, -1), many), minlength=40)
    plain = np.array(plain_probabilities(logits.tolist(), temperature, top_k, top_p))
    assert counts[plain == 0].sum() == 0
    kept = plain > 0
    chi_square = ((counts[kept] - draws * plain[kept]) ** 2 / (draws * plain[kept])).sum()
    degrees = kept.sum() - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_rows_do_not_see_each_other() -> None:
    draw = np.random.default_rng(5)
    logits = torch.randn(24, 5000, generator=torch.Generator().manual_seed(5)) * 3
    rows = [
        (
            float(draw.choice([0, 0.5, 1.0])),
            int(draw.choice([0, 1, 50])),
            float(draw.choice([0.3, 0.999, 1])),
            s,
            s,
        )
        for s in range(24)
    ]
    together = sample(logits, columns(*rows)).tolist()
    assert together == [int(sample(logits[i : i + 1], columns(rows[i]))[0]) for i in range(24)]
    backwards = sample(logits.flip(0), columns(*rows[::-1])).tolist()
    assert backwards[::-1] == together


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.99999])
def test_nucleus_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(6)) * spread
    one = columns((1.0, 0, top_p, 0, 0))
    kept = sampler.weights(logits, one.temperature, one.top_k, one.top_p)[0].double()
    whole = logits[0].double().softmax(0)
    size = int((kept > 0).sum())
    ranked = whole.sort(descending=True).values
    assert float(ranked[:size].sum()) >= top_p - 1e-6 and float(ranked[: size - 1].sum()) < top_p + 1e-6
    assert float(whole[kept > 0].min()) == float(ranked[size - 1])


def test_draws_fall_where_a_running_sum_puts_them() -> None:
    kept = torch.rand(40, 1000, generator=torch.Generator().manual_seed(8))
    kept[:, ::3] = 0
    kept[20:, 100:950] = 0
    u = np.random.default_rng(2).random(40)
    u[:2], u[20:22] = 0, 1 - 2**-24
    drawn = sampler._draw(kept, u)
    for row, token in enumerate(drawn.tolist()):
        mass = kept[row].double().cumsum(0)
        assert kept[row, token] > 0
        assert float(mass[token]) >= u[row] * float(mass[-1]) * (1 - 1e-12)
        assert float(mass[token] - kept[row, token]) <= u[row] * float(mass[-1]) * (1 + 1e-12)


def test_greedy_takes_the_first_of_equals_and_computes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> torch.Tensor:
        raise AssertionError("a greedy batch was given to the distribution")

    monkeypatch.setattr(sampler, "weights", never)
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 1.0]])
    assert sample(logits, columns((0, 5, 0.1, 1, 1), (0, 0, 1.0, 2, 2))).tolist() == [1, 0]


def test_last_token_of_the_vocabulary_can_be_drawn() -> None:
    logits = torch.tensor([[-100.0, -100.0, 0.0]])
    assert [int(sample(logits, columns((1.0, 0, 1.0, s, 0)))[0]) for s in range(50)] == [2] * 50

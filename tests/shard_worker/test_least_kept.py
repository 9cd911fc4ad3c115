"""The least value kept is the one a plain sort finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shard_worker.least_kept import least_of_mass, least_of_top_k


def plain_mass(weights: np.ndarray[tuple[int], np.dtype[np.float32]], share: float) -> float:
    ranked = np.sort(weights)[::-1].astype(np.float64)
    mass = ranked.cumsum()
    return float(ranked[min(int((mass < share * mass[-1]).sum()), len(ranked) - 1)])


few = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 2.0])
rows = arrays.arrays(np.float32, st.integers(1, 900), elements=few)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(rows, st.integers(1, 60))
def test_top_k_of_any_row(row: np.ndarray[tuple[int], np.dtype[np.float32]], k: int) -> None:
    k = min(k, len(row))
    assert least_of_top_k(row, k) == np.sort(row)[::-1][k - 1]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(rows, st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999]))
def test_mass_of_any_row(row: np.ndarray[tuple[int], np.dtype[np.float32]], share: float) -> None:
    row[0] = 1.0
    assert least_of_mass(row, share) == plain_mass(row, share)


@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("size", [64, 1000, 50_000])
def test_large_vocabularies(size: int, spread: float) -> None:
    row = np.exp(np.random.default_rng(1).normal(size=size) * spread).astype(np.float32)
    for k in (1, 2, 40, size // 2, size):
        assert least_of_top_k(row, min(k, size)) == np.sort(row)[::-1][min(k, size) - 1]
    for share in (0.001, 0.5, 0.95, 0.99999):
        assert least_of_mass(row, share) == plain_mass(row, share)
    masked = np.where(row < np.median(row), -np.inf, row).astype(np.float32)
    assert least_of_top_k(masked, 20) == np.sort(row)[::-1][19]
    assert least_of_top_k(masked, size) == -np.inf

"""What is learned of the lengths of outputs."""

from random import Random

import numpy as np
import pytest

from batcher import output_lengths
from batcher.output_lengths import OutputLengths


def chance(lengths: OutputLengths, now: float, then: float) -> float:
    hazard, _ = lengths.hazard(np.array([now, then]))
    return float(np.exp(hazard[0] - hazard[1]))


def doubt(lengths: OutputLengths, now: float, then: float) -> float:
    _, variance = lengths.hazard(np.array([now, then]))
    return float(variance[1] - variance[0])


def run_to(lengths: OutputLengths, length: int, ends: bool) -> None:
    lengths.ran(np.zeros(1), np.array([float(length)]))
    if ends:
        lengths.ended(length)


def test_before_anything_is_known_something_may_be_long() -> None:
    lengths = OutputLengths()
    assert chance(lengths, 0, 0) == 1.0
    assert 0.3 < chance(lengths, 0, 500) < 0.6
    assert chance(lengths, 1000, 1040) > 0.9
    assert chance(lengths, 0, 1 << 20) > 0.0


def test_chances_become_those_that_are_seen() -> None:
    lengths, dice = OutputLengths(), Random(1)
    drawn = [dice.randint(1, 400) for _ in range(3000)]
    for length in drawn:
        run_to(lengths, length, ends=True)
    for now, then in ((0, 100), (100, 200), (50, 300)):
        alive = [length for length in drawn if length > now]
        seen = sum(length > then for length in alive) / len(alive)
        assert abs(chance(lengths, now, then) - seen) < 0.08
    assert chance(lengths, 0, 450) < 0.02


def test_one_that_ran_into_its_limit_did_not_end_before() -> None:
    lengths = OutputLengths()
    for _ in range(500):
        run_to(lengths, 64, ends=False)
    assert chance(lengths, 0, 64) > 0.98
    assert 0.6 < chance(lengths, 64, 192) < 0.95, "of what is beyond nothing was learned"


def test_those_that_still_run_count() -> None:
    """Of a hundred that began together, ten were short: nothing says that the others are."""
    lengths = OutputLengths()
    lengths.ran(np.zeros(90), np.full(90, 200.0))
    for _ in range(10):
        run_to(lengths, 8, ends=True)
    assert chance(lengths, 0, 200) > 0.8


def test_all_of_one_length_end_there() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        run_to(lengths, 500, ends=True)
    assert chance(lengths, 0, 460) > 0.97
    assert chance(lengths, 400, 560) < 0.05


def test_what_was_seen_often_is_known_better_and_old_counts_fade() -> None:
    lengths = OutputLengths()
    before = doubt(lengths, 0, 500)
    for _ in range(300):
        run_to(lengths, 1000, ends=True)
    assert doubt(lengths, 0, 500) < before / 20
    for _ in range(10_000):
        run_to(lengths, 20, ends=True)
    assert chance(lengths, 0, 100) < 0.02


def test_what_is_never_reached_does_not_fade_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lengths, "MEMORY", 2)
    lengths = OutputLengths()
    for _ in range(2500):  # more than halvings until a number is zero
        run_to(lengths, 5, ends=True)
    hazard, variance = lengths.hazard(np.array([0.0, 10.0, 5000.0]))
    assert np.isfinite(hazard).all() and np.isfinite(variance).all()
    assert chance(lengths, 0, 6) < 0.1

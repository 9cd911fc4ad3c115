"""Predictions of a step's time."""

import pytest

from batcher.step_cost import StepCost


def test_the_prediction_follows_what_is_measured() -> None:
    cost = StepCost()
    assert cost.predict(100) == 0.0
    for _ in range(300):
        cost.observe(1, 0.011)
        cost.observe(100, 0.11)
        cost.observe(0, 9.0)  # an empty step tells nothing
        cost.check()
    assert cost.predict(1) == pytest.approx(0.011, rel=0.5)
    assert cost.predict(100) == pytest.approx(0.11, rel=0.5)

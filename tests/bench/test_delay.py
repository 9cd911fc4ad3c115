"""The bound that the row `delay` is held against, and its plot."""

import pytest

from batcher.spread import round_of
from batcher.stage_cost import Coefficients
from bench import delay
from bench.delay_plot import plot
from bench.delay_theory import best_groups, bound, decode_bound, round_s
from bench.load import W3


def test_the_bound_is_what_the_batcher_reckons_with() -> None:
    """The same arithmetic twice, by itself and with what the batcher learned."""
    stages = delay.stages_s("fake", 2)
    learned = (Coefficients(1.25e-3, 0.0, 275e-6, 0.0, 0.0),) * 2
    for groups in (1, 2, 4, 8, 16):
        for delay_s in (0.0, 1e-3, 2e-2):
            reckoned = round_of(learned, groups, 64, 100.0, way_s=3 * delay_s).seconds
            assert round_s(stages, 64, groups, delay_s) == pytest.approx(reckoned)


def test_a_short_delay_costs_nothing_and_a_long_one_what_it_must() -> None:
    for model in ("fake", "smollm2"):
        stages = delay.stages_s(model, 2)
        rates = [decode_bound(stages, 64, delay_ms / 1e3) for delay_ms in delay.DELAYS_MS]
        assert rates == sorted(rates, reverse=True)
        assert rates[1] >= 0.9 * rates[0]
        assert rates[-1] <= 64 / 0.060  # a token takes three links of 20 ms at least
        assert best_groups(stages, 64, 0.0) <= 3 < best_groups(stages, 64, 0.02)


def test_more_stages_are_faster_where_nothing_delays() -> None:
    rates = [bound(delay.stages_s("fake", stages), W3, 0.0) for stages in delay.STAGES]
    assert rates == sorted(rates)
    assert rates[3] > 2.5 * rates[0]


def test_the_plot_has_a_line_and_dots_for_each() -> None:
    keys = [("smollm2", 2, ms) for ms in delay.DELAYS_MS]
    keys += [("fake", stages, ms) for stages in delay.STAGES for ms in delay.DELAYS_MS]
    drawn = plot({key: [100.0, 120.0, 110.0] for key in keys}, delay.bounds(keys))
    assert drawn.count("<polyline") == 2 + len(delay.DELAYS_MS)
    assert drawn.count("<circle") == 2 * 6 + 4 * 6
    assert plot({}, {}).endswith("</svg>\n")


def test_points_are_known_by_the_names_they_are_written_under() -> None:
    key = ("smollm2", 2, 10.0)
    assert delay.name_of(key) == "delay.smollm2.s2.ms10"

"""How many steps are in flight, and into how many decodes are divided."""

import pytest

from batcher.ring import RESULT_OPTIONS
from batcher.spread import WAY_STEPS, Spread, round_of, runs_ahead, steps_in_flight_max
from batcher.stage_cost import Coefficients
from shard_worker.config import Config

FLAT = Coefficients(4e-3, 2e-4, 1e-5, 0.0, 0.0)  # a step costs, whatever is in it
STEEP = Coefficients(1e-5, 2e-4, 2e-4, 0.0, 0.0)  # decodes cost, whatever step they are in


def spread(num_stages: int, fixed: int | None = None) -> Spread:
    made = Spread(fixed, run_ahead=True)
    made.open(num_stages)
    return made


@pytest.mark.parametrize(
    ("fixed", "num_stages", "run_ahead", "most"),
    [
        (None, 1, True, 3),
        (None, 1, False, 2),
        (None, 4, True, 13),
        (2, 4, True, 2),
        (9, 4, True, 9),
        (99, 4, True, 13),
        (9, 1, True, 2),
    ],
)
def test_as_many_steps_as_stages_and_one_more_and_those_on_a_long_way(
    fixed: int | None, num_stages: int, run_ahead: bool, most: int
) -> None:
    assert steps_in_flight_max(fixed, num_stages, run_ahead) == most


def test_steps_are_sent_ahead_with_one_stage_only() -> None:
    assert runs_ahead(2, 1, wanted=True)
    assert not runs_ahead(3, 2, wanted=True)
    assert not runs_ahead(1, 1, wanted=True) and not runs_ahead(2, 1, wanted=False)


def test_decodes_share_one_step_on_one_stage_and_a_step_a_stage_on_more() -> None:
    assert spread(1).groups == 1
    assert spread(3).groups == 3
    assert spread(3, fixed=2).groups == 2


def test_a_round_takes_what_the_busiest_stage_takes_for_all_groups_or_one_group_round_the_ring() -> None:
    stages = (STEEP, STEEP)
    alone = round_of(stages, 1, 64, 100.0, way_s=1e-3).seconds
    assert alone == pytest.approx(2 * (1e-5 + 64 * 2e-4) + 1e-3)
    assert round_of(stages, 3, 64, 100.0, way_s=1e-3).seconds == pytest.approx(3 * 1e-5 + 64 * 2e-4)
    idle = round_of(stages, 3, 64, 100.0, way_s=1e-3, idle_s=1e-3)
    assert idle.seconds == pytest.approx(3 * 1e-5 + 64 * 2e-4 + 3e-3)


def looked(made: Spread, stage: Coefficients, decodes: int, way_s: float) -> int:
    for _ in range(100):
        made.went_round(way_s, 0.0)
        made.look((stage,) * 2, decodes, 100.0)
        made.check()
    return made.groups


def test_where_a_step_costs_there_are_no_more_than_stages_and_where_the_way_costs_one_more() -> None:
    assert looked(spread(2), FLAT, 8, way_s=1e-3) == 2
    assert looked(spread(2), STEEP, 64, way_s=1e-3) == 3
    assert looked(spread(2), FLAT, 1, way_s=1e-3) <= 2


def test_a_fixed_number_stays() -> None:
    assert looked(spread(2, fixed=2), STEEP, 64, way_s=1e-2) == 2


def test_a_little_better_is_not_enough_to_change() -> None:
    made = spread(2)
    even = Coefficients(1e-3, 2e-4, 2e-4, 0.0, 0.0)  # a group costs what the way does
    assert looked(made, even, 64, way_s=0.85e-3) == 2
    assert looked(made, even, 64, way_s=3e-3) == 3
    assert looked(made, even, 64, way_s=1.05e-3) == 3


def test_where_the_busiest_stage_stands_idle_one_more_step_fills_it() -> None:
    made = spread(2)
    even = Coefficients(1e-3, 2e-4, 2e-4, 0.0, 0.0)
    for _ in range(200):
        made.went_round(0.0, 2e-3 if made.groups == 2 else 0.0)
        made.look((even,) * 2, 64, 100.0)
    assert made.groups == 3


def test_prompts_alone_may_use_every_place_and_beside_decodes_those_of_the_groups() -> None:
    made = spread(3)
    assert made.places(0) == 4
    assert made.places(5) == 3
    assert spread(1).places(5) == 3  # where steps are sent ahead one place is for prompts


def test_over_a_long_way_there_are_as_many_as_fill_it() -> None:
    """Stages that take 6.5 ms for a third of the sequences would stand idle over 30 ms."""
    even = Coefficients(1e-3, 2e-4, 2.5e-4, 0.0, 0.0)
    for way_s, groups in ((0.0, 2), (4e-3, 3), (12e-3, 5), (30e-3, 3 + WAY_STEPS)):
        made = spread(2)
        assert looked(made, even, 64, way_s) == groups, way_s
        best = min(round_of((even,) * 2, n, 64, 100.0, way_s).seconds for n in range(1, 12))
        assert round_of((even,) * 2, groups, 64, 100.0, way_s).seconds <= 1.02 * best
        assert made.places(64) == groups
        assert made.places(0) == 3  # prompts follow each other as ever


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_links_have_credits_for_all_that_is_on_a_long_way(stages: int) -> None:
    """A frame's credit is back after twice the delay of its link, of which the way round has one more than
    stages; half of the slots are given back together."""
    steps = steps_in_flight_max(None, stages, run_ahead=False)
    on_a_link = 2 * steps / (stages + 1)
    for slots in (Config().slots, RESULT_OPTIONS.slots):
        assert slots >= on_a_link + slots // 2 - 1


def test_over_a_way_that_nothing_fills_there_are_no_more_than_help() -> None:
    """Each sequence waits for the whole way, however they are divided."""
    costly = Coefficients(4e-3, 2e-4, 1e-6, 0.0, 0.0)
    assert looked(spread(2), costly, 64, way_s=1.0) <= 3


def test_when_the_way_gets_short_again_so_does_the_line() -> None:
    made = spread(2)
    even = Coefficients(1e-3, 2e-4, 2.5e-4, 0.0, 0.0)
    assert looked(made, even, 64, way_s=30e-3) > 3
    for _ in range(6):
        looked(made, even, 64, way_s=0.5e-3)
    assert made.groups == 2

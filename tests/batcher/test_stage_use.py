"""What stages did with the time."""

import pytest

from batcher.stage_use import StageUse
from chassis.messages.pipeline import StageTiming

MS = 1_000_000


def step(stage: int, received_ms: int, wait_ms: int, compute_ms: int) -> StageTiming:
    return StageTiming(stage, received_ms * MS, wait_ms * MS, compute_ms * MS, 0)


def test_a_stage_is_idle_from_the_end_of_a_step_until_it_has_the_next() -> None:
    use = StageUse()
    use.open(2)
    assert use.returned(1, [step(0, 0, 0, 10), step(1, 10, 0, 4)], 0.014, follows=False) is None
    # the first stage, which is the busiest, has it only 3 ms after it was done with the last one
    idle_s = use.returned(2, [step(0, 13, 0, 10), step(1, 23, 0, 4)], 0.013, follows=True)
    assert idle_s == pytest.approx(0.003)
    assert [stage.idle_s for stage in use.stages] == pytest.approx([0.003, 0.009])
    assert [stage.busy_s for stage in use.stages] == pytest.approx([0.020, 0.008])
    assert use.bubble_shares == pytest.approx((7 / 27, 19 / 27))


def test_a_step_that_lay_there_found_no_idle_stage() -> None:
    use = StageUse()
    use.open(1)
    use.returned(1, [step(0, 0, 0, 10)], 0.010, follows=True)
    assert use.returned(2, [step(0, 2, 8, 10)], 0.010, follows=True) == 0.0
    assert use.stages[0].queued_s == pytest.approx(0.008)
    assert use.bubble_shares == pytest.approx((0.0,))


def test_rest_is_not_idleness_and_neither_is_a_gap_in_the_numbers() -> None:
    use = StageUse()
    use.open(1)
    use.returned(1, [step(0, 0, 0, 10)], 0.010, follows=True)
    assert use.returned(2, [step(0, 5000, 0, 10)], 0.010, follows=False) is None
    assert use.returned(4, [step(0, 9000, 0, 10)], 0.010, follows=True) is None
    assert use.stages[0].idle_s == 0.0


def test_a_new_epoch_goes_on_and_another_number_of_stages_begins_anew() -> None:
    use = StageUse()
    use.open(1)
    use.returned(1, [step(0, 0, 0, 10)], 0.010, follows=True)
    use.open(1)
    assert use.returned(1, [step(0, 7000, 0, 10)], 0.010, follows=True) is None
    assert use.stages[0].busy_s == pytest.approx(0.020)
    use.open(2)
    assert use.bubble_shares == () and use.active_s == 0.0
    assert use.returned(2, [step(0, 0, 0, 1)], 0.1, follows=True) is None  # a stage is missing
    assert use.active_s == 0.0

"""What the batcher learns of stages from the steps that came back."""

from random import Random

import pytest

from batcher.stage_cost import BUCKETS_MAX, Coefficients, Load, StageCost

TRUE = (Coefficients(2e-3, 2.5e-4, 1.5e-4, 1e-7, 4e-7), Coefficients(2.5e-3, 2e-4, 3e-4, 1e-7, 2e-7))


def decodes(rows: int, context: int) -> Load:
    return Load(0, rows, 0, rows * context)


def mixed(rows: int, context: int, tokens: int, start: int) -> Load:
    return Load(tokens, rows, tokens * start + tokens * (tokens + 1) // 2, rows * context + start + tokens)


def observe(cost: StageCost, load: Load, factor: float = 1.0) -> None:
    cost.observe(load, [stage.seconds(load) * factor for stage in TRUE])
    cost.check()


def learned(dice: Random, steps: int = 600) -> StageCost:
    cost = StageCost()
    cost.open(2)
    for step in range(steps):
        rows, context = dice.randint(1, 64), dice.randint(16, 2000)
        load = mixed(rows, context, dice.randint(16, 256), dice.randint(0, 3000)) if step % 4 == 0 else None
        observe(cost, load or decodes(rows, context), dice.uniform(0.97, 1.03))
    return cost


def true_s(load: Load) -> float:
    return sum(stage.seconds(load) for stage in TRUE)


def test_nothing_is_known_at_first_and_all_costs_nothing() -> None:
    cost = StageCost()
    cost.open(2)
    assert not cost.known and cost.seconds(mixed(8, 100, 512, 0)) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_each_stage_is_learned_by_itself(seed: int) -> None:
    cost = learned(Random(seed))
    for load in (decodes(8, 100), decodes(64, 1500), mixed(16, 400, 64, 1000), mixed(0, 0, 256, 2000)):
        assert cost.seconds(load) == pytest.approx(true_s(load), rel=0.15)
        for found, stage in zip(cost.stages, TRUE, strict=True):
            assert found.seconds(load) == pytest.approx(stage.seconds(load), rel=0.2)


def test_what_prompts_cost_is_not_forgotten_over_thousands_of_decodes() -> None:
    cost = learned(Random(1))
    for step in range(4000):
        observe(cost, decodes(16, 100 + step // 4))
    load = mixed(16, 1000, 128, 500)
    assert cost.seconds(load) == pytest.approx(true_s(load), rel=0.25)


def test_it_follows_stages_that_became_slower() -> None:
    cost = learned(Random(2))
    for _ in range(200):
        observe(cost, decodes(16, 500), 1.5)
    assert cost.seconds(decodes(16, 500)) == pytest.approx(1.5 * true_s(decodes(16, 500)), rel=0.1)


def test_one_odd_step_changes_little() -> None:
    cost = learned(Random(3))
    for _ in range(50):
        observe(cost, decodes(16, 500))
    before = cost.seconds(decodes(16, 500))
    observe(cost, decodes(16, 500), 100.0)
    for _ in range(16):
        observe(cost, decodes(16, 500))
    assert cost.seconds(decodes(16, 500)) == pytest.approx(before, rel=0.1)


def test_the_same_steps_teach_the_same() -> None:
    assert learned(Random(5)).stages == learned(Random(5)).stages


def test_timings_of_another_number_of_stages_and_of_no_time_teach_nothing() -> None:
    cost = StageCost()
    cost.open(2)
    cost.observe(decodes(8, 100), [1e-3])
    cost.observe(Load(), [1e-3, 1e-3])
    cost.observe(decodes(8, 100), [0.0, 0.0])
    cost.check()
    assert not cost.known


def test_another_number_of_stages_is_learned_anew_and_the_same_is_kept() -> None:
    cost = learned(Random(6))
    cost.open(2)
    assert cost.known
    cost.open(3)
    assert not cost.known


def test_what_it_keeps_is_bounded() -> None:
    cost = StageCost()
    cost.open(1)
    for tokens in range(10):
        for rows in range(7):
            for start in (0, 100, 10_000):
                cost.observe(mixed(1 << rows, 64, 1 << tokens, start), [1e-3])
                cost.check()
    assert len(cost._buckets) == BUCKETS_MAX

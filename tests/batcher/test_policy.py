"""Order, victims, spreading, reserves, predictions."""

import pytest

from batcher.policy import (
    GrowthReserve,
    Order,
    StepCost,
    choose_victim,
    decode_groups,
    prefill_tokens_max,
)
from tests.batcher.toy_pipeline import make_sequence


def test_priority_then_age() -> None:
    order = Order(age_steps_per_priority=10)
    late_urgent, early, late = order.key(4, 0), order.key(5, 0), order.key(5, 0)
    assert late_urgent < early < late


def test_waiting_outweighs_priority_at_the_stated_step() -> None:
    order = Order(age_steps_per_priority=10)
    old = order.key(9, 100)
    assert order.key(0, 189) < old  # 89 steps later: may still pass
    assert order.key(0, 190) > old  # 90 steps later: may not
    order.check()


def test_the_last_in_order_gives_way_but_never_to_one_behind_it() -> None:
    first, second, third = (make_sequence(f"r{i}", order=(0, i)) for i in range(3))
    running = [second, third, first]
    assert choose_victim(running, first) is third
    assert choose_victim([first, second], second) is None
    assert choose_victim([first], first) is None
    assert choose_victim([], first) is None


def test_decodes_are_spread_over_the_steps_in_flight_but_not_on_one_stage() -> None:
    assert decode_groups(3, 2) == 3
    assert decode_groups(2, 1) == 1


def test_prompts_get_what_decodes_leave() -> None:
    assert prefill_tokens_max(32, 5) == 27
    assert prefill_tokens_max(4, 5) == 0


def test_the_reserve_grows_with_preemptions_and_fades() -> None:
    reserve = GrowthReserve(share=0.5, share_min=0.1, decay=0.5)
    assert reserve.blocks(growth_tokens=64, num_running=3, block_size_tokens=16) == 3 + 2
    for _ in range(10):
        reserve.step()
    assert reserve.share == 0.1
    for _ in range(50):
        reserve.preempted()
        reserve.check()
    assert reserve.share == 1.0


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

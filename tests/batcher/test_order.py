"""Priority, then age."""

from batcher.order import Order


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

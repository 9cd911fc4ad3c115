"""What holds of the policy whatever it is told."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.autoscale.policy import USE_ENOUGH, Policy, Rules, Signals

amounts = st.floats(0, 40, allow_nan=False)
signals = st.builds(
    Signals,
    now=st.just(0.0),
    demand=amounts,
    demand_now=amounts,
    backlog_s=st.floats(0, 500),
    queue_age_s=st.floats(0, 100),
    unfinished=st.integers(0, 100_000),
    ready=st.integers(0, 20),
    coming_s=st.none() | st.floats(0, 100),
    start_s=st.floats(0, 60),
)
bounds = st.tuples(st.integers(0, 10), st.integers(1, 20)).map(
    lambda pair: Rules(pipelines_min=min(pair), pipelines_max=max(pair), gateways_max=4, down_after_s=10.0)
)


@given(bounds, st.integers(0, 30), st.lists(signals, max_size=40), st.lists(st.booleans(), min_size=40))
def test_bounds_are_kept(rules: Rules, begin: int, told: list[Signals], may: list[bool]) -> None:
    policy = Policy(rules, begin)
    for i, s in enumerate(told):
        decision = policy.decide(replace(s, now=3.0 * i), may[i])
        assert rules.pipelines_min <= decision.pipelines <= rules.pipelines_max
        assert 1 <= decision.gateways <= 4
        policy.check()


@given(bounds, st.integers(0, 20), signals, st.booleans())
def test_the_same_for_ever_is_a_fixed_point(rules: Rules, begin: int, s: Signals, follows: bool) -> None:
    """Up at once, perhaps down after that, and never again: whether pipelines come as asked for, or never."""
    policy = Policy(rules, begin)
    numbers = []
    for i in range(400):
        ready = policy.pipelines if follows else s.ready
        numbers.append(policy.decide(replace(s, now=1.0 * i, ready=ready)).pipelines)
    assert numbers[1:] == sorted(numbers[1:], reverse=True)
    assert len(set(numbers[200:])) == 1


@given(bounds, st.integers(0, 20), signals, st.data())
def test_more_load_never_asks_for_less(rules: Rules, begin: int, s: Signals, data: st.DataObject) -> None:
    more = replace(
        s,
        demand=s.demand + data.draw(amounts),
        demand_now=s.demand_now + data.draw(amounts),
        backlog_s=s.backlog_s + data.draw(amounts),
        queue_age_s=s.queue_age_s + data.draw(amounts),
        unfinished=s.unfinished + data.draw(st.integers(0, 1000)),
    )
    one, other = Policy(rules, begin), Policy(rules, begin)
    less_wanted, more_wanted = one.decide(s), other.decide(more)
    assert more_wanted.pipelines >= less_wanted.pipelines
    assert more_wanted.gateways >= less_wanted.gateways
    assert more_wanted.needed >= less_wanted.needed


@given(bounds, st.integers(0, 20), st.lists(signals, min_size=2, max_size=60))
def test_nothing_goes_that_was_needed_of_late(rules: Rules, begin: int, told: list[Signals]) -> None:
    """Who stays would have been little enough used, and nobody would have waited too long, all that time."""
    policy = Policy(rules, begin)
    number, seen = policy.decide(replace(told[0], now=0.0)).pipelines, [replace(told[0], now=0.0)]
    for i, s in enumerate(told[1:], 1):
        seen.append(replace(s, now=2.0 * i))
        after = policy.decide(seen[-1]).pipelines
        if after < number:
            assert after == number - 1 and 2.0 * i >= 10.0
            for past in seen:
                if past.now < 2.0 * i - 10.0 or after == rules.pipelines_max:
                    continue
                idle = not past.unfinished and past.demand_now < 1e-6
                assert idle or past.demand <= USE_ENOUGH * after + 1e-6
                assert past.backlog_s <= rules.wait_max_s * after + 1e-6
                assert after > 0 or idle
        number = after


@settings(max_examples=50)
@given(st.integers(0, 5), st.integers(1, 100_000))
def test_the_first_request_wakes_a_pipeline_at_once(pipelines_min: int, unfinished: int) -> None:
    policy = Policy(Rules(pipelines_min=0, pipelines_max=8), 0)
    assert policy.decide(Signals(0.0)).pipelines == 0
    assert policy.decide(Signals(0.5, unfinished=unfinished)).pipelines == 1


def test_what_waits_counts_as_of_when_more_can_be_there() -> None:
    def asked(demand_now: float, start_s: float) -> int:
        s = Signals(0.0, demand=0.5, demand_now=demand_now, unfinished=1, ready=1, start_s=start_s)
        return Policy(Rules(pipelines_max=64), 1).decide(s).pipelines

    assert asked(0.9, 10.0) == 1  # one does it
    assert asked(1.5, 0.5) == 1  # nobody waits too long before there is another
    assert asked(1.5, 10.0) == 2 and asked(6.0, 10.0) > 6


def test_what_comes_already_is_not_asked_for_twice() -> None:
    policy = Policy(Rules(pipelines_max=64), 1)
    s = Signals(0.0, demand=0.5, demand_now=5.0, backlog_s=0.0, unfinished=1, ready=1, start_s=5.0)
    first = policy.decide(s).pipelines
    for i in range(1, 10):  # the backlog grows as it was foreseen to
        now = 0.5 * i
        s = replace(s, now=now, backlog_s=4.0 * now, coming_s=now)
        assert policy.decide(s).pipelines == first


def test_it_goes_up_at_once_and_down_late_one_at_a_time() -> None:
    policy = Policy(Rules(pipelines_max=8, down_after_s=20.0), 1)
    assert policy.decide(Signals(0.0, demand=4.0, unfinished=9, ready=1)).pipelines == 5
    wanted = [policy.decide(Signals(1.0 + t, demand=0.5, unfinished=1, ready=5)).pipelines for t in range(60)]
    assert wanted[:20] == [5] * 20
    assert wanted[20:] == [4] * 5 + [3] * 5 + [2] * 5 + [1] * 25


def test_how_late_follows_from_what_a_start_takes() -> None:
    rules = Rules()
    assert rules.hold_s(1.0) == 30.0 and rules.hold_s(12.0) == 120.0
    assert Rules(down_after_s=5.0).hold_s(100.0) == 5.0


def test_nothing_goes_while_something_comes_or_drains() -> None:
    policy = Policy(Rules(pipelines_max=8, down_after_s=1.0), 3)
    for t in range(10):
        assert policy.decide(Signals(float(t), ready=3), may_fall=False).pipelines == 3
    assert policy.decide(Signals(10.0, ready=3)).pipelines == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"pipelines_min": -1}, "pipelines_min: -1; 0 to 64"),
        ({"pipelines_min": 3, "pipelines_max": 2}, "pipelines_max: 2; 3 to 64"),
        ({"pipelines_max": 0}, "pipelines_max: 0; 1 to 64"),
        ({"pipelines_max": 65}, "pipelines_max: 65; 1 to 64"),
        ({"gateways_min": 0}, "gateways_min: 0; 1 to 64"),
        ({"ttft_objective_ms": 0}, "ttft_objective_ms: 0; 1 to"),
        ({"gateway_streams": 0}, "gateway_streams: 0; 1 to"),
        ({"down_after_s": 0.0}, "down_after_s: 0; 0.1 to 86400"),
        ({"down_after_s": float("nan")}, "down_after_s: nan"),
    ],
)
def test_rules_name_what_is_wrong(words: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Rules(**words)  # type: ignore[arg-type]

"""The autoscaler's cores together over a queue: bursts, ramps, waves, silence."""

from itertools import pairwise
from math import pi, sin

import pytest

from shoal.autoscale.policy import Rules
from tests.shoal.autoscale.queueing import World

RULES = Rules(pipelines_max=16, ttft_objective_ms=2000)


@pytest.mark.parametrize("level", [0.3, 1.0, 2.0, 3.6, 5.3, 8.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_constant_load_is_settled_and_stays(level: float, seed: int) -> None:
    """`level`: in pipelines. It never goes up and down again, and nobody waits for longer than may be."""
    ran = World(RULES, lambda t: 10 * level, seed=seed).run(900)
    late = ran.changes(since=200)
    ups = [
        n for (_, n), before in zip(late, [ran.at(200), *(n for _, n in late)], strict=False) if n > before
    ]
    assert not ups, late
    assert len(late) <= 1
    assert level <= ran.at(900) <= level / 0.65 + 2
    assert ran.waited(0.99, since=200) < 1.0


@pytest.mark.parametrize("start_s", [2.0, 6.0, 15.0])
def test_a_burst_of_ten_times_the_load(start_s: float) -> None:
    """Capacity comes as soon as a start allows, what waits is done away with, and it settles."""
    ran = World(RULES, lambda t: 40 if 60 <= t < 360 else 4, start_s=start_s, seed=3).run(1600)
    assert ran.at(59) == 1
    first_up = next(t for t, n in ran.changes() if n > 1)
    assert first_up - 60 <= 2.0
    assert ran.at(60 + start_s + 4) >= 4
    assert ran.waited(0.95, since=60 + 4 * start_s + 10, until=360) < 1.0
    assert len(ran.changes(since=60 + 4 * start_s + 10)) <= 20  # the steps down, one at a time
    numbers = [n for t, n in ran.numbers if t > 60 + 4 * start_s + 10]
    assert numbers == sorted(numbers, reverse=True), "up again after the burst"
    assert ran.at(1600) == 1


def test_a_ramp_is_followed() -> None:
    ran = World(RULES, lambda t: 5 + t / 10, start_s=4.0, seed=4).run(600)
    numbers = [n for t, n in ran.numbers if t > 30]
    assert numbers == sorted(numbers), "down while the load grows"
    assert ran.waited(0.99) < 2.0


def test_a_wave_shorter_than_the_hold_changes_nothing() -> None:
    """Once it has seen the crest it stays for the next one."""
    ran = World(RULES, lambda t: 30 + 20 * sin(2 * pi * t / 40), start_s=5.0, seed=5).run(900)
    assert not ran.changes(since=300)
    assert ran.waited(0.99, since=300) < 1.0


def test_a_long_wave_is_followed_both_ways() -> None:
    ran = World(RULES, lambda t: 30 + 25 * sin(2 * pi * t / 600), start_s=4.0, seed=6).run(1800)
    crest, trough = ran.at(750), ran.at(1100)
    assert trough <= crest / 2
    assert ran.waited(0.95, since=300) < 1.5


def test_to_zero_and_back() -> None:
    rules = Rules(pipelines_min=0, pipelines_max=4, down_after_s=20.0)
    ran = World(rules, lambda t: 5 if t < 30 or 200 <= t < 230 else 0, start_s=5.0, seed=7).run(300)
    assert ran.at(120) == 0 and ran.at(199) == 0
    first = next(came for came, _ in ran.waits if came > 100)
    assert next(t for t, n in ran.changes(since=150) if n) - first <= 0.6
    assert max(w for came, w in ran.waits if came > 100) < 7.0  # a start, and what came meanwhile
    assert ran.at(299) == 0


def test_one_request_a_minute_wakes_it_each_time_or_keeps_it() -> None:
    """Held for longer than the pause it stays, for less it comes each time."""
    numbers = {}
    for down_after_s in (20.0, 90.0):
        rules = Rules(pipelines_min=0, pipelines_max=4, down_after_s=down_after_s)
        ran = World(rules, lambda t: 10 if t % 60 < 0.15 else 0, seed=8).run(600)
        numbers[down_after_s] = sum(n == 0 for t, n in ran.numbers if t > 200)
        assert len(ran.waits) >= 5
    assert numbers[20.0] > 100 and numbers[90.0] == 0


def test_pipelines_that_do_less_than_they_say() -> None:
    """Memory for few sequences only, say: it is learned where they wait, and settles all the same."""
    ran = World(RULES, lambda t: 10, speed=0.3, seed=9).run(900)
    assert 4 <= ran.at(300) <= 7
    ups = [n for t, n in ran.changes(since=200)]
    assert len(ups) <= 2, ran.changes(since=200)
    assert ran.waited(0.99, since=200) < 1.5


def test_a_load_beyond_the_bound_stays_at_the_bound() -> None:
    rules = Rules(pipelines_max=3)
    ran = World(rules, lambda t: 60, seed=10).run(120)
    assert ran.at(119) == 3 and not ran.changes(since=20)


def test_a_short_hold_lets_hardly_anything_go_that_a_burst_has_just_made_needed() -> None:
    """What came is averaged over less time than that: else the average would still be on its way up."""
    ups = 0
    for seed in range(8):
        rules = Rules(pipelines_max=6, down_after_s=8.0)
        ran = World(rules, lambda t: 18 if 15 <= t < 120 else 1, start_s=2.0, seed=seed).run(120)
        numbers = [n for t, n in ran.numbers if t > 20]
        ups += sum(b > a for a, b in pairwise(numbers))
    assert ups <= 1

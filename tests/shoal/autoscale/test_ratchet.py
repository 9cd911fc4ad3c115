"""A number that goes up at once and comes down late."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.autoscale.ratchet import FALLS_PER_HOLD, Ratchet

steps = st.lists(
    st.tuples(st.floats(0.05, 2.0), st.integers(0, 9), st.integers(0, 4), st.booleans()), max_size=80
)


@given(st.integers(0, 9), steps)
def test_it_is_the_most_that_was_enough_of_late(begin: int, told: list[tuple[float, int, int, bool]]) -> None:
    ratchet, now, hold_s = Ratchet(begin), 0.0, 10.0
    seen: list[tuple[float, int]] = []
    fell_at = -100.0
    for took_s, needed, margin, may_fall in told:
        now += took_s
        before = ratchet.number
        seen.append((now, needed + margin))
        number = ratchet.turn(now, needed, needed + margin, hold_s, may_fall)
        ratchet.check()
        assert number >= needed
        if number > before:
            assert number == needed
        if number < before:
            assert may_fall and number == before - 1
            assert now - seen[0][0] >= hold_s and now - fell_at >= hold_s / FALLS_PER_HOLD
            assert number >= max(enough for when, enough in seen if when >= now - hold_s)
            fell_at = now


def test_after_a_time_in_which_nobody_looked_it_begins_anew() -> None:
    ratchet = Ratchet(5)
    for t in range(10):
        ratchet.turn(float(t), 5, 5, 20.0)
    numbers = [ratchet.turn(500.0 + t, 1, 1, 20.0) for t in range(30)]
    assert numbers[:20] == [5] * 20 and numbers[29] < 5


def test_what_somebody_else_made_it_holds_for_as_long() -> None:
    ratchet = Ratchet(1)
    for t in range(100):
        ratchet.turn(float(t), 1, 1, 20.0)
    ratchet.put(100.0, 4)
    assert [ratchet.turn(100.0 + t, 1, 1, 20.0) for t in range(21)] == [4] * 20 + [3]

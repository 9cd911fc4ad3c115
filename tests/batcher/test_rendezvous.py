"""Which kvstore a pool belongs to."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from batcher.rendezvous import ranked, weight

NAMES = st.lists(st.text(max_size=8), min_size=1, max_size=8, unique=True)


def test_golden() -> None:
    """All batchers of all versions must say the same."""
    assert [weight("", ""), weight("pool", "a"), weight("pool", "b")] == [
        4111763080007792286,
        8134796069025207541,
        2367893367190135436,
    ]
    assert weight("1:a", "b") != weight("1", ":ab")


@given(st.text(max_size=8), NAMES)
def test_the_order_in_which_they_are_known_is_nothing(pool: str, names: list[str]) -> None:
    assert ranked(pool, names) == ranked(pool, reversed(names))
    assert sorted(ranked(pool, names)) == sorted(names)


@given(st.text(max_size=8), NAMES, st.text(max_size=8))
def test_only_the_pools_of_who_leaves_move_each_to_its_next(pool: str, names: list[str], other: str) -> None:
    without = ranked(pool, [n for n in names if n != other])
    assert [n for n in ranked(pool, {*names, other}) if n != other] == without


def test_a_newcomer_takes_its_share() -> None:
    pools = [f"pool {i}" for i in range(3000)]
    before = {p: ranked(p, ["a", "b"])[0] for p in pools}
    after = {p: ranked(p, ["a", "b", "c"])[0] for p in pools}
    moved = [p for p in pools if before[p] != after[p]]
    assert {after[p] for p in moved} == {"c"}
    shares = Counter(after.values())
    assert all(900 <= shares[name] <= 1100 for name in "abc")

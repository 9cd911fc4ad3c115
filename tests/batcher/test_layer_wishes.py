"""Layer ranges that workers prefer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.layer_wishes import wished_split


@pytest.mark.parametrize(
    ("num_stages", "wishes", "split"),
    [
        (2, [range(20)], [(0, 20), (20, 30)]),
        (2, [range(20, 30)], [(0, 20), (20, 30)]),
        (2, [range(20), range(20, 30)], [(0, 20), (20, 30)]),
        (3, [range(10, 12)], [(0, 10), (10, 12), (12, 30)]),
        (4, [range(6)], [(0, 6), (6, 14), (14, 22), (22, 30)]),
        (4, [range(4, 10)], [(0, 4), (4, 10), (10, 20), (20, 30)]),
        (1, [range(30)], [(0, 30)]),
        (2, [range(20), range(10, 30)], [(0, 20), (20, 30)]),  # the first of those that overlap
    ],
)
def test_wishes_are_stages_and_the_others_share_the_rest(
    num_stages: int, wishes: list[range], split: list[tuple[int, int]]
) -> None:
    assert wished_split(30, num_stages, wishes) == split


@pytest.mark.parametrize(
    ("num_stages", "wishes"),
    [
        (2, []),
        (2, [range(10, 20)]),  # three stages at least
        (2, [range(30)]),  # nothing is left for the other
        (1, [range(20)]),
        (2, [range(10, 40)]),  # of another model
        (3, [range(29)]),  # one layer for two
    ],
)
def test_what_cannot_be_is_not_followed(num_stages: int, wishes: list[range]) -> None:
    assert wished_split(30, num_stages, wishes) is None


@given(
    num_layers=st.integers(1, 40),
    num_stages=st.integers(1, 8),
    ends=st.lists(st.tuples(st.integers(0, 44), st.integers(0, 44)), max_size=6),
)
def test_a_split_is_whole_and_has_a_layer_for_each(
    num_layers: int, num_stages: int, ends: list[tuple[int, int]]
) -> None:
    wishes = [range(first, end) for first, end in ends]
    split = wished_split(num_layers, num_stages, wishes)
    if split is None:
        return
    assert len(split) == num_stages
    assert [first for first, _ in split] == [0, *(end for _, end in split[:-1])]
    assert split[-1][1] == num_layers and all(first < end for first, end in split)
    assert any(range(first, end) in wishes for first, end in split)

"""How long rounds were seen to take."""

import pytest

from batcher.paces import KEPT_STEPS, ROUNDS_MIN, SETTLING_ROUNDS, Paces


def rounds(paces: Paces, since: float, count: int, groups: int, decodes: int, round_s: float) -> float:
    """So many rounds; when the last step came back."""
    now = since
    for _ in range(count * groups):
        now += round_s / groups
        paces.returned(now, -(-decodes // groups), groups, decodes, 10.0)
    return now


def round_s(paces: Paces, groups: int, decodes: int) -> float | None:
    pace = paces.of(groups, decodes)
    return None if pace is None else pace.round_s


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_round_is_from_a_groups_return_to_its_next(groups: int) -> None:
    paces = Paces()
    now = rounds(paces, 0.0, SETTLING_ROUNDS + ROUNDS_MIN - 1, groups, 12, 0.03)
    if groups == 1:
        assert paces.of(1, 12) is None
    rounds(paces, now, 2, groups, 12, 0.03)
    assert round_s(paces, groups, 12) == pytest.approx(0.03)
    assert round_s(paces, groups, 8) == pytest.approx(0.03)  # about as many
    assert paces.of(groups, 16) is None and paces.of(groups + 1, 12) is None


def test_what_comes_between_ends_the_line_of_returns() -> None:
    paces = Paces()
    now = 0.0
    for _ in range(40):
        now = rounds(paces, now, SETTLING_ROUNDS, 2, 8, 0.02)
        paces.returned(now + 0.3, 0, 2, 8, 10.0)  # a prompt's step
        now += 0.3
    assert paces.of(2, 8) is None


def test_rounds_of_a_split_that_is_not_even_do_not_count() -> None:
    paces = Paces()
    for i in range(100):
        paces.returned(i / 100, 6 if i % 2 else 2, 2, 8, 10.0)  # two groups are being merged
    assert paces.of(2, 8) is None


def test_another_number_of_groups_needs_a_while() -> None:
    paces = Paces()
    now = rounds(paces, 0.0, 20, 2, 8, 0.02)
    now = rounds(paces, now + 5.0, SETTLING_ROUNDS, 1, 8, 0.5)
    rounds(paces, now, ROUNDS_MIN + 1, 1, 8, 0.01)
    assert round_s(paces, 1, 8) == pytest.approx(0.01)
    assert round_s(paces, 2, 8) == pytest.approx(0.02)


def test_it_is_forgotten_after_long_and_with_the_stages() -> None:
    paces = Paces()
    now = rounds(paces, 0.0, 20, 2, 8, 0.02)
    rounds(paces, now, KEPT_STEPS, 1, 8, 0.01)
    assert paces.of(2, 8) is not None
    rounds(paces, now, 1, 1, 8, 0.01)
    assert paces.of(2, 8) is None and paces.of(1, 8) is not None
    paces.open()
    assert paces.of(1, 8) is None


def test_one_odd_round_moves_little() -> None:
    paces = Paces()
    now = rounds(paces, 0.0, 20, 1, 8, 0.02)
    now = rounds(paces, now, 1, 1, 8, 4.0)
    rounds(paces, now, 3, 1, 8, 0.02)
    assert round_s(paces, 1, 8) == pytest.approx(0.02)

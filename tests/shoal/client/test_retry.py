"""When a call is tried again, and how long after: on numbers alone."""

import pytest

from shoal.client.errors import DeadlineExceeded, ShoalError, Unavailable, error_of
from shoal.client.retry import Retry, Tries


def refused(retry_ms: int | None = None) -> ShoalError:
    return Unavailable("UNAVAILABLE", "no room", retry_ms)


def test_waits_double_up_to_a_cap_and_begin_anew_after_progress() -> None:
    tries = Tries(Retry(patience_s=100, first_wait_s=0.1, wait_s_max=0.5), 1, 0.0)
    assert [tries.wait_s(refused(), 0.0, 1.0) for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    tries.progress()
    assert tries.wait_s(refused(), 0.0, 1.0) == 0.1
    assert tries.wait_s(refused(), 0.0, 0.0) == 0.1  # drawn: between a half and the whole


def test_each_address_is_tried_before_a_wait() -> None:
    tries = Tries(Retry(first_wait_s=0.1), 3, 0.0)
    assert [tries.wait_s(refused(), 0.0, 1.0) for _ in range(6)] == [0.0, 0.0, 0.1, 0.0, 0.0, 0.2]


def test_a_hint_is_the_least_and_spread_by_chance() -> None:
    tries = Tries(Retry(first_wait_s=0.1), 1, 0.0)
    assert tries.wait_s(refused(800), 0.0, 0.0) == 0.8
    assert tries.wait_s(refused(800), 0.0, 1.0) == 1.0
    assert tries.wait_s(refused(0), 0.0, 1.0) == 0.4


def test_patience_ends_and_counts_from_the_first_failure() -> None:
    tries = Tries(Retry(patience_s=10), 1, 0.0)
    assert tries.wait_s(refused(), 50.0, 0.0)
    assert tries.wait_s(refused(), 59.0, 0.0)
    with pytest.raises(Unavailable):
        tries.wait_s(refused(), 60.0, 0.0)
    with pytest.raises(Unavailable):  # a hint beyond it is not waited for
        Tries(Retry(patience_s=10), 1, 0.0).wait_s(refused(10_001), 0.0, 0.0)


def test_the_callers_deadline_is_kept() -> None:
    tries = Tries(Retry(first_wait_s=1.0), 1, 100.0, timeout_s=5.0)
    assert tries.left_s(101.0) == 4.0
    assert tries.wait_s(refused(), 101.0, 1.0) == 1.0
    with pytest.raises(DeadlineExceeded, match="timeout_s: 5; last UNAVAILABLE: no room"):
        tries.wait_s(refused(), 104.5, 1.0)
    with pytest.raises(DeadlineExceeded):
        tries.left_s(105.0)
    assert Tries(Retry(), 1, 0.0).left_s(1e9) is None


@pytest.mark.parametrize(
    ("code", "hint", "again"),
    [
        ("UNAVAILABLE", None, True),
        ("CANCELLED", None, True),  # the other side's: it stops
        ("RESOURCE_EXHAUSTED", 100, True),  # a quota that says when
        ("RESOURCE_EXHAUSTED", None, False),  # a limit
        ("INVALID_ARGUMENT", 100, False),
        ("ABORTED", None, False),
        ("DEADLINE_EXCEEDED", 100, False),
        ("INTERNAL", None, False),
    ],
)
def test_what_was_refused_for_a_reason_is_not_asked_again(code: str, hint: int | None, again: bool) -> None:
    tries = Tries(Retry(), 1, 0.0)
    if again:
        assert tries.wait_s(error_of(code, "", hint), 0.0, 0.5) > 0
    else:
        with pytest.raises(ShoalError) as caught:
            tries.wait_s(error_of(code, "", hint), 0.0, 0.5)
        assert caught.value.code == code


def test_without_retry_the_first_failure_is_the_last() -> None:
    with pytest.raises(Unavailable):
        Tries(None, 2, 0.0).wait_s(refused(1), 0.0, 0.0)


def test_who_wants_to_know_is_told_before_each_wait() -> None:
    heard: list[ShoalError] = []
    tries = Tries(Retry(patience_s=1, first_wait_s=0.1, on_wait=heard.append), 2, 0.0)
    first, second = refused(), refused()
    tries.wait_s(first, 0.0, 1.0)
    assert heard == [], "the other address is tried at once"
    tries.wait_s(second, 0.0, 1.0)
    assert heard == [second]
    tries.wait_s(refused(), 0.0, 1.0)
    with pytest.raises(Unavailable):
        tries.wait_s(refused(2000), 0.0, 1.0)
    assert heard == [second]

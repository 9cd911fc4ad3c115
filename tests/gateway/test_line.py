"""The line at the door: what it says before it knows, how near it comes, who counts for whom."""

import random

import pytest

from chassis.errors import Code, Status
from gateway.line import BEGAN_MIN, LINE_MIN, PRIORITIES, Line, Lines, Waiting


class Queue:
    """Requests begin in the order of priority and age, `rate` a second while any wait."""

    def __init__(self, rate: float) -> None:
        self.line = Line()
        self.now = 0.0
        self._each_s = 1 / rate
        self._waiting: list[tuple[int, int, Waiting]] = []
        self._numbers = 0

    def come(self, priority: int = 5) -> float | None:
        wait_s = self.line.wait_s(priority, self.now)
        self._numbers += 1
        self._waiting.append((priority, self._numbers, self.line.enter(priority, self.now)))
        return wait_s

    def serve(self, seconds: float) -> None:
        until = self.now + seconds
        while self._waiting and self.now + self._each_s <= until:
            self.now += self._each_s
            first = min(self._waiting, key=lambda one: one[:2])
            self._waiting.remove(first)
            first[2].ends(self.now, began=True)
        self.now = until

    def hang_up(self) -> None:
        self._waiting.pop()[2].ends(self.now, began=False)


def test_nothing_is_said_of_a_line_that_was_not_seen_to_move() -> None:
    queue = Queue(100.0)
    assert [queue.come() for _ in range(500)] == [None] * 500
    queue.serve(0.2)
    assert queue.come() is None


def test_few_at_once_are_no_line() -> None:
    """They may begin together: how often they come says nothing of how fast they could."""
    queue = Queue(1000.0)
    for _ in range(200):
        for _ in range(LINE_MIN - 1):
            assert queue.come() is None
        queue.serve(1.0)


@pytest.mark.parametrize("rate", [20.0, 450.0])
def test_what_it_says_is_what_the_last_would_wait(rate: float) -> None:
    queue = Queue(rate)
    for _ in range(round(rate) * 3 + 2 * round(BEGAN_MIN)):
        queue.come()
    queue.serve(2.0 + BEGAN_MIN / rate)
    waits = len(queue.line)
    said = queue.come()
    assert said is not None and said == pytest.approx(waits / rate, rel=0.1)
    queue.serve(said * 1.2)
    assert len(queue.line) == 0 and queue.line.wait_s(5, queue.now) == 0.0


def test_a_slower_pace_is_noticed_while_the_line_stands() -> None:
    queue = Queue(100.0)
    for _ in range(1000):
        queue.come()
    queue.serve(5.0)
    queue._each_s = 1 / 10
    queue.serve(10.0)
    said = queue.line.wait_s(5, queue.now)
    assert said is not None and said == pytest.approx(len(queue.line) / 10, rel=0.3)


def test_who_comes_behind_does_not_count_and_who_hangs_up_no_more() -> None:
    queue = Queue(100.0)
    for _ in range(400):
        queue.come(5)
    queue.serve(2.0)
    before = queue.come(5)
    for _ in range(100):
        queue.come(9)
    assert before is not None and queue.line.wait_s(4, queue.now) == 0.0
    same, behind = queue.line.wait_s(5, queue.now), queue.line.wait_s(9, queue.now)
    assert same == pytest.approx(before, rel=0.02) and behind == pytest.approx(before + 1.0, rel=0.1)
    for _ in range(100):
        queue.hang_up()
    assert queue.line.wait_s(9, queue.now) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_who_waits_is_counted_once(seed: int) -> None:
    dice, line, now = random.Random(seed), Line(), 0.0
    waiting: list[Waiting] = []
    for _ in range(500):
        now += dice.choice([0.0, 0.001, 0.1])
        if waiting and dice.random() < 0.5:
            one = waiting.pop(dice.randrange(len(waiting)))
            one.ends(now, dice.random() < 0.8)
            one.ends(now, True)  # said again
        else:
            waiting.append(line.enter(dice.randrange(PRIORITIES), now))
        assert len(line) == len(waiting)
        said = line.wait_s(9, now)
        assert said is None or said >= 0


def test_who_would_wait_too_long_is_told_how_long_and_when_to_come_again() -> None:
    lines, now = Lines(200), 0.0
    line = [lines.enter("m", 5, now) for _ in range(200)]
    lines.check("m", 5, now)  # nothing is known yet
    for one in line[:100]:
        now += 0.01
        assert one is not None
        one.ends(now, began=True)
    with pytest.raises(
        Status, match="wait_max_ms: its first token would take about 1000 ms; at most 200"
    ) as told:
        lines.check("m", 5, now)
    assert told.value.code is Code.UNAVAILABLE and told.value.retry_ms == 800
    lines.check("m", 4, now)
    lines.check("other", 5, now)
    for one in line[100:181]:
        now += 0.01
        assert one is not None
        one.ends(now, began=True)
    lines.check("m", 5, now)


def test_all_may_wait_where_nothing_is_said() -> None:
    lines = Lines(0)
    assert lines.enter("m", 5, 0.0) is None
    lines.check("m", 5, 0.0)

"""Whose turn it is to be fetched: priority first, and nobody starves in the stream."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.turns import Turns

OVERTAKES, FETCH, ROOM = 16, 32, 1024


class Stream:
    """A backlog per priority; what was taken past each priority that waits, in its own measure."""

    def __init__(self, backlog: list[int]) -> None:
        self.backlog = backlog
        self.turns = Turns(len(backlog), OVERTAKES, FETCH)
        self.taken: list[int] = []
        self.passed = [Fraction(0)] * len(backlog)
        self.worst = [Fraction(0)] * len(backlog)

    def answer(self, priority: int, asked: int) -> int:
        """The broker answers a poll with what there is."""
        num = min(asked, self.backlog[priority])
        self.backlog[priority] -= num
        self.taken += [priority] * num
        for lower in range(priority + 1, len(self.backlog)):
            if self.backlog[lower]:
                self.passed[lower] += Fraction(num, lower - priority)
                self.worst[lower] = max(self.worst[lower], self.passed[lower])
        if num:
            self.passed[priority] = Fraction(0)
        self.turns.came(priority, num)
        self.turns.check()
        return num

    def round(self, room: int = ROOM) -> int:
        """Each priority in turn asks and is answered at once."""
        num = 0
        for priority in range(len(self.backlog)):
            while asked := self.turns.ask(priority, room - num):
                came = self.answer(priority, asked)
                num += came
                if not came:
                    break
        return num


def test_the_highest_comes_first_while_lower_ones_wait_for_their_turn() -> None:
    stream = Stream([100, 0, 100])
    while stream.backlog[2] == 100:
        stream.round()
    assert stream.taken == [*[0] * 32, 2], "two levels up: two times sixteen"


def test_every_priority_is_served_within_the_stated_bound() -> None:
    stream = Stream([5000] * 10)
    while len(stream.taken) < 5000:
        stream.round(room=64)
    at_once = sum(Fraction(1, n) for n in range(1, 10))  # every priority above has its own turn then
    assert all(0 < worst <= OVERTAKES + at_once for worst in stream.worst[1:]), stream.worst
    shares = [stream.taken.count(p) / len(stream.taken) for p in range(10)]
    assert shares[0] > 0.8 and shares == sorted(shares, reverse=True), "priority still means something"


def test_a_single_low_request_is_not_passed_for_ever() -> None:
    stream = Stream([10_000] + [0] * 8 + [1])
    while stream.backlog[9]:
        stream.round(room=40)
    assert stream.worst[9] <= OVERTAKES
    assert len(stream.taken) == 9 * OVERTAKES + 1


def test_what_is_empty_holds_nobody_up_again() -> None:
    """A lower priority is waited for once when its turn comes; then its poll is out, in vain."""
    turns = Turns(2, OVERTAKES, FETCH)
    assert turns.ask(0, ROOM) == OVERTAKES
    turns.came(0, OVERTAKES)
    assert turns.ask(0, ROOM) == 0, "its turn first"
    assert turns.ask(1, ROOM) == 1
    assert turns.ask(0, ROOM) == 0
    turns.is_quiet(1)
    for _ in range(10):
        assert turns.ask(0, ROOM) == FETCH
        turns.came(0, FETCH)
    turns.came(1, 0)  # a long poll ends and the next one begins
    assert turns.ask(0, ROOM) == FETCH
    assert turns.ask(1, ROOM) == 1


def test_who_cannot_be_asked_holds_nobody_up() -> None:
    turns = Turns(2, OVERTAKES, FETCH)
    turns.came(0, turns.ask(0, ROOM))
    assert turns.ask(1, ROOM) == 1
    turns.failed(1)
    assert turns.ask(0, ROOM) == FETCH


def test_lower_ones_ask_for_many_only_while_all_above_are_empty() -> None:
    turns = Turns(3, OVERTAKES, FETCH)
    assert turns.ask(1, ROOM) == 0
    assert turns.ask(0, ROOM) > 0
    turns.is_quiet(0)
    assert turns.ask(1, ROOM) == OVERTAKES
    turns.came(1, OVERTAKES)
    turns.came(0, 0)
    assert turns.ask(2, ROOM) == 1


@pytest.mark.parametrize("room", [1, 5, 9, 40, 1024])
def test_polls_under_way_fit_the_room_but_for_one_each(room: int) -> None:
    turns, asked = Turns(10, OVERTAKES, FETCH), []
    for priority in range(10):
        asked.append(turns.ask(priority, room))
        turns.is_quiet(priority)
    assert all(asked) and sum(asked) <= max(room, 10)
    turns.came(0, 0)
    assert turns.ask(0, 0) == 0


@given(st.integers(0, 1 << 32))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_polls_answered_in_any_order_starve_nobody_and_never_stall(seed: int) -> None:
    rng = random.Random(seed)
    stream = Stream([rng.choice((0, 0, 3, 100)) for _ in range(10)])
    under_way: dict[int, int] = {}
    for _ in range(6000):
        if not any(stream.backlog):
            break
        for priority in rng.sample(range(10), 10):
            if priority not in under_way and (asked := stream.turns.ask(priority, ROOM)):
                under_way[priority] = asked
        assert under_way, "requests wait and nobody asks"
        priority = rng.choice(list(under_way))
        if stream.backlog[priority] or rng.random() < 0.2:
            stream.answer(priority, under_way.pop(priority))
        else:
            stream.turns.is_quiet(priority)
        if rng.random() < 0.01:
            stream.backlog[rng.randrange(10)] += rng.randint(1, 40)
    else:
        raise AssertionError("it stalls")
    for lower, worst in enumerate(stream.worst):
        assert worst <= OVERTAKES + FETCH * lower


def test_at_the_beginning_each_asks_for_one() -> None:
    turns = Turns(3, OVERTAKES, FETCH)
    turns.begin()
    assert [turns.ask(priority, ROOM) for priority in range(3)] == [OVERTAKES, 1, 1]
    turns.came(1, 1)
    assert turns.ask(1, ROOM) == 0, "and then it waits for those above"
    turns.begin()
    assert turns.ask(1, 0) == 0 and turns.ask(1, ROOM) == 1
    turns.check()

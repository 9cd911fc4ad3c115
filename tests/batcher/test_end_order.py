"""`preserve_ordering`: ends are told in the order of arrival, whatever is done first."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.queueing import Queueing
from chassis.ids import RequestId
from chassis.messages.request import Limits, Reason
from tests.batcher.test_scheduler import settle
from tests.batcher.toy_pipeline import EOS, World, make_config, make_request


def world(seed: int = 1, **changes: object) -> World:
    made = World(Random(seed), make_config(queueing=Queueing(preserve_ordering=True), **changes), 64)
    made.form(pool_changed=True)
    settle(made)
    return made


def bring(made: World, name: str, output: int, priority: int = 5) -> None:
    made.add(make_request(name, [1, 2, 3], Limits(output, ignore_eos=True), priority))


def run_until(made: World, name: str) -> None:
    while len(made.outputs.get(RequestId(name), ())) < made.requests[RequestId(name)].limits.max_tokens:
        settle(made)
        made.execute()


def test_an_end_waits_for_those_that_came_before() -> None:
    made = world()
    bring(made, "long", 12)
    bring(made, "short", 3)
    bring(made, "other priority", 3, priority=4)
    run_until(made, "short")
    assert list(made.ended) == ["other priority"]
    assert all(s.request.id != "short" for s in made.scheduler._running), "its place is free"
    made.finish(400)
    assert list(made.ended) == ["other priority", "long", "short"]
    made.check_answers()


def test_who_goes_is_waited_for_no_more() -> None:
    made = world()
    bring(made, "long", 12)
    bring(made, "short", 3)
    run_until(made, "short")
    made.stop(RequestId("long"))
    assert list(made.ended) == ["short"]


def test_an_untold_end_can_be_stopped_and_begun_again() -> None:
    made = world()
    bring(made, "long", 12)
    bring(made, "short", 3)
    run_until(made, "short")
    had = made.scheduler.stop(RequestId("short"), made.now)
    assert had is not None and len(had.output_ids) == 3
    assert made.scheduler.stop(RequestId("short"), made.now) is None
    bring(made, "again", 3)
    run_until(made, "again")
    made.run(made.requests[RequestId("again")], (), alone=False)
    made.finish(400)
    assert list(made.ended) == ["long", "again"]


def test_refused_and_late_ones_do_not_wait() -> None:
    made = world()
    bring(made, "long", 12)
    made.add(make_request("late", [1], Limits(3)), deadline=made.now)
    assert made.ended[RequestId("late")].reason is Reason.DEADLINE
    made.finish(400)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_whatever_happens_ends_come_in_order(seed: int) -> None:
    made = world(seed, sequences_max=3)
    dice, came, stopped = made.dice, 0, set()
    for _ in range(300):
        act = dice.random()
        if act < 0.1 and came < 20:
            prompt = [dice.randrange(EOS) for _ in range(dice.randint(1, 9))]
            request = make_request(f"r{came}", prompt, Limits(dice.randint(1, 9)), dice.choice([4, 5]))
            made.add(request)
            came += 1
        elif act < 0.12 and (held := made.scheduler.request_ids()):
            name = dice.choice(held)
            made.stop(name)
            stopped.add(name)
        else:
            made.plan()
            if made.calls or made.ring or made.scheduler.request_ids():
                made.turn()
    made.finish(2000)
    assert sorted(made.ended) == sorted(set(made.requests) - stopped)
    for priority in (4, 5):
        told = [name for name in made.ended if made.requests[name].priority == priority]
        assert told == sorted(told, key=lambda name: int(name[1:]))
    made.check_answers()

"""The core of a batch: by hand, with a moved clock, and against a driver's world that fails at random."""

import random
from dataclasses import replace

import pytest

from chassis.messages.batches import Batch, BatchState, Problem, build_batch, parse_batch
from chassis.messages.jobs import CANCELLED, EXPIRED
from gateway.batches.driving import OFFERED_LEN_MAX, Driving
from gateway.batches.events import (
    Answered,
    AnswerSeen,
    Close,
    Effect,
    Event,
    Leave,
    Load,
    Loaded,
    Offer,
    Offered,
    Save,
    Seen,
    Tick,
    Write,
    Written,
)

NEW = Batch("batch_1", "t", "", "/v1/completions", "file-1", 100, 100 + 86400)


def only(effects: list[Effect]) -> Effect:
    (effect,) = effects
    return effect


def saved(effects: list[Effect]) -> Batch:
    effect = only(effects)
    assert isinstance(effect, Save)
    return effect.batch


def begun(total: int, core: Driving | None = None, batch: Batch = NEW) -> tuple[Driving, Batch, list[Effect]]:
    """In progress, and what it wants first."""
    core = core or Driving("me")
    claimed = saved(core.handle(Seen(100, batch)))
    assert claimed.driver == "me"
    assert only(core.handle(Seen(100, claimed))) == Load()
    running = saved(core.handle(Loaded(101, total, "m")))
    assert (running.state, running.total, running.in_progress_at) == (BatchState.IN_PROGRESS, total, 101)
    return core, running, core.handle(Seen(101, running))


def test_from_validating_to_completed() -> None:
    core, batch, effects = begun(3)
    assert only(effects) == Offer((0, 1, 2), 86399)
    assert core.handle(Offered(102, (0, 1, 2))) == []
    some = (AnswerSeen(1, True, 5, 1, 2), AnswerSeen(0, False), AnswerSeen(1, True, 5, 1, 2))
    counted = saved(core.handle(Answered(103, some)))
    assert (counted.tally.completed, counted.tally.failed, counted.tally.output_tokens) == (1, 1, 2)
    assert core.handle(Seen(103, counted)) == []
    last = saved(core.handle(Answered(104, (AnswerSeen(2, True, 5, 0, 2),))))
    assert (last.state, last.ending, last.finalizing_at) == (BatchState.FINALIZING, BatchState.COMPLETED, 104)
    assert only(core.handle(Seen(104, last))) == Write()
    done = saved(core.handle(Written(105, "o", "e")))
    assert (done.state, done.completed_at, done.output_file_id) == (BatchState.COMPLETED, 105, "o")
    assert parse_batch(build_batch(done)) == done
    assert only(core.handle(Seen(105, done))) == Leave(over=True)


def test_a_file_with_errors_fails_the_batch() -> None:
    core = Driving("me")
    core.handle(Seen(100, replace(NEW, driver="me")))
    problem = Problem("invalid_json_line", "not JSON", 3)
    failed = saved(core.handle(Loaded(101, 0, None, (problem,))))
    assert (failed.state, failed.failed_at, failed.problems) == (BatchState.FAILED, 101, (problem,))
    assert only(core.handle(Seen(101, failed))) == Leave(over=True)


def test_its_time_is_over() -> None:
    core, batch, _ = begun(3)
    core.handle(Offered(102, (0, 1)))
    core.handle(Answered(103, (AnswerSeen(0, True),)))
    core.handle(Seen(104, batch))
    assert isinstance(only(core.handle(Tick(batch.expires_at - 1))), Offer)
    over = saved(core.handle(Tick(batch.expires_at)))
    assert (over.state, over.ending) == (BatchState.FINALIZING, BatchState.EXPIRED)
    assert only(core.handle(Seen(batch.expires_at, over))) == Close((2, 1), EXPIRED, (1,))
    told = core.handle(Answered(batch.expires_at + 5, (AnswerSeen(2, False), AnswerSeen(1, True))))
    assert only(told) == Write()
    done = saved(core.handle(Written(batch.expires_at + 6, "o", "e")))
    assert (done.state, done.expired_at) == (BatchState.EXPIRED, batch.expires_at + 6)
    assert (done.tally.completed, done.tally.failed) == (2, 1)


def test_a_cancel_keeps_what_was_done_and_stops_the_rest() -> None:
    core, batch, _ = begun(3)
    core.handle(Offered(102, (0, 1)))
    core.handle(Answered(102, (AnswerSeen(0, True),)))
    cancelling = replace(batch, state=BatchState.CANCELLING, cancelling_at=103)
    counted = saved(core.handle(Seen(103, cancelling)))
    assert (counted.state, counted.tally.completed) == (BatchState.CANCELLING, 1)
    assert only(core.handle(Seen(103, counted))) == Close((2, 1), CANCELLED, (1,))
    assert only(core.handle(Answered(104, (AnswerSeen(1, False), AnswerSeen(2, False))))) == Write()
    done = saved(core.handle(Written(105, "o", "e")))
    assert (done.state, done.cancelled_at, done.tally.completed) == (BatchState.CANCELLED, 105, 1)


def test_a_cancel_before_its_file_was_read() -> None:
    core = Driving("me")
    cancelling = replace(NEW, driver="me", state=BatchState.CANCELLING, cancelling_at=100)
    assert only(core.handle(Seen(100, cancelling))) == Load()
    assert only(core.handle(Loaded(101, 2, "m"))) == Close((0, 1), CANCELLED, ())
    other = Driving("me")
    other.handle(Seen(100, cancelling))
    done = saved(other.handle(Loaded(101, 0, None, (Problem("empty_file", "no request"),))))
    assert (done.state, done.problems) == (BatchState.CANCELLED, ())


def test_who_was_taken_over_leaves_and_who_is_new_takes_over() -> None:
    core, batch, _ = begun(3)
    assert only(core.handle(Seen(103, replace(batch, driver="other")))) == Leave(over=False)
    fresh = Driving("new")
    assert saved(fresh.handle(Seen(103, batch))).driver == "new"


def test_no_more_is_offered_than_the_window() -> None:
    core, _, effects = begun(OFFERED_LEN_MAX + 100)
    offered = 0
    while effects:
        offer = only(effects)
        assert isinstance(offer, Offer)
        offered += len(offer.indexes)
        effects = core.handle(Offered(102, offer.indexes))
        core.check()
    assert offered == OFFERED_LEN_MAX
    assert only(
        [e for e in core.handle(Answered(102, (AnswerSeen(7, True),))) if isinstance(e, Offer)]
    ) == Offer((OFFERED_LEN_MAX,), NEW.expires_at - 102)


@pytest.mark.parametrize("seed", range(40))
def test_drivers_that_die_anywhere_leave_one_answer_each_and_one_end(seed: int) -> None:
    """A world where effects fail, answers come when they like, a cancel may come, and drivers are killed."""
    rng = random.Random(seed)
    total, now = rng.choice((1, 7, 300)), 100
    stored, written, version, known = NEW, 0, 0, 0
    answers: dict[int, AnswerSeen] = {}
    jobs: set[int] = set()
    ends: list[BatchState] = []
    slow = rng.random() < 0.2  # the window passes first

    def perform(effect: Effect) -> list[Event]:
        nonlocal stored, written, version, known
        if rng.random() < 0.2:
            return []
        match effect:
            case Load():
                return [Loaded(now, total, "m", (), tuple(answers.values()))]
            case Save(batch):
                if version != known:
                    known = version
                    return [Seen(now, stored)]
                assert not stored.state.over, "nothing is written over an end"
                stored, version = batch, version + 1
                ends.extend([batch.state] if batch.state.over else [])
                if rng.random() < 0.2:
                    return []  # stored, and nobody was told
                known = version
                return [Seen(now, batch)]
            case Offer(indexes):
                some = indexes[: rng.randint(0, len(indexes))]
                jobs.update(some)
                return [Offered(now, some)]
            case Close(indexes):
                for i in indexes:
                    if rng.random() < 0.9:
                        answers.setdefault(i, AnswerSeen(i, False))
                return [Answered(now, tuple(answers.values()))]
            case Write():
                assert len(answers) == total
                written += 1
                return [Written(now, "o", None)]
            case Leave():
                raise AssertionError("not performed")

    for turn in range(5000):
        core = Driving(f"driver{turn}")
        events: list[Event] = [Seen(now, stored)]
        known = version
        while events and rng.random() > 0.01:
            effects: list[Effect] = []
            for event in events:
                effects = core.handle(event)
            events = []
            for effect in effects:
                if isinstance(effect, Leave):
                    assert effect.over and stored.state.over
                    assert ends == [stored.state] and written >= 1
                    tally = stored.tally
                    assert (tally.completed + tally.failed, len(answers)) == (total, total)
                    assert tally.completed == sum(a.ok for a in answers.values())
                    assert not slow or stored.state in (BatchState.EXPIRED, BatchState.CANCELLED)
                    return
                events += perform(effect)
            core.check()
            now += rng.choice((0, 0, 1, 500 if slow else 1))
            if not slow:
                for i in sorted(jobs):
                    if rng.random() < 0.1:
                        answers.setdefault(i, AnswerSeen(i, True))
            if rng.random() < 0.001 and stored.state is BatchState.IN_PROGRESS:
                stored, version = replace(stored, state=BatchState.CANCELLING, cancelling_at=now), version + 1
            if not events:
                events, known = [Seen(now, stored)], version
                if core._loaded:
                    events.append(Answered(now, tuple(answers.values())))
    raise AssertionError("no end")

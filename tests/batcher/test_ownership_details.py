"""What the rows of the table leave to the reader: ghosts, and what is forgotten or kept between states."""

import pytest

from batcher import events as e
from batcher.audience import Audience
from batcher.ownership import State
from chassis.ids import Attempt
from chassis.messages.ownership import AttachKind, Refused
from chassis.messages.request import (
    Cancel,
    Claim,
    Reason,
    Terminal,
    Timings,
    Usage,
)
from tests.batcher.ownership_rig import ME, OTHER, G, H, R, Rig

A1, A2, A3 = Attempt(1), Attempt(2), Attempt(3)


def last_record(rig: Rig) -> object:
    return [x for x in rig.seen if isinstance(x, e.Append)][-1].record


# ---- ghosts ----------------------------------------------------------------------------------------


def test_an_answer_to_an_earlier_call_is_a_ghost() -> None:
    rig = Rig().reading()
    earlier = rig.calls[e.ReadLast]
    rig.read_same(None, failed=True)
    rig.wait(0.2)
    assert rig.calls[e.ReadLast] > earlier
    rig.do(e.ReadDone(rig.now, R, earlier, None, 0))
    assert rig.dropped() and rig.at(State.READING)


@pytest.mark.parametrize("state", [State.VERIFYING, State.CLAIMING])
def test_the_scheduler_is_not_heard_about_what_was_stopped(state: State) -> None:
    rig = Rig().verifying(10) if state is State.VERIFYING else Rig().claiming()
    rig.cancel()
    assert rig.out == [e.Stop(R)]
    rig.end(10, 11)
    assert rig.dropped()
    rig.do(e.WorkersDied(rig.now, (R,)))
    assert rig.dropped()
    rig.cancel()
    assert rig.dropped(), "once is enough"


@pytest.mark.parametrize("what", ["yes", "refused"])
def test_gateways_words_wait_for_no_verification(what: str) -> None:
    rig = Rig().verifying(10)
    if what == "yes":
        rig.do(e.TakeoverAnswered(rig.now, R, G, A1, (10, 11), None))
    else:
        rig.hear(Refused(R, G, A1, differs=(9,)))
    assert rig.dropped() and rig.at(State.VERIFYING)


def test_a_fence_is_counted() -> None:
    rig = Rig().verifying()
    rig.read(Claim(A2, OTHER))
    assert e.Count("ownership.fenced") in rig.out


# ---- attach ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", [State.WAITING, State.READING, State.ASKING, State.CLAIMING, State.TAKEOVER]
)
def test_attach_before_owning_is_unknown(state: State) -> None:
    rig = {
        State.WAITING: Rig.waiting,
        State.READING: Rig.reading,
        State.ASKING: Rig.asking,
        State.CLAIMING: Rig.claiming,
        State.TAKEOVER: Rig.takeover,
    }[state](Rig())
    rig.attach(attempt=0)
    assert rig.one(e.AnswerAttach).kind is AttachKind.UNKNOWN and rig.of(e.Count)
    assert rig.at(state)


@pytest.mark.parametrize("state", [State.VERIFYING, State.WRITING])
def test_attach_while_the_log_is_unclear(state: State) -> None:
    rig = Rig().verifying(10, 11) if state is State.VERIFYING else Rig().writing(10, 11)
    rig.attach(9)
    assert rig.one(e.AnswerAttach).kind is AttachKind.UNKNOWN and rig.of(e.Count)
    rig.attach(10)
    assert rig.one(e.AnswerAttach).kind is AttachKind.ATTACHED and not rig.of(e.SendParts)
    if state is State.VERIFYING:
        rig.read_same(Claim(A1, ME))
    else:
        rig.stored()
        assert len(rig.finishes(H)) == 1
    assert rig.parts(H)[0].ids == (11,)


def test_attach_with_more_than_the_request_allows_diverges() -> None:
    rig = Rig(max_tokens=2).running(10)
    rig.attach(1, 2, 3)
    assert rig.one(e.AnswerAttach).kind is AttachKind.DIVERGED
    assert e.Count("ownership.diverged") in rig.out and not rig.of(e.Run)


def test_a_late_yes_attaches_and_gets_the_rest() -> None:
    rig = Rig().takeover()
    rig.yes(10)
    rig.wait(0.2)
    rig.make(11)
    rig.yes(10, gateway=H)
    assert rig.parts(H)[0].ids == (11,) and rig.at(State.RUNNING)
    rig.yes(77, gateway=H)
    assert rig.one(e.Run).output_ids == (77,), "like an attach"
    rig.yes(88, gateway=H)
    assert e.Count("ownership.diverged") in rig.out and not rig.parts(H)


def test_other_gateways_go_on_from_where_the_forced_output_ends() -> None:
    rig = Rig().running(10, 11, 12)
    rig.attach(10, 99)
    rig.make(100)
    assert (rig.parts(G)[0].first_index, rig.parts(G)[0].ids) == (2, (100,))


def test_forced_once_per_attempt_survives_a_verification() -> None:
    rig = Rig().running(10)
    rig.attach(20)
    rig.deliver(count=2)
    rig.read_same(Claim(A1, ME))
    rig.attach(30)
    assert rig.one(e.AnswerAttach).kind is AttachKind.DIVERGED


# ---- takeover --------------------------------------------------------------------------------------


def test_who_answered_is_served_and_counts_nothing() -> None:
    rig = Rig().takeover()
    rig.yes()
    rig.wait(15)
    assert rig.at(State.RUNNING)


def reclaimed(rig: Rig) -> Rig:
    """My next claim is stored; the gateways are asked."""
    rig.do(e.WorkersDied(rig.now, (R,)))
    rig.stored()
    assert rig.at(State.TAKEOVER)
    return rig


def test_each_takeover_asks_twice() -> None:
    rig = Rig().takeover()
    rig.wait(0.4)
    reclaimed(rig).wait(0.2)
    assert rig.at(State.TAKEOVER)
    rig.wait(0.2)
    assert rig.at(State.RUNNING)


def test_answers_to_an_earlier_takeover_are_forgotten() -> None:
    rig = Rig().takeover()
    rig.yes(10)
    rig.no(5)
    rig.read_same(Claim(A2, ME))
    rig.stored()
    rig.wait(0.2)
    assert rig.at(State.TAKEOVER), "nobody has answered this one"
    rig.yes(20)
    assert next(x for x in rig.wait(0.2) if isinstance(x, e.Run)).output_ids == (20,)


def test_other_ids_downstream_void_an_end() -> None:
    rig = reclaimed(Rig().running(10))
    rig.end(10, 11)
    rig.yes(99)
    effects = rig.wait(0.2)
    assert next(x for x in effects if isinstance(x, e.Run)).output_ids == (99,)
    assert rig.at(State.RUNNING)
    rig.end(99, 100)
    record = last_record(rig)
    assert isinstance(record, Terminal) and record.output_ids == (99, 100)


def test_the_same_ids_downstream_keep_an_end() -> None:
    rig = reclaimed(Rig().running(10))
    rig.end(10, 11)
    rig.yes(10)
    effects = rig.wait(0.2)
    assert rig.at(State.WRITING) and not any(isinstance(x, e.Run) for x in effects)


def test_other_ids_downstream_restart_a_running_sequence() -> None:
    rig = reclaimed(Rig().running(10))
    rig.yes(99)
    effects = [x for x in rig.wait(0.2) if isinstance(x, e.Stop | e.Run)]
    assert [type(x) for x in effects] == [e.Stop, e.Run]


def test_a_refused_claim_forgets_the_one_before() -> None:
    rig = Rig().running(10)
    rig.do(e.WorkersDied(rig.now, (R,)))
    rig.refused()
    assert rig.at(State.READING) and rig.core.attempt(R) is None
    rig.read(Claim(A3, OTHER))
    rig.answer(mine=False, answered=True)
    rig.stored()
    rig.wait(0.4)
    assert [x for x in rig.seen if isinstance(x, e.Run)][-1].output_ids == ()


# ---- ends ------------------------------------------------------------------------------------------


def test_delivered_after_its_deadline_it_never_waits() -> None:
    rig = Rig(timeout_ms=400)
    rig.deliver(age_s=0.5)
    record = last_record(rig)
    assert isinstance(record, Terminal) and record.reason is Reason.DEADLINE and not rig.of(e.Enqueue)


def test_the_owner_of_a_cancelled_claim_says_mine_while_it_ends_it() -> None:
    rig = Rig().reading()
    rig.read(Cancel(A2, ME))
    rig.owner_asked(attempt=2)
    assert rig.one(e.AnswerOwner).mine and rig.at(State.WRITING)


def test_a_cancel_stays_a_cancel_whatever_died() -> None:
    rig = Rig().asking(Claim(A1, OTHER, worker_deaths=2))
    rig.answer(mine=False, answered=True)
    rig.stored()
    rig.yes(10)
    rig.wait(0.2)
    rig.deliver(count=2)
    rig.do(e.WorkersDied(rig.now, (R,)))
    rig.cancel()
    rig.read_same(Claim(A2, ME, worker_deaths=2))
    record = last_record(rig)
    assert isinstance(record, Terminal) and record.reason is Reason.CANCELLED
    rig.stored()
    assert not rig.of(e.DeadLetter)


def test_a_third_death_before_the_takeover_ends_is_not_run_again() -> None:
    rig = Rig().reading()
    rig.read(Claim(A3, ME, worker_deaths=2, batcher_deaths=1))
    rig.yes(10)
    effects = rig.wait(0.2)
    assert not any(isinstance(x, e.Run) for x in effects)
    record = last_record(rig)
    assert isinstance(record, Terminal) and record.reason is Reason.FAILED
    assert record.output_ids == (10,)


def test_what_my_record_says_is_said_whatever_is_held() -> None:
    rig = Rig().verifying(10, 11)
    rig.read(Terminal(A1, ME, Reason.CANCELLED, (10,)))
    assert rig.out[0] == e.Stop(R)
    (finish,) = rig.finishes()
    assert finish.length == 1 and finish.reason is Reason.CANCELLED and not rig.parts()


def test_the_account_of_a_stopped_sequence_is_kept_when_the_end_is_written_again() -> None:
    rig = Rig().running(10)
    rig.cancel()
    record = last_record(rig)
    assert isinstance(record, Terminal)
    usage, timings = Usage(3, 2, 1), Timings(decode_us=7)
    amended = Terminal(A1, ME, record.reason, record.output_ids, usage=usage, timings=timings)
    rig.core.amend(R, amended)
    rig.refused()
    rig.read_same(Claim(A1, ME))
    again = last_record(rig)
    assert isinstance(again, Terminal)
    assert again.usage.cached_tokens == 2 and again.timings.decode_us == 7


def test_rows_of_a_run_that_was_taken_over_and_cancelled() -> None:
    rig = Rig().takeover()
    rig.yes(10)
    rig.wait(0.2)
    rig.now += 0.1
    rig.make(11)
    rig.now += 0.1
    rig.make(12)
    rig.cancel()
    record = last_record(rig)
    assert isinstance(record, Terminal)
    t = record.timings
    rows = (t.queued_us, t.waiting_us, t.prefill_us, t.decode_us, t.interrupted_us)
    assert rows == (500_000, 0, 100_000, 100_000, 200_000)


def test_rows_of_a_run_that_was_restarted_start_with_its_admission() -> None:
    rig = Rig().waiting()
    rig.now += 0.1
    rig.admit()
    rig.stored()
    rig.now += 0.1
    rig.make(10)
    rig.attach(20)
    rig.now += 0.1
    rig.cancel()
    record = last_record(rig)
    assert isinstance(record, Terminal)
    assert record.timings == Timings(500_000, 100_000, 100_000, 100_000)


# ---- poison ----------------------------------------------------------------------------------------


def test_my_own_claim_read_again_keeps_its_deaths() -> None:
    rig = Rig().reading()
    rig.read(Claim(A3, ME, worker_deaths=1, batcher_deaths=1))
    rig.yes()
    assert next(x for x in rig.wait(0.2) if isinstance(x, e.Run)).alone


# ---- the audience ----------------------------------------------------------------------------------


def test_a_count_is_never_lengthened_but_by_sleep() -> None:
    audience = Audience()
    audience.count(10.0, 1.0)
    audience.count(20.0, 5.0)
    assert (audience.count_ends, audience.ask_at) == (10.0, 1.0)
    audience.count_anew(4.0, 3.0)
    assert (audience.count_ends, audience.ask_at) == (13.0, 4.0)
    audience.join(G, 0)
    audience.count_anew(5.0, 1.0)
    assert audience.count_ends is None and audience.ask_at is None

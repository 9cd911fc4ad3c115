"""Table 2.1 of the ownership protocol, row by row. Each test is named for its row."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from batcher import events as e
from batcher.ownership import Ownership, OwnershipConfig, State
from chassis.ids import AckToken, Attempt, BootId, RequestId
from chassis.messages.chunk import extend_digest
from chassis.messages.ownership import AttachKind, CancelAsk, Detached, Refused
from chassis.messages.request import Cancel, Claim, Reason, Terminal
from tests.batcher.ownership_rig import ME, OTHER, G, H, R, Rig, request

A1, A2, A3 = Attempt(1), Attempt(2), Attempt(3)
TERMINAL = Terminal(A1, OTHER, Reason.STOP, (1, 2))

EVERY_STATE: dict[State, Callable[[Rig], Rig]] = {
    State.WAITING: Rig.waiting,
    State.READING: Rig.reading,
    State.ASKING: Rig.asking,
    State.CLAIMING: Rig.claiming,
    State.TAKEOVER: Rig.takeover,
    State.RUNNING: Rig.running,
    State.VERIFYING: Rig.verifying,
    State.WRITING: Rig.writing,
    State.LEAVING: Rig.leaving,
}


def in_state(state: State, **fields: object) -> Rig:
    rig = EVERY_STATE[state](Rig(**fields))  # type: ignore[arg-type]
    assert rig.state is state
    return rig


# ---- NONE ------------------------------------------------------------------------------------------


def test_first_delivery_waits_without_claim() -> None:
    rig = Rig(timeout_ms=2000)
    rig.deliver(count=1, age_s=0.5)
    assert rig.at(State.WAITING)
    assert rig.out == [e.Enqueue(rig.request, 0.5, 101.5)]


def test_redelivery_reads_first() -> None:
    rig = Rig()
    rig.deliver(count=2)
    assert rig.at(State.READING)
    assert rig.one(e.ReadLast).request_id == R and not rig.of(e.Enqueue)


def test_what_is_not_held_is_answered_or_dropped() -> None:
    rig = Rig()
    rig.owner_asked()
    assert rig.out == [e.AnswerOwner(5, False)]
    rig.attach()
    assert rig.out == [e.AnswerAttach(9, AttachKind.UNKNOWN)]
    rig.cancel()
    assert rig.dropped()
    rig.make(1)
    assert rig.dropped()


# ---- given and taken -------------------------------------------------------------------------------


def test_what_waits_is_given_away_and_forgotten_when_it_is_taken() -> None:
    rig = Rig(timeout_ms=5000).waiting()
    rig.now += 0.25
    rig.do(e.GiveAway(rig.now, R, OTHER))
    assert rig.out == [e.Give(rig.request, OTHER, AckToken("t1"), 0.75)]
    assert rig.at(State.WAITING)
    rig.do(e.TakeAnswered(rig.now, R, taken=True))
    assert rig.at(State.NONE) and rig.one(e.Closed).why == "given away"
    assert not rig.of(e.Ack) and not rig.of(e.Nak)


def test_what_nobody_takes_stays() -> None:
    rig = Rig().waiting()
    rig.do(e.GiveAway(rig.now, R, OTHER))
    rig.do(e.TakeAnswered(rig.now, R, taken=False))
    assert rig.dropped() and rig.at(State.WAITING)


def test_what_was_claimed_meanwhile_stays_whoever_takes_it() -> None:
    rig = Rig().waiting()
    rig.do(e.GiveAway(rig.now, R, OTHER))
    rig.admit()
    rig.do(e.TakeAnswered(rig.now, R, taken=True))
    assert rig.dropped() and rig.at(State.CLAIMING)
    rig.do(e.GiveAway(rig.now, R, OTHER))
    assert rig.dropped()


def test_what_is_taken_waits_with_its_age_and_is_not_given_on() -> None:
    rig = Rig(timeout_ms=5000)
    rig.do(e.TakeAsked(rig.now, rig.request, AckToken("t1"), 0.75, reply=5))
    assert rig.out == [e.AnswerOwner(5, True), e.Enqueue(rig.request, 0.75, 104.25, given=True)]
    assert [p.tokens for p in rig.wait(0.3) if isinstance(p, e.Progress)] == [(AckToken("t1"),)]
    rig.do(e.GiveAway(rig.now, R, OTHER))
    assert rig.dropped()


def test_who_holds_it_already_says_that_it_is_taken() -> None:
    rig = Rig().running()
    rig.do(e.TakeAsked(rig.now, rig.request, AckToken("old"), 0.75, reply=5))
    assert rig.out == [e.AnswerOwner(5, True)] and rig.at(State.RUNNING)
    assert [p.tokens for p in rig.wait(0.3) if isinstance(p, e.Progress)] == [(AckToken("t1"),)]


@pytest.mark.parametrize("what", [e.Drain(100.0), e.PipelineChanged(100.0, alive=False)])
def test_who_leaves_or_stands_still_takes_nothing(what: e.OwnershipEvent) -> None:
    rig = Rig()
    rig.do(what)
    rig.do(e.TakeAsked(rig.now, rig.request, AckToken("t1"), 0.75, reply=5))
    assert rig.out == [e.AnswerOwner(5, False)] and rig.at(State.NONE)


# ---- WAITING ---------------------------------------------------------------------------------------


def test_admission_claims_expecting_nothing() -> None:
    rig = Rig().waiting()
    rig.admit()
    append = rig.one(e.Append)
    assert rig.at(State.CLAIMING)
    assert append.expected_seq == 0 and append.record == Claim(A1, ME, b"body")
    assert not rig.of(e.Stop), "prefill goes on meanwhile"


@pytest.mark.parametrize("reason", [Reason.DEADLINE, Reason.CANCELLED, Reason.FAILED])
def test_ends_while_waiting_write_an_unclaimed_terminal(reason: Reason) -> None:
    rig = Rig(timeout_ms=2000).waiting()
    match reason:
        case Reason.DEADLINE:
            rig.wait(1.5)
        case Reason.CANCELLED:
            rig.wait(0.25)
            rig.cancel()
        case _:
            rig.wait(0.25)
            rig.end(reason=Reason.FAILED)
    append = next(x for x in rig.seen if isinstance(x, e.Append))
    assert append.expected_seq == 0 and rig.at(State.WRITING)
    assert isinstance(append.record, Terminal) and append.record.reason is reason
    assert (e.Stop(R) in rig.seen) == (reason is not Reason.FAILED), "the scheduler knows its own refusals"
    t = append.record.timings
    waited_us = {Reason.DEADLINE: 1_500_000}.get(reason, 250_000)
    if reason is not Reason.FAILED:
        assert (t.queued_us, t.waiting_us) == (500_000, waited_us)
        assert append.record.usage.prompt_tokens == 3
    total = t.queued_us + t.waiting_us + t.prefill_us + t.decode_us + t.interrupted_us
    assert total == 500_000 + waited_us
    rig.stored()
    assert rig.finishes()[0].reason is reason
    assert rig.one(e.WriteReceipt).record == append.record
    rig.receipt()
    assert rig.at(State.NONE) and rig.one(e.Ack).token == "t1"


@pytest.mark.parametrize("outcome", [e.Write.REFUSED, e.Write.UNKNOWN])
def test_an_unclaimed_terminal_refused_is_read_as_by_a_receiver(outcome: e.Write) -> None:
    rig = Rig().writing_unclaimed()
    rig.refused(outcome)
    assert rig.at(State.READING)
    rig.read(None)
    assert rig.at(State.WRITING), "it still ends"
    rig.refused(outcome)
    rig.wait(0.1)
    rig.read(Claim(A1, OTHER))
    assert rig.at(State.ASKING)
    rig.answer(mine=True)
    assert rig.at(State.NONE) and not rig.of(e.Ack)


# ---- READING ---------------------------------------------------------------------------------------


def test_reading_nothing_waits() -> None:
    rig = Rig().reading()
    rig.read(None)
    assert rig.at(State.WAITING) and rig.of(e.Enqueue)


def test_reading_the_end_acknowledges() -> None:
    rig = Rig().reading()
    rig.read(TERMINAL)
    assert rig.one(e.WriteReceipt).record == TERMINAL and len(rig.out) == 1
    assert rig.at(State.FINISHING)
    rig.receipt(e.Write.REFUSED)
    assert rig.out == [e.Ack(AckToken("t1")), e.Closed(R, "ended elsewhere")]
    assert rig.at(State.NONE)


@pytest.mark.parametrize("record", [Claim(A3, OTHER), Cancel(A3, OTHER)])
def test_reading_anothers_record_asks_the_boot_it_names(record: Claim | Cancel) -> None:
    rig = Rig().reading()
    rig.read(record)
    ask = rig.one(e.AskOwner)
    assert (ask.boot, ask.attempt, ask.token) == (OTHER, A3, "t1")
    assert ask.cancelled is isinstance(record, Cancel)
    assert rig.at(State.ASKING)


def test_reading_my_claim_takes_its_attempt() -> None:
    rig = Rig().reading()
    rig.read(Claim(A3, ME))
    assert rig.one(e.AskTakeover) == e.AskTakeover(R, A3)
    assert rig.at(State.TAKEOVER) and rig.core.attempt(R) == 3


def test_a_copy_with_another_body_goes_when_its_key_is_taken() -> None:
    """Stored under another subject; taking the claim over would run this body under that one's log."""
    rig = Rig().reading()
    rig.read(Claim(A1, OTHER, b"another body"))
    assert rig.out == [e.Ack(AckToken("t1")), e.Closed(R, "another body")] and rig.at(State.NONE)


@pytest.mark.parametrize("boot", [ME, ""])
def test_reading_a_cancel_of_mine_or_of_nobody_ends_it(boot: str) -> None:
    rig = Rig().reading()
    rig.read(Cancel(Attempt(1 if boot else 0), boot))  # type: ignore[arg-type]
    append = rig.one(e.Append)
    assert isinstance(append.record, Terminal) and append.record.reason is Reason.CANCELLED
    assert append.expected_seq == 1 and rig.at(State.WRITING)


def test_a_failed_read_is_repeated_with_growing_waits() -> None:
    rig = Rig().reading()
    waits = []
    for _ in range(6):
        rig.read_same(None, failed=True)
        since = rig.now
        reads = [x for _ in range(30) for x in rig.wait(0.05) if isinstance(x, e.ReadLast)]
        assert len(reads) == 1
        waits.append(round(rig.read_at - since, 2))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


# ---- ASKING ----------------------------------------------------------------------------------------


def test_a_living_owner_keeps_it() -> None:
    rig = Rig().asking()
    rig.answer(mine=True)
    assert rig.out == [e.Closed(R, "owned elsewhere")] and rig.at(State.NONE)


@pytest.mark.parametrize("how", ["not mine", "no responder", "silence"])
def test_without_owner_it_claims_above_the_record(how: str) -> None:
    rig = Rig().asking(Claim(A3, OTHER, batcher_deaths=1))
    if how == "silence":
        rig.wait(0.2)
    else:
        rig.answer(mine=False, answered=how == "not mine")
    (append,) = [x for x in rig.seen if isinstance(x, e.Append)]
    deaths = 1 if how == "not mine" else 2
    assert append.record == Claim(Attempt(4), ME, b"body", batcher_deaths=deaths)
    assert append.expected_seq == 1 and rig.at(State.CLAIMING)


@pytest.mark.parametrize("how", ["no responder", "silence"])
def test_an_owner_that_left_is_not_counted_as_dead(how: str) -> None:
    """Three restarts in good order would fail a long request as poison."""
    rig = Rig().asking(Claim(A3, OTHER, worker_deaths=1, batcher_deaths=1, left=True))
    if how == "silence":
        rig.wait(0.2)
    else:
        rig.answer(mine=False)
    append = [x for x in rig.seen if isinstance(x, e.Append)][-1]
    assert append.record == Claim(Attempt(4), ME, b"body", worker_deaths=1, batcher_deaths=1)


@pytest.mark.parametrize("state", [State.READING, State.VERIFYING])
def test_what_i_left_i_claim_anew(state: State) -> None:
    """Or my own death would not be counted afterwards."""
    rig = in_state(state)
    rig.read(Claim(A1, ME, left=True))
    assert rig.one(e.Append).record == Claim(A2, ME, b"body") and rig.at(State.CLAIMING)


def test_before_silence_nothing_is_claimed() -> None:
    rig = Rig().asking()
    rig.wait(0.19)
    assert rig.at(State.ASKING)


def test_a_cancelled_one_without_owner_is_ended_and_never_claimed() -> None:
    rig = Rig().asking(Cancel(A3, OTHER))
    rig.wait(0.2)
    (append,) = [x for x in rig.seen if isinstance(x, e.Append)]
    assert isinstance(append.record, Terminal) and append.record.reason is Reason.CANCELLED
    assert (append.record.attempt, append.expected_seq) == (3, 1) and rig.at(State.WRITING)


# ---- CLAIMING --------------------------------------------------------------------------------------


def test_parts_wait_for_the_first_claim_and_go_with_it() -> None:
    rig = Rig().claiming()
    rig.make(10, 11)
    assert not rig.of(e.SendParts)
    rig.stored()
    (part,) = rig.parts()
    assert (part.first_index, part.ids, part.attempt) == (0, (10, 11), 1)
    assert part.digest == extend_digest(0, (10, 11)) and rig.at(State.RUNNING)


def test_an_end_before_the_claim_is_stored_is_written_after_it() -> None:
    rig = Rig().claiming()
    rig.end(10)
    assert rig.at(State.CLAIMING) and not rig.of(e.Append)
    rig.stored()
    assert rig.at(State.WRITING) and isinstance(rig.one(e.Append).record, Terminal)
    assert rig.parts()[0].ids == (10,) and not rig.finishes()


def test_a_later_claim_asks_the_gateways() -> None:
    rig = Rig().reclaiming()
    rig.stored()
    assert rig.at(State.TAKEOVER) and rig.one(e.AskTakeover).attempt == 2
    assert not rig.of(e.Run)


@pytest.mark.parametrize("outcome", [e.Write.REFUSED, e.Write.UNKNOWN])
def test_a_refused_claim_stops_prefill_and_reads(outcome: e.Write) -> None:
    rig = Rig().claiming()
    rig.make(10)
    rig.refused(outcome)
    assert [type(x) for x in rig.out] == [e.Stop, e.ReadLast] and rig.at(State.READING)
    rig.make(11)
    assert rig.dropped()
    rig.read(None)
    assert rig.of(e.Enqueue) and rig.at(State.WAITING)


def test_writes_that_stay_unknown_are_given_time() -> None:
    rig = Rig().claiming()
    rig.refused(e.Write.UNKNOWN)
    rig.read(None)
    rig.admit()
    rig.refused(e.Write.UNKNOWN)
    assert not rig.of(e.ReadLast)
    assert any(isinstance(x, e.ReadLast) for x in rig.wait(0.1))


# ---- TAKEOVER --------------------------------------------------------------------------------------


def test_the_longest_answer_is_forced_and_each_gateway_gets_what_it_lacks() -> None:
    rig = Rig().takeover()
    rig.yes(10, 11, gateway=G)
    rig.yes(10, 11, 12, gateway=H)
    assert rig.at(State.TAKEOVER), "answers are collected"
    effects = rig.wait(0.2)
    run = next(x for x in effects if isinstance(x, e.Run))
    assert run.output_ids == (10, 11, 12) and rig.at(State.RUNNING)
    sent = {s.gateway: s.parts[0] for s in effects if isinstance(s, e.SendParts)}
    assert set(sent) == {G} and (sent[G].first_index, sent[G].ids) == (2, (12,))
    rig.make(13)
    assert rig.parts(G)[0].ids == rig.parts(H)[0].ids == (13,)


def test_a_no_wants_more_and_reads() -> None:
    rig = Rig().takeover()
    rig.no(6)
    assert rig.at(State.VERIFYING) and rig.of(e.ReadLast)
    rig.read_same(Claim(A2, ME))
    append = rig.one(e.Append)
    assert isinstance(append.record, Claim) and append.record.attempt == 7
    assert rig.at(State.CLAIMING)
    rig.stored()
    assert rig.asked().attempt == 7


def test_two_rounds_of_silence_start_from_the_prompt_and_count() -> None:
    rig = Rig().takeover()
    effects = rig.wait(0.2)
    assert sum(isinstance(x, e.AskTakeover) for x in effects) == 1 and rig.at(State.TAKEOVER)
    effects = rig.wait(0.2)
    assert next(x for x in effects if isinstance(x, e.Run)).output_ids == ()
    assert rig.at(State.RUNNING)
    rig.wait(9.8)
    assert rig.at(State.RUNNING)
    rig.wait(0.25)
    assert rig.at(State.WRITING), "nobody came within ten seconds"


def test_answers_to_another_attempt_are_ghosts() -> None:
    rig = Rig().takeover()
    rig.do(e.TakeoverAnswered(rig.now, R, G, A1, (9,), None))
    assert rig.dropped()


# ---- RUNNING ---------------------------------------------------------------------------------------


def test_tokens_go_out_as_parts_with_the_running_digest() -> None:
    rig = Rig().running(10)
    rig.make(11, 12)
    (part,) = rig.parts()
    assert (part.first_index, part.ids, part.digest) == (1, (11, 12), extend_digest(0, (10, 11, 12)))


def test_the_end_is_written_before_it_is_said_or_acknowledged() -> None:
    rig = Rig().running(10)
    rig.end(10, 11, reason=Reason.LENGTH, byte_cut=4)
    terminal = rig.one(e.Append).record
    assert isinstance(terminal, Terminal) and rig.one(e.Append).expected_seq == 1
    assert (terminal.reason, terminal.output_ids, terminal.byte_cut) == (Reason.LENGTH, (10, 11), 4)
    assert terminal.usage.cached_tokens == 1 and terminal.usage.output_tokens == 2
    assert rig.parts()[0].ids == (11,), "tokens stream at once"
    assert not rig.finishes() and not rig.of(e.Ack)
    rig.stored()
    (finish,) = rig.finishes()
    assert (finish.length, finish.digest, finish.byte_cut) == (2, extend_digest(0, (10, 11)), 4)
    assert [type(x) for x in rig.out] == [e.SendParts, e.WriteReceipt] and rig.at(State.FINISHING)
    assert rig.one(e.WriteReceipt).record == terminal
    rig.receipt()
    assert [type(x) for x in rig.out] == [e.Ack, e.Closed] and rig.at(State.NONE)


@pytest.mark.parametrize("reason", [Reason.DEADLINE, Reason.CANCELLED])
def test_deadline_and_cancel_stop_steps_and_write_the_end(reason: Reason) -> None:
    rig = Rig(timeout_ms=1500).running(10)
    effects = rig.wait(1.0) if reason is Reason.DEADLINE else []
    if reason is Reason.CANCELLED:
        rig.cancel()
        effects = rig.out
    append = next(x for x in effects if isinstance(x, e.Append))
    assert e.Stop(R) in effects and rig.at(State.WRITING)
    assert isinstance(append.record, Terminal) and append.record.reason is reason
    assert append.record.output_ids == (10,)


@pytest.mark.parametrize("minimum,wanted", [(1, 2), (4, 5)])
def test_an_old_attempt_wants_more_and_reads(minimum: int, wanted: int) -> None:
    rig = Rig().running(10)
    rig.hear(Refused(R, G, A1, minimum=Attempt(minimum)))
    assert rig.at(State.VERIFYING) and rig.of(e.ReadLast)
    rig.read_same(Claim(A1, ME))
    claim = rig.one(e.Append).record
    assert isinstance(claim, Claim) and claim.attempt == wanted


def test_refusals_of_earlier_attempts_or_below_mine_are_ghosts() -> None:
    rig = Rig().takeover()
    rig.wait(0.4)
    rig.hear(Refused(R, G, A1, minimum=A2))
    assert rig.dropped()
    rig.hear(Refused(R, G, A2, minimum=A1))
    assert rig.dropped() and rig.at(State.RUNNING)


def test_who_attaches_amid_a_takeover_answers_it_and_stops_the_count() -> None:
    rig = Rig(resume_window_ms=1000).running(10, 11)
    rig.hear(Detached(R, G))
    rig.do(e.WorkersDied(rig.now, (R,)))
    rig.stored()
    assert rig.at(State.TAKEOVER)
    rig.attach(10, attempt=2)
    assert rig.one(e.AnswerAttach).kind is AttachKind.ATTACHED
    rig.wait(3)
    assert rig.at(State.RUNNING)
    rig.make(12)
    assert [part.ids for part in rig.parts(H)] == [(12,)]


@pytest.mark.parametrize("attempt, held", [(1, (10,)), (3, (10,)), (2, (1,) * 99)])
def test_of_another_attempt_or_too_long_it_does_not(attempt: int, held: tuple[int, ...]) -> None:
    rig = Rig().takeover()
    rig.attach(*held, attempt=attempt)
    assert rig.one(e.AnswerAttach).kind is AttachKind.UNKNOWN and rig.at(State.TAKEOVER)


@pytest.mark.parametrize("how", ["differs", "attach"])
def test_other_ids_downstream_are_forced_once(how: str) -> None:
    rig = Rig().running(10, 11)

    def say(*ids: int) -> None:
        if how == "differs":
            rig.hear(Refused(R, H, A1, differs=ids))
        else:
            rig.attach(*ids)

    say(10, 99)
    assert [type(x) for x in rig.out[:2]] == [e.Stop, e.Run] and rig.one(e.Run).output_ids == (10, 99)
    assert rig.at(State.RUNNING)
    rig.make(12)
    assert (rig.parts(H)[0].first_index, rig.parts(H)[0].ids) == (2, (12,))
    say(7)
    assert not rig.of(e.Run) and not rig.of(e.Stop)
    if how == "attach":
        assert rig.one(e.AnswerAttach).kind is AttachKind.DIVERGED


def test_a_new_attempt_may_force_again() -> None:
    rig = Rig().running(10)
    rig.attach(20)
    rig.hear(Refused(R, G, A1, minimum=A1))
    rig.read_same(Claim(A1, ME))
    rig.stored()
    rig.wait(0.4)
    rig.attach(30, attempt=2)
    assert rig.one(e.Run).output_ids == (30,)


def test_differs_with_what_i_hold_is_late_and_dropped() -> None:
    rig = Rig().running(10, 11)
    rig.hear(Refused(R, G, A1, differs=(10,)))
    assert rig.dropped()


def test_attach_with_a_prefix_joins_and_gets_the_rest() -> None:
    rig = Rig().running(10, 11)
    rig.attach(10)
    assert rig.one(e.AnswerAttach) == e.AnswerAttach(9, AttachKind.ATTACHED)
    (part,) = rig.parts(H)
    assert (part.first_index, part.ids) == (1, (11,)) and not rig.parts(G)


def test_attach_that_knows_a_later_attempt_is_not_taken() -> None:
    rig = Rig().running(10)
    rig.attach(attempt=2)
    assert rig.one(e.AnswerAttach).kind is AttachKind.UNKNOWN
    rig.make(11)
    assert not rig.parts(H)


def test_redelivery_while_running_reads() -> None:
    rig = Rig().running(10)
    rig.deliver(count=2)
    assert rig.at(State.VERIFYING) and rig.of(e.ReadLast) and not rig.of(e.Stop)


def test_a_dead_worker_is_counted_in_a_new_claim() -> None:
    rig = Rig().running(10)
    rig.do(e.WorkersDied(rig.now, (R, RequestId("stranger"))))
    append = rig.one(e.Append)
    assert append.record == Claim(A2, ME, b"body", worker_deaths=1) and append.expected_seq == 1
    assert rig.at(State.CLAIMING) and not rig.of(e.Stop)
    rig.stored()
    rig.yes(10)
    effects = rig.wait(0.2)
    assert rig.at(State.RUNNING) and not any(isinstance(x, e.Run | e.Stop) for x in effects)
    rig.make(11)
    assert rig.parts()[0].attempt == 2 and rig.parts()[0].ids == (11,)


# ---- VERIFYING -------------------------------------------------------------------------------------


def test_steps_go_on_and_parts_wait_while_verifying() -> None:
    rig = Rig().verifying(10)
    rig.make(11)
    assert not rig.out
    rig.read_same(Claim(A1, ME))
    assert rig.at(State.RUNNING) and rig.parts()[0].ids == (11,)


def test_an_end_found_while_verifying_is_written_after() -> None:
    rig = Rig().verifying(10)
    rig.end(10, 11)
    assert not rig.out
    rig.read_same(Claim(A1, ME))
    assert rig.at(State.WRITING) and rig.parts()[0].ids == (11,)
    assert isinstance(rig.one(e.Append).record, Terminal)


def test_a_cancel_on_my_claim_ends_it() -> None:
    rig = Rig().verifying(10)
    rig.read(Cancel(A1, ME))
    append = rig.one(e.Append)
    assert isinstance(append.record, Terminal) and append.record.reason is Reason.CANCELLED
    assert append.expected_seq == 2 and append.record.output_ids == (10,) and rig.of(e.Stop)


def test_my_terminal_record_finishes() -> None:
    rig = Rig().writing(10, 11)
    terminal = rig.one(e.Append).record
    rig.refused(e.Write.UNKNOWN)
    assert rig.at(State.VERIFYING)
    rig.read(terminal)
    assert [type(x) for x in rig.out] == [e.SendParts, e.WriteReceipt]
    assert rig.finishes()[0].length == 2


def test_anothers_terminal_record_is_acknowledged_without_finish() -> None:
    rig = Rig().verifying(10)
    rig.read(TERMINAL)
    assert [type(x) for x in rig.out] == [e.Stop, e.WriteReceipt]
    rig.receipt()
    assert rig.out == [e.Ack(AckToken("t2")), e.Closed(R, "ended elsewhere")]


def test_a_receipt_in_doubt_is_written_again_and_held_meanwhile() -> None:
    rig = Rig().finishing(10, 11)
    rig.receipt(e.Write.UNKNOWN)
    assert rig.at(State.FINISHING) and not rig.out
    again = next(x for x in rig.wait(0.3) if isinstance(x, e.WriteReceipt))
    assert again.record == [x for x in rig.seen if isinstance(x, e.Append)][-1].record
    assert any(isinstance(x, e.Progress) for x in rig.seen), "it stays held"
    assert len([x for x in rig.seen if isinstance(x, e.SendParts) and x.finishes]) == 1, "said once"
    rig.receipt(e.Write.REFUSED)
    assert rig.one(e.Ack) and rig.at(State.NONE)


def test_what_comes_while_the_receipt_is_written_changes_nothing_but_the_token() -> None:
    rig = Rig().finishing(10, 11)
    rig.cancel()
    assert rig.dropped()
    rig.make(12)
    assert rig.dropped()
    rig.owner_asked(cancelled=True)
    assert rig.one(e.AnswerOwner).mine and rig.at(State.FINISHING)
    rig.deliver(count=3)
    assert not rig.out
    rig.receipt()
    assert rig.one(e.Ack).token == f"t{rig.tokens}"


def test_who_drains_before_its_receipt_gives_the_message_back() -> None:
    rig = Rig().finishing(10, 11)
    rig.do(e.Drain(rig.now))
    assert rig.of(e.Nak) and not rig.of(e.Ack) and rig.at(State.NONE)


@pytest.mark.parametrize("record", [None, Claim(A2, OTHER), Cancel(A2, OTHER)])
def test_anything_else_fences(record: Claim | Cancel | None) -> None:
    rig = Rig().verifying(10)
    rig.read(record)
    assert e.Stop(R) in rig.out and e.Closed(R, "fenced") in rig.out and rig.at(State.NONE)
    assert not any(isinstance(x, e.Ack | e.Nak | e.SendParts | e.Append) for x in rig.out)
    rig.make(11)
    assert rig.dropped()
    assert not any(isinstance(x, e.Progress) for x in rig.wait(1))


def test_a_stale_read_of_an_older_claim_of_mine_fences() -> None:
    rig = Rig().running(10)
    rig.hear(Refused(R, G, A1, minimum=A1))
    rig.read_same(Claim(A1, ME))
    rig.stored()
    rig.wait(0.4)
    rig.deliver(count=2)
    rig.do(e.ReadDone(rig.now, R, rig.calls[e.ReadLast], Claim(A1, ME), 1))
    assert rig.at(State.NONE)


def test_a_late_claim_of_mine_is_mine() -> None:
    """Its write timed out, the older one was read and taken, then it arrived."""
    rig = Rig().verifying(10)
    rig.read(Claim(A2, ME))
    assert rig.at(State.RUNNING) and rig.core.attempt(R) == 2
    rig.end(10)
    assert rig.one(e.Append).expected_seq == 2


# ---- WRITING ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [e.Write.REFUSED, e.Write.UNKNOWN])
def test_a_terminal_not_stored_is_read_and_written_again(outcome: e.Write) -> None:
    rig = Rig().writing(10)
    rig.refused(outcome)
    assert rig.at(State.VERIFYING)
    rig.read_same(Claim(A1, ME))
    assert rig.at(State.WRITING) and isinstance(rig.one(e.Append).record, Terminal)


# ---- rows of several states ------------------------------------------------------------------------


@pytest.mark.parametrize("state", [s for s in EVERY_STATE if s is not State.RUNNING])
def test_delivered_keeps_the_newest_token(state: State) -> None:
    rig = in_state(state)
    rig.deliver(count=3)
    assert rig.out == [] and rig.state is state
    progress = next(x for x in rig.wait(0.25) if isinstance(x, e.Progress))
    assert progress.tokens == (f"t{rig.tokens}",)


@pytest.mark.parametrize("state", [State.TAKEOVER, State.RUNNING, State.VERIFYING, State.WRITING])
@pytest.mark.parametrize("cancelled", [False, True])
def test_the_owner_asked_keeps_the_token(state: State, cancelled: bool) -> None:
    rig = in_state(state)
    rig.owner_asked(attempt=2 if state is State.TAKEOVER else 1, cancelled=cancelled)
    assert rig.one(e.AnswerOwner).mine
    reads = cancelled and state is not State.WRITING
    assert bool(rig.of(e.ReadLast)) is reads
    assert rig.state is (State.VERIFYING if reads else state)
    assert next(x for x in rig.wait(0.25) if isinstance(x, e.Progress)).tokens == (f"t{rig.tokens}",)


@pytest.mark.parametrize("state", EVERY_STATE)
def test_the_owner_of_another_attempt_is_not_me(state: State) -> None:
    rig = in_state(state)
    rig.owner_asked(attempt=9)
    assert rig.out == [e.AnswerOwner(5, False)] and rig.state is state


@pytest.mark.parametrize("state", EVERY_STATE)
def test_asked_with_a_dead_pipeline_it_lets_go(state: State) -> None:
    rig = in_state(state)
    rig.do(e.PipelineChanged(rig.now, alive=False))
    rig.owner_asked(attempt=2 if state is State.TAKEOVER else 1)
    assert not rig.one(e.AnswerOwner).mine and rig.at(State.NONE)
    assert not rig.of(e.Ack) and not rig.of(e.Nak)


@pytest.mark.parametrize("state", EVERY_STATE)
def test_drain_drops_then_naks(state: State) -> None:
    rig = in_state(state)
    token = AckToken(f"t{rig.tokens}")
    live = state in (State.WAITING, State.CLAIMING, State.RUNNING, State.VERIFYING)
    rig.do(e.Drain(rig.now))
    gone = [e.Closed(R, "drained"), e.Nak(token)]
    if state in (State.WAITING, State.READING, State.ASKING, State.WRITING):
        assert rig.out == [e.Stop(R)] * live + gone
    else:
        assert rig.at(State.LEAVING) and rig.out[: int(live)] == [e.Stop(R)] * live
        if state is State.CLAIMING:
            rig.stored()
        attempt = A2 if state is State.TAKEOVER else A1
        append = [x for x in rig.seen if isinstance(x, e.Append)][-1]
        assert append.record == Claim(attempt, ME, b"body", left=True) and append.expected_seq == rig.seq
        rig.stored()
        assert rig.out == gone
    assert rig.at(State.NONE)
    rig.deliver()
    assert rig.of(e.Nak) and rig.at(State.NONE)
    rig.do(e.PipelineChanged(rig.now, alive=True))
    rig.deliver()
    assert rig.at(State.WAITING)


@pytest.mark.parametrize("state", [State.CLAIMING, State.RUNNING])
@pytest.mark.parametrize("outcome", [e.Write.REFUSED, e.Write.UNKNOWN, None])
def test_a_drain_waits_for_a_bounded_time(state: State, outcome: e.Write | None) -> None:
    """What is not stored in time is given back all the same, and counted as before."""
    rig = in_state(state)
    token = AckToken(f"t{rig.tokens}")
    rig.do(e.Drain(rig.now))
    rig.do(e.Drain(rig.now))
    if outcome is None:
        rig.wait(0.9)
        assert rig.at(State.LEAVING)
        rig.wait(0.1)
    else:
        rig.refused(outcome)
    assert rig.at(State.NONE) and rig.seen[-1] == e.Nak(token)


@pytest.mark.parametrize("state", EVERY_STATE)
def test_everything_held_is_kept_from_redelivery_while_the_pipeline_lives(state: State) -> None:
    rig = in_state(state)
    assert sum(isinstance(x, e.Progress) for x in rig.wait(0.9)) == 3
    rig.do(e.PipelineChanged(rig.now, alive=False))
    assert not any(isinstance(x, e.Progress) for x in rig.wait(1.0))


def test_progress_comes_in_bounded_batches() -> None:
    rig = Rig(OwnershipConfig(progress_len_max=3))
    for n in range(7):
        rig.deliver(request=request(f"r{n}"))
    batches = [len(x.tokens) for x in rig.wait(0.25) if isinstance(x, e.Progress)]
    assert batches == [3, 3, 1]


@pytest.mark.parametrize("state", EVERY_STATE)
def test_the_deadline_ends_it_from_every_state(state: State) -> None:
    """Whatever was unclear is settled first; then the terminal record says so."""
    rig = in_state(state, timeout_ms=1500)
    if state in (State.WRITING, State.LEAVING):
        return
    rig.wait(0.95)  # more than any question takes
    rig.now = 101.2
    rig.do(e.Tick(rig.now))
    for _ in range(8):
        if rig.at(State.WRITING):
            break
        match rig.state:
            case State.READING:
                rig.read(None)
            case State.VERIFYING:
                rig.read_same(Claim(A1, ME))
            case State.CLAIMING:
                rig.stored()
            case _:
                rig.wait(0.2)
    append = [x for x in rig.seen if isinstance(x, e.Append)][-1]
    assert isinstance(append.record, Terminal) and append.record.reason is Reason.DEADLINE
    assert not rig.core._held[R].live
    t = append.record.timings
    total = t.queued_us + t.waiting_us + t.prefill_us + t.decode_us + t.interrupted_us
    assert abs(total - (500_000 + round((rig.now - 100) * 1e6))) <= 400_000


@pytest.mark.parametrize("state", [State.CLAIMING, State.TAKEOVER, State.VERIFYING])
def test_a_cancel_in_doubt_waits_until_the_doubt_is_settled(state: State) -> None:
    rig = in_state(state)
    rig.cancel()
    assert rig.state is state and not rig.of(e.Append)
    match state:
        case State.CLAIMING:
            rig.stored()
        case State.TAKEOVER:
            rig.yes(5)
            rig.wait(0.2)
        case _:
            rig.read_same(Claim(A1, ME))
    append = [x for x in rig.seen if isinstance(x, e.Append)][-1]
    assert isinstance(append.record, Terminal) and append.record.reason is Reason.CANCELLED
    assert append.record.output_ids == ((5,) if state is State.TAKEOVER else ())


@pytest.mark.parametrize("state", [State.READING, State.ASKING, State.WRITING])
def test_a_cancel_without_row_is_dropped(state: State) -> None:
    rig = in_state(state)
    rig.cancel()
    assert rig.dropped() and rig.state is state


NO_ROW: list[tuple[State, e.OwnershipEvent]] = [
    (state, event)
    for state in EVERY_STATE
    for event in (
        e.WriteDone(100.0, R, 999, e.Write.STORED, 4),
        e.ReadDone(100.0, R, 999, None, 0),
        e.OwnerAnswered(100.0, R, 999, True),
        e.TakeoverAnswered(100.0, R, G, Attempt(77), (1,), None),
        e.Heard(100.0, Refused(R, G, Attempt(77), minimum=Attempt(78))),
    )
] + [
    (State.WAITING, e.TokensMade(100.0, (R,), ((1,),))),
    (State.WRITING, e.TokensMade(100.0, (R,), ((1,),))),
    (State.RUNNING, e.Admitted(100.0, R)),
    (State.WAITING, e.Heard(100.0, Detached(R, G))),
    (State.WRITING, e.Heard(100.0, Detached(R, G))),
    (State.WAITING, e.WorkersDied(100.0, (R,))),
]


@pytest.mark.parametrize("state,event", NO_ROW)
def test_events_without_a_row_are_dropped_and_counted(state: State, event: e.OwnershipEvent) -> None:
    rig = in_state(state)
    rig.do(event)
    assert rig.dropped() and rig.state is state


# ---- time and sleep --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["tick", "clock", "pipeline"])
def test_after_a_sleep_the_records_are_read_before_anything_else(how: str) -> None:
    rig = Rig().running(10)
    match how:
        case "tick":
            rig.do(e.Tick(rig.now + 0.2, gap_s=1.1))
        case "clock":
            rig.now += 1.1
            rig.make(11)
        case _:
            rig.do(e.PipelineChanged(rig.now, alive=False))
            rig.do(e.PipelineChanged(rig.now, alive=True))
    assert isinstance(rig.out[0], e.ReadLast) and rig.at(State.VERIFYING)
    assert not rig.of(e.SendParts)


def test_a_sleep_makes_questions_void() -> None:
    asking, takeover = Rig().asking(), Rig().takeover()
    for rig, state in ((asking, State.READING), (takeover, State.VERIFYING)):
        rig.do(e.Tick(rig.now + 1.2))
        assert rig.state is state and rig.of(e.ReadLast)
        assert not rig.of(e.Append) and not rig.of(e.Run)


def test_a_takeover_that_was_verified_asks_again() -> None:
    rig = Rig().takeover()
    rig.owner_asked(attempt=2, cancelled=True)
    rig.read_same(Claim(A2, ME))
    assert rig.at(State.TAKEOVER) and rig.of(e.AskTakeover)


# ---- parts of an interval ------------------------------------------------------------------------


def test_an_interval_gathers_ids_but_the_first_and_the_last() -> None:
    rig = Rig(stream_interval=3).running(10)
    assert [part.ids for part in rig.parts()] == [(10,)]
    for token_id in (11, 12):
        rig.make(token_id)
        assert not rig.parts()
    rig.make(13)
    (part,) = rig.parts()
    assert (part.first_index, part.ids) == (1, (11, 12, 13))
    rig.make(14)
    rig.end(10, 11, 12, 13, 14, 15)
    (last,) = rig.parts()
    assert (last.first_index, last.ids) == (4, (14, 15))


def test_who_drains_sends_what_waits_for_its_interval() -> None:
    rig = Rig(stream_interval=4).running(10)
    rig.make(11)
    rig.do(e.Drain(rig.now))
    (part,) = rig.parts()
    assert (part.first_index, part.ids) == (1, (11,))
    assert rig.at(State.LEAVING)


def test_who_joins_within_an_interval_gets_all_at_once_and_so_do_those_who_waited() -> None:
    rig = Rig(stream_interval=4).running(10)
    rig.make(11)
    rig.attach(10)
    assert [part.ids for part in rig.parts(H)] == [(11,)]
    assert [part.ids for part in rig.parts(G)] == [(11,)]
    for token_id in (12, 13, 14):
        rig.make(token_id)
        assert not rig.parts(G) and not rig.parts(H)
    rig.make(15)
    assert [part.ids for part in rig.parts(G)] == [part.ids for part in rig.parts(H)] == [(12, 13, 14, 15)]


# ---- the count without gateways --------------------------------------------------------------------


@pytest.mark.parametrize(
    "word,window_ms,least_s",
    [("detached", 3000, 3), ("detached", 0, 0), ("unknown", 3000, 10), ("unknown", 20_000, 20)],
)
def test_the_count_lasts_the_window_and_ten_seconds_unless_the_client_left(
    word: str, window_ms: int, least_s: int
) -> None:
    rig = Rig(resume_window_ms=window_ms).running(10)
    rig.hear(Detached(R, G) if word == "detached" else Refused(R, G, A1))
    rig.wait(max(0, least_s - 0.1))
    assert (rig.at(State.RUNNING)) == (least_s > 0)
    rig.wait(0.35)
    assert rig.at(State.WRITING)
    record = [x for x in rig.seen if isinstance(x, e.Append)][-1].record
    assert isinstance(record, Terminal) and record.reason is Reason.CANCELLED


def test_detached_shortens_a_count_that_an_unknown_started() -> None:
    rig = Rig(resume_window_ms=2000).running(10)
    rig.hear(Refused(R, G, A1))
    rig.hear(Detached(R, G))
    rig.wait(2.1)
    assert rig.at(State.WRITING)


@pytest.mark.parametrize("who", ["attach", "yes"])
def test_attach_and_yes_stop_the_count(who: str) -> None:
    rig = Rig(resume_window_ms=1000).running(10)
    rig.hear(Detached(R, G))
    assert any(isinstance(x, e.AskTakeover) for x in rig.wait(0.1)), "a gateway unknown here may serve it"
    if who == "attach":
        rig.attach(10)
    else:
        rig.yes(10, gateway=H)
    rig.wait(20)
    assert rig.at(State.RUNNING)
    rig.make(11)
    assert rig.parts(H) and not rig.parts(G)


def test_while_the_count_runs_the_gateways_are_asked_every_two_seconds() -> None:
    """The first question, or its answer, may be lost."""
    rig = Rig(resume_window_ms=9000).running(10)
    rig.hear(Detached(R, G))
    start = rig.now
    turns = [(rig.wait(0.25), rig.now - start) for _ in range(35)]
    asked_s = [at for out, at in turns if any(isinstance(x, e.AskTakeover) for x in out)]
    assert rig.at(State.RUNNING)
    assert asked_s == [pytest.approx(2 * i, abs=0.26) for i in range(5)]
    rig.yes(10, gateway=H)
    assert not any(isinstance(x, e.AskTakeover) for x in rig.wait(10))


def test_one_gateway_that_leaves_starts_no_count_while_another_stays() -> None:
    rig = Rig().running(10)
    rig.attach(10)
    rig.hear(Detached(R, G))
    rig.wait(20)
    assert rig.at(State.RUNNING)


def test_a_count_goes_on_only_while_running() -> None:
    rig = Rig(resume_window_ms=1000).running(10)
    rig.hear(Detached(R, G))
    rig.deliver(count=2)
    rig.wait(0.9)
    rig.wait(0.9)
    assert rig.at(State.VERIFYING)
    rig.attach(10)
    rig.read_same(Claim(A1, ME))
    rig.wait(0.5)
    assert rig.at(State.RUNNING), "who attached meanwhile stopped it"


def test_who_leaves_while_the_log_is_unclear_is_heard() -> None:
    rig = Rig(resume_window_ms=1000).verifying(10)
    rig.hear(Detached(R, G))
    rig.read_same(Claim(A1, ME))
    assert rig.at(State.RUNNING)
    rig.wait(1.2)
    assert rig.at(State.WRITING), "nobody else says it again"


def test_a_sleep_does_not_count() -> None:
    rig = Rig(resume_window_ms=1500).running(10)
    rig.hear(Detached(R, G))
    rig.now += 5
    rig.do(e.Tick(rig.now))
    rig.read_same(Claim(A1, ME))
    assert any(isinstance(x, e.AskTakeover) for x in rig.wait(0.1))
    rig.yes(10)
    rig.wait(5)
    assert rig.at(State.RUNNING)


def test_without_a_gateway_nobody_is_counted() -> None:
    rig = Rig(gateway="").takeover()
    rig.wait(30)
    assert rig.at(State.RUNNING)


def test_gateways_are_bounded() -> None:
    rig = Rig().running(10)
    for n in range(9):
        rig.attach(10, gateway=f"g{n}")  # type: ignore[arg-type]
    rig.make(11)
    assert len(rig.of(e.SendParts)) == 8 and not rig.parts(G) and rig.parts("g8")  # type: ignore[arg-type]


# ---- poison ----------------------------------------------------------------------------------------


def test_two_deaths_run_alone_from_what_is_held() -> None:
    rig = Rig().running(10)
    for attempt in (2, 3):
        rig.do(e.WorkersDied(rig.now, (R,)))
        assert bool(rig.of(e.Stop)) == (attempt == 3)
        rig.stored()
        rig.yes(10)
        effects = rig.wait(0.2)
    (run,) = [x for x in effects if isinstance(x, e.Run)]
    assert run.alone and run.output_ids == (10,)


def test_the_third_death_fails_into_the_dead_letters() -> None:
    rig = Rig().asking(Claim(A3, OTHER, worker_deaths=1, batcher_deaths=1))
    rig.wait(0.2)
    record = [x for x in rig.seen if isinstance(x, e.Append)][-1].record
    assert isinstance(record, Terminal) and record.reason is Reason.FAILED and record.error
    rig.stored()
    letter = rig.one(e.DeadLetter)
    assert (letter.worker_deaths, letter.batcher_deaths, letter.terminal) == (1, 2, record)
    rig.receipt()
    assert rig.of(e.Ack)


def test_the_third_worker_death_fails() -> None:
    rig = Rig().asking(Claim(A1, OTHER, worker_deaths=2))
    rig.answer(mine=False, answered=True)
    rig.stored()
    rig.yes(10)
    effects = rig.wait(0.2)
    assert next(x for x in effects if isinstance(x, e.Run)).alone
    rig.do(e.WorkersDied(rig.now, (R,)))
    record = rig.one(e.Append).record
    assert isinstance(record, Terminal) and record.reason is Reason.FAILED


def test_a_death_while_the_log_is_unclear_is_claimed_after() -> None:
    rig = Rig().verifying(10)
    rig.do(e.WorkersDied(rig.now, (R,)))
    assert rig.at(State.VERIFYING) and not rig.of(e.Append)
    rig.read_same(Claim(A1, ME))
    assert rig.one(e.Append).record == Claim(A2, ME, b"body", worker_deaths=1)


# ---- bounds, accounts ------------------------------------------------------------------------------


def test_beyond_the_bound_messages_go_back() -> None:
    rig = Rig(OwnershipConfig(held_len_max=2))
    for n in range(3):
        rig.deliver(request=request(f"r{n}"))
    assert rig.one(e.Nak).token == "t3" and len(rig.core) == 2


def test_nothing_is_taken_in_by_a_dead_pipeline() -> None:
    rig = Rig()
    rig.do(e.PipelineChanged(rig.now, alive=False))
    rig.deliver()
    assert rig.of(e.Nak) and not rig.core.holds(R)


def test_answers_longer_than_the_request_allows_are_dropped() -> None:
    rig = Rig(max_tokens=2).takeover()
    rig.yes(1, 2, 3)
    assert rig.dropped()


def test_timings_of_a_cancelled_run_sum_to_its_age() -> None:
    rig = Rig().waiting()
    rig.wait(0.2)
    rig.admit()
    rig.stored()
    rig.wait(0.3)
    rig.make(10)
    rig.wait(0.7)
    rig.cancel()
    record = rig.one(e.Append).record
    assert isinstance(record, Terminal)
    t = record.timings
    assert (t.queued_us, t.waiting_us, t.prefill_us, t.decode_us) == (500_000, 200_000, 300_000, 700_000)
    rig.core.amend(R, Terminal(A1, ME, Reason.CANCELLED, (10,), usage=record.usage, error="with account"))
    rig.stored()
    assert rig.finishes()[0].error == "with account", "what is said is what was written"


def test_timings_of_a_taken_over_run_count_the_rest_as_interruption() -> None:
    rig = Rig().takeover()
    rig.yes(10)
    rig.wait(0.25)
    rig.end(10, 11)
    record = rig.one(e.Append).record
    assert isinstance(record, Terminal)
    t = record.timings
    assert t.decode_us == 5 and t.interrupted_us == 750_000 - 5


def test_counts_by_state() -> None:
    rig = Rig().running(10)
    rig.deliver(request=request("r2"))
    counts = rig.core.counts()
    assert counts[State.RUNNING] == 1 and counts[State.WAITING] == 1 and sum(counts.values()) == 2
    assert rig.core.attempt(R) == 1 and rig.core.attempt(RequestId("r2")) is None


def test_gateways_are_those_of_owned_requests() -> None:
    rig = Rig().waiting()
    assert rig.core.gateways() == ()
    rig.admit()
    rig.stored()
    rig.attach()
    assert rig.core.gateways() == (G, H)


def test_a_cancel_ask_is_not_the_only_word() -> None:
    rig = Rig().waiting()
    rig.hear(CancelAsk(RequestId("stranger")))
    assert rig.dropped() and rig.at(State.WAITING)


@pytest.mark.parametrize("how", ["cancel ask", "read by me", "read by a receiver", "the owner is silent"])
def test_a_cancel_for_the_deadline_ends_as_deadline(how: str) -> None:
    """The gateway's word comes when the owner was deaf at the deadline; its client never cancelled."""
    match how:
        case "cancel ask":
            rig = Rig().running(10)
            rig.hear(CancelAsk(R, "deadline"))
        case "read by me":
            rig = Rig().verifying(10)
            rig.read(Cancel(A1, ME, "deadline"))
        case "read by a receiver":
            rig = Rig().reading()
            rig.read(Cancel(Attempt(0), BootId(""), "deadline"))
        case _:
            rig = Rig().asking(Cancel(A3, OTHER, "deadline"))
            rig.wait(0.2)
    (append,) = [x for x in rig.seen if isinstance(x, e.Append) and isinstance(x.record, Terminal)]
    assert append.record.reason is Reason.DEADLINE  # type: ignore[union-attr]


def test_many_are_kept_in_turns_and_each_within_two_periods() -> None:
    """A thousand acks in one turn would hold up the steps; whoever leaves, nobody is passed over."""
    config = OwnershipConfig()
    ownership = Ownership(ME, config)
    for i in range(400):
        asked = replace(request(), id=RequestId(f"r{i}"))
        ownership.handle(e.Delivered(0.0, asked, AckToken(f"t{i}"), 1, 0.0))
    kept = dict.fromkeys((f"t{i}" for i in range(400)), 0.0)
    now, burst = 0.0, 0
    for turn in range(64):
        at = ownership.next_timer()
        assert at is not None
        now = at
        said = [effect for effect in ownership.handle(e.Tick(now)) if isinstance(effect, e.Progress)]
        tokens = [token for effect in said for token in effect.tokens]
        burst = max(burst, len(tokens))
        kept.update(dict.fromkeys(tokens, now))
        gone = f"r{turn * 3}"
        if ownership.holds(RequestId(gone)):
            ownership.handle(e.Heard(now, CancelAsk(RequestId(gone))))
        live = [t for i, t in enumerate(kept) if ownership.holds(RequestId(f"r{i}"))]
        assert all(now - kept[t] <= 2 * config.progress_period_s for t in live)
    assert burst <= 60 and now > 4 * config.progress_period_s

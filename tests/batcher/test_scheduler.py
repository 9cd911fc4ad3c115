"""What runs in which step: one rule of the scheduler a test."""

from random import Random

import pytest

from batcher.events import Ended, ExchangeBlocks, MatchBlocks, Row, StepPlan, StepReturned
from batcher.queueing import Queueing
from batcher.scheduler import Scheduler
from batcher.stage_cost import Load
from chassis.ids import Epoch, RequestId
from chassis.messages.request import Limits, Reason
from tests.batcher.toy_pipeline import STOPS, World, make_config, make_request, oracle

LONG = Limits(100, ignore_eos=True)


def world(
    num_blocks: int = 64,
    num_stages: int = 1,
    formed: bool = True,
    careless: bool = False,
    **changes: object,
) -> World:
    made = World(Random(1), make_config(**changes), num_blocks, num_stages, careless=careless)
    if formed:
        made.form(pool_changed=True)
        settle(made)
    return made


def settle(made: World) -> None:
    """Calls to kvstore and empty steps come back."""
    while made.calls:
        made.answer()
    while made.plan():
        pass
    while made.ring and not any(plan.rows for plan in made.ring):
        made.execute()


def plan_rows(made: World) -> tuple[Row, ...]:
    """Of the next step, once kvstore has answered all."""
    while True:
        while made.calls:
            made.answer()
        if made.plan():
            return made.ring[-1].rows
        if not made.calls:
            return ()


def plan_rows_once(made: World) -> None:
    """One thing happens: an answer of kvstore before a step, a step before its return."""
    if not made.plan():
        if made.calls:
            made.answer()
        elif made.ring:
            made.execute()


def add(made: World, name: str, prompt_len: int = 5, limits: Limits = LONG, priority: int = 5) -> None:
    base = sum(map(ord, name))
    made.add(make_request(name, [(base + i) % 30 for i in range(prompt_len)], limits, priority))


def spans(rows: tuple[Row, ...]) -> list[tuple[str, int, int, bool]]:
    return [(row.request_id, row.start, row.start + len(row.token_ids), row.samples) for row in rows]


# ---- steps -----------------------------------------------------------------------------------------


def test_a_prompt_is_cut_into_chunks_that_follow_each_other() -> None:
    made = world(num_stages=4, step_tokens_max=8)
    add(made, "a", 20)
    assert spans(plan_rows(made)) == [("a", 0, 8, False)]
    assert spans(plan_rows(made)) == [("a", 8, 16, False)]  # the first is still in flight
    assert spans(plan_rows(made)) == [("a", 16, 20, True)]
    assert plan_rows(made) == ()  # the next token is not known
    for _ in range(3):
        made.execute()
    assert spans(plan_rows(made)) == [("a", 20, 21, True)]


def test_decodes_go_first_and_prompts_fill_the_rest() -> None:
    made = world(step_tokens_max=8)
    add(made, "a", 3)
    plan_rows(made)
    made.execute()
    add(made, "b", 20)
    assert spans(plan_rows(made)) == [("a", 3, 4, True), ("b", 0, 7, False)]


def test_decodes_are_spread_over_the_steps_in_flight() -> None:
    made = world(num_stages=2)
    for name in "abcdef":
        add(made, name, 3, Limits(20))
    assert len(plan_rows(made)) == 6
    made.execute()
    assert [row.request_id for row in plan_rows(made)] == ["a", "b", "c"]
    assert [row.request_id for row in plan_rows(made)] == ["d", "e", "f"]
    made.execute()
    assert [row.request_id for row in plan_rows(made)] == ["a", "b", "c"]


def test_one_stage_keeps_its_decodes_together() -> None:
    made = world(num_stages=1, run_ahead=False)
    add(made, "a", 3)
    assert len(plan_rows(made)) == 1
    add(made, "b", 3)
    assert len(plan_rows(made)) == 1  # the prompt goes meanwhile
    made.execute()
    assert [row.request_id for row in plan_rows(made)] == ["a"]
    made.execute()
    assert plan_rows(made) == ()  # "b" waits for "a", to go with it
    made.execute()
    assert [row.request_id for row in plan_rows(made)] == ["b", "a"]


def test_no_more_steps_in_flight_than_allowed() -> None:
    made = world(num_stages=4, step_tokens_max=1, steps_in_flight_max=3)
    add(made, "a", 20)
    settle(made)
    assert len(made.ring) == 3


def test_only_the_first_row_of_a_sequence_is_fresh_and_tables_grow_by_deltas() -> None:
    made = world(step_tokens_max=6)
    add(made, "a", 9)
    first, second = plan_rows(made)[0], plan_rows(made)[0]
    assert (first.fresh, len(first.new_blocks)) == (True, 2)
    assert (second.fresh, len(second.new_blocks)) == (False, 1)


def test_an_empty_step_every_second_when_nothing_runs() -> None:
    made = world(idle_step_ms=1000)
    assert not made.plan()
    made.now = made.scheduler.wake_at() or 0.0
    assert made.now == pytest.approx(1.0)
    assert made.plan() and made.ring[-1].rows == ()
    assert not made.plan()
    made.execute()


# ---- the cache -------------------------------------------------------------------------------------


WARM = list(range(16))


def warm(made: World) -> None:
    """The pool has the blocks of `WARM`."""
    made.add(make_request("warm", WARM, Limits(1)))
    made.finish(100)


def test_a_repeated_prompt_computes_only_its_tail() -> None:
    made = world()
    limits = Limits(2, ignore_eos=True)
    add(made, "a", 16, limits)
    made.finish(100)
    assert made.ended[RequestId("a")].usage.cached_tokens == 0
    made.add(make_request("b", list(made.requests[RequestId("a")].prompt_ids), limits))
    assert spans(plan_rows(made)) == [("b", 12, 16, True)]  # a whole hit still computes the last token
    made.finish(100)
    assert made.ended[RequestId("b")].usage.cached_tokens == 12
    made.check_answers()


def test_tenants_share_nothing() -> None:
    made = world()
    ids = list(range(16))
    made.add(make_request("a", ids, Limits(1), tenant="t"))
    made.finish(100)
    made.add(make_request("b", ids, Limits(1), tenant="u"))
    assert spans(plan_rows(made)) == [("b", 0, 16, True)]


def test_an_answer_to_a_match_that_nobody_waits_for_gives_its_blocks_back() -> None:
    made = world()
    ids = list(range(16))
    made.add(make_request("a", ids, Limits(1)))
    made.finish(100)
    made.add(make_request("b", ids, Limits(1)))
    made.stop(RequestId("b"))
    made.finish(100)


def test_a_kvstore_that_does_not_answer_does_not_hold_up_admission() -> None:
    made = world(match_wait_ms=250)
    warm(made)
    began = made.now
    made.add(make_request("a", WARM, Limits(2, ignore_eos=True)))
    assert not made.plan()
    made.now = made.scheduler.wake_at() or 0.0
    assert made.now == pytest.approx(began + 0.25)
    assert made.plan() and spans(made.ring[-1].rows) == [("a", 0, 16, True)]


def just_made(made: World) -> None:
    """What a request computed is not told yet when the next one with its prompt is there."""
    made.add(make_request("a", WARM, Limits(1)))
    assert plan_rows(made)
    made.execute()
    assert made.ended and not made.calls
    made.add(make_request("b", WARM, Limits(1)))


def test_who_comes_right_after_another_finds_its_blocks() -> None:
    made = world()
    just_made(made)
    ((call, _),) = made.calls  # at once, and before the match
    assert isinstance(call, ExchangeBlocks) and len(call.commits) == 4
    assert spans(plan_rows(made)) == [("b", 12, 16, True)]
    made.finish(100)


def test_who_comes_while_blocks_are_being_told_waits_for_that() -> None:
    made = world()
    add(made, "a", 16, Limits(1))
    assert plan_rows(made)
    made.execute()
    made.now = made.scheduler.wake_at() or 0.0
    assert not made.plan() and isinstance(made.calls[-1][0], ExchangeBlocks)
    made.add(make_request("b", list(made.requests[RequestId("a")].prompt_ids), Limits(1)))
    assert len(made.calls) == 1
    assert spans(plan_rows(made)) == [("b", 12, 16, True)]


def test_blocks_that_cannot_be_told_hold_up_admission_for_a_time_only() -> None:
    made = world(match_wait_ms=250)
    just_made(made)
    began = made.now
    while made.now < began + 0.5:
        assert not made.plan()
        made.now = made.scheduler.wake_at() or 0.0
    assert made.now == pytest.approx(began + 0.5)  # for the telling, then for the match
    assert made.plan() and spans(made.ring[-1].rows) == [("b", 0, 16, True)]


def test_a_prompt_that_begins_with_nothing_committed_is_not_asked_about() -> None:
    made = world()
    warm(made)
    made.add(make_request("a", [*WARM[1:], WARM[0]], Limits(1)))
    assert not any(isinstance(effect, MatchBlocks) for effect, _ in made.calls)
    assert made.plan() and spans(made.ring[-1].rows) == [("a", 0, 16, True)]


# ---- room ------------------------------------------------------------------------------------------


def test_no_more_run_than_there_are_slots() -> None:
    made = world(sequences_max=2)
    for name in "abc":
        add(made, name)
    assert [row.request_id for row in plan_rows(made)] == ["a", "b"]
    assert (made.scheduler.num_running, made.scheduler.num_waiting) == (2, 1)
    made.stop(RequestId("a"))
    assert [row.request_id for row in plan_rows(made)] == ["b", "c"]
    assert made.ring[-1].freed_slots == (0,)


def test_admission_leaves_room_to_grow() -> None:
    made = world(num_blocks=8)
    add(made, "a", 12)
    assert len(plan_rows(made)) == 1
    add(made, "b", 12)
    made.execute()
    assert spans(plan_rows(made)) == [("a", 12, 13, True)]
    assert made.scheduler.num_waiting == 1


def test_the_last_in_order_gives_way_and_comes_back() -> None:
    made = world(num_blocks=8, careless=True)
    limits = Limits(18, ignore_eos=True)
    for name in ("a", "b"):
        add(made, name, 5, limits)
    made.finish(500)
    a, b = made.ended[RequestId("a")], made.ended[RequestId("b")]
    assert a.timings.preemptions == 0 < b.timings.preemptions
    assert b.timings.recomputed_tokens > 0 < b.timings.interrupted_us + 1
    made.check_answers()


def test_a_prompt_that_fits_no_pool_fails_and_says_why() -> None:
    made = world(num_blocks=4)
    add(made, "a", 16)
    add(made, "b", 3, Limits(1))
    made.finish(50)
    ended = made.ended[RequestId("a")]
    assert ended.reason is Reason.FAILED and ended.error.startswith("prompt: 16 tokens, at most 15 ")
    assert made.ended[RequestId("b")].reason in (Reason.LENGTH, Reason.STOP)


def test_a_prompt_that_fits_no_pool_does_not_have_the_pipeline_run_dry_first() -> None:
    made = world(num_blocks=6)
    add(made, "runs", 5, Limits(12, ignore_eos=True))
    plan_rows(made)
    add(made, "large", 24)
    add(made, "small", 3, Limits(1))
    made.execute()
    assert spans(plan_rows(made)) == [("runs", 5, 6, True), ("small", 0, 3, True)]
    assert set(made.ended) == {RequestId("large")}


def test_an_output_ends_where_the_pool_does() -> None:
    made = world(num_blocks=4)
    add(made, "a", 10)
    made.finish(100)
    ended = made.ended[RequestId("a")]
    assert (ended.reason, len(ended.output_ids)) == (Reason.LENGTH, 6)


def test_what_waits_lets_its_prefix_go_and_takes_it_back_only_when_nobody_lacks() -> None:
    made = world(num_blocks=8, sequences_max=2)
    stem = list(range(9))
    made.add(make_request("first", stem, Limits(1)))
    made.finish(100)
    add(made, "runs", 8, Limits(30, ignore_eos=True))
    for _ in range(4):
        plan_rows(made)
        made.execute()
    made.add(make_request("waits", [*stem, *range(12)], Limits(1)))  # no room for it
    while made.calls:
        made.answer()
    assert len(list(made.scheduler.tables())) == 2  # it holds its prefix
    for _ in range(200):  # until the runner needs the room
        if len(list(made.scheduler.tables())) == 1:
            break
        plan_rows_once(made)
    assert RequestId("runs") not in made.ended
    assert len(list(made.scheduler.tables())) == 1
    assert not any(isinstance(effect, MatchBlocks) for effect, _ in made.calls)
    made.finish(200)
    assert made.ended[RequestId("runs")].timings.preemptions == 0
    made.check_answers()


def test_blocks_that_kvstore_has_lost_are_found_again() -> None:
    made = world(num_blocks=8)
    add(made, "a", 5, Limits(20, ignore_eos=True))
    while made.kvstore.free:
        made.kvstore.refs[made.kvstore.free.popleft()] = 1
    made.finish(500)
    assert made.ended[RequestId("a")].reason is Reason.LENGTH
    made.check_answers()


# ---- order -----------------------------------------------------------------------------------------


def test_priority_then_age() -> None:
    made = world(sequences_max=1, formed=False)
    add(made, "late", priority=5)
    add(made, "later", priority=5)
    add(made, "urgent", priority=0)
    made.run(make_request("owned", [1, 2], LONG, 8), (), alone=False)
    made.form(pool_changed=True)
    order = []
    for _ in range(4):
        settle(made)
        (name,) = {row.request_id for plan in made.ring for row in plan.rows}
        order.append(name)
        made.stop(name)
        while made.ring:
            made.execute()
    assert order == ["owned", "urgent", "late", "later"]


@pytest.mark.parametrize("priority", [1, 5, 9])
def test_starvation_bound(priority: int) -> None:
    """Urgent requests come faster than they can be served; the one that waits is passed by a number of them,
    and then runs to its end."""
    made = world(num_blocks=256, sequences_max=1, queueing=Queueing(overtakes_max=4))
    limits = Limits(2, ignore_eos=True)
    add(made, "u0", 3, limits, priority=0)
    add(made, "patient", 3, limits, priority=priority)
    came = 1
    for _ in range(1000):
        if RequestId("patient") in made.ended:
            break
        add(made, f"u{came}", 3, limits, priority=0)
        came += 1
        settle(made)
        made.execute()
    assert made.admitted.index(RequestId("patient")) <= priority * 4
    assert came > priority * 4, "nothing came that it could be starved by"
    assert made.scheduler.num_waiting > 1


def test_alone_means_alone_in_the_ring() -> None:
    made = world(num_stages=2, step_tokens_max=8)
    for name in ("a", "b"):
        add(made, name, 3, Limits(6, ignore_eos=True))
    made.run(make_request("poison", list(range(20)), Limits(6, ignore_eos=True)), (), alone=True)
    made.finish(300)  # the world checks every plan
    made.check_answers()


@pytest.mark.parametrize("prompt_len", range(1, 9))
def test_one_that_must_be_alone_and_lacks_blocks_holds_up_nobody(prompt_len: int) -> None:
    made = world(num_blocks=8)
    add(made, "a", prompt_len, Limits(20, ignore_eos=True))
    made.run(make_request("poison", list(range(5)), Limits(26, ignore_eos=True)), (), alone=True)
    made.finish(1000)
    made.check_answers()


# ---- ends ------------------------------------------------------------------------------------------


def test_a_prompt_goes_on_while_another_has_the_ring_to_itself() -> None:
    made = world()
    cost = made.scheduler.balance.cost
    for load in (Load(0, 1, 0, 40), Load(0, 4, 0, 160), Load(16, 0, 136, 16), Load(32, 0, 528, 32)):
        cost.observe(load, [1e-3 + 1e-4 * load.prompt_tokens + 2e-4 * load.decodes])
    assert cost.known
    made.run(make_request("alone", [1, 2, 3], Limits(40, ignore_eos=True)), (), alone=True)
    made.run(make_request("long", [i % 30 for i in range(120)], Limits(5, ignore_eos=True)), (), alone=False)
    while made.scheduler.request_ids():
        settle(made)
        if not made.plan():
            made.execute()
    assert list(made.ended) == ["long", "alone"]


def test_a_whole_output_ends_without_a_step() -> None:
    made = world()
    made.run(make_request("a", [1, 2], Limits(3, ignore_eos=True)), (4, 5, 6, 7), alone=False)
    ended = made.ended[RequestId("a")]
    assert (ended.reason, ended.output_ids) == (Reason.LENGTH, (4, 5, 6))
    assert made.steps == 0


def test_forced_output_is_continued_whatever_it_is() -> None:
    made = world()
    request = make_request("a", [1, 2, 3], Limits(12, ignore_eos=True))
    made.run(request, (9, 9), alone=False)
    rows = plan_rows(made)
    assert spans(rows) == [("a", 0, 5, True)] and rows[0].output_index == 2
    made.finish(50)
    continued = make_request("x", [1, 2, 3, 9, 9], Limits(10, ignore_eos=True))
    assert made.ended[RequestId("a")].output_ids == (9, 9, *oracle(continued, 4096)[1])


def test_a_restart_forgets_what_is_in_flight() -> None:
    made = world()
    request = make_request("a", [1, 2, 3], Limits(4, ignore_eos=True))
    made.add(request)
    plan_rows(made)
    made.run(request, (8,), alone=False)
    made.execute()
    assert made.outputs[request.id] == [8]
    made.finish(50)
    assert made.ended[request.id].output_ids[0] == 8
    assert made.admitted == ["a"]


def test_deadlines_end_the_waiting_and_the_running() -> None:
    made = world(sequences_max=1)
    made.add(make_request("run", [1, 2], LONG, priority=4), deadline=2.0)
    made.add(make_request("wait", [1, 2], LONG), deadline=1.0)
    plan_rows(made)
    made.execute()
    made.now = 1.0
    assert made.scheduler.wake_at() is not None and (made.scheduler.wake_at() or 9.0) <= 1.0
    made.plan()
    assert made.ended[RequestId("wait")].reason is Reason.DEADLINE
    made.now = 2.0
    made.plan()
    ended = made.ended[RequestId("run")]
    assert ended.reason is Reason.DEADLINE and len(ended.output_ids) == 1
    made.add(make_request("late", [1, 2], LONG), deadline=1.5)
    assert made.ended[RequestId("late")].reason is Reason.DEADLINE


def test_the_account_of_a_request_sums_up() -> None:
    made = world(sequences_max=1)
    made.now = 10.0
    add(made, "a", 5, Limits(2, ignore_eos=True))
    made.now = 11.0
    plan_rows(made)
    made.now = 13.0
    made.execute()
    plan_rows(made)
    made.now = 17.0
    made.execute()
    t = made.ended[RequestId("a")].timings
    assert (t.queued_us, t.waiting_us, t.prefill_us, t.decode_us) == (
        500_000,
        1_000_000,
        2_000_000,
        4_000_000,
    )
    assert (t.interrupted_us, t.preemptions, t.recomputed_tokens) == (0, 0, 0)


# ---- the pipeline ----------------------------------------------------------------------------------


def test_the_same_pool_keeps_what_was_committed() -> None:
    made = world()
    add(made, "a", 10)
    plan_rows(made)
    made.execute()
    assert spans(plan_rows(made)) == [("a", 10, 11, True)]
    made.lose()
    made.form(pool_changed=False)
    rows = plan_rows(made)
    assert spans(rows) == [("a", 8, 11, True)]
    assert rows[0].fresh and len(rows[0].new_blocks) == 3


def test_a_match_on_its_way_is_asked_again_of_the_new_epoch() -> None:
    made = world()
    warm(made)
    made.add(make_request("a", WARM, Limits(2, ignore_eos=True)))
    assert any(isinstance(effect, MatchBlocks) for effect, _ in made.calls)
    made.lose()
    made.form(pool_changed=False)
    while not any(isinstance(effect, MatchBlocks) for effect, _ in made.calls):
        assert made.calls, "it is not asked again"
        made.answer()


def test_another_pool_keeps_nothing() -> None:
    made = world()
    add(made, "a", 10)
    plan_rows(made)
    made.execute()
    made.lose()
    made.form(pool_changed=True)
    assert spans(plan_rows(made)) == [("a", 0, 11, True)]
    made.finish(500)
    assert made.ended[RequestId("a")].timings.recomputed_tokens == 10
    made.check_answers()


def test_who_was_in_the_steps_when_the_pipeline_went() -> None:
    made = world(num_stages=2, step_tokens_max=4)
    for name in "abc":
        add(made, name, 3, Limits(20))
    plan_rows(made)
    plan_rows(made)
    made.stop(RequestId("b"))
    assert made.scheduler.unform(made.now) == ("a", "c")
    assert made.scheduler.unform(made.now) == ()


def test_results_of_another_epoch_are_ghosts_and_wrong_ones_are_told() -> None:
    made = world()
    add(made, "a", 3)
    plan_rows(made)
    number = made.ring[-1].number
    returned = made.scheduler.returned
    assert returned(StepReturned(0.0, Epoch(99), 1, ()))
    assert not returned(StepReturned(0.0, Epoch(1), number + 1, (1,)))
    assert not returned(StepReturned(0.0, Epoch(1), number, ()))
    made.lose()
    assert returned(StepReturned(0.0, Epoch(1), number, (1,)))
    made.scheduler.check()
    assert made.outputs == {}


def test_a_step_that_does_not_come_back_is_overdue() -> None:
    made = world(step_deadline_min_ms=5000)
    add(made, "a", 3)
    plan_rows(made)
    assert made.scheduler.runnable
    assert not made.scheduler.overdue(4.9)
    assert made.scheduler.overdue(5.1)


def test_without_a_pipeline_nothing_is_planned_or_called() -> None:
    made = world(formed=False)
    add(made, "a", 30)
    assert not made.plan() and not made.calls
    assert made.scheduler.wake_at() is None


# ---- cancel anywhere -------------------------------------------------------------------------------


def run_and_cancel(step: int, victim: str, num_stages: int, run_ahead: bool) -> World:
    made = world(num_blocks=12, num_stages=num_stages, step_tokens_max=6, run_ahead=run_ahead)
    for name, prompt_len in (("a", 9), ("b", 3), ("c", 14)):
        add(made, name, prompt_len, Limits(7, ignore_eos=True))
    for _ in range(500):
        settle(made)
        if made.steps >= step and RequestId(victim) in made.scheduler.request_ids():
            made.stop(RequestId(victim))
            tables = list(made.scheduler.tables())
            assert len(tables) <= 2, "its blocks are free at once"
        if not made.scheduler.request_ids():
            return made
        if made.ring:
            made.execute()
        else:
            made.now = made.scheduler.wake_at() or made.now
    raise AssertionError("a request does not end")


@pytest.mark.parametrize(("num_stages", "run_ahead"), [(1, False), (1, True), (3, False)])
def test_cancel_at_every_step(num_stages: int, run_ahead: bool) -> None:
    total = run_and_cancel(10**9, "a", num_stages, run_ahead).steps
    assert total > 10
    for victim in "abc":
        for step in range(total + 1):
            made = run_and_cancel(step, victim, num_stages, run_ahead)
            made.finish(50)
            made.check_answers()  # its neighbours' answers are the same
            assert len(made.ended) >= 2


# ---- shape -----------------------------------------------------------------------------------------


def test_the_public_notes_are_in_order() -> None:
    scheduler = Scheduler(make_config(), STOPS)
    scheduler.run(make_request("a", [1], Limits(1)), (5,), 0.0, None)
    taken = scheduler.take()
    assert [type(note) for note in taken.notes] == [Ended] and taken.effects == ()
    assert scheduler.take().notes == ()


def test_a_plan_names_its_epoch_and_counts_from_one() -> None:
    made = world(formed=False)
    made.form(pool_changed=True)
    made.plan()
    plan = made.ring[-1]
    assert isinstance(plan, StepPlan) and (plan.epoch, plan.number) == (1, 1)

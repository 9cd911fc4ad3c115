"""Rows that nothing was drawn for: they wait for their grammar, or fail, and nobody else does."""

from dataclasses import replace

from batcher.events import Ended, StepReturned
from chassis.ids import RequestId
from chassis.messages.request import Limits, Reason
from chassis.messages.sampling import Grammar, GrammarKind, Sampling
from tests.batcher.test_scheduler import add, plan_rows, spans, world
from tests.batcher.test_slot_start import asked, sequence
from tests.batcher.toy_pipeline import EOS, STOPS, World

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")


def returns(made: World, **told: object) -> None:
    """The oldest step, as computed, with something told of its rows."""
    plan = made.ring.popleft()
    tokens = made.workers.execute(plan)
    sampling = [row for row in plan.rows if row.samples]
    for place, row in enumerate(sampling):
        same = made.begun.pop((plan.number, row.request_id)) == made.beginnings[row.request_id]
        made.sampling[row.request_id] -= same
        if same and place in told.get("waiting_places", ()):  # type: ignore[operator]
            made._begin_anew(row.request_id)
    returned = StepReturned(made.now, plan.epoch, plan.number, tokens, **told)  # type: ignore[arg-type]
    assert made.scheduler.returned(returned)
    made.take()


def lens(made: World) -> dict[str, int]:
    return {str(name): len(ids) for name, ids in made.outputs.items()}


def test_who_waits_is_computed_again_from_the_last_block_that_is_committed() -> None:
    made = world(run_ahead=False)  # blocks of four
    add(made, "a", 11)
    add(made, "b", 3)
    assert spans(plan_rows(made)) == [("a", 0, 11, True), ("b", 0, 3, True)]
    returns(made, waiting_places=(0,))
    assert lens(made) == {"b": 1}
    rows = plan_rows(made)
    assert spans(rows) == [("b", 3, 4, True), ("a", 0, 11, True)] and rows[1].fresh
    returns(made)
    assert lens(made) == {"a": 1, "b": 2}
    again = plan_rows(made)
    assert sorted(spans(again)) == [("a", 11, 12, True), ("b", 4, 5, True)]
    returns(made, waiting_places=(0, 1))  # in the middle, too
    assert sorted(spans(plan_rows(made))) == [("a", 8, 12, True), ("b", 4, 5, True)]


def test_what_was_sent_ahead_of_a_row_that_waits_is_a_ghost() -> None:
    made = world(run_ahead=True)
    add(made, "a", 6)
    plan_rows(made)
    assert spans(plan_rows(made)) == [("a", 6, 7, True)]
    returns(made, waiting_places=(0,))
    returns(made)
    assert lens(made) == {}
    made.finish(200)
    made.check_answers()


def test_a_refusal_ends_its_request_and_no_other() -> None:
    made = world(run_ahead=False)
    add(made, "a", 3)
    add(made, "b", 3)
    plan_rows(made)
    returns(made, refusals=((1, "grammar: too complex"),))
    (ended,) = made.ended.values()
    assert isinstance(ended, Ended) and (ended.request_id, ended.reason) == ("b", Reason.FAILED)
    assert ended.error == "grammar: too complex" and ended.output_ids == ()
    made.finish(200)
    assert made.ended[RequestId("a")].reason is Reason.LENGTH


def test_a_fresh_row_takes_the_output_along_for_its_grammar() -> None:
    request = replace(asked(Limits(9, min_tokens=3)), sampling=Sampling(0.5, grammar=DIGITS))
    start = sequence(request, (7, 8)).slot_start(4)
    assert (start.prompt_len, start.before) == (3, (1, 2, 3, 7))
    assert (start.min_tokens, start.stop_ids) == (3, (EOS,))
    assert start.sampling.grammar == DIGITS


def test_a_grammar_counts_among_what_a_step_brings_along() -> None:
    request = replace(asked(Limits(9)), sampling=Sampling(0.5, grammar=replace(DIGITS, text="a" * 999)))
    assert sequence(request).num_told == 999


def test_an_end_that_a_grammar_had_to_draw_ends_before_min_tokens() -> None:
    limits = Limits(9, min_tokens=5)
    free, bound = STOPS.watch(limits, 3, 100), STOPS.watch(limits, 3, 100, bound=True)
    assert free.push(EOS) is None
    end = bound.push(EOS)
    assert end is not None and end.reason is Reason.STOP

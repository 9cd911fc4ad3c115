"""Steps sent before the token they compute is known: who goes ahead, and what ghosts leave behind."""

from itertools import count
from random import Random
from typing import Any

import pytest

from batcher import spread
from batcher.events import ExchangeBlocks, Row
from chassis.ids import RequestId
from chassis.messages.pipeline import LAST_SAMPLED
from chassis.messages.request import Limits, Reason
from tests.batcher.toy_pipeline import EOS, World, make_config, make_request, next_token, oracle

LONG = Limits(40, ignore_eos=True)


def world(num_blocks: int = 64, num_stages: int = 1, careless: bool = False, **changes: object) -> World:
    made = World(Random(1), make_config(**changes), num_blocks, num_stages, careless=careless)
    made.form(pool_changed=True)
    answer_all(made)
    made.plan()
    made.execute()  # the empty step of a new epoch
    return made


def answer_all(made: World) -> None:
    while made.calls:
        made.answer()


def plan(made: World) -> list[tuple[str, int, bool]]:
    """Of the next step's rows: whose, from where, and whether its token is left open. None: no step goes."""
    while True:
        answer_all(made)
        if made.plan():
            return [(row.request_id, row.start, is_open(row)) for row in made.ring[-1].rows]
        if not made.calls:
            return []


def is_open(row: Row) -> bool:
    return row.token_ids == (LAST_SAMPLED,)


def add(made: World, name: str, prompt_len: int = 5, limits: Limits = LONG) -> None:
    made.add(make_request(name, [(ord(name) + i) % 30 for i in range(prompt_len)], limits))


def prompt_that_ends(prompt_len: int) -> list[int]:
    """The first token after it is the end."""
    for first in count():
        prompt = [first // 30**i % 30 for i in range(prompt_len)]
        if next_token(prompt) == EOS:
            return prompt
    raise AssertionError


# ---- who goes ahead --------------------------------------------------------------------------------


def test_one_step_lies_behind_the_one_in_flight() -> None:
    made = world()
    add(made, "a", 5)
    assert plan(made) == [("a", 0, False)]
    assert plan(made) == [("a", 5, True)]
    assert plan(made) == [], "two unknown tokens"
    for position in range(6, 12):
        made.execute()
        assert plan(made) == [("a", position, True)]
    made.finish(100)
    made.check_answers()


def test_prompts_are_followed_from_their_last_chunk_on() -> None:
    made = world(step_tokens_max=4)
    add(made, "a", 8)
    assert plan(made) == [("a", 0, False)]
    assert plan(made) == [("a", 4, False)]
    made.execute()
    assert plan(made) == [("a", 8, True)]


def test_decodes_stay_together_and_take_prompts_along() -> None:
    made = world()
    add(made, "a", 3)
    assert plan(made) == [("a", 0, False)]
    add(made, "b", 3)
    assert plan(made) == [("a", 3, True), ("b", 0, False)]
    made.execute()
    assert sorted(plan(made)) == [("a", 4, True), ("b", 3, True)]


def test_those_that_came_one_by_one_share_all_steps_soon() -> None:
    made = world(num_blocks=200, sequences_max=16)
    for i in range(12):
        add(made, chr(65 + i), 3)
        plan(made)
        if made.dice.random() < 0.5 and made.ring:
            made.execute()
    for _ in range(4):
        made.execute()
        while plan(made):
            pass
    assert [len(step.rows) for step in made.ring] == [12, 12]


def test_a_request_that_comes_waits_for_one_step_more_at_most() -> None:
    made = world()
    add(made, "a", 3)
    plan(made)
    plan(made)
    add(made, "b", 3)  # one step computes, the other is the one more
    assert plan(made) == [("b", 0, False)]
    made.execute()
    assert sorted(plan(made)) == [("a", 4, True), ("b", 3, True)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_none_goes_behind_the_last_by_length(max_tokens: int) -> None:
    made = world()
    add(made, "a", 5, Limits(max_tokens, ignore_eos=True))
    sent = 0
    for _ in range(10):
        while plan(made):
            sent += 1
        if made.ring:
            made.execute()
    assert sent == max_tokens
    assert made.ended[RequestId("a")].reason is Reason.LENGTH


def test_none_goes_behind_the_end_of_the_pool() -> None:
    made = world(num_blocks=2)  # of 4 tokens each
    add(made, "a", 6)
    assert plan(made) == [("a", 0, False)]
    assert plan(made) == [("a", 6, True)]
    made.execute()
    assert plan(made) == [], "its second token is its last"
    made.finish(20)
    assert len(made.ended[RequestId("a")].output_ids) == 2


def test_nobody_gives_way_to_a_row_ahead() -> None:
    made = world(num_blocks=8, careless=True, lease_low_blocks=0, lease_high_blocks=1)
    limits = Limits(18, ignore_eos=True)
    for name in ("a", "b"):
        add(made, name, 5, limits)
    preempted_by = []
    for _ in range(400):
        answer_all(made)
        waiting = made.scheduler.num_waiting
        if made.plan() and made.scheduler.num_waiting > waiting:
            preempted_by += [is_open(row) for row in made.ring[-1].rows]
        elif made.ring:
            made.execute()
    assert preempted_by and not all(preempted_by), "only for a token that is known"
    made.finish(100)
    made.check_answers()


@pytest.mark.parametrize("changes", [{"run_ahead": False}, {"steps_in_flight_max": 1}])
def test_it_can_be_left(changes: dict[str, Any]) -> None:
    made = world(**changes)
    add(made, "a", 5)
    assert plan(made) == [("a", 0, False)]
    assert plan(made) == []


def test_several_stages_send_nothing_ahead() -> None:
    assert spread.runs_ahead(2, 1, wanted=True)
    assert not spread.runs_ahead(3, 2, wanted=True)
    made = world(num_stages=2)
    add(made, "a", 5)
    assert plan(made) == [("a", 0, False)]
    assert plan(made) == []


def test_who_must_be_alone_has_one_step_at_a_time() -> None:
    made = world()
    made.run(make_request("poison", [1, 2, 3], Limits(6, ignore_eos=True)), (), alone=True)
    add(made, "a", 3)
    made.finish(300)  # the world checks every plan
    made.check_answers()


# ---- ghosts ----------------------------------------------------------------------------------------


def test_a_row_behind_the_end_is_a_ghost() -> None:
    made = world()
    made.add(make_request("a", prompt_that_ends(5), Limits(9)))
    plan(made)
    assert plan(made) == [("a", 5, True)]
    made.execute()
    ended = made.ended[RequestId("a")]
    assert (ended.reason, ended.output_ids, ended.usage.output_tokens) == (Reason.STOP, (EOS,), 1)
    assert not list(made.scheduler.tables()), "its blocks are free at once"
    made.execute()
    assert made.outputs[RequestId("a")] == [EOS]
    assert ended.timings.recomputed_tokens == 0
    stats = made.scheduler.stats
    assert (stats.ghost_rows, stats.ahead_rows, stats.samples) == (1, 1, 2)


def test_a_block_that_a_ghost_writes_has_a_new_owner_already() -> None:
    """Whoever has it next is sent behind the ghost, so it writes last. That its memory holds its own prefix
    the world checks at each of its steps."""
    made = world(num_blocks=2)
    made.add(make_request("a", prompt_that_ends(3), Limits(5)))
    plan(made)
    assert plan(made) == [("a", 3, True)]
    made.execute()  # its end; the ghost is in flight still
    made.add(make_request("b", [5, 6, 7, 8, 9], Limits(3, ignore_eos=True)))
    assert plan(made) == [("b", 0, False)]
    ghost, owner = made.ring
    assert made.workers.tables[ghost.rows[0].slot][0] in owner.rows[0].new_blocks
    made.finish(50)
    made.check_answers()


@pytest.mark.parametrize("how", ["end", "cancel", "restart"])
def test_no_commit_covers_a_ghost(how: str) -> None:
    """The ghost fills the first block: nobody may be given it as a prefix."""
    made = world(num_blocks=2)
    prompt = prompt_that_ends(3)
    request = make_request("a", prompt, Limits(5))
    made.add(request)
    plan(made)
    assert plan(made) == [("a", 3, True)]
    if how == "cancel":
        made.stop(request.id)
    elif how == "restart":
        made.run(request, (), alone=False)
    committed = []
    for _ in range(20):
        committed += [
            c for effect, _ in made.calls if isinstance(effect, ExchangeBlocks) for c in effect.commits
        ]
        if made.ring:
            made.execute()
        answer_all(made)
        made.now += 0.02
        if how == "restart":
            made.plan()
    made.finish(50)
    assert not committed and not made.kvstore.index


def test_a_ghost_counts_for_nobody_who_has_its_slot() -> None:
    made = world(sequences_max=1)
    made.add(make_request("a", prompt_that_ends(4), Limits(5)))
    add(made, "b", 6)
    plan(made)
    plan(made)
    made.execute()
    assert plan(made) == [("b", 0, False)] and made.ring[0].rows[0].slot == made.ring[1].rows[0].slot
    made.finish(200)
    made.check_answers()


def test_a_stop_in_the_midst_of_many() -> None:
    """All end at their own places, by their own rules; every one as without rows ahead."""
    outputs = []
    for run_ahead in (False, True):
        made = world(run_ahead=run_ahead)
        for i in range(12):
            limits = Limits(3 + i, stop=(b"a", b"cd") if i % 3 else (), ignore_eos=i % 2 == 0)
            made.add(make_request(f"r{i}", [i, i + 1, i + 2], limits))
        made.finish(500)
        made.check_answers()
        assert bool(made.scheduler.stats.ahead_rows) == run_ahead
        outputs.append({name: made.ended[name].output_ids for name in made.ended})
    assert outputs[0] == outputs[1]
    assert all(oracle(made.requests[name], 64 * 4)[1] == output for name, output in outputs[1].items())

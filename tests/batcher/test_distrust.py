"""Blocks that do not hold what they should: who computed on them begins anew, and the cache forgets them."""

from random import Random

import pytest

from batcher.events import ExchangeBlocks, StepReturned
from chassis.ids import BlockId, RequestId
from chassis.messages.request import Limits
from chassis.sequence_digest import carried_on
from tests.batcher.test_scheduler import plan_rows, world
from tests.batcher.toy_pipeline import World, make_request, make_sequence

PROMPT = list(range(20))
TEN = Limits(10, ignore_eos=True)


def lied_to() -> World:
    """What "a" left in the cache is asked for by "b", and one of its blocks was written over."""
    made = world()
    made.lies = 1e-9  # workers look
    made.add(make_request("a", PROMPT, TEN))
    made.finish(1000)
    held = made.kvstore.index[made.chain_of(PROMPT)[2]]
    made.workers.memory[held][1] += 1
    made.add(make_request("b", PROMPT, TEN))
    return made


def test_it_is_computed_anew_without_the_cache() -> None:
    made = lied_to()
    (row,) = plan_rows(made)
    assert (row.fresh, row.start) == (True, 16)
    made.execute()
    assert [(note.request_id, note.num_blocks) for note in made.distrusted] == [("b", 4)]
    starts = []
    for _ in range(1000):
        if RequestId("b") in made.ended:
            break
        starts += [row.start for row in plan_rows(made)]
        made.execute()
    assert starts[0] == 0, "nothing of it is taken for known"
    made.finish(1000)
    made.check_answers()
    assert made.ended[RequestId("b")].usage.cached_tokens == 0
    assert len(made.distrusted) == 1


def test_kvstore_forgets_what_it_was_and_the_next_finds_the_new() -> None:
    made = lied_to()
    wrong = made.kvstore.index[made.chain_of(PROMPT)[2]]
    plan_rows(made)
    made.execute()
    told = [call for call, _ in made.calls if isinstance(call, ExchangeBlocks) and call.bad]
    assert len(told) == 1 and BlockId(wrong) in told[0].bad and len(told[0].bad) == 4
    made.finish(1000)
    made.add(make_request("c", PROMPT, TEN))
    made.finish(1000)
    made.check_answers()
    assert made.ended[RequestId("c")].usage.cached_tokens == 16
    assert len(made.distrusted) == 1, "what b computed is right"


def test_rows_that_a_step_does_not_have_end_the_pipeline() -> None:
    made = world()
    made.add(make_request("a", PROMPT, TEN))
    plan_rows(made)
    plan = made.ring.popleft()
    tokens = made.workers.execute(plan)
    assert not made.scheduler.returned(StepReturned(0.0, plan.epoch, plan.number, tokens, void_rows=(1,)))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_kvstore_says_every_answer_is_right(seed: int) -> None:
    """Matches that lie, in a pool tight or not, with steps ahead, several stages and lost pipelines."""
    dice = Random(seed)
    made = world(num_blocks=dice.choice((24, 64)), num_stages=dice.choice((1, 2)), step_tokens_max=8)
    made.dice, made.lies = dice, 0.5
    for turn in range(40):
        length = dice.randint(5, 20)
        made.add(make_request(f"r{turn}", PROMPT[:length], Limits(dice.randint(1, 12))))
        for _ in range(dice.randint(0, 12)):
            while made.plan():
                pass
            if not (made.calls or made.ring):
                break
            made.turn()
        if dice.random() < 0.1:
            made.lose()
            made.form(pool_changed=False)
    made.finish(10_000)
    made.check_answers()
    assert len(made.ended) == 40


def test_digests_are_those_of_the_ids_and_of_what_else_the_content_depends_on() -> None:
    sequence = make_sequence("a", prompt_len=12)
    root = sequence.hasher.root
    for length in (8, 12, 0, 4):
        assert sequence.digest(length) == carried_on(root, sequence.ids[:length])

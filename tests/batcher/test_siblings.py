"""Several of one prompt: it is computed once, and the end of its last block is copied by who writes it."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batcher.queueing import BATCH
from chassis.ids import RequestId
from chassis.messages.request import Limits
from tests.batcher.toy_pipeline import EOS, World, make_config, make_request

LONG = Limits(12, ignore_eos=True)


def world(num_blocks: int = 64, num_stages: int = 1, **changes: object) -> World:
    made = World(Random(1), make_config(**changes), num_blocks, num_stages)
    made.form(pool_changed=True)
    settle(made)
    return made


def settle(made: World) -> None:
    while made.calls:
        made.answer()


def add(made: World, names: str, prompt_len: int, limits: Limits = LONG, tenant: str = "t") -> None:
    for name in names:
        made.add(make_request(name, [7 + i % 20 for i in range(prompt_len)], limits, tenant=tenant))


def run_all(made: World) -> list[tuple[str, int, int]]:
    """Of every row: whose, from where, how many tokens."""
    rows: list[tuple[str, int, int]] = []
    while made.scheduler.request_ids():
        settle(made)
        if made.plan():
            rows += [(row.request_id, row.start, len(row.token_ids)) for row in made.ring[-1].rows]
        elif made.ring:
            made.execute()
    made.finish(100)
    made.check_answers()
    return rows


def prompt_work(rows: list[tuple[str, int, int]], prompt_len: int) -> int:
    return sum(min(count, prompt_len - start) for _, start, count in rows if start < prompt_len)


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 8, 30, 31, 32, 33])
def test_a_prompt_is_computed_once_but_for_its_last_token(prompt_len: int, num_stages: int) -> None:
    made = world(num_blocks=200, num_stages=num_stages)
    add(made, "abcdefgh", prompt_len)
    rows = run_all(made)
    assert prompt_work(rows, prompt_len) == prompt_len + 7
    assert [start for name, start, _ in rows if name == "h"][0] == prompt_len - 1
    cached = {made.ended[RequestId(name)].usage.cached_tokens for name in "bcdefgh"}
    assert cached == {prompt_len - 1}


def test_one_that_comes_later_begins_from_a_prompt_whose_answer_is_being_written() -> None:
    made = world()
    add(made, "a", 10)
    for _ in range(4):
        settle(made)
        made.plan()
        made.execute()
    assert len(made.outputs[RequestId("a")]) > 1
    add(made, "b", 10)
    assert prompt_work(run_all(made), 10) == 1


def test_tenants_share_nothing() -> None:
    made = world()
    add(made, "a", 10)
    add(made, "b", 10, tenant="u")
    assert prompt_work(run_all(made), 10) == 20


def test_without_the_cache_nothing_is_shared() -> None:
    made = world(prefix_cache=False)
    add(made, "ab", 10)
    assert prompt_work(run_all(made), 10) == 20


def test_who_waits_for_a_prompt_holds_nobody_up_and_no_blocks() -> None:
    made = world(step_tokens_max=8)
    add(made, "ab", 30)
    made.add(make_request("c", [3, 4, 5], LONG))
    settle(made)
    made.plan()
    waiting = [s for s in made.scheduler._running if s.request.id == "b"]
    assert waiting and not waiting[0].blocks
    assert made.scheduler.num_waiting == 0, "c has its place too"
    run_all(made)


def test_the_next_computes_it_when_the_first_is_cancelled() -> None:
    made = world(step_tokens_max=8, num_stages=2)
    add(made, "abc", 30)
    settle(made)
    made.plan()
    made.stop(RequestId("a"))
    rows = run_all(made)
    assert prompt_work([row for row in rows if row[0] == "b"], 30) == 30
    assert prompt_work([row for row in rows if row[0] == "c"], 30) == 1


def test_the_first_may_end_with_its_prompt() -> None:
    made = world()
    add(made, "abc", 10, Limits(1))
    assert prompt_work(run_all(made), 10) == 12


def test_who_lacks_a_block_for_its_copy_waits_and_keeps_what_it_shares() -> None:
    made = world(num_blocks=3, lease_low_blocks=0, lease_high_blocks=1)
    add(made, "ab", 7, Limits(4, ignore_eos=True))
    run_all(made)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([6, 12, 64]),
    st.sampled_from([3, 8, 32]),
    st.booleans(),
)
@example(10240, 1, 6, 3, True)  # gives way while it has less than it began with
def test_whatever_happens_to_the_others(
    seed: int, num_stages: int, num_blocks: int, step_tokens_max: int, careless: bool
) -> None:
    """Some are cancelled, the pipeline is lost, the pool too small: answers stay right, no block is lost."""
    dice = Random(seed)
    config = make_config(
        step_tokens_max=step_tokens_max, lease_low_blocks=1, lease_high_blocks=dice.choice([1, 8])
    )
    made = World(dice, config, num_blocks, num_stages, dice.choice([0.0, 0.0, 0.2]), careless)
    made.form(pool_changed=True)
    prompts = [[dice.randrange(EOS) for _ in range(dice.randint(1, 14))] for _ in range(2)]
    coming = [
        make_request(f"r{i}", dice.choice(prompts), Limits(dice.randint(1, 8)), tenant=dice.choice("ttu"))
        for i in range(12)
    ]
    gone: set[RequestId] = set()
    for _ in range(300):
        made.now += dice.choice([0.0, 0.001, 0.02])
        act = dice.random()
        held = made.scheduler.request_ids()
        if not made.formed:
            made.form(pool_changed=dice.random() < 0.4)
        elif act < 0.02:
            made.lose()
        elif act < 0.06 and held:
            cancelled = dice.choice(held)
            gone.add(cancelled)
            made.stop(cancelled)
        elif act < 0.25 and coming:
            made.add(coming.pop())
        elif act < 0.5:
            made.answer()
        elif act < 0.75:
            made.plan()
        else:
            made.execute()
    while coming:
        made.add(coming.pop())
    made.finish(4000)
    made.check_answers()
    assert set(made.ended) == set(made.requests) - gone


def test_nobody_waits_for_a_prompt_that_is_computed_in_spare_room() -> None:
    made = world(step_tokens_max=8)
    prompt = [i % 30 for i in range(60)]
    made.add(make_request("batch", prompt, LONG, priority=BATCH))
    settle(made)
    for _ in range(2):
        made.plan()
        made.execute()
    made.add(make_request("a", prompt, LONG))
    made.add(make_request("b", prompt, LONG))
    made.finish(400)
    made.check_answers()
    assert list(made.ended)[-1] == "batch"
    assert made.ended[RequestId("b")].usage.cached_tokens == 59


def test_a_pool_that_has_too_little_is_doubted_though_others_wait_for_the_prompt() -> None:
    made = world(num_blocks=60, step_tokens_max=4)
    store = made.kvstore
    lost = [store.free.pop() for _ in range(len(store.free) - 10)]
    store.refs.update(dict.fromkeys(lost, 1))  # it does not know that nobody has these
    add(made, "abc", 160)
    for _ in range(4):
        made.answer()
        made.plan()
        made.execute()
    assert len(made.scheduler._running.siblings) == 2
    made.finish(800)
    assert made.scheduler._lease.stats.attaches == 2
    made.check_answers()

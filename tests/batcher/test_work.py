"""Work, told in seconds of a full pipeline: what one pipeline does of it, several do in so many parts."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from batcher.inflight import Flight
from batcher.queueing import BATCH
from batcher.stage_cost import Coefficients, Load
from batcher.work import Work
from bench.virtual_pipeline import SPLITS, Costs, VirtualPipeline
from chassis.messages.request import Limits
from tests.batcher.test_scheduler import settle
from tests.batcher.toy_pipeline import World, make_config, make_request

COST = Coefficients(base=0.008, prompt_token=0.0001, decode=0.00002, attended=0.0, read=0.0)


def flight(load: Load, rows: tuple[Any, ...] = ()) -> Flight[Any]:
    return Flight(1, rows, load.prompt_tokens + load.decodes, 0, 0.0, 0.0, True, load, False, 1)


def row(tokens: int, batch: bool) -> tuple[Any, int, int, int, bool]:
    return (SimpleNamespace(place=SimpleNamespace(batch=batch)), 0, 10, 10 + tokens, True)


def test_a_full_step_is_what_it_takes_and_a_lone_decode_is_its_share() -> None:
    work = Work(places_max=8, step_tokens_max=512)
    assert work.price(Load(decodes=8), COST, 1) == pytest.approx(COST.seconds(Load(decodes=8)))
    assert work.price(Load(decodes=1), COST, 1) == pytest.approx(0.008 / 8 + 0.00002)
    assert work.price(Load(prompt_tokens=512), COST, 1) == pytest.approx(COST.seconds(Load(512)))


def test_stages_share_what_tokens_cost() -> None:
    work = Work(places_max=8, step_tokens_max=512)
    assert work.price(Load(decodes=8), COST, 2) == pytest.approx(0.008 + 8 * 0.00002 / 2)


def test_the_batch_class_is_left_out() -> None:
    work = Work(places_max=8, step_tokens_max=512)
    load = Load(decodes=4)
    work.returned(flight(load, tuple(row(1, batch=i > 0) for i in range(4))), COST, 1)
    assert work.tokens == 1 and work.seconds == pytest.approx(work.price(load, COST, 1) / 4)
    work.returned(flight(load, tuple(row(1, batch=True) for _ in range(4))), COST, 1)
    assert work.tokens == 1
    work.check()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_pipeline_that_never_waits_for_work_does_a_second_a_second(stages: int) -> None:
    """By the figures that steps of SmolLM2 were measured to take; the price leaves out what stages wait."""
    pipeline = VirtualPipeline(Costs(SPLITS[stages]), sequences_max=32)
    for _ in range(200):
        pipeline.ask(64, 64)
    pipeline.run(2.0)
    work = pipeline.scheduler.balance.work
    before_s, began = work.seconds, pipeline.now
    pipeline.run(began + 4.0)
    assert 0.6 <= (work.seconds - before_s) / (pipeline.now - began) <= 1.3


def test_what_waits_is_told_without_the_batch_class() -> None:
    made = World(Random(1), make_config(sequences_max=1), 64)
    made.form(pool_changed=True)
    settle(made)
    for name, priority, tokens in (("a", 5, 6), ("b", 5, 10), ("c", BATCH, 20), ("d", 2, 4)):
        made.add(make_request(name, [ord(name)] * tokens, Limits(8, ignore_eos=True), priority))
        settle(made)
    busy = made.scheduler.busy()
    assert (busy.running, busy.batch_running) == (1, 0)
    assert (busy.waiting, busy.batch_waiting) == (3, 1)
    assert busy.pending_tokens == 10 + 8 + 4 + 8
    assert busy.oldest_since is not None

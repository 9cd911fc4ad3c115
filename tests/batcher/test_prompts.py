"""Log probabilities of prompts, from what steps ask to the record: each place once, come what may."""

import asyncio
import math
from dataclasses import replace

import pytest

from batcher.events import Ended, StepReturned, TokensMade
from batcher.prompts import PromptSoFar
from chassis import subjects
from chassis.ids import RequestId
from chassis.memory_bus import MemoryBus
from chassis.messages.chunk import Part
from chassis.messages.pipeline import PromptAsk
from chassis.messages.request import Limits, Reason, Request, Sampling, Terminal, build_request, parse_record
from chassis.messages.sampling import PromptTold, TokenLogprobs
from chassis.messages.step_result import PromptAnswer
from shard_worker.fake_model import oracle, prompt_oracle
from tests.batcher.test_scheduler import world
from tests.batcher.test_service import GATEWAY, Gateway, deployment, request
from tests.batcher.toy_pipeline import World, make_request
from tests.sim.loop import run

R = RequestId("a")


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token_id), 1)


def asking(prompt: list[int], max_tokens: int = 3) -> Request:
    plain = make_request("a", prompt, Limits(max_tokens, ignore_eos=True))
    return replace(plain, sampling=Sampling(prompt_logprobs=0))


class Told:
    """A pipeline that answers what it is asked, and counts."""

    def __init__(self, made: World, prompt: list[int]) -> None:
        self.made, self.prompt = made, prompt
        self.asked: list[int] = []  # indices in the prompt, as they were asked for
        self.told: list[PromptTold] = []

    def turn(self) -> None:
        made = self.made
        if made.calls:
            made.answer()
        elif not made.plan():
            made.now += 0.01
        while made.ring:
            self.execute()

    def execute(self) -> None:
        made = self.made
        plan = made.ring.popleft()
        asks = made.scheduler.prompts.asks(plan)
        answers = []
        for place, first, num_tokens, next_id, top in asks:
            begin = plan.rows[place].start + first + 1
            ids = self.prompt[begin : begin + num_tokens]
            assert (ids[-1], top) == (next_id, 0)
            self.asked += range(begin, begin + num_tokens)
            answers.append(PromptAnswer(place, begin, tuple(map(entry, ids))))
        tokens = made.workers.execute(plan)
        for row in plan.rows:
            if row.samples:
                made.sampling[row.request_id] -= 1
        assert made.scheduler.returned(
            StepReturned(made.now, plan.epoch, plan.number, tokens, (), tuple(answers))
        )
        taken = made.scheduler.take()
        for note in taken.notes:
            if isinstance(note, TokensMade):
                self.told += [told for _, told in note.prompts]
                for request_id, more in zip(note.request_ids, note.ids, strict=True):
                    made.outputs.setdefault(request_id, []).extend(more)
        made.calls.extend((effect, made.attachment) for effect in taken.effects)
        made.scheduler.check()

    def whole(self) -> PromptTold:
        return PromptTold(tuple(self.prompt[1:]), tuple(map(entry, self.prompt[1:])))


def test_rows_ask_for_what_is_not_known_and_no_more() -> None:
    prompt = PromptSoFar((5, 6, 7, 8, 9), 2)
    assert prompt.ask(3, 0, 3) == PromptAsk(3, 0, 3, 8, 2)
    assert prompt.ask(0, 3, 5) == PromptAsk(0, 0, 1, 9, 2), "its last place draws the output"
    assert prompt.ask(0, 4, 5) is None
    prompt.learn(1, (entry(6), entry(7)))
    assert prompt.num_covered == 2 and not prompt.whole
    assert prompt.ask(0, 0, 5) == PromptAsk(0, 2, 2, 9, 2)
    prompt.learn(1, (entry(6), entry(7), entry(8), entry(9)))
    assert prompt.whole and prompt.num_covered == 5 and prompt.ask(0, 0, 5) is None
    assert prompt.entries == [entry(6), entry(7), entry(8), entry(9)]


def test_each_place_is_asked_for_once_and_told_with_the_first_id() -> None:
    prompt = [i % 7 for i in range(30)]
    made = Told(world(step_tokens_max=8), prompt)
    made.made.add(asking(prompt))
    while not made.made.scheduler.num_running or not made.told:
        assert made.made.now < 5
        made.turn()
    assert made.asked == list(range(1, 30)) and made.told == [made.whole()]


def test_a_cached_prefix_is_not_taken_where_its_numbers_are_asked_for() -> None:
    prompt = [i % 7 for i in range(22)]
    made = world(step_tokens_max=8)
    made.add(make_request("before", prompt, Limits(1)))
    made.finish(200)
    assert made.kvstore.index, "nothing is cached"
    made.add(make_request("plain", prompt, Limits(1)))
    made.finish(200)
    assert made.ended[RequestId("plain")].usage.cached_tokens == 20
    told = Told(made, prompt)
    made.add(asking(prompt, 1))
    while not told.told:
        assert made.now < 5
        told.turn()
    assert told.asked == list(range(1, 22)) and told.told == [told.whole()]


def test_after_a_preemption_only_the_rest_is_asked_for() -> None:
    prompt = [i % 7 for i in range(30)]
    made = Told(world(step_tokens_max=8), prompt)
    made.made.add(asking(prompt))
    while len(made.asked) < 16:
        made.turn()
    sequence = made.made.scheduler._roster[R]
    made.made.scheduler._roster.preempt(sequence, made.made.now)
    while not made.told:
        assert made.made.now < 5
        made.turn()
    assert made.asked == list(range(1, 30)) and made.told == [made.whole()]


def test_a_request_that_starts_again_has_what_was_told_of_its_prompt() -> None:
    prompt = [i % 7 for i in range(30)]
    made = Told(world(step_tokens_max=8), prompt)
    made.made.add(asking(prompt))
    while len(made.asked) < 16:
        made.turn()
    made.made.run(asking(prompt), (), alone=False)
    while not made.told:
        assert made.made.now < 5
        made.turn()
    assert made.asked == list(range(1, 30)) and made.told == [made.whole()]


def test_one_that_starts_with_output_asks_for_nothing() -> None:
    made = Told(world(), [1, 2, 3, 4])
    made.made.run(asking([1, 2, 3, 4], 9), (5,), alone=False)
    for _ in range(20):
        made.turn()
    assert made.asked == [] and made.told == []


@pytest.mark.parametrize("behind", [False, True])
def test_who_has_nan_logits_fails_and_nobody_else(behind: bool) -> None:
    """Also with a row sent ahead behind it: that is a ghost."""
    made = world(run_ahead=behind)
    for name, last in (("a", 3), ("b", 4)):  # of one prompt one would wait for the other
        made.add(make_request(name, [1, 2, last], Limits(6, ignore_eos=True)))
    while not made.ring or len(made.ring[0].rows) < 2:
        if made.calls:
            made.answer()
        made.plan()
    made.plan()
    assert len(made.ring) == 1 + behind
    plan = made.ring.popleft()
    tokens = made.workers.execute(plan)
    for row in plan.rows:
        made.sampling[row.request_id] -= 1
    nan = [row.request_id for row in plan.rows].index(R)
    returned = StepReturned(made.now, plan.epoch, plan.number, tokens, nan_places=(nan,))
    assert made.scheduler.returned(returned)
    made.take()
    ended = made.ended[R]
    assert (ended.reason, ended.output_ids) == (Reason.FAILED, ()) and "NaN logits" in ended.error
    made.finish(200)
    assert made.ended[RequestId("b")].reason is Reason.LENGTH
    del made.ended[R]
    made.check_answers()


# ---- through the batcher and real workers ------------------------------------------------------------


async def _records(bus: MemoryBus, names: list[str]) -> dict[str, Terminal]:
    found: dict[str, Terminal] = {}
    async with asyncio.timeout(20):
        while len(found) < len(names):
            await asyncio.sleep(0.1)
            for name in names:
                stored = await bus.last(subjects.RESULTS, subjects.result(RequestId(name)))
                record = parse_record(stored.data) if stored is not None else None
                if isinstance(record, Terminal):
                    found[name] = record
    return found


@pytest.mark.parametrize("stages", [1, 2])
def test_parts_and_records_tell_what_the_model_says_of_the_prompt(stages: int) -> None:
    async def main() -> None:
        async with deployment(num_stages=stages, step_tokens_max=8) as world:
            bus, gateway = MemoryBus(world.broker, "client"), Gateway()
            await bus.subscribe(subjects.chunks(GATEWAY), gateway.heard)
            prompt = tuple(range(1, 30))
            asked = {
                name: replace(request(name, prompt), sampling=Sampling(1.0, prompt_logprobs=top))
                for name, top in (("r1", 2), ("r2", None), ("r3", 0))
            }
            for name, each in asked.items():
                await bus.append(subjects.request("fake", 5, each.id), build_request(each))
                await _records(bus, [name])
            records = await _records(bus, list(asked))
            parts: dict[str, list[Part]] = {}
            for part in (part for chunk in gateway.chunks for part in chunk.parts):
                parts.setdefault(part.request_id, []).append(part)
            for name, each in asked.items():
                top = each.sampling.prompt_logprobs
                want = None if top is None else PromptTold(prompt[1:], tuple(prompt_oracle(prompt, top)))
                assert records[name].prompt == want
                assert [part.prompt for part in parts[name] if part.first_index == 0] == [want]
                assert not any(part.prompt for part in parts[name] if part.first_index)
                assert list(records[name].output_ids) == oracle(prompt, 7, 1.0, 10)
                assert (records[name].usage.cached_tokens > 0) == (name == "r2")
            bus.kill()

    run(main())


@pytest.mark.parametrize("asks", [None, 1])
def test_nan_logits_fail_their_request_and_leave_the_epoch_alone(asks: int | None) -> None:
    """In the last place of a prompt, where the output is drawn, or, when asked about, in its midst."""

    async def main() -> None:
        async with deployment(nan_id=500) as world:
            bus = MemoryBus(world.broker, "client")
            await asyncio.sleep(1)
            epoch = world.nodes["batcher"].service._core.formation.epoch
            broken = (7, 500, 9) if asks is not None else (7, 9, 500)
            requests = [
                replace(request("nan", broken), sampling=Sampling(1.0, prompt_logprobs=asks)),
                request("fine", (7, 8, 9)),
                request("fine2", (3, 500, 4)),
            ]
            for each in requests:
                await bus.append(subjects.request("fake", 5, each.id), build_request(each))
            records = await _records(bus, [each.id for each in requests])
            assert records["nan"].reason is Reason.FAILED and "NaN logits" in records["nan"].error
            assert records["nan"].output_ids == () and records["nan"].prompt is None
            for each in requests[1:]:
                assert list(records[each.id].output_ids) == oracle(each.prompt_ids, 7, 1.0, 10)
            assert world.nodes["batcher"].service._core.formation.epoch == epoch
            bus.kill()

    run(main())


def test_numbers_that_are_none_are_found_among_a_prompts() -> None:
    made = Told(world(), [1, 2, 3, 4])
    made.made.add(asking([1, 2, 3, 4]))
    while not made.made.ring:
        if made.made.calls:
            made.made.answer()
        made.made.plan()
    plan = made.made.ring.popleft()
    tokens = made.made.workers.execute(plan)
    wrong = (entry(2), TokenLogprobs(math.nan, 1), entry(4))
    returned = StepReturned(0.0, plan.epoch, plan.number, tokens, (), (PromptAnswer(0, 1, wrong),))
    made.made.scheduler.returned(returned)
    (ended,) = [note for note in made.made.scheduler.take().notes if isinstance(note, Ended)]
    assert ended.reason is Reason.FAILED and "NaN logits" in ended.error

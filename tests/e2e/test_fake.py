"""A deployment of real processes with the fake model, undisturbed: answers, cache, ends, resumption."""

import asyncio
from dataclasses import replace
from statistics import fmean

import grpc
import grpc.aio
import pytest

from chassis.messages.request import Reason, Terminal
from chassis.wire import gateway_pb2_grpc
from gateway.admission import choice_seed
from shard_worker.fake_model import EOS_ID, TOKEN_BYTES, logprobs_of, oracle
from shoal.client import Accepted, AsyncClient, Finished, Params, ShoalError, build_generate
from tests.e2e.rig import (
    Answer,
    Running,
    amid,
    ask,
    call,
    draw_calls,
    is_pending,
    last_record,
    listen,
    params,
    resume,
    settled,
    until,
)
from tests.sim.clients import NUM_LAYERS


async def nothing() -> None:
    pass


def test_sixteen_streams_are_what_the_model_says(calm: Running) -> None:
    async def life() -> None:
        async with calm.client() as client:
            await amid(client, draw_calls(1, 60), nothing)
            await amid(client, draw_calls(2, 40, stop=("e", "at s")), nothing, begun=0)

    calm.run(life())


def test_text_goes_in_and_out(calm: Running) -> None:
    """A chat and a raw prompt, through the model's own template and tokenizer."""

    async def life() -> None:
        async with calm.client() as client:
            for prompt in ("Grüße, 🐟!", [("system", "be brief"), ("user", "hello")]):
                ids = await client.tokenize(prompt)
                made = oracle(ids, 0, 0.0, 40, NUM_LAYERS)
                made = made[: made.index(EOS_ID)] if EOS_ID in made else made
                text = b"".join(TOKEN_BYTES[i] for i in made).decode(errors="replace")
                events = client.generate(prompt, Params(temperature=0.0, max_tokens=40))
                answer = Answer(call(ids, 40))
                await listen(events, answer)
                assert answer.text == text

    calm.run(life())


def test_a_repeated_prompt_prefills_only_its_tail(calm: Running) -> None:
    async def life() -> tuple[Answer, Answer]:
        async with calm.client() as client:
            prompt = [7, *range(1, 200)]
            first = await ask(client, Answer(call(prompt, 4)))
            second = await ask(client, Answer(call([*prompt, 9, 9, 9], 4)))
        first.check()
        second.check()
        return first, second

    first, second = calm.run(life())
    assert first.end is not None and first.end.cached_tokens == 0
    assert second.end is not None and second.end.prompt_tokens == 203
    assert second.end.cached_tokens == 192  # twelve blocks of sixteen


def test_choices_draw_with_seeds_of_their_own(calm: Running) -> None:
    """Each is what its seed gives alone."""

    async def life() -> None:
        asked = call(
            [1, 2, 3], 12, temperature=1.0, seed=9, repetition_penalty=1.5, top_logprobs=1, prompt_logprobs=2
        )
        answers: dict[int, Answer] = {}
        async with calm.client() as client:
            assert asked.token_ids is not None
            async for event in client.generate(asked.token_ids, replace(params(asked), n=3)):
                if isinstance(event, Accepted):
                    of_prompt = None if event.choice else asked.prompt_logprobs  # the first alone is told
                    told = replace(asked, seed=event.seed, prompt_logprobs=of_prompt)
                    answers[event.choice] = Answer(told)
                answers[event.choice].take(event)
            for choice in range(3):
                answers[choice].check()
                alone = await ask(client, Answer(answers[choice].call))
                assert alone.ids == answers[choice].ids
        assert answers[0].call.seed == 9 and len({tuple(a.ids) for a in answers.values()}) == 3

    calm.run(life())


def test_the_best_of_four_are_those_that_are_best_alone(calm: Running) -> None:
    async def life() -> None:
        asked = call([1, 2, 3], 12, temperature=1.0, ignore_eos=False)
        assert asked.token_ids is not None
        async with calm.client() as client:
            alone: list[tuple[float, int]] = []
            generated = 0
            for candidate in range(4):
                said = replace(asked, seed=choice_seed(9, candidate), top_logprobs=0)
                answer = await ask(client, Answer(said))
                alone.append((-fmean(logprobs_of(i, 0).logprob for i in answer.ids), candidate))
                generated += len(answer.ids)
            best = [choice_seed(9, candidate) for _, candidate in sorted(alone)[:2]]
            told = replace(params(asked), seed=9, n=2, best_of=4)
            events = [event async for event in client.generate(asked.token_ids, told)]
            answers = [Answer(replace(asked, seed=seed)) for seed in best]
            for event in events[1:]:
                answers[event.choice].take(event)
            for answer in answers:
                answer.check()
                assert answer.end is not None and answer.end.generated_tokens == generated
            opening, *accepted = [event for event in events if isinstance(event, Accepted)]
            assert opening == events[0] and opening.seed == 9
            assert [event.seed for event in accepted] == best

    calm.run(life())


def test_a_cancel_reaches_all_choices(calm: Running) -> None:
    async def life() -> None:
        async with calm.client() as client, calm.client(1) as other:
            for canceller in (client, other):
                asked = call([1, 2, 3], 1000, temperature=1.0)
                ids: dict[int, str] = {}
                reasons: list[str] = []
                assert asked.token_ids is not None
                async for event in client.generate(asked.token_ids, replace(params(asked), n=3)):
                    if isinstance(event, Accepted):
                        ids[event.choice] = event.request_id
                    if isinstance(event, Accepted) and len(ids) == 3:
                        await canceller.cancel(ids[0])
                    if isinstance(event, Finished):
                        reasons.append(event.reason)
                assert reasons == ["cancelled"] * 3

    calm.run(life())


def test_cancel_ends_a_request(calm: Running) -> None:
    async def life() -> None:
        bus = await calm.bus()
        async with calm.client() as client, calm.client(1) as other:
            for canceller in (client, other):  # any gateway may be told
                answer = Answer(call([1, 2, 3], 1000))

                async def cancel(canceller: AsyncClient = canceller, answer: Answer = answer) -> None:
                    await until(lambda: len(answer.ids) > 3, "the stream begins")
                    await canceller.cancel(answer.request_id)

                await asyncio.gather(ask(client, answer), cancel())
                assert answer.end is not None and answer.end.reason == "cancelled"
                record = await last_record(bus, answer.request_id)
                assert isinstance(record, Terminal) and record.reason is Reason.CANCELLED
                assert list(record.output_ids[: len(answer.ids)]) == answer.ids
                await settled(bus, answer.request_id)
        await bus.close()

    calm.run(life())


def test_a_client_that_leaves_ends_its_request(calm: Running) -> None:
    async def life() -> None:
        bus = await calm.bus()
        async with calm.client() as client:
            answer = Answer(call([4, 5, 6], 1000))
            assert answer.call.token_ids is not None
            async for event in client.generate(answer.call.token_ids, params(answer.call)):
                answer.take(event)
                if len(answer.ids) > 3:
                    break
        await settled(bus, answer.request_id)
        record = await last_record(bus, answer.request_id)
        assert isinstance(record, Terminal) and record.reason is Reason.CANCELLED
        assert len(record.output_ids) < 1000
        await bus.close()

    calm.run(life())


def test_a_deadline_ends_a_request(calm: Running) -> None:
    async def life() -> None:
        bus = await calm.bus()
        async with calm.client() as client:
            answer = await ask(client, Answer(call([8, 9], 3000, timeout_ms=400)))
        assert answer.end is not None and answer.end.reason == "deadline"
        await settled(bus, answer.request_id)
        record = await last_record(bus, answer.request_id)
        assert isinstance(record, Terminal) and record.reason is Reason.DEADLINE
        await bus.close()

    calm.run(life())


def test_the_deadline_of_a_call_counts_too(calm: Running) -> None:
    """However short: where it is over before anything was accepted, one twice as long is asked for."""

    async def life() -> None:
        bus = await calm.bus()
        async with grpc.aio.insecure_channel(calm.deployment.address) as channel:
            stub = gateway_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            asked = build_generate([8, 8], Params(max_tokens=3000, ignore_eos=True))
            request_id, timeout_s = "", 0.2
            while not request_id:
                timeout_s *= 2
                with pytest.raises(grpc.aio.AioRpcError) as late:
                    async for event in stub.Generate(asked, timeout=timeout_s):
                        request_id = request_id or event.accepted.request_id
                assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await settled(bus, request_id)
        record = await last_record(bus, request_id)
        assert isinstance(record, Terminal)
        assert record.reason in (Reason.DEADLINE, Reason.CANCELLED)  # whichever clock was first
        await bus.close()

    calm.run(life())


def test_who_returns_within_the_window_gets_the_rest(calm: Running) -> None:
    """Through another gateway, before the end and after it."""

    async def life() -> None:
        bus = await calm.bus()
        async with calm.client() as client, calm.client(1) as other:
            for wait_for_end in (False, True):
                answer = Answer(call([10, 11, int(wait_for_end)], 100, temperature=1.0, resume_window_s=30))
                assert answer.call.token_ids is not None
                async for event in client.generate(answer.call.token_ids, params(answer.call)):
                    answer.take(event)
                    if len(answer.ids) > 10:
                        break
                assert await is_pending(bus, answer.request_id)
                if wait_for_end:
                    await settled(bus, answer.request_id)
                await resume(other, answer)
                answer.check()
        await bus.close()

    calm.run(life())


def test_a_client_key_names_one_request(calm: Running) -> None:
    """The same words attach, at any gateway; other words are refused."""

    async def life() -> None:
        keyed = call([12, 13], 60, client_key="mine")
        async with calm.client() as client, calm.client(1) as other:
            answers = [Answer(keyed), Answer(keyed)]
            await asyncio.gather(ask(client, answers[0]), ask(other, answers[1]))
            for answer in answers:
                answer.check()
            assert answers[0].request_id == answers[1].request_id
            again = await ask(other, Answer(keyed))
            again.check()
            with pytest.raises(ShoalError) as refused:
                await ask(client, Answer(call([12, 14], 60, client_key="mine")))
            assert refused.value.code == "ALREADY_EXISTS"

    calm.run(life())


def test_nothing_is_known_of_a_strange_request(calm: Running) -> None:
    async def life() -> None:
        async with calm.client() as client:
            strange = Answer(call([1], 1), request_id="01ARZ3NDEKTSV4RRFFQ69G5FAV")
            for act in (resume(client, strange), client.cancel(strange.request_id)):
                with pytest.raises(ShoalError) as refused:
                    await act
                assert refused.value.code == "NOT_FOUND"

    calm.run(life())

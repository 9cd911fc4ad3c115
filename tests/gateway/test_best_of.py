"""`best_of`: more is generated than told, the best come first, and nobody is told more than he asked for."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from chassis.errors import Code, Status
from chassis.ids import Attempt, RequestId
from chassis.messages.card import TokenBytes
from chassis.messages.gateway import Accepted, Delta, Finished, GenerateCall, IdLogprobs, PromptLogprobs
from chassis.messages.ownership import CancelAsk
from chassis.messages.request import Reason, Timings, Usage
from chassis.messages.sampling import UNTOLD, PromptTold, TokenLogprobs
from gateway.admission import body_digest, choice_id
from gateway.candidates import best_events, ranked
from gateway.clients import Client
from gateway.detokenizer import OutputText
from gateway.events import Accept, End
from tests.gateway.rig import Job, Reader, Rig, ScriptedBatcher, call, run, until
from tests.gateway.test_sampling import TEXT, admitted, take


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_of": 0}, "best_of: 0; n, 1, to 16"),
        ({"best_of": 17}, "best_of: 17; n, 1, to 16"),
        ({"best_of": 2, "n": 3}, "best_of: 2; n, 3, to 16"),
        ({"best_of": 20, "n": 17}, "n: 17; 1 to 16"),
    ],
)
def test_what_is_out_of_range_is_refused_by_field_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Status) as refused:
        admitted(replace(TEXT, **changes))
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.message == message


@pytest.mark.parametrize(
    ("asked", "logprobs"),
    [
        (GenerateCall(prompt="hi", best_of=1), None),
        (GenerateCall(prompt="hi", n=3, best_of=3), None),
        (GenerateCall(prompt="hi", n=3, best_of=4), 0),
        (GenerateCall(prompt="hi", best_of=16, temperature=0.0), 0),
        (GenerateCall(prompt="hi", best_of=2, top_logprobs=5), 5),
    ],
)
def test_log_probabilities_are_computed_only_where_they_choose(
    asked: GenerateCall, logprobs: int | None
) -> None:
    assert admitted(asked).sampling.logprobs == logprobs


def test_another_number_of_candidates_is_another_body() -> None:
    digests = {body_digest(replace(TEXT, best_of=best_of), "m") for best_of in (None, 1, 2, 3)}
    assert len(digests) == 4


# ---- the order --------------------------------------------------------------------------------------


def ended(choice: int, told: tuple[TokenLogprobs, ...], reason: Reason = Reason.STOP) -> Client:
    client = Client(choice, RequestId(f"r{choice}"), choice)
    client.pass_on(0, tuple(range(len(told))), told)
    client.finish(End(choice, reason, len(told), None, Usage(), Timings(), Attempt(1)))
    return client


def each(*logprobs: float) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(logprob, 1) for logprob in logprobs)


def test_the_mean_counts_and_not_the_sum_and_equals_keep_their_order() -> None:
    short, long = each(-1.0, -1.0), each(-0.5, -0.5, -0.5, -0.5, -0.5)
    assert [c.choice for c in ranked([ended(0, short), ended(1, long), ended(2, short)])] == [1, 0, 2]


def test_what_is_not_known_does_not_count_and_what_is_cut_off_comes_last() -> None:
    candidates = [
        ended(0, each(-0.1), Reason.CANCELLED),
        ended(1, (UNTOLD,)),
        ended(2, (*each(-2.0), UNTOLD, UNTOLD)),
        ended(3, each(-1.0), Reason.LENGTH),
        ended(4, (), Reason.DEADLINE),
    ]
    assert [c.choice for c in ranked(candidates)] == [3, 2, 1, 0, 4]


# ---- as a service -----------------------------------------------------------------------------------


async def write(batcher: ScriptedBatcher, job: Job, text: bytes, logprob: float) -> None:
    """All of a candidate's output, an id at a time."""
    for byte in text:
        batcher.send(job, byte, told=(TokenLogprobs(logprob, 1),))
    await batcher.end(job, told=each(*[logprob] * len(text)))


@pytest.mark.parametrize("top_logprobs", [None, 0])
def test_the_best_are_told_in_order_when_all_have_ended(top_logprobs: int | None) -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(n=2, best_of=3, seed=5, top_logprobs=top_logprobs)))
            jobs = await take(batcher, 3)
            base = jobs[0].request.id
            assert [job.request.id for job in jobs] == [choice_id(base, c) for c in range(3)]
            await write(batcher, jobs[0], b"no", -3.0)
            await write(batcher, jobs[1], b"good", -1.0)
            await until(lambda: len(gateway._streams._core) == 1)
            assert reader.events == [Accepted(base, 2, 5)], "nobody knows yet"
            await write(batcher, jobs[2], b"best", -0.5)
            await reader.done()
            second, third = jobs[1].request, jobs[2].request
            ends = [e for e in reader.events if isinstance(e, Finished)]
            assert reader.events == [
                Accepted(base, 2, 5),
                Accepted(third.id, 2, third.seed, 0),
                delta(b"best", -0.5, top_logprobs, 0),
                ends[0],
                Accepted(second.id, 2, second.seed, 1),
                delta(b"good", -1.0, top_logprobs, 1),
                ends[1],
            ]
            assert [(e.choice, e.usage.output_tokens, e.generated_tokens) for e in ends] == [
                (0, 4, 10),
                (1, 4, 10),
            ]
            assert not batcher.heard

    run(main())


def delta(text: bytes, logprob: float, top_logprobs: int | None, choice: int) -> Delta:
    told = tuple(IdLogprobs(logprob, 1, bytes([byte])) for byte in text) if top_logprobs is not None else ()
    return Delta(text.decode(), tuple(text), 0, told, choice)


def test_as_many_as_are_told_come_as_they_are_made() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(n=2, best_of=2)))
            jobs = await take(batcher, 2)
            batcher.send(jobs[1], 97)
            await until(lambda: reader.text == "a")
            await reader.leave()

    run(main())


def test_leaving_reaches_all_candidates() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(best_of=3)))
            jobs = await take(batcher, 3)
            await reader.accepted()
            await write(batcher, jobs[1], b"done", -1.0)
            await until(lambda: len(gateway._streams._core) == 2)
            await reader.leave()
            await until(lambda: len(batcher.heard) == 2)
            assert set(batcher.heard) == {CancelAsk(jobs[c].request.id, "disconnect") for c in (0, 2)}
            await until(lambda: gateway._streams.idle)

    run(main())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_cancel_of_the_first_reaches_all_and_what_was_whole_is_told(elsewhere: bool) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher), rig.gateway("gw2") as second:
            await until(lambda: second.ready)
            reader = Reader(gateway.generate(call(best_of=3)))
            jobs = await take(batcher, 3)
            first = await reader.accepted()
            await write(batcher, jobs[0], b"whole", -4.0)
            await until(lambda: len(gateway._streams._core) == 2)
            batcher.send(jobs[1], 97, told=each(-0.1))
            await (second if elsewhere else gateway).cancel(first, "t")
            await until(lambda: len(batcher.heard) == 2)
            assert batcher.heard == [CancelAsk(jobs[c].request.id, "client") for c in (1, 2)]
            for job in jobs[1:]:
                await batcher.end(job, Reason.CANCELLED)
            await reader.done()
            assert reader.text == "whole" and reader.finished is not None
            assert reader.finished.reason is Reason.STOP

    run(main())


def test_one_candidate_that_fails_ends_the_call_and_the_others() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(best_of=2)))
            jobs = await take(batcher, 2)
            await reader.accepted()
            await batcher.end(jobs[1], Reason.FAILED, error="no room")
            with pytest.raises(Status, match="no room"):
                await reader.done()
            await until(lambda: batcher.heard)
            assert batcher.heard == [CancelAsk(jobs[0].request.id, "disconnect")]

    run(main())


def test_candidates_need_a_place_each() -> None:
    async def main() -> None:
        async with Rig().standing(streams_len_max=2) as (gateway, _):
            with pytest.raises(Status, match="too many open streams"):
                await Reader(gateway.generate(call(best_of=3))).done()

    run(main())


def test_who_asks_again_under_the_same_key_is_told_the_best_once_more() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            first = Reader(gateway.generate(call(best_of=2, client_key="k")))
            jobs = await take(batcher, 2)
            await write(batcher, jobs[0], b"no", -3.0)
            await write(batcher, jobs[1], b"yes", -1.0)
            await first.done()
            again = Reader(gateway.generate(call(best_of=2, client_key="k")))
            await again.done()
            assert (first.text, again.text) == ("yes", "yes")
            other = Reader(gateway.generate(call(best_of=3, client_key="k")))
            with pytest.raises(Status) as refused:
                await other.done()
            assert refused.value.code is Code.ALREADY_EXISTS

    run(main())


def test_of_the_prompt_the_first_candidate_tells_at_once_and_only_once() -> None:
    async def main() -> None:
        ready = asyncio.Event()
        clients = [Client(c, RequestId(f"r{c}"), c, ready) for c in range(2)]
        for c, client in enumerate(clients):
            client.accept(Accept(c, client.request_id, "m", (), (), None), OutputText(BYTES))
        prompt = PromptTold((98,), each(-2.0))
        async with aclosing(best_events(clients, ready, 2, logprobs=False)) as events:
            assert await anext(events) == Accepted(RequestId("r0"), 0, 0)
            clients[0].pass_on(0, (97,), each(-3.0), prompt)
            told = PromptLogprobs((98,), 1, (IdLogprobs(-2.0, 1, b"b"),))
            assert await anext(events) == told
            clients[1].pass_on(0, (99,), each(-1.0))
            for client in clients:
                client.finish(End(client.number, Reason.STOP, 1, None, Usage(), Timings(), Attempt(1)))
            rest = [event async for event in events]
        assert [(type(event), event.choice) for event in rest] == [
            (kind, choice) for choice in range(2) for kind in (Accepted, Delta, Finished)
        ]
        assert [event.text for event in rest if isinstance(event, Delta)] == ["c", "a"]

    run(main())


BYTES = TokenBytes.of([bytes([b]) for b in range(256)])

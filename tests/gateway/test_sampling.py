"""Sampling parameters at the border: what is refused and how, what becomes of the rest, choices, logprobs."""

import asyncio
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from chassis import subjects
from chassis.errors import Code, Status
from chassis.ids import Attempt, GatewayId, RequestId
from chassis.messages.card import TokenBytes
from chassis.messages.gateway import Accepted, Delta, Finished, GenerateCall, IdLogprobs, TopLogprob
from chassis.messages.ownership import CancelAsk, TakeoverAnswer, TakeoverQuestion, build_takeover_question
from chassis.messages.request import Reason, Request
from chassis.messages.sampling import UNTOLD, Grammar, GrammarKind, Sampling, Shaping, TokenLogprobs
from gateway.admission import ModelFacts, admit, check_call, choice_id, choice_seed, of_choice
from gateway.sampling import forms_of
from tests.gateway.rig import Job, Reader, Rig, ScriptedBatcher, byte_card, call, run, until
from tests.gateway.test_admission import LIMITS

MODEL = ModelFacts("m", context_len_max=16, vocab_size=100)
TEXT = GenerateCall(prompt="hi")


def admitted(asked: GenerateCall, bad_words: tuple[tuple[int, ...], ...] = ()) -> Request:
    check_call(asked, LIMITS)
    return admit(
        asked,
        MODEL,
        (1, 2, 3),
        request_id=RequestId("r1"),
        gateway=GatewayId("g1"),
        fresh_seed=77,
        bad_words=bad_words,
    )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"min_p": 1.1}, "min_p: 1.1; 0 to 1"),
    ({"min_p": -0.1}, "min_p: -0.1; 0 to 1"),
    ({"typical_p": 0.0}, "typical_p: 0; above 0, up to 1"),
    ({"typical_p": math.nan}, "typical_p: nan; above 0, up to 1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty: 0; above 0, up to 2"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty: 4.94066e-324; above 0, up to 2"),  # 0 in a message
    ({"top_p": 1e-46}, "top_p: 1e-46; above 0, up to 1"),
    ({"repetition_penalty": 2.5}, "repetition_penalty: 2.5; above 0, up to 2"),
    ({"presence_penalty": -2.1}, "presence_penalty: -2.1; -2 to 2"),
    ({"frequency_penalty": math.inf}, "frequency_penalty: inf; -2 to 2"),
    ({"logit_bias": ((3, 101.0),)}, "logit_bias[3]: 101; -100 to 100"),
    ({"logit_bias": ((3, math.nan),)}, "logit_bias[3]: nan; -100 to 100"),
    ({"logit_bias": ((100, 1.0),)}, "logit_bias: 100; below 100, the vocabulary of m"),
    ({"logit_bias": tuple((i, 1.0) for i in range(1025))}, "logit_bias: 1025 ids; at most 1024"),
    ({"allowed_token_ids": (1, 100)}, "allowed_token_ids: 100; below 100, the vocabulary of m"),
    ({"allowed_token_ids": (1,) * 16385}, "allowed_token_ids: 16385; at most 16384"),
    ({"bad_words": ("a",) * 65}, "bad_words: 65 strings; at most 64"),
    ({"bad_words": ("a", " ")}, "bad_words[1]: 1 to 256 bytes, and not only space"),
    ({"bad_words": ("x" * 257,)}, "bad_words[0]: 1 to 256 bytes"),
    ({"bad_words": ("\ud800",)}, "bad_words[0]: not valid Unicode"),
    ({"top_logprobs": 21}, "top_logprobs: 21; 0 to 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs: 21; 0 to 20"),
    ({"n": 0}, "n: 0; 1 to 16"),
    ({"n": 17}, "n: 17; 1 to 16"),
    ({"n": 2, "temperature": 0.0}, "n: 2; 1 with temperature 0"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_what_is_out_of_range_is_refused_by_field_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Status) as refused:
        admitted(replace(TEXT, **changes))
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.message.startswith(message)


def test_what_says_nothing_costs_nothing() -> None:
    neutral: dict[str, Any] = {
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
    }
    said = replace(TEXT, frequency_penalty=0.0, logit_bias=((5, 0.0),), **neutral)
    for asked in (TEXT, said, replace(TEXT, n=1)):
        assert admitted(asked).sampling == Sampling()


def test_every_parameter_becomes_the_requests() -> None:
    asked = replace(
        TEXT,
        min_p=0.1,
        typical_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias=((9, 1.0), (2, -3.0)),
        allowed_token_ids=(9, 2, 9),
        top_logprobs=4,
    )
    sampling = admitted(asked, bad_words=((4, 5),)).sampling
    assert sampling.logprobs == 4
    assert sampling.shaping == Shaping(0.1, 0.9, 1.2, -1.0, 0.5, ((2, -3.0), (9, 1.0)), (2, 9), ((4, 5),))


def test_bad_words_are_meant_with_and_without_a_space() -> None:
    assert forms_of(("no", " never", "no")) == ("no", " no", " never")


# ---- choices ----------------------------------------------------------------------------------------


def test_seeds_of_choices_are_golden() -> None:
    assert [choice_seed(7, choice) for choice in range(3)] == GOLDEN_SEEDS
    first = admitted(replace(TEXT, seed=7))
    second = of_choice(first, 1, b"p" * 25)
    assert (second.id, second.seed, second.trace_parent) == ("r1c1", GOLDEN_SEEDS[1], b"p" * 25)
    assert of_choice(first, 0, b"") == first
    seeds = {choice_seed(seed, choice) for seed in range(50) for choice in range(16)}
    assert len(seeds) == 800


GOLDEN_SEEDS = [7, 17529653414094454445, 4215916219287366819]


def of(reader: Reader, choice: int) -> str:
    return "".join(e.text for e in reader.events if isinstance(e, Delta) and e.choice == choice)


async def take(batcher: ScriptedBatcher, n: int) -> list[Job]:
    jobs = [await batcher.take() for _ in range(n)]
    return sorted(jobs, key=lambda job: job.request.id)


def test_choices_are_requests_of_their_own_under_one_stream() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(n=3, seed=5)))
            jobs = await take(batcher, 3)
            base = jobs[0].request.id
            assert [job.request.id for job in jobs] == [choice_id(base, c) for c in range(3)]
            assert [job.request.seed for job in jobs] == [choice_seed(5, c) for c in range(3)]
            await until(lambda: len(reader.events) == 3)
            assert reader.events == [
                Accepted(job.request.id, 2, job.request.seed, c) for c, job in enumerate(jobs)
            ]
            for letters in (b"abc", b"xyz"):
                for job, letter in zip(jobs, letters, strict=True):
                    batcher.send(job, letter)
            await until(lambda: of(reader, 2) == "cz")
            await batcher.end(jobs[1], Reason.LENGTH)
            await until(lambda: any(isinstance(e, Finished) for e in reader.events))
            batcher.send(jobs[0], ord("!"))
            await batcher.end(jobs[0], Reason.LENGTH)
            await batcher.end(jobs[2], Reason.STOP)
            await reader.done()
            assert [of(reader, c) for c in range(3)] == ["ax!", "by", "cz"]
            ends = [(e.choice, e.reason) for e in reader.events if isinstance(e, Finished)]
            assert sorted(ends) == [(0, Reason.LENGTH), (1, Reason.LENGTH), (2, Reason.STOP)]
            assert ends[0][0] == 1 and isinstance(reader.events[-1], Finished)
            assert not batcher.heard

    run(main())


def test_leaving_reaches_all_choices() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(n=3)))
            jobs = await take(batcher, 3)
            await until(lambda: len(reader.events) == 3)
            await reader.leave()
            await until(lambda: len(batcher.heard) == 3)
            assert {said for said in batcher.heard if isinstance(said, CancelAsk)} == {
                CancelAsk(job.request.id, "disconnect") for job in jobs
            }
            await until(lambda: gateway._streams.idle)

    run(main())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_cancel_of_the_first_reaches_all_choices(elsewhere: bool) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher), rig.gateway("gw2") as second:
            await until(lambda: second.ready)
            reader = Reader(gateway.generate(call(n=2)))
            jobs = await take(batcher, 2)
            await until(lambda: len(reader.events) == 2)
            await (second if elsewhere else gateway).cancel(jobs[0].request.id, "t")
            await until(lambda: len(batcher.heard) == 2)
            assert batcher.heard == [CancelAsk(job.request.id, "client") for job in jobs]
            for job in jobs:
                await batcher.end(job, Reason.CANCELLED)
            await reader.done()
            assert [e.reason for e in reader.events if isinstance(e, Finished)] == [Reason.CANCELLED] * 2

    run(main())


def test_a_cancel_of_another_choice_is_only_its_own() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(n=2)))
            jobs = await take(batcher, 2)
            await until(lambda: len(reader.events) == 2)
            await gateway.cancel(jobs[1].request.id, "t")
            assert batcher.heard == [CancelAsk(jobs[1].request.id, "client")]
            await batcher.end(jobs[1], Reason.CANCELLED)
            await batcher.end(jobs[0], Reason.LENGTH)
            await reader.done()

    run(main())


def test_another_number_of_choices_under_the_same_key_is_another_body() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            first = Reader(gateway.generate(call(n=2, client_key="k")))
            jobs = await take(batcher, 2)
            await until(lambda: len(first.events) == 2)
            wrong = Reader(gateway.generate(call(n=3, client_key="k")))
            with pytest.raises(Status) as refused:
                await wrong.done()
            assert refused.value.code is Code.ALREADY_EXISTS
            third = subjects.request_anywhere(choice_id(jobs[0].request.id, 2))
            assert rig.broker.stream(subjects.REQUESTS).last(third, 0.0) is None, (
                "nothing of it was asked for"
            )
            again = Reader(gateway.generate(call(n=2, client_key="k")))
            await until(lambda: len(again.events) == 2)
            assert [e.request_id for e in again.events if isinstance(e, Accepted)] == [
                job.request.id for job in jobs
            ]
            await again.leave()

    run(main())


def test_one_choice_that_fails_ends_the_call_and_the_others() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(n=2)))
            jobs = await take(batcher, 2)
            await until(lambda: len(reader.events) == 2)
            await batcher.end(jobs[1], Reason.FAILED, error="no room")
            with pytest.raises(Status, match="no room"):
                await reader.done()
            await until(lambda: batcher.heard)
            assert batcher.heard == [CancelAsk(jobs[0].request.id, "disconnect")]

    run(main())


def test_choices_need_a_place_each() -> None:
    async def main() -> None:
        async with Rig().standing(streams_len_max=2) as (gateway, _):
            with pytest.raises(Status, match="too many open streams"):
                await Reader(gateway.generate(call(n=3))).done()

    run(main())


# ---- bad words and log probabilities ----------------------------------------------------------------


def test_bad_words_go_out_in_ids() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(bad_words=("no", "x"))))
            shaping = (await batcher.take()).request.sampling.shaping
            assert shaping is not None
            assert shaping.bad_words == (tuple(b"no"), tuple(b" no"), tuple(b"x"), tuple(b" x"))
            await reader.leave()

    run(main())


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token_id), 2, (66, 256), (-0.5, -1.5))


def told(token_id: int) -> IdLogprobs:
    return IdLogprobs(
        -float(token_id), 2, bytes([token_id]), (TopLogprob(66, -0.5, b"B"), TopLogprob(256, -1.5, b""))
    )


def logprobs(reader: Reader) -> list[IdLogprobs]:
    found: list[IdLogprobs] = []
    for event in reader.events:
        if isinstance(event, Delta) and event.ids:
            assert len(event.logprobs) == len(event.ids)
            found += event.logprobs
    return found


def test_deltas_tell_log_probabilities_of_their_ids() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(top_logprobs=2)))
            job = await batcher.take()
            assert job.request.sampling.logprobs == 2
            batcher.send(job, 97, told=(entry(97),))
            batcher.send(job, 98, 99, told=(entry(98), entry(99)))
            await batcher.end(job, told=tuple(map(entry, b"abc")))
            await reader.done()
            assert logprobs(reader) == [told(97), told(98), told(99)]

    run(main())


def test_what_a_part_repeats_is_told_once() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(top_logprobs=2)))
            job = await batcher.take()
            batcher.send(job, 97, told=(entry(97),))
            job.ids.clear()
            batcher.send(job, 97, 98, told=(entry(97), entry(98)))
            await until(lambda: reader.text == "ab")
            assert logprobs(reader) == [told(97), told(98)]
            await reader.leave()

    run(main())


@pytest.mark.parametrize("kept", [3, 2, 0])
def test_the_rest_of_the_record_tells_what_it_kept(kept: int) -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(top_logprobs=2)))
            job = await batcher.take()
            batcher.send(job, 97, told=(entry(97),))
            job.ids += b"bc"
            await batcher.end(job, tell=False, told=tuple(map(entry, b"abc"))[:kept])
            await reader.done()
            unknown = [IdLogprobs(0.0, 0, bytes([c])) for c in b"bc"]
            if kept:
                assert logprobs(reader) == [told(97), *[told(98), told(99)][: kept - 1], *unknown[kept - 1 :]]
            else:
                assert reader.text == "abc"

    run(main())


def test_a_new_owner_is_told_what_was_passed_on() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(top_logprobs=2)))
            job = await batcher.take()
            batcher.send(job, 97, 98, told=(entry(97), UNTOLD))
            await until(lambda: reader.text == "ab")
            other = ScriptedBatcher(rig.bus("batcher2"), "batcher2")
            await other.start()
            question = TakeoverQuestion(job.request.id, Attempt(2), other.boot)
            other.bus.publish(subjects.TAKEOVER, build_takeover_question(question))
            await until(lambda: other.heard)
            me = GatewayId(gateway.boot)
            yes = TakeoverAnswer(job.request.id, me, Attempt(2), tuple(b"ab"), None, (entry(97), UNTOLD))
            assert other.heard == [yes]
            await reader.leave()

    run(main())


def test_a_slow_reader_gets_the_log_probabilities_of_all_it_missed() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            slow = gateway.generate(call(top_logprobs=2))
            job = asyncio.create_task(batcher.take())
            await anext(slow)
            held = await job
            quick = Reader(gateway.generate(call("quick")))
            other = await batcher.take()
            for byte in b"abc":
                batcher.send(held, byte, told=(entry(byte),))
                batcher.send(other, byte)
            await until(lambda: quick.text == "abc")
            assert await anext(slow) == Delta("abc", tuple(b"abc"), 0, tuple(map(told, b"abc")))
            await slow.aclose()
            await quick.leave()

    run(main())


def test_a_prompt_is_asked_about_once_and_within_what_messages_hold() -> None:
    asked = admitted(replace(TEXT, prompt_logprobs=20, n=3))
    assert asked.sampling.prompt_logprobs == 20
    others = [of_choice(asked, choice, b"") for choice in range(3)]
    assert [each.sampling.prompt_logprobs for each in others] == [20, None, None]
    assert admitted(TEXT).body_digest != admitted(replace(TEXT, prompt_logprobs=0)).body_digest

    def prompt_of(length: int, top: int) -> Request:
        model = ModelFacts("m", context_len_max=100_000, vocab_size=100)
        call_ = GenerateCall(token_ids=(1,) * length, prompt_logprobs=top)
        names = {"request_id": RequestId("r1"), "gateway": GatewayId("g1")}
        return admit(call_, model, call_.token_ids or (), fresh_seed=77, **names)  # type: ignore[arg-type]

    assert prompt_of(32_769, 0).sampling.prompt_logprobs == 0
    with pytest.raises(Status, match="prompt_logprobs: 1600 ids, and 20 .* are 33600; at most 32768"):
        prompt_of(1601, 20)


def test_bad_words_that_the_model_never_says_are_left_out() -> None:
    """A tokenizer may know more than the model: an id beyond its vocabulary would end the epoch."""

    async def main() -> None:
        rig, table = Rig(), TokenBytes.of([bytes([b]) for b in range(200)])
        await rig.serve_model(byte_card(vocab_size=200, token_bytes=table, eos_ids=()))
        batcher = ScriptedBatcher(rig.bus("batcher1"))
        await batcher.start()
        async with rig.gateway() as gateway:
            await until(lambda: gateway.ready)
            reader = Reader(gateway.generate(call(bad_words=("ab", "\u0400"))))
            job = await batcher.take()
            shaping = job.request.sampling.shaping
            assert shaping is not None, "of the other the first byte is 208"
            assert shaping.bad_words == (tuple(b"ab"), tuple(b" ab"))
            await batcher.end(job, Reason.LENGTH)
            await reader.done()

    run(main())


RANGES: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    # field: its range in ARCHITECTURE.md, what is in it at its ends, what is just outside
    "temperature": ("0 to 2", (0.0, 2.0), (-0.01, 2.01, math.nan)),
    "top_k": ("0 to 4294967295", (0, 4294967295), (-1, 4294967296)),
    "top_p": ("above 0, up to 1", (0.001, 1.0), (0.0, 1.01, math.nan)),
    "min_p": ("0 to 1", (0.0, 1.0), (-0.01, 1.01, math.nan)),
    "typical_p": ("above 0, up to 1", (0.001, 1.0), (0.0, 1.01, math.nan)),
    "repetition_penalty": ("above 0, up to 2", (0.001, 2.0), (0.0, 2.01, math.nan)),
    "presence_penalty": ("-2 to 2", (-2.0, 2.0), (-2.01, 2.01, math.nan)),
    "frequency_penalty": ("-2 to 2", (-2.0, 2.0), (-2.01, 2.01, math.nan)),
    "logit_bias": (
        "-100 to 100, 1024 ids",
        (((3, -100.0),), ((3, 100.0),)),
        (((3, 100.1),), ((3, -101.0),)),
    ),
    "allowed_token_ids": ("16384 ids", ((1,) * 16384,), ((1,) * 16385,)),
    "bad_words": ("64 strings of 256 bytes", (("x" * 256,) * 64,), (("x" * 257,), ("x",) * 65)),
    "min_tokens": ("0 to `max_tokens`", (0, 8), (-1, 9)),
    "grammar": (
        "65536 bytes, 64 deep",
        (Grammar(GrammarKind.REGEX, "a" * 65536), Grammar(GrammarKind.LARK, "(" * 64)),
        (Grammar(GrammarKind.REGEX, "a" * 65537), Grammar(GrammarKind.LARK, "(" * 65)),
    ),
    "max_tokens": ("at least 1", (8,), (0,)),
    "stop_token_ids": ("64 ids", ((1,) * 64,), ((1,) * 65,)),
    "stop": ("16 strings of 256 bytes", (("x" * 256,) * 16,), (("x" * 257,), ("x",) * 17)),
    "ignore_eos": ("", (False, True), ()),
    "seed": ("0 to 2^64 - 1", (0, 2**64 - 1), (-1, 2**64)),
    "top_logprobs": ("0 to 20", (0, 20), (-1, 21)),
    "prompt_logprobs": ("0 to 20", (0, 20), (-1, 21)),
    "n": ("1 to 16", (1, 16), (0, 17)),
    "best_of": ("`n` to 16", (1, 16), (0, 17)),
    "stream_interval": ("0 to 1024", (0, 1024), (-1, 1025)),
}


def documented() -> dict[str, tuple[str, str]]:
    """Field: range and default, by the table of ARCHITECTURE.md."""
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    rows = text.split("\n## Sampling\n")[1].split("\n## ")[0].splitlines()
    found: dict[str, tuple[str, str]] = {}
    for row in rows:
        if not row.startswith("| `"):
            continue
        names, ranges, default, _ = [cell.strip() for cell in row.split("|")[1:-1]]
        fields = [name.strip("` |") for name in names.split(", ")]
        for name, each in zip(fields, ranges.split("; ") if len(fields) > 1 else [ranges], strict=True):
            found[name] = each.strip("| "), default
    return found


def test_every_sampling_parameter_is_documented_with_its_range_and_default() -> None:
    table = documented()
    assert table.keys() == RANGES.keys()
    assert {n: each for n, (each, _) in table.items()} == {n: each for n, (each, _, _) in RANGES.items()}
    assert all(default for name, (_, default) in table.items() if name != "max_tokens")
    fields_of_calls = {field.name for field in fields(GenerateCall)}
    others = (
        "model chat tools prompt token_ids priority timeout_ms queue_timeout_ms resume_window_s client_key"
    )
    others += " tenant key time_left_ms job"
    assert fields_of_calls == RANGES.keys() | set(others.split())


@pytest.mark.parametrize("name", RANGES)
def test_what_is_documented_is_what_is_refused(name: str) -> None:
    _, inside, outside = RANGES[name]
    room = replace(TEXT, max_tokens=8)
    for value in inside:
        admitted(replace(room, **{name: value}))
    for value in outside:
        with pytest.raises(Status) as refused:
            admitted(replace(room, **{name: value}))
        assert refused.value.code is Code.INVALID_ARGUMENT and refused.value.message.startswith(name)

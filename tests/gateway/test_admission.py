"""Each bad input is refused by name and limit; what is admitted is complete; derived ids agree everywhere."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.errors import Code, Status
from chassis.ids import GatewayId, RequestId
from chassis.messages.gateway import GenerateCall, Turn
from chassis.messages.request import Limits, Request, Sampling, build_request, parse_request
from chassis.messages.sampling import Grammar, GrammarKind
from gateway.admission import (
    CallLimits,
    ModelFacts,
    admit,
    body_digest,
    check_call,
    check_request_id,
    derived_seed,
    request_id_of,
)

LIMITS = CallLimits(prompt_bytes_max=1000, chat_turns_len_max=3, timeout_s_max=60, resume_window_s_max=3600)
MODEL = ModelFacts("m", context_len_max=16, vocab_size=100)
TEXT = GenerateCall(prompt="hi")


def admitted(call: GenerateCall, prompt_ids: tuple[int, ...] = (1, 2, 3)) -> Request:
    check_call(call, LIMITS)
    return admit(
        call,
        MODEL,
        call.token_ids or prompt_ids,
        request_id=RequestId("r1"),
        gateway=GatewayId("g1"),
        fresh_seed=77,
        trace_parent=b"p" * 25,
    )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "input: exactly one of chat, prompt, token_ids; none given"),
    ({"token_ids": (1,)}, "input: exactly one of chat, prompt, token_ids; prompt and token_ids given"),
    ({"prompt": ""}, "prompt: 0 bytes; 1 to 1000"),
    ({"prompt": "x" * 2_000_000}, "prompt: 2000000 bytes; 1 to 1000"),
    ({"prompt": "\ud800"}, "prompt: not valid Unicode"),
    ({"prompt": None, "token_ids": ()}, "token_ids: at least 1"),
    ({"prompt": None, "token_ids": (1, 100)}, "token_ids: 100; below 100, the vocabulary of m"),
    ({"prompt": None, "token_ids": (1,) * 16}, "token_ids: 16 tokens; at most 15"),
    ({"prompt": None, "chat": ()}, "chat.turns: 0; 1 to 3"),
    ({"prompt": None, "chat": (Turn("user", "x"),) * 4}, "chat.turns: 4; 1 to 3"),
    ({"prompt": None, "chat": (Turn("", "x"),)}, "chat.turns[0].role: 1 to 64 bytes"),
    ({"prompt": None, "chat": (Turn("u" * 65, "x"),)}, "chat.turns[0].role: 1 to 64 bytes"),
    ({"prompt": None, "chat": (Turn("user", "x" * 1001),)}, "chat: 1001 bytes; at most 1000"),
    ({"prompt": None, "chat": (Turn("user", "\udfff"),)}, "chat.turns[0].content: not valid Unicode"),
    ({"temperature": -1.0}, "temperature: -1; 0 to 2"),
    ({"temperature": 2.1}, "temperature: 2.1; 0 to 2"),
    ({"temperature": math.nan}, "temperature: nan; 0 to 2"),
    ({"temperature": math.inf}, "temperature: inf; 0 to 2"),
    ({"top_p": 0.0}, "top_p: 0; above 0, up to 1"),
    ({"top_p": 1.1}, "top_p: 1.1; above 0, up to 1"),
    ({"top_p": math.nan}, "top_p: nan; above 0, up to 1"),
    ({"top_k": -1}, "top_k: -1; 0 (off) to"),
    ({"seed": -1}, "seed: -1; 0 to"),
    ({"seed": 1 << 64}, "seed: 18446744073709551616; 0 to"),
    ({"max_tokens": 0}, "max_tokens: 0; at least 1"),
    ({"min_tokens": -1}, "min_tokens: -1; at least 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: 5; at most max_tokens, 4"),
    ({"min_tokens": 14}, "min_tokens: 14; at most 13, what the context leaves"),
    ({"stop": ("x",) * 17}, "stop: 17 strings; at most 16"),
    ({"stop": ("a", "")}, "stop[1]: 1 to 256 bytes"),
    ({"stop": ("x" * 257,)}, "stop[0]: 1 to 256 bytes"),
    ({"stop": ("\ud800",)}, "stop[0]: not valid Unicode"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids: 65; at most 64"),
    ({"stop_token_ids": (100,)}, "stop_token_ids: 100; below 100, the vocabulary of m"),
    ({"priority": 10}, "priority: 10; 0 (first) to 9"),
    ({"priority": -1}, "priority: -1; 0 (first) to 9"),
    ({"timeout_ms": 60_001}, "timeout_ms: 60001; up to 60000"),
    ({"resume_window_s": 3601}, "resume_window_s: 3601; up to 3600"),
    ({"stream_interval": 1025}, "stream_interval: 1025; up to 1024"),
    ({"queue_timeout_ms": 3_600_001}, "queue_timeout_ms: 3600001; up to 3600000"),
    ({"client_key": "k" * 257}, "client_key: at most 256 bytes"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_refused_by_field_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Status) as refused:
        admitted(replace(TEXT, **changes))
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.message.startswith(message)


def test_prompt_without_tokens_and_prompt_beyond_the_context() -> None:
    with pytest.raises(Status, match="prompt: has no tokens"):
        admitted(TEXT, ())
    with pytest.raises(Status, match="prompt: 16 tokens; at most 15, the context of model m less one"):
        admitted(TEXT, (1,) * 16)
    assert admitted(TEXT, (1,) * 15).limits.max_tokens == 1


def test_defaults() -> None:
    assert admitted(TEXT) == Request(
        id=RequestId("r1"),
        tenant="",
        gateway=GatewayId("g1"),
        model="m",
        prompt_ids=(1, 2, 3),
        seed=77,
        sampling=Sampling(temperature=1.0, top_k=0, top_p=1.0),
        limits=Limits(max_tokens=13),
        body_digest=body_digest(TEXT, "m"),
        trace_parent=b"p" * 25,
    )


def test_everything_asked_for_arrives() -> None:
    call = GenerateCall(
        tenant="t",
        token_ids=(4, 5),
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        seed=(1 << 64) - 1,
        max_tokens=1000,
        min_tokens=2,
        stop=("\u00e9", "b"),
        stop_token_ids=(9,),
        ignore_eos=True,
        priority=0,
        timeout_ms=5000,
        resume_window_s=7,
        client_key="k",
    )
    request = admitted(call)
    assert request.sampling == Sampling(0.5, 3, 0.25)
    assert request.limits == Limits(14, 2, ("\u00e9".encode(), b"b"), (9,), True), "cut to the context"
    assert (request.seed, request.timeout_ms, request.resume_window_ms) == ((1 << 64) - 1, 5000, 7000)
    assert request.priority == 0 and request.keyed and request.tenant == "t"
    assert parse_request(build_request(request)) == request


@pytest.mark.parametrize(
    ("timeout_ms", "time_left_ms", "expected"),
    [(0, None, 0), (5000, None, 5000), (0, 300, 300), (5000, 300, 300), (200, 300, 200), (0, -5, 1)],
)
def test_the_shorter_deadline_counts(timeout_ms: int, time_left_ms: int | None, expected: int) -> None:
    call = replace(TEXT, timeout_ms=timeout_ms, time_left_ms=time_left_ms)
    assert admitted(call).timeout_ms == expected


def test_a_job_lives_without_a_client() -> None:
    assert admitted(replace(TEXT, job=True)).resume_window_ms == 0xFFFFFFFF
    assert admitted(replace(TEXT, resume_window_s=2)).resume_window_ms == 2000


def test_tiny_temperature_is_greedy() -> None:
    assert admitted(replace(TEXT, temperature=1e-6)).sampling.temperature == 0.0


def test_keyed_requests_get_the_same_seed_everywhere() -> None:
    keyed = replace(TEXT, client_key="k")
    assert admitted(keyed).seed == admitted(keyed).seed != 77
    assert admitted(replace(keyed, seed=5)).seed == 5
    assert derived_seed(RequestId("a"), b"d") != derived_seed(RequestId("b"), b"d")


def test_request_ids_are_safe_derived_and_golden() -> None:
    derived = request_id_of("tenant", "my key /.*>")
    assert derived == "akcrc43fgofj6uzwl7fetqbimtk3vu6oidy5peradd25neisdhaa"
    assert check_request_id(derived) == derived
    assert request_id_of("a", "bc") != request_id_of("ab", "c")
    for bad in ("", "a.b", "a b", "x" * 65, "\u00e9", "a*"):
        with pytest.raises(Status, match="request_id"):
            check_request_id(bad)


CHANGES: dict[str, Any] = {
    "model": None,  # the resolved name counts
    "chat": (Turn("user", "hi"),),
    "prompt": "ho",
    "token_ids": (1,),
    "temperature": 0.5,
    "top_k": 1,
    "top_p": 0.5,
    "seed": 0,
    "max_tokens": 1,
    "min_tokens": 1,
    "stop": ("x",),
    "stop_token_ids": (1,),
    "ignore_eos": True,
    "priority": 5,
    "timeout_ms": 1,
    "resume_window_s": 1,
    "client_key": None,
    "min_p": 0.5,
    "typical_p": 0.5,
    "repetition_penalty": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": ((1, 0.5),),
    "allowed_token_ids": (1,),
    "bad_words": ("x",),
    "top_logprobs": 1,
    "n": 1,
    "best_of": 2,
    "prompt_logprobs": 0,
    "grammar": Grammar(GrammarKind.REGEX, "a"),
    "tools": ("{}",),
    "stream_interval": None,  # how it is told, not what
    "queue_timeout_ms": None,  # nor how long it may wait
    "tenant": None,  # part of the id
    "key": None,
    "time_left_ms": None,
    "job": None,  # nor for whom
}


def test_digest_tells_every_field_of_the_body() -> None:
    assert set(CHANGES) == {f.name for f in fields(GenerateCall)}, "a new field needs its place in the digest"
    bodies = [replace(TEXT, **{name: value}) for name, value in CHANGES.items() if value is not None]
    digests = {body_digest(body, "m") for body in [TEXT, *bodies]} | {body_digest(TEXT, "n")}
    # chat wins over prompt in the encoding, and only one is ever given
    assert len(digests) == len(bodies) + 2 - 1
    same = replace(TEXT, client_key="k", tenant="t", key="x", time_left_ms=5, model="m", stream_interval=8)
    same = replace(same, queue_timeout_ms=5, job=True)
    assert body_digest(same, "m") == body_digest(TEXT, "m")


@given(st.lists(st.text(max_size=4), max_size=3), st.lists(st.text(max_size=4), max_size=3))
@settings(deadline=None, derandomize=True)
def test_digest_of_texts_has_no_seams(a: list[str], b: list[str]) -> None:
    one = GenerateCall(prompt="", stop=tuple(a))
    two = GenerateCall(prompt="", stop=tuple(b))
    assert (body_digest(one, "m") == body_digest(two, "m")) == (a == b)

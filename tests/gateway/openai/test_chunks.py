"""Events into chunks and bodies, without a server: both say the same, in the shapes of the description."""

import json
from typing import Any

import pytest

from chassis.errors import Code, Status
from chassis.ids import RequestId
from chassis.messages.gateway import (
    Accepted,
    Delta,
    Finished,
    GenerateEvent,
    IdLogprobs,
    PromptLogprobs,
    TopLogprob,
)
from chassis.messages.request import Reason, Timings, Usage
from gateway.openai.answer import asked_of
from gateway.openai.body import Circumstances, chat_body, text_body
from gateway.openai.chunks import ChatChunks, TextChunks
from gateway.openai.gathered import Gathered
from gateway.openai.prompt import NO_PROMPT, Prompt
from gateway.openai.replies import ChatChunk, ChatReply, TextChunk, TextReply

WHERE = Circumstances("m", 1_700_000_000)
MESSAGES = [{"role": "user", "content": "hi"}]


def entry(token: bytes, logprob: float = -1.0, rank: int = 1) -> IdLogprobs:
    return IdLogprobs(logprob, rank, token, (TopLogprob(7, -0.5, b"\xc3"), TopLogprob(8, -0.75, b"x")))


def events(told: bool = False, choices: int = 1) -> list[GenerateEvent]:
    """Two pieces of text a choice, with half a character between their tokens."""
    pieces = (("a", (1,), (b"a",)), ("", (2,), (b"\xc3",)), ("ü", (3,), (b"\xbc",)))
    made: list[GenerateEvent] = [Accepted(RequestId("r"), 3, 1, c) for c in range(choices)]
    for index, (text, ids, tokens) in enumerate(pieces):
        for choice in range(choices):
            entries = tuple(entry(token) for token in tokens) if told else ()
            made.append(Delta(text, ids, index, entries, choice))
    for choice in range(choices):
        made.append(Delta("!", (), 3, (), choice))
        made.append(Finished(Reason.STOP, Usage(3, 2, 3), Timings(), choice))
    return made


def parsed(data: bytes) -> list[Any]:
    return [json.loads(p[6:]) if p != "data: [DONE]" else p for p in data.decode().split("\n\n") if p]


def chat(body: dict[str, Any], told: list[GenerateEvent], prompt: Prompt = NO_PROMPT) -> list[Any]:
    asked = asked_of("/v1/chat/completions", {"messages": MESSAGES, "stream": True, **body})
    chunks = ChatChunks(asked, WHERE, [prompt])
    return parsed(b"".join([chunks.take(0, event) for event in told]) + chunks.end())


def text(body: dict[str, Any], told: list[GenerateEvent], prompt: Prompt = NO_PROMPT) -> list[Any]:
    asked = asked_of("/v1/completions", {"prompt": "p", "stream": True, **body})
    chunks = TextChunks(asked, WHERE, [prompt])
    return parsed(b"".join([chunks.take(0, event) for event in told]) + chunks.end())


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_a_chat_streamed_is_the_chat_whole(usage: bool, told: bool, ids: bool) -> None:
    body: dict[str, Any] = {"n": 2, "return_token_ids": ids, "logprobs": told}
    if told:
        body["top_logprobs"] = 2
    prompt = Prompt("", (5, 6, 7))
    streaming = body | ({"stream_options": {"include_usage": True}} if usage else {})
    *chunks, done = chat(streaming, events(told, choices=2), prompt)
    assert done == "data: [DONE]"
    gathered = Gathered()
    for event in events(told, choices=2):
        gathered.take(event)
    asked = asked_of("/v1/chat/completions", {"messages": MESSAGES, **body})
    whole = ChatReply.model_validate_json(json.dumps(chat_body(asked, WHERE, prompt, gathered)))
    assert [c.message.content for c in whole.choices] == ["aü!", "aü!"]
    made = [ChatChunk.model_validate(chunk) for chunk in chunks]
    if usage:
        assert made.pop().usage == whole.usage
        assert all(chunk.usage is None for chunk in made)
    for index, choice in enumerate(whole.choices):
        mine = [c for chunk in made for c in chunk.choices if c.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason == "stop"
        assert [i for c in mine for i in c.token_ids] == choice.token_ids == ([1, 2, 3] if ids else [])
        if told:
            assert choice.logprobs is not None
            streamed = [t for c in mine if c.logprobs for t in c.logprobs.content or ()]
            assert streamed == choice.logprobs.content and len(streamed) == 3
    assert whole.usage.prompt_tokens_details.cached_tokens == 2
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)


def test_an_echo_with_log_probabilities_streamed_is_the_whole() -> None:
    prompt = Prompt("pü", (5, 6, 7), b"p")
    told = events(told=True)
    told.insert(1, PromptLogprobs((6, 7), 1, (entry(b"\xc3", -2.0, 4), entry(b"\xbc", float("-inf"), 0))))
    body: dict[str, Any] = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1}
    *chunks, _ = text(body, told, prompt)
    gathered = Gathered()
    for event in told:
        gathered.take(event)
    asked = asked_of("/v1/completions", body)
    reply = TextReply.model_validate_json(json.dumps(text_body(asked, WHERE, [prompt], [gathered])))
    (choice,) = reply.choices
    made = [TextChunk.model_validate(chunk).choices[0] for chunk in chunks]
    assert "".join(c.text for c in made) == choice.text == "püaü!"
    lists = choice.logprobs
    assert lists is not None
    assert lists.tokens == ["p", "bytes:\\xc3", "bytes:\\xbc", "a", "bytes:\\xc3", "bytes:\\xbc"]
    assert lists.token_logprobs == [None, -2.0, None, -1.0, -1.0, -1.0]
    assert lists.top_logprobs[1] == {"bytes:\\xc3": -0.5}
    assert lists.top_logprobs[3] == {"bytes:\\xc3": -0.5, "a": -1.0}
    assert lists.text_offset == [0, 1, 1, 2, 3, 3]  # where each begins in the text
    told_of = [c.logprobs for c in made if c.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [v for one in told_of for v in getattr(one, name)] == getattr(lists, name)


def test_no_tokens_asked_for_are_none_told() -> None:
    body: dict[str, Any] = {"max_tokens": 0, "echo": True}
    asked = asked_of("/v1/completions", {"prompt": "p", **body})
    assert asked.calls[0].max_tokens == 1
    gathered = Gathered()
    for event in events():
        gathered.take(event)
    (choice,) = text_body(asked, WHERE, [Prompt("p")], [gathered])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("p", "length")
    *chunks, _ = text(body | {"stream_options": {"include_usage": True}}, events(), Prompt("p"))
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "p"
    assert chunks[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.CANCELLED, Code.CANCELLED),
        (Reason.DEADLINE, Code.DEADLINE_EXCEEDED),
        (Reason.FAILED, Code.INTERNAL),
    ],
)
def test_what_was_cut_off_is_no_answer(reason: Reason, code: Code) -> None:
    told = [*events()[:3], Finished(reason, Usage(3, 0, 2), Timings())]
    with pytest.raises(Status) as raised:
        chat({}, told)
    assert raised.value.code is code
    gathered = Gathered()
    for event in told:
        gathered.take(event)
    with pytest.raises(Status):
        chat_body(asked_of("/v1/chat/completions", {"messages": MESSAGES}), WHERE, NO_PROMPT, gathered)


def test_best_of_counts_what_was_generated() -> None:
    gathered = Gathered()
    for choice in range(2):
        gathered.take(Finished(Reason.STOP, Usage(3, 0, 4), Timings(), choice, generated_tokens=13))
    assert gathered.spent.told()["completion_tokens"] == 13


def test_a_text_that_looks_like_the_marker_is_text() -> None:
    made: list[GenerateEvent] = [Accepted(RequestId("r"), 1, 1), Delta('\x00"}\n\ndata: x', (1,), 0)]
    made.append(Finished(Reason.LENGTH, Usage(1, 0, 1), Timings()))
    *chunks, _ = chat({}, made)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == '\x00"}\n\ndata: x'


def test_calls_say_what_bodies_do() -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
        ],
        "model": "m",
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "top_k": -1,
        "seed": -1,
        "stop": "x",
        "logit_bias": {"7": -5, "3": 2.5},
        "logprobs": True,
        "n": 2.0,
        "unknown": {"a": []},
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
    }
    (call,) = asked_of("/v1/chat/completions", body).calls
    assert call.chat is not None
    assert [(turn.role, turn.content) for turn in call.chat] == [
        ("system", "d"),
        ("user", "ab"),
        ("assistant", ""),
    ]
    assert (call.max_tokens, call.top_k, call.seed, call.stop) == (6, 0, (1 << 64) - 1, ("x",))
    assert (call.logit_bias, call.top_logprobs, call.n) == (((3, 2.5), (7, -5.0)), 0, 2)


def test_prompts_come_in_four_forms() -> None:
    forms: list[tuple[Any, list[tuple[str | None, tuple[int, ...] | None]]]] = [
        ("a", [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, (1, 2))]),
        ([[1], [2, 3]], [(None, (1,)), (None, (2, 3))]),
    ]
    for prompt, wanted in forms:
        asked = asked_of("/v1/completions", {"prompt": prompt})
        assert [(call.prompt, call.token_ids) for call in asked.calls] == wanted
        assert all(call.max_tokens == 16 for call in asked.calls)

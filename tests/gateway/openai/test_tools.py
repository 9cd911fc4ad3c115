"""Tools at OpenAI's door: what the prompt says, what must be written, and calls in answers and streams."""

import asyncio
import json
from typing import Any

import pytest

from chassis.errors import Status
from chassis.messages.gateway import ToolCalled, Turn
from chassis.messages.request import Reason
from chassis.messages.sampling import GrammarKind
from gateway.openai.answer import CHAT, asked_of
from gateway.openai.replies import ChatChunk, ChatReply
from tests.gateway.http_client import ask, stream
from tests.gateway.openai.test_http import events_in, messages, refused, say, standing
from tests.gateway.rig import run

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells it",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "time"}}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom\u00e9"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def body(**more: Any) -> dict[str, Any]:
    return {"messages": messages(), "tools": TOOLS, **more}


async def told(
    text: str, reason: Reason = Reason.STOP, **more: Any
) -> tuple[ChatReply, list[ChatChunk], str]:
    """A whole answer, the same as a stream, and the prompt."""
    async with standing() as (_, batcher, address):
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(ask(address, "POST", CHAT, body(**more)))
            job = await say(batcher, text, reason)
            answer = await asking
        assert answer.status == 200, answer.body
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(say(batcher, text, reason))
            async with stream(address, "POST", CHAT, body(stream=True, **more)) as events:
                data = await events.body()
            await serving
    *chunks, done = events_in(data)
    assert done == "[DONE]"
    prompt = bytes(i for i in job.request.prompt_ids if i < 256).decode()
    return ChatReply.model_validate_json(answer.body), [ChatChunk.model_validate(c) for c in chunks], prompt


def gathered(chunks: list[ChatChunk]) -> tuple[str, list[tuple[str, str]], str | None]:
    text, calls, word = "", list[tuple[str, str]](), None
    for chunk in chunks:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        word = choice.finish_reason or word
        for part in choice.delta.tool_calls or ():
            assert part.function is not None
            if part.id is not None:
                assert part.index == len(calls) and part.type == "function"
                calls.append((part.function.name or "", ""))
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + (part.function.arguments or "")
    return text, calls, word


@pytest.mark.parametrize(
    ("text", "reason", "content", "calls", "word"),
    [
        ("hello", Reason.STOP, "hello", [], "stop"),
        (ONE, Reason.STOP, None, [("weather", '{"city": "Romé"}')], "tool_calls"),
        (
            "Well.\n" + TWO,
            Reason.STOP,
            "Well.",
            [("weather", '{"city": "Romé"}'), ("time", "{}")],
            "tool_calls",
        ),
        (ONE[:-21], Reason.LENGTH, None, [("weather", '{"city": ')], "length"),
        (ONE[:14], Reason.LENGTH, ONE[:14], [], "length"),
        ('<tool_call>{"name": "no"}', Reason.STOP, '<tool_call>{"name": "no"}', [], "stop"),
    ],
)
def test_calls_are_told_whole_and_as_they_come(
    text: str, reason: Reason, content: str | None, calls: list[tuple[str, str]], word: str
) -> None:
    reply, chunks, _ = run(told(text, reason))
    message = reply.choices[0].message
    assert message.content == content and reply.choices[0].finish_reason == word
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == calls
    assert len({c.id for c in message.tool_calls}) == len(calls)
    assert gathered(chunks) == (content or "", calls, word)


def test_tools_are_in_the_prompt_unless_none_is_to_be_called() -> None:
    _, _, prompt = run(told("x"))
    assert '"name":"weather"' in prompt and "<tool_call>" in prompt
    reply, _, prompt = run(told(ONE, tool_choice="none"))
    assert "weather" not in prompt and reply.choices[0].message.content == ONE


def test_logprobs_and_ids_stand_beside_calls() -> None:
    async def life() -> None:
        async with standing() as (_, batcher, address), asyncio.TaskGroup() as group:
            given = body(stream=True, return_token_ids=True)
            serving = group.create_task(say(batcher, ONE))
            async with stream(address, "POST", CHAT, given) as events:
                chunks = [ChatChunk.model_validate(c) for c in events_in(await events.body())[:-1]]
            await serving
        ids = [i for chunk in chunks for i in chunk.choices[0].token_ids]
        assert bytes(ids).decode() == ONE and gathered(chunks)[1][0][0] == "weather"

    run(life())


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_who_must_call_has_a_grammar(choice: Any) -> None:
    async def life() -> None:
        async with standing() as (_, batcher, address), asyncio.TaskGroup() as group:
            asking = group.create_task(ask(address, "POST", CHAT, body(tool_choice=choice)))
            job = await say(batcher, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
            reply = ChatReply.model_validate_json((await asking).body)
            grammar = job.request.sampling.grammar
            assert grammar is not None and grammar.kind is GrammarKind.LARK
            assert ("weather" in grammar.text) is (choice == "required")
            word = "tool_calls" if choice == "required" else "stop"
            assert reply.choices[0].finish_reason == word and len(reply.choices[0].message.tool_calls) == 1

    run(life())


def test_a_tool_whose_parameters_are_no_schema_is_told_of() -> None:
    async def life() -> None:
        bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
        async with standing() as (_, _, address):
            given = {"messages": messages(), "tools": [bad], "tool_choice": "required"}
            assert "nonsense" in refused(await ask(address, "POST", CHAT, given), 400, "tools")

    run(life())


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}


def test_what_was_called_and_what_it_gave_become_turns() -> None:
    given = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    (call,) = asked_of(CHAT, {"messages": given, "tools": TOOLS}).calls
    assert call.chat == (
        Turn("user", "hi"),
        Turn("assistant", "", tool_calls=(ToolCalled("c1", "weather", '{"city":"Rom"}'),)),
        Turn("tool", "rain", tool_call_id="c1"),
    )
    assert [json.loads(tool) for tool in call.tools] == TOOLS


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, "response_format"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [CALL | {"function": {"name": "f", "arguments": "["}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            CALL
                            | {"function": {"name": "f", "arguments": '{"a":' + "[" * 300 + "]" * 300 + "}"}}
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ],
)
def test_what_can_not_be_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with pytest.raises(Status) as found:
        asked_of(CHAT, body(**more))
    assert found.value.message.startswith(f"{field}: ")


def test_an_answer_in_json_may_stand_beside_tools() -> None:
    async def life() -> None:
        async with standing() as (_, batcher, address), asyncio.TaskGroup() as group:
            given = body(response_format={"type": "json_object"})
            asking = group.create_task(ask(address, "POST", CHAT, given))
            job = await say(batcher, '{"a": 1}')
            reply = ChatReply.model_validate_json((await asking).body)
            grammar = job.request.sampling.grammar
            assert grammar is not None and "answer: %json" in grammar.text
            assert reply.choices[0].message.content == '{"a": 1}'

    run(life())

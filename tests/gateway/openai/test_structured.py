"""Bodies that say what the whole answer has to be: which grammar that is, and what is refused by name."""

import asyncio
from typing import Any

import orjson
import pytest

from chassis.errors import Status
from chassis.messages.sampling import Grammar, GrammarKind
from gateway.openai.answer import CHAT, COMPLETIONS, asked_of
from tests.gateway.http_client import ask
from tests.gateway.openai.test_http import messages, refused, say, standing
from tests.gateway.rig import run

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WRITTEN = Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(SCHEMA).decode())
OBJECT = Grammar(GrammarKind.JSON_OBJECT)
REGEX = Grammar(GrammarKind.REGEX, "a+")
LARK = Grammar(GrammarKind.LARK, 'start: "a"')
FORMS: list[tuple[dict[str, Any], Grammar | None, str]] = [
    ({}, None, ""),
    ({"response_format": {"type": "text"}}, None, ""),
    ({"response_format": {"type": "json_object"}}, OBJECT, "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        WRITTEN,
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        OBJECT,
        "response_format.json_schema.schema",
    ),
    ({"guided_json": SCHEMA}, WRITTEN, "guided_json"),
    ({"guided_json": WRITTEN.text}, WRITTEN, "guided_json"),
    ({"guided_regex": "a+"}, REGEX, "guided_regex"),
    ({"guided_choice": ["a", "é"]}, Grammar(GrammarKind.CHOICE, '["a","é"]'), "guided_choice"),
    ({"guided_grammar": LARK.text}, LARK, "guided_grammar"),
    ({"structured_outputs": {"json": SCHEMA}}, WRITTEN, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a+"}}, REGEX, "structured_outputs.regex"),
    (
        {"structured_outputs": {"choice": ["a"]}},
        Grammar(GrammarKind.CHOICE, '["a"]'),
        "structured_outputs.choice",
    ),
    ({"structured_outputs": {"grammar": LARK.text}}, LARK, "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}}, OBJECT, "structured_outputs.json_object"),
]


@pytest.mark.parametrize(("body", "grammar", "field"), FORMS)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_each_form_is_one_grammar(
    url: str, body: dict[str, Any], grammar: Grammar | None, field: str
) -> None:
    given: dict[str, Any] = {"messages": messages()} if url == CHAT else {"prompt": ["a", "b"]}
    asked = asked_of(url, given | body)
    assert {call.grammar for call in asked.calls} == {grammar} and asked.grammar_field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_choice": "a"}, "guided_choice"),
    ],
)
def test_what_is_no_grammar_or_two_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(Status) as told:
        asked_of(CHAT, {"messages": messages()} | body)
    assert told.value.message.startswith(f"{field}: ")


def test_one_that_can_not_be_compiled_is_told_of_its_field() -> None:
    async def life() -> None:
        async with standing() as (_, batcher, address):
            for body, param in (
                ({"guided_regex": "("}, "guided_regex"),
                ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
                (
                    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
                    "response_format.json_schema.schema",
                ),
                ({"guided_regex": "a" * 70_000}, "guided_regex"),
                ({"guided_json": "[1]"}, "guided_json"),
            ):
                answer = await ask(address, "POST", CHAT, {"messages": messages(), **body})
                refused(answer, 400, param)
            async with asyncio.TaskGroup() as group:
                given = {"messages": messages(), "guided_regex": "a+"}
                asking = group.create_task(ask(address, "POST", CHAT, given))
                job = await say(batcher, "aa")
                assert (await asking).status == 200 and job.request.sampling.grammar == REGEX

    run(life())


def test_llama_cpp_s_form_of_grammars_is_read() -> None:
    from chassis.grammars import refusal_of

    assert refusal_of(Grammar(GrammarKind.LARK, 'root ::= "yes" | num\nnum ::= [0-9]+')) is None
    assert refusal_of(Grammar(GrammarKind.LARK, "root ::= nowhere")) is not None

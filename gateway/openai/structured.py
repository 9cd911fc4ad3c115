"""Pure. What the whole answer has to be, as clients of OpenAI and vLLM say it, and the field that says so."""

from collections.abc import Callable
from typing import Any

import orjson

from chassis.errors import Status
from chassis.messages.sampling import Grammar, GrammarKind
from gateway.openai.errors import BadField
from gateway.openai.schema import Sampled

ANY_OBJECT = Grammar(GrammarKind.JSON_OBJECT)
Named = tuple[str, Grammar]  # by the field it came in


def grammar_of(request: Sampled) -> Named | None:
    """Raises Status where several are given, or one that is none."""
    given = [*_of_response_format(request), *_of_guided(request), *_of_structured_outputs(request)]
    if len(given) > 1:
        raise BadField(given[1][0], f"not beside {given[0][0]}")
    return given[0] if given else None


def _of_response_format(request: Sampled) -> list[Named]:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", ANY_OBJECT)]
    if wanted.type != "json_schema":
        raise BadField("response_format.type", f"{wanted.type} is not supported")
    if wanted.json_schema is None:
        raise BadField("response_format.json_schema", "is missing")
    schema = wanted.json_schema.schema_
    return [("response_format.json_schema.schema", ANY_OBJECT if schema is None else _of_schema(schema))]


def _of_guided(request: Sampled) -> list[Named]:
    values = (request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return _given(names, values)


def _of_structured_outputs(request: Sampled) -> list[Named]:
    wanted = request.structured_outputs
    if wanted is None:
        return []
    names = tuple(f"structured_outputs.{name}" for name in ("json", "regex", "choice", "grammar"))
    found = _given(names, (wanted.json_, wanted.regex, wanted.choice, wanted.grammar))
    if wanted.json_object:
        found.append(("structured_outputs.json_object", ANY_OBJECT))
    if not found:
        raise BadField("structured_outputs", "says nothing")
    return found


def _given(names: tuple[str, ...], values: tuple[Any, ...]) -> list[Named]:
    """Of a schema, a regular expression, choices, a grammar: those that are there."""
    makers: tuple[Callable[[Any], Grammar], ...] = (_of_schema, _of_regex, _of_choice, _of_lark)
    return [
        (name, make(value))
        for name, value, make in zip(names, values, makers, strict=True)
        if value is not None
    ]


def _of_schema(schema: Any) -> Grammar:
    if schema is True:
        schema = {}
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _of_regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def _of_choice(texts: list[str]) -> Grammar:
    return Grammar(GrammarKind.CHOICE, orjson.dumps(texts).decode())


def _of_lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def renamed(status: Status, field: str) -> Status:
    """What the gateway says of a grammar, of the field that it came in."""
    name, colon, rest = status.message.partition(": ")
    if not colon or name.partition(".")[0] != "grammar":
        return status
    return Status(status.code, f"{field}: {rest}", status.retry_ms)

"""Pure. Having calls written: the grammar of an answer that must call functions, in the model's own form."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chassis.messages.sampling import Grammar, GrammarKind
from gateway.tool_calls.forms import MARKS, Marks, ToolForm

REQUIRED_CALLS_MAX = 16  # of one answer that must call
SPACE = r"[ \t\n\r]{1,40}"  # between the parts of JSON


@dataclass(frozen=True, slots=True)
class Function:
    """`parameters`: a JSON schema of an object."""

    name: str
    parameters: dict[str, Any]


def grammar_of(
    functions: Sequence[Function], form: ToolForm, several: bool, answer: Grammar | None = None
) -> Grammar:
    """One call of one of these, or `several`; or else the `answer`, a grammar of JSON."""
    marks = MARKS[form]
    lines = [f"start: calls{' | answer' if answer is not None else ''}"]
    lines += _calls(marks, several)
    lines.append("object: " + " | ".join(f"function_{i}" for i in range(len(functions))))
    lines += [f"function_{i}: {_object(function, marks)}" for i, function in enumerate(functions)]
    if answer is not None:
        schema = json.loads(answer.text) if answer.kind is GrammarKind.JSON_SCHEMA else {"type": "object"}
        lines.append(f"answer: {_json(schema)}")
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def _calls(marks: Marks, several: bool) -> list[str]:
    more = f" ({_text(marks.between)} {{}}){{{{0,{REQUIRED_CALLS_MAX - 1}}}}}" if several else ""
    if not marks.begin:
        return ["calls: object" + more.format("object")]
    if marks.listed:
        end = f" {_text(marks.end)}" if marks.end else ""
        return [f'calls: {_text(marks.begin)} "[" object{more.format("object")} "]"{end}']
    one = f"one: {_text(marks.begin + chr(10))} object {_text(chr(10) + marks.end)}"
    return ["calls: one" + more.format("one"), one]


def _object(function: Function, marks: Marks) -> str:
    head = '{"name": ' + json.dumps(function.name, ensure_ascii=False) + f', "{marks.arguments}": '
    return f'{_text(head)} {_json(function.parameters)} "}}"'


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": SPACE}} | schema, ensure_ascii=False)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

"""Pure. Chats for models whose template knows no tools: what functions there are is said in words, calls and
what they gave are text."""

import json
from collections.abc import Iterable, Sequence

from chassis.messages.gateway import ToolCalled, Turn
from gateway.tool_calls.forms import MARKS, ToolForm

_MARKS = MARKS[ToolForm.HERMES]
_INTRODUCTION = "Functions that may be called, each as a JSON object:"
_HOW = "Where a call helps, answer with nothing but the call, as JSON between these tags:"
_EXAMPLE = '{"name": "<its name>", "arguments": {<its arguments>}}'


def in_words(turns: Sequence[Turn], tools: Iterable[str], system: bool) -> list[Turn]:
    """`tools`: JSON. `system`: the template knows that role; else the first turn tells of the functions."""
    told: list[Turn] = []
    for turn in turns:
        if turn.role == "tool":
            text = f"<tool_response>\n{turn.content}\n</tool_response>"
            if told and told[-1].role == "user" and told[-1].content.endswith("</tool_response>"):
                told[-1] = Turn("user", f"{told[-1].content}\n{text}")
            else:
                told.append(Turn("user", text))
        elif turn.tool_calls:
            told.append(
                Turn(turn.role, "\n".join([*filter(None, [turn.content]), *map(_call, turn.tool_calls)]))
            )
        else:
            told.append(turn)
    listed = list(tools)
    if not listed:
        return told
    words = "\n".join((_INTRODUCTION, *listed, _HOW, f"{_MARKS.begin}\n{_EXAMPLE}\n{_MARKS.end}"))
    first = told[0] if told else Turn("system", "")
    if first.role == "system" or not system:
        return [Turn(first.role, f"{first.content}\n\n{words}".strip(), first.name), *told[1:]]
    return [Turn("system", words), *told]


def _call(call: ToolCalled) -> str:
    written = json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}, ensure_ascii=False)
    return f"{_MARKS.begin}\n{written}\n{_MARKS.end}"

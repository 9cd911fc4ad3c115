"""Pure. Tools in OpenAI's words: which functions a chat may call, and the calls in what is answered."""

import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from chassis.messages.gateway import ToolCalled
from chassis.messages.sampling import Grammar, GrammarKind
from gateway.openai.errors import BadField
from gateway.openai.schema import ChatRequest, ToolCall
from gateway.sampling import GRAMMAR_NESTING_MAX, nesting_of
from gateway.tool_calls.forms import ToolForm, short_id
from gateway.tool_calls.reading import Argued, Called, Read, Said, ToolReader
from gateway.tool_calls.writing import Function, grammar_of

_NAME = re.compile(r"[\w.\-]{1,64}")
ANY_OBJECT: dict[str, Any] = {"type": "object"}
JSON_KINDS = (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat may call. `must`: it has to; `named`: one that it has to, by name."""

    functions: tuple[Function, ...]
    form: ToolForm = ToolForm.HERMES
    must: bool = False
    named: bool = False
    several: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """`answer`: what else the answer may be. None: anything."""
        if self.must:
            return grammar_of(self.functions, self.form, self.several)
        return None if answer is None else grammar_of(self.functions, self.form, self.several, answer)


def tools_of(request: ChatRequest) -> tuple[Tools | None, tuple[str, ...]]:
    """What may be called, and the tools as templates take them. Raises Status."""
    choice, given = request.tool_choice, request.tools or []
    if not given:
        if choice not in (None, "none", "auto"):
            raise BadField("tool_choice", "wants tools")
        return None, ()
    functions = tuple(_function(tool.function, f"tools[{i}].function") for i, tool in enumerate(given))
    names = [function.name for function in functions]
    if len(dict.fromkeys(names)) < len(names):
        raise BadField("tools", "two functions of one name")
    if choice == "none":
        return None, ()
    listed = tuple(orjson.dumps(tool.model_dump(exclude_none=True)).decode() for tool in given)
    several = request.parallel_tool_calls is not False
    if choice is None or isinstance(choice, str):
        return Tools(functions, must=choice == "required", several=several), listed
    if (name := choice.function.name) not in names:
        raise BadField("tool_choice.function.name", f"{name!r} is none of the tools")
    one = (functions[names.index(name)],)
    return Tools(one, must=True, named=True, several=False), listed


def _function(given: Any, field: str) -> Function:
    if not _NAME.fullmatch(given.name):
        raise BadField(f"{field}.name", "1 to 64 letters, digits, dots, dashes and underscores")
    parameters = given.parameters or ANY_OBJECT
    if nesting_of(parameters) > GRAMMAR_NESTING_MAX:
        raise BadField(f"{field}.parameters", f"nested deeper than {GRAMMAR_NESTING_MAX}")
    return Function(given.name, parameters)


def check_beside(tools: Tools, field: str, answer: Grammar) -> None:
    """Whether an answer of this grammar may stand beside calls. Raises Status."""
    if tools.must:
        raise BadField(field, "not where tool_choice asks for a call")
    if answer.kind not in JSON_KINDS:
        raise BadField(field, "not beside tools")


def called(call: ToolCall, field: str) -> ToolCalled:
    """Raises Status."""
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise BadField(f"{field}.function.arguments", "not a JSON object")
    if nesting_of(arguments) > GRAMMAR_NESTING_MAX:
        raise BadField(f"{field}.function.arguments", f"nested deeper than {GRAMMAR_NESTING_MAX}")
    return ToolCalled(call.id, call.function.name, orjson.dumps(arguments).decode())


# ---- what is answered ------------------------------------------------------------------------------


@dataclass(slots=True)
class ToolAnswer:
    """One choice, as it is read."""

    tools: Tools
    reader: ToolReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = ToolReader(self.tools.form, self.tools.names)

    def word(self, word: str) -> str:
        """Why it ended. What names the function asks for the call and nothing else: it just stops."""
        ended = word == "stop" and self.reader.num_calls > 0 and not self.tools.named
        return "tool_calls" if ended else word

    def delta(self, read: list[Read], request_id: str, choice: int) -> dict[str, Any]:
        """A stream's next."""
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for event in read:
            match event:
                case Said(text):
                    delta["content"] = delta.get("content", "") + text
                case Called(index, name):
                    function = {"name": name, "arguments": ""}
                    calls.append(
                        {"index": index, **self._head(request_id, choice, index), "function": function}
                    )
                case Argued(index, text) if calls and calls[-1]["index"] == index:
                    calls[-1]["function"]["arguments"] += text
                case Argued(index, text):
                    calls.append({"index": index, "function": {"arguments": text}})
        if calls:
            delta["tool_calls"] = calls
        return delta

    def message(self, text: str, request_id: str, choice: int) -> dict[str, Any]:
        """A whole one's, without its role."""
        delta = self.delta([*self.reader.feed(text), *self.reader.end()], request_id, choice)
        calls: dict[int, dict[str, Any]] = {}
        for part in delta.get("tool_calls", ()):
            index = part.pop("index")
            if index in calls:
                calls[index]["function"]["arguments"] += part["function"]["arguments"]
            else:
                calls[index] = part
        content = delta.get("content")
        if not calls:
            return {"content": content or "", "refusal": None}
        return {"content": content, "refusal": None, "tool_calls": list(calls.values())}

    def _head(self, request_id: str, choice: int, index: int) -> dict[str, Any]:
        name = f"call_{request_id}c{choice}t{index}"
        return {"id": short_id(name) if self.tools.form is ToolForm.MISTRAL else name, "type": "function"}

"""Chat turns to the text of a prompt, by the model's own template.

Rendered as `transformers` does (sandbox, trimmed blocks, `raise_exception`, `strftime_now`, `tojson` that
keeps characters, `{% generation %}`), so that the tokens are those the model was trained on. Whatever a
template refuses is the user's: INVALID_ARGUMENT.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from chassis.messages.gateway import Turn
from gateway.admission import invalid
from gateway.tool_calls.forms import ToolForm, form_of, knows_tools, short_id
from gateway.tool_calls.telling import in_words

RENDERED_CHARS_MAX = 4 << 20


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only holds it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Keeps templates, which come with a model, away from the interpreter's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have {name!r}")


class ChatTemplate:
    """A compiled template. Raises jinja2.TemplateError when it is not one."""

    def __init__(self, template: str, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, namespace=_Namespace, dict=_new_dict)
        self._template = environment.from_string(template)
        self.tool_form = form_of(template)
        self._knows_tools = knows_tools(template)
        self._knows_system = "System role not supported" not in template
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, turns: Sequence[Turn], wall_ns: int, tools: Sequence[str] = ()) -> str:
        """Ends where the assistant is to speak. `tools`: JSON. Raises Status."""
        if not self._knows_tools:
            turns, tools = in_words(turns, tools, self._knows_system), ()
        now = datetime.fromtimestamp(wall_ns / 1e9, UTC)
        try:
            text = self._template.render(
                messages=[_message(turn, self.tool_form) for turn in turns],
                add_generation_prompt=True,
                tools=[json.loads(tool) for tool in tools] or None,
                documents=None,
                strftime_now=now.strftime,
                **self._tokens,
            )
        except TemplateError as error:
            raise invalid(f"chat: the model's template refuses it: {error}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise invalid(f"chat: the model's template fails on it: {error}") from error
        if len(text) > RENDERED_CHARS_MAX:
            raise invalid(f"chat: {len(text)} characters once rendered; at most {RENDERED_CHARS_MAX}")
        return text


def _message(turn: Turn, form: ToolForm) -> dict[str, Any]:
    def id_of(name: str) -> str:
        return short_id(name) if form is ToolForm.MISTRAL else name

    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.name:
        message["name"] = turn.name
    if turn.tool_call_id:
        message["tool_call_id"] = id_of(turn.tool_call_id)
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": id_of(call.id),
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in turn.tool_calls
        ]
    return message


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise(message: str) -> None:
    raise TemplateError(message)

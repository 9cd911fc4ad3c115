"""Pure. Failures in OpenAI's words: the field's name as its clients know it, and their shape."""

import re
from typing import Any

from pydantic import ValidationError

from chassis.errors import Code, Status
from gateway.http_errors import error_body, http_status

MESSAGE_LEN_MAX = 2000
_FIELD = re.compile(r"([A-Za-z_][\w.\-]*(?:\[\w+\][\w.]*)*): ")
_TOO_LONG = re.compile(r": \d+ tokens; at most ")
_CHAT_NAMES = {"chat.turns": "messages", "chat": "messages", "input": "messages", "token_ids": "messages"}
_TEXT_NAMES = {"token_ids": "prompt", "input": "prompt", "top_logprobs": "logprobs"}
_HEADERS = {"client_key": "Idempotency-Key"}


class BadField(Status):
    """A field that cannot be as it is; its name stands first in the message."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(Code.INVALID_ARGUMENT, f"{field}: {message}")


def bad_field(error: ValidationError, body: object) -> BadField:
    """Of several complaints the one that leads deepest into the body: what was meant."""
    found = [(_path(details["loc"], body), details["msg"]) for details in error.errors(include_url=False)]
    path, message = max(found, key=lambda one: len(one[0]))
    return BadField(_named(path) or "body", message)


def _path(loc: tuple[int | str, ...], body: object) -> tuple[int | str, ...]:
    """Without the names of alternatives, which are nowhere in the body; a missing field's own name stays."""
    path: list[int | str] = []
    value: Any = body
    for i, key in enumerate(loc):
        if isinstance(key, int) and isinstance(value, list) and key < len(value):
            path.append(key)
            value = value[key]
        elif isinstance(key, str) and isinstance(value, dict) and (key in value or i == len(loc) - 1):
            path.append(key)
            value = value.get(key)
    return tuple(path)


def _named(path: tuple[int | str, ...]) -> str:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text[:200]


def in_openai_words(status: Status, chat: bool) -> tuple[int, dict[str, Any]]:
    """HTTP status and body."""
    message = status.message
    param = code = None
    number = http_status(status)
    if number in (400, 404, 409, 413) and (named := _FIELD.match(message)) is not None:
        names = _HEADERS | (_CHAT_NAMES if chat else _TEXT_NAMES)
        told = named[1]
        known = next((n for n in names if told == n or told.startswith((n + "[", n + "."))), None)
        param = told if known is None else names[known] + told[len(known) :]
        message = param + message[len(told) :]
    if number == 404 and param == "model":
        code = "model_not_found"
    elif number == 400 and _TOO_LONG.search(message):
        code = "context_length_exceeded"
    return number, error_body(number, message[:MESSAGE_LEN_MAX], param, code)

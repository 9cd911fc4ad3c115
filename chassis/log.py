"""Logs: one JSON object a line on stderr, with service, boot and, where there are any, request and trace ids.

Rules: an event is a short fixed phrase, what varies is a field; no prompts, no outputs, no secrets. What is
bound (`bind`) belongs to the current task and those it starts, so that several services in one process
keep their own names.
"""

import sys
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from chassis.trace import TraceContext

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "off": 100}
_TEXT_LEN_MAX = 2000


def _to_stderr(line: bytes) -> None:
    try:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
    except (AttributeError, OSError, ValueError):  # replaced, closed or full: a log line is not worth a crash
        pass


@dataclass(frozen=True, slots=True)
class _Bound:
    level: int = LEVELS["info"]
    write: Callable[[bytes], None] = _to_stderr
    wall_ns: Callable[[], int] = time.time_ns
    fields: dict[str, Any] = field(default_factory=dict)


_default = _Bound()
_bound: ContextVar[_Bound | None] = ContextVar("log", default=None)


def _current() -> _Bound:
    return _bound.get() or _default


def bind(
    *,
    level: str | None = None,
    write: Callable[[bytes], None] | None = None,
    wall_ns: Callable[[], int] | None = None,
    **fields: Any,
) -> None:
    """Adds fields (service, boot, ...) to every later line of this task; may change level, sink and clock."""
    now = _current()
    _bound.set(
        replace(
            now,
            level=now.level if level is None else LEVELS[level],
            write=write or now.write,
            wall_ns=wall_ns or now.wall_ns,
            fields={**now.fields, **fields},
        )
    )


def debug(event: str, **fields: Any) -> None:
    _emit("debug", event, fields)


def info(event: str, **fields: Any) -> None:
    _emit("info", event, fields)


def warning(event: str, **fields: Any) -> None:
    _emit("warning", event, fields)


def error(event: str, **fields: Any) -> None:
    _emit("error", event, fields)


def exception(event: str, exc: BaseException, **fields: Any) -> None:
    """An error with its stack, in one line."""
    stack = "".join(traceback.format_exception(exc))[-8 * _TEXT_LEN_MAX :]
    _emit("error", event, {**fields, "error": f"{type(exc).__name__}: {exc}"[:_TEXT_LEN_MAX], "stack": stack})


def _emit(level: str, event: str, fields: dict[str, Any]) -> None:
    bound = _current()
    if LEVELS[level] < bound.level:
        return
    line: dict[str, Any] = {"time_ns": bound.wall_ns(), "level": level, "event": event, **bound.fields}
    for name, value in fields.items():
        match value:
            case TraceContext():  # under whatever name it was given
                line["trace_id"] = value.trace_id.hex()
                line["span_id"] = value.span_id.hex()
            case bytes():
                line[name] = value.hex()[:_TEXT_LEN_MAX]
            case _:
                line[name] = value
    bound.write(orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))

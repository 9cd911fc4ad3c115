"""Bodies of HTTP requests: read under a limit and in bounded time, and looked at before they are parsed.

A JSON text that nests too deeply, or has too many parts, is refused by its marks: the parser never sees it.
One client's body takes no more than some tenths of a second from everybody's streams.
"""

import asyncio
from typing import Any

import numpy as np
import orjson
from starlette.requests import ClientDisconnect, Request

from chassis.errors import Code, Status
from gateway.http_errors import TooLarge

JSON_DEPTH_MAX = 64
JSON_MARKS_MAX = 500_000  # quotes and brackets
JSON_COMMAS_MAX = 2_000_000  # in text too: a prompt of so many is too long
_MARKS = b'"[]{}'
_OPENING = np.frombuffer(b"[{", np.uint8)
_OTHERS = bytes(set(range(256)) - set(_MARKS))


class NotJson(Status):
    """The body is not what it says it is; HTTP 400."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_ARGUMENT, message)


async def read_body(request: Request, bytes_max: int, timeout_s: float = 60.0) -> bytes:
    """Raises Status (TooLarge before anything is read, if the length is told) and ClientDisconnect."""
    if (told := told_len(request)) > bytes_max:
        raise TooLarge(f"body: {told} bytes; at most {bytes_max}")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > bytes_max:
                    raise TooLarge(f"body: more than {bytes_max} bytes")
                parts.append(part)
    except TimeoutError:
        raise Status(Code.INVALID_ARGUMENT, f"body: not here after {timeout_s:g} s") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def told_len(request: Request) -> int:
    """Of the body; 0 where nothing is said. Its digits may have zeros before them, in any number."""
    told = request.headers.get("content-length", "").lstrip("0")
    return int(told[:20]) if told.isascii() and told.isdecimal() else 0


def parse_json(data: bytes) -> Any:
    """Raises NotJson."""
    check_depth(data)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise NotJson(f"body: not JSON: {error}") from None


def parse_object(data: bytes) -> dict[str, Any]:
    """Raises NotJson."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise NotJson("body: not a JSON object")
    return value


def check_depth(data: bytes) -> None:
    """Raises NotJson if arrays and objects nest too deeply. Says nothing of whether it is JSON at all."""
    if (commas := data.count(b",")) > JSON_COMMAS_MAX:
        raise NotJson(f"body: {commas} commas; at most {JSON_COMMAS_MAX}")
    if data.count(b"[") + data.count(b"{") <= JSON_DEPTH_MAX:
        return
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(None, _OTHERS)
    if len(marks) > JSON_MARKS_MAX:
        raise NotJson(f"body: {len(marks)} quotes and brackets; at most {JSON_MARKS_MAX}")
    brackets = b"".join(marks.split(b'"')[::2])
    opening = np.isin(np.frombuffer(brackets, np.uint8), _OPENING)
    if len(brackets) and int(np.where(opening, 1, -1).cumsum().max()) > JSON_DEPTH_MAX:
        raise NotJson(f"body: nests deeper than {JSON_DEPTH_MAX} levels")


__all__ = [
    "ClientDisconnect",
    "NotJson",
    "check_depth",
    "parse_json",
    "parse_object",
    "read_body",
    "told_len",
]

"""Every message has one home here: its value type, one function that builds it, one that parses it.

One file per noun. Parsers raise `BadMessage` on anything that is not a well-formed message.
"""

import re
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from chassis.messages.text_fields import bad_text

M = TypeVar("M", bound=Message)
_ID = re.compile(r"[A-Za-z0-9_=-]{1,200}")


class BadMessage(Exception):
    """Bytes from outside that are not what the subject promises."""


def parse(kind: type[M], data: bytes) -> M:
    """Raises BadMessage."""
    try:
        return kind.FromString(data)
    except (DecodeError, ValueError) as error:
        if (found := bad_text(kind, data)) is not None:
            path, offset = found
            raise BadMessage(f"not a {kind.DESCRIPTOR.name}: {path}: not UTF-8 at byte {offset}") from None
        raise BadMessage(f"not a {kind.DESCRIPTOR.name}: {error}") from None


def check(ok: bool, what: str) -> None:
    """Raises BadMessage with `what` when it does not hold."""
    if not ok:
        raise BadMessage(what)


def check_id(value: str, what: str) -> None:
    """Raises BadMessage unless subjects and keys can be made of it: whoever sent it may be answered."""
    check(_ID.fullmatch(value) is not None, f"{what}: not an id: {value[:40]!r}")

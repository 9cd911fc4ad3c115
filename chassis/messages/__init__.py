"""Every message has one home here: its value type, one function that builds it, one that parses it.

One file per proto. Parsers raise `BadMessage` on anything that is not a well-formed message.
"""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)


class BadMessage(Exception):
    """Bytes from outside that are not what the subject promises."""


def parse(kind: type[M], data: bytes) -> M:
    """Raises BadMessage."""
    try:
        return kind.FromString(data)
    except (DecodeError, ValueError) as error:
        raise BadMessage(f"not a {kind.DESCRIPTOR.name}: {error}") from None


def check(ok: bool, what: str) -> None:
    """Raises BadMessage with `what` when it does not hold."""
    if not ok:
        raise BadMessage(what)

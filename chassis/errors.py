"""Pure. Failures of the world that callers handle by kind.

Ours are assertions; the user's are `Status`, raised only where requests enter.
"""

import traceback
from enum import Enum


class BusError(Exception):
    """The bus did not do as asked."""


class BusTimeout(BusError):
    """No answer in time: it may or may not have happened, or happen later."""


class BusUnavailable(BusError):
    """Refused for now (no leader, not connected): it did not happen; try again later."""


class NoResponders(BusError):
    """Nobody listens on the subject of a request."""


class WrongSequence(BusError):
    """A conditional write lost: the subject's last sequence (or the key's revision) is another."""


class SubjectTaken(BusError):
    """The subject already holds a message (discard-new per subject)."""


class StreamFull(BusError):
    """The stream's bound is reached."""


class MessageTooLarge(BusError):
    """Above the broker's message limit."""


class LayoutDrift(BusError):
    """A stream or consumer exists and is configured otherwise than `chassis/subjects.py` says."""


class LinkClosed(Exception):
    """A transport link is gone; what was in flight may or may not have arrived."""


class RpcError(Exception):
    """A remote call failed."""


class RpcUnavailable(RpcError):
    """No answer: it may or may not have happened."""


class RpcRejected(RpcError):
    """The other side answered with an error; `code` is a gRPC status name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Code(Enum):
    """gRPC status names used towards users."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    ABORTED = "ABORTED"
    NOT_FOUND = "NOT_FOUND"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


class Status(Exception):
    """What a user is told. `retry_ms` is a hint, where a retry helps."""

    def __init__(self, code: Code, message: str, retry_ms: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_ms = retry_ms


def let_go(errors: BaseExceptionGroup[BaseException]) -> None:
    """Of what a task group raised, once it is handled: the group's own frame refers to it (Python before
    3.13), so that all that its tasks held would stay until a whole collection, which services never make."""
    traceback.clear_frames(errors.__traceback__)

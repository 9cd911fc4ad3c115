"""Pure. What can go wrong for a caller, by kind: each is a ShoalError, and its `code` a gRPC status name.

A class by itself for each kind that callers treat differently; the words are the gateway's own.
"""


class ShoalError(Exception):
    """What the gateway, or the way to it, said. `code` is a gRPC status name.

    `retry_ms`: when to try again, if that helps. `request_id`: what is resumed, if it was accepted before.
    """

    def __init__(self, code: str, message: str, retry_ms: int | None = None, request_id: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_ms = retry_ms
        self.request_id = request_id

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, self.message, self.retry_ms, self.request_id)


class InvalidArgument(ShoalError):
    """Field and limit are in the message."""


class Unauthenticated(ShoalError):
    """No key, or none that is known."""


class PermissionDenied(ShoalError):
    """The key may not do this."""


class AlreadyExists(ShoalError):
    """The client key came with another call before."""


class Diverged(ShoalError):
    """ABORTED: the answer went on otherwise than what was told of it."""


class NotFound(ShoalError):
    """No such model, or no such request of this tenant."""


class ResourceExhausted(ShoalError):
    """The caller's quota, or a message that is too large."""


class Unavailable(ShoalError):
    """No gateway answers, or it has no room now."""


class DeadlineExceeded(ShoalError):
    """Not done in time."""


class Cancelled(ShoalError):
    """Somebody ended the call."""


_KINDS: dict[str, type[ShoalError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "ALREADY_EXISTS": AlreadyExists,
    "ABORTED": Diverged,
    "NOT_FOUND": NotFound,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
}


def error_of(code: str, message: str, retry_ms: int | None = None, request_id: str = "") -> ShoalError:
    """Of the kind that the code names; of any other a plain ShoalError."""
    return _KINDS.get(code, ShoalError)(code, message, retry_ms, request_id)

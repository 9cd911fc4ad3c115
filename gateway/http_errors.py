"""Pure. What HTTP says of a failure: status, headers, and a body where a door has none of its own."""

import math

from chassis.errors import Code, Status

STATUS_OF = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.CANCELLED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.INTERNAL: 500,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
TYPE_OF = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CODE_OF = {
    401: "invalid_api_key",
    403: "permission_denied",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "overloaded",
    504: "deadline_exceeded",
}


class TooLarge(Status):
    """What was sent is larger than a limit, which the message names: 413."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_ARGUMENT, message)


def http_status(status: Status) -> int:
    return 413 if isinstance(status, TooLarge) else STATUS_OF[status.code]


def retry_headers(status: Status) -> dict[str, str]:
    """Whole seconds, at least one, and the exact hint; nothing where a retry is of no use."""
    if status.retry_ms is None:
        return {}
    whole = max(1, math.ceil(status.retry_ms / 1000))
    return {"retry-after": str(whole), "retry-after-ms": str(status.retry_ms)}


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """OpenAI's shape."""
    kind = TYPE_OF.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or CODE_OF.get(status)}}

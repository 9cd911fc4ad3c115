"""The caller's W3C trace context, from a header or from gRPC's metadata."""

import re

from chassis.trace import TraceContext

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def caller_of(traceparent: str | None) -> TraceContext | None:
    """None: none was sent, or it is no such thing."""
    if not (found := _TRACEPARENT.fullmatch(traceparent or "")):
        return None
    flags = int(found[3], 16) & 1  # other bits say how the id was made
    return TraceContext.decode(bytes.fromhex(found[1] + found[2]) + bytes([flags]))

"""Spans as cheap tuples in a bounded ring; only those of kept requests and steps are ever exported.

A span belongs to a `key`: a request id, or `step:<epoch>:<number>`. `keep` marks keys; the exporter takes
their spans to OTLP (when configured) and to the TRACES stream. Ids are derived, so that services agree
without talking: a request's trace id comes with its trace parent, a step's from its epoch and number.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context. `trace_id` 16 bytes, `span_id` 8 bytes."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True

    def encode(self) -> bytes:
        """25 bytes: trace id, span id, flags."""
        return self.trace_id + self.span_id + (b"\x01" if self.sampled else b"\x00")

    @staticmethod
    def decode(data: bytes) -> "TraceContext | None":
        """None unless `data` is a whole, non-zero context."""
        if len(data) != 25 or not any(data[:16]) or not any(data[16:24]):
            return None
        return TraceContext(data[:16], data[16:24], bool(data[24] & 1))


class Span(NamedTuple):
    key: str
    name: str  # service.verb
    context: TraceContext
    parent: bytes | None  # span id
    start_ns: int  # wall clock
    end_ns: int
    attributes: Mapping[str, Value]
    links: tuple[TraceContext, ...] = ()
    error: str | None = None


class Tracer(Protocol):
    def record(self, span: Span) -> None:
        """Puts a finished span into the ring; the oldest falls out."""

    def keep(self, keys: Iterable[str]) -> None:
        """Spans of these keys, recorded already or within the next seconds, are exported."""

    def new_span_id(self) -> bytes: ...

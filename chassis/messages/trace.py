"""Kept spans as segments of the TRACES stream, and the word that says which keys are kept."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import orjson
from google.protobuf.message import DecodeError

from chassis.messages import BadMessage
from chassis.trace import Span, TraceContext, Value, decode_steps, encode_steps, parse_step_key, step_key
from chassis.wire import trace_pb2 as pb


@dataclass(frozen=True, slots=True)
class Segment:
    """What one process saw of one request, or of a run of steps."""

    service: str
    boot: str
    spans: tuple[Span, ...]


def build_segment(service: str, boot: str, spans: Sequence[Span]) -> bytes:
    links: dict[int, list[bytes]] = {}  # by identity: steps that follow each other share theirs
    for span in spans:
        if id(span.links) not in links:
            links[id(span.links)] = [link.encode() for link in span.links]
    built = [_span(span, links[id(span.links)]) for span in spans]
    return pb.Segment(service=service, boot=boot, spans=built).SerializeToString()


def parse_segment(data: bytes) -> Segment:
    try:
        m = pb.Segment.FromString(data)
    except DecodeError as error:
        raise BadMessage(f"not a Segment: {error}") from None
    return Segment(m.service, m.boot, tuple(_parse_span(s) for s in m.spans))


def build_keep(keys: Iterable[str]) -> bytes:
    requests: list[str] = []
    steps: list[tuple[int, int]] = []
    for key in keys:
        step = parse_step_key(key)
        if step is None:
            requests.append(key)
        else:
            steps.append(step)
    return pb.Keep(requests=requests, steps=encode_steps(steps)).SerializeToString()


def parse_keep(data: bytes) -> list[str]:
    try:
        m = pb.Keep.FromString(data)
        return [*m.requests, *(step_key(epoch, number) for epoch, number in decode_steps(m.steps))]
    except (DecodeError, ValueError) as error:
        raise BadMessage(f"not a Keep: {error}") from None


def _span(s: Span, links: list[bytes]) -> pb.Span:
    return pb.Span(
        key=s.key,
        name=s.name,
        context=s.context.encode(),
        parent=s.parent or b"",
        start_ns=s.start_ns,
        duration_ns=max(0, s.end_ns - s.start_ns),
        attributes=orjson.dumps(s.attributes, default=_plain) if s.attributes else b"",
        links=links,
        error=s.error,
    )


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _parse_span(m: pb.Span) -> Span:
    return Span(
        key=m.key,
        name=m.name,
        context=_context(m.context),
        parent=m.parent or None,
        start_ns=m.start_ns,
        end_ns=m.start_ns + m.duration_ns,
        attributes=_parse_attributes(m.attributes),
        links=tuple(_context(link) for link in m.links),
        error=m.error if m.HasField("error") else None,
    )


def _parse_attributes(data: bytes) -> dict[str, Value]:
    if not data:
        return {}
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadMessage(f"span: attributes: {error}") from None
    if not isinstance(found, dict):
        raise BadMessage("span: attributes are not an object")
    return {name: value for name, value in found.items() if isinstance(value, str | int | float)}


def _context(data: bytes) -> TraceContext:
    context = TraceContext.decode(data)
    if context is None:
        raise BadMessage("span: not a trace context")
    return context

"""Kept spans as OpenTelemetry spans, to any OTLP endpoint. Only loaded when one is configured.

Ids are kept, so that a trace reads the same here and there. The exporter blocks: one thread of its own takes
batches from a bounded queue; what does not fit is dropped and counted. Sampling has happened already.
"""

import queue
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from chassis.trace import Span, TraceContext

_BATCHES_MAX = 64
_EXPORT_TIMEOUT_S = 5
_CLOSE_TIMEOUT_S = 2.0
_KINDS = {
    "gateway.generate": SpanKind.SERVER,
    "gateway.resume": SpanKind.SERVER,
    "gateway.publish": SpanKind.PRODUCER,
    "batcher.request": SpanKind.CONSUMER,
}
_SCOPE = InstrumentationScope("shoal")


def to_sdk(span: Span, resource: Resource) -> ReadableSpan:
    """The same span in the SDK's terms."""
    context = _context(span.context, remote=False)
    parent = None
    if span.parent is not None:
        parent = SpanContext(
            context.trace_id,
            int.from_bytes(span.parent, "big"),
            is_remote=True,
            trace_flags=context.trace_flags,
        )
    attributes = {"shoal.key": span.key, **span.attributes}
    if span.error is not None:
        attributes["error.type"] = span.error
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=parent,
        resource=resource,
        attributes=attributes,
        links=[Link(_context(link, remote=True)) for link in span.links],
        kind=_KINDS.get(span.name, SpanKind.INTERNAL),
        instrumentation_scope=_SCOPE,
        status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR, span.error),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )


def _context(context: TraceContext, remote: bool) -> SpanContext:
    return SpanContext(
        int.from_bytes(context.trace_id, "big"),
        int.from_bytes(context.span_id, "big"),
        is_remote=remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


class OtlpSink:
    """`endpoint` as OTEL_EXPORTER_OTLP_ENDPOINT has it; http:// means without TLS."""

    def __init__(self, endpoint: str, service: str, boot: str = "") -> None:
        self.dropped = 0  # spans
        self._resource = Resource.create(
            {"service.name": service, "service.namespace": "shoal", "service.instance.id": boot}
        )
        self._exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT_S
        )
        self._batches: queue.Queue[Sequence[Span] | None] = queue.Queue(_BATCHES_MAX)
        self._thread = threading.Thread(target=self._export, name="otlp", daemon=True)
        self._thread.start()

    async def send(self, spans: Sequence[Span]) -> None:
        try:
            self._batches.put_nowait(spans)
        except queue.Full:
            self.dropped += len(spans)

    async def close(self) -> None:
        """Gives what is queued a moment to leave; blocks the loop, which has nothing else to do by then."""
        try:
            self._batches.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _export(self) -> None:
        while (spans := self._batches.get()) is not None:
            self._exporter.export([to_sdk(span, self._resource) for span in spans])
        self._exporter.shutdown()

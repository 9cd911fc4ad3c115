"""A small OTLP receiver: keeps every span it is sent."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(pb_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[tuple[str, Span]] = []  # with the service

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            for scope in resource.scope_spans:
                self.spans += [(names[0], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def of_trace(self, trace_id: bytes) -> dict[bytes, tuple[str, Span]]:
        """By span id."""
        return {span.span_id: (home, span) for home, span in list(self.spans) if span.trace_id == trace_id}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()

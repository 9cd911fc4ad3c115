"""Kept spans reach a collector with the ids they have here."""

import asyncio
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from chassis.otlp import OtlpSink
from chassis.trace import Span, TraceContext, step_context


class Collector(pb_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[pb.ExportTraceServiceRequest] = []

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        self.requests.append(request)
        return pb.ExportTraceServiceResponse()


def test_ids_links_and_errors_survive() -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        context = TraceContext(bytes(range(16)), bytes(range(8, 16)))
        link = step_context("b", 7, 42)
        sent = Span(
            "r", "batcher.decode", context, b"\x05" * 8, 1000, 2000, {"shoal.tokens": 3}, (link,), "died"
        )

        async def send() -> None:
            sink = OtlpSink(f"http://127.0.0.1:{port}", "batcher", "boot")
            await sink.send([sent])
            await sink.close()

        asyncio.run(send())
    finally:
        server.stop(0).wait()
    (request,) = collector.requests
    (resource_spans,) = request.resource_spans
    resource = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
    assert resource["service.name"] == "batcher"
    assert resource["service.instance.id"] == "boot"
    (got,) = resource_spans.scope_spans[0].spans
    assert (got.trace_id, got.span_id, got.parent_span_id) == (context.trace_id, context.span_id, b"\x05" * 8)
    assert (got.name, got.start_time_unix_nano, got.end_time_unix_nano) == ("batcher.decode", 1000, 2000)
    assert (got.links[0].trace_id, got.links[0].span_id) == (link.trace_id, link.span_id)
    assert (got.status.code, got.status.message) == (2, "died")
    attributes = {a.key: a.value for a in got.attributes}
    assert attributes["shoal.tokens"].int_value == 3
    assert attributes["shoal.key"].string_value == "r"

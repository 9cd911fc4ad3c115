"""A gateway of a few lines that knows one answer, tells the rest of it, and fails when the test says."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from chassis.wire import gateway_pb2 as pb
from chassis.wire import gateway_pb2_grpc as pb_grpc

IDS = tuple(range(10, 40))
TEXT = "".join(chr(ord("a") + i % 26) for i in range(len(IDS)))


class FakeGateway(pb_grpc.InferenceServicer):
    """Each id is a letter, two ids a delta. `fail_after`: events of each next stream before it fails."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.time_left_s: list[float | None] = []
        self.fail_after: list[int] = []
        self.code = grpc.StatusCode.UNAVAILABLE
        self.hint_ms: int | None = None
        self.hold = threading.Event()  # after six ids, until it is set
        self.hold.set()
        self.cancelled = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateEvent]:
        self._note(request, context)
        yield from self._tell(context, max(1, request.n), "r", 0)

    def Resume(self, request: pb.ResumeRequest, context: Any) -> Iterator[pb.GenerateEvent]:
        self._note(request, context)
        assert tuple(request.output_ids) == IDS[: len(request.output_ids)]
        yield from self._tell(context, 1, request.request_id, len(request.output_ids))

    def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelReply:
        self._note(request, context)
        self.cancelled.set()
        self.hold.set()
        return pb.CancelReply()

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsReply:
        self._note(request, context)
        if self.fail_after:
            self.fail_after.pop(0)
            self._fail(context)
        return pb.ListModelsReply(models=[pb.Model(name="m")])

    def _note(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_left_s.append(context.time_remaining())

    def _tell(self, context: Any, choices: int, name: str, held: int) -> Iterator[pb.GenerateEvent]:
        left = self.fail_after.pop(0) if self.fail_after else None
        for event in self._events(choices, name, held):
            if left == 0 and self.code is grpc.StatusCode.OK:
                return
            if left == 0:
                self._fail(context)
            left = None if left is None else left - 1
            yield event

    def _events(self, choices: int, name: str, held: int) -> Iterator[pb.GenerateEvent]:
        for choice in range(choices):
            accepted = pb.Accepted(request_id=f"{name}c{choice}" if choice else name, prompt_tokens=3)
            yield pb.GenerateEvent(accepted=accepted, choice=choice)
        for first in range(held, len(IDS), 2):
            if first == 6:
                self.hold.wait()
            if self.cancelled.is_set():
                break
            for choice in range(choices):
                delta = pb.Delta(text=TEXT[first : first + 2], ids=IDS[first : first + 2], first_index=first)
                yield pb.GenerateEvent(delta=delta, choice=choice)
        reason = "cancelled" if self.cancelled.is_set() else "length"
        for choice in range(choices):
            yield pb.GenerateEvent(finished=pb.Finished(reason=reason), choice=choice)

    def _fail(self, context: Any) -> None:
        if self.hint_ms is not None:
            context.set_trailing_metadata((("retry-after-ms", str(self.hint_ms)),))
        context.abort(self.code, "as the test says")


@contextmanager
def served(*gateways: FakeGateway) -> Iterator[list[str]]:
    """Their addresses."""
    servers = []
    addresses = []
    for gateway in gateways:
        server = grpc.server(futures.ThreadPoolExecutor(4))
        pb_grpc.add_InferenceServicer_to_server(gateway, server)  # type: ignore[no-untyped-call]
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        server.start()
        servers.append(server)
    try:
        yield addresses
    finally:
        for gateway in gateways:
            gateway.hold.set()
        for server in servers:
            server.stop(0).wait()

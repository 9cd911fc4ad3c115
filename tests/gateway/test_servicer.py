"""The gRPC door over loopback: events, errors, deadlines, departures, garbage, health, reflection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from chassis.errors import Code, Status
from chassis.ids import RequestId
from chassis.messages.gateway import (
    Accepted,
    Delta,
    Finished,
    GenerateCall,
    Turn,
)
from chassis.messages.request import Reason, Timings, Usage
from chassis.trace import TraceContext
from chassis.wire import gateway_pb2 as pb
from chassis.wire import gateway_pb2_grpc as pb_grpc
from gateway.config import Config
from gateway.servicer import serve
from tests.gateway.fake_front import FakeFront
from tests.gateway.rig import Rig, run, until

INFERENCE = "shoal.v1.Inference"


@asynccontextmanager
async def door(front: FakeFront, **settings: Any) -> AsyncIterator[tuple[Any, grpc.aio.Channel]]:
    config = Config(**({"grpc_address": "127.0.0.1:0"} | settings))
    async with serve(front, config) as address, grpc.aio.insecure_channel(address) as channel:
        yield pb_grpc.InferenceStub(channel), channel  # type: ignore[no-untyped-call]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    return failed.value


def most_ms(deadline_ms: int) -> int:
    """What may arrive of a call's deadline: gRPC rounds it up to its third digit on the wire."""
    digit: int = 10 ** max(0, len(str(deadline_ms)) - 3)
    return deadline_ms + digit


def test_events_and_fields_go_through() -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [
            Accepted(RequestId("r1"), 3, (1 << 64) - 1),
            Delta("h\u00e9", (5, 6), 0),
            Finished(Reason.STOP, Usage(3, 1, 2), Timings(1, 2, 3, 4, 5)),
        ]
        async with door(front) as (stub, _):
            request = pb.GenerateRequest(
                chat=pb.Chat(turns=[pb.Turn(role="user", content="hi")]),
                temperature=0,
                seed=(1 << 64) - 1,
                max_tokens=4,
                stop=["x"],
                client_key="k",
            )
            events = [e async for e in stub.Generate(request, timeout=5)]
        assert events == [
            pb.GenerateEvent(accepted=pb.Accepted(request_id="r1", prompt_tokens=3, seed=(1 << 64) - 1)),
            pb.GenerateEvent(delta=pb.Delta(text="h\u00e9", ids=[5, 6], first_index=0)),
            pb.GenerateEvent(
                finished=pb.Finished(
                    reason="stop",
                    prompt_tokens=3,
                    cached_tokens=1,
                    output_tokens=2,
                    queued_us=3,
                    prefill_us=3,
                    decode_us=9,
                )
            ),
        ]
        [(call, caller)] = front.calls
        assert call.chat == (Turn("user", "hi"),) and call.prompt is None and call.token_ids is None
        assert (call.temperature, call.top_p, call.top_k, call.priority) == (0.0, None, None, None)
        assert (call.seed, call.max_tokens, call.stop) == ((1 << 64) - 1, 4, ("x",))
        assert (call.client_key, call.tenant, caller) == ("k", "t", None)
        assert 0 < call.time_left_ms <= most_ms(5000)

    run(main())


def test_the_other_calls() -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [Finished(Reason.LENGTH, Usage(), Timings())]
        async with door(front) as (stub, _):
            resumed = [e async for e in stub.Resume(pb.ResumeRequest(request_id="r1", output_ids=[7, 8]))]
            assert resumed[0].finished.reason == "length"
            await stub.Cancel(pb.CancelRequest(request_id="r1"))
            missing = await failure(stub.Cancel(pb.CancelRequest(request_id="gone")))
            assert missing.code() is grpc.StatusCode.NOT_FOUND
            tokens = await stub.Tokenize(pb.TokenizeRequest(model="m", prompt="x"))
            assert list(tokens.ids) == [1, 2, 300]
            models = await stub.ListModels(pb.ListModelsRequest())
            assert models.models[0] == pb.Model(
                name="m", digest="d", context_len_max=8, vocab_size=9, chat=True
            )
        assert front.calls == [
            ("r1", (7, 8), "t"),
            ("r1", "t"),
            ("gone", "t"),
            GenerateCall(model="m", prompt="x", tenant="t"),
        ]

    run(main())


@pytest.mark.parametrize("code", list(Code))
def test_every_status_keeps_its_code_and_hint(code: Code) -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [Accepted(RequestId("r1"), 1, 1), Status(code, "field: limit", 250)]
        async with door(front) as (stub, _):
            error = await failure(stub.Generate(pb.GenerateRequest(prompt="x")))
        assert error.code().name == code.value and error.details() == "field: limit"
        assert ("retry-after-ms", "250") in tuple(error.trailing_metadata() or ())

    run(main())


def test_our_own_mistake_is_internal_and_tells_nothing() -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [AssertionError("the secret")]
        async with door(front) as (stub, _):
            error = await failure(stub.Generate(pb.GenerateRequest(prompt="x")))
            assert error.code() is grpc.StatusCode.INTERNAL and "secret" not in str(error.details())
            front.events = [Accepted(RequestId("r1"), 1, 1)]
            assert len([e async for e in stub.Generate(pb.GenerateRequest(prompt="x"))]) == 1

    run(main())


def test_a_client_that_leaves_ends_its_stream() -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [Accepted(RequestId("r1"), 1, 1), asyncio.Event()]
        async with door(front) as (stub, _):
            stream = stub.Generate(pb.GenerateRequest(prompt="x"))
            await stream.read()
            stream.cancel()
            await asyncio.wait_for(front.left.wait(), 5)

    run(main())


def test_the_calls_deadline_ends_the_stream() -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [asyncio.Event()]
        async with door(front) as (stub, _):
            error = await failure(stub.Generate(pb.GenerateRequest(prompt="x"), timeout=0.2))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await asyncio.wait_for(front.left.wait(), 5)
        assert 0 < front.calls[0][0].time_left_ms <= most_ms(200)

    run(main())


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\x05ab"])
def test_garbage_and_invalid_utf8_are_invalid_arguments(data: bytes) -> None:
    async def main() -> None:
        front = FakeFront()
        async with door(front) as (stub, channel):
            for method in ("Generate", "Resume"):
                error = await failure(channel.unary_stream(f"/{INFERENCE}/{method}")(data))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert str(error.details()).startswith("request: not a ")
            for method in ("Cancel", "Tokenize"):
                error = await failure(channel.unary_unary(f"/{INFERENCE}/{method}")(data))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert not front.calls
            assert len((await stub.ListModels(pb.ListModelsRequest())).models) == 1

    run(main())


def test_a_message_above_the_bound_is_refused_by_grpc() -> None:
    async def main() -> None:
        front = FakeFront()
        async with door(front, message_bytes_max=1000) as (stub, _):
            error = await failure(stub.Generate(pb.GenerateRequest(prompt="x" * 2000)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not front.calls

    run(main())


def test_a_burst_of_calls_is_answered_or_refused_with_a_reason() -> None:
    """gRPC by itself cancels some at random."""

    async def main() -> None:
        async with door(FakeFront()) as (stub, _):
            calls = [stub.ListModels(pb.ListModelsRequest()) for _ in range(1900)]
            codes = {await call.code() for call in calls}
            assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}

    run(main())


def test_callers_trace_context_is_taken_up() -> None:
    async def main() -> None:
        front = FakeFront()
        async with door(front) as (stub, _):
            for value in (f"00-{'ab' * 16}-{'cd' * 8}-03", "00-zz-cd-01", f"00-{'00' * 16}-{'cd' * 8}-01"):
                async for _event in stub.Generate(
                    pb.GenerateRequest(prompt="x"), metadata=(("traceparent", value),)
                ):
                    pass
        callers = [caller for _, caller in front.calls]
        assert callers == [TraceContext(b"\xab" * 16, b"\xcd" * 8, True), None, None]

    run(main())


def test_health_follows_readiness() -> None:
    async def main() -> None:
        front = FakeFront()
        async with door(front) as (_, channel):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            response = health_pb2.HealthCheckResponse
            for service in ("", INFERENCE):
                check = health_pb2.HealthCheckRequest(service=service)
                assert (await stub.Check(check)).status == response.SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == response.SERVING
            front.ready = False
            assert (await watch.read()).status == response.NOT_SERVING
            watch.cancel()
            error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="other")))
            assert error.code() is grpc.StatusCode.NOT_FOUND

    run(main())


def test_reflection_lists_the_services() -> None:
    async def main() -> None:
        async with door(FakeFront()) as (_, channel):
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

            async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
                yield reflection_pb2.ServerReflectionRequest(list_services="")
                yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=INFERENCE)

            answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
            names = {service.name for service in answers[0].list_services_response.service}
            assert {INFERENCE, "grpc.health.v1.Health"} <= names
            assert answers[1].file_descriptor_response.file_descriptor_proto

    run(main())


def test_an_address_in_use_is_an_error() -> None:
    async def main() -> None:
        async with serve(FakeFront(), Config(grpc_address="127.0.0.1:0")) as address:
            with pytest.raises(OSError, match="cannot listen"):
                async with serve(FakeFront(), Config(grpc_address=address)):
                    pass

    run(main())


def test_the_whole_gateway_behind_its_door() -> None:
    async def main() -> None:
        async with Rig().standing(grpc_address="127.0.0.1:0", prompt_bytes_max=1000) as (gateway, batcher):
            async with grpc.aio.insecure_channel(gateway.address) as channel:
                stub: Any = pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
                stream = stub.Generate(pb.GenerateRequest(prompt="hi", seed=1), timeout=10)
                job = await batcher.take()
                assert 0 < job.request.timeout_ms <= most_ms(10_000)
                batcher.send(job, *b"yes")
                await batcher.end(job)
                events = [e async for e in stream]
                assert [e.WhichOneof("event") for e in events] == ["accepted", "delta", "finished"]
                assert events[1].delta.text == "yes"
                refused = await failure(stub.Generate(pb.GenerateRequest(prompt="x" * 2000)))
                assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert refused.details() == "prompt: 2000 bytes; 1 to 1000"
                stream = stub.Generate(pb.GenerateRequest(prompt="hi"))
                job = await batcher.take()
                await stream.read()
                stream.cancel()
                await until(lambda: batcher.heard)

    run(main())

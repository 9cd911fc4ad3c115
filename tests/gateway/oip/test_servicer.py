"""The protocol's gRPC door over loopback: streams of several requests, limits, departures, keys, garbage."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from chassis.errors import Code, Status
from chassis.ids import BootId, RequestId
from chassis.messages.gateway import Accepted, Delta, Finished, IdLogprobs
from chassis.messages.request import Reason, Timings, Usage
from chassis.messages.statistics import Computed, Duration, ModelStatistics
from chassis.wire import open_inference_pb2 as pb
from chassis.wire import open_inference_pb2_grpc as pb_grpc
from gateway.access.caller import Caller
from gateway.config import Config
from gateway.model_control import Present
from gateway.oip.server import Server
from gateway.oip.servicer import SERVICE, service
from gateway.servicer import serve
from tests.gateway.fake_front import FakeFront
from tests.gateway.rig import run

STATISTICS = ModelStatistics(
    BootId(""),
    "m",
    5,
    12,
    4,
    Duration(1, 2),
    Duration(),
    Duration(1, 9),
    batch_stats={3: Computed(Duration(4, 8))},
)


class FakeControl:
    def __init__(self, front: FakeFront) -> None:
        self.loaded = True
        self._front = front

    def models(self, who: Caller) -> list[Present]:
        return [Present(info, self.loaded) for info in self._front.list_models(who)]

    async def statistics(self, name: str) -> ModelStatistics:
        return STATISTICS

    async def load(self, name: str, who: Caller) -> None:
        self.loaded = True

    async def unload(self, name: str, who: Caller) -> None:
        self.loaded = False


@asynccontextmanager
async def door(front: FakeFront, **settings: Any) -> AsyncIterator[tuple[Any, grpc.aio.Channel]]:
    config = Config(**({"grpc_address": "127.0.0.1:0"} | settings))
    other = service(Server(front, FakeControl(front), config), config)
    async with serve(front, config, (other,)) as address, grpc.aio.insecure_channel(address) as channel:
        yield pb_grpc.GRPCInferenceServiceStub(channel), channel  # type: ignore[no-untyped-call]


def ended(reason: Reason = Reason.STOP, choice: int = 0) -> Finished:
    return Finished(reason, Usage(3, 1, 2), Timings(), choice)


def infer(
    request_id: str = "", stream: bool = False, outputs: tuple[str, ...] = (), **parameters: Any
) -> Any:
    text = pb.InferTensorContents(bytes_contents=[b"hi"])
    kind = pb.ModelInferRequest
    return kind(
        model_name="m",
        id=request_id,
        parameters={"stream": pb.InferParameter(bool_param=stream), **parameters},
        inputs=[kind.InferInputTensor(name="text_input", datatype="BYTES", shape=[1], contents=text)],
        outputs=[kind.InferRequestedOutputTensor(name=name) for name in outputs],
    )


def values(response: pb.ModelInferResponse) -> dict[str, Any]:
    return {o.name: next(list(v) for _, v in o.contents.ListFields()) for o in response.outputs}


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


def test_a_unary_call_has_the_whole_answer() -> None:
    async def main() -> None:
        front = FakeFront()
        told = (IdLogprobs(-0.5, 1, b"a"), IdLogprobs(-0.25, 1, b"b"))
        front.events = [
            Accepted(RequestId("r"), 3, 1),
            Delta("a", (5,), 0, told[:1]),
            Delta("b", (6,), 1, told[1:]),
        ]
        front.events.append(ended())
        names: tuple[str, ...] = (
            "text_output",
            "output_ids",
            "sequence_length",
            "cum_log_probs",
            "output_log_probs",
        )
        names += ("num_input_tokens", "num_cached_tokens", "num_output_tokens", "finish_reason")
        async with door(front) as (stub, _):
            answer = await stub.ModelInfer(infer("x", stream=True, outputs=names), timeout=5)
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "x")
        assert values(answer) == {
            "text_output": [b"ab"],
            "output_ids": [5, 6],
            "sequence_length": [2],
            "cum_log_probs": [-0.75],
            "output_log_probs": [-0.5, -0.25],
            "num_input_tokens": [3],
            "num_cached_tokens": [1],
            "num_output_tokens": [2],
            "finish_reason": [b"stop"],
        }
        [(call, _)] = front.calls
        assert (call.prompt, call.tenant, call.top_logprobs) == (
            "hi",
            "t",
            0,
        ) and 0 < call.time_left_ms <= 5010

    run(main())


@pytest.mark.parametrize(
    "end, code",
    [
        (ended(Reason.DEADLINE), grpc.StatusCode.DEADLINE_EXCEEDED),
        (ended(Reason.CANCELLED), grpc.StatusCode.CANCELLED),
        (Status(Code.RESOURCE_EXHAUSTED, "quota: used up", 70), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (AssertionError("the secret"), grpc.StatusCode.INTERNAL),
    ],
)
def test_half_an_answer_is_an_error(end: Any, code: grpc.StatusCode) -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [Delta("a", (5,), 0), end]
        async with door(front) as (stub, _):
            error = await failure(stub.ModelInfer(infer()))
        assert error.code() is code and "secret" not in str(error.details())

    run(main())


def test_an_error_leaves_the_stream_open() -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [Delta("a", (5,), 0), Delta("", (), 1), Delta("b", (6,), 1), ended(Reason.LENGTH)]
        async with door(front) as (stub, channel):
            call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
            read = pb.ModelStreamInferResponse.FromString
            await call.write(b"\xff\xff")
            assert "not a ModelInferRequest" in read(await call.read()).error_message
            bad = infer("bad", priority=pb.InferParameter(uint64_param=12))
            await call.write(bad.SerializeToString())
            failed = read(await call.read())
            assert failed.error_message == "parameter priority: 12; 0 to 10"
            assert failed.infer_response.id == "bad"
            assert failed.infer_response.parameters["status"].string_param == "INVALID_ARGUMENT"
            assert failed.infer_response.parameters["triton_final_response"].bool_param
            await call.write(infer("good", stream=True).SerializeToString())
            await call.done_writing()
            got = []
            while (data := await call.read()) is not grpc.aio.EOF:
                got.append(read(data).infer_response)
        assert [values(response) for response in got] == [
            {"text_output": [b"a"]},
            {"text_output": [b"b"]},
            {"text_output": [b""], "finish_reason": [b"length"]},
        ]
        assert [r.parameters["triton_final_response"].bool_param for r in got] == [False, False, True]
        assert {r.id for r in got} == {"good"}

    run(main())


def test_choices_on_a_stream_say_which_they_are() -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [Delta("a", (5,), 0), Delta("b", (6,), 0, choice=1), ended(choice=1), ended()]
        async with door(front) as (stub, _):
            two = pb.InferParameter(int64_param=2)
            got = [r.infer_response async for r in stub.ModelStreamInfer(iter([infer("c", True, n=two)]))]
        assert [values(r)["sequence_index"][0] for r in got] == [0, 1, 1, 0]
        assert [r.parameters["triton_final_response"].bool_param for r in got] == [False, False, False, True]

    run(main())


def test_leaving_the_stream_ends_its_requests_and_a_limit_holds() -> None:
    async def main() -> None:
        front = FakeFront()
        front.events = [Delta("a", (5,), 0), asyncio.Event()]
        async with door(front, stream_requests_max=2) as (stub, _):
            call = stub.ModelStreamInfer()
            for name in ("a", "b"):
                await call.write(infer(name, stream=True))
                assert (await call.read()).infer_response.id == name
            await call.write(infer("c", stream=True))
            refused = await call.read()
            assert refused.error_message == "stream: 2 requests under way; at most 2"
            assert refused.infer_response.id == "c"
            assert refused.infer_response.parameters["retry_after_ms"].int64_param > 0
            assert not front.left.is_set()
            call.cancel()
            await asyncio.wait_for(front.left.wait(), 5)

    run(main())


def test_keys_are_asked_for_and_liveness_is_not() -> None:
    async def main() -> None:
        async with door(FakeFront()) as (stub, _):
            wrong = (("authorization", "Bearer wrong"),)
            assert (await stub.ServerLive(pb.ServerLiveRequest(), metadata=wrong)).live
            assert (await stub.ServerReady(pb.ServerReadyRequest(), metadata=wrong)).ready
            for call in (
                stub.ModelInfer(infer(), metadata=wrong),
                stub.ModelMetadata(pb.ModelMetadataRequest(name="m"), metadata=wrong),
                stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m"), metadata=wrong),
                stub.ModelStreamInfer(iter([infer()]), metadata=wrong).read(),
            ):
                assert (await failure(call)).code() is grpc.StatusCode.UNAUTHENTICATED

    run(main())


def test_models_are_told_of() -> None:
    async def main() -> None:
        front = FakeFront()
        async with door(front) as (stub, channel):
            config = (await stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
            assert config.dynamic_batching.default_priority_level == 6
            assert config.parameters["context_len_max"].string_value == "8"
            (told,) = (await stub.ModelStatistics(pb.ModelStatisticsRequest())).model_stats
            assert (told.name, told.version, told.inference_count, told.execution_count) == ("m", "1", 12, 4)
            assert (told.batch_stats[0].batch_size, told.batch_stats[0].compute_input.ns) == (3, 8)
            await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m"))
            (entry,) = (await stub.RepositoryIndex(pb.RepositoryIndexRequest())).models
            assert (entry.state, entry.reason) == ("UNAVAILABLE", "unloaded")
            assert not (await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models
            named = pb.RepositoryIndexRequest(repository_name="r")
            assert (await failure(stub.RepositoryIndex(named))).code() is grpc.StatusCode.INVALID_ARGUMENT
            for method in ("ModelInfer", "ModelMetadata", "RepositoryIndex", "LogSettings"):
                error = await failure(channel.unary_unary(f"/{SERVICE}/{method}")(b"\x0a\x02\xff\xfe\xff"))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            front.ready = False
            assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready

    run(main())

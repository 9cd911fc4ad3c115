"""Clients that know nothing of Shoal's code: by reflection, by health checks, over plain NATS, by command."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import grpc
import nats
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc  # type: ignore[import-untyped]

from gateway.admission import request_id_of
from shard_worker.fake_model import oracle
from tests.e2e.rig import ROOT, Answer, Running, ask, call
from tests.sim.clients import NUM_LAYERS


class GenericClient:
    """Calls methods by name with JSON, as grpcurl does; all it knows comes from the server."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self.database)

    def call(self, service: str, method: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
        described = self._pool.FindServiceByName(service).FindMethodByName(method)
        request = message_factory.GetMessageClass(described.input_type)()
        reply = message_factory.GetMessageClass(described.output_type)
        json_format.ParseDict(asked, request)
        stub = self._channel.unary_stream(
            f"/{service}/{method}", type(request).SerializeToString, reply.FromString
        )
        return [json_format.MessageToDict(m, preserving_proto_field_name=True) for m in stub(request)]


@pytest.fixture
def generic(calm: Running) -> Any:
    with grpc.insecure_channel(calm.deployment.address) as channel:
        yield GenericClient(channel)


def test_reflection_is_enough_to_ask(generic: GenericClient) -> None:
    services = set(generic.database.get_services())
    assert services >= {"shoal.v1.Inference", "grpc.health.v1.Health"}
    (models,) = generic.call("shoal.v1.Inference", "ListModels", {})
    (model,) = models["models"]
    assert (model["name"], model["vocab_size"], model["chat"]) == ("fake", 512, True)
    asked = {"token_ids": {"ids": [1, 2, 3]}, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    events = generic.call("shoal.v1.Inference", "Generate", asked)
    assert events[0]["accepted"]["prompt_tokens"] == 3
    ids = [i for e in events for i in e.get("delta", {}).get("ids", ())]
    assert ids == oracle((1, 2, 3), 0, 0.0, 8, NUM_LAYERS)
    assert events[-1]["finished"]["reason"] == "length"


def test_health_is_told(calm: Running, generic: GenericClient) -> None:
    for service in ("", "shoal.v1.Inference"):
        assert generic.call("grpc.health.v1.Health", "Check", {"service": service}) == [{"status": "SERVING"}]
    with pytest.raises(grpc.RpcError) as unknown:
        generic.call("grpc.health.v1.Health", "Check", {"service": "nonsense"})
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    with grpc.insecure_channel(calm.deployment.address) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_any_nats_client_can_read_results(calm: Running, tmp_path: Path) -> None:
    """With nothing but the schema from `proto/`."""
    compiled = tmp_path / "request.bin"
    flags = [f"-I{ROOT / 'proto'}", f"--descriptor_set_out={compiled}", "request.proto"]
    assert protoc.main(["protoc", *flags]) == 0
    pool = DescriptorPool()
    (file,) = FileDescriptorSet.FromString(compiled.read_bytes()).file
    pool.Add(file)
    record_class = message_factory.GetMessageClass(pool.FindMessageTypeByName("shoal.internal.v1.Record"))

    async def life() -> tuple[Answer, Any]:
        async with calm.client() as client:
            answer = await ask(client, Answer(call([90, 91], 12)))
        connection = await nats.connect(calm.deployment.nats_url)
        stored = await connection.jetstream().get_last_msg("RESULTS", f"shoal.res.{answer.request_id}")
        await connection.close()
        return answer, stored

    answer, stored = calm.run(life())
    record = json_format.MessageToDict(record_class.FromString(stored.data))
    assert record["terminal"]["reason"] == "length"
    assert record["terminal"]["outputIds"] == answer.ids
    assert record["terminal"]["usage"] == {"promptTokens": 2, "outputTokens": 12}


def test_the_command_streams_an_answer(calm: Running, tmp_path: Path) -> None:
    held = tmp_path / "held"

    async def shoal(*words: str) -> str:
        command = (sys.executable, "-m", "shoal", *words, "--run-dir", str(calm.deployment.run_dir))
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
        out, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        return out.decode()

    async def life() -> None:
        async with calm.client() as client:
            ids = await client.tokenize("hello")
        made = oracle(ids, 0, 0.0, 6, NUM_LAYERS)
        words = ("generate", "hello", "--temperature", "0", "--max-tokens", "6", "--ids")
        assert (await shoal(*words)).split() == [str(i) for i in made]
        assert "fake  context 4096  vocabulary 512  chat" in await shoal("models")
        await shoal(*words, "--client-key", "of the command")
        request_id = request_id_of("", "of the command")
        assert (await shoal("resume", request_id, "--ids")).split() == [str(i) for i in made]
        held.write_text(" ".join(map(str, made[:2])))
        rest = await shoal("resume", request_id, "--ids", "--held", str(held))
        assert rest.split() == [str(i) for i in made[2:]]

    calm.run(life())


def test_an_interrupt_ends_an_answer_and_not_the_chat(calm: Running) -> None:
    async def life() -> None:
        words = ["-m", "shoal", "chat", "--run-dir", str(calm.deployment.run_dir), "--ignore-eos"]
        words += ["--max-tokens", "100"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"hello\n")
        assert await process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert (await process.stderr.readline()).startswith(b"[cancelled: ")
        process.stdin.write(b"again\n/quit\n")
        _, said = await process.communicate()
        assert said.startswith(b"[length: 100 tokens") and process.returncode == 0

    calm.run(life())

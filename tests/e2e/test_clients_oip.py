"""The Open Inference Protocol as its own clients speak it, before real processes."""

import asyncio
import json
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE
from base64 import b64decode, b64encode

import pytest

from chassis.messages.request import Reason
from gateway.admission import request_id_of
from tests.e2e.rig import ROOT, Running, until
from tests.e2e.test_clients_openai import PYTHON, ended, script

KSERVE = ROOT / ".clients-kserve" / "bin" / "python"
SERVICE = "inference.GRPCInferenceService"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make .clients/.ready")


def test_tritonclient_over_grpc(calm: Running) -> None:
    async def life() -> None:
        said = json.loads(await script("oip_grpc.py", calm.deployment.addresses[0]))
        assert said["inferences"] > said["executions"]
        bus = await calm.bus()
        try:
            record = await ended(bus, request_id_of("", "left-by-triton"))
        finally:
            await bus.close()
        assert record.reason is Reason.CANCELLED and len(record.output_ids) < 3000

    calm.run(life())


def test_tritonclient_over_http(calm: Running) -> None:
    async def life() -> None:
        await script("oip_http.py", calm.deployment.http_addresses[0])

    calm.run(life())


@pytest.mark.skipif(not KSERVE.exists(), reason="make .clients-kserve/.ready")
def test_the_kserve_sdk(calm: Running) -> None:
    async def life() -> None:
        where = calm.deployment.addresses[0], calm.deployment.http_addresses[0]
        await script("oip_kserve.py", *where, python=KSERVE)

    calm.run(life())


def test_grpcurl_by_reflection(calm: Running) -> None:
    address = calm.deployment.addresses[0]

    async def ask(*words: str, data: object = None) -> str:
        body = () if data is None else ("-d", json.dumps(data))
        argv = (str(PYTHON.parent / "grpcurl"), "-plaintext", *body, address, *words)
        process = await asyncio.create_subprocess_exec(*argv, stdout=PIPE, stderr=PIPE)
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()

    async def life() -> None:
        assert {SERVICE, "shoal.v1.Inference"} <= set((await ask("list")).split())
        methods = (await ask("list", SERVICE)).split()
        assert f"{SERVICE}.ModelStreamInfer" in methods and len(methods) == 20
        assert "map<string, .inference.InferParameter> parameters = 4;" in await ask(
            "describe", "inference.ModelInferRequest"
        )
        health = await ask("grpc.health.v1.Health/Check", data={"service": SERVICE})
        assert json.loads(health) == {"status": "SERVING"}
        prompt = {"bytes_contents": [b64encode(b"One").decode()]}
        asked = {
            "model_name": "fake",
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": ["1"], "contents": prompt}],
            "parameters": {"max_tokens": {"int64_param": 5}, "ignore_eos": {"bool_param": True}},
        }
        answer = json.loads(await ask(f"{SERVICE}/ModelInfer", data=asked))
        outputs = {output["name"]: output for output in answer["outputs"]}
        assert outputs["text_output"]["shape"] == ["1"]
        ((reason,),) = outputs["finish_reason"]["contents"].values()
        assert b64decode(reason) == b"length"

    calm.run(life())


def test_unloading_is_refusing_at_all_gateways(calm: Running) -> None:
    """Over REST at one, seen at the other; what runs goes on."""
    first, second = (f"http://{address}" for address in calm.deployment.http_addresses)

    def post(url: str, body: object) -> int:
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    async def asked(base: str) -> int:
        body = {"text_input": "One", "max_tokens": 2}
        return await asyncio.to_thread(post, f"{base}/v2/models/fake/generate", body)

    async def life() -> None:
        for base in (first, second):
            assert await asked(base) == 200
        assert await asyncio.to_thread(post, f"{first}/v2/repository/models/fake/unload", {}) == 200
        try:

            async def refused() -> bool:
                return [await asked(first), await asked(second)] == [503, 503]

            await until(refused, "both refuse")
        finally:
            assert await asyncio.to_thread(post, f"{second}/v2/repository/models/fake/load", {}) == 200

        async def served() -> bool:
            return [await asked(first), await asked(second)] == [200, 200]

        await until(served, "both serve")

    calm.run(life())

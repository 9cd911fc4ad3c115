"""Files and batches before real processes: the openai package, and whoever drives a batch killed amid it."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from chassis import batch_subjects, subjects
from chassis.batch_layout import BATCHES
from chassis.bus import Bus
from chassis.errors import BusError
from chassis.job_subjects import answers
from chassis.messages.batches import Batch, BatchState, parse_batch
from tests.e2e.rig import ROOT, Running, fake_plan, running, until
from tests.e2e.test_clients_openai import PYTHON, script
from tests.gateway import http_client

URL = "/v1/completions"
COUNT = 900


@pytest.fixture(scope="module")
def shoal(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    plan = fake_plan(tmp_path_factory.mktemp("batches"), "--fake-step-cost-us", "1000", gateways=2)
    with running(runner, plan) as made:
        yield made


@pytest.mark.skipif(not PYTHON.exists(), reason="make .clients/.ready")
def test_the_openai_package(shoal: Running) -> None:
    shoal.run(script("openai_batches.py", f"http://{shoal.deployment.http_addresses[0]}/v1"))


def line(i: int) -> bytes:
    body = {"model": "fake", "prompt": [i % 256, 7], "max_tokens": 30 + i % 4, "seed": i, "ignore_eos": True}
    return json.dumps({"custom_id": f"é{i}", "method": "POST", "url": URL, "body": body}).encode()


async def begin(address: str, data: bytes) -> str:
    form = (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        + data
        + b"\r\n--x--\r\n"
    )
    kind = {"content-type": "multipart/form-data; boundary=x"}
    file = (await http_client.ask(address, "POST", "/v1/files", form, kind)).json()
    asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    made = (await http_client.ask(address, "POST", "/v1/batches", asked)).json()
    return str(made["id"])


async def record(bus: Bus, batch_id: str) -> Batch | None:
    try:
        stored = await bus.last(BATCHES, batch_subjects.batch("", batch_id))
    except BusError:
        return None
    return None if stored is None else parse_batch(stored.data)


async def answered(bus: Bus, batch_id: str, count: int) -> bool:
    try:
        return len(await bus.read(subjects.ANSWERS, answers("", batch_id), 1, count)) == count
    except BusError:
        return False


async def read(address: str, file_id: str | None) -> list[dict[str, object]]:
    if file_id is None:
        return []
    answer = await http_client.ask(address, "GET", f"/v1/files/{file_id}/content")
    assert answer.status == 200
    return [json.loads(text) for text in answer.body.splitlines()]


def test_whoever_drives_a_batch_is_killed_amid_it(shoal: Running) -> None:
    """Each custom_id has exactly one line in both files together."""

    async def life() -> None:
        address = shoal.deployment.http_addresses[1]
        batch_id = await begin(address, b"\n".join(line(i) for i in range(COUNT)))
        bus = await shoal.bus()
        drivers: list[str] = []

        async def is_driven_anew() -> bool:
            batch = await record(bus, batch_id)
            if batch is None or batch.driver in drivers or batch.state is BatchState.VALIDATING:
                return False
            assert batch.state is BatchState.IN_PROGRESS, "it is too short for this test"
            return await answered(bus, batch_id, 50 * (1 + len(drivers)))

        for victims in (("gateway", "gateway-1"), ("nats",)):
            await until(is_driven_anew, "it is driven", 40.0)
            batch = await record(bus, batch_id)
            assert batch is not None
            drivers.append(batch.driver)
            for name in victims:  # one of the gateways drives it
                await shoal.kill(name)

        async def over() -> bool:
            batch = await record(bus, batch_id)
            return batch is not None and batch.state.over

        await until(over, "it is over", 60.0)
        batch = await record(bus, batch_id)
        assert batch is not None and batch.state is BatchState.COMPLETED
        assert (batch.total, batch.tally.completed, batch.tally.failed) == (COUNT, COUNT, 0)
        told = await read(address, batch.output_file_id) + await read(address, batch.error_file_id)
        found = Counter(str(one["custom_id"]) for one in told)
        assert found == Counter(f"é{i}" for i in range(COUNT))
        await bus.close()

    shoal.run(life(), 120)


async def shoal_batch(*words: str, code: int = 0) -> tuple[str, str]:
    """What the command said, and what beside it."""
    argv = (sys.executable, "-m", "shoal", "batch", *words)
    process = await asyncio.create_subprocess_exec(*argv, stdout=PIPE, stderr=PIPE, cwd=ROOT)
    out, err = await process.communicate()
    assert process.returncode == code, err.decode()
    return out.decode().strip(), err.decode()


def test_the_command(shoal: Running, tmp_path: Path) -> None:
    where = ("--url", f"http://{shoal.deployment.http_addresses[0]}")

    async def life() -> None:
        good, bad, results = tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / "results.jsonl"
        good.write_bytes(b"\n".join(line(i) for i in range(30)))
        bad.write_bytes(line(1) + b"\n" + line(1))
        batch_id, beside = await shoal_batch("submit", str(good), "--wait", *where)
        assert "] 30/30 completed" in beside
        said, _ = await shoal_batch("status", batch_id, *where)
        assert said == f"{batch_id}  completed  30 completed, 0 failed of 30"
        await shoal_batch("results", batch_id, "-o", str(results), *where)
        told = [json.loads(text)["custom_id"] for text in results.read_text().splitlines()]
        assert sorted(told) == sorted(f"é{i}" for i in range(30))
        assert not results.with_name("results.jsonl.part").exists()
        _, beside = await shoal_batch("submit", str(bad), "--wait", *where, code=1)
        assert "line 2: custom_id: 'é1' is line 1 too" in beside
        assert batch_id in (await shoal_batch("status", *where))[0]
        _, beside = await shoal_batch("cancel", batch_id, *where, code=1)
        assert "it is completed" in beside
        _, beside = await shoal_batch("status", "batch_none", *where, code=1)
        assert "HTTP 404" in beside
        odd = tmp_path / "odd.jsonl"
        odd.write_bytes(line(1) + b"\n" + line(2).replace(b'"fake"', b'"fkae"'))
        odd_id, beside = await shoal_batch("submit", str(odd), *where)
        assert "model 'fkae' is not served now" in beside and "'fake'" not in beside
        await shoal_batch("cancel", odd_id, *where)
        _, beside = await shoal_batch("submit", str(tmp_path / "none"), *where, code=1)
        assert "No such file" in beside

    shoal.run(life())

"""Receipts and metrics of real processes: both say the same, whatever became of the requests."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import nats
import pytest

from chassis import subjects
from chassis.ids import RequestId
from chassis.wire import usage_pb2
from shoal.client import Accepted, Finished, ShoalError
from tests.chassis.test_metrics import parse
from tests.e2e.receipts import checked_receipts
from tests.e2e.rig import (
    ROOT,
    Answer,
    Running,
    amid,
    ask,
    call,
    draw_calls,
    fake_plan,
    params,
    running,
    until,
)

MODEL = 'gen_ai_request_model="fake"'


@pytest.fixture(scope="module")
def calm(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One in which nobody else leaves behind what nobody takes."""
    with running(runner, fake_plan(tmp_path_factory.mktemp("usage"), gateways=2)) as shoal:
        yield shoal


async def get(address: str, path: str) -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def samples_of(shoal: Running, name: str) -> dict[str, float]:
    status, body = await get(shoal.deployment.metrics_addresses[name], "/metrics")
    assert status == 200
    return parse(body)


async def nothing() -> None:
    pass


async def some_of_each(shoal: Running) -> None:
    """Requests that end in every way that a client can bring about."""
    async with shoal.client() as client:
        await amid(client, draw_calls(71, 24), nothing)
        cancelled = Answer(call([3, 1], 2000))

        async def cancel() -> None:
            await until(lambda: len(cancelled.ids) > 2, "it runs")
            await client.cancel(cancelled.request_id)

        await asyncio.gather(ask(client, cancelled), cancel())
        late = await ask(client, Answer(call([8, 9, 7], 3000, timeout_ms=300)))
        assert late.end is not None and late.end.reason == "deadline"
        async for _ in client.generate([5, 6, 7], replace(params(call([5], 8, temperature=1.0)), n=3)):
            pass
        prompt = [11, *range(1, 90)]
        for tail in ([], [5]):
            await ask(client, Answer(call([*prompt, *tail], 4)))
        try:
            await ask(client, Answer(call([5], 0)))
        except ShoalError as error:
            assert error.code == "INVALID_ARGUMENT"
    bus = await shoal.bus()
    await bus.append(subjects.request("fake", 5, RequestId("garbage1")), b"\xff\xffno request")
    await bus.close()


def test_receipts_agree_with_records_and_with_metrics(calm: Running) -> None:
    async def life() -> None:
        await some_of_each(calm)
        bus = await calm.bus()
        try:
            receipts = list((await checked_receipts(bus)).values())
        finally:
            await bus.close()
        told = await samples_of(calm, "batcher")
        ends = Counter(r.reason.value for r in receipts)
        assert {"length", "cancelled", "deadline", "failed"} <= ends.keys()
        for reason, count in ends.items():
            assert told[f'shoal_requests_total{{reason="{reason}",{MODEL}}}'] == count
        tokens = {
            "input": sum(r.usage.prompt_tokens for r in receipts),
            "cached": sum(r.usage.cached_tokens for r in receipts),
            "output": sum(r.usage.output_tokens for r in receipts),
            "recomputed": sum(r.timings.recomputed_tokens for r in receipts),
        }
        assert tokens["cached"] > 0 and tokens["output"] > 0
        for kind, count in tokens.items():
            assert told[f'shoal_tokens_total{{gen_ai_token_type="{kind}",{MODEL}}}'] == count
        assert told[f"shoal_request_seconds_count{{{MODEL}}}"] == len(receipts)
        computed_s = sum(sum(r.timings.stage_compute_us) for r in receipts) / 1e6
        busy_s = sum(told[f'shoal_stage_busy_seconds_total{{stage="{stage}"}}'] for stage in "01")
        assert 0 < computed_s <= busy_s, "no more is shared out than was computed"

    calm.run(life())


def test_choices_have_receipts_of_their_own_under_one_call(calm: Running) -> None:
    async def life() -> None:
        ids: dict[int, str] = {}
        tokens = 0
        async with calm.client() as client:
            asked = replace(params(call([31, 32], 6, temperature=1.0)), n=3)
            async for event in client.generate([31, 32], asked):
                if isinstance(event, Accepted):
                    ids[event.choice] = event.request_id
                elif isinstance(event, Finished):
                    tokens += event.output_tokens
        bus = await calm.bus()
        try:
            receipts = await checked_receipts(bus)
        finally:
            await bus.close()
        mine = {r.choice: r for r in receipts.values() if r.call_id == ids[0]}
        assert {choice: r.request_id for choice, r in mine.items()} == ids
        assert sum(r.usage.output_tokens for r in mine.values()) == tokens
        assert all(len(r.timings.stage_compute_us) == 2 and r.attempts == 1 for r in mine.values())

    calm.run(life())


def test_every_service_says_that_it_lives_and_is_ready(calm: Running) -> None:
    async def life() -> None:
        addresses = calm.deployment.metrics_addresses
        assert {"kvstore", "worker-0", "worker-1", "batcher", "gateway", "gateway-1"} <= addresses.keys()
        for name, address in addresses.items():
            assert await get(address, "/live") == (200, "live\n"), name
            assert (await get(address, "/ready"))[0] == 200, name
            samples = parse((await get(address, "/metrics"))[1])
            assert samples["shoal_ready"] == 1 and samples["process_cpu_seconds_total"] > 0, name
        batcher = await samples_of(calm, "batcher")
        for name in ("shoal_requests_waiting", "shoal_requests_running", "shoal_kv_cache_usage_ratio"):
            assert batcher[f"{name}{{{MODEL}}}"] >= 0
        assert batcher["shoal_pipeline_standing"] == 1
        gateway = await samples_of(calm, "gateway")
        assert any(name.startswith("gen_ai_server_time_to_first_token_seconds_sum") for name in gateway)
        assert (await samples_of(calm, "worker-0"))["shoal_stage_steps_total"] > 0
        assert (await samples_of(calm, "kvstore"))["shoal_kvstore_calls_total"] > 0

    calm.run(life())


def test_any_nats_client_reads_them(calm: Running) -> None:
    """With the generated message and a durable consumer, as whoever bills would have it."""

    async def life() -> None:
        bus = await calm.bus()
        async with calm.client() as client:
            await ask(client, Answer(call([51], 5)))
        expected = await checked_receipts(bus)
        await bus.close()
        connection = await nats.connect(calm.deployment.nats_url)
        try:
            subscription = await connection.jetstream().pull_subscribe(
                "shoal.use.*.fake.>", durable="billing", stream="USAGE"
            )
            found: dict[str, usage_pb2.Receipt] = {}
            while len(found) < len(expected):
                for message in await subscription.fetch(100, timeout=5):
                    receipt = usage_pb2.Receipt.FromString(message.data)
                    assert receipt.request_id not in found
                    found[receipt.request_id] = receipt
                    await message.ack()
        finally:
            await connection.close()
        for request_id, receipt in found.items():
            assert receipt.output_tokens == expected[RequestId(request_id)].usage.output_tokens

    calm.run(life())


def test_the_command_sums_up(calm: Running) -> None:
    async def life() -> int:
        async with calm.client() as client:
            await ask(client, Answer(call([41], 5)))
        bus = await calm.bus()
        try:
            return len(await checked_receipts(bus))
        finally:
            await bus.close()

    count = calm.run(life())
    words = [sys.executable, "-m", "shoal", "usage", "--by", "model,day", "--csv"]
    done = subprocess.run(
        [*words, "--nats", calm.deployment.nats_url], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(",") for line in done.stdout.splitlines()]
    assert rows[0][:3] == ["model", "day", "requests"]
    assert sum(int(row[2]) for row in rows[1:]) == count

"""Jobs over NATS and real processes: each has one answer, the oracle's, whoever is killed meanwhile."""

import asyncio
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chassis import subjects
from chassis.job_subjects import JobName, answer, job
from chassis.messages.jobs import STATUS
from chassis.wire import jobs_pb2
from shoal import readiness
from shoal.dead_words import letters, retry
from tests.e2e.job_rig import PROTOBUF, Tiny, all_answered, draw_jobs, storm
from tests.e2e.rig import ROOT, Running, call, fake_plan, newcomer, registered, running, until

ONCE = ("gateway", "batcher", "nats", "worker-0", "kvstore")
EVERYBODY = (*ONCE, "gateway-1", "worker-1")
EXAMPLES = ROOT / "examples"
NODE_MODULES = EXAMPLES / "node-nats" / "node_modules"
RUNS_STEPS = 20  # between two deaths: a part of its 500, more than are in flight when a worker dies
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shoal(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(runner, fake_plan(tmp_path_factory.mktemp("jobs"), gateways=2)) as made:
        yield made


async def said_by(*command: str) -> str:
    """What a process printed; it ends well."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()


def test_everyone_dies_once_amid_300_jobs(shoal: Running) -> None:
    wanted = draw_jobs(1, 300)

    async def kill(number: int) -> None:
        await asyncio.sleep(0.05)
        await shoal.kill(ONCE[number])

    found = shoal.run(storm(shoal, [wanted[i::5] for i in range(5)], kill))
    for tiny in wanted:
        tiny.check(found[answer(tiny.name)])


def test_a_job_that_met_three_deaths_is_dead_and_can_be_tried_anew(shoal: Running) -> None:
    tiny = Tiny(JobName("", "poison", "k"), call([1, 2, 3], 500))
    anew = Tiny(tiny.name.next, tiny.call)

    async def steps() -> float:
        batcher = shoal.deployment.metrics_addresses["batcher"]
        return await readiness.value_of(batcher, "shoal_steps_total") or 0.0

    async def killed() -> None:
        bus = await shoal.bus()

        async def is_over() -> bool:
            return await bus.last(subjects.ANSWERS, answer(tiny.name)) is not None

        async def runs_or_is_over() -> bool:
            return await is_over() or await steps() >= made + RUNS_STEPS

        made = await steps()
        await bus.append(job(tiny.name), tiny.body, headers=PROTOBUF)
        while not await is_over():
            await until(runs_or_is_over, "it runs in a pipeline: else a death is none of its")
            before = await registered(bus, subjects.WORKERS)
            await shoal.kill("worker-0")
            await until(newcomer(bus, subjects.WORKERS, before), "the new worker registers")
            made = await steps()
        stored = (await all_answered(bus, [tiny]))[answer(tiny.name)]
        said = jobs_pb2.Answer.FromString(stored.data)
        assert said.status_code == 500 and "3 worker" in said.error
        await bus.close()

    async def tried_anew() -> None:
        bus = await shoal.bus()
        (letter,) = [found for found in await letters(bus) if ".poison." in found.subject]
        dead = (sys.executable, "-m", "shoal", "batch", "dead")
        where = ("--nats", shoal.deployment.nats_url)
        shown = json.loads(await said_by(*dead, "list", "--json", *where))
        assert shown["subject"] == letter.subject == job(tiny.name)
        assert any("deaths 2 of workers" in entry for entry in shown["history"])
        assert "terminal" in shown["history"][-1] and "3 worker" in shown["error"]
        assert job(anew.name) in await said_by(*dead, "retry", letter.subject, *where)
        assert await retry(bus, letter) == job(anew.name), "twice is once"

        async def answered() -> bool:
            return await bus.last(subjects.ANSWERS, answer(anew.name)) is not None

        await until(answered, "the second try is answered", 60.0)
        stored = await bus.last(subjects.ANSWERS, answer(anew.name))
        assert stored is not None
        anew.check(stored)
        await bus.close()

    shoal.run(killed())
    shoal.run(tried_anew())


@pytest.mark.parametrize("runtime", ["python", "node"])
def test_the_examples_get_their_answers(shoal: Running, runtime: str) -> None:
    if runtime == "node" and (shutil.which("node") is None or not NODE_MODULES.is_dir()):
        pytest.skip("needs node and npm: make examples/node-nats/node_modules/.ready")
    python = (sys.executable, str(EXAMPLES / "jobs.py"))
    command = python if runtime == "python" else ("node", str(EXAMPLES / "node-nats" / "jobs.js"))
    said = shoal.run(said_by(*command, shoal.deployment.nats_url, "fake"))
    assert sorted(text.split()[0] for text in said.splitlines()) == ["one", "three", "two"]
    assert "failed" not in said


@pytest.mark.slow
def test_10_000_jobs_amid_random_kills_of_every_service(shoal: Running, record_property: Record) -> None:
    """One that met three deaths is dead, and says so; tried anew it has the answer that it would have had."""
    wanted = draw_jobs(2, 10_000, "storm")
    rng = random.Random(2)
    killed: list[str] = []

    async def kill(number: int) -> None:
        for name in rng.sample(EVERYBODY, rng.choice((1, 1, 2))):
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            killed.append(name)
            await shoal.kill(name)

    async def life() -> None:
        began = time.monotonic()
        found = await storm(shoal, [wanted[i::40] for i in range(40)], kill)
        record_property("jobs.10000_with_kills_s", round(time.monotonic() - began, 1))
        record_property("jobs.killed", {name: killed.count(name) for name in EVERYBODY})
        bus = await shoal.bus()
        dead = [tiny for tiny in wanted if found[answer(tiny.name)].headers[STATUS] == "500"]
        buried = {letter.subject: letter for letter in await letters(bus) if ".storm." in letter.subject}
        assert set(buried) == {job(tiny.name) for tiny in dead}
        record_property("jobs.dead", len(dead))
        for tiny in wanted:
            if tiny not in dead:
                tiny.check(found[answer(tiny.name)])
        for letter in buried.values():
            await retry(bus, letter)
        again = [Tiny(tiny.name.next, tiny.call) for tiny in dead]
        for tiny in again:

            async def answered(tiny: Tiny = tiny) -> bool:
                return await bus.last(subjects.ANSWERS, answer(tiny.name)) is not None

            await until(answered, "a second try is answered", 60.0)
            stored = await bus.last(subjects.ANSWERS, answer(tiny.name))
            assert stored is not None
            tiny.check(stored)
        await bus.close()

    shoal.run(life(), 600)


@pytest.mark.slow
def test_jobs_a_second(runner: asyncio.Runner, tmp_path: Path, record_property: Record) -> None:
    """Nobody dies, and the model costs nothing; one gateway, one stage."""
    plan = fake_plan(tmp_path, "--fake-step-cost-us", "0", gateways=1, stages=1)
    with running(runner, plan) as shoal:

        async def life() -> None:
            wanted = draw_jobs(3, 5_000, "rate")

            async def nobody(number: int) -> None:
                pass

            await storm(shoal, [draw_jobs(4, 200, "warm")], nobody)
            began_ns = time.time_ns()
            found = await storm(shoal, [wanted], nobody)
            took_s = (max(stored.stored_at_ns for stored in found.values()) - began_ns) / 1e9
            record_property("jobs.per_s", round(len(wanted) / took_s))

        shoal.run(life(), 300)


def test_garbage_on_the_subjects_of_jobs_is_told_so_and_kills_nothing(shoal: Running) -> None:
    """From whoever speaks NATS: bytes that are no text in subjects and headers, nesting, types, sizes."""
    rng = random.Random(4)
    line = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions"}
    bodies = [
        b"",
        b"\xff" * 300,
        b"[" * 50_000,
        b'{"a":' * 5_000,
        b"null",
        json.dumps(line | {"body": {"messages": [{"role": "user", "content": None}]}}).encode(),
        json.dumps(line | {"body": {"messages": "\ud800"}}).encode(),
        json.dumps(line | {"body": {"model": 7, "messages": []}}).encode(),
        json.dumps(line | {"custom_id": ["x"], "body": {}}).encode(),
        json.dumps(line | {"body": {"messages": [{"role": "user", "content": "x" * 600_000}]}}).encode(),
        json.dumps(line | {"body": {"n": 10**30, "messages": [{"role": "user", "content": "x"}]}}).encode(),
        *(rng.randbytes(rng.randrange(400)) for _ in range(40)),
    ]
    headers = [
        "",
        "Content-Type: application/x-protobuf",
        "Shoal-Timeout-Ms: \xb2",
        "traceparent: 00-zz",
        "\x00: \x00",
    ]

    async def life() -> None:
        address = shoal.deployment.nats_url.removeprefix("nats://")
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
        count = 0
        for k, body in enumerate(bodies):
            head = b"NATS/1.0\r\n" + headers[k % len(headers)].encode("latin-1") + b"\r\n\r\n"
            for token in (b"k%d" % k, b"\xff\xfe%d" % k, "ü%d".encode() % k, b"%%%d" % k):
                writer.write(
                    b"HPUB shoal.job.-.garbage.%s %d %d\r\n" % (token, len(head), len(head) + len(body))
                )
                writer.write(head + body + b"\r\n")
                count += 1
        writer.write(b"PING\r\n")
        await writer.drain()
        await reader.readuntil(b"PONG")
        bus = await shoal.bus()
        pids = shoal.deployment.pids()

        async def taken_away() -> bool:
            return not await bus.read(subjects.JOBS, "shoal.job.-.garbage.*", 1, 1)

        await until(taken_away, "garbage is taken away", 30.0)
        found = await bus.read(subjects.ANSWERS, "shoal.ans.-.garbage.*", 1, 1000)
        assert len(found) == count
        assert {stored.headers[STATUS] for stored in found} <= {"400", "404"}
        (tiny,) = draw_jobs(5, 1, "after")
        await bus.append(job(tiny.name), tiny.body, headers=PROTOBUF)
        tiny.check((await all_answered(bus, [tiny]))[answer(tiny.name)])
        assert shoal.deployment.pids() == pids
        await bus.close()
        writer.close()

    shoal.run(life())

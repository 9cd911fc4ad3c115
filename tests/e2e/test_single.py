"""All services in one process: what it answers, how it ends, and that it does not grow."""

import asyncio
import gc
import json
import signal
import sys
import tracemalloc
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from chassis import log
from chassis.edge_layout import EDGE_LAYOUT
from chassis.ports import Ports
from chassis.service import Stop
from shoal import single
from shoal.client import AsyncClient, Params
from shoal.door import DoorError
from shoal.door import ask as ask_door
from shoal.launcher import LaunchError, Plan, read_state
from shoal.single import Single
from tests.e2e.rig import PATIENCE_S, ROOT, Answer, ask, call, draw_calls, until
from tests.sim.clients import NUM_LAYERS

TIMERS_MAX = 20  # of a broker at rest; it has a dozen
FREE = ("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")


def plan_of(*worker: str, gateway: tuple[str, ...] = FREE, batcher: tuple[str, ...] = ()) -> Plan:
    layers = ("--fake-layers", str(NUM_LAYERS))
    return Plan(
        model="fake",
        stages=1,
        flags={"shard_worker": (*layers, *worker), "gateway": gateway, "batcher": batcher},
    )


@asynccontextmanager
async def serving(plan: Plan) -> AsyncIterator[Single]:
    """Until the end of the block; then it must drain."""
    shoal, stop, stands = Single(plan, env={}), Stop(), asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        running = group.create_task(shoal.run(stop, stands.set))
        await stands.wait()
        yield shoal
        stop.ask()
        await running


def here(case: Callable[[], object], runner: asyncio.Runner) -> None:
    log.bind(level="warning")
    runner.run(case())  # type: ignore[arg-type]


def test_answers_are_those_of_the_model(runner: asyncio.Runner) -> None:
    """Through both doors, greedy and sampled, with what a client may ask for; nothing is left behind."""

    async def case() -> None:
        async with serving(plan_of()) as shoal, AsyncClient(shoal.address, retry=None) as client:
            answers = [Answer(c) for c in draw_calls(5, 40)]
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(ask(client, answer))
            for answer in answers:
                answer.check()
            head, body = await http(shoal.http_address, "/v1/models")
            assert head.startswith("HTTP/1.1 200") and json.loads(body)["data"][0]["id"] == "fake"
            await until(lambda: not list(shoal.broker.streams["REQUESTS"].messages()), "all are acknowledged")
            shoal.broker.check()

    here(case, runner)


async def http(address: str, path: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head, body


@pytest.mark.parametrize("name", list(single.KINDS))
def test_the_crash_of_one_is_the_crash_of_all(
    name: str, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class, make = single.KINDS[name]
    crash = asyncio.Event()

    def fragile(config: object, ports: Ports) -> object:
        service = make(config, ports)
        run = service.run

        async def breaking() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(run())
                await crash.wait()
                raise ArithmeticError("broken on purpose")

        service.run = breaking  # type: ignore[method-assign]
        return service

    monkeypatch.setitem(single.KINDS, name, (config_class, fragile))

    async def case() -> None:
        log.bind(level="off")
        shoal, stop = Single(plan_of(), env={"SHOAL_CHASSIS_LOG_LEVEL": "off"}), Stop()
        with pytest.raises(LaunchError, match=f"{name}: .*on purpose"):
            async with asyncio.timeout(PATIENCE_S):
                await shoal.run(stop, crash.set)
        assert not shoal.broker.links  # every handle is closed

    here(case, runner)


def test_memory_stays_what_it_is(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its streams are full, six hundred requests leave nothing behind. Streams are short here, so that
    they are full soon, and so are the rings of spans: how much of one is sent and gone when it is looked at
    is chance. 500 bytes kept of each request would be seen."""
    small = tuple(replace(one, msgs_max=min(one.msgs_max, 64)) for one in EDGE_LAYOUT)
    monkeypatch.setattr(single, "EDGE_LAYOUT", small)
    monkeypatch.setitem(single.DEFAULTS, "chassis", {"trace_ring_len_max": 32})

    async def case() -> None:
        blocks = ("--num-blocks", "256")
        async with serving(plan_of(*blocks)) as shoal, AsyncClient(shoal.address, retry=None) as client:
            tracemalloc.start()  # what is replaced later counts from the beginning
            try:
                await burst(client, 400)
                before = await settled_bytes(shoal)
                await burst(client, 600)
                after = await settled_bytes(shoal)
            finally:
                tracemalloc.stop()
            shoal.broker.check()
            assert after - before < 200_000, f"{after - before} bytes more after 600 requests"

    here(case, runner)


async def burst(client: AsyncClient, count: int) -> None:
    """Requests of different prompts, 16 at a time."""
    numbers = iter(range(count))

    async def one_after_the_other() -> None:
        for i in numbers:
            prompt = [i % 251, i // 251, *range(30)]
            result = await client.complete(prompt, Params(max_tokens=4, ignore_eos=True, temperature=0.0))
            assert len(result.ids) == 4

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(one_after_the_other())


async def settled_bytes(shoal: Single) -> int:
    """What is traced once nothing is under way: the broker's timers for what was delivered hold it until
    they are due, and how many there are tells how busy the machine was."""
    await until(lambda: not list(shoal.broker.streams["REQUESTS"].messages()), "all are acknowledged")
    await until(lambda: len(shoal.broker.agenda._heap) < TIMERS_MAX, "only timers that always run are left")
    for part in shoal.parts.values():
        await part.exporter.flush()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


# ---- as a user runs it -----------------------------------------------------------------------------


async def shoal_process(*words: str | Path) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shoal", *map(str, words)), cwd=ROOT, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )


async def started(folder: Path) -> Process:
    config = folder / "shoal.toml"
    config.write_text(f"[shard_worker]\nfake_layers = {NUM_LAYERS}\nfake_step_cost_us = 4000.0\n")
    words = ("--model", "fake", "--port", "0", "--http-port", "0", "--run-dir", folder, "--config", config)
    process = await shoal_process("serve", "--single", *words)
    assert process.stderr is not None
    while line := await process.stderr.readline():
        if b"serving gRPC" in line:
            return process
    raise AssertionError("it did not stand")


async def said(*words: str | Path) -> tuple[int, str, str]:
    process = await shoal_process(*words)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_a_signal_drains_it(runner: asyncio.Runner, tmp_path: Path) -> None:
    """What streams goes on to its end; the commands find it while it runs, and no more afterwards."""

    async def case() -> None:
        process = await started(tmp_path)
        try:
            code, out, _ = await said("models", "--run-dir", tmp_path)
            assert code == 0 and out.startswith("fake ")
            await the_commands_that_look(tmp_path)
            code, _, err = await said("serve", "--single", "--model", "fake", "--run-dir", tmp_path)
            assert code == 1 and "another deployment runs" in err
            addresses = read_state(tmp_path)["addresses"]
            assert isinstance(addresses, list)
            answers = [Answer(call(range(i, i + 20), 100)) for i in range(4)]
            async with AsyncClient(str(addresses[0]), retry=None) as client, asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(ask(client, answer))
                await until(lambda: all(a.ids for a in answers), "all streams begin")
                process.send_signal(signal.SIGTERM)
            for answer in answers:
                answer.check()
            _, err_bytes = await process.communicate()
            assert process.returncode == 0, err_bytes.decode()
            lines = err_bytes.decode().splitlines()
            assert lines[-1] == "drained" and not any("crashed" in line for line in lines)
            ended = [json.loads(line)["service"] for line in lines if '"event":"ended"' in line]
            assert ended == ["gateway", "batcher", "shard_worker", "kvstore"]
            with pytest.raises(LaunchError):
                read_state(tmp_path)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    runner.run(asyncio.wait_for(case(), PATIENCE_S))


async def the_commands_that_look(folder: Path) -> None:
    """They have no bus to connect to: the process answers them at its door."""
    code, out, err = await said("generate", "Hello", "--max-tokens", "5", "--run-dir", folder)
    assert code == 0 and out
    request_id = next(line for line in err.splitlines() if line.startswith("request ")).split()[1]
    found = [await said(word, "--run-dir", folder) for word in ("stats", "usage", "cache")]
    assert [code for code, _, _ in found] == [0, 0, 0]
    stats, usage, cache = (out for _, out, _ in found)
    assert stats.startswith("model fake, 1 batcher") and "requests ended: 1 " in stats
    assert usage.splitlines()[0].startswith("tenant") and " 1 " in usage
    assert cache.startswith("kvstore ") and "blocks of 16 tokens" in cache
    code, out, _ = await said("why", request_id, "--run-dir", folder)
    assert code == 0 and "time to first token" in out
    code, _, err = await said("stats", "none", "--json", "--run-dir", folder)
    assert code == 1
    assert (folder / "door").stat().st_mode & 0o777 == 0o600
    for words in (["up"], ["stats", "--nonsense"], ["why"]):
        with pytest.raises(DoorError, match="not a command that looks"):
            await ask_door(folder / "door", words)


def test_what_cannot_begin_says_why(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def case() -> None:
        words = ("serve", "--single", "--run-dir", tmp_path, "--port", "0", "--http-port", "0")
        code, _, err = await said(*words, "--model", tmp_path / "none.gguf")
        assert code == 1 and "no such model" in err
        bad = tmp_path / "bad.toml"
        bad.write_text("[batcher]\nrunning_len_max = 0\n")
        code, _, err = await said(*words, "--model", "fake", "--config", bad)
        assert code == 1 and "running_len_max: 1 to 4096" in err
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        code, _, err = await said("serve", "--single", "--model", "fake", "--http-port", str(port))
        assert code == 1 and f"port {port} is taken" in err
        bad.write_text(f'[gateway]\nhttp_address = "127.0.0.1:{port}"\n')
        code, _, err = await said(*words[:-2], "--model", "fake", "--config", bad)
        assert code == 1 and "gateway: cannot listen on" in err
        server.close()
        code, _, err = await said("serve", "--model", "fake")
        assert code == 2 and "--single" in err

    runner.run(asyncio.wait_for(case(), PATIENCE_S))

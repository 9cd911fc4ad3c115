"""`shoal up` as a user runs it: signals drain it; what a drain cannot finish, the next deployment does."""

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import pytest

from shoal.client import AsyncClient, ShoalError
from shoal.launcher import LaunchError, read_state
from tests.e2e.rig import PATIENCE_S, ROOT, STEP_COST_US, Answer, ask, call, draw_calls, resume, until
from tests.sim.clients import NUM_LAYERS

CONFIG = f"""
[shard_worker]
fake_layers = {NUM_LAYERS}
fake_step_cost_us = {STEP_COST_US}.0

[gateway]
drain_wait_s = 2.0

[batcher]
drain_timeout_ms = 500
"""


async def shoal(*words: str | Path) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shoal", *map(str, words)), cwd=ROOT, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )


async def up(folder: Path) -> Process:
    config = folder / "shoal.toml"
    config.write_text(CONFIG)
    return await shoal(
        "up", "--model", "fake", "--port", "0", "--http-port", "0", "--run-dir", folder, "--config", config
    )


async def serving(process: Process) -> None:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        if b"serving gRPC" in line:
            return
    raise AssertionError("shoal up did not stand")


def address(folder: Path) -> str:
    addresses = read_state(folder)["addresses"]
    assert isinstance(addresses, list)
    return str(addresses[0])


async def end(process: Process, number: int) -> str:
    """Asks it to stop; what it then said."""
    process.send_signal(number)
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


def exit_codes_are_clean(folder: Path) -> bool:
    logs = [p.read_text() for p in (folder / "logs").glob("*.log") if p.stem != "nats"]
    return len(logs) == 5 and all('"ended"' in log and "crashed" not in log for log in logs)


def test_signals_drain_and_nothing_is_lost(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Short streams end within the drain; a long one is brought to its end by the next deployment."""
    short = [Answer(call) for call in draw_calls(30, 20)]
    long = Answer(call(range(20), 450, resume_window_s=120))

    async def until_lost(client: AsyncClient) -> None:
        with pytest.raises(ShoalError) as lost:
            await ask(client, long)
        assert lost.value.code == "UNAVAILABLE"

    async def life() -> None:
        process = await up(tmp_path)
        await serving(process)
        async with AsyncClient(address(tmp_path), retry=None) as client, asyncio.TaskGroup() as group:
            group.create_task(until_lost(client))
            for answer in short:
                group.create_task(ask(client, answer))
            await until(lambda: all(a.ids for a in (*short, long)), "all streams begin")
            said = await end(process, signal.SIGINT)
        assert "draining" in said and "did not drain" not in said
        for answer in short:
            answer.check()
        assert 0 < len(long.ids) < 450
        assert exit_codes_are_clean(tmp_path)
        with pytest.raises(LaunchError):
            read_state(tmp_path)

        process = await up(tmp_path)
        await serving(process)
        before = len(long.heard_s)
        async with AsyncClient(address(tmp_path), retry=None) as client:
            await resume(client, long)
        long.check()
        assert len(long.heard_s) > before + 50  # it was still being made
        assert "did not drain" not in await end(process, signal.SIGTERM)
        assert exit_codes_are_clean(tmp_path)

    runner.run(asyncio.wait_for(life(), PATIENCE_S))

"""One process: it lives, dies, comes back, ends when asked, and never outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal.child
from shoal.child import Child

SLEEP = "import signal, time; print('up', flush=True); time.sleep(1000)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"


def child(tmp_path: Path, code: str, restart: bool = True) -> Child:
    argv, log_path = [sys.executable, "-c", code], tmp_path / "logs" / "c.log"
    return Child("c", argv, dict(os.environ), log_path, restart, stranger=True)


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - another process is no event
            await asyncio.sleep(0.01)


def ups(c: Child) -> int:
    return c.log_tail().count("up")


def test_it_is_started_again_when_it_dies(tmp_path: Path) -> None:
    async def go() -> None:
        c = child(tmp_path, SLEEP)
        async with asyncio.TaskGroup() as group:
            group.create_task(c.run())
            await until(lambda: ups(c) == 1)
            first = c.pid
            assert c.signal(signal.SIGKILL)
            await until(lambda: ups(c) == 2)
            assert c.pid not in (None, first)
            assert c.failures == 1
            assert await c.end(10)
        assert c.pid is None

    asyncio.run(go())


def test_one_that_takes_its_time_to_end_by_itself_keeps_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker does that reads its model on busy cores, and can't; one that is killed is well again."""
    monkeypatch.setattr(shoal.child, "STABLE_AFTER_S", 0.05)
    monkeypatch.setattr(shoal.child, "RESTART_DELAY_S", 0.01)

    async def failures(name: str, code: str) -> list[int]:
        c, seen = child(tmp_path / name, code), [0]
        async with asyncio.TaskGroup() as group:
            group.create_task(c.run())
            while ups(c) < 4:
                await asyncio.sleep(0.01)
                if c.failures != seen[-1]:
                    seen.append(c.failures)
            await c.end(1)
        return seen

    slow = "import os, signal, time; print('up', flush=True); time.sleep(0.1); "
    assert asyncio.run(failures("ends", slow + "exit(1)")) == [0, 1, 2, 3]
    assert asyncio.run(failures("killed", slow + "os.kill(os.getpid(), signal.SIGKILL)")) == [0, 1]


def test_without_restart_its_death_is_the_end(tmp_path: Path) -> None:
    async def go() -> None:
        c = child(tmp_path, "print('up')", restart=False)
        async with asyncio.timeout(20):
            await c.run()
        assert ups(c) == 1
        assert await c.end(1)

    asyncio.run(go())


def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    async def go() -> None:
        argv, log_path = [sys.executable, "-c", "print('up'); exit(2)"], tmp_path / "c.log"
        c = Child("c", argv, dict(os.environ), log_path)
        async with asyncio.timeout(20):
            await c.run()
        assert ups(c) == 1 and not c.ended

    asyncio.run(go())


def test_one_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    async def go() -> None:
        c = child(tmp_path, STUBBORN)
        async with asyncio.TaskGroup() as group:
            group.create_task(c.run())
            await until(lambda: ups(c) == 1)
            assert not await c.end(0.2)
        assert c.pid is None

    asyncio.run(go())


def test_cancelling_kills_it(tmp_path: Path) -> None:
    async def go() -> int:
        c = child(tmp_path, SLEEP)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(c.run())
            await until(lambda: ups(c) == 1)
            pid = c.pid
            assert pid is not None
            task.cancel()
        return pid

    pid = asyncio.run(go())
    asyncio.run(until(lambda: gone(pid)))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, sys
from pathlib import Path
import pytest

import shoal.child
from shoal.child import Child
async def go():
    argv, log_path = [sys.executable, "-c", {SLEEP!r}], Path({str(tmp_path / "c.log")!r})
    c = Child("c", argv, dict(os.environ), log_path, stranger=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(c.run())
        while "up" not in c.log_tail():
            await asyncio.sleep(0.01)
        print(c.pid, flush=True)
        os.kill(os.getpid(), 9)
asyncio.run(go())
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    asyncio.run(until(lambda: gone(int(done.stdout))))

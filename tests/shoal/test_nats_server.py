"""The embedded broker starts again where it was, and never outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chassis.nats_bus import connect
from shoal.nats_server import NatsServer, NatsServerError, free_port

PARENT = """
import asyncio, sys, time
from pathlib import Path
from shoal.nats_server import NatsServer
server = NatsServer(Path(sys.argv[1]))
asyncio.run(server.start())
sys.stdout.write(f"{server.pid}\\n")
sys.stdout.flush()
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return status.read_text().rpartition(")")[2].split()[0] != "Z" if status.exists() else False


@pytest.mark.skipif(sys.platform != "linux", reason="parents are watched on Linux only")
def test_a_killed_parent_takes_it_along(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline_s = time.monotonic() + 5
    while is_alive(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_it_starts_again_where_it_was(tmp_path: Path, how: str) -> None:
    async def run() -> None:
        server = NatsServer(tmp_path)
        await server.start()
        try:
            url = server.url
            bus = await connect(url)
            await bus.ensure_streams()
            await bus.put_entry("model.m", b"1")
            await bus.close()
            if how == "kill":
                server.kill()
            else:
                await server.stop()
            assert not server.running
            await server.start()
            assert server.url == url
            bus = await connect(url)
            entry = await bus.entry("model.m")
            assert entry is not None and entry.value == b"1"
            await bus.close()
        finally:
            server.kill()

    asyncio.run(run())


def test_a_broker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        first, second = NatsServer(tmp_path / "a"), None
        await first.start()
        try:
            second = NatsServer(tmp_path / "b", port=first.port)
            with pytest.raises(NatsServerError, match="address already in use"):
                await second.start()
            assert not second.running
        finally:
            first.signal(signal.SIGTERM)
            await first.stop()
        monkeypatch.setenv("NATS_SERVER", str(tmp_path / "no-such-binary"))
        with pytest.raises(NatsServerError, match="no-such-binary"):
            await NatsServer(tmp_path / "c").start()

    asyncio.run(run())


def test_ports_are_not_given_twice() -> None:
    """Of many at once, before anybody listens."""
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300

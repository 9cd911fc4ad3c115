"""How a service ends: by itself, drained, hurried, too slow, crashed."""

import asyncio
import contextvars
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from chassis import log, service
from chassis.ports import Ports
from chassis.service import Inbox, Stop, run_service
from tests.sim.loop import run as on_virtual_clock


class Echo:
    """Runs until drained; `drain_s` is how long that takes, `linger_s` what run needs after."""

    def __init__(self, drain_s: float = 0.0, crash_after_s: float | None = None) -> None:
        self.inbox: Inbox[str] = Inbox(4)
        self.drain_s = drain_s
        self.crash_after_s = crash_after_s
        self.ended = ""

    async def run(self) -> None:
        try:
            if self.crash_after_s is not None:
                await asyncio.sleep(self.crash_after_s)
                raise RuntimeError("broken")
            while "end" not in await self.inbox.drain():
                pass
            self.ended = "drained"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise

    async def drain(self) -> None:
        await asyncio.sleep(self.drain_s)
        self.inbox.put_nowait("end")


def run(echo: Echo, asks_at_s: tuple[float, ...], drain_timeout_s: float = 10.0) -> float:
    """Virtual seconds until the service ended."""

    async def go() -> float:
        log.bind(level="off")
        stop = Stop()
        loop = asyncio.get_running_loop()
        start = loop.time()
        for at_s in asks_at_s:
            loop.call_later(at_s, stop.ask)
        await run_service(echo, stop, drain_timeout_s)
        return loop.time() - start

    return on_virtual_clock(go())


def test_a_stop_drains() -> None:
    echo = Echo(drain_s=3)
    assert run(echo, (1,)) == pytest.approx(4)
    assert echo.ended == "drained"


def test_a_drain_has_its_time() -> None:
    echo = Echo(drain_s=30)
    assert run(echo, (1,)) == pytest.approx(11)
    assert echo.ended == "cancelled"


def test_a_second_stop_is_at_once() -> None:
    echo = Echo(drain_s=30)
    assert run(echo, (1, 2)) == pytest.approx(2)
    assert echo.ended == "cancelled"


def test_a_crash_comes_out() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(Echo(crash_after_s=1), ())
    assert caught.group_contains(RuntimeError, match="broken")


def test_a_crash_while_draining_comes_out() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(Echo(drain_s=30, crash_after_s=2), (1,))
    assert caught.group_contains(RuntimeError, match="broken")


# ---- the process around it -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Config:
    port: int = 1
    drain_timeout_s: float = 5.0


def start(
    argv: list[str], env: dict[str, str], make: Callable[[Config, Ports], Any]
) -> tuple[int, list[Any]]:
    out: list[bytes] = []

    def go() -> int:
        log.bind(write=out.append)
        return service.start("echo", Config, make, argv, env)

    code = contextvars.copy_context().run(go)
    return code, [orjson.loads(line) for line in out]


def never(config: Config, ports: Ports) -> Any:
    raise AssertionError("not reached")


def test_a_bad_configuration_ends_at_once_and_says_so() -> None:
    for argv in (["--prot", "2"], ["--config"], ["--config", "nowhere.toml"]):
        code, lines = start(argv, {}, never)
        assert code == 2
        assert [line["event"] for line in lines] == ["bad configuration"]
        assert lines[0]["service"] == "echo"


def test_flags_go_to_whom_they_concern() -> None:
    words = ["--nats-url", "nats://x:1", "--port=3", "--drain-timeout-s", "7"]
    chassis, own = service._configure("echo", Config, words, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"})
    assert own == Config(port=3, drain_timeout_s=7.0)
    assert chassis.nats_url == "nats://x:1"
    assert chassis.drain_timeout_s == 7.0
    assert chassis.otlp_endpoint == "http://c:4317"


def test_the_plain_names_of_the_environment() -> None:
    chassis, _ = service._configure("echo", Config, [], {"SHOAL_NATS_URL": "nats://a:1"})
    assert chassis.nats_url == "nats://a:1"
    env = {"SHOAL_NATS_URL": "nats://a:1", "SHOAL_CHASSIS_NATS_URL": "nats://b:1"}
    assert service._configure("echo", Config, [], env)[0].nats_url == "nats://b:1"


def test_without_a_bus_the_process_gives_up_in_time() -> None:
    code, lines = start(["--nats-url", "nats://127.0.0.1:1", "--nats-wait-s", "0.2"], {}, never)
    assert code == 1
    assert [line["event"] for line in lines] == ["starting", "no bus", "crashed"]


def test_a_service_whose_launcher_is_gone_does_not_start() -> None:
    """In a process of its own: it asks the kernel to die with its parent."""
    code = (
        "import sys; from chassis import service; from tests.chassis.test_service import Config, never;"
        "sys.exit(service.start('echo', Config, never, [], {'SHOAL_LAUNCHER_PID': '1'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 1
    assert orjson.loads(done.stderr)["event"] == "the launcher is gone"


def tick(loop: asyncio.AbstractEventLoop) -> float:
    """Seconds until the loop's clock goes on."""
    start = loop.time()
    while (now := loop.time()) == start:
        pass
    return now - start


def test_the_loops_clock_is_finer_than_a_millisecond() -> None:
    """Timings are read from it; uvloop alone rounds them away. Its timers must agree with it."""

    async def go() -> None:
        loop = asyncio.get_running_loop()
        assert min(tick(loop) for _ in range(100)) < 0.0005  # at best: others may have the core for a while
        for _ in range(20):
            due = loop.time() + 0.003
            await Inbox[int](1).drain(until=due)
            assert -0.001 < loop.time() - due < 1.0

    with asyncio.Runner(loop_factory=service.loop_factory()) as runner:
        runner.run(go())

"""Hosts of a lab reach each other, late as wanted; what is cut is silent; nothing is left of a lab."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.lab import ROOT, Host, Lab, LabError

SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 7001))
print("up", flush=True)
while True:
    link, _ = server.accept()
    link.setsockopt(6, 1, 1)
    while data := link.recv(1 << 20):
        link.sendall(data if len(data) < 100 else b"ok" * (data[-1] == 1))
"""
CLIENT = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], 7001), timeout=float(sys.argv[2]))
link.setsockopt(6, 1, 1)
def trip(data):
    began = time.perf_counter()
    link.sendall(data)
    assert link.recv(100)
    return time.perf_counter() - began
if sys.argv[3] == "bulk":
    print(trip(bytes(32 << 20) + b"\\x01"))
else:
    print(min(trip(b"x") for _ in range(20)))
"""


def ask(host: Host, other: Host, what: str = "trips", timeout_s: float = 5.0, **options: Any) -> float:
    """Seconds: of the quickest of some round trips, or of 32 MiB. Raises CalledProcessError."""
    words = (sys.executable, "-c", CLIENT, other.address, str(timeout_s), what)
    return float(host.run(*words, **options).stdout)


class Server:
    def __init__(self, host: Host) -> None:
        self._host = host

    def __enter__(self) -> None:
        words = self._host.words(sys.executable, "-c", SERVER, self._host.address)
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self._process.stdout is not None and self._process.stdout.readline() == b"up\n"

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_a_delay_is_had_each_way_and_by_large_data_once(two: Lab) -> None:
    a, b = two.hosts
    with Server(b):
        two.delay(0.02)
        assert ask(a, b) >= 0.04
        assert ask(a, b, "bulk", timeout_s=20.0) >= 0.04  # 500 times that, were it one frame at a time


def test_what_is_cut_is_silent_and_heals(two: Lab) -> None:
    a, b = two.hosts
    with Server(b):
        assert ask(a, b) < 1.0
        for cut in (partial(two.cut, b), partial(two.cut_way, a, b), partial(two.cut_way, b, a)):
            cut()
            done = b.run("ping", "-c1", "-W1", a.address, check=False) if _has_ping() else None
            assert done is None or done.returncode
            with pytest.raises(subprocess.CalledProcessError) as failed:
                ask(a, b, timeout_s=0.3)
            assert "timed out" in failed.value.stderr
            two.heal()
            assert ask(a, b) < 5.0


def _has_ping() -> bool:
    return any(Path(folder, "ping").exists() for folder in os.environ["PATH"].split(":"))


def test_who_is_unplugged_is_told_and_comes_back(two: Lab) -> None:
    a, b = two.hosts
    with Server(b):
        two.unplug(a)
        with pytest.raises(subprocess.CalledProcessError) as failed:
            ask(a, b)
        assert "Network is unreachable" in failed.value.stderr
        two.plug(a)
        assert ask(a, b) < 5.0


def test_a_host_has_a_loopback_of_its_own(two: Lab) -> None:
    a, b = two.hosts
    listen = "import socket; socket.create_server(('127.0.0.1', 7001)); print('bound')"
    with Server(b):
        assert a.run(sys.executable, "-c", listen).stdout == "bound\n"


def test_nothing_is_left(can_have_hosts: None) -> None:
    with pytest.raises(RuntimeError), Lab(3) as lab:
        names = [host.name for host in lab.hosts]
        forgotten = subprocess.Popen(lab.hosts[0].words("sleep", "1000"))
        raise RuntimeError
    assert forgotten.wait(5) < 0
    assert not any(Path("/run/netns", name).exists() for name in names)


def test_what_a_killed_run_left_is_swept_by_the_next(can_have_hosts: None) -> None:
    code = (
        "import time; from tests.hosts.lab import Lab; lab = Lab(1).__enter__(); "
        "print(lab.hosts[0].name, flush=True); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()
    assert Path("/run/netns", name).exists()
    with Lab(1):
        assert not Path("/run/netns", name).exists()


def test_a_switch_that_cannot_be_says_so(can_have_hosts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LabError, match="the switch ended"), Lab(1):
        pass

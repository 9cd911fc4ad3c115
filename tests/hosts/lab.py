"""Several hosts on this machine: network namespaces behind a switch of ours (`tests/hosts/switch.py`).

    with Lab(2, delay_s=0.001) as lab:
        lab.hosts[0].run("ping", "-c1", lab.hosts[1].address)

Each host has one interface with an address of 192.0.2.0/24 and a loopback of its own; files are shared. Needs
root, `ip` and /dev/net/tun (`missing` says what is not there). Names hold our process id, so that whatever a
killed run left is swept by the next one; at the end whatever still runs in a host is killed.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.hosts.switch import INTERFACE, MAC_PREFIX

ROOT = Path(__file__).resolve().parents[2]
HOSTS_MAX = 16
MTU = 65_000  # few large frames: what limits is a delay, not how many frames Python can pass on
COMMAND_TIMEOUT_S = 20.0
_PREFIX = "shoal-lab"
_serials = itertools.count()


class LabError(Exception):
    """The lab cannot be made."""


@dataclass(frozen=True, slots=True)
class Host:
    name: str  # of its namespace
    number: int  # from 1
    address: str

    def words(self, *argv: str | Path) -> list[str]:
        """What runs `argv` on this host; the process started is the program itself."""
        return ["ip", "netns", "exec", self.name, *map(str, argv)]

    def run(
        self, *argv: str | Path, timeout_s: float = COMMAND_TIMEOUT_S, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """To its end. Raises CalledProcessError, TimeoutExpired."""
        settings = {"check": True, "capture_output": True, "text": True, **options}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            self.words(*argv), timeout=timeout_s, **settings
        )
        return done

    @property
    def pids(self) -> list[int]:
        """Of all that runs there."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(word) for word in done.stdout.split()]


def missing() -> str:
    """Why there can be no lab here; empty: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    name = f"{_PREFIX}-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
    except LabError as error:
        return str(error)
    _ip("netns", "del", name)
    return ""


class Lab:
    """`with Lab(3) as lab: ...`; `delay_s` is one way, between any two hosts."""

    def __init__(self, num_hosts: int, delay_s: float = 0.0) -> None:
        assert 1 <= num_hosts <= HOSTS_MAX
        serial = next(_serials)
        self.hosts = [
            Host(f"{_PREFIX}-{os.getpid()}-{serial}-{number}", number, f"192.0.2.{number}")
            for number in range(1, num_hosts + 1)
        ]
        self._delay_s = delay_s
        self._cut: set[tuple[int, int]] = set()
        self._switch: subprocess.Popen[str] | None = None
        self._stack = ExitStack()

    # ---- life

    def __enter__(self) -> "Lab":
        """Raises LabError."""
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        _sweep()
        for host in self.hosts:
            _ip("netns", "add", host.name)
            self._stack.callback(_remove, host)
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.switch", *(host.name for host in self.hosts)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(self._end_switch)
        self._hear_ok()
        for host in self.hosts:
            self._connect(host)
        self._order()

    def _connect(self, host: Host) -> None:
        _ip("-n", host.name, "link", "set", "lo", "up")
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        _ip("-n", host.name, "link", "set", INTERFACE, "mtu", str(MTU), "address", _mac(host), "up")
        for other in self.hosts:  # what is cut is silent, and no name of a neighbour is forgotten
            if other is not host:
                words = ("neigh", "replace", other.address, "lladdr", _mac(other), "nud", "permanent")
                _ip("-n", host.name, *words, "dev", INTERFACE)

    # ---- what happens to it

    @property
    def delay_s(self) -> float:
        return self._delay_s

    def delay(self, seconds: float) -> None:
        """One way, of frames sent from now on."""
        self._delay_s = seconds
        self._order()

    def cut(self, host: Host) -> None:
        """Nothing comes to it or from it, and nobody is told."""
        for other in self.hosts:
            if other is not host:
                self._cut |= {(host.number, other.number), (other.number, host.number)}
        self._order()

    def cut_way(self, sender: Host, receiver: Host) -> None:
        """What one sends never reaches the other; the way back is open."""
        self._cut.add((sender.number, receiver.number))
        self._order()

    def heal(self) -> None:
        """Every way is open."""
        self._cut.clear()
        self._order()

    def unplug(self, host: Host) -> None:
        """Its interface goes down: what it sends fails at once."""
        _ip("-n", host.name, "link", "set", INTERFACE, "down")

    def plug(self, host: Host) -> None:
        _ip("-n", host.name, "link", "set", INTERFACE, "up")

    # ---- inside

    def _order(self) -> None:
        assert self._switch is not None and self._switch.stdin is not None
        wanted: Mapping[str, object] = {"delay_s": self._delay_s, "cut": sorted(self._cut)}
        self._switch.stdin.write(json.dumps(wanted) + "\n")
        self._switch.stdin.flush()
        self._hear_ok()

    def _hear_ok(self) -> None:
        """Raises LabError."""
        assert self._switch is not None and self._switch.stdout is not None
        if self._switch.stdout.readline() != "ok\n":
            raise LabError(f"the switch ended with {self._switch.wait()}")

    def _end_switch(self) -> None:
        switch = self._switch
        assert switch is not None and switch.stdin is not None and switch.stdout is not None
        switch.stdin.close()
        try:
            switch.wait(COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            switch.kill()
            switch.wait()
        switch.stdout.close()


def _mac(host: Host) -> str:
    return (MAC_PREFIX + bytes((host.number,))).hex(":")


def _ip(*words: str) -> None:
    """Raises LabError."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _remove(host: Host) -> None:
    """With all that runs there; of what is gone already nothing is said."""
    for pid in host.pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def _sweep() -> None:
    """What runs that were killed left."""
    folder = Path("/run/netns")
    for path in folder.glob(f"{_PREFIX}-*") if folder.exists() else ():
        pid = path.name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _remove(Host(path.name, 0, ""))

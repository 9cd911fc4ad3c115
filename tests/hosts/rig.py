"""A deployment over the hosts of a lab, started as people start it: `shoal up --listen`, `shoal join`.

All of it ends with the block: asked to, within its time, or it is a failure.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests.hosts.lab import ROOT, Host, Lab
from tests.shard_worker.driver import Sequence as Known
from tests.sim.clients import NUM_LAYERS

PATIENCE_S = 60.0
STEP_COST_US = 8_000
CONFIG = f"""
[shard_worker]
fake_layers = {NUM_LAYERS}
fake_step_cost_us = {STEP_COST_US}.0
drain_wait_ms = 500
[batcher]
step_timeout_ms = 1500
"""


def until(holds: Callable[[], bool], what: Callable[[], str], timeout_s: float = PATIENCE_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {timeout_s:g} s: {what()}"
        time.sleep(0.02)


def lines_of(answered: Sequence[Known]) -> str:
    """As `tests.hosts.asking_known` reads them."""
    known = (
        {"prompt": k.prompt, "temperature": k.temperature, "seed": k.seed, "output": k.output}
        for k in answered
    )
    return "".join(json.dumps(one) + "\n" for one in known)


class Started:
    """One command on a host; what it says goes to a file."""

    def __init__(self, host: Host, words: Sequence[str | Path], log: Path, cwd: Path, **env: str) -> None:
        self.host = host
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                host.words(*words),
                cwd=cwd,
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        def told() -> bool:
            if text in self.said:
                return True
            assert self._process.poll() is None, f"ended with {self._process.returncode}: {self.said}"
            return False

        until(told, lambda: f"{text!r} in {self.said[-2000:]}", timeout_s)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, once it ends."""
        return self._process.wait(timeout_s)

    def end(self) -> int:
        """Asks it to; its exit code."""
        self._process.terminate()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return -signal.SIGKILL


class HostsRig:
    """`with HostsRig(lab, folder) as rig`: the first host has all but stages."""

    def __init__(self, lab: Lab, folder: Path, stages: int = 2, model: str = "fake") -> None:
        self.lab = lab
        self.folder = folder
        self._stages = stages
        self._model = model
        self._stack = ExitStack()
        self._count = 0
        self.started: dict[int, Started] = {}  # by host, what was started there last

    def __enter__(self) -> "HostsRig":
        (self.folder / "shoal.toml").write_text(CONFIG)
        first, *others = self.lab.hosts
        try:
            up = self.shoal(
                first, "up", "--listen", first.address, "--workers", "0", "--stages", str(self._stages),
                "--model", self._model, "--config", self.folder / "shoal.toml",
            )  # fmt: skip
            up.wait_for("others join")
            for host in others:
                self.join(host)
            up.wait_for("serving gRPC")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def bus(self) -> str:
        return f"nats://{self.lab.hosts[0].address}:4222"

    def shoal(self, host: Host, *words: str | Path) -> Started:
        """Ends with the rig. The run folder is the host's own."""
        self._count += 1
        log = self.folder / f"{host.number}.{self._count}.said"
        run_dir = ("--run-dir", self.folder / f"run{host.number}")
        argv = (sys.executable, "-m", "shoal", words[0], *run_dir, *words[1:])
        started = Started(host, argv, log, ROOT)
        self.started[host.number] = started
        self._stack.callback(started.end)
        return started

    def join(self, host: Host, *words: str | Path) -> Started:
        config = ("--model", self._model, "--config", self.folder / "shoal.toml")
        return self.shoal(host, "join", self.bus, "--role", "worker", *config, *words)

    def asking(
        self, seed: int, output_len: int = 60, count: int = 8, address: str = "127.0.0.1:50051"
    ) -> Started:
        """Clients of the fake model on the first host."""
        return self._clients("tests.hosts.asking", address, seed, count, output_len)

    def asking_known(self, known: Path, address: str = "127.0.0.1:50051") -> Started:
        """Clients on the first host of what `known` has the answers to (`tests.hosts.asking_known`)."""
        return self._clients("tests.hosts.asking_known", address, known)

    def _clients(self, *words: object) -> Started:
        self._count += 1
        log = self.folder / f"asking.{self._count}.said"
        argv = (sys.executable, "-m", *map(str, words))
        started = Started(self.lab.hosts[0], argv, log, ROOT)
        self._stack.callback(started.end)
        return started

    def worker_pid(self, host: Host) -> int:
        """Of the stage that runs there. Raises LookupError."""
        for pid in host.pids:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"shard_worker" in words:
                return pid
        raise LookupError(f"no worker on {host.name}")

    def serves(self, host: Host) -> bool:
        """Whether its worker has a stage now, by what it says: it may be a spare."""
        logs = [path.read_text() for path in (self.folder / f"run{host.number}" / "logs").glob("worker*.log")]
        return any(log.rfind('"stage stands"') > log.rfind('"epoch ended"') for log in logs)

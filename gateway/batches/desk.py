"""The batches that this gateway drives: given by the bus, one gateway at a time each, until they are over.

What is driven has a progress ack each second; a gateway that dies loses its batches to another within the
consumer's ack wait.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from chassis import log
from chassis.batch_layout import DRIVERS, PROGRESS_INTERVAL_S
from chassis.bus import Bus, Delivery
from chassis.errors import BusError
from chassis.ids import AckToken
from chassis.insist import insist
from chassis.messages import BadMessage
from chassis.messages.batches import Batch, parse_batch
from chassis.ports import Ports
from gateway.batches.driver import Driver
from gateway.front import Front

DRIVES_MAX = 32
FETCH_WAIT_S = 2.0
BACKOFF_S = 0.5
FAULT_DELAY_S = 30.0


@dataclass(slots=True)
class _Drive:
    token: AckToken


class Desk:
    def __init__(self, front: Front, ports: Ports) -> None:
        self._front = front
        self._ports = ports
        self._bus: Bus = ports.bus
        self._boot = ports.new_id()
        self._drives: dict[str, _Drive] = {}  # by subject
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; what is driven is then given back at once."""
        await insist(lambda: self._bus.ensure_consumer(DRIVERS))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._progress(), name="batches progress")
            while True:
                room = DRIVES_MAX - len(self._drives)
                if room <= 0:
                    self._room.clear()
                    await self._room.wait()
                    continue
                try:
                    found = await self._bus.fetch(DRIVERS.stream, DRIVERS.name, room, FETCH_WAIT_S)
                except BusError as error:
                    log.debug("batches not fetched", error=str(error))
                    await asyncio.sleep(BACKOFF_S)
                    continue
                for delivery in found:
                    self._take(group, delivery)

    def _take(self, group: asyncio.TaskGroup, delivery: Delivery) -> None:
        subject = delivery.message.subject
        if (known := self._drives.get(subject)) is not None:
            known.token = delivery.token  # redelivery: it goes on
            return
        try:
            batch = parse_batch(delivery.message.data)
        except BadMessage as error:
            log.error("not a batch", subject=subject, error=str(error))
            self._bus.ack(delivery.token)
            return
        self._drives[subject] = drive = _Drive(delivery.token)
        group.create_task(self._drive(subject, drive, batch), name="batch")

    async def _drive(self, subject: str, drive: _Drive, batch: Batch) -> None:
        ports = self._ports
        driver = Driver(batch, self._boot, self._front, self._bus, ports.new_id, ports.wall_ns)
        over, delay_s, taken_over = False, 0.0, False
        try:
            over = await driver.drive()
            taken_over = not over
        except Exception as error:  # what trips one batch up must not stop one gateway after another
            log.exception("a batch cannot be driven", error, batch=batch.id)
            delay_s = FAULT_DELAY_S
        finally:
            del self._drives[subject]
            self._room.set()
            if not taken_over:  # else it is kept by who has it; given back, it might come here once more
                self._settle(drive.token, over, delay_s)

    def _settle(self, token: AckToken, over: bool, delay_s: float) -> None:
        try:
            if over:
                self._bus.ack(token)
            else:
                self._bus.nak(token, delay_s)
        except BusError as error:  # it is given to somebody again
            log.debug("a batch is not settled", error=str(error))

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            for drive in self._drives.values():
                try:
                    self._bus.progress(drive.token)
                except BusError as error:
                    log.debug("no progress said", error=str(error))


@asynccontextmanager
async def driving(front: Front, ports: Ports) -> AsyncIterator[None]:
    """Drives batches while the context lasts."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(Desk(front, ports).run(), name="batches")
        try:
            yield
        finally:
            task.cancel()

"""The batcher's links: a dead worker's entry outlives it, and must not hold a living neighbour up."""

import asyncio

from batcher.formation import FormStage, PipelineLost, Stage
from batcher.ring import Ring, RingConfig
from batcher.service import Batcher
from chassis.errors import LinkClosed
from chassis.ids import BootId, Epoch
from chassis.messages.forming import Form, FormAnswer, FormAsk, Formed, build_formed, parse_form
from chassis.messages.registry import WorkerEntry
from chassis.ports import Ports
from chassis.transport.interface import Accept, Link, LinkOptions
from shard_worker.config import Config as WorkerConfig
from shard_worker.fake_model import FakeConfig, FakeExecutor
from shard_worker.service import ShardWorker
from tests.batcher.test_service import deployment
from tests.sim.loop import run


async def _until(standing: bool, service: Batcher) -> None:
    while service._core.standing is not standing:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.01)


def test_a_killed_neighbour_is_replaced_long_before_its_entry_expires() -> None:
    """Its entry still says free: the first stage must not be asked, and blamed, on its behalf."""

    async def main() -> None:
        async with deployment(num_stages=2) as world:
            await asyncio.sleep(1)
            batcher = world.nodes["batcher"].service
            first, second = world.nodes["worker0"], world.nodes["worker1"]
            await _until(True, batcher)
            async with asyncio.timeout(5):
                await first.kill()
                await _until(False, batcher)
                await asyncio.sleep(0.5)
                await second.kill()
                first.start()
                await asyncio.sleep(1)
                second.start()
                await _until(True, batcher)

    run(main())


def test_a_spare_comes_between_two_workers_that_do_not_reach_each_other() -> None:
    async def main() -> None:
        async with deployment(num_stages=2) as world:
            await asyncio.sleep(1)
            await _until(True, world.nodes["batcher"].service)
            config = WorkerConfig(listen="mem://worker:0", rpc_listen="worker:0")
            fake = FakeConfig(num_blocks=64)
            spare = world.add(
                "spare", lambda ports: ShardWorker(config, ports, FakeExecutor(fake, lambda s: None))
            )
            world.ring.partition("worker0", "worker1")
            await world.nodes["batcher"].kill()
            await asyncio.sleep(1)
            world.nodes["batcher"].start()
            await asyncio.sleep(3)
            service = world.nodes["batcher"].service
            assert not service._core.standing, "two alone cannot"
            spare.start()
            async with asyncio.timeout(5):
                await _until(True, service)
            assert spare.service.boot in [s.worker.boot for s in service._core.formation.stages]

    run(main())


class SlowTransport:
    """Dials only when told to; keeps every link that it made."""

    def __init__(self) -> None:
        self.may_dial = asyncio.Event()
        self.links: list[SilentLink] = []

    async def dial(self, address: str, hello: bytes, options: LinkOptions, timeout_s: float) -> Link:
        await self.may_dial.wait()
        self.links.append(SilentLink())
        return self.links[-1]  # type: ignore[return-value]


class SilentLink:
    def __init__(self) -> None:
        self._over = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._over.is_set()

    def close(self) -> None:
        self._over.set()

    async def receive(self) -> None:
        await self._over.wait()
        raise LinkClosed("closed")


def test_a_link_that_is_dialled_when_its_epoch_is_over_is_closed() -> None:
    """Else nobody closes it: it holds the worker, and a batcher that drains waits for its reader in vain."""

    async def main() -> None:
        transport = SlowTransport()
        ports = Ports(None, None, transport, None, None, None, None)  # type: ignore[arg-type]
        config = RingConfig("", 16, 64, 512, 60.0)
        worker = WorkerEntry(BootId("w"), "m", "d", "rpc", "mem", Epoch(0), True, 4)
        want = FormStage(1, Epoch(1), 0, (Stage(worker, 0, 4),))
        lost: list[object] = []

        def tell(event: object) -> None:
            assert isinstance(event, PipelineLost)
            lost.append(event)

        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            ring = Ring(ports, BootId("me"), config, group, tell, lambda result: None)
            forming = group.create_task(ring.form(want))
            await asyncio.sleep(0)
            ring.close(Epoch(1))
            transport.may_dial.set()
            formed = await forming
        assert formed.kv_stamp is None and [link.closed for link in transport.links] == [True]
        assert not lost, "who closed it knows"

    run(main())


def test_a_worker_whose_address_is_none_is_blamed_and_nothing_breaks() -> None:
    async def main() -> None:
        async with deployment(num_stages=2) as world:
            await asyncio.sleep(1)
            service = world.nodes["batcher"].service
            odd = WorkerEntry(BootId("odd"), "fake", "", "rpc", "no address", Epoch(0), True, 4)
            want = FormStage(1, Epoch(1 << 40), 0, (Stage(odd, 0, 4),))
            formed = await service._ring.form(want)
            assert formed.kv_stamp is None and formed.blamed == "odd"

    run(main())


class Asked:
    """A transport that listens on all interfaces, and workers that note what they were asked to form."""

    def __init__(self, formed: Formed) -> None:
        self.forms: list[Form] = []
        self._formed = formed

    async def listen(self, address: str, accept: Accept, options: LinkOptions) -> str:
        return f"unix://@name {address}"

    async def dial(self, address: str, hello: bytes, options: LinkOptions, timeout_s: float) -> Link:
        return SilentLink()  # type: ignore[return-value]

    async def call(self, address: str, method: object, ask: FormAsk, timeout_s: float) -> FormAnswer:
        self.forms.append(parse_form(ask))
        return build_formed(self._formed)


def test_the_last_stage_is_told_the_address_that_reaches_us() -> None:
    async def main() -> None:
        world = Asked(Formed(None, Epoch(1), "stamp", 8))
        ports = Ports(None, world, world, None, None, None, None)  # type: ignore[arg-type]
        config = RingConfig("tcp://0.0.0.0:7002", 16, 64, 512, 60.0, advertise_host="batcher-0.internal")
        worker = WorkerEntry(BootId("w"), "m", "d", "rpc", "mem", Epoch(0), True, 4)
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            ring = Ring(ports, BootId("me"), config, group, lambda event: None, lambda result: None)
            await ring.listen()
            formed = await ring.form(FormStage(1, Epoch(1), 0, (Stage(worker, 0, 4),)))
            ring.close(Epoch(1))
        assert formed.kv_stamp == "stamp"
        (form,) = world.forms
        assert form.next_address == "unix://@name tcp://batcher-0.internal:7002"

    run(main())

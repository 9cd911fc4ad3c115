"""kvstore with tiers and the stages of a pipeline: what was computed once comes back, or nothing does."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from chassis import log, subjects
from chassis.cache_view import CacheView
from chassis.errors import RpcRejected
from chassis.ids import BlockHash, BlockId, Epoch
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.memory_rpc import MemoryRpcNetwork
from chassis.messages import cache
from chassis.messages import kvstore as messages
from chassis.messages.cache import TIER_DISK, TIER_HOST, HoldingsQuestion
from chassis.messages.kvstore import NO_PARENT, Attach, Commit, Exchange, Match, PoolRef, StageAddress
from chassis.ports import Ports
from chassis.transport.memory import MemoryNetwork
from kvstore.config import Config
from kvstore.io_thread import InlineIo
from kvstore.service import KvStore
from tests.kvstore.fake_stage import PAGE, FakeStage
from tests.kvstore.faulty_files import MemoryFiles
from tests.sim.loop import run as on_virtual_clock
from tests.sim.tracer import SimTracer

HOST = Config(check_every_calls=1, host_bytes=1 << 20, restore_min_tokens=1, restore_wait_ms=200)
DISK = replace(HOST, host_bytes=0, disk_bytes=1 << 20, disk_dir="-")
NUM_BLOCKS = 16


def content(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def chain(first: int, count: int) -> tuple[BlockHash, ...]:
    return tuple(content(number) for number in range(first, first + count))


class World:
    """A kvstore, the stages of one pipeline, and what its batcher would say."""

    def __init__(self, config: Config, splits: Sequence[range], files: MemoryFiles) -> None:
        self.config = config
        self.files = files
        self.ring = MemoryNetwork()
        self.rpc = MemoryRpcNetwork()
        self.broker = MemoryBroker(wall_ns=lambda: 0)
        self.ref = PoolRef("g", Epoch(1), 1)
        self.ids = 0
        self.stages: list[FakeStage] = []
        self.addresses: tuple[StageAddress, ...] = ()
        self.splits = splits

    async def start(self) -> None:
        log.bind(level="off")
        clock = asyncio.get_running_loop().time

        def new_id() -> str:
            self.ids += 1
            return f"boot{self.ids}"

        self.bus = MemoryBus(self.broker, f"kvstore{self.ids}")
        ports = Ports(
            bus=self.bus,
            rpc=self.rpc.rpc("kvstore"),
            transport=self.ring.transport("kvstore"),
            tracer=SimTracer(1).of("kvstore"),
            new_id=new_id,
            new_seed=lambda: 0,
            wall_ns=lambda: int(clock() * 1e9),
        )
        config = replace(self.config, rpc_address="kvstore:1")
        self.store = KvStore(config, ports, (self.files, InlineIo()))
        self.running = asyncio.create_task(self.store.run())
        await asyncio.sleep(0.1)

    async def stop(self, kill: bool = False) -> None:
        if not kill:
            await self.store.drain()
            await asyncio.wait_for(self.running, 5.0)
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.bus.close()

    async def pipeline(
        self, splits: Sequence[range], epoch: int = 1, layout: str = "fake", late_s: float = 0.0
    ) -> None:
        """Another pipeline takes the place of the last one: other memory, other stages."""
        for stage in self.stages:
            stage.close()
        self.stages, addresses = [], []
        for i, layers in enumerate(splits):
            stage = FakeStage(layers, layout, Epoch(epoch), late_s=late_s)
            address = f"mem://worker{i}:{epoch}"
            await stage.listen(self.ring.transport(f"worker{i}"), address)
            self.stages.append(stage)
            addresses.append(StageAddress(address, layers))
        self.addresses = tuple(addresses)
        self.ref = PoolRef(f"g{epoch}", Epoch(epoch), 0)
        await self.attach()

    async def attach(self, held: Sequence[BlockId] = (), known: bool = True) -> None:
        """A new attach of the same pool."""
        prior, self.ref = self.ref, replace(self.ref, attachment=self.ref.attachment + 1)
        call = Attach(
            self.ref,
            (f"w.{self.ref.epoch}",),
            NUM_BLOCKS,
            16,
            "n",
            held=tuple(held),
            prior_epoch=prior.epoch if known else Epoch(0),
            prior_attachment=prior.attachment,
            stages=self.addresses,
        )
        await self.call(messages.ATTACH, messages.build_attach(call))
        await asyncio.sleep(0.1)

    async def call(self, method: Any, request: Any) -> Any:
        return await self.rpc.rpc("batcher").call("kvstore:1", method, request, 30.0)

    async def exchange(self, **fields: Any) -> messages.Exchanged:
        request = messages.build_exchange(Exchange(self.ref, **fields))
        return messages.parse_exchanged(await self.call(messages.EXCHANGE, request))

    async def compute(self, contents: Sequence[BlockHash]) -> tuple[BlockId, ...]:
        """A prompt is computed, and let go of."""
        leased = (await self.exchange(lease_count=len(contents))).leased
        assert len(leased) == len(contents)
        for stage in self.stages:
            for block, named in zip(leased, contents, strict=True):
                stage.compute(block, named)
        parents = (NO_PARENT, *contents[:-1])
        await self.exchange(commits=tuple(map(Commit, leased, contents, parents)), releases=leased)
        return leased

    async def match(self, *chains: Sequence[BlockHash]) -> list[int]:
        """How many blocks of each are found; they hold on all stages what they are called."""
        request = messages.build_match(Match(self.ref, tuple(map(tuple, chains))))
        found = messages.parse_matched(await self.call(messages.MATCH, request), len(chains))
        for blocks, named in zip(found, chains, strict=True):
            for block, which in zip(blocks, named, strict=False):
                assert all(stage.holds(block, which) for stage in self.stages), "a lie"
        await self.exchange(releases=tuple(block for blocks in found for block in blocks))
        return [len(blocks) for blocks in found]

    async def crowd_out(self) -> None:
        """All blocks are needed for something else."""
        leased = (await self.exchange(lease_count=NUM_BLOCKS)).leased
        for stage in self.stages:
            for block in leased:
                stage.compute(block, content(999))
        await self.exchange(releases=leased)

    async def stats(self) -> dict[str, int]:
        asked = messages.build_stats_question("")
        return dict(messages.parse_stats(await self.call(messages.STATS, asked)).tiers)


def on_world(
    case: Callable[[World], Awaitable[None]],
    config: Config = HOST,
    splits: Sequence[range] = (range(0, 2), range(2, 4)),
    files: MemoryFiles | None = None,
) -> None:
    async def main() -> None:
        world = World(config, splits, files or MemoryFiles())
        await world.start()
        await world.pipeline(splits)
        try:
            await case(world)
            world.store.tiers.check()
            world.store.ledger.check()
        finally:
            for stage in world.stages:
                stage.close()
            await world.stop(kill=True)

    on_virtual_clock(main())


@pytest.mark.parametrize("config", [HOST, DISK], ids=["host", "disk"])
def test_what_was_evicted_comes_back(config: Config) -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 5))
        await asyncio.sleep(1.0)
        await world.crowd_out()
        assert await world.match(chain(1, 5)) == [5]
        assert await world.match(chain(1, 7)) == [5]
        stats = await world.stats()
        assert (stats["saved"], stats["restored"], stats["backlog"]) == (5, 5, 0)

    on_world(case, config)


def test_many_blocks_take_many_calls_and_leave_room_for_others() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, NUM_BLOCKS))
        await asyncio.sleep(1.0)
        await world.compute(chain(100, NUM_BLOCKS))
        await asyncio.sleep(1.0)
        assert await world.match(chain(1, NUM_BLOCKS)) == [NUM_BLOCKS - NUM_BLOCKS // 8]
        assert world.stages[0].saves == 2

    on_world(case)


def test_too_little_is_computed_rather_than_restored() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 3))
        await world.compute(chain(11, 4))
        await asyncio.sleep(1.0)
        await world.crowd_out()
        assert await world.match(chain(1, 3)) == [0]
        assert await world.match(chain(11, 4)) == [4]

    on_world(case, replace(HOST, restore_min_tokens=50))


def test_a_restarted_kvstore_has_what_is_on_disk() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 5))
        await asyncio.sleep(1.0)
        await world.stop()
        await world.start()
        await world.attach(known=False)
        await world.crowd_out()
        assert await world.match(chain(1, 5)) == [5]

    on_world(case, DISK)
    on_world(case, replace(HOST, disk_bytes=1 << 20, disk_dir="-"))


def test_a_pipeline_with_other_stages_reads_what_the_last_one_wrote() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 5))
        await asyncio.sleep(1.0)
        await world.pipeline([range(0, 1), range(1, 3), range(3, 4)], epoch=2)
        assert await world.match(chain(1, 5)) == [5]
        await world.pipeline([range(0, 4)], epoch=3)
        assert await world.match(chain(1, 5)) == [5]
        await world.pipeline([range(0, 4)], epoch=4, layout="another")
        assert await world.match(chain(1, 5)) == [0]

    on_world(case, HOST)
    on_world(case, DISK)


@pytest.mark.parametrize(
    ("late_s", "first", "found", "waits_s"),
    [(0.25, 1, 5, 0.15), (0.5, 1, 0, 0.2), (0.25, 100, 0, 0.0)],
    ids=["in time", "too late", "of nothing that is known"],
)
def test_a_pools_first_match_waits_for_links_that_open(
    late_s: float, first: int, found: int, waits_s: float
) -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 5))
        await asyncio.sleep(1.0)
        await world.pipeline((range(4),), epoch=2, late_s=late_s)  # attached 0.1 s ago
        now = asyncio.get_running_loop().time
        begun = now()
        assert await world.match(chain(first, 5)) == [found]
        assert now() - begun == pytest.approx(waits_s, abs=0.03)
        await asyncio.sleep(1.0)
        assert await world.match(chain(1, 5)) == [5]

    on_world(case)


def test_a_match_does_not_wait_for_a_stage_that_is_not_reached() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 5))
        await asyncio.sleep(1.0)
        world.addresses = (StageAddress("mem://nobody:1", range(4)),)
        world.ref = PoolRef("g2", Epoch(2), 0)
        await world.attach()
        now = asyncio.get_running_loop().time
        begun = now()
        assert await world.match(chain(1, 5)) == [0]
        assert now() - begun < 0.03

    on_world(case)


def test_two_prompts_that_begin_alike_share_one_restore() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 5))
        await asyncio.sleep(1.0)
        await world.crowd_out()
        other = (*chain(1, 4), content(50))
        assert await world.match(chain(1, 5), other, chain(70, 2)) == [5, 4, 0]
        assert (await world.stats())["restored"] == 5

    on_world(case)


def test_a_match_waits_no_longer_than_it_may_and_the_rest_comes_later() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 5))
        await asyncio.sleep(1.0)
        await world.crowd_out()
        gate = world.stages[1].hold = asyncio.Event()
        before = asyncio.get_running_loop().time()
        assert await world.match(chain(1, 5)) == [0]
        assert 0.19 < asyncio.get_running_loop().time() - before < 0.25
        gate.set()
        await asyncio.sleep(0.5)
        assert await world.match(chain(1, 5)) == [5]
        stats = await world.stats()
        assert (stats["late_restores"], stats["restored"]) == (1, 5)

    on_world(case)


def test_flipped_bits_on_the_way_up_are_not_kept() -> None:
    async def case(world: World) -> None:
        world.stages[0].flip_saved = True
        await world.compute(chain(1, 3))
        await asyncio.sleep(1.0)
        await world.crowd_out()
        assert await world.match(chain(1, 3)) == [0]
        stats = await world.stats()
        assert (stats["wrong_pages"], stats["saved"], stats["host_contents"]) == (3, 0, 0)

    on_world(case)


def test_flipped_bits_on_the_way_down_are_refused_and_forgotten() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 3))
        await asyncio.sleep(1.0)
        await world.crowd_out()
        world.stages[1].flip_loaded = True
        assert await world.match(chain(1, 3)) == [0]
        world.stages[1].flip_loaded = False
        assert await world.match(chain(1, 3)) == [0], "computed again"
        stats = await world.stats()
        assert (stats["refused"], stats["host_contents"]) == (3, 0)

    on_world(case)


def test_a_worker_that_refuses_costs_a_hit_and_nothing_else() -> None:
    async def case(world: World) -> None:
        world.stages[0].error = "no time"
        await world.compute(chain(1, 3))
        await asyncio.sleep(0.5)
        world.stages[0].error = ""
        await world.compute(chain(1, 3))
        await asyncio.sleep(2.0)
        await world.crowd_out()
        world.stages[0].error = "no time"
        assert await world.match(chain(1, 3)) == [0]
        world.stages[0].error = ""
        assert await world.match(chain(1, 3)) == [3]
        stats = await world.stats()
        assert (stats["failed_saves"], stats["failed_restores"]) == (1, 1)

    on_world(case)


def test_a_lost_link_amid_a_restore_makes_the_pool_be_attached_anew() -> None:
    """Nobody knows whether the worker will still write those blocks; the next attach says that it may not."""

    async def case(world: World) -> None:
        await world.compute(chain(1, 3))
        await asyncio.sleep(1.0)
        await world.crowd_out()
        world.stages[1].hold = asyncio.Event()
        asking = asyncio.create_task(world.match(chain(1, 3)))
        await asyncio.sleep(0.05)
        world.ring.cut("kvstore", "worker1")
        with pytest.raises(RpcRejected, match="in doubt: attach anew"):
            await asking
        with pytest.raises(RpcRejected, match="in doubt: attach anew"):
            await world.exchange(lease_count=1)
        world.stages[1].hold = None
        await world.attach()
        for stage in world.stages:
            stage.fence = world.ref.attachment
        assert len((await world.exchange(lease_count=NUM_BLOCKS)).leased) == NUM_BLOCKS
        await world.attach()
        await asyncio.sleep(1.0)
        assert await world.match(chain(1, 3)) == [3], "over a new link"

    on_world(case)


def test_an_attach_amid_a_restore_and_a_save_voids_both() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 3))
        await asyncio.sleep(1.0)
        await world.crowd_out()
        gate = asyncio.Event()
        for stage in world.stages:
            stage.hold = gate
        await world.compute(chain(11, 3))
        asking = asyncio.create_task(world.match(chain(1, 3)))
        await asyncio.sleep(0.05)
        world.stages[0].fence = world.ref.attachment + 1
        await world.attach()
        with pytest.raises(RpcRejected, match="old epoch"):
            await asking
        gate.set()
        await asyncio.sleep(2.0)
        assert len((await world.exchange(lease_count=NUM_BLOCKS)).leased) == NUM_BLOCKS
        world.store.ledger.check()
        assert await world.match(chain(11, 3)) == [0]

    on_world(case)


def test_what_proved_wrong_in_a_pool_is_in_no_tier_any_more() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 3))
        await asyncio.sleep(1.0)
        request = messages.build_match(Match(world.ref, (chain(1, 3),)))
        (blocks,) = messages.parse_matched(await world.call(messages.MATCH, request), 1)
        await world.exchange(bad=(blocks[1],), releases=blocks)
        await world.crowd_out()
        assert await world.match(chain(1, 3)) == [1]

    on_world(case)


def test_a_killed_kvstore_leaves_blocks_to_its_successor() -> None:
    async def case(world: World) -> None:
        await world.compute(chain(1, 5))
        await asyncio.sleep(1.0)
        await world.stop(kill=True)
        number = max(world.files.files)
        world.files.tear(number, len(world.files.files[number]) - 1)
        await world.start()
        await world.attach(known=False)
        assert await world.match(chain(1, 5)) == [0], "the head was written last, and torn"
        await world.compute(chain(1, 1))
        assert await world.match(chain(1, 5)) == [5]
        assert (await world.stats())["disk_damaged"] == 1

    on_world(case, DISK)


def test_listeners_and_people_see_the_tiers() -> None:
    async def case(world: World) -> None:
        view = CacheView()
        boot = world.store.boot

        async def ask(generation: str) -> cache.Holdings:
            question = cache.build_question(HoldingsQuestion(generation))
            return cache.parse_holdings(await world.call(cache.HOLDINGS, question))

        bus = MemoryBus(world.broker, "listener")
        await bus.subscribe(subjects.cache_changes(boot), lambda m: view.heard(cache.parse_changes(m.data)))
        view.answered(await ask(""))
        for generation in list(view.pools):
            view.answered(await ask(generation))
        assert view.whole
        await world.compute(chain(1, 4))
        await asyncio.sleep(1.0)
        for tier in (TIER_HOST, TIER_DISK):
            assert view.pools[tier].held == dict(zip(chain(1, 4), (NO_PARENT, *chain(1, 3)), strict=True))
            known = await ask(tier)
            assert known.tier == tier and {h.content for h in known.held} == set(chain(1, 4))
            totals = next(p for p in known.pools if p.tier == tier)
            assert totals.total == 4 and totals.num_bytes >= 4 * 4 * PAGE and totals.bytes_max == 1 << 20
        await world.crowd_out()
        assert view.longest(world.ref.generation, chain(1, 4)) == 0
        assert view.longest(TIER_HOST, chain(1, 4)) == 4
        await bus.close()

    on_world(case, replace(HOST, disk_bytes=1 << 20, disk_dir="-"))

"""The ledger served: registry, statuses, spans, ends."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from chassis import log, subjects
from chassis.cache_view import CacheView
from chassis.errors import BusError, BusTimeout, RpcRejected, RpcUnavailable
from chassis.ids import BlockHash, BlockId, BootId, Epoch
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.memory_rpc import MemoryRpc, MemoryRpcNetwork
from chassis.messages import cache
from chassis.messages import kvstore as messages
from chassis.messages.cache import CacheChanges, HoldingsQuestion
from chassis.messages.kvstore import NO_PARENT, Attach, Commit, Exchange, Match, PoolRef, TraceRef
from chassis.messages.registry import parse_kvstore
from chassis.ports import Ports
from chassis.trace import TraceContext
from chassis.wire import kvstore_pb2 as pb
from kvstore.config import Config
from kvstore.service import KvStore
from tests.sim.loop import run as on_virtual_clock
from tests.sim.tracer import SimTracer

REF = PoolRef("g", Epoch(1), 1)
A, B, C = BlockHash(b"a" * 32), BlockHash(b"b" * 32), BlockHash(b"c" * 32)
PARENT = TraceContext(b"t" * 16, b"s" * 8)


@dataclass
class World:
    broker: MemoryBroker
    network: MemoryRpcNetwork
    tracer: SimTracer
    store: KvStore
    bus: MemoryBus
    rpc: MemoryRpc
    running: "asyncio.Task[None]"
    address: str = ""

    async def call(self, method: Any, request: Any) -> Any:
        return await self.rpc.call(self.address, method, request, 1.0)

    async def attach(self, num_blocks: int = 4) -> Any:
        return await self.call(
            messages.ATTACH, messages.build_attach(Attach(REF, ("w.1",), num_blocks, 16, "n"))
        )


async def found(bus: MemoryBus) -> str:
    """The address that the registry gives."""
    async with asyncio.timeout(5.0):
        while True:
            for entry in await bus.entries(subjects.KVSTORES):
                assert entry.value is not None
                return parse_kvstore(entry.value).rpc_address
            await asyncio.sleep(0.01)


def on_world(case: Callable[[World], Awaitable[None]], config: Config = Config(check_every_calls=1)) -> None:  # noqa: B008
    async def main() -> None:
        log.bind(level="off")
        broker, network, tracer = MemoryBroker(wall_ns=lambda: 0), MemoryRpcNetwork(), SimTracer(1)
        ids = iter(range(100))
        own = MemoryBus(broker, "kvstore")
        clock = asyncio.get_running_loop().time
        ports = Ports(
            bus=own,
            rpc=network.rpc("kvstore"),
            transport=None,  # type: ignore[arg-type]
            tracer=tracer.of("kvstore"),
            new_id=lambda: f"boot{next(ids)}",
            new_seed=lambda: 0,
            wall_ns=lambda: int(clock() * 1e9),
        )
        bus = MemoryBus(broker, "test")
        store = KvStore(config, ports)
        running = asyncio.create_task(store.run())
        world = World(broker, network, tracer, store, bus, network.rpc("batcher"), running)
        try:
            world.address = await found(bus)
            await case(world)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await own.close()
            await bus.close()
            await network.close()

    on_virtual_clock(main())


def test_attach_match_exchange_and_statistics_over_the_wire() -> None:
    async def case(world: World) -> None:
        attached = await world.attach()
        assert (attached.kvstore_boot, attached.free, attached.cached) == ("boot0", 4, 0)
        done = messages.parse_exchanged(
            await world.call(messages.EXCHANGE, messages.build_exchange(Exchange(REF, lease_count=2)))
        )
        commits = (Commit(done.leased[0], A, NO_PARENT), Commit(done.leased[1], B, A))
        call = messages.build_exchange(Exchange(REF, commits, done.leased))
        assert messages.parse_exchanged(await world.call(messages.EXCHANGE, call)).cached == 2
        matched = await world.call(messages.MATCH, messages.build_match(Match(REF, ((A, B), (C,)))))
        assert messages.parse_matched(matched, 2) == (done.leased, ())
        stats = messages.parse_stats(await world.call(messages.STATS, messages.build_stats_question("g")))
        assert (stats.total, stats.free, stats.leased, stats.cached, stats.hits) == (4, 2, 2, 0, 2)

    on_world(case)


def test_refusals_come_as_statuses_and_change_nothing() -> None:
    async def case(world: World) -> None:
        for method, request, code, words in (
            (messages.MATCH, pb.MatchRequest(), "FAILED_PRECONDITION", "unknown pool ''"),
            (messages.MATCH, pb.MatchRequest(chains=[b"x"]), "INVALID_ARGUMENT", "chains: 1 bytes"),
            (messages.ATTACH, pb.AttachRequest(), "INVALID_ARGUMENT", "pool.generation"),
            (
                messages.EXCHANGE,
                pb.ExchangeRequest(release_blocks=b"x"),
                "INVALID_ARGUMENT",
                "release_blocks",
            ),
            (messages.STATS, pb.StatsRequest(generation="x"), "NOT_FOUND", "no pool 'x'"),
        ):
            with pytest.raises(RpcRejected, match=words) as caught:
                await world.call(method, request)
            assert caught.value.code == code
        await world.attach()
        release = messages.build_exchange(Exchange(REF, releases=(BlockId(1),)))
        with pytest.raises(RpcRejected, match="INVALID_ARGUMENT: release_blocks: 1 is not leased"):
            await world.call(messages.EXCHANGE, release)
        assert not world.running.done()

    on_world(case)


def test_spans_belong_to_the_requests_that_asked() -> None:
    async def case(world: World) -> None:
        await world.attach()
        mine = (TraceRef("r1", PARENT.encode()), TraceRef("r2", b"not a context"))
        await world.call(messages.MATCH, messages.build_match(Match(REF, ((A, B), (B,)), mine)))
        await world.call(messages.MATCH, messages.build_match(Match(REF, ((A,),))))
        await world.call(messages.EXCHANGE, messages.build_exchange(Exchange(REF, lease_count=9)))
        (match,) = world.tracer.spans
        assert (match.key, match.name) == ("r1", "kvstore.match")
        assert match.context.trace_id == PARENT.trace_id and match.parent == PARENT.span_id
        assert match.attributes == {"shoal.blocks_asked": 2, "shoal.blocks_hit": 0}
        assert match.start_ns <= match.end_ns

    on_world(case)


def test_the_registry_entry_is_refreshed_and_gone_after_a_drain() -> None:
    async def case(world: World) -> None:
        key = subjects.kvstore_key(world.store.boot)
        first = await world.bus.entry(key)
        await asyncio.sleep(subjects.REGISTRY_REFRESH_S + 0.1)
        second = await world.bus.entry(key)
        assert first is not None and second is not None and second.revision > first.revision
        await world.store.drain()
        await asyncio.wait_for(world.running, 5.0)
        assert await world.bus.entries(subjects.KVSTORES) == []
        with pytest.raises(RpcUnavailable):
            await world.attach()

    on_world(case)


def test_it_serves_without_the_broker_and_registers_when_it_is_back() -> None:
    async def case(world: World) -> None:
        key = subjects.kvstore_key(world.store.boot)
        before = await world.bus.entry(key)
        assert before is not None
        world.broker.stop()
        await asyncio.sleep(subjects.REGISTRY_REFRESH_S + 1.0)
        await world.attach()
        world.broker.start()
        await asyncio.sleep(2.0)  # less than until the next refresh
        after = await world.bus.entry(key)
        assert after is not None and after.revision > before.revision

    on_world(case)


def test_a_drain_ends_without_the_broker() -> None:
    async def case(world: World) -> None:
        world.broker.stop()
        await world.store.drain()
        await asyncio.wait_for(world.running, 5.0)

    on_world(case)


def test_a_killed_kvstore_leaves_no_task_and_frees_its_address() -> None:
    async def case(world: World) -> None:
        world.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await world.running
        with pytest.raises(RpcUnavailable, match="nobody listens"):
            await world.attach()
        assert len(await world.bus.entries(subjects.KVSTORES)) == 1  # nobody said goodbye

    on_world(case)


def test_a_ledger_that_does_not_add_up_ends_the_service() -> None:
    async def case(world: World) -> None:
        await world.attach()
        world.store.ledger.pools["g"].table.free.pop()
        with pytest.raises(RpcRejected, match="INTERNAL"):
            await world.call(messages.EXCHANGE, messages.build_exchange(Exchange(REF)))
        with pytest.raises(AssertionError, match="a block is lost"):
            await asyncio.wait_for(world.running, 5.0)

    on_world(case)


def test_what_is_held_is_told_on_the_bus_and_over_rpc() -> None:
    async def case(world: World) -> None:
        boot = world.store.boot
        heard: list[CacheChanges] = []
        await world.bus.subscribe(
            subjects.cache_changes(BootId("*")), lambda m: heard.append(cache.parse_changes(m.data))
        )
        await world.attach()
        await asyncio.sleep(0.1)
        assert heard == [], "nobody asked"
        question = cache.encode_question(HoldingsQuestion())
        reply = await world.bus.request(subjects.cache_questions(boot), question, 1.0)
        known = cache.decode_holdings(reply.data)
        assert [p.ref for p in known.pools] == [REF] and known.held == ()
        done = messages.parse_exchanged(
            await world.call(messages.EXCHANGE, messages.build_exchange(Exchange(REF, lease_count=2)))
        )
        commits = (Commit(done.leased[0], A, NO_PARENT), Commit(done.leased[1], B, A))
        await world.call(messages.EXCHANGE, messages.build_exchange(Exchange(REF, commits, done.leased)))
        await asyncio.sleep(2.5)
        (changes,) = heard
        assert (changes.boot, changes.number) == (boot, known.number + 1)
        assert changes.stored == ((A, NO_PARENT), (B, A))
        asked = cache.build_question(HoldingsQuestion("g"))
        holdings = cache.parse_holdings(await world.call(cache.HOLDINGS, asked))
        assert (holdings.number, holdings.next_block) == (changes.number, None)
        assert {(h.content, h.references, h.unused_ms) for h in holdings.held} == {(A, 0, 2500), (B, 0, 2500)}
        (pool,) = holdings.pools
        assert (pool.total, pool.free, pool.leased, pool.cached) == (4, 2, 0, 2)

    on_world(case)


def test_questions_that_are_none_are_not_answered_and_harm_nothing() -> None:
    async def case(world: World) -> None:
        subject = subjects.cache_questions(world.store.boot)
        with pytest.raises(BusTimeout):
            await world.bus.request(subject, b"\xff", 0.2)
        reply = await world.bus.request(subject, cache.encode_question(HoldingsQuestion("nobody", 7)), 0.2)
        assert cache.decode_holdings(reply.data).held == ()

    on_world(case)


def test_changes_go_on_when_the_bus_came_back() -> None:
    """What was told while it was away comes late, or its number is missing: never in disorder."""

    async def case(world: World) -> None:
        view = CacheView()
        subject = subjects.cache_questions(world.store.boot)
        await world.bus.subscribe(
            subjects.cache_changes(world.store.boot), lambda m: view.heard(cache.parse_changes(m.data))
        )
        await world.attach(64)

        async def learn() -> None:
            async with asyncio.timeout(30.0):
                while True:
                    question = cache.encode_question(view.question())
                    try:
                        reply = await world.bus.request(subject, question, 0.5)
                    except BusError:
                        await asyncio.sleep(0.1)
                        continue
                    view.answered(cache.decode_holdings(reply.data))
                    if view.whole and view.number == world.store.announcer.number:
                        return

        async def write(number: int) -> None:
            content = BlockHash(number.to_bytes(32, "big"))
            lease = messages.build_exchange(Exchange(REF, lease_count=1))
            (block,) = messages.parse_exchanged(await world.call(messages.EXCHANGE, lease)).leased
            commit = (Commit(block, content, NO_PARENT),)
            await world.call(messages.EXCHANGE, messages.build_exchange(Exchange(REF, commit, (block,))))

        await learn()
        for number in range(1, 20):
            if number == 8:
                world.broker.cut("kvstore")
            if number == 12:
                world.broker.heal("kvstore")
            await write(number)
        await learn()
        held = {h for h, _ in world.store.ledger.pools["g"].index.hashes()}
        assert view.pools["g"].held.keys() == held and len(held) == 19

    on_world(case)

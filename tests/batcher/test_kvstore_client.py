"""The batcher's way to kvstore, against the real service over a network that misbehaves."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from batcher.events import (
    AttachPool,
    BlockEvent,
    BlocksExchanged,
    BlocksMatched,
    ExchangeBlocks,
    MatchBlocks,
    PoolAttached,
    PoolMoves,
)
from batcher.kvstore_client import KvstoreClient, Pool
from batcher.rendezvous import ranked
from chassis import log, subjects
from chassis.ids import BlockHash, BlockId, BootId, Epoch, RequestId
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.memory_rpc import MemoryRpcNetwork, RpcHabits
from chassis.messages.kvstore import TraceRef, keep_of_priority
from chassis.messages.registry import KvstoreEntry, build_kvstore
from chassis.ports import Ports
from chassis.trace import TraceContext
from kvstore.config import Config
from kvstore.service import KvStore
from tests.sim.loop import run as on_virtual_clock
from tests.sim.tracer import SimTracer

ZEROS, A = BlockHash(bytes(32)), BlockHash(b"a" * 32)
POOL = Pool("g", Epoch(5), ("w.1",), 8, 16, "n")
OWNER, NEXT = ranked(POOL.generation, ("one", "two"))
E = TypeVar("E", BlocksExchanged, BlocksMatched, PoolAttached)


@dataclass
class World:
    group: asyncio.TaskGroup
    broker: MemoryBroker = field(default_factory=lambda: MemoryBroker(wall_ns=lambda: 0))
    network: MemoryRpcNetwork = field(default_factory=lambda: MemoryRpcNetwork(lambda: 0.5))
    tracer: SimTracer = field(default_factory=lambda: SimTracer(1))
    calls: int = 0
    stores: dict[str, KvStore] = field(default_factory=dict)
    running: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    buses: dict[str, MemoryBus] = field(default_factory=dict)
    moves: list[PoolMoves] = field(default_factory=list)

    def ports(self, name: str) -> Ports:
        bus = self.buses[name] = MemoryBus(self.broker, name)
        return Ports(
            bus=bus,
            rpc=self.network.rpc(name),
            transport=None,  # type: ignore[arg-type]
            tracer=self.tracer.of(name),
            new_id=lambda: f"{name}-boot{len(self.stores)}",
            new_seed=lambda: 0,
            wall_ns=lambda: 0,
        )

    async def start(self, name: str, **settings: Any) -> KvStore:
        config = Config(check_every_calls=1, name=name, **settings)
        store = self.stores[name] = KvStore(config, self.ports(name))
        self.running[name] = self.group.create_task(store.run())
        registered = asyncio.Event()
        await self.buses[name].watch(subjects.kvstore_key(store.boot), lambda _: registered.set())
        async with asyncio.timeout(5.0):
            await registered.wait()
        return store

    async def kill(self, name: str) -> None:
        self.network.kill(name)
        self.running.pop(name).cancel()
        self.buses.pop(name).kill()
        await asyncio.sleep(0)

    async def client(self, name: str = "batcher") -> KvstoreClient:
        client = KvstoreClient(self.ports(name), self.moves.append)
        await client.start(self.group)
        return client

    async def attach(
        self,
        client: KvstoreClient,
        held: tuple[int, ...] = (),
        committed: tuple[tuple[int, BlockHash], ...] = (),
    ) -> PoolAttached:
        self.calls += 1
        blocks = tuple(BlockId(b) for b in held)
        known = tuple((BlockId(b), h) for b, h in committed)
        return self.of(PoolAttached, await client.call(AttachPool(self.calls, blocks, known)))

    async def match(self, client: KvstoreClient, *chains: tuple[BlockHash, ...]) -> BlocksMatched:
        self.calls += 1
        asking = tuple(RequestId(f"r{i}") for i in range(len(chains)))
        return self.of(BlocksMatched, await client.call(MatchBlocks(self.calls, asking, chains)))

    async def exchange(
        self,
        client: KvstoreClient,
        commits: tuple[tuple[int, BlockHash], ...] = (),
        releases: tuple[int, ...] = (),
        lease: int = 0,
        keeps: tuple[int, ...] = (),
    ) -> BlocksExchanged:
        self.calls += 1
        effect = ExchangeBlocks(
            self.calls,
            tuple((BlockId(b), h, ZEROS) for b, h in commits),
            tuple(BlockId(b) for b in releases),
            lease,
            keeps,
        )
        return self.of(BlocksExchanged, await client.call(effect))

    def of(self, kind: type[E], event: BlockEvent) -> E:
        """Every effect ends in its own event, now."""
        assert isinstance(event, kind) and event.call == self.calls
        assert event.now == asyncio.get_running_loop().time()
        return event

    async def cache_a(self, client: KvstoreClient) -> None:
        """Content A is in the cache."""
        (block,) = (await self.exchange(client, lease=1)).leased
        assert not (await self.exchange(client, ((block, A),), (block,))).failed


def on_world(case: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        log.bind(level="off")
        async with asyncio.TaskGroup() as group:
            world = World(group)
            await case(world)
            for bus in world.buses.values():
                await bus.close()
            group.create_task(cancel(group))
        await world.network.close()

    async def cancel(group: asyncio.TaskGroup) -> None:
        raise Over

    class Over(Exception):
        pass

    async def ended() -> None:
        try:
            await main()
        except* Over:
            pass

    on_virtual_clock(ended())


def test_effects_come_back_as_their_events() -> None:
    async def case(world: World) -> None:
        await world.start("k")
        client = await world.client()
        client.open(POOL)
        assert client.generation == "g"
        attached = await world.attach(client, (3, 3, 4), ((3, A),))
        assert (attached.failed, attached.free, attached.cached) == (False, 6, 0)
        assert (await world.match(client, (A, ZEROS), ())).blocks == ((3,), ())
        done = await world.exchange(client, releases=(3, 3, 3, 4), lease=2)
        assert (done.failed, len(done.leased), done.free, done.cached) == (False, 2, 5, 1)

    on_world(case)


def test_a_release_brings_along_how_long_its_content_is_to_stay() -> None:
    async def case(world: World) -> None:
        store = await world.start("k")
        client = await world.client()
        client.open(POOL)
        await world.attach(client, (3, 4), ((3, A),))
        await world.exchange(client, releases=(3,), keeps=(keep_of_priority(0),))
        (held,) = store.ledger.holdings("g", 0, 0.0)[1]
        assert (held.content, held.keep) == (A, 1)

    on_world(case)


def test_without_a_kvstore_a_pool_or_an_attach_everything_fails() -> None:
    async def case(world: World) -> None:
        client = await world.client()
        client.open(POOL)
        assert (await world.attach(client)).failed
        await world.start("k")
        assert (await world.match(client, (A,))).failed
        assert (await world.exchange(client, lease=1)).failed
        assert not (await world.attach(client)).failed
        client.open(replace(POOL, epoch=Epoch(6)))
        assert (await world.exchange(client, lease=1)).failed
        assert not (await world.attach(client)).failed
        client.close()
        assert (await world.attach(client)).failed and client.generation == ""

    on_world(case)


def test_a_lost_reply_fails_and_only_an_attach_helps() -> None:
    async def case(world: World) -> None:
        store = await world.start("k")
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        world.network.habits = RpcHabits(reply_loss=1.0)
        assert (await world.exchange(client, lease=3)).failed
        assert store.ledger.stats().leased == 3
        world.network.habits = RpcHabits()
        assert (await world.exchange(client, lease=1)).failed  # not even asked
        assert store.ledger.stats().leased == 3
        assert (await world.attach(client)).free == 8
        assert len((await world.exchange(client, lease=8)).leased) == 8

    on_world(case)


def test_a_late_exchange_is_refused_after_the_attach() -> None:
    async def case(world: World) -> None:
        store = await world.start("k")
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        world.network.habits = RpcHabits(delay_min_s=3.0, delay_max_s=3.0)
        assert (await world.exchange(client, lease=3)).failed  # after 1 s; it arrives after 3
        world.network.habits = RpcHabits()
        assert not (await world.attach(client)).failed
        await asyncio.sleep(5.0)
        assert (store.ledger.stats().leased, store.ledger.stats().old_epochs) == (0, 1)

    on_world(case)


def test_an_answer_from_before_the_attach_is_not_believed() -> None:
    async def case(world: World) -> None:
        await world.start("k")
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        await world.cache_a(client)
        world.network.habits = RpcHabits(delay_min_s=0.4, delay_max_s=0.4)
        asked = asyncio.create_task(client.call(MatchBlocks(100, (RequestId("r"),), ((A,),))))
        await asyncio.sleep(0.5)  # its answer is on the way
        world.network.habits = RpcHabits()
        world.calls = 100
        await world.attach(client)
        event = await asked
        assert isinstance(event, BlocksMatched) and event.failed

    on_world(case)


def test_a_restarted_kvstore_is_found_and_rebuilt() -> None:
    async def case(world: World) -> None:
        await world.start("k")
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        (block,) = (await world.exchange(client, lease=1)).leased
        await world.kill("k")
        assert (await world.exchange(client, ((block, A),))).failed
        assert (await world.attach(client, (block,), ((block, A),))).failed
        await world.start("k")  # the dead one's entry is still there
        attached = await world.attach(client, (block,), ((block, A),))
        assert (attached.failed, attached.free) == (False, 7)
        assert (await world.match(client, (A,))).blocks == ((block,),)

    on_world(case)


def test_a_new_batcher_finds_the_cache_where_there_is_one_kvstore() -> None:
    async def case(world: World) -> None:
        await world.start("k")
        first = await world.client()
        first.open(POOL)
        await world.attach(first)
        await world.cache_a(first)
        second = await world.client("second")
        second.open(replace(POOL, epoch=Epoch(6), prior_epoch=POOL.epoch))
        world.calls = 0
        assert (await world.attach(second)).cached == 1
        assert len((await world.match(second, (A,))).blocks[0]) == 1
        world.calls = 50
        assert (await world.exchange(first, lease=1)).failed  # fenced
        assert (await world.attach(first)).failed

    on_world(case)


def test_a_cache_is_not_trusted_after_another_kvstore_had_the_pool() -> None:
    """The second kvstore gave the block to others meanwhile: what the first remembers would be a lie."""

    async def case(world: World) -> None:
        one = await world.start(OWNER)
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        await world.cache_a(client)
        await world.start(NEXT)
        world.network.partition("batcher", OWNER)
        assert (await world.match(client, (A,))).failed
        assert (await world.attach(client)).free == 8  # at the second
        world.network.heal()
        world.network.partition("batcher", NEXT)
        assert (await world.match(client, (A,))).failed
        again = await world.attach(client)
        assert not again.failed and again.cached == 0
        assert one.ledger.stats().free == 8
        assert (await world.match(client, (A,))).blocks == ((),)

    on_world(case)


def test_a_cache_is_not_trusted_after_another_batcher_was_elsewhere() -> None:
    """Its kvstore is gone with what it knew; the one that is left had the pool two epochs ago."""

    async def case(world: World) -> None:
        await world.start(OWNER)
        first, second = await world.client(), await world.client("second")
        first.open(POOL)
        await world.attach(first)
        await world.cache_a(first)
        await world.start(NEXT)
        second.open(replace(POOL, epoch=Epoch(6), prior_epoch=POOL.epoch))
        world.network.partition("second", OWNER)
        assert (await world.attach(second)).failed
        assert (await world.attach(second)).free == 8
        await world.cache_a(second)
        await world.kill(NEXT)
        await asyncio.sleep(subjects.REGISTRY_TTL_S + 1)
        first.open(replace(POOL, epoch=Epoch(7), prior_epoch=Epoch(6)))
        again = await world.attach(first)
        assert (again.failed, again.cached) == (False, 0)

    on_world(case)


def test_a_cache_is_not_trusted_after_its_batcher_moved_on_and_died_with_where_it_went() -> None:
    """Its workers know under which attach they wrote last: not under the one that is left to ask."""

    async def case(world: World) -> None:
        await world.start(OWNER)
        first = await world.client()
        first.open(POOL)
        await world.attach(first)
        await world.cache_a(first)
        await world.start(NEXT)
        world.network.partition("batcher", OWNER)
        assert (await world.match(first, (A,))).failed
        assert not (await world.attach(first)).failed  # at the other one, within the epoch
        await world.cache_a(first)
        heard = first.attachment
        await world.kill(NEXT)
        await asyncio.sleep(subjects.REGISTRY_TTL_S + 1)
        second = await world.client("second")
        second.open(replace(POOL, epoch=Epoch(6), prior_epoch=POOL.epoch, prior_attachment=heard))
        attached = await world.attach(second)
        assert (attached.failed, attached.cached) == (False, 0)

    on_world(case)


def test_a_new_batcher_finds_the_cache_among_several_kvstores() -> None:
    """It is told as of which attach the memory is, so it need not guess where that was."""

    async def case(world: World) -> None:
        await world.start(OWNER)
        await world.start(NEXT)
        first = await world.client()
        first.open(POOL)
        await world.attach(first)
        await world.cache_a(first)
        second = await world.client("second")
        known = replace(POOL, epoch=Epoch(6), prior_epoch=POOL.epoch, prior_attachment=first.attachment)
        second.open(known)
        world.calls = 50
        assert (await world.attach(second)).cached == 1
        assert len((await world.match(second, (A,))).blocks[0]) == 1

    on_world(case)


def test_a_cache_is_kept_over_epochs_of_ones_own_and_lost_answers() -> None:
    async def case(world: World) -> None:
        await world.start("one")
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        await world.cache_a(client)
        client.open(replace(POOL, epoch=Epoch(9), intact=True))  # of several epochs, all ours
        world.network.habits = RpcHabits(reply_loss=1.0)
        assert (await world.attach(client)).failed
        world.network.habits = RpcHabits()
        assert (await world.attach(client)).cached == 1
        client.open(replace(POOL, epoch=Epoch(11), prior_epoch=Epoch(10)))  # somebody else's
        assert (await world.attach(client)).cached == 0

    on_world(case)


def test_a_pool_lies_at_its_owner_and_leaves_one_that_does_not_answer() -> None:
    async def case(world: World) -> None:
        owner, other = await world.start(OWNER), await world.start(NEXT)
        client = await world.client()
        client.open(POOL)
        for _ in range(3):
            await world.attach(client)
            assert (owner.ledger.stats().total, other.ledger.stats().total) == (8, 0)
            await asyncio.sleep(4.0)
        await world.kill(OWNER)
        assert (await world.attach(client)).failed
        assert not (await world.attach(client)).failed
        assert other.ledger.stats().total == 8 and not world.moves

    on_world(case)


def test_an_entry_that_names_another_than_its_key_is_nobodys() -> None:
    """It could not be blamed for not answering, and the pool would never be attached."""

    async def case(world: World) -> None:
        await world.start(NEXT)
        client = await world.client()
        client.open(POOL)
        lie = build_kvstore(KvstoreEntry(BootId("elsewhere"), "nowhere:1", name=OWNER))
        await world.buses[NEXT].put_entry(subjects.kvstore_key(BootId("stranger")), lie)
        await asyncio.sleep(1.0)
        assert not (await world.attach(client)).failed

    on_world(case)


def test_a_pool_moves_to_a_better_one_that_joins_and_back_when_that_leaves() -> None:
    """With all that is held; where it was it is forgotten."""

    async def case(world: World) -> None:
        other = await world.start(NEXT)
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        (block,) = (await world.exchange(client, lease=1)).leased
        await world.exchange(client, ((block, A),))
        owner = await world.start(OWNER)
        await asyncio.sleep(1.0)
        assert len(world.moves) == 1
        assert not (await world.attach(client, (block,), ((block, A),))).failed
        await asyncio.sleep(1.0)
        assert (owner.ledger.stats().total, other.ledger.stats().total) == (8, 0)
        assert (await world.match(client, (A,))).blocks == ((block,),)
        assert len(world.moves) == 1

        began = asyncio.get_running_loop().time()
        leaving = asyncio.create_task(owner.drain())
        await asyncio.sleep(0.1)
        assert len(world.moves) == 2 and not leaving.done()
        attached = await world.attach(client, (block, block), ((block, A),))
        assert not attached.failed and other.ledger.stats().leased == 1
        await leaving
        assert asyncio.get_running_loop().time() - began < 0.5, "its pools have left: nothing to wait for"
        await world.running.pop(OWNER)

    on_world(case)


def test_nothing_moves_to_who_cannot_be_reached_or_does_not_take_it() -> None:
    async def case(world: World) -> None:
        other = await world.start(NEXT)
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        await world.cache_a(client)
        world.network.partition("batcher", OWNER)
        await world.start(OWNER)
        await asyncio.sleep(20.0)  # it writes anew again and again
        assert not world.moves
        assert len((await world.match(client, (A,))).blocks[0]) == 1
        await world.kill(OWNER)
        world.network.heal()
        small = await world.start(OWNER, blocks_max=4)
        await asyncio.sleep(1.0)
        assert len(world.moves) == 1
        assert (await world.attach(client)).failed
        again = await world.attach(client)
        assert (again.failed, again.cached) == (False, 1)
        await asyncio.sleep(20.0)
        assert (len(world.moves), small.ledger.stats().total, other.ledger.stats().total) == (1, 0, 8)

    on_world(case)


def test_silence_of_the_registry_moves_nothing() -> None:
    async def case(world: World) -> None:
        owner, other = await world.start(OWNER), await world.start(NEXT)
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        await world.cache_a(client)
        world.buses[OWNER].kill()
        await asyncio.sleep(subjects.REGISTRY_TTL_S + 10)
        assert not world.moves
        assert (await world.attach(client)).cached == 1
        assert (owner.ledger.stats().total, other.ledger.stats().total) == (8, 0)

    on_world(case)


def test_one_that_comes_again_under_its_name_gets_its_pools_again() -> None:
    async def case(world: World) -> None:
        await world.start(OWNER)
        other = await world.start(NEXT)
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        await world.kill(OWNER)
        assert (await world.attach(client)).failed
        assert not (await world.attach(client)).failed
        assert other.ledger.stats().total == 8
        again = await world.start(OWNER)
        await asyncio.sleep(1.0)
        assert len(world.moves) == 1
        assert not (await world.attach(client)).failed
        assert again.ledger.stats().total == 8

    on_world(case)


def test_prompts_are_looked_for_where_the_pools_lie() -> None:
    async def case(world: World) -> None:
        stores = {name: await world.start(name) for name in ("one", "two", "three", "four")}
        first, second = await world.client(), await world.client("second")
        first.open(POOL)
        await world.attach(first)
        await world.cache_a(first)
        second.open(replace(POOL, generation="h", worker_stamps=("w.2",)))
        world.calls = 0
        await world.attach(second)
        await world.cache_a(second)
        assert sorted(await first.locate([(A,)], ("h",))) == [("g", (1,)), ("h", (1,))]
        assert ("g", (1,)) in await first.locate([(A,)])
        keepers = {ranked(g, stores)[0] for g in ("g", "h")}
        assert {name for name, store in stores.items() if store.ledger.pools} == keepers

    on_world(case)


def test_a_pool_that_two_tell_of_is_as_its_owner_says() -> None:
    """One of them did not hear that it left."""

    async def case(world: World) -> None:
        await world.start(NEXT)
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        await world.cache_a(client)
        await world.start(OWNER)
        await asyncio.sleep(1.0)
        world.network.partition("batcher", NEXT)
        await world.attach(client)
        await asyncio.sleep(2.0)
        world.network.heal()
        second = await world.client("second")
        second.open(replace(POOL, generation="h", worker_stamps=("w.2",)))
        assert {name for name, store in world.stores.items() if store.ledger.pools} == {OWNER, NEXT}
        assert await second.locate([(A,)], ("g",)) in ((), (("g", (0,)),))

    on_world(case)


def test_steps_are_told_the_newest_attach_that_stood_in_their_epoch() -> None:
    async def case(world: World) -> None:
        await world.start("k")
        client = await world.client()
        assert client.attachment == 0
        client.open(POOL)
        assert client.attachment == 0
        await world.attach(client)
        first = world.calls
        assert client.attachment == first
        await world.kill("k")
        assert (await world.exchange(client, lease=1)).failed
        assert (await world.attach(client)).failed
        assert client.attachment == first, "what it had before is all that was leased"
        await world.start("other")
        await world.attach(client)
        assert client.attachment == world.calls > first
        client.open(replace(POOL, epoch=Epoch(6)))
        assert client.attachment == 0, "numbers begin anew"

    on_world(case)


def test_spans_reach_kvstore() -> None:
    async def case(world: World) -> None:
        await world.start("k")
        client = await world.client()
        client.open(POOL)
        await world.attach(client)
        parent = TraceContext(b"t" * 16, b"s" * 8)
        trace = TraceRef("r", parent.encode())
        await client.call(MatchBlocks(9, (RequestId("r"),), ((A,),)), [trace])
        (span,) = world.tracer.spans
        assert (span.key, span.name, span.parent) == ("r", "kvstore.match", parent.span_id)

    on_world(case)

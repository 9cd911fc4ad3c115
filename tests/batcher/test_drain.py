"""A batcher before it serves: it may be told to leave, and it waits for a bus that is away."""

import asyncio

import pytest

from batcher.config import Config
from batcher.core import LET_GO_S
from batcher.service import Batcher
from chassis import subjects
from chassis.ids import RequestId
from chassis.memory_bus import MemoryBus
from chassis.messages.request import Claim, Reason, Terminal, build_request, parse_record
from tests.batcher.test_service import deployment, request
from tests.sim.loop import run
from tests.sim.options import draw
from tests.sim.world import World


def test_a_batcher_without_a_model_leaves_when_asked() -> None:
    async def main() -> None:
        world = World(draw(0))
        world.habits.calm = True
        node = world.add("batcher", lambda ports: Batcher(Config(listen="mem://batcher:0"), ports))
        node.start()
        await asyncio.sleep(1)
        await node.drain(within_s=1.0)
        assert not world.killed, "it had to be killed"
        await world.close()
        assert not world.failures, world.failures

    run(main())


def test_a_batcher_that_starts_without_its_broker_waits_for_it() -> None:
    async def main() -> None:
        async with deployment() as world:
            await world.nodes["batcher"].kill()
            world.broker.stop()
            world.nodes["batcher"].start()
            await asyncio.sleep(5)
            world.broker.start()
            await asyncio.sleep(5)
            assert world.nodes["batcher"].service._core.standing

    run(main())


def test_more_stages_than_layers_is_said_at_once() -> None:
    async def main() -> None:
        async with deployment(num_stages=40) as world:
            await asyncio.sleep(1)
            assert "num_stages: 40; model fake has 8 layers" in world.failures[0], world.failures
            world.failures.clear()

    run(main())


def test_a_batcher_that_drains_is_not_counted_as_a_death() -> None:
    """Each leaves what it owns in the log; the third owner would else find two deaths and run it alone."""

    async def main() -> None:
        async with deployment(num_stages=2, drain_timeout_ms=200) as world:
            world.ring.delay_s = lambda a, b: 0.03  # the request outlasts the drains
            bus = MemoryBus(world.broker, "client")
            asked = build_request(request("r1", (1, 2, 3), max_tokens=80))
            await bus.append(subjects.request("fake", 5, RequestId("r1")), asked)
            async with asyncio.timeout(90):
                for attempt in range(1, 4):
                    while len(_claims(world)) < attempt:  # noqa: ASYNC110 - virtual time
                        await asyncio.sleep(0.1)
                    await world.drain(world.nodes["batcher"], within_s=5.0, after_s=0.1)
                while list(world.broker.streams[subjects.REQUESTS].messages()):  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.1)
            assert not world.killed, "it had to be killed"
            assert len(_claims(world)) == 4 and set(_deaths(world)) == {(0, 0)}
            end = await bus.last(subjects.RESULTS, subjects.result(RequestId("r1")))
            assert end is not None
            record = parse_record(end.data)
            assert isinstance(record, Terminal) and record.reason is Reason.LENGTH
            bus.kill()

    run(main())


def _claims(world: World) -> list[Claim]:
    log = world.broker.streams[subjects.RESULTS].messages()
    records = [parse_record(stored.data) for stored in log]
    return [r for r in records if isinstance(r, Claim) and not r.left]


def _deaths(world: World) -> list[tuple[int, int]]:
    return [(c.worker_deaths, c.batcher_deaths) for c in _claims(world)]


@pytest.mark.parametrize("who", ["worker0", "worker1"])
def test_a_worker_that_drains_is_not_counted_as_a_death(who: str) -> None:
    """Otherwise three restarts in good order would fail a long request as poison."""

    async def main() -> None:
        async with deployment(num_stages=2) as world:
            world.ring.delay_s = lambda a, b: 0.03  # the request outlasts the drain
            bus = MemoryBus(world.broker, "client")
            asked = build_request(request("r1", (1, 2, 3), max_tokens=200))
            await bus.append(subjects.request("fake", 5, RequestId("r1")), asked)
            async with asyncio.timeout(90):
                while not _deaths(world):  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.1)
                await world.drain(world.nodes[who], within_s=20.0, after_s=0.1)
                while list(world.broker.streams[subjects.REQUESTS].messages()):  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.1)
            assert not world.killed, "it had to be killed"
            assert _deaths(world)[-1] == (0, 0)
            bus.kill()

    run(main())


async def _leave(world: World, who: str) -> float:
    """Seconds until it has."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await world.nodes[who].drain(within_s=20.0)
    assert not world.killed, "it had to be killed"
    return loop.time() - began


def test_a_batcher_that_holds_nothing_leaves_at_once() -> None:
    """It used to wait for something to happen, and then said that requests were left."""

    async def main() -> None:
        async with deployment(num_stages=2) as world:
            await asyncio.sleep(5.25)  # between two empty steps
            assert await _leave(world, "batcher") < 0.1

    run(main())


@pytest.mark.parametrize("who", ["worker0", "worker1"])
def test_a_worker_without_a_spare_that_serves_nobody_leaves_at_once(who: str) -> None:
    """It used to wait for its batcher in vain; the pipeline stands again when it comes back."""

    async def main() -> None:
        async with deployment(num_stages=2) as world:
            await asyncio.sleep(5)
            core = world.nodes["batcher"].service._core
            assert core.standing
            assert await _leave(world, who) < LET_GO_S + 0.5
            assert not core.standing
            world.nodes[who].start()
            await asyncio.sleep(5)
            assert core.standing

    run(main())


def test_a_worker_without_a_spare_leaves_when_what_runs_has_ended() -> None:
    """In the epoch it began in, though that takes longer than a pipeline without requests is kept."""

    async def main() -> None:
        async with deployment(num_stages=2) as world:
            world.ring.delay_s = lambda a, b: 0.03
            bus = MemoryBus(world.broker, "client")
            asked = build_request(request("r1", (1, 2, 3), max_tokens=40))
            await bus.append(subjects.request("fake", 5, RequestId("r1")), asked)
            async with asyncio.timeout(90):
                while not _claims(world):  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.1)
                assert LET_GO_S + 2.0 < await _leave(world, "worker0") < 8.0
            end = await bus.last(subjects.RESULTS, subjects.result(RequestId("r1")))
            assert end is not None
            record = parse_record(end.data)
            assert isinstance(record, Terminal) and record.reason is Reason.LENGTH
            assert len(_claims(world)) == 1 and record.timings.interrupted_us == 0
            bus.kill()

    run(main())


@pytest.mark.parametrize("who", ["worker0", "worker1"])
def test_a_worker_leaves_under_continuous_traffic_once_what_runs_has_ended(who: str) -> None:
    """The other pipeline takes what comes and what waits; nothing is interrupted."""

    async def main() -> None:
        async with deployment(num_stages=1, running_len_max=4) as world:
            config = Config(listen="mem://batcher2:0", block_size_tokens=4, num_stages=1, running_len_max=4)
            second = world.add("batcher2", lambda ports: Batcher(config, ports))
            second.start()
            world.ring.delay_s = lambda a, b: 0.02
            bus = MemoryBus(world.broker, "client")
            asked = 0

            async def come() -> None:
                nonlocal asked
                while True:
                    body = build_request(request(f"r{asked}", (1, 2, asked % 50), max_tokens=25))
                    await bus.append(subjects.request("fake", 5, RequestId(f"r{asked}")), body)
                    asked += 1
                    await asyncio.sleep(0.3)

            async with asyncio.TaskGroup() as group:
                coming = group.create_task(come())
                await asyncio.sleep(10)
                assert all(world.nodes[n].service._core.standing for n in ("batcher", "batcher2"))
                assert await _leave(world, who) < 5.0
                await asyncio.sleep(3)
                coming.cancel()
            async with asyncio.timeout(60):
                while list(world.broker.streams[subjects.REQUESTS].messages()):  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.1)
            log = world.broker.streams[subjects.RESULTS].messages()
            ends = [r for r in (parse_record(stored.data) for stored in log) if isinstance(r, Terminal)]
            assert len(ends) == len(_claims(world)) == asked
            assert {(r.reason, r.timings.interrupted_us) for r in ends} == {(Reason.LENGTH, 0)}
            bus.kill()

    run(main())

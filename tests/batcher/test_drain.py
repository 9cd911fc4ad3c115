"""A batcher before it serves: it may be told to leave, and it waits for a bus that is away."""

import asyncio

from batcher.config import Config
from batcher.service import Batcher
from tests.batcher.test_service import deployment
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

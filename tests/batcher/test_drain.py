"""A batcher may be told to leave at any time, also before there is a model to serve."""

import asyncio

from batcher.config import Config
from batcher.service import Batcher
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

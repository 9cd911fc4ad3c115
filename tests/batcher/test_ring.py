"""The batcher's links: a dead worker's entry outlives it, and must not hold a living neighbour up."""

import asyncio

from batcher.service import Batcher
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

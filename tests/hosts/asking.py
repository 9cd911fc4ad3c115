"""Clients on a host: `python -m tests.hosts.asking ADDRESS SEED COUNT OUTPUT_LEN` asks the fake model.

Says `begun` when every stream has begun and `right` when each has come to its end as the oracle has it.
"""

import asyncio
import sys

from shoal.client import AsyncClient
from tests.e2e.rig import amid, draw_calls


async def main(address: str, seed: int, count: int, output_len: int) -> None:
    async def say_begun() -> None:
        sys.stdout.write("begun\n")
        sys.stdout.flush()

    async with AsyncClient(address) as client:
        await amid(client, draw_calls(seed, output_len, count), say_begun, begun=4)
    sys.stdout.write("right\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))

"""The client of the row `delay`, on the gateway's own host: `python -m bench.delay_client ADDRESS`.

A workload's name, a space and a seed come as a line on standard input; what it took is told as a line of
JSON. Its end ends this.
"""

import json
import sys

from bench import load
from bench.client_loop import run
from bench.load import WORKLOADS, Workload
from shoal.client import AsyncClient

WARM_UP = Workload("warm-up", 16, 64, 48)
KNOWN = {**WORKLOADS, WARM_UP.name: WARM_UP}


async def serve(address: str) -> None:
    async with AsyncClient(address, retry=None) as client:
        vocab_size = (await client.models())[0].vocab_size
        for line in sys.stdin:  # nothing else is to be done meanwhile
            name, seed = line.split()
            result = await load.run(client, KNOWN[name], int(seed), vocab_size)
            told = {"tokens_per_s": result.tokens_per_s, "gaps_ms": sorted(result.gaps_ms)}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    run(serve(sys.argv[1]))

"""Clients on a host: `python -m tests.hosts.asking_known ADDRESS FILE` asks what FILE has the answers to.

FILE has lines of JSON: `prompt`, `temperature`, `seed`, `output`, of ids. Says `begun` when every stream has
begun and `right` when each has come to its end with its output.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from shoal.client import AsyncClient
from tests.e2e.rig import Answer, ask, call, until


async def main(address: str, known: list[dict[str, Any]]) -> None:
    answers = [
        Answer(call(k["prompt"], len(k["output"]), temperature=k["temperature"], seed=k["seed"]))
        for k in known
    ]
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for one in answers:
            group.create_task(ask(client, one))
        await until(lambda: all(len(a.ids) >= 4 for a in answers), "all streams begin")
        sys.stdout.write("begun\n")
        sys.stdout.flush()
    for one, wanted in zip(answers, known, strict=True):
        assert one.ids == wanted["output"], one
    sys.stdout.write(f"longest silence {max(a.longest_silence_s for a in answers):.2f} s\nright\n")


if __name__ == "__main__":
    lines = Path(sys.argv[2]).read_text().splitlines()
    asyncio.run(main(sys.argv[1], list(map(json.loads, lines))))

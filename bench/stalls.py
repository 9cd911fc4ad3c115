"""How long streams fall silent when a service is killed amid sixteen of them.

SIGKILL when every stream has begun; the launcher starts the service again. A stall is the longest silence of
any stream from its first token to its end. Each answer must be whole, and is compared with the one that the
same prompt got undisturbed.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.client_loop import SERVICES_ENV
from bench.load import Seen, Workload, draw_prompts, listen
from bench.quiet import watch_others
from bench.results_file import Sample, table, write
from shoal.client import AsyncClient
from shoal.launcher import Deployment, Plan

ROUNDS = 3
LOAD = Workload("stalls", 16, 48, 64)
BEGUN = 4  # tokens of each stream before the kill
BETWEEN_S = 2.0  # kvstore, which no stream waits for, gets up again
FAKE_STEP_COST_US = "10000"


async def _streams(shoal: Deployment, prompts: Sequence[Sequence[int]], victim: str | None) -> list[Seen]:
    start = time.perf_counter()
    seen = [Seen() for _ in prompts]
    async with AsyncClient(shoal.address, retry=None) as client, asyncio.TaskGroup() as group:
        for s, prompt in zip(seen, prompts, strict=True):
            group.create_task(listen(client, prompt, LOAD.output_tokens, start, s))
        if victim is not None:
            while not all(len(s.ids) >= BEGUN for s in seen):  # noqa: ASYNC110 - of sixteen streams
                await asyncio.sleep(0.005)
            shoal.kill(victim)
    for s in seen:
        assert len(s.ids) == LOAD.output_tokens, f"{s.request_id}: {len(s.ids)} ids, {s.reason}"
    return seen


def _stall_s(seen: Sequence[Seen]) -> float:
    times = ([*s.arrivals_s, s.finished_s] for s in seen)
    return max(b - a for t in times for a, b in zip(t, t[1:], strict=False))


async def measure(model: str, stages: int, rounds: int = ROUNDS) -> tuple[dict[str, list[float]], int, float]:
    """Stalls by service in seconds, how many answers differed from the undisturbed, others' cores."""
    flags = {"shard_worker": ("--fake-step-cost-us", FAKE_STEP_COST_US)} if model == "fake" else {}
    stalls: dict[str, list[float]] = {}
    differing = 0
    with TemporaryDirectory() as folder, watch_others() as others:
        plan = Plan(model=model, stages=stages, run_dir=Path(folder), flags=flags, env=SERVICES_ENV)
        async with Deployment(plan) as shoal:
            async with AsyncClient(shoal.address, retry=None) as client:
                vocab_size = (await client.models())[0].vocab_size
            for number in range(rounds):
                prompts = draw_prompts(LOAD, number, vocab_size)
                calm = await _streams(shoal, prompts, None)
                for service in ("stage", "batcher", "kvstore", "nats"):
                    victim = f"worker-{number % stages}" if service == "stage" else service
                    seen = await _streams(shoal, prompts, victim)
                    stalls.setdefault(service, []).append(_stall_s(seen))
                    differing += sum(s.ids != c.ids for s, c in zip(seen, calm, strict=True))
                    sys.stderr.write(f"round {number + 1}: {victim} {stalls[service][-1]:.2f} s\n")
                    await asyncio.sleep(BETWEEN_S)
    return stalls, differing, others.cores


async def main(model: str, stages: int) -> None:
    stalls, differing, cores = await measure(model, stages)
    values = {f"stall.{service}_s": Sample(tuple(v), "s") for service, v in stalls.items()}
    rows = [["killed", "longest silence"], *([name, str(sample)] for name, sample in values.items())]
    sys.stdout.write(table(rows) + "\n")
    sys.stdout.write(f"answers that differ from the undisturbed: {differing}\n")
    notes = {"model": model, "stages": stages, "differing": differing, "others_cores": round(cores, 2)}
    write("stalls", values, notes)

"""What sharing out a stage between ranks costs here: W1 and W2 through gRPC on two cores, in turns.

Two ranks of one thread against one of two threads, which have the same cores; beside them one thread alone,
and two stages of one thread. On one host ranks gain nothing that threads don't: they are for several.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.client_loop import SERVICES_ENV
from bench.load import WORKLOADS, run
from bench.quiet import watch_others
from bench.results_file import Sample, table, write
from shoal.client import AsyncClient
from shoal.launcher import Deployment, Plan


@dataclass(frozen=True, slots=True)
class Setting:
    model: str = "smollm2"
    rounds: int = 3
    workloads: tuple[str, ...] = ("W1", "W2")
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Cut:
    stages: int
    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.stages} stage x {self.ranks} rank x {self.threads} thread"


CUTS = (Cut(1, 1, 2), Cut(1, 2, 1), Cut(1, 1, 1), Cut(2, 1, 1))


async def _turn(cut: Cut, dtype: str, setting: Setting) -> dict[str, tuple[list[float], list[float]]]:
    """Tokens a second and milliseconds to the first, by workload."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    with TemporaryDirectory() as folder:
        plan = Plan(
            model=setting.model,
            stages=cut.stages,
            threads=cut.threads,
            tensor_parallel=cut.ranks,
            dtype=dtype,
            run_dir=Path(folder),
            env=SERVICES_ENV,
        )
        async with Deployment(plan) as shoal, AsyncClient(shoal.address, retry=None) as client:
            vocab_size = (await client.models())[0].vocab_size
            for name in setting.workloads:
                workload = WORKLOADS[name]
                speeds, firsts = found.setdefault(name, ([], []))
                for number in range(setting.rounds + 1):  # the first warms up
                    result = await run(client, workload, number, vocab_size)
                    if number:
                        speeds.append(result.tokens_per_s)
                        firsts += result.ttft_ms
    return found


async def main(setting: Setting) -> None:
    samples: dict[str, Sample] = {}
    rows: list[Sequence[str]] = [("weights", "workload", "", "tokens/s", "first token ms")]
    with watch_others() as others:
        for dtype in setting.dtypes:
            for cut in CUTS:
                for name, (speeds, firsts) in (await _turn(cut, dtype, setting)).items():
                    key = f"{dtype}.{name.lower()}.{cut.stages}x{cut.ranks}x{cut.threads}"
                    speed = samples[f"{key}.tokens_per_s"] = Sample(tuple(speeds), "tokens/s")
                    first = samples[f"{key}.ttft_ms"] = Sample(tuple(firsts), "ms")
                    rows.append((dtype, name, str(cut), f"{speed.median:.0f}", f"{first.median:.0f}"))
    write("ranks", samples, {"model": setting.model, "others_cores": round(others.cores, 2)})
    sys.stdout.write(table(rows) + "\n")

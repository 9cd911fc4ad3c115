"""How long a seed of the simulation takes: the first fifty, in one process, each timed."""

import sys
import time

from bench.quiet import watch_others
from bench.results_file import Sample, write
from tests.sim.run import run_seed

SEEDS = 50


def main() -> None:
    times: list[float] = []
    with watch_others() as others:
        for seed in range(SEEDS):
            start = time.perf_counter()
            report = run_seed(seed)
            times.append(time.perf_counter() - start)
            assert not report.failures, f"seed {seed}: {report.failures[0]}"
    mean = Sample((sum(times) / SEEDS,), "s")
    sys.stdout.write(f"sim.seed_s: {mean}, slowest {max(times):.2f} s\n")
    write(
        "sim",
        {"sim.seed_s": mean},
        {"slowest_s": round(max(times), 3), "others_cores": round(others.cores, 2)},
    )

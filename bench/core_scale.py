"""What a plan costs with a long line and many running: processor time of the core, and its profile.

512 sequences decode while 10,000 wait, of 300 tenants, half of them with deadlines; then 64, and 100 that
wait. Every turn is what the batcher does for a step: take in what came back, admit, plan, hand over calls.
"""

import cProfile
import io
import pstats
import random
import sys
import time

from batcher.queueing import Queueing
from bench.results_file import Sample, table, write
from bench.virtual_line import Asked, VirtualLine

TURNS = 300
WARM_UP = 60
CASES = ((10_000, 512), (100, 512), (10_000, 64), (100, 64))


def line(waiting: int, running: int, seed: int) -> VirtualLine:
    """`running` decode, `waiting` wait."""
    rng = random.Random(seed)
    made = VirtualLine(
        Queueing(), sequences_max=running, num_blocks=running * 48, waiting_len_max=waiting + running
    )
    for number in range(waiting + running):
        ends_soon = number % 8 == 0  # so that there is always somebody to be seated
        made.bring(
            Asked(
                0.0, rng.randint(8, 64), rng.randint(40, 80) if ends_soon else 600,
                priority=rng.choice((2, 5, 5, 5, 8)), tenant=f"t{rng.randrange(300)}",
                timeout_s=rng.uniform(1e3, 1e4) if number % 2 else None,
            )
        )  # fmt: skip
    while made.scheduler.num_running < running:
        turn(made)
    for _ in range(WARM_UP):
        turn(made)
    return made


def turn(made: VirtualLine) -> float:
    """Seconds of planning the next step."""
    if made.ring:
        made.come_back()
    begun = time.process_time()
    made.plan()
    return time.process_time() - begun


def plan_ms(waiting: int, running: int) -> tuple[float, ...]:
    """Of three lines: the median of their turns."""
    medians = []
    for seed in range(3):
        made = line(waiting, running, seed)
        took = sorted(turn(made) for _ in range(TURNS))
        medians.append(1000 * took[len(took) // 2])
        made.scheduler.check()
    return tuple(medians)


def profile(waiting: int, running: int) -> str:
    made = line(waiting, running, 0)
    watched = cProfile.Profile()
    for _ in range(TURNS):
        if made.ring:
            made.come_back()
        watched.enable()
        made.plan()
        watched.disable()
    text = io.StringIO()
    pstats.Stats(watched, stream=text).sort_stats("tottime").print_stats(12)
    return "\n".join(text.getvalue().splitlines()[6:])


def main() -> None:
    values: dict[str, Sample] = {}
    rows = [["waiting", "running", "a plan"]]
    for waiting, running in CASES:
        sample = Sample(plan_ms(waiting, running), "ms")
        values[f"core_scale.plan_ms.{waiting}x{running}"] = sample
        rows.append([f"{waiting:,}", str(running), str(sample)])
    big, small = (values[f"core_scale.plan_ms.{waiting}x512"] for waiting in (10_000, 100))
    ratios = tuple(a / b for a, b in zip(big.values, small.values, strict=True))
    values["core_scale.queue_ratio"] = Sample(ratios, "ratio")
    sys.stdout.write(table(rows) + "\n")
    sys.stdout.write(f"10,000 waiting against 100, 512 running: {values['core_scale.queue_ratio']}\n")
    sys.stdout.write(profile(10_000, 512) + "\n")
    write("core_scale", values, {"turns": TURNS})

"""A KV pool of a third of what is asked for: what is computed twice, and how much of the pool works.

The batcher's Scheduler and kvstore's Ledger as in `bench.paging`, on a virtual clock. `sequences_max`
requests are always there; were the pool large enough all would run, and would hold, on average, `demand`
tokens at their ends. It has a third of that. Nothing is left out at the start: an empty pool, nothing known
of lengths, and everybody comes at once. Mixes differ in what admission can know: who ends early, who runs
into a limit.
"""

import random
import sys
from dataclasses import dataclass, field
from statistics import mean

from bench.paging import Draw, Lengths, Pipeline, Setting, draw_chat
from bench.results_file import Sample, table, write

SEQUENCES = 96
CONTEXT_LEN = 4096
SHARE = 3  # the pool has one of so many
STEPS = 3000
SEEDS = (1, 2, 3)


def chat(rng: random.Random) -> Lengths:
    return draw_chat(rng, CONTEXT_LEN)


def limited(rng: random.Random) -> Lengths:
    """Each says how long its answer becomes, and it does."""
    prompt, output, _ = draw_chat(rng, CONTEXT_LEN)
    return Lengths(prompt, output, output)


def labels_and_stories(rng: random.Random) -> Lengths:
    """Four of five answer with a word, the fifth tells a story; all under one limit."""
    output = rng.randint(1, 6) if rng.random() < 0.8 else rng.randint(600, 1400)
    return Lengths(rng.randint(50, 300), output, 2048)


def alike(rng: random.Random) -> Lengths:
    """All of one length, far below the limit: they grow, and end, at the same time."""
    return Lengths(128, 512, 2048)


def documents(rng: random.Random) -> Lengths:
    """Long prompts, short answers."""
    return Lengths(rng.randint(1000, 3500), rng.randint(20, 120), 256)


def mixture(seed: int) -> Draw:
    """Any: two kinds of requests, of any lengths, some under limits that say something."""
    rng = random.Random(seed)
    kinds = [
        (rng.randint(1, 1200), rng.randint(1, 1200), rng.choice([1, 2, 8, 100]), rng.random())
        for _ in range(2)
    ]
    first = rng.random()

    def draw(rng: random.Random) -> Lengths:
        prompt, output, slack, spread = kinds[rng.random() > first]
        prompt = max(1, round(prompt * rng.uniform(1 - spread, 1)))
        output = max(1, round(output * rng.uniform(1 - spread, 1)))
        return Lengths(prompt, output, min(output * slack, CONTEXT_LEN - prompt))

    return draw


MIXES: dict[str, Draw] = {
    "chat": chat,
    "limited": limited,
    "labels_and_stories": labels_and_stories,
    "alike": alike,
    "documents": documents,
}


@dataclass(slots=True)
class Pressed:
    recomputed: float = 0.0
    filled: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    preemptions: int = 0


def run(draw: Draw, seed: int, steps: int = STEPS) -> Pressed:
    rng = random.Random(seed)
    drawn = [draw(rng) for _ in range(2000)]
    demand = SEQUENCES * mean(one.prompt + one.output for one in drawn)
    longest = max(one.prompt + one.output for one in drawn)
    setting = Setting(
        context_len=CONTEXT_LEN, sequences_max=SEQUENCES, step_tokens_max=2048, waiting=SEQUENCES,
        pool_tokens=max(int(demand / SHARE), longest),
    )  # fmt: skip
    pipeline = Pipeline(setting, seed, draw)
    pressed = Pressed()
    for _ in range(steps):
        pipeline.step()
        pipeline.look()
    pipeline.scheduler.check()
    pipeline.ledger.check()
    seen = pipeline.seen
    memory = setting.num_blocks * setting.block_size_tokens
    pressed.filled = [tokens / memory for tokens in seen.table_tokens]
    pressed.running = seen.running
    pressed.preemptions = seen.preemptions
    pressed.recomputed = seen.recomputed / seen.computed
    return pressed


def main() -> None:
    values: dict[str, Sample] = {}
    rows = [["mix", "computed twice", "pool in use", "running", "gave way"]]
    for name, draw in MIXES.items():
        runs = [run(draw, seed) for seed in SEEDS]
        twice = Sample(tuple(r.recomputed for r in runs), "ratio")
        used = Sample(tuple(mean(r.filled) for r in runs), "ratio")
        values |= {f"pressure.{name}.recomputed": twice, f"pressure.{name}.used": used}
        running = mean(mean(r.running) for r in runs)
        rows.append([name, str(twice), str(used), f"{running:.0f}", str(sum(r.preemptions for r in runs))])
    sys.stdout.write(table(rows) + "\n")
    write("pressure", values, {"sequences": SEQUENCES, "steps": STEPS, "pool": f"1/{SHARE}"})

"""What the line does for those in it, on a virtual clock (`virtual_line`): the same in every run.

- Batch class: chats come at half of what the pipeline can do, with and without a line of batch work that
  never ends. What their first token and the times between tokens take at the 99th percentile, and how many
  tokens of batch work are made meanwhile.
- Batching: the highest load at which 95 of 100 requests end within a bound, with and without it
  (`max_batch_size` 1), which is how Triton's own guide shows it.
- Deadlines: twice the load, half of the requests with a deadline. How many are refused early, how many of
  those would have met it (the same load without refusals tells), and how many more meet theirs.
- Shares: two tenants of weights 2 and 1 that both have a backlog, one with long requests and one with short.
"""

import random
import sys
from dataclasses import dataclass, replace

from batcher.queueing import BATCH, Queueing
from bench.results_file import Sample, percentile, table, write
from bench.virtual_line import Asked, Served, VirtualLine
from chassis.messages.request import Reason

SEEDS = (1, 2, 3)
LENGTH_S = 120.0
BOUND_S = 4.0  # of the 95th percentile, with and without batching
WHOLE = (Reason.STOP, Reason.LENGTH)


@dataclass(frozen=True, slots=True)
class Chats:
    per_s: float
    prompt_median: int = 96
    output_median: int = 64

    def draw(self, rng: random.Random, length_s: float) -> list[Asked]:
        coming, at = [], 0.0
        while (at := at + rng.expovariate(self.per_s)) < length_s:
            prompt = min(1500, max(4, round(rng.lognormvariate(0, 0.7) * self.prompt_median)))
            output = min(500, max(2, round(rng.lognormvariate(0, 0.6) * self.output_median)))
            coming.append(Asked(at, prompt, output))
        return coming


def serve(coming: list[Asked], queueing: Queueing, until: float) -> list[Served]:
    line = VirtualLine(queueing, num_blocks=16_384, waiting_len_max=100_000)
    line.run(coming, until)
    line.scheduler.check()
    return list(line.served.values())


def batch_class(seed: int) -> dict[str, float]:
    """With over without batch work; and batch tokens a second."""
    rng = random.Random(seed)
    chats = Chats(3.0).draw(rng, LENGTH_S)
    batch = [Asked(0.0, rng.randint(64, 512), rng.randint(64, 256), BATCH, "batch") for _ in range(400)]
    found: dict[str, float] = {}
    for name, coming in (("without", chats), ("with", [*chats, *batch])):
        served = serve(coming, Queueing(), LENGTH_S)
        mine = [s for s in served if s.asked.priority != BATCH and len(s.arrivals) > 1 and s.asked.at > 10]
        found[f"ttft_{name}"] = percentile([s.ttft_s for s in mine], 0.99)
        found[f"itl_{name}"] = percentile([gap for s in mine for gap in s.gaps_s], 0.99)
        made = sum(len(s.arrivals) for s in served if s.asked.priority == BATCH)
        found[f"tokens_{name}"] = made / LENGTH_S
    return found


def batching(seed: int, max_batch_size: int) -> float:
    """Requests a second at which the 95th percentile is within the bound: by halving."""
    low, high = 0.0, 16.0
    while high - low > 0.05:
        per_s = (low + high) / 2
        coming = Chats(per_s).draw(random.Random(seed), LENGTH_S)
        served = serve(coming, Queueing(max_batch_size=max_batch_size), LENGTH_S + 2 * BOUND_S)
        took = [s.ended_at - s.asked.at if s.reason else float("inf") for s in served]
        if took and percentile(took, 0.95) <= BOUND_S:
            low = per_s
        else:
            high = per_s
    return low


def deadlines(seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    coming = Chats(24.0).draw(rng, LENGTH_S)
    coming = [
        replace(a, timeout_s=rng.choice((4.0, 10.0, 20.0))) if i % 2 else a for i, a in enumerate(coming)
    ]
    early, late = (serve(coming, Queueing(refuse_late=refuses), LENGTH_S + 60) for refuses in (True, False))
    due = [i for i, s in enumerate(early) if s.asked.timeout_s is not None]
    refused = [i for i in due if early[i].error]
    would = [i for i in refused if late[i].reason in WHOLE]
    missed = [i for i in due if late[i].reason is Reason.DEADLINE]
    return {
        "refused": len(refused) / len(due),
        "refused_of_missed": len(refused) / max(1, len(missed)),
        "wrongly": len(would) / max(1, len(refused)),
        "met": sum(early[i].reason in WHOLE for i in due) / len(due),
        "met_without": sum(late[i].reason in WHOLE for i in due) / len(due),
    }


def shares(seed: int) -> float:
    """Tokens of work that the tenant of weight 2 is given over those of the other: 2."""
    rng = random.Random(seed)
    coming = [Asked(0.0, rng.randint(200, 400), rng.randint(100, 200), tenant="heavy") for _ in range(600)]
    coming += [Asked(0.0, rng.randint(10, 40), rng.randint(10, 60), tenant="light") for _ in range(4000)]
    served = serve(coming, Queueing(tenant_weights={"heavy": 2.0}), LENGTH_S)
    work = {"heavy": 0, "light": 0}
    for s in served:
        if s.arrivals:
            work[s.asked.tenant] += s.asked.prompt_len + len(s.arrivals)
    return work["heavy"] / work["light"]


def main() -> None:
    values: dict[str, Sample] = {}
    classes = [batch_class(seed) for seed in SEEDS]
    rows = [["chats", "first token p99", "between tokens p99", "batch tokens/s"]]
    for name in ("without", "with"):
        cells = [Sample(tuple(1000 * c[f"{what}_{name}"] for c in classes), "ms") for what in ("ttft", "itl")]
        tokens = Sample(tuple(c[f"tokens_{name}"] for c in classes), "tokens/s")
        rows.append([f"{name} batch work", *map(str, cells), str(tokens)])
        values[f"line.batch_class.ttft_{name}_ms"], values[f"line.batch_class.itl_{name}_ms"] = cells
        values[f"line.batch_class.tokens_{name}"] = tokens
    for what in ("ttft", "itl"):
        ratios = tuple(c[f"{what}_with"] / c[f"{what}_without"] for c in classes)
        values[f"line.batch_class.{what}_ratio"] = Sample(ratios, "ratio")
    on, off = (tuple(batching(seed, size) for seed in SEEDS) for size in (0, 1))
    values["line.batching.on_per_s"] = Sample(on, "requests/s")
    values["line.batching.off_per_s"] = Sample(off, "requests/s")
    values["line.batching.ratio"] = Sample(tuple(a / b for a, b in zip(on, off, strict=True)), "ratio")
    late = [deadlines(seed) for seed in SEEDS]
    for what in ("refused", "refused_of_missed", "wrongly", "met", "met_without"):
        values[f"line.deadlines.{what}"] = Sample(tuple(found[what] for found in late), "ratio")
    values["line.shares.ratio"] = Sample(tuple(shares(seed) for seed in SEEDS), "ratio")
    sys.stdout.write(table(rows) + "\n")
    for name, sample in values.items():
        if "_ms" not in name and ".tokens_" not in name:
            sys.stdout.write(f"{name}: {sample}\n")
    write("line", values, {"length_s": LENGTH_S, "bound_s": BOUND_S})

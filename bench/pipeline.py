"""What the batcher makes of several stages: steps in flight as they are chosen, against every fixed number.

The scheduler as it is, over stages that take what a real worker's steps were measured to take, on a clock
of their own (`bench/virtual_pipeline.py`): the figures say what scheduling does, not what a machine does, and
are the same in every run. Beside throughput: how a long prompt's chunks follow each other, how long it keeps
decodes waiting, and how long stages wait for the batcher while only decodes run.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.results_file import FOLDER, Sample, percentile, table, write
from bench.virtual_pipeline import SPLITS, Costs, VirtualPipeline, steady

STAGES = (2, 3, 4)
SEQUENCES = (8, 64, 256)
PROMPT_TOKENS = OUTPUT_TOKENS = 128
ROUNDS = 3
LONG_PROMPT = 4000
STREAMS = 16

Grid = dict[tuple[int, int], dict[int | None, float]]  # stages, sequences -> steps in flight -> tokens/s


@dataclass(frozen=True, slots=True)
class Waiting:
    """Between the tokens of the streams, in seconds; of the prompt that came among them."""

    usual_s: float
    beside_prompt_s: float
    ttft_s: float

    @property
    def ratio(self) -> float:
        return self.beside_prompt_s / self.usual_s


def throughput(stages: int, sequences: int, rounds: int = ROUNDS) -> dict[int | None, float]:
    """Output tokens per second by steps in flight; None: as chosen."""
    costs = Costs(SPLITS[stages])
    return {
        number: steady(
            costs, sequences, PROMPT_TOKENS, OUTPUT_TOKENS, rounds, steps_in_flight_max=number
        ).tokens_per_s
        for number in (*range(1, stages + 2), None)
    }


def chosen_share(found: Mapping[int | None, float]) -> float:
    """Of what the best fixed number makes."""
    return found[None] / max(value for number, value in found.items() if number is not None)


def long_prompt_ttft(stages: int, prompt_tokens: int = LONG_PROMPT, **config: Any) -> float:
    """Seconds, alone, when what steps cost is known."""
    pipeline = VirtualPipeline(Costs(SPLITS[stages]), **config)
    for tokens in (*[300] * 8, prompt_tokens):
        pipeline.ask(tokens, 4)
        pipeline.run()
    request_id = pipeline.ask(prompt_tokens, 2)
    pipeline.run()
    return pipeline.seen[request_id].ttft_s


def waiting(stages: int, **config: Any) -> Waiting:
    """A long prompt comes among streams that decode: the 99th percentile of what they wait from then on until
    they end, against the same streams without it."""

    def gaps(prompt: bool) -> tuple[list[float], float]:
        pipeline = VirtualPipeline(Costs(SPLITS[stages]), **config)
        streams = [pipeline.ask(64, 400) for _ in range(STREAMS)]
        pipeline.run(2.0)
        late = pipeline.ask(LONG_PROMPT, 8) if prompt else None
        came_s = pipeline.now
        pipeline.run()
        times = [pipeline.seen[stream].tokens_s for stream in streams]
        waited = [b - a for one in times for a, b in zip(one, one[1:], strict=False) if b > came_s]
        return waited, pipeline.seen[late].ttft_s if late is not None else 0.0

    usual, (beside, ttft_s) = gaps(False)[0], gaps(True)
    return Waiting(percentile(usual, 0.99), percentile(beside, 0.99), ttft_s)


def idle_shares(stages: int, sequences: int) -> tuple[int, list[float], list[float]]:
    """While all decode and none comes: groups of decodes, and by stage the shares of the time in which it
    computes, and in which it stands idle because no step is there."""
    pipeline = VirtualPipeline(Costs(SPLITS[stages]), sequences_max=sequences)
    for _ in range(sequences):
        pipeline.ask(32, 400)
    while len(pipeline.seen) < sequences or not all(len(s.tokens_s) > 100 for s in pipeline.seen.values()):
        pipeline.run(pipeline.now + 0.05)
    use = pipeline.scheduler.balance.use
    begun_s, before = use.active_s, [(stage.busy_s, stage.idle_s) for stage in use.stages]
    while all(len(seen.tokens_s) < 390 for seen in pipeline.seen.values()):
        pipeline.run(pipeline.now + 0.05)
    took_s = use.active_s - begun_s
    pairs = list(zip(use.stages, before, strict=True))
    busy = [(stage.busy_s - then[0]) / took_s for stage, then in pairs]
    idle = [(stage.idle_s - then[1]) / took_s for stage, then in pairs]
    return pipeline.scheduler.balance.spread.groups, busy, idle


def plot(grid: Grid) -> str:
    """An SVG: a panel for each number of stages, a line for each number of sequences over the fixed numbers
    of steps in flight, as shares of its best, and a dot where they are chosen."""
    width, height, gap = 220, 180, 50
    colours = dict(zip(SEQUENCES, ("#1b9e77", "#d95f02", "#7570b3"), strict=True))
    parts = []
    for panel, stages in enumerate(STAGES):
        left, top = gap + panel * (width + gap), 40

        def x(number: float, left: int = left, stages: int = stages) -> float:
            return left + (number - 0.5) / (stages + 1.5) * width

        def y(share: float, top: int = top) -> float:
            return top + height * (1.05 - share)

        parts.append(f'<text x="{left}" y="{top - 12}">{stages} stages</text>')
        parts += [
            f'<path d="M{left} {y(share):.1f}h{width}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:g}</text>'
            for share in (0.25, 0.5, 0.75, 1.0)
        ]
        parts += [
            f'<text x="{x(number):.1f}" y="{top + height + 28}">{number}</text>'
            for number in range(1, stages + 2)
        ]
        for sequences, colour in colours.items():
            found = grid[stages, sequences]
            best = max(v for k, v in found.items() if k is not None)
            points = " ".join(f"{x(k):.1f},{y(found[k] / best):.1f}" for k in range(1, stages + 2))
            chosen = y(found[None] / best)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
                f'<circle cx="{x(stages + 1.75):.1f}" cy="{chosen:.1f}" r="4" fill="{colour}"/>'
            )
    legend = "".join(
        f'<text x="{gap + i * 130}" y="300" fill="{c}">{n} sequences</text>'
        for i, (n, c) in enumerate(colours.items())
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="860" height="330" font-family="sans-serif" '
        'font-size="12"><rect width="860" height="330" fill="white"/>'
        f"{''.join(parts)}{legend}"
        '<text x="50" y="320">tokens/s over the best fixed number of steps in flight; dots: as chosen</text>'
        "</svg>\n"
    )


def main() -> None:
    values: dict[str, Sample] = {}
    grid: Grid = {(stages, n): throughput(stages, n) for stages in STAGES for n in SEQUENCES}
    rows = [["stages", "sequences", "tokens/s by steps in flight", "chosen", "of the best"]]
    for (stages, sequences), found in grid.items():
        fixed = ", ".join(f"{k}: {v:.0f}" for k, v in found.items() if k is not None)
        share = chosen_share(found)
        values[f"pipeline.chosen.s{stages}.b{sequences}"] = Sample((share,), "ratio")
        rows.append([str(stages), str(sequences), fixed, f"{found[None]:.0f}", f"{share:.3f}"])
    values["pipeline.chosen_least"] = Sample((min(map(chosen_share, grid.values())),), "ratio")
    sys.stdout.write(table(rows) + "\n\n")

    rows = [
        ["stages", "a prompt's first token, s", "one chunk at a time", "ratio", "decodes wait, ms", "ratio"]
    ]
    for stages in (1, *STAGES):
        ttft_s, one_s = long_prompt_ttft(stages), long_prompt_ttft(stages, steps_in_flight_max=1)
        beside = waiting(stages)
        values[f"pipeline.ttft.s{stages}"] = Sample((one_s / ttft_s,), "ratio")
        values[f"pipeline.itl.s{stages}"] = Sample((beside.ratio,), "ratio")
        waits = f"{1e3 * beside.usual_s:.1f} -> {1e3 * beside.beside_prompt_s:.1f}"
        ratios = f"{one_s / ttft_s:.2f}", f"{beside.ratio:.2f}"
        rows.append([str(stages), f"{ttft_s:.2f}", f"{one_s:.2f}", ratios[0], waits, ratios[1]])
    sys.stdout.write(table(rows) + "\n\n")

    rows = [["stages", "sequences", "groups", "stages compute, %", "wait for a step, %"]]
    for stages in (1, *STAGES):
        for sequences in SEQUENCES:
            groups, busy, idle = idle_shares(stages, sequences)
            values[f"pipeline.idle.s{stages}.b{sequences}"] = Sample((idle[busy.index(max(busy))],), "ratio")
            told = [" ".join(f"{100 * share:.1f}" for share in shares) for shares in (busy, idle)]
            rows.append([str(stages), str(sequences), str(groups), *told])
    sys.stdout.write(table(rows) + "\n")
    (FOLDER / "pipeline.svg").write_text(plot(grid))
    write("pipeline", values, {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS})

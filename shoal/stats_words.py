"""The words of `shoal stats`: what each model has done, summed over its batchers, with Triton's names."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from chassis.bus import Bus
from chassis.messages.statistics import Computed, Duration, ModelStatistics, total
from chassis.statistics_view import StatsShown, look
from shoal.looking import Dial


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--nats", help="URL of the bus (default: what `shoal up` runs)")


async def tell(bus: Bus, dial: Dial, arguments: argparse.Namespace) -> tuple[str, bool]:
    """The text, and whether all answered. Raises BusError when the bus does not."""
    shown = await look(bus, arguments.model)
    models = list(total(shown.of_batchers).values())
    text = as_json(models) if arguments.json else render(models, shown)
    if arguments.model and not (models or arguments.json):
        text = f"no batcher of model {arguments.model!r} answers"
    return text, bool(models) and not shown.silent


def render(models: Sequence[ModelStatistics], shown: StatsShown) -> str:
    lines = [] if models else ["no batcher answers"]
    for s in models:
        batchers = sum(its.model == s.model for its in shown.of_batchers)
        mean = s.inference_count / s.execution_count if s.execution_count else 0.0
        ends = ", ".join(f"{count:,} {reason}" for reason, count in s.ends.items()) or "none"
        lines += [
            f"model {s.model}, {batchers} batcher{'s' * (batchers != 1)}",
            f"  requests ended: {ends}",
            f"  tokens of those: {s.input_tokens:,} in ({s.cached_tokens:,} cached), {s.output_tokens:,} out",
            f"  inference count {s.inference_count:,}, execution count {s.execution_count:,}: "
            f"{mean:.1f} sequences a step",
            f"  success {_mean(s.success)}, fail {_mean(s.fail)}, queue {_mean(s.queue)}",
        ]
        if s.stages:
            shares = ", ".join(f"{100 * share:.1f} %" for share in s.bubble_shares)
            idle = ", ".join(f"{100 * stage.idle_ns / max(1, s.active_ns):.1f} %" for stage in s.stages)
            lines.append(f"  bubbles of the stages {shares}; waiting for a step {idle}")
        if s.batch_stats:
            lines.append(f"  {'batch':>7}{'steps':>10}{'input ms':>10}{'infer ms':>10}{'output ms':>11}")
        for size, computed in s.batch_stats.items():
            cells = "".join(f"{_ms(d):>{w}.2f}" for d, w in zip(computed, (10, 10, 11), strict=True))
            lines.append(f"  {size:>7,}{computed.compute_infer.count:>10,}{cells}")
    return "\n".join([*lines, *(f"does not answer: {who}" for who in shown.silent)])


def as_json(models: Sequence[ModelStatistics]) -> str:
    """Triton's names and nesting."""
    return json.dumps({"model_stats": [_plain(s) for s in models]}, indent=2)


def _plain(s: ModelStatistics) -> dict[str, object]:
    return {
        "name": s.model,
        "last_inference": s.last_inference_ms,
        "inference_count": s.inference_count,
        "execution_count": s.execution_count,
        "inference_stats": {
            "success": asdict(s.success),
            "fail": asdict(s.fail),
            "queue": asdict(s.queue),
            **_computed(s.computed),
        },
        "batch_stats": [{"batch_size": size, **_computed(c)} for size, c in s.batch_stats.items()],
        "ends": s.ends,
        "stages": [stage._asdict() for stage in s.stages],
        "active_ns": s.active_ns,
        "tokens": {"input": s.input_tokens, "cached": s.cached_tokens, "output": s.output_tokens},
    }


def _computed(computed: Computed) -> dict[str, dict[str, int]]:
    return {name: asdict(duration) for name, duration in computed._asdict().items()}


def _ms(duration: Duration) -> float:
    return duration.ns / max(1, duration.count) / 1e6


def _mean(duration: Duration) -> str:
    return f"{duration.count:,} of {_ms(duration):,.1f} ms" if duration.count else "0"

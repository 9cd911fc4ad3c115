"""What of a seed's deployment comes and goes, and how unlike its workers are."""

import random
from dataclasses import dataclass

SHARE = 0.3  # of the seeds
KINDS = ("kvstore", "gateway", "worker", "batcher")


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """`extra`: processes by kind that are there beside the others, away at first. `changes`: so many times
    one joins or leaves, drawn over the time of the faults."""

    extra: dict[str, int]
    changes: int
    cut_short: float  # how often one that leaves is not waited for
    speeds: tuple[float, ...]  # times of a layer, of which each worker has one
    rooms: tuple[int, ...]  # layers there is memory for; 0: all


def draw_scaling(seed: int, stages: int, num_layers: int) -> ScalingOptions | None:
    """None: who is there at first stays, or comes back."""
    rng = random.Random(f"scaling of {seed}")
    if rng.random() >= SHARE:
        return None
    fewest = -(-num_layers // stages)  # with less memory no pipeline might stand
    kinds = KINDS if rng.random() < 0.5 else ("kvstore",)
    extra = {kind: rng.choice((0, 1, 2)) for kind in kinds}
    extra["kvstore"] = max(1, extra["kvstore"])
    return ScalingOptions(
        extra=extra,
        changes=rng.choice((2, 5, 9)),
        cut_short=rng.choice((0.0, 0.3)),
        speeds=rng.choice(((0.0,), (1.0,), (1.0, 1.0, 2.0), (1.0, 2.0, 5.0))),
        rooms=rng.choice(((0,), (0,), (fewest, 0), (fewest,))),
    )

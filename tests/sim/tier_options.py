"""What a seed gives its kvstores: tiers below the pools, or none."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Bytes of each tier: 0 is off. `faults`: so many, drawn over the time of the others."""

    host_bytes: int
    disk_bytes: int
    restore_wait_ms: int
    restore_min_tokens: int
    io_delay_s: float
    proven: bool  # workers prove what blocks hold, or it shows in the answers
    faults: int


def draw_tiers(seed: int) -> TierOptions | None:
    """None: a kvstore without."""
    rng = random.Random(f"tiers of {seed}")
    if rng.random() < 0.65:
        return None
    host, disk = rng.choice(((1, 0), (0, 1), (1, 1), (1, 1)))
    return TierOptions(
        host_bytes=host * rng.choice((1 << 10, 1 << 13, 1 << 20)),
        disk_bytes=disk * rng.choice((1 << 17, 1 << 20)),
        restore_wait_ms=rng.choice((50, 200)),
        restore_min_tokens=rng.choice((1, 1, 4)),
        io_delay_s=rng.choice((0.0, 0.001, 0.05)),
        proven=rng.random() < 0.5,
        faults=rng.choice((0, 2, 6)),
    )

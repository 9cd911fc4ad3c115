"""Pure. Whether a pipeline that stands forms anew because other workers, or other layers, would be quicker.

All that runs is computed again then, and layers are loaded: only for a gain that lasts and pays, and seldom.
"""

GAIN_MIN = 0.2  # of the slowest stage's time
SETTLE_S = 5.0  # it must be there for so long: workers come and go together
EVERY_S = 60.0
HORIZON_S = 600.0  # a pipeline is thought to stand for so long
COST_FACTOR = 4.0  # what is computed again and who waits count, beside the time that forming takes


class Rebalance:
    def __init__(self) -> None:
        self._took_s = 0.0  # the last formation
        self._due_at: float | None = None
        self._not_before = float("-inf")

    def stood(self, took_s: float) -> None:
        """Forming, loading among it, took so long."""
        self._took_s = took_s
        self._due_at = None

    def saw(self, gain: float, now: float, jitter_s: float) -> None:
        """What would be gained now. `jitter_s`: of two pipelines one comes first."""
        if gain <= GAIN_MIN or gain * HORIZON_S < COST_FACTOR * self._took_s:
            self._due_at = None
        elif self._due_at is None:
            self._due_at = max(now + SETTLE_S + jitter_s, self._not_before)

    def leaves(self, now: float) -> None:
        """A worker leaves, and another can take its place."""
        self._due_at = now

    def due_at(self) -> float | None:
        return self._due_at

    def done(self, now: float) -> None:
        """The pipeline is let go, for this or anything else."""
        self._due_at = None
        self._not_before = now + EVERY_S

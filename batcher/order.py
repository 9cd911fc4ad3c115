"""Pure. Who comes before whom among the running, and among those that lost their place.

The best of the running by this order is never preempted for blocks, so it ends; then the next one is the
best. The batch class is behind all others, however long it has been there. Who waits for the first time is
in another order (`waiting`).
"""

OrderKey = tuple[int, int]
BEHIND = 1 << 60


class Order:
    """Priority, then age. A key never changes: every `age_steps_per_priority` steps count as one priority
    level. Smaller is earlier."""

    def __init__(self, age_steps_per_priority: int) -> None:
        assert age_steps_per_priority >= 1
        self._age_steps_per_priority = age_steps_per_priority
        self._arrivals = 0

    def key(self, priority: int, steps_so_far: int, batch: bool = False) -> OrderKey:
        """For a request that arrives now; no two are equal."""
        self._arrivals += 1
        behind = BEHIND if batch else 0
        return behind + steps_so_far + priority * self._age_steps_per_priority, self._arrivals

    def check(self) -> None:
        assert self._arrivals >= 0

"""Pure. Whether the fresh wait a little, so that a batch of a preferred size comes together.

Triton's rule, where a batch is what runs together: the fresh join at once as long as the largest preferred
size that can be reached with those who wait is not reached; the rest wait for others until the oldest has
waited `max_queue_delay_us`, then all that came until then join, whatever the size. Without preferred sizes
the size is the largest possible. Without a delay nobody waits. Who owns a claim is never kept.
"""

from batcher.queueing import Queueing
from batcher.sequence import Sequence


class Gathering:
    def __init__(self, queueing: Queueing, sequences_max: int) -> None:
        size_max = min(queueing.max_batch_size or sequences_max, sequences_max)
        sizes = [min(size, size_max) for size in queueing.preferred_batch_size] or [size_max]
        self._sizes = tuple(sorted(sizes, reverse=True))
        self._delay_s = queueing.max_queue_delay_us / 1e6
        self._let_in_until = float("-inf")  # who came until then has waited for long enough

    def keeps(
        self, head: Sequence, now: float, num_running: int, num_waiting: int, oldest_since: float
    ) -> bool:
        """Whether `head`, a fresh one, goes on waiting for others."""
        if not self._delay_s or head.place.since <= self._let_in_until:
            return False
        if now >= oldest_since + self._delay_s:
            self._let_in_until = now
            return False
        reach = num_running + num_waiting
        target = next((size for size in self._sizes if size <= reach), 0)
        return num_running >= target

    def wake_at(self, oldest_since: float) -> float | None:
        return oldest_since + self._delay_s if self._delay_s else None

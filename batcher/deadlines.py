"""Pure. Sequences by a time that comes: those that have it behind them, or do not care any more, are skipped,
and swept out when they are the most."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from batcher.sequence import Sequence, Status


class Deadlines:
    def __init__(self, cares: Callable[[Sequence], bool] | None = None) -> None:
        """`cares`: whether its time still matters; else until it ended."""
        self._cares = cares or (lambda sequence: sequence.status is not Status.ENDED)
        self._heap: list[tuple[float, int, Sequence]] = []
        self._count = 0

    def add(self, sequence: Sequence, at: float | None) -> None:
        if at is not None:
            self._count += 1
            heappush(self._heap, (at, self._count, sequence))

    def sweep(self, num_live: int) -> None:
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if self._cares(entry[2])]
            heapify(self._heap)

    def next(self) -> float | None:
        while self._heap and not self._cares(self._heap[0][2]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_passed(self, now: float) -> Sequence | None:
        at = self.next()
        return heappop(self._heap)[2] if at is not None and at <= now else None

    def check(self) -> None:
        times = [entry[0] for entry in self._heap]
        assert not times or times[0] == min(times)

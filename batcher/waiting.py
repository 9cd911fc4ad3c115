"""Pure. Who waits to be admitted, in order, and whose deadline comes next.

Requests that own a claim go first. The cost of coming, going and being first is a binary search and a
move of memory: nothing looks at all that wait.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from batcher.sequence import Sequence, Status

Key = tuple[bool, tuple[int, int]]


class WaitingRoom:
    def __init__(self) -> None:
        self._line: list[tuple[Key, Sequence]] = []

    def __len__(self) -> int:
        return len(self._line)

    @staticmethod
    def _key(sequence: Sequence) -> Key:
        return (not sequence.claimed, sequence.order)

    def add(self, sequence: Sequence) -> None:
        insort(self._line, (self._key(sequence), sequence))

    def remove(self, sequence: Sequence) -> None:
        index = self._index(sequence)
        del self._line[index]

    def _index(self, sequence: Sequence) -> int:
        # a tuple of the key alone sorts just before the entry
        index = bisect_left(self._line, (self._key(sequence),))
        assert self._line[index][1] is sequence
        return index

    @property
    def head(self) -> Sequence | None:
        return self._line[0][1] if self._line else None

    def first(self, count: int) -> Iterator[Sequence]:
        return (sequence for _, sequence in islice(self._line, count))

    def check(self) -> None:
        keys = [key for key, _ in self._line]
        assert keys == sorted(keys) and len(dict.fromkeys(keys)) == len(keys)
        for key, sequence in self._line:
            assert key == self._key(sequence)
            assert sequence.status in (Status.WAITING, Status.MATCHING, Status.MATCHED)


class Deadlines:
    """Sequences by deadline. Those that ended are skipped, and swept out when they are the most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._count = 0

    def add(self, sequence: Sequence) -> None:
        if sequence.deadline is not None:
            self._count += 1
            heappush(self._heap, (sequence.deadline, self._count, sequence))

    def sweep(self, num_live: int) -> None:
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[2].status is not Status.ENDED]
            heapify(self._heap)

    def next(self) -> float | None:
        while self._heap and self._heap[0][2].status is Status.ENDED:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_passed(self, now: float) -> Sequence | None:
        deadline = self.next()
        return heappop(self._heap)[2] if deadline is not None and deadline <= now else None

    def check(self) -> None:
        assert all(entry[0] == entry[2].deadline for entry in self._heap)

"""Pure. Whose turn it is among the priorities that wait.

The highest that waits goes first. Besides, a request taken at priority p counts 1/(q - p) at every lower
priority q that waits, and at `overtakes_max` it is q's turn for one request.

Starvation bound: while requests wait at priority q, one of them is taken before `overtakes_max` times (q - p)
of priority p are, or a mixture that counts as much; besides, of a mixture, one of each other priority. It is
the rule by which requests are fetched from the stream (`turns`).
"""

from collections.abc import Sequence
from math import lcm


class Overtakes:
    """Priorities are 0 (first) to `num_priorities` - 1."""

    def __init__(self, num_priorities: int, overtakes_max: int) -> None:
        assert num_priorities >= 1 and overtakes_max >= 1
        self._unit = lcm(*range(1, num_priorities))  # of what is counted: 1/(q - p) is whole
        self._due = overtakes_max * self._unit
        self._passed = [0] * num_priorities

    def turn(self, waiting: Sequence[int]) -> int | None:
        """The priority whose turn it is though a higher one waits. `waiting`: how many wait at each."""
        for priority, passed in enumerate(self._passed):
            if passed >= self._due and waiting[priority]:
                return priority
        return None

    def took(self, priority: int, waiting: Sequence[int]) -> None:
        """One of this priority was taken; `waiting`: how many wait at each now."""
        self._passed[priority] = 0
        for lower in range(priority + 1, len(self._passed)):
            if waiting[lower]:
                counted = self._passed[lower] + self._unit // (lower - priority)
                self._passed[lower] = min(self._due, counted)
            else:
                self._passed[lower] = 0

    def check(self) -> None:
        assert all(0 <= passed <= self._due for passed in self._passed)

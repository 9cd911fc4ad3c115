"""Pure. Which priority may ask the stream for requests, and for how many.

A priority asks for many while every higher one is known to be empty. Besides, it has turns, in which it asks
for one: a request fetched at priority p counts 1/(q - p) at every lower priority q, and at `overtakes_max` it
is q's turn, before which the higher ones wait until q is answered or known to be empty. At the beginning
(`begin`) each asks for one: to find out one after another that all above are empty took a request 100 ms.

Starvation bound: while requests of priority q wait in the stream, one of them is fetched before any
`overtakes_max` times (q - p) of priority p are, or a mixture that counts as much. What may come besides: one
of each priority between whose turn it is too, what polls under way had asked for when the turn came, and
one of each at the beginning.
"""

from math import lcm


class Turns:
    """Priorities are 0 (first) to `num_priorities` - 1, with one poll each at a time."""

    def __init__(self, num_priorities: int, overtakes_max: int, fetch_len_max: int) -> None:
        assert num_priorities >= 1 and overtakes_max >= 1 and fetch_len_max >= 1
        self._fetch_len_max = fetch_len_max
        self._unit = lcm(*range(1, num_priorities))  # of what is counted: 1/(q - p) is whole
        self._due = overtakes_max * self._unit
        self._passed = [0] * num_priorities
        self._asked = [0] * num_priorities  # by the poll under way
        self._empty = [False] * num_priorities  # as far as is known
        self._begins = [False] * num_priorities  # and has not asked yet

    def begin(self) -> None:
        """After a time without polls: what was known of the stream is old."""
        self._begins = [True] * len(self._begins)

    def ask(self, priority: int, room: int) -> int:
        """For how many its next poll may ask, which is then under way; 0: it has to wait."""
        assert not self._asked[priority]
        count = self._many(priority, room) if all(self._empty[:priority]) else 0
        if not count and (self._is_due(priority) or self._begins[priority]) and room > 0:
            count = 1
        self._begins[priority] = self._begins[priority] and not count
        self._asked[priority] = count
        return count

    def _many(self, priority: int, room: int) -> int:
        if room <= 0:
            return 0
        share = min(room // len(self._passed), room - sum(self._asked), self._fetch_len_max)
        for lower in range(priority + 1, len(self._passed)):
            if not self._is_due(lower):
                left = self._due - self._passed[lower]
                share = min(share, -(-left * (lower - priority) // self._unit))
            elif not self._empty[lower]:
                return 0
        return max(1, share)

    def came(self, priority: int, num_requests: int) -> None:
        """Its poll brought so many."""
        self._empty[priority] = num_requests < self._asked[priority]
        self._asked[priority] = 0
        if not num_requests:
            return
        self._passed[priority] = 0
        for lower in range(priority + 1, len(self._passed)):
            before = self._is_due(lower)
            counted = num_requests * self._unit // (lower - priority)
            self._passed[lower] = min(self._due, self._passed[lower] + counted)
            if self._is_due(lower) and not before and not self._asked[lower]:
                self._empty[lower] = False  # as far as is known; its turn will tell

    def is_quiet(self, priority: int) -> None:
        """Its poll, still under way, found nothing at once."""
        self._empty[priority] = True

    def failed(self, priority: int) -> None:
        """Nobody waits for a priority that cannot be asked."""
        self._asked[priority] = 0
        self._empty[priority] = True

    def _is_due(self, priority: int) -> bool:
        return self._passed[priority] >= self._due

    def check(self) -> None:
        assert all(0 <= passed <= self._due for passed in self._passed)
        assert all(0 <= asked <= self._fetch_len_max for asked in self._asked)

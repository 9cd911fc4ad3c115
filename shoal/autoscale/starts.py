"""Pure. How long a pipeline takes to come, measured: from the moment it was asked for until it takes work.

Whichever comes first counts for whoever was asked for first. One that does not come within `GIVEN_UP_S` is no
longer waited for.
"""

from collections import deque

FIRST_GUESS_S = 10.0
LEARN = 0.3
GIVEN_UP_S = 600.0


class Starts:
    def __init__(self) -> None:
        self.start_s = FIRST_GUESS_S
        self.measured = 0
        self._asked: deque[float] = deque()
        self._arrived = 0

    @property
    def coming(self) -> int:
        return len(self._asked)

    def since(self, now: float) -> float | None:
        """For how long the first of those that are coming was asked for; None: nobody comes."""
        return now - self._asked[0] if self._asked else None

    def asked(self, now: float, count: int = 1) -> None:
        self._asked.extend([now] * count)

    def unasked(self, count: int = 1) -> None:
        """As many of the last are not wanted any more, as far as they have not come."""
        for _ in range(min(count, len(self._asked))):
            self._asked.pop()

    def saw(self, now: float, arrived: int) -> None:
        """`arrived`: that began to take work, ever: of those that do, one may come just as another leaves."""
        for _ in range(min(arrived - self._arrived, len(self._asked))):
            took_s = now - self._asked.popleft()
            share = LEARN if self.measured else 1.0
            self.start_s += share * (took_s - self.start_s)
            self.measured += 1
        self._arrived = arrived
        while self._asked and now - self._asked[0] > GIVEN_UP_S:
            self._asked.popleft()

    def check(self) -> None:
        assert list(self._asked) == sorted(self._asked) and self.start_s >= 0

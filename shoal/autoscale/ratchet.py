"""Pure. A number that goes up at once and comes down late.

`needed` must be there now; `enough` is what would do with a margin, and never less. The number is never below
`needed`, and it comes down, by one at a time, only to the most that was enough at any moment of the last
`hold_s`. So whatever is between the two stays as it is: a constant load is a fixed point, and noise that is
smaller than the margin moves nothing. After a time in which nobody looked it begins anew.
"""

from collections import deque

FALLS_PER_HOLD = 4  # at most
GAP_S = 3.0  # between two looks


class Ratchet:
    def __init__(self, number: int) -> None:
        self.number = number
        self._seen: deque[tuple[float, int]] = deque()  # (when, enough), falling: the first is the most
        self._began: float | None = None
        self._turned_at = self._fell_at = float("-inf")

    def turn(self, now: float, needed: int, enough: int, hold_s: float, may_fall: bool = True) -> int:
        """`now`: seconds, never going back. `may_fall`: nothing else is on its way."""
        assert needed <= enough, (needed, enough)
        if self._began is None or now - self._turned_at > max(GAP_S, hold_s / FALLS_PER_HOLD):
            self.put(now, self.number)  # nobody knows what was enough meanwhile
        self._turned_at = now
        while self._seen and self._seen[-1][1] <= enough:
            self._seen.pop()
        self._seen.append((now, enough))
        while self._seen[0][0] < now - hold_s:
            self._seen.popleft()
        if needed > self.number:
            self.number = needed
        elif may_fall and self._seen[0][1] < self.number and self._may_fall(now, hold_s):
            self.number -= 1
            self._fell_at = now
        return self.number

    def _may_fall(self, now: float, hold_s: float) -> bool:
        assert self._began is not None
        return now - self._began >= hold_s and now - self._fell_at >= hold_s / FALLS_PER_HOLD

    def put(self, now: float, number: int) -> None:
        """Somebody else changed it: what was seen before counts no more."""
        self.number = number
        self._began = now
        self._seen.clear()

    def check(self) -> None:
        values = [enough for _, enough in self._seen]
        assert values == sorted(values, reverse=True) and len(dict.fromkeys(values)) == len(values)

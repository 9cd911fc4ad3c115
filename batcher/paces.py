"""Pure. How long rounds were seen to take, by the number of groups that decodes are in.

Stages that share a machine slow each other, and no timing of a stage tells: what it takes is learned while
they do, so two groups look as good as one where one is a quarter better. What a number of groups makes of
that is known only when it was tried. A round is the time from a step's return to the return of the same
group's next, while nothing but decodes is in flight. It counts for batches of about its size (the same power
of two), for `KEPT_STEPS`.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

ROUNDS_MIN = 8
ROUNDS_MAX = 32
SETTLING_ROUNDS = 2  # after the number of groups has changed, or something else was in flight
KEPT_STEPS = 1 << 14


@dataclass(slots=True)
class Pace:
    """Rounds of `decodes` sequences in so many groups, `context` positions each."""

    decodes: int
    context: float
    rounds_s: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS_MAX))
    step: int = 0  # when last seen

    @property
    def round_s(self) -> float:
        return median(self.rounds_s)


class Paces:
    def __init__(self) -> None:
        self.returns = 0  # of steps, ever
        self._groups = 0
        self._left = 0  # returns until rounds count
        self._returns: deque[float] = deque()  # of one of each group, and the last
        self._paces: dict[tuple[int, int], Pace] = {}

    def open(self) -> None:
        """Other stages, perhaps."""
        self._groups = 0
        self._paces.clear()

    def returned(self, now: float, rows: int, groups: int, decodes: int, context: float) -> None:
        """A step came back, with so many decodes and nothing else, or with 0: with something else. `decodes`
        and `context` as they are now, of all groups."""
        self.returns += 1
        even = decodes // groups <= rows <= -(-decodes // groups)
        if groups != self._groups or not rows or not even:
            self._groups = groups
            self._left = SETTLING_ROUNDS * groups
            self._returns.clear()
            return
        self._left -= 1
        if self._left > 0:
            return
        self._returns.append(now)
        if len(self._returns) <= groups:
            return
        pace = self._paces.get((groups, decodes.bit_length()))
        if pace is None or 4 * abs(pace.decodes - decodes) > decodes:
            pace = self._paces[groups, decodes.bit_length()] = Pace(decodes, context)
        pace.rounds_s.append(now - self._returns.popleft())
        pace.decodes, pace.context, pace.step = decodes, context, self.returns

    def of(self, groups: int, decodes: int) -> Pace | None:
        """Of so many groups and about as many sequences; None: not known, or not any more."""
        pace = self._paces.get((groups, decodes.bit_length()))
        if pace is None or self.returns - pace.step > KEPT_STEPS or len(pace.rounds_s) < ROUNDS_MIN:
            return None
        return pace

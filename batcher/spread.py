"""Pure. How work is spread over the steps in flight: how many there are, and what decodes share one.

A decode's next step can leave when its last one has come back, so decodes go in groups, one step each, and
while one group is at the last stage another is at the first. Every group costs each stage its base anew, and
too few leave stages without work: the number that takes the least time for a token of every sequence is
chosen, by what stages are known to take (`stage_cost`), what the way round the ring adds, and how long the
busiest stage was seen to stand idle. Of numbers that are alike the most are best: then the next step lies at
a stage when it is done with one. More than one above the stages would only wait for each other, unless the
way is so long that all stages stand idle: then there are as many as fill it, or `WAY_STEPS` more. Another is
taken only if it is better by `HYSTERESIS`, or more and as good.

What rounds were seen to take (`paces`) is believed before what the model says. The least number that the
model finds hardly worse, by `TRIED` at most, is tried once for each size of a batch: stages that share a
machine slow each other, and only so it is seen that less of them at work at once may do more.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from batcher.paces import ROUNDS_MIN, SETTLING_ROUNDS, Paces
from batcher.stage_cost import Coefficients, Load

ALIKE = 0.01  # so much more time is none
HYSTERESIS = 0.02
TRIED = 0.3
TRIAL_ROUNDS = 2 * (ROUNDS_MIN + SETTLING_ROUNDS)
TRY_AGAIN_AFTER = 256  # returns, if prompts came between
FILLED = 0.4  # of the time that a stage stands idle between steps, by one step more
LOOK_STEPS = 8  # between two looks at whether another number is better
MEAN_LEN = 64
WAY_STEPS = 8  # in flight beyond one more than stages, while a long way keeps them from all stages
ENOUGH = 32
ODD = 4.0  # what is so many times the mean counts as that


def runs_ahead(steps_in_flight_max: int, num_stages: int, wanted: bool) -> bool:
    """Whether a sequence's next step is sent before the token of the one in flight is known. With one stage
    who samples it computes it next: the step lies there already, and nobody waits for the batcher. With more
    the token travels from the last stage to the first anyway, and groups of decodes keep all at work."""
    return wanted and num_stages == 1 and steps_in_flight_max > 1


def steps_in_flight_max(fixed: int | None, num_stages: int, run_ahead: bool) -> int:
    """One more than there are stages, so that one lies there when another is done, and those on a long way.
    With one stage it may be sent ahead: then a third place stays for prompts that come meanwhile."""
    if num_stages == 1:
        return 3 if fixed is None and run_ahead else min(fixed or 2, 2)
    return min(fixed or num_stages + 1 + WAY_STEPS, num_stages + 1 + WAY_STEPS)


class Round(NamedTuple):
    """Seconds until each sequence has its next token."""

    stage_s: float  # the busiest stage, for all groups and standing idle between them
    ring_s: float  # one group, once round

    @property
    def seconds(self) -> float:
        return max(self)


def round_of(
    stages: Sequence[Coefficients],
    groups: int,
    decodes: int,
    context: float,
    way_s: float,
    idle_s: float = 0.0,
) -> Round:
    """Of `decodes` sequences in so many groups."""
    rows = -(-decodes // groups)
    took = [stage.seconds(Load(0, rows, 0, round(rows * context))) for stage in stages]
    used = min(groups, decodes)
    smaller = used * rows - decodes  # groups with a row less
    all_groups = [
        used * (took_s + idle_s) - smaller * (stage.decode + stage.read * context)
        for took_s, stage in zip(took, stages, strict=True)
    ]
    return Round(max(all_groups), sum(took) + way_s)


class _Mean:
    """Moves by one part in `MEAN_LEN`; one odd value moves it by little. Zero until it has seen enough."""

    __slots__ = ("_count", "_mean")

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, MEAN_LEN)
        if self._count > ENOUGH:
            value = min(value, ODD * self._mean)
        self._mean += (value - self._mean) / self._count

    @property
    def value(self) -> float:
        return self._mean if self._count >= ENOUGH else 0.0


class Spread:
    def __init__(self, fixed: int | None, run_ahead: bool) -> None:
        assert fixed is None or fixed >= 1
        self._fixed = fixed
        self._run_ahead = run_ahead
        self._num_stages = 1
        self._steps = 0
        self._looked_decodes = 0
        self._decodes = 0
        self._context = 0.0  # of each
        self._paces = Paces()
        self._plain = 0  # returns with nothing but decodes, one after the other
        self._trial_until = 0  # return
        self._trial_size = 0  # of the batch, as a power of two
        self._try_again: dict[int, int] = {}  # size -> return
        self._way_s = _Mean()
        self._idle_s: dict[int, _Mean] = {}  # of the busiest stage, between two steps of so many groups
        self.runs_ahead = False
        self.steps_max = 1  # in flight
        self.places_max = 1  # of them, prompts that follow each other
        self.groups = 1  # steps into which the decodes are divided

    def open(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.steps_max = steps_in_flight_max(self._fixed, num_stages, self._run_ahead)
        self.places_max = min(self.steps_max, num_stages + 1) if self.chooses else self.steps_max
        self.runs_ahead = runs_ahead(self.steps_max, num_stages, self._run_ahead)
        self.groups = 1 if num_stages == 1 else min(self.places_max, self._fixed or num_stages)
        self._looked_decodes = 0
        self._paces.open()
        self._plain = 0
        self._trial_until = 0
        self._try_again.clear()
        self._way_s = _Mean()
        self._idle_s.clear()

    @property
    def chooses(self) -> bool:
        return self._fixed is None and self._num_stages > 1

    def places(self, decodes: int) -> int:
        """Steps that may be in flight, while so many sequences decode. Where they do, a step more than there
        are stages would make them wait for each other; prompts alone follow each other without."""
        if not self.chooses or not decodes:
            return self.places_max
        return max(self.groups, self._num_stages)

    def went_round(self, way_s: float, idle_s: float | None) -> None:
        """A step with decodes came back: how long it was on its way, beside computing and waiting at stages,
        and how long the busiest stage had stood idle before it, if that is known."""
        self._way_s.add(max(0.0, way_s))
        if idle_s is not None:
            self._idle_s.setdefault(self.groups, _Mean()).add(idle_s)

    def came_back(self, now: float, rows: int) -> None:
        """A step came back, with so many decodes and nothing else; 0: with something else."""
        if not self.chooses or not self._looked_decodes:
            return
        self._plain = self._plain + 1 if rows else 0
        if not rows:
            self._trial_until = 0  # prompts would wait, and nothing is seen
        if self.groups > self._num_stages:  # no more of them are at work at once than with one a stage
            rows = 0
        self._paces.returned(now, rows, self.groups, self._decodes, self._context)

    def look(self, stages: Sequence[Coefficients], decodes: int, context: float) -> None:
        """Before a step is planned: chooses anew, now and then and when the number of decodes has changed.
        `context`: positions of each, on average."""
        self._decodes, self._context = decodes, context
        if not self.chooses or not decodes or not stages:
            return
        changed = abs(decodes - self._looked_decodes) * 4 > self._looked_decodes
        self._steps += 1
        if self._steps % LOOK_STEPS and not changed:
            return
        if changed:
            self._idle_s.clear()  # of other steps
            self._looked_decodes = decodes
        rounds = self._rounds(stages, decodes, context)
        tried = self._to_try(rounds, decodes)
        if tried is not None:
            self.groups = tried
            return
        took = self._seen(rounds, stages, decodes, context)
        now_s = took[min(self.groups, max(took))]
        least_s = min(took.values())
        best = self._best([groups for groups in took if took[groups] <= least_s * (1 + ALIKE)])
        better = now_s > least_s * (1 + HYSTERESIS)
        if better or self.groups not in took or (best > self.groups and took[best] <= now_s):
            self.groups = best

    def _to_try(self, rounds: Mapping[int, float], decodes: int) -> int | None:
        """The number that is being tried, or is to be, once the pace of the usual one is known."""
        size = decodes.bit_length()
        if self._paces.returns < self._trial_until and size == self._trial_size:
            if self._paces.of(self.groups, decodes) is None:
                return self.groups
        self._trial_until = 0
        least_s = min(rounds.values())
        fewest = min([groups for groups in rounds if rounds[groups] <= least_s * (1 + TRIED)])
        known = [groups for groups in (fewest, self.groups) if self._paces.of(groups, decodes) is not None]
        if known != [self.groups] or fewest >= min(self.groups, self._num_stages):
            return None
        if self._paces.returns < self._try_again.get(size, 0) or self._plain < ROUNDS_MIN * self.groups:
            return None
        self._try_again[size] = self._paces.returns + TRY_AGAIN_AFTER
        self._trial_until, self._trial_size = self._paces.returns + TRIAL_ROUNDS * fewest, size
        return fewest

    def _seen(
        self, rounds: Mapping[int, float], stages: Sequence[Coefficients], decodes: int, context: float
    ) -> dict[int, float]:
        """Seconds of a round by groups: what the model says, times what those that were seen took of what it
        says of them; numbers between two of these lie between."""
        scales = {}
        for groups in rounds:
            pace = self._paces.of(groups, decodes)
            if pace is not None:
                model = self._round(stages, groups, pace.decodes, pace.context)
                scales[groups] = pace.round_s / model.seconds
        if not scales:
            return dict(rounds)
        known, seen = list(scales), list(scales.values())
        return {groups: model_s * float(np.interp(groups, known, seen)) for groups, model_s in rounds.items()}

    def _rounds(self, stages: Sequence[Coefficients], decodes: int, context: float) -> Mapping[int, float]:
        """Seconds of a round by groups, as the model says: of all numbers that may be best."""
        took = {}
        for groups in range(1, min(self.steps_max, decodes) + 1):
            round_ = self._round(stages, groups, decodes, context)
            took[groups] = round_.seconds
            if groups > self._num_stages and round_.ring_s <= round_.stage_s:
                break  # a stage has enough of them
        return took

    def _round(self, stages: Sequence[Coefficients], groups: int, decodes: int, context: float) -> Round:
        idle = self._idle_s.get(groups)
        idle_s = FILLED * idle.value if idle is not None else 0.0
        return round_of(stages, groups, decodes, context, self._way_s.value, idle_s)

    def _best(self, alike: Sequence[int]) -> int:
        """Of ascending numbers: the most, but of those that are on a long way the least."""
        usual = [groups for groups in alike if groups <= self._num_stages + 1]
        return usual[-1] if usual else alike[0]

    def check(self) -> None:
        assert 1 <= self.groups <= self.steps_max <= max(3, self._num_stages + 1 + WAY_STEPS)
        assert self.places_max <= self.steps_max

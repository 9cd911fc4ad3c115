"""Pure. How many pipelines and gateways a model should have.

Work is measured in seconds that one pipeline takes for it when it is full (`demand.py`), so that what comes,
per second, is a number of pipelines, whatever their number is now. Two rules say what is needed:

- *use*: what came over the last while, with every pipeline at most `USE_MAX` busy;
- *wait*: if, with those that are there or on their way, a request would wait for more than half of the
  objective (the other half is for computing its prompt), what comes now and also does away with what waits
  while another pipeline comes, or within that half if that is longer. What waits counts as of the moment when
  more can be there: the longer a start takes, the earlier they are asked for.

`enough` is the same at `USE_ENOUGH`. Hysteresis is `ratchet`'s: up at once, down late. How late follows from
the time that a pipeline takes to come, measured (`starts`): one that was let go too early costs its users a
start, so a load must have been lower for many times as long.

To zero only where the bounds allow it, when nothing was accepted and unfinished for as long. The first
request asks for one at once.
"""

from dataclasses import dataclass
from math import ceil

from shoal.autoscale.ratchet import Ratchet

USE_MAX = 0.8  # of a pipeline, before another one is needed
USE_ENOUGH = 0.65  # of those that would stay, before one may go
WAIT_SHARE = 0.5  # of the objective
HOLD_STARTS = 10.0  # how many starts a load must have been lower for
HOLD_MIN_S = 30.0
WHILE_S = 15.0
PIPELINES_MAX = 64
GATEWAYS_MAX = 64
SLACK = 1e-9  # what adding up costs


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator asks for. Raises ValueError naming what and its limits."""

    pipelines_min: int = 1
    pipelines_max: int = 1
    gateways_min: int = 1
    gateways_max: int = 1
    gateway_streams: int = 1024  # open at once, that a gateway is meant to carry
    ttft_objective_ms: int = 2000
    down_after_s: float | None = None  # None: follows from how long a pipeline takes to come

    def __post_init__(self) -> None:
        _between("pipelines_min", self.pipelines_min, 0, PIPELINES_MAX)
        _between("pipelines_max", self.pipelines_max, max(1, self.pipelines_min), PIPELINES_MAX)
        _between("gateways_min", self.gateways_min, 1, GATEWAYS_MAX)
        _between("gateways_max", self.gateways_max, self.gateways_min, GATEWAYS_MAX)
        _between("gateway_streams", self.gateway_streams, 1, 1 << 20)
        _between("ttft_objective_ms", self.ttft_objective_ms, 1, 3_600_000)
        if self.down_after_s is not None:
            _between("down_after_s", self.down_after_s, 0.1, 86400)

    @property
    def while_s(self) -> float:
        """Over which what came is averaged: so that a hold sees nearly all of what began with it."""
        return min(WHILE_S, self.hold_s(0.0) / 2)

    def hold_s(self, start_s: float) -> float:
        if self.down_after_s is not None:
            return self.down_after_s
        return max(HOLD_MIN_S, HOLD_STARTS * start_s)

    @property
    def wait_max_s(self) -> float:
        return WAIT_SHARE * self.ttft_objective_ms / 1000


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: {value:g}; {low:g} to {high:g}")


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known of a model at one moment. Work in seconds of one full pipeline."""

    now: float
    demand: float = 0.0  # work that came, per second, over the last while
    demand_now: float = 0.0  # the same over the last seconds
    backlog_s: float = 0.0  # work that waits for a place
    queue_age_s: float = 0.0  # who waits longest
    unfinished: int = 0  # requests that were accepted and have not ended
    ready: int = 0  # pipelines that take work
    coming_s: float | None = None  # since the first of those on their way was asked for; None: none is
    start_s: float = 0.0  # that one takes to come


@dataclass(frozen=True, slots=True)
class Decision:
    pipelines: int
    gateways: int
    needed: int  # by the rules, before hysteresis and bounds
    wait_s: float  # that a request would have which comes now


class Policy:
    def __init__(self, rules: Rules, pipelines: int, gateways: int = 1) -> None:
        """`pipelines`, `gateways`: that there are."""
        self.rules = rules
        self._pipelines = Ratchet(pipelines)
        self._gateways = Ratchet(gateways)

    @property
    def pipelines(self) -> int:
        return self._pipelines.number

    def decide(self, s: Signals, may_fall: bool = True) -> Decision:
        """`may_fall`: nothing drains or starts."""
        rules, hold_s = self.rules, self.rules.hold_s(s.start_s)
        needed = max(self._by_use(s, USE_MAX), self._by_wait(s))
        enough = max(needed, self._by_use(s, USE_ENOUGH), self._quiet(s, s.start_s))
        low, high = rules.pipelines_min, rules.pipelines_max
        pipelines = self._pipelines.turn(
            s.now, _within(low, needed, high), _within(low, enough, high), hold_s, may_fall
        )
        if not low <= pipelines <= high:  # they were so many when this began
            pipelines = _within(low, pipelines, high)
            self._pipelines.put(s.now, pipelines)
        streams = rules.gateway_streams
        gateways = self._gateways.turn(
            s.now,
            _within(rules.gateways_min, ceil(s.unfinished / (USE_MAX * streams)), rules.gateways_max),
            _within(rules.gateways_min, ceil(s.unfinished / (USE_ENOUGH * streams)), rules.gateways_max),
            hold_s,
        )
        gateways = _within(rules.gateways_min, gateways, rules.gateways_max)
        return Decision(pipelines, gateways, needed, self.wait_s(s))

    def put(self, now: float, pipelines: int) -> None:
        """Somebody else has made them so many."""
        self._pipelines.put(now, pipelines)

    def wait_s(self, s: Signals) -> float:
        """What one that comes now would wait with the pipelines that are there."""
        return max(s.backlog_s / max(1, s.ready), s.queue_age_s)

    def _by_use(self, s: Signals, use: float) -> int:
        if not s.unfinished and s.demand_now < SLACK:
            return 0
        return max(1, ceil(s.demand / use - SLACK))

    def _by_wait(self, s: Signals) -> int:
        """0: with those that are there or on their way nobody waits for too long."""
        left_s = s.start_s if s.coming_s is None else max(0.0, s.start_s - s.coming_s)
        if max(s.ready, self.pipelines) >= self._quiet(s, left_s):
            return 0
        within_s = max(self.rules.wait_max_s, s.start_s)
        backlog_s = _backlog_s(s) + max(0.0, s.demand_now - s.ready) * left_s
        return max(1, ceil(max(s.demand, s.demand_now) + backlog_s / within_s - SLACK))

    def _quiet(self, s: Signals, left_s: float) -> int:
        """The fewest with which nobody will wait for too long in `left_s`, when others can be there."""
        wait_s, backlog_s = self.rules.wait_max_s, _backlog_s(s)
        if backlog_s >= wait_s * s.demand_now:
            return ceil(backlog_s / wait_s - SLACK)
        return ceil((backlog_s + s.demand_now * left_s) / (wait_s + left_s) - SLACK)

    def check(self) -> None:
        self._pipelines.check()
        self._gateways.check()


def _backlog_s(s: Signals) -> float:
    """Who has waited for so long found at least as much in front of him, whatever it was thought to be."""
    return max(s.backlog_s, s.queue_age_s) if s.ready else s.backlog_s


def _within(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)

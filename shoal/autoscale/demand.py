"""Pure. What comes and what waits, from what batchers tell and the stream's consumers say.

A batcher tells, every second or more often, how much work it has done since it started, in seconds that its
pipeline takes for it when it is full by its own model of costs, and how many tokens wait (`PipelineLoad`).
How much of that a full pipeline really does is learned while more waits in it than it does meanwhile:
memory for blocks, or a machine shared with others, may allow less. That is forgotten over hours, so that one
bad hour does not count for ever. What comes is what was done and what the backlog has grown by.
"""

from dataclasses import dataclass
from math import exp

from chassis.ids import BootId
from chassis.messages.load import PipelineLoad
from shoal.autoscale.policy import WHILE_S, Signals

HEARD_TTL_S = 2.5
SLICE_S = 1.0  # of a batcher's account
NOW_S = 2.0  # over which what comes now is averaged
IDLE_S = 3.0  # without work: nothing comes
LEARN = 0.3  # of each new measurement
WARM_S = 5.0  # a pipeline's first seconds say nothing of how fast it is
FORGET_S = 4 * 3600.0
CAPACITY_MIN, CAPACITY_MAX = 0.05, 2.0
PIPELINES_MAX = 256  # that are listened to


class Mean:
    """Of late; 0: nothing was seen."""

    def __init__(self) -> None:
        self.value = 0.0

    def see(self, value: float) -> None:
        self.value += (LEARN if self.value else 1.0) * (value - self.value)


@dataclass(slots=True)
class Heard:
    """Of one pipeline. `slice_`: what it had told when the slice under way began."""

    load: PipelineLoad
    heard_at: float
    since: float  # it takes work
    slice_: PipelineLoad
    slice_at: float
    rate: float = 0.0  # work per second in the last slice


@dataclass(frozen=True, slots=True)
class Queued:
    """What the stream says. `waiting`: requests that no batcher has, without the batch class; `unfinished`:
    all that were accepted and have not ended; `oldest_s`: the age of the oldest of those."""

    waiting: int = 0
    unfinished: int = 0
    oldest_s: float = 0.0


class Demand:
    def __init__(self, while_s: float = WHILE_S) -> None:
        """`while_s`: over which what came is averaged."""
        self._while_s = while_s
        self._pipelines: dict[BootId, Heard] = {}
        self.arrived = 0  # pipelines that began to take work, ever
        self.capacity = 1.0  # of its own account, that a full pipeline does
        self._token_s = Mean()  # work of a token
        self._request_tokens = Mean()  # of work, of a request that waits
        self._now = self._while = 0.0  # work that comes, per second: the averages
        self._worked_at = float("-inf")
        self._looked_at: float | None = None
        self._pending_tokens = self._waiting = 0

    @property
    def ready(self) -> int:
        """Pipelines that take work."""
        return len(self._pipelines)

    # ---- what is heard

    def heard(self, load: PipelineLoad, now: float) -> None:
        known = self._pipelines.get(load.boot)
        if not load.accepting:
            self._pipelines.pop(load.boot, None)
            return
        if known is None:
            if len(self._pipelines) < PIPELINES_MAX:
                self._pipelines[load.boot] = Heard(load, now, now, load, now)
                self.arrived += 1
            return
        known.load, known.heard_at = load, now
        if load.waiting:
            self._request_tokens.see(load.pending_tokens / load.waiting)
        if now >= known.slice_at + SLICE_S:
            self._slice(known, now)

    def _slice(self, known: Heard, now: float) -> None:
        load, before = known.load, known.slice_
        work_s, tokens = load.work_s - before.work_s, load.work_tokens - before.work_tokens
        known.rate = max(0.0, work_s) / (now - known.slice_at)
        if tokens > 0 and work_s >= 0:
            self._worked_at = now
            self._token_s.see(work_s / tokens)
            if now - known.since >= WARM_S:
                self._learn_capacity(known.rate, full=load.waiting > 0 and before.pending_tokens >= tokens)
        known.slice_, known.slice_at = load, now

    def _learn_capacity(self, rate: float, full: bool) -> None:
        if full:
            self.capacity += LEARN * (max(rate, CAPACITY_MIN) - self.capacity)
        self.capacity = min(max(rate, self.capacity), CAPACITY_MAX)

    # ---- what follows

    def signals(self, now: float, queued: Queued, coming_s: float | None, start_s: float) -> Signals:
        """Call it regularly. `coming_s`, `start_s`: as in `Signals`."""
        for boot in [b for b, heard in self._pipelines.items() if heard.heard_at < now - HEARD_TTL_S]:
            del self._pipelines[boot]
        loads = [heard.load for heard in self._pipelines.values()]
        pending_tokens = sum([load.pending_tokens for load in loads])
        waiting = queued.waiting if loads else queued.unfinished
        work_s = self._token_s.value / self.capacity  # of a token
        self._look(now, pending_tokens, waiting, work_s)
        return Signals(
            now=now,
            demand=max(0.0, self._while),
            demand_now=max(0.0, self._now),
            backlog_s=(pending_tokens + waiting * self._request_tokens.value) * work_s,
            queue_age_s=max([load.oldest_wait_s for load in loads]) if loads else queued.oldest_s,
            unfinished=queued.unfinished,
            ready=len(loads),
            coming_s=coming_s,
            start_s=start_s,
        )

    def _look(self, now: float, pending_tokens: int, waiting: int, work_s: float) -> None:
        """Moves the averages up to now."""
        new = (waiting - self._waiting) * self._request_tokens.value
        grown_tokens = pending_tokens - self._pending_tokens + new
        self._pending_tokens, self._waiting = pending_tokens, waiting
        before, self._looked_at = self._looked_at, now
        if before is None or now <= before:
            return
        took_s = now - before
        done = sum([heard.rate for heard in self._pipelines.values()]) / self.capacity
        rate = done + grown_tokens * work_s / took_s
        self._now += (1 - exp(-took_s / NOW_S)) * (rate - self._now)
        self._while += (1 - exp(-took_s / self._while_s)) * (rate - self._while)
        if now - self._worked_at > IDLE_S and not pending_tokens and not waiting:
            self._now = 0.0
        self.capacity += (1 - exp(-took_s / FORGET_S)) * (1.0 - self.capacity)

    def check(self) -> None:
        assert len(self._pipelines) <= PIPELINES_MAX and CAPACITY_MIN <= self.capacity <= CAPACITY_MAX

"""A model's pipelines as one queue on a clock of their own, under load that a trace gives: what the
autoscaler sees of it, and what requests waited. Each pipeline does `speed` seconds of work a second, tells
each second, and takes `start_s` to come; who leaves drains at once: its requests are in the queue again.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chassis.ids import BootId
from chassis.messages.load import PipelineLoad
from shoal.autoscale.demand import Demand, Queued
from shoal.autoscale.policy import Policy, Rules
from shoal.autoscale.starts import Starts

STEP_S = 0.1
LOOK_S = 0.5
TOKENS = 100  # of a request
Trace = Callable[[float], float]  # requests a second, by the time


@dataclass(slots=True)
class Pipeline:
    boot: BootId
    ready_at: float
    work_s: float = 0.0


@dataclass(slots=True)
class Waiting:
    came_at: float
    left_s: float  # of work


@dataclass(slots=True)
class Ran:
    """What happened. `numbers`: pipelines wanted, as often as somebody looked."""

    numbers: list[tuple[float, int]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # when it came, how long it waited
    lost: int = 0

    def changes(self, since: float = 0.0) -> list[tuple[float, int]]:
        found = [(t, n) for t, n in self.numbers if t >= since]
        return [b for a, b in zip(found, found[1:], strict=False) if a[1] != b[1]]

    def at(self, t: float) -> int:
        return [n for when, n in self.numbers if when <= t][-1]

    def waited(self, share: float, since: float = 0.0, until: float = float("inf")) -> float:
        found = sorted(w for came, w in self.waits if since <= came < until)
        return found[min(len(found) - 1, int(share * len(found)))]


class World:
    def __init__(
        self,
        rules: Rules,
        trace: Trace,
        work_s: float = 0.1,
        start_s: float = 5.0,
        speed: float = 1.0,
        seed: int = 0,
        begin: int = 1,
    ) -> None:
        self.now = 0.0
        self.ran = Ran()
        self._rng = random.Random(seed)
        self._trace, self._work_s, self._start_s, self._speed = trace, work_s, start_s, speed
        self._policy = Policy(rules, begin)
        self._demand, self._starts = Demand(rules.while_s), Starts()
        self._serial = 0
        self._pipelines = [self._pipeline(0.0) for _ in range(begin)]
        self._queue: deque[Waiting] = deque()

    def _pipeline(self, ready_at: float) -> Pipeline:
        self._serial += 1
        return Pipeline(BootId(f"b{self._serial}"), ready_at)

    def run(self, until: float) -> Ran:
        while self.now < until:
            self._come()
            self._work()
            tick = round(self.now / STEP_S)
            if tick % round(1 / STEP_S) == 0:
                self._tell()
            if tick % round(LOOK_S / STEP_S) == 0:
                self._look()
            self.now = round(self.now + STEP_S, 6)
        return self.ran

    @property
    def _ready(self) -> list[Pipeline]:
        return [p for p in self._pipelines if p.ready_at <= self.now]

    def _come(self) -> None:
        expected = self._trace(self.now) * STEP_S
        at = self._rng.expovariate(1.0)
        while at < expected:
            self._queue.append(Waiting(self.now, self._work_s))
            at += self._rng.expovariate(1.0)

    def _work(self) -> None:
        ready = self._ready
        left_s = len(ready) * self._speed * STEP_S
        done_s = 0.0
        while self._queue and left_s > 0:
            head = self._queue[0]
            if head.left_s == self._work_s:
                self.ran.waits.append((head.came_at, self.now - head.came_at))
            took_s = min(head.left_s, left_s)
            head.left_s -= took_s
            left_s -= took_s
            done_s += took_s
            if head.left_s <= 1e-12:
                self._queue.popleft()
        for pipeline in ready:
            pipeline.work_s += done_s / len(ready)

    def _tell(self) -> None:
        ready = self._ready
        for index, pipeline in enumerate(ready):
            mine = list(self._queue)[index :: len(ready)]
            self._demand.heard(
                PipelineLoad(
                    pipeline.boot,
                    "",
                    True,
                    wait_s=0.0,
                    places=0,
                    place_s=0.0,
                    prompt_token_s=0.0,
                    output_token_s=0.0,
                    waiting=len(mine),
                    pending_tokens=len(mine) * TOKENS,
                    oldest_wait_s=self.now - mine[0].came_at if mine else 0.0,
                    work_s=pipeline.work_s,
                    work_tokens=round(pipeline.work_s / self._work_s * TOKENS),
                ),
                self.now,
            )

    def _look(self) -> None:
        policy, starts = self._policy, self._starts
        oldest_s = self.now - self._queue[0].came_at if self._queue else 0.0
        queued = Queued(0 if self._ready else len(self._queue), len(self._queue), oldest_s)
        signals = self._demand.signals(self.now, queued, starts.since(self.now), starts.start_s)
        starts.saw(self.now, self._demand.arrived)
        there = signals.ready >= len(self._pipelines) or not self._queue
        decision = policy.decide(signals, may_fall=there and not starts.coming)
        for part in (policy, self._demand, starts):
            part.check()
        more = decision.pipelines - len(self._pipelines)
        if more > 0:
            starts.asked(self.now, more)
            self._pipelines += [self._pipeline(self.now + self._start_s) for _ in range(more)]
        elif more < 0:
            del self._pipelines[more:]
        self.ran.numbers.append((self.now, decision.pipelines))

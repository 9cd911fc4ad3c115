"""Pure. What is known of the stages from steps that came back, and what follows from it for the next."""

from typing import Any

from batcher.chunks import ChunkRules, Chunks
from batcher.events import StepReturned
from batcher.inflight import Flight
from batcher.spread import Spread
from batcher.stage_cost import StageCost
from batcher.stage_use import StageUse
from batcher.work import Work


class Balance:
    def __init__(
        self, rules: ChunkRules, steps_in_flight: int | None, run_ahead: bool, places_max: int = 64
    ) -> None:
        self.cost = StageCost()
        self.spread = Spread(steps_in_flight, run_ahead)
        self.chunks = Chunks(rules, self.cost)
        self.use = StageUse()
        self.work = Work(places_max, rules.step_tokens_max)

    def open(self, num_stages: int) -> None:
        """A new epoch: nothing is in flight."""
        self.cost.open(num_stages)
        self.spread.open(num_stages)
        self.chunks.open(num_stages)
        self.use.open(num_stages)

    def returned(self, flight: Flight[Any], event: StepReturned, service_s: float) -> None:
        """A step with rows came back. `service_s`: what it added to the one before."""
        timings = event.timings
        self.cost.observe(flight.load, [timing.compute_ns / 1e9 for timing in timings])
        self.work.returned(flight, self.cost.all, len(timings))
        idle_s = self.use.returned(flight.number, timings, service_s, flight.follows)
        if flight.decodes:
            at_stages_s = sum([timing.wait_ns + timing.compute_ns for timing in timings]) / 1e9
            full = flight.num_in_flight >= self.spread.groups
            self.spread.went_round(event.now - flight.sent_at - at_stages_s, idle_s if full else None)
        self.spread.came_back(event.now, 0 if flight.load.prompt_tokens else flight.load.decodes)

    def check(self) -> None:
        self.cost.check()
        self.spread.check()
        self.work.check()

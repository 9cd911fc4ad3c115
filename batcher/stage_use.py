"""Pure. What stages did with the time while steps were in flight: computed, or stood idle.

By the stages' own clocks: a stage that has ended a step and has not received the next one stands idle. The
first stage then waits for the batcher and the way from it, another for the stage before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from chassis.messages.pipeline import StageTiming


@dataclass(slots=True)
class Use:
    """Sums of one stage, in seconds; the reader takes differences."""

    busy_s: float = 0.0
    queued_s: float = 0.0  # steps lay there while it computed others
    idle_s: float = 0.0  # between two steps of which the second was sent before the first came back


class StageUse:
    def __init__(self) -> None:
        self.active_s = 0.0  # steps with rows were in flight
        self.stages: tuple[Use, ...] = ()
        self._number = 0
        self._ended_ns: tuple[int, ...] = ()

    def open(self, num_stages: int) -> None:
        """A new epoch: what it was is kept if it has as many stages."""
        if num_stages != len(self.stages):
            self.stages = tuple([Use() for _ in range(num_stages)])
            self.active_s = 0.0
        self._ended_ns = ()

    def returned(
        self, number: int, timings: Sequence[StageTiming], service_s: float, follows: bool
    ) -> float | None:
        """`service_s`: since the step before came back, or since it was sent if that is later. `follows`: it
        was sent while others were in flight, or as soon as there was something to send. Returns how long the
        busiest stage had stood idle before it; None: there was nothing to do before it."""
        if len(timings) != len(self.stages):
            return None
        self.active_s += service_s
        ended = self._ended_ns if self._number + 1 == number and follows else ()
        self._number = number
        for use, timing in zip(self.stages, timings, strict=True):
            use.busy_s += timing.compute_ns / 1e9
            use.queued_s += timing.wait_ns / 1e9
        idle = [max(0, t.received_ns - at_ns) / 1e9 for t, at_ns in zip(timings, ended, strict=False)]
        for use, idle_s in zip(self.stages, idle, strict=False):
            use.idle_s += idle_s
        self._ended_ns = tuple([t.received_ns + t.wait_ns + t.compute_ns for t in timings])
        busiest = max(range(len(timings)), key=lambda stage: self.stages[stage].busy_s)
        return idle[busiest] if idle else None

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """Of the time in which steps were in flight: what each stage did not compute."""
        if not self.active_s:
            return ()
        return tuple([max(0.0, 1.0 - use.busy_s / self.active_s) for use in self.stages])

"""Pure. The numbered steps that are on their way round the ring.

Steps of an epoch are numbered from 1 without gaps and come back in order. At most `steps_max` are in
flight. A step's time to come back starts when it was sent or when the one before came back, whichever is
later; when the oldest exceeds the larger of a floor and a multiple of what was predicted, the pipeline hangs.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from batcher.stage_cost import Load
from chassis.ids import Epoch

R = TypeVar("R")
NOTHING = Load()


@dataclass(slots=True)
class Flight(Generic[R]):
    """One step in flight. `rows` is the sender's own record of what it carries."""

    number: int
    rows: tuple[R, ...]
    num_tokens: int
    num_samples: int
    sent_at: float
    predicted_s: float
    decodes: bool
    load: Load
    follows: bool  # sent while others were in flight, or at once when the last one came back
    num_in_flight: int  # when it was sent, itself included


@dataclass(slots=True)
class StepStats:
    """Sums since the start; the reader takes differences."""

    steps: int = 0
    empty_steps: int = 0
    rows: int = 0
    tokens: int = 0
    samples: int = 0
    ahead_rows: int = 0  # sent before the token that they compute was known
    ghost_rows: int = 0  # computed for nobody: their sequence had ended, lost its place or begun anew
    round_trip_s: float = 0.0  # sent to returned
    service_s: float = 0.0  # returned, or sent if later, to returned: what one step adds
    voided: int = 0
    ghosts: int = 0
    wrong: int = 0


class InFlight(Generic[R]):
    def __init__(self, deadline_min_s: float, deadline_factor: float) -> None:
        assert deadline_min_s > 0 and deadline_factor > 0
        self._deadline_min_s = deadline_min_s
        self._deadline_factor = deadline_factor
        self._flights: deque[Flight[R]] = deque()
        self._next_number = 1
        self._returned_at = 0.0
        self.epoch: Epoch | None = None
        self.steps_max = 0
        self.num_decoding = 0  # flights with decodes
        self.stats = StepStats()
        self.histogram: dict[int, int] = {}  # sampling rows in a step -> steps

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def full(self) -> bool:
        return len(self._flights) >= self.steps_max

    @property
    def next_number(self) -> int:
        return self._next_number

    @property
    def oldest(self) -> Flight[R] | None:
        return self._flights[0] if self._flights else None

    def rows(self) -> Iterator[R]:
        """Of all steps in flight, oldest first."""
        return (row for flight in self._flights for row in flight.rows)

    def open(self, epoch: Epoch, steps_max: int) -> None:
        """A new epoch begins at step 1. The flights of the last one were voided before."""
        assert not self._flights and steps_max >= 1
        assert self.epoch is None or epoch > self.epoch, "an epoch came again"
        self.epoch = epoch
        self.steps_max = steps_max
        self._next_number = 1
        self._returned_at = 0.0

    def send(
        self,
        rows: tuple[R, ...],
        num_tokens: int,
        num_samples: int,
        now: float,
        predicted_s: float,
        decodes: bool = False,
        load: Load = NOTHING,
        follows: bool = False,
    ) -> int:
        """Count a step as sent; returns its number."""
        assert not self.full
        number = self._next_number
        self._next_number = number + 1
        self.num_decoding += decodes
        in_flight = len(self._flights) + 1
        self._flights.append(
            Flight(number, rows, num_tokens, num_samples, now, predicted_s, decodes, load, follows, in_flight)
        )
        return number

    def returned(self, number: int, num_tokens: int, now: float) -> tuple[Flight[R], float] | None:
        """The flight of this epoch that came back and its service time in seconds. None: not what is due."""
        flight = self.oldest
        if flight is None or flight.number != number or flight.num_samples != num_tokens:
            self.stats.wrong += 1
            return None
        self._flights.popleft()
        self.num_decoding -= flight.decodes
        service_s = max(0.0, now - max(flight.sent_at, self._returned_at))
        self._returned_at = now
        stats = self.stats
        stats.steps += 1
        stats.rows += len(flight.rows)
        stats.tokens += flight.num_tokens
        stats.samples += flight.num_samples
        stats.round_trip_s += max(0.0, now - flight.sent_at)
        if flight.rows:
            stats.service_s += service_s
            self.histogram[len(flight.rows)] = self.histogram.get(len(flight.rows), 0) + 1
        else:
            stats.empty_steps += 1
        return flight, service_s

    def void(self) -> tuple[Flight[R], ...]:
        """The pipeline is lost; returns what was in flight, oldest first."""
        flights = tuple(self._flights)
        self._flights.clear()
        self.num_decoding = 0
        self.stats.voided += len(flights)
        return flights

    def deadline(self) -> float | None:
        """When the oldest step must have come back."""
        flight = self.oldest
        if flight is None:
            return None
        wait_s = max(self._deadline_min_s, self._deadline_factor * flight.predicted_s)
        return max(flight.sent_at, self._returned_at) + wait_s

    def check(self, step_tokens_max: int) -> None:
        assert len(self._flights) <= self.steps_max
        assert all(flight.num_tokens <= step_tokens_max for flight in self._flights), "beyond the budget"
        assert self.num_decoding == sum(flight.decodes for flight in self._flights)
        numbers = [flight.number for flight in self._flights]
        first = self._next_number - len(numbers)
        assert numbers == list(range(first, self._next_number))

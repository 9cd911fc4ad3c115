"""Pure. How much a pipeline has done and has to do, told in a way that does not depend on how many there are.

A step takes about as long with one sequence as with several, so that the time in which steps were in flight
says little of how much more there could be. Here a decode is charged its share of a step in which every place
is taken, and a prompt's token its share of a step as large as steps get; with several stages, which compute
different steps at once, what each token costs is shared out over them. So one second of work is what a full
pipeline does in a second. The batch class is left out: it has what others leave.
"""

from typing import Any

from batcher.admission import Admission
from batcher.inflight import Flight
from batcher.placement import Busy
from batcher.running import Running
from batcher.stage_cost import Coefficients, Load, StageCost

PROMPT_TOKENS = 256  # of a chunk, by which a prompt's token is priced


class Work:
    """What was done since the start; the reader takes differences."""

    def __init__(self, places_max: int, step_tokens_max: int) -> None:
        self._places_max = places_max
        self._step_tokens_max = step_tokens_max
        self.seconds = 0.0
        self.tokens = 0

    def returned(self, flight: Flight[Any], cost: Coefficients, num_stages: int) -> None:
        """A step came back. Rows are as `FlightRow`s: sequence first, then where its tokens begin and end."""
        load = flight.load
        seconds, tokens = self.price(load, cost, num_stages), load.prompt_tokens + load.decodes
        batch = sum([row[3] - row[2] for row in flight.rows if row[0].place.batch])
        if batch:
            seconds *= 1 - batch / tokens
        self.seconds += seconds
        self.tokens += tokens - batch

    def price(self, load: Load, cost: Coefficients, num_stages: int) -> float:
        """Seconds."""
        share = load.decodes / self._places_max + load.prompt_tokens / self._step_tokens_max
        return cost.base * share + (cost.seconds(load) - cost.base) / num_stages

    def check(self) -> None:
        assert self.seconds >= 0 and self.tokens >= 0


def busy(running: Running, admission: Admission, cost: StageCost, places_max: int, done: Work) -> Busy:
    """What there is to do. Costs time in all that run."""
    waiting = admission.waiting
    read = sum([sequence.num_computed for sequence in running])
    prompts = sum([len(sequence.ids) - sequence.num_computed for sequence in running.prompts()])
    oldest = waiting.oldest_but_batch
    return Busy(
        prompt_tokens=prompts + admission.num_waiting_tokens,
        running=len(running),
        waiting=len(waiting),
        places=running.places,
        places_max=places_max,
        prompt_token_s=cost.all.of_chunk(PROMPT_TOKENS, 0) / PROMPT_TOKENS,
        step_s=cost.seconds(Load(decodes=len(running) + 1, read=read)),
        batch_running=len(running.batch),
        batch_waiting=waiting.num_batch,
        pending_tokens=waiting.work_but_batch,
        oldest_since=None if oldest is None else oldest.place.since,
        work_s=done.seconds,
        work_tokens=done.tokens,
    )

"""Pure. Which sequences run in which numbered step.

No phases: a sequence has tokens and computed tokens, and a step lets it catch up. Every call may leave
notes for ownership and calls for kvstore; `take()` hands them over. Time comes with each call.
"""

from dataclasses import dataclass

from batcher.events import (
    Admitted,
    BlockEffect,
    BlockEvent,
    Ended,
    StepPlan,
    StepReturned,
    TokensMade,
)
from batcher.stops import Stops
from chassis.ids import Epoch, RequestId
from chassis.messages.request import Request, Timings, Usage

Note = Admitted | TokensMade | Ended


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    context_len_max: int
    namespace: bytes  # block_hash.namespace(model digest, dtype, layout)
    block_size_tokens: int = 16
    step_tokens_max: int = 512
    sequences_max: int = 64  # running at once; also the number of slots
    waiting_len_max: int = 1024
    steps_in_flight_max: int | None = None  # None: the number of stages, 2 for one stage
    lease_low_blocks: int = 16
    lease_high_blocks: int = 64
    match_ahead_len: int = 8  # waiting requests matched ahead of admission
    match_wait_ms: int = 250
    age_steps_per_priority: int = 64
    idle_step_ms: int = 1000
    step_deadline_min_ms: int = 5000
    step_deadline_factor: int = 8
    prefix_cache: bool = True
    salt_by_tenant: bool = True


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a request had when it was stopped."""

    output_ids: tuple[int, ...]
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Taken:
    """In order. Perform `effects` in order; their completions come back through `handle_blocks`."""

    notes: tuple[Note, ...] = ()
    effects: tuple[BlockEffect, ...] = ()


class Scheduler:
    """One pipeline's schedule. Call `take()` after any of the calls below that is not a query."""

    def __init__(self, config: SchedulerConfig, stops: Stops) -> None: ...

    # requests

    def add_waiting(self, request: Request, now: float, age_s: float, deadline: float | None) -> None:
        """A fresh request waits for admission (note `Admitted`). A passed deadline ends it (note `Ended`)."""

    def run(
        self,
        request: Request,
        output_ids: tuple[int, ...],
        now: float,
        deadline: float | None,
        alone: bool = False,
        age_s: float = 0.0,
    ) -> None:
        """An owned request, or one that starts again; no `Admitted`. Ends are judged on `output_ids` first:
        if whole already, `Ended` is noted at once. `age_s` counts as interrupted when it is new here."""

    def stop(self, request_id: RequestId, now: float) -> Stopped | None:
        """Forget the request; None if unknown (it had ended). No `Ended` is noted."""

    def progress(self, request_id: RequestId, now: float) -> Stopped | None:
        """As `stop`, but it goes on."""

    # pipeline

    def form(self, epoch: Epoch, num_blocks: int, num_stages: int, pool_changed: bool, now: float) -> None:
        """A pipeline stands. `pool_changed`: its block pool holds nothing that this scheduler put there."""

    def unform(self, now: float) -> tuple[RequestId, ...]:
        """The pipeline is lost: its steps in flight are void. Returns the requests that were in them."""

    def plan(self, now: float) -> StepPlan | None:
        """The next step, counted as sent; None: nothing to do or all places in flight taken. Call until None."""

    def returned(self, event: StepReturned) -> bool:
        """False: not what was expected next from this epoch's pipeline, which must be formed anew.
        Ghosts of other epochs are counted and True."""

    def overdue(self, now: float) -> bool:
        """The oldest step in flight has passed its deadline: the pipeline hangs."""

    # blocks and time

    def handle_blocks(self, event: BlockEvent) -> None: ...

    def tick(self, now: float) -> None:
        """Deadlines, block calls that wait for time. Call it at `wake_at()` or every 50 ms; then `plan`."""

    def wake_at(self) -> float | None:
        """When `tick` (and then `plan`) next has something to do, if nothing else happens before."""

    def take(self) -> Taken: ...

    # queries

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def steps_in_flight(self) -> int: ...

    @property
    def runnable(self) -> bool:
        """Something could run or is in flight: if no step completes in time, the pipeline hangs."""

    def request_ids(self) -> tuple[RequestId, ...]:
        """All it holds, in the order they came."""

    def check(self) -> None: ...

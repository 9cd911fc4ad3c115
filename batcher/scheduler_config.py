"""Pure. What the scheduler is told of its pipeline, its limits and its judgements."""

from dataclasses import dataclass

from batcher.queueing import Queueing


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    context_len_max: int
    namespace: bytes  # block_hash.namespace(model digest, dtype, layout)
    block_size_tokens: int = 16
    step_tokens_max: int = 512
    sequences_max: int = 64  # running at once; also the number of slots
    waiting_len_max: int = 1024
    max_step_ms: float = 0.0  # see `chunks`
    slowdown_max: float = 1.7  # see `chunks`
    steps_in_flight_max: int | None = None  # None: see `spread`
    run_ahead: bool = True  # where it can be: see `spread.runs_ahead`
    lease_low_blocks: int = 16
    lease_high_blocks: int = 64
    match_ahead_len: int = 8  # waiting requests matched ahead of admission
    match_wait_ms: int = 250
    age_steps_per_priority: int = 64
    queueing: Queueing = Queueing()
    idle_step_ms: int = 1000
    step_deadline_min_ms: int = 5000
    step_deadline_factor: int = 8
    prefix_cache: bool = True
    salt_by_tenant: bool = True

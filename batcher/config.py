"""What an operator can set on a batcher. Limits stand on everything that can grow.

How requests queue is explained in ARCHITECTURE.md, "Queueing".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from batcher.queueing import Queueing, QueuePolicy


@dataclass(frozen=True, slots=True)
class Config:
    model: str = ""  # name of the model to serve; empty: the first one registered
    num_stages: int = 2
    listen: str = "tcp://127.0.0.1:0"  # where the last stage returns tokens
    advertise_host: str = ""  # how the last stage reaches this host; empty: as it listens
    # scheduling
    waiting_len_max: int = 1024
    running_len_max: int = 64
    step_tokens_max: int = 512
    steps_in_flight: int = (
        0  # 0: chosen as it goes: to one more than stages, more where links are slow; two or three for one
    )
    max_step_ms: float = (
        0.0  # how long a decode may wait for its next token for the sake of prompts; 0: no bound
    )
    slowdown_max: float = 1.7  # how many times as long as without prompts, while few wait; 0: no bound
    run_ahead: bool = True  # with one stage: the next step is sent before the last one's tokens are known
    block_size_tokens: int = 16
    # queueing
    max_batch_size: int = 0  # sequences in a step; 0: as many as run
    preferred_batch_size: tuple[int, ...] = ()  # sizes that the fresh wait for
    max_queue_delay_us: int = 0  # for so long; 0: nobody waits for others
    preserve_ordering: bool = False  # requests end in the order in which they came
    priority_levels: int = 10  # 1: all are equal
    default_priority: int = 5  # of a request whose priority is none of the levels
    default_queue_policy: QueuePolicy = QueuePolicy()
    queue_policies: Mapping[int, QueuePolicy] = field(default_factory=dict)  # by priority, instead of that
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # shares of the work; not named: 1
    overtakes_max: int = 16  # requests past one of the next lower priority that waits
    patience_ms: int = 30_000  # waiting for so long counts like a deadline that is here
    batch_class: bool = True  # priority 9 runs in spare room only
    batch_share: float = 0.05  # of the time of others' steps that it may add
    refuse_late: bool = True  # deadlines that cannot be met are refused at once
    # time
    step_timeout_ms: int = 5_000
    reform_timeout_ms: int = 15_000
    form_timeout_ms: int = 60_000
    jitter_ms: int = 100
    # bus
    fetch_len_max: int = 32
    fetch_wait_ms: int = 1_000
    bus_timeout_ms: int = 2_000
    kvstore_timeout_ms: int = 1_000
    inbox_len_max: int = 65_536
    drain_timeout_ms: int = 10_000
    # measuring
    record_steps: str = ""  # a file for the headers of all steps sent; empty: none

    def __post_init__(self) -> None:
        assert 1 <= self.num_stages <= 64, "num_stages: 1 to 64"
        assert 1 <= self.running_len_max <= 4096, "running_len_max: 1 to 4096"
        assert 1 <= self.step_tokens_max <= 65_536, "step_tokens_max: 1 to 65536"
        assert self.max_step_ms >= 0, "max_step_ms: at least 0"
        assert self.slowdown_max == 0 or self.slowdown_max > 1, "slowdown_max: 0, or above 1"
        assert 1 <= self.block_size_tokens <= 256, "block_size_tokens: 1 to 256"
        assert self.waiting_len_max >= 1, "waiting_len_max: at least 1"
        for policy in (self.default_queue_policy, *self.queue_policies.values()):
            room = self.waiting_len_max
            assert policy.max_queue_size < room, f"max_queue_size: below waiting_len_max, {room}"
        self.queueing()

    @property
    def held_len_max(self) -> int:
        """Requests waiting, running, and those whose records are being read or written."""
        return self.waiting_len_max + self.running_len_max + 960

    def queueing(self) -> Queueing:
        return Queueing(
            priority_levels=self.priority_levels,
            default_priority=self.default_priority,
            overtakes_max=self.overtakes_max,
            tenant_weights=self.tenant_weights,
            patience_ms=self.patience_ms,
            policy=self.default_queue_policy,
            policies=self.queue_policies,
            max_batch_size=self.max_batch_size,
            preferred_batch_size=self.preferred_batch_size,
            max_queue_delay_us=self.max_queue_delay_us,
            preserve_ordering=self.preserve_ordering,
            batch_class=self.batch_class,
            batch_share=self.batch_share,
            refuse_late=self.refuse_late,
        )

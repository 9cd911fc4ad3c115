"""Pure. How requests queue: what an operator can set, with the names and the meaning that Triton gives them.

Each knob's meaning for continuous batching stands in ARCHITECTURE.md, "Queueing".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

PRIORITIES = 10  # of requests, 0 (first) to 9
BATCH = 9  # the priority of the class that only fills spare room
FOREVER = float("inf")


class TimeoutAction(Enum):
    """What becomes of a request that waited too long."""

    REJECT = "reject"
    DELAY = "delay"  # behind all of its priority that have not


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Of the requests that wait at one priority. 0: no bound."""

    max_queue_size: int = 0
    default_timeout_us: int = 0
    timeout_action: TimeoutAction = TimeoutAction.REJECT
    allow_timeout_override: bool = False

    def __post_init__(self) -> None:
        assert self.max_queue_size >= 0, "max_queue_size: at least 0"
        assert self.default_timeout_us >= 0, "default_timeout_us: at least 0"

    def timeout_s(self, asked_us: int) -> float | None:
        """How long a request may wait that asks for `asked_us` (0: nothing): no longer than the default."""
        times = [self.default_timeout_us] if self.default_timeout_us else []
        if self.allow_timeout_override and asked_us:
            times.append(asked_us)
        return min(times) / 1e6 if times else None


@dataclass(frozen=True, slots=True)
class Queueing:
    priority_levels: int = PRIORITIES
    default_priority: int = 5  # of a request whose priority is none of the levels
    overtakes_max: int = 16  # see `overtakes`
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # who is not named has 1
    patience_ms: int = 30_000  # waiting for so long counts like a deadline that is here
    policy: QueuePolicy = QueuePolicy()
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)  # by priority, instead of `policy`
    max_batch_size: int = 0  # sequences in a step; 0: as many as run
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    batch_class: bool = True  # priority 9 runs in spare room only
    batch_share: float = 0.05  # of the time of others' steps, see `spare_room`
    refuse_late: bool = True  # deadlines that cannot be met are refused early

    def __post_init__(self) -> None:
        assert 1 <= self.priority_levels <= PRIORITIES, f"priority_levels: 1 to {PRIORITIES}"
        assert 0 <= self.default_priority < self.priority_levels, "default_priority: below priority_levels"
        assert self.overtakes_max >= 1, "overtakes_max: at least 1"
        assert 0 < self.batch_share <= 1, "batch_share: above 0, up to 1"
        assert self.patience_ms >= 1, "patience_ms: at least 1"
        assert all(0 < w < FOREVER for w in self.tenant_weights.values()), "tenant_weights: above 0"
        assert all(0 <= p < PRIORITIES for p in self.policies), f"queue_policies: 0 to {PRIORITIES - 1}"
        assert self.max_batch_size >= 0, "max_batch_size: at least 0"
        assert all(size >= 1 for size in self.preferred_batch_size), "preferred_batch_size: at least 1"
        assert self.max_queue_delay_us >= 0, "max_queue_delay_us: at least 0"

    def level(self, priority: int) -> int:
        return priority if priority < self.priority_levels else self.default_priority

    def is_batch(self, priority: int) -> bool:
        return self.batch_class and self.level(priority) == BATCH

    def of(self, priority: int) -> QueuePolicy:
        return self.policies.get(self.level(priority), self.policy)


@dataclass(slots=True)
class Place:
    """What a sequence's place in the line rests on."""

    level: int = 5
    batch: bool = False
    due: float = FOREVER  # its deadline, or when its tenant's patience ends
    since: float = 0.0  # it waits here
    charge: int = 1  # tokens of work that its tenant is charged
    charged: bool = False
    delayed: bool = False  # it waited too long: behind all that have not
    until: float | None = None  # it may wait

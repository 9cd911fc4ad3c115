"""Which knobs of the queue a seed turns, and what clients may be told because of it."""

import random
from dataclasses import dataclass

from batcher.queueing import QueuePolicy, TimeoutAction

TENANTS = ("t", "t", "u")


@dataclass(frozen=True, slots=True)
class QueueKnobs:
    policy: QueuePolicy = QueuePolicy()
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    max_batch_size: int = 0
    preserve_ordering: bool = False
    overtakes_max: int = 16
    tenants: bool = False

    @property
    def refuses(self) -> bool:
        rejects = self.policy.default_timeout_us and self.policy.timeout_action is TimeoutAction.REJECT
        return bool(self.policy.max_queue_size or rejects)


def draw_knobs(seed: int, waiting_len_max: int) -> QueueKnobs:
    """Half of the seeds turn none."""
    rng = random.Random(f"queue {seed}")
    if rng.random() < 0.5:
        return QueueKnobs()
    size = rng.choice((0, 0, 1, 2))
    return QueueKnobs(
        policy=QueuePolicy(
            max_queue_size=size if size < waiting_len_max else 0,
            default_timeout_us=rng.choice((0, 0, 50_000, 1_000_000)),
            timeout_action=rng.choice(list(TimeoutAction)),
            allow_timeout_override=rng.random() < 0.5,
        ),
        preferred_batch_size=rng.choice(((), (2,), (2, 4))),
        max_queue_delay_us=rng.choice((0, 5_000, 300_000)),
        max_batch_size=rng.choice((0, 0, 1, 2)),
        preserve_ordering=rng.random() < 0.3,
        overtakes_max=rng.choice((1, 4, 16)),
        tenants=rng.random() < 0.5,
    )


def tenant_of(knobs: QueueKnobs, seed: int, client: int) -> str:
    return random.Random(f"tenant {seed} {client}").choice(TENANTS) if knobs.tenants else "t"

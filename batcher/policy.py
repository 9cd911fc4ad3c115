"""Pure. The scheduler's judgements, each alone so that it can be replaced.

Starvation bound, of the waiting room (`turns` has that of the stream before it): a waiting request is
overtaken only by requests that came fewer than `(its priority - theirs) * age_steps_per_priority` steps
after it, so for priority p no one that comes `p * age_steps_per_priority` steps later passes it. Nothing
passes the first of the order because it is smaller. The best of the running by `Order` is never preempted,
so it ends; then the next one is the best.
"""

from collections.abc import Iterable

from batcher.sequence import Sequence

OrderKey = tuple[int, int]


class Order:
    """Priority, then age. A key never changes, so that waiting needs no rescans: every
    `age_steps_per_priority` steps of waiting count as one priority level. Smaller is earlier."""

    def __init__(self, age_steps_per_priority: int) -> None:
        assert age_steps_per_priority >= 1
        self._age_steps_per_priority = age_steps_per_priority
        self._arrivals = 0

    def key(self, priority: int, steps_so_far: int) -> OrderKey:
        """For a request that arrives now; no two are equal."""
        self._arrivals += 1
        return steps_so_far + priority * self._age_steps_per_priority, self._arrivals

    def check(self) -> None:
        assert self._arrivals >= 0


def choose_victim(running: Iterable[Sequence], requester: Sequence) -> Sequence | None:
    """Who gives way to `requester`: the last in the order, and only if it is behind the requester."""
    victim = max(running, key=lambda sequence: sequence.order, default=None)
    return victim if victim is not None and victim.order > requester.order else None


def decode_groups(steps_in_flight_max: int, num_stages: int) -> int:
    """Into how many steps the decodes are spread. With one stage all share one step, because each reads
    all weights; the place beside it hides the planning, and prompts that come meanwhile use it."""
    return steps_in_flight_max if num_stages > 1 else 1


def steps_in_flight(wanted: int | None, num_stages: int, run_ahead: bool) -> int:
    """As many as there are stages; with one stage two, so that one lies there when the other is done. If that
    one was sent ahead a third place stays, for prompts that come meanwhile: they go right behind it."""
    if wanted is None and num_stages == 1 and run_ahead:
        return 3
    return min(wanted or max(2, num_stages), num_stages + 1)


def runs_ahead(steps_in_flight_max: int, num_stages: int, wanted: bool) -> bool:
    """Whether a sequence's next step is sent before the token of the one in flight is known. With one stage
    who samples it computes it next: the step lies there already, and nobody waits for the batcher. With more
    the token travels from the last stage to the first anyway, and groups of decodes keep all at work."""
    return wanted and num_stages == 1 and steps_in_flight_max > 1


def prefill_tokens_max(step_tokens_max: int, num_decodes: int) -> int:
    """Prompt tokens in a step that already has `num_decodes` decodes."""
    return max(0, step_tokens_max - num_decodes)


class GrowthReserve:
    """Blocks that admission leaves for running sequences to grow into: a share of what they may still
    write. The share rises with each preemption and decays with each step (SGLang's new-token ratio)."""

    def __init__(self, share: float = 0.3, share_min: float = 0.1, decay: float = 0.002) -> None:
        assert 0 < share_min <= share <= 1
        self.share = share
        self._share_min = share_min
        self._decay = decay

    def blocks(self, growth_tokens: int, num_running: int, block_size_tokens: int) -> int:
        """`growth_tokens`: the output that running sequences may still add."""
        return num_running + int(self.share * growth_tokens) // block_size_tokens

    def step(self) -> None:
        self.share = max(self._share_min, self.share - self._decay * self.share)

    def preempted(self) -> None:
        self.share = min(1.0, self.share * 1.25 + 0.05)

    def check(self) -> None:
        assert self._share_min <= self.share <= 1.0


class StepCost:
    """Predicts a step's seconds from what it computes: a moving mean of time per token above a moving
    mean of the cheapest step. It only sets deadlines; it decides nothing else."""

    def __init__(self) -> None:
        self._base_s = 0.0
        self._token_s = 0.0
        self._seen = False

    def predict(self, num_tokens: int) -> float:
        return self._base_s + self._token_s * num_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` added `seconds`."""
        if num_tokens <= 0:
            return
        if not self._seen:
            self._seen = True
            self._base_s = seconds
            return
        self._base_s = min(seconds, self._base_s + 0.05 * (seconds - self._base_s))
        token_s = max(0.0, seconds - self._base_s) / num_tokens
        self._token_s += 0.1 * (token_s - self._token_s)

    def check(self) -> None:
        assert self._base_s >= 0 and self._token_s >= 0

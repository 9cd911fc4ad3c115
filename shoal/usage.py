"""Pure. Sums of receipts, by whatever they are asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from chassis.messages.usage import Receipt


def _day(receipt: Receipt) -> str:
    return datetime.fromtimestamp(receipt.ended_ms / 1000, UTC).strftime("%Y-%m-%d")


GROUPS: dict[str, Callable[[Receipt], str]] = {
    "tenant": lambda r: r.tenant,
    "model": lambda r: r.model,
    "day": _day,  # in UTC, of its end
    "key": lambda r: r.key,
    "reason": lambda r: r.reason.value,
    "priority": lambda r: str(r.priority),
}


@dataclass(slots=True)
class Sums:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    queued_us: int = 0  # in the stream and in the batcher
    running_us: int = 0  # from its place to its end
    stage_compute_us: list[int] = field(default_factory=list)
    attempts: int = 0
    deaths: int = 0

    def add(self, r: Receipt) -> None:
        u, t, stages = r.usage, r.timings, self.stage_compute_us
        self.requests += 1
        self.prompt_tokens += u.prompt_tokens
        self.cached_tokens += u.cached_tokens
        self.output_tokens += u.output_tokens
        self.recomputed_tokens += t.recomputed_tokens
        self.queued_us += t.queued_us + t.waiting_us
        self.running_us += t.prefill_us + t.decode_us + t.interrupted_us
        self.attempts += r.attempts
        self.deaths += r.worker_deaths + r.batcher_deaths
        stages += [0] * (len(t.stage_compute_us) - len(stages))
        for stage, us in enumerate(t.stage_compute_us):
            stages[stage] += us


class Summary:
    """`by`: names of `GROUPS`; none: all in one."""

    def __init__(self, by: Sequence[str]) -> None:
        self._key_of = [GROUPS[name] for name in by]
        self._groups: dict[tuple[str, ...], Sums] = {}
        self.all = Sums()

    def add(self, receipt: Receipt) -> None:
        key = tuple([of(receipt) for of in self._key_of])
        sums = self._groups.get(key)
        if sums is None:
            sums = self._groups[key] = Sums()
        sums.add(receipt)
        if key:
            self.all.add(receipt)
        else:
            self.all = sums

    @property
    def groups(self) -> dict[tuple[str, ...], Sums]:
        """In the order of their names."""
        return dict(sorted(self._groups.items()))

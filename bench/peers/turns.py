"""Pure. How turns are taken and what they amount to: the order, when a turn is too noisy, medians and ratios.

A ratio is of one turn of each, taken in the same round, so that both saw the same machine; its median and
range over the rounds are what is reported. A round in which others used the cores counts for nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.load import Workload
from bench.peers.conversation import Ran

OTHERS_CORES_MAX = 0.05
# what the accounting of processor time by ticks of 10 ms can be wrong in a turn
OTHERS_ERROR_S = 0.04


class Noisy(Exception):
    """Others used the cores each time: there is nothing to report."""


@dataclass(frozen=True, slots=True)
class Turn:
    contestant: str
    ran: Ran
    others_cores: float

    @property
    def noisy(self) -> bool:
        return is_noisy(self.others_cores, self.ran.seconds)


def is_noisy(others_cores: float, seconds: float) -> bool:
    return others_cores * seconds > OTHERS_CORES_MAX * seconds + OTHERS_ERROR_S


def order(names: Sequence[str], round_number: int) -> list[str]:
    """Every one goes first as often as any other, and after a different one."""
    turn = round_number % len(names)
    rotated = [*names[turn:], *names[:turn]]
    return rotated[::-1] if round_number // len(names) % 2 else rotated


def complete(ran: Ran, workload: Workload, repeats: int) -> bool:
    """Whether every request got all its tokens."""
    return len(ran.requests) == workload.concurrent * repeats and all(
        t.tokens == workload.output_tokens for t in ran.requests
    )


def tokens_per_s(workload: Workload, ran: Ran) -> float:
    """Output tokens over the whole time, the prompts' included; of a prefill workload, prompt tokens."""
    counts = [t.tokens for t in ran.requests]
    if workload.output_tokens == 1:
        return workload.prompt_tokens * len(counts) / ran.seconds
    return sum(counts) / ran.seconds


def decode_tokens_per_s(ran: Ran) -> float | None:
    """Of one stream after its first token; None when there is more than one, or nothing after it."""
    match ran.requests:
        case (only,) if only.finished_s > only.first_s:
            return (only.tokens - 1) / (only.finished_s - only.first_s)
    return None


def ttft_ms(ran: Ran) -> float:
    return 1000 * median(t.first_s for t in ran.requests)


def joined(runs: Sequence[Ran]) -> Ran:
    """Runs one after another as one turn."""
    return Ran(sum(r.seconds for r in runs), tuple(t for r in runs for t in r.requests))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one workload, in the order of the rounds."""

    rates: Mapping[str, tuple[float, ...]]  # by contestant
    ttfts_ms: Mapping[str, tuple[float, ...]]
    ratios: Mapping[str, tuple[float, ...]]  # the first contestant over each other one


def figures(workload: Workload, rounds: Sequence[Mapping[str, Turn]]) -> Figures:
    """The first contestant of a round is the one whose ratios are wanted.

    Raises Noisy when a turn is: a caller repeats such rounds first.
    """
    assert rounds, "no rounds"
    names = list(rounds[0])
    for number, one in enumerate(rounds, 1):
        assert list(one) == names, "the same contestants in each round"
        for turn in one.values():
            if turn.noisy:
                raise Noisy(
                    f"{workload.name}, round {number}: others used {turn.others_cores:.2f} cores"
                    f" beside {turn.contestant}"
                )
    rates = {n: tuple(tokens_per_s(workload, r[n].ran) for r in rounds) for n in names}
    ttfts = {n: tuple(ttft_ms(r[n].ran) for r in rounds) for n in names}
    first, *others = names
    ratios = {n: tuple(a / b for a, b in zip(rates[first], rates[n], strict=True)) for n in others}
    return Figures(rates, ttfts, ratios)


def best(found: Figures) -> tuple[float, ...]:
    """The ratio to the best of the others, round by round."""
    return tuple(min(ratios) for ratios in zip(*found.ratios.values(), strict=True))

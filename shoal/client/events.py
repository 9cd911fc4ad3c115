"""Pure. What a caller is told: the events of a stream, and the result of one that is read to its end."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: str
    prompt_tokens: int
    seed: int
    choice: int = 0  # of `Params.n`


class TopLogprob(NamedTuple):
    id: int
    logprob: float
    token: bytes


class TokenLogprobs(NamedTuple):
    """Of one id, by the model alone. `rank` 1 is the likeliest, 0 not known."""

    logprob: float
    rank: int
    token: bytes
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """`text` is whole code points and may be empty; `first_index` counts output ids from 0."""

    text: str
    ids: tuple[int, ...]
    first_index: int
    logprobs: tuple[TokenLogprobs, ...] = ()  # one an id, with `Params.top_logprobs`
    choice: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A piece of what is told of the prompt, before the first Delta; `first_index` counts its ids from 0, and
    nothing is told of the first."""

    ids: tuple[int, ...]
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]  # one an id
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    reason: str  # stop, length, cancelled, deadline
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queued_us: int
    prefill_us: int
    decode_us: int
    choice: int = 0
    generated_tokens: int = 0  # by all candidates together, with `Params.best_of` above n


Event = Accepted | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer, whole."""

    request_id: str
    seed: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one an id, with `Params.top_logprobs`
    end: Finished

    @property
    def reason(self) -> str:
        """stop, length, cancelled, deadline."""
        return self.end.reason


@dataclass(frozen=True, slots=True)
class Result:
    """What `complete` gives: `choices`, the first of which is what most callers want."""

    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's ids after the first

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def ids(self) -> tuple[int, ...]:
        return self.choices[0].ids

    @property
    def reason(self) -> str:
        return self.choices[0].reason

    @property
    def request_id(self) -> str:
        return self.choices[0].request_id

    @property
    def usage(self) -> Finished:
        """Of the first choice."""
        return self.choices[0].end


def result_of(events: Iterable[Event]) -> Result:
    """Of a whole stream: each choice has its end."""
    accepted: dict[int, Accepted] = {}
    deltas: dict[int, list[Delta]] = {}
    ends: dict[int, Finished] = {}
    of_prompt: list[TokenLogprobs] = []
    for event in events:
        match event:
            case Accepted():
                accepted[event.choice] = event
            case PromptLogprobs():
                of_prompt.extend(event.logprobs)
            case Delta():
                deltas.setdefault(event.choice, []).append(event)
            case Finished():
                ends[event.choice] = event
    return Result(
        tuple(
            _choice(accepted.get(number), deltas.get(number, []), end) for number, end in sorted(ends.items())
        ),
        tuple(of_prompt),
    )


def _choice(accepted: Accepted | None, deltas: list[Delta], end: Finished) -> Choice:
    return Choice(
        accepted.request_id if accepted is not None else "",
        accepted.seed if accepted is not None else 0,
        "".join(delta.text for delta in deltas),
        tuple(i for delta in deltas for i in delta.ids),
        tuple(told for delta in deltas for told in delta.logprobs),
        end,
    )

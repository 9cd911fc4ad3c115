"""Pure. What a caller has of one call's answers, and how it goes on when its stream is lost.

Rules: nothing is handed out twice and nothing is left out. Before Accepted the call is made again. After it
each choice is resumed with the ids that were handed out; where one was not accepted yet, or best_of ranks
them, only a call under the same client key means the same answers: it is told from the start, and what was
handed out before is dropped. Text is a function of the ids before it, however it comes in pieces, so that its
characters can be counted.
"""

from dataclasses import dataclass, field, replace

from shoal.client.errors import Diverged, ShoalError
from shoal.client.events import Accepted, Delta, Event, Finished, PromptLogprobs


@dataclass(frozen=True, slots=True)
class Whole:
    """The call itself."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What follows `ids` of one choice."""

    choice: int
    request_id: str
    ids: tuple[int, ...]


Ask = Whole | Rest


@dataclass(slots=True)
class _Choice:
    ids: list[int] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)  # best_of accepts its first choice twice
    chars: int = 0
    tail_chars: int = 0  # of those, set free by the end: they come after the ids
    prompt_until: int = 0  # in the prompt
    ended: bool = False
    # of the stream that is read now
    chars_here: int = 0
    accepted_here: int = 0


class Reading:
    def __init__(
        self, choices: int = 1, *, ranked: bool = False, keyed: bool = False, held: Rest | None = None
    ) -> None:
        """`ranked`: by best_of. `held`: what a caller brings who resumes."""
        self._choices = [_Choice() for _ in range(choices)]
        self._ranked = ranked
        self._keyed = keyed
        self._left = choices
        self._first = held
        self._again = False
        if held is not None:
            self._choices[0].ids = list(held.ids)

    @property
    def over(self) -> bool:
        """All choices have ended."""
        return self._left == 0

    @property
    def request_id(self) -> str:
        """The first choice's; empty until it is accepted."""
        if self._first is not None:
            return self._first.request_id
        accepted = self._choices[0].accepted
        return accepted[-1] if accepted else ""

    def request_id_of(self, choice: int) -> str:
        accepted = self._choices[choice].accepted
        return accepted[-1] if accepted else self.request_id if not choice else ""

    def ids_of(self, choice: int) -> tuple[int, ...]:
        """Handed out so far; of a resumed stream with those that were brought."""
        return tuple(self._choices[choice].ids)

    def begin(self) -> tuple[Ask, ...]:
        """The first calls to make."""
        return (Whole() if self._first is None else self._first,)

    def take(self, event: Event, choice: int | None = None) -> Event | None:
        """What of it is new, as this `choice` (None: as it says). Raises Diverged."""
        if choice:
            event = replace(event, choice=choice)
        if event.choice >= len(self._choices):
            raise Diverged("ABORTED", f"choice: {event.choice}; {len(self._choices)} were asked for")
        held = self._choices[event.choice]
        match event:
            case Delta(text=text, ids=ids):
                if self._again:
                    return self._new(held, event)
                if ids:
                    if event.first_index != len(held.ids):
                        raise _gap(len(held.ids), event.first_index)
                    held.ids += ids
                else:
                    held.tail_chars += len(text)
                held.chars += len(text)
                return event
            case Finished():
                if held.ended:
                    return None
                held.ended = True
                self._left -= 1
                return event
            case PromptLogprobs():
                return self._new_of_prompt(held, event)
            case Accepted():
                return self._new_accepted(held, event)

    def lost(self, error: ShoalError) -> tuple[Ask, ...]:
        """The calls that bring the rest. Raises the error when none would."""
        self._again = True
        left = [(i, c) for i, c in enumerate(self._choices) if not c.ended]
        untold = not any(c.accepted for c in self._choices)
        if self._first is None and untold:
            return self._whole()
        if self._ranked or not all(c.accepted for _, c in left if self._first is None):
            if not self._keyed:
                raise error
            return self._whole()
        for _, held in left:
            held.chars_here = held.chars - held.tail_chars
            held.accepted_here = 0
        return tuple(Rest(i, self.request_id_of(i), tuple(c.ids)) for i, c in left)

    def _whole(self) -> tuple[Ask, ...]:
        for held in self._choices:
            held.chars_here = held.accepted_here = 0
        return (Whole(),)

    def _new(self, held: _Choice, delta: Delta) -> Delta | None:
        """Of a stream that begins before what was handed out, or just at it."""
        old = 0
        if delta.ids:
            old = min(len(held.ids) - delta.first_index, len(delta.ids))
            if old < 0:
                raise _gap(len(held.ids), delta.first_index)
            if list(delta.ids[:old]) != held.ids[delta.first_index : delta.first_index + old]:
                raise Diverged("ABORTED", f"output ids from {delta.first_index} on are others than before")
        old_text = min(held.chars - held.chars_here, len(delta.text))
        held.chars_here += len(delta.text)
        text, ids = delta.text[old_text:], delta.ids[old:]
        held.ids += ids
        held.chars += len(text)
        if not delta.ids:
            held.tail_chars += len(text)
        if not text and not ids:
            return None
        return replace(
            delta, text=text, ids=ids, first_index=delta.first_index + old, logprobs=delta.logprobs[old:]
        )

    def _new_of_prompt(self, held: _Choice, told: PromptLogprobs) -> PromptLogprobs | None:
        until = told.first_index + len(told.ids)
        old = max(0, held.prompt_until - told.first_index)
        held.prompt_until = max(held.prompt_until, until)
        if old >= len(told.ids):
            return None
        return replace(
            told, ids=told.ids[old:], first_index=told.first_index + old, logprobs=told.logprobs[old:]
        )

    def _new_accepted(self, held: _Choice, accepted: Accepted) -> Accepted | None:
        place = held.accepted_here
        held.accepted_here += 1
        if place < len(held.accepted):
            if accepted.request_id not in held.accepted:
                raise Diverged("ABORTED", f"request {held.accepted[-1]} became {accepted.request_id}")
            return None
        held.accepted.append(accepted.request_id)
        return accepted


def _gap(held: int, first_index: int) -> Diverged:
    return Diverged("ABORTED", f"output ids from {first_index} on, where {held} are held")

"""Pure. Log probabilities of prompts: what is known, and what the steps of those that ask are to tell.

A prompt's numbers depend on nothing but the prompt: told once they stay, whatever becomes of the sequence.
They go with its first output id, so that who has that has them; one that starts with output asks for none. A
cached prefix hides the places it covers, so only what is known already is matched (`num_covered`): the first
time the whole prompt is computed, after a preemption what was not told yet.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isnan
from typing import Protocol

from batcher.events import StepPlan
from chassis.ids import RequestId
from chassis.messages.pipeline import PromptAsk
from chassis.messages.request import Request
from chassis.messages.sampling import PromptTold, TokenLogprobs
from chassis.messages.step_result import PromptAnswer


@dataclass(slots=True)
class PromptSoFar:
    """`entries`: of the ids after the first, as far as they came back."""

    ids: tuple[int, ...]  # the whole prompt
    top: int
    entries: list[TokenLogprobs] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return len(self.entries) == len(self.ids) - 1

    @property
    def num_covered(self) -> int:
        """Tokens that need not be computed for this."""
        return len(self.ids) if self.whole else len(self.entries)

    def ask(self, row: int, start: int, end: int) -> PromptAsk | None:
        """What a row of positions from `start` to `end` can tell and is not known. None: nothing."""
        first, last = max(start, len(self.entries)), min(end, len(self.ids) - 1)
        if first >= last:
            return None
        return PromptAsk(row, first - start, last - first, self.ids[last], self.top)

    def learn(self, first_index: int, entries: tuple[TokenLogprobs, ...]) -> None:
        """`entries`: of the ids from `first_index` on. Steps come back in order: there is no gap."""
        known = 1 + len(self.entries)
        assert first_index <= known and first_index + len(entries) <= len(self.ids), (
            "told of no id of the prompt"
        )
        self.entries.extend(entries[known - first_index :])

    def check(self, num_proven: int) -> None:
        assert len(self.entries) >= min(num_proven, len(self.ids) - 1), "a place came back untold"


def prompt_of(request: Request, output_ids: Iterable[int]) -> PromptSoFar | None:
    top = request.sampling.prompt_logprobs
    if top is None or len(request.prompt_ids) < 2 or tuple(output_ids):
        return None
    return PromptSoFar(request.prompt_ids, top)


class Asking(Protocol):
    """A sequence, as far as it matters here."""

    request: Request
    incarnation: int
    prompt: PromptSoFar | None


class Prompts:
    """Those of the sequences that have no output yet."""

    def __init__(self) -> None:
        self._asking: dict[RequestId, PromptSoFar] = {}

    def add(self, sequence: Asking) -> None:
        if sequence.prompt is not None:
            self._asking[sequence.request.id] = sequence.prompt

    def forget(self, request_id: RequestId) -> None:
        self._asking.pop(request_id, None)

    def asks(self, plan: StepPlan) -> tuple[PromptAsk, ...]:
        if not self._asking:
            return ()
        asked = []
        for i, row in enumerate(plan.rows):
            prompt = self._asking.get(row.request_id)
            if prompt is not None and (ask := prompt.ask(i, row.start, row.start + len(row.token_ids))):
                asked.append(ask)
        return tuple(asked)

    def learn(self, rows: list[Asking | None], answers: tuple[PromptAnswer, ...]) -> list[RequestId]:
        """`rows`: the step's, None for ghosts. Returns those whose numbers are none."""
        wrong = []
        for row, first_index, entries in answers:
            sequence = rows[row]
            if sequence is None or sequence.prompt is None:
                continue
            sequence.prompt.learn(first_index, entries)
            if any(isnan(entry.logprob) for entry in entries):
                wrong.append(sequence.request.id)
        return wrong

    def begun(self, request_ids: Iterable[RequestId]) -> tuple[tuple[RequestId, PromptTold], ...]:
        """Of these, which have new output ids, those whose output begins with them; they ask no more."""
        if not self._asking:
            return ()
        found = []
        for request_id in request_ids:
            prompt = self._asking.pop(request_id, None)
            if prompt is not None:
                assert prompt.whole, "an output begins before its prompt is told"
                found.append((request_id, PromptTold(prompt.ids[1:], tuple(prompt.entries))))
        return tuple(found)

    def check(self, request_ids: Iterable[RequestId]) -> None:
        known = tuple(request_ids)
        assert all(request_id in known for request_id in self._asking)

"""Pure. One prompt's events, gathered: what a whole answer is made of."""

from dataclasses import dataclass, field

from chassis.errors import Code, Status
from chassis.messages.gateway import (
    Accepted,
    Delta,
    Finished,
    GenerateEvent,
    IdLogprobs,
    PromptLogprobs,
)
from chassis.messages.request import Reason

FINISH = {Reason.STOP: "stop", Reason.LENGTH: "length"}


def finish_reason(reason: Reason) -> str:
    """In OpenAI's words. Raises Status for an answer that was cut off: it has no word for that."""
    if (word := FINISH.get(reason)) is not None:
        return word
    if reason is Reason.DEADLINE:
        raise Status(Code.DEADLINE_EXCEEDED, "request: its time is over")
    if reason is Reason.CANCELLED:
        raise Status(Code.CANCELLED, "request: cancelled by another call")
    raise Status(Code.INTERNAL, f"request: {reason.value}")


@dataclass(slots=True)
class Choice:
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[IdLogprobs] = field(default_factory=list)
    reason: Reason | None = None


@dataclass(slots=True)
class Spent:
    """Tokens, summed over prompts and choices."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def add(self, event: Finished) -> None:
        if event.choice == 0:
            self.prompt += event.usage.prompt_tokens
            self.cached += event.usage.cached_tokens
        if not event.generated_tokens:
            self.output += event.usage.output_tokens
        elif event.choice == 0:
            self.output += event.generated_tokens  # of all candidates

    def told(self, drop_output: bool = False) -> dict[str, object]:
        output = 0 if drop_output else self.output
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": output,
            "total_tokens": self.prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(slots=True)
class Gathered:
    request_id: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)  # those told of: after the first
    prompt_logprobs: list[IdLogprobs] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)

    def take(self, event: GenerateEvent) -> None:
        match event:
            case Delta(text, ids):
                choice = self.choices.setdefault(event.choice, Choice())
                choice.text.append(text)
                choice.ids += ids
                choice.logprobs += event.logprobs
            case Finished(reason):
                self.choices.setdefault(event.choice, Choice()).reason = reason
                self.spent.add(event)
            case PromptLogprobs(ids, _, entries):
                self.prompt_ids += ids
                self.prompt_logprobs += entries
            case Accepted(request_id):
                self.request_id = self.request_id or request_id

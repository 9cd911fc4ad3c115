"""Pure. The output tensors: which there are, and what they hold of one piece or a whole answer.

A row is one choice of one prompt; choices of a prompt stand together. Rows of unequal length are filled up
with -1 (ids) or 0 (log probabilities); `sequence_length` says how much of them is so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import fsum

from chassis.messages.gateway import Delta, Finished, GenerateEvent
from chassis.messages.open_inference_models import TensorShape
from chassis.messages.tensors import Tensor, Value

OUTPUTS = (
    TensorShape("text_output", "BYTES", (-1,)),
    TensorShape("finish_reason", "BYTES", (-1,)),
    TensorShape("output_ids", "INT32", (-1, -1)),
    TensorShape("sequence_length", "INT32", (-1,)),
    TensorShape("output_log_probs", "FP32", (-1, -1)),
    TensorShape("cum_log_probs", "FP32", (-1,)),
    TensorShape("cumulative_logprob", "FP32", (-1,)),
    TensorShape("num_input_tokens", "UINT32", (-1,)),
    TensorShape("num_cached_tokens", "UINT32", (-1,)),
    TensorShape("num_output_tokens", "UINT32", (-1,)),
    TensorShape("batch_index", "INT32", (-1,)),  # which prompt
    TensorShape("sequence_index", "INT32", (-1,)),  # which choice of it
)
UNASKED = ("text_output", "finish_reason")
LOGPROBS = frozenset({"output_log_probs", "cum_log_probs", "cumulative_logprob"})
AT_THE_END = frozenset(
    {"finish_reason", "cum_log_probs", "cumulative_logprob", "num_input_tokens", "num_cached_tokens"}
    | {"num_output_tokens"}
)  # of a stream


@dataclass(slots=True)
class Row:
    """What is known of it, or of a piece of it."""

    prompt: int
    choice: int
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cumulative: float = 0.0
    end: Finished | None = None

    def take(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.ids += delta.ids
        told = [entry.logprob for entry in delta.logprobs]
        self.logprobs += told
        self.cumulative += fsum(told)


_OF_ROWS: dict[str, Callable[[Row], Value]] = {
    "text_output": lambda row: "".join(row.text).encode(),
    "finish_reason": lambda row: row.end.reason.value.encode() if row.end else b"",
    "sequence_length": lambda row: len(row.ids),
    "cum_log_probs": lambda row: row.cumulative,
    "cumulative_logprob": lambda row: row.cumulative,
    "num_input_tokens": lambda row: row.end.usage.prompt_tokens if row.end else 0,
    "num_cached_tokens": lambda row: row.end.usage.cached_tokens if row.end else 0,
    "num_output_tokens": lambda row: row.end.usage.output_tokens if row.end else 0,
    "batch_index": lambda row: row.prompt,
    "sequence_index": lambda row: row.choice,
}
_DATATYPES = {shape.name: shape.datatype for shape in OUTPUTS}


def tensors_of(rows: Sequence[Row], names: Sequence[str]) -> tuple[Tensor, ...]:
    return tuple(_tensor(rows, name) for name in names)


def _tensor(rows: Sequence[Row], name: str) -> Tensor:
    match name:
        case "output_ids":
            return _filled(name, [row.ids for row in rows], -1)
        case "output_log_probs":
            return _filled(name, [row.logprobs for row in rows], 0.0)
        case _:
            values = tuple(map(_OF_ROWS[name], rows))
            return Tensor(name, _DATATYPES[name], (len(values),), values)


def _filled(name: str, lists: Sequence[Sequence[Value]], filler: Value) -> Tensor:
    width = max(map(len, lists))
    values = [value for row in lists for value in (*row, *[filler] * (width - len(row)))]
    return Tensor(name, _DATATYPES[name], (len(lists), width), tuple(values))


class Rows:
    """Of one request, as its events come."""

    def __init__(self, prompts: int, choices: int) -> None:
        self._choices = choices
        self._rows = [Row(p, c) for p in range(prompts) for c in range(choices)]
        self._ended = 0

    @property
    def over(self) -> bool:
        return self._ended == len(self._rows)

    @property
    def all(self) -> Sequence[Row]:
        return self._rows

    def take(self, prompt: int, event: GenerateEvent) -> Row | None:
        """The row that it is about, if it says anything of one."""
        if not isinstance(event, Delta | Finished):
            return None
        row = self._rows[prompt * self._choices + event.choice]
        if isinstance(event, Delta):
            row.take(event)
        else:
            row.end = event
            self._ended += 1
        return row


class Pieces:
    """The same for a stream: what was told is not kept."""

    def __init__(self, prompts: int, choices: int, names: Sequence[str]) -> None:
        self._rows = Rows(prompts, choices)
        several = prompts * choices > 1
        which = [name for name in ("batch_index", "sequence_index") if name not in names]
        self._last = (*names, *which) if several else tuple(names)
        self._names = [name for name in self._last if name not in AT_THE_END]
        self._speaks = not set(names) <= AT_THE_END | {"batch_index", "sequence_index"}

    @property
    def over(self) -> bool:
        return self._rows.over

    def take(self, prompt: int, event: GenerateEvent) -> tuple[Tensor, ...] | None:
        """None: there is nothing to send."""
        row = self._rows.take(prompt, event)
        if row is None:
            return None
        if row.end is None and not (self._speaks and (row.ids or row.text[-1])):
            return None
        told = tensors_of([row], self._last if row.end is not None else self._names)
        row.text, row.ids, row.logprobs = [], [], []
        return told

"""Pure. The words of the core of a batch: what its driver learns (events), what it is to do (effects).

`now` is whole seconds since 1970: what a batch promises outlives a process. The shell performs effects one
after another and hands in what each leads to; one that fails for now leads to nothing, and is wanted again.
"""

from dataclasses import dataclass

from chassis.messages.batches import Batch, Problem

# ---- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """The record as it is stored."""

    now: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class AnswerSeen:
    """Of the request of this index; `ok`: it ran."""

    index: int
    ok: bool
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The input file, read: how many requests, of which model if of one, and what is wrong. And the answers
    that an earlier driver's work has brought."""

    now: int
    total: int
    model: str | None
    problems: tuple[Problem, ...] = ()
    answers: tuple[AnswerSeen, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    now: int
    answers: tuple[AnswerSeen, ...]


@dataclass(frozen=True, slots=True)
class Offered:
    """These are among the jobs, or were and have their answer."""

    now: int
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """Both files are there; None: nothing was to be said in it."""

    now: int
    output_file_id: str | None
    error_file_id: str | None


@dataclass(frozen=True, slots=True)
class Tick:
    now: int


Event = Seen | Loaded | Answered | Offered | Written | Tick

# ---- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Reads the input file. Leads to Loaded."""


@dataclass(frozen=True, slots=True)
class Save:
    """Stores the record if nobody did meanwhile. Leads to Seen, of this or of the other record."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Offer:
    """Publishes requests as jobs. Leads to Offered, perhaps of fewer."""

    indexes: tuple[int, ...]
    timeout_s: int


@dataclass(frozen=True, slots=True)
class Close:
    """Answers requests in place of whoever runs them, if nobody has, and stops those that may run."""

    indexes: tuple[int, ...]
    code: str
    running: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Writes both files from the answers. Leads to Written."""


@dataclass(frozen=True, slots=True)
class Leave:
    """`over`: nobody need drive it any more. Else another one does."""

    over: bool


Effect = Load | Save | Offer | Close | Write | Leave

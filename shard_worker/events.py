"""Pure. A stage's vocabulary: what happens to it, and what it wants done.

Links are known by numbers that the shell gives them, calls by the number of their Form.
"""

from dataclasses import dataclass

from chassis.ids import Epoch, StepNumber
from chassis.messages.forming import Form, Formed
from chassis.messages.pipeline import Hello

# ---- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Somebody dialled us."""

    now: float
    link: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class LinkDown:
    now: float
    link: int


@dataclass(frozen=True, slots=True)
class FormAsked:
    now: float
    call: int
    form: Form


@dataclass(frozen=True, slots=True)
class LoadDone:
    """Of the Load effect; `error` says why the range is not resident."""

    now: float
    call: int
    layers: range
    num_blocks: int = 0
    kv_allocated: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Dialled:
    """Of the Dial effect; None: nobody there."""

    now: float
    call: int
    link: int | None


@dataclass(frozen=True, slots=True)
class StepArrived:
    now: float
    link: int
    epoch: Epoch
    number: StepNumber


@dataclass(frozen=True, slots=True)
class BadFrame:
    """What came is no step, or can't be one."""

    now: float
    link: int
    cause: str


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The device could not run a step of this epoch."""

    now: float
    epoch: Epoch
    cause: str


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new; what is served is served on."""

    now: float


Event = (
    LinkUp | LinkDown | FormAsked | LoadDone | Dialled | StepArrived | BadFrame | StepFailed | Tick | Drain
)

# ---- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CloseLink:
    link: int


@dataclass(frozen=True, slots=True)
class Load:
    """Completes as LoadDone, also when nobody waits for it any more."""

    call: int
    form: Form


@dataclass(frozen=True, slots=True)
class Dial:
    call: int
    form: Form


@dataclass(frozen=True, slots=True)
class Answer:
    call: int
    formed: Formed


@dataclass(frozen=True, slots=True)
class Stood:
    """The stage serves `form` with empty tables; its output goes to `next_link`."""

    form: Form
    num_blocks: int
    next_link: int


@dataclass(frozen=True, slots=True)
class Execute:
    """Run the step that has just arrived."""


@dataclass(frozen=True, slots=True)
class Broke:
    """Nothing of this epoch runs or is sent any more."""

    epoch: Epoch
    cause: str


@dataclass(frozen=True, slots=True)
class Announce:
    """What the registry says of this worker has changed."""


@dataclass(frozen=True, slots=True)
class Count:
    """A ghost or an offence, dropped."""

    what: str


Effect = CloseLink | Load | Dial | Answer | Stood | Execute | Broke | Announce | Count

"""Pure. The words of the core of jobs: what happens to one that is held (events), what it wants (effects).

Every event carries `now`, seconds on the shell's monotonic clock. Effects with a `call` complete as the
event named beside them, always; a completion whose call is not awaited is a ghost.
"""

from dataclasses import dataclass
from enum import Enum

from chassis.bus import Headers, Stored
from chassis.errors import Code
from chassis.ids import AckToken
from chassis.job_subjects import JobName
from chassis.messages.gateway import GenerateEvent
from chassis.messages.jobs import Answer, Job
from chassis.messages.request import Reason, Terminal

# ---- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivered:
    now: float
    message: Stored
    token: AckToken
    count: int  # of deliveries; a hint
    age_s: float


@dataclass(frozen=True, slots=True)
class Looked:
    """Whether it has an answer. `failed`: not known."""

    now: float
    call: int
    found: bool
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """What the door said; `reasons`: why its choices ended."""

    request_id: str
    status_code: int
    body: dict[str, object] | None = None  # of the JSON form
    events: tuple[GenerateEvent, ...] = ()  # of the other
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The front refused it, or its request failed. `terminal`: the end of its log, if that was read."""

    request_id: str
    code: Code
    message: str
    retry_ms: int | None = None
    terminal: Terminal | None = None
    body: dict[str, object] | None = None  # as the door of the JSON form says it


@dataclass(frozen=True, slots=True)
class Ended:
    now: float
    call: int
    outcome: Ran | Failed


@dataclass(frozen=True, slots=True)
class Buried:
    """`failed`: its letter may not be stored."""

    now: float
    call: int
    failed: bool = False


class Write(Enum):
    STORED = "stored"
    TAKEN = "taken"  # it has an answer
    TOO_LARGE = "too large"
    UNKNOWN = "unknown"  # full, refused for now, or perhaps stored


@dataclass(frozen=True, slots=True)
class Written:
    now: float
    call: int
    outcome: Write


@dataclass(frozen=True, slots=True)
class LetGo:
    """The gateway stops: whatever is held goes back."""

    now: float


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


Event = Delivered | Looked | Ended | Buried | Written | LetGo | Tick

# ---- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """For the answer of a job. Completes as Looked."""

    call: int
    subject: str  # of the answer


@dataclass(frozen=True, slots=True)
class Run:
    """`refusals`: so many requests were made of it before and refused by a queue. Completes as Ended."""

    call: int
    name: JobName
    job: Job
    refusals: int
    priority: int
    time_left_ms: int
    trace_parent: str
    key: str = ""  # the API key that it counts to


@dataclass(frozen=True, slots=True)
class Stop:
    """Whoever runs it need not go on; completes as nothing."""

    call: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Writes the letter, with the log of the request. Completes as Buried."""

    call: int
    message: Stored
    request_id: str
    error: str


@dataclass(frozen=True, slots=True)
class WriteAnswer:
    """If there is none. Completes as Written."""

    call: int
    subject: str
    data: bytes
    headers: Headers


@dataclass(frozen=True, slots=True)
class Ack:
    token: AckToken


@dataclass(frozen=True, slots=True)
class Progress:
    token: AckToken


@dataclass(frozen=True, slots=True)
class Nak:
    token: AckToken
    delay_s: float


@dataclass(frozen=True, slots=True)
class Count:
    what: str


Effect = Look | Run | Stop | Bury | WriteAnswer | Ack | Progress | Nak | Count


@dataclass(frozen=True, slots=True)
class Reply:
    """A verdict: this is its answer. `dead`: its letter comes first."""

    answer: Answer
    dead: bool = False

"""Pure. The words of the gateway's core: what happens to a stream (events), what it wants done (effects).

Every event carries `now`, seconds on the shell's monotonic clock. Effects with a `call` complete as the
event named beside them, always, within the shell's own time limits.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from chassis.errors import Code
from chassis.ids import Attempt, BootId, RequestId
from chassis.messages.chunk import Chunk
from chassis.messages.ownership import (
    AttachKind,
    CancelAsk,
    Detached,
    Refused,
    TakeoverAnswer,
    TakeoverQuestion,
)
from chassis.messages.request import (
    Cancel,
    Reason,
    Record,
    Request,
    Timings,
    Usage,
)
from chassis.messages.sampling import PromptTold, TokenLogprobs

# ---- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A client's new request; `client` names its stream to the shell."""

    now: float
    client: int
    request: Request


@dataclass(frozen=True, slots=True)
class Resume:
    """A client that holds `ids` of a request wants the rest."""

    now: float
    client: int
    request_id: RequestId
    tenant: str
    ids: tuple[int, ...]


class Publish(Enum):
    STORED = "stored"
    DUPLICATE = "duplicate"  # the broker remembers the message id: nothing stored now
    TAKEN = "taken"  # the subject holds a message
    FULL = "full"  # the stream's bound is reached
    TIMEOUT = "timeout"  # perhaps stored, perhaps later
    REFUSED = "refused"  # it did not happen
    TOO_LARGE = "too large"


@dataclass(frozen=True, slots=True)
class Published:
    now: float
    request_id: RequestId
    call: int
    outcome: Publish


@dataclass(frozen=True, slots=True)
class RecordRead:
    """`failed`: no answer."""

    now: float
    request_id: RequestId
    call: int
    record: Record | None
    seq: int  # 0 when there is none
    failed: bool = False


@dataclass(frozen=True, slots=True)
class MessageRead:
    """The stored request, if there is one. `vocab_size` is its model's, None while that is not served."""

    now: float
    request_id: RequestId
    call: int
    request: Request | None
    age_s: float = 0.0  # since the broker stored it
    vocab_size: int | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class AttachAnswered:
    """`kind` None: nobody answered."""

    now: float
    request_id: RequestId
    call: int
    kind: AttachKind | None


class Write(Enum):
    STORED = "stored"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CancelWritten:
    now: float
    request_id: RequestId
    call: int
    outcome: Write


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    now: float
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class TakeoverAsked:
    now: float
    question: TakeoverQuestion


@dataclass(frozen=True, slots=True)
class CancelWanted:
    """By the request's id, from any client of the tenant; answered as CancelHeard."""

    now: float
    request_id: RequestId
    tenant: str
    reply: int


@dataclass(frozen=True, slots=True)
class ClientGone:
    now: float
    client: int
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class LetGo:
    """The gateway stops: clients are told to resume elsewhere."""

    now: float


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


Event = (
    Submit
    | Resume
    | Published
    | RecordRead
    | MessageRead
    | AttachAnswered
    | CancelWritten
    | ChunkArrived
    | TakeoverAsked
    | CancelWanted
    | ClientGone
    | LetGo
    | Tick
)

# ---- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Completes as Published."""

    call: int
    request: Request


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """The last record of the request's log; completes as RecordRead."""

    request_id: RequestId
    call: int


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """The request in REQUESTS; completes as MessageRead."""

    request_id: RequestId
    call: int


@dataclass(frozen=True, slots=True)
class AskOwner:
    """Attach at a batcher, with what is held; completes as AttachAnswered."""

    request_id: RequestId
    call: int
    boot: BootId
    attempt: Attempt
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteCancel:
    """Completes as CancelWritten."""

    request_id: RequestId
    call: int
    record: Cancel
    expected_seq: int


@dataclass(frozen=True, slots=True)
class Tell:
    """To one batcher, or to all of a model."""

    boot: BootId | None
    model: str
    message: TakeoverAnswer | CancelAsk | Detached | Refused


@dataclass(frozen=True, slots=True)
class Accept:
    """The request is in Shoal's hands. `request` None: only its terminal record is left, of `model`.

    `held`: the ids that the client already has. `stop`: what the text is held back for.
    """

    client: int
    request_id: RequestId
    model: str
    stop: tuple[bytes, ...]
    held: tuple[int, ...]
    request: Request | None


class Pass(NamedTuple):
    """New output ids for the client, from `first_index` on. A tuple: one is made per stream and step."""

    client: int
    first_index: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one an id, if the request asks for them
    prompt: PromptTold | None = None  # the same of the prompt, with the first id


@dataclass(frozen=True, slots=True)
class End:
    """The terminal record is stored. `length` output ids are its text, cut at `byte_cut` bytes if given."""

    client: int
    reason: Reason
    length: int
    byte_cut: int | None
    usage: Usage
    timings: Timings
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Fail:
    client: int
    code: Code
    message: str
    retry_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CancelHeard:
    """`found`: the request is being cancelled or over already. `failed`: why nobody knows."""

    reply: int
    found: bool
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    what: str
    amount: int = 1


Effect = (
    PublishRequest
    | ReadRecord
    | ReadMessage
    | AskOwner
    | WriteCancel
    | Tell
    | Accept
    | Pass
    | End
    | Fail
    | CancelHeard
    | Count
)

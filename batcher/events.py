"""Pure. The batcher's vocabulary: what happens to its core (events) and what it wants done (effects).

Every event carries `now`, seconds on the shell's monotonic clock. The shell performs effects in order
and brings completions back as events. Ownership (`ownership.py`) and scheduling (`scheduler.py`) speak
to each other through `core.py`, in the terms of the last section.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from chassis.ids import AckToken, Attempt, BlockHash, BlockId, BootId, Epoch, GatewayId, RequestId
from chassis.messages.chunk import Finish, Part
from chassis.messages.load import PipelineLoad
from chassis.messages.ownership import (
    Attach,
    AttachKind,
    CancelAsk,
    Detached,
    Refused,
)
from chassis.messages.pipeline import StageTiming
from chassis.messages.request import (
    Reason,
    Record,
    Request,
    Terminal,
    Timings,
    Usage,
)
from chassis.messages.sampling import PromptTold, TokenLogprobs
from chassis.messages.step_result import PromptAnswer

# ---- ownership: events -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivered:
    now: float
    request: Request
    token: AckToken
    count: int  # a hint only
    age_s: float  # since the broker stored it
    body_digest: bytes = b""  # SHA-256 of the message
    accepted_ms: int = 0  # the broker's wall clock when it stored it


class Write(Enum):
    STORED = "stored"
    REFUSED = "refused"
    UNKNOWN = "unknown"  # timed out: perhaps stored, perhaps later


@dataclass(frozen=True, slots=True)
class WriteDone:
    now: float
    request_id: RequestId
    call: int  # of the Append or WriteReceipt effect
    outcome: Write
    seq: int  # when stored


@dataclass(frozen=True, slots=True)
class ReadDone:
    """`failed`: no answer, read again."""

    now: float
    request_id: RequestId
    call: int  # of the ReadLast effect
    record: Record | None
    seq: int  # 0 when there is none
    failed: bool = False


@dataclass(frozen=True, slots=True)
class OwnerAnswered:
    """`mine` False also stands for no responder; 200 ms of silence is the core's own timer."""

    now: float
    request_id: RequestId
    call: int  # of the AskOwner effect
    mine: bool
    answered: bool = False  # it lives and said no: its letting go is no death


@dataclass(frozen=True, slots=True)
class OwnerAsked:
    now: float
    request_id: RequestId
    attempt: Attempt
    token: AckToken
    cancelled: bool
    reply: int  # names the asker to the shell


@dataclass(frozen=True, slots=True)
class TakeoverAnswered:
    now: float
    request_id: RequestId
    gateway: GatewayId
    attempt: Attempt
    ids: tuple[int, ...] | None  # yes
    minimum: Attempt | None  # no
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the ids, if the request asks for them
    prompt: PromptTold | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """A gateway's word: attach (wants a reply), cancel, detached, refused."""

    now: float
    message: Attach | CancelAsk | Detached | Refused
    reply: int | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; also after every pause. `gap_s` is how late it came: above AckWait all is read anew."""

    now: float
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineChanged:
    """`alive`: steps complete, nothing is runnable, or a re-formation is within its time."""

    now: float
    alive: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Let go of everything: drop, then nak."""

    now: float


# ---- ownership: events from the scheduler, through core.py -----------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    now: float
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class TokensMade:
    """A step's new output ids, in columns: of each request those after the ids it was run with."""

    now: float
    request_ids: tuple[RequestId, ...]
    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[RequestId, TokenLogprobs], ...] = ()  # of those that ask: of the first of their ids
    prompts: tuple[tuple[RequestId, PromptTold], ...] = ()  # of those that ask: with their first id


@dataclass(frozen=True, slots=True)
class Ended:
    """The scheduler's verdict: `output_ids` is the whole output, `byte_cut` bytes of its text stay."""

    now: float
    request_id: RequestId
    reason: Reason
    output_ids: tuple[int, ...]
    byte_cut: int | None
    usage: Usage
    timings: Timings
    error: str = ""
    retry_ms: int = 0  # when a retry may help, of what was refused


@dataclass(frozen=True, slots=True)
class Distrusted:
    """Workers found other content in blocks that the request computed on: it is computed anew."""

    now: float
    request_id: RequestId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class WorkersDied:
    """These requests were in a step during which a worker died."""

    now: float
    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class TakeAsked:
    """Another batcher gives a request that waits there."""

    now: float
    request: Request
    token: AckToken
    age_s: float  # since the broker stored it
    reply: int
    accepted_ms: int = 0  # the broker's wall clock when it stored it

    @property
    def request_id(self) -> RequestId:
        return self.request.id


@dataclass(frozen=True, slots=True)
class TakeAnswered:
    """`taken` False also stands for silence: then two may hold it, and the first claim decides."""

    now: float
    request_id: RequestId
    taken: bool


@dataclass(frozen=True, slots=True)
class GiveAway:
    """It is to run on another pipeline, if it still waits here."""

    now: float
    request_id: RequestId
    boot: BootId


OwnershipEvent = (
    Delivered
    | TakeAsked
    | TakeAnswered
    | GiveAway
    | WriteDone
    | ReadDone
    | OwnerAnswered
    | OwnerAsked
    | TakeoverAnswered
    | Heard
    | Tick
    | PipelineChanged
    | Drain
    | Admitted
    | TokensMade
    | Ended
    | WorkersDied
)


# ---- ownership: effects for the shell --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """Write a record to the request's subject in RESULTS; completes as WriteDone."""

    request_id: RequestId
    call: int
    record: Record
    expected_seq: int


@dataclass(frozen=True, slots=True)
class WriteReceipt:
    """Write what the request used, if that is not written yet (REFUSED); completes as WriteDone."""

    request_id: RequestId
    call: int
    record: Terminal


@dataclass(frozen=True, slots=True)
class ReadLast:
    request_id: RequestId
    call: int


@dataclass(frozen=True, slots=True)
class AskOwner:
    request_id: RequestId
    call: int
    boot: BootId
    attempt: Attempt
    token: AckToken
    cancelled: bool


@dataclass(frozen=True, slots=True)
class AskTakeover:
    """To all gateways; answers come as TakeoverAnswered."""

    request_id: RequestId
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class AnswerOwner:
    reply: int
    mine: bool


@dataclass(frozen=True, slots=True)
class AnswerAttach:
    reply: int
    kind: AttachKind


@dataclass(frozen=True, slots=True)
class SendParts:
    """The shell gathers all parts and finishes for one gateway into one chunk per turn and numbers it."""

    gateway: GatewayId
    parts: tuple[Part, ...] = ()
    finishes: tuple[Finish, ...] = ()


@dataclass(frozen=True, slots=True)
class Ack:
    token: AckToken


@dataclass(frozen=True, slots=True)
class Progress:
    tokens: tuple[AckToken, ...]


@dataclass(frozen=True, slots=True)
class Nak:
    token: AckToken
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A poison request's history, beside its terminal record."""

    request: Request
    terminal: Terminal
    worker_deaths: int
    batcher_deaths: int


@dataclass(frozen=True, slots=True)
class Count:
    """One of a rare kind happened: dropped ghosts, fences, divergences."""

    what: str
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Closed:
    """The request left this batcher; `why` for its span: done, fenced, asked, drained, ..."""

    request_id: RequestId
    why: str


@dataclass(frozen=True, slots=True)
class Give:
    """Offer it to another batcher; completes as TakeAnswered."""

    request: Request
    boot: BootId
    token: AckToken
    age_s: float


# ---- ownership: effects for the scheduler, performed by core.py ------------------------------------


@dataclass(frozen=True, slots=True)
class Enqueue:
    """A fresh request waits for admission (answered by Admitted)."""

    request: Request
    age_s: float
    deadline: float | None  # on the core's clock
    given: bool = False  # by another batcher: it stays


@dataclass(frozen=True, slots=True)
class Run:
    """Run, or run again, with `output_ids` given as output so far; judge the ends on them first.

    The request owns a claim: no Admitted follows. `alone`: nothing else may share its steps.
    """

    request: Request
    output_ids: tuple[int, ...]
    deadline: float | None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """No more steps of this request; its blocks go back. Steps in flight are ignored for it."""

    request_id: RequestId


OwnershipEffect = (
    Append
    | WriteReceipt
    | ReadLast
    | AskOwner
    | AskTakeover
    | AnswerOwner
    | AnswerAttach
    | SendParts
    | Ack
    | Progress
    | Nak
    | DeadLetter
    | Count
    | Closed
    | Give
    | Enqueue
    | Run
    | Stop
)


# ---- pipeline, steps, blocks -----------------------------------------------------------------------


class Row(NamedTuple):
    """One sequence's share of a step. A tuple, so that rows turn into columns in one pass."""

    request_id: RequestId
    slot: int
    start: int  # position of the first token computed
    token_ids: tuple[int, ...]  # computed by this step
    samples: bool
    output_index: int  # of the token it yields, when it samples
    new_blocks: tuple[BlockId, ...]  # appended to the slot's table; the whole table when fresh
    fresh: bool  # the first step that names this sequence in this epoch (or since it lost its slot)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Step `number` of an epoch. No rows: an empty step, which only proves that the ring turns."""

    epoch: Epoch
    number: int
    rows: tuple[Row, ...]
    freed_slots: tuple[int, ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()  # from, to: before the rows


@dataclass(frozen=True, slots=True)
class StepReturned:
    now: float
    epoch: Epoch
    number: int
    token_ids: tuple[int, ...]  # one per sampling row, in row order
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # by place among token_ids, ascending
    prompts: tuple[PromptAnswer, ...] = ()
    nan_places: tuple[int, ...] = ()  # among token_ids, which stand for nothing there
    void_rows: tuple[int, ...] = ()  # ascending: their blocks held other content, nothing is to come of them
    timings: tuple[StageTiming, ...] = ()  # one a stage, in order
    waiting_places: tuple[int, ...] = ()  # among token_ids: not drawn, their grammar is compiled still
    refusals: tuple[tuple[int, str], ...] = ()  # by place among token_ids: nothing can be drawn, and why


@dataclass(frozen=True, slots=True)
class MatchBlocks:
    """Ask kvstore for the longest cached prefix of each chain; completes as BlocksMatched."""

    call: int
    request_ids: tuple[RequestId, ...]
    chains: tuple[tuple[BlockHash, ...], ...]


@dataclass(frozen=True, slots=True)
class BlocksMatched:
    """Leased block ids for each request of the call; `failed`: none, and the pool must be attached anew."""

    now: float
    call: int
    blocks: tuple[tuple[BlockId, ...], ...]
    failed: bool = False


@dataclass(frozen=True, slots=True)
class ExchangeBlocks:
    """Commit, release, lease, in this order; completes as BlocksExchanged. One at a time per pool."""

    call: int
    commits: tuple[tuple[BlockId, BlockHash, BlockHash], ...]  # block, its hash, its parent's (zeros: none)
    releases: tuple[BlockId, ...]
    lease: int
    keeps: tuple[int, ...] = ()  # of each release: how long its content is to stay; none: the default
    bad: tuple[BlockId, ...] = ()  # held: they do not hold what they were said to


@dataclass(frozen=True, slots=True)
class BlocksExchanged:
    now: float
    call: int
    leased: tuple[BlockId, ...]
    free: int
    cached: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class AttachPool:
    """Open the pool with the whole inventory; completes as PoolAttached, repeated until it succeeds."""

    call: int
    held: tuple[BlockId, ...]  # with repetition: one entry per reference
    committed: tuple[tuple[BlockId, BlockHash], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class PoolAttached:
    now: float
    call: int
    free: int
    cached: int
    failed: bool = False
    tiers: bool = False  # a match may find what the pool lacks


@dataclass(frozen=True, slots=True)
class PoolMoves:
    """Another kvstore is to have the pool: it is to be attached anew, with all that is held."""

    now: float


BlockEffect = MatchBlocks | ExchangeBlocks | AttachPool
BlockEvent = BlocksMatched | BlocksExchanged | PoolAttached | PoolMoves


# ---- placement among the pipelines of a model --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadHeard:
    now: float
    load: PipelineLoad


@dataclass(frozen=True, slots=True)
class LocateBlocks:
    """Which pools hold how much of each chain's head? Completes as BlocksLocated."""

    call: int
    request_ids: tuple[RequestId, ...]
    chains: tuple[tuple[BlockHash, ...], ...]
    generations: tuple[str, ...] = ()  # the pools of the others


@dataclass(frozen=True, slots=True)
class BlocksLocated:
    """`found`: by pool generation, blocks of every request's head; nothing where no kvstore answered."""

    now: float
    call: int
    request_ids: tuple[RequestId, ...]
    found: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class TellLoad:
    """To the other batchers of the model."""

    load: PipelineLoad


PlacementEffect = LocateBlocks | TellLoad | GiveAway

"""Pure. What a gateway knows of one request that it serves: the ids it passed on, and its witness's minimum.

Rules: ids only ever grow; `minimum` (attempt, boot) only rises; the digest of every prefix is kept, so that
a part that overlaps is judged exactly.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from chassis.ids import Attempt, BootId, RequestId
from chassis.messages.chunk import EMPTY_DIGEST, Finish, Part, extend_digest
from chassis.messages.ownership import TakeoverQuestion
from chassis.messages.request import Record, Request
from chassis.messages.sampling import UNTOLD, PromptTold, TokenLogprobs

KEPT_LEN_MAX = 256


class State(Enum):
    """CLOSED is to be forgotten: a part of a request nobody knows is answered `unknown` all the same."""

    PUBLISHING = "publishing"
    ATTACHING = "attaching"
    OPEN = "open"


class Probe(Enum):
    """How far an open stream is in finding its owner."""

    IDLE = "idle"
    ASKING = "asking"  # the owner it knows
    READING = "reading"  # the record
    NAMED = "named"  # asking the boot that the record names
    MESSAGE = "message"  # nobody answered: whether the request is still there at all


class Fit(Enum):
    CONTINUES = "continues"
    GAP = "gap"
    DIFFERS = "differs"


class Held:
    """Output ids in order, and the running digest after each. 12 bytes a token, and its log probabilities
    (and its prompt's) where a request asks for them: a new owner is told all.
    """

    __slots__ = ("_digests", "_ids", "_logprobs", "prompt")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids = array("I")
        self._digests = array("Q")
        self._logprobs: list[TokenLogprobs] = []  # of the first ids, or none
        self.prompt: PromptTold | None = None
        self.append(ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One for each id, or none."""
        if not self._logprobs:
            return ()
        return (*self._logprobs, *(UNTOLD,) * (len(self._ids) - len(self._logprobs)))

    def tell(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Of ids that were appended just now."""
        known = self._logprobs
        known.extend((UNTOLD,) * (first_index - len(known)))
        known.extend(logprobs)

    def digest_at(self, length: int) -> int:
        return self._digests[length - 1] if length else EMPTY_DIGEST

    def append(self, ids: Sequence[int]) -> None:
        digest = self.digest_at(len(self._ids))
        for token_id in ids:
            digest = extend_digest(digest, (token_id,))
            self._ids.append(token_id)
            self._digests.append(digest)

    def take(self, part: Part) -> tuple[Fit, tuple[int, ...]]:
        """Judges a part and appends what it adds; returns that. Nothing is taken unless it continues."""
        length = len(self._ids)
        if part.first_index > length:
            return Fit.GAP, ()
        end = part.first_index + len(part.ids)
        if end <= length:
            return (Fit.CONTINUES if self.digest_at(end) == part.digest else Fit.DIFFERS), ()
        fresh = part.ids[length - part.first_index :]
        digests, digest = [], self.digest_at(length)
        for token_id in fresh:
            digest = extend_digest(digest, (token_id,))
            digests.append(digest)
        if digest != part.digest:
            return Fit.DIFFERS, ()
        self._ids.extend(fresh)
        self._digests.extend(digests)
        return Fit.CONTINUES, fresh

    def fits(self, ids: tuple[int, ...]) -> bool:
        """Whether what is held is a prefix of `ids`."""
        return len(self._ids) <= len(ids) and self._ids == array("I", ids[: len(self._ids)])

    def begins_with(self, ids: tuple[int, ...]) -> bool:
        return len(ids) <= len(self._ids) and self._ids[: len(ids)] == array("I", ids)

    def check(self) -> None:
        assert len(self._ids) == len(self._digests) >= len(self._logprobs)
        assert extend_digest(EMPTY_DIGEST, self._ids) == self.digest_at(len(self._ids))


@dataclass(frozen=True, slots=True)
class Said:
    """A part or finish that came before its time, and who sent it."""

    boot: BootId
    what: Part | Finish


class Stream:
    """The fields of table 2.2 for one request, and the timers of the rows that wait."""

    __slots__ = (
        "absences",
        "accepted",
        "call",
        "cancel_wanted",
        "cancelling",
        "check_at",
        "client",
        "deadline_at",
        "due",
        "give_up_at",
        "gone",
        "held",
        "id",
        "joined",
        "kept",
        "look_at",
        "min_attempt",
        "min_boot",
        "none_seen",
        "owner",
        "probe",
        "read",
        "request",
        "state",
        "stored",
        "tenant",
    )

    def __init__(
        self, client: int, request_id: RequestId, tenant: str, request: Request | None, ids: Sequence[int]
    ) -> None:
        self.client = client
        self.id = request_id
        self.tenant = tenant
        self.request = request  # None: joined, and its message not read yet
        self.joined = request is None  # asks for the rest of a request by its id
        self.held = Held(ids)
        self.state = State.PUBLISHING if request is not None else State.ATTACHING
        self.min_attempt = Attempt(0)
        self.min_boot: BootId | None = None
        self.owner: BootId | None = None  # whom to ask: the boot of the minimum, or one that a record named
        self.call = 0  # the completion that is awaited; others are ghosts
        self.probe = Probe.IDLE
        self.absences = 0  # in a row: no owner was found, and no message
        self.look_at = float("-inf")  # the message is looked for no sooner
        self.kept: list[Said | TakeoverQuestion] = []
        self.read: Record | None = None  # while its message is read
        self.none_seen = False  # a read found neither record nor message
        self.stored = False  # our own publish was stored just now
        self.accepted = False  # the client was told
        self.gone = False
        self.cancel_wanted = ""  # the reason
        self.cancelling = False  # it was passed on
        self.check_at: float | None = None
        self.deadline_at: float | None = None
        self.give_up_at: float | None = None
        self.due: float | None = None  # when the heap wakes this stream

    @property
    def keyed(self) -> bool:
        return self.request is not None and self.request.keyed

    @property
    def uninvited(self) -> bool:
        """The message may name another gateway: then no owner sends us anything before we attach."""
        return self.joined or (self.keyed and not self.stored)

    def below(self, attempt: Attempt, boot: BootId) -> bool:
        """Whether a part of this attempt is of an owner that was superseded."""
        if attempt == self.min_attempt:
            return self.min_boot is not None and self.min_boot != boot
        return attempt < self.min_attempt

    def keep(self, what: Said | TakeoverQuestion) -> bool:
        if len(self.kept) >= KEPT_LEN_MAX:
            return False
        self.kept.append(what)
        return True

    def wakes_at(self) -> float | None:
        times = [t for t in (self.check_at, self.deadline_at, self.give_up_at) if t is not None]
        return min(times) if times else None

    def check(self) -> None:
        self.held.check()
        assert (self.min_attempt == 0) == (self.min_boot is None)
        assert self.state is State.OPEN or (self.probe is Probe.IDLE and self.owner is None)
        assert not (self.state is State.OPEN and self.kept)
        assert self.state is not State.OPEN or self.request is not None
        wakes_at = self.wakes_at()
        assert wakes_at is None or (self.due is not None and self.due <= wakes_at), "nobody wakes it"

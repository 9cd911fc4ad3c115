"""Pure. Cancels under way: tell the owner; a second later write `cancel` until it or a terminal is stored.

Rules: a write expects the sequence of the last record read, so a terminal record always wins; an errand
outlives its stream; whoever only knows an id must be of the request's tenant. Owner words are repeated with
each write attempt, because they may be lost.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from chassis.ids import Attempt, BootId, RequestId
from chassis.messages.ownership import CancelAsk
from chassis.messages.request import Cancel, Claim, Terminal
from gateway.events import (
    CancelHeard,
    CancelWritten,
    Count,
    Effect,
    MessageRead,
    ReadMessage,
    ReadRecord,
    RecordRead,
    Tell,
    Write,
    WriteCancel,
)

WRITE_AFTER_S = 1.0
RETRY_FIRST_S = 0.25
RETRY_MAX_S = 8.0
GIVE_UP_S = 600.0
LEN_MAX = 16384  # beyond it the oldest gives way
UNREAD = "bus: the request's record cannot be read"
FULL = "gateway: too many cancels under way"


@dataclass(slots=True)
class Errand:
    reason: str
    give_up_at: float
    model: str = ""
    owner: BootId | None = None
    due: float | None = None  # when to read next; None while a call is under way
    call: int = 0
    retry_s: float = RETRY_FIRST_S
    tenant: str | None = None  # to be checked before anything else
    replies: list[int] = field(default_factory=list)
    none_seen: bool = False
    follows_none: bool = False  # the write under way: no record is before it


class Cancels:
    def __init__(self, new_call: Callable[[], int]) -> None:
        self._new_call = new_call
        self._errands: dict[RequestId, Errand] = {}
        self._heap: list[tuple[float, RequestId]] = []  # stale entries are dropped when they surface

    def __len__(self) -> int:
        return len(self._errands)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._errands

    def awaits(self, request_id: RequestId, call: int) -> bool:
        """Whether a completion is an errand's."""
        errand = self._errands.get(request_id)
        return errand is not None and errand.due is None and errand.call == call

    def start(
        self, now: float, request_id: RequestId, owner: BootId | None, model: str, reason: str
    ) -> list[Effect]:
        """Tells the owner (all batchers of the model while none is known) now, writes after a second."""
        known = self._errands.get(request_id)
        if known is not None and known.tenant is None:
            return []
        errand, evicted = self._add(now, request_id, reason)
        errand.owner, errand.model = owner, model
        self._wait(request_id, errand, now + WRITE_AFTER_S)
        if known is not None:
            errand.replies = known.replies
            return [self._tell(request_id, errand), *self._answer(errand, True)]
        return [*evicted, self._tell(request_id, errand)]

    def write_now(self, now: float, request_id: RequestId, model: str, reason: str) -> list[Effect]:
        """For a publish that timed out: nobody may have it, nobody is told."""
        errand, evicted = self._add(now, request_id, reason)
        errand.model = model
        return [*evicted, *self._read(request_id, errand)]

    def start_by_id(
        self, now: float, request_id: RequestId, tenant: str, reason: str, reply: int
    ) -> list[Effect]:
        """For a request that is served elsewhere: looks it up first. Answered by CancelHeard."""
        known = self._errands.get(request_id)
        if known is not None and known.tenant is None:
            return [CancelHeard(reply, True)]
        if known is not None:
            if known.tenant != tenant:
                return [CancelHeard(reply, False)]
            known.replies.append(reply)
            return []
        errand, evicted = self._add(now, request_id, reason)
        errand.tenant, errand.replies = tenant, [reply]
        return [*evicted, *self._read(request_id, errand)]

    def forget(self, request_id: RequestId) -> list[Effect]:
        """Its terminal record is known."""
        errand = self._errands.pop(request_id, None)
        return self._answer(errand, True) if errand is not None else []

    def on_record(self, e: RecordRead) -> tuple[list[Effect], Terminal | Cancel | None]:
        """What follows a read, and the record that ends the request if it found one: a terminal one, or a
        cancel that follows none."""
        errand = self._errands[e.request_id]
        if e.failed:
            return self._later(e.now, e.request_id, errand), None
        match e.record:
            case Terminal() as terminal:
                if errand.tenant is not None and terminal.tenant and terminal.tenant != errand.tenant:
                    del self._errands[e.request_id]
                    return self._answer(errand, False), None
                return self.forget(e.request_id), terminal
            case _ if errand.tenant is not None:
                errand.call = self._new_call()
                return [ReadMessage(e.request_id, errand.call)], None
            case Cancel() as cancel:
                return self.forget(e.request_id), cancel if cancel.follows_none else None
            case Claim() as claim:
                told: list[Effect] = []
                if claim.boot != errand.owner and errand.model:
                    errand.owner = claim.boot
                    told.append(self._tell(e.request_id, errand))
                record = Cancel(claim.attempt, claim.boot, errand.reason)
                return [*told, self._write(e.request_id, errand, record, e.seq)], None
            case None:
                record = Cancel(Attempt(0), BootId(""), errand.reason)
                return [self._write(e.request_id, errand, record, 0)], None

    def on_message(self, e: MessageRead) -> list[Effect]:
        """The message of a request known by id only: proves the tenant."""
        errand = self._errands[e.request_id]
        if e.failed:
            return self._later(e.now, e.request_id, errand)
        if e.request is None and not errand.none_seen:
            errand.none_seen = True
            return self._later(e.now, e.request_id, errand)  # both reads may have been a little behind
        if e.request is None or e.request.tenant != errand.tenant:
            del self._errands[e.request_id]
            return self._answer(errand, False)
        errand.tenant, errand.model = None, e.request.model
        self._wait(e.request_id, errand, e.now + WRITE_AFTER_S)
        return [self._tell(e.request_id, errand), *self._answer(errand, True)]

    def on_written(self, e: CancelWritten) -> tuple[list[Effect], bool]:
        """And whether that ends the request: no record was before it, so nobody ever begins it."""
        errand = self._errands[e.request_id]
        if e.outcome is Write.STORED:
            return self.forget(e.request_id), errand.follows_none
        return self._later(e.now, e.request_id, errand), False

    def tick(self, now: float) -> list[Effect]:
        out: list[Effect] = []
        while (due := self.next_timer()) is not None and due <= now:
            _, request_id = heapq.heappop(self._heap)
            errand = self._errands[request_id]
            if now >= errand.give_up_at:
                del self._errands[request_id]
                out += [Count("cancel given up"), *self._answer(errand, False, UNREAD)]
                continue
            if errand.tenant is None and errand.retry_s > RETRY_FIRST_S and errand.model:
                out.append(self._tell(request_id, errand))
            out += self._read(request_id, errand)
        return out

    def next_timer(self) -> float | None:
        while self._heap:
            due, request_id = self._heap[0]
            errand = self._errands.get(request_id)
            if errand is not None and errand.due == due:
                return due
            heapq.heappop(self._heap)
        return None

    def check(self) -> None:
        assert len(self._errands) <= LEN_MAX
        for errand in self._errands.values():
            assert errand.due is not None or errand.call > 0
        waiting = {(e.due, request_id) for request_id, e in self._errands.items() if e.due is not None}
        assert waiting <= set(self._heap), "nobody wakes it"

    def _add(self, now: float, request_id: RequestId, reason: str) -> tuple[Errand, list[Effect]]:
        """The new errand, and what is to be told of the one that gave way to it."""
        evicted: list[Effect] = []
        if len(self._errands) >= LEN_MAX and request_id not in self._errands:
            oldest = self._errands.pop(next(iter(self._errands)))
            evicted = [Count("cancel evicted"), *self._answer(oldest, False, FULL)]
        errand = self._errands[request_id] = Errand(reason, now + GIVE_UP_S)
        return errand, evicted

    def _tell(self, request_id: RequestId, errand: Errand) -> Effect:
        return Tell(errand.owner, errand.model, CancelAsk(request_id, errand.reason))

    def _read(self, request_id: RequestId, errand: Errand) -> list[Effect]:
        errand.call, errand.due = self._new_call(), None
        return [ReadRecord(request_id, errand.call)]

    def _write(self, request_id: RequestId, errand: Errand, record: Cancel, seq: int) -> Effect:
        errand.call, errand.follows_none = self._new_call(), not seq
        return WriteCancel(request_id, errand.call, record, seq)

    def _wait(self, request_id: RequestId, errand: Errand, until: float) -> None:
        errand.due = until
        heapq.heappush(self._heap, (until, request_id))

    def _later(self, now: float, request_id: RequestId, errand: Errand) -> list[Effect]:
        self._wait(request_id, errand, now + errand.retry_s)
        errand.retry_s = min(errand.retry_s * 2, RETRY_MAX_S)
        if errand.tenant is not None and errand.replies and errand.retry_s > 2.0:
            return self._answer(errand, False, UNREAD)
        return []

    def _answer(self, errand: Errand, found: bool, failed: str = "") -> list[Effect]:
        replies, errand.replies = errand.replies, []
        return [CancelHeard(reply, found, failed) for reply in replies]

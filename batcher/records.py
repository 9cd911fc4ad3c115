"""Calls on the ownership log and to other owners: each is made once and comes back as one event.

Retries are the core's: here a failure is only named.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from batcher import events as ev
from batcher.account import Account
from batcher.statistics import Statistics
from chassis import log, subjects, usage_subjects
from chassis.bus import Appended, Bus
from chassis.errors import BusError, NoResponders, WrongSequence
from chassis.ids import Attempt, BootId, RequestId
from chassis.messages import BadMessage
from chassis.messages.ownership import OwnerQuestion, Take, build_to_batcher, parse_owner_answer
from chassis.messages.request import Cancel, Claim, Reason, Record, Terminal, build_record
from chassis.messages.usage import build_receipt, receipt_of
from chassis.record_log import last_record
from chassis.subjects import RequestSubject

OWNER_TIMEOUT_S = 0.2
DOUBTED_MAX = 65536
UNKNOWN_PAUSE_S = 0.05
WRITER = "Shoal-Writer"  # of a receipt: the batcher that stored it


def _span_of(record: Record) -> str:
    if isinstance(record, Claim):
        return "leave" if record.left else "claim"
    return "finish"


class Records:
    def __init__(
        self,
        bus: Bus,
        boot: BootId,
        account: Account,
        statistics: Statistics,
        wall_ns: Callable[[], int],
        timeout_s: float,
        tell: Callable[[ev.WriteDone | ev.ReadDone | ev.OwnerAnswered | ev.TakeAnswered], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._bus = bus
        self._account = account
        self._statistics = statistics
        self._wall_ns = wall_ns
        self._timeout_s = timeout_s
        self._tell = tell
        self._spawn = spawn
        self._boot = boot
        self._doubted: dict[RequestId, None] = {}  # a write of their receipt had no answer

    def append(self, effect: ev.Append) -> None:
        what = _span_of(effect.record)
        self._account.began(effect.request_id, what, self._wall_ns())
        done = partial(self._appended, effect, what)
        try:
            self._bus.append_then(
                subjects.result(effect.request_id),
                build_record(effect.record),
                done,
                expected_seq=effect.expected_seq,
                timeout_s=self._timeout_s,
            )
        except BusError as error:
            done(error)

    def _appended(self, effect: ev.Append, what: str, found: Appended | BusError) -> None:
        request_id, seq, outcome = effect.request_id, 0, ev.Write.STORED
        match found:
            case Appended(stored_seq):
                seq = stored_seq
            case WrongSequence():
                outcome = ev.Write.REFUSED
            case _:
                outcome = ev.Write.UNKNOWN
                log.warning("a record's fate is unknown", request_id=request_id, error=str(found))
        self._account.ended(request_id, what, self._wall_ns(), **{"shoal.outcome": outcome.value})
        if outcome is ev.Write.STORED:
            match effect.record:
                case Claim(attempt=attempt, left=False):
                    self._account.claimed(request_id, attempt)
                case Terminal():
                    self._account.terminal(request_id, effect.record)
        self._written(request_id, effect.call, outcome, seq)

    def _written(self, request_id: RequestId, call: int, outcome: ev.Write, seq: int = 0) -> None:
        """Told at once; a doubt after a pause, for whoever did not answer."""
        loop = asyncio.get_running_loop()
        if outcome is not ev.Write.UNKNOWN:
            self._tell(ev.WriteDone(loop.time(), request_id, call, outcome, seq))
            return

        def tell() -> None:
            self._tell(ev.WriteDone(loop.time(), request_id, call, outcome, seq))

        loop.call_later(UNKNOWN_PAUSE_S, tell)

    # ---- receipts

    def write_receipt(self, effect: ev.WriteReceipt) -> None:
        written = partial(self._written, effect.request_id, effect.call)
        self._store_receipt(effect.request_id, effect.record, written)

    async def _receipt(self, request_id: RequestId, record: Terminal) -> ev.Write:
        outcome: asyncio.Future[ev.Write] = asyncio.get_running_loop().create_future()
        self._store_receipt(request_id, record, outcome.set_result)
        return await outcome

    def _store_receipt(
        self, request_id: RequestId, record: Terminal, then: Callable[[ev.Write], None]
    ) -> None:
        """The counters move with the receipts, so that their sums agree."""
        told = receipt_of(request_id, record)
        subject = usage_subjects.receipt(told.tenant, told.model, request_id)

        def done(found: Appended | BusError) -> None:
            match found:
                case Appended():
                    then(self._counted(request_id, record))
                case WrongSequence() if request_id in self._doubted:
                    self._spawn(self._look(request_id, record, subject, then))
                case WrongSequence():
                    then(ev.Write.REFUSED)
                case _:
                    then(self._doubt(request_id, found))

        try:
            self._bus.append_then(
                subject,
                build_receipt(told),
                done,
                expected_seq=0,
                headers={WRITER: self._boot},
                timeout_s=self._timeout_s,
            )
        except BusError as error:
            done(error)

    async def _look(
        self, request_id: RequestId, record: Terminal, subject: str, then: Callable[[ev.Write], None]
    ) -> None:
        """Whether the receipt that is there is the one that had no answer."""
        try:
            mine = await self._is_mine(subject)
        except BusError as error:
            then(self._doubt(request_id, error))
            return
        if mine:
            then(self._counted(request_id, record))
        else:
            self._doubted.pop(request_id, None)
            then(ev.Write.REFUSED)

    def _counted(self, request_id: RequestId, record: Terminal) -> ev.Write:
        self._doubted.pop(request_id, None)
        self._statistics.ended(record)
        return ev.Write.STORED

    async def _is_mine(self, subject: str) -> bool:
        """Whether the receipt that is there was stored by a write of this batcher. Raises BusError."""
        stored = await self._bus.last(subjects.USAGE, subject, self._timeout_s)
        return stored is not None and stored.headers.get(WRITER) == self._boot

    def _doubt(self, request_id: RequestId, error: BusError) -> ev.Write:
        log.warning("a receipt's fate is unknown", request_id=request_id, error=str(error))
        self._doubted[request_id] = None
        if len(self._doubted) > DOUBTED_MAX:
            del self._doubted[next(iter(self._doubted))]
        return ev.Write.UNKNOWN

    # ---- questions

    async def read(self, effect: ev.ReadLast) -> None:
        loop = asyncio.get_running_loop()
        try:
            record, seq = await last_record(self._bus, effect.request_id, self._timeout_s)
        except BusError as error:
            log.warning("a record can't be read", request_id=effect.request_id, error=str(error))
            self._tell(ev.ReadDone(loop.time(), effect.request_id, effect.call, None, 0, failed=True))
            return
        if isinstance(record, Cancel) or (isinstance(record, Claim) and not record.left):
            self._account.followed(effect.request_id, record.boot, record.attempt)
        self._tell(ev.ReadDone(loop.time(), effect.request_id, effect.call, record, seq))

    async def ask_owner(self, effect: ev.AskOwner) -> None:
        question = OwnerQuestion(effect.request_id, effect.attempt, effect.token, effect.cancelled)
        answered = False
        try:
            answer = await self._bus.request(
                subjects.owner(effect.boot), build_to_batcher(question), timeout_s=OWNER_TIMEOUT_S
            )
            mine, answered = parse_owner_answer(answer.data), True
        except (NoResponders, BadMessage):
            mine = False
        except BusError:
            return  # silence: ownership counts its 200 ms itself
        now = asyncio.get_running_loop().time()
        self._tell(ev.OwnerAnswered(now, effect.request_id, effect.call, mine, answered))

    async def give(self, effect: ev.Give) -> None:
        """Silence is a no: who took it all the same claims it, or does not."""
        request_id = effect.request.id
        take = Take(effect.request, effect.token, max(0, round(effect.age_s * 1e6)))
        self._account.began(request_id, "give", self._wall_ns())
        taken = False
        try:
            answer = await self._bus.request(
                subjects.owner(effect.boot), build_to_batcher(take), timeout_s=OWNER_TIMEOUT_S
            )
            taken = parse_owner_answer(answer.data)
        except (BusError, BadMessage) as error:
            log.debug("not given", request_id=request_id, error=str(error))
        self._account.ended(request_id, "give", self._wall_ns(), **{"shoal.taken": taken})
        self._tell(ev.TakeAnswered(asyncio.get_running_loop().time(), request_id, taken))

    async def refuse(self, said: RequestSubject, boot: BootId, why: str, accepted_ms: int) -> bool:
        """Ends a request that cannot be read; False when that is not sure."""
        found: Record | None = Terminal(
            attempt=Attempt(0),
            boot=boot,
            reason=Reason.FAILED,
            output_ids=(),
            error=why,
            model=said.model,
            priority=said.priority,
            accepted_ms=accepted_ms,
        )
        assert found is not None
        try:
            subject = subjects.result(said.request_id)
            try:
                await self._bus.append(subject, build_record(found), expected_seq=0)
            except WrongSequence:  # it has a record already
                found, _ = await last_record(self._bus, said.request_id, self._timeout_s)
        except BusError:
            return False  # it will be delivered again
        if not isinstance(found, Terminal):
            return True  # another of this id lives
        return await self._receipt(said.request_id, found) is not ev.Write.UNKNOWN

    async def dead_letter(self, effect: ev.DeadLetter) -> None:
        request_id = effect.request.id
        headers = {
            "Shoal-Worker-Deaths": str(effect.worker_deaths),
            "Shoal-Batcher-Deaths": str(effect.batcher_deaths),
        }
        log.error("poison request", request_id=request_id, worker_deaths=effect.worker_deaths)
        try:
            await self._bus.append(
                subjects.dead(request_id),
                build_record(effect.terminal),
                message_id=f"dead-{request_id}",
                headers=headers,
            )
        except BusError as error:
            log.error("dead letter not stored", request_id=request_id, error=str(error))

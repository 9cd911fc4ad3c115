"""Calls on the ownership log and to other owners: each is made once and comes back as one event.

Retries are the core's: here a failure is only named.
"""

import asyncio
from collections.abc import Callable

from batcher import events as ev
from batcher.account import Account
from chassis import log, subjects
from chassis.bus import Bus
from chassis.errors import BusError, NoResponders, WrongSequence
from chassis.ids import Attempt, BootId, RequestId
from chassis.messages import BadMessage
from chassis.messages.ownership import OwnerQuestion, build_to_batcher, parse_owner_answer
from chassis.messages.request import Cancel, Claim, Reason, Record, Terminal, build_record
from chassis.record_log import last_record

OWNER_TIMEOUT_S = 0.2
UNKNOWN_PAUSE_S = 0.05


def _span_of(record: Record) -> str:
    if isinstance(record, Claim):
        return "leave" if record.left else "claim"
    return "finish"


class Records:
    def __init__(
        self,
        bus: Bus,
        account: Account,
        wall_ns: Callable[[], int],
        timeout_s: float,
        tell: Callable[[ev.WriteDone | ev.ReadDone | ev.OwnerAnswered], None],
    ) -> None:
        self._bus = bus
        self._account = account
        self._wall_ns = wall_ns
        self._timeout_s = timeout_s
        self._tell = tell

    async def append(self, effect: ev.Append) -> None:
        loop = asyncio.get_running_loop()
        what = _span_of(effect.record)
        self._account.began(effect.request_id, what, self._wall_ns())
        seq, outcome = 0, ev.Write.STORED
        try:
            stored = await self._bus.append(
                subjects.result(effect.request_id),
                build_record(effect.record),
                expected_seq=effect.expected_seq,
                timeout_s=self._timeout_s,
            )
            seq = stored.seq
        except WrongSequence:
            outcome = ev.Write.REFUSED
        except BusError as error:
            outcome = ev.Write.UNKNOWN
            log.warning("a record's fate is unknown", request_id=effect.request_id, error=str(error))
            await asyncio.sleep(UNKNOWN_PAUSE_S)
        self._account.ended(effect.request_id, what, self._wall_ns(), **{"shoal.outcome": outcome.value})
        if outcome is ev.Write.STORED:
            match effect.record:
                case Claim(attempt=attempt, left=False):
                    self._account.claimed(effect.request_id, attempt)
                case Terminal():
                    self._account.terminal(effect.request_id, effect.record)
        self._tell(ev.WriteDone(loop.time(), effect.request_id, effect.call, outcome, seq))

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

    async def refuse(self, request_id: RequestId, boot: BootId, why: str) -> bool:
        """Ends a request that cannot be read; False when that is not sure."""
        record = Terminal(attempt=Attempt(0), boot=boot, reason=Reason.FAILED, output_ids=(), error=why)
        try:
            await self._bus.append(subjects.result(request_id), build_record(record), expected_seq=0)
        except WrongSequence:
            pass  # it has a record already
        except BusError:
            return False  # it will be delivered again
        return True

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

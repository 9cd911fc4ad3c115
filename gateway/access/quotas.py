"""The quotas of keys, held together with all other gateways by one ledger a key in the stream QUOTAS.

What a request needs is mostly here already (`gateway/access/quota.py`); if not, it waits for one write that
expects the ledger as it was read. Who loses that race reads and tries again. Without the bus nothing is
granted: a request could not be published then either.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from chassis import log, subjects
from chassis.api_keys import ApiKey
from chassis.bus import Bus
from chassis.errors import BusError, Code, Status, WrongSequence
from chassis.ids import BootId
from chassis.messages import BadMessage
from chassis.messages.gateway import Delta, Finished, GenerateEvent
from chassis.messages.quota import QuotaLedger, build_ledger, parse_ledger
from gateway.access.quota import OUTPUT_RESERVED, Need, Plan, Purse, Short

TRIES = 32
RETRY_MS = 500
TEND_S = 1.0
SLOT_WAIT_S = 0.1  # for a slot that another gateway is about to give back
NONE = Need()


@dataclass(slots=True)
class _Account:
    """Of one key. `lock` orders those who need the ledger; `seq` None: it is to be read."""

    purse: Purse
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ledger: QuotaLedger = field(default_factory=QuotaLedger)
    seq: int | None = None


class Hold:
    """What one request has reserved and used."""

    def __init__(self, purse: Purse | None, need: Need, since_ms: int, now_ms: Callable[[], int]) -> None:
        self._purse = purse
        self._reserved = need.tokens
        self._in_slot = need.slot or not need.requests
        if purse is not None:
            purse.outside += not self._in_slot
        self._since_ms = since_ms
        self._now_ms = now_ms
        self._used = 0  # tokens of output
        self._generated = 0
        self._accepted = False
        self._ends = 0

    def saw(self, event: GenerateEvent, prompt_tokens: int = 0) -> None:
        """Of the stream that is passed on."""
        purse = self._purse
        if purse is None:
            return
        if not self._accepted:
            self._accepted = True
            self._used += prompt_tokens
        match event:
            case Delta():
                self._use(len(event.ids), purse)
            case Finished():
                self._ends += 1
                if event.generated_tokens > self._generated:
                    told = max(0, self._used - prompt_tokens)
                    self._generated = event.generated_tokens
                    self._use(max(0, event.generated_tokens - told), purse)

    def _use(self, tokens: int, purse: Purse) -> None:
        before = max(self._used, self._reserved)
        self._used += tokens
        if self._used > before:
            purse.charge(self._used - before, self._now_ms())

    def end(self, goes_on: bool) -> None:
        """`goes_on`: it may run without anybody listening, so that its reservation is not given back."""
        purse = self._purse
        if purse is None:
            return
        if self._in_slot:
            purse.leave()
        else:
            purse.outside -= 1
        unused = self._reserved - self._used
        if unused > 0 and not (goes_on and self._accepted and not self._ends):
            purse.refund(unused, self._since_ms, self._now_ms())


class Quotas:
    def __init__(self, bus: Bus, boot: BootId, wall_ns: Callable[[], int]) -> None:
        self._bus = bus
        self._boot = boot
        self._wall_ns = wall_ns
        self._accounts: dict[str, _Account] = {}
        self._nudged = asyncio.Event()

    @asynccontextmanager
    async def hold(
        self, key_id: str, key: ApiKey | None, need: Need, *, goes_on: bool = False
    ) -> AsyncIterator[Hold]:
        """One request's part, while it runs. One that needs nothing runs unasked. Raises Status."""
        if key is None or not key.limited:
            yield Hold(None, need, 0, self._now_ms)
            return
        account = self._account(key_id, key)
        since_ms = self._now_ms()
        if need.requests:
            await self._take(key_id, account, need)
        else:
            account.purse.enter()
        hold = Hold(account.purse, need, since_ms, self._now_ms)
        try:
            yield hold
        finally:
            hold.end(goes_on)
            if account.purse.due(self._now_ms()):
                self._nudged.set()

    async def spend(self, key_id: str, key: ApiKey | None, need: Need) -> None:
        """What is not given back. Raises Status."""
        if key is not None and key.limited:
            await self._take(key_id, self._account(key_id, key), need)

    def check(self, key_id: str, key: ApiKey | None) -> None:
        """Refuses early what is known to be refused. Raises Status."""
        account = self._accounts.get(key_id)
        if account is not None and key is not None and not account.lock.locked():
            account.purse.key = key
            if short := account.purse.refused(Need(1, 1, slot=False), self._now_ms()):
                raise _status(short, Need(1, 1))

    async def run(self) -> None:
        """Tells debts, renews and gives back."""
        while True:
            try:
                async with asyncio.timeout(TEND_S):
                    await self._nudged.wait()
            except TimeoutError:
                pass
            self._nudged.clear()
            await self._tend(everything=False)

    async def give_back(self) -> None:
        """Before this gateway goes; what it cannot give back ends by itself."""
        await self._tend(everything=True)

    # ---- inside

    def _now_ms(self) -> int:
        return self._wall_ns() // 1_000_000

    def _account(self, key_id: str, key: ApiKey) -> _Account:
        account = self._accounts.get(key_id)
        if account is None:
            account = self._accounts[key_id] = _Account(Purse(self._boot, key))
        account.purse.key = key
        return account

    async def _take(self, key_id: str, account: _Account, need: Need) -> None:
        """Raises Status."""
        purse = account.purse
        if not account.lock.locked() and purse.take(need, self._now_ms()):
            return
        async with account.lock:
            waited = False
            while not purse.take(need, self._now_ms()):
                if not waited and (known := purse.refused(need, self._now_ms())):
                    raise _status(known, need)
                short = await self._write(key_id, account, partial(self._plan, purse, need))
                if short is None:
                    continue
                if short.limit != "concurrent_requests" or waited:
                    raise _status(short, need)
                waited = True
                await asyncio.sleep(SLOT_WAIT_S)

    def _plan(self, purse: Purse, need: Need, ledger: QuotaLedger) -> Plan | Short:
        return purse.plan(ledger, need, self._now_ms())

    async def _write(
        self, key_id: str, account: _Account, plan: Callable[[QuotaLedger], Plan | Short]
    ) -> Short | None:
        """Writes what `plan` makes of the ledger as it is. Raises Status."""
        subject = subjects.quota(key_id)
        try:
            for _ in range(TRIES):
                fresh = account.seq is None
                if fresh:
                    await self._read(subject, account)
                planned = plan(account.ledger)
                if isinstance(planned, Short):
                    account.seq = None  # whoever asks next sees what others gave back
                    if fresh:
                        return planned
                    continue
                expected, account.seq = account.seq, None
                try:
                    data = build_ledger(planned.ledger)
                    appended = await self._bus.append(subject, data, expected_seq=expected)
                except WrongSequence:
                    continue
                account.ledger, account.seq = planned.ledger, appended.seq
                account.purse.gain(planned, self._now_ms())
                return None
        except BusError as error:
            log.debug("quota ledger not reached", error=str(error))
        raise Status(Code.UNAVAILABLE, "quota: the ledger cannot be reached now", RETRY_MS)

    async def _read(self, subject: str, account: _Account) -> None:
        stored = await self._bus.last(subjects.QUOTAS, subject)
        account.ledger, account.seq = QuotaLedger(), stored.seq if stored is not None else 0
        if stored is not None:
            try:
                account.ledger = parse_ledger(stored.data)
            except BadMessage as error:
                log.warning("quota ledger is garbage: begun anew", error=str(error))

    async def _tend(self, everything: bool) -> None:
        for key_id, account in tuple(self._accounts.items()):
            purse = account.purse
            async with account.lock:
                try:
                    now_ms = self._now_ms()
                    if (everything or purse.idle(now_ms)) and not purse.empty:
                        await self._return(key_id, account)
                    elif purse.due(now_ms):
                        await self._write(key_id, account, partial(self._plan, purse, NONE))
                except Status:
                    continue  # with the next round
            if purse.empty and purse.idle(self._now_ms()) and not account.lock.locked():
                del self._accounts[key_id]

    async def _return(self, key_id: str, account: _Account) -> None:
        """Raises Status."""
        purse = account.purse
        rest = purse.empty_out(self._now_ms())
        try:
            await self._write(key_id, account, lambda ledger: purse.plan_return(ledger, rest, self._now_ms()))
        except Status:
            purse.keep_debts(rest, self._now_ms())
            raise


def cost(prompt_tokens: int, max_tokens: int, choices: int, slot: bool = True) -> Need:
    """Of a request that comes. `slot`: somebody waits for it, so it counts among those that run at once."""
    return Need(1, prompt_tokens + choices * min(max_tokens, OUTPUT_RESERVED), slot)


def _status(short: Short, need: Need) -> Status:
    if short.retry_ms is None:
        asked = need.tokens if short.limit.startswith("tokens") else need.requests
        message = f"{short.limit}: this request counts as {asked}; the key's quota is {short.allowed}"
        return Status(Code.RESOURCE_EXHAUSTED, message)
    message = f"{short.limit}: the key's quota of {short.allowed} is used up"
    return Status(Code.RESOURCE_EXHAUSTED, message, short.retry_ms)

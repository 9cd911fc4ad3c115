"""Pure. How much of its quotas a key has left here, and what to ask of the ledger that all gateways share.

A gateway spends only what the ledger has granted to it, so that requests a minute and requests at once are
never exceeded, however many gateways there are (at once: while each reaches the bus within `SHARE_MS`). It is
granted a slice at a time, a sixteenth of what is left: what one holds and does not use is missing to the
others until it is given back or the window ends. Windows are the clock's: any sixty seconds may see two
minutes' worth.

Tokens are reserved when a request comes: its prompt, and `OUTPUT_RESERVED` of each choice's output at most.
What is told beyond is charged as it is told, as a debt if need be; what was not used is given back. Admission
stops once a quota is used up; it is exceeded by no more than what requests that run then still tell.
"""

from dataclasses import dataclass, field, replace

from chassis.api_keys import ApiKey
from chassis.ids import BootId
from chassis.messages.quota import Meter, QuotaLedger, Share, Window

MINUTE_MS = 60_000
WINDOW_MS = {
    Meter.REQUESTS_PER_MINUTE: MINUTE_MS,
    Meter.TOKENS_PER_MINUTE: MINUTE_MS,
    Meter.TOKENS_PER_DAY: 24 * 60 * MINUTE_MS,
}
SLICES = 16
LOW = 4  # a slice is asked for again when less than one of so many parts of it is left
OUTPUT_RESERVED = 256
SHARE_MS = 30_000
RENEW_MS = 10_000
SLOT_RETRY_MS = 1_000
DRY_MS = 1_000  # how long a refusal is believed: others may give back
DRY_SLOTS_MS = 50
IDLE_MS = 10_000  # unused for so long, slices are given back
WINDOWS_KEPT = 3  # of each meter: clocks of gateways differ


@dataclass(frozen=True, slots=True)
class Need:
    requests: int = 0
    tokens: int = 0
    slot: bool = False

    def of(self, meter: Meter) -> int:
        return self.requests if meter is Meter.REQUESTS_PER_MINUTE else self.tokens


@dataclass(frozen=True, slots=True)
class Short:
    """`limit` is the one that does not allow it; `retry_ms` None: it never will."""

    limit: str
    allowed: int
    retry_ms: int | None


@dataclass(slots=True)
class Balance:
    """Of one meter: `left` is negative where more was used than granted."""

    number: int = -1
    left: int = 0
    slice: int = 0
    refused: int = 0  # so much was not there until `dry_until_ms`
    dry_until_ms: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A ledger to write, and what is ours once it is written."""

    ledger: QuotaLedger
    gains: tuple[tuple[Meter, int, int], ...]  # (meter, window, amount)
    slots: int
    until_ms: int


Rest = tuple[tuple[Meter, int, int], ...]  # (meter, window, amount)


@dataclass(slots=True)
class Purse:
    """Of one key at one gateway."""

    boot: BootId
    key: ApiKey
    balances: dict[Meter, Balance] = field(default_factory=dict)
    used: int = 0  # requests that run
    outside: int = 0  # that run and need no slot
    slots: int = 0  # how many may
    until_ms: int = 0
    slots_dry_until_ms: int = 0
    touched_ms: int = 0

    # ---- spending

    def take(self, need: Need, now_ms: int) -> bool:
        """Spends it if it is there."""
        self._turn(now_ms)
        if need.slot and self.key.concurrent_requests and not self._has_slot(now_ms):
            return False
        if any(self.balances[meter].left < need.of(meter) for meter in self._meters() if need.of(meter)):
            return False
        for meter in self._meters():
            self.balances[meter].left -= need.of(meter)
        self.touched_ms = now_ms
        self.used += need.slot
        return True

    def charge(self, tokens: int, now_ms: int) -> None:
        """What a request used beyond its reservation; negative: it gives back."""
        self._turn(now_ms)
        for meter in self._meters():
            if meter is not Meter.REQUESTS_PER_MINUTE:
                self.balances[meter].left -= tokens
        self.touched_ms = now_ms

    def refund(self, tokens: int, since_ms: int, now_ms: int) -> None:
        """Of a reservation made at `since_ms`, in windows that still last."""
        self._turn(now_ms)
        for meter in self._meters():
            if meter is not Meter.REQUESTS_PER_MINUTE and since_ms // WINDOW_MS[meter] == self._number(meter):
                self.balances[meter].left += tokens

    def enter(self) -> None:
        """Runs without being asked whether it may: it was, when it first came."""
        self.used += 1

    def leave(self) -> None:
        self.used -= 1
        assert self.used >= 0

    def refused(self, need: Need, now_ms: int) -> Short | None:
        """What is known not to be there, without asking the ledger."""
        self._turn(now_ms)
        for meter in self._meters():
            limit = self._limit(meter)
            if need.of(meter) > limit:
                return Short(meter.value, limit, None)
            balance = self.balances[meter]
            if now_ms < balance.dry_until_ms and need.of(meter) >= balance.refused > 0:
                return self._short(meter, now_ms)
        if need.slot and self.key.concurrent_requests and now_ms < self.slots_dry_until_ms:
            return Short("concurrent_requests", self.key.concurrent_requests, SLOT_RETRY_MS)
        return None

    # ---- the ledger

    def plan(self, ledger: QuotaLedger, need: Need, now_ms: int) -> Plan | Short:
        """What to write so that `need` can be taken; of none: so that debts are known and slots are ours."""
        self._turn(now_ms)
        gains, windows = [], list(ledger.windows)
        for meter in self._meters():
            amount = self._wanted(meter, _granted(windows, meter, self._number(meter)), need)
            if amount is None:
                balance = self.balances[meter]
                balance.refused, balance.dry_until_ms = need.of(meter), now_ms + DRY_MS
                return self._short(meter, now_ms)
            if amount:
                gains.append((meter, self._number(meter), amount))
                windows = _grant(windows, meter, self._number(meter), amount)
        slots = self._wanted_slots(ledger, need, now_ms)
        if slots is None:
            self.slots_dry_until_ms = now_ms + DRY_SLOTS_MS
            return Short("concurrent_requests", self.key.concurrent_requests, SLOT_RETRY_MS)
        return self._planned(ledger, windows, tuple(gains), slots, now_ms)

    def empty_out(self, now_ms: int) -> Rest:
        """All that is not used, and debts: nobody may spend it while that is being written."""
        self._turn(now_ms)
        rest = tuple((meter, self._number(meter), self.balances[meter].left) for meter in self._meters())
        for meter in self._meters():
            self.balances[meter].left = self.balances[meter].slice = 0
        return rest

    def plan_return(self, ledger: QuotaLedger, rest: Rest, now_ms: int) -> Plan:
        """What was emptied out goes back."""
        windows = list(ledger.windows)
        for meter, number, amount in rest:
            windows = _grant(windows, meter, number, -amount)
        return self._planned(ledger, windows, (), self.used, now_ms)

    def keep_debts(self, rest: Rest, now_ms: int) -> None:
        """It is not known to be written. What was left may be there for others by now, debts stay ours."""
        self._turn(now_ms)
        for meter, number, amount in rest:
            if amount < 0 and number == self._number(meter):
                self.balances[meter].left += amount

    def _planned(
        self,
        ledger: QuotaLedger,
        windows: list[Window],
        gains: tuple[tuple[Meter, int, int], ...],
        slots: int,
        now_ms: int,
    ) -> Plan:
        shares = tuple(s for s in ledger.shares if s.boot != self.boot and s.until_ms > now_ms)
        until_ms = now_ms + SHARE_MS
        self.slots = min(self.slots, slots)  # nobody's from now on; what comes is ours once it is written
        if slots and self.key.concurrent_requests:
            shares += (Share(self.boot, slots, until_ms),)
        return Plan(QuotaLedger(tuple(windows), shares), gains, slots, until_ms)

    def gain(self, plan: Plan, now_ms: int) -> None:
        """It is written."""
        self._turn(now_ms)
        for meter, number, amount in plan.gains:
            if (balance := self.balances.get(meter)) is not None and balance.number == number:
                balance.left += amount
                balance.slice, balance.dry_until_ms = max(balance.left, 0), 0
        self.slots_dry_until_ms = 0
        self.slots, self.until_ms = plan.slots, plan.until_ms

    # ---- what is due without a request

    def due(self, now_ms: int) -> bool:
        """Debts to tell, slots to renew or to give back, or a slice that runs out."""
        self._turn(now_ms)
        if self.key.concurrent_requests:
            if self.slots > self.used + self._spare or self.used > self.slots:
                return True
            if self.slots and self.until_ms - now_ms < SHARE_MS - RENEW_MS:
                return True
        return any(
            (balance := self.balances[meter]).left < 0
            or (balance.left < balance.slice // LOW and now_ms >= balance.dry_until_ms)
            for meter in self._meters()
        )

    def idle(self, now_ms: int) -> bool:
        """Nothing runs, and nothing came for a while: what is left goes back."""
        return not self.used and not self.outside and now_ms - self.touched_ms > IDLE_MS

    @property
    def empty(self) -> bool:
        left = any(self.balances[meter].left for meter in self._meters() if meter in self.balances)
        return not self.used and not self.outside and not self.slots and not left

    # ---- inside

    @property
    def _spare(self) -> int:
        """Slots that are kept although nobody uses them."""
        return self.key.concurrent_requests // SLICES

    def _has_slot(self, now_ms: int) -> bool:
        return self.used < self.slots and now_ms < self.until_ms

    def _meters(self) -> tuple[Meter, ...]:
        """Those that this key limits."""
        return tuple(meter for meter in Meter if self._limit(meter))

    def _limit(self, meter: Meter) -> int:
        limit: int = getattr(self.key, meter.value)
        return limit

    def _number(self, meter: Meter) -> int:
        return self.balances[meter].number

    def _turn(self, now_ms: int) -> None:
        """What was granted of a window that is over is worth nothing, and so are its debts."""
        for meter in self._meters():
            number = now_ms // WINDOW_MS[meter]
            if (balance := self.balances.get(meter)) is None or balance.number != number:
                self.balances[meter] = Balance(number)

    def _short(self, meter: Meter, now_ms: int) -> Short:
        left_ms = WINDOW_MS[meter] - now_ms % WINDOW_MS[meter]
        return Short(meter.value, self._limit(meter), left_ms)

    def _wanted(self, meter: Meter, granted: int, need: Need) -> int | None:
        """How much more to be granted; None: it is not there. Debts are granted in any case."""
        balance = self.balances[meter]
        debt = max(0, -balance.left)
        rest = max(0, self._limit(meter) - granted - debt)
        missing = max(0, need.of(meter) - max(0, balance.left))
        if need.of(meter) and missing > rest:
            return None
        low = balance.left - need.of(meter) < balance.slice // LOW or missing > 0
        if low and not rest:
            balance.slice = 0  # nothing more will come
        return debt + (min(rest, max(missing, -(-rest // SLICES))) if low else 0)

    def _wanted_slots(self, ledger: QuotaLedger, need: Need, now_ms: int) -> int | None:
        """How many to hold; None: there is none for the one that came."""
        limit = self.key.concurrent_requests
        if not limit:
            return 0
        others = sum(s.slots for s in ledger.shares if s.boot != self.boot and s.until_ms > now_ms)
        wanted = self.used + need.slot
        if need.slot and wanted > limit - others:
            return None
        # what runs is ours, also where there is no room for it
        return max(wanted, min(wanted + self._spare, limit - others)) if wanted else 0


def _granted(windows: list[Window], meter: Meter, number: int) -> int:
    return sum(w.granted for w in windows if w.meter is meter and w.number == number)


def _grant(windows: list[Window], meter: Meter, number: int, amount: int) -> list[Window]:
    """The windows with so much more granted; the oldest of a meter are forgotten."""
    of_others = [w for w in windows if w.meter is not meter]
    mine = {w.number: w for w in windows if w.meter is meter}
    window = mine.get(number, Window(meter, number, 0))
    mine[number] = replace(window, granted=max(0, window.granted + amount))
    kept = sorted(mine, reverse=True)[:WINDOWS_KEPT]
    if number not in kept:
        kept[-1] = number
    return [*of_others, *(mine[n] for n in sorted(kept))]

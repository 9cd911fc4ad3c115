"""Pure. What all gateways together have granted to one API key."""

from dataclasses import dataclass
from enum import Enum

from chassis.ids import BootId
from chassis.messages import check, check_id, parse
from chassis.wire import quota_pb2 as pb

WINDOWS_MAX = 32
SHARES_MAX = 1024


class Meter(Enum):
    """What is limited per window; the value is the limit's name in a key."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"


_NUMBERS = {
    Meter.REQUESTS_PER_MINUTE: pb.QUOTA_METER_REQUESTS_PER_MINUTE,
    Meter.TOKENS_PER_MINUTE: pb.QUOTA_METER_TOKENS_PER_MINUTE,
    Meter.TOKENS_PER_DAY: pb.QUOTA_METER_TOKENS_PER_DAY,
}
_METERS = {number: meter for meter, number in _NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Window:
    meter: Meter
    number: int
    granted: int


@dataclass(frozen=True, slots=True)
class Share:
    boot: BootId
    slots: int
    until_ms: int  # wall clock


@dataclass(frozen=True, slots=True)
class QuotaLedger:
    windows: tuple[Window, ...] = ()
    shares: tuple[Share, ...] = ()


def build_ledger(ledger: QuotaLedger) -> bytes:
    return pb.QuotaLedger(
        windows=[
            pb.QuotaWindow(meter=_NUMBERS[w.meter], number=w.number, granted=w.granted)
            for w in ledger.windows
        ],
        shares=[pb.QuotaShare(boot=s.boot, slots=s.slots, until_ms=s.until_ms) for s in ledger.shares],
    ).SerializeToString()


def parse_ledger(data: bytes) -> QuotaLedger:
    """Raises BadMessage."""
    m = parse(pb.QuotaLedger, data)
    check(len(m.windows) <= WINDOWS_MAX, f"windows: {len(m.windows)}; at most {WINDOWS_MAX}")
    check(len(m.shares) <= SHARES_MAX, f"shares: {len(m.shares)}; at most {SHARES_MAX}")
    for window in m.windows:
        check(window.meter in _METERS, f"windows: no such meter: {window.meter}")
    for share in m.shares:
        check_id(share.boot, "shares: boot")
    return QuotaLedger(
        tuple(Window(_METERS[w.meter], w.number, w.granted) for w in m.windows),
        tuple(Share(BootId(s.boot), s.slots, s.until_ms) for s in m.shares),
    )

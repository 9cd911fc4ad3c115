"""The last record of a request's ownership log, whatever strangers wrote into it.

Garbage says nothing, but it has a sequence, which the next writer must name. A log of nothing else is that of
a request that somebody wants gone: it counts as cancelled, so that it comes to an end.
"""

from chassis import log, subjects
from chassis.bus import Bus
from chassis.ids import Attempt, BootId, RequestId
from chassis.messages import BadMessage
from chassis.messages.request import Cancel, Record, parse_record

HISTORY_LEN_MAX = 256


async def last_record(bus: Bus, request_id: RequestId, timeout_s: float) -> tuple[Record | None, int]:
    """The last record that can be read, and the sequence of the log's last message; (None, 0) without one.

    Raises BusError.
    """
    subject = subjects.result(request_id)
    stored = await bus.last(subjects.RESULTS, subject, timeout_s)
    if stored is None:
        return None, 0
    record = _readable(stored.data)
    if record is not None:
        return record, stored.seq
    log.warning("garbage in an ownership log", request_id=request_id, seq=stored.seq)
    seq = stored.seq
    for earlier in await bus.read(subjects.RESULTS, subject, 1, HISTORY_LEN_MAX):
        seq = max(seq, earlier.seq)
        record = _readable(earlier.data) or record
    return record or Cancel(Attempt(0), BootId(""), "garbage in its log"), seq


def _readable(data: bytes) -> Record | None:
    try:
        return parse_record(data)
    except BadMessage:
        return None

"""Receipts of a deployment, held against its ownership logs."""

from chassis import subjects, usage_subjects
from chassis.bus import Bus
from chassis.ids import RequestId
from chassis.messages.request import Terminal, parse_record
from chassis.messages.usage import Receipt, parse_receipt, receipt_of
from tests.e2e.rig import until


async def checked_receipts(bus: Bus) -> dict[RequestId, Receipt]:
    """Of all requests, once all are acknowledged: one for each that ended, saying what its record says."""

    async def idle() -> bool:
        return not await bus.read(subjects.REQUESTS, "shoal.req.>", 1, 1)

    await until(idle, "everything is acknowledged")
    written: dict[RequestId, Receipt] = {}
    async for stored in bus.scan(subjects.USAGE, usage_subjects.receipts()):
        receipt = parse_receipt(stored.data)
        assert receipt.request_id not in written, "two receipts of one request"
        assert stored.subject == usage_subjects.receipt(receipt.tenant, receipt.model, receipt.request_id)
        written[receipt.request_id] = receipt
    ends: dict[RequestId, Receipt] = {}
    async for stored in bus.scan(subjects.RESULTS, "shoal.res.*"):
        record = parse_record(stored.data)
        if isinstance(record, Terminal):
            request_id = RequestId(stored.subject.rpartition(".")[2])
            ends[request_id] = receipt_of(request_id, record)
    assert written == ends
    return written

"""Receipts: what a request used, as its terminal record says. `proto/usage.proto` explains each field."""

from dataclasses import dataclass

from chassis.ids import RequestId
from chassis.messages import check, parse
from chassis.messages.request import Reason, Terminal, Timings, Usage, parse_reason
from chassis.wire import usage_pb2 as pb

TIME_MS_MAX = 253_402_300_799_999
STAGES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Receipt:
    request_id: RequestId
    call_id: str  # the same for all choices of one call
    choice: int
    tenant: str
    key: str
    model: str
    priority: int
    reason: Reason
    accepted_ms: int
    ended_ms: int
    usage: Usage
    timings: Timings
    attempts: int
    worker_deaths: int
    batcher_deaths: int


def receipt_of(request_id: RequestId, end: Terminal) -> Receipt:
    """Of nothing but the record: whoever reads that writes the same."""
    return Receipt(
        request_id=request_id,
        call_id=request_id.removesuffix(f"c{end.choice}") if end.choice else request_id,
        choice=end.choice,
        tenant=end.tenant,
        key=end.key,
        model=end.model,
        priority=end.priority,
        reason=end.reason,
        accepted_ms=end.accepted_ms,
        ended_ms=end.accepted_ms + end.timings.total_us // 1000,
        usage=end.usage,
        timings=end.timings,
        attempts=end.attempt,
        worker_deaths=end.worker_deaths,
        batcher_deaths=end.batcher_deaths,
    )


def build_receipt(r: Receipt) -> bytes:
    u, t = r.usage, r.timings
    return pb.Receipt(
        request_id=r.request_id,
        call_id=r.call_id,
        choice=r.choice,
        tenant=r.tenant,
        key=r.key,
        model=r.model,
        priority=r.priority,
        reason=r.reason.value,
        accepted_ms=r.accepted_ms,
        ended_ms=r.ended_ms,
        prompt_tokens=u.prompt_tokens,
        cached_tokens=u.cached_tokens,
        output_tokens=u.output_tokens,
        recomputed_tokens=t.recomputed_tokens,
        queued_us=t.queued_us,
        waiting_us=t.waiting_us,
        prefill_us=t.prefill_us,
        decode_us=t.decode_us,
        interrupted_us=t.interrupted_us,
        stage_compute_us=t.stage_compute_us,
        attempts=r.attempts,
        worker_deaths=r.worker_deaths,
        batcher_deaths=r.batcher_deaths,
        preemptions=t.preemptions,
    ).SerializeToString()


def parse_receipt(data: bytes) -> Receipt:
    m = parse(pb.Receipt, data)
    check(bool(m.request_id), "request_id: missing")
    check(m.ended_ms <= TIME_MS_MAX and m.accepted_ms <= TIME_MS_MAX, "ended_ms: beyond the year 9999")
    check(len(m.stage_compute_us) <= STAGES_MAX, f"stage_compute_us: at most {STAGES_MAX}")
    return Receipt(
        request_id=RequestId(m.request_id),
        call_id=m.call_id,
        choice=m.choice,
        tenant=m.tenant,
        key=m.key,
        model=m.model,
        priority=m.priority,
        reason=parse_reason(m.reason),
        accepted_ms=m.accepted_ms,
        ended_ms=m.ended_ms,
        usage=Usage(m.prompt_tokens, m.cached_tokens, m.output_tokens),
        timings=Timings(
            m.queued_us,
            m.waiting_us,
            m.prefill_us,
            m.decode_us,
            m.interrupted_us,
            m.preemptions,
            m.recomputed_tokens,
            tuple(m.stage_compute_us),
        ),
        attempts=m.attempts,
        worker_deaths=m.worker_deaths,
        batcher_deaths=m.batcher_deaths,
    )

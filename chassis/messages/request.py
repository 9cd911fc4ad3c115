"""Requests, the records of the ownership log, and what gateways and batchers say to each other.

The value types are what cores work with; `build_*` and `parse_*` are the only code that sees protobuf.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple

from chassis.ids import Attempt, BootId, GatewayId, RequestId
from chassis.messages import BadMessage, check, check_id, parse
from chassis.wire import request_pb2 as pb

IDS_MAX = 1 << 20
_ACK_TOKEN = re.compile(r"[\x21-\x7e]{1,1000}")  # where an answer is published


class Reason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off


@dataclass(frozen=True, slots=True)
class Limits:
    max_tokens: int
    min_tokens: int = 0
    stop: tuple[bytes, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    id: RequestId
    tenant: str
    gateway: GatewayId
    model: str
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    limits: Limits
    timeout_ms: int = 0  # counted from the broker's timestamp; 0 = none
    resume_window_ms: int = 0
    priority: int = 5
    body_digest: bytes = b""
    keyed: bool = False
    trace_parent: bytes = b""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Rows of the ledger in microseconds; they sum to broker timestamp until terminal record."""

    queued_us: int = 0
    waiting_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    interrupted_us: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    attempt: Attempt
    boot: BootId
    body_digest: bytes = b""
    worker_deaths: int = 0
    batcher_deaths: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """`attempt` and `boot` of the record it follows; 0 and empty if it follows none."""

    attempt: Attempt
    boot: BootId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Terminal:
    attempt: Attempt
    boot: BootId
    reason: Reason
    output_ids: tuple[int, ...]
    byte_cut: int | None = None  # bytes of output text that stay
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    error: str = ""
    tenant: str = ""
    body_digest: bytes = b""
    model: str = ""  # whose tokens these are
    stop: tuple[bytes, ...] = ()  # the request's, so that its text can be told without it


Record = Claim | Cancel | Terminal


class Part(NamedTuple):
    """A tuple: one is made per stream and step."""

    request_id: RequestId
    attempt: Attempt
    first_index: int
    ids: tuple[int, ...]
    digest: int  # of all output ids up to and with these


@dataclass(frozen=True, slots=True)
class Finish:
    request_id: RequestId
    attempt: Attempt
    length: int
    digest: int
    reason: Reason
    byte_cut: int | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    boot: BootId
    number: int
    parts: tuple[Part, ...]
    finishes: tuple[Finish, ...]


@dataclass(frozen=True, slots=True)
class TakeoverQuestion:
    request_id: RequestId
    attempt: Attempt
    boot: BootId


@dataclass(frozen=True, slots=True)
class OwnerQuestion:
    request_id: RequestId
    attempt: Attempt
    ack_token: str
    cancelled: bool


@dataclass(frozen=True, slots=True)
class TakeoverAnswer:
    """`ids` (yes) or `minimum` (no); exactly one is not None."""

    request_id: RequestId
    gateway: GatewayId
    attempt: Attempt  # of the question
    ids: tuple[int, ...] | None
    minimum: Attempt | None


@dataclass(frozen=True, slots=True)
class Attach:
    request_id: RequestId
    attempt: Attempt
    gateway: GatewayId
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelAsk:
    request_id: RequestId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Detached:
    request_id: RequestId
    gateway: GatewayId


@dataclass(frozen=True, slots=True)
class Refused:
    """A gateway's word on a part: `minimum` (old), `differs` (the ids it holds) or neither (unknown)."""

    request_id: RequestId
    gateway: GatewayId
    attempt: Attempt  # of the part
    minimum: Attempt | None = None
    differs: tuple[int, ...] | None = None


ToBatcher = OwnerQuestion | TakeoverAnswer | Attach | CancelAsk | Detached | Refused


class AttachKind(Enum):
    ATTACHED = "attached"
    UNKNOWN = "unknown"
    DIVERGED = "diverged"


# ---- running digest of output ids ------------------------------------------------------------------

EMPTY_DIGEST = 0
_DIGESTED = struct.Struct("<QI").pack  # digest so far, id


def extend_digest(digest: int, ids: Iterable[int]) -> int:
    """Running 64-bit digest of output ids: BLAKE2b-64 over (digest so far, id), one id at a time."""
    state = digest
    for token_id in ids:
        data = _DIGESTED(state, token_id)
        state = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return state


# ---- build and parse -------------------------------------------------------------------------------


def build_request(r: Request) -> bytes:
    s, n = r.sampling, r.limits
    return pb.Request(
        id=r.id,
        tenant=r.tenant,
        gateway=r.gateway,
        model=r.model,
        prompt_ids=r.prompt_ids,
        seed=r.seed,
        sampling=build_sampling(s),
        limits=pb.Limits(
            max_tokens=n.max_tokens,
            min_tokens=n.min_tokens,
            stop=n.stop,
            stop_token_ids=n.stop_token_ids,
            ignore_eos=n.ignore_eos,
        ),
        timeout_ms=r.timeout_ms,
        resume_window_ms=r.resume_window_ms,
        priority=r.priority,
        body_digest=r.body_digest,
        keyed=r.keyed,
        trace_parent=r.trace_parent,
    ).SerializeToString()


def parse_request(data: bytes) -> Request:
    """Checks what the cores rely on; ranges that users see are the gateway's to check."""
    m = parse(pb.Request, data)
    check(0 < len(m.id) <= 64 and m.id.isalnum(), "request id: 1 to 64 letters and digits")
    check_id(m.gateway, "gateway")
    check(bool(m.model), "model: missing")
    check(0 < len(m.prompt_ids) <= IDS_MAX, f"prompt_ids: 1 to {IDS_MAX}")
    check(m.limits.max_tokens > 0, "max_tokens: at least 1")
    check(m.limits.min_tokens <= m.limits.max_tokens, "min_tokens: at most max_tokens")
    check(all(m.limits.stop), "stop: empty string")
    check(m.priority <= 9, "priority: 0 to 9")
    check(m.sampling.temperature >= 0 and 0 < m.sampling.top_p <= 1, "sampling: out of range")
    return Request(
        id=RequestId(m.id),
        tenant=m.tenant,
        gateway=GatewayId(m.gateway),
        model=m.model,
        prompt_ids=tuple(m.prompt_ids),
        seed=m.seed,
        sampling=parse_sampling(m.sampling),
        limits=Limits(
            max_tokens=m.limits.max_tokens,
            min_tokens=m.limits.min_tokens,
            stop=tuple(m.limits.stop),
            stop_token_ids=tuple(m.limits.stop_token_ids),
            ignore_eos=m.limits.ignore_eos,
        ),
        timeout_ms=m.timeout_ms,
        resume_window_ms=m.resume_window_ms,
        priority=m.priority,
        body_digest=m.body_digest,
        keyed=m.keyed,
        trace_parent=m.trace_parent,
    )


def build_sampling(s: Sampling) -> pb.Sampling:
    return pb.Sampling(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p)


def parse_sampling(m: pb.Sampling) -> Sampling:
    return Sampling(temperature=m.temperature, top_k=m.top_k, top_p=m.top_p)


def _usage(u: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=u.prompt_tokens, cached_tokens=u.cached_tokens, output_tokens=u.output_tokens
    )


def _timings(t: Timings) -> pb.Timings:
    return pb.Timings(
        queued_us=t.queued_us,
        waiting_us=t.waiting_us,
        prefill_us=t.prefill_us,
        decode_us=t.decode_us,
        interrupted_us=t.interrupted_us,
        preemptions=t.preemptions,
        recomputed_tokens=t.recomputed_tokens,
    )


def _parse_usage(m: pb.Usage) -> Usage:
    return Usage(m.prompt_tokens, m.cached_tokens, m.output_tokens)


def _parse_timings(m: pb.Timings) -> Timings:
    return Timings(
        m.queued_us,
        m.waiting_us,
        m.prefill_us,
        m.decode_us,
        m.interrupted_us,
        m.preemptions,
        m.recomputed_tokens,
    )


def _parse_reason(name: str) -> Reason:
    try:
        return Reason(name)
    except ValueError:
        raise BadMessage(f"reason: {name!r} is unknown") from None


def build_record(record: Record) -> bytes:
    match record:
        case Claim():
            m = pb.Record(
                claim=pb.Claim(
                    attempt=record.attempt,
                    boot=record.boot,
                    body_digest=record.body_digest,
                    worker_deaths=record.worker_deaths,
                    batcher_deaths=record.batcher_deaths,
                )
            )
        case Cancel():
            m = pb.Record(
                cancel=pb.CancelMark(attempt=record.attempt, boot=record.boot, reason=record.reason)
            )
        case Terminal():
            m = pb.Record(
                terminal=pb.Terminal(
                    attempt=record.attempt,
                    boot=record.boot,
                    reason=record.reason.value,
                    output_ids=record.output_ids,
                    byte_cut=record.byte_cut,
                    usage=_usage(record.usage),
                    timings=_timings(record.timings),
                    error=record.error,
                    tenant=record.tenant,
                    body_digest=record.body_digest,
                    model=record.model,
                    stop=record.stop,
                )
            )
    return m.SerializeToString()


def parse_record(data: bytes) -> Record:
    m = parse(pb.Record, data)
    match m.WhichOneof("kind"):
        case "claim":
            c = m.claim
            check(c.attempt > 0, "claim: attempt")
            check_id(c.boot, "claim: boot")
            return Claim(Attempt(c.attempt), BootId(c.boot), c.body_digest, c.worker_deaths, c.batcher_deaths)
        case "cancel":
            if m.cancel.boot:
                check_id(m.cancel.boot, "cancel: boot")
            return Cancel(Attempt(m.cancel.attempt), BootId(m.cancel.boot), m.cancel.reason)
        case "terminal":
            t = m.terminal
            return Terminal(
                attempt=Attempt(t.attempt),
                boot=BootId(t.boot),
                reason=_parse_reason(t.reason),
                output_ids=tuple(t.output_ids),
                byte_cut=t.byte_cut if t.HasField("byte_cut") else None,
                usage=_parse_usage(t.usage),
                timings=_parse_timings(t.timings),
                error=t.error,
                tenant=t.tenant,
                body_digest=t.body_digest,
                model=t.model,
                stop=tuple(t.stop),
            )
        case _:
            raise BadMessage("record: no kind")


def build_chunk(chunk: Chunk) -> bytes:
    return pb.Chunk(
        boot=chunk.boot,
        number=chunk.number,
        parts=_parts(chunk.parts) if chunk.parts else None,
        finishes=[
            pb.Finish(
                request_id=f.request_id,
                attempt=f.attempt,
                length=f.length,
                digest=f.digest,
                reason=f.reason.value,
                byte_cut=f.byte_cut,
                usage=_usage(f.usage),
                timings=_timings(f.timings),
                error=f.error,
            )
            for f in chunk.finishes
        ],
    ).SerializeToString()


def _parts(parts: Sequence[Part]) -> pb.Parts:
    request_ids, attempts, first_indices, ids, digests = zip(*parts, strict=True)
    return pb.Parts(
        request_ids=request_ids,
        attempts=attempts,
        first_indices=first_indices,
        lens=list(map(len, ids)),
        ids=list(chain.from_iterable(ids)),
        digests=digests,
    )


def _parse_parts(m: pb.Parts) -> Iterator[Part]:
    ids, lens = tuple(m.ids), m.lens
    n = len(lens)
    whole = n == len(m.request_ids) == len(m.attempts) == len(m.first_indices) == len(m.digests)
    check(whole and sum(lens) == len(ids), "parts: columns do not add up")
    end = 0
    columns = zip(m.request_ids, m.attempts, m.first_indices, lens, m.digests, strict=True)
    for request_id, attempt, first_index, length, digest in columns:
        begin, end = end, end + length
        yield Part(RequestId(request_id), Attempt(attempt), first_index, ids[begin:end], digest)


def parse_chunk(data: bytes) -> Chunk:
    m = parse(pb.Chunk, data)
    check_id(m.boot, "chunk: boot")
    check(m.number > 0, "chunk: number")
    return Chunk(
        boot=BootId(m.boot),
        number=m.number,
        parts=tuple(_parse_parts(m.parts)),
        finishes=tuple(
            Finish(
                RequestId(f.request_id),
                Attempt(f.attempt),
                f.length,
                f.digest,
                _parse_reason(f.reason),
                f.byte_cut if f.HasField("byte_cut") else None,
                _parse_usage(f.usage),
                _parse_timings(f.timings),
                f.error,
            )
            for f in m.finishes
        ),
    )


def build_takeover_question(q: TakeoverQuestion) -> bytes:
    return pb.TakeoverQuestion(request_id=q.request_id, attempt=q.attempt, boot=q.boot).SerializeToString()


def parse_takeover_question(data: bytes) -> TakeoverQuestion:
    m = parse(pb.TakeoverQuestion, data)
    check(bool(m.request_id) and m.attempt > 0, "takeover question: incomplete")
    check_id(m.boot, "takeover question: boot")
    return TakeoverQuestion(RequestId(m.request_id), Attempt(m.attempt), BootId(m.boot))


def build_to_batcher(message: ToBatcher) -> bytes:
    m = pb.ToBatcher()
    match message:
        case OwnerQuestion(request_id, attempt, ack_token, cancelled):
            m.owner.CopyFrom(
                pb.OwnerQuestion(
                    request_id=request_id, attempt=attempt, ack_token=ack_token, cancelled=cancelled
                )
            )
        case TakeoverAnswer(request_id, gateway, attempt, ids, minimum):
            answer = pb.TakeoverAnswer(request_id=request_id, gateway=gateway, attempt=attempt)
            if ids is not None:
                answer.yes.ids.extend(ids)
                answer.yes.SetInParent()
            else:
                answer.no_minimum = minimum or 0
            m.takeover.CopyFrom(answer)
        case Attach(request_id, attempt, gateway, held):
            m.attach.CopyFrom(
                pb.Attach(request_id=request_id, attempt=attempt, gateway=gateway, held=pb.Ids(ids=held))
            )
        case CancelAsk(request_id, reason):
            m.cancel.CopyFrom(pb.CancelAsk(request_id=request_id, reason=reason))
        case Detached(request_id, gateway):
            m.detached.CopyFrom(pb.Detached(request_id=request_id, gateway=gateway))
        case Refused(request_id, gateway, attempt, minimum, differs):
            refused = pb.Refused(request_id=request_id, gateway=gateway, attempt=attempt)
            if minimum is not None:
                refused.old_minimum = minimum
            elif differs is not None:
                refused.differs.ids.extend(differs)
                refused.differs.SetInParent()
            else:
                refused.unknown = True
            m.refused.CopyFrom(refused)
    return m.SerializeToString()


def parse_to_batcher(data: bytes) -> ToBatcher:
    m = parse(pb.ToBatcher, data)
    match m.WhichOneof("kind"):
        case "owner":
            o = m.owner
            check(_ACK_TOKEN.fullmatch(o.ack_token) is not None, "owner question: ack token")
            return OwnerQuestion(RequestId(o.request_id), Attempt(o.attempt), o.ack_token, o.cancelled)
        case "takeover":
            return _parse_takeover_answer(m.takeover)
        case "attach":
            a = m.attach
            check_id(a.gateway, "attach: gateway")
            return Attach(
                RequestId(a.request_id), Attempt(a.attempt), GatewayId(a.gateway), tuple(a.held.ids)
            )
        case "cancel":
            return CancelAsk(RequestId(m.cancel.request_id), m.cancel.reason)
        case "detached":
            check_id(m.detached.gateway, "detached: gateway")
            return Detached(RequestId(m.detached.request_id), GatewayId(m.detached.gateway))
        case "refused":
            return _parse_refused(m.refused)
        case _:
            raise BadMessage("to batcher: no kind")


def _parse_takeover_answer(t: pb.TakeoverAnswer) -> TakeoverAnswer:
    check_id(t.gateway, "takeover answer: gateway")
    which = t.WhichOneof("answer")
    check(which is not None, "takeover answer: neither yes nor no")
    yes = which == "yes"
    return TakeoverAnswer(
        RequestId(t.request_id),
        GatewayId(t.gateway),
        Attempt(t.attempt),
        tuple(t.yes.ids) if yes else None,
        None if yes else Attempt(t.no_minimum),
    )


def _parse_refused(r: pb.Refused) -> Refused:
    check_id(r.gateway, "refused: gateway")
    which = r.WhichOneof("why")
    return Refused(
        RequestId(r.request_id),
        GatewayId(r.gateway),
        Attempt(r.attempt),
        minimum=Attempt(r.old_minimum) if which == "old_minimum" else None,
        differs=tuple(r.differs.ids) if which == "differs" else None,
    )


def build_owner_answer(mine: bool) -> bytes:
    return pb.OwnerAnswer(mine=mine).SerializeToString()


def parse_owner_answer(data: bytes) -> bool:
    return parse(pb.OwnerAnswer, data).mine


def build_attach_answer(kind: AttachKind) -> bytes:
    return pb.AttachAnswer(kind=kind.value).SerializeToString()


def parse_attach_answer(data: bytes) -> AttachKind:
    try:
        return AttachKind(parse(pb.AttachAnswer, data).kind)
    except ValueError:
        raise BadMessage("attach answer: unknown kind") from None


def longest(texts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest of several answers; the first of equals."""
    return max(texts, key=len, default=())

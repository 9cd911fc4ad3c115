"""Requests, and the records of their ownership logs: what streams hold.

The value types are what cores work with; `build_*` and `parse_*` are the only code that sees protobuf.
"""

from dataclasses import dataclass, field
from enum import Enum

from chassis.ids import Attempt, BootId, GatewayId, RequestId
from chassis.messages import BadMessage, check, check_id, parse
from chassis.messages.sampling import (
    PROMPT_LOGPROBS_MAX,
    PromptTold,
    TokenLogprobs,
    build_logprobs,
    build_prompt_told,
    build_sampling,
    parse_logprobs,
    parse_prompt_told,
    parse_sampling,
    prompt_entries,
)
from chassis.messages.sampling import Sampling as Sampling
from chassis.wire import request_pb2 as pb

IDS_MAX = 1 << 20
PROMPT_ERROR = "prompt: "  # begins what is said of one that no pool of its pipeline has room for


class Reason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"
    REFUSED = "refused"  # by a queue policy; nothing was computed


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
    stream_interval: int = 0  # output ids of a part at least, but of the first and the last
    queue_timeout_us: int = 0  # how long it may wait for its place; 0: as the queue policy says
    key: str = ""  # name of the API key it came with
    choice: int = 0  # of a call for several


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
    stage_compute_us: tuple[int, ...] = ()  # no row: its share of what each stage computed

    @property
    def total_us(self) -> int:
        return self.queued_us + self.waiting_us + self.prefill_us + self.decode_us + self.interrupted_us


@dataclass(frozen=True, slots=True)
class Claim:
    attempt: Attempt
    boot: BootId
    body_digest: bytes = b""
    worker_deaths: int = 0
    batcher_deaths: int = 0
    left: bool = False  # its owner drained; written over its own claim


@dataclass(frozen=True, slots=True)
class Cancel:
    """`attempt` and `boot` of the record it follows; 0 and empty if it follows none."""

    attempt: Attempt
    boot: BootId
    reason: str = ""

    @property
    def follows_none(self) -> bool:
        """Then nobody ever begins the request."""
        return not self.boot


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
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the first output ids, up to a limit
    prompt: PromptTold | None = None  # if the request asks for it
    retry_ms: int = 0  # when a retry may help, of what was refused
    # what else its receipt says
    key: str = ""
    priority: int = 0
    choice: int = 0
    accepted_ms: int = 0  # the broker's timestamp; 0: not known
    worker_deaths: int = 0
    batcher_deaths: int = 0


Record = Claim | Cancel | Terminal


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
        stream_interval=r.stream_interval,
        queue_timeout_us=r.queue_timeout_us,
        key=r.key,
        choice=r.choice,
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
    if m.sampling.HasField("prompt_logprobs"):
        entries = prompt_entries(len(m.prompt_ids), m.sampling.prompt_logprobs)
        check(entries <= PROMPT_LOGPROBS_MAX, f"prompt_logprobs: {entries} entries")
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
        stream_interval=m.stream_interval,
        queue_timeout_us=m.queue_timeout_us,
        key=m.key,
        choice=m.choice,
    )


def build_usage(u: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=u.prompt_tokens, cached_tokens=u.cached_tokens, output_tokens=u.output_tokens
    )


def build_timings(t: Timings) -> pb.Timings:
    return pb.Timings(
        queued_us=t.queued_us,
        waiting_us=t.waiting_us,
        prefill_us=t.prefill_us,
        decode_us=t.decode_us,
        interrupted_us=t.interrupted_us,
        preemptions=t.preemptions,
        recomputed_tokens=t.recomputed_tokens,
        stage_compute_us=t.stage_compute_us,
    )


def parse_usage(m: pb.Usage) -> Usage:
    return Usage(m.prompt_tokens, m.cached_tokens, m.output_tokens)


def parse_timings(m: pb.Timings) -> Timings:
    return Timings(
        m.queued_us,
        m.waiting_us,
        m.prefill_us,
        m.decode_us,
        m.interrupted_us,
        m.preemptions,
        m.recomputed_tokens,
        tuple(m.stage_compute_us),
    )


def parse_reason(name: str) -> Reason:
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
                    left=record.left,
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
                    usage=build_usage(record.usage),
                    timings=build_timings(record.timings),
                    error=record.error,
                    tenant=record.tenant,
                    body_digest=record.body_digest,
                    model=record.model,
                    stop=record.stop,
                    logprobs=build_logprobs(record.logprobs),
                    prompt=build_prompt_told(record.prompt) if record.prompt is not None else None,
                    retry_ms=record.retry_ms,
                    key=record.key,
                    priority=record.priority,
                    choice=record.choice,
                    accepted_ms=record.accepted_ms,
                    worker_deaths=record.worker_deaths,
                    batcher_deaths=record.batcher_deaths,
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
            deaths = c.worker_deaths, c.batcher_deaths
            return Claim(Attempt(c.attempt), BootId(c.boot), c.body_digest, *deaths, c.left)
        case "cancel":
            if m.cancel.boot:
                check_id(m.cancel.boot, "cancel: boot")
            return Cancel(Attempt(m.cancel.attempt), BootId(m.cancel.boot), m.cancel.reason)
        case "terminal":
            t = m.terminal
            return Terminal(
                attempt=Attempt(t.attempt),
                boot=BootId(t.boot),
                reason=parse_reason(t.reason),
                output_ids=tuple(t.output_ids),
                byte_cut=t.byte_cut if t.HasField("byte_cut") else None,
                usage=parse_usage(t.usage),
                timings=parse_timings(t.timings),
                error=t.error,
                tenant=t.tenant,
                body_digest=t.body_digest,
                model=t.model,
                stop=tuple(t.stop),
                logprobs=parse_logprobs(t.logprobs) if t.HasField("logprobs") else (),
                prompt=parse_prompt_told(t.prompt) if t.HasField("prompt") else None,
                retry_ms=t.retry_ms,
                key=t.key,
                priority=t.priority,
                choice=t.choice,
                accepted_ms=t.accepted_ms,
                worker_deaths=t.worker_deaths,
                batcher_deaths=t.batcher_deaths,
            )
        case _:
            raise BadMessage("record: no kind")

"""What gateways and batchers ask each other about who owns a request, and what they answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from chassis.ids import Attempt, BootId, GatewayId, RequestId
from chassis.messages import BadMessage, check, check_id, parse
from chassis.messages.request import Request, build_request, parse_request
from chassis.messages.sampling import (
    PromptTold,
    TokenLogprobs,
    build_logprobs,
    build_prompt_told,
    parse_logprobs,
    parse_prompt_told,
)
from chassis.wire import request_pb2 as pb

_ACK_TOKEN = re.compile(r"[\x21-\x7e]{1,1000}")  # where an answer is published


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
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the ids, if the request asks for them
    prompt: PromptTold | None = None  # the same of its prompt


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


@dataclass(frozen=True, slots=True)
class Take:
    """A waiting request, given to another batcher of its model. It carries the digest of its body."""

    request: Request
    ack_token: str
    age_us: int

    @property
    def request_id(self) -> RequestId:
        return self.request.id


ToBatcher = OwnerQuestion | TakeoverAnswer | Attach | CancelAsk | Detached | Refused | Take


class AttachKind(Enum):
    ATTACHED = "attached"
    UNKNOWN = "unknown"
    DIVERGED = "diverged"


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
        case TakeoverAnswer(request_id, gateway, attempt, ids, minimum, logprobs, prompt):
            answer = pb.TakeoverAnswer(request_id=request_id, gateway=gateway, attempt=attempt)
            if ids is not None:
                told = build_prompt_told(prompt) if prompt is not None else None
                answer.yes.CopyFrom(pb.Ids(ids=ids, logprobs=build_logprobs(logprobs), prompt=told))
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
        case Take(request, ack_token, age_us):
            m.take.ack_token, m.take.age_us = ack_token, age_us
            m.take.request.ParseFromString(build_request(request))
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
        case "take":
            check(_ACK_TOKEN.fullmatch(m.take.ack_token) is not None, "take: ack token")
            request = parse_request(m.take.request.SerializeToString())
            check(bool(request.body_digest), "take: no digest of the body")
            return Take(request, m.take.ack_token, m.take.age_us)
        case _:
            raise BadMessage("to batcher: no kind")


def _parse_takeover_answer(t: pb.TakeoverAnswer) -> TakeoverAnswer:
    check_id(t.gateway, "takeover answer: gateway")
    which = t.WhichOneof("answer")
    check(which is not None, "takeover answer: neither yes nor no")
    yes = which == "yes"
    logprobs = parse_logprobs(t.yes.logprobs) if yes and t.yes.HasField("logprobs") else ()
    check(not logprobs or len(logprobs) == len(t.yes.ids), "takeover answer: logprobs do not add up")
    return TakeoverAnswer(
        RequestId(t.request_id),
        GatewayId(t.gateway),
        Attempt(t.attempt),
        tuple(t.yes.ids) if yes else None,
        None if yes else Attempt(t.no_minimum),
        logprobs,
        parse_prompt_told(t.yes.prompt) if yes and t.yes.HasField("prompt") else None,
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

"""The batcher's spans: one tree per request, one trace per step, linked both ways.

Marks are taken as events and effects pass through the shell; spans are recorded when a request leaves or
a step returns. Decode is recorded in segments of `SEGMENT_TOKENS`, each linked to the steps that made it.
The id of a request's span follows from the batcher's boot: who takes over can write its dead owner's.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batcher.events import StepPlan
from chassis.ids import BootId, RequestId
from chassis.messages.kvstore import TraceRef
from chassis.messages.pipeline import StageTiming
from chassis.messages.request import Request, Terminal
from chassis.metrics import TOKEN_GAP_S, Histogram
from chassis.trace import Span, TraceContext, Tracer, Value, encode_steps, step_context, step_key

SEGMENT_TOKENS = 32
LINKS_MAX = 128
OPEN_MAX = 1 << 15  # requests
STEPS_MAX = 4096  # kept per request


class _Step(NamedTuple):
    epoch: int
    number: int
    context: TraceContext


@dataclass(slots=True)
class _Open:
    """A request on its way through this batcher."""

    request: Request
    context: TraceContext
    parent: bytes | None
    stored_ns: int
    delivered_ns: int
    deliveries: int
    admitted_ns: int | None = None
    attempt: int = 0
    spans: list[Span] = field(default_factory=list)
    first_token_ns: int | None = None
    last_token_ns: int = 0
    num_steps: int = 0
    steps: list[_Step] = field(default_factory=list)
    # the segment that is not recorded yet
    segment: list[_Step] = field(default_factory=list)
    segment_start_ns: int = 0
    segment_end_ns: int = 0
    segment_tokens: int = 0
    terminal: Terminal | None = None
    before: tuple[BootId, int] | None = None  # who owned it, in which attempt
    calls: dict[str, int] = field(default_factory=dict)  # what is under way: name -> since
    cause: str = ""  # of an interruption that is no loss of the pipeline


class Account:
    def __init__(self, boot: BootId, tracer: Tracer, gaps: Histogram | None = None) -> None:
        """`gaps`: seconds between the tokens of one request."""
        self._boot = boot
        self._tracer = tracer
        self._gaps = gaps or Histogram(TOKEN_GAP_S)
        self._open: dict[RequestId, _Open] = {}
        self._sent: dict[tuple[int, int], tuple[_Step, StepPlan, int]] = {}
        self._named: list[RequestId] = []  # by the last step, as mostly by the next one
        self._members: tuple[tuple[TraceContext, ...], str] = (), ""  # their contexts and ids

    # ---- requests

    def reference(self, request_id: RequestId) -> TraceRef:
        """For spans that others record on behalf of a request."""
        o = self._open.get(request_id)
        return TraceRef(request_id, o.context.encode() if o is not None else b"")

    def delivered(self, request: Request, stored_ns: int, now_ns: int, count: int) -> None:
        known = self._open.get(request.id)
        if known is not None:
            known.deliveries = max(known.deliveries, count)
            return
        self._named = []
        if len(self._open) >= OPEN_MAX:  # what was turned away and never came again
            del self._open[next(iter(self._open))]
        parent = TraceContext.decode(request.trace_parent)
        trace_id = parent.trace_id if parent else step_context(request.id, 0, 0).trace_id
        self._open[request.id] = _Open(
            request,
            TraceContext(trace_id, span_id_of(request.id, self._boot)),
            parent.span_id if parent else None,
            min(stored_ns, now_ns),
            now_ns,
            count,
        )

    def admitted(self, request_id: RequestId, now_ns: int) -> None:
        o = self._open.get(request_id)
        if o is not None and o.admitted_ns is None:
            o.admitted_ns = now_ns

    def began(self, request_id: RequestId, what: str, now_ns: int) -> None:
        """A call (claim, finish, takeover, kv_match) starts; `ended` makes its span."""
        o = self._open.get(request_id)
        if o is not None:
            o.calls[what] = now_ns

    def ended(self, request_id: RequestId, what: str, now_ns: int, **attributes: Value) -> None:
        o = self._open.get(request_id)
        since = o.calls.pop(what, None) if o is not None else None
        if o is not None and since is not None:
            self._child(o, f"batcher.{what}", since, now_ns, attributes)

    def followed(self, request_id: RequestId, boot: BootId, attempt: int) -> None:
        """The log names another owner, which `claimed` and `terminal` take for dead."""
        o = self._open.get(request_id)
        if o is not None and boot and boot != self._boot:
            o.before = (boot, attempt)

    def claimed(self, request_id: RequestId, attempt: int) -> None:
        o = self._open.get(request_id)
        if o is not None:
            o.attempt = attempt
            self._bury(o)

    def interrupted(self, request_ids: Sequence[RequestId], epoch: int, cause: str, now_ns: int) -> None:
        """What a lost pipeline had outstanding: written here, by who knows."""
        for request_id in request_ids:
            o = self._open.get(request_id)
            if o is not None:
                self._close_segment(o)
                o.calls["interrupted"] = now_ns
        lost = [key for key in self._sent if key[0] == epoch]
        for key in lost:
            step, plan, start_ns = self._sent.pop(key)
            self._step_span(step, plan, start_ns, now_ns, (), error=cause)

    def computed_anew(self, request_id: RequestId, cause: str, now_ns: int) -> None:
        o = self._open.get(request_id)
        if o is not None:
            self._close_segment(o)
            o.calls["interrupted"], o.cause = now_ns, cause

    def terminal(self, request_id: RequestId, record: Terminal) -> None:
        o = self._open.get(request_id)
        if o is not None:
            o.terminal = record
            self._bury(o)

    def closed(self, request_id: RequestId, why: str, now_ns: int) -> None:
        """The request left: record its tree, and say that it is worth keeping."""
        o = self._open.pop(request_id, None)
        if o is None:
            return
        self._named = []
        self._close_segment(o)
        for what, since in o.calls.items():
            self._child(o, f"batcher.{what}", since, now_ns, {})
        self._child(o, "batcher.queue", o.stored_ns, o.delivered_ns, {"messaging.system": "nats"})
        until = o.admitted_ns if o.admitted_ns is not None else o.first_token_ns or now_ns
        self._child(o, "batcher.wait", o.delivered_ns, max(until, o.delivered_ns), {})
        for span in o.spans:
            self._tracer.record(span)
        self._tracer.record(self._summary(o, why, now_ns))
        self._tracer.keep([request_id, *(step_key(s.epoch, s.number) for s in o.steps)])

    def _bury(self, o: _Open) -> None:
        """Writes the span that a dead owner cannot: what others recorded on its behalf hangs below it."""
        if o.before is None:
            return
        (boot, attempt), o.before = o.before, None
        context = TraceContext(o.context.trace_id, span_id_of(o.request.id, boot))
        attributes: dict[str, Value] = {
            "shoal.request_id": o.request.id,
            "shoal.boot": boot,
            "shoal.attempt": attempt,
            "shoal.outcome": "died",
        }
        o.spans.append(
            Span(
                o.request.id,
                "batcher.request",
                context,
                o.parent,
                o.stored_ns,
                o.delivered_ns,
                attributes,
                error="batcher died",
            )
        )

    def _summary(self, o: _Open, why: str, now_ns: int) -> Span:
        attributes: dict[str, Value] = {
            "gen_ai.request.model": o.request.model,
            "shoal.request_id": o.request.id,
            "shoal.boot": self._boot,
            "shoal.outcome": why,
            "shoal.attempt": o.attempt,
            "shoal.deliveries": o.deliveries,
            "shoal.steps": _encode(o.steps),
            "shoal.num_steps": o.num_steps,
        }
        error = None
        if o.terminal is not None:
            t, usage = o.terminal.timings, o.terminal.usage
            attributes |= {
                "gen_ai.response.finish_reasons": o.terminal.reason.value,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "shoal.queued_us": t.queued_us,
                "shoal.waiting_us": t.waiting_us,
                "shoal.prefill_us": t.prefill_us,
                "shoal.decode_us": t.decode_us,
                "shoal.interrupted_us": t.interrupted_us,
                "shoal.preemptions": t.preemptions,
                "shoal.recomputed_tokens": t.recomputed_tokens,
            }
            error = o.terminal.error or None
        return Span(
            o.request.id, "batcher.request", o.context, o.parent, o.stored_ns, now_ns, attributes, (), error
        )

    def _child(
        self,
        o: _Open,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, Value],
        links: tuple[TraceContext, ...] = (),
    ) -> None:
        context = TraceContext(o.context.trace_id, self._tracer.new_span_id())
        o.spans.append(
            Span(o.request.id, name, context, o.context.span_id, start_ns, end_ns, attributes, links)
        )

    # ---- steps

    def sent(self, plan: StepPlan, now_ns: int) -> bytes:
        """A step goes out; returns its trace parent."""
        context = step_context(self._boot, plan.epoch, plan.number)
        if plan.rows:
            step = _Step(int(plan.epoch), plan.number, context)
            self._sent[(plan.epoch, plan.number)] = (step, plan, now_ns)
        return context.encode()

    def returned(self, epoch: int, number: int, timings: Sequence[StageTiming], now_ns: int) -> None:
        known = self._sent.pop((epoch, number), None)
        if known is None:
            return
        step, plan, start_ns = known
        self._step_span(step, plan, start_ns, now_ns, timings)
        since_ns, since_times = 0, 0  # most rows had their last token at the same time
        for row in plan.rows:
            o = self._open.get(row.request_id)
            if o is None or o.terminal is not None:  # a ghost of one that has ended is no step of it
                continue
            if not o.segment:
                self._open_segment(o, min(start_ns, now_ns))
            o.segment.append(step)
            o.segment_end_ns = now_ns
            o.segment_tokens += row.samples
            if row.samples:
                if o.last_token_ns != since_ns:
                    self._gap(since_ns, now_ns, since_times)
                    since_ns, since_times = o.last_token_ns, 0
                since_times += 1
                o.last_token_ns = now_ns
            if row.samples and o.first_token_ns is None:
                self._close_segment(o)
                o.first_token_ns = now_ns
            elif len(o.segment) >= SEGMENT_TOKENS:
                self._close_segment(o)
        self._gap(since_ns, now_ns, since_times)

    def _gap(self, since_ns: int, now_ns: int, times: int) -> None:
        if since_ns and times:
            self._gaps.observe(max(0, now_ns - since_ns) / 1e9, times)

    def _open_segment(self, o: _Open, start_ns: int) -> None:
        since = o.calls.pop("interrupted", None)
        if since is not None:
            attributes: dict[str, Value] = {"shoal.cause": o.cause} if o.cause else {}
            self._child(o, "batcher.interrupted", since, start_ns, attributes)
            o.cause = ""
        o.segment_start_ns, o.segment_tokens = start_ns, 0

    def _close_segment(self, o: _Open) -> None:
        if not o.segment:
            return
        segment, o.segment = o.segment, []
        o.num_steps += len(segment)
        o.steps.extend(segment[: STEPS_MAX - len(o.steps)])
        links = tuple([step.context for step in segment[:LINKS_MAX]])
        name = "batcher.prefill" if o.first_token_ns is None else "batcher.decode"
        attributes: dict[str, Value] = {"shoal.tokens": o.segment_tokens, "shoal.steps": _encode(segment)}
        self._child(o, name, o.segment_start_ns, o.segment_end_ns, attributes, links)

    def _step_span(
        self,
        step: _Step,
        plan: StepPlan,
        start_ns: int,
        end_ns: int,
        timings: Sequence[StageTiming],
        error: str | None = None,
    ) -> None:
        named = [row.request_id for row in plan.rows[:LINKS_MAX]]
        if named != self._named:
            members = [self._open.get(request_id) for request_id in named]
            self._named = named
            self._members = tuple([o.context for o in members if o is not None]), ",".join(named)
        links, requests = self._members
        attributes: dict[str, Value] = {
            "shoal.epoch": step.epoch,
            "shoal.step": step.number,
            "shoal.rows": len(plan.rows),
            "shoal.tokens": sum([len(row.token_ids) for row in plan.rows]),
            "shoal.requests": requests,
        }
        for t in timings:
            attributes[f"shoal.stage.{t.stage}.wait_us"] = t.wait_ns // 1000
            attributes[f"shoal.stage.{t.stage}.compute_us"] = t.compute_ns // 1000
        self._tracer.record(
            Span(
                step_key(step.epoch, step.number),
                "batcher.step",
                step.context,
                None,
                start_ns,
                end_ns,
                attributes,
                links,
                error,
            )
        )


def _encode(steps: Sequence[_Step]) -> str:
    return encode_steps([(step.epoch, step.number) for step in steps])


def span_id_of(request_id: RequestId, boot: BootId) -> bytes:
    """Of the batcher.request span of one batcher."""
    return hashlib.blake2b(f"{boot}:{request_id}".encode(), digest_size=8, person=b"shoal.owner").digest()

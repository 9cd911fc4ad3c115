"""A request's spans at the gateway: gateway.generate or gateway.resume, with publish and stream below.

Attributes follow the GenAI conventions where they exist. No text of a prompt or an answer is ever in them.
"""

import hashlib
from collections.abc import Callable

from chassis.errors import Status
from chassis.ids import RequestId
from chassis.messages.request import Request, Usage
from chassis.trace import Span, TraceContext, Tracer, Value
from gateway.clients import Client
from gateway.meters import Meters

GENERATE = "gateway.generate"
RESUME = "gateway.resume"
FIRST_TOKEN = "shoal.first_token_us"  # from the root's start to the first delta with ids


class RequestTrace:
    """Opened when the call comes in; everything is recorded at its end."""

    def __init__(
        self,
        tracer: Tracer,
        wall_ns: Callable[[], int],
        name: str,
        request_id: RequestId,
        caller: TraceContext | None,
        *,
        start_ns: int,
        start_s: float,
    ) -> None:
        self._tracer = tracer
        self._wall_ns = wall_ns
        self._name = name
        self._key = request_id
        self._start_ns = start_ns
        self._start_s = start_s  # on the loop's clock
        self._accepted_ns = 0
        self._parent = caller.span_id if caller is not None else None
        trace_id = caller.trace_id if caller is not None else trace_id_of(request_id)
        self.context = TraceContext(trace_id, tracer.new_span_id())
        self.attributes: dict[str, Value] = {
            "gen_ai.provider.name": "shoal",
            "gen_ai.response.id": request_id,
        }

    def asked(self, request: Request, operation: str) -> None:
        self.attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": request.limits.max_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.request.top_k": request.sampling.top_k,
            "gen_ai.request.seed": str(request.seed),  # 64 bits without a sign
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
            "shoal.priority": request.priority,
        }

    def published(self, start_ns: int, end_ns: int, outcome: str, subject: str) -> None:
        error = None if outcome in ("stored", "duplicate", "taken") else outcome
        attributes: dict[str, Value] = {
            "messaging.system": "nats",
            "messaging.operation.type": "send",
            "messaging.destination.name": subject,
            "shoal.outcome": outcome,
        }
        self._record("gateway.publish", start_ns, end_ns, attributes, error)

    def accepted(self, request: Request | None) -> None:
        """A resumed stream joins the trace of its request, below the call that brought it."""
        self._accepted_ns = self._wall_ns()
        origin = TraceContext.decode(request.trace_parent) if request is not None else None
        if self._name == RESUME and request is not None and origin is not None:
            self.context = TraceContext(origin.trace_id, self.context.span_id)
            self._parent = origin.span_id
            self.asked(request, "resume")

    def done(self, client: Client, error: BaseException | None, meters: Meters | None = None) -> None:
        """The client took the end, or left, or was told why not."""
        end_ns = self._wall_ns()
        what = None if error is None or client.end is not None else _error_type(error)
        if self._accepted_ns:
            taken: dict[str, Value] = {"shoal.output_tokens": client.taken}
            self._record("gateway.stream", self._accepted_ns, end_ns, taken, what)
        if client.first_delta_at is not None:
            self.attributes[FIRST_TOKEN] = max(0, round((client.first_delta_at - self._start_s) * 1e6))
        if client.end is not None:
            self.attributes |= _usage(client.end.usage)
            self.attributes["gen_ai.response.finish_reasons"] = client.end.reason.value
            self.attributes["shoal.attempt"] = client.end.attempt
        if what is not None:
            self.attributes["error.type"] = what
        if meters is not None:
            self._count(meters, client, what, end_ns)
        self._tracer.record(
            Span(
                self._key,
                self._name,
                self.context,
                self._parent,
                self._start_ns,
                end_ns,
                self.attributes,
                error=what,
            )
        )
        self._tracer.keep([self._key])

    def _count(self, meters: Meters, client: Client, error: str | None, end_ns: int) -> None:
        first_us = self.attributes.get(FIRST_TOKEN)
        meters.ended(
            operation=str(self.attributes.get("gen_ai.operation.name", "resume")),
            model=str(self.attributes.get("gen_ai.request.model", "")),
            outcome=error or (client.end.reason.value if client.end is not None else "CANCELLED"),
            failed=error is not None,
            duration_s=max(0, end_ns - self._start_ns) / 1e9,
            first_token_s=first_us / 1e6 if isinstance(first_us, int) else None,
            num_tokens=client.taken,
        )

    def _record(
        self, name: str, start_ns: int, end_ns: int, attributes: dict[str, Value], error: str | None
    ) -> None:
        context = TraceContext(self.context.trace_id, self._tracer.new_span_id())
        parent = self.context.span_id
        self._tracer.record(Span(self._key, name, context, parent, start_ns, end_ns, attributes, error=error))


def trace_id_of(request_id: RequestId) -> bytes:
    """The same at every gateway that serves the request."""
    return hashlib.blake2b(request_id.encode(), digest_size=16, person=b"shoal.trace").digest()


def _usage(usage: Usage) -> dict[str, Value]:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }


def _error_type(error: BaseException) -> str:
    return error.code.value if isinstance(error, Status) else "CANCELLED"

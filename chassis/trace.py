"""Spans as cheap tuples in a bounded ring; only those of kept requests and steps are ever exported.

A span belongs to a `key`: a request id, or `step:<epoch>:<number>`. `keep` marks keys; the exporter takes
their spans to OTLP (when configured) and to the TRACES stream. Ids are derived, so that services agree
without talking: a request's trace id comes with its trace parent, a step's from its batcher's boot, epoch
and number (`step_context`).
"""

import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context. `trace_id` 16 bytes, `span_id` 8 bytes."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True

    def encode(self) -> bytes:
        """25 bytes: trace id, span id, flags."""
        return self.trace_id + self.span_id + (b"\x01" if self.sampled else b"\x00")

    @staticmethod
    def decode(data: bytes) -> "TraceContext | None":
        """None unless `data` is a whole, non-zero context."""
        if len(data) != 25 or not any(data[:16]) or not any(data[16:24]):
            return None
        return TraceContext(data[:16], data[16:24], bool(data[24] & 1))


class Span(NamedTuple):
    key: str
    name: str  # service.verb
    context: TraceContext
    parent: bytes | None  # span id
    start_ns: int  # wall clock
    end_ns: int
    attributes: Mapping[str, Value]
    links: tuple[TraceContext, ...] = ()
    error: str | None = None


class Tracer(Protocol):
    def record(self, span: Span) -> None:
        """Puts a finished span into the ring; the oldest falls out."""

    def keep(self, keys: Iterable[str]) -> None:
        """Spans of these keys, recorded already or within the next seconds, are exported."""

    def new_span_id(self) -> bytes: ...


# ---- what the tools rely on ------------------------------------------------------------------------

ATTEMPT = "shoal.attempt"  # of summaries: above 1 when the request was redelivered or taken over
STEPS = "shoal.steps"  # batcher.prefill, batcher.decode: `encode_steps` of the steps they ran in
REQUESTS = "shoal.requests"  # batcher.step: the ids of its requests, separated by commas

# ---- keys and derived ids --------------------------------------------------------------------------

STEP_PREFIX = "step:"


def step_key(epoch: int, number: int) -> str:
    return f"{STEP_PREFIX}{epoch}:{number}"


def parse_step_key(key: str) -> tuple[int, int] | None:
    """(epoch, number), or None when the key is a request's."""
    if not key.startswith(STEP_PREFIX):
        return None
    epoch, _, number = key[len(STEP_PREFIX) :].partition(":")
    return int(epoch), int(number)


def step_context(boot: str, epoch: int, number: int) -> TraceContext:
    """The root of a step's own trace, the same wherever it is computed. `boot` is the batcher's."""
    digest = hashlib.blake2b(f"{boot}:{epoch}:{number}".encode(), digest_size=24).digest()
    return TraceContext(digest[:16], digest[16:])


def encode_steps(steps: Iterable[tuple[int, int]]) -> str:
    """Steps as text, for attributes: `7:12-43,45;8:1` = 12 to 43 and 45 of epoch 7, 1 of epoch 8."""
    numbers_by_epoch: dict[int, list[int]] = {}
    for epoch, number in steps:
        numbers_by_epoch.setdefault(epoch, []).append(number)
    epochs: list[str] = []
    for epoch, numbers in sorted(numbers_by_epoch.items()):
        ranges: list[list[int]] = []
        for number in sorted(numbers):
            if ranges and number <= ranges[-1][1] + 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        epochs.append(f"{epoch}:" + ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in ranges))
    return ";".join(epochs)


def decode_steps(text: str, count_max: int = 1 << 16) -> list[tuple[int, int]]:
    """The steps of `encode_steps`. Raises ValueError on anything else, and beyond `count_max`."""
    steps: list[tuple[int, int]] = []
    for part in text.split(";") if text else ():
        epoch, colon, ranges = part.partition(":")
        if not colon:
            raise ValueError(f"not a list of steps: {part[:40]!r}")
        for item in ranges.split(","):
            first, _, last = item.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if len(steps) + len(numbers) > count_max:
                raise ValueError(f"more than {count_max} steps")
            steps.extend((int(epoch), number) for number in numbers)
    return steps


# ---- the ring --------------------------------------------------------------------------------------


class SpanRing:
    """The Tracer of a process. Holds the last `len_max` spans by key; kept ones leave through `take`.

    `keep` is the owner's word and is judged: of requests that went well, `keep_ratio` are kept and of the
    others the summary only; those that failed, were slow or ran more than once are always kept. What it
    kept is announced to the other processes, which say `keep_told`. A kept key takes in spans for
    `lookahead_ticks` calls of `tick` more.
    """

    SUMMARIES = ("batcher.request", "gateway.generate", "gateway.resume")

    def __init__(
        self,
        len_max: int = 65536,
        *,
        keep_ratio: float = 1.0,
        slow_ms: int = 10_000,
        lookahead_ticks: int = 20,
        first_span_id: int | None = None,
    ) -> None:
        assert len_max > 0 and 0 <= keep_ratio <= 1 and lookahead_ticks > 0
        self.len_max = len_max
        self.dropped = 0  # kept spans and keys that found no room
        self._keep_below = int(keep_ratio * (1 << 64))
        self._slow_ns = slow_ms * 1_000_000
        self._lookahead_ticks = lookahead_ticks
        self._spans: OrderedDict[str, list[Span]] = OrderedDict()
        self._len = 0
        self._kept: dict[str, None] = {}
        self._kept_by_tick: deque[list[str]] = deque([[]])
        self._out: list[Span] = []
        self._announce: list[str] = []
        self._next_id = secrets.randbits(64) if first_span_id is None else first_span_id

    def record(self, span: Span) -> None:
        if span.key in self._kept:
            self._emit((span,))
            return
        spans = self._spans.get(span.key)
        if spans is None:
            self._spans[span.key] = [span]
        else:
            spans.append(span)
        self._len += 1
        while self._len > self.len_max:
            self._len -= len(self._spans.popitem(last=False)[1])

    def keep(self, keys: Iterable[str]) -> None:
        requests: list[str] = []
        steps: list[str] = []
        for key in keys:
            (steps if key.startswith(STEP_PREFIX) else requests).append(key)
        chosen = [key for key in requests if self._judge(key)]
        if requests and not chosen:
            return
        self._announce.extend(self._mark(chosen + steps))

    def keep_told(self, keys: Iterable[str]) -> None:
        """Another process keeps these."""
        self._mark(keys)

    def new_span_id(self) -> bytes:
        self._next_id = (self._next_id + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF or 1
        return self._next_id.to_bytes(8, "little")

    def take(self) -> tuple[list[Span], list[str]]:
        """Kept spans and keys to announce, each handed out once."""
        out, announce = self._out, self._announce
        self._out, self._announce = [], []
        return out, announce

    def tick(self) -> None:
        """Time passes: keys kept `lookahead_ticks` ago take in no more spans."""
        self._kept_by_tick.append([])
        if len(self._kept_by_tick) > self._lookahead_ticks:
            for key in self._kept_by_tick.popleft():
                del self._kept[key]

    def _mark(self, keys: Iterable[str]) -> list[str]:
        """Newly kept ones; what the ring holds of them goes out."""
        marked: list[str] = []
        for key in keys:
            if key in self._kept:
                continue
            if len(self._kept) >= self.len_max:
                self.dropped += 1
                continue
            self._kept[key] = None
            marked.append(key)
            if spans := self._spans.pop(key, None):
                self._len -= len(spans)
                self._emit(spans)
        self._kept_by_tick[-1].extend(marked)
        return marked

    def _emit(self, spans: Sequence[Span]) -> None:
        if len(self._out) + len(spans) > self.len_max:
            self.dropped += len(spans)
        else:
            self._out.extend(spans)

    def _judge(self, request: str) -> bool:
        draw = int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little")
        if draw < self._keep_below:
            return True
        spans = self._spans.get(request, [])
        for span in spans:
            if span.error is not None:
                return True
            if span.name in self.SUMMARIES and (
                span.end_ns - span.start_ns >= self._slow_ns or int(span.attributes.get(ATTEMPT, 1)) > 1
            ):
                return True
        self._emit([span for span in spans if span.name in self.SUMMARIES])
        return False

"""Where a request's milliseconds went: rows that add up to the whole, from its spans and records.

The rows come from different clocks and processes (gateway spans, the broker's stamp, the owner's timings,
the span of the terminal write), so that what they leave unaccounted is a measurement, not a definition.
Rows marked `inner` split the row above them and do not count again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chassis.messages.request import Terminal, Timings
from chassis.trace import ATTEMPT, STEPS, Span, decode_steps, step_key

ROOTS = ("gateway.generate", "gateway.resume")
SUMMARY = "batcher.request"
_SEGMENTS = ("batcher.prefill", "batcher.decode")
FIRST_TOKEN = "shoal.first_token_us"  # attribute of the root: from its start to the first delta with ids


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    us: int
    note: str = ""
    inner: bool = False


@dataclass(frozen=True, slots=True)
class Ledger:
    """`rows` for the whole request, `first_rows` until its first token; totals measured, not added up."""

    total_us: int
    rows: tuple[Row, ...]
    first_us: int | None
    first_rows: tuple[Row, ...]

    @property
    def unaccounted_us(self) -> int:
        """Negative when rows overlap."""
        return self.total_us - sum(row.us for row in self.rows if not row.inner)

    @property
    def first_unaccounted_us(self) -> int | None:
        if self.first_us is None:
            return None
        return self.first_us - sum(row.us for row in self.first_rows if not row.inner)

    @property
    def first_added_us(self) -> int | None:
        """Time to the first token that no stage spent computing."""
        if self.first_us is None:
            return None
        return self.first_us - sum(row.us for row in self.first_rows if row.inner and row.name == "compute")


@dataclass(frozen=True, slots=True)
class Times:
    """What a span of time in the ring was used for, in microseconds."""

    compute: int = 0  # by stages
    wait: int = 0  # at stages, for those before
    ring: int = 0  # transport, and the batcher's share of a step
    between: int = 0  # no step of this request under way

    def rows(self) -> tuple[Row, ...]:
        return (
            Row("compute", self.compute, "stages at work on its steps", inner=True),
            Row("stage wait", self.wait, "its steps queued at a stage", inner=True),
            Row("ring", self.ring, "sending, receiving, batcher", inner=True),
            Row("between steps", self.between, "scheduling, or not scheduled", inner=True),
        )


def newest(spans: Iterable[Span], *names: str) -> Span | None:
    """The last to start of the spans with one of these names."""
    return max((s for s in spans if s.name in names), key=lambda s: s.start_ns, default=None)


def ledger(
    spans: Sequence[Span], terminal: Terminal | None, terminal_ns: int, steps: Sequence[Span]
) -> Ledger | None:
    """`terminal_ns` is the broker's stamp of the record, `steps` the batcher.step spans of its steps.

    None when neither the batcher's nor the gateway's summary is there.
    """
    root = newest(spans, *ROOTS)
    summary = _summary(spans)
    timings = terminal.timings if terminal is not None else None
    if summary is None or timings is None:
        return None if root is None else Ledger(_us(root), (Row("gateway", _us(root)),), None, ())
    stored_ns = summary.start_ns
    before: list[Row] = []
    if root is not None:
        publish = newest([s for s in spans if s.start_ns <= stored_ns], "gateway.publish")
        accepted_ns = min(publish.start_ns, stored_ns) if publish is not None else stored_ns
        before.append(Row("accept", _between(root.start_ns, accepted_ns), "check, template, tokenize"))
        if publish is not None:
            before.append(Row("publish", _between(accepted_ns, stored_ns), "to the broker's stamp"))
    before.append(Row("queue", timings.queued_us, "in the stream, until delivered"))
    before.append(Row("wait", timings.waiting_us, "in the batcher's waiting room"))
    prefill = Row("prefill", timings.prefill_us, "admitted to first token")
    prefill_rows = (prefill, *_inside(spans, steps, "batcher.prefill", timings.prefill_us))
    rows = [*before, *prefill_rows]
    rows.append(Row("decode", timings.decode_us, "first token to last"))
    rows.extend(_inside(spans, steps, "batcher.decode", timings.decode_us))
    if timings.interrupted_us:
        rows.append(Row("interrupted", timings.interrupted_us, "deaths, takeovers, preemption"))
    rows.extend(_ending(root, spans, stored_ns, timings, terminal_ns))
    start_ns = min(root.start_ns, stored_ns) if root is not None else stored_ns  # before a resume
    finish = newest(spans, "batcher.finish")
    told_ns = max(terminal_ns, finish.end_ns) if finish is not None else terminal_ns
    end_ns = root.end_ns if root is not None else told_ns
    first_us, first_rows = _first(root, spans, before, prefill_rows)
    return Ledger(_between(start_ns, end_ns), tuple(rows), first_us, first_rows)


def counted_us(t: Timings) -> int:
    """From the broker's stamp of the request to its terminal record, as the owner counted it."""
    return t.queued_us + t.waiting_us + t.prefill_us + t.decode_us + t.interrupted_us


def _summary(spans: Iterable[Span]) -> Span | None:
    """Of several owners', the one that ended the request."""
    summaries = [s for s in spans if s.name == SUMMARY]
    ended = [s for s in summaries if "gen_ai.response.finish_reasons" in s.attributes]
    return newest(ended or summaries, SUMMARY)


def _ending(
    root: Span | None, spans: Sequence[Span], stored_ns: int, timings: Timings, terminal_ns: int
) -> list[Row]:
    """From the last token on, or from where the owner's own count ends, when that is later."""
    counted_ns = stored_ns + counted_us(timings) * 1000
    finish = newest(spans, "batcher.finish")
    if finish is not None:
        last_ns = max((s.end_ns for s in spans if s.name in _SEGMENTS), default=counted_ns)
        record_us, recorded_ns = _between(max(last_ns, counted_ns), finish.end_ns), finish.end_ns
    else:
        recorded_ns = max(terminal_ns, counted_ns)
        record_us = _between(counted_ns, recorded_ns)
    rows = [Row("record", record_us, "ending it, writing the terminal record")]
    if root is not None:
        rows.append(Row("delivery", _between(recorded_ns, root.end_ns), "the end, to the client"))
    return rows


def _first(
    root: Span | None, spans: Sequence[Span], before: Sequence[Row], prefill: Sequence[Row]
) -> tuple[int | None, tuple[Row, ...]]:
    """Nothing is said of the first token of a request that was interrupted: its rows can't tell when."""
    first_us = root.attributes.get(FIRST_TOKEN) if root is not None else None
    broken = any(s.name == "batcher.interrupted" or int(s.attributes.get(ATTEMPT, 1)) > 1 for s in spans)
    if root is None or first_us is None or broken:
        return None, ()
    rows = [*before, *prefill]
    left_us = max(0, int(first_us) - sum(row.us for row in rows if not row.inner))
    claim, made = newest(spans, "batcher.claim"), newest(spans, "batcher.prefill")
    if claim is not None and made is not None and claim.end_ns > made.end_ns:
        claim_us = min(_between(made.end_ns, claim.end_ns), left_us)
        rows.append(Row("claim", claim_us, "made, but its claim was not stored yet"))
        left_us -= claim_us
    return int(first_us), (*rows, Row("delivery", left_us, "to the first delta"))


def _inside(spans: Sequence[Span], steps: Sequence[Span], name: str, whole_us: int) -> tuple[Row, ...]:
    """How the time of all segments called `name` was used; nothing when their steps are unknown."""
    keys = {step_key(*s) for span in spans if span.name == name for s in steps_of(span)}
    mine = [step for step in steps if step.key in keys]
    return times(mine, whole_us).rows() if mine else ()


def times(steps: Sequence[Span], whole_us: int) -> Times:
    """Splits `whole_us` by what these steps did. Steps that overlap count once."""
    busy_ns, until_ns = 0, 0
    for step in sorted(steps, key=lambda s: s.start_ns):
        busy_ns += max(0, step.end_ns - max(step.start_ns, until_ns))
        until_ns = max(until_ns, step.end_ns)
    busy = min(busy_ns // 1000, whole_us)
    compute = min(sum(_stages(step, "compute_us") for step in steps), busy)
    wait = min(sum(_stages(step, "wait_us") for step in steps), busy - compute)
    return Times(compute, wait, busy - compute - wait, whole_us - busy)


def steps_of(span: Span) -> list[tuple[int, int]]:
    """(epoch, number) of the steps a segment names; none when it does not."""
    try:
        return decode_steps(str(span.attributes.get(STEPS, "")))
    except ValueError:
        return []


def _stages(step: Span, what: str) -> int:
    return sum(
        int(value)
        for name, value in step.attributes.items()
        if name.startswith("shoal.stage.") and name.endswith(what)
    )


def _us(span: Span) -> int:
    return _between(span.start_ns, span.end_ns)


def _between(start_ns: int, end_ns: int) -> int:
    return max(0, end_ns - start_ns) // 1000

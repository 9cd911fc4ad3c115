"""`shoal why`: reads what the streams hold of one request and tells its story.

Needs only the bus. A request's own segments name its steps; a step's spans are stored once and name the
requests that shared it.
"""

import argparse
import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chassis import subjects
from chassis.bus import Bus, Stored
from chassis.errors import BusError
from chassis.ids import RequestId
from chassis.messages import BadMessage
from chassis.messages.request import Cancel, Claim, Record, Terminal, parse_record
from chassis.messages.trace import Segment, parse_segment
from chassis.trace import REQUESTS, Span, step_key
from chassis.trace_export import subject_of
from shoal.ledger import ROOTS, SUMMARY, Ledger, Row, ledger, steps_of
from shoal.looking import Dial

SEGMENTS_MAX = 10_000
STEP_SUBJECTS_MAX = 1_000
_POLL_S = 0.1
_BELOW_ROOT = (SUMMARY, "gateway.publish", "gateway.stream")


@dataclass(frozen=True, slots=True)
class Entry:
    """A record of the ownership log with the broker's stamp."""

    stored_at_ns: int
    record: Record


@dataclass(frozen=True, slots=True)
class Story:
    request_id: str
    records: tuple[Entry, ...]
    spans: tuple[Span, ...]
    steps: tuple[Span, ...]  # batcher.step and shard_worker.step of the request's steps
    homes: dict[bytes, str]  # span id -> service and boot

    @property
    def terminal(self) -> Terminal | None:
        last = self.records[-1].record if self.records else None
        return last if isinstance(last, Terminal) else None

    def ledger(self) -> Ledger | None:
        batcher_steps = [s for s in self.steps if s.name == "batcher.step"]
        stamp_ns = self.records[-1].stored_at_ns if self.records else 0
        return ledger(self.spans, self.terminal, stamp_ns, batcher_steps)

    def unwritten(self) -> list[bytes]:
        """Span ids of calls whose gateway did not live to write them, or still serves them."""
        known = {s.context.span_id for s in self.spans}
        above = (s.parent for s in self.spans if s.name in _BELOW_ROOT and s.parent is not None)
        return [parent for parent in dict.fromkeys(above) if parent not in known]

    def orphans(self) -> list[Span]:
        """Spans whose parent is not in the story, nor a call that was never written; the roots' parents are
        the callers' own."""
        everything = (*self.spans, *self.steps)
        known = {s.context.span_id for s in everything} | set(self.unwritten())
        below = [s for s in everything if s.parent is not None and s.name not in ROOTS]
        return [s for s in below if s.parent not in known]


async def collect(bus: Bus, request_id: str, wait_s: float = 0.0) -> Story:
    """All there is; with `wait_s`, until both summaries have arrived. Raises BusError."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + wait_s
    while True:
        story = await _collect(bus, request_id)
        names = {span.name for span in story.spans}
        whole = SUMMARY in names and any(root in names for root in ROOTS) and bool(story.steps)
        if whole or loop.time() >= give_up_at:
            return story
        await asyncio.sleep(_POLL_S)


async def _collect(bus: Bus, request_id: str) -> Story:
    stored = await bus.read(subjects.RESULTS, subjects.result(RequestId(request_id)), 1, 1000)
    records = tuple(_entries(stored))
    homes: dict[bytes, str] = {}
    spans: list[Span] = []
    for segment in await _segments(bus, subjects.trace(RequestId(request_id))):
        spans.extend(_at_home(segment, homes))
    wanted = {step_key(*step): None for span in spans for step in steps_of(span)}
    steps: list[Span] = []
    for subject in list(dict.fromkeys(subject_of(key) for key in wanted))[:STEP_SUBJECTS_MAX]:
        for segment in await _segments(bus, subject):
            steps.extend(span for span in _at_home(segment, homes) if span.key in wanted)
    spans.sort(key=lambda s: (s.start_ns, -s.end_ns))
    steps.sort(key=lambda s: (s.start_ns, -s.end_ns))
    return Story(request_id, records, tuple(spans), tuple(steps), homes)


def _entries(stored: Sequence[Stored]) -> Iterator[Entry]:
    for s in stored:
        try:
            yield Entry(s.stored_at_ns, parse_record(s.data))
        except BadMessage:
            continue  # anyone may write there


async def _segments(bus: Bus, subject: str) -> list[Segment]:
    segments: list[Segment] = []
    for stored in await bus.read(subjects.TRACES, subject, 1, SEGMENTS_MAX):
        try:
            segments.append(parse_segment(stored.data))
        except BadMessage:
            continue  # anyone may publish there
    return segments


def _at_home(segment: Segment, homes: dict[bytes, str]) -> tuple[Span, ...]:
    """Its spans that no earlier segment had: one whose fate was unknown was sent again."""
    fresh = tuple(span for span in segment.spans if span.context.span_id not in homes)
    homes |= {span.context.span_id: f"{segment.service} {segment.boot[-6:]}" for span in fresh}
    return fresh


# ---- telling it ------------------------------------------------------------------------------------


def render(story: Story) -> str:
    """The whole story as text."""
    if not story.records and not story.spans:
        return f"Nothing is known of request {story.request_id}: never accepted, or too long ago.\n"
    parts = [_headline(story), render_ledger(story.ledger()), _tree(story), _company(story), _retries(story)]
    return "\n".join(part for part in parts if part)


def render_ledger(book: Ledger | None) -> str:
    if book is None:
        return "No ledger: the request has not ended, or its spans are gone.\n"
    lines = list(_table(f"total {_ms(book.total_us)}", book.rows, book.total_us, book.unaccounted_us))
    if book.first_us is not None and book.first_unaccounted_us is not None:
        lines += _table(
            f"time to first token {_ms(book.first_us)}",
            book.first_rows,
            book.first_us,
            book.first_unaccounted_us,
        )
        lines.append(f"  not computing before the first token: {_ms(book.first_added_us or 0)}")
    return "\n".join(lines) + "\n"


def _table(title: str, rows: Sequence[Row], total_us: int, left_us: int) -> Iterator[str]:
    yield title
    for row in (*rows, Row("unaccounted", left_us)):
        share = 100 * row.us / total_us if total_us else 0.0
        name = ("    " if row.inner else "  ") + row.name
        yield f"{name:<20}{_ms(row.us):>14}  {share:5.1f} %  {row.note}".rstrip()


def _headline(story: Story) -> str:
    terminal = story.terminal
    if terminal is None:
        return f"request {story.request_id}: not ended"
    u = terminal.usage
    text = f"request {story.request_id}: {terminal.reason.value}"
    if terminal.error:
        text += f" ({terminal.error})"
    return f"{text}, {u.prompt_tokens} prompt tokens ({u.cached_tokens} cached), {u.output_tokens} made"


def _tree(story: Story) -> str:
    if not story.spans:
        return "No spans are left.\n"
    unwritten = story.unwritten()
    known = {s.context.span_id for s in story.spans} | set(unwritten)
    children: dict[bytes | None, list[Span]] = {}
    for span in story.spans:
        children.setdefault(span.parent if span.parent in known else None, []).append(span)
    start_ns = min(s.start_ns for s in story.spans)
    lines = ["spans (start, duration)"]

    def walk(parent: bytes | None, depth: int) -> None:
        for span in children.get(parent, ()):
            lost = parent is None and span.parent is not None and span.name not in ROOTS
            orphan = "  (its parent is missing)" if lost else ""
            home = story.homes.get(span.context.span_id, "")
            lines.append(_span_line(span, start_ns, depth, home) + orphan)
            lines.extend(_steps_lines(story, span, depth + 1))
            walk(span.context.span_id, depth + 1)

    for call in unwritten:
        cause = "its gateway died" if story.terminal is not None else "its gateway died, or still serves it"
        lines.append(f"  {ROOTS[0]}  (not written: {cause})")
        walk(call, 2)
    walk(None, 1)
    return "\n".join(lines) + "\n"


def _span_line(span: Span, start_ns: int, depth: int, home: str) -> str:
    begun = _ms((span.start_ns - start_ns) // 1000)
    took = _ms((span.end_ns - span.start_ns) // 1000)
    error = f"  ERROR {span.error}" if span.error else ""
    return f"{'  ' * depth + span.name:<34}{begun:>14}{took:>14}  {home}{error}".rstrip()


def _steps_lines(story: Story, span: Span, depth: int) -> Iterator[str]:
    """One line for the steps of a segment, one per stage for what they spent there."""
    if span.name == SUMMARY:
        return
    keys = {step_key(*step) for step in steps_of(span)}
    if not keys:
        return
    mine = [s for s in story.steps if s.key in keys]
    rings = [s for s in mine if s.name == "batcher.step"]
    indent = "  " * depth
    yield f"{indent}{len(keys)} steps: {span.attributes['shoal.steps']}, {len(rings)} of them kept"
    stages: dict[str, list[int]] = {}
    for ring in rings:
        for name, value in ring.attributes.items():
            if name.startswith("shoal.stage."):
                stages.setdefault(name.removeprefix("shoal."), []).append(int(value))
    for name, values in sorted(stages.items()):
        yield f"{indent}  {name:<24} sum {_ms(sum(values)):>10}  max {_ms(max(values)):>10}"
    for ring in rings:
        if ring.error:
            yield f"{indent}  {ring.key} lost: {ring.error}"


def _company(story: Story) -> str:
    """Who sat in the same steps."""
    counts: Counter[str] = Counter()
    for step in story.steps:
        if step.name == "batcher.step":
            counts.update(r for r in str(step.attributes.get(REQUESTS, "")).split(",") if r)
    counts.pop(story.request_id, None)
    if not counts:
        return "Its steps were its own.\n"
    lines = [f"shared its steps with {len(counts)} other requests"]
    lines += [f"  {request}  {count} steps" for request, count in counts.most_common(16)]
    return "\n".join(lines) + "\n"


def _retries(story: Story) -> str:
    """The ownership log, and what broke on the way."""
    lines: list[str] = []
    for entry in story.records:
        match entry.record:
            case Claim(left=True) as c:
                lines.append(f"  left by batcher {c.boot[-6:]}, which drained, in attempt {c.attempt}")
            case Claim() as c:
                deaths = [f"{c.worker_deaths} worker deaths"] if c.worker_deaths else []
                deaths += [f"{c.batcher_deaths} batcher deaths"] if c.batcher_deaths else []
                cause = ", after " + " and ".join(deaths) if deaths else ""
                lines.append(f"  attempt {c.attempt} claimed by batcher {c.boot[-6:]}{cause}")
            case Cancel() as c:
                lines.append(f"  cancel written after attempt {c.attempt}: {c.reason or 'no reason given'}")
            case Terminal() as t:
                lines.append(f"  ended by batcher {t.boot[-6:]} in attempt {t.attempt}: {t.reason.value}")
                if t.timings.preemptions or t.timings.recomputed_tokens:
                    lines.append(
                        f"  {t.timings.preemptions} preemptions,"
                        f" {t.timings.recomputed_tokens} tokens computed again"
                    )
    for span in story.spans:
        if span.name == "batcher.interrupted":
            cause = f": {why}" if (why := span.attributes.get("shoal.cause")) else ""
            lines += [f"  interrupted for {_ms((span.end_ns - span.start_ns) // 1000)}{cause}"]
    lines += [f"  {step.key} was lost: {step.error}" for step in story.steps if step.error]
    return "\n".join(["ownership", *lines]) + "\n" if lines else ""


def _ms(us: int) -> str:
    return f"{us / 1000:,.2f} ms"


def request_id_of(text: str) -> str:
    """Of a request: ids of OpenAI's answers and of batches' lines have it in them."""
    for prefix in ("chatcmpl-", "cmpl-", "batch_req_"):
        text = text.removeprefix(prefix)
    return text


async def why(nats_url: str, request_id: str, wait_s: float = 0.0) -> tuple[Story, str]:
    """Connects, collects, renders. Raises BusError when the bus does not answer."""
    from chassis import nats_bus

    bus = await nats_bus.connect(nats_url, name="why")
    try:
        story = await collect(bus, request_id, wait_s)
    finally:
        try:
            await bus.close()
        except BusError:
            pass  # it was only read from
    return story, render(story)


async def tell(bus: Bus, dial: Dial, arguments: argparse.Namespace) -> tuple[str, bool]:
    """The story of `request_id`, and whether there is any. Raises BusError."""
    story = await collect(bus, arguments.request_id)
    return render(story), bool(story.records or story.spans)

"""Spans of requests: what hangs below whom, also when the owner before died."""

from dataclasses import replace

from batcher.account import OPEN_MAX, Account, span_id_of
from batcher.events import Row, StepPlan
from chassis.ids import Attempt, BootId, Epoch, GatewayId, RequestId
from chassis.messages.request import Limits, Reason, Request, Sampling, Terminal, Usage
from chassis.trace import Span, SpanRing, TraceContext

ROOT = TraceContext(b"t" * 16, b"r" * 8)
REQUEST = Request(
    id=RequestId("r1"),
    tenant="",
    gateway=GatewayId("g"),
    model="fake",
    prompt_ids=(1, 2),
    seed=0,
    sampling=Sampling(),
    limits=Limits(max_tokens=4),
    trace_parent=ROOT.encode(),
)


def life(ring: SpanRing, boot: str, before: str = "", ends: bool = True) -> bytes:
    """Of a request at one batcher; returns the parent that others were given for their spans."""
    account = Account(BootId(boot), ring)
    account.delivered(REQUEST, 10, 20, 1)
    parent = TraceContext.decode(account.reference(REQUEST.id).trace_parent)
    assert parent is not None and parent.trace_id == ROOT.trace_id
    if before:
        account.followed(REQUEST.id, BootId(before), 1)
    account.claimed(REQUEST.id, 2 if before else 1)
    if ends:
        record = Terminal(Attempt(1), BootId(boot), Reason.LENGTH, (3,), usage=Usage(2, 0, 1))
        account.terminal(REQUEST.id, record)
        account.closed(REQUEST.id, "ended", 90)
    return parent.span_id


def summaries(ring: SpanRing) -> dict[bytes, Span]:
    spans, _ = ring.take()
    return {s.context.span_id: s for s in spans if s.name == "batcher.request"}


def test_what_others_recorded_hangs_below_the_summary() -> None:
    ring = SpanRing()
    parent = life(ring, "a")
    found = summaries(ring)
    assert found.keys() == {parent}
    assert found[parent].parent == ROOT.span_id


def test_the_heir_writes_what_the_dead_owner_cannot() -> None:
    """Its kvstore spans, say, are stored already, below a span that died with it."""
    ring = SpanRing()
    orphaned = life(SpanRing(), "a", ends=False)
    own = life(ring, "b", before="a")
    found = summaries(ring)
    assert found.keys() == {orphaned, own}
    dead = found[orphaned]
    assert (dead.parent, dead.error) == (ROOT.span_id, "batcher died")
    assert (dead.attributes["shoal.boot"], dead.attributes["shoal.attempt"]) == ("a", 1)
    assert (dead.start_ns, dead.end_ns) == (10, 20)


def test_nobody_is_taken_for_its_own_heir() -> None:
    ring = SpanRing()
    own = life(ring, "a", before="a")
    assert summaries(ring).keys() == {own}
    assert span_id_of(REQUEST.id, BootId("a")) != span_id_of(REQUEST.id, BootId("b"))


def test_a_step_that_comes_back_behind_the_end_is_none_of_the_request() -> None:
    ring = SpanRing()
    account = Account(BootId("a"), ring)
    account.delivered(REQUEST, 10, 20, 1)
    for number in (1, 2):
        row = Row(REQUEST.id, 0, 1 + number, (5,), True, number - 1, (), number == 1)
        account.sent(StepPlan(Epoch(1), number, (row,)), 30)
    account.returned(1, 1, (), 40)
    account.terminal(REQUEST.id, Terminal(Attempt(1), BootId("a"), Reason.STOP, (3,), usage=Usage(2, 0, 1)))
    account.returned(1, 2, (), 50)
    account.closed(REQUEST.id, "ended", 90)
    spans, _ = ring.take()
    (segment,) = [s for s in spans if s.name in ("batcher.prefill", "batcher.decode")]
    assert (segment.end_ns, segment.attributes["shoal.tokens"]) == (40, 1)
    assert [s.key for s in spans if s.name == "batcher.step"] == ["step:1:1"], "kept are the steps it had"


def test_what_was_turned_away_is_forgotten_in_the_end() -> None:
    ring = SpanRing()
    account = Account(BootId("b"), ring)
    for number in range(OPEN_MAX + 2):
        account.delivered(replace(REQUEST, id=RequestId(f"r{number}")), 10, 20, 1)
    assert len(account._open) == OPEN_MAX
    account.closed(RequestId("r0"), "ended", 90)
    assert not summaries(ring)

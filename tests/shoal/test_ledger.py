"""Where the milliseconds went: rows that add up, and what they say when they do not."""

from dataclasses import replace
from typing import Any

from chassis.ids import Attempt, BootId
from chassis.messages.request import Reason, Terminal, Timings, Usage
from chassis.trace import REQUESTS, STEPS, Span, TraceContext, encode_steps, step_context, step_key
from shoal.ledger import FIRST_TOKEN, Ledger, ledger, times

MS = 1_000_000
TRACE = b"\x01" * 16


def span(name: str, start_ms: float, end_ms: float, **attributes: Any) -> Span:
    context = TraceContext(TRACE, name.encode().ljust(8, b"_")[-8:])
    return Span("r", name, context, None, round(start_ms * MS), round(end_ms * MS), attributes)


def step(number: int, start_ms: float, end_ms: float, compute_us: int = 0, wait_us: int = 0) -> Span:
    attributes: dict[str, Any] = {
        "shoal.stage.0.compute_us": compute_us // 2,
        "shoal.stage.1.compute_us": compute_us - compute_us // 2,
        "shoal.stage.0.wait_us": wait_us,
        REQUESTS: "r,other",
    }
    key, context = step_key(7, number), step_context("b", 7, number)
    return Span(key, "batcher.step", context, None, round(start_ms * MS), round(end_ms * MS), attributes)


def segment(name: str, start_ms: float, end_ms: float, first: int, last: int) -> Span:
    return span(name, start_ms, end_ms, **{STEPS: encode_steps([(7, n) for n in range(first, last + 1)])})


def terminal(**rows: int) -> Terminal:
    timings = replace(Timings(), **rows)  # type: ignore[arg-type]
    return Terminal(Attempt(1), BootId("b"), Reason.STOP, (1, 2), usage=Usage(3, 0, 2), timings=timings)


# a request: accepted at 3 ms, stored at 4, delivered at 6, admitted at 7, first token at 27, last at 67,
# recorded at 69, told at 70
SPANS = [
    span("gateway.generate", 0, 70, **{FIRST_TOKEN: 28_000}),
    span("gateway.publish", 3, 5),
    span("batcher.request", 4, 69.5, **{"gen_ai.response.finish_reasons": "stop"}),
    segment("batcher.prefill", 8, 27, 1, 1),
    segment("batcher.decode", 27, 67, 2, 3),
    span("batcher.finish", 67, 69),
]
TERMINAL = terminal(queued_us=2000, waiting_us=1000, prefill_us=20_000, decode_us=40_000)
STEPS_MADE = [step(1, 8, 27, 15_000, 1000), step(2, 28, 46, 10_000), step(3, 48, 66, 10_000)]


def made(
    spans: list[Span] = SPANS, steps: list[Span] = STEPS_MADE, end: Terminal | None = TERMINAL
) -> Ledger:
    book = ledger(spans, end, 69 * MS, steps)
    assert book is not None
    return book


def rows(book: Ledger, inner: bool = False) -> dict[str, int]:
    return {row.name: row.us for row in book.rows if row.inner == inner}


def test_the_rows_add_up() -> None:
    book = made()
    assert book.total_us == 70_000
    assert book.unaccounted_us == 0
    assert rows(book) == {
        "accept": 3000,
        "publish": 1000,
        "queue": 2000,
        "wait": 1000,
        "prefill": 20_000,
        "decode": 40_000,
        "record": 2000,
        "delivery": 1000,
    }


def test_what_is_missing_shows() -> None:
    late = terminal(queued_us=2000, waiting_us=1000, prefill_us=10_000, decode_us=40_000)
    assert made(end=late).unaccounted_us == 10_000
    more = terminal(queued_us=2000, waiting_us=1000, prefill_us=25_000, decode_us=40_000)
    assert made(end=more).unaccounted_us == -3000  # beyond the record's end


def test_inner_rows_split_the_one_above() -> None:
    inner = [(row.name, row.us) for row in made().rows if row.inner]
    assert inner == [
        ("compute", 15_000),
        ("stage wait", 1000),
        ("ring", 3000),
        ("between steps", 1000),
        ("compute", 20_000),
        ("stage wait", 0),
        ("ring", 16_000),
        ("between steps", 4000),
    ]


def test_the_first_token_has_its_own_rows() -> None:
    book = made()
    assert book.first_us == 28_000
    assert book.first_unaccounted_us == 0
    assert [row.name for row in book.first_rows if not row.inner] == [
        "accept",
        "publish",
        "queue",
        "wait",
        "prefill",
        "delivery",
    ]
    assert book.first_added_us == 28_000 - 15_000


def test_a_claim_that_is_late_holds_the_first_token_back() -> None:
    late = made([*SPANS, span("batcher.claim", 8, 27.6)])
    rows = {row.name: row.us for row in late.first_rows if not row.inner}
    assert (rows["claim"], rows["delivery"]) == (600, 400)
    early = made([*SPANS, span("batcher.claim", 8, 20)])
    assert "claim" not in {row.name for row in early.first_rows}


def test_steps_that_overlap_count_once() -> None:
    overlapping = [step(1, 0, 10, 6000), step(2, 2, 12, 6000), step(3, 4, 14, 6000)]
    t = times(overlapping, 20_000)
    assert (t.compute, t.wait, t.ring, t.between) == (14_000, 0, 0, 6000)
    assert sum(row.us for row in t.rows()) == 20_000


def test_without_steps_there_are_no_inner_rows() -> None:
    book = made(steps=[])
    assert rows(book, inner=True) == {}
    assert book.unaccounted_us == 0


def test_without_a_gateway_the_batchers_view_remains() -> None:
    alone = [s for s in SPANS if not s.name.startswith(("gateway.", "batcher.finish"))]
    book = made(spans=[*alone, span("batcher.finish", 67, 70)])  # stored at 69, known to be at 70
    assert book.total_us == 66_000
    assert book.unaccounted_us == 0
    assert book.first_us is None


def test_an_interruption_is_a_row_and_hides_the_first_token() -> None:
    broken = terminal(
        queued_us=2000, waiting_us=1000, prefill_us=20_000, decode_us=30_000, interrupted_us=10_000
    )
    book = made([*SPANS, span("batcher.interrupted", 30, 40)], end=broken)
    assert rows(book)["interrupted"] == 10_000
    assert book.unaccounted_us == 0
    assert book.first_us is None


def test_a_record_that_had_to_wait_for_the_bus_counts_once() -> None:
    """The owner counts the wait as interruption; the record's row begins where its count ends."""
    broken = terminal(
        queued_us=2000, waiting_us=1000, prefill_us=20_000, decode_us=40_000, interrupted_us=10_000
    )
    late = [span("gateway.generate", 0, 80), span("batcher.finish", 77, 79)]
    book = made([*(s for s in SPANS if s.name != "gateway.generate"), *late], end=broken)
    assert (rows(book)["interrupted"], rows(book)["record"]) == (10_000, 2000)
    assert book.unaccounted_us == 0


def test_a_turn_of_the_owner_that_came_late_counts_once() -> None:
    """Its clock stands at the turn that took the last token in, its span's at the token's arrival."""
    late = terminal(queued_us=2000, waiting_us=1000, prefill_us=20_000, decode_us=41_500)
    book = made(end=late)
    assert (rows(book)["decode"], rows(book)["record"]) == (41_500, 500)
    assert book.unaccounted_us == 0


def test_a_resumed_request_is_told_from_its_beginning() -> None:
    spans = [s for s in SPANS if s.name not in ("gateway.generate", "gateway.publish")]
    book = made([*spans, span("gateway.resume", 40, 71)])
    assert book.total_us == 67_000  # from the broker's stamp
    assert book.unaccounted_us == 0
    assert rows(book)["delivery"] == 2000


def test_the_owner_that_ended_it_counts() -> None:
    """A dead owner's summary may have been written by its successor, later or earlier."""
    other = span("batcher.request", 30, 90)
    assert made(spans=[*SPANS, other]).unaccounted_us == 0


def test_what_never_reached_a_batcher_has_one_row() -> None:
    book = ledger([span("gateway.generate", 0, 5)], None, 0, [])
    assert book is not None
    assert (book.total_us, rows(book)) == (5000, {"gateway": 5000})
    assert ledger([], None, 0, []) is None

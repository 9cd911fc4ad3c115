"""Receipts: a function of the terminal record, said on a subject that says whose they are."""

from dataclasses import replace

import pytest

from chassis import subjects, usage_subjects
from chassis.ids import Attempt, BootId, RequestId
from chassis.messages import BadMessage
from chassis.messages.request import Reason, Terminal, Timings, Usage, build_record, parse_record
from chassis.messages.usage import build_receipt, parse_receipt, receipt_of

END = Terminal(
    attempt=Attempt(3),
    boot=BootId("b"),
    reason=Reason.CANCELLED,
    output_ids=(1, 2),
    usage=Usage(9, 4, 2),
    timings=Timings(1_000, 2_000, 3_000, 4_000, 5_500, 6, 7, (11, 12)),
    tenant="acme",
    model="m",
    key="laptop",
    priority=9,
    choice=2,
    accepted_ms=1_000_000,
    worker_deaths=1,
    batcher_deaths=2,
)
R = RequestId("r1c2")


def test_a_receipt_says_what_the_record_says() -> None:
    r = receipt_of(R, END)
    assert (r.tenant, r.key, r.model, r.priority, r.reason) == ("acme", "laptop", "m", 9, Reason.CANCELLED)
    assert (r.usage, r.timings, r.attempts) == (END.usage, END.timings, 3)
    assert (r.worker_deaths, r.batcher_deaths) == (1, 2)
    assert (r.accepted_ms, r.ended_ms) == (1_000_000, 1_000_015), "the rows sum to the time between"


def test_whoever_reads_the_record_writes_the_same_receipt() -> None:
    read = parse_record(build_record(END))
    assert isinstance(read, Terminal)
    assert build_receipt(receipt_of(R, read)) == build_receipt(receipt_of(R, END))


def test_receipts_come_through_the_bus_whole() -> None:
    receipt = receipt_of(R, END)
    assert parse_receipt(build_receipt(receipt)) == receipt


def test_choices_share_the_id_of_their_call() -> None:
    assert receipt_of(R, END).call_id == "r1"
    first = Terminal(Attempt(1), BootId("b"), Reason.STOP, ())
    assert receipt_of(RequestId("xc2"), first).call_id == "xc2", "an id may end so by itself"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff",
        b"",
        build_receipt(receipt_of(R, END))[:20],
        build_receipt(replace(receipt_of(R, END), ended_ms=1 << 60)),
        build_receipt(receipt_of(R, replace(END, timings=Timings(stage_compute_us=(1,) * 5000)))),
    ],
)
def test_garbage_is_no_receipt(data: bytes) -> None:
    with pytest.raises(BadMessage):
        parse_receipt(data)


def test_the_subject_names_tenant_and_model() -> None:
    assert usage_subjects.receipt("acme", "a/b:1", R) == "shoal.use.acme.a=2Fb=3A1.r1c2"
    assert usage_subjects.receipt("", "m", R) == "shoal.use.-.m.r1c2"
    assert usage_subjects.receipt("-", "m", R) == "shoal.use.=2D.m.r1c2", "not the unnamed one"
    assert usage_subjects.receipts() == "shoal.use.*.*.*"
    assert usage_subjects.receipts(tenant="a.b") == "shoal.use.a=2Eb.*.*"
    assert usage_subjects.receipts(model="m") == "shoal.use.*.m.*"


def test_no_name_leaves_its_token() -> None:
    """Whatever a tenant is called, it gets one token, which the stream takes in."""
    for name in ("*", ">", "a b", "ü" * 400, "a.*.>", "\r\n"):
        subject = usage_subjects.receipt(name, "m", R)
        assert subject.count(".") == 4 and subjects.matches("shoal.use.*.*.*", subject)
        assert subject.isascii() and not set(subject) & set("*> \r\n")
        assert len(subject) < 500

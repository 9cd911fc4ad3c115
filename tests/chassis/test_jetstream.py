"""What the broker says is understood, and what it does not say is not believed."""

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis import jetstream as js
from chassis.bus import Appended
from chassis.errors import BusError, BusUnavailable, MessageTooLarge, StreamFull, SubjectTaken, WrongSequence
from chassis.jetstream import TokenParts


def test_tokens_of_both_forms() -> None:
    parts = TokenParts("REQUESTS", "b-m-5", 2, 17, 4, 1796046353130402753, 3)
    assert js.parse_token("$JS.ACK.REQUESTS.b-m-5.2.17.4.1796046353130402753.3") == parts
    assert js.parse_token("$JS.ACK._.hash.REQUESTS.b-m-5.2.17.4.1796046353130402753.3") == parts
    assert js.parse_token("$JS.ACK.hub.hash.REQUESTS.b-m-5.2.17.4.1796046353130402753.3.any") == parts
    for foreign in ("", "_INBOX.a.b", "$JS.ACK", "$JS.ACK.S.C.x.1.1.1.1", "$JS.API.a.b.c.1.1.1.1"):
        assert js.parse_token(foreign) is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ('{"err_code":10071,"description":"wrong last sequence: 1"}', WrongSequence),
        ('{"err_code":10164,"description":"wrong last sequence"}', WrongSequence),
        ('{"err_code":10077,"description":"maximum messages per subject exceeded"}', SubjectTaken),
        ('{"err_code":10077,"description":"maximum messages exceeded"}', StreamFull),
        ('{"err_code":10077,"description":"maximum bytes exceeded"}', StreamFull),
        ('{"err_code":10077,"description":"disk on fire"}', BusUnavailable),
        ('{"err_code":10054,"description":"message size exceeds maximum allowed"}', MessageTooLarge),
        ('{"err_code":10008,"description":"JetStream system temporarily unavailable"}', BusUnavailable),
        ('{"description":"?"}', BusUnavailable),
    ],
)
def test_refusals(answer: str, error: type[BusError]) -> None:
    with pytest.raises(error) as raised:
        js.parse_append("x", f'{{"error":{answer},"stream":"S","seq":0}}'.encode())
    assert type(raised.value) is error


def test_appended() -> None:
    assert js.parse_append("x", b'{"stream":"S","seq":7}') == Appended(7, False)
    assert js.parse_append("x", b'{"stream":"S","seq":7,"duplicate": true}') == Appended(7, True)
    for foreign in (b"", b"+OK", b"[]", b"{}"):
        with pytest.raises(BusUnavailable):
            js.parse_append("x", foreign)


def test_stored() -> None:
    stored = js.parse_stored(
        "x",
        b'{"message":{"subject":"shoal.res.r","seq":3,"hdrs":"TkFUUy8xLjANCnRyYWNlOiBhOmINCg0K",'
        b'"data":"eA==","time":"2026-11-30T13:45:53.134199064Z"}}',
    )
    assert stored is not None
    assert (stored.subject, stored.seq, stored.data, stored.headers) == (
        "shoal.res.r",
        3,
        b"x",
        {"trace": "a:b"},
    )
    assert stored.stored_at_ns == 1796046353134199064
    assert js.parse_stored("x", b'{"error":{"code":404,"err_code":10037,"description":"no message"}}') is None
    for foreign in (b'{"message":{}}', b'{"message":3}', b'{"error":{"code":503,"err_code":10008}}', b"?"):
        with pytest.raises(BusUnavailable):
            js.parse_stored("x", foreign)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(0, 4_000_000_000), st.integers(0, 999_999_999), st.sampled_from(["Z", "+00:00", "+02:00"]))
def test_times_to_the_nanosecond(seconds: int, nanos: int, zone: str) -> None:
    offset_s = 7200 if zone == "+02:00" else 0
    local = datetime.fromtimestamp(seconds, timezone(timedelta(seconds=offset_s)))
    text = local.strftime("%Y-%m-%dT%H:%M:%S")
    fraction = f".{nanos:09d}".rstrip("0").rstrip(".")
    assert js.parse_time_ns(text + fraction + zone) == seconds * 10**9 + nanos


def test_differences_ignore_what_is_left_out_when_empty() -> None:
    assert js.differences({"a": 1, "more": 2}, {"a": 1, "b": False, "c": 0, "d": None}) == []
    assert js.differences({"a": 1}, {"a": 2, "b": True}) == ["a is 1, not 2", "b is None, not True"]

"""Subjects are safe whatever a model is called, and come back as they went in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis import subjects
from chassis.ids import BootId, GatewayId, RequestId

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=15)
tame = settings(deadline=None, derandomize=True, max_examples=60)


@tame
@given(names, st.sampled_from(subjects.PRIORITIES))
def test_a_request_comes_back(model: str, priority: int) -> None:
    subject = subjects.request(model, priority, RequestId("01jabc"))
    assert len(subject.split(".")) == 5
    assert not set(subject) & set(" *>\r\n\t")
    assert subjects.parse_request(subject) == subjects.RequestSubject(model, priority, RequestId("01jabc"))


@tame
@given(names, names)
def test_two_models_never_share_a_token(one: str, other: str) -> None:
    assert (one == other) == (subjects.model_token(one) == subjects.model_token(other))


def test_golden() -> None:
    """Other NATS clients rely on these."""
    model, rid, boot = "org/Some-Model_1.5", RequestId("01jr"), BootId("b00t")
    assert subjects.request(model, 5, rid) == "shoal.req.org=2FSome-Model_1=2E5.5.01jr"
    assert subjects.model_of_token("org=2FSome-Model_1=2E5") == model
    assert subjects.result(rid) == "shoal.res.01jr"
    assert subjects.trace(rid) == "shoal.trace.01jr"
    assert subjects.dead(rid) == "shoal.dead.01jr"
    assert subjects.chunks(GatewayId("g1")) == "shoal.tok.g1"
    assert subjects.owner(boot) == "shoal.own.b00t"
    assert subjects.batchers(model) == "shoal.bat.org=2FSome-Model_1=2E5"
    assert (subjects.TAKEOVER, subjects.KEEP) == ("shoal.takeover", "shoal.keep")
    assert subjects.consumer_name("m.1", 9) == "b-m=2E1-9"
    assert subjects.registry_subject(subjects.epoch_key("m.1")) == "$KV.shoal-registry.epoch.m=2E1"
    assert subjects.registry_key("$KV.shoal-registry.worker.b00t") == subjects.worker_key(boot)
    assert subjects.card_object("ab12") == "card.ab12"


@pytest.mark.parametrize(
    "subject",
    [
        "shoal.req.m.5",
        "shoal.req.m.10.r",
        "shoal.req.m.x.r",
        "shoal.req.m.5.r.s",
        "shoal.req.=2f.5.r",
        "shoal.req.m=.5.r",
        "shoal.req.m..r",
        "shoal.req..5.r",
        "shoal.res.m.5.r",
        "shoal.req.m.5.r/s",
        "shoal.req.=FF.5.r",
    ],
)
def test_foreign_subjects_are_not_requests(subject: str) -> None:
    assert subjects.parse_request(subject) is None


def test_names_out_of_bounds() -> None:
    with pytest.raises(ValueError, match="1 to 200"):
        subjects.model_token("")
    with pytest.raises(ValueError, match="1 to 200"):
        subjects.model_token("." * 67)
    with pytest.raises(AssertionError):
        subjects.result(RequestId("a.b"))
    with pytest.raises(AssertionError):
        subjects.result(RequestId(""))
    with pytest.raises(AssertionError):
        subjects.request("m", 10, RequestId("r"))


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.b", "a", False),
        ("a", "a.b", False),
        ("*", "a", True),
        (">", "a.b", True),
        ("a.b*", "a.bc", False),
    ],
)
def test_wildcards(pattern: str, subject: str, expected: bool) -> None:
    assert subjects.matches(pattern, subject) is expected


@tame
@given(
    st.lists(st.sampled_from("abc."), max_size=8).map("".join), st.sampled_from(["a", "a.b", "a.b.c", "b.a"])
)
def test_a_prefixs_filter_holds_all_its_keys(prefix: str, key: str) -> None:
    if key.startswith(prefix):
        assert subjects.matches(subjects.registry_filter(prefix), subjects.registry_subject(key))


def test_every_stream_is_bounded_and_states_its_loss() -> None:
    for stream in subjects.LAYOUT:
        assert stream.bytes_max > 0, stream.name
        assert stream.loss_window, stream.name
    held = sum(stream.bytes_max for stream in subjects.LAYOUT)
    assert held < 16 * subjects.GIB  # what the embedded broker may store


def test_a_models_consumers_part_its_requests() -> None:
    layout = subjects.consumers("m.1")
    for priority in subjects.PRIORITIES:
        subject = subjects.request("m.1", priority, RequestId("r"))
        assert [c.name for c in layout if subjects.matches(c.filter, subject)] == [
            subjects.consumer_name("m.1", priority)
        ]
    assert {c.ack_wait_s for c in layout} == {1.0}

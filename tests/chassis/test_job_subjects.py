"""Jobs' subjects: safe whatever names are, the same for every client, apart where they must be."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis import subjects
from chassis.job_subjects import (
    CONSUMER,
    JobName,
    answer,
    answer_of,
    answers,
    job,
    jobs,
    letter_of,
    parse_answer,
    parse_job,
)

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
tame = settings(deadline=None, derandomize=True, max_examples=100)


@tame
@given(st.one_of(st.just(""), st.just("-"), names), names, names, st.sampled_from((1, 2, 9999)))
def test_a_job_comes_back(tenant: str, queue: str, key: str, attempt: int) -> None:
    name = JobName(tenant, queue, key, attempt)
    subject = job(name)
    assert re.fullmatch(r"shoal\.job\.[\w=-]+\.[\w=-]+\.[\w=-]+", subject, re.ASCII)
    assert parse_job(subject) == name
    assert parse_answer(answer(name)) == name
    assert answer_of(subject) == answer(name)
    assert subjects.matches(jobs(tenant, queue), subject)
    assert subjects.matches(answers(tenant, queue), answer(name))


@tame
@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_two_jobs_are_never_one(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    first, second = JobName(*one), JobName(*other)
    assert (one == other) == (job(first) == job(second))
    assert (one[1:] == other[1:]) == (first.client_key == second.client_key)


def test_golden() -> None:
    """Other NATS clients rely on these."""
    name = JobName("", "nightly", "line 7")
    assert job(name) == "shoal.job.-.nightly.line=207"
    assert answer(name) == "shoal.ans.-.nightly.line=207"
    assert job(name.next) == "shoal.job.-.nightly.line=207=r2"
    assert job(JobName("-", "q", "k=r2")) == "shoal.job.=2D.q.k=3Dr2"
    assert letter_of(job(name)) == "shoal.dead.job.-.nightly.line=207"
    assert name.client_key == "job:nightly.line=207"
    assert name.next.client_key == "job:nightly.line=207=r2"
    assert (CONSUMER.stream, CONSUMER.name, CONSUMER.filter) == (subjects.JOBS, "jobs", "shoal.job.>")


@pytest.mark.parametrize(
    "subject",
    [
        "shoal.job.t.q",
        "shoal.job.t.q.k.l",
        "shoal.job..q.k",
        "shoal.job.t.q.",
        "shoal.job.t.q.a b",
        "shoal.job.t.q.=2d",
        "shoal.job.t.q.=41",  # a letter is written as itself
        "shoal.job.t.q.k=r1",
        "shoal.job.t.q.k=r01",
        "shoal.job.t.q.k=r10000",
        "shoal.job.t.q.=r2",
        "shoal.job.t.q.=FF",
        "shoal.ans.t.q.k",
        f"shoal.job.{'t' * 129}.q.k",
        f"shoal.job.t.{'q' * 65}.k",
        f"shoal.job.t.q.{'k' * 161}",
    ],
)
def test_what_is_no_job(subject: str) -> None:
    assert parse_job(subject) is None


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (JobName("t" * 129, "q", "k"), "tenant"),
        (JobName("t", "", "k"), "queue"),
        (JobName("t", "/" * 22, "k"), "queue: 66 characters"),
        (JobName("t", "q", ""), "key"),
        (JobName("t", "q", "k" * 158, 2), "key: 161 characters"),
    ],
)
def test_names_that_are_too_long_are_refused(name: JobName, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        job(name)
    assert len(JobName("t", "q" * 64, "k" * 160).client_key) <= 256


def test_tries_come_to_an_end() -> None:
    with pytest.raises(ValueError, match="9999 times"):
        _ = JobName("t", "q", "k", 9999).next

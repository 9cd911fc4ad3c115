"""Pure. The subjects of jobs and their answers, built here and nowhere else; public, for any NATS client.

    shoal.job.<tenant>.<queue>.<key>    a job, in JOBS
    shoal.ans.<tenant>.<queue>.<key>    its answer, in ANSWERS: the same tokens
    shoal.dead.job.<tenant>.<queue>.<key>    its letter, in DEAD, if it killed who ran it

A token is a name whose bytes other than letters, digits, `-` and `_` are written `=XX`; `-` alone is the
unnamed tenant, and a tenant that is really called so is `=2D`. A job that is tried anew after it was dead has
`=rN` behind its key, which no name is written as: another subject, another request, an answer of its own.
"""

import re
from dataclasses import dataclass, replace

from chassis.stream_layout import ConsumerLayout
from chassis.subjects import DEAD_PREFIX, JOB_PREFIX

QUEUE_LEN_MAX = 64  # characters of a token
KEY_LEN_MAX = 160
TENANT_LEN_MAX = 128
TRY_MAX = 9999
UNNAMED = "-"

_UNSAFE_BYTE = re.compile(rb"[^A-Za-z0-9_-]")
_TRY = re.compile(r"(.+)=r([1-9][0-9]{0,3})")
_ANSWER_PREFIX = "shoal.ans"
_TAKEN = re.compile(r"shoal\.job\.[^.]+\.[^.]+\.[^.]+")

CONSUMER = ConsumerLayout("JOBS", "jobs", f"{JOB_PREFIX}.>", ack_wait_s=5.0, ack_pending_max=16384)
PROGRESS_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class JobName:
    """`attempt` above 1: tried anew after its letter was among the dead."""

    tenant: str  # may be empty
    queue: str
    key: str
    attempt: int = 1

    @property
    def client_key(self) -> str:
        """What its request's id is derived from, beside the tenant."""
        return f"job:{_token(self.queue)}.{self._key_token}"

    @property
    def _key_token(self) -> str:
        return _token(self.key) + (f"=r{self.attempt}" if self.attempt > 1 else "")

    @property
    def _rest(self) -> str:
        return f"{tenant_token(self.tenant)}.{_token(self.queue)}.{self._key_token}"

    @property
    def next(self) -> "JobName":
        """Of the next try. Raises ValueError beyond the last."""
        if self.attempt >= TRY_MAX:
            raise ValueError(f"job {self.key!r}: tried {self.attempt} times")
        return replace(self, attempt=self.attempt + 1)

    def check(self) -> None:
        """Raises ValueError naming what is empty or too long."""
        for what, name, most in (
            ("tenant", tenant_token(self.tenant), TENANT_LEN_MAX),
            ("queue", _token(self.queue), QUEUE_LEN_MAX),
            ("key", self._key_token, KEY_LEN_MAX),
        ):
            if not 0 < len(name) <= most:
                raise ValueError(f"{what}: {len(name)} characters once encoded; 1 to {most}")


def tenant_token(tenant: str) -> str:
    return {"": UNNAMED, UNNAMED: "=2D"}.get(tenant) or _token(tenant)


def _token(name: str) -> str:
    return _UNSAFE_BYTE.sub(lambda m: b"=%02X" % m.group()[0], name.encode()).decode()


def job(name: JobName) -> str:
    """Raises ValueError."""
    name.check()
    return f"{JOB_PREFIX}.{name._rest}"


def answer(name: JobName) -> str:
    """Raises ValueError."""
    name.check()
    return f"{_ANSWER_PREFIX}.{name._rest}"


def answers(tenant: str, queue: str) -> str:
    """All of a queue."""
    return f"{_ANSWER_PREFIX}.{tenant_token(tenant)}.{_token(queue)}.*"


def jobs(tenant: str, queue: str) -> str:
    """All of a queue that still wait or run."""
    return f"{JOB_PREFIX}.{tenant_token(tenant)}.{_token(queue)}.*"


def answer_of(subject: str) -> str:
    """The answer's subject of any subject that JOBS takes, whatever its tokens are."""
    assert _TAKEN.fullmatch(subject), subject
    return _ANSWER_PREFIX + subject.removeprefix(JOB_PREFIX)


def letter_of(subject: str) -> str:
    """The letter's subject of any subject that JOBS takes."""
    assert _TAKEN.fullmatch(subject), subject
    return f"{DEAD_PREFIX}.job{subject.removeprefix(JOB_PREFIX)}"


LETTERS = f"{DEAD_PREFIX}.job.*.*.*"


def parse_job(subject: str) -> JobName | None:
    """What a subject of JOBS says; None for tokens that no name is written as, or too long ones."""
    return _parse(subject, JOB_PREFIX)


def parse_answer(subject: str) -> JobName | None:
    return _parse(subject, _ANSWER_PREFIX)


def _parse(subject: str, prefix: str) -> JobName | None:
    parts = subject.split(".")
    if len(parts) != 5 or ".".join(parts[:2]) != prefix:
        return None
    tried = _TRY.fullmatch(parts[4])
    key, attempt = (tried.group(1), int(tried.group(2))) if tried else (parts[4], 1)
    try:
        tenant = "" if parts[2] == UNNAMED else _name(parts[2])
        name = JobName(tenant, _name(parts[3]), _name(key), attempt)
        name.check()
    except ValueError:
        return None
    return name if name._rest == ".".join(parts[2:]) else None


def _name(token: str) -> str:
    """Raises ValueError."""
    return re.sub(rb"=([0-9A-F]{2})", lambda m: bytes([int(m.group(1), 16)]), token.encode()).decode()

"""Pure. Every subject, stream, consumer, bucket and key of the bus, built here and nowhere else.

`LAYOUT` states each stream's retention, bounds and loss window; `ensure_streams` of a bus creates it and
refuses one that differs. Everything in a subject is safe by construction: ids are checked, names encoded.
People with other NATS clients may rely on REQUESTS, RESULTS and DEAD and the subjects in them, on USAGE
(`chassis/usage_subjects.py`), on JOBS and ANSWERS (`chassis/job_subjects.py`), and on those of caches
(`cache_changes`, `cache_questions`; `proto/kvstore.proto` says how to listen).
"""

import re
from dataclasses import dataclass

from chassis.batch_layout import BATCH_LAYOUT
from chassis.ids import BootId, Epoch, GatewayId, RequestId
from chassis.stream_layout import ConsumerLayout, Discard, Retention, StreamLayout

PRIORITIES = range(10)  # 0 is the highest
TOKEN_LEN_MAX = 200

REQUESTS = "REQUESTS"
RESULTS = "RESULTS"
USAGE = "USAGE"
TRACES = "TRACES"
DEAD = "DEAD"
JOBS = "JOBS"
ANSWERS = "ANSWERS"
QUOTAS = "QUOTAS"
JOB_PREFIX = "shoal.job"
DEAD_PREFIX = "shoal.dead"
REGISTRY_BUCKET = "shoal-registry"
REGISTRY = f"KV_{REGISTRY_BUCKET}"
CARDS_BUCKET = "shoal-cards"
CARDS = f"OBJ_{CARDS_BUCKET}"

REGISTRY_TTL_S = 30.0
REGISTRY_REFRESH_S = 5.0
PROGRESS_INTERVAL_S = 0.25

# A record must outlive the longest request, its resume window and the oldest message together.
REQUEST_TIME_MAX_S = 12 * 3600.0
RESUME_WINDOW_MAX_S = 3600.0
RECORD_AGE_S = 24 * 3600.0
assert RECORD_AGE_S > REQUEST_TIME_MAX_S + RESUME_WINDOW_MAX_S
ANSWER_AGE_S = 7 * 24 * 3600.0

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


_SYNCED = "none that was acknowledged: synced before the answer (one server: `sync_interval: always`)"

LAYOUT: tuple[StreamLayout, ...] = (
    StreamLayout(  # accepted requests: a message lives until its terminal record exists
        REQUESTS,
        ("shoal.req.>",),
        Retention.WORK_QUEUE,
        Discard.NEW,
        msgs_max=100_000,
        bytes_max=1 * GIB,
        age_max_s=0,
        loss_window=_SYNCED,
        msgs_per_subject_max=1,
        discard_new_per_subject=True,
    ),
    StreamLayout(  # the ownership logs. Full: refuses, because forgetting a live record breaks the fence
        RESULTS,
        ("shoal.res.>",),
        Retention.LIMITS,
        Discard.NEW,
        msgs_max=5_000_000,
        bytes_max=4 * GIB,
        age_max_s=RECORD_AGE_S,
        loss_window=_SYNCED,
    ),
    StreamLayout(  # receipts. Full: forgets, because what waits for its receipt is not acknowledged
        USAGE,
        ("shoal.use.>",),
        Retention.LIMITS,
        Discard.OLD,
        msgs_max=5_000_000,
        bytes_max=2 * GIB,
        age_max_s=40 * 24 * 3600.0,
        loss_window=f"{_SYNCED}; and the oldest above the bound",
    ),
    StreamLayout(  # kept spans
        TRACES,
        ("shoal.trace.>",),
        Retention.LIMITS,
        Discard.OLD,
        msgs_max=1_000_000,
        bytes_max=256 * MIB,
        age_max_s=6 * 3600.0,
        loss_window="what a dying process had not sent yet (about a second), and the oldest above the bound",
        duplicate_window_s=1.0,
    ),
    StreamLayout(  # requests that failed as poison, with their history
        DEAD,
        ("shoal.dead.>",),
        Retention.LIMITS,
        Discard.OLD,
        msgs_max=100_000,
        bytes_max=256 * MIB,
        age_max_s=7 * 24 * 3600.0,
        loss_window="a letter whose writer dies between the terminal record and it",
    ),
    StreamLayout(  # jobs: a message lives until its answer exists
        JOBS,
        (f"{JOB_PREFIX}.*.*.*",),
        Retention.WORK_QUEUE,
        Discard.NEW,
        msgs_max=1_000_000,
        bytes_max=1 * GIB,
        age_max_s=0,
        loss_window=_SYNCED,
        msgs_per_subject_max=1,
        discard_new_per_subject=True,
    ),
    StreamLayout(  # their answers, one a subject, written if there is none. Full: refuses, and jobs wait
        ANSWERS,
        ("shoal.ans.*.*.*",),
        Retention.LIMITS,
        Discard.NEW,
        msgs_max=2_000_000,
        bytes_max=2 * GIB,
        age_max_s=ANSWER_AGE_S,
        loss_window=_SYNCED,
        msgs_per_subject_max=1,
        discard_new_per_subject=True,
    ),
    StreamLayout(  # what gateways together have granted to each API key: the last ledger counts
        QUOTAS,
        ("shoal.quota.*",),
        Retention.LIMITS,
        Discard.NEW,
        msgs_max=0,
        bytes_max=64 * MIB,
        age_max_s=2 * 24 * 3600.0,
        loss_window=_SYNCED,
        msgs_per_subject_max=1,
        duplicate_window_s=1.0,
    ),
    StreamLayout(  # who is there; every entry is written again each REGISTRY_REFRESH_S
        REGISTRY,
        (f"$KV.{REGISTRY_BUCKET}.>",),
        Retention.LIMITS,
        Discard.NEW,
        msgs_max=0,
        bytes_max=16 * MIB,
        age_max_s=REGISTRY_TTL_S,
        loss_window="one refresh; an epoch is also fixed by every worker's last one",
        msgs_per_subject_max=1,
        duplicate_window_s=REGISTRY_TTL_S,
        rollup_headers=True,
    ),
    StreamLayout(  # model cards, named by their digest; uploaded again by whoever serves the model
        CARDS,
        (f"$O.{CARDS_BUCKET}.C.>", f"$O.{CARDS_BUCKET}.M.>"),
        Retention.LIMITS,
        Discard.NEW,
        msgs_max=0,
        bytes_max=1 * GIB,
        age_max_s=0,
        loss_window=_SYNCED,
        rollup_headers=True,
    ),
    *BATCH_LAYOUT,
)

_SAFE = re.compile(r"[A-Za-z0-9_=-]+")
_UNSAFE_BYTE = re.compile(rb"[^A-Za-z0-9_-]")


def model_token(model: str) -> str:
    """A model's name as one subject token. Raises ValueError when it is empty or too long."""
    token = encoded(model)
    if not token or len(token) > TOKEN_LEN_MAX:
        raise ValueError(f"a model's name needs 1 to {TOKEN_LEN_MAX} characters once encoded: {model[:80]!r}")
    return token


def encoded(name: str) -> str:
    return _UNSAFE_BYTE.sub(lambda m: b"=%02X" % m.group()[0], name.encode()).decode()


def model_of_token(token: str) -> str:
    """Inverse of `model_token`. Raises ValueError on what it cannot have made."""
    model = re.sub(rb"=([0-9A-F]{2})", lambda m: bytes([int(m.group(1), 16)]), token.encode()).decode()
    if model_token(model) != token:
        raise ValueError(f"not a model token: {token[:80]!r}")
    return model


def _token(value: str) -> str:
    assert len(value) <= TOKEN_LEN_MAX and _SAFE.fullmatch(value), f"not a subject token: {value!r}"
    return value


# REQUESTS, RESULTS, TRACES, DEAD


def request(model: str, priority: int, request_id: RequestId) -> str:
    assert priority in PRIORITIES, priority
    return f"shoal.req.{model_token(model)}.{priority}.{_token(request_id)}"


def requests(model: str) -> str:
    """Every subject of a model's requests."""
    return f"shoal.req.{model_token(model)}.>"


def request_anywhere(request_id: RequestId) -> str:
    """Every subject that a request of this id may have."""
    return f"shoal.req.*.*.{_token(request_id)}"


@dataclass(frozen=True, slots=True)
class RequestSubject:
    model: str
    priority: int
    request_id: RequestId


def parse_request(subject: str) -> RequestSubject | None:
    """What a subject of REQUESTS says; None when it is not one of ours (anyone may publish)."""
    parts = subject.split(".")
    if len(parts) != 5 or parts[:2] != ["shoal", "req"] or not _SAFE.fullmatch(parts[4]):
        return None
    try:
        model = model_of_token(parts[2])
    except ValueError:
        return None
    if len(parts[3]) != 1 or parts[3] not in "0123456789":
        return None
    return RequestSubject(model, int(parts[3]), RequestId(parts[4]))


def result(request_id: RequestId) -> str:
    return f"shoal.res.{_token(request_id)}"


def trace(request_id: RequestId) -> str:
    return f"shoal.trace.{_token(request_id)}"


def step_traces(epoch: Epoch, run: int) -> str:
    """The spans of one run of consecutive steps."""
    return f"shoal.trace.step.{epoch}.{run}"


def dead(request_id: RequestId) -> str:
    return f"shoal.dead.{_token(request_id)}"


def consumer_name(model: str, priority: int) -> str:
    assert priority in PRIORITIES, priority
    return f"b-{model_token(model)}-{priority}"


def consumers(model: str) -> tuple[ConsumerLayout, ...]:
    """The consumers of a model's requests, highest priority first."""
    token = model_token(model)
    return tuple(
        ConsumerLayout(REQUESTS, consumer_name(model, p), f"shoal.req.{token}.{p}.*") for p in PRIORITIES
    )


def quota(key_id: str) -> str:
    """The ledger of one API key's quotas."""
    return f"shoal.quota.{_token(key_id)}"


# core messages

TAKEOVER = "shoal.takeover"  # takeover questions, to all gateways
KEEP = "shoal.keep"  # which requests and steps are kept in traces, to everyone


def chunks(gateway: GatewayId) -> str:
    """Chunks of tokens and finish frames to one gateway."""
    return f"shoal.tok.{_token(gateway)}"


def owner(boot: BootId) -> str:
    """To one batcher: owner questions and attaches (requests with reply), cancels, detaches, refusals."""
    return f"shoal.own.{_token(boot)}"


def cache_changes(boot: BootId) -> str:
    """What one kvstore (`*`: any) stores and evicts, while somebody asks: for routers and people."""
    return f"shoal.kv.{boot if boot == '*' else _token(boot)}"


def cache_questions(boot: BootId) -> str:
    """To one kvstore: what it holds, a piece at a time (request with reply)."""
    return f"shoal.kvask.{_token(boot)}"


def statistics(boot: BootId) -> str:
    """To one batcher: what its pipeline has done (request with reply)."""
    return f"shoal.stat.{_token(boot)}"


def batchers(model: str) -> str:
    """To all batchers of a model."""
    return f"shoal.bat.{model_token(model)}"


def loads(model: str) -> str:
    """To all batchers of a model: how busy each is."""
    return f"shoal.load.{model_token(model)}"


# registry keys and objects


def worker_key(boot: BootId) -> str:
    return f"worker.{_token(boot)}"


def batcher_key(boot: BootId) -> str:
    return f"batcher.{_token(boot)}"


def kvstore_key(boot: BootId) -> str:
    return f"kvstore.{_token(boot)}"


def gateway_key(boot: BootId) -> str:
    return f"gateway.{_token(boot)}"


def model_key(model: str) -> str:
    return f"model.{model_token(model)}"


def unloaded_key(model: str) -> str:
    return f"unloaded.{model_token(model)}"


def scale_key(model: str) -> str:
    return f"scale.{model_token(model)}"


def epoch_key(model: str) -> str:
    return f"epoch.{model_token(model)}"


WORKERS = "worker."
BATCHERS = "batcher."
KVSTORES = "kvstore."
GATEWAYS = "gateway."
MODELS = "model."
UNLOADED = "unloaded."


def card_object(digest_hex: str) -> str:
    """The object of a model's card; the digest is the card's own SHA-256."""
    return f"card.{_token(digest_hex)}"


def registry_subject(key: str) -> str:
    assert is_key(key), f"not a registry key: {key!r}"
    return f"$KV.{REGISTRY_BUCKET}.{key}"


def registry_key(subject: str) -> str:
    return subject.removeprefix(f"$KV.{REGISTRY_BUCKET}.")


def registry_filter(prefix: str) -> str:
    """The narrowest subject filter that holds every key with this prefix (it may hold others too)."""
    whole, dot, _ = prefix.rpartition(".")
    return f"$KV.{REGISTRY_BUCKET}.{whole}{dot}>"


def is_key(key: str) -> bool:
    return all(_SAFE.fullmatch(part) for part in key.split("."))


def is_pattern(subject: str) -> bool:
    """Whether it may stand for several."""
    return "*" in subject or ">" in subject


def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, `>` the rest (at least one)."""
    if pattern == subject:
        return True
    if not is_pattern(pattern):
        return False
    wanted, given = pattern.split("."), subject.split(".")
    for i, token in enumerate(wanted):
        if token == ">":
            return len(given) > i
        if i >= len(given) or token not in ("*", given[i]):
            return False
    return len(wanted) == len(given)

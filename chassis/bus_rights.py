"""Pure. What each service may do on the bus: the least that it needs, as permissions of NATS.

Subjects are of kinds, not of processes: where all batchers write (`shoal.res.*`) each may write any. Streams
are created by whoever comes first, and changed, emptied or deleted by nobody but the operator. Not covered:
NATS does not check a consumer's delivery subject, so that who may create consumers of the registry could have
entries delivered where it may not publish.
"""

from dataclasses import dataclass

from chassis import subjects
from chassis.batch_layout import BATCHES, DRIVES, FILES

API = "$JS.API"
OPERATOR = "operator"  # the `shoal` command and the launcher
REGISTRY_KEYS = f"$KV.{subjects.REGISTRY_BUCKET}"


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects with wildcards. Everybody may answer what it was asked, and listens to its own inboxes."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_prefix(user: str) -> str:
    return f"_INBOX.{user}"


def _reads(*streams: str) -> tuple[str, ...]:
    return tuple(f"{API}.STREAM.MSG.GET.{stream}" for stream in streams)


def _watches(stream: str) -> tuple[str, ...]:
    return (f"{API}.CONSUMER.CREATE.{stream}.>",)


def _scans(*streams: str) -> tuple[str, ...]:
    verbs = ("CREATE", "MSG.NEXT", "DELETE")
    return tuple(f"{API}.CONSUMER.{verb}.{stream}.>" for stream in streams for verb in verbs)


def _consumes(stream: str) -> tuple[str, ...]:
    return (
        f"{API}.CONSUMER.DURABLE.CREATE.{stream}.*",
        f"{API}.CONSUMER.INFO.{stream}.*",
        f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"$JS.ACK.{stream}.>",
    )


def _entries(*kinds: str) -> tuple[str, ...]:
    return tuple(f"{REGISTRY_KEYS}.{kind}.*" for kind in kinds)


def _of(user: str, publish: tuple[str, ...], subscribe: tuple[str, ...]) -> Rights:
    """With what every service needs: the layout, traces, its inboxes."""
    layout = tuple(
        f"{API}.STREAM.{verb}.{stream.name}" for stream in subjects.LAYOUT for verb in ("CREATE", "INFO")
    )
    inboxes = f"{inbox_prefix(user)}.>"
    return Rights(
        (*publish, subjects.KEEP, "shoal.trace.>", inboxes, *layout),
        (*subscribe, subjects.KEEP, inboxes),
    )


def rights() -> dict[str, Rights]:
    """By user, which is the service's name."""
    kvstore = ("shoal.kv.*", *_entries("kvstore"), *_reads(subjects.REGISTRY))
    shard_worker = (
        *_entries("worker", "model"),
        f"$O.{subjects.CARDS_BUCKET}.>",
        f"{API}.STREAM.PURGE.{subjects.CARDS}",
        *_reads(subjects.REGISTRY, subjects.CARDS),
    )
    return {
        "gateway": _of("gateway", _GATEWAY, ("shoal.tok.*", subjects.TAKEOVER)),
        "batcher": _of("batcher", _BATCHER, ("shoal.own.*", "shoal.bat.*", "shoal.load.*", "shoal.stat.*")),
        "kvstore": _of("kvstore", kvstore, ("shoal.kvask.*",)),
        "shard_worker": _of("shard_worker", shard_worker, ()),
        "autoscale": _of("autoscale", _AUTOSCALE, ("shoal.load.*",)),
        OPERATOR: Rights((">",), (">",)),
    }


_GATEWAY = (
    "shoal.req.*.*.*",
    "shoal.res.*",
    "shoal.own.*",
    "shoal.bat.*",
    f"{subjects.JOB_PREFIX}.*.*.*",
    "shoal.ans.*.*.*",
    "shoal.dead.job.>",
    "shoal.quota.*",
    "shoal.file.*.*",
    "shoal.piece.*",
    "shoal.batch.*.*",
    "shoal.drive.*.*",
    f"{API}.STREAM.PURGE.{FILES}",
    *_reads(FILES, BATCHES),
    *_scans(FILES, BATCHES),
    *_consumes(DRIVES),
    "shoal.stat.*",
    *_entries("gateway", "unloaded"),
    *_reads(subjects.REQUESTS, subjects.RESULTS, subjects.JOBS, subjects.ANSWERS, subjects.QUOTAS),
    *_reads(subjects.REGISTRY, subjects.CARDS),
    *_watches(subjects.REGISTRY),
    *_consumes(subjects.JOBS),
)
_AUTOSCALE = (
    *_entries("model", "scale"),
    *_reads(subjects.REQUESTS, subjects.REGISTRY),
    *_watches(subjects.REGISTRY),
    f"{API}.CONSUMER.DURABLE.CREATE.{subjects.REQUESTS}.*",
    f"{API}.CONSUMER.INFO.{subjects.REQUESTS}.*",
)
_BATCHER = (
    "shoal.tok.*",
    subjects.TAKEOVER,
    "shoal.res.*",
    "shoal.dead.*",
    "shoal.use.*.*.*",
    "shoal.own.*",
    "shoal.load.*",
    *_entries("batcher", "epoch"),
    *_reads(subjects.RESULTS, subjects.USAGE, subjects.REGISTRY, subjects.CARDS),
    *_watches(subjects.REGISTRY),
    *_consumes(subjects.REQUESTS),
)

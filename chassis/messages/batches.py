"""Pure. Files and batches as they are stored, in JSON. Times are whole seconds since 1970."""

from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

import orjson

from chassis.messages import BadMessage

BATCH_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


class BatchState(Enum):
    """In OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in _OVER


_OVER = {BatchState.FAILED, BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """`place` names its pieces, of which there are `pieces`."""

    id: str
    tenant: str
    place: str
    pieces: int
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with an input file. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """Of the requests that have an answer, and what they used."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """`driver`: boot id of the gateway that drives it. `ending`: what it will be with its files written."""

    id: str
    tenant: str
    key: str  # of its owner
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    state: BatchState = BatchState.VALIDATING
    ending: BatchState = BatchState.COMPLETED
    driver: str = ""
    metadata: dict[str, str] | None = None
    output_age_s: int | None = None
    model: str | None = None
    total: int = 0
    tally: Tally = field(default_factory=Tally)
    problems: tuple[Problem, ...] = ()
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None


def build_file(file: StoredFile) -> bytes:
    return orjson.dumps(asdict(file))


def parse_file(data: bytes) -> StoredFile:
    """Raises BadMessage."""
    return _made(StoredFile, _object(data))


def build_batch(batch: Batch) -> bytes:
    return orjson.dumps(asdict(batch))


def parse_batch(data: bytes) -> Batch:
    """Raises BadMessage."""
    given = _object(data)
    try:
        given["state"], given["ending"] = BatchState(given["state"]), BatchState(given["ending"])
        given["tally"] = _made(Tally, given["tally"])
        given["problems"] = tuple(_made(Problem, problem) for problem in given["problems"])
    except (KeyError, ValueError, TypeError) as error:
        raise BadMessage(f"not a batch: {error}") from None
    return _made(Batch, given)


def _object(data: bytes) -> dict[str, Any]:
    try:
        given = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadMessage(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadMessage("not an object")
    return given


T = TypeVar("T")


def _made(kind: type[T], given: dict[str, Any]) -> T:
    """Fields that this version does not know are left out. Raises BadMessage."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    try:
        return kind(**{name: value for name, value in given.items() if name in names})
    except (TypeError, AttributeError) as error:
        raise BadMessage(f"not a {kind.__name__}: {error}") from None

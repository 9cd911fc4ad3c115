"""Pure. What an answer of a job means for its batch: a line of one of the two files, and a count."""

from dataclasses import dataclass
from typing import Any

import orjson

from chassis.bus import Stored
from chassis.job_subjects import parse_answer
from chassis.messages import BadMessage
from chassis.messages.jobs import AnswerLine, answer_id, parse_answer_line
from gateway.batches.events import AnswerSeen

OTHER = "invalid_answer"


@dataclass(frozen=True, slots=True)
class BatchLine:
    seen: AnswerSeen
    data: bytes  # with its line end


def index_of(stored: Stored, total: int) -> int | None:
    """Which request of a batch it answers; None for what is none of its answers (a second try, for one)."""
    name = parse_answer(stored.subject)
    if name is None or name.attempt != 1:
        return None
    key = name.key
    if not (key.isascii() and key.isdecimal() and len(key) < 8 and str(int(key)) == key and int(key) < total):
        return None
    return int(key)


def seen(index: int, stored: Stored) -> AnswerSeen:
    try:
        return _seen(index, parse_answer_line(stored.data))
    except BadMessage:
        return AnswerSeen(index, ok=False)


def _seen(index: int, answer: AnswerLine) -> AnswerSeen:
    usage = (answer.body or {}).get("usage") if isinstance(answer.body, dict) else None
    if not answer.ok or not isinstance(usage, dict):
        return AnswerSeen(index, answer.ok)
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return AnswerSeen(
        index,
        True,
        _count(usage.get("prompt_tokens")),
        _count(cached),
        _count(usage.get("completion_tokens")),
    )


def line(index: int, custom_id: str, stored: Stored) -> BatchLine:
    """Under the custom_id of the input, whatever the answer says: anybody may store one."""
    try:
        said = _seen(index, parse_answer_line(stored.data))
        told: dict[str, Any] = orjson.loads(stored.data)
        one = {key: told.get(key) for key in ("id", "custom_id", "response", "error")}
        one["custom_id"] = custom_id
        return BatchLine(said, orjson.dumps(one) + b"\n")
    except (BadMessage, TypeError):  # or nested deeper than is written
        said = AnswerSeen(index, ok=False)
        error = {"code": OTHER, "message": "what was stored as its answer is none"}
        one = {"id": answer_id(f"{stored.seq}"), "custom_id": custom_id, "response": None, "error": error}
    return BatchLine(said, orjson.dumps(one) + b"\n")


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0

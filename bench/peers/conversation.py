"""Pure. What the bench and a peer say to each other: one JSON object a line, a question then its answer.

A peer's process runs in the peer's own environment, so this file needs nothing but Python. The peer takes
the times itself, by one clock that starts when the run does.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


class Failed(Exception):
    """The peer answered that it can't, or something that is no answer; the message says what."""


@dataclass(frozen=True, slots=True)
class Load:
    model: str  # a file or folder of the kind that this peer takes
    dtype: str  # float32, bfloat16, or what the file says (packed)
    threads: int
    sequences_max: int = 64
    context_len_max: int = 1280
    cache_mb: int = 2048


@dataclass(frozen=True, slots=True)
class Ask:
    """All prompts at once, greedy, the end token ignored."""

    prompts: Sequence[Sequence[int]]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Loaded:
    version: str
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, in seconds since the run began."""

    first_s: float
    finished_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Ran:
    seconds: float
    requests: tuple[Times, ...]


def build_question(question: Load | Ask) -> str:
    kind = "load" if isinstance(question, Load) else "ask"
    return json.dumps({kind: asdict(question)}) + "\n"


def parse_question(line: str) -> Load | Ask:
    """Raises Failed."""
    match _object(line):
        case {"load": dict(fields)}:
            return Load(**fields)
        case {"ask": {"prompts": list(prompts), "output_tokens": int(output_tokens)}}:
            return Ask(prompts, output_tokens)
    raise Failed(f"no question: {line[:200]!r}")


def build_answer(answer: Loaded | Ran | Failed) -> str:
    match answer:
        case Loaded():
            said: object = {"loaded": asdict(answer)}
        case Ran():
            requests = [[t.first_s, t.finished_s, t.tokens] for t in answer.requests]
            said = {"ran": {"seconds": answer.seconds, "requests": requests}}
        case Failed():
            said = {"failed": str(answer)}
    return json.dumps(said) + "\n"


def parse_answer(line: str) -> Loaded | Ran:
    """Raises Failed, also with what the peer said."""
    match _object(line):
        case {"loaded": {"version": str(version), "seconds": float(seconds), "note": str(note)}}:
            return Loaded(version, seconds, note)
        case {"ran": {"seconds": float(seconds), "requests": [*requests]}}:
            return Ran(seconds, tuple(_times(r, line) for r in requests))
        case {"failed": str(why)}:
            raise Failed(why)
    raise Failed(f"no answer: {line[:200]!r}")


def _times(value: object, line: str) -> Times:
    match value:
        case [float(first_s), float(finished_s), int(tokens)]:
            return Times(first_s, finished_s, tokens)
    raise Failed(f"no times: {line[:200]!r}")


def _object(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        raise Failed(f"not JSON: {line[:200]!r}") from None

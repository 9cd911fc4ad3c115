"""Pure. The lines of an input file: cut out of pieces, looked at one by one.

A body is not judged here: what is wrong with one request is that request's answer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import orjson

from chassis.messages.batches import Problem
from chassis.messages.jobs import CUSTOM_ID_BYTES_MAX

REQUESTS_MAX = 50_000
LINE_BYTES_MAX = 1024 * 1024 - 4096  # a job is one message of the bus
PROBLEMS_MAX = 100
DEPTH_MAX = 64


@dataclass(slots=True)
class Cutter:
    """Gives (offset in the file, line) without line ends; the last one by `rest`."""

    _offset: int = 0
    _held: bytes = b""

    def cut(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        *whole, held = (self._held + piece).split(b"\n")
        for line in whole:
            yield self._offset, line
            self._offset += len(line) + 1
        self._held = held

    @property
    def held_len(self) -> int:
        """Of a line that has not ended."""
        return len(self._held)

    def rest(self) -> tuple[int, bytes]:
        return self._offset, self._held


@dataclass(slots=True)
class Looked:
    """What is known of a file as its lines go by. `may_use`: of a model; None: any."""

    endpoint: str
    may_use: Callable[[str], bool] | None = None
    custom_ids: list[str] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)  # offset, length
    problems: list[Problem] = field(default_factory=list)
    models: dict[str, None] = field(default_factory=dict)
    _line: int = 0
    _full: bool = False
    _known: dict[str, int] = field(default_factory=dict)  # line by custom_id

    @property
    def enough(self) -> bool:
        """Nothing more needs to be said."""
        return self._full or len(self.problems) >= PROBLEMS_MAX

    @property
    def model(self) -> str | None:
        return next(iter(self.models)) if len(self.models) == 1 else None

    def take(self, offset: int, data: bytes) -> None:
        self._line += 1
        if self.enough or not (line := data.strip()):
            return
        if len(self.custom_ids) >= REQUESTS_MAX:
            self.problems.append(Problem("too_many_requests", f"more than {REQUESTS_MAX} requests"))
            self._full = True
            return
        custom_id, problem = self._judge(line)
        if problem is not None:
            self.problems.append(problem)
            return
        self._known[custom_id] = self._line
        self.custom_ids.append(custom_id)
        self.places.append((offset, len(data)))

    def end(self) -> None:
        if not self.custom_ids and not self.problems:
            self.problems.append(Problem("empty_file", "the file holds no request"))

    def _judge(self, line: bytes) -> tuple[str, Problem | None]:
        def bad(code: str, message: str, param: str | None = None) -> tuple[str, Problem]:
            return "", Problem(code, message, self._line, param)

        if len(line) > LINE_BYTES_MAX:
            return bad("line_too_large", f"{len(line)} bytes; at most {LINE_BYTES_MAX}")
        try:
            request = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            return bad("invalid_json_line", f"not JSON: {error}")
        if not isinstance(request, dict):
            return bad("invalid_json_line", "not a JSON object")
        custom_id, body = request.get("custom_id"), request.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_BYTES_MAX:
            why = f"a string of 1 to {CUSTOM_ID_BYTES_MAX} characters"
            return bad("invalid_custom_id", why, "custom_id")
        if (before := self._known.get(custom_id)) is not None:
            return bad("duplicate_custom_id", f"{custom_id[:100]!r} is line {before} too", "custom_id")
        if request.get("method") != "POST":
            return bad("invalid_method", "POST", "method")
        if request.get("url") != self.endpoint:
            return bad("mismatched_endpoint", f"{str(request.get('url'))[:100]!r}; {self.endpoint}", "url")
        if not isinstance(body, dict):
            return bad("invalid_body", "a JSON object", "body")
        if body.get("stream"):
            return bad("stream_not_supported", "answers of a batch are not streamed", "body.stream")
        model = body.get("model")
        if not isinstance(model, str) or not model:
            return bad("invalid_model", "the name of a model", "body.model")
        if self.may_use is not None and not self.may_use(model):
            return bad("model_not_found", f"{model[:100]!r} is not served to this key", "body.model")
        self.models[model] = None
        return custom_id, None

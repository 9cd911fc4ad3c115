"""Keeps every span, and who gave each span id out, so that checkers can look for orphans."""

import random
from collections.abc import Iterable

from chassis.trace import Span


class SimTracer:
    """All processes' spans, in the order they were recorded."""

    def __init__(self, seed: int) -> None:
        self.spans: list[Span] = []
        self.kept: dict[str, None] = {}
        self.owners: dict[bytes, str] = {}  # of span ids: the process
        self._rng = random.Random(f"spans {seed}")

    def of(self, process: str) -> "ProcessTracer":
        return ProcessTracer(self, process)

    def new_span_id(self, process: str) -> bytes:
        span_id = (self._rng.getrandbits(64) or 1).to_bytes(8, "little")
        self.owners[span_id] = process
        return span_id


class ProcessTracer:
    """A process's `Tracer`."""

    def __init__(self, all_spans: SimTracer, process: str) -> None:
        self._all = all_spans
        self._process = process

    def record(self, span: Span) -> None:
        self._all.spans.append(span)

    def keep(self, keys: Iterable[str]) -> None:
        self._all.kept.update(dict.fromkeys(keys))

    def new_span_id(self) -> bytes:
        return self._all.new_span_id(self._process)

"""Keeps every span, so that checkers can look for orphans."""

import random
from collections.abc import Iterable

from chassis.trace import Span


class SimTracer:
    """All nodes' spans, in the order they were recorded."""

    def __init__(self, seed: int) -> None:
        self.spans: list[tuple[str, Span]] = []
        self.kept: dict[str, None] = {}
        self._rng = random.Random(f"spans {seed}")

    def of(self, node: str) -> "NodeTracer":
        return NodeTracer(self, node)

    def new_span_id(self) -> bytes:
        return (self._rng.getrandbits(64) or 1).to_bytes(8, "little")


class NodeTracer:
    """A node's `Tracer`."""

    def __init__(self, all_spans: SimTracer, node: str) -> None:
        self._all = all_spans
        self._node = node

    def record(self, span: Span) -> None:
        self._all.spans.append((self._node, span))

    def keep(self, keys: Iterable[str]) -> None:
        self._all.kept.update(dict.fromkeys(keys))

    def new_span_id(self) -> bytes:
        return self._all.new_span_id()

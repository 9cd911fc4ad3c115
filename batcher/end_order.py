"""Pure. `preserve_ordering`: requests of one priority end in the order in which they came.

Their tokens are told as they are made, and their places and blocks are free at once: it is the end that waits
until all that came before have ended or gone. Refused ones do not wait, and nobody waits for them.
"""

from batcher.events import Ended
from chassis.ids import RequestId


class EndOrder:
    def __init__(self, preserves: bool) -> None:
        self._preserves = preserves
        self._lines: dict[int, dict[RequestId, Ended | None]] = {}  # by priority, as they came
        self._level: dict[RequestId, int] = {}

    def came(self, request_id: RequestId, level: int) -> None:
        if self._preserves:
            self._level[request_id] = level
            self._lines.setdefault(level, {})[request_id] = None

    def ended(self, end: Ended) -> list[Ended]:
        """Which ends are told now."""
        level = self._level.get(end.request_id)
        if level is None:
            return [end]
        self._lines[level][end.request_id] = end
        return self._due(level)

    def gone(self, request_id: RequestId) -> tuple[Ended | None, list[Ended]]:
        """Nobody wants to hear of it any more: its end, if it waited, and those that are told now."""
        level = self._level.pop(request_id, None)
        if level is None:
            return None, []
        return self._lines[level].pop(request_id), self._due(level)

    def _due(self, level: int) -> list[Ended]:
        line, due = self._lines[level], []
        while line and (end := next(iter(line.values()))) is not None:
            del line[end.request_id], self._level[end.request_id]
            due.append(end)
        return due

    def check(self) -> None:
        assert sum(map(len, self._lines.values())) == len(self._level)
        for line in self._lines.values():
            assert not line or next(iter(line.values())) is None, "an end that is due was not told"

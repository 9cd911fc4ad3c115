"""Pure. How long one that comes now would wait for its first token, by what this gateway sees of a model.

Who waits in front of it, over how many begin a second (Little's law: with several gateways each sees its
share of both). The rate is measured while a line stands, for only then do they begin as fast as they can, and
forgets by half every `HALF_LIFE_S` of such time. Until it has seen enough nobody is refused.
"""

from dataclasses import dataclass, field

from chassis.errors import Code, Status

LINE_MIN = 16  # that wait: fewer are no line, they may begin together
HALF_LIFE_S = 2.0
STOOD_MIN_S = 0.5
BEGAN_MIN = 32.0
PRIORITIES = 10
RETRY_MIN_MS = 100


@dataclass(slots=True)
class Line:
    """Of one model."""

    _waiting: list[int] = field(default_factory=lambda: [0] * PRIORITIES)
    _len: int = 0
    _since: float | None = None  # it stands, and is measured up to here
    _stood_s: float = 0.0
    _began: float = 0.0

    def __len__(self) -> int:
        return self._len

    def enter(self, priority: int, now: float) -> "Waiting":
        """One more of this priority waits."""
        self._pass(now)
        self._count(priority, 1)
        return Waiting(self, priority)

    def wait_s(self, priority: int, now: float) -> float | None:
        """Of one that comes; None: not known."""
        self._pass(now)
        if self._stood_s < STOOD_MIN_S or self._began < BEGAN_MIN:
            return None
        return sum(self._waiting[: priority + 1]) * self._stood_s / self._began

    def leave(self, priority: int, now: float, began: bool) -> None:
        self._pass(now)
        self._began += began and self._since is not None
        self._count(priority, -1)

    def _count(self, priority: int, change: int) -> None:
        self._waiting[priority] += change
        self._len += change
        assert self._waiting[priority] >= 0

    def _pass(self, now: float) -> None:
        if self._since is not None and now > self._since:
            kept = 0.5 ** ((now - self._since) / HALF_LIFE_S)
            self._stood_s = self._stood_s * kept + now - self._since
            self._began *= kept
        self._since = now if self._len >= LINE_MIN else None


@dataclass(slots=True)
class Waiting:
    """One in a line, until it begins or leaves: what is said first counts."""

    _line: Line | None
    _priority: int

    def ends(self, now: float, began: bool) -> None:
        if self._line is not None:
            self._line.leave(self._priority, now, began)
            self._line = None


@dataclass(slots=True)
class Lines:
    """Of all models."""

    wait_max_ms: int  # 0: all may wait
    _lines: dict[str, Line] = field(default_factory=dict)

    def check(self, model: str, priority: int, now: float) -> None:
        """Raises Status for who would wait too long."""
        line = self._lines.get(model)
        if not self.wait_max_ms or line is None or (wait_s := line.wait_s(priority, now)) is None:
            return
        over_ms = round(1000 * wait_s) - self.wait_max_ms
        if over_ms > 0:
            most = self.wait_max_ms
            why = f"its first token would take about {over_ms + most} ms; at most {most}"
            raise Status(Code.UNAVAILABLE, f"wait_max_ms: {why}", max(RETRY_MIN_MS, over_ms))

    def enter(self, model: str, priority: int, now: float) -> Waiting | None:
        if not self.wait_max_ms:
            return None
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = Line()
        return line.enter(priority, now)

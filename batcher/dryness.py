"""Pure. Whether the pool has no more to give, as its last answer said.

Until something is released, asking again brings nothing; but a kvstore with tiers holds blocks itself while
their contents move, and nobody is told when that ends. So it is asked again after a while.
"""

ASK_AGAIN_S = 0.05


class Dryness:
    def __init__(self) -> None:
        self._dry = False
        self._asked_at = 0.0
        self._tiers = False

    def __bool__(self) -> bool:
        """It gave less than it was asked for."""
        return self._dry

    def attached(self, tiers: bool) -> None:
        self._dry, self._tiers = False, tiers

    def answered(self, dry: bool, now: float) -> None:
        self._dry, self._asked_at = dry, now

    def starves(self, now: float) -> bool:
        """Asking now brings nothing, if nothing was released."""
        return self._dry and not (self._tiers and now >= self._asked_at + ASK_AGAIN_S)

    def asks_by(self, due_at: float | None) -> float | None:
        """When whoever wants blocks, and has another call to make at `due_at`, makes the next one."""
        if not self._dry or not self._tiers:
            return due_at
        again_at = self._asked_at + ASK_AGAIN_S
        return again_at if due_at is None else min(due_at, again_at)

"""Deliberate bugs of pools that move between kvstores (`tests/sim/bugs.py` has the others)."""

from collections.abc import Callable
from typing import Any

from batcher.kvstores import Known, Kvstores

Bug = tuple[type[Any], str, Any]


def pools_lie_at_the_last_to_write() -> Bug:
    """As before they were spread."""

    def broken(self: Kvstores, generation: str, used: object = None) -> Known | None:
        return max(self.present(), key=lambda known: known.revision, default=None)

    return Kvstores, "owner", broken


def pools_stay_where_they_are() -> Bug:
    def broken(self: Kvstores, generation: str, used: object) -> None:
        return None

    return Kvstores, "better", broken


SCALING_BUGS: tuple[Callable[[], Bug], ...] = (
    pools_lie_at_the_last_to_write,
    pools_stay_where_they_are,
)

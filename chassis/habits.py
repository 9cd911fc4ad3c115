"""Pure. What a broker may do to its users and still be the broker that the protocol assumes.

The methods of `Habits` describe a perfect one; a test overrides those that it wants to be bad, drawing
from its own seeded chance. What a broker must do (conditional writes, keeping what it acknowledged, one
message per subject) is not here: it can't be overridden.
"""

from dataclasses import dataclass
from enum import Enum


class Settle(Enum):
    ACK = "ack"
    PROGRESS = "progress"
    NAK = "nak"


@dataclass(frozen=True, slots=True)
class Fate:
    """How long a call travels to the broker and its answer back; None: it never arrives.

    Fate(0, None): done, but the answer is lost. Fate(5, 0): done late, perhaps after the caller's time-out.
    """

    there_s: float | None = 0.0
    back_s: float | None = 0.0


@dataclass(frozen=True, slots=True)
class Restart:
    """What a broker forgets when it restarts."""

    redelivers_all: bool = False  # whatever is held is given again at once
    forgets_counts: bool = False  # and its delivery count is the one it had before
    forgets_ids: bool = False  # message ids are not known any more


class Habits:
    """A perfect broker. `sender`, `receiver` and `name` are names of bus handles."""

    def core_delay_s(self, sender: str, receiver: str, subject: str) -> float | None:
        """Of one core message on its way to one receiver; None: lost."""
        return 0.0

    def call(self, sender: str, what: str, subject: str) -> Fate:
        """Of anything with an answer. `what`: append, last, fetch, read, subscribe, watch, entry, ..."""
        return Fate()

    def settle_delay_s(self, sender: str, kind: Settle, subject: str) -> float | None:
        """Of an ack, progress ack or nak of a message of `subject`; None: lost."""
        return 0.0

    def honours(self, kind: Settle, subject: str, newest: bool) -> bool:
        """Whether a settlement counts. `newest`: by the token of the last delivery."""
        return True

    def ack_wait_s(self, consumer: str, subject: str, ack_wait_s: float) -> float:
        """Time until a delivery is repeated; a shorter one redelivers early."""
        return ack_wait_s

    def count(self, subject: str, count: int) -> int:
        """The delivery count that is told."""
        return count

    def records_behind(self, sender: str, subject: str) -> int:
        """How many of the newest records `last` and `entry` do not see."""
        return 0

    def watch_delay_s(self, receiver: str, key: str) -> float:
        """Of a registry change on its way to a watcher; changes stay in order."""
        return 0.0

    def restart(self) -> Restart:
        return Restart()

    def reconnect_delay_s(self, name: str) -> float:
        """From when the broker can be reached again until a handle is connected."""
        return 0.05

    def cut_notice_s(self, name: str) -> float:
        """From a partition until the handle knows."""
        return 4.0

    def survives_cut(self, name: str) -> bool:
        """Whether what a handle sent into a partition arrives when it heals (else it is lost)."""
        return True

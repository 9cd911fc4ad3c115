"""Pure. What can be said of a stream of the bus and of its consumers. `chassis/subjects.py` has them all."""

from dataclasses import dataclass
from enum import Enum

ACK_WAIT_S = 1.0


class Retention(Enum):
    LIMITS = "limits"  # kept until a bound or its age removes it
    WORK_QUEUE = "workqueue"  # kept until acknowledged


class Discard(Enum):
    NEW = "new"  # refuses what is above the bound
    OLD = "old"  # forgets the oldest


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """A stream on file storage. 0 = no bound. `loss_window` says what a crash may take with it.

    No stream allows direct reads: any replica would answer those, hence perhaps an old one.
    """

    name: str
    subjects: tuple[str, ...]
    retention: Retention
    discard: Discard
    msgs_max: int
    bytes_max: int
    age_max_s: float
    loss_window: str
    msgs_per_subject_max: int = 0
    discard_new_per_subject: bool = False
    duplicate_window_s: float = 120.0
    rollup_headers: bool = False


@dataclass(frozen=True, slots=True)
class ConsumerLayout:
    """A durable pull consumer with explicit acknowledgement and unlimited deliveries."""

    stream: str
    name: str
    filter: str
    ack_wait_s: float = ACK_WAIT_S
    ack_pending_max: int = 65536

"""Pure. The streams of a bus that lives in the memory of one process: `LAYOUT` within bounds that fit there.

Subjects, retention and ages are those of every Shoal. What is bounded more tightly refuses as it does on a
disk, but for the ownership logs: on a disk they refuse when they are full, here they forget the oldest that
no request needs any more (`is_live`), so that a process that has served long enough goes on serving.
Nothing here outlives the process.
"""

from dataclasses import replace

from chassis import batch_layout, subjects
from chassis.memory_streams import MemoryStream
from chassis.stream_layout import Discard, StreamLayout

KIB = 1024
MIB = 1024 * KIB

# messages and bytes; a message takes about 1 KiB beside its bytes
BOUNDS: dict[str, tuple[int, int]] = {
    subjects.REQUESTS: (1024, 16 * MIB),
    subjects.RESULTS: (2048, 16 * MIB),
    subjects.USAGE: (2048, 4 * MIB),
    subjects.TRACES: (2048, 4 * MIB),
    subjects.DEAD: (64, 1 * MIB),
    subjects.JOBS: (256, 4 * MIB),
    subjects.ANSWERS: (1024, 8 * MIB),
    subjects.QUOTAS: (1024, 1 * MIB),
    subjects.REGISTRY: (1024, 1 * MIB),
    subjects.CARDS: (64, 64 * MIB),
    batch_layout.FILES: (1024, 16 * MIB),
    batch_layout.BATCHES: (256, 4 * MIB),
    batch_layout.DRIVES: (64, 1 * MIB),
}
DUPLICATE_WINDOW_S = 10.0  # a call that is asked again has long had its time-out


def bounded(layout: StreamLayout) -> StreamLayout:
    msgs_max, bytes_max = BOUNDS[layout.name]
    return replace(
        layout,
        msgs_max=msgs_max,
        bytes_max=bytes_max,
        discard=Discard.OLD if layout.name == subjects.RESULTS else layout.discard,
        duplicate_window_s=min(layout.duplicate_window_s, DUPLICATE_WINDOW_S),
        loss_window="all of it, when the process ends",
    )


EDGE_LAYOUT: tuple[StreamLayout, ...] = tuple(bounded(layout) for layout in subjects.LAYOUT)


def is_live(requests: MemoryStream, log_subject: str) -> bool:
    """Whether an ownership log is of a request that has not ended. `requests`: the stream of those."""
    request_id = log_subject.rpartition(".")[2]
    return any(
        requests.holds(consumer.layout.filter.removesuffix("*") + request_id)
        for consumer in requests.consumers.values()
    )

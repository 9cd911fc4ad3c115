"""Pure. Where files and batches are kept, and who drives a batch: three streams of the layout.

FILES has pieces of files and, written last, what each file is. BATCHES has the last record of each batch,
written by whoever names the record before. DRIVES holds a batch until it is over, and gives it to one gateway
at a time. What is stored here outlives the longest time a file may be kept, and is then forgotten.
"""

from chassis.stream_layout import ConsumerLayout, Discard, Retention, StreamLayout

FILES = "FILES"
BATCHES = "BATCHES"
DRIVES = "DRIVES"

FILE_AGE_MAX_S = 30 * 24 * 3600  # what a file's owner may ask for
AGE_S = FILE_AGE_MAX_S + 2 * 24 * 3600.0
MIB = 1024 * 1024
BATCHES_BYTES_MAX = 64 * MIB
NEW_BATCHES_BYTES_MAX = BATCHES_BYTES_MAX * 7 // 8  # the rest is for records of those that run, which grow

_SYNCED = "none that was acknowledged: synced before the answer (one server: `sync_interval: always`)"

BATCH_LAYOUT: tuple[StreamLayout, ...] = (
    StreamLayout(  # what callers sent up and what became of it
        FILES,
        ("shoal.file.*.*", "shoal.piece.*"),
        Retention.LIMITS,
        Discard.NEW,
        msgs_max=0,
        bytes_max=4096 * MIB,
        age_max_s=AGE_S,
        loss_window=_SYNCED,
        duplicate_window_s=1.0,
    ),
    StreamLayout(
        BATCHES,
        ("shoal.batch.*.*",),
        Retention.LIMITS,
        Discard.NEW,
        msgs_max=0,
        bytes_max=BATCHES_BYTES_MAX,
        age_max_s=AGE_S,
        loss_window=_SYNCED,
        msgs_per_subject_max=1,
        duplicate_window_s=1.0,
    ),
    StreamLayout(  # batches that are not over
        DRIVES,
        ("shoal.drive.*.*",),
        Retention.WORK_QUEUE,
        Discard.NEW,
        msgs_max=10_000,
        bytes_max=64 * MIB,
        age_max_s=0,
        loss_window=_SYNCED,
        msgs_per_subject_max=1,
        discard_new_per_subject=True,
    ),
)

DRIVERS = ConsumerLayout(DRIVES, "drivers", "shoal.drive.>", ack_wait_s=5.0, ack_pending_max=10_000)
PROGRESS_INTERVAL_S = 1.0

"""What every test of the suite stands on.

Spinning OpenMP threads on busy cores cost many times what they compute; torch reads these when imported.
What was collected stays: as in a service, no later collection of garbage walks over it again.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_finish() -> None:
    from chassis.service import keep_what_start_made

    keep_what_start_made()

"""What every test of the suite stands on.

Spinning OpenMP threads on busy cores cost many times what they compute; torch reads these when imported.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

"""Pure. Where top-k and top-p cut: the least value that stays, found without sorting a vocabulary.

Few values of many are looked at twice: those that reach a bound which is cheap to find. What is found is a
value of the row itself, the same as a full sort would give, so that equals stay together.
"""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
LANES = 64  # peaks are of so many values each
BUCKET_BITS = 16  # of a float that are left out: values of a bucket differ by less than a hundredth
FEW = 512  # so few are sorted at once


def least_of_top_k(x: F32, k: int) -> np.float32:
    """The k-th largest of a row; 0 < k <= len(x)."""
    whole = len(x) // LANES * LANES
    if 4 * k <= whole // LANES:
        peaks = x[:whole].reshape(LANES, -1).max(axis=0)
        x = x[x >= _k_th_largest(peaks, k)]  # k peaks reach it, so k values do
    return _k_th_largest(x, k)


def _k_th_largest(x: F32, k: int) -> np.float32:
    found: np.float32 = np.partition(x, len(x) - k)[len(x) - k]
    return found


def least_of_mass(weights: F32, share: float) -> np.float32:
    """Of a row that is not negative: the weight at which the largest together reach this share of all."""
    total = float(weights.sum(dtype=np.float64))
    target = share * total
    # all that are less weigh together less than what may be left out
    candidates = weights[weights >= total * (1 - share) / len(weights)]
    above = 0.0
    if len(candidates) > FEW:  # positive floats are ordered as their bits are
        buckets = (candidates.view(np.uint32) >> np.uint32(BUCKET_BITS)).astype(np.int64)
        buckets = buckets.max() - buckets
        masses = np.bincount(buckets, weights=candidates).cumsum()
        bucket = min(int(masses.searchsorted(target)), len(masses) - 1)
        above = float(masses[bucket - 1]) if bucket else 0.0
        candidates = candidates[buckets == bucket]
    ranked = np.sort(candidates)[::-1]
    mass = above + ranked.cumsum(dtype=np.float64)
    found: np.float32 = ranked[min(int((mass < target).sum()), len(ranked) - 1)]
    return found

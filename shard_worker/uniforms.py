"""Pure. The one uniform number behind every sampled token: a hash, never a generator with a state.

It depends on the request's seed and the output index alone, so a token comes out the same whoever shared
the step, however often the request was taken up again. The definition is frozen by golden values.
"""

import numpy as np
from numpy.typing import NDArray

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def _finalise(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], output_index: NDArray[np.int32]) -> NDArray[np.float64]:
    """[k] numbers in [0, 1), multiples of 2^-24, one per (seed, output index)."""
    x = seeds ^ (GOLDEN_RATIO * (output_index.astype(np.uint64) + np.uint64(1)))
    bits = _finalise(_finalise(x))
    return (bits >> np.uint64(40)).astype(np.float64) / float(1 << 24)

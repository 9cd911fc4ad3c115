"""Pure. What a step takes on each stage, learned from the timings that steps bring back.

Seconds = a base, and for each: token of a prompt, decode, position that prompts attend to, position whose
keys and values are read. All are at least zero. Steps alike share a bucket that keeps their moving means, so
that what is seldom seen is not forgotten while thousands of other steps pass; the coefficients are the least
squares of relative errors over the buckets, those seen of late counting more, times what the last steps took
of what these say: a stage that has less of its machine is slower in all. One odd measurement moves little.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

BUCKETS_MAX = 96
COUNT_MAX = 24  # a bucket's mean moves by one part in so many, at least
ODD = 3.0  # what takes so many times its bucket's mean counts as that
REFIT_STEPS = 16
RECENT_STEPS = 512  # a bucket that was not seen for so many counts half
LEAST_S = 1e-6  # below it a timing says nothing
RIDGE = 1e-6


class Load(NamedTuple):
    """What a step computes. A decode is a row of one token."""

    prompt_tokens: int = 0
    decodes: int = 0
    attended: int = 0  # positions, its own included, summed over the prompt tokens
    read: int = 0  # positions, summed over all rows


class Coefficients(NamedTuple):
    """Seconds. Of one stage, or of all together."""

    base: float
    prompt_token: float
    decode: float
    attended: float
    read: float

    def seconds(self, load: Load) -> float:
        tokens, decodes, attended, read = load
        more = self.prompt_token * tokens + self.decode * decodes
        return self.base + more + self.attended * attended + self.read * read

    def times(self, factor: float) -> "Coefficients":
        return Coefficients(*[factor * each for each in self])

    def of_chunk(self, tokens: int, start: int) -> float:
        """What the next `tokens` of a prompt add to a step, `start` being computed."""
        attended = tokens * start + tokens * (tokens + 1) // 2
        return self.prompt_token * tokens + self.attended * attended + self.read * (start + tokens)


NOTHING = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0)
_SCALE = np.array([1.0, 64.0, 16.0, 64.0 * 512.0, 16.0 * 512.0])  # so that all matter alike to the ridge


class _Bucket:
    __slots__ = ("count", "features", "seconds", "seen_at")

    def __init__(self, features: F64, seconds: F64) -> None:
        self.features = features
        self.seconds = seconds  # a stage
        self.count = 1
        self.seen_at = 0


class StageCost:
    def __init__(self) -> None:
        self._num_stages = 1
        self._buckets: dict[tuple[int, ...], _Bucket] = {}
        self._observed = 0
        self._refit_at = 0
        self._fitted: tuple[Coefficients, ...] = ()
        self._drifts = [1.0]  # a stage: what the last steps took, of what was fitted
        self._stages: tuple[Coefficients, ...] = ()
        self.all = NOTHING  # of a step through all stages

    def open(self, num_stages: int) -> None:
        """A new epoch: other workers, perhaps. What was learned holds until they say otherwise."""
        if num_stages != self._num_stages:
            self._buckets.clear()
            self._fitted, self._stages, self.all = (), (), NOTHING
        self._num_stages = num_stages
        self._drifts = [1.0] * num_stages
        for bucket in self._buckets.values():
            bucket.count = 1

    @property
    def known(self) -> bool:
        """Whether steps have told something; else all costs nothing."""
        return bool(self._stages)

    @property
    def stages(self) -> tuple[Coefficients, ...]:
        return self._stages

    def seconds(self, load: Load) -> float:
        """Through all stages, none waiting."""
        return self.all.seconds(load)

    def observe(self, load: Load, stage_s: Sequence[float]) -> None:
        """What a step took on each stage. A count of stages that is not this epoch's is ignored."""
        if len(stage_s) != self._num_stages or load.prompt_tokens + load.decodes <= 0:
            return
        self._observed += 1
        key = (
            load.prompt_tokens.bit_length(),
            load.decodes.bit_length(),
            load.attended.bit_length(),
            load.read.bit_length(),
        )
        features = np.array([1.0, *load]) / _SCALE
        seconds = np.array(stage_s)
        for stage, (took_s, fitted) in enumerate(zip(stage_s, self._fitted, strict=False)):
            of_fitted = took_s / max(fitted.seconds(load), LEAST_S)
            of_fitted = min(max(of_fitted, 1 / ODD), ODD)
            self._drifts[stage] += (of_fitted - self._drifts[stage]) / REFIT_STEPS
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = _Bucket(features, seconds)
            self._refit_at = self._observed
            if len(self._buckets) >= BUCKETS_MAX:
                del self._buckets[next(iter(self._buckets))]
        else:
            bucket.count = min(bucket.count + 1, COUNT_MAX)
            if bucket.count > 3:
                seconds = np.minimum(seconds, ODD * bucket.seconds + LEAST_S)
            bucket.features += (features - bucket.features) / bucket.count
            bucket.seconds += (seconds - bucket.seconds) / bucket.count
        bucket.seen_at = self._observed
        self._buckets[key] = bucket  # the last seen is the last
        if self._observed >= self._refit_at:
            self._refit()

    def _refit(self) -> None:
        self._refit_at = self._observed + REFIT_STEPS
        buckets = [b for b in self._buckets.values() if b.seconds.sum() > LEAST_S]
        if not buckets:
            return
        x = np.array([b.features for b in buckets])
        ages = np.array([self._observed - b.seen_at for b in buckets])
        counts = np.array([min(b.count, 8) for b in buckets])
        weights = np.sqrt(counts / (1.0 + ages / RECENT_STEPS))
        seconds = np.array([b.seconds for b in buckets])
        fitted = [_least_squares(x, seconds[:, i], weights) for i in range(self._num_stages)]
        self._fitted = tuple([Coefficients(*(f / _SCALE).tolist()) for f in fitted])
        self._stages = tuple([f.times(drift) for f, drift in zip(self._fitted, self._drifts, strict=True)])
        self.all = Coefficients(*map(sum, zip(*self._stages, strict=True)))

    def check(self) -> None:
        assert len(self._buckets) <= BUCKETS_MAX
        assert not self._stages or len(self._stages) == self._num_stages
        for stage in self._stages:
            assert min(stage) >= 0.0


def _least_squares(x: F64, y: F64, weights: F64) -> F64:
    """At least zero each: what would be negative is left out, the most negative first."""
    w = (weights / np.maximum(y, LEAST_S))[:, None]
    a, b = x * w, y * w[:, 0]
    normal, target = a.T @ a, a.T @ b
    kept = list(range(x.shape[1]))
    found = np.zeros(x.shape[1])
    while kept:
        part = normal[np.ix_(kept, kept)]
        ridge = RIDGE * float(np.trace(part)) / len(kept) + 1e-300
        some = np.linalg.solve(part + ridge * np.eye(len(kept)), target[kept])
        if some.min() >= 0.0:
            found[kept] = some
            break
        del kept[int(some.argmin())]
    return found

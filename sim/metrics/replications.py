"""What several independent runs say together: means, paired differences and percentiles, each with an interval.

One simulation is one draw.  Requests of one run are not independent of each other (a queue that has formed makes all
that come next wait), so its own scatter says little about how far off it is; runs with different seeds are independent,
and their scatter does.  All intervals here take the run, the *replication*, as the unit of chance, and Student's t for
how well few of them know their spread.

Sources: Law, "Simulation Modeling and Analysis", 2015, ch. 9 and 10 (replications, common random numbers); Woodruff,
"Confidence Intervals for Medians and Other Position Measures", JASA 1952, and Francisco and Fuller, "Quantile
Estimation with a Complex Survey Design", Annals of Statistics 1991 (percentiles of samples that come in clusters: here
the cluster is a replication); Johnson, "Modified t Tests and Confidence Intervals for Asymmetrical Populations", JASA
1978.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, nextafter, sqrt
from typing import Any

import numpy as np

from windtunnel.sim.metrics.sample import Sample, weighted_sample


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate from replications and the bounds that hold the true value with the confidence asked for."""

    mean: float
    """The estimate itself (a mean, or a percentile of all values together)."""
    low: float
    """-inf where the replications are too few to tell."""
    high: float
    """inf where the replications are too few to tell."""
    num: int
    """Replications that it rests on."""
    confidence: float = 0.95

    @property
    def half_width(self) -> float:
        """Half the length of the interval; inf where a bound is unknown."""
        return (self.high - self.low) / 2

    def excludes(self, value: float) -> bool:
        """Whether the value lies outside: for a paired difference ``excludes(0)`` says that there is one."""
        return not self.low <= value <= self.high

    def to_dict(self) -> dict[str, float | int | None]:
        """As plain data for JSON, which has no infinity: an unknown bound is None."""
        return {
            "mean": self.mean,
            "low": self.low if isfinite(self.low) else None,
            "high": self.high if isfinite(self.high) else None,
            "num": self.num,
            "confidence": self.confidence,
        }


def mean_interval(values: Sequence[float], confidence: float = 0.95, *, skewness: float = 0.0) -> Interval:
    """The mean of independent values and its two-sided t interval; a single value has unknown bounds.

    For a one-sided bound at confidence c ask for 2c - 1 and take one end.  Values that now and then are much larger
    than usual, as waits are, have a mean that is often too low while their spread is, too: then the t interval ends too
    low.  ``skewness`` is what is assumed of them (2 is that of an exponential distribution; negative for values that
    now and then are much smaller), and moves the bound on that side outwards as Johnson does.

    Raises ValueError for no value, one that is not finite, or a confidence outside of (0, 1).
    """
    _check_confidence(confidence)
    array = np.asarray(values, np.float64)
    if not len(array):
        raise ValueError("an interval needs at least one value, got none: run at least one replication")
    if not np.isfinite(array).all():
        raise ValueError(f"values must be finite numbers, got {array[~np.isfinite(array)][0]}: leave such runs out")
    mean = float(array.mean())
    if len(array) == 1:
        return Interval(mean, -inf, inf, 1, confidence)
    error = float(array.std(ddof=1)) / sqrt(len(array))
    below, above = _reaches(confidence, len(array), skewness)
    return Interval(mean, mean - below * error, mean + above * error, len(array), confidence)


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean of ``b[i] - a[i]`` and its t interval: what changes from a to b, run against run of the same seed.

    Runs of one seed share their random numbers, so what is chance in both cancels and the interval is shorter than that
    of two independent means.  Raises ValueError for sequences of different length and as ``mean_interval``.
    """
    if len(a) != len(b):
        raise ValueError(f"pairs need as many values on both sides, got {len(a)} and {len(b)}: use the same seeds")
    return mean_interval([second - first for first, second in zip(a, b, strict=True)], confidence)


def percentile_interval(
    samples: Sequence[Sample], percent: float, confidence: float = 0.95, *, skewness: float = 0.0
) -> Interval:
    """A percentile of all replications' values together, with a two-sided interval.

    The percentile lies above x if more than 100 - percent of the values do.  That share, at any x, is a mean over
    replications and has a t interval with the replication as the unit.  The lower bound is the largest x above which
    the share is thus shown to be larger.  For the upper bound the share's error is taken at the estimate, where it is
    what it must be, and the percentile read off at as much more (Woodruff): further out most replications have no value
    at all, and one would think to know that share too well.  The variance is never taken to be less than that of
    independent values, which congestion only makes larger.  ``skewness`` is that of the share of values above, as for
    ``mean_interval``.  A bound beyond the largest or smallest value is unknown (inf, -inf).

    Pooling has less bias than a mean of percentiles of short runs.

    Raises ValueError if no replication has a value, for a percent outside of 0 to 100 and as ``mean_interval``.
    """
    _check_confidence(confidence)
    pooled = merged(samples)
    estimate = pooled.percentile(percent)
    if estimate is None:
        raise ValueError("a percentile needs values, got none: no request was counted in any replication")
    if len(samples) == 1:
        return Interval(estimate, -inf, inf, 1, confidence)
    below, above = _reaches(confidence, len(samples), skewness)
    shares = _SharesAbove(samples, percent)
    values = pooled.values

    def lies_at_or_above(place: int) -> bool:
        share, error = shares.at(nextafter(float(values[place]), -inf))
        return share - below * error > shares.allowed

    num_low = bisect_left(range(len(values)), True, key=lambda place: not lies_at_or_above(place))
    high = percent + 100 * above * shares.at(estimate)[1]
    return Interval(
        estimate,
        float(values[num_low - 1]) if num_low else -inf,
        (pooled.percentile(high) or 0.0) if high <= 100 else inf,
        len(samples),
        confidence,
    )


def merged(samples: Sequence[Sample]) -> Sample:
    """All values of several samples as one, each as often as it occurs in any."""
    if not samples:
        return Sample(np.zeros(0, np.float64), None)
    values: Any = np.concatenate([each.values for each in samples])
    if all(each.ranks is None for each in samples):
        return Sample(np.sort(values), None)
    return weighted_sample(values, np.concatenate([each.weights for each in samples]))


@lru_cache(maxsize=1024)
def student_quantile(confidence: float, degrees: int) -> float:
    """The t that a Student variable of so many degrees of freedom exceeds in size with probability 1 - confidence."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + confidence / 2))


def _reaches(confidence: float, num: int, skewness: float) -> tuple[float, float]:
    """How many standard errors the bounds lie below and above the estimate.

    Johnson's modified t, solved for the mean to first order: t + skewness (1 + 2 t^2) / (6 sqrt(n)) on the long side.
    """
    t = student_quantile(confidence, num - 1)
    more = abs(skewness) * (1 + 2 * t * t) / (6 * sqrt(num))
    return t + (more if skewness < 0 else 0.0), t + (more if skewness > 0 else 0.0)


class _SharesAbove:
    """Of several samples, the share of values above any x and its standard error, as a ratio of sums over samples."""

    def __init__(self, samples: Sequence[Sample], percent: float) -> None:
        self.allowed = 1 - percent / 100
        self._samples = samples
        self._counts = np.array([each.count for each in samples], np.float64)
        self._total = float(self._counts.sum())
        self._least = self.allowed * (1 - self.allowed) / self._total

    def at(self, value: float) -> tuple[float, float]:
        """Share of the values above ``value``, and its standard error."""
        shares = np.array([1 - (each.share_at_most(value) or 0.0) for each in self._samples])
        above = shares * self._counts
        share = float(above.sum()) / self._total
        residuals = above - share * self._counts
        num = len(self._samples)
        variance = num / (num - 1) * float((residuals**2).sum()) / self._total**2
        return share, sqrt(max(variance, self._least))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be above 0 and below 1, got {confidence}: 0.95 is usual")

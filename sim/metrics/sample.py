"""A set of measured values that may occur many times each, and its statistics as numpy would give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.int64] | npt.NDArray[np.float64]

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Sample:
    """Values in ascending order, each with the number of times it occurs.

    Every statistic equals numpy's (``mean``, population ``std``, ``median``, ``percentile`` with linear
    interpolation) on the list that has each value as often as its weight says, without ever making that list.
    """

    values: Values
    """In ascending order."""
    ranks: npt.NDArray[np.int64] | None
    """Weights cumulated: ``ranks[i]`` values lie at or before position i.  None where each value occurs once."""

    @property
    def count(self) -> int:
        """How many values there are, repetitions included."""
        if self.ranks is None:
            return len(self.values)
        return int(self.ranks[-1]) if len(self.ranks) else 0

    @property
    def weights(self) -> npt.NDArray[np.int64]:
        """How often each of ``values`` occurs."""
        if self.ranks is None:
            return np.ones(len(self.values), np.int64)
        return np.diff(self.ranks, prepend=0)

    def at(self, rank: int) -> float:
        """The value at that rank, 0 for the smallest."""
        position = rank if self.ranks is None else int(np.searchsorted(self.ranks, rank, side="right"))
        return float(self.values[position])

    def sum(self) -> float:
        """Sum of all values."""
        if not self.count:
            return 0.0
        if self.ranks is None and self.values.dtype.kind == "f":
            return float(self.values.sum())
        fits_int64 = float(np.abs(self.values[[0, -1]]).max()) * self.count < 2**62
        exact = self.values.dtype.kind == "i" and fits_int64
        values = self.values if exact else self.values.astype(np.float64)
        return float(values.sum()) if self.ranks is None else weighted_sum(values, self.weights)

    def mean(self) -> float | None:
        """Arithmetic mean, None for an empty sample."""
        return self.sum() / self.count if self.count else None

    def std(self) -> float | None:
        """Population standard deviation (numpy's default), None for an empty sample."""
        mean = self.mean()
        if mean is None:
            return None
        squares = (self.values - mean) ** 2
        total = float(squares.sum()) if self.ranks is None else weighted_sum(squares, self.weights)
        return sqrt(total / self.count)

    def median(self) -> float | None:
        """Middle value, or the mean of the two middle ones; None for an empty sample."""
        if not self.count:
            return None
        upper = self.at(self.count // 2)
        return upper if self.count % 2 else (self.at(self.count // 2 - 1) + upper) / 2

    def percentile(self, percent: float) -> float | None:
        """Linear interpolation between order statistics, numpy's default; None for an empty sample.

        Raises ValueError if ``percent`` lies outside 0 … 100.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"a percentile must be from 0 to 100, got {percent}")
        if not self.count:
            return None
        position = (self.count - 1) * (percent / 100)
        below = floor(position)
        low, high = self.at(below), self.at(min(below + 1, self.count - 1))
        share = position - below
        # numpy counts from the nearer end; the same keeps the last bit the same
        return high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share

    def share_at_most(self, value: float) -> float | None:
        """Share of the values that are at most ``value``; None for an empty sample."""
        if not self.count:
            return None
        position = int(np.searchsorted(self.values, value, side="right"))
        below = position if self.ranks is None else (int(self.ranks[position - 1]) if position else 0)
        return below / self.count


def weighted_sum(values: npt.NDArray[Any], weights: npt.NDArray[Any]) -> float:
    """Sum of the products.

    Not ``np.dot``: a BLAS library adds in an order that depends on its number of threads, and lets these spin for a
    while afterwards, which took a third of the CPU time of a search.
    """
    return float((values * weights).sum())


def sample(values: npt.ArrayLike) -> Sample:
    """A sample in which each value occurs once."""
    return Sample(np.sort(np.asarray(values)), None)


def weighted_sample(values: Values, weights: npt.NDArray[np.int64]) -> Sample:
    """A sample in which ``values[i]`` occurs ``weights[i]`` times; weight 0 leaves it out."""
    there = weights > 0
    values, weights = values[there], weights[there]
    order = np.argsort(values)
    return Sample(values[order], np.cumsum(weights[order]))


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Statistics of one latency, in milliseconds; None where there was nothing to measure."""

    count: int
    mean_ms: float | None
    median_ms: float | None
    std_ms: float | None
    """Population standard deviation."""
    min_ms: float | None
    max_ms: float | None
    percentiles_ms: tuple[tuple[float, float | None], ...]
    """(percent, value) as asked for."""

    def percentile_ms(self, percent: float) -> float | None:
        """The value of one of the percentiles asked for.  Raises KeyError for another."""
        return dict(self.percentiles_ms)[percent]


def latency_stats(sample_ns: Sample, percentiles: Sequence[float]) -> LatencyStats:
    """Statistics in milliseconds of a sample in nanoseconds."""
    return LatencyStats(
        count=sample_ns.count,
        mean_ms=_ms(sample_ns.mean()),
        median_ms=_ms(sample_ns.median()),
        std_ms=_ms(sample_ns.std()),
        min_ms=_ms(sample_ns.percentile(0)),
        max_ms=_ms(sample_ns.percentile(100)),
        percentiles_ms=tuple((percent, _ms(sample_ns.percentile(percent))) for percent in percentiles),
    )


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / NS_PER_MS

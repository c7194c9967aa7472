"""Intervals from replications: means, paired differences and percentiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.metrics.replications import (
    Interval,
    mean_interval,
    merged,
    paired_difference,
    percentile_interval,
    student_quantile,
)
from windtunnel.sim.metrics.sample import sample, weighted_sample

finite = st.floats(-1e6, 1e6, allow_nan=False)


def test_the_t_interval_is_that_of_the_textbook() -> None:
    """Mean 5, sample deviation 2.58, t(3, 0.975) = 3.182: 5 +- 4.108."""
    found = mean_interval([2, 4, 6, 8])
    assert found.mean == 5
    assert found.half_width == pytest.approx(3.1824463 * math.sqrt(20 / 3) / 2, rel=1e-6)
    assert (found.num, found.confidence) == (4, 0.95)


@given(st.lists(finite, min_size=2, max_size=20))
def test_the_mean_lies_within_its_interval_and_more_confidence_makes_it_longer(values: list[float]) -> None:
    narrow, wide = mean_interval(values, 0.8), mean_interval(values, 0.99)
    assert narrow.low <= narrow.mean <= narrow.high
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


def test_one_value_has_a_mean_and_no_bounds() -> None:
    found = mean_interval([3.0])
    assert found == Interval(3.0, -math.inf, math.inf, 1)
    assert found.to_dict() == {"mean": 3.0, "low": None, "high": None, "num": 1, "confidence": 0.95}


@pytest.mark.parametrize(
    ("values", "confidence", "message"),
    [
        ([], 0.95, "at least one value"),
        ([1.0, math.nan], 0.95, "finite"),
        ([1.0], 1.0, "below 1"),
        ([1.0], 0, "above 0"),
    ],
)
def test_what_has_no_interval_is_refused(values: list[float], confidence: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mean_interval(values, confidence)


@given(st.lists(st.tuples(finite, st.floats(-1, 1)), min_size=3, max_size=20))
def test_pairs_cancel_what_both_have_in_common(pairs: list[tuple[float, float]]) -> None:
    base = [common for common, _ in pairs]
    other = [common + 10 + own for common, own in pairs]
    found = paired_difference(base, other)
    assert found.mean == pytest.approx(10, abs=1.1)
    assert found.half_width < 8  # the pairs differ by 1 at most, whatever they have in common


def test_pairs_need_two_sides_of_equal_length() -> None:
    with pytest.raises(ValueError, match="same seeds"):
        paired_difference([1, 2], [1, 2, 3])


def test_the_percentile_of_all_values_together_is_numpys() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.exponential(1.0, 50 + 10 * k) for k in range(6)]
    found = percentile_interval([sample(part) for part in parts], 90)
    assert found.mean == pytest.approx(float(np.percentile(np.concatenate(parts), 90)))
    assert found.low < found.mean < found.high


def test_values_with_weights_count_as_often_as_they_occur() -> None:
    weighted = weighted_sample(np.array([1.0, 2.0, 3.0]), np.array([5, 3, 2]))
    listed = sample(np.array([1.0] * 5 + [2.0] * 3 + [3.0] * 2))
    assert percentile_interval([weighted] * 3, 70) == percentile_interval([listed] * 3, 70)
    assert merged([weighted, listed]).count == 20


def test_a_bound_beyond_the_largest_value_is_unknown() -> None:
    """p99 of 3 x 20 values: the share below it cannot be known to be under 1."""
    found = percentile_interval([sample(np.arange(20.0)) for _ in range(3)], 99)
    assert found.high == math.inf
    assert math.isfinite(found.low)


def test_percentile_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Values of a replication share a common factor, so they are not independent: 90 % intervals hold p95 in 86 to 95 %
    of 400 experiments."""
    rng, num, hits = np.random.default_rng(5), 400, 0
    truth = float(np.quantile(np.exp(0.3 * rng.standard_normal(400_000)) * rng.exponential(1.0, 400_000), 0.95))
    for _ in range(num):
        factors = np.exp(0.3 * rng.standard_normal(12))
        samples = [sample(factor * rng.exponential(1.0, 200)) for factor in factors]
        hits += not percentile_interval(samples, 95, 0.9).excludes(truth)
    assert 0.86 * num <= hits <= 0.95 * num


def test_the_quantile_of_student_tends_to_the_normal_one() -> None:
    assert student_quantile(0.95, 10_000) == pytest.approx(1.96, abs=0.001)
    assert student_quantile(0.95, 1) == pytest.approx(12.7062, abs=1e-3)

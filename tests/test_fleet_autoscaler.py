"""The autoscaler's rule against Kubernetes' examples and against a naive restatement."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.fleet.autoscaler import Autoscaler, ScalingRule, Seen, recommended

S = 1_000_000_000


def scaler(metric: str = "concurrency", target: float = 10, **changes: Any) -> Autoscaler:
    return Autoscaler(metric, target, **{"max_replicas": 1000, "min_replicas": 1, **changes})


def test_the_example_of_kubernetes() -> None:
    """50 pods at 90 where 75 is wanted become 60; 10 % off is no reason to do anything."""
    usage = scaler("kv_usage", 0.75)
    assert recommended(usage, Seen(50 * 0.90, 50, 50)) == 60
    assert recommended(usage, Seen(50 * 0.82, 50, 50)) == 50
    assert recommended(usage, Seen(50 * 0.30, 50, 50)) == 20


def test_a_total_is_shared_by_replicas_on_their_way_too() -> None:
    assert recommended(scaler(), Seen(100.0, 2, 2)) == 10
    assert recommended(scaler(), Seen(100.0, 2, 10)) == 10
    assert recommended(scaler(), Seen(104.0, 2, 10)) == 10, "4 % more is within the tolerance"
    assert recommended(scaler(), Seen(112.0, 2, 10)) == 12
    assert recommended(scaler(), Seen(0.0, 3, 3)) == 0
    assert recommended(scaler(), Seen(1.0, 0, 0)) == 1


def test_pods_that_are_not_ready_count_as_idle_when_it_grows() -> None:
    """1 ready at 0.9 where 0.5 is wanted: 2; with one on its way (0.45 of two) nothing more is needed."""
    usage = scaler("kv_usage", 0.5)
    assert recommended(usage, Seen(0.9, 1, 1)) == 2
    assert recommended(usage, Seen(0.9, 1, 2)) == 2
    assert recommended(usage, Seen(1.8, 2, 3)) == 4  # 0.6 of three
    assert recommended(usage, Seen(0.2, 2, 3)) == 1  # it shrinks by those that are ready
    assert recommended(usage, Seen(0.0, 0, 2)) == 2


def decisions(settings: Autoscaler, wanted: list[int], start: int = 1, every_s: int = 15) -> list[int]:
    """What it chooses for totals that ask for so many replicas, one look after the other."""
    rule, current, chosen = ScalingRule(settings), start, []
    for look, number in enumerate(wanted):
        current = rule.decide(Seen(number * settings.target, current, current), look * every_s * S).num_chosen
        chosen.append(current)
    return chosen


def test_it_shrinks_to_the_highest_recommendation_of_the_window() -> None:
    settings = scaler(down_stabilization_ns=60 * S, up_limit_replicas=100)
    assert decisions(settings, [8, 3, 5, 3, 3, 3, 3, 3, 3, 3]) == [8, 8, 8, 8, 5, 5, 3, 3, 3, 3]


def test_it_does_not_shrink_a_pool_that_it_has_just_met() -> None:
    assert decisions(scaler(), [1, 1], start=6) == [6, 6]
    assert decisions(scaler(down_stabilization_ns=0), [1, 1], start=6) == [1, 1]


def test_it_grows_to_the_lowest_recommendation_of_the_window() -> None:
    settings = scaler(up_stabilization_ns=30 * S, up_limit_replicas=100)
    assert decisions(settings, [1, 9, 7, 9, 9]) == [1, 1, 7, 7, 9]


def test_it_grows_by_four_or_to_the_double_in_a_period() -> None:
    assert decisions(scaler(), [100] * 5) == [5, 10, 20, 40, 80]
    slow = scaler(up_limit_replicas=1, up_limit_percent=0, up_period_ns=60 * S)
    assert decisions(slow, [100] * 9) == [2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_what_it_removed_in_the_period_it_may_add_again() -> None:
    """The limit counts from the number at the beginning of the period."""
    slow = scaler(up_limit_replicas=1, up_limit_percent=0, up_period_ns=60 * S, down_stabilization_ns=0)
    assert decisions(slow, [6, 2, 100, 100, 100], start=6) == [6, 2, 7, 7, 7]


SETTINGS = st.builds(
    scaler,
    tolerance=st.sampled_from([0.0, 0.1, 0.5]),
    min_replicas=st.integers(0, 3),
    max_replicas=st.integers(3, 20),
    up_stabilization_ns=st.sampled_from([0, 20 * S, 60 * S]),
    down_stabilization_ns=st.sampled_from([0, 20 * S, 60 * S]),
    up_limit_replicas=st.integers(1, 5),
    up_limit_percent=st.sampled_from([0, 50, 100]),
    up_period_ns=st.sampled_from([15 * S, 40 * S]),
)


@given(SETTINGS, st.lists(st.floats(0, 250), max_size=25), st.integers(1, 20))
def test_decisions_are_those_of_the_rule_restated(settings: Autoscaler, totals: list[float], start: int) -> None:
    rule = ScalingRule(settings)
    current = min(max(start, settings.min_replicas), settings.max_replicas)
    seen_before: list[tuple[int, int]] = [(0, current)]
    added: list[tuple[int, int]] = []
    for look, total in enumerate(totals):
        now = look * 15 * S
        close = current > 0 and abs(total / (settings.target * current) - 1) <= settings.tolerance
        wanted = current if close else ceil(total / settings.target)
        ups = [n for t, n in seen_before if t > now - settings.up_stabilization_ns]
        downs = [n for t, n in seen_before if t > now - settings.down_stabilization_ns]
        low, high = min([wanted, *ups]), max([wanted, *downs])
        expected = low if current < low else high if current > high else current
        base = current - sum(n for t, n in added if t > now - settings.up_period_ns)
        most = max(base + settings.up_limit_replicas, ceil(base * (1 + settings.up_limit_percent / 100)), current)
        expected = max(min(expected, most, settings.max_replicas), settings.min_replicas)
        decision = rule.decide(Seen(total, current, current), now)
        assert decision == (wanted, expected)
        if expected != current:
            added.append((now, expected - current))
        seen_before.append((now, wanted))
        current = expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric": "gpu"}, "metric must be one of waiting, concurrency, kv_usage, got 'gpu'"),
        ({"target": 0}, "target must be above 0, got 0"),
        ({"metric": "kv_usage", "target": 70}, "share above 0 and at most 1, got 70"),
        ({"metric": "kv_usage", "target": 0.7, "min_replicas": 0}, "min_replicas must be at least 1 .*, got 0"),
        ({"min_replicas": 5, "max_replicas": 4}, r"at least min_replicas \(5\), got 4"),
        ({"tolerance": 1.0}, "tolerance must be at least 0 and below 1, got 1.0"),
        ({"interval_ns": 0}, "interval_ns must be at least 1000000, got 0"),
        ({"start_up_ns": -1}, "start_up_ns must be at least 0, got -1"),
        ({"up_limit_replicas": 0, "up_limit_percent": 0}, "could never grow"),
    ],
)
def test_a_wrong_autoscaler_says_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scaler(**changes)

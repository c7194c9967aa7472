"""How many replicas a pool should have: the rules of Kubernetes' HorizontalPodAutoscaler, as KEDA drives it.

Source of the rules: the controller's ``ReplicaCalculator`` and ``normalizeDesiredReplicasWithBehaviors`` (Kubernetes
1.30 to 1.36, ``autoscaling/v2``), restated here.  Defaults are Kubernetes' (looked at every 15 s, tolerance 10 %, no
stabilisation upwards and 300 s downwards, upwards at most the double or 4 more in 15 s, whichever is more).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite
from typing import NamedTuple

METRICS = ("waiting", "concurrency", "kv_usage")
NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """When a pool grows and shrinks.

    Raises ValueError, naming the field, its value and the allowed range.
    """

    metric: str
    """``waiting``: requests that wait, in the engines and at the gateway.  ``concurrency``: requests sent and not
    answered, waiting ones included.  ``kv_usage``: vLLM's ``kv_cache_usage_perc`` (0 … 1), mean of the replicas."""
    target: float
    """What the metric should be for each replica."""
    max_replicas: int
    min_replicas: int = 1
    start_up_ns: int = 120 * NS_PER_S
    """From the decision to the first request that a new replica takes: node, image, weights, CUDA graphs."""
    interval_ns: int = 15 * NS_PER_S
    """How often it looks; at least 1 ms."""
    metric_delay_ns: int = 0
    """How old the metric is that it acts upon: scraping and averaging."""
    tolerance: float = 0.1
    """Share by which the metric may miss the target without anything being done."""
    up_stabilization_ns: int = 0
    """It grows to the lowest recommendation of so long a time."""
    down_stabilization_ns: int = 300 * NS_PER_S
    """It shrinks to the highest recommendation of so long a time."""
    up_limit_replicas: int = 4
    """In ``up_period_ns`` it grows by so many replicas, or by ``up_limit_percent``, whichever is more."""
    up_limit_percent: int = 100
    up_period_ns: int = 15 * NS_PER_S
    drain_timeout_ns: int | None = None
    """How long a replica that has to go may finish its requests; what is left then is lost.  None is as long as it
    takes."""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        if not (isfinite(self.target) and self.target > 0):
            raise ValueError(f"target must be above 0, got {self.target}")
        if self.metric == "kv_usage" and self.target > 1:
            raise ValueError(f"target of kv_usage is a share above 0 and at most 1, got {self.target}")
        least = 1 if self.metric == "kv_usage" else 0
        if self.min_replicas < least:
            why = " (without a replica there is no kv_usage to grow by)" if least else ""
            raise ValueError(f"min_replicas must be at least {least}{why}, got {self.min_replicas}")
        if self.max_replicas < max(self.min_replicas, 1):
            raise ValueError(
                f"max_replicas must be at least 1 and at least min_replicas ({self.min_replicas}), got "
                f"{self.max_replicas}"
            )
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, got {self.tolerance}")
        for name, lowest in (
            ("start_up_ns", 0),
            ("interval_ns", NS_PER_MS),
            ("metric_delay_ns", 0),
            ("up_stabilization_ns", 0),
            ("down_stabilization_ns", 0),
            ("up_limit_replicas", 0),
            ("up_limit_percent", 0),
            ("up_period_ns", 1),
            ("drain_timeout_ns", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")
        if not self.up_limit_replicas and not self.up_limit_percent:
            raise ValueError("up_limit_replicas and up_limit_percent are both 0: the pool could never grow")

    @property
    def patience_ns(self) -> int:
        """Within this time of nothing else happening it does what it is going to do."""
        return 2 * self.interval_ns + self.metric_delay_ns + self.up_stabilization_ns + self.up_period_ns


class Seen(NamedTuple):
    """A pool as its autoscaler sees it."""

    total: float
    """The metric summed over the replicas that are ready (and the gateway's queue, for ``waiting`` and
    ``concurrency``)."""
    num_ready: int
    num_wanted: int
    """Replicas that are ready or on their way."""

    @property
    def per_replica(self) -> float:
        """The metric for each replica that is ready; the total where there is none."""
        return self.total / max(self.num_ready, 1)


def recommended(settings: Autoscaler, seen: Seen) -> int:
    """What the formula asks for: ``ceil(current * value / target)``, unless that is within the tolerance.

    ``waiting`` and ``concurrency`` are totals shared by all replicas, those on their way included (an external metric
    with an ``AverageValue``); ``kv_usage`` is the replicas' own (a ``Pods`` metric), of which those on their way count
    as 0 when the pool would grow and not at all when it would shrink.
    """
    if settings.metric == "kv_usage":
        return _by_pods(settings, seen)
    current = seen.num_wanted
    if current and abs(seen.total / (settings.target * current) - 1.0) <= settings.tolerance:
        return current
    return ceil(seen.total / settings.target)


def _by_pods(settings: Autoscaler, seen: Seen) -> int:
    if not seen.num_ready:
        return seen.num_wanted
    ratio = seen.total / seen.num_ready / settings.target
    num_coming = seen.num_wanted - seen.num_ready
    count = seen.num_ready
    if num_coming > 0 and ratio > 1:
        count = seen.num_wanted
        fuller = seen.total / count / settings.target
        if fuller <= 1:
            return seen.num_wanted
        ratio = fuller
    if abs(ratio - 1.0) <= settings.tolerance:
        return seen.num_wanted
    return ceil(ratio * count)


class Decision(NamedTuple):
    """What an autoscaler made of what it saw."""

    num_recommended: int
    num_chosen: int


class ScalingRule:
    """The memory of one autoscaler: its recommendations and what it did, for stabilisation and speed limit."""

    def __init__(self, settings: Autoscaler) -> None:
        self.settings = settings
        self._recommendations: list[tuple[int, int]] = []  # (time, replicas)
        self._changes: list[tuple[int, int]] = []  # (time, replicas added, below 0 for removed ones)
        self._has_looked = False

    def decide(self, seen: Seen, now_ns: int) -> Decision:
        """How many replicas there should be from now on."""
        wanted = recommended(self.settings, seen)
        chosen = self._stabilised(wanted, seen.num_wanted, now_ns)
        chosen = min(chosen, self._limit(seen.num_wanted, now_ns))
        chosen = min(max(chosen, self.settings.min_replicas), self.settings.max_replicas)
        if chosen != seen.num_wanted:
            self._changes.append((now_ns, chosen - seen.num_wanted))
        return Decision(wanted, chosen)

    def _stabilised(self, wanted: int, current: int, now_ns: int) -> int:
        """Up to the lowest and down to the highest recommendation of the two windows, this one included."""
        settings = self.settings
        if not self._has_looked:  # as the controller does, which else would shrink a pool that it has just met
            self._has_looked = True
            self._recommendations.append((now_ns, current))
        longest_ns = max(settings.up_stabilization_ns, settings.down_stabilization_ns)
        self._recommendations = [item for item in self._recommendations if item[0] > now_ns - longest_ns]
        up = min([n for t, n in self._recommendations if t > now_ns - settings.up_stabilization_ns], default=wanted)
        down = max([n for t, n in self._recommendations if t > now_ns - settings.down_stabilization_ns], default=wanted)
        self._recommendations.append((now_ns, wanted))
        return min(max(current, min(up, wanted)), max(down, wanted))

    def _limit(self, current: int, now_ns: int) -> int:
        """Most replicas that there may be after this decision."""
        settings = self.settings
        self._changes = [item for item in self._changes if item[0] > now_ns - settings.up_period_ns]
        before = current - sum(count for _, count in self._changes)
        by_percent = ceil(before * (100 + settings.up_limit_percent) / 100)
        return max(before + settings.up_limit_replicas, by_percent, current)

"""How queue and backlog developed while requests came: the numbers that the stability verdict is made of."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from windtunnel.sim.metrics.latency import NS_PER_S, FloatArray
from windtunnel.sim.metrics.load import level_over_time
from windtunnel.sim.records import IntArray, Outcome, Records, is_unservable
from windtunnel.sim.workload import Workload

MIN_REQUESTS = 30
"""Below this many requests no verdict is given."""
NUM_BUCKETS = 20
"""Equal parts of the window whose means are looked at for a trend."""
MIN_TAU = 0.5
"""Least Kendall correlation of those means with time that counts as steady growth."""
NOISE_FACTOR = 2.0
"""Multiple of the standard deviation (of a random walk, or of a count) that growth must exceed."""
MIN_GROWTH = 5.0
"""Growth, in requests, that is never called overload, however regular the arrivals are."""
MIN_STAY_RATIO = 1.25
"""Least ratio of the time that requests stay in the last quarter of the window to that in the first that is growth."""
FALLEN_SHARE = 1 / 3
"""A queue that has fallen by this share from its height before the arrivals end does not grow without bound."""
BURST_WINDOW_SHARE = 0.05
"""If all arrivals fall into this share of the run, it is one burst that is worked off."""
FOOT_SHARE = 0.1
"""A queue's rise to its height is told from where it last was below this share of it."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The height of the queue while requests came: how long it was, when, and since when it had been rising."""

    height: int
    time_ns: int
    foot_ns: int
    arrival_rate: float
    """Requests due per second while it rose."""


class Lives:
    """When each request that was ever due came, was started and left, and the queue that follows from it."""

    def __init__(self, records: Records, workload: Workload) -> None:
        table = records.requests
        came = np.flatnonzero((table.due_ns >= 0) & (table.due_ns <= records.end_ns) & ~is_unservable(records))
        came = came[np.argsort(table.due_ns[came], kind="stable")]
        self.due: IntArray = table.due_ns[came]
        self.sent: IntArray = _or_never(table.arrival_ns[came], records.end_ns)
        self.gone: IntArray = _or_never(table.finish_ns[came], records.end_ns)
        # who is refused, or gives up while waiting, leaves the queue at that moment
        self.started: IntArray = np.where(table.scheduled_ns[came] < 0, self.gone, table.scheduled_ns[came])
        self.is_refused = table.outcome[came] == Outcome.REJECTED
        self.is_finished = table.outcome[came] == Outcome.FINISHED
        self.max_concurrency = workload.max_concurrency
        self.first_due = int(self.due[0]) if len(came) else 0
        self.last_due = int(self.due[-1]) if len(came) else 0
        self.window_ns = self.last_due - self.first_due
        self.duration_ns = max(records.end_ns - self.first_due, 1)
        self.queue_drain_ns = max(int(self.started.max(initial=0)) - self.last_due, 0) if len(came) else 0
        queue_window = (self.first_due, records.end_ns if self.is_burst else self.last_due)
        self.queue_share_at_server = self._queue_share_at_server(records, *queue_window)
        self.queue_share_at_client = self._queue_share_at_client(*queue_window)
        served = (self.gone - self.started)[table.scheduled_ns[came] >= 0]
        self.usual_service_ns = float(np.median(served)) if len(served) else 0.0
        self.long_service_ns = float(np.percentile(served, 90)) if len(served) else 0.0
        self.noise_per_request = sqrt(_square_cv(np.diff(self.due)) + _square_cv(table.num_output_tokens[came]))
        self.num_running_peak = sum(int(replica.steps.num_running.max(initial=0)) for replica in records.replicas)
        self.queue_at_last_arrival = int((self.started > self.last_due).sum())
        self.peak = self._peak()

    @property
    def offered_request_rate(self) -> float | None:
        """Requests due per second; None if all are due at once."""
        return (len(self.due) - 1) * NS_PER_S / self.window_ns if self.window_ns else None

    @property
    def completion_rate(self) -> float | None:
        """Requests finished per second while others came."""
        done = self.is_finished & (self.gone <= self.last_due)
        return float(done.sum()) * NS_PER_S / self.window_ns if self.window_ns else None

    @property
    def refused_share(self) -> float:
        """Share of the requests that the server refused though it could have served them at another time."""
        return float(self.is_refused.mean()) if len(self.due) else 0.0

    @property
    def is_burst(self) -> bool:
        """Whether all were due in so short a time that there is no arrival window to speak of."""
        return self.window_ns <= BURST_WINDOW_SHARE * self.duration_ns

    @property
    def has_fallen(self) -> bool:
        """Whether the queue had fallen a good deal from its height before the last request came."""
        return self.queue_at_last_arrival <= (1 - FALLEN_SHARE) * self.peak.height

    @property
    def queue_share(self) -> float:
        """Share of the arrival window in which requests were waiting, at the server or at the client."""
        return max(self.queue_share_at_server, self.queue_share_at_client)

    def _queue_share_at_server(self, records: Records, start: int, end: int) -> float:
        """Share of the time, averaged over replicas, in steps whose decision left requests waiting."""
        if end <= start:
            return 0.0
        waited_ns = 0.0
        for replica in records.replicas:
            left_waiting = replica.steps.num_waiting > 0
            waited_ns += _overlap(replica.steps.start_ns[left_waiting], replica.steps.end_ns[left_waiting], start, end)
        return waited_ns / (end - start) / max(len(records.replicas), 1)

    def _queue_share_at_client(self, start: int, end: int) -> float:
        held = self.sent > self.due
        return _union(self.due[held], self.sent[held], start, end) / (end - start) if end > start else 0.0

    def _peak(self) -> Peak:
        times, level = level_over_time(self.due, self.started)
        inside = int(np.searchsorted(times, self.last_due, "right"))
        if not inside or not level[:inside].max(initial=0):
            return Peak(0, self.first_due, self.first_due, 0.0)
        top = int(level[:inside].argmax())
        low = np.flatnonzero(level[:top] <= FOOT_SHARE * level[top])
        foot, peak = int(times[low[-1]]) if len(low) else self.first_due, int(times[top])
        came = int(np.searchsorted(self.due, peak, "right") - np.searchsorted(self.due, foot, "right"))
        return Peak(int(level[top]), peak, foot, came * NS_PER_S / max(peak - foot, 1))


@dataclass(frozen=True, slots=True)
class Trend:
    """How the number of requests in some state developed, as means of equal parts of the time."""

    level: FloatArray
    tau: float
    growth: float
    noise: float
    stay_ratio: float
    """Mean time in that state in the last quarter of the window over that in the first."""

    @property
    def is_rising(self) -> bool:
        """Whether it rose through the window, and not only because more came: each stayed longer, too."""
        return self.tau >= MIN_TAU and self.stay_ratio >= MIN_STAY_RATIO


def queue_trend(life: Lives) -> Trend | None:
    """Trend of the requests due and not yet started, over the whole window."""
    if life.is_burst or len(life.due) < MIN_REQUESTS:
        return None
    noise = max(NOISE_FACTOR * life.noise_per_request * sqrt(len(life.due)), MIN_GROWTH)
    return _trend(life, life.started, life.first_due, noise)


def backlog_trend(life: Lives) -> Trend | None:
    """Trend of the requests due and not yet finished, after the time in which most of the first ones are served."""
    ramp_end = life.first_due + int(max(life.long_service_ns, 0.1 * life.window_ns))
    if life.is_burst or len(life.due) < MIN_REQUESTS or ramp_end > life.first_due + life.window_ns // 2:
        return None
    return _trend(life, life.gone, ramp_end, None)


def _trend(life: Lives, leaves: IntArray, start_ns: int, noise: float | None) -> Trend:
    edges = np.linspace(start_ns, life.last_due, NUM_BUCKETS + 1)
    level = np.diff(_integral(life.due, edges) - _integral(np.sort(leaves), edges)) / np.diff(edges)
    later, earlier = np.tril_indices(NUM_BUCKETS, -1)
    rises = level[later] - level[earlier]
    counted = NOISE_FACTOR * sqrt(max(float(level.mean()), 0.0))  # a count varies like one of independent things
    return Trend(
        level=level,
        tau=float(np.sign(rises).mean()),
        growth=float(np.median(rises / (later - earlier))) * NUM_BUCKETS,
        noise=max(counted, MIN_GROWTH) if noise is None else noise,
        stay_ratio=_stay_ratio(level, np.diff(np.searchsorted(life.due, edges))),
    )


def _stay_ratio(level: FloatArray, num_due: IntArray) -> float:
    """How much longer requests stay in the end, by Little's law: the number there over the rate at which they come.

    Stays themselves would mislead: those of the last requests end after the arrivals, in a system that empties.
    """
    quarter = NUM_BUCKETS // 4
    early = float(level[:quarter].sum()) / max(int(num_due[:quarter].sum()), 1)
    late = float(level[-quarter:].sum()) / max(int(num_due[-quarter:].sum()), 1)
    return late / early if early > 0 else (inf if late > 0 else 1.0)


def _or_never(times: IntArray, end_ns: int) -> IntArray:
    """Those times, and one after the run's end for what never happened, even if the last request came at its end."""
    return np.where(times < 0, end_ns + 1, times)


def _square_cv(values: IntArray) -> float:
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.var()) / mean**2 if mean > 0 else 0.0


def _integral(times: IntArray, edges: FloatArray) -> FloatArray:
    """For each edge t the integral up to t of the number of (sorted) times that lie before: sum of max(0, t - time)."""
    before: IntArray = np.searchsorted(times, edges, side="right")
    origin = edges[0]  # keeps the sums small, so that doubles hold them well
    summed = np.concatenate(([0.0], np.cumsum(times - origin)))
    total: FloatArray = before * (edges - origin) - summed[before]
    return total


def _overlap(start_ns: IntArray, end_ns: IntArray, low: int, high: int) -> float:
    """Summed length of disjoint intervals inside [low, high]."""
    return float(np.maximum(np.minimum(end_ns, high) - np.maximum(start_ns, low), 0).sum())


def _union(start_ns: IntArray, end_ns: IntArray, low: int, high: int) -> float:
    """Length of the union of intervals (sorted by start) inside [low, high]."""
    if not len(start_ns):
        return 0.0
    reached = np.concatenate(([low], np.maximum.accumulate(end_ns)[:-1]))
    return _overlap(np.maximum(start_ns, reached), end_ns, low, high)

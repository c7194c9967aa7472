"""Whether a run reached a steady state: stable, backlogged, overloaded, or too short to tell.

Latency percentiles describe a system only if they do not depend on how long one looks.  Above capacity the number of
requests in the system grows with time and so does every latency; then a percentile says how long the run was.

How overload is told from chance.  Let A requests be due in the part of the arrival window that counts.  A queue just
*at* capacity wanders like a reflected random walk: after A requests its length is about sqrt(A (ca² + cs²)) |Z|, with
ca and cs the coefficients of variation of the gaps between arrivals and of the work per request (the heavy-traffic
limit, Kingman 1962; Whitt, "Stochastic-Process Limits", 2002, ch. 9), Z standard normal.  Twice that is exceeded by a
queue at capacity in fewer than one run of twenty, and by a stable one hardly ever, while beyond capacity the growth
is A (1 - 1/rho), which outgrows it.  So a run is called *overloaded* when the growth (Theil-Sen slope of bucketed
means times the window) exceeds that noise, the buckets rise together (Kendall's tau) and requests that come late take
longer than those that come early (which a mere rise of a bearable rate does not cause).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import sqrt

import numpy as np

from windtunnel.sim.metrics.latency import NS_PER_S, FloatArray
from windtunnel.sim.records import IntArray, Outcome, Records
from windtunnel.sim.workload import Workload

MIN_REQUESTS = 30
"""Below this many requests no verdict is given."""
NUM_BUCKETS = 20
"""Equal parts of the window whose means are looked at for a trend."""
MIN_TAU = 0.5
"""Least Kendall correlation of those means with time that counts as steady growth."""
NOISE_FACTOR = 2.0
"""Multiple of the random-walk noise that growth must exceed."""
MIN_GROWTH = 5.0
"""Growth, in requests, that is never called overload, however regular the arrivals are."""
MIN_LATENCY_RATIO = 1.25
"""Least ratio of the latency of the last quarter of the requests to that of the first that counts as growing."""
STANDING_QUEUE_SHARE = 0.5
"""Share of the arrival window with requests waiting from which on a queue is said to stand."""
LONG_DRAIN_SHARE = 0.1
"""Time to empty the queue after the last arrival, as a share of the window, from which on it counts."""
BURST_WINDOW_SHARE = 0.05
"""If all arrivals fall into this share of the run, it is one burst that is worked off."""


class Verdict(StrEnum):
    """What the load did to the system."""

    STABLE = "stable"
    BACKLOGGED = "backlogged"
    """A queue stood most of the time or had to be drained at the end, but did not grow without bound."""
    OVERLOADED = "overloaded"
    """More came than could be served: the number in the system grew through the arrival window."""
    TOO_SHORT = "too_short"
    """Too few requests, or a window too short against the time one request takes."""
    STALLED = "stalled"
    """Waiting requests could never be scheduled."""


@dataclass(frozen=True, slots=True)
class Stability:
    """The verdict, a sentence that says why, and the numbers behind it."""

    verdict: Verdict
    reason: str
    arrival_window_s: float
    """From the first to the last request due."""
    offered_request_rate: float | None
    """Requests due per second in that window; None if all are due at once."""
    completion_rate: float | None
    """Requests that finished in that window, per second."""
    backlog_growth: float | None
    """Growth of the number of requests in the system (due but not finished) over the part of the window that counts."""
    backlog_noise: float | None
    """Growth that chance alone explains at capacity."""
    backlog_tau: float | None
    """Kendall correlation of that number with time: 1 rises steadily, 0 has no trend."""
    backlog_at_last_arrival: int
    latency_ratio: float | None
    """Median latency (from due) of the last quarter of the requests over that of the first quarter."""
    queue_share: float
    """Share of the arrival window in which requests were left waiting by the scheduler (or at the client)."""
    queue_drain_s: float
    """From the last request due until the last one waiting was started."""
    drain_s: float
    """From the last request due until the end of the run."""

    @property
    def is_steady(self) -> bool:
        """Whether latency statistics may be read as those of a steady state."""
        return self.verdict is Verdict.STABLE or self.verdict is Verdict.BACKLOGGED


def judge(records: Records, workload: Workload) -> Stability:
    """The stability verdict of a run.

    Times count from when a request was *due*: under a client-side limit (closed loop) the wait at the client shows
    overload that the server never sees.
    """
    life = _Lives(records, workload)
    trend = _strongest_trend(life)
    verdict, reason = _verdict(records, life, trend)
    window_s = life.window_ns / NS_PER_S
    return Stability(
        verdict=verdict,
        reason=reason,
        arrival_window_s=window_s,
        offered_request_rate=life.offered_request_rate,
        completion_rate=float((life.gone <= life.last_due).sum()) / window_s if life.window_ns else None,
        backlog_growth=trend.growth if trend else None,
        backlog_noise=trend.noise if trend else None,
        backlog_tau=trend.tau if trend else None,
        backlog_at_last_arrival=int((life.gone > life.last_due).sum()),
        latency_ratio=trend.latency_ratio if trend else None,
        queue_share=life.queue_share,
        queue_drain_s=life.queue_drain_ns / NS_PER_S,
        drain_s=(records.end_ns - life.last_due) / NS_PER_S if len(life.due) else 0.0,
    )


class _Lives:
    """When each request that was ever due came, was started and left; what never happened counts as the run's end."""

    def __init__(self, records: Records, workload: Workload) -> None:
        table = records.requests
        came = np.flatnonzero(
            (table.due_ns >= 0) & (table.due_ns <= records.end_ns) & (table.outcome != Outcome.REJECTED)
        )
        came = came[np.argsort(table.due_ns[came], kind="stable")]
        self.due: IntArray = table.due_ns[came]
        self.sent: IntArray = _or_end(table.arrival_ns[came], records.end_ns)
        self.started: IntArray = _or_end(table.scheduled_ns[came], records.end_ns)
        self.gone: IntArray = _or_end(table.finish_ns[came], records.end_ns)
        self.max_concurrency = workload.max_concurrency
        self.first_due = int(self.due[0]) if len(came) else 0
        self.last_due = int(self.due[-1]) if len(came) else 0
        self.window_ns = self.last_due - self.first_due
        self.duration_ns = max(records.end_ns - self.first_due, 1)
        self.queue_drain_ns = max(int(self.started.max(initial=0)) - self.last_due, 0) if len(came) else 0
        queue_window = (self.first_due, records.end_ns if self.is_burst else self.last_due)
        self.queue_share_at_server = self._queue_share_at_server(records, *queue_window)
        self.queue_share_at_client = self._queue_share_at_client(*queue_window)
        served = self.gone - self.started
        self.usual_service_ns = float(np.median(served)) if len(came) else 0.0
        self.long_service_ns = float(np.percentile(served, 90)) if len(came) else 0.0
        self.noise_per_request = sqrt(_square_cv(np.diff(self.due)) + _square_cv(table.num_output_tokens[came]))

    @property
    def offered_request_rate(self) -> float | None:
        return (len(self.due) - 1) * NS_PER_S / self.window_ns if self.window_ns else None

    @property
    def is_burst(self) -> bool:
        return self.window_ns <= BURST_WINDOW_SHARE * self.duration_ns

    @property
    def queue_share(self) -> float:
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


@dataclass(frozen=True, slots=True)
class _Trend:
    growth: float
    noise: float
    tau: float
    latency_ratio: float

    @property
    def is_overload(self) -> bool:
        grows = self.growth > self.noise and self.tau >= MIN_TAU
        return grows and self.latency_ratio >= MIN_LATENCY_RATIO


def _strongest_trend(life: _Lives) -> _Trend | None:
    """Trend of the requests in the system after the ramp, or of those not yet started over the whole window."""
    if life.is_burst or len(life.due) < MIN_REQUESTS:
        return None
    in_system = _trend(life, life.gone, life.first_due + int(max(life.long_service_ns, 0.1 * life.window_ns)))
    not_started = _trend(life, life.started, life.first_due)
    if in_system is None or (not_started is not None and not_started.is_overload and not in_system.is_overload):
        return not_started
    return in_system


def _trend(life: _Lives, leaves: IntArray, start_ns: int) -> _Trend | None:
    if start_ns > life.first_due + life.window_ns // 2:
        return None
    edges = np.linspace(start_ns, life.last_due, NUM_BUCKETS + 1)
    level = np.diff(_integral(life.due, edges) - _integral(np.sort(leaves), edges)) / np.diff(edges)
    later, earlier = np.tril_indices(NUM_BUCKETS, -1)
    rises = level[later] - level[earlier]
    slope = float(np.median(rises / (later - earlier)))
    counted = life.due >= start_ns
    waits = (leaves - life.due)[counted]
    quarter = max(len(waits) // 4, 1)
    early, late = float(np.median(waits[:quarter])), float(np.median(waits[-quarter:]))
    return _Trend(
        growth=slope * NUM_BUCKETS,
        noise=max(NOISE_FACTOR * life.noise_per_request * sqrt(int(counted.sum())), MIN_GROWTH),
        tau=float(np.sign(rises).mean()),
        latency_ratio=late / early if early > 0 else (float("inf") if late > 0 else 1.0),
    )


def _verdict(records: Records, life: _Lives, trend: _Trend | None) -> tuple[Verdict, str]:
    if records.stalled:
        stuck = int((records.requests.outcome == Outcome.UNFINISHED).sum())
        return Verdict.STALLED, (
            f"the run stopped with {stuck:,} unfinished requests of which the first in the queue can never be "
            "scheduled: it needs more KV blocks or tokens than the engine can ever give"
        )
    if len(life.due) < MIN_REQUESTS:
        return Verdict.TOO_SHORT, f"{len(life.due)} requests are too few to tell, at least {MIN_REQUESTS} are needed"
    if trend is not None and trend.is_overload:
        return Verdict.OVERLOADED, _why_overloaded(life, trend)
    if life.is_burst:
        return _verdict_of_burst(life)
    if life.window_ns < 2 * life.usual_service_ns:
        return Verdict.TOO_SHORT, (
            f"requests came for {_s(life.window_ns)} only and one takes {_s(life.usual_service_ns)} to serve: no "
            "steady state could form, let them come for several times as long"
        )
    if _was_drained(life):
        return Verdict.BACKLOGGED, (
            f"the queue did not grow steadily, but the last request waiting was started only "
            f"{_s(life.queue_drain_ns)} after the last arrival"
        )
    if life.queue_share > STANDING_QUEUE_SHARE:
        where = "at the client's limit or the server" if life.max_concurrency else "at the server"
        return Verdict.BACKLOGGED, (
            f"requests were waiting {where} {life.queue_share:.0%} of the time while they came, "
            "but the queue did not grow without bound"
        )
    return Verdict.STABLE, (
        f"the number of requests in the system shows no lasting growth; requests were left waiting "
        f"{life.queue_share:.0%} of the time"
    )


def _verdict_of_burst(life: _Lives) -> tuple[Verdict, str]:
    if life.max_concurrency is not None:
        if life.queue_share_at_server > STANDING_QUEUE_SHARE:
            return Verdict.BACKLOGGED, (
                f"closed loop with {life.max_concurrency:,} requests in flight: the load adapts to the server, yet "
                f"some of them waited in its queue {life.queue_share_at_server:.0%} of the time"
            )
        return Verdict.STABLE, (
            f"closed loop with {life.max_concurrency:,} requests in flight: the load adapts to the server"
        )
    return Verdict.BACKLOGGED, (
        f"all {len(life.due):,} requests were due within {_s(life.window_ns)} and worked off in "
        f"{_s(life.duration_ns)}: throughput is that of a full system, latencies are those of one burst"
    )


def _was_drained(life: _Lives) -> bool:
    return life.queue_drain_ns > LONG_DRAIN_SHARE * life.window_ns


def _why_overloaded(life: _Lives, trend: _Trend) -> str:
    window_s = life.window_ns / NS_PER_S
    done = float((life.gone <= life.last_due).sum()) / window_s
    place = " (counting the wait at the client's limit)" if life.max_concurrency else ""
    return (
        f"{life.offered_request_rate or 0:,.2f} requests/s were offered and {done:,.2f}/s finished: the backlog{place} "
        f"grew by {trend.growth:,.0f} requests in {_s(life.window_ns)}, where chance explains {trend.noise:,.0f}"
    )


def _or_end(times: IntArray, end_ns: int) -> IntArray:
    return np.where(times < 0, end_ns, times)


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


def _s(time_ns: float) -> str:
    return f"{time_ns / NS_PER_S:,.3g} s"

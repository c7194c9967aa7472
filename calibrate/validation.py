"""The verdict on a prediction: its error in each metric of a live run, how sure that is, and the limits that it keeps.

Both runs are measured with the same ruler (``calibrate.live.observed_metrics``).  The interval of an error comes from
a circular block bootstrap over the requests in the order of their sending (Politis and Romano 1992), with blocks of
about the square root of their number, since the latencies of neighbours in a queue are alike.  The requests of both
runs are the same ones, so they are drawn together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite
from typing import NamedTuple

import numpy as np

from windtunnel.calibrate.live.observed import (
    NS_PER_S,
    BoolArray,
    FloatArray,
    ObservedRequests,
    ObservedRun,
    ServerSeries,
)
from windtunnel.calibrate.live.observed_metrics import ObservedMetrics, latency_sample, observed_metrics
from windtunnel.sim import rng
from windtunnel.sim.metrics.agreement import METRICS, Curve, MetricError, Overlay, relative_error
from windtunnel.sim.metrics.sample import weighted_sum
from windtunnel.sim.records import IntArray

LATENCIES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
OWN_CLOCK = ("windtunnel live", "windtunnel simulation", "windtunnel executor")
"""Sources whose series and requests are on one clock, so that series can be compared instant by instant."""
NUM_RESAMPLES = 1000
_MOST_DRAWN = 10_000_000
"""Values drawn for one statistic's interval; more of them lower the number of resamples, to 100 at least."""
_FEWEST_RESAMPLES = 100
_FEWEST_REQUESTS = 10
"""A bootstrap over fewer says nothing."""
_CONFIDENCE = 0.95
NUM_LEVELS = 201
MOST_POINTS = 1500

_SERIES = {
    "num_running": "running",
    "num_waiting": "waiting",
    "kv_usage": "kv_usage",
    "num_preemptions": "preemptions",
}
_STATISTICS_OF = {
    "throughput": ("requests", "output", "total"),
    **dict.fromkeys(LATENCIES, STATISTICS),
    "preemptions": ("over_time",),
    "kv_usage": ("mean", "peak", "over_time"),
    "running": ("mean", "peak", "over_time"),
    "waiting": ("mean", "peak", "over_time"),
}
_ALSO_CALLED = {"duration": "makespan", "preemption": "preemptions", "kv": "kv_usage", "latency": "e2el"}


# --- limits


class Limit(NamedTuple):
    """A largest error: of one statistic of a metric, or of all of them."""

    metric: str
    statistic: str
    """Empty: whatever the statistic, but not over time."""
    most: float
    text: str

    def covers(self, error: MetricError) -> bool:
        """Whether it is about that error."""
        if error.metric != self.metric:
            return False
        return error.statistic == self.statistic if self.statistic else error.statistic != "over_time"


_LIMIT = re.compile(
    r"(?P<metric>[a-z][a-z0-9_]*)(?::(?P<statistic>[a-z][a-z0-9_]*))?(?:<=|<|:)(?P<most>[0-9]*\.?[0-9]+)(?P<percent>%?)"
)


def parse_limits(text: str) -> tuple[Limit, ...]:
    """Limits such as ``throughput:2% ttft:mean<4% e2el:p95<8% preemptions<10%``, apart by spaces, commas or semicolons.

    Without a statistic a limit holds for each of the metric's own.  Raises ValueError for anything else.
    """
    joined = re.sub(r"\s*(<=|<|:)\s*", r"\1", text).replace(" %", "%")
    parts = [part for part in re.split(r"[\s,;]+", joined) if part]
    if not parts:
        raise ValueError("no limit is in it: give one such as 'ttft:mean<4%'")
    return tuple(map(_limit, parts))


def _limit(part: str) -> Limit:
    found = _LIMIT.fullmatch(part.lower())
    if found is None:
        raise ValueError(
            f"{part!r} is no limit: write METRIC<PERCENT or METRIC:STATISTIC<PERCENT, such as 'throughput<2%' or "
            "'ttft:p95<8%'"
        )
    metric = _ALSO_CALLED.get(found["metric"], found["metric"])
    if metric not in METRICS:
        raise ValueError(f"{part!r}: there is no metric {found['metric']!r}, only {', '.join(METRICS)}")
    statistic = {"median": "p50"}.get(found["statistic"] or "", found["statistic"] or "")
    known = _STATISTICS_OF.get(metric, ())
    if statistic and statistic not in known:
        told = ", ".join(known) if known else "no statistics: leave it out"
        raise ValueError(f"{part!r}: {metric} has no statistic {statistic!r}; it has {told}")
    if not found["percent"]:
        raise ValueError(f"{part!r}: a limit is in percent: write {part}%")
    return Limit(metric, statistic, float(found["most"]) / 100, part)


def with_limits(errors: Sequence[MetricError], limits: Sequence[Limit]) -> tuple[MetricError, ...]:
    """The errors with their limits: of several the one with a statistic, else the last.

    Raises ValueError for a limit on what was not compared at all.
    """
    for limit in limits:
        if not any(limit.covers(error) for error in errors):
            raise ValueError(
                f"limit {limit.text!r}: {limit.metric} was not compared, since the live result does not have it"
                f" (compared: {', '.join(dict.fromkeys(error.metric for error in errors))})"
            )
    return tuple(replace(error, limit=_limit_of(error, limits)) for error in errors)


def _limit_of(error: MetricError, limits: Sequence[Limit]) -> float | None:
    covering = sorted((limit for limit in limits if limit.covers(error)), key=lambda limit: bool(limit.statistic))
    return covering[-1].most if covering else None


# --- errors


def errors_of(live: Sequence[ObservedRun], predicted: ObservedRun, *, seed: int = 0) -> tuple[MetricError, ...]:
    """The error of a prediction in each metric that the live runs have; several live runs are of the same workload.

    ``seed`` draws the resamples.  Raises ValueError if there is no live run.
    """
    if not live:
        raise ValueError("there is no live run to compare with: give at least one")
    told = [observed_metrics(run) for run in live]
    own = observed_metrics(predicted)
    resampled = _Resampled(live, predicted, seed)
    errors = [
        *_plain_errors(live, told, predicted, own),
        *(_latency_error(name, statistic, told, own, resampled) for name, statistic in product(LATENCIES, STATISTICS)),
        *_load_errors(live, told, predicted, own),
    ]
    order = {metric: place for place, metric in enumerate(METRICS)}
    known = [error for error in errors if error.error is not None]
    return tuple(sorted(known, key=lambda error: order[error.metric]))


def _error(
    metric: str,
    statistic: str,
    unit: str,
    live: Sequence[float | None],
    predicted: float | None,
    *,
    in_points: bool = False,
    interval: tuple[float, float] | None = None,
) -> MetricError:
    """The error against the mean of the live runs, and how far these lie from their mean."""
    known = [value for value in live if value is not None]
    mean = sum(known) / len(known) if known and len(known) == len(live) else None

    def off(value: float | None) -> float | None:
        if in_points:
            return None if mean is None or value is None else value - mean
        return relative_error(mean, value)

    spread = (
        max((abs(off(value) or 0.0) for value in known), default=0.0) if len(live) > 1 and mean is not None else None
    )
    return MetricError(metric, statistic, unit, mean, predicted, off(predicted), in_points, interval, spread)


def _plain_errors(
    live: Sequence[ObservedRun], told: Sequence[ObservedMetrics], predicted: ObservedRun, own: ObservedMetrics
) -> Iterator[MetricError]:
    for statistic, unit, key in (
        ("requests", "requests/s", "request_throughput"),
        ("output", "tok/s", "output_throughput"),
        ("total", "tok/s", "total_token_throughput"),
    ):
        yield _error("throughput", statistic, unit, [getattr(each, key) for each in told], getattr(own, key))
    yield _error("makespan", "", "s", list(map(_makespan_s, live, told)), _makespan_s(predicted, own))
    yield _error("preemptions", "", "", [each.preemptions for each in told], own.preemptions)
    hits = [each.prefix_cache_hit_rate for each in told]
    yield _error("prefix_hits", "", "%", hits, own.prefix_cache_hit_rate, in_points=True)


def _makespan_s(run: ObservedRun, told: ObservedMetrics) -> float | None:
    return told.duration_s if run.makespan_ns is None else run.makespan_ns / NS_PER_S


def _latency_error(
    name: str, statistic: str, told: Sequence[ObservedMetrics], own: ObservedMetrics, resampled: _Resampled
) -> MetricError:
    live = [_statistic_ms(each, name, statistic) for each in told]
    return _error(
        name, statistic, "ms", live, _statistic_ms(own, name, statistic), interval=resampled.interval(name, statistic)
    )


def _statistic_ms(told: ObservedMetrics, name: str, statistic: str) -> float | None:
    stats = getattr(told, name)
    value = stats.mean_ms if statistic == "mean" else stats.percentile_ms(float(statistic[1:]))
    return None if value is None else float(value)


# --- intervals


@dataclass(frozen=True, slots=True)
class _Values:
    """One latency of the requests of a run: a value each, or several (gaps between tokens), with their requests."""

    values: FloatArray
    rows: IntArray
    num_requests: int

    def known_rows(self) -> BoolArray:
        known: BoolArray = np.bincount(self.rows, minlength=self.num_requests) > 0
        return known

    def of(self, kept: BoolArray) -> _Values:
        """Those of some of the requests, which are numbered anew."""
        numbers = np.cumsum(kept) - 1
        wanted = kept[self.rows]
        return _Values(self.values[wanted], numbers[self.rows[wanted]], int(kept.sum()))

    @property
    def is_one_each(self) -> bool:
        return len(self.values) == self.num_requests

    def statistics(self, draws: IntArray) -> FloatArray:
        """The statistics of each drawn set of requests: [STATISTICS, resamples]."""
        levels = [float(name[1:]) for name in STATISTICS[1:]]
        if self.is_one_each:
            drawn = self.values[draws]
            return np.vstack([drawn.mean(axis=1), np.percentile(drawn, levels, axis=1)])
        return np.array([self._weighted(row, levels) for row in draws]).T

    def _weighted(self, drawn: IntArray, levels: Sequence[float]) -> list[float]:
        """``values`` are in ascending order here."""
        weights = np.bincount(drawn, minlength=self.num_requests)[self.rows]
        ranks = np.cumsum(weights)
        places = np.searchsorted(ranks, np.array(levels) / 100 * (ranks[-1] - 1), side="right")
        mean = weighted_sum(self.values, weights) / float(ranks[-1])
        return [mean, *self.values[np.minimum(places, len(self.values) - 1)].tolist()]


class _Resampled:
    """Intervals of the relative errors of latencies."""

    def __init__(self, live: Sequence[ObservedRun], predicted: ObservedRun, seed: int) -> None:
        self._live = live
        self._predicted = predicted
        self._seed = seed
        self._known: dict[str, FloatArray | None] = {}

    def interval(self, name: str, statistic: str) -> tuple[float, float] | None:
        """None where requests are not known one by one, not the same ones in both runs, or too few."""
        if name not in self._known:
            self._known[name] = self._intervals(name)
        known = self._known[name]
        if known is None:
            return None
        low, high = known[STATISTICS.index(statistic)].tolist()
        return (low, high) if isfinite(low) and isfinite(high) else None

    def _intervals(self, name: str) -> FloatArray | None:
        """[STATISTICS, 2]"""
        pair = self._paired(name)
        if pair is None:
            return None
        live, predicted = pair
        draws = self._draws(name, predicted)
        tail = 100 * (1 - _CONFIDENCE) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.mean([each.statistics(draws) for each in live], axis=0)
            errors = predicted.statistics(draws) / means - 1.0
            ends: FloatArray = np.percentile(errors, [tail, 100 - tail], axis=1).T
        return ends

    def _paired(self, name: str) -> tuple[list[_Values], _Values] | None:
        runs = [*self._live, self._predicted]
        if len({len(run.requests) for run in runs}) > 1 or not len(self._predicted.requests):
            return None
        order = np.argsort(self._predicted.requests.send_ns, kind="stable")
        found = [_values(run, name, order) for run in runs]
        kept = np.logical_and.reduce([each.known_rows() for each in found])
        if int(kept.sum()) < _FEWEST_REQUESTS:
            return None
        *live, predicted = (each.of(kept) for each in found)
        return live, predicted

    def _draws(self, name: str, predicted: _Values) -> IntArray:
        """[resamples, requests]: requests in blocks of neighbours, which wrap around."""
        num_requests = predicted.num_requests
        number = int(np.clip(_MOST_DRAWN // len(predicted.values), _FEWEST_RESAMPLES, NUM_RESAMPLES))
        length = max(1, round(num_requests**0.5))
        num_blocks = -(-num_requests // length)
        generator = rng.stream(self._seed, "validation", "bootstrap", name)
        starts = generator.integers(num_requests, size=(number, num_blocks, 1))
        drawn: IntArray = (starts + np.arange(length)).reshape(number, -1)[:, :num_requests] % num_requests
        return drawn


def _values(run: ObservedRun, name: str, order: IntArray) -> _Values:
    """A latency of a run's requests, which are taken in this order."""
    table = run.requests
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    if name == "itl":
        row = np.repeat(np.arange(len(table)), np.diff(table.chunk_offsets))
        same = (row[1:] == row[:-1]) & table.is_finished[row[1:]]
        gaps, rows = np.diff(table.chunk_ns)[same].astype(np.float64), place[row[1:][same]]
        ascending = np.argsort(gaps, kind="stable")
        return _Values(gaps[ascending], rows[ascending], len(table))
    known = table.is_finished & (table.ttft_ns >= 0 if name != "e2el" else table.e2el_ns >= 0)
    if name == "tpot":
        known &= (table.e2el_ns >= 0) & (table.num_output_tokens > 1)
        values = (table.e2el_ns - table.ttft_ns) / np.maximum(table.num_output_tokens - 1, 1)
    else:
        values = (table.ttft_ns if name == "ttft" else table.e2el_ns).astype(np.float64)
    in_order = known[order]
    return _Values(values[order][in_order], np.flatnonzero(in_order), len(table))


# --- load over time


def _load_errors(
    live: Sequence[ObservedRun], told: Sequence[ObservedMetrics], predicted: ObservedRun, own: ObservedMetrics
) -> Iterator[MetricError]:
    if _are_aligned((*live, predicted)):
        for column in _SERIES:
            yield from _aligned_errors(column, live, predicted)
        return
    for metric, key in (("kv_usage", "kv_usage"), ("running", "num_running"), ("waiting", "num_waiting")):
        unit, in_points = ("%", True) if metric == "kv_usage" else ("requests", False)
        for statistic in ("mean", "peak"):
            values = [getattr(each, f"{key}_{statistic}") for each in told]
            yield _error(metric, statistic, unit, values, getattr(own, f"{key}_{statistic}"), in_points=in_points)


def _are_aligned(runs: Iterable[ObservedRun]) -> bool:
    return all(run.series is not None and run.source.startswith(OWN_CLOCK) for run in runs)


def _aligned_errors(column: str, live: Sequence[ObservedRun], predicted: ObservedRun) -> Iterator[MetricError]:
    """A gauge is seen only where it was looked at, so that the simulated one is looked at at the same instants."""
    pairs = [_at_same_instants(run, predicted, column) for run in live]
    pairs = [pair for pair in pairs if len(pair[0])]
    if len(pairs) < len(live):
        return
    metric = _SERIES[column]
    unit, in_points = {"kv_usage": ("%", True), "preemptions": ("", False)}.get(metric, ("requests", False))
    distances = [float(np.abs(theirs - ours).mean()) for theirs, ours in pairs]
    peaks = [float(theirs.max()) for theirs, _ in pairs]
    if metric != "preemptions":
        for statistic, of in (("mean", np.mean), ("peak", np.max)):
            values = [float(of(theirs)) for theirs, _ in pairs]
            ours = float(np.mean([of(ours) for _, ours in pairs]))
            yield _error(metric, statistic, unit, values, ours, in_points=in_points)
    far = float(np.mean(distances))
    peak = float(np.mean(peaks))
    error = far if in_points else relative_error(peak, peak + far)
    yield MetricError(metric, "over_time", unit, None, None, error, in_points)


def _at_same_instants(live: ObservedRun, predicted: ObservedRun, column: str) -> tuple[FloatArray, FloatArray]:
    """Live samples between the first sending and the last token, and the simulated level at those instants."""
    assert live.series is not None, "the runs are aligned"
    assert predicted.series is not None, "the runs are aligned"
    values: FloatArray = getattr(live.series, column)
    sent = live.requests.send_ns[live.requests.send_ns >= 0]
    ends = live.requests.finish_ns
    inside = ~np.isnan(values)
    if len(sent):
        inside &= (live.series.time_ns >= sent.min()) & (live.series.time_ns <= ends.max())
    theirs, ours = values[inside], _level_at(predicted.series, column, live.series.time_ns[inside])
    known = ~np.isnan(ours)
    return theirs[known], ours[known]


def _level_at(series: ServerSeries, column: str, times_ns: IntArray) -> FloatArray:
    """The level that held at those instants: 0 before the first one, NaN if there is none at all."""
    values: FloatArray = getattr(series, column)
    place = np.searchsorted(series.time_ns, times_ns, side="right") - 1
    if np.isnan(values).all():
        return np.full(len(times_ns), np.nan)
    return np.where(place >= 0, values[np.maximum(place, 0)], 0.0)


# --- what is drawn


def overlays_of(live: Sequence[ObservedRun], predicted: ObservedRun) -> tuple[Overlay, ...]:
    """Distributions of the latencies and, where they can be compared, levels over time, live and simulated."""
    drawn = [_distributions(name, live, predicted) for name in LATENCIES]
    if _are_aligned((*live, predicted)):
        drawn += [_levels(column, live, predicted) for column in _SERIES]
    return tuple(each for each in drawn if each is not None)


def _distributions(name: str, live: Sequence[ObservedRun], predicted: ObservedRun) -> Overlay | None:
    curves = [_cumulative(run, name) for run in (*live, predicted)]
    known = [curve for curve in curves if curve is not None]
    if len(known) < len(curves):
        return None
    return Overlay(name, "ms", tuple(known[:-1]), known[-1], is_distribution=True)


def _cumulative(run: ObservedRun, name: str) -> Curve | None:
    values = latency_sample(run, name)
    if not values.count:
        return None
    levels = np.linspace(0, 1, NUM_LEVELS)
    return Curve(np.array([values.percentile(100 * level) or 0.0 for level in levels]) / 1e6, levels)


def _levels(column: str, live: Sequence[ObservedRun], predicted: ObservedRun) -> Overlay | None:
    curves = [_over_time(run.series, column) for run in (*live, predicted) if run.series is not None]
    if any(not len(curve.x) for curve in curves):
        return None
    unit = {"kv_usage": "%", "num_preemptions": "preemptions"}.get(column, "requests")
    thinned = len(curves[-1].x) > MOST_POINTS
    note = f" The simulated line is drawn at {MOST_POINTS:,} instants." if thinned else ""
    return Overlay(_SERIES[column], unit, tuple(curves[:-1]), _thinned(curves[-1]), is_distribution=False, note=note)


def _over_time(series: ServerSeries, column: str) -> Curve:
    values: FloatArray = getattr(series, column)
    known = ~np.isnan(values) & (series.time_ns >= 0)
    scale = 100.0 if column == "kv_usage" else 1.0
    return Curve(series.time_ns[known] / NS_PER_S, values[known] * scale)


def _thinned(curve: Curve) -> Curve:
    if len(curve.x) <= MOST_POINTS:
        return curve
    at = np.linspace(curve.x[0], curve.x[-1], MOST_POINTS)
    return Curve(at, curve.y[np.searchsorted(curve.x, at, side="right") - 1])


# --- parts of runs


def with_requests(run: ObservedRun, rows: IntArray) -> ObservedRun:
    """The run with those of its requests only, in that order; what follows a request that is left out follows none."""
    table = run.requests
    number = np.full(len(table) + 1, -1, np.int64)
    number[rows] = np.arange(len(rows))
    chunks = [np.arange(table.chunk_offsets[row], table.chunk_offsets[row + 1]) for row in rows.tolist()]
    kept = np.concatenate([np.zeros(0, np.int64), *chunks])
    columns = {
        name: getattr(table, name)[rows]
        for name in ObservedRequests.__slots__
        if name not in ("errors", "labels", "chunk_offsets", "chunk_ns", "chunk_tokens", "previous")
    }
    requests = ObservedRequests(
        **columns,
        previous=number[table.previous[rows]],
        errors=tuple(table.errors[row] for row in rows.tolist()),
        labels=None if table.labels is None else tuple(table.labels[row] for row in rows.tolist()),
        chunk_offsets=np.concatenate(([0], np.cumsum([len(each) for each in chunks], dtype=np.int64))),
        chunk_ns=table.chunk_ns[kept],
        chunk_tokens=table.chunk_tokens[kept],
    )
    return replace(run, requests=requests)

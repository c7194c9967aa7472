"""What the runs of a sweep say together: where the knees are, and which point is best under the objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import log
from typing import Any

from windtunnel.reports.sweep_data import (
    COMES_FIRST,
    Best,
    Curve,
    Knee,
    Swept,
    SweptAxis,
    SweptPoint,
    are_level,
    measure,
)
from windtunnel.sim.metrics.comparison import MOST_FAILED
from windtunnel.sweeping.axes import Axis
from windtunnel.sweeping.dials import PLANNED
from windtunnel.sweeping.knee import find_knee
from windtunnel.sweeping.plan import PlannedPoint, SweepPlan

LEAST_SPAN = 0.02
"""Share of its largest value by which a number must change to have a knee."""
LEAST_LOG_RATIO = 4
"""Of the largest to the smallest position, from which equal ratios may deserve equal distances."""


def swept_points(points: Sequence[PlannedPoint], runs: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[SweptPoint, ...]:
    """Planned points with what came out."""
    return tuple(
        SweptPoint(number, point.settings, point.words, point.positions, tuple(own))
        for number, (point, own) in enumerate(zip(points, runs, strict=True), 1)
    )


def swept_axes(axes: Sequence[Axis], points: Sequence[PlannedPoint]) -> tuple[SweptAxis, ...]:
    """The axes, with their values as people read them."""
    return tuple(_swept_axis(axis, points) for axis in axes)


def _swept_axis(axis: Axis, points: Sequence[PlannedPoint]) -> SweptAxis:
    key = axis.key
    is_numeric = all(point.positions[key] is not None for point in points)
    places = {point.words[key]: point.positions[key] for point in points}
    words = sorted(places, key=lambda word: places[word] or 0.0) if is_numeric else list(places)
    is_log = is_numeric and _deserves_log(sorted({place for place in places.values() if place is not None}))
    if axis.draw is not None and not axis.draw.choices:
        is_log = axis.draw.is_log
    return SweptAxis(key, axis.text, tuple(words), is_numeric, is_log, axis.draw is not None)


def _deserves_log(positions: Sequence[float]) -> bool:
    """Whether the values lie more nearly at equal ratios than at equal distances."""
    if len(positions) < 3 or positions[0] <= 0 or positions[-1] / positions[0] < LEAST_LOG_RATIO:
        return False
    differences = [b - a for a, b in pairwise(positions)]
    ratios = [log(b / a) for a, b in pairwise(positions)]
    return max(ratios) / min(ratios) < max(differences) / min(differences)


# --- the point to count from


def baseline_point(
    plan: SweepPlan, points: Sequence[SweptPoint], own_settings: Mapping[str, Any] | None
) -> SweptPoint | None:
    """The point that was asked for; else the one with the scenario's own values; else the first that can run."""
    if plan.baseline is not None:
        return next(point for point in points if point.settings == plan.baseline)
    if own_settings:
        for point in points:
            if not point.infeasible and all(own_settings.get(key) == value for key, value in point.settings.items()):
                return point
    return next((point for point in points if not point.infeasible), None)


# --- the best


def default_best_by(points: Sequence[SweptPoint]) -> str:
    """Good requests per second where limits say what is good, else output tokens; per GPU where these differ."""
    feasible = [point for point in points if not point.infeasible]
    has_goodput = bool(feasible) and all(point.values("request_goodput") for point in feasible)
    key = "request_goodput" if has_goodput else "output_throughput"
    gpus = {point.mean("num_gpus") for point in feasible}
    return f"{key}_per_gpu" if len(gpus) > 1 and None not in gpus else key


def best_point(points: Sequence[SweptPoint], by: str, objectives: Sequence[str]) -> Best | None:
    """The point that is best in one number among those that keep all objectives in all replications.

    Unsafe and overloaded points count only if there are no others.  Of points that are level within noise the one with
    fewer GPUs wins, then the one with fewer preemptions (which tell how near the KV cache is to its limit), then the
    one with lower latencies, then the one with more memory left, then the first.  None if no point is left.
    """
    chosen = _candidates(points, by, objectives)
    if not chosen:
        return None
    better = max if measure(by).better != "lower" else min
    top = better(chosen, key=lambda point: point.mean(by) or 0.0)
    level = [point for point in chosen if point is not top and are_level(top, point, by)]
    winner, why = _tie_break([top, *level])
    others = tuple(sorted((point for point in (top, *level) if point is not winner), key=lambda point: point.number))
    return Best(winner, by, bool(objectives), others, why)


def _candidates(points: Sequence[SweptPoint], by: str, objectives: Sequence[str]) -> list[SweptPoint]:
    known = [point for point in points if not point.infeasible and point.values(by)]
    if objectives:
        known = [point for point in known if point.holds]
    else:
        known = _answering(known)
        known = [point for point in known if not point.is_hopeless] or known
    return [point for point in known if not point.is_unsafe] or known


def _answering(points: Sequence[SweptPoint]) -> list[SweptPoint]:
    """Those that leave hardly more requests without an answer than the one that leaves the fewest."""
    shares = [point.mean("failed_share") or 0.0 for point in points]
    return [point for point, share in zip(points, shares, strict=True) if share <= min(shares) + MOST_FAILED]


_TIE_BREAKS = (
    ("num_gpus", "needs the fewest GPUs"),
    ("preemptions", "has the fewest preemptions"),
    ("p99_itl_ms", "has the lowest P99 ITL"),
    ("p99_ttft_ms", "has the lowest P99 TTFT"),
    ("oom_margin_gib", "leaves the most memory free"),
)
NO_PREEMPTIONS = 0.005
"""Preemptions as a share of the requests up to which there are as good as none."""
NEAR = 0.05
"""Share of the lowest latency by which others count as the same."""


def _tie_break(level: Sequence[SweptPoint]) -> tuple[SweptPoint, str]:
    """Of points that are as good: the one to take, and why."""
    if len(level) == 1:
        return level[0], ""
    reasons: list[str] = []
    for key, words in _TIE_BREAKS:
        kept = [point for point in level if _is_among_the_best(point, level, key)]
        if 0 < len(kept) < len(level):
            level, reasons = kept, [*reasons, words]
    return min(level, key=lambda point: point.number), " and ".join(reasons) or COMES_FIRST


def _is_among_the_best(point: SweptPoint, level: Sequence[SweptPoint], key: str) -> bool:
    known = [mean for each in level if (mean := each.mean(key)) is not None]
    own = point.mean(key)
    if own is None:
        return False
    match key:
        case "oom_margin_gib":
            return own == max(known)
        case "preemptions":
            return own <= max(min(known), NO_PREEMPTIONS * (point.mean("num_prompts") or 0.0))
        case "num_gpus":
            return own == min(known)
    return own <= (1 + NEAR) * min(known)


# --- knees


def knees(swept: Swept) -> Iterator[Knee]:
    """Those of each number along the axis of the figures, if that is one of numbers and points lie on lines."""
    if not swept.x_axis.is_numeric or swept.is_scattered:
        return
    for key in swept.shown():
        if key in PLANNED or measure(key).better == "":
            continue
        for curve in swept.curves():
            found = _knee(swept.x_axis, curve, key)
            if found is not None:
                yield found


def _knee(axis: SweptAxis, curve: Curve, key: str) -> Knee | None:
    points = [point for point in curve.points if point.values(key)]
    positions = [point.positions[axis.key] or 0.0 for point in points]
    means = [point.mean(key) or 0.0 for point in points]
    if means and max(means) - min(means) < LEAST_SPAN * max(map(abs, means)):
        return None
    values = [list(each) for each in zip(*(point.values(key) for point in points), strict=True)]
    if len(set(positions)) < len(positions):
        return None
    found = find_knee(positions, values, is_log=axis.is_log)
    if found is None:
        return None
    words = [point.words[axis.key] for point in points]
    return Knee(
        key,
        curve.name,
        points[found.place],
        points[0],
        points[-1],
        found.distance,
        words[found.low],
        words[found.high],
        found.is_tested,
    )


def is_deterministic(points: Sequence[SweptPoint]) -> bool:
    """Whether replications of the same point are all the same, so that they say nothing of noise."""
    return all(_without_seed(run) == _without_seed(point.runs[0]) for point in points for run in point.runs[1:])


def _without_seed(run: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "seed"}

"""The figures of a report as plain data for plotly.js; nothing here imports plotly.

Colours are names such as ``@blue`` or ``@blue/20`` (with opacity in percent) that the page turns into those of the
light or the dark theme.  The palette is Okabe and Ito's, made for colour-blind readers ("Color Universal Design",
2008); no figure tells things apart by colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.reports.causes import often
from windtunnel.reports.words import digits, percent, plural, verb
from windtunnel.sim.metrics import Summary
from windtunnel.sim.metrics.latency import (
    NS_PER_S,
    FloatArray,
    RequestLatencies,
    inter_token_latencies,
    request_latencies,
)
from windtunnel.sim.metrics.load import kv_usage, level_over_time, num_tokens
from windtunnel.sim.metrics.sample import Sample, sample
from windtunnel.sim.records import IntArray, Records, StepTable

NUM_BUCKETS = 600
"""Parts of the time axis when there are too many steps to draw each."""
MAX_RAW_STEPS = 1500
MAX_POINTS = 4000
"""Requests drawn as points; more are drawn as bands."""
NUM_QUANTILES = 200
MAX_MARKS = 160

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: its plotly data and layout, and what is said about it."""

    name: str
    title: str
    caption: str
    """How to read it, and how it was thinned out, if it was."""
    data: list[Trace]
    layout: dict[str, Any]
    half: bool = False
    """Whether two of them stand side by side on a wide page."""
    tall: bool = False
    """Whether it holds two plots, one above the other."""

    def for_page(self) -> dict[str, Any]:
        """What the page needs to draw it."""
        return {"name": self.name, "data": self.data, "layout": self.layout}


@dataclass(frozen=True, slots=True)
class Axis:
    """The time axis: from the first sending on, in the unit that suits the run."""

    start_ns: int
    end_ns: int
    unit_ns: int
    unit: str

    def at(self, times_ns: IntArray | FloatArray) -> FloatArray:
        """Times on this axis."""
        placed: FloatArray = (times_ns - self.start_ns) / self.unit_ns
        return placed

    def say(self, time_ns: int) -> str:
        """One time in words, with as many digits as any other of this run."""
        return f"{(time_ns - self.start_ns) / self.unit_ns:,.2f} {self.unit}"

    @property
    def title(self) -> str:
        """The axis' title with its unit."""
        return f"time since the first request ({self.unit})"

    def edges(self, num_buckets: int) -> FloatArray:
        """Ends of so many equal parts, in nanoseconds."""
        return np.linspace(self.start_ns, max(self.end_ns, self.start_ns + 1), num_buckets + 1)


def time_axis(records: Records) -> Axis:
    """The axis that holds the whole run."""
    sent = records.requests.arrival_ns[records.requests.arrival_ns >= 0]
    start = int(sent.min()) if len(sent) else 0
    length_s = (records.end_ns - start) / NS_PER_S
    unit_ns, unit = (NS_PER_S, "s")
    if length_s > 3 * 3600:
        unit_ns, unit = 3600 * NS_PER_S, "h"
    elif length_s > 600:
        unit_ns, unit = 60 * NS_PER_S, "min"
    return Axis(start, records.end_ns, unit_ns, unit)


def figures(records: Records, summary: Summary) -> list[Figure]:
    """All figures of a report, in the order in which they are read."""
    axis, latencies = time_axis(records), request_latencies(records)
    drawn = [
        kv_figure(records, axis),
        queue_figure(records, axis),
        tokens_figure(records, axis),
        latency_over_time_figure(records, latencies, axis),
        *latency_figures(latencies, inter_token_latencies(records), summary),
    ]
    return [*drawn, preemption_figure(records)] if summary.preemption.num_preemptions else drawn


# --- over time


def kv_figure(records: Records, axis: Axis) -> Figure:
    """KV usage, active and cached, with a mark for every preemption."""
    usages = [kv_usage(replica) for replica in records.replicas]
    steps = [replica.steps for replica in records.replicas]
    active = _series(steps, [100 * usage for usage, _ in usages], axis)
    cached = _series(steps, [100 * usage for _, usage in usages], axis)
    data = [
        *([_area(cached, "active or cached", "@sky", dash="dot")] if _has_cached(records) else []),
        _area(active, "active", "@blue"),
        *_peaks(active, "highest in the interval", "@blue"),
        *_preemption_marks(records, axis),
    ]
    caption = (
        "Active blocks belong to requests; cached ones are free but still hold a prefix that can be found, and are "
        "given away when blocks are needed. At 100 % active the scheduler preempts: requests lose their blocks and "
        "are computed again (▼)."
    )
    if _has_cached(records):
        caption += " vLLM's gauge kv_cache_usage_perc shows the active part only."
    y = {"title": "KV blocks (% of usable)", "range": [0, 108], "ticksuffix": " %"}
    return Figure("kv", "KV cache", caption + active.caption + _many(records), data, _layout(axis.title, y))


def queue_figure(records: Records, axis: Axis) -> Figure:
    """Running and waiting requests, and those held back at the client."""
    steps = [replica.steps for replica in records.replicas]
    running = _series(steps, [s.num_running for s in steps], axis, combine="sum")
    waiting = _series(steps, [s.num_waiting for s in steps], axis, combine="sum")
    data = [
        *_band(running, "@blue"),
        _line(running, "running", "@blue"),
        *_band(waiting, "@vermillion"),
        _line(waiting, "waiting in the engine", "@vermillion", dash="dash"),
        *_held_at_client(records, axis),
    ]
    seats = sum(replica.max_num_seqs for replica in records.replicas)
    peak = max((float(np.nanmax(series.high, initial=0)) for series in (running, waiting)), default=0.0)
    if seats <= 2 * max(peak, 1):
        data.append(_limit(axis, seats, f"max_num_seqs ({seats:,})"))
    caption = (
        "Running requests have a seat in the batch and hold KV blocks; waiting ones were left over by the scheduler's "
        "decision. A queue that keeps growing means overload."
    )
    y = {"title": "requests", "rangemode": "tozero"}
    return Figure(
        "queue", "Running and waiting", caption + running.caption + _many(records), data, _layout(axis.title, y)
    )


def tokens_figure(records: Records, axis: Axis) -> Figure:
    """Tokens computed in an average step, decode and prefill stacked; above it the largest steps against the budget."""
    steps = [replica.steps for replica in records.replicas]
    decode, prefill, most = _tokens_by_interval(steps, axis)
    times = _middles(axis.edges(NUM_BUCKETS), axis)
    stack = {"stackgroup": "tokens", "mode": "lines", "line": {"width": 0, "shape": "hvh"}}
    budget = max(replica.max_num_batched_tokens for replica in records.replicas) if records.replicas else 0
    data: list[Trace] = [
        {**stack, "x": _floats(times), "y": _floats(decode), "name": "decode", "fillcolor": "@green/70"},
        {**stack, "x": _floats(times), "y": _floats(prefill), "name": "prefill", "fillcolor": "@orange/70"},
    ]
    data[0]["hovertemplate"] = data[1]["hovertemplate"] = "%{y:,.4~r} tokens"
    largest: Trace = {"x": _floats(times), "y": _floats(most), "name": "largest step", "mode": "lines", "yaxis": "y2"}
    data.append({**largest, "line": {"color": "@grey", "width": 1}, "hovertemplate": "%{y:,.0f} tokens"})
    data.append(_limit(axis, budget, f"budget ({budget:,})") | {"yaxis": "y2"})
    caption = (
        f"Below: tokens of an average step in each of {NUM_BUCKETS} equal intervals (stacked); above, on a scale of "
        "its own, the largest step there. Decode takes one token for every running request; prompts fill up the rest "
        "of max_num_batched_tokens in chunks. Steps at the budget are long, and every running request waits for them"
    )
    caption += _at_budget(records)
    y = {"title": "tokens of a mean step", "rangemode": "tozero", "domain": [0, 0.6]}
    layout = _layout(axis.title, y)
    layout["yaxis2"] = {"title": "largest step", "rangemode": "tozero", "domain": [0.68, 1], "nticks": 4}
    layout["xaxis"]["anchor"] = "y"
    return Figure("tokens", "Tokens per step", caption + _many(records), data, layout, tall=True)


def latency_over_time_figure(records: Records, latencies: RequestLatencies, axis: Axis) -> Figure:
    """TTFT and E2EL of each request against the time at which it was sent."""
    sent = records.requests.arrival_ns[latencies.rows]
    order = np.argsort(sent, kind="stable")
    sent, scale, unit = sent[order], *_latency_unit(latencies.e2el_ns)
    shown = (("E2EL", latencies.e2el_ns, "@blue", "circle"), ("TTFT", latencies.ttft_ns, "@orange", "diamond"))
    data: list[Trace] = []
    for name, values, colour, symbol in shown:
        if len(sent) <= MAX_POINTS:
            data.append(_points(axis.at(sent), values[order] / scale, name, colour, symbol, unit))
        else:
            data += _quantile_bands(axis, sent, values[order] / scale, name, colour, unit)
    caption = (
        "Each finished request at the time it was sent. Level clouds mean a steady state; clouds that climb mean that "
        "whoever comes later waits longer."
    )
    if len(sent) > MAX_POINTS:
        caption += (
            f" {len(sent):,} requests are too many for points: lines are medians of {NUM_BUCKETS // 3} intervals, "
            "bands reach from the smallest to the largest value."
        )
    both = np.concatenate((latencies.ttft_ns, latencies.e2el_ns)) / scale
    y = _log_if_wide({"title": f"latency ({unit})"}, both)
    return Figure("over-time", "Latency over time", caption, data, _layout(axis.title, y))


# --- distributions


def latency_figures(latencies: RequestLatencies, itl: Sample, summary: Summary) -> list[Figure]:
    """Cumulative distributions of the four latencies, with the limits of the objectives."""
    samples = (
        ("ttft", "Time to first token (TTFT)", sample(latencies.ttft_ns), "requests"),
        ("itl", "Inter-token latency (ITL)", itl, "gaps between tokens"),
        ("tpot", "Time per output token (TPOT)", sample(latencies.tpot_ns[latencies.has_tpot]), "requests"),
        ("e2el", "End-to-end latency (E2EL)", sample(latencies.e2el_ns), "requests"),
    )
    return [_distribution(name, title, values, of, summary) for name, title, values, of in samples if values.count]


def _distribution(name: str, title: str, values: Sample, of: str, summary: Summary) -> Figure:
    levels = _levels(values.count)
    scale, unit = _latency_unit(np.array([values.percentile(99) or 0.0]))
    x = [(values.percentile(100 * level) or 0.0) / scale for level in levels]
    curve: Trace = {
        "x": rounded(x),
        "y": [round(100 * level, 4) for level in levels],
        "mode": "lines",
        "name": name.upper(),
    }
    curve |= {"line": {"color": "@blue", "width": 2.5}, "showlegend": False}
    curve["hovertemplate"] = f"%{{y:,.4~r}} % within %{{x:,.4~r}} {unit}<extra></extra>"
    limits = _limits_of(name, summary, scale, unit)
    x_axis: dict[str, Any] = {"title": f"{name.upper()} ({unit})", "rangemode": "tozero"}
    is_log = _is_wide(values)
    if is_log:
        low, high = values.percentile(0) or 0.0, values.percentile(100) or 0.0
        x_axis |= log_axis(low / scale, high / scale) | {"rangemode": "normal"}
    layout = _layout(None, {"title": f"share of {of} (%)", "range": [0, 112], "tickvals": [0, 25, 50, 75, 100]})
    layout["xaxis"] |= x_axis
    quantiles = {level: (values.percentile(level) or 0.0) / scale for level in (50, 99)}
    layout["shapes"] = [_limit_shape(limit) for limit, _ in limits]
    layout["annotations"] = [_limit_label(limit, text, log=is_log) for limit, text in limits]
    layout["annotations"] += [
        _quantile_label(level, value, f"P{level} {digits(value, 4)} {unit}", log=is_log)
        for level, value in quantiles.items()
    ]
    caption = f"{values.count:,} {of}. The curve says which share had at most the latency below it."
    return Figure(f"cdf-{name}", title, caption, [curve, _quantile_marks(quantiles)], layout, half=True)


def _limits_of(name: str, summary: Summary, scale: float, unit: str) -> list[tuple[float, str]]:
    return [
        (
            result.slo.limit * 1e6 / scale,
            f"{result.slo.statistic} {result.slo.operator} {_short(result.slo.limit, unit)}",
        )
        for result in summary.slo
        if result.slo.metric == name
    ]


def _short(limit_ms: float, unit: str) -> str:
    return f"{digits(limit_ms / 1000, 9)} s" if unit == "s" else f"{digits(limit_ms, 9)} ms"


def _limit_shape(limit: float) -> dict[str, Any]:
    line = {"color": "@vermillion", "width": 1.5, "dash": "dash"}
    return {"type": "line", "x0": limit, "x1": limit, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _limit_label(limit: float, text: str, *, log: bool) -> dict[str, Any]:
    label = {
        "x": _place(limit, log=log),
        "yref": "paper",
        "y": 0.02,
        "text": text,
        "showarrow": False,
        "textangle": -90,
    }
    return label | {"xanchor": "right", "yanchor": "bottom", "font": {"color": "@vermillion", "size": 12}}


def _quantile_marks(quantiles: dict[int, float]) -> Trace:
    """Points on the curve at these levels."""
    return {
        "x": rounded(list(quantiles.values())), "y": list(quantiles), "mode": "markers", "showlegend": False,
        "hoverinfo": "skip", "cliponaxis": False, "marker": {"color": "@blue", "size": 9, "symbol": "circle"},
    }  # fmt: skip


def _quantile_label(level: int, value: float, text: str, *, log: bool) -> dict[str, Any]:
    """The value at a level, left of its point and above the curve, on a ground that hides the lines of limits."""
    return {
        "x": _place(value, log=log), "y": level, "text": text, "showarrow": False, "bgcolor": "@paper", "borderpad": 2,
        "xanchor": "right", "xshift": -6, "yanchor": "bottom", "yshift": 3, "font": {"color": "@text", "size": 12},
    }  # fmt: skip


def _place(value: float, *, log: bool) -> float:
    """Where plotly puts an annotation: logarithmic axes take the logarithm."""
    return float(np.log10(value)) if log and value > 0 else value


def _is_wide(values: Sample) -> bool:
    """Whether a linear axis would squeeze most of the values into its beginning."""
    low, median, high = (values.percentile(percent) or 0.0 for percent in (0, 50, 100))
    return low > 0 and high > 5 * median


def _levels(num_values: int) -> list[float]:
    """Quantile levels, evenly spaced and then ever finer towards 1."""
    even = np.linspace(0, 1, NUM_QUANTILES + 1)
    tail = 1 - np.logspace(-2, -5, 31)
    return [float(level) for level in np.unique(np.concatenate((even, tail[tail < 1 - 0.5 / max(num_values, 1)])))]


def preemption_figure(records: Records) -> Figure:
    """How many requests were preempted how often."""
    frequency = np.bincount(records.requests.num_preemptions)
    never = int(frequency[0])
    bars = {
        "type": "bar", "x": list(range(1, len(frequency))), "y": frequency[1:].tolist(), "text": frequency[1:].tolist(),
        "marker": {"color": "@purple"}, "name": "requests", "showlegend": False, "textposition": "outside",
        "hovertext": [
            f"{plural(number, 'request')} {verb(number, 'was', 'were')} preempted {often(times)}"
            for times, number in enumerate(frequency[1:].tolist(), 1)
        ],
        "hovertemplate": "%{hovertext}<extra></extra>", "cliponaxis": False,
    }  # fmt: skip
    layout = _layout(None, {"title": "requests", "rangemode": "tozero"})
    layout["xaxis"] |= {"title": "preemptions of one request", "dtick": max(1, len(frequency) // 12)}
    caption = (
        f"{plural(never, 'request')} never lost {verb(never, 'its blocks and is', 'their blocks and are')} not drawn."
    )
    return Figure("preemptions", "How often requests were preempted", caption, [bars], layout, half=False)


# --- series of step states


@dataclass(frozen=True, slots=True)
class Series:
    """A quantity over time: its mean in each interval and how far it ranged there; or its exact steps."""

    x: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    exact: bool
    caption: str


def _series(steps: list[StepTable], values: list[npt.NDArray[Any]], axis: Axis, *, combine: str = "mean") -> Series:
    """The values of one or several replicas; those of several are summed, or averaged."""
    if len(steps) == 1 and len(steps[0]) <= MAX_RAW_STEPS:
        times, level = _staircase(steps[0], values[0].astype(np.float64))
        return Series(axis.at(times), level, level, level, True, "")
    edges = axis.edges(NUM_BUCKETS)
    parts = [_envelope(table, column.astype(np.float64), edges) for table, column in zip(steps, values, strict=True)]
    mean, low, high = (
        (np.array([part[k] for part in parts]) for k in range(3)) if parts else (np.zeros((1, NUM_BUCKETS)),) * 3
    )
    caption = (
        f" The run's {sum(len(table) for table in steps):,} steps are drawn as {NUM_BUCKETS} intervals: "
        "lines are means over time, thin lines or bands reach to the lowest and highest value inside."
    )
    x = _middles(edges, axis)
    if combine == "sum":
        return Series(x, mean.sum(0), low.sum(0), high.sum(0), False, caption)
    return Series(x, mean.mean(0), low.min(0), high.max(0), False, caption)


def _staircase(steps: StepTable, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """Times and levels of a line that holds each value during its step and is 0 between steps."""
    if not len(steps):
        return np.zeros(0, np.int64), np.zeros(0)
    idle = np.append(steps.start_ns[1:] > steps.end_ns[:-1], True)
    times = np.concatenate((steps.start_ns, steps.end_ns[idle]))
    levels = np.concatenate((values, np.zeros(int(idle.sum()))))
    order = np.argsort(times, kind="stable")
    return times[order], levels[order]


def _envelope(steps: StepTable, values: FloatArray, edges: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean over time, lowest and highest value between successive edges; 0 where no step ran."""
    num = len(edges) - 1
    if not len(steps):
        return np.zeros(num), np.zeros(num), np.zeros(num)
    length = steps.end_ns - steps.start_ns
    area = np.concatenate(([0.0], np.cumsum(values * length)))
    busy = np.concatenate(([0.0], np.cumsum(length)))
    mean = np.diff(_up_to(edges, steps, area, values)) / np.diff(edges)
    share = np.diff(_up_to(edges, steps, busy, np.ones(len(values)))) / np.diff(edges)
    first = np.searchsorted(steps.end_ns, edges[:-1], "right")
    behind = np.searchsorted(steps.start_ns, edges[1:], "left")
    low, high = np.zeros(num), np.zeros(num)
    for k in np.flatnonzero(behind > first).tolist():
        inside = values[first[k] : behind[k]]
        low[k], high[k] = inside.min(), inside.max()
    low[share < 1 - 1e-6] = 0
    return mean, low, high


def _up_to(edges: FloatArray, steps: StepTable, cumulated: FloatArray, values: FloatArray) -> FloatArray:
    """Integral of the values up to each edge; a step that holds the edge counts with its part before it."""
    done = np.searchsorted(steps.end_ns, edges, "right")
    current = np.minimum(done, len(steps) - 1)
    part = np.clip(edges - steps.start_ns[current], 0, None)
    total: FloatArray = cumulated[done] + np.where(done < len(steps), part * values[current], 0)
    return total


def _tokens_by_interval(steps: list[StepTable], axis: Axis) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean decode and prefill tokens of the steps that start in each interval, and the largest step's tokens."""
    edges = axis.edges(NUM_BUCKETS)
    decode, prefill, number, most = (np.zeros(NUM_BUCKETS) for _ in range(4))
    for table in steps:
        place = np.clip(np.searchsorted(edges, table.start_ns, "right") - 1, 0, NUM_BUCKETS - 1)
        decode += np.bincount(place, table.num_decode_seqs, NUM_BUCKETS)
        prefill += np.bincount(place, table.prefill_tokens, NUM_BUCKETS)
        number += np.bincount(place, minlength=NUM_BUCKETS)
        np.maximum.at(most, place, num_tokens(table))
    number = np.maximum(number, 1)
    return decode / number, prefill / number, most


def _at_budget(records: Records) -> str:
    """How many steps, and how much of the busy time, were at the budget."""
    full, full_ns, number, busy_ns = 0, 0, 0, 0
    for replica in records.replicas:
        length = replica.steps.end_ns - replica.steps.start_ns
        at_budget = num_tokens(replica.steps) >= replica.max_num_batched_tokens
        full, full_ns = full + int(at_budget.sum()), full_ns + int(length[at_budget].sum())
        number, busy_ns = number + len(length), busy_ns + int(length.sum())
    if not full:
        return "; here no step reached it."
    return f"; here {percent(full / number)} of the steps did, {percent(full_ns / busy_ns)} of the time that steps ran."


def _held_at_client(records: Records, axis: Axis) -> list[Trace]:
    table = records.requests
    held = (table.due_ns >= 0) & (table.due_ns <= records.end_ns) & (table.arrival_ns != table.due_ns)
    if not held.any():
        return []
    sent = table.arrival_ns[held]
    times, level = level_over_time(table.due_ns[held], np.where(sent < 0, records.end_ns, sent))
    edges = axis.edges(NUM_BUCKETS)
    before = np.searchsorted(times, edges, "right") - 1
    at_edges = np.where(before >= 0, level[np.maximum(before, 0)], 0)
    line = {"color": "@purple", "width": 2, "dash": "dot"}
    return [
        {
            "x": _floats(axis.at(edges)),
            "y": at_edges.tolist(),
            "name": "held at the client",
            "mode": "lines",
            "line": line,
        }
    ]


def _preemption_marks(records: Records, axis: Axis) -> list[Trace]:
    times = np.concatenate([replica.preemptions.time_ns for replica in records.replicas] or [np.zeros(0, np.int64)])
    if not len(times):
        return []
    if len(times) > MAX_MARKS:
        edges = axis.edges(MAX_MARKS)
        number = np.bincount(np.clip(np.searchsorted(edges, times, "right") - 1, 0, MAX_MARKS - 1), minlength=MAX_MARKS)
        place, number = _middles(edges, axis)[number > 0], number[number > 0]
    else:
        distinct, number = np.unique(times, return_counts=True)
        place = axis.at(distinct)
    sizes = 5 + 7 * np.sqrt(number / number.max())
    return [
        {
            "x": _floats(place), "y": [104.0] * len(place), "mode": "markers", "customdata": number.tolist(),
            "name": f"preemptions ({len(times):,})", "hovertemplate": "%{customdata} preempted<extra></extra>",
            "marker": {"symbol": "triangle-down", "color": "@vermillion", "size": rounded(sizes, 3)},
        }
    ]  # fmt: skip


def _has_cached(records: Records) -> bool:
    return any(bool(replica.steps.num_cached_blocks.any()) for replica in records.replicas)


def _many(records: Records) -> str:
    return f" Taken over {len(records.replicas)} replicas." if len(records.replicas) > 1 else ""


# --- traces


def _shape(series: Series) -> str:
    return "hv" if series.exact else "linear"


def _area(series: Series, name: str, colour: str, dash: str = "solid") -> Trace:
    line = {"color": colour, "width": 1.5, "dash": dash, "shape": _shape(series)}
    filled = {"fill": "tozeroy", "fillcolor": f"{colour}/25", "hovertemplate": "%{y:.1f} %"}
    return {"x": _floats(series.x), "y": _floats(series.mean), "mode": "lines", "name": name, "line": line, **filled}


def _line(series: Series, name: str, colour: str, dash: str = "solid") -> Trace:
    line = {"color": colour, "width": 2, "dash": dash, "shape": _shape(series)}
    return {
        "x": _floats(series.x), "y": _floats(series.mean), "mode": "lines", "name": name, "line": line,
        "hovertemplate": "%{y:.1f}",
    }  # fmt: skip


def _peaks(series: Series, name: str, colour: str) -> list[Trace]:
    if series.exact:
        return []
    line = {"color": colour, "width": 1}
    high = {"x": _floats(series.x), "y": _floats(series.high), "mode": "lines", "name": name, "line": line}
    return [high | {"hovertemplate": "%{y:.1f} %", "opacity": 0.6}]


def _band(series: Series, colour: str) -> list[Trace]:
    """From the lowest to the highest value in each interval, as one closed shape behind the line."""
    if series.exact:
        return []
    return [_closed(series.x, series.low, series.high, colour)]


def _closed(x: FloatArray, low: FloatArray, high: FloatArray, colour: str) -> Trace:
    outline = {"x": _floats(np.concatenate((x, x[::-1]))), "y": _floats(np.concatenate((high, low[::-1])))}
    look = {"mode": "lines", "line": {"width": 0}, "fill": "toself", "fillcolor": f"{colour}/20"}
    return {**outline, **look, "hoverinfo": "skip", "showlegend": False}


def _limit(axis: Axis, value: int, name: str) -> Trace:
    ends = axis.at(np.array([axis.start_ns, axis.end_ns]))
    line = {"color": "@text", "width": 1.2, "dash": "dash"}
    return {"x": _floats(ends), "y": [value, value], "mode": "lines", "name": name, "line": line, "hoverinfo": "skip"}


def _points(x: FloatArray, y: FloatArray, name: str, colour: str, symbol: str, unit: str) -> Trace:
    look = {"color": f"{colour}/60", "size": 5, "symbol": symbol}
    text = f"{name} %{{y:,.4~r}} {unit}<extra></extra>"
    return {"x": _floats(x), "y": rounded(y), "mode": "markers", "name": name, "marker": look, "hovertemplate": text}


def _quantile_bands(axis: Axis, sent: IntArray, values: FloatArray, name: str, colour: str, unit: str) -> list[Trace]:
    edges = axis.edges(NUM_BUCKETS // 3)
    bounds = np.searchsorted(sent, edges)
    filled = np.flatnonzero(np.diff(bounds) > 0)
    parts = [np.sort(values[bounds[k] : bounds[k + 1]]) for k in filled.tolist()]
    x = _middles(edges, axis)[filled]
    median = np.array([float(np.median(part)) for part in parts])
    low, high = np.array([part[0] for part in parts]), np.array([part[-1] for part in parts])
    line = {"color": colour, "width": 2, "dash": "solid" if name == "E2EL" else "dash"}
    middle = {"x": _floats(x), "y": rounded(median), "mode": "lines", "name": f"median {name}", "line": line}
    return [_closed(x, low, high, colour), middle | {"hovertemplate": f"%{{y:,.4~r}} {unit}"}]


# --- axes and numbers


def _layout(x_title: str | None, y_axis: dict[str, Any]) -> dict[str, Any]:
    return {
        "xaxis": {"title": x_title, "rangemode": "nonnegative"} if x_title else {},
        "yaxis": {**y_axis},
        "hovermode": "x unified" if x_title else "closest",
    }


def _log_if_wide(y_axis: dict[str, Any], values: FloatArray) -> dict[str, Any]:
    positive = values[values > 0]
    if len(positive) and positive.max() > 50 * positive.min():
        return y_axis | log_axis(float(positive.min()), float(positive.max()))
    return y_axis | {"rangemode": "tozero"}


def log_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2 and 5 of each decade, or at decades if it holds more than two or three."""
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    leading = (1, 2, 5) if high < 300 * low else (1,)
    ticks = [digit * 10.0**power for power in range(first, last + 1) for digit in leading]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def _latency_unit(values_ns: npt.NDArray[Any]) -> tuple[float, str]:
    return (1e9, "s") if len(values_ns) and float(values_ns.max()) > 2e9 else (1e6, "ms")


def _middles(edges: FloatArray, axis: Axis) -> FloatArray:
    return axis.at((edges[1:] + edges[:-1]) / 2)


def _floats(values: npt.NDArray[Any]) -> list[float]:
    return rounded(values, 6)


def rounded(values: npt.NDArray[Any] | list[float], digits: int = 5) -> list[float]:
    """Values with so many significant digits: finer than any pixel, and short to write."""
    array = np.asarray(values, np.float64)
    with np.errstate(divide="ignore"):
        magnitude = np.where(array == 0, 0, np.floor(np.log10(np.abs(array))) + 1)
    up, down = 10.0 ** np.maximum(digits - magnitude, 0), 10.0 ** np.maximum(magnitude - digits, 0)
    rounded: list[float] = (np.rint(array * up / down) / up * down).tolist()
    return rounded

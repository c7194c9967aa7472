"""The figures of a plan as plain data for plotly.js: cost against latency and throughput, room, risk and growth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.reports.figures import Figure, Trace
from windtunnel.reports.plan_words import Told, growth_rate, measured, money, size_of
from windtunnel.reports.words import count, digits

COLOURS = ("@blue", "@orange", "@green", "@purple", "@vermillion", "@sky", "@grey")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon")
LINES = ("solid", "dash", "dot", "dashdot", "longdash", "solid", "dash")
MOST_LINES = 7
MOST_BARS = 14
LIMIT_NAMES = {
    "max_num_seqs": "seats (max_num_seqs)",
    "max_num_batched_tokens": "budget (max_num_batched_tokens)",
    "kv_blocks": "KV cache",
    "queue": "another queue",
    "compute": "compute",
    "bandwidth": "bandwidth",
    "idle": "idle",
}


def plan_figures(told: Told) -> list[Figure]:
    """All figures that the plan has data for, in the order in which they are read."""
    drawn = [pareto_figure(told), curves_figure(told), candidates_figure(told)]
    if told["recommended"] is not None:
        drawn += [room_figure(told), time_figure(told)]
    drawn.append(load_figure(told))
    if told["growth"]:
        drawn.append(growth_figure(told))
    return [figure for figure in drawn if figure is not None]


def cost_axis(told: Told) -> str:
    """What costs are counted in."""
    return f"{told['currency']} an hour" if told["has_prices"] else "GPUs"


def _shapes(told: Told) -> list[str]:
    """Shapes in the order of the candidates, so that a shape keeps its colour in all figures."""
    names = [row["label"] for row in told["candidates"]]
    return list(dict.fromkeys(names))


def _style(told: Told, label: str) -> tuple[str, str, str]:
    place = _shapes(told).index(label) if label in _shapes(told) else len(COLOURS) - 1
    k = place % len(COLOURS)
    return COLOURS[k], SYMBOLS[k], LINES[k]


# --- cost, latency, throughput


def pareto_figure(told: Told) -> Figure | None:
    """Whole fleets: cost across, latency up, and the load that they carry as the size of the mark."""
    found = told["pareto"]
    points = found["points"]
    if not points:
        return None
    data: list[Trace] = []
    largest = max(point["rate"] for point in points)
    for shape in dict.fromkeys(point["shape"] for point in points):
        own = [point for point in points if point["shape"] == shape]
        colour, symbol, _ = _style(told, shape)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": shape,
                "x": [round(point["cost_per_hour"], 4) for point in own],
                "y": [round(point["latency"], 4) for point in own],
                "marker": {
                    "color": colour,
                    "symbol": [symbol if point["holds"] else f"{symbol}-open" for point in own],
                    "size": [round(9 + 17 * (point["rate"] / largest) ** 2, 1) for point in own],
                    "opacity": 0.85,
                },
                "customdata": [_point_words(told, found, point) for point in own],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    front = sorted((point for point in points if point["on_front"]), key=lambda point: point["cost_per_hour"])
    if len(front) > 1:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "not beaten in all three",
                "x": [round(point["cost_per_hour"], 4) for point in front],
                "y": [round(point["latency"], 4) for point in front],
                "line": {"color": "@grey", "width": 1.5, "dash": "dot", "shape": "hv"},
                "hoverinfo": "skip",
            }
        )
    values = [point["latency"] for point in points]
    layout = {
        "xaxis": {"title": cost_axis(told)},
        "yaxis": {
            "title": f"{found['objective']} ({found['unit']})",
            "type": "log",
            **_log_ticks([*values, found["limit"]]),
        },
        "shapes": [_limit_line(found["limit"], "y")],
        "annotations": [_limit_note(found)],
    }
    caption = (
        "Whole fleets as simulated; left and low is better. The larger the mark, the more requests per second the "
        "fleet carries within the objectives; open marks miss one of them. The dashed line is the limit; the dotted "
        "one joins fleets that hold and that no other beats in cost, latency and load together."
    )
    if told["spare_replicas"]:
        caption += " Costs are those with the spare replicas; latencies and loads those without."
    return Figure("pareto", "Cost, latency and throughput", caption, data, layout, tall=True)


def _point_words(told: Told, found: Told, point: Told) -> str:
    holds = "holds" if point["holds"] else "misses an objective"
    return (
        f"{point['num_replicas']} x {point['label']}<br>{money(point['cost_per_hour'], told)} an hour, {holds}<br>"
        f"{found['objective']}: {measured(point['latency'], found['unit'])}<br>carries about "
        f"{count(point['rate'])} requests/s"
    )


def _limit_line(limit: float, axis: str) -> dict[str, Any]:
    line = {"type": "line", "line": {"color": "@vermillion", "width": 1.5, "dash": "dash"}}
    if axis == "y":
        return {**line, "xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit}
    return {**line, "yref": "paper", "y0": 0, "y1": 1, "x0": limit, "x1": limit}


def _limit_note(found: Told) -> dict[str, Any]:
    from math import log10

    return {
        "text": f"limit {measured(found['limit'], found['unit'])}",
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "y": log10(found["limit"]) if found["limit"] > 0 else 0,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": "@vermillion", "size": 12},
    }


def _log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at 1, 2, 5 and their tenfolds, so that a short logarithmic axis has some."""
    from math import floor, log10

    known = [value for value in values if value > 0]
    if not known:
        return {}
    decades = range(floor(log10(min(known))) - 1, floor(log10(max(known))) + 2)
    marks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    inside = [mark for mark in marks if min(known) / 2 <= mark <= 2 * max(known)]
    return {"tickvals": inside, "ticktext": [digits(mark, 3) for mark in inside]}


def curves_figure(told: Told) -> Figure | None:
    """For each shape how much of the objectives is used, against what is spent, on one replica's share of the load."""
    lines = [line for line in told["curves"] if len(line["strain"]) > 1][:MOST_LINES]
    if not lines:
        return None
    data: list[Trace] = []
    for line in lines:
        colour, symbol, dash = _style(told, line["shape"])
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": line["shape"],
                "x": [round(value, 4) for value in line["cost_per_hour"]],
                "y": [round(100 * value, 2) for value in line["strain"]],
                "line": {"color": colour, "width": 2, "dash": dash},
                "marker": {"symbol": symbol, "size": 7, "color": colour},
                "customdata": [f"{digits(size, 3)} replicas" for size in line["num_replicas"]],
                "hovertemplate": f"%{{customdata}}: %{{y:,.0f}} % at %{{x:,.2f}}<extra>{line['shape']}</extra>",
            }
        )
    values = [100 * value for line in lines for value in line["strain"]]
    title = {"title": "% of what the nearest objective allows", "type": "log", **_log_ticks([*values, 100.0])}
    layout = {"xaxis": {"title": cost_axis(told)}, "yaxis": title, "shapes": [_limit_line(100.0, "y")]}
    caption = (
        "How near each kind of deployment comes to the limit of the objective that is worst off, for what is spent: "
        "found while the search bracketed how many replicas it takes, on one replica's share of the requests, "
        "fractions of replicas allowed. Below the dashed line all objectives hold."
    )
    return Figure("curves", "What money buys", caption, data, layout, tall=True)


# --- candidates


def candidates_figure(told: Told) -> Figure | None:
    """Cost of the cheapest candidates with the interval of the replications."""
    rows = [row for row in told["candidates"] if row["cost_interval"] is not None][:MOST_BARS]
    if not rows:
        return None
    names = [
        f"{row['label']}, {row['max_num_seqs']:,} / {row['max_num_batched_tokens']:,} / "
        f"{row['gpu_memory_utilization']:g}"
        for row in rows
    ]
    costs = [_fractional(row) for row in rows]
    highs = [_end(row, "high", cost) - cost for row, cost in zip(rows, costs, strict=True)]
    lows = [cost - _end(row, "low", cost) for row, cost in zip(rows, costs, strict=True)]
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "as the search estimates it, fractions of replicas allowed",
            "y": names,
            "x": [round(cost, 4) for cost in costs],
            "marker": {"color": "@blue", "opacity": [1.0 if row["is_verified"] else 0.45 for row in rows]},
            "error_x": {
                "type": "data",
                "array": [round(each, 4) for each in highs],
                "arrayminus": [round(each, 4) for each in lows],
                "color": "@text",
                "thickness": 1.2,
            },
            "customdata": [f"binds: {row['binding']}" for row in rows],
            "hovertemplate": "%{y}<br>%{x:,.2f}, %{customdata}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "whole fleet that held",
            "y": [name for name, row in zip(names, rows, strict=True) if row["is_verified"]],
            "x": [round(row["cost_per_hour"], 4) for row in rows if row["is_verified"]],
            "marker": {"symbol": "diamond", "size": 11, "color": "@vermillion"},
            "customdata": [size_of(row) for row in rows if row["is_verified"]],
            "hovertemplate": "%{customdata}<br>%{x:,.2f}<extra></extra>",
        },
    ]
    layout = {
        "xaxis": {"title": cost_axis(told), "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed", "tickfont": {"size": 11}},
        "bargap": 0.3,
    }
    caption = (
        "Seats / token budget / share of memory behind each name. Bars of candidates whose whole fleet was simulated "
        "are solid; whiskers are 95 % intervals over the replications, where there are any."
    )
    return Figure("candidates", "The cheapest candidates", caption, data, layout, tall=True)


def _fractional(row: Told) -> float:
    """Cost of as many replicas as it takes, not rounded."""
    unit = row["cost_per_hour"] * row["replicas_needed"]["mean"] / row["num_replicas"]
    return float(unit)


def _end(row: Told, end: str, fallback: float) -> float:
    value = row["replicas_needed"][end]
    if value is None:
        return fallback
    return float(max(0.0, value) * row["cost_per_hour"] / row["num_replicas"])


# --- the recommended fleet


def room_figure(told: Told) -> Figure:
    """How much of each limit is used: objectives, capacity, KV cache, seats."""
    best = told["recommended"]
    bars: list[tuple[str, float, str]] = [
        (
            row["text"],
            row["strain"],
            f"{measured(row['measured'], row['unit'])} of {measured(row['limit'], row['unit'])}",
        )
        for row in best["objectives_over_replications"]
        if row["strain"] is not None
    ]
    room = best["headroom"]["mean"]
    if room:
        bars.append(("load, of what it carries", 1 / room, f"it carries {digits(room, 3)} times this load"))
    if best["rho"] is not None:
        bars.append(("rho at the mean load", best["rho"], "mean rate over what the engines can do at most"))
    bars.append(("KV cache, peak", best["kv_usage_peak"], f"{best['num_kv_tokens']:,} tokens a replica"))
    bars.append(
        (
            "seats, peak",
            best["num_running_peak"] / best["max_num_seqs"],
            f"{best['num_running_peak']:,} of {best['max_num_seqs']:,}",
        )
    )
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [name for name, _, _ in bars],
            "x": [round(100 * min(used, 2.0), 2) for _, used, _ in bars],
            "marker": {"color": ["@vermillion" if used > 0.9 else "@blue" for _, used, _ in bars]},
            "customdata": [f"{100 * used:.0f} % used: {words}" for _, used, words in bars],
            "text": [f"{100 * used:.0f} %" for _, used, _ in bars],
            "textposition": "auto",
            "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
            "showlegend": False,
        }
    ]
    layout = {
        "xaxis": {
            "title": "% used",
            "range": [0, max(105, *(100 * min(used, 2.0) + 5 for _, used, _ in bars))],
            "ticksuffix": " %",
        },
        "yaxis": {"type": "category", "autorange": "reversed"},
        "shapes": [_limit_line(100, "x")],
        "bargap": 0.3,
    }
    caption = "How much of each limit the recommended fleet uses; more than nine tenths, in another colour, is a risk."
    return Figure("room", "Head-room", caption, data, layout, half=True)


def time_figure(told: Told) -> Figure:
    """What the time went into at the most load that it carries."""
    shares: Mapping[str, float] = told["recommended"]["time_shares"]
    kept = [(LIMIT_NAMES[name], share) for name, share in shares.items() if share >= 0.0005]
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [name for name, _ in kept],
            "x": [round(100 * share, 2) for _, share in kept],
            "marker": {"color": "@sky"},
            "text": [f"{100 * share:.1f} %" for _, share in kept],
            "textposition": "auto",
            "hovertemplate": "%{y}: %{x:.1f} %<extra></extra>",
            "showlegend": False,
        }
    ]
    layout = {
        "xaxis": {"title": "% of the time", "rangemode": "tozero", "ticksuffix": " %"},
        "yaxis": {"type": "category", "autorange": "reversed"},
        "bargap": 0.3,
    }
    caption = (
        "At the most load that a replica carries within the objectives: while requests wait, what they wait for; else "
        "what the steps' time is made of."
    )
    return Figure("time", "What binds", caption, data, layout, half=True)


def load_figure(told: Told) -> Figure:
    """The request rate over the workload, with its mean."""
    demand = told["demand"]
    over = demand["over_time"]
    lines = [{**_limit_line(demand["mean_rate"], "y"), "line": {"color": "@grey", "width": 1.5, "dash": "dash"}}]
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"color": "@blue", "width": 1.8, "shape": "hv"},
            "fill": "tozeroy",
            "fillcolor": "@blue/20",
            "x": over["start_s"],
            "y": over["rate"],
            "hovertemplate": "from %{x:,.0f} s: %{y:,.2f} requests/s<extra></extra>",
            "showlegend": False,
        }
    ]
    layout = {
        "xaxis": {"title": "time since the first request (s)"},
        "yaxis": {"title": "requests/s", "rangemode": "tozero"},
        "shapes": lines,
    }
    caption = "Requests per second in sixty equal parts of the workload; the dashed line is the mean."
    half = not told["growth"] and told["recommended"] is None
    return Figure("load", "Peak and mean", caption, data, layout, half=bool(told["growth"]) or half)


def growth_figure(told: Told) -> Figure:
    """What the load, and with it the cost, grow to."""
    rows = [row for row in told["growth"]["rows"] if row["num_replicas"] is not None]
    months = [row["month"] for row in rows]
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": cost_axis(told),
            "x": months,
            "y": [round(row["cost"], 4) for row in rows],
            "line": {"color": "@blue", "width": 2, "shape": "hv"},
            "marker": {"symbol": "circle", "size": 7, "color": "@blue"},
            "customdata": [f"{row['num_replicas']:,} replicas, {row['load']:.2f} times the load" for row in rows],
            "hovertemplate": "month %{x}: %{y:,.2f}<br>%{customdata}<extra></extra>",
            "showlegend": False,
        }
    ]
    layout = {
        "xaxis": {"title": "month", "dtick": 1 if len(months) < 16 else 6},
        "yaxis": {"title": cost_axis(told), "rangemode": "tozero"},
    }
    caption = f"Load growing by {growth_rate(told)} a month; replicas follow in whole numbers."
    return Figure("growth", "Growth", caption, data, layout, half=True)

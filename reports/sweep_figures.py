"""The figures of a sweep as plain data for plotly.js: effects along an axis, what is traded, maps of two settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite, log10
from typing import Any

from windtunnel.reports.figures import Figure, Trace, log_axis, rounded
from windtunnel.reports.sweep_answer import say_with_noise
from windtunnel.reports.sweep_data import Curve, Swept, SweptAxis, SweptPoint, measure
from windtunnel.reports.words import digits
from windtunnel.sim.metrics.comparison import WIDE_METRIC

MOST_CURVES = 7
MOST_TICKS = 11
MOST_LABELS = 24
TICK_CHARACTERS = 34
"""Of all labels of an axis together, so that they do not touch on a telephone."""
MOST_SCATTERS = 4
"""Settings whose effect is drawn where all were drawn at random."""
MOST_MAPS = 4
LEAST_ZOOM = 0.1
"""Share of the largest value by which values differ that have an axis to themselves."""
GAP = 0.32
"""Between two plots, as a share of one of them: room for the title."""
LOOKS = (
    ("@blue", "circle", "solid"),
    ("@orange", "diamond", "dash"),
    ("@green", "square", "dot"),
    ("@purple", "triangle-up", "dashdot"),
    ("@vermillion", "cross", "longdash"),
    ("@sky", "triangle-down", "longdashdot"),
    ("@grey", "hexagon", "solid"),
)
"""Colour, symbol and dash of each curve."""


def sweep_figures(swept: Swept) -> list[Figure]:
    """All figures, in the order in which they are read."""
    if not swept.feasible:
        return []
    if swept.is_scattered:
        drawn = [axis for axis in swept.axes if axis.is_numeric][:MOST_SCATTERS] or [swept.x_axis]
        effects = [_effects(swept, axis, f"effects-{axis.key}") for axis in drawn]
    else:
        effects = [_effects(swept, swept.x_axis, "effects")]
    return [*effects, *_trade(swept), *_maps(swept)]


def num_panels(swept: Swept) -> int:
    """Plots below each other in a figure of effects."""
    return len(swept.shown())


# --- effects: plots below each other that share the horizontal axis


def _effects(swept: Swept, axis: SweptAxis, name: str) -> Figure:
    keys = swept.shown()
    curves = swept.curves()
    data: list[Trace] = []
    layout: dict[str, Any] = {"annotations": [], "hovermode": "closest", "showlegend": len(curves) > 1}
    for row, key in enumerate(keys):
        y_name = "y" if row == 0 else f"y{row + 1}"
        bottom, top = _rows(len(keys))[row]
        scale, unit = _scale(swept, key)
        y_axis = {"domain": [bottom, top], "nticks": 4, **_y_axis(swept, key, scale)}
        layout[f"yaxis{'' if row == 0 else row + 1}"] = y_axis
        layout["annotations"].append(_panel_title(key, unit, top))
        for place, curve in enumerate(curves[:MOST_CURVES]):
            data += _curve(swept, axis, curve, place, key, y_name, scale, with_legend=row == 0)
        data += _marks(swept, axis, key, y_name, scale)
    data += _infeasible(swept, axis)
    layout["xaxis"] = {"anchor": f"y{len(keys)}" if len(keys) > 1 else "y", **_x_axis(swept, axis)}
    title = f"What {axis.key} does"
    return Figure(name, title, _caption(swept, axis, len(curves)), data, layout, tall=True)


def _rows(number: int) -> list[tuple[float, float]]:
    """Bottom and top of so many plots, the first on top."""
    height = 1 / (number + GAP * number)
    return [
        (round(1 - (row + 1) * (1 + GAP) * height, 4), round(1 - row * (1 + GAP) * height - GAP * height, 4))
        for row in range(number)
    ]


def _panel_title(key: str, unit: str, top: float) -> dict[str, Any]:
    words = measure(key).words
    label = f"{words[:1].upper()}{words[1:]}{f' ({unit})' if unit else ''}"
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom"}
    return {**place, "text": f"<b>{escape(label)}</b>", "showarrow": False, "font": {"size": 13, "color": "@text"}}


def _scale(swept: Swept, key: str) -> tuple[float, str]:
    """What values are multiplied by to be drawn, and the unit that they then have."""
    unit = measure(key).unit
    if unit == "ms" and max(_means(swept, key), default=0.0) > 2000:
        return 0.001, "s"
    return (100.0, "%") if unit == "%" else (1.0, unit or (swept.currency if "cost" in key else ""))


def _means(swept: Swept, key: str) -> list[float]:
    return [mean for point in swept.points if (mean := point.mean(key)) is not None]


def _is_log(swept: Swept, key: str) -> bool:
    means = _means(swept, key)
    return measure(key).unit in ("ms", "s") and min(means) > 0 and max(means) > WIDE_METRIC * min(means)


def _y_axis(swept: Swept, key: str, scale: float) -> dict[str, Any]:
    if _is_log(swept, key):
        means = _means(swept, key)
        return _few_ticks(log_axis(min(means) * scale, max(means) * scale))
    return {"rangemode": "tozero"}


def _few_ticks(axis: dict[str, Any]) -> dict[str, Any]:
    """Decades only: there is room for no more."""
    kept = [(tick, text) for tick, text in zip(axis["tickvals"], axis["ticktext"], strict=True) if log10(tick) % 1 == 0]
    return {**axis, "tickvals": [tick for tick, _ in kept], "ticktext": [text for _, text in kept]}


def _thinned(words: Sequence[str]) -> list[str]:
    """Labels of an axis, of which every second or third is left out if they are too many."""
    every = -(-sum(len(word) + 1 for word in words) // TICK_CHARACTERS)
    return [word if place % every == 0 else "" for place, word in enumerate(words)]


def _x_axis(swept: Swept, axis: SweptAxis) -> dict[str, Any]:
    if not axis.is_numeric:
        return {"title": axis.key, "type": "category", "categoryarray": list(map(escape, axis.words))}
    places = sorted({position for point in swept.points if (position := point.positions[axis.key]) is not None})
    made: dict[str, Any] = {"title": axis.key}
    if axis.is_log:
        made |= log_axis(places[0], places[-1])
    if len(places) <= MOST_TICKS and not axis.is_drawn:
        made |= {"tickvals": rounded(places, 10), "ticktext": _thinned(list(map(escape, axis.words))), "tickangle": 0}
    ends = [log10(places[0]), log10(places[-1])] if axis.is_log else [places[0], places[-1]]
    room = 0.04 * (ends[1] - ends[0] or 1.0)
    return made | {"range": [ends[0] - room, ends[1] + room]}


def _at(point: SweptPoint, axis: SweptAxis) -> Any:
    return point.positions[axis.key] if axis.is_numeric else escape(point.words[axis.key])


def _curve(
    swept: Swept, axis: SweptAxis, curve: Curve, place: int, key: str, y_name: str, scale: float, *, with_legend: bool
) -> Iterator[Trace]:
    points = [point for point in curve.points if point.values(key)]
    if not points:
        return
    colour, symbol, dash = LOOKS[place % len(LOOKS)]
    xs = [_at(point, axis) for point in points]
    is_line = axis.is_numeric and not swept.is_scattered and len(points) > 1
    if is_line:
        yield from _band(points, xs, key, y_name, scale, colour)
    yield {
        "type": "scatter", "mode": "lines+markers" if is_line else "markers", "name": escape(curve.name or axis.key),
        "legendgroup": str(place), "showlegend": with_legend, "x": xs, "yaxis": y_name,
        "y": rounded([(point.mean(key) or 0.0) * scale for point in points]),
        "line": {"color": colour, "width": 2.2, "dash": dash},
        "marker": {
            "size": 8, "color": colour,
            "symbol": [f"{symbol}-open" if point.is_hopeless or point.is_unsafe else symbol for point in points],
        },
        "customdata": [_hover(point, key) for point in points],
        "hovertemplate": "%{customdata}<extra></extra>",
        **({} if is_line else _bars(points, key, scale)),
    }  # fmt: skip


def _band(
    points: Sequence[SweptPoint], xs: list[Any], key: str, y_name: str, scale: float, colour: str
) -> Iterator[Trace]:
    """Where the mean lies with 95 % confidence, if there are replications."""
    lows, highs = _bounds(points, key, scale)
    if lows:
        yield {
            "type": "scatter", "mode": "lines", "x": [*xs, *reversed(xs)], "y": rounded([*highs, *reversed(lows)]),
            "yaxis": y_name, "fill": "toself", "fillcolor": f"{colour}/20", "line": {"width": 0}, "hoverinfo": "skip",
            "showlegend": False,
        }  # fmt: skip


def _bounds(points: Sequence[SweptPoint], key: str, scale: float) -> tuple[list[float], list[float]]:
    """Ends of the intervals, never below what a number of that kind can be; empty without replications."""
    found = [interval for point in points if (interval := point.interval(key)) is not None]
    if not found or not all(isfinite(interval.half_width) for interval in found):
        return [], []
    if not any(interval.half_width > 0 for interval in found):
        return [], []
    least = min(interval.mean for interval in found) / 2
    floor = min(least, 0.0) if key == "oom_margin_gib" else max(least, 0.0)
    return [max(interval.low, floor) * scale for interval in found], [interval.high * scale for interval in found]


def _bars(points: Sequence[SweptPoint], key: str, scale: float) -> dict[str, Any]:
    lows, highs = _bounds(points, key, scale)
    if not lows:
        return {}
    middles = [(point.mean(key) or 0.0) * scale for point in points]
    up = [high - middle for high, middle in zip(highs, middles, strict=True)]
    down = [middle - low for low, middle in zip(lows, middles, strict=True)]
    bars = {"type": "data", "symmetric": False, "array": rounded(up), "arrayminus": rounded(down), "thickness": 1.2}
    return {"error_y": bars}


def _hover(point: SweptPoint, key: str) -> str:
    held = point.num_held
    kept = [f"objectives kept in {held} of {len(point.runs)}"] if held is not None else []
    kept += [f"missed: {', '.join(point.missed)}"] if point.missed else []
    lines = [f"<b>{escape(point.name)}</b>", f"{measure(key).words}: {say_with_noise(key, point)}"]
    return "<br>".join([*lines, escape(", ".join((*point.marked, *kept)))])


def _marks(swept: Swept, axis: SweptAxis, key: str, y_name: str, scale: float) -> Iterator[Trace]:
    """Rings around knees, a star on the best point, a square around the baseline."""
    kneed = [knee.point for knee in swept.knees if knee.key == key and axis is swept.x_axis]
    best = [swept.best.point] if swept.best else []
    for name, points, symbol, size, colour in (
        ("baseline", [swept.baseline] if swept.baseline else [], "square-open", 15, "@soft"),
        ("knee", kneed, "circle-open", 17, "@vermillion"),
        ("best", best, "star", 15, "@text"),
    ):
        drawn = [point for point in points if point.values(key)]
        if drawn:
            yield {
                "type": "scatter", "mode": "markers", "name": name, "showlegend": False, "yaxis": y_name,
                "x": [_at(point, axis) for point in drawn],
                "y": rounded([(point.mean(key) or 0.0) * scale for point in drawn]),
                "marker": {"symbol": symbol, "size": size, "color": colour, "line": {"width": 2.2, "color": colour}},
                "customdata": [f"{name}<br>{_hover(point, key)}" for point in drawn],
                "hovertemplate": "%{customdata}<extra></extra>", "cliponaxis": False,
            }  # fmt: skip


def _infeasible(swept: Swept, axis: SweptAxis) -> Iterator[Trace]:
    """A cross at the foot of the first plot where a point cannot run."""
    points = [point for point in swept.points if point.infeasible and _at(point, axis) is not None]
    keys = swept.shown()
    if points and keys:
        foot = min(_means(swept, keys[0])) * _scale(swept, keys[0])[0] if _is_log(swept, keys[0]) else 0.0
        yield {
            "type": "scatter", "mode": "markers", "name": "cannot run", "showlegend": False, "cliponaxis": False,
            "x": [_at(point, axis) for point in points], "y": rounded([foot] * len(points)),
            "marker": {"symbol": "x", "size": 9, "color": "@vermillion"},
            "customdata": [f"<b>{escape(point.name)}</b><br>cannot run" for point in points],
            "hovertemplate": "%{customdata}<extra></extra>",
        }  # fmt: skip


def _caption(swept: Swept, axis: SweptAxis, num_curves: int) -> str:
    parts = []
    if len(swept.seeds) > 1 and not swept.is_deterministic:
        what = "Bands" if axis.is_numeric and not swept.is_scattered else "Bars"
        parts.append(f"{what} hold the mean with 95 % confidence.")
    if swept.best:
        parts.append("★ is the best point.")
    if swept.knees and axis is swept.x_axis:
        parts.append("○ is a knee.")
    if swept.baseline:
        parts.append("□ is what changes are counted from.")
    if any(point.is_hopeless or point.is_unsafe for point in swept.feasible):
        parts.append("Open symbols are overloaded, or unsafe in memory.")
    if any(point.infeasible for point in swept.points):
        parts.append("✕ cannot run.")
    if num_curves > MOST_CURVES:
        parts.append(f"Only the first {MOST_CURVES} of {num_curves:,} combinations of the other settings are drawn.")
    if swept.is_scattered:
        parts.append("All other settings vary, too.")
    return " ".join(parts)


# --- what is traded


def _trade(swept: Swept) -> Iterator[Figure]:
    """One number against another, a point for each point of the sweep."""
    if swept.trade is None or len(swept.feasible) < 2:
        return
    x_key, y_key = _of_the_trade(swept)
    if not x_key:
        return
    x_scale, x_unit = _scale(swept, x_key)
    y_scale, y_unit = _scale(swept, y_key)
    data = list(_trade_curves(swept, x_key, y_key, x_scale, y_scale))
    x = {"title": f"{measure(x_key).words} ({x_unit})", **_trade_axis(swept, x_key, x_scale)}
    y = {"title": f"{measure(y_key).words} ({y_unit})", **_trade_axis(swept, y_key, y_scale)}
    layout = {"xaxis": x, "yaxis": y, "hovermode": "closest", "showlegend": len(swept.curves()) > 1}
    better = "up and to the left" if measure(y_key).better == "higher" else "down and to the left"
    caption = (
        f"Each point is one of the sweep; better is {better}. ★ is the best point, □ what changes are counted from."
    )
    title = f"{_cap(measure(y_key).words)} against {measure(x_key).words}"
    yield Figure("trade", title, caption, data, layout, tall=True)


def _trade_axis(swept: Swept, key: str, scale: float) -> dict[str, Any]:
    """From 0 on where values hardly differ, so that a figure does not make much of it."""
    means = _means(swept, key)
    if _is_log(swept, key):
        return log_axis(min(means) * scale, max(means) * scale)
    return {"rangemode": "tozero"} if max(means) - min(means) < LEAST_ZOOM * max(means) else {}


def _of_the_trade(swept: Swept) -> tuple[str, str]:
    assert swept.trade is not None
    x_key, y_key = swept.trade
    both = [point for point in swept.feasible if point.values(x_key) and point.values(y_key)]
    return (x_key, y_key) if len(both) > 1 else ("", "")


def _trade_curves(swept: Swept, x_key: str, y_key: str, x_scale: float, y_scale: float) -> Iterator[Trace]:
    num_points = len(swept.feasible)
    for place, curve in enumerate(swept.curves()[:MOST_CURVES]):
        points = [point for point in curve.points if point.values(x_key) and point.values(y_key)]
        colour, symbol, dash = LOOKS[place % len(LOOKS)]
        is_line = swept.x_axis.is_numeric and not swept.is_scattered
        labels = [escape(point.words[swept.x_axis.key]) for point in points]
        is_labelled = num_points <= MOST_LABELS and not swept.is_scattered
        yield {
            "type": "scatter", "name": escape(curve.name or swept.x_axis.key), "cliponaxis": False,
            "mode": "+".join((*(("lines",) if is_line else ()), "markers", *(("text",) if is_labelled else ()))),
            "x": rounded([(point.mean(x_key) or 0.0) * x_scale for point in points]),
            "y": rounded([(point.mean(y_key) or 0.0) * y_scale for point in points]),
            "text": labels if is_labelled else [], "textposition": _sides(len(points)),
            "textfont": {"size": 12, "color": "@soft"}, "line": {"color": colour, "width": 2, "dash": dash},
            "marker": {
                "size": 9, "color": colour,
                "symbol": [f"{symbol}-open" if point.is_hopeless or point.is_unsafe else symbol for point in points],
            },
            "customdata": [f"{_hover(point, y_key)}<br>{measure(x_key).words}: {say_with_noise(x_key, point)}"
                           for point in points],
            "hovertemplate": "%{customdata}<extra></extra>",
        }  # fmt: skip
    for name, marked, symbol in (
        ("baseline", swept.baseline, "square-open"),
        ("best", swept.best.point if swept.best else None, "star"),
    ):
        if marked is not None and marked.values(x_key) and marked.values(y_key):
            yield {
                "type": "scatter", "mode": "markers", "name": name, "showlegend": False, "cliponaxis": False,
                "x": rounded([(marked.mean(x_key) or 0.0) * x_scale]),
                "y": rounded([(marked.mean(y_key) or 0.0) * y_scale]),
                "marker": {"symbol": symbol, "size": 16, "color": "@text", "line": {"width": 2, "color": "@text"}},
                "customdata": [f"{name}<br>{_hover(marked, y_key)}"], "hovertemplate": "%{customdata}<extra></extra>",
            }  # fmt: skip


def _sides(number: int) -> list[str]:
    """Where labels stand, so that those of neighbours do not cover each other."""
    return ["top center" if place % 2 == 0 else "bottom center" for place in range(number)]


def _cap(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


# --- maps of two settings


def _maps(swept: Swept) -> Iterator[Figure]:
    """For grids of two settings, each shown number as a map."""
    if len(swept.axes) != 2 or swept.is_scattered or swept.is_zipped:
        return
    x = swept.x_axis
    y = next(axis for axis in swept.axes if axis is not x)
    if min(len(x.words), len(y.words)) < 3:
        return
    wanted = dict.fromkeys((swept.best_by, *(swept.trade or ()), *swept.shown()))
    for key in swept.shown(tuple(wanted))[:MOST_MAPS]:
        yield _map(swept, x, y, key)


def _map(swept: Swept, x: SweptAxis, y: SweptAxis, key: str) -> Figure:
    scale, unit = _scale(swept, key)
    at = {(point.words[x.key], point.words[y.key]): point for point in swept.points}
    grid = [[at.get((column, row)) for column in x.words] for row in y.words]
    heights = [[None if point is None else point.mean(key) for point in row] for row in grid]
    best = swept.best.point if swept.best else None
    data: list[Trace] = [
        {
            "type": "heatmap", "x": list(map(escape, x.words)), "y": list(map(escape, y.words)),
            "z": [[None if value is None else rounded([value * scale])[0] for value in row] for row in heights],
            "text": [[_in_map(point, key, best, scale) for point in row] for row in grid], "texttemplate": "%{text}",
            "customdata": [["" if point is None else _hover(point, key) for point in row] for row in grid],
            "hovertemplate": "%{customdata}<extra></extra>", "colorscale": "Cividis",
            "reversescale": measure(key).better == "lower", "xgap": 2, "ygap": 2,
            "colorbar": {"thickness": 12, "outlinewidth": 0, "title": {"text": unit}},
        }
    ]  # fmt: skip
    layout = {
        "xaxis": {"title": x.key, "type": "category"},
        "yaxis": {"title": y.key, "type": "category"},
        "hovermode": "closest",
    }
    caption = "Bright is better." if measure(key).better else ""
    caption += " ★ is the best point." if best else ""
    caption += " † misses objectives." if _some_miss(swept) else ""
    caption += " ✕ cannot run." if any(point.infeasible for point in swept.points) else ""
    return Figure(f"map-{key}", _cap(measure(key).words), caption.strip(), data, layout, half=True)


def _in_map(point: SweptPoint | None, key: str, best: SweptPoint | None, scale: float) -> str:
    if point is None:
        return ""
    if point.infeasible:
        return "✕"
    mean = point.mean(key)
    missed = "†" if point.num_held is not None and not point.holds else ""
    return "" if mean is None else f"{'★ ' if point is best else ''}{digits(mean * scale)}{missed}"


def _some_miss(swept: Swept) -> bool:
    return any(point.num_held is not None and not point.holds for point in swept.feasible)

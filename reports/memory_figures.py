"""The figures of a memory plan as plain data for plotly.js: where a GPU's memory goes, and a sweep's curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from windtunnel.reports.figures import Figure, Trace
from windtunnel.reports.memory_text import VERDICT_WORDS, short, size, unexplained_words
from windtunnel.reports.values import plain
from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, OK, UNSAFE, MemoryPlan

SYMBOLS = {OK: "circle", UNSAFE: "diamond-open", DOES_NOT_START: "x"}
LINES = ("solid", "dash", "dot", "dashdot", "longdash")
COLOURS = ("@blue", "@orange", "@green", "@purple", "@vermillion", "@sky", "@grey")
DRAWN_BYTES = GIB // 200
"""Smaller parts than what two decimals show are drawn with what is free."""
MOST_CURVES = 12
"""Combinations of the other settings that are drawn; the table has all."""


class Part(NamedTuple):
    """One part of a card's memory."""

    name: str
    num_bytes: int
    colour: str
    remark: str = ""


def parts_of(plan: MemoryPlan) -> list[Part]:
    """What fills the card, from the bottom; the sum is the total, to the byte."""
    context = plan.total_bytes - plan.free_bytes
    before = "taken before vLLM starts" if plan.request.free_memory_bytes else "CUDA context, NCCL: an estimate"
    parts = [
        Part("in use before", context, "@grey", before),
        Part("weights", plan.weights_bytes, "@blue"),
        Part("non-torch", plan.non_torch_bytes, "@sky"),
        Part("activation", plan.activation_bytes, "@orange", "peak of the profile run"),
    ]
    graphs = Part("CUDA graphs", plan.cudagraph_bytes, "@purple", "inside" if plan.graphs_inside else "outside")
    if plan.graphs_inside:
        parts.append(graphs)
    unexplained = 0 if plan.is_given else plan.unexplained_bytes
    if abs(unexplained) >= DRAWN_BYTES:
        parts.append(Part("unexplained", unexplained, "@grey", unexplained_words(plan)))
    parts.append(Part("KV cache", plan.kv_cache_bytes, "@green", f"{plan.num_gpu_blocks:,} blocks"))
    unused = (
        0 if plan.is_given or plan.available_kv_cache_bytes < 0 else plan.available_kv_cache_bytes - plan.kv_cache_bytes
    )
    if abs(unused) >= DRAWN_BYTES:
        parts.append(Part("unused budget", unused, "@grey", "less than a block, or another stage is tighter"))
    if not plan.graphs_inside and plan.cudagraph_bytes:
        parts.append(graphs)
    free = plan.total_bytes - sum(part.num_bytes for part in parts)
    parts.append(
        Part("free", free, "@grey", "beside the budget") if free >= 0 else Part("missing", free, "@vermillion")
    )
    return parts


def waterfall(plan: MemoryPlan) -> Figure:
    """The parts stacked one after the other, up to the card's total, with the budget as a line."""
    parts = parts_of(plan)
    names, starts, heights = [], [], []
    level = 0
    for part in parts:
        names.append(f"{part.name}  {size(part.num_bytes)}")
        starts.append(level / GIB)
        heights.append(part.num_bytes / GIB)
        level += part.num_bytes
    total = plan.total_bytes / GIB
    bars: Trace = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": [round(height, 4) for height in heights],
        "base": [round(start, 4) for start in starts],
        "marker": {
            "color": [part.colour if part.num_bytes >= 0 else "@vermillion" for part in parts],
            "opacity": [0.35 if part.name in ("free", "unused budget", "unexplained") else 1.0 for part in parts],
        },
        "customdata": [part.remark for part in parts],
        "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
        "showlegend": False,
    }
    lines = [_upright(total, "@text", "total", len(parts), 0)]
    if not plan.is_given:
        budget = plan.requested_bytes + (plan.total_bytes - plan.free_bytes)
        lines.append(_upright(budget / GIB, "@vermillion", "budget ends", len(parts), 1))
    widest = max(total, *(start + max(height, 0) for start, height in zip(starts, heights, strict=True)))
    layout = {
        "xaxis": {"title": "GiB of one GPU", "range": [0, 1.1 * widest]},
        "yaxis": {"range": [len(parts) - 0.5, -0.5 - LABEL_ROWS], "type": "category"},
        "shapes": [line["shape"] for line in lines],
        "annotations": [line["note"] for line in lines],
        "bargap": 0.25,
    }
    caption = (
        "Each bar begins where the one above ends. The budget is gpu_memory_utilization of the total; what is in use "
        "before vLLM starts comes on top of it."
        if not plan.is_given
        else "Each bar begins where the one above ends. The KV cache was given, so that no budget bounds it."
    )
    return Figure("waterfall", "Where the memory of one GPU goes", caption, [bars], layout, tall=True)


LABEL_ROWS = 1.0
"""Room above the bars for the words at the lines, in bars: two rows of them, as the lines can be close together."""


def _upright(x: float, colour: str, text: str, num_bars: int, row: int) -> dict[str, Any]:
    """A line across all bars; its word stands on its left above them, so that neither edge nor bar is in the way."""
    top = -0.5 - LABEL_ROWS * (1 - row / 2)
    return {
        "shape": {
            "type": "line",
            "x0": x,
            "x1": x,
            "y0": num_bars - 0.5,
            "y1": top,
            "line": {"color": colour, "width": 1.5, "dash": "dash"},
        },
        "note": {
            "x": x,
            "y": top,
            "text": text,
            "showarrow": False,
            "xanchor": "right",
            "xshift": -3,
            "yanchor": "top",
            "font": {"color": colour, "size": 12},
        },
    }


# --- a sweep


def sweep_figures(axes: Sequence[str], points: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """KV tokens, concurrency and what is left on the card, along one of the settings."""
    planned = [point for point in points if "kv_cache_tokens" in point]
    if not planned:
        return []
    axis = _axis(axes, points)
    others = [name for name in axes if name != axis]
    curves = _curves(planned, others)[:MOST_CURVES]
    return [
        _figure("tokens", "KV cache", "kv_cache_tokens", "tokens", axis, curves, 1, banded=True),
        _figure("concurrency", "Maximum concurrency", "max_concurrency", "requests", axis, curves, 1),
        _figure("margin", "Left on the card", "oom_margin_bytes", "GiB", axis, curves, GIB),
    ]


def num_curves(axes: Sequence[str], points: Sequence[Mapping[str, Any]]) -> int:
    """Combinations of the settings that are not on the axis of the figures."""
    axis = _axis(axes, points)
    return len({tuple(plain(point[name]) for name in axes if name != axis) for point in points})


Curve = tuple[str, list[Mapping[str, Any]]]


def _axis(axes: Sequence[str], points: Sequence[Mapping[str, Any]]) -> str:
    """The setting on the axis: one of numbers if there is any, of these the one with most values."""

    def rank(name: str) -> tuple[bool, int]:
        return all(_is_number(point[name]) for point in points), len(_distinct(points, name))

    return max(axes, key=rank)


def _distinct(points: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(point[name] for point in points))


def _curves(points: Sequence[Mapping[str, Any]], others: Sequence[str]) -> list[Curve]:
    """One curve for each combination of the other settings."""
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        name = ", ".join(f"{short(other)} {plain(point[other])}" for other in others)
        curves.setdefault(name, []).append(point)
    return list(curves.items())


def _figure(
    name: str, title: str, key: str, unit: str, axis: str, curves: Sequence[Curve], scale: int, *, banded: bool = False
) -> Figure:
    is_numeric = all(_is_number(point[axis]) for _, points in curves for point in points)
    data: list[Trace] = []
    heights = [[_height(point, key, scale) for point in points] for _, points in curves]
    for place, (label, points) in enumerate(curves):
        colour = COLOURS[place % len(COLOURS)]
        num_over = sum(other == heights[place] for other in heights[place + 1 :])  # those that would hide this one
        line = {"color": colour, "width": 2 + 3 * num_over, "dash": LINES[place // len(COLOURS) % len(LINES)]}
        mode = "lines+markers" if is_numeric else "markers"
        xs = [point[axis] if is_numeric else plain(point[axis]) for point in points]
        if banded and len(curves) <= len(COLOURS) and len(points) > 1 and is_numeric:
            data.append(_band(xs, points, colour))
        data.append(
            {
                "type": "scatter",
                "mode": mode,
                "name": label or title,
                "showlegend": False,
                "legendgroup": label,
                "x": xs,
                "y": heights[place],
                "line": line,
                "marker": {
                    "symbol": [SYMBOLS[point["verdict"]] for point in points],
                    "size": 9 + 5 * num_over,
                    "color": colour,
                },
                "customdata": [f"{VERDICT_WORDS[point['verdict']]}, {_told(point)}" for point in points],
                "hovertemplate": f"{axis} %{{x}}: %{{y:,.6~g}} {unit}<br>%{{customdata}}<extra>{label}</extra>",
            }
        )
        if label:
            data.append(_legend_entry(label, mode, line, colour))
    caption = _CAPTIONS[key]
    if banded:
        caption += " Filled points are ok, open diamonds unsafe, crosses do not start."
    y: dict[str, Any] = {"title": unit, "rangemode": "tozero"}
    layout = {"xaxis": {"title": axis, **({} if is_numeric else {"type": "category"})}, "yaxis": y}
    return Figure(name, title, caption, data, layout, half=not banded, tall=banded)


def _legend_entry(label: str, mode: str, line: Mapping[str, Any], colour: str) -> Trace:
    """A curve without points: plotly would draw the symbol of a curve's first point, which may be a cross."""
    return {
        "type": "scatter",
        "mode": mode,
        "name": label,
        "legendgroup": label,
        "showlegend": True,
        "hoverinfo": "skip",
        "x": [None],
        "y": [None],
        "line": {**line, "width": 2},
        "marker": {"symbol": SYMBOLS[OK], "size": 9, "color": colour},
    }


_CAPTIONS = {
    "kv_cache_tokens": "Tokens that fit, with the band in which nine starts of ten lie.",
    "max_concurrency": "Requests of max_model_len tokens that fit at once.",
    "oom_margin_bytes": "What is free once the pool is there and CUDA graphs are captured, where it starts.",
}


def _height(point: Mapping[str, Any], key: str, scale: int) -> float | None:
    if key == "oom_margin_bytes" and point["verdict"] == DOES_NOT_START:
        return None
    return float(round(point[key] / scale, 4))


def _told(point: Mapping[str, Any]) -> str:
    return f"{point['num_gpus']:,} GPUs, {size(point['oom_margin_bytes'])} left"


def _band(xs: list[Any], points: Sequence[Mapping[str, Any]], colour: str) -> Trace:
    lows = [point["interval_90"]["low"] for point in points]
    highs = [point["interval_90"]["high"] for point in points]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*xs, *reversed(xs)],
        "y": [*highs, *reversed(lows)],
        "fill": "toself",
        "fillcolor": f"{colour}/20",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""The figures of a validation: live and simulated curves over each other, and what explains the error."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from textwrap import wrap
from typing import Any

import numpy as np

from windtunnel.reports.figures import Figure, Trace, log_axis, rounded
from windtunnel.reports.validation_answer import error_words, share_words
from windtunnel.reports.words import digits
from windtunnel.sim.metrics.agreement import (
    Agreement,
    Attribution,
    Curve,
    Headline,
    MetricError,
    Overlay,
    relative_error,
)

_LIVE, _SIMULATED = "@orange", "@blue"
_COLOURS = ("@blue", "@orange", "@green", "@purple", "@vermillion", "@sky")
_PATTERNS = ("", "/", ".", "x", "\\", "-")
_MOST_MARKERS = 200
_LONGEST_BAR = 400.0
"""Per cent of the error at which bars are cut."""
_NAME_WIDTH = 16
_NOT_DRAWN = ("over_time", "p50", "p90", "total")
"""Statistics of which the table tells, to keep the figure readable."""
_WHAT = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "running": "requests in the batch",
    "waiting": "requests in the server's queue",
    "kv_usage": "share of the KV blocks in use",
    "preemptions": "preemptions so far",
}


def validation_figures(agreement: Agreement) -> list[Figure]:
    """Errors with their intervals, the overlays, and the attribution if there is one."""
    drawn = [error_figure(agreement)] if _drawn_errors(agreement) else []
    drawn += [overlay_figure(overlay) for overlay in agreement.overlays if _is_worth_drawing(overlay)]
    attribution = agreement.attribution
    if attribution is not None and _explained(attribution):
        drawn.append(attribution_figure(attribution))
    return drawn


# --- errors


def _drawn_errors(agreement: Agreement) -> list[MetricError]:
    """Relative ones that are numbers, and not too many of them."""
    return [
        each
        for each in agreement.errors
        if each.error is not None and not each.in_points and not isinf(each.error) and each.statistic not in _NOT_DRAWN
    ]


def error_figure(agreement: Agreement) -> Figure:
    """The error of each metric as a point, with its interval, the live spread and the limit."""
    shown = _drawn_errors(agreement)
    names = [each.name for each in shown]
    spread = [100 * (each.spread or 0.0) for each in shown]
    data: list[Trace] = []
    if any(spread):
        data.append(
            {
                "type": "bar", "orientation": "h", "name": "live runs among themselves", "y": names,
                "base": [-value for value in spread], "x": rounded([2 * value for value in spread]),
                "marker": {"color": "@grey/30"}, "hoverinfo": "skip",
            }
        )  # fmt: skip
    error = [100 * (each.error or 0.0) for each in shown]
    ends = [each.interval or (each.error or 0.0, each.error or 0.0) for each in shown]
    below = [max(value - 100 * low, 0.0) for value, (low, _) in zip(error, ends, strict=True)]
    above = [max(100 * high - value, 0.0) for value, (_, high) in zip(error, ends, strict=True)]
    whiskers = {"type": "data", "symmetric": False, "array": rounded(above), "arrayminus": rounded(below)}
    data.append(
        {
            "type": "scatter", "mode": "markers", "name": "error ± 95 %", "y": names,
            "x": rounded(error), "error_x": whiskers | {"color": "@blue", "thickness": 1.5, "width": 4},
            "marker": {"color": "@blue", "size": 8}, "customdata": [error_words(each) for each in shown],
            "hovertemplate": "%{y}: %{customdata}<extra></extra>",
        }
    )  # fmt: skip
    limits = [(100 * each.limit, each.name) for each in shown if each.limit is not None]
    if limits:
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": "limit", "y": [name for _, name in limits] * 2,
                "x": rounded([-value for value, _ in limits] + [value for value, _ in limits]), "hoverinfo": "x",
                "marker": {"color": "@vermillion", "size": 12, "symbol": "line-ns-open", "line": {"width": 2}},
            }
        )  # fmt: skip
    layout = {
        "xaxis": {"title": "error of the prediction (%)", "zeroline": True, "zerolinecolor": "@text"},
        "yaxis": {"autorange": "reversed", "type": "category", "ticks": "", "categoryarray": names},
        "hovermode": "closest",
        "barmode": "overlay",
    }
    caption = (
        "(predicted - live) / live. Right of 0 the prediction is too high. Intervals are a bootstrap over the "
        "requests, drawn in blocks of neighbours, the same ones in both runs; totals of a run have none."
    )
    return Figure("errors", "Errors by metric", caption, data, layout, tall=True)


# --- overlays


def _is_worth_drawing(overlay: Overlay) -> bool:
    """Not what was 0 all the time."""
    return overlay.is_distribution or any(bool(curve.y.any()) for curve in (*overlay.live, overlay.predicted))


def overlay_figure(overlay: Overlay) -> Figure:
    """One quantity, live and simulated."""
    return _distribution(overlay) if overlay.is_distribution else _over_time(overlay)


def _distribution(overlay: Overlay) -> Figure:
    scale, unit = _scale([*overlay.live, overlay.predicted])
    data = [
        _cdf(curve, scale, unit, _live_name(overlay, number), number, "solid")
        for number, curve in enumerate(overlay.live)
    ]
    data.append(_cdf(overlay.predicted, scale, unit, "simulated", -1, "dash"))
    x: dict[str, Any] = {"title": f"{overlay.title} ({unit})", "rangemode": "tozero"}
    values = np.concatenate([curve.x for curve in (*overlay.live, overlay.predicted)]) / scale
    positive = values[values > 0]
    if len(positive) and positive.max() > 5 * np.median(positive):
        x |= log_axis(float(positive.min()), float(positive.max())) | {"rangemode": "normal"}
    layout = {
        "xaxis": x,
        "yaxis": {"title": "share (%)", "range": [0, 102], "tickvals": [0, 25, 50, 75, 100]},
        "hovermode": "closest",
    }
    what = _WHAT[overlay.name]
    caption = f"Which share had at most this {what}."
    return Figure(
        f"cdf-{overlay.name}", f"{what[:1].upper()}{what[1:]} ({overlay.title})", caption, data, layout, half=True
    )


def _cdf(curve: Curve, scale: float, unit: str, name: str, number: int, dash: str) -> Trace:
    line = {"color": _SIMULATED if number < 0 else _LIVE, "width": 2.5 if number < 0 else 2, "dash": dash}
    return {
        "x": rounded(curve.x / scale), "y": rounded(100 * curve.y), "mode": "lines", "name": name, "line": line,
        "showlegend": number <= 0, "hovertemplate": f"{name}: %{{y:,.4~r}} % within %{{x:,.4~r}} {unit}<extra></extra>",
    }  # fmt: skip


def _live_name(overlay: Overlay, number: int) -> str:
    return "live" if len(overlay.live) == 1 or number == 0 else f"live, run {number + 1}"


def _scale(curves: Sequence[Curve]) -> tuple[float, str]:
    return (1000.0, "s") if max(float(curve.x.max()) for curve in curves) > 2000 else (1.0, "ms")


def _over_time(overlay: Overlay) -> Figure:
    data: list[Trace] = []
    for number, curve in enumerate(overlay.live):
        line = {"color": _LIVE, "width": 1.5, "shape": "hv"}
        data.append(
            {
                "x": rounded(curve.x), "y": rounded(curve.y), "line": line,
                "mode": "lines+markers" if len(curve.x) <= _MOST_MARKERS else "lines",
                "name": _live_name(overlay, number), "marker": {"size": 4, "color": _LIVE}, "showlegend": number == 0,
                "hovertemplate": "%{y:,.4~r}",
            }
        )  # fmt: skip
    line = {"color": _SIMULATED, "width": 1.5, "shape": "hv"}
    simulated = overlay.predicted
    data.append(
        {
            "x": rounded(simulated.x), "y": rounded(simulated.y), "mode": "lines", "name": "simulated", "line": line,
            "hovertemplate": "%{y:,.4~r}",
        }
    )  # fmt: skip
    layout = {
        "xaxis": {"title": "time since the run began (s)", "rangemode": "nonnegative"},
        "yaxis": {"title": overlay.unit, "rangemode": "tozero"},
        "hovermode": "x unified",
    }
    what = _WHAT[overlay.name]
    caption = f"The {what}: live as often as it was looked at, simulated at every step.{overlay.note}"
    return Figure(f"level-{overlay.name}", overlay.title, caption, data, layout, half=True)


# --- attribution


def _explained(attribution: Attribution) -> bool:
    return bool(attribution.effects) and bool(_drawn_headlines(attribution))


def _drawn_headlines(attribution: Attribution) -> list[Headline]:
    """Those of whose error shares say something."""
    return [
        each
        for each in attribution.headlines
        if attribution.rest(each) is not None and not attribution.has_opposing_effects(each)
    ]


def attribution_figure(attribution: Attribution) -> Figure:
    """For each headline metric, which share of its error each ingredient takes away, and what is left."""
    shown = _drawn_headlines(attribution)
    errors = [share_words(relative_error(each.live, each.predicted)) for each in shown]
    labels = [
        "<br>".join((*wrap(each.label, _NAME_WIDTH), error.replace(" ", "\u00a0")))
        for each, error in zip(shown, errors, strict=True)
    ]
    rows = [
        (effect.ingredient, [attribution.explained(effect, each) for each in shown]) for effect in attribution.effects
    ]
    rows.append(("left", [attribution.rest(each) for each in shown]))
    data = [_bars(name, labels, shares, number, is_rest=name == "left") for number, (name, shares) in enumerate(rows)]
    layout = {
        "xaxis": {"type": "category", "ticks": ""},
        "yaxis": {"title": "share of the error (%)", "zeroline": True, "zerolinecolor": "@text"},
        "barmode": "group",
        "hovermode": "closest",
    }
    caption = (
        "How much of the error goes if an ingredient has its measured value: the mean of swapping it alone and of "
        "swapping it last, so that no order matters. Below 0 it adds to the error; shares need not sum up to 100 %."
    )
    if any(abs(100 * (share or 0.0)) > _LONGEST_BAR for _, shares in rows for share in shares):
        caption += f" Bars are cut at {_LONGEST_BAR:.0f} %."
    return Figure("attribution", "What explains the error", caption, data, layout)


def _bars(name: str, labels: Sequence[str], shares: Sequence[float | None], number: int, *, is_rest: bool) -> Trace:
    known = [0.0 if share is None else 100 * share for share in shares]
    colour = "@grey" if is_rest else _COLOURS[number % len(_COLOURS)]
    pattern = "" if is_rest else _PATTERNS[number % len(_PATTERNS)]
    looks = {"shape": pattern, "fillmode": "overlay", "fgcolor": "@paper", "size": 7, "solidity": 0.3}
    return {
        "type": "bar", "name": name, "x": list(labels),
        "y": rounded([float(np.clip(value, -_LONGEST_BAR, _LONGEST_BAR)) for value in known]),
        "customdata": [f"{digits(value)} %" for value in known],
        "hovertemplate": f"{name}: %{{customdata}}<extra>%{{x}}</extra>",
        "marker": {"color": colour, "pattern": looks},
    }  # fmt: skip

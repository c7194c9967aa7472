"""The figures of a comparison as plain data for plotly.js: curves or bars, and where the work went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite, log10
from textwrap import wrap
from typing import Any

from windtunnel.reports.comparison_answer import from_to, relation_words, say
from windtunnel.reports.figures import Figure, Trace, log_axis, rounded
from windtunnel.reports.words import digits, percent
from windtunnel.sim.metrics.comparison import (
    CONFIDENCE,
    MOST_FAILED,
    ComparedRun,
    ComparedRuns,
    ComparisonAxis,
    Crossing,
    Difference,
    Relation,
    metric,
)
from windtunnel.sim.metrics.replications import Interval

MOST_TICKS = 9
MOST_BARS = 16
"""Bars in the figure of where the work went; of more runs only those at one value of the axis are drawn."""
NAME_WIDTH = 18
"""Characters of a line of a name."""
CHARACTER_WIDTH = 0.02
"""Of a label of the axis, as a share of the axis of a figure of half the page's width."""
LABEL_WIDTH = 28
"""Of a name that has one line only."""

_LOOKS = (
    ("@blue", "circle", "solid"),
    ("@orange", "diamond", "dash"),
    ("@green", "square", "dot"),
    ("@purple", "triangle-up", "dashdot"),
    ("@vermillion", "star", "longdash"),
    ("@sky", "triangle-down", "longdashdot"),
    ("@grey", "hexagon", "solid"),
)
"""Colour, symbol and dash of each variant's line."""
_WORK = (
    ("useful_tokens", "useful", "@green", ""),
    ("recomputed_tokens", "recomputed after preemption", "@vermillion", "/"),
    ("padding_tokens", "padding", "@orange", "."),
    ("straggler_tokens", "complete answers waiting for the longest", "@purple", "x"),
    ("rejected_draft_tokens", "rejected drafts", "@sky", "-"),
    ("abandoned_tokens", "for requests given up or lost", "@grey", "|"),
)


def comparison_figures(runs: ComparedRuns, relations: Sequence[Relation]) -> list[Figure]:
    """One for each metric that some run has, and one of the tokens computed in vain if there are any."""
    keys = [key for key in runs.metrics if runs.numbers(key)]
    drawn = [*_difference_figures(runs), *(_metric_figure(runs, relations, key) for key in keys)]
    return [*drawn, work_figure(runs)] if has_waste(runs) else drawn


def _metric_figure(runs: ComparedRuns, relations: Sequence[Relation], key: str) -> Figure:
    if runs.axis is None:
        return _bars(runs, key)
    if runs.axis.positions is None:
        return _grouped_bars(runs, runs.axis, key)
    return _curves(runs, runs.axis, relations, key)


# --- differences between replications


def _difference_figures(runs: ComparedRuns) -> Iterator[Figure]:
    """Changes from the baseline with their intervals, a line for each metric and variant; only without an axis."""
    others = [run for run in runs.runs if run.variant != runs.baseline and run.replications]
    keys = [key for key in runs.metrics if any(_share_of(runs, run, key) for run in others)]
    if runs.axis is not None or not keys:
        return
    zero = {"type": "line", "xref": "x", "yref": "paper", "x0": 0, "x1": 0, "y0": 0, "y1": 1}
    layout = {
        "xaxis": {"title": f"change from {_name(runs.baseline)} (%)", "zeroline": False},
        "yaxis": {
            "tickvals": list(range(len(keys))),
            "ticktext": ["<br>".join(wrap(_title(key), NAME_WIDTH)) for key in keys],
            "range": [len(keys) - 0.5, -0.5], "zeroline": False, "showgrid": False, "ticks": "",
        },
        "hovermode": "closest",
        "showlegend": len(others) > 1,
        "shapes": [{**zero, "line": {"color": "@text", "width": 1.2, "dash": "dash"}}],
    }  # fmt: skip
    caption = (
        f"Means of {runs.num_replications} replications, seed against seed, with the {percent(CONFIDENCE)} interval of "
        "their mean; open symbols and intervals that hold 0 are noise."
    )
    data = [_difference_trace(runs, run, keys, place, len(others)) for place, run in enumerate(others)]
    yield Figure("differences", f"Differences from {runs.baseline}", caption, data, layout)


def _share_of(runs: ComparedRuns, run: ComparedRun, key: str) -> tuple[Difference, Interval] | None:
    found = runs.difference(run, key)
    return None if found is None or found.share is None else (found, found.share)


def _difference_trace(runs: ComparedRuns, run: ComparedRun, keys: Sequence[str], place: int, num: int) -> Trace:
    """One variant's changes, beside those of the others."""
    colour, symbol, _ = _LOOKS[runs.variants.index(run.variant) % len(_LOOKS)]
    told = [(row, *found) for row, key in enumerate(keys) if (found := _share_of(runs, run, key)) is not None]
    beside = (place - (num - 1) / 2) * min(0.25, 0.8 / num)
    return {
        "x": rounded([100 * share.mean for _, _, share in told]), "y": [row + beside for row, _, _ in told],
        "name": _name(run.variant), "mode": "markers", "cliponaxis": False,
        "error_x": _reach([100 * share.half_width for _, _, share in told], colour),
        "marker": {
            "color": colour, "size": 11,
            "symbol": [f"{symbol}-open" if each.is_noise else symbol for _, each, _ in told],
        },
        "hovertext": [f"{from_to(each)}{', within noise' if each.is_noise else ''}" for _, each, _ in told],
        "hovertemplate": f"{_name(run.variant)}: %{{hovertext}}<extra></extra>",
    }  # fmt: skip


def _reach(half_widths: Sequence[float], colour: str) -> dict[str, Any]:
    """Bars of uncertainty to both sides."""
    return {"type": "data", "array": rounded(list(half_widths)), "color": colour, "thickness": 1.5, "width": 4}


def _half_widths(drawn: Sequence[ComparedRun], key: str, scale: float) -> list[float]:
    """Half of the interval of each mean; empty without replications."""
    found = [run.interval(key) for run in drawn]
    known = [each.half_width * scale for each in found if each is not None]
    return known if len(known) == len(found) else []


def _caption(runs: ComparedRuns, key: str) -> str:
    better = metric(key).better
    text = f"{better.capitalize()} is better." if better else ""
    if any(runs.is_offered(key, place) for place in runs.places):
        text += " Where all serve what is offered it does not tell them apart."
    if all(runs.judges(key, run) for run in runs.runs):
        return text.strip()
    mark = "Open symbols" if runs.axis is not None and runs.axis.positions is not None else "Hatched bars"
    why = ["overloaded; a longer run would be worse still"] if any(run.is_hopeless for run in runs.runs) else []
    lucky = any(not runs.judges(key, run) and not run.is_hopeless for run in runs.runs)
    why += [f"more than {percent(MOST_FAILED)} of the requests failed; latencies are those of the others"] * lucky
    return f"{text} {mark}: {', or '.join(why)}.".strip()


def _title(key: str) -> str:
    words = metric(key).words
    return f"{words[:1].upper()}{words[1:]}"


def _name(variant: str) -> str:
    """plotly reads markup in names."""
    return escape(variant, quote=False)


def _broken_name(variant: str) -> str:
    """The same, broken over lines."""
    return "<br>".join(_name(line) for line in wrap(variant, NAME_WIDTH)) or _name(variant)


def _scale(runs: ComparedRuns, key: str) -> tuple[float, str]:
    """What values are multiplied by to be drawn, and the unit that they then have."""
    unit = metric(key).unit
    if unit == "ms" and max(runs.numbers(key), default=0.0) > 2000:
        return 0.001, "s"
    return (100.0, "%") if unit == "%" else (1.0, unit)


# --- along a numeric axis


def _curves(runs: ComparedRuns, axis: ComparisonAxis, relations: Sequence[Relation], key: str) -> Figure:
    scale, unit = _scale(runs, key)
    data = [_curve(runs, axis, key, number, scale) for number in range(len(runs.variants))]
    found = [crossing for relation in relations if relation.metric == key for crossing in relation.crossings]
    if found:
        data.append(_crossing_marks(axis, relations, key, scale))
    y: dict[str, Any] = {"title": unit or metric(key).words, "rangemode": "tozero"}
    if runs.is_log(key):
        numbers = runs.numbers(key)
        y |= log_axis(min(numbers) * scale, max(numbers) * scale) | {"rangemode": "normal"}
    in_order = enumerate(sorted(found, key=lambda crossing: crossing.at))
    labels = [_crossing_label(axis, each, scale, log_y=runs.is_log(key), above=k % 2 == 0) for k, each in in_order]
    layout: dict[str, Any] = {"xaxis": _numeric_axis(axis), "yaxis": y, "hovermode": "closest", "annotations": labels}
    layout |= {"showlegend": len(runs.variants) > 1}
    caption = _caption(runs, key) + (" Rings: where lines cross." if found else "")
    return Figure(f"metric-{key}", _title(key), caption.strip(), data, layout, half=True)


def _curve(runs: ComparedRuns, axis: ComparisonAxis, key: str, number: int, scale: float) -> Trace:
    variant, (colour, symbol, dash) = runs.variants[number], _LOOKS[number % len(_LOOKS)]
    assert axis.positions is not None, "drawn along numeric axes only"
    drawn = [run for place in axis.order if (run := runs.run(variant, place)).number(key) is not None]
    reach = _half_widths(drawn, key, scale)
    return {
        **({"error_y": _reach(reach, colour)} if reach else {}),
        "x": rounded([axis.positions[run.place] for run in drawn]),
        "y": rounded([(run.number(key) or 0.0) * scale for run in drawn]),
        "mode": "lines+markers", "name": _broken_name(variant), "line": {"color": colour, "width": 2.5, "dash": dash},
        "marker": {
            "size": 9, "color": colour,
            "symbol": [symbol if runs.judges(key, run) else f"{symbol}-open" for run in drawn],
        },
        "customdata": [_hover(axis, run, key) for run in drawn], "hovertemplate": _hover_template(axis),
    }  # fmt: skip


def _hover_template(axis: ComparisonAxis) -> str:
    return f"<b>%{{customdata[0]}}</b><br>{escape(axis.key)} %{{customdata[1]}}<br>%{{customdata[2]}}"


def _hover(axis: ComparisonAxis, run: ComparedRun, key: str) -> list[str]:
    return [_said(run, key), escape(axis.values[run.place]), run.verdict]


def _said(run: ComparedRun, key: str) -> str:
    """A value, and half of its interval where there are replications."""
    found, text = run.interval(key), say(key, run.number(key) or 0.0)
    if found is None or not isfinite(found.half_width):
        return text
    reach = say(key, found.half_width)
    unit = reach.rpartition(" ")[2]
    return f"{text.removesuffix(f' {unit}')} ±{reach}"


def _numeric_axis(axis: ComparisonAxis) -> dict[str, Any]:
    """Ticks where runs are, if these are few."""
    assert axis.positions is not None, "drawn along numeric axes only"
    shown = [axis.positions[place] for place in axis.order]
    words = [f"{axis.positions[place]:.2f}" if axis.label != axis.key else axis.values[place] for place in axis.order]
    made: dict[str, Any] = {"title": axis.label}
    if axis.is_log:
        made |= log_axis(min(shown), max(shown))
    if len(shown) <= MOST_TICKS:
        kept = _apart([log10(x) for x in shown] if axis.is_log else shown, words)
        text = [escape(word) if keep else "" for word, keep in zip(words, kept, strict=True)]
        made |= {"tickvals": rounded(shown), "ticktext": text, "tickangle": 0}
    return made


def _apart(places: Sequence[float], words: Sequence[str]) -> list[bool]:
    """Which labels of ticks to keep so that they do not overlap; the last one in any case."""
    if len(places) < 2:
        return [True] * len(places)
    width = [CHARACTER_WIDTH * (len(word) + 2) * (places[-1] - places[0]) for word in words]
    kept = [len(places) - 1]
    for k in reversed(range(len(places) - 1)):
        if places[kept[-1]] - places[k] >= (width[k] + width[kept[-1]]) / 2:
            kept.append(k)
    return [k in kept for k in range(len(places))]


def _crossing_marks(axis: ComparisonAxis, relations: Sequence[Relation], key: str, scale: float) -> Trace:
    found = [(crossing, each) for each in relations if each.metric == key for crossing in each.crossings]
    said = ["<br>".join(wrap(escape(relation_words(axis, relation)), 60)) for _, relation in found]
    return {
        "x": rounded([crossing.at for crossing, _ in found]),
        "y": rounded([crossing.value * scale for crossing, _ in found]),
        "mode": "markers", "showlegend": False, "hovertext": said, "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {"symbol": "circle-open", "size": 16, "color": "@text", "line": {"width": 2}}, "cliponaxis": False,
    }  # fmt: skip


def _crossing_label(
    axis: ComparisonAxis, crossing: Crossing, scale: float, *, log_y: bool, above: bool
) -> dict[str, Any]:
    """Labels of neighbours stand above and below, so that they do not cover each other."""
    x, y = crossing.at, crossing.value * scale
    place = {"x": log10(x) if axis.is_log else x, "y": log10(y) if log_y else y, "yshift": 19 if above else -19}
    look = {"showarrow": False, "bgcolor": "@paper", "borderpad": 1, "font": {"size": 12, "color": "@text"}}
    return {**place, "text": f"≈ {digits(x, 2)}", **look}


# --- without one


def _bars(runs: ComparedRuns, key: str) -> Figure:
    scale, unit = _scale(runs, key)
    drawn = [run for run in runs.runs if run.number(key) is not None]
    numbers = [runs.variants.index(run.variant) for run in drawn]
    bars: Trace = {
        "type": "bar", "orientation": "h", "showlegend": False, "cliponaxis": False, "textposition": "outside",
        "y": [_broken_name(run.variant) for run in drawn],
        "x": rounded([(run.number(key) or 0.0) * scale for run in drawn]),
        "text": [_said(run, key) for run in drawn],
        "customdata": [run.verdict for run in drawn], "hovertemplate": "%{y}: %{text}, %{customdata}<extra></extra>",
        "marker": {
            "color": [_LOOKS[number % len(_LOOKS)][0] for number in numbers],
            "pattern": _pattern(["" if runs.judges(key, run) else "/" for run in drawn]),
        },
    }  # fmt: skip
    most = max((run.number(key) or 0.0) * scale for run in drawn)
    x = {
        "title": unit or metric(key).words,
        "range": [0, (1.6 if _half_widths(drawn, key, scale) else 1.3) * most or 1],
        "nticks": 5,
    }
    layout = {"xaxis": x, "yaxis": _upright(), "hovermode": "closest", "bargap": 0.35}
    return Figure(f"metric-{key}", _title(key), _caption(runs, key), [bars], layout, half=True)


def _pattern(shape: str | list[str]) -> dict[str, Any]:
    """Lines in the paper's colour over the bar's own."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "@paper", "size": 7, "solidity": 0.3}


def _upright() -> dict[str, Any]:
    """Categories from the top down."""
    return {"autorange": "reversed", "type": "category", "ticks": "", "showgrid": False}


def _grouped_bars(runs: ComparedRuns, axis: ComparisonAxis, key: str) -> Figure:
    scale, unit = _scale(runs, key)
    data = list(_groups(runs, axis, key, scale))
    y = {"title": unit or metric(key).words, "rangemode": "tozero"}
    layout: dict[str, Any] = {
        "xaxis": {"title": axis.key, "type": "category"},
        "yaxis": y,
        "barmode": "group",
        "hovermode": "closest",
    }
    return Figure(f"metric-{key}", _title(key), _caption(runs, key), data, layout, half=True)


def _groups(runs: ComparedRuns, axis: ComparisonAxis, key: str, scale: float) -> Iterator[Trace]:
    for number, variant in enumerate(runs.variants):
        drawn = [run for place in runs.places if (run := runs.run(variant, place)).number(key) is not None]
        reach = _half_widths(drawn, key, scale)
        yield {
            **({"error_y": _reach(reach, "@text")} if reach else {}),
            "type": "bar", "name": _broken_name(variant), "x": [_broken_name(axis.values[run.place]) for run in drawn],
            "y": rounded([(run.number(key) or 0.0) * scale for run in drawn]),
            "marker": {
                "color": _LOOKS[number % len(_LOOKS)][0],
                "pattern": _pattern(["" if runs.judges(key, run) else "/" for run in drawn]),
            },
            "customdata": [_hover(axis, run, key) for run in drawn], "hovertemplate": _hover_template(axis),
        }  # fmt: skip


# --- where the work went


def has_waste(runs: ComparedRuns) -> bool:
    """Whether any run computed tokens in vain, and says so."""
    return any(any(runs.numbers(key)) for key, *_ in _WORK[1:]) and bool(runs.numbers("useful_tokens"))


def work_figure(runs: ComparedRuns) -> Figure:
    """Tokens computed, by what they were good for."""
    drawn, where = _of_work(runs)
    labels = [_work_label(runs, run) for run in drawn]
    data: list[Trace] = []
    for rank, (key, name, colour, pattern) in enumerate(_WORK):
        tokens = [run.number(key) or 0.0 for run in drawn]
        if any(tokens):
            shares = [_share(number, run) for number, run in zip(tokens, drawn, strict=True)]
            look = {"color": colour, "pattern": _pattern(pattern)}
            bar: Trace = {"type": "bar", "orientation": "h", "name": name, "marker": look, "legendrank": 1000 - rank}
            hover = f"{name}: %{{x:,.0f}} tokens (%{{customdata}})<extra>%{{y}}</extra>"
            data.append(bar | {"y": labels, "x": tokens, "customdata": shares, "hovertemplate": hover})
    x = {"title": "tokens computed", "rangemode": "tozero", "nticks": 6}
    layout = {"xaxis": x, "yaxis": _upright(), "barmode": "stack", "hovermode": "closest", "bargap": 0.3}
    axis = runs.axis
    labelled = f" Numbers before the names are the {axis.label}." if axis is not None and axis.label != axis.key else ""
    caption = (
        f"Tokens that the steps computed{where}, and what they were good for. Padding fills prompts up to the longest "
        f"of their batch; slots whose answer is complete are computed until the longest of their batch is.{labelled}"
    )
    return Figure("work", "Tokens computed", caption, data, layout, tall=len(drawn) > 6)


def _share(tokens: float, run: ComparedRun) -> str:
    computed = run.number("computed_tokens")
    return percent(tokens / computed) if computed else ""


def _of_work(runs: ComparedRuns) -> tuple[list[ComparedRun], str]:
    """The runs to draw: all if they are few, else those at the place where most is lost; and which these are."""
    known = [run for run in runs.runs if run.number("useful_tokens") is not None]
    if runs.axis is None or len(known) <= MOST_BARS:
        return known, ""
    worst = max(known, key=_lost_share).place
    return [run for run in known if run.place == worst], f" at {runs.axis.key} {runs.axis.values[worst]}"


def _lost_share(run: ComparedRun) -> float:
    lost = sum(run.number(key) or 0.0 for key, *_ in _WORK[1:])
    return lost / (lost + (run.number("useful_tokens") or 0.0) or 1.0)


def _work_label(runs: ComparedRuns, run: ComparedRun) -> str:
    axis = runs.axis
    if axis is None:
        return _broken_name(run.variant)
    is_measured = axis.positions is not None and axis.label != axis.key
    value = f"{axis.positions[run.place]:.2f}" if axis.positions and is_measured else _name(axis.values[run.place])
    name = run.variant if len(run.variant) <= LABEL_WIDTH else f"{run.variant[: LABEL_WIDTH - 1]}…"
    return value if len(runs.variants) == 1 else f"{value} {_name(name)}"

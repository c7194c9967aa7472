"""The figures of a search as plain data for plotly.js: its progress, the trade-off, the walk, and each knob."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from windtunnel.reports.figures import Figure, Trace, log_axis, rounded
from windtunnel.reports.optimize_answer import step_words
from windtunnel.reports.optimize_data import (
    Optimized,
    Tried,
    TunedKnob,
    half_width,
    label_of,
    say_value,
    with_noise,
)
from windtunnel.reports.optimize_text import state_words
from windtunnel.reports.sweep_data import SweptPoint

MOST_SLICES = 8
LOWEST = -100
"""Per cent of head-room below which a figure shows no difference."""
TICK_CHARACTERS = 13
KEEPS, MISSES, WORSE = "keeps the objectives", "misses an objective, or unsafe", "worse beyond noise"
LOOKS = {KEEPS: ("@blue", "circle"), WORSE: ("@sky", "circle-open"), MISSES: ("@orange", "diamond-open")}
NO_START = "does not start"


def optimize_figures(found: Optimized) -> list[Figure]:
    """All figures, in the order in which they are read."""
    if found.is_infeasible:
        return []
    return [*_progress(found), *_walk(found), *_trade(found), *_slices(found)]


def _kind(found: Optimized, each: Tried) -> str:
    if each.excess > 0 or each.point.is_unsafe:
        return MISSES
    if each.dropped:
        return WORSE
    del found
    return KEEPS


def _mean(found: Optimized, each: Tried) -> float | None:
    """What is drawn upwards: the target, or head-room in % (no less than −100) where the target is flat."""
    return _height(found, each.point)


def _height(found: Optimized, point: SweptPoint) -> float | None:
    if not found.is_flat:
        return point.mean(found.target.key)
    mean = point.mean("headroom")
    return None if mean is None else max(100 * mean, LOWEST)


def _up(found: Optimized) -> dict[str, Any]:
    """The axis of that."""
    if found.is_flat:
        return {"title": "Head-room (% of the limit)"}
    return {"title": found.target.label, "rangemode": "tozero"}


def _flat_words(found: Optimized) -> str:
    if not found.is_flat:
        return ""
    return (
        f" {found.target.words[:1].upper()}{found.target.words[1:]} is level among all that keep the objectives, so "
        f"head-room is drawn; below {LOWEST} % it is cut off."
    )


def _groups(found: Optimized) -> Iterator[tuple[str, list[Tried]]]:
    known = [each for each in found.tried if _mean(found, each) is not None]
    for kind in LOOKS:
        group = [each for each in known if _kind(found, each) == kind]
        if group:
            yield kind if found.objectives or kind != KEEPS else "all replications run", group


def _look(kind: str) -> tuple[str, str]:
    return LOOKS.get(kind, LOOKS[KEEPS])


def _hover(found: Optimized, each: Tried) -> str:
    target, point = found.target, each.point
    own = [f"{key} {escape(word)}" for key, word in point.words.items()]
    interval = point.interval(target.key)
    lines = [f"<b>{each.point.number or ''}</b> ({escape(each.origin)})", *own]
    if interval is not None:
        lines.append(f"{escape(target.words)}: {with_noise(target, interval.mean, half_width(interval))}")
    if point.mean("headroom") is not None:
        lines.append(f"head-room: {say_value('headroom', point.mean('headroom'))}")
    return "<br>".join([*lines, f"{len(point.runs)} runs", *([escape(state)] if (state := state_words(each)) else [])])


def _stars(found: Optimized, xs: Any, ys: Any) -> Iterator[Trace]:
    """A star on the answer, a square around the scenario's own settings; from functions of a trial."""
    for name, each, symbol in (("scenario", found.start, "square-open"), ("answer", found.answer, "star")):
        if each is None or each.point.infeasible:
            continue
        x, y = xs(each), ys(each)
        if x is None or y is None:
            continue
        yield {
            "type": "scatter", "mode": "markers", "name": name, "x": [x], "y": rounded([y]), "cliponaxis": False,
            "marker": {"symbol": symbol, "size": 16, "color": "@text", "line": {"width": 2, "color": "@text"}},
            "customdata": [_hover(found, each)], "hovertemplate": "%{customdata}<extra></extra>",
        }  # fmt: skip


# --- progress


def _progress(found: Optimized) -> Iterator[Figure]:
    data: list[Trace] = []
    places, best = [], []
    so_far: float | None = None
    for each in found.tried:
        mean = _mean(found, each)
        if mean is not None and each.is_candidate and not each.dropped:
            sign = 1 if found.is_flat else found.target.sign
            better = so_far is None or sign * (mean - so_far) > 0
            so_far = mean if better else so_far
        if so_far is not None:
            places.append(each.point.number)
            best.append(so_far)
    if best:
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": "best so far", "x": places, "y": rounded(best),
                "line": {"color": "@green", "width": 2.2, "shape": "hv"}, "hoverinfo": "skip",
            }
        )  # fmt: skip
    for kind, group in _groups(found):
        data.append(_markers(found, kind, [each.point.number for each in group], group))
    failed = [each for each in found.tried if each.point.infeasible]
    if failed:
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": NO_START, "cliponaxis": False,
                "x": [each.point.number for each in failed], "y": [LOWEST if found.is_flat else 0] * len(failed),
                "marker": {"symbol": "x", "size": 9, "color": "@vermillion"},
                "customdata": [_hover(found, each) for each in failed],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )  # fmt: skip
    last = len(found.tried) + 1  # where an answer stands that was made simple after the search
    data += _stars(found, lambda each: each.point.number or last, lambda each: _mean(found, each))
    layout = {
        "xaxis": {"title": "deployment, in the order of the search"},
        "yaxis": _up(found),
        "hovermode": "closest",
        "showlegend": True,
    }
    caption = "Each point is one deployment. ★ is the answer, □ the scenario's own settings."
    caption += " ✕ does not start." if failed else ""
    yield Figure("progress", "How the search went", caption + _flat_words(found), data, layout)


def _markers(found: Optimized, kind: str, xs: Sequence[Any], group: Sequence[Tried], ys: Any = None) -> Trace:
    colour, symbol = _look(kind)
    values: list[Any] = [_mean(found, each) if ys is None else ys(each) for each in group]
    return {
        "type": "scatter", "mode": "markers", "name": kind, "x": list(xs), "y": rounded(values), "cliponaxis": False,
        "marker": {"size": 9, "color": colour, "symbol": symbol, "line": {"width": 1.6, "color": colour}},
        "customdata": [_hover(found, each) for each in group], "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


# --- the walk


def _walk(found: Optimized) -> Iterator[Figure]:
    """A point a step, with its interval: what each knob buys."""
    if not found.walk or found.confirmation is None:
        return
    target = found.target
    stops = [("scenario", found.walk[0].before), *((step_words(step), step.after) for step in found.walk)]
    known = [(words, point, height) for words, point in stops if (height := _height(found, point)) is not None]
    if len(known) < 2:
        return
    names = [f"{place}" for place in range(len(known))]
    paired = [0.0, *(half_width(step.change) for step in found.walk)][-len(known) :]
    bars = {} if found.is_flat else {"error_y": {"type": "data", "array": rounded(paired), "thickness": 1.4}}
    data: list[Trace] = [
        {
            "type": "scatter", "mode": "lines+markers", "name": target.words, "x": names, "cliponaxis": False,
            "y": rounded([height for _, _, height in known]),
            "line": {"color": "@blue", "width": 2.2, "shape": "hv"}, "marker": {"size": 10, "color": "@blue"}, **bars,
            "customdata": [_stop_hover(found, words, point) for words, point, _ in known],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
    ]  # fmt: skip
    layout = {
        "xaxis": {
            "type": "category", "tickvals": names, "ticktext": [_broken(words) for words, _, _ in known],
            "tickangle": 0, "tickfont": {"size": 11},
        },
        "yaxis": _up(found),
        "hovermode": "closest",
        "showlegend": False,
    }  # fmt: skip
    on = "" if found.is_fixed else ", on fresh seeds"
    caption = f"From the scenario's settings (left) to the answer (right), one knob at a time{on}."
    caption += "" if found.is_flat else " Bars hold the step's paired change with 95 % confidence."
    yield Figure("walk", "Which knob buys how much", caption + _flat_words(found), data, layout)


def _stop_hover(found: Optimized, words: str, point: SweptPoint) -> str:
    interval = point.interval(found.target.key)
    told = "" if interval is None else with_noise(found.target, interval.mean, half_width(interval))
    headroom = point.mean("headroom")
    more = [] if headroom is None else [f"head-room: {say_value('headroom', headroom)}"]
    return "<br>".join([f"<b>{escape(words)}</b>", f"{escape(found.target.words)}: {told}", *more])


def _broken(words: str) -> str:
    """A step's words over several short lines, for the label of an axis."""
    lines = [""]
    for part in words.replace("_", "_ ").replace(", ", ",  ").split(" "):
        gap = "" if lines[-1].endswith("_") or not lines[-1] else " "
        if lines[-1] and len(lines[-1]) + len(part) > TICK_CHARACTERS:
            lines.append(part)
        else:
            lines[-1] += f"{gap}{part}"
    return "<br>".join(map(escape, lines))


# --- the trade-off


def _trade(found: Optimized) -> Iterator[Figure]:
    """The target against what it is paid for with: head-room at the scenario's load, GPUs or money at capacity."""
    x_key = "headroom"
    if found.at == "capacity" or not any(each.point.values("headroom") for each in found.tried):
        x_key = "cost_per_hour" if found.is_priced else "num_gpus"
    y_key = found.target.key if x_key == "headroom" else "goodput"
    scale = 100 if x_key == "headroom" else 1

    def x_of(each: Tried) -> float | None:
        mean = each.point.mean(x_key)
        return None if mean is None else mean * scale

    def y_of(each: Tried) -> float | None:
        return each.point.mean(y_key)

    data: list[Trace] = []
    for kind, group in _groups(found):
        both = [each for each in group if x_of(each) is not None and y_of(each) is not None]
        if both:
            data.append(_markers(found, kind, rounded([x_of(each) or 0.0 for each in both]), both, y_of))
    if not data:
        return
    way = found.target.sign if y_key == found.target.key else 1
    data += _front(found, x_of, y_of, way, more_is_better=x_key == "headroom")
    data += _stars(found, x_of, y_of)
    x_label = "Head-room (% of the tightest limit)" if x_key == "headroom" else label_of(x_key)
    layout: dict[str, Any] = {
        "xaxis": {"title": x_label, **_head_range(found, x_of, x_key)},
        "yaxis": {"title": found.target.label if y_key == found.target.key else label_of(y_key), "rangemode": "tozero"},
        "hovermode": "closest",
        "showlegend": True,
    }
    better = "right" if x_key == "headroom" else "left"
    caption = f"Better is {'up' if way > 0 else 'down'} and to the {better}."
    caption += (
        " The line is the front: nothing is better in both." if any(t.get("name") == "front" for t in data) else ""
    )
    if x_key == "headroom":
        caption += " Left of 0 an objective is missed."
    yield Figure("trade", f"What is traded: {found.target.words}", caption, data, layout)


def _head_range(found: Optimized, x_of: Any, x_key: str) -> dict[str, Any]:
    """Overloaded trials are far to the left: what lies below −100 % is not shown."""
    values = [value for each in found.tried if (value := x_of(each)) is not None]
    if x_key != "headroom" or not values or min(values) >= -100:
        return {"rangemode": "tozero"} if x_key != "headroom" else {}
    return {"range": [-105, max(10.0, max(values) + 5)]}


def _front(found: Optimized, x_of: Any, y_of: Any, way: int, *, more_is_better: bool) -> Iterator[Trace]:
    kept = [each for each in found.tried if each.is_candidate and x_of(each) is not None and y_of(each) is not None]
    side = 1 if more_is_better else -1
    front: list[Tried] = []
    best: float | None = None
    for each in sorted(kept, key=lambda one: (-side * x_of(one), -way * y_of(one))):
        if best is None or way * (y_of(each) - best) > 0:
            best = y_of(each)
            front.append(each)
    if len(front) > 1:
        yield {
            "type": "scatter", "mode": "lines", "name": "front", "x": rounded([x_of(each) for each in front]),
            "y": rounded([y_of(each) for each in front]), "line": {"color": "@green", "width": 2, "dash": "dash"},
            "hoverinfo": "skip",
        }  # fmt: skip


# --- each knob


def _slices(found: Optimized) -> Iterator[Figure]:
    """For each knob all trials by its value."""
    for knob in found.knobs[:MOST_SLICES]:
        yield _slice(found, knob)


def _slice(found: Optimized, knob: TunedKnob) -> Figure:
    data: list[Trace] = []

    def x_of(each: Tried) -> Any:
        return each.point.positions[knob.key] if knob.is_numeric else escape(each.point.words[knob.key])

    for kind, group in _groups(found):
        shown = [each for each in group if x_of(each) is not None]
        if shown:
            data.append(_markers(found, kind, [x_of(each) for each in shown], shown) | {"showlegend": False})
    data += [trace | {"showlegend": False} for trace in _stars(found, x_of, lambda each: _mean(found, each))]
    x: dict[str, Any] = {"title": knob.key}
    positions = [place for each in found.tried if (place := each.point.positions[knob.key]) is not None]
    if not knob.is_numeric:
        x |= {"type": "category", "categoryarray": list(map(escape, knob.order))}
    elif knob.is_log and positions and min(positions) > 0:
        x |= log_axis(min(positions), max(positions))
    layout = {
        "xaxis": x,
        "yaxis": _up(found),
        "hovermode": "closest",
        "showlegend": False,
    }
    share = found.importance.get(knob.key)
    told = "" if share is None else f" It has {100 * share:.0f} % of the importance."
    own = f" The scenario has {knob.own}." if knob.own else ""
    caption = f"All other knobs vary, too.{own}{told}"
    return Figure(f"knob-{knob.key}", knob.key, caption, data, layout, half=True)

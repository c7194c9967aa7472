"""A sensitivity analysis as one HTML file: which setting matters most, with a tornado for each number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

from windtunnel.reports.figures import Figure, Trace, rounded
from windtunnel.reports.page import (
    answer_box,
    calibration_box,
    cell,
    cell_html,
    code,
    figure,
    glossary,
    header,
    how_it_was_run,
    navigation,
    section,
    simulated_with,
    table,
    warning_box,
    write_page,
)
from windtunnel.reports.sweep_data import measure, say
from windtunnel.reports.sweep_html import STYLES
from windtunnel.reports.sweep_influence import (
    METHOD_NAMES,
    Influence,
    Influences,
    Sensed,
    influence_answer,
    ranges_words,
    size_words,
    value_words,
    what_is_measured,
)

BAR_PX = 34
FOOT_PX = 90


def write_html(path: str | Path, sensed: Sensed) -> None:
    """Write the report; the same runs give the same bytes.  Raises OSError if the file cannot be written."""
    shared = sensed.context
    drawn = [tornado(sensed, found) for found in sensed.found if not found.is_flat]
    write_page(
        path,
        f"{shared.title}: which setting matters most",
        _body(sensed, drawn),
        skip_to="curves",
        head=header(shared),
        foot=simulated_with(shared.version),
        drawn=drawn,
        styles=STYLES,
    )


def _body(sensed: Sensed, drawn: Sequence[Figure]) -> Iterator[str]:
    shared, said = sensed.context, influence_answer(sensed)
    what = f"Sensitivity, {METHOD_NAMES[sensed.method]}: {size_words(sensed)}"
    yield from answer_box(said.headline, [what, *said.risks[:2]], said.tone)
    yield from _matrix(sensed)
    yield from warning_box(shared.warnings, calibrated=shared.calibrated)
    yield from calibration_box(shared)
    figures = [("curves", "Tornados")] if drawn else []
    yield from navigation([("says", "What it says"), *figures, ("how", "How it was run"), ("glossary", "Glossary")])
    yield section("says", "What it says")
    yield _list([*said.sentences, *said.risks])
    yield "</section>"
    if drawn:
        yield section("curves", "Tornados")
        yield f'<p class="lead">{escape(what_is_measured(sensed.method))}</p>'
        height = len(sensed.axes) * BAR_PX + FOOT_PX
        made = (figure(each).replace('class="plot half"', f'class="plot" style="height:{height}px"') for each in drawn)
        yield f'<div class="pair">{"".join(made)}</div>\n</section>'
    yield from _how(sensed)
    yield from glossary()


def _list(texts: Sequence[str]) -> str:
    return f'<ul class="told">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'


def _matrix(sensed: Sensed) -> Iterator[str]:
    """One row a setting, one column a number; what leads is bold."""
    shown = [found for found in sensed.found if not found.is_flat]
    if not shown:
        return
    heads = ("Setting", *(measure(found.key).words for found in shown))
    rows = [[code(axis.key), *(_cell(sensed, found, axis.key) for found in shown)] for axis in sensed.axes]
    yield '<div class="wide">'
    yield from table(heads, rows, "stack points")
    yield "</div>"


def _cell(sensed: Sensed, found: Influences, axis: str) -> str:
    each = next(each for each in found.ranked if each.axis == axis)
    value, _, bounds = value_words(sensed, found, each).partition(", ")
    told = f"<strong>{escape(value)}</strong>" if each in found.leaders else escape(value)
    return cell_html(f'{told} <span class="change">{escape(bounds)}</span>' if bounds else told, "number")


def _how(sensed: Sensed) -> Iterator[str]:
    yield section("how", "How it was run")
    if sensed.command:
        yield f"<h3>Command</h3><pre>{escape(sensed.command)}</pre>"
    yield "<h3>Ranges</h3>"
    yield from table(("Setting", "Varied over"), [
        (code(key), cell(rest.strip())) for key, _, rest in (text.partition(":") for text in ranges_words(sensed))
    ])  # fmt: skip
    yield from how_it_was_run(sensed.context)
    yield "</section>"


# --- the figure


def tornado(sensed: Sensed, found: Influences) -> Figure:
    """Settings below each other, the one that matters most on top."""
    words = measure(found.key).words
    title = f"{words[:1].upper()}{words[1:]}"
    scale, unit = _scale(sensed, found)
    bars = _swings(found, scale) if sensed.method == "oat" else _sizes(sensed, found, scale)
    x: dict[str, Any] = {"title": unit, "nticks": 5}
    y = {"autorange": "reversed", "type": "category", "ticks": "", "showgrid": False}
    layout: dict[str, Any] = {
        "xaxis": x,
        "yaxis": y,
        "hovermode": "closest",
        "bargap": 0.35,
        "showlegend": len(bars) > 1,
    }
    layout["barmode"] = "overlay"
    caption = {
        "oat": f"From the base ({say(found.key, found.base)}) to the least and the greatest over its values.",
        "sobol": "Wide: total index with its interval; narrow, hatched: the setting alone.",
        "morris": "Mean size of the effect of moving a setting through its range, with its interval.",
    }[sensed.method]
    return Figure(f"tornado-{found.key}", title, caption, list(bars), layout, half=True)


def _scale(sensed: Sensed, found: Influences) -> tuple[float, str]:
    if sensed.method == "sobol":
        return 1.0, "share of the variance"
    unit = measure(found.key).unit
    if unit == "ms" and max((each.value for each in found.ranked), default=0.0) > 2000:
        return 0.001, "s"
    return (100.0, "%") if unit == "%" else (1.0, unit or measure(found.key).words)


def _sizes(sensed: Sensed, found: Influences, scale: float) -> list[Trace]:
    names = [escape(each.axis) for each in found.ranked]
    values = [each.value * scale for each in found.ranked]
    up = [max(each.high * scale - value, 0.0) for each, value in zip(found.ranked, values, strict=True)]
    down = [max(value - max(each.low, 0.0) * scale, 0.0) for each, value in zip(found.ranked, values, strict=True)]
    bars: list[Trace] = [
        {
            "type": "bar", "orientation": "h", "name": "total" if sensed.method == "sobol" else "effect", "y": names,
            "x": rounded(values), "marker": {"color": "@blue"},
            "error_x": {
                "type": "data", "symmetric": False, "array": rounded(up), "arrayminus": rounded(down),
                "color": "@text", "thickness": 1.3,
            },
            "customdata": [_hover(sensed, found, each) for each in found.ranked],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
    ]  # fmt: skip
    if sensed.method == "sobol":
        alone = [max(each.first[0], 0.0) if each.first else 0.0 for each in found.ranked]
        pattern = {"shape": "/", "fillmode": "overlay", "fgcolor": "@paper", "size": 6, "solidity": 0.3}
        bars.append(
            {
                "type": "bar", "orientation": "h", "name": "alone", "y": names, "x": rounded(alone), "width": 0.3,
                "marker": {"color": "@orange", "pattern": pattern}, "hoverinfo": "skip",
            }
        )  # fmt: skip
    return bars


def _hover(sensed: Sensed, found: Influences, each: Influence) -> str:
    lines = [f"<b>{escape(each.axis)}</b>", value_words(sensed, found, each)]
    if each.first is not None:
        lines.append(f"alone {each.first[0]:.2f} ({each.first[1]:.2f} to {each.first[2]:.2f})")
    if each.mean is not None and each.spread is not None:
        lines.append(f"mean effect {say(found.key, each.mean)}, spread {say(found.key, each.spread)}")
    return "<br>".join(lines)


def _swings(found: Influences, scale: float) -> list[Trace]:
    """Two bars a setting, from the base to its least and to its greatest."""
    names = [escape(each.axis) for each in found.ranked]
    bars: list[Trace] = []
    for name, colour, pattern, pick in (("least", "@blue", "", min), ("greatest", "@orange", "/", max)):
        ends = [pick(each.ends, key=lambda end: end[1]) for each in found.ranked]
        look = {"shape": pattern, "fillmode": "overlay", "fgcolor": "@paper", "size": 7, "solidity": 0.3}
        bars.append(
            {
                "type": "bar", "orientation": "h", "name": name, "y": names, "base": round(found.base * scale, 6),
                "x": rounded([(value - found.base) * scale for _, value in ends]),
                "marker": {"color": colour, "pattern": look},
                "customdata": [
                    f"<b>{escape(each.axis)} {escape(word)}</b><br>{say(found.key, value)}{_interval(found, each)}"
                    for each, (word, value) in zip(found.ranked, ends, strict=True)
                ],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )  # fmt: skip
    return bars


def _interval(found: Influences, each: Influence) -> str:
    if not isfinite(each.low):
        return ""
    return (
        f"<br>largest change {say(found.key, each.value)} ({say(found.key, each.low)} to {say(found.key, each.high)})"
    )

"""A sweep as one HTML file that works offline: the answer for a manager, figures and tables for an engineer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import inf
from pathlib import Path

from windtunnel.reports.figures import Figure
from windtunnel.reports.page import (
    answer_box,
    badge,
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
    table_head,
    table_row,
    warning_box,
    write_page,
)
from windtunnel.reports.page import table as plain_table
from windtunnel.reports.sweep_answer import SweepAnswer, answer
from windtunnel.reports.sweep_data import Swept, measure, say
from windtunnel.reports.sweep_figures import num_panels, sweep_figures
from windtunnel.reports.sweep_table import Row, heads, rows
from windtunnel.reports.sweep_text import legend, what_was_varied
from windtunnel.reports.values import plain
from windtunnel.reports.words import plural

ROWS_SHOWN = 60
"""Of the table of points, before the fold."""
MOST_ROWS = 2000
PANEL_PX = 132
PANELS_FOOT_PX = 70
MOST_CARDS = 8
STYLES = ("page.css", "sweep.css")
_TONES = {"stable": "good", "infeasible": "bad", "not possible": "bad", "overloaded": "bad", "stalled": "bad"}


def write_html(path: str | Path, swept: Swept) -> None:
    """Write the report: one file, of which plotly.js is most, that needs no network.

    The same runs give the same bytes.  Raises OSError if the file cannot be written; then none is left behind.
    """
    drawn, shared = sweep_figures(swept), swept.context
    write_page(
        path,
        f"{shared.title}: {', '.join(axis.key for axis in swept.axes)}",
        _body(swept, drawn),
        skip_to="curves",
        head=header(shared),
        foot=simulated_with(shared.version),
        drawn=drawn,
        styles=STYLES,
    )


def _body(swept: Swept, drawn: Sequence[Figure]) -> Iterator[str]:
    said, shared = answer(swept), swept.context
    yield from answer_box(said.headline, _first_screen(swept, said), said.tone)
    yield from _cards(swept)
    yield from warning_box(shared.warnings, calibrated=shared.calibrated or not swept.feasible)
    yield from calibration_box(shared)
    yield from navigation(_sections(swept, drawn))
    yield from _figures(swept, drawn)
    yield from _what_happens(said)
    yield from _points(swept)
    yield from _infeasible(swept)
    yield from _how(swept)
    yield from glossary()


def _sections(swept: Swept, drawn: Sequence[Figure]) -> Iterator[tuple[str, str]]:
    if drawn:
        yield "curves", "Figures"
    yield "says", "What it says"
    yield "points", "All points"
    if any(point.infeasible for point in swept.points):
        yield "infeasible", "What cannot run"
    yield "how", "How it was run"
    yield "glossary", "Glossary"


# --- the first screen


def _first_screen(swept: Swept, said: SweepAnswer) -> list[str]:
    """What was asked, and the gravest risk."""
    asked = " × ".join(f"{axis.key} {axis.span}" for axis in swept.axes)
    each = plural(len(swept.points) * len(swept.seeds), "simulation")
    return [f"Varied: {asked}; {each}.", *said.effects[:2], *said.risks[:2]]


def _cards(swept: Swept) -> Iterator[str]:
    """The numbers of the best point, each with what it is at the baseline."""
    best = swept.best
    if best is None:
        return
    keys = list(dict.fromkeys((best.by, *swept.shown())))[:MOST_CARDS]
    base = swept.baseline if swept.baseline is not best.point else None
    made = []
    for key in keys:
        if best.point.mean(key) is None:
            continue
        words = swept.label(key) if "cost" in key else measure(key).words
        more = f"{say(key, base.mean(key))} at baseline" if base is not None else ""
        interval = best.point.interval(key)
        half = interval.half_width if interval is not None else 0.0
        value, spread = say(key, best.point.mean(key)), f"± {say(key, half)}" if 0 < half < inf else ""
        told = " · ".join(text for text in (spread, more) if text)
        made.append(
            f'<li><span class="name">{escape(words[:1].upper() + words[1:])}</span>'
            f'<span class="value">{escape(value)}</span><span class="more">{escape(told)}</span></li>'
        )
    if made:
        yield f'<p class="lead">At {escape(best.point.name)}:</p><ul class="cards">{"".join(made)}</ul>'


def _what_happens(said: SweepAnswer) -> Iterator[str]:
    yield section("says", "What it says")
    yield f'<ul class="told">{"".join(f"<li>{escape(text)}</li>" for text in said.effects)}</ul>'
    if said.risks:
        yield "<h3>What to mind</h3>"
        yield f'<ul class="told">{"".join(f"<li>{escape(text)}</li>" for text in said.risks)}</ul>'
    yield "</section>"


# --- figures


def _figures(swept: Swept, drawn: Sequence[Figure]) -> Iterator[str]:
    if not drawn:
        return
    yield section("curves", "Figures")
    for each in drawn:
        if not each.half:
            yield _panels(each, num_panels(swept)) if each.name.startswith("effects") else figure(each)
    maps = [figure(each) for each in drawn if each.half]
    if maps:
        yield f'<div class="pair">{"".join(maps)}</div>'
    yield "</section>"


def _panels(drawn: Figure, number: int) -> str:
    """A figure of so many plots below each other, as high as it needs to be."""
    height = number * PANEL_PX + PANELS_FOOT_PX
    return figure(drawn).replace('class="plot tall"', f'class="plot" style="height:{height}px"')


# --- tables


def _points(swept: Swept) -> Iterator[str]:
    yield section("points", "All points")
    told = " ".join(legend(swept))
    if told:
        yield f'<p class="lead">{escape(told)}</p>'
    names = ["#", *(axis.key for axis in swept.axes), *heads(swept)]
    names += [*(["SLO kept"] if swept.objectives else []), "Verdict", ""]
    found = rows(swept)
    yield from _point_table(swept, names, found[:ROWS_SHOWN])
    if found[ROWS_SHOWN:]:
        rest = found[ROWS_SHOWN:MOST_ROWS]
        yield f"<details><summary>{plural(len(rest), 'more point')}</summary>"
        yield from _point_table(swept, names, rest)
        yield "</details>"
    if found[MOST_ROWS:]:
        yield f"<p>{plural(len(found) - MOST_ROWS, 'more point')} in the CSV and Parquet files.</p>"
    yield "</section>"


def _point_table(swept: Swept, names: Sequence[str], found: Sequence[Row]) -> Iterator[str]:
    num_left = len(names) - 2
    yield '<div class="wide">'
    yield from table_head(names, [k < num_left for k in range(len(names))], "stack points")
    for row in found:
        made = table_row(names, _cells(swept, row))
        yield made.replace("<tr>", '<tr class="best">', 1) if "best" in row.marks else made
    yield "</tbody></table></div>"


def _cells(swept: Swept, row: Row) -> list[str]:
    numbers = [
        _with_change(key, value, change)
        for key, value, change in zip(swept.shown(), row.numbers, row.changes, strict=True)
    ]
    verdicts = [
        badge("bad" if word.endswith(" failed") else _TONES.get(word, "note"), word) for word in row.verdict.split(", ")
    ]
    marks = [badge("good" if mark == "best" else "note", mark) for mark in row.marks]
    return [
        cell(str(row.point.number), "number"),
        *(cell(text, "number") for text in row.settings),
        *numbers,
        *([cell(row.held, "number")] if swept.objectives else []),
        cell_html("".join(verdicts), "marks"),
        cell_html("".join(marks), "marks"),
    ]


def _with_change(key: str, value: str, change: str) -> str:
    tone = _tone(key, change)
    told = f' <span class="change {tone}">{escape(change)}</span>' if change else ""
    return cell_html(f"{escape(value)}{told}", "number")


def _tone(key: str, change: str) -> str:
    better = measure(key).better
    if not better or not change or change == "≈":
        return ""
    is_up = change[0] in "+×"
    return "good" if is_up == (better == "higher") else "bad"


def _infeasible(swept: Swept) -> Iterator[str]:
    found = list(swept.reasons())
    if not found:
        return
    yield section("infeasible", "What cannot run")
    made = [(cell("; ".join(point.name for point in points)), cell(reason, "words")) for reason, points in found]
    yield from plain_table(("Points", "Why, and what would help"), made)
    yield "</section>"


def _how(swept: Swept) -> Iterator[str]:
    yield section("how", "How it was run")
    yield f'<p class="lead">{escape(" ".join(what_was_varied(swept)))}</p>'
    if swept.command:
        yield f"<h3>Command</h3><pre>{escape(swept.command)}</pre>"
    if swept.overrides:
        made = [(code(key), code(plain(value))) for key, value in swept.overrides.items()]
        yield "<h3>Set for all points</h3>"
        yield from plain_table(("Setting", "Value"), made)
    yield "<h3>How numbers are judged</h3>"
    yield f'<ul class="told">{"".join(f"<li>{escape(text)}</li>" for text in METHODS)}</ul>'
    yield from how_it_was_run(swept.context)
    yield "</section>"


METHODS = (
    "Each point is run with the same seeds, so with the same requests (common random numbers); changes are means of "
    "the differences run by run, with Student's t interval at 95 %.",
    "The best point is the one with most (or least) of its number among those that keep all objectives in every "
    "replication and are safe in memory. Points that differ by less than 1 %, or not beyond noise, are level; of these "
    "what counts is, in this order: fewest GPUs, fewest preemptions (up to 0.5 % of the requests there are as good as "
    "none), lowest P99 ITL, lowest P99 TTFT (within 5 %), most memory left.",
    "A knee is the point of a curve farthest from the chord between its ends, once both axes are scaled to 0 … 1. It "
    "counts if that distance is at least 0.1, beyond noise, and twice any distance on the chord's other side.",
)
"""How the answer comes about, for those who doubt it."""

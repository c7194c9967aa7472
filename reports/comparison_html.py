"""A comparison as one HTML file: it works offline and shows who leads, where curves cross, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from windtunnel.reports.comparison_answer import (
    ComparisonAnswer,
    ComparisonContext,
    answer,
    relation_words,
    replicated_words,
)
from windtunnel.reports.comparison_figures import comparison_figures, has_waste
from windtunnel.reports.comparison_text import Cell, run_columns, run_table, variant_table
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
    table,
    table_head,
    table_row,
    warning_box,
    write_page,
)
from windtunnel.reports.values import plain
from windtunnel.reports.words import NOTHING
from windtunnel.sim.metrics.comparison import ComparedRuns, Relation
from windtunnel.sim.metrics.stability import Verdict

MOST_COLUMNS = 5
"""Variants side by side in one table; more become rows."""
MOST_VALUES = 6
_TONES = {
    Verdict.STABLE.value: "good",
    Verdict.OVERLOADED.value: "bad",
    Verdict.STALLED.value: "bad",
    "shedding": "bad",
    "infeasible": "bad",
    "not possible": "bad",
}


def write_html(path: str | Path, runs: ComparedRuns, relations: Sequence[Relation], context: ComparisonContext) -> None:
    """Write the report of a comparison: one file, of which plotly.js is most, that needs no network.

    The same runs give the same bytes.  Raises OSError if the file cannot be written; then none is left behind.
    """
    drawn = comparison_figures(runs, relations)
    write_page(
        path,
        context.common.title,
        _body(runs, relations, context, drawn),
        skip_to="curves",
        head=header(context.common),
        foot=simulated_with(context.common.version),
        drawn=drawn,
        styles=("page.css", "comparison.css"),
    )


def _body(
    runs: ComparedRuns, relations: Sequence[Relation], context: ComparisonContext, drawn: Sequence[Figure]
) -> Iterator[str]:
    yield from _purpose(context)
    said = answer(runs, relations)
    yield from answer_box(said.headline, said.sentences, "none")
    yield from warning_box(context.common.warnings, calibrated=context.common.calibrated)
    yield from calibration_box(context.common)
    further = _further(runs, relations, said)
    yield from navigation(_sections(runs, further))
    yield from _curves(runs, drawn)
    yield from _crossings(further)
    yield from _work(runs, drawn)
    yield from _numbers(runs, context.seeds)
    yield from _settings(runs, context)
    yield from _how(context)
    yield from glossary()


class _Further(NamedTuple):
    """What holds between each two variants, without what the answer has said."""

    changing: list[str]
    """Where their lines cross."""
    others: list[str]


def _further(runs: ComparedRuns, relations: Sequence[Relation], said: ComparisonAnswer) -> _Further:
    further = _Further([], [])
    if runs.axis is None:
        return further
    for each in relations:
        words = relation_words(runs.axis, each)
        if words not in said.sentences:
            (further.changing if each.crossings else further.others).append(words)
    return further


def _sections(runs: ComparedRuns, further: _Further) -> Iterator[tuple[str, str]]:
    yield "curves", "Side by side"
    if any(further):
        yield "crossings", "Who is ahead where"
    if has_waste(runs):
        yield "work", "Where the work went"
    yield "numbers", "All numbers"
    yield "settings", "What was compared"
    yield "how", "How it was run"
    yield "glossary", "Glossary"


def _purpose(context: ComparisonContext) -> Iterator[str]:
    for text in (context.description, context.teaches):
        if text:
            yield f'<p class="teaches">{escape(text)}</p>'


# --- figures


def _curves(runs: ComparedRuns, drawn: Sequence[Figure]) -> Iterator[str]:
    yield section("curves", "Side by side")
    if runs.axis is not None and runs.axis.positions is not None and len(runs.axis.order) < len(runs.axis.values):
        left_out = [runs.axis.values[place] for place in runs.places if place not in runs.axis.order]
        yield f'<p class="lead">Not drawn, for want of a place: {escape(", ".join(left_out))}.</p>'
    yield from (figure(each) for each in drawn if each.name == "differences")
    yield f'<div class="pair">{"".join(figure(each) for each in drawn if each.half)}</div>\n</section>'


def _crossings(further: _Further) -> Iterator[str]:
    if not any(further):
        return
    yield section("crossings", "Who is ahead where")
    yield (
        '<p class="lead">Numbers that differ by 1 % or less (capacities: 3 %) are level. A crossing lies where the '
        "lines between runs meet, so it is as exact as the values of the axis are close.</p>"
    )
    if further.changing:
        yield _list(further.changing)
    if further.others:
        yield f"<details><summary>Pairs that do not cross</summary>{_list(further.others)}</details>"
    yield "</section>"


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _work(runs: ComparedRuns, drawn: Sequence[Figure]) -> Iterator[str]:
    if has_waste(runs):
        yield section("work", "Where the work went")
        yield from (figure(each) for each in drawn if each.name == "work")
        yield "</section>"


# --- tables


def _numbers(runs: ComparedRuns, seeds: Sequence[int]) -> Iterator[str]:
    yield section("numbers", "All numbers")
    told = [f"Changes are against {runs.baseline}."] if len(runs.variants) > 1 else []
    told += [words] if (words := replicated_words(runs, seeds)) else []
    if told:
        yield f'<p class="lead">{escape(" ".join(told))}</p>'
    if runs.axis is None and len(runs.variants) <= MOST_COLUMNS:
        heads, rows = variant_table(runs)
        beside = [name != runs.baseline for name in runs.variants]
        made = [[cell(row[0].value), *map(_number, row[1:], beside)] for row in rows]
        yield from table(heads, made, "stack figures beside")
    else:
        yield from _run_rows(runs)
    yield "</section>"


def _run_rows(runs: ComparedRuns) -> Iterator[str]:
    """A row a run; where several variants were run at each value of the axis, below a line that names the value."""
    heads, rows = run_table(runs)
    is_grouped = runs.axis is not None and len(runs.variants) > 1
    first = heads.index("Variant") if is_grouped else 0
    number_from = len(heads) - len(run_columns(runs))
    made = [
        [*(_place(each) for each in row[first:number_from]), *(_number(each) for each in row[number_from:])]
        for row in rows
    ]
    yield from table_head(heads[first:], [k >= number_from for k in range(first, len(heads))], "stack figures")
    for number, row in enumerate(made):
        if is_grouped and number % len(runs.variants) == 0:
            words = escape(_group_words(runs, runs.runs[number].place))
            yield f'<tr class="group"><th scope="rowgroup" colspan="{len(heads) - first}">{words}</th></tr>'
        yield table_row(heads[first:], row)
    yield "</tbody></table>"


def _group_words(runs: ComparedRuns, place: int) -> str:
    axis = runs.axis
    assert axis is not None, "rows are grouped along an axis only"
    words = f"{axis.key} {axis.values[place]}"
    if axis.positions is None or axis.label == axis.key:
        return words
    return f"{words} · {axis.label} {axis.positions[place]:,.2f}"


def _number(shown: Cell, beside: bool = False) -> str:
    """A value with its change; ``beside`` keeps room for one even where there is none."""
    value = _verdict(shown.value) if shown.is_verdict else escape(shown.value)
    has_change = bool(shown.change) or (beside and not shown.is_verdict)
    change = f' <span class="change {shown.tone}">{escape(shown.change)}</span>' if has_change else ""
    return cell_html(f"{value}{change}", "number")


def _place(shown: Cell) -> str:
    """A value of the axis, a variant's name or a verdict."""
    return cell_html(_verdict(shown.value)) if shown.is_verdict else cell(shown.value)


def _verdict(words: str) -> str:
    return badge(_TONES.get(words, "note"), words)


def _settings(runs: ComparedRuns, context: ComparisonContext) -> Iterator[str]:
    yield section("settings", "What was compared")
    asked = [(name, context.overrides.get(name) or {}) for name in runs.variants]
    if any(own for _, own in asked):
        yield from table(("Variant", "Set to"), [(cell(name), code(_set_to(own))) for name, own in asked])
    if runs.axis is not None:
        values = escape("; ".join(runs.axis.values))
        yield f'<p class="varied">Varied: <span class="code">{escape(runs.axis.key)}</span> = {values}.</p>'
    if context.differing:
        yield "<h3>Settings that differ, what follows from them included</h3>"
        rows = [
            (code(each.key), *(code(_values(each.values.get(name, ()))) for name in runs.variants))
            for each in context.differing
        ]
        yield from table(("Setting", *runs.variants), rows)
    yield "</section>"


def _set_to(own: Mapping[str, object]) -> str:
    return ", ".join(f"{key} = {plain(value)}" for key, value in own.items()) or "as the scenario has it"


def _values(values: Sequence[object]) -> str:
    shown = [plain(value) for value in values]
    return "varies" if len(shown) > MOST_VALUES else "; ".join(shown) or NOTHING


def _how(context: ComparisonContext) -> Iterator[str]:
    yield section("how", "How it was run")
    yield '<p class="lead">What all runs have in common.</p>'
    yield from how_it_was_run(context.common)
    yield "</section>"

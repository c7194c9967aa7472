"""A validation as one HTML file: verdict, errors, live and simulated curves over each other, and what explains them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
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
    made_by,
    navigation,
    section,
    table,
    warning_box,
    write_page,
)
from windtunnel.reports.validation_answer import (
    MAIN,
    answer,
    effect_words,
    error_words,
    opposing_note,
    rest_words,
    share_words,
    value_words,
)
from windtunnel.reports.validation_context import ValidationContext
from windtunnel.reports.validation_figures import validation_figures
from windtunnel.reports.validation_text import columns, row
from windtunnel.reports.words import count
from windtunnel.sim.metrics.agreement import Agreement, Attribution, MetricError, relative_error

_SHOWN = ("", "output", "mean", "p95", "over_time")
"""Statistics of the first table; all are in a second one that is folded."""
_TONES = {"kept": "good", "missed": "bad"}


def write_html(path: str | Path, agreement: Agreement, context: ValidationContext) -> None:
    """Write the report of a validation: one file, of which plotly.js is most, that needs no network.

    The same input gives the same bytes.  Raises OSError if the file cannot be written; then none is left behind.
    """
    drawn, simulated = validation_figures(agreement), context.simulated
    write_page(
        path,
        f"{simulated.title}, validated",
        _body(agreement, context, drawn),
        skip_to="errors",
        head=header(simulated),
        foot=f"Simulated with {made_by(simulated.version)} and laid beside what was measured.",
        drawn=drawn,
        styles=("page.css", "comparison.css", "validation.css"),
    )


def _body(agreement: Agreement, context: ValidationContext, drawn: Sequence[Figure]) -> Iterator[str]:
    said, simulated = answer(agreement), context.simulated
    yield from answer_box(said.headline, said.sentences, said.tone)
    yield from warning_box(simulated.warnings, calibrated=simulated.calibrated)
    yield from calibration_box(simulated)
    yield f'<ul class="cards">{"".join(_cards(agreement))}</ul>'
    yield from navigation(_sections(agreement, drawn))
    yield from _errors(agreement, drawn)
    yield from _why(agreement, drawn)
    yield from _overlaid(drawn)
    yield from _live(agreement, context)
    yield from _how(context)
    yield from glossary()


def _sections(agreement: Agreement, drawn: Sequence[Figure]) -> Iterator[tuple[str, str]]:
    yield "errors", "How far off"
    if agreement.causes or agreement.attribution is not None:
        yield "why", "Why"
    if any(each.half for each in drawn):
        yield "curves", "Live and simulated"
    yield "live", "What was measured"
    yield "how", "How it was simulated"
    yield "glossary", "Glossary"


def _cards(agreement: Agreement) -> Iterator[str]:
    for key in MAIN:
        each = agreement.error(key)
        if each is not None:
            more = f"live {value_words(each.live, each.unit)}, predicted {value_words(each.predicted, each.unit)}"
            yield (
                f'<li><span class="name">{escape(each.name)}</span>'
                f'<span class="value">{escape(error_words(each))}</span>'
                f'<span class="more">{escape(more)}</span></li>'
            )


# --- errors


def _errors(agreement: Agreement, drawn: Sequence[Figure]) -> Iterator[str]:
    yield section("errors", "How far off")
    yield from (figure(each) for each in drawn if each.name == "errors")
    heads = columns(agreement)
    shown = [each for each in agreement.errors if each.limit is not None or each.statistic in _SHOWN]
    yield from table(heads, [_cells(each, heads) for each in shown])
    if len(shown) < len(agreement.errors):
        yield f"<details><summary>All {len(agreement.errors)} numbers</summary>"
        yield from table(heads, [_cells(each, heads) for each in agreement.errors])
        yield "</details>"
    if agreement.num_live_runs > 1:
        yield '<p class="lead">Live spread: how far a live run lay from the mean of the live runs at most.</p>'
    if any(each.statistic == "over_time" for each in agreement.errors):
        yield (
            '<p class="lead">Over time: the mean distance of the two series at the instants at which the server was '
            "looked at, as a share of the live peak, or in points. Means and peaks are of the same instants.</p>"
        )
    yield "</section>"


def _cells(error: MetricError, heads: Sequence[str]) -> list[str]:
    made = []
    for head, text in zip(heads, row(error, heads), strict=True):
        if head == "Verdict" and text:
            made.append(cell_html(badge(_TONES[text], text)))
        else:
            made.append(cell(text, "" if head == "Metric" else "number"))
    return made


# --- why


def _why(agreement: Agreement, drawn: Sequence[Figure]) -> Iterator[str]:
    attribution = agreement.attribution
    if not agreement.causes and attribution is None:
        return
    yield section("why", "Why")
    if agreement.causes:
        yield f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in agreement.causes)}</ul>"
    if attribution is not None:
        yield from (figure(each) for each in drawn if each.name == "attribution")
        yield from _swaps(attribution)
    yield "</section>"


def _swaps(attribution: Attribution) -> Iterator[str]:
    if attribution.effects:
        heads = ("Ingredient", "In the live run", *(each.label for each in attribution.headlines))
        rows = [
            (
                cell(effect.ingredient),
                cell(effect.swap or "about the same", "words"),
                *(cell(effect_words(attribution, effect, each), "number") for each in attribution.headlines),
            )
            for effect in attribution.effects
        ]
        rest = (
            cell("left"),
            cell("by none of them", "words"),
            *(cell(rest_words(attribution, each), "number") for each in attribution.headlines),
        )
        error = (
            cell("error of the prediction"),
            cell("", "words"),
            *(cell(share_words(relative_error(each.live, each.predicted)), "number") for each in attribution.headlines),
        )
        yield from table(heads, [error, *rows, rest])
        if note := opposing_note(attribution):
            yield f'<p class="lead">{escape(note)}</p>'
    if attribution.unmeasured:
        yield f"<h3>Not swapped</h3><ul>{''.join(f'<li>{escape(text)}</li>' for text in attribution.unmeasured)}</ul>"


# --- curves and origins


def _overlaid(drawn: Sequence[Figure]) -> Iterator[str]:
    half = [each for each in drawn if each.half]
    if half:
        yield section("curves", "Live and simulated")
        yield f'<div class="pair">{"".join(figure(each) for each in half)}</div>\n</section>'


def _live(agreement: Agreement, context: ValidationContext) -> Iterator[str]:
    yield section("live", "What was measured")
    facts = [
        ("Measured by", context.live_source),
        ("Where", context.live_name),
        ("Live runs", count(agreement.num_live_runs)),
        ("Requests of each", count(agreement.num_requests)),
        ("Did not finish", count(agreement.num_failed)),
    ]
    rows = [(cell(name), cell(value)) for name, value in facts]
    rows += [(code(name), code(value)) for name, value in context.server_facts]
    yield from table(("What", "Value"), rows)
    if context.assumptions:
        yield "<h3>Taken for granted, and noted</h3>"
        yield f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in context.assumptions)}</ul>"
    yield "</section>"


def _how(context: ValidationContext) -> Iterator[str]:
    yield section("how", "How it was simulated")
    yield from how_it_was_run(context.simulated)
    yield "</section>"

"""A validation as text: the verdict, the table of errors, what explains them, and what was taken for granted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from windtunnel.reports.text import header
from windtunnel.reports.validation_answer import (
    answer,
    effect_words,
    error_words,
    interval_words,
    opposing_note,
    rest_words,
    share_words,
    spread_words,
    value_words,
    verdict_words,
)
from windtunnel.reports.validation_context import ValidationContext
from windtunnel.reports.words import percent, plural
from windtunnel.sim.metrics.agreement import Agreement, Attribution, Headline, MetricError, relative_error

PROSE_WIDTH = 100


def render_text(agreement: Agreement, context: ValidationContext) -> str:
    """The whole text, ending in a newline."""
    said = answer(agreement)
    lines = [*header(context.simulated)]
    runs = plural(agreement.num_live_runs, "run")
    lines += [
        f"Live: {context.live_source}, {context.live_name}: {runs} of {plural(agreement.num_requests, 'request')}",
        "",
    ]
    for sentence in (f"{said.headline}.", *said.sentences):
        lines += wrap(sentence, PROSE_WIDTH, subsequent_indent="  ")
    lines += ["", *_table(agreement)]
    if agreement.attribution is not None:
        lines += ["", *_attribution(agreement.attribution)]
    lines += [
        *_listed("Likely causes and findings", agreement.causes),
        *_listed("Taken for granted", context.assumptions),
    ]
    for warning in context.simulated.warnings:
        lines += wrap(f"WARNING: {warning}", PROSE_WIDTH, subsequent_indent="         ")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def columns(agreement: Agreement) -> list[str]:
    """Heads of the table of errors: those that have anything to say."""
    heads = ["Metric", "Live", "Predicted", "Error"]
    heads += ["95 % interval"] if any(each.interval for each in agreement.errors) else []
    heads += ["Live spread"] if agreement.num_live_runs > 1 else []
    heads += ["Limit", "Verdict"] if agreement.limited else []
    return heads


def row(error: MetricError, heads: Sequence[str]) -> list[str]:
    """The cells of a metric under those heads."""
    cells = {
        "Metric": error.name,
        "Live": value_words(error.live, error.unit),
        "Predicted": value_words(error.predicted, error.unit),
        "Error": error_words(error),
        "95 % interval": interval_words(error),
        "Live spread": spread_words(error),
        "Limit": "" if error.limit is None else percent(error.limit),
        "Verdict": verdict_words(error),
    }
    return [cells[head] for head in heads]


def _table(agreement: Agreement) -> list[str]:
    heads = columns(agreement)
    return _aligned([heads, *(row(each, heads) for each in agreement.errors)])


def _attribution(attribution: Attribution) -> list[str]:
    """What each ingredient takes off the error, and what is left."""
    if not attribution.headlines:
        return []
    heads = ["What explains the error", *(each.label for each in attribution.headlines)]
    rows = [["error of the prediction", *map(_headline_error, attribution.headlines)]]
    rows += [
        [effect.ingredient, *(effect_words(attribution, effect, each) for each in attribution.headlines)]
        for effect in attribution.effects
    ]
    if attribution.effects:
        rows.append(["left", *(rest_words(attribution, each) for each in attribution.headlines)])
    lines = _aligned([heads, *rows])
    lines += wrap(opposing_note(attribution), PROSE_WIDTH, subsequent_indent="  ")
    for text in attribution.unmeasured:
        lines += wrap(f"Not swapped: {text}", PROSE_WIDTH, subsequent_indent="  ")
    return lines


def _headline_error(headline: Headline) -> str:
    return share_words(relative_error(headline.live, headline.predicted))


def _listed(title: str, sentences: Sequence[str]) -> Iterator[str]:
    if sentences:
        yield ""
        yield f"{title}:"
        for sentence in sentences:
            yield from wrap(sentence, PROSE_WIDTH, initial_indent="- ", subsequent_indent="  ")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in rows
    ]

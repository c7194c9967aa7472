"""A sensitivity analysis as text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from windtunnel.reports.sweep_data import measure, say
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
from windtunnel.reports.text import header
from windtunnel.reports.words import NOTHING, digits

PROSE_WIDTH = 100
BAR = 24
"""Characters of the longest bar."""


def render_text(sensed: Sensed) -> str:
    """The whole text, ending in a newline: what was varied, the answer, and a tornado for each number."""
    said = influence_answer(sensed)
    lines = [*header(sensed.context), "", f"Sensitivity, {METHOD_NAMES[sensed.method]}: {size_words(sensed)}"]
    lines += [f"  {text}" for text in ranges_words(sensed)]
    lines.append("")
    for sentence in (said.headline, *said.sentences, *said.risks):
        lines += wrap(sentence, PROSE_WIDTH, subsequent_indent="  ")
    for found in sensed.found:
        lines += ["", _title(sensed, found), *_bars(sensed, found)]
    lines.append("")
    lines += wrap(what_is_measured(sensed.method), PROSE_WIDTH)
    for warning in sensed.context.warnings:
        lines += wrap(f"WARNING: {warning}", PROSE_WIDTH, subsequent_indent="         ")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def _title(sensed: Sensed, found: Influences) -> str:
    words = measure(found.key).words
    at = "at the base" if sensed.method == "oat" else "on average"
    return f"{words[:1].upper()}{words[1:]}: {say(found.key, found.base)} {at}"


def _bars(sensed: Sensed, found: Influences) -> list[str]:
    if found.is_flat:
        return ["  nothing varied changes it"]
    most = found.ranked[0].value
    width = max(len(each.axis) for each in found.ranked)
    return [
        f"  {each.axis.ljust(width)}  {('#' * max(round(BAR * each.value / most), 0)).ljust(BAR)}  "
        f"{value_words(sensed, found, each)}{_more(found, each)}"
        for each in found.ranked
    ]


def _more(found: Influences, each: Influence) -> str:
    """What a method knows beside the size."""
    if each.first is not None:
        return f"; alone {digits(max(each.first[0], 0.0), 2)}"
    if each.mean is not None:
        way = "raises" if each.mean > 0 else "lowers"
        return f"; {way} it by {say(found.key, abs(each.mean))} on average" if each.value > 0 else ""
    if each.ends:
        return f"; {', '.join(f'{say(found.key, value)} at {word}' for word, value in shown_ends(each))}"
    return ""


def shown_ends(each: Influence) -> list[tuple[str, float]]:
    """The values of a setting with the least and the greatest number, and its first and last."""
    if len(each.ends) <= 4:
        return list(each.ends)
    by_value = sorted(each.ends, key=lambda end: end[1])
    kept = (each.ends[0], each.ends[-1], by_value[0], by_value[-1])
    return [end for end in each.ends if end in kept]


def render_markdown(sensed: Sensed) -> str:
    """The same as Markdown, ending in a newline."""
    said, shared = influence_answer(sensed), sensed.context
    parts = [
        [f"### {shared.title}: sensitivity ({METHOD_NAMES[sensed.method]})"],
        [f"**{said.headline}**"],
        [f"- {sentence}" for sentence in (*said.sentences, *said.risks)],
        list(_table(sensed)),
        [what_is_measured(sensed.method)],
        [size_words(sensed), *(f"- {text}" for text in ranges_words(sensed))],
        [f"cost model {shared.cost_model}, {shared.calibration}."] if shared.cost_model else [],
        list(shared.calibrated_by),
        [f"> **Warning:** {text}" for text in shared.warnings],
        [f"```\n{sensed.command}\n```"] if sensed.command else [],
        [f"windtunnel {shared.version}"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if any(part)) + "\n"


def _table(sensed: Sensed) -> Iterator[str]:
    """One row a setting, one column a number; the greatest of each column in bold."""
    if not sensed.found:
        return
    yield _row(["setting", *(measure(found.key).words for found in sensed.found)])
    yield _row(["---", *("---:" for _ in sensed.found)])
    for axis in sensed.axes:
        yield _row([f"`{axis.key}`", *(influence_cell(sensed, found, axis.key) for found in sensed.found)])


def influence_cell(sensed: Sensed, found: Influences, axis: str) -> str:
    """The influence of one setting on one number, bold if it leads."""
    each = next(each for each in found.ranked if each.axis == axis)
    if found.is_flat:
        return NOTHING
    told = value_words(sensed, found, each)
    return f"**{told}**" if each in found.leaders else told


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

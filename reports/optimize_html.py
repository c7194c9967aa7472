"""A search as one HTML file that works offline: the answer for a manager, figures and tables for an engineer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import inf
from pathlib import Path

from windtunnel.reports.figures import Figure
from windtunnel.reports.optimize_answer import (
    OptimizeAnswer,
    answer,
    importance_words,
    reset_words,
    step_buys,
    step_words,
)
from windtunnel.reports.optimize_data import Optimized, Tried, say_value, words_of
from windtunnel.reports.optimize_figures import optimize_figures
from windtunnel.reports.optimize_text import heads, number_words, ordered, state_words
from windtunnel.reports.page import (
    answer_box,
    badge,
    calibration_box,
    cards,
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
from windtunnel.reports.values import plain
from windtunnel.reports.words import plural

ROWS_SHOWN = 20
MOST_ROWS = 2000
MOST_UNIT = 6
"""Characters of a unit that stands beside the value of a card; a longer one stands below it."""
STYLES = ("page.css", "optimize.css")


def write_html(path: str | Path, found: Optimized) -> None:
    """Write the report: one file, of which plotly.js is most, that needs no network.

    The same runs give the same bytes.  Raises OSError if the file cannot be written; then none is left behind.
    """
    drawn, shared = optimize_figures(found), found.context
    write_page(
        path,
        f"{shared.title}: {found.target.words}",
        _body(found, drawn),
        skip_to="curves",
        head=header(shared),
        foot=simulated_with(shared.version),
        drawn=drawn,
        styles=STYLES,
    )


def _body(found: Optimized, drawn: Sequence[Figure]) -> Iterator[str]:
    said, shared = answer(found), found.context
    yield from answer_box(said.headline, [*said.gains, *said.costs[:1], *said.risks[:3]], said.tone)
    yield _cards(found)
    yield from _command(found)
    yield from warning_box(shared.warnings, calibrated=shared.calibrated or found.is_infeasible)
    yield from calibration_box(shared)
    yield from navigation(_sections(found, drawn))
    yield from _figures(drawn)
    yield from _why(found, said)
    yield from _trials(found)
    yield from _infeasible(found)
    yield from _how(found, said)
    yield from glossary()


def _sections(found: Optimized, drawn: Sequence[Figure]) -> Iterator[tuple[str, str]]:
    if drawn:
        yield "curves", "Figures"
    yield "why", "Why this"
    yield "trials", "All deployments"
    if any(each.point.infeasible for each in found.tried):
        yield "infeasible", "What cannot run"
    yield "how", "How it was searched"
    yield "glossary", "Glossary"


def _cards(found: Optimized) -> str:
    """Numbers of the answer on fresh seeds, each with what it is with the scenario's own settings."""
    if found.confirmation is None:
        return ""
    winner, start = found.confirmation.winner, found.confirmation.start
    made = []
    for key in found.shown_keys:
        mean = winner.mean(key)
        if mean is None:
            continue
        is_target = key == found.target.key
        words = found.target.words if is_target else words_of(key)

        def say(value: float | None, key: str = key, is_target: bool = is_target) -> str:
            if key == "cost_per_hour" and value is not None:
                return f"{value:,.2f} {found.currency}".rstrip()
            return found.target.say(value) if is_target else say_value(key, value)

        interval = winner.interval(key)
        half = interval.half_width if interval is not None else 0.0
        more = [f"± {say(half)}"] if 1e-9 * abs(mean) < half < inf else []
        if start is not None and start.mean(key) is not None:
            more.append(f"{say(start.mean(key))} before")
        value, _, unit = say(mean).partition(" ")
        is_long = len(unit) > MOST_UNIT
        told = [unit, *(text.replace(f" {unit}", "") for text in more)] if is_long else more
        made.append((f"{words[:1].upper()}{words[1:]}", value if is_long else say(mean), " · ".join(told)))
    return cards(made) if made else ""


def _command(found: Optimized) -> Iterator[str]:
    if found.serve_command:
        yield f'<pre class="command" tabindex="0" aria-label="vllm serve command">{escape(found.serve_command)}</pre>'
    elif found.why_no_command:
        yield f"<p>No <code>vllm serve</code> line: {escape(found.why_no_command)}</p>"


def _figures(drawn: Sequence[Figure]) -> Iterator[str]:
    if not drawn:
        return
    yield section("curves", "Figures")
    yield from (figure(each) for each in drawn if not each.half)
    halves = [figure(each) for each in drawn if each.half]
    if halves:
        yield "<h3>Each knob</h3>"
        yield f'<div class="pair">{"".join(halves)}</div>'
    yield "</section>"


def _why(found: Optimized, said: OptimizeAnswer) -> Iterator[str]:
    yield section("why", "Why this")
    if found.walk:
        rows = [(code(step_words(step)), cell(step_buys(found, step), "words")) for step in found.walk]
        yield "<h3>One knob at a time</h3>"
        yield from plain_table(("Step from the scenario's settings", "What it buys"), rows)
    told = [text for text in (reset_words(found), importance_words(found), *said.costs, *said.risks) if text]
    yield f'<ul class="told">{"".join(f"<li>{escape(text)}</li>" for text in told)}</ul>'
    yield "</section>"


def _trials(found: Optimized) -> Iterator[str]:
    yield section("trials", "All deployments")
    yield (
        f'<p class="lead">{plural(len(found.tried), "deployment")}, the best first. Numbers are means over the runs of '
        "the search, with the 95 % interval; the answer's own numbers above are those on fresh seeds.</p>"
    )
    names = ["#", *(knob.key for knob in found.knobs), *heads(found), "Runs", "State"]
    rows = ordered(found)
    yield from _table(found, names, rows[:ROWS_SHOWN])
    if rows[ROWS_SHOWN:]:
        rest = rows[ROWS_SHOWN:MOST_ROWS]
        yield f"<details><summary>{plural(len(rest), 'more deployment')}</summary>"
        yield from _table(found, names, rest)
        yield "</details>"
    yield "</section>"


def _table(found: Optimized, names: Sequence[str], rows: Sequence[Tried]) -> Iterator[str]:
    yield '<div class="wide">'
    yield from table_head(names, [k < len(names) - 1 for k in range(len(names))], "stack")
    for each in rows:
        made = table_row(names, _cells(found, each))
        yield made.replace("<tr>", '<tr class="best">', 1) if _is_answer(found, each) else made
    yield "</tbody></table></div>"


def _is_answer(found: Optimized, each: Tried) -> bool:
    return found.winner is not None and found.winner.number == each.point.number


def _cells(found: Optimized, each: Tried) -> list[str]:
    marks = []
    if _is_answer(found, each):
        marks.append(badge("good", "answer"))
    if each is found.start:
        marks.append(badge("note", "scenario"))
    elif each.origin == "vLLM defaults":
        marks.append(badge("note", each.origin))
    state = state_words(each)
    if state:
        marks.append(escape(state))
    return [
        cell(str(each.point.number or "–"), "number"),
        *(cell(each.point.words[knob.key], "number") for knob in found.knobs),
        *(cell(number_words(found, each, key), "number") for key in found.shown_keys),
        cell(str(len(each.point.runs)), "number"),
        cell_html(" ".join(marks), "marks"),
    ]


def _infeasible(found: Optimized) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for each in found.tried:
        if each.point.infeasible:
            reasons.setdefault(each.point.infeasible, []).append(str(each.point.number))
    if not reasons:
        return
    yield section("infeasible", "What cannot run")
    made = [(cell(", ".join(numbers)), cell(reason, "words")) for reason, numbers in reasons.items()]
    yield from plain_table(("Deployments", "Why, and what would help"), made)
    yield "</section>"


def _how(found: Optimized, said: OptimizeAnswer) -> Iterator[str]:
    yield section("how", "How it was searched")
    told = [*said.how, *found.notes]
    yield f'<ul class="told">{"".join(f"<li>{escape(text)}</li>" for text in told)}</ul>'
    rows = [
        (code(knob.key), cell(", ".join(knob.order) or knob.text), cell(knob.own or "–"), cell(knob.default or "–"))
        for knob in found.knobs
    ]
    yield "<h3>Knobs</h3>"
    yield from plain_table(("Knob", "Values", "Scenario", "vLLM's default"), rows)
    if found.command:
        yield f'<h3>Command</h3><pre class="command">{escape(found.command)}</pre>'
    if found.scenario_toml:
        yield "<details><summary>The answer as a scenario file</summary>"
        yield f'<pre class="command">{escape(found.scenario_toml)}</pre></details>'
    if found.overrides:
        made = [(code(key), code(plain(value))) for key, value in found.overrides.items()]
        yield "<h3>Set for all deployments</h3>"
        yield from plain_table(("Setting", "Value"), made)
    yield "<h3>How numbers are judged</h3>"
    yield f'<ul class="told">{"".join(f"<li>{escape(text)}</li>" for text in METHODS)}</ul>'
    yield from how_it_was_run(found.context)
    yield "</section>"


METHODS = (
    "Deployments are proposed eight at a time by optuna's tree-structured Parzen estimator, which is told by how much "
    "each misses its objectives; what was tried is not run again. The scenario's settings and vLLM's defaults come "
    "first.",
    "All deployments serve the same requests, seed by seed. One that misses an objective in its first run gets no "
    "second one, nor does one that would be worse than the best if all of its requests were good. After three runs, "
    "one whose paired difference to the best so far lies below 0 with 95 % confidence, and by 1 %, gets no more.",
    "Deployments that differ by less than 1 %, or by less than 5 % and not beyond noise, are level. Of these what "
    "counts is, in this order: lowest cost, most head-room (in steps of 3 % of the limit), fewest settings that are "
    "not vLLM's default, most memory left. Settings that then buy nothing are set back to vLLM's default.",
    "At capacity each deployment is first run at the rate that it needs to be the best. One that misses an objective "
    "there has an upper bound in place of a number, and is searched no further.",
    "The best of many noisy trials looks better than it is. So the answer is run again with seeds that the search has "
    "not seen, and so are the scenario's own settings; the numbers stated are those.",
)
"""How the answer comes about, for those who doubt it."""

"""The report as one HTML file: it works offline and shows what happened, from the answer down to single requests."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.reports.answer import answer
from windtunnel.reports.causes import Causes, worst_requests
from windtunnel.reports.context import ReportContext
from windtunnel.reports.figures import Figure, figures, time_axis
from windtunnel.reports.files import atomic_writer
from windtunnel.reports.glossary import GLOSSARY
from windtunnel.reports.text import measured, render_text
from windtunnel.reports.values import facts_of, plain, rows_of
from windtunnel.reports.words import NOTHING, count, milliseconds, nanoseconds, percent, plural
from windtunnel.sim.metrics import LatencyStats, Summary
from windtunnel.sim.metrics.summary import percent_word
from windtunnel.sim.records import Records

NUM_WORST = 20
NUM_SHOWN = 5
"""Rows of a long table that are always shown; the others are behind a fold."""
NUM_EVICTIONS = 12

SECTIONS = (
    ("load", "KV cache, queue and steps"),
    ("latency", "Latencies"),
    ("preemptions", "Preemptions"),
    ("worst", "Worst requests"),
    ("how", "How it was run"),
    ("numbers", "All numbers"),
    ("glossary", "Glossary"),
)
NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the page cannot load anything, wherever it is opened."""


def write_html(path: str | Path, records: Records, summary: Summary, context: ReportContext) -> None:
    """Write the report of a run: one file, about 5 MB of which plotly.js is most, that needs no network.

    The same run gives the same bytes.  Raises OSError if the file cannot be written; then none is left behind.
    """
    with atomic_writer(path) as file:
        for part in _page(records, summary, context):
            file.write(part)
            file.write("\n")


def _page(records: Records, summary: Summary, context: ReportContext) -> Iterator[str]:
    drawn = figures(records, summary)
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{NO_NETWORK}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(context.title)} – windtunnel</title>"
    yield f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>"
    yield '<a class="skip" href="#load">Skip to the figures</a>'
    yield from _header(context)
    yield "<main>"
    yield from _answer(records, summary, context)
    yield from _navigation(summary)
    yield from _load(drawn)
    yield from _latency(drawn, summary)
    yield from _preemptions(records, summary, context, drawn)
    yield from _worst(records, context)
    yield from _how(context)
    yield from _numbers(summary, context)
    yield from _glossary()
    yield "</main>"
    yield from _footer(context)
    yield f'<script type="application/json" id="figures">{_json([figure.for_page() for figure in drawn])}</script>'
    yield f"<script>{_script(_plotly())}</script>"
    yield f"<script>\n{_script(_asset('page.js'))}</script>\n</body>\n</html>"


# --- first screen


def _header(context: ReportContext) -> Iterator[str]:
    yield f"<header>\n<h1>{escape(context.title)}</h1>"
    where = " on ".join(part for part in (context.model, context.gpu) if part)
    facts = [where, context.engine, f"cost model {context.cost_model}" if context.cost_model else ""]
    badge = _badge("good" if context.calibrated else "note", context.calibration)
    yield f'<p class="what">{" · ".join(escape(fact) for fact in facts if fact)} {badge}</p>\n</header>'


def _answer(records: Records, summary: Summary, context: ReportContext) -> Iterator[str]:
    said = answer(records, summary)
    yield f'<div class="answer tone-{said.tone}">'
    yield f'<p class="headline" role="heading" aria-level="2">{escape(said.headline)}</p>'
    yield "".join(f"<p>{escape(sentence)}</p>" for sentence in said.sentences)
    yield "</div>"
    yield from _warnings((*context.warnings, *summary.warnings), context)
    yield f'<ul class="cards">{"".join(_cards(summary))}</ul>'
    yield from _objectives(summary)


def _warnings(warnings: Sequence[str], context: ReportContext) -> Iterator[str]:
    shown = list(warnings)
    if not context.calibrated:
        shown.append(
            "Uncalibrated: step times come from a formula with assumed efficiencies, not from measurements on this "
            "hardware. Comparisons of settings are worth more than absolute times."
        )
    if shown:
        yield f'<div class="warnings" role="note">{"".join(f"<p>{escape(text)}</p>" for text in shown)}</div>'


def _cards(summary: Summary) -> Iterator[str]:
    kv, preemption, load = summary.kv, summary.preemption, summary.load
    yield _card("TTFT, median", milliseconds(summary.ttft.median_ms), _high(summary.ttft))
    yield _card("ITL, median", milliseconds(summary.itl.median_ms), _high(summary.itl))
    yield _card("E2EL, median", milliseconds(summary.e2el.median_ms), _high(summary.e2el))
    yield _card(
        "Output", f"{count(summary.output_throughput)} tok/s", f"{count(summary.request_throughput)} requests/s"
    )
    yield _card("Requests", f"{summary.completed:,}", f"finished, {summary.failed:,} failed")
    yield _card("In flight, mean", count(load.in_flight_mean), f"peak {summary.peak_concurrent_requests:,}")
    yield _card("KV usage, peak", percent(kv.usage_peak), f"mean {percent(kv.usage_mean)}")
    lost = (
        f"{preemption.recomputed_prefill_tokens:,} tokens recomputed"
        if preemption.num_preemptions
        else "nothing recomputed"
    )
    yield _card("Preemptions", f"{preemption.num_preemptions:,}", lost)
    rho = "rho unknown" if load.utilisation is None else f"rho {load.utilisation:.2f}"
    yield _card("Verdict", summary.stability.verdict.replace("_", " "), rho)
    if summary.slo:
        kept = sum(result.passed for result in summary.slo)
        yield _card("Objectives", "kept" if summary.slo_passed else "missed", f"{kept} of {len(summary.slo)} kept")
    if summary.goodput is not None:
        yield _card(
            "Goodput", f"{count(summary.goodput.request_goodput)}/s", f"{percent(summary.goodput.good_share)} good"
        )


def _card(name: str, value: str, more: str) -> str:
    return (
        f'<li><span class="name">{escape(name)}</span><span class="value">{escape(value)}</span>'
        f'<span class="more">{escape(more)}</span></li>'
    )


def _high(stats: LatencyStats) -> str:
    if not stats.percentiles_ms:
        return f"max {milliseconds(stats.max_ms)}"
    level, value = stats.percentiles_ms[-1]
    return f"P{percent_word(level)} {milliseconds(value)}"


def _objectives(summary: Summary) -> Iterator[str]:
    if not summary.slo:
        return
    rows = [
        (
            _code(result.slo.text),
            _cell(measured(result), "number"),
            _cell_html(_badge("good", "✓ kept") if result.passed else _badge("bad", "✗ missed")),
        )
        for result in summary.slo
    ]
    yield from _table(("Objective", "Measured", "Result"), rows, "stack snug")


def _navigation(summary: Summary) -> Iterator[str]:
    shown = [item for item in SECTIONS if item[0] != "preemptions" or summary.preemption.num_preemptions]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in shown)
    yield f'<nav aria-label="Sections"><ul>{links}</ul></nav>'


# --- figures


def _load(drawn: list[Figure]) -> Iterator[str]:
    yield _section("load", "KV cache, queue and steps")
    yield '<p class="lead">With a mouse, drag across a figure to zoom in; a double click shows all of it again.</p>'
    yield from (_figure(figure) for figure in drawn if figure.name in ("kv", "queue", "tokens"))
    yield "</section>"


def _latency(drawn: list[Figure], summary: Summary) -> Iterator[str]:
    yield _section("latency", "Latencies")
    if not summary.stability.is_steady:
        yield (
            f'<p class="lead">{_badge("bad", "not a steady state")} '
            "These distributions depend on how long the run was.</p>"
        )
    yield from (_figure(figure) for figure in drawn if figure.name == "over-time")
    yield f'<div class="pair">{"".join(_figure(figure) for figure in drawn if figure.half)}</div>\n</section>'


def _figure(figure: Figure) -> str:
    kind = "plot half" if figure.half else "plot tall" if figure.tall else "plot"
    return (
        f"<figure><figcaption><strong>{escape(figure.title)}</strong>{escape(figure.caption)}</figcaption>"
        f'<div class="{kind}" id="plot-{figure.name}" role="img" tabindex="0" aria-label="{escape(figure.title)}. '
        f'{escape(figure.caption)}"><noscript>This figure needs JavaScript.</noscript></div></figure>'
    )


# --- tables


def _preemptions(records: Records, summary: Summary, context: ReportContext, drawn: list[Figure]) -> Iterator[str]:
    if not summary.preemption.num_preemptions:
        return
    yield _section("preemptions", "Preemptions")
    yield from (_figure(figure) for figure in drawn if figure.name == "preemptions")
    rows = _evictions(records, context)
    total = summary.preemption.num_preemptions
    which = "All of them" if total <= NUM_EVICTIONS else f"The {NUM_EVICTIONS} of {total:,} that threw away the most"
    yield f'<h3>Who lost blocks for whom</h3><p class="lead">{which}, in order of time.</p>'
    heads = ("Time", "Preempted", "For", "Tokens lost", "Blocks given back", "Free afterwards")
    yield from _folded_table(heads, rows, "stack snug")
    yield "</section>"


def _evictions(records: Records, context: ReportContext) -> list[tuple[str, ...]]:
    axis = time_axis(records)
    found: list[tuple[int, int, tuple[str, ...]]] = []
    for replica in records.replicas:
        table = replica.preemptions
        for k in np.argsort(-table.num_computed_tokens, kind="stable")[:NUM_EVICTIONS].tolist():
            victim, needy = int(table.request[k]), int(table.for_request[k])
            lost = int(table.num_computed_tokens[k])
            cells = (
                _cell(axis.say(int(table.time_ns[k])), "number"),
                _cell(context.label(victim)),
                _cell("itself" if needy == victim else context.label(needy)),
                _cell(f"{lost:,}", "number"),
                _cell(f"{int(table.num_blocks[k]):,}", "number"),
                _cell(f"{int(table.num_free_blocks[k]):,}", "number"),
            )
            found.append((lost, int(table.time_ns[k]), cells))
    most = sorted(found, key=lambda item: -item[0])[:NUM_EVICTIONS]
    return [cells for _, _, cells in sorted(most, key=lambda item: item[1])]


def _worst(records: Records, context: ReportContext) -> Iterator[str]:
    yield _section("worst", "Worst requests, and why")
    causes = Causes(records)
    tables = (
        ("e2el", "Longest from sending to the last token", "Where its time went", causes.why),
        ("ttft", "Longest until the first token", "Where the time until its first token went", causes.why_first_token),
    )
    for name, title, why, explain in tables:
        worst = worst_requests(records, name, NUM_WORST).tolist()
        rows = [_request(records, row, explain(row), context) for row in worst]
        heads = ("Request", "Sent", "Prompt", "Output", "TTFT", "E2EL", why)
        yield f"<h3>{title}</h3>"
        yield from _folded_table(heads, rows)
    yield "</section>"


def _request(records: Records, row: int, why: str, context: ReportContext) -> tuple[str, ...]:
    table = records.requests
    sent = int(table.arrival_ns[row])

    def since(end_ns: int) -> str:
        return NOTHING if end_ns < 0 else nanoseconds(end_ns - sent)

    return (
        _cell(context.label(row)),
        _cell(time_axis(records).say(sent), "number"),
        _cell(f"{int(table.num_prompt_tokens[row]):,}", "number"),
        _cell(f"{int(table.num_output_tokens[row]):,}", "number"),
        _cell(since(int(table.first_token_ns[row])), "number"),
        _cell(since(int(table.finish_ns[row])), "number"),
        _cell(why, "words"),
    )


def _how(context: ReportContext) -> Iterator[str]:
    yield _section("how", "How it was run")
    seed = "" if context.seed is None else str(context.seed)
    facts = [("Seed", seed), ("windtunnel", context.version), ("Engine", context.engine)]
    facts += [("Model", context.model), ("GPU", context.gpu)]
    facts += [("Cost model", f"{context.cost_model} ({context.calibration})" if context.cost_model else "")]
    facts += facts_of(context.workload)
    yield from _table(("What", "Value"), [(_cell(name), _cell(value)) for name, value in facts if value])
    if context.notes:
        yield f"<h3>Notes</h3><ul>{''.join(f'<li>{escape(note)}</li>' for note in context.notes)}</ul>"
    if context.resolved:
        yield f"<details><summary>{plural(len(context.resolved), 'setting')}, each with its source</summary>"
        rows = [
            (_code(item.section), _code(item.key), _code(plain(item.value)), _cell(item.source))
            for item in context.resolved
        ]
        yield from _table(("Section", "Setting", "Value", "Source"), rows)
        yield "</details>"
    if context.cost:
        yield "<details><summary>What the cost model says of itself</summary>"
        yield from _table(("What", "Value"), [(_code(name), _cell(value)) for name, value in rows_of(context.cost)])
        yield "</details>"
    yield "</section>"


def _numbers(summary: Summary, context: ReportContext) -> Iterator[str]:
    yield _section("numbers", "All numbers")
    yield '<p class="lead">The rows of vllm bench serve, with the same names and definitions, and then our own.</p>'
    yield f"<details><summary>Show the table</summary><pre>{escape(render_text(summary, context))}</pre></details>"
    yield "</section>"


def _glossary() -> Iterator[str]:
    yield _section("glossary", "Glossary")
    entries = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in GLOSSARY)
    yield f"<dl>{entries}</dl>\n</section>"


def _footer(context: ReportContext) -> Iterator[str]:
    made = f"windtunnel {context.version}" if context.version else "windtunnel"
    yield (
        f"<footer><p>Simulated with {escape(made)}; nothing here was measured on a GPU. "
        "Figures by plotly.js (MIT licence), included in this file.</p></footer>"
    )


# --- pieces


def _badge(tone: str, text: str) -> str:
    return f'<span class="badge {tone}">{escape(text)}</span>'


def _section(name: str, title: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{escape(title)}</h2>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "stack") -> Iterator[str]:
    """A table that becomes a list of cards on a narrow page; each cell is told its column's name for that."""
    made = [list(row) for row in rows]
    numeric = [all("number" in row[k].split(">", 1)[0] for row in made) for k in range(len(heads))] if made else []
    yield f'<table class="{kind}"><thead><tr>'
    for k, head in enumerate(heads):
        align = ' class="number"' if made and numeric[k] else ""
        yield f'<th scope="col"{align}>{escape(head)}</th>'
    yield "</tr></thead><tbody>"
    for row in made:
        cells = (
            cell.replace("<td", f'<td data-name="{escape(head)}"', 1) for head, cell in zip(heads, row, strict=True)
        )
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table>"


def _folded_table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "stack") -> Iterator[str]:
    yield from _table(heads, rows[:NUM_SHOWN], kind)
    if rows[NUM_SHOWN:]:
        yield f"<details><summary>{plural(len(rows) - NUM_SHOWN, 'more row')}</summary>"
        yield from _table(heads, rows[NUM_SHOWN:], kind)
        yield "</details>"


def _cell(text: str, kind: str = "") -> str:
    return _cell_html(escape(text), kind)


def _cell_html(html: str, kind: str = "") -> str:
    return f'<td class="{kind}"><span>{html}</span></td>' if kind else f"<td><span>{html}</span></td>"


def _code(text: str) -> str:
    return _cell(text, "code")


def _json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _script(code: str) -> str:
    """JavaScript that cannot end the script element it stands in."""
    return code.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """The source of plotly.js that comes with the plotly package, read without importing that."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("reports need plotly: pip install 'plotly>=6'")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")

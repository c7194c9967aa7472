"""The parts that HTML reports are made of: one file that works offline, with plotly.js and the figures' data in it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from windtunnel.reports.context import ReportContext
from windtunnel.reports.figures import Figure
from windtunnel.reports.files import atomic_writer
from windtunnel.reports.glossary import GLOSSARY
from windtunnel.reports.values import facts_of, plain, rows_of
from windtunnel.reports.words import plural
from windtunnel.sim.cost.evidence import in_words

NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the page cannot load anything, wherever it is opened."""

# --- the page


def write_page(
    path: str | Path,
    title: str,
    body: Iterable[str],
    *,
    skip_to: str,
    head: Iterable[str],
    foot: str,
    drawn: Sequence[Figure] = (),
    styles: Sequence[str] = ("page.css",),
) -> None:
    """Write a page: one file that needs no network; plotly.js is most of it, where there are figures.

    ``title`` is that of the window, ``skip_to`` the section that a keyboard user may jump to, ``head`` what stands
    above the main part, ``foot`` a sentence on where the page comes from, and ``drawn`` are the figures whose places
    ``body`` has.  The same parts give the same bytes.  Raises OSError if it cannot be written; then none is left
    behind.
    """
    parts = chain(
        _page_head(title, skip_to, styles),
        head,
        ("<main>",),
        body,
        ("</main>",),
        _footer(foot, drawn),
        _page_end(drawn),
    )
    with atomic_writer(path) as file:
        for part in parts:
            file.write(part)
            file.write("\n")


def _page_head(title: str, skip_to: str, styles: Sequence[str]) -> Iterator[str]:
    """Everything up to the body's first element."""
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{NO_NETWORK}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)} – windtunnel</title>"
    yield f"<style>\n{''.join(map(_asset, styles))}</style>\n</head>\n<body>"
    yield f'<a class="skip" href="#{skip_to}">Skip to the figures</a>'


def _footer(foot: str, drawn: Sequence[Figure]) -> Iterator[str]:
    figures = " Figures by plotly.js (MIT licence), included in this file." if drawn else ""
    yield f"<footer><p>{escape(foot)}{figures}</p></footer>"


def _page_end(drawn: Sequence[Figure]) -> Iterator[str]:
    """The data of the figures, plotly.js and what draws them."""
    if drawn:
        yield f'<script type="application/json" id="figures">{_json([figure.for_page() for figure in drawn])}</script>'
        yield f"<script>{_script(_plotly())}</script>"
        yield f"<script>\n{_script(_asset('plot.js') + _asset('page.js'))}</script>"
    yield "</body>\n</html>"


def masthead(title: str, what: str) -> Iterator[str]:
    """The page's title, and below it a line of markup on what it is about."""
    yield f'<header>\n<h1>{escape(title)}</h1>\n<p class="what">{what}</p>\n</header>'


def header(context: ReportContext) -> Iterator[str]:
    """What was simulated, and what stands behind its step times."""
    where = " on ".join(part for part in (context.model, context.gpu) if part)
    facts = [where, context.engine, f"cost model {context.cost_model}" if context.cost_model else ""]
    shown = " · ".join(escape(fact) for fact in facts if fact)
    yield from masthead(context.title, f"{shown} {evidence_badge(context.evidence)}")


def answer_box(headline: str, sentences: Iterable[str], tone: str) -> Iterator[str]:
    """The answer, which is what a reader sees first."""
    yield f'<div class="answer tone-{tone}">'
    yield f'<p class="headline" role="heading" aria-level="2">{escape(headline)}</p>'
    yield "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    yield "</div>"


def warning_box(warnings: Sequence[str], *, calibrated: bool) -> Iterator[str]:
    """What a reader must know before believing a number; an uncalibrated cost model is always among it."""
    shown = list(warnings)
    if not calibrated:
        shown.append(
            "Uncalibrated: step times come from a formula with assumed efficiencies, not from measurements on this "
            "hardware. Comparisons of settings are worth more than absolute times."
        )
    if shown:
        yield f'<div class="warnings" role="note">{"".join(f"<p>{escape(text)}</p>" for text in shown)}</div>'


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """A few values side by side: what each is, the value, and more of it.  Long names may break at underscores."""
    made = (
        f'<li><span class="name">{escape(name)}</span><span class="value">{escape(value).replace("_", "_<wbr>")}</span>'
        f'<span class="more">{escape(more)}</span></li>'
        for name, value, more in items
    )
    return f'<ul class="cards">{"".join(made)}</ul>'


def calibration_box(context: ReportContext) -> Iterator[str]:
    """Where step times of profiles come from and how far off they are."""
    yield from stated_box(context.calibrated_by, context.evidence)


def stated_box(sentences: Iterable[str], evidence: str) -> Iterator[str]:
    """What step times rest on, with an edge in the colour of their evidence; nothing for no sentences."""
    said = "".join(f"<p>{escape(text)}</p>" for text in sentences)
    if said:
        yield f'<div class="stated {evidence}" role="note">{said}</div>'


def navigation(sections: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Links to sections, given as name and title."""
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in sections)
    yield f'<nav aria-label="Sections"><ul>{links}</ul></nav>'


def how_it_was_run(context: ReportContext) -> Iterator[str]:
    """Origin, workload, settings with their sources, and the cost model's own words."""
    seed = "" if context.seed is None else str(context.seed)
    facts = [("Seed", seed), ("windtunnel", context.version), ("Engine", context.engine)]
    facts += [("Model", context.model), ("GPU", context.gpu)]
    facts += [("Cost model", f"{context.cost_model} ({context.calibration})" if context.cost_model else "")]
    facts += facts_of(context.workload)
    yield from table(("What", "Value"), [(cell(name), cell(value)) for name, value in facts if value])
    if context.notes:
        yield f"<h3>Notes</h3><ul>{''.join(f'<li>{escape(note)}</li>' for note in context.notes)}</ul>"
    if context.resolved:
        yield f"<details><summary>{plural(len(context.resolved), 'setting')}, each with its source</summary>"
        rows = [
            (code(item.section), code(item.key), code(plain(item.value)), cell(item.source))
            for item in context.resolved
        ]
        yield from table(("Section", "Setting", "Value", "Source"), rows)
        yield "</details>"
    if context.cost:
        yield "<details><summary>What the cost model says of itself</summary>"
        yield from table(("What", "Value"), [(code(name), cell(value)) for name, value in rows_of(context.cost)])
        yield "</details>"


def glossary() -> Iterator[str]:
    """The words of the field."""
    yield section("glossary", "Glossary")
    entries = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in GLOSSARY)
    yield f"<dl>{entries}</dl>\n</section>"


def simulated_with(version: str) -> str:
    """Where a page comes from whose numbers are simulated."""
    return f"Simulated with {made_by(version)}; nothing here was measured on a GPU."


def made_by(version: str) -> str:
    """This program, with its version if that is known."""
    return f"windtunnel {version}" if version else "windtunnel"


# --- pieces


def figure(drawn: Figure) -> str:
    """The place of a figure, with its title and caption."""
    kind = "plot half" if drawn.half else "plot tall" if drawn.tall else "plot"
    return (
        f"<figure><figcaption><strong>{escape(drawn.title)}</strong>{escape(drawn.caption)}</figcaption>"
        f'<div class="{kind}" id="plot-{drawn.name}" role="img" tabindex="0" aria-label="{escape(drawn.title)}. '
        f'{escape(drawn.caption)}"><noscript>This figure needs JavaScript.</noscript></div></figure>'
    )


def lead(text: str) -> str:
    """A paragraph that says what follows."""
    return f'<p class="lead">{escape(text)}</p>'


def badge(tone: str, text: str) -> str:
    """A word on coloured ground: good, note or bad; see ``evidence_badge`` for that of step times."""
    return f'<span class="badge {tone}">{escape(text)}</span>'


def evidence_badge(evidence: str) -> str:
    """What stands behind step times: the word, its own colour, and a disc that is full, half full or empty."""
    return badge(evidence, in_words(evidence))


def section(name: str, title: str) -> str:
    """The start of a section that links can lead to."""
    return f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{escape(title)}</h2>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "stack") -> Iterator[str]:
    """A table that becomes a list of cards on a narrow page; each cell is told its column's name for that."""
    made = [list(row) for row in rows]
    yield from table_head(heads, [all(map(is_number, column)) for column in zip(*made, strict=True)], kind)
    yield from (table_row(heads, row) for row in made)
    yield "</tbody></table>"


def table_head(heads: Sequence[str], numeric: Sequence[bool], kind: str = "stack") -> Iterator[str]:
    """The start of a table, up to its first row; headings of numeric columns stand above the numbers."""
    yield f'<table class="{kind}"><thead><tr>'
    for k, head in enumerate(heads):
        align = ' class="number"' if numeric and numeric[k] else ""
        yield f'<th scope="col"{align}>{escape(head)}</th>'
    yield "</tr></thead><tbody>"


def table_row(heads: Sequence[str], row: Sequence[str]) -> str:
    """A row of cells, each with the name of its column."""
    cells = (one.replace("<td", f'<td data-name="{escape(head)}"', 1) for head, one in zip(heads, row, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def is_number(made: str) -> bool:
    """Whether a cell is one of numbers."""
    return "number" in made.split(">", 1)[0]


def folded_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "stack", *, num_shown: int
) -> Iterator[str]:
    """A table of which only the first rows are always shown; the others are behind a fold."""
    yield from table(heads, rows[:num_shown], kind)
    if rows[num_shown:]:
        yield f"<details><summary>{plural(len(rows) - num_shown, 'more row')}</summary>"
        yield from table(heads, rows[num_shown:], kind)
        yield "</details>"


def cell(text: str, kind: str = "") -> str:
    """A cell of a table; ``number`` is aligned to the right, ``words`` may be long, ``code`` is set as such."""
    return cell_html(escape(text), kind)


def cell_html(html: str, kind: str = "") -> str:
    """A cell that holds markup."""
    return f'<td class="{kind}"><span>{html}</span></td>' if kind else f"<td><span>{html}</span></td>"


def code(text: str) -> str:
    """A cell with a name from a program."""
    return cell(text, "code")


def _json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _script(source: str) -> str:
    """JavaScript that cannot end the script element it stands in."""
    return source.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """The source of plotly.js that comes with the plotly package, read without importing that."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("reports need plotly: pip install 'plotly>=6'")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")

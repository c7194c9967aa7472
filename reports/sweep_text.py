"""A sweep as text and as Markdown: the answer, and one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from windtunnel.reports.sweep_answer import MOST_REASONS, answer
from windtunnel.reports.sweep_data import Swept
from windtunnel.reports.sweep_table import Row, heads, rows
from windtunnel.reports.text import header
from windtunnel.reports.words import NOTHING, plural

PROSE_WIDTH = 100
WIDTH = 160
"""Of a table; changes are left out where it would be wider."""
MOST_ROWS = 200
"""Of a table on the terminal; the files have all."""


def render_text(swept: Swept) -> str:
    """The whole text, ending in a newline: what was varied, the answer, and the table."""
    said = answer(swept)
    lines = [*header(swept.context), ""]
    for text in what_was_varied(swept):
        lines += wrap(text, PROSE_WIDTH, subsequent_indent="  ")
    lines.append("")
    for sentence in (said.headline, *said.sentences):
        lines += wrap(sentence, PROSE_WIDTH, subsequent_indent="  ")
    table, has_changes = _table(swept)
    lines += ["", *table, ""]
    for text in legend(swept, with_changes=has_changes):
        lines += wrap(text, PROSE_WIDTH, subsequent_indent="  ")
    for text in reasons(swept):
        lines += wrap(text, PROSE_WIDTH, subsequent_indent="  ")
    for warning in swept.context.warnings:
        lines += wrap(f"WARNING: {warning}", PROSE_WIDTH, subsequent_indent="         ")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def what_was_varied(swept: Swept) -> Iterator[str]:
    """One sentence an axis, and how often each point was run."""
    for axis in swept.axes:
        yield f"Varied: {axis.key}, {axis.span}."
    seeds = f"seed {swept.seeds[0]}" if len(swept.seeds) == 1 else f"seeds {swept.seeds[0]} to {swept.seeds[-1]}"
    same = ", the same at each" if len(swept.seeds) > 1 else ""
    yield f"{plural(len(swept.points), 'point')}, {plural(len(swept.seeds), 'run')} each ({seeds}{same})."


def legend(swept: Swept, *, with_changes: bool = True) -> Iterator[str]:
    """What the numbers of the table are."""
    if len(swept.seeds) > 1:
        yield f"Numbers are means of {len(swept.seeds)} replications; ± is half of the 95 % interval (Student's t)."
    if swept.baseline is None or len(swept.points) == 1:
        return
    if not with_changes:
        left_out = "are left out for want of room; --html, --markdown and --json have them"
        yield f"Changes from {swept.baseline.name} {left_out}."
    else:
        same = "no change beyond noise" if len(swept.seeds) > 1 else "a change of less than 0.05 %"
        yield f"Changes are against {swept.baseline.name}, run against run of the same seed; ≈ is {same}."


def reasons(swept: Swept) -> Iterator[str]:
    """Why points cannot run, with the points."""
    found = list(swept.reasons())
    for reason, points in found[:MOST_REASONS]:
        names = ", ".join(str(point.number) for point in points)
        yield f"Point {names} cannot run: {reason}"
    if found[MOST_REASONS:]:
        yield f"{plural(len(found) - MOST_REASONS, 'more reason')} in the files."


def _table(swept: Swept) -> tuple[list[str], bool]:
    """The lines, and whether there was room for changes."""
    found = rows(swept)
    lines = _laid_out(swept, found[:MOST_ROWS], with_changes=True)
    has_room = max(map(len, lines)) <= WIDTH
    if not has_room:
        lines = _laid_out(swept, found[:MOST_ROWS], with_changes=False)
    if found[MOST_ROWS:]:
        lines.append(f"... and {plural(len(found) - MOST_ROWS, 'more point')} in --csv, --json and -o")
    return lines, has_room


def _laid_out(swept: Swept, found: Sequence[Row], *, with_changes: bool) -> list[str]:
    head = ["#", *(axis.key for axis in swept.axes), *heads(swept), *(["SLO kept"] if swept.objectives else [])]
    head += ["verdict", ""]
    cells = [
        [
            str(row.point.number),
            *row.settings,
            *(
                f"{value}  {change}" if change and with_changes else value
                for value, change in zip(row.numbers, row.changes, strict=True)
            ),
            *([row.held] if swept.objectives else []),
            row.verdict,
            f"← {', '.join(row.marks)}" if row.marks else "",
        ]
        for row in found
    ]
    top = _heading(head)
    widths = [max(len(line[k]) for line in [*top, *cells]) for k in range(len(head))]
    num_left = len(head) - 2
    return [
        "  ".join(
            text.rjust(width) if k < num_left else text.ljust(width)
            for k, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [*top, ["-" * width for width in widths], *cells]
    ]


def _heading(head: Sequence[str]) -> list[list[str]]:
    """Names broken over lines, standing on the table."""
    broken = [wrap(name, 16, break_long_words=False) or [""] for name in head]
    height = max(map(len, broken))
    padded = [[""] * (height - len(part)) + part for part in broken]
    return [[part[line] for part in padded] for line in range(height)]


# --- Markdown


def render_markdown(swept: Swept) -> str:
    """The same as Markdown, ending in a newline: for issues and pull requests."""
    said, shared = answer(swept), swept.context
    what = " on ".join(part for part in (shared.model, shared.gpu) if part)
    facts = [what, shared.engine and f"{shared.engine} (simulated)"]
    facts.append(f"cost model {shared.cost_model}, {shared.calibration}" if shared.cost_model else "")
    parts = [
        [f"### {shared.title}: {', '.join(axis.key for axis in swept.axes)}"],
        [f"**{said.headline}**"],
        [f"- {sentence}" for sentence in said.sentences],
        list(markdown_table(swept)),
        [" ".join(legend(swept))],
        [f"- {text}" for text in reasons(swept)],
        [" ".join(what_was_varied(swept))],
        ["; ".join(fact for fact in facts if fact) + "."],
        list(shared.calibrated_by),
        [f"> **Warning:** {text}" for text in shared.warnings],
        [f"```\n{swept.command}\n```"] if swept.command else [],
        [f"windtunnel {shared.version}" if shared.version else ""],
    ]
    return "\n\n".join("\n".join(part) for part in parts if any(part)) + "\n"


def markdown_table(swept: Swept) -> Iterator[str]:
    """One row a point; changes behind the numbers."""
    head = ["#", *(f"`{axis.key}`" for axis in swept.axes), *heads(swept)]
    head += [*(["SLO kept"] if swept.objectives else []), "verdict", ""]
    yield _markdown_row(head)
    yield _markdown_row(["---:"] * (len(head) - 2) + ["---", "---"])
    for row in rows(swept):
        numbers = (
            f"{value} ({change})" if change and value != NOTHING else value
            for value, change in zip(row.numbers, row.changes, strict=True)
        )
        held = [row.held] if swept.objectives else []
        marks = f"**{', '.join(row.marks)}**" if row.marks else ""
        yield _markdown_row([str(row.point.number), *row.settings, *numbers, *held, row.verdict, marks])


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"

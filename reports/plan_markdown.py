"""A plan as Markdown, for a pull request or an issue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from windtunnel.reports import plan_words as words
from windtunnel.reports.plan_words import Told

MOST_CANDIDATES = 20


def plan_markdown(told: Told) -> str:
    """The whole document."""
    return "\n\n".join(part for part in _parts(told) if part) + "\n"


def _parts(told: Told) -> Iterator[str]:
    yield f"## Plan for {words.title(told)}"
    yield f"**{words.headline(told)}**"
    yield "\n".join(f"- {text}" for text in words.first_sentences(told))
    yield "\n".join(f"> **Warning:** {text}" for text in told["warnings"])
    if told["recommended"] is not None:
        yield "\n".join(_statement(told))
        yield f"```sh\n{told['serve_command']}\n```"
        yield _table(words.RUNNER_UP_HEADS, words.runner_up_rows(told))
        yield "### Cost"
        yield _table(words.cost_heads(told), words.cost_rows(told))
        yield "### Room"
        yield _table(("What", "How much", "Remark"), words.room_rows(told))
        yield "### What if"
        yield _table(("Case", "Consequence"), words.risk_rows(told))
        yield "### Peak and mean"
        yield _table(("What", "Value"), words.peak_rows(told))
        if told["growth"]:
            yield "### Growth"
            yield words.growth_sentence(told)
            heads = ("Month", "Load", "Replicas", "GPUs", "An hour", "Cheaper then")
            yield _table(heads, words.growth_rows(told))
    rows = [words.candidate_cells(told, row) for row in told["candidates"]][:MOST_CANDIDATES]
    if rows:
        yield _folded(f"{len(told['candidates'])} candidates", _table(words.candidate_heads(told), rows))
    pruned = words.pruned_rows(told)
    if pruned:
        yield _folded(f"{len(pruned)} that are not the answer", _table(("Deployment", "Kind", "Why"), pruned))
    yield "### How it was found"
    yield _table(("What", "Value"), words.asked_rows(told))
    yield "\n".join(f"- {text}" for text in (*words.how_sentences(told), *told["notes"]))
    if told["reproduce"]:
        yield f"```sh\n{told['reproduce']}\n```"
    yield f"windtunnel {told['windtunnel_version']}"


def _statement(told: Told) -> Sequence[str]:
    best = told["recommended"]
    return [] if best is None else best["statement"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _folded(summary: str, body: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"

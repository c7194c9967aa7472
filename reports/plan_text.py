"""A plan as text: the answer first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import shorten, wrap

from windtunnel.reports import plan_words as words
from windtunnel.reports.plan_words import Told

WIDTH = 100
MOST_CANDIDATES = 12
MOST_REASON = 180
"""Characters of a reason; the other outputs have it in full."""
_WIDEST = 60


def plan_text(told: Told) -> str:
    """The whole text; the same plan gives the same text."""
    parts = [f"Plan for {words.title(told)}"]
    parts.append(
        "\n".join(line for text in (words.headline(told), *words.first_sentences(told)) for line in _wrapped(text))
    )
    parts += ["\n".join(_wrapped(f"WARNING: {text}", "         ")) for text in told["warnings"]]
    best = told["recommended"]
    if best is not None:
        parts.append("\n".join(line for text in best["statement"] for line in _wrapped(text)))
        parts += list(_of_the_best(told))
    parts.append(_candidates(told))
    parts.append(_pruned(told))
    parts.append(_titled("What was asked", words.asked_rows(told)))
    parts.append("\n".join(line for text in (*words.how_sentences(told), *_notes(told)) for line in _wrapped(text)))
    if told["reproduce"]:
        parts.append(f"Again: {told['reproduce']}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_the_best(told: Told) -> Iterator[str]:
    yield _titled("vllm serve, each replica", [(told["serve_command"],)], wide=True)
    if told["runners_up"]:
        yield _titled("Fleets that hold", words.runner_up_rows(told))
    yield _titled("Cost", [("", *words.cost_heads(told)[1:]), *words.cost_rows(told)])
    yield _titled("Room", words.room_rows(told))
    yield _titled("What if", words.risk_rows(told))
    yield _titled("Peak and mean", words.peak_rows(told))
    if told["growth"]:
        heads = [["month", "load", "replicas", "GPUs", "cost an hour", "cheaper then"]]
        yield "\n".join(_wrapped(words.growth_sentence(told))) + "\n" + _titled("", heads + words.growth_rows(told))
    yield "\n".join(line for text in words.apart_sentence(told) for line in _wrapped(text))


def _candidates(told: Told) -> str:
    rows = [words.candidate_cells(told, row) for row in told["candidates"]]
    if not rows:
        return ""
    heads = words.candidate_heads(told)
    shown = _titled("Candidates (replicas it takes: mean and 95 % interval)", [heads, *rows[:MOST_CANDIDATES]])
    rest = len(rows) - MOST_CANDIDATES
    return f"{shown}\n  … {rest} more: --csv or --json has all" if rest > 0 else shown


def _pruned(told: Told) -> str:
    rows = words.pruned_rows(told)
    if not rows:
        return ""
    lines = ["Not the answer"]
    for what, kind, reason in rows:
        short = shorten(reason, MOST_REASON, placeholder=" …")
        lines += wrap(f"{what}: {kind}. {short}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    for what, reason in words.effectless_rows(told):
        lines += wrap(f"{what}: changes nothing, {reason}.", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _notes(told: Told) -> list[str]:
    return [f"note: {text}" for text in told["notes"]]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _titled(heading: str, rows: Sequence[Sequence[str]], *, wide: bool = False) -> str:
    """A heading over rows with aligned columns."""
    if not rows:
        return ""
    widths = [min(max(len(row[k]) for row in rows), _WIDEST) for k in range(len(rows[0]))]
    lines = [heading] if heading else []
    for row in rows:
        if wide:
            lines.append(f"  {row[0]}")
            continue
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        lines.append(f"  {cells}")
    return "\n".join(lines)

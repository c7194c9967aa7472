"""A memory plan, or a sweep of plans, as Markdown for issues and pull requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from windtunnel.reports.memory_first_screen import Card, Cost, headline, hourly, plan_cards, sweep_cards
from windtunnel.reports.memory_text import (
    MemoryRow,
    axis_cell,
    budget_rows,
    pool_rows,
    reasons_of,
    remedy_rows,
    short,
    sweep_cells,
)
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, UNSAFE


def render_plan_markdown(row: MemoryRow, *, version: str, cost: Cost | None = None, command: str = "") -> str:
    """The answer, cost and risk, then memory, pool and what would help; ends in a newline."""
    remedies = remedy_rows(row.judged.remedies)
    parts = [
        [f"### {row.title}"],
        [f"**{headline(row)}** {row.judged.reason}"],
        list(_cards(plan_cards(row, cost))),
        [f"> **Warning:** {text}" for text in row.warnings],
        list(_table(("memory of one GPU", "size", "remark"), budget_rows(row))),
        list(_table(("KV cache", "value", "remark"), pool_rows(row))),
        list(_table(("change that would help", "verdict", "KV cache", "cost"), remedies)) if remedies else [],
        _block(row.serve_command),
        [f"- {text}" for text in dict.fromkeys((*row.notes, *row.assumptions))],
        _reproduce(version, command),
    ]
    return _joined(parts)


def render_sweep_markdown(
    axes: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    warnings: Sequence[str],
    *,
    title: str,
    version: str,
    currency: str = "",
    command: str = "",
) -> str:
    """The answer, cost and risk, then a line for each plan; ends in a newline."""
    heads = ["row", *map(short, axes), "GPUs", "KV tokens", "90 % interval", "concurrency", "left", "verdict"]
    heads += ["cost per hour"] if currency else []
    rows = [
        [
            str(number),
            *(axis_cell(point, axis) for axis in axes),
            *sweep_cells(point),
            *([hourly(point, currency)] if currency else []),
        ]
        for number, point in enumerate(points, 1)
    ]
    reasons = [*reasons_of(points, DOES_NOT_START), *reasons_of(points, UNSAFE)]
    parts = [
        [f"### {title}"],
        list(_cards(sweep_cards(axes, points, currency))),
        [f"> **Warning:** {text}" for text in warnings],
        list(_table(heads, rows)),
        [f"- {text}" for text in dict.fromkeys((*reasons, *notes))],
        _reproduce(version, command),
    ]
    return _joined(parts)


def _cards(cards: Iterable[Card]) -> Iterator[str]:
    yield from _table(("", "value", ""), [(card.name, card.value, card.more) for card in cards])


def _reproduce(version: str, command: str) -> list[str]:
    return [f"Planned with windtunnel {version}{f': `{command}`' if command else '.'}"]


def _block(text: str) -> list[str]:
    return ["```", text, "```"] if text else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _joined(parts: Iterable[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

"""Who got what, tenant by tenant: rows for text, Markdown and HTML, sentences, and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from windtunnel.reports.figures import Figure, rounded, time_axis
from windtunnel.reports.words import count, milliseconds, percent
from windtunnel.sim.metrics import Summary
from windtunnel.sim.metrics.sample import LatencyStats
from windtunnel.sim.metrics.summary import percent_word
from windtunnel.sim.metrics.tenants import TenantsSummary, served_until
from windtunnel.sim.records import IntArray, Records

NUM_INTERVALS = 120
MAX_LINES = 6
"""Tenants that get a line of their own in the figure; the others are one line together."""
_LOOKS = (
    ("@blue", "solid"),
    ("@vermillion", "dash"),
    ("@green", "dot"),
    ("@purple", "dashdot"),
    ("@orange", "longdash"),
    ("@sky", "longdashdot"),
)
FAIR = 0.95
"""Jain's index from which on the tenants are said to have got what was fair."""


def tenant_heads(summary: Summary) -> tuple[str, ...]:
    """Heads of the table; columns that no tenant has anything in are left out."""
    return tuple(head for head, _ in _columns(summary))


def tenant_rows(summary: Summary) -> list[tuple[str, ...]]:
    """One row a tenant."""
    of = summary.tenants
    assert of is not None
    columns = _columns(summary)
    return [tuple(cells[place] for _, cells in columns) for place in range(len(of.tenants))]


def _columns(summary: Summary) -> list[tuple[str, list[str]]]:
    of = summary.tenants
    assert of is not None
    high = f"P{percent_word(summary.percentiles[-1])}" if summary.percentiles else "max"
    columns = [
        ("Tenant", [tenant.name for tenant in of.tenants]),
        ("Weight", [count(tenant.weight) for tenant in of.tenants]),
        ("Finished", [f"{tenant.completed:,} of {tenant.num_requests:,}" for tenant in of.tenants]),
        ("Rejected", [f"{tenant.rejected:,}" if tenant.rejected else "" for tenant in of.tenants]),
        ("Tokens", [percent(tenant.token_share) for tenant in of.tenants]),
        ("Of its fair part", [_share(tenant.fair_share_ratio) for tenant in of.tenants]),
        ("Good", [_share(tenant.good_share) for tenant in of.tenants]),
        ("TTFT, mean", [milliseconds(tenant.ttft.mean_ms) for tenant in of.tenants]),
        (f"TTFT, {high}", [milliseconds(_highest(tenant.ttft)) for tenant in of.tenants]),
        ("TPOT, mean", [milliseconds(tenant.tpot.mean_ms) for tenant in of.tenants]),
        ("E2EL, mean", [milliseconds(tenant.e2el.mean_ms) for tenant in of.tenants]),
        ("Slowdown", [_times(tenant.slowdown) for tenant in of.tenants]),
        ("TTFT slowdown", [_times(tenant.ttft_slowdown) for tenant in of.tenants]),
    ]
    return [(head, cells) for head, cells in columns if any(cells)]


def tenant_sentences(of: TenantsSummary) -> Iterator[str]:
    """How fair it was, and what that means."""
    if of.jain_index is None:
        yield "Requests of two tenants never waited at the same time, so there was nothing to share out."
    else:
        verdict = "tenants got what was fair" if of.jain_index >= FAIR else "some got less than was fair"
        yield (
            f"Jain's index of fairness is {of.jain_index:.2f} (1 is fair, {1 / len(of.tenants):.2f} is one tenant "
            f"taking all) while tenants competed: {verdict}. A tenant's fair part is all that it asks for, or else its "
            "weight's part of what there was; 100 % is fair."
        )
    if any(tenant.slowdown is not None for tenant in of.tenants):
        yield (
            "Slowdown is the mean latency (E2EL) over what the tenant's own requests see when nobody else is there, "
            "TTFT slowdown the same for the time to the first token."
        )
    yield from _evicted(of)


def _evicted(of: TenantsSummary) -> Iterator[str]:
    for place, row in enumerate(of.evictions):
        by_others = {of.tenants[other].name: number for other, number in enumerate(row) if number and other != place}
        if by_others:
            whom = ", ".join(f"{number:,} for {name}" for name, number in by_others.items())
            yield f"Requests of {of.tenants[place].name} lost their KV blocks to others' requests: {whom}."


def tenants_figure(records: Records, tenants: Sequence[str], tenant: IntArray) -> Figure:
    """Tokens per second of each tenant over time."""
    axis = time_axis(records)
    edges = np.linspace(axis.start_ns, max(axis.end_ns, axis.start_ns + 1), NUM_INTERVALS + 1).astype(np.int64)
    of_row = tenant[records.requests.request]
    lasts_s = np.diff(edges) / 1e9
    middles = rounded(axis.at((edges[1:] + edges[:-1]) / 2), 6)
    data: list[dict[str, Any]] = []
    for name, places, (colour, dash) in _lines(tenants):
        tokens = np.diff(served_until(records, np.isin(of_row, places), edges))
        data.append(
            {
                "x": middles, "y": rounded(tokens / np.maximum(lasts_s, 1e-9)), "mode": "lines", "name": name,
                "line": {"color": colour, "width": 2, "dash": dash}, "hovertemplate": "%{y:,.4~r} tokens/s",
            }
        )  # fmt: skip
    caption = (
        f"Tokens served per second in {NUM_INTERVALS} equal intervals: a prompt counts when its first token comes, an "
        "answer token by token."
    )
    layout = {
        "xaxis": {"title": axis.title, "rangemode": "nonnegative"},
        "yaxis": {"title": "tokens/s", "rangemode": "tozero"},
        "hovermode": "x unified",
    }
    return Figure("tenants", "Tokens by tenant", caption, data, layout)


def _lines(tenants: Sequence[str]) -> Iterator[tuple[str, list[int], tuple[str, str]]]:
    num_own = len(tenants) if len(tenants) <= MAX_LINES else MAX_LINES - 1
    for place, name in enumerate(tenants[:num_own]):
        yield name, [place], _LOOKS[place]
    if num_own < len(tenants):
        yield f"{len(tenants) - num_own:,} others", list(range(num_own, len(tenants))), _LOOKS[num_own]


def text_table(summary: Summary) -> Iterator[str]:
    """The table in columns, each as wide as it needs to be."""
    table = [tenant_heads(summary), *tenant_rows(summary)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join((row[0].ljust(widths[0]), *cells[1:])).rstrip()


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}x"


def _highest(stats: LatencyStats) -> float | None:
    return stats.percentiles_ms[-1][1] if stats.percentiles_ms else stats.max_ms

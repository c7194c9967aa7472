"""Numbers as people read them; the same everywhere in a report."""

from __future__ import annotations

NOTHING = "–"


def milliseconds(value_ms: float | None) -> str:
    """A duration with the unit that suits it: 0.42 ms, 87 ms, 1.24 s, 3.5 min."""
    if value_ms is None:
        return NOTHING
    if value_ms < 1000:
        return f"{value_ms:.3g} ms" if value_ms < 100 else f"{value_ms:.0f} ms"
    if value_ms < 120_000:
        return f"{value_ms / 1000:.2f} s" if value_ms < 100_000 else f"{value_ms / 1000:.0f} s"
    if value_ms < 7_200_000:
        return f"{value_ms / 60_000:.1f} min"
    return f"{value_ms / 3_600_000:.1f} h"


def nanoseconds(value_ns: float) -> str:
    """As ``milliseconds``, from nanoseconds."""
    return milliseconds(value_ns / 1e6)


def percent(share: float | None) -> str:
    """A share (0 … 1) in percent, with one decimal below 10 %."""
    if share is None:
        return NOTHING
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def count(value: float | None) -> str:
    """A whole number with separators, or one with up to two decimals."""
    if value is None:
        return NOTHING
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.2f}"


def plural(number: int, word: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"

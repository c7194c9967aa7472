"""Numbers as people read them; the same in every sentence of the summary and of the reports."""

from __future__ import annotations

from math import floor, isfinite, log10

NOTHING = "–"


def milliseconds(value_ms: float | None) -> str:
    """A duration with the unit that suits it: 3.2 µs, 0.42 ms, 87 ms, 1.24 s, 3.5 min, 4.2 h."""
    if value_ms is None:
        return NOTHING
    size = abs(value_ms)
    if 0 < size < 0.01:
        return f"{digits(value_ms * 1000)} µs"
    if size < 999.5:
        return f"{digits(value_ms)} ms"
    if size < 119_500:
        return f"{value_ms / 1000:.2f} s" if size < 99_995 else f"{value_ms / 1000:.0f} s"
    if size < 7_200_000:
        return f"{value_ms / 60_000:.1f} min"
    return f"{value_ms / 3_600_000:,.1f} h"


def nanoseconds(value_ns: float) -> str:
    """As ``milliseconds``, from nanoseconds."""
    return milliseconds(value_ns / 1e6)


def seconds(value_s: float) -> str:
    """A duration for a sentence, with three digits: 87 ms, 1.24 s, 60 s, 14.6 min, 4.2 h."""
    if abs(value_s) < 1:
        return milliseconds(value_s * 1000)
    if abs(value_s) < 119.5:
        return f"{digits(value_s)} s"
    return f"{digits(value_s / 60)} min" if abs(value_s) < 7200 else f"{digits(value_s / 3600)} h"


def digits(value: float, num_digits: int = 3) -> str:
    """So many significant digits, never fewer than the whole part has, with separators and without an exponent."""
    if not isfinite(value):
        return "∞" if value > 0 else NOTHING
    if value == 0:
        return "0"
    places = max(num_digits - 1 - floor(log10(abs(value))), 0)
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float | None) -> str:
    """A share (0 … 1) in percent, with one decimal below 10 %, and one digit where that would be none."""
    if share is None:
        return NOTHING
    if abs(share) < 0.0005:
        return f"{digits(100 * share, 1)} %"
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def count(value: float | None) -> str:
    """A whole number with separators, or one with up to two decimals; small ones keep two digits."""
    if value is None:
        return NOTHING
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.1:
        return digits(value, 2)
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.2f}"


def plural(number: int, word: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def verb(number: int, one: str, many: str) -> str:
    """The form that agrees with the number: ``verb(1, "is", "are")``."""
    return one if number == 1 else many

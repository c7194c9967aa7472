"""Settings and facts as people read them: no raw JSON, no endless digits, units behind the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windtunnel.reports.words import NOTHING, count, digits, percent, seconds

SETTING_DIGITS = 10
"""Of a number that was given: all that anybody writes."""
FACT_DIGITS = 4
"""Of a number that was measured or computed."""


def plain(value: Any, num_digits: int = SETTING_DIGITS) -> str:
    """A value of a setting: ``yes``, ``8,192``, ``0.9``, ``ttft:500, tpot:50``, ``dist lognormal, mean 512``."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return digits(value, num_digits)
    if isinstance(value, Mapping):
        return ", ".join(f"{words(str(key))} {plain(inner, num_digits)}" for key, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(plain(inner, num_digits) for inner in value)
    return str(value)


def facts_of(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of what was computed, with the unit of the name behind the value; what is None is left out."""
    return [_fact(key, value) for key, value in described.items() if value is not None]


def rows_of(described: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The same of nested mappings, one row a value, named by its path."""
    for key, value in described.items():
        if isinstance(value, Mapping):
            yield from rows_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _fact(key, value)[1]


def words(name: str) -> str:
    """A name from a program as words."""
    return name.replace("_", " ")


def _fact(key: str, value: Any) -> tuple[str, str]:
    if isinstance(value, float | int) and not isinstance(value, bool):
        if key.endswith("_per_s"):
            return _name(key.removesuffix("_per_s")), f"{count(value)} /s"
        if key.endswith("_s"):
            return _name(key.removesuffix("_s")), seconds(value)
        if key.endswith("_share"):
            return _name(key), percent(value)
    return _name(key), plain(value, FACT_DIGITS)


def _name(key: str) -> str:
    """``Requests`` for ``num_requests``, ``Burstiness CV`` for ``burstiness_cv``."""
    name = words(key.removeprefix("num_")).replace(" cv", " CV")
    return f"{name[:1].upper()}{name[1:]}"

"""Reading other tools' results: values that may be missing, and errors that name their place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.calibrate.live.observed import NS_PER_S, UNKNOWN

_MOST_S = 9e9
"""Seconds that fit into 64 bits of nanoseconds."""


class UnreadableResult(ValueError):
    """A result that cannot be read; the message names the file, the place and the remedy."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: file, line, and the keys that lead to it."""

    path: str
    line: int | None = None
    keys: str = ""

    def at_line(self, line: int) -> Place:
        """A line of the file, from 1."""
        return Place(self.path, line, self.keys)

    def key(self, key: str | int) -> Place:
        """A key of an object, or a place in a list."""
        keys = f"{self.keys}[{key}]" if isinstance(key, int) else f"{self.keys}.{key}" if self.keys else key
        return Place(self.path, self.line, keys)

    def wrong(self, reason: str) -> UnreadableResult:
        """The error to raise."""
        line = "" if self.line is None else f":{self.line}"
        return UnreadableResult(f"{self.path}{line}: {self.keys + ': ' if self.keys else ''}{reason}")


def number_or_none(value: Any, place: Place, *, least: float = -math.inf) -> float | None:
    """A number; None for null and NaN.  Raises UnreadableResult for anything else, or a number below ``least``."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise place.wrong(f"{str(value)[:40]!r} is not a number")
    if value < least:
        raise place.wrong(f"{value} is below {least:g}")
    return float(value)


def count_or_unknown(value: Any, place: Place) -> int:
    """A whole number of at least 0; -1 for null.  Raises UnreadableResult for anything else."""
    number = number_or_none(value, place, least=0)
    if number is None:
        return UNKNOWN
    if not math.isfinite(number) or number != int(number) or number > 2**53:
        raise place.wrong(f"{value} is not a whole number")
    return int(number)


def ns_or_unknown(value: Any, place: Place, *, per_s: float = 1.0) -> int:
    """A time of at least 0 in units of which ``per_s`` make a second, in nanoseconds; -1 for null.

    Raises UnreadableResult for anything else.
    """
    number = number_or_none(value, place, least=0)
    if number is None:
        return UNKNOWN
    if not number / per_s < _MOST_S:
        raise place.wrong(f"{value} is too long a time: is the unit right?")
    return round(number / per_s * NS_PER_S)


def mapping(value: Any, place: Place) -> Mapping[str, Any]:
    """An object; empty for null.  Raises UnreadableResult for anything else."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise place.wrong(f"{str(value)[:40]!r} is not an object")
    return value


def sequence(value: Any, place: Place) -> Sequence[Any]:
    """A list; empty for null.  Raises UnreadableResult for anything else."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise place.wrong(f"{str(value)[:40]!r} is not a list")
    return value

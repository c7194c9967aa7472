"""Cells of a trace as numbers: token counts and times, with a reason for each that is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.scenarios.workloads.errors import BadRows, brief
from windtunnel.sim.workload import IntArray

TimeArray = npt.NDArray[np.int64] | npt.NDArray[np.float64]

MAX_TOKENS = 2**31 - 1
_MAX_TIME = 9.2e18

_WALL_CLOCK = re.compile(
    r"\s*(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})(?:[.,](\d{1,9}))?\s*(Z|UTC|[+-]\d{2}:?\d{2})?\s*"
)


def token_counts(name: str, cells: Sequence[Any], bad: BadRows, *, least: int = 1) -> IntArray:
    """Whole numbers from ``least`` to 2**31 - 1, one a cell; a cell that is none makes its row bad."""
    return integers(name, cells, bad, least=least, most=MAX_TOKENS)


def integers(name: str, cells: Sequence[Any], bad: BadRows, *, least: int, most: int) -> IntArray:
    """Whole numbers in [least, most], one a cell (text such as ``12.0`` too); any other cell makes its row bad."""
    values = _all_integers(cells)
    if values is None:
        values = _each_integer(name, cells, bad, least)
    for row in np.flatnonzero((values < least) | (values > most)).tolist():
        bound = f"at least {least:,}" if values[row] < least else f"at most {most:,}"
        bad.add(row, f"{name} is {values[row]:,}, must be {bound}")
    return values


def _all_integers(cells: Sequence[Any]) -> IntArray | None:
    kinds = set(map(type, cells))
    try:
        if kinds == {str}:
            return np.fromiter(map(int, cells), np.int64, len(cells))
        if kinds == {int}:
            return np.array(cells, np.int64)
    except (ValueError, OverflowError):
        return None
    return None


def _each_integer(name: str, cells: Sequence[Any], bad: BadRows, neutral: int) -> IntArray:
    values = np.full(len(cells), neutral, np.int64)
    for row, cell in enumerate(cells):
        number, problem = number_of(cell)
        if not problem and number != int(number):
            problem = f"is {brief(cell)}, not a whole number"
        if not problem and abs(number) >= 2**63:
            problem = f"is {brief(cell)}, far too large"
        if problem:
            bad.add(row, f"{name} {problem}")
        else:
            values[row] = int(number)
    return values


def number_of(cell: Any) -> tuple[int | float, str]:
    """The finite number in a cell and "", or 0 and what is wrong with it (for "NAME is …")."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return 0, "is missing"
    if isinstance(cell, bool) or not isinstance(cell, (int, float, str)):
        return 0, f"is {brief(cell)}, not a number"
    try:
        number = _parsed(cell) if isinstance(cell, str) else cell
        finite = abs(number) < float("inf")
    except (ValueError, OverflowError):
        return 0, f"is {brief(cell)}, not a number"
    return (number, "") if finite else (0, f"is {brief(cell)}, not a finite number")


def _parsed(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def times(name: str, cells: Sequence[Any], bad: BadRows) -> TimeArray:
    """Finite numbers, one a cell: whole ones exactly, as int64, if all of them are whole; else float64."""
    exact = _all_integers(cells)
    if exact is not None:
        return exact
    numbers: list[int | float] = []
    for row, cell in enumerate(cells):
        number, problem = number_of(cell)
        if not problem and abs(number) > _MAX_TIME:
            number, problem = 0, f"is {brief(cell)}, out of range"
        if problem:
            bad.add(row, f"{name} {problem}")
        numbers.append(number)
    whole = all(type(number) is int for number in numbers)
    return np.array(numbers, np.int64) if whole else np.array(numbers, np.float64)


def is_wall_clock(cell: Any) -> bool:
    """Whether the cell reads like ``2023-11-16 18:17:03.9799600``."""
    return isinstance(cell, str) and _WALL_CLOCK.fullmatch(cell) is not None


def wall_clock_ns(name: str, cells: Sequence[Any], bad: BadRows) -> IntArray:
    """Nanoseconds since 1970 (UTC) of times such as ``2023-11-16 18:17:03.9799600`` or ``…03.98+00:00``.

    Up to nine digits of a second; a time without a zone is taken as UTC.
    """
    stamps: list[str] = []
    rest_ns: list[int] = []
    for row, cell in enumerate(cells):
        match = _WALL_CLOCK.fullmatch(cell)
        if match is None:
            bad.add(row, f"{name} is {brief(cell)}, not a time such as 2023-11-16 18:17:03.9799600")
            stamps.append("1970-01-01T00:00:00")
            rest_ns.append(0)
            continue
        date, clock, fraction, zone = match.groups()
        stamps.append(f"{date}T{clock}")
        rest_ns.append(int((fraction or "0").ljust(9, "0")) - _offset_ns(zone))
    return _seconds(name, stamps, bad) * 1_000_000_000 + np.array(rest_ns, np.int64)


def _offset_ns(zone: str | None) -> int:
    if zone is None or zone in ("Z", "UTC"):
        return 0
    minutes = int(zone[1:3]) * 60 + int(zone[-2:])
    return (minutes if zone[0] == "+" else -minutes) * 60_000_000_000


def _seconds(name: str, stamps: list[str], bad: BadRows) -> IntArray:
    try:
        return np.array(stamps, "datetime64[s]").astype(np.int64)
    except ValueError:
        return np.array([_second(name, row, stamp, bad) for row, stamp in enumerate(stamps)], np.int64)


def _second(name: str, row: int, stamp: str, bad: BadRows) -> int:
    try:
        return int(np.datetime64(stamp, "s").astype(np.int64))
    except ValueError:
        bad.add(row, f"{name} is {brief(stamp.replace('T', ' '))}, which is no date and time")
        return 0

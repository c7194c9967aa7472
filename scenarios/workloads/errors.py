"""What goes wrong when a trace is read, and where."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

OnBadRow = Literal["error", "skip"]
BoolArray = npt.NDArray[np.bool_]

_SHOWN = 3
_MOST_NAMES = 12
_LONGEST_VALUE = 60


def brief(value: object, longest: int = _LONGEST_VALUE) -> str:
    """A value as it is shown in a message: quoted, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def names(known: Iterable[str]) -> str:
    """Some names (of columns, of models) as a list for a message; not more than a dozen, none of them long."""
    listed = list(known)
    shown = [name if len(name) <= _LONGEST_VALUE else name[: _LONGEST_VALUE - 1] + "…" for name in listed[:_MOST_NAMES]]
    return printable(_listed(shown, len(listed)))


def printable(text: str) -> str:
    """The text with what no file can hold (halves of surrogate pairs, from JSON) written out as ``\\ud800``."""
    return text.encode("utf-8", "backslashreplace").decode()


class TraceError(ValueError):
    """A trace that cannot be read as it stands; the message begins with ``path:line:``.

    ``path`` is the file, ``line`` counts from 1 as an editor does (None where the file as a whole is meant),
    ``reason`` says what is wrong, with the value and the remedy.
    """

    def __init__(self, path: str | os.PathLike[str], line: int | None, reason: str) -> None:
        self.path = os.fspath(path)
        self.line = line
        self.reason = reason
        where = self.path if line is None else f"{self.path}:{line}"
        super().__init__(f"{where}: {reason}")

    def __reduce__(self) -> tuple[type[TraceError], tuple[str, int | None, str]]:
        return type(self), (self.path, self.line, self.reason)


class BadRows:
    """The rows of one file that cannot be used, each with its line and the first reason found."""

    def __init__(self, path: str | os.PathLike[str], lines: Sequence[int]) -> None:
        self._path = path
        self._lines = lines
        self._reasons: dict[int, str] = {}

    def add(self, row: int, reason: str) -> None:
        """Mark row number ``row`` (from 0) as unusable; the first reason stands."""
        self._reasons.setdefault(row, reason)

    def __contains__(self, row: int) -> bool:
        return row in self._reasons

    def settle(self, on_bad_row: OnBadRow) -> tuple[BoolArray, tuple[str, ...]]:
        """Which rows to keep, and a note on those left out.  Raises TraceError for the first one under "error"."""
        keep = np.ones(len(self._lines), np.bool_)
        if not self._reasons:
            return keep, ()
        rows = sorted(self._reasons)
        if on_bad_row == "error":
            remedy = 'correct the row, or leave such rows out with on_bad_row = "skip" (--on-bad-row skip)'
            raise TraceError(self._path, self._lines[rows[0]], f"{self._reasons[rows[0]]}: {remedy}")
        keep[rows] = False
        return keep, (self._note(rows),)

    def _note(self, rows: list[int]) -> str:
        shown = [f"line {self._lines[row]} ({self._reasons[row]})" for row in rows[:_SHOWN]]
        return f"Left out {len(rows):,} of {len(self._lines):,} rows as bad: {_listed(shown, len(rows))}."


def failures_note(num_rows: int, lines: Sequence[int], what: str) -> str:
    """A note that requests which failed at their source were left out, with the first lines."""
    shown = [str(line) for line in lines[:_SHOWN]]
    return f"Left out {len(lines):,} of {num_rows:,} requests {what}: line {_listed(shown, len(lines))}."


def check_on_bad_row(on_bad_row: str) -> None:
    """Raise ValueError for anything but "error" and "skip"."""
    if on_bad_row not in ("error", "skip"):
        raise ValueError(f'on_bad_row must be "error" or "skip", got {brief(on_bad_row)}')


def _listed(shown: list[str], total: int) -> str:
    more = total - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more > 0 else "")

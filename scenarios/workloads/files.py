"""Trace files as text, as tables and as JSON values, with the line of everything in them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.scenarios.workloads.errors import BadRows, TraceError, brief, names
from windtunnel.sim.workload import IntArray

PathLike = str | os.PathLike[str]

_GZIP_MAGIC = b"\x1f\x8b"
_HEAD_BYTES = 1 << 16
_BATCH = 4096


def read_text(path: PathLike) -> str:
    """The whole file, unpacked if it is gzip; a byte-order mark is dropped.

    Raises OSError as ``open`` does, TraceError if the bytes are not UTF-8 text or the gzip data is cut off.
    """
    data = Path(path).read_bytes()
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(path, None, f"the gzip data is damaged ({error}): fetch the file again") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(path, line, f"not UTF-8 text (byte {data[error.start]:#04x}): save it as UTF-8") from None


def read_head(path: PathLike) -> str:
    """The first part of the file, enough to recognise its format.  Raises as ``read_text``."""
    with open(path, "rb") as file:
        packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    try:
        with gzip.open(path) if packed else open(path, "rb") as file:
            return file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(path, None, f"the gzip data is damaged ({error}): fetch the file again") from error


@dataclass(frozen=True, slots=True)
class Table:
    """Cells by column, with the line of every row: one shape for CSV and JSON lines."""

    path: PathLike
    columns: dict[str, list[Any]]
    """Column name → cells; text from CSV, JSON values (None where a key is missing) from JSON lines."""
    lines: list[int]
    bad: BadRows
    header_line: int | None = None

    @property
    def line_numbers(self) -> IntArray:
        """``lines`` as an array."""
        return np.array(self.lines, np.int64)

    def column(self, name: str) -> list[Any]:
        """The cells under a name, whatever its case.  Raises TraceError that lists what is there."""
        cells = self.find(name)
        if cells is None:
            near = get_close_matches(name.lower(), [c.lower() for c in self.columns], 1)
            hint = f" (is {near[0]!r} it?)" if near else ""
            raise TraceError(
                self.path, self.header_line, f"there is no column {name!r}{hint}; there are {names(self.columns)}"
            )
        return cells

    def find(self, name: str) -> list[Any] | None:
        """The cells under a name, whatever its case, or None."""
        for column, cells in self.columns.items():
            if column.lower() == name.lower():
                return cells
        return None

    def unused_note(self, used: frozenset[str] | set[str]) -> tuple[str, ...]:
        """A note on the columns that nothing reads; ``used`` in lower case."""
        unused = [name for name in self.columns if name.lower() not in used]
        return (f"Columns not used: {names(unused)}.",) if unused else ()


def header_cells(text: str) -> list[str]:
    """The names in the first row of a CSV text that is neither blank nor a ``#`` comment; [] if there is none."""
    for line in io.StringIO(text):
        if line.strip() and not line.startswith("#"):
            try:
                return [cell.strip() for cell in next(csv.reader([line], delimiter=_delimiter(line)), [])]
            except csv.Error:  # a lone carriage return, a cell that goes on for ever: no header
                return []
    return []


def read_csv(path: PathLike) -> Table:
    """A CSV file with a header row (comma, semicolon or tab); ``#`` lines before the header are skipped.

    Blank lines are no rows; a row with too few or too many cells is a bad row.  Raises OSError, and TraceError
    for an empty file, a column that is named twice, or broken quoting.
    """
    return parse_csv(path, read_text(path))


def parse_csv(path: PathLike, text: str) -> Table:
    """As ``read_csv``, from the text of the file."""
    lines = io.StringIO(text, newline="")
    first, skipped = _first_line(lines)
    if not first:
        raise TraceError(path, None, "the file is empty: a header row and one row a request are needed")
    reader = csv.reader(chain([first], lines), delimiter=_delimiter(first), strict=True)
    records = _records(path, reader, skipped, one_a_line='"' not in text)
    header_line, cells = next(records)
    header = [cell.strip() for cell in cells]
    twice = [name for name in header if [h.lower() for h in header].count(name.lower()) > 1]
    if twice:
        raise TraceError(path, header_line, f"column {brief(twice[0])} is there twice: keep one")
    columns, numbers, odd = _columns(records, len(header))
    bad = BadRows(path, numbers)
    for row, width in odd:
        bad.add(row, f"the row has {width} cells, the header {len(header)}")
    return Table(path, dict(zip(header, columns, strict=True)), numbers, bad, header_line)


def _first_line(lines: io.StringIO) -> tuple[str, int]:
    for skipped, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            return line, skipped
    return "", 0


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)


def _records(path: PathLike, reader: Any, skipped: int, *, one_a_line: bool) -> Iterator[tuple[int, list[str]]]:
    """The records that are not blank, each with its first line; a quoted cell may reach over several lines."""
    line = skipped
    try:
        for record in reader:
            if record:
                yield line + 1, record
            line = line + 1 if one_a_line else skipped + reader.line_num
    except csv.Error as error:
        raise TraceError(path, line + 1, f"broken CSV ({error}): check the quotes in this row") from None


def _columns(
    records: Iterator[tuple[int, list[str]]], width: int
) -> tuple[list[list[str]], list[int], list[tuple[int, int]]]:
    """Cells by column, lines, and the rows of another width (filled up) with their width.

    Batch by batch: a list a row for the whole file at once would keep the garbage collector busy.
    """
    columns: list[list[str]] = [[] for _ in range(width)]
    numbers: list[int] = []
    odd: list[tuple[int, int]] = []
    while batch := list(islice(records, _BATCH)):
        rows = [record for _, record in batch]
        for row, record in enumerate(rows):
            if len(record) != width:
                odd.append((len(numbers) + row, len(record)))
                rows[row] = (record + [""] * width)[:width]
        numbers.extend(line for line, _ in batch)
        for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
            column.extend(cells)
    return columns, numbers, odd


def read_json_lines(path: PathLike) -> Table:
    """A file with one JSON object a line; blank lines are no rows, a line that is no object is a bad row.

    Raises OSError, and TraceError for an empty file.
    """
    return parse_json_lines(path, read_text(path))


def parse_json_lines(path: PathLike, text: str, *, skip_lines: int = 0) -> Table:
    """As ``read_json_lines``, from the text of the file without its first ``skip_lines`` lines."""
    objects: list[dict[str, Any]] = []
    numbers: list[int] = []
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if number <= skip_lines or not line.strip():
            continue
        value, problem = _json_object(line)
        if problem:
            problems.append((len(objects), problem))
        objects.append(value)
        numbers.append(number)
    if not objects and not skip_lines:
        raise TraceError(path, None, "the file is empty: one JSON object a request is needed")
    bad = BadRows(path, numbers)
    for row, problem in problems:
        bad.add(row, problem)
    names = dict.fromkeys(name for value in objects for name in value)
    return Table(path, {name: [value.get(name) for value in objects] for name in names}, numbers, bad)


def _json_object(line: str) -> tuple[dict[str, Any], str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also for a number of more than 4,300 digits
        return {}, f"not JSON ({error})"
    if not isinstance(value, dict):
        return {}, f"a JSON object is needed, this is {line.strip()[:40]!r}"
    return value, ""


def json_values(path: PathLike, text: str) -> Iterator[tuple[int, Any]]:
    """The JSON values that follow each other in a text, each with the line on which it begins.

    One array at the top stands for its elements.  Raises TraceError where the text is not JSON.
    """
    position = _skip(text, 0, " \t\r\n")
    array = text.startswith("[", position)
    if array:
        position = _skip(text, position + 1, " \t\r\n")
    line, counted = 1, 0
    decoder = json.JSONDecoder()
    while position < len(text) and not (array and text[position] == "]"):
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise TraceError(path, error.lineno, f"not JSON ({error.msg}, column {error.colno})") from None
        except (RecursionError, ValueError) as error:  # ValueError: a number of more than 4,300 digits
            raise TraceError(path, line, f"not usable JSON ({error})") from None
        yield line, value
        position = _skip(text, position, ", \t\r\n" if array else " \t\r\n")
    if array and position >= len(text):
        raise TraceError(path, text.count("\n") + 1, "not JSON (the list is never closed): the file is cut off")


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position

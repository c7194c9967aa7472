"""Tables with a request a row: LLMPerf's columns and their like, as CSV or as a JSON list of objects.

Columns are known by their names; a column of times must say its unit at the end of its name (``ttft_s``, ``ttft_ms``),
since a wrong guess is a factor of a thousand.  LLMPerf's ``inter_token_latency_s`` is the whole latency over all output
tokens, neither ITL nor TPOT, and is not used.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from windtunnel.calibrate.live.observed import (
    UNKNOWN,
    Ending,
    ObservedRun,
    observed_requests,
)
from windtunnel.calibrate.live.reading import Place, count_or_unknown, ns_or_unknown
from windtunnel.sim.records import IntArray

_UNITS = {"_s": 1.0, "_ms": 1e3, "_us": 1e6, "_ns": 1e9}
_TIMES = {
    "ttft": ("ttft", "time_to_first_token"),
    "e2el": ("end_to_end_latency", "e2e_latency", "e2el", "request_latency", "latency"),
    "send": ("send", "send_time", "start", "start_time", "request_start", "arrival", "arrival_time", "timestamp"),
}
_COUNTS = {
    "input": (
        "number_input_tokens",
        "num_input_tokens",
        "input_tokens",
        "num_prompt_tokens",
        "prompt_tokens",
        "input_len",
    ),
    "output": ("number_output_tokens", "num_output_tokens", "output_tokens", "completion_tokens", "output_len"),
}
_ERRORS = ("error_msg", "error", "error_code")


def looks_like(value: Any) -> bool:
    """Whether a JSON value is a list of such rows."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and _has_latency(value[0])


def _has_latency(row: Mapping[str, Any]) -> bool:
    names = {str(key).strip().lower() for key in row}
    return any(base + unit in names for base in (*_TIMES["ttft"], *_TIMES["e2el"]) for unit in _UNITS)


def read(place: Place, text: str) -> ObservedRun:
    """The run in a CSV table.  Raises UnreadableResult."""
    try:
        lines = csv.reader(io.StringIO(text), delimiter=_delimiter(text), strict=True)
        header = [cell.strip().lower() for cell in next(lines)]
        rows, places = [], []
        for cells in lines:
            if any(cell.strip() for cell in cells):
                where = place.at_line(lines.line_num)
                if len(cells) != len(header):
                    raise where.wrong(f"{len(cells)} cells, the header has {len(header)}")
                rows.append({name: _value(cell) for name, cell in zip(header, cells, strict=True)})
                places.append(where)
    except csv.Error as error:
        raise place.wrong(f"not a table ({error})") from None
    return _run(place, header, rows, places)


def read_rows(place: Place, values: Sequence[Any]) -> ObservedRun:
    """The run in a JSON list of objects.  Raises UnreadableResult."""
    rows, places = [], []
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise place.key(number).wrong(f"{str(value)[:40]!r} is not an object")
        rows.append({str(key).strip().lower(): cell for key, cell in value.items()})
        places.append(place.key(number))
    return _run(place, list(rows[0]), rows, places)


def _delimiter(text: str) -> str:
    first = text.lstrip().partition("\n")[0]
    return max(",;\t", key=first.count)


def _value(cell: str) -> Any:
    text = cell.strip()
    if text.lower() in ("", "none", "null", "nan", "n/a", "na"):
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _run(place: Place, header: list[str], rows: list[dict[str, Any]], places: list[Place]) -> ObservedRun:
    table = _Table(place, header, rows, places)
    ttft, e2el, send = table.times("ttft"), table.times("e2el"), table.times("send")
    if ttft is None and e2el is None:
        raise (places[0] if places else place).wrong(
            f"no column of latencies among {', '.join(header[:12])}: name one ttft_s, ttft_ms, end_to_end_latency_s …"
        )
    if not rows:
        raise place.wrong("the table has no rows")
    errors = table.errors()
    notes = []
    if send is None:
        notes.append("The table does not say when requests were sent: arrivals, throughput and load are not known.")
    else:
        send = _from_the_first(send)
    if any(name.startswith("inter_token_latency") for name in header):
        notes.append("inter_token_latency is not used: LLMPerf divides the whole latency by all output tokens.")
    failed = np.array([bool(error) for error in errors])
    return ObservedRun(
        source="LLMPerf" if "number_output_tokens" in header else "table",
        name=place.path,
        requests=observed_requests(
            len(rows),
            send_ns=send,
            ttft_ns=None if ttft is None else np.where(failed, UNKNOWN, ttft),
            e2el_ns=None if e2el is None else np.where(failed, UNKNOWN, e2el),
            num_prompt_tokens=table.counts("input"),
            num_output_tokens=table.counts("output"),
            ending=np.where(failed, Ending.FAILED, Ending.FINISHED),
            errors=tuple(errors),
        ),
        notes=tuple(notes),
    )


def _from_the_first(send: IntArray) -> IntArray:
    known = send >= 0
    return np.where(known, send - int(send[known].min()), UNKNOWN) if known.any() else send


class _Table:
    def __init__(self, place: Place, header: list[str], rows: list[dict[str, Any]], places: list[Place]) -> None:
        self._place = place
        self._header = header
        self._rows = rows
        self._places = places

    def times(self, quantity: str) -> IntArray | None:
        for base in _TIMES[quantity]:
            for unit, per_s in _UNITS.items():
                if base + unit in self._header:
                    return self._times(base + unit, per_s)
        for base in _TIMES[quantity]:
            if base in self._header:
                raise self._place.at_line(1).wrong(
                    f"column {base!r} does not say its unit: name it {base}_s or {base}_ms"
                )
        return None

    def _times(self, name: str, per_s: float) -> IntArray:
        cells = [
            ns_or_unknown(row.get(name), where.key(name), per_s=per_s)
            for row, where in zip(self._rows, self._places, strict=True)
        ]
        return np.array(cells, np.int64)

    def counts(self, quantity: str) -> IntArray | None:
        name = next((name for name in _COUNTS[quantity] if name in self._header), None)
        if name is None:
            return None
        cells = [
            count_or_unknown(row.get(name), where.key(name))
            for row, where in zip(self._rows, self._places, strict=True)
        ]
        return np.array(cells, np.int64)

    def errors(self) -> list[str]:
        """The first of the columns of errors that says something, row by row; a code of 0 says nothing."""
        there = [name for name in _ERRORS if name in self._header]
        return [next((str(row[name]) for name in there if row.get(name)), "") for row in self._rows]

"""An ObservedRun as a file: JSON lines, a head with everything about the run, then one line a request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.calibrate.live.observed import (
    SERIES_COLUMNS,
    ObservedRequests,
    ObservedRun,
    SendReport,
    ServerCounts,
    ServerFacts,
    ServerSeries,
    observed_requests,
)

KIND = "windtunnel observed run"
VERSION = 1
_COLUMNS = tuple(
    item.name
    for item in fields(ObservedRequests)
    if item.name not in ("errors", "labels", "chunk_offsets", "chunk_ns", "chunk_tokens")
)


def save_observed(run: ObservedRun, path: Path) -> None:
    """Write the run to a file, all of it or nothing.  Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for line in _lines(run):
            file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n")
    partial.replace(path)


def load_observed(path: Path) -> ObservedRun:
    """Read a run that ``save_observed`` wrote.

    Raises OSError, or ValueError that names file and line for anything else than such a file.
    """
    with path.open(encoding="utf-8") as file:
        lines = [_parsed(path, number, text) for number, text in enumerate(file, 1) if text.strip()]
    if not lines or lines[0].get("kind") != KIND:
        raise ValueError(f"{path}:1: not a saved run of windtunnel; other results are read with read_results")
    head, rows = lines[0], lines[1:]
    if head.get("version") != VERSION:
        raise ValueError(f"{path}:1: version {head.get('version')!r} of the format, only {VERSION} can be read")
    if len(rows) != head.get("num_requests"):
        raise ValueError(f"{path}: {len(rows)} requests, {head.get('num_requests')!r} are announced: the file is cut")
    try:
        return _run(head, rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not as windtunnel writes it ({error!r}); save the run again") from None


def _parsed(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: not JSON ({error}); the file is damaged") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}:{number}: {str(value)[:40]!r} is not a JSON object")
    return value


def _lines(run: ObservedRun) -> Iterator[dict[str, Any]]:
    table = run.requests
    yield {
        "kind": KIND,
        "version": VERSION,
        "num_requests": len(table),
        "source": run.source,
        "name": run.name,
        "duration_ns": run.duration_ns,
        "max_concurrency": run.max_concurrency,
        "request_rate": "inf" if run.request_rate == math.inf else run.request_rate,
        "stated": dict(run.stated),
        "server": _filled(asdict(run.server)),
        "counts": _filled(asdict(run.counts)),
        "send_report": None if run.send_report is None else asdict(run.send_report),
        "was_interrupted": run.was_interrupted,
        "notes": list(run.notes),
        "series": None if run.series is None else _series_dict(run.series),
    }
    columns = [getattr(table, name).tolist() for name in _COLUMNS]
    offsets, times, tokens = table.chunk_offsets.tolist(), table.chunk_ns.tolist(), table.chunk_tokens.tolist()
    for row, values in enumerate(zip(*columns, strict=True)):
        line: dict[str, Any] = {
            name: value for name, value in zip(_COLUMNS, values, strict=True) if value != -1 or name == "due_ns"
        }
        if table.errors[row]:
            line["error"] = table.errors[row]
        if table.labels is not None:
            line["label"] = table.labels[row]
        start, end = offsets[row], offsets[row + 1]
        if end > start:
            line["chunk_ns"] = times[start:end]
            if any(count != 1 for count in tokens[start:end]):
                line["chunk_tokens"] = tokens[start:end]
        yield line


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _series_dict(series: ServerSeries) -> dict[str, Any]:
    columns: dict[str, Any] = {"time_ns": series.time_ns.tolist()}
    for name in SERIES_COLUMNS:
        column = getattr(series, name)
        if not np.isnan(column).all():
            columns[name] = [None if math.isnan(value) else value for value in column.tolist()]
    return columns


def _run(head: Mapping[str, Any], rows: list[dict[str, Any]]) -> ObservedRun:
    rate = head["request_rate"]
    report = head["send_report"]
    return ObservedRun(
        source=head["source"],
        name=head["name"],
        requests=_requests(rows),
        duration_ns=head["duration_ns"],
        max_concurrency=head["max_concurrency"],
        request_rate=math.inf if rate == "inf" else rate,
        stated=head["stated"],
        series=None if head["series"] is None else _series(head["series"]),
        counts=ServerCounts(**head["counts"]),
        server=ServerFacts(**head["server"]),
        send_report=None if report is None else SendReport(**report),
        was_interrupted=head["was_interrupted"],
        notes=tuple(head["notes"]),
    )


def _requests(rows: list[dict[str, Any]]) -> ObservedRequests:
    chunks = [np.array(row.get("chunk_ns", ()), np.int64) for row in rows]
    tokens = [
        np.array(row.get("chunk_tokens", np.ones(len(times))), np.int64)
        for row, times in zip(rows, chunks, strict=True)
    ]
    return observed_requests(
        len(rows),
        chunks=chunks,
        chunk_tokens=tokens,
        errors=tuple(row.get("error", "") for row in rows),
        labels=tuple(row.get("label", "") for row in rows) if rows and "label" in rows[0] else None,
        **{name: [row.get(name, -1) for row in rows] for name in _COLUMNS},
    )


def _series(columns: Mapping[str, Any]) -> ServerSeries:
    times = np.array(columns["time_ns"], np.int64)
    unknown = [None] * len(times)
    floats = {name: np.array(columns.get(name, unknown), np.float64) for name in SERIES_COLUMNS}
    return ServerSeries(time_ns=times, **floats)

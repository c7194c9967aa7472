"""A Workload as a file in windtunnel's own format, CSV or JSON lines (described in ``native``)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from windtunnel.scenarios.workloads.files import PathLike
from windtunnel.scenarios.workloads.native import CSV_MARK, JSON_MARK, preamble
from windtunnel.sim.workload import Segment, Workload


def write_workload(workload: Workload, path: PathLike, *, format: Literal["auto", "csv", "jsonl"] = "auto") -> None:  # noqa: A002
    """Write it so that ``read_trace`` gives an equal Workload back, source and notes included.

    "auto" is JSON lines for a name that ends in .jsonl or .json, else CSV.  Columns in which every request has the
    neutral value are left out.  Raises OSError as ``open`` does, ValueError for another format.
    """
    if format not in ("auto", "csv", "jsonl"):
        raise ValueError(f'format must be "auto", "csv" or "jsonl", got {format!r}')
    names = Path(path).name.lower()
    json_lines = format == "jsonl" or (format == "auto" and names.endswith((".jsonl", ".json")))
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.writelines(_json_lines(workload) if json_lines else ())
        if not json_lines:
            file.write(f"{CSV_MARK}{json.dumps(preamble(workload), ensure_ascii=False)}\n")
            columns = _columns(workload)
            writer = csv.writer(file, lineterminator="\n", quoting=_quoting(workload))
            writer.writerow(columns)
            writer.writerows(zip(*(_csv_cells(name, cells) for name, cells in columns.items()), strict=True))


def _json_lines(workload: Workload) -> Iterator[str]:
    yield json.dumps({JSON_MARK: preamble(workload)}, ensure_ascii=False) + "\n"
    columns = _columns(workload)
    for cells in zip(*columns.values(), strict=True):
        row = {name: cell for name, cell in zip(columns, cells, strict=True) if cell is not None}
        yield json.dumps(row, ensure_ascii=False) + "\n"


def _columns(workload: Workload) -> dict[str, Sequence[Any]]:
    """Name → cells, None for an empty one; neutral columns are left out."""
    due = workload.previous < 0
    columns: dict[str, Sequence[Any]] = {
        "arrival_ns": [at if has else None for at, has in zip(workload.arrival_ns.tolist(), due.tolist(), strict=True)],
        "num_prompt_tokens": workload.num_prompt_tokens.tolist(),
        "num_output_tokens": workload.num_output_tokens.tolist(),
    }
    if bool((workload.max_tokens != workload.num_output_tokens).any()):
        columns["max_tokens"] = workload.max_tokens.tolist()
    if bool(workload.priority.any()):
        columns["priority"] = workload.priority.tolist()
    if not due.all():
        columns["previous"] = [None if row < 0 else row for row in workload.previous.tolist()]
    if bool(workload.think_ns.any()):
        columns["think_ns"] = workload.think_ns.tolist()
    if workload.content is not None:
        columns["content"] = workload.content
    if workload.labels is not None:
        columns["request_id"] = workload.labels
    if workload.tenant is not None:
        columns["tenant"] = [workload.tenants[place] for place in workload.tenant.tolist()]
    return columns


def _quoting(workload: Workload) -> Literal[0, 2]:
    """The writer quotes its own line ends, but not a lone carriage return, which ends a line for readers."""
    lone = any("\r" in text for text in (*(workload.labels or ()), *workload.tenants))
    return csv.QUOTE_NONNUMERIC if lone else csv.QUOTE_MINIMAL


def _csv_cells(name: str, cells: Sequence[Any]) -> Iterator[Any]:
    if name == "content":
        return map(_content_cell, cells)
    return iter(cells)


def _content_cell(segments: tuple[Segment, ...]) -> str:
    return " ".join(f"{stream}:{end}" for stream, end in segments)

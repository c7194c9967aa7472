"""A run on disk: a folder of Parquet tables and JSON that reports are made from later.

``workload.parquet`` holds what was asked (which prompts begin alike is left out), ``requests.parquet``,
``steps.parquet``, ``spans.parquet`` and ``preemptions.parquet`` what happened (whole nanoseconds; the latter three with
a ``replica`` column), ``summary.json`` the summary, ``scenario.resolved.json`` every setting with its source, the seed
and the version.  Equal runs give equal bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.sim.records import (
    PreemptionTable,
    Records,
    ReplicaRecords,
    RequestTable,
    SpanTable,
    StepTable,
    table_columns,
)
from windtunnel.sim.workload import Workload

RESOLVED_FILE = "scenario.resolved.json"
SUMMARY_FILE = "summary.json"
_REPLICA_TABLES = {"steps": StepTable, "spans": SpanTable, "preemptions": PreemptionTable}
_WORKLOAD_COLUMNS = (
    "arrival_ns",
    "num_prompt_tokens",
    "num_output_tokens",
    "max_tokens",
    "priority",
    "previous",
    "think_ns",
)
_REPLICA_FACTS = ("num_usable_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")


class OutputError(ValueError):
    """The results cannot be written where they should go."""


class RunUnreadable(ValueError):
    """The folder does not hold a run, or not a whole one."""


def check_can_write(folder: Path, *, force: bool = False) -> None:
    """Make sure, before hours of work, that ``folder`` can be written later.

    Raises OutputError if it is a file, if its parent cannot be written, or if it holds something other than an earlier
    run (``force`` replaces that too).
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"cannot write {folder}: it is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not force and not _is_run(folder):
        raise OutputError(
            f"{folder} is not empty and holds no earlier run: name another folder, or replace it with --force"
        )
    parent = _nearest_existing(folder.absolute().parent)
    _check_is_folder(folder, parent)
    _try_to_write(folder, folder if folder.is_dir() else parent)


def check_can_write_file(path: Path) -> None:
    """Make sure that a file can be written later; raises OutputError if it cannot."""
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder; name a file")
    parent = path.absolute().parent
    _check_is_folder(path, parent)
    _try_to_write(path, parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise OutputError(f"cannot write {path}: no permission to overwrite it")


def _is_run(folder: Path) -> bool:
    return (folder / RESOLVED_FILE).is_file()


def _nearest_existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _check_is_folder(target: Path, parent: Path) -> None:
    if not parent.exists():
        raise OutputError(f"cannot write {target}: there is no folder {parent}")
    if not parent.is_dir():
        raise OutputError(f"cannot write {target}: {parent} is a file, not a folder")


def _try_to_write(target: Path, parent: Path) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".windtunnel-"):
            pass
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror} ({parent})") from None


@dataclass(frozen=True, slots=True)
class SavedRun:
    """What a run's folder holds."""

    workload: Workload
    """Without ``content``: which prompts begin alike is not saved."""
    records: Records
    summary: dict[str, Any]
    resolved: dict[str, Any]


def write_run(folder: Path, run: SavedRun, *, force: bool = False) -> None:
    """Write a run, whole or not at all: into a folder beside it, which then takes its place.

    Raises OutputError as ``check_can_write`` does, and when the disk fails.
    """
    check_can_write(folder, force=force)
    resolved = {**run.resolved, "requests": _workload_facts(run.workload), "records": _facts(run.records)}
    try:
        with _replacing(folder) as scratch:
            for name, columns in _tables(run).items():
                _write_parquet(scratch / f"{name}.parquet", columns)
            _write_json(scratch / SUMMARY_FILE, run.summary)
            _write_json(scratch / RESOLVED_FILE, resolved)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from error


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A fresh folder beside ``folder`` that takes its place if the block succeeds and vanishes if it does not.

    What else lies in ``folder``, such as a report made from it, is left alone.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield scratch
        if folder.exists():
            _move_into(scratch, folder)
        else:
            scratch.chmod(0o777 & ~_umask())
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move_into(scratch: Path, folder: Path) -> None:
    """Replace file by file; the one that makes a folder a run goes first and comes last."""
    (folder / RESOLVED_FILE).unlink(missing_ok=True)
    for path in sorted(scratch.iterdir(), key=lambda path: (path.name == RESOLVED_FILE, path.name)):
        path.replace(folder / path.name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _tables(run: SavedRun) -> dict[str, dict[str, Any]]:
    workload: dict[str, Any] = {name: getattr(run.workload, name) for name in _WORKLOAD_COLUMNS}
    if run.workload.labels is not None:
        workload["label"] = list(run.workload.labels)
    requests = table_columns(run.records.requests)
    replicas = {name: replica_columns(run.records, name) for name in _REPLICA_TABLES}
    return {"workload": workload, "requests": dict(requests), **replicas}


def replica_columns(records: Records, name: str) -> dict[str, Any]:
    """Columns of ``steps``, ``spans`` or ``preemptions`` of all replicas below each other, ``replica`` first."""
    tables = [getattr(replica, name) for replica in records.replicas]
    numbers = [np.full(len(table), index, np.int64) for index, table in enumerate(tables)]
    columns = [table_columns(table) for table in tables]
    joined = {
        field.name: _joined([column[field.name] for column in columns]) for field in fields(_REPLICA_TABLES[name])
    }
    return {"replica": _joined(numbers), **joined}


def _joined(parts: list[Any]) -> Any:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _workload_facts(workload: Workload) -> dict[str, Any]:
    return {"source": workload.source, "notes": workload.notes, "max_concurrency": workload.max_concurrency}


def _facts(records: Records) -> dict[str, Any]:
    return {
        "end_ns": int(records.end_ns),
        "stalled": bool(records.stalled),
        "replicas": [{fact: int(getattr(replica, fact)) for fact in _REPLICA_FACTS} for replica in records.replicas],
    }


def _write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(dict(columns)), path, compression="zstd")


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(to_json(data) + "\n", "utf-8")


def to_json(data: Mapping[str, Any]) -> str:
    """The JSON that we write everywhere: indented, in the order given, and strict (no NaN)."""
    return json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """JSON's own types; what is not a number becomes null, and infinite rates become vLLM's "inf"."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return str(value) if isinstance(value, Path) else value


def read_run(folder: Path) -> SavedRun:
    """A saved run.  Raises RunUnreadable if the folder holds no run or a damaged one."""
    advice = f"write one with windtunnel simulate -o {folder}"
    if not folder.is_dir():
        raise RunUnreadable(f"no run in {folder}: there is no such folder; {advice}")
    if not _is_run(folder):
        raise RunUnreadable(f"no run in {folder}: it has no {RESOLVED_FILE}; {advice}")
    import pyarrow as pa

    try:
        resolved = json.loads((folder / RESOLVED_FILE).read_text("utf-8"))
        summary = json.loads((folder / SUMMARY_FILE).read_text("utf-8"))
        names = ("workload", "requests", *_REPLICA_TABLES)
        tables = {name: _read_parquet(folder / f"{name}.parquet") for name in names}
        workload = _workload(resolved.pop("requests"), tables["workload"])
        return SavedRun(workload, _records(resolved.pop("records"), tables), summary, resolved)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise RunUnreadable(f"the run in {folder} cannot be read ({error}): simulate it again") from error


def _read_parquet(path: Path) -> dict[str, Any]:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return {name: column.to_numpy() for name, column in zip(table.column_names, table.columns, strict=True)}


def _workload(facts: Mapping[str, Any], columns: Mapping[str, Any]) -> Workload:
    own: dict[str, Any] = {name: np.ascontiguousarray(columns[name], np.int64) for name in _WORKLOAD_COLUMNS}
    return Workload(
        **own,
        labels=tuple(str(label) for label in columns["label"]) if "label" in columns else None,
        max_concurrency=facts["max_concurrency"],
        source=str(facts["source"]),
        notes=tuple(facts["notes"]),
    )


def _records(facts: Mapping[str, Any], tables: Mapping[str, Any]) -> Records:
    replicas = []
    for index, described in enumerate(facts["replicas"]):
        own = {name: _table(kind, _rows_of(tables[name], index)) for name, kind in _REPLICA_TABLES.items()}
        replicas.append(ReplicaRecords(**own, **{fact: described[fact] for fact in _REPLICA_FACTS}))
    requests = _table(RequestTable, tables["requests"])
    return Records(requests, tuple(replicas), int(facts["end_ns"]), bool(facts["stalled"]))


def _rows_of(columns: Mapping[str, Any], replica: int) -> dict[str, Any]:
    chosen = columns["replica"] == replica
    return {name: column[chosen] for name, column in columns.items()}


def _table(kind: Any, columns: Mapping[str, Any]) -> Any:
    return kind(**{field.name: np.ascontiguousarray(columns[field.name], np.int64) for field in fields(kind)})

"""A run on disk: a folder of tables (Parquet or CSV) and JSON that reports are made from later.

``workload`` holds what was asked (which prompts begin alike is left out), ``requests``, ``steps``, ``spans``,
``preemptions`` and ``drafts`` what happened (whole nanoseconds; all but the first with a ``replica`` column),
``summary.json`` the summary, ``scenario.resolved.json`` every setting with its source, the seed and the version.
Equal runs give equal bytes.  docs/run-folder.md describes every column.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from windtunnel.sim.fleet.records import FleetRecords, LifeTable, PoolFacts, ScalingTable, StayTable, TransferTable
from windtunnel.sim.records import (
    DraftTable,
    Outcome,
    PreemptionTable,
    Records,
    ReplicaRecords,
    RequestTable,
    SpanTable,
    StepTable,
    table_columns,
)
from windtunnel.sim.workload import Workload

RecordsFormat = Literal["parquet", "csv"]

NS_PER_S = 1_000_000_000
RESOLVED_FILE = "scenario.resolved.json"
SUMMARY_FILE = "summary.json"
_REPLICA_TABLES = {"steps": StepTable, "spans": SpanTable, "preemptions": PreemptionTable, "drafts": DraftTable}
_WORKLOAD_COLUMNS = (
    "arrival_ns",
    "num_prompt_tokens",
    "num_output_tokens",
    "max_tokens",
    "priority",
    "previous",
    "think_ns",
)
_TEXT_COLUMNS = ("label", "outcome_name", "tenant")
_TABLES = ("workload", "requests", *_REPLICA_TABLES)
_FLEET_TABLES = {"lives": LifeTable, "stays": StayTable, "scalings": ScalingTable, "transfers": TransferTable}
"""Tables that only a fleet has."""
_FLEET_FACTS = ("router", "on_crash", "router_block_tokens", "num_missed_faults")
_LATER_COLUMNS: dict[Any, dict[str, int]] = {StepTable: {"recomputed_tokens": -1, "decode_only_ns": -1}}
"""Columns that runs of before lack, and what they then hold."""
_REPLICA_FACTS = (
    "num_usable_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "runs_to_completion",
)


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


def check_can_write_file(path: Path, *, inputs: Iterable[object] = ()) -> None:
    """Make sure that a file can be written later, be it into folders that are still to be made.

    ``inputs`` are paths that are read for it (what is no path of a file that is there does not matter); of a scenario
    file, so are the traces, profiles and models that it names.

    Raises OutputError if it cannot, if it is one of the inputs, and if it is a part of a saved run or of the results
    that a sweep keeps.
    """
    if str(path) == "-":
        raise OutputError("cannot write -: standard output is not written to, and no file is called so; name a file")
    if path.is_dir():
        also = " (an empty name is this folder, too)" if str(path) == "." else ""
        raise OutputError(f"cannot write {path}: it is a folder; name a file{also}")
    parent = _nearest_existing(path.absolute().parent)
    _check_is_folder(path, parent)
    _try_to_write(path, parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise OutputError(f"cannot write {path}: no permission to overwrite it")
    if _is_run(path.parent) and path.name in (RESOLVED_FILE, SUMMARY_FILE, *_tables_of_run(path.parent)):
        raise OutputError(f"cannot write {path}: it is a part of the run in {path.parent}; name another file")
    if path.is_file() and _keeps_results(path):
        raise OutputError(f"cannot write {path}: results are kept there, and --resume needs them; name another file")
    if path.exists() and any(_is_read(path, source) for source in inputs):
        raise OutputError(f"cannot write {path}: it is read for that; name another file")


def check_can_write_scenario(path: Path, *, force: bool = False) -> None:
    """Make sure that a scenario takes the place of nothing but another scenario, unless ``force`` says so.

    Raises OutputError for a file of any other kind.
    """
    if path.is_file() and path.stat().st_size and not force and not _is_scenario(path):
        raise OutputError(
            f"cannot write {path}: a file is there that is no scenario (it has no schema_version); name another file, "
            "or write over it with --force"
        )


def _is_scenario(path: Path) -> bool:
    try:
        return "schema_version" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _keeps_results(path: Path) -> bool:
    """Whether it is a file of a ``workers.Store``, which begins every store with a line that says so."""
    store = path.with_name("results.jsonl")
    if path.name not in (store.name, "lock") or not store.is_file():
        return False
    with suppress(OSError), store.open("rb") as file:
        return file.readline(64).startswith(b'{"windtunnel_results":')
    return False


def _is_read(path: Path, source: object) -> bool:
    """Whether a source is that file, or the folder of a model with it in, or a scenario that names one of these."""
    if not isinstance(source, str | Path) or not str(source).strip():
        return False
    if _is_same_file(path, source):
        return True
    if path.suffix == ".json" and _is_same_file(path.parent, source):
        return True
    return any(_is_read(path, named) for named in _named_in(Path(source)))


def _named_in(scenario: Path) -> list[Path]:
    """Whatever may be a path in a scenario file, from its folder on; nothing for any other file."""
    if scenario.suffix != ".toml":
        return []
    try:
        told = tomllib.loads(scenario.expanduser().read_text("utf-8"))
    except (OSError, ValueError, RuntimeError, RecursionError):
        return []  # whoever reads the scenario says so
    folder = scenario.expanduser().parent
    names = [text for text in _texts(told) if not text.endswith(".toml")]
    return [folder / Path(text).expanduser() if text.startswith("~") else folder / text for text in names]


def _texts(told: Any) -> Iterator[str]:
    if isinstance(told, str):
        yield told
    elif isinstance(told, Mapping):
        for value in told.values():
            yield from _texts(value)
    elif isinstance(told, list):
        for value in told:
            yield from _texts(value)


def _is_same_file(path: Path, source: object) -> bool:
    if not isinstance(source, str | Path):
        return False
    try:
        return Path(source).expanduser().samefile(path)
    except (OSError, ValueError, RuntimeError):  # one of them is not there, or is no path at all
        return False


def _is_run(folder: Path) -> bool:
    return (folder / RESOLVED_FILE).is_file()


def _nearest_existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _check_is_folder(target: Path, parent: Path) -> None:
    if not parent.is_dir():
        raise OutputError(f"cannot write {target}: {parent} is a file, not a folder")


def _try_to_write(target: Path, parent: Path) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".windtunnel-"):
            pass
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror} ({parent})") from None


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Make the folders in which ``target`` is written in the block; if that fails, those that were made go again.

    An OSError of the block becomes an OutputError.
    """
    parent = target.absolute().parent
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        if not isinstance(error, OSError):
            raise
        said = error.strerror or str(error)
        raise OutputError(said if said.startswith("cannot write") else f"cannot write {target}: {said}") from error


@dataclass(frozen=True, slots=True)
class SavedRun:
    """What a run's folder holds."""

    workload: Workload
    """Without ``content``: which prompts begin alike is not saved."""
    records: Records
    summary: dict[str, Any]
    resolved: dict[str, Any]


def write_run(folder: Path, run: SavedRun, *, force: bool = False, records_format: RecordsFormat = "parquet") -> None:
    """Write a run, whole or not at all: into a folder beside it, which then takes its place.

    Raises OutputError as ``check_can_write`` does, and when the disk fails; ValueError for an unknown format.
    """
    if records_format not in get_args(RecordsFormat):
        raise ValueError(f'records_format must be "parquet" or "csv", got {records_format!r}')
    check_can_write(folder, force=force)
    facts = {"format": records_format, **_facts(run.records)}
    resolved = {**run.resolved, "requests": _workload_facts(run.workload), "records": facts}
    with writing(folder), _replacing(folder) as scratch:
        for name, columns in _tables(run).items():
            _write_table(scratch / f"{name}.{records_format}", columns)
        _write_json(scratch / SUMMARY_FILE, run.summary)
        _write_json(scratch / RESOLVED_FILE, resolved)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A fresh folder beside ``folder`` that takes its place if the block succeeds and vanishes if it does not.

    What else lies in ``folder``, such as a report made from it, is left alone.
    """
    folder = folder.absolute()
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
    old_tables = _tables_of_run(folder)
    (folder / RESOLVED_FILE).unlink(missing_ok=True)
    for name in old_tables:
        (folder / name).unlink(missing_ok=True)
    for path in sorted(scratch.iterdir(), key=lambda path: (path.name == RESOLVED_FILE, path.name)):
        path.replace(folder / path.name)


def _tables_of_run(folder: Path) -> list[str]:
    """The tables of the run that is there, be it in another format; none if that cannot be told."""
    try:
        suffix = _format_of(json.loads((folder / RESOLVED_FILE).read_text("utf-8"))["records"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [f"{name}.{suffix}" for name in (*_TABLES, *_FLEET_TABLES)]


def _format_of(facts: Mapping[str, Any]) -> RecordsFormat:
    return "csv" if facts.get("format") == "csv" else "parquet"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _tables(run: SavedRun) -> dict[str, dict[str, Any]]:
    workload: dict[str, Any] = {name: getattr(run.workload, name) for name in _WORKLOAD_COLUMNS}
    if run.workload.labels is not None:
        workload["label"] = list(run.workload.labels)
    if run.workload.tenant is not None:
        workload["tenant"] = _tenant_names(run.workload, run.workload.tenant)
    replicas = {name: replica_columns(run.records, name) for name in _REPLICA_TABLES}
    fleet = run.records.fleet
    own = {} if fleet is None else {name: dict(table_columns(table)) for name, table in _fleet_tables(fleet).items()}
    return {"workload": workload, "requests": request_columns(run.records, run.workload), **replicas, **own}


def request_columns(records: Records, workload: Workload) -> dict[str, Any]:
    """Columns of the requests, with what joins them to their source and what people read.

    ``label`` behind ``request`` is the request's name in its source (None where it has none), ``outcome_name`` behind
    ``outcome`` the outcome in words, ``tenant`` behind that the tenant's name if there are tenants; last come
    latencies in seconds, defined as by ``vllm bench serve`` and NaN where
    the request did not get so far (``tpot_s`` also for a single output token, which has none).
    """
    own = dict(table_columns(records.requests))
    names = np.array([outcome.name.lower() for outcome in Outcome], object)[own["outcome"]]
    columns = {"request": own.pop("request"), "label": _labels(records, workload), "outcome": own.pop("outcome")}
    columns["outcome_name"] = names
    if workload.tenant is not None:
        columns["tenant"] = _tenant_names(workload, workload.tenant[records.requests.request])
    return {**columns, **own, **_request_seconds(records)}


def _tenant_names(workload: Workload, places: Any) -> Any:
    return np.array(workload.tenants, object)[places]


def _labels(records: Records, workload: Workload) -> Any:
    labels = np.full(len(records.requests), None, object)
    if workload.labels is not None:
        labels[:] = [workload.labels[row] for row in records.requests.request.tolist()]
    return labels


def _request_seconds(records: Records) -> dict[str, Any]:
    table = records.requests

    def since(end_ns: Any, start_ns: Any) -> Any:
        return np.where((end_ns >= 0) & (start_ns >= 0), (end_ns - start_ns) / NS_PER_S, np.nan)

    finished_ns = np.where(table.outcome == Outcome.FINISHED, table.finish_ns, -1)
    gaps = np.maximum(table.num_output_tokens - 1, 1)
    has_gaps = table.num_output_tokens > 1
    return {
        "ttft_s": since(table.first_token_ns, table.arrival_ns),
        "tpot_s": np.where(has_gaps, since(finished_ns, table.first_token_ns) / gaps, np.nan),
        "e2el_s": since(finished_ns, table.arrival_ns),
        "queue_s": since(table.scheduled_ns, table.arrival_ns),
    }


def replica_columns(records: Records, name: str) -> dict[str, Any]:
    """Columns of a table of the replicas, all of them below each other, ``replica`` first."""
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
    facts = {"source": workload.source, "notes": workload.notes, "max_concurrency": workload.max_concurrency}
    return {**facts, **({"tenants": workload.tenants} if workload.tenants else {})}


def _facts(records: Records) -> dict[str, Any]:
    return {
        "end_ns": int(records.end_ns),
        "stalled": bool(records.stalled),
        "replicas": [{fact: _fact(getattr(replica, fact)) for fact in _REPLICA_FACTS} for replica in records.replicas],
        **({} if records.fleet is None else {"fleet": _fleet_facts(records.fleet)}),
    }


def _fleet_tables(fleet: FleetRecords) -> dict[str, Any]:
    """The tables that there are: of transfers only where caches are handed over."""
    return {name: table for name in _FLEET_TABLES if (table := getattr(fleet, name)) is not None}


def _fleet_facts(fleet: FleetRecords) -> dict[str, Any]:
    plain = {key: getattr(fleet, key) for key in _FLEET_FACTS}
    return {**plain, "pools": [asdict(pool) for pool in fleet.pools], "tables": list(_fleet_tables(fleet))}


def _fact(value: int | bool) -> int | bool:
    return value if isinstance(value, bool) else int(value)


def _write_table(path: Path, columns: Mapping[str, Any]) -> None:
    """Parquet or CSV by the name's suffix; what there is not (NaN, None) is null in the one and empty in the other."""
    import pyarrow as pa

    table = pa.table({name: _arrow(name, values) for name, values in columns.items()})
    if path.suffix == ".csv":
        import pyarrow.csv

        pyarrow.csv.write_csv(table, path)
    else:
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path, compression="zstd")


def _arrow(name: str, values: Any) -> Any:
    import pyarrow as pa

    return pa.array(values, type=pa.string() if name in _TEXT_COLUMNS else None, from_pandas=True)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    # what no file can hold (a file name that is no UTF-8, in surrogates) becomes JSON's own escape
    path.write_text(to_json(data) + "\n", "utf-8", errors="backslashreplace")


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
        suffix = _format_of(resolved["records"])
        names = (*_TABLES, *resolved["records"].get("fleet", {}).get("tables", ()))
        tables = {name: _read_table(folder / f"{name}.{suffix}") for name in names}
        workload = _workload(resolved.pop("requests"), tables["workload"])
        return SavedRun(workload, _records(resolved.pop("records"), tables), summary, resolved)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, pa.ArrowException) as error:
        raise RunUnreadable(f"the run in {folder} cannot be read ({error}): simulate it again") from error


def _read_table(path: Path) -> dict[str, Any]:
    table = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    return {name: column.to_numpy() for name, column in zip(table.column_names, table.columns, strict=True)}


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path)


def _read_csv(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.csv as pc

    types = pc.ConvertOptions(column_types={name: pa.string() for name in _TEXT_COLUMNS})
    return pc.read_csv(path, parse_options=pc.ParseOptions(newlines_in_values=True), convert_options=types)


def _workload(facts: Mapping[str, Any], columns: Mapping[str, Any]) -> Workload:
    own: dict[str, Any] = {name: np.ascontiguousarray(columns[name], np.int64) for name in _WORKLOAD_COLUMNS}
    return Workload(
        **own,
        labels=tuple(str(label) for label in columns["label"]) if "label" in columns else None,
        max_concurrency=facts["max_concurrency"],
        **_tenants(tuple(facts.get("tenants", ())), columns),
        source=str(facts["source"]),
        notes=tuple(facts["notes"]),
    )


def _tenants(names: tuple[str, ...], columns: Mapping[str, Any]) -> dict[str, Any]:
    if not names:
        return {}
    places = {name: place for place, name in enumerate(names)}
    return {"tenant": np.array([places[name] for name in columns["tenant"]], np.int64), "tenants": names}


def _records(facts: Mapping[str, Any], tables: Mapping[str, Any]) -> Records:
    replicas = []
    for index, described in enumerate(facts["replicas"]):
        own = {name: _table(kind, _rows_of(tables[name], index)) for name, kind in _REPLICA_TABLES.items()}
        replicas.append(ReplicaRecords(**own, **{fact: described[fact] for fact in _REPLICA_FACTS}))
    requests = _table(RequestTable, tables["requests"])
    fleet = _fleet(facts["fleet"], tables) if "fleet" in facts else None
    return Records(requests, tuple(replicas), int(facts["end_ns"]), bool(facts["stalled"]), fleet)


def _fleet(facts: Mapping[str, Any], tables: Mapping[str, Any]) -> FleetRecords:
    own = {name: _table(kind, tables[name]) for name, kind in _FLEET_TABLES.items() if name in tables}
    plain = {key: facts[key] for key in _FLEET_FACTS}
    return FleetRecords(pools=tuple(PoolFacts(**pool) for pool in facts["pools"]), **own, **plain)


def _rows_of(columns: Mapping[str, Any], replica: int) -> dict[str, Any]:
    chosen = columns["replica"] == replica
    return {name: column[chosen] for name, column in columns.items()}


def _table(kind: Any, columns: Mapping[str, Any]) -> Any:
    num_rows = len(next(iter(columns.values())))
    found = {name: np.full(num_rows, value, np.int64) for name, value in _LATER_COLUMNS.get(kind, {}).items()}
    named = [field.name for field in fields(kind) if field.name in columns or field.name not in found]
    return kind(**found | {name: np.ascontiguousarray(columns[name], np.int64) for name in named})

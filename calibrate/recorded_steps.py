"""Reads the recorded steps of a real vLLM as a table: the shape of each step, and how long it took.

Two kinds of recording are read alike: the file that ``executor.vllm_plugin.recorder`` writes, and the folder of a live
run with ``steps.csv`` (times, context sums) and ``sched.jsonl.gz`` (who computed what).
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.executor.vllm_plugin.recording import COLUMNS, FORMAT, UNKNOWN, VERSION, StepTimes
from windtunnel.sim.engine.plan import StepShape

if TYPE_CHECKING:
    import pandas as pd

_Columns = dict[str, NDArray[Any]]

STATE = ("num_drafts", "num_running", "num_waiting", "num_free_blocks", "num_preempted")
TIMES = ("begin_s", "step_s", "schedule_s", "update_s", "gap_s", "recorder_s")
TABLE_COLUMNS = ("step", *StepShape._fields, *TIMES, *STATE)
"""Columns of the table.

``step_s`` is the time in the executor, from the hand-over of the decision to the tokens; where the engine decides ahead
(asynchronous scheduling), from the end of the step before if that is later.  ``begin_s`` is when the decision began, in
seconds after the first one; ``schedule_s`` and ``update_s`` are the scheduler's own time before and after the step;
``gap_s`` is the time from the end of the previous update to this decision, waiting for requests included, NaN where
steps overlap and for the first one; ``recorder_s`` is what recording itself took, NaN where unknown.  -1 blocks or
preemptions are unknown ones.
"""

_NS_PER_S = 1e9
_CSV_NUMBERS = ("i", "tok", "seqs", "dec", "pairs", "running", "waiting", "free_blocks", "preempted")
_CSV_TIMES = {"t": 1.0, "exec_ms": 1e-3, "sched_ms": 1e-3, "upd_ms": 1e-3, "gap_ms": 1e-3}


@dataclass(frozen=True, eq=False, slots=True)
class RecordedSteps:
    """A recording: where it comes from, and its steps in the order of their decisions."""

    path: Path
    header: Mapping[str, Any]
    """What the recording says of its origin: versions, device, model, settings."""
    notes: tuple[str, ...]
    """What whoever uses it should know, such as a last line that was cut off."""
    columns: Mapping[str, NDArray[Any]]
    """``TABLE_COLUMNS``, each with one value a step."""

    @property
    def num_steps(self) -> int:
        """Steps in the recording."""
        return len(self.columns["step"])

    def table(self) -> pd.DataFrame:
        """The steps, one a row."""
        import pandas as pd

        return pd.DataFrame({name: self.columns[name] for name in TABLE_COLUMNS})


def read_recorded_steps(path: str | Path) -> RecordedSteps:
    """The recording at ``path``: a file of the recorder (.jsonl, .jsonl.gz) or the folder of a live run.

    Raises FileNotFoundError if there is none, ValueError, with file and line, for what cannot be read.  A last line
    that was cut off, as by the end of a killed engine, is left out and noted.
    """
    path = Path(path)
    if path.is_dir():
        return _read_live_run(path)
    if not path.exists():
        raise FileNotFoundError(f"no recording at {path}: give a file of the recorder or the folder of a live run")
    return _read_recording(path)


def recorded_table(paths: Iterable[str | Path]) -> pd.DataFrame:
    """Several recordings as one table, with a first column ``recording`` that says which; raises as for one."""
    import pandas as pd

    tables = []
    for path in paths:
        table = read_recorded_steps(path).table()
        table.insert(0, "recording", str(path))
        tables.append(table)
    if not tables:
        raise ValueError("no recordings were given: name at least one")
    return pd.concat(tables, ignore_index=True)


# ------------------------------------------------------------------ files of the recorder


def _read_recording(path: Path) -> RecordedSteps:
    text, notes = _text(path)
    lines = text.split("\n")
    header = _header(path, lines[0])
    rows: list[tuple[int, ...]] = []
    for number, line in enumerate(lines[1:], 2):
        is_last = number == len(lines)
        if is_last and line == "":
            continue
        given = _object(line)
        if given is None and is_last:
            notes.append(f"line {number}, the last one, was cut off and is left out")
        elif given is not None and "stopped" in given:
            notes.append(f"the recorder stopped after {len(rows)} steps: {given['stopped']}")
        else:
            rows.append(_row(path, number, given))
    if not rows:
        notes.append("there are no steps in it")
    return RecordedSteps(path, header, tuple(notes), _columns(path, rows))


def _text(path: Path) -> tuple[str, list[str]]:
    if path.suffix != ".gz":
        return path.read_text(encoding="utf-8", errors="replace"), []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read(), []
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is not a whole gzip file ({error}): give the file as the recorder wrote it"
        ) from error


def _object(line: str) -> dict[str, Any] | None:
    try:
        given = json.loads(line)
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


def _header(path: Path, line: str) -> dict[str, Any]:
    header = _object(line)
    if header is None or header.get("format") != FORMAT:
        raise ValueError(
            f'{path}, line 1: expected the header of a recording, with "format": "{FORMAT}", got {line[:80]!r}: '
            f"give a file that the recorder wrote, from its first line on"
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path}, line 1: version {header.get('version')!r} of the format, this release reads version {VERSION}: "
            f"read it with the release that wrote it ({header.get('windtunnel')})"
        )
    return header


def _row(path: Path, number: int, given: dict[str, Any] | None) -> tuple[int, ...]:
    where = f"{path}, line {number}"
    if given is None:
        raise ValueError(f"{where}: not an object of JSON; only the last line may be cut off: repair or remove it")
    missing = [name for name in COLUMNS if name not in given]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing; a step has {', '.join(COLUMNS)}")
    row = tuple(given[name] for name in COLUMNS)
    for name, value in zip(COLUMNS, row, strict=True):
        least = UNKNOWN if name in ("num_free_blocks", "num_preempted") else 0
        if type(value) is not int or not least <= value < 1 << 63:
            raise ValueError(f"{where}: {name} must be a whole number of at least {least}, got {value!r}")
    _check_row(where, given)
    return row


def _check_row(where: str, given: Mapping[str, int]) -> None:
    instants = [given[name] for name in StepTimes._fields]
    if instants != sorted(instants):
        raise ValueError(
            f"{where}: instants must not go back, got {dict(zip(StepTimes._fields, instants, strict=True))}"
        )
    if given["num_decode_seqs"] + given["prefill_tokens"] == 0:
        raise ValueError(f"{where}: a step computes at least one token, got no decodes and prefill_tokens 0")


def _columns(path: Path, rows: Sequence[tuple[int, ...]]) -> _Columns:
    values = np.array(rows, dtype=np.int64).reshape(len(rows), len(COLUMNS))
    raw = dict(zip(COLUMNS, values.T, strict=True))
    _check_order(path, raw)
    begin_ns, execute_end_ns, update_end_ns = (
        raw[f"{at}_ns"] for at in ("schedule_begin", "execute_end", "update_end")
    )
    execute_begin_ns = raw["execute_begin_ns"].copy()
    execute_begin_ns[1:] = np.maximum(execute_begin_ns[1:], execute_end_ns[:-1])
    gap_s = np.full(len(rows), np.nan)
    gap_s[1:] = (begin_ns[1:] - update_end_ns[:-1]) / _NS_PER_S
    gap_s[gap_s < 0] = np.nan
    return {
        "step": raw["step"],
        **{name: raw[name] for name in (*StepShape._fields, *STATE)},
        "begin_s": (begin_ns - begin_ns[:1]) / _NS_PER_S,
        "step_s": (execute_end_ns - execute_begin_ns) / _NS_PER_S,
        "schedule_s": (raw["schedule_end_ns"] - begin_ns) / _NS_PER_S,
        "update_s": (update_end_ns - execute_end_ns) / _NS_PER_S,
        "gap_s": gap_s,
        "recorder_s": raw["recorder_ns"] / _NS_PER_S,
    }


def _check_order(path: Path, raw: _Columns) -> None:
    for name in ("step", "schedule_begin_ns", "execute_end_ns"):
        back = np.flatnonzero(np.diff(raw[name]) <= 0)
        if len(back):
            first = int(back[0])
            raise ValueError(
                f"{path}: {name} must grow from step to step, got {raw[name][first + 1]} after {raw[name][first]}: "
                f"it is not the file of one engine in the order in which it was written"
            )


# ------------------------------------------------------------------ folders of live runs


class _LiveStep(NamedTuple):
    """A step as sched.jsonl has it."""

    shape: StepShape
    num_pairs: int
    """Query-key pairs of all requests, the decoding ones included."""


def _read_live_run(folder: Path) -> RecordedSteps:
    times = _csv_columns(folder / "steps.csv")
    steps = _live_steps(folder / "sched.jsonl.gz")
    listed = [_matching(folder, times, steps, row) for row in range(len(times["i"]))]
    shapes = np.array([step.shape for step in listed], dtype=np.int64).reshape(len(listed), len(StepShape._fields))
    unknown = np.full(len(listed), np.nan)
    gap_s = times["gap_ms"].copy()
    gap_s[:1] = np.nan
    columns = {
        "step": times["i"],
        **dict(zip(StepShape._fields, shapes.T, strict=True)),
        "begin_s": times["t"] - times["t"][:1],
        "step_s": times["exec_ms"],
        "schedule_s": times["sched_ms"],
        "update_s": times["upd_ms"],
        "gap_s": gap_s,
        "recorder_s": unknown,
        "num_drafts": np.zeros(len(listed), dtype=np.int64),
        "num_running": times["running"],
        "num_waiting": times["waiting"],
        "num_free_blocks": times["free_blocks"],
        "num_preempted": times["preempted"],
    }
    return RecordedSteps(folder, _live_header(folder), (), columns)


def _live_header(folder: Path) -> dict[str, Any]:
    """The settings of the server, in a file beside its runs, and what the run says of itself."""
    header: dict[str, Any] = {}
    for path in (folder.parent / "engine_config.json", folder / "run.json"):
        if path.exists():
            header |= _object(path.read_text(encoding="utf-8")) or {}
    return header


def _csv_columns(path: Path) -> _Columns:
    if not path.exists():
        raise FileNotFoundError(f"no {path.name} in {path.parent}: a live run has one, with a row for each step")
    columns: dict[str, list[float]] = {name: [] for name in (*_CSV_NUMBERS, *_CSV_TIMES)}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}, line 1: no column {', '.join(missing)}")
        for row in reader:
            for name, values in columns.items():
                values.append(_number(path, reader.line_num, name, row[name]))
    numbers = {name: np.array(columns[name], dtype=np.int64) for name in _CSV_NUMBERS}
    return numbers | {name: np.array(columns[name], dtype=float) * unit for name, unit in _CSV_TIMES.items()}


def _number(path: Path, line: int, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf") or (name in _CSV_NUMBERS and value != int(value)):
        kind = "a whole number" if name in _CSV_NUMBERS else "a number"
        raise ValueError(f"{path}, line {line}: {name} must be {kind} of at least 0, got {text!r}")
    return value


def _live_steps(path: Path) -> dict[int, _LiveStep]:
    """The steps by their number.

    Which of them yield tokens follows from the lengths: a request prefills until what it had when it was admitted is
    computed, and yields one token in that step and in each one after it.
    """
    if not path.exists():
        raise FileNotFoundError(f"no {path.name} in {path.parent}: without it nobody knows which chunks end a prefill")
    decisions, prompts = _sched_lines(path)
    known = dict(prompts)
    ends = dict(prompts)
    steps = {}
    for line in decisions:
        ends.update((request_id, known[request_id]) for request_id, *_ in line["pre"] if request_id in known)
        unknown = [request_id for request_id, *_ in line["det"] if request_id not in known]
        if unknown:
            raise ValueError(
                f"{path}: step {line['i']} computes request {unknown[0]!r}, of which there is no add event"
            )
        steps[line["i"]] = _live_step(line["det"], known, ends)
    return steps


def _live_step(computed: Iterable[tuple[str, int, int]], known: dict[str, int], ends: Mapping[str, int]) -> _LiveStep:
    decodes = context = chunks = tokens = cached = chunk_pairs = sampled = num_pairs = 0
    for request_id, num_tokens, before in computed:
        pairs = num_tokens * before + num_tokens * (num_tokens + 1) // 2
        num_pairs += pairs
        if before >= ends[request_id]:
            decodes += 1
            context += before + 1
        else:
            chunks += 1
            tokens += num_tokens
            cached += before
            chunk_pairs += pairs
        if before + num_tokens >= known[request_id]:
            sampled += 1
            known[request_id] += 1
    return _LiveStep(StepShape(decodes, context, chunks, tokens, cached, chunk_pairs, sampled), num_pairs)


def _sched_lines(path: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Decisions in their order, and the prompt tokens of each request."""
    decisions, prompts = [], {}
    for number, line in enumerate(_gzip_lines(path), 1):
        given = _object(line)
        if given is None:
            raise ValueError(f"{path}, line {number}: not an object of JSON")
        try:
            if "det" in given:
                decisions.append({name: given[name] for name in ("i", "pre", "det")})
            elif given.get("ev") == "add":
                prompts[str(given["id"])] = int(given["prompt"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {type(error).__name__} {error} in {line.strip()[:80]!r}"
            ) from error
    return decisions, prompts


def _gzip_lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error


def _matching(folder: Path, times: _Columns, steps: Mapping[int, _LiveStep], row: int) -> _LiveStep:
    number = int(times["i"][row])
    step = steps.get(number)
    if step is None:
        raise ValueError(
            f"{folder}: steps.csv has step {number}, sched.jsonl.gz has not: the files are of different runs"
        )
    shape = step.shape
    told = tuple(int(times[name][row]) for name in ("tok", "seqs", "pairs"))
    found = (shape.num_tokens, shape.num_decode_seqs + shape.num_prefill_seqs, step.num_pairs)
    if told != found:
        raise ValueError(
            f"{folder}: step {number} has (tokens, requests, pairs) {told} in steps.csv and {found} in sched.jsonl.gz: "
            f"the files are of different runs"
        )
    return step

"""Tables of measured steps: what each step held and how long it took.

Three kinds of columns are understood (CSV, or Parquet by its ending ``.parquet`` or ``.pq``):

=========  ===========================================================================================================
kind       columns
=========  ===========================================================================================================
shape      the fields of StepShape, and the time as ``step_s``, ``step_ms`` or ``step_ns``; the exact one
recorded   ``dec, pf, ptok, dctx, pctx, pairs, step_ms``: a scheduler's record, where ``dctx`` leaves out the decodes'
           own new tokens and ``pairs`` counts them too
summed     ``sum_prefill_tokens, num_prefill_requests, sum_prefill_kv_tokens, num_decode_requests,
           sum_decode_kv_tokens, latency_ms`` and perhaps ``var_prefill_length`` (Dynamo's forward-pass metrics)
=========  ===========================================================================================================

The last two do not say how many requests sampled: every request of the batch counts, as vLLM computes logits for each.
The last one does not say how tokens and context divide over the chunks; ``_pairs_from_sums`` says what is assumed.

Columns that name a deployment (``tp``, ``gpu``, ``model``, ``dtype``, …, see ``_FACTS``) hold one value in the rows
that are read, which is then part of the provenance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.measurements import read_provenance
from windtunnel.calibrate.origins import DEPLOYMENT, gpu_name, merged, model_name
from windtunnel.calibrate.recorded_steps import RecordedSteps, read_recorded_steps
from windtunnel.sim.engine.plan import StepShape

if TYPE_CHECKING:
    import pandas as pd

_TIMES = {"step_s": 1.0, "step_ms": 1e-3, "step_ns": 1e-9}
_RECORDED = ("dec", "pf", "ptok", "dctx", "pctx", "pairs", "step_ms")
_SUMMED = (
    "sum_prefill_tokens",
    "num_prefill_requests",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
    "latency_ms",
)
_MOST_NAMED = 8
_LARGEST_COUNT = 2**40
"""No count of a step is larger: 16,384 new tokens behind 10 million of context have 2**37 pairs."""
_USUAL_S = (1e-6, 2.0)
"""Where the median step of an engine lies; outside of it the unit is probably another one."""
_LIKELY_S = (1e-4, 1.0)
_OTHER_UNITS = {
    "a thousand times shorter": 1e-3,
    "a million times shorter": 1e-6,
    "a billion times shorter": 1e-9,
    "a thousand times longer": 1e3,
    "a million times longer": 1e6,
    "a billion times longer": 1e9,
}
_SAME_TIME = 0.01
"""Share by which two columns of the same time may differ, for rounding."""
_CONTRADICTION = 2.0
"""Medians of equal shapes that are so many times apart are told of."""
_FACTS = (
    dict.fromkeys(("run",))
    | {key: key for key in DEPLOYMENT}
    | {
        "tp": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "dp": "data_parallel_size",
        "ep": "enable_expert_parallel",
        "gpu_name": "gpu",
        "gpu_type": "gpu",
        "gpu_model": "gpu",
        "hardware": "gpu",
        "model_name": "model",
        "model_id": "model",
        "backend": "engine",
        "engine_version": "engine",
        "vllm_version": "vllm",
        "torch_version": "torch",
        "kv_dtype": "kv_cache_dtype",
        "precision": "dtype",
    }
)
"""Columns, in lower case, that say which deployment a row is of, and what a provenance calls that (None: nothing)."""
_HEADER_KEYS = (
    *("date", "vllm", "torch", "python", "windtunnel", "device", "num_cpus", "architectures", "dtype", "quantization"),
    *("kv_cache_dtype", "block_size", "enforce_eager", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
    *("async_scheduling", "speculative_method", "num_speculative_tokens", "cudagraph_mode", "cudagraph_capture_sizes"),
)
"""Of a recording's header, what a profile keeps."""

_NAMES = frozenset(
    {
        *("engine", "vllm", "torch", "triton", "gpu", "device", "cpu", "model", "model_config", "architectures"),
        *("dtype", "quantization", "kv_cache_dtype", "executor", "speculative_method", "cudagraph_mode", "clock"),
    }
)
"""Facts that are text, whatever it looks like: a release 0.32 is no number."""


class StepTableError(ValueError):
    """The file is no usable table of steps; the message names file, column, row and remedy."""


@dataclass(frozen=True)
class StepTable:
    """Measured steps: a StepShape of int64 arrays and the times in seconds, all of one length.

    Raises StepTableError for arrays of different lengths, no steps, counts that no step can have together and a time
    that is not positive.
    """

    shapes: Any
    """A StepShape of arrays."""
    step_s: NDArray[np.float64]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    """What is odd about the steps, in sentences for people."""

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (*self.shapes, self.step_s)}
        if lengths == {0}:
            raise StepTableError("the table holds no steps")
        if len(lengths) > 1:
            raise StepTableError(f"the columns of a table of steps must be equally long, got {sorted(lengths)}")
        for name, values in zip(StepShape._fields, self.shapes, strict=True):
            _refuse_rows(name, values, values < 0, "at least 0")
            _refuse_rows(name, values, values > _LARGEST_COUNT, f"at most {_LARGEST_COUNT:,}")
        _refuse_rows("the time", self.step_s, ~(np.isfinite(self.step_s) & (self.step_s > 0)), "above 0 and finite")
        _refuse_rows("num_tokens", self.shapes.num_tokens, self.shapes.num_tokens == 0, "at least 1")
        _refuse_impossible(self.shapes)

    def __len__(self) -> int:
        return len(self.step_s)

    @property
    def shape_ids(self) -> NDArray[np.int64]:
        """A number for each step, the same for steps of the same shape: 0, 1, … in the order of the shapes."""
        rows = np.stack(self.shapes, axis=1)
        return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def rows(self) -> Iterator[StepShape]:
        """The steps' shapes one by one, of Python's integers."""
        return (StepShape(*values) for values in zip(*(column.tolist() for column in self.shapes), strict=True))

    def take(self, rows: NDArray[Any]) -> StepTable:
        """Those rows (numbers or a mask), as a table of their own."""
        return StepTable(
            _shape(*(values[rows] for values in self.shapes)), self.step_s[rows], self.provenance, self.remarks
        )


def read_step_table(path: str | Path, *, where: Mapping[str, str] | None = None) -> StepTable:
    """The steps of a file, those whose column ``where`` names holds that text (``{"tp": "4"}``).

    Of a table of ``windtunnel measure`` the provenance is read, too; its samples of the reference step, which is
    measured far more often than any other, are left out, and its outliers stay: a fit is robust against them, and the
    noise that it states should know them.

    Raises StepTableError for a file that cannot be read as a table of steps, lacks columns, holds several runs or
    deployments (columns such as ``run``, ``tp``, ``gpu``) without a choice, states its origin in a way that cannot be
    read, or has a bad row; OSError if it cannot be opened.
    """
    path = Path(path)
    frame = _frame(path)
    try:
        frame = _chosen(_without_reference(frame), where or {})
        shapes, step_s = _dialect(set(frame.columns))(frame)
        origin = {**_stated_facts(frame), **_origin(path), **({"where": dict(where)} if where else {})}
        return StepTable(shapes, step_s, origin, tuple(f"{path}: {text}" for text in _unusual_times(step_s)))
    except StepTableError as error:
        raise StepTableError(f"{path}: {error}") from None


def read_steps(
    paths: Iterable[str | Path], *, where: Mapping[str, str] | None = None, include_host: bool = True
) -> StepTable:
    """The steps of several tables (``read_step_table``) and recordings (``recorded_step_table``) of one deployment.

    ``where`` chooses rows of the tables, ``include_host`` is for the recordings.  Steps of equal shapes that took far
    longer in one than in another become a remark.  Raises StepTableError if they are of different deployments by their
    provenance, if one is given twice, and as for each of them.
    """
    named = [Path(path) for path in paths]
    _refuse_repeats(named)
    tables = [
        recorded_step_table([path], include_host=include_host)
        if is_recording(path)
        else read_step_table(path, where=where)
        for path in named
    ]
    if not tables:
        raise StepTableError("no tables were given: name at least one")
    if len(tables) == 1:
        return tables[0]
    try:
        origin = merged((str(path), table.provenance) for path, table in zip(named, tables, strict=True))
    except ValueError as error:
        raise StepTableError(str(error)) from None
    shapes = _shape(*(np.concatenate(columns) for columns in zip(*(table.shapes for table in tables), strict=True)))
    remarks = (*(text for table in tables for text in table.remarks), *_contradictions(named, tables))
    return StepTable(shapes, np.concatenate([table.step_s for table in tables]), origin, remarks)


def _refuse_repeats(paths: Sequence[Path]) -> None:
    known: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in known:
            raise StepTableError(f"{path} is given twice: its steps would count double; name it once")
        known[path.resolve()] = path


def _contradictions(paths: Sequence[Path], tables: Sequence[StepTable]) -> Iterator[str]:
    """Says of every table whose steps are far slower or faster than the first one's that has the same shapes."""
    known: list[tuple[Path, dict[StepShape, float]]] = []
    for path, table in zip(paths, tables, strict=True):
        medians_s = _medians_s(table)
        for other, others_s in known:
            factors = [medians_s[shape] / others_s[shape] for shape in medians_s if shape in others_s]
            if factors and not 1 / _CONTRADICTION <= (factor := float(np.median(factors))) <= _CONTRADICTION:
                yield (
                    f"{path} and {other} contradict each other: steps of the same {len(factors)} shapes take "
                    f"{factor:.3g} times as long in the first; if they are of different deployments, fit each by itself"
                )
                break
        known.append((path, medians_s))


def _medians_s(table: StepTable) -> dict[StepShape, float]:
    times_s: dict[StepShape, list[float]] = {}
    for shape, step_s in zip(table.rows(), table.step_s.tolist(), strict=True):
        times_s.setdefault(shape, []).append(step_s)
    return {shape: float(np.median(values)) for shape, values in times_s.items()}


def is_recording(path: Path) -> bool:
    """Whether that is a recording of a real engine rather than a table: a live run's folder, or a recorder's file."""
    return path.is_dir() or path.name.endswith((".jsonl", ".jsonl.gz"))


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by the ending of its name."""
    return path.suffix.casefold() in (".parquet", ".pq")


def _without_reference(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that are not marked as the reference; one without a mark is none."""
    if "is_reference" not in frame.columns:
        return frame
    column = frame["is_reference"]
    told = {value: _flag(value) for value in column.unique().tolist()}
    wrong = next((value for value, flag in told.items() if flag is None), None)
    if wrong is not None:
        raise StepTableError(f"is_reference must be true or false, got {wrong!r}")
    return frame[~column.map(told).astype(bool)]


def _flag(value: object) -> bool | None:
    """What a cell says; None for what is neither true nor false."""
    if value is None or value != value:
        return False
    text = str(value).casefold()
    return True if text in ("true", "1", "1.0") else False if text in ("false", "0", "0.0", "") else None


def _origin(path: Path) -> dict[str, Any]:
    try:
        told = read_provenance(path) if is_parquet(path) else None
    except ValueError as error:
        raise StepTableError(str(error)) from None
    return {"source": path.name} if told is None else {**told, "tables": [path.name]}


def _stated_facts(frame: pd.DataFrame) -> dict[str, Any]:
    """What columns say of the deployment; they hold one value each by now, see ``_chosen``."""
    facts = {}
    for column in frame.columns:
        key = _FACTS.get(str(column).casefold())
        values = frame[column].dropna().unique().tolist()
        if key is not None and values:
            whole = isinstance(values[0], float) and values[0].is_integer()
            facts[key] = int(values[0]) if whole else values[0]
            if key in _NAMES:
                facts[key] = str(facts[key])
    return facts


def recorded_step_table(paths: Iterable[str | Path], *, include_host: bool) -> StepTable:
    """The steps of recordings of a real engine (see ``recorded_steps``), one after the other.

    With ``include_host`` a step lasts as long as it keeps the engine busy: the scheduler's own time before and after it
    (``schedule_s``, ``update_s``) and the loop's way from one step to the next count, too.  The loop's is the median
    ``gap_s`` of steps with a decode, which had no need to wait for a request, less what the recorder itself took in it.
    Steps that overlap the one before (asynchronous scheduling) hide all that and are taken as they are.  Without
    ``include_host`` a step is the executor's time alone.

    Raises StepTableError for recordings without steps or of different deployments; otherwise as
    ``read_recorded_steps`` does.
    """
    recordings = [_recording(path) for path in paths]
    if not recordings:
        raise StepTableError("no recordings were given: name at least one")
    host = [_host_s(recording) if include_host else np.zeros(recording.num_steps) for recording in recordings]
    step_s = np.concatenate([steps.columns["step_s"] for steps in recordings]) + np.concatenate(host)
    shapes = _shape(*(np.concatenate([steps.columns[name] for steps in recordings]) for name in StepShape._fields))
    try:
        origin = merged((str(steps.path), _recorded_origin(steps, include_host)) for steps in recordings)
        return StepTable(shapes, step_s, {**origin, "tables": [_shown(steps.path) for steps in recordings]})
    except ValueError as error:
        raise StepTableError(str(error)) from None


def _recording(path: str | Path) -> RecordedSteps:
    try:
        return read_recorded_steps(path)
    except ValueError as error:
        raise StepTableError(str(error)) from None


def _host_s(recording: RecordedSteps) -> NDArray[np.float64]:
    columns = recording.columns
    overlaps = np.isnan(columns["gap_s"])
    overlaps[:1] = False
    host_s: NDArray[np.float64] = columns["schedule_s"] + columns["update_s"] + loop_gap_s(recording)
    return np.where(overlaps, 0.0, host_s)


def loop_gap_s(recording: RecordedSteps) -> float:
    """Median seconds from the end of a step's bookkeeping to the next decision where the engine had no need to wait.

    Those are the gaps before steps with a decode: its request was there already.  What the recorder took in them is
    left out where it is known.  0 for a recording without any.
    """
    columns = recording.columns
    gap_s = columns["gap_s"] - np.nan_to_num(columns["recorder_s"])
    busy = (columns["num_decode_seqs"] > 0) & np.isfinite(columns["gap_s"])
    return float(np.median(np.maximum(gap_s[busy], 0.0))) if busy.any() else 0.0


def _recorded_origin(recording: RecordedSteps, include_host: bool) -> dict[str, Any]:
    """What the recording says of itself, in the words of all provenances."""
    header = recording.header
    told = {key: header.get(key) for key in _HEADER_KEYS if header.get(key) is not None}
    release = header.get("vllm")
    with_host = " with the scheduler's and the loop's time" if include_host else ", the executor's time alone"
    return {
        **told,
        "source": "recorded",
        "statement": f"steps of a real vLLM, recorded while it served{with_host}",
        "engine": "vLLM" if release is None else f"vLLM {release}",
        "model": model_name(header.get("model")),
        "gpu": gpu_name(header.get("device")),
        "clock": "wall",
        "includes_host": include_host,
    }


def _shown(path: Path) -> str:
    """A recording's name without the folders of the machine that it was read on; of a live run with its server's."""
    return f"{path.parent.name}/{path.name}" if path.is_dir() else path.name


def _frame(path: Path) -> pd.DataFrame:
    import pandas as pd

    with path.open("rb"):
        pass  # whatever is wrong from here on is wrong with the content
    try:
        return _parquet_frame(path) if is_parquet(path) else pd.read_csv(path)
    except (OSError, ValueError) as error:  # pandas' and pyarrow's own are kinds of them
        kind = "Parquet" if is_parquet(path) else "CSV"
        raise StepTableError(f"{path}: not a {kind} file ({str(error).splitlines()[0]})") from error


def _parquet_frame(path: Path) -> pd.DataFrame:
    """The columns alone, without what pandas or somebody else wrote of them into the metadata."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        frame: pd.DataFrame = file.read().replace_schema_metadata(None).to_pandas()
    return frame


def _chosen(frame: pd.DataFrame, where: Mapping[str, str]) -> pd.DataFrame:
    for column, text in where.items():
        if column not in frame.columns:
            raise StepTableError(f"no column {column!r} to choose by; columns: {', '.join(frame.columns)}")
        kept = frame[_holds(frame[column], text)]
        if kept.empty:
            raise StepTableError(f"no row has {column} = {text!r}; there are {_values(frame[column])}")
        frame = kept
    for column in frame.columns:
        if str(column).casefold() in _FACTS and frame[column].nunique() > 1:
            raise StepTableError(
                f"several {'runs' if column == 'run' else f'deployments (column {column})'}, which must not be mixed; "
                f"choose one (--where {column}={'NAME' if column == 'run' else 'VALUE'}): {_values(frame[column])}"
            )
    return frame


def _holds(column: pd.Series, text: str) -> NDArray[np.bool_]:
    """Which cells hold that text, be they numbers that are written another way (4 and 4.0)."""
    import pandas as pd

    same = column.astype(str).str.casefold().to_numpy(object) == text.casefold()
    try:
        number = float(text)
    except ValueError:
        return np.asarray(same, bool)
    return np.asarray(same | (pd.to_numeric(column, errors="coerce").to_numpy() == number), bool)


def _values(column: pd.Series) -> str:
    return _named(sorted(column.astype(str).unique()))


def _named(values: Sequence[str]) -> str:
    more = f" and {len(values) - _MOST_NAMED} more" if len(values) > _MOST_NAMED else ""
    return ", ".join(values[:_MOST_NAMED]) + more


_Steps = tuple[Any, NDArray[np.float64]]


def _shape(*columns: Any, **named: Any) -> Any:
    return StepShape(*columns, **named)


def _dialect(columns: set[str]) -> Callable[[pd.DataFrame], _Steps]:
    if columns.issuperset(StepShape._fields) and columns.intersection(_TIMES):
        return _from_shapes
    if columns.issuperset(_RECORDED):
        return _from_record
    if columns.issuperset(_SUMMED):
        return _from_sums
    lacking = {
        name: [column for column in wanted if column not in columns]
        for name, wanted in (("shape", (*StepShape._fields, "step_s")), ("recorded", _RECORDED), ("summed", _SUMMED))
    }
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    raise StepTableError(
        f"no table of steps; of the columns of kind {nearest!r} it lacks {', '.join(lacking[nearest])} "
        f"(has {', '.join(sorted(columns)) or 'none'}); see docs/calibration.md"
    )


def _from_shapes(frame: pd.DataFrame) -> _Steps:
    return _shape(*(_whole(frame, column) for column in StepShape._fields)), _times_s(frame)


def _times_s(frame: pd.DataFrame) -> NDArray[np.float64]:
    """The step times by whichever of the columns there is; several must agree."""
    first, *others = (column for column in _TIMES if column in frame.columns)
    step_s = _floats(frame, first) * _TIMES[first]
    for other in others:
        again_s = _floats(frame, other) * _TIMES[other]
        apart = ~np.isclose(step_s, again_s, rtol=_SAME_TIME, atol=0.0)
        _refuse_rows(f"{other}, as a time beside {first},", frame[other].to_numpy(), apart, "the same time")
    return step_s


def _unusual_times(step_s: NDArray[np.float64]) -> Iterator[str]:
    """Says so where the median is no time that an engine's step takes, and which unit would make it one."""
    median_s = float(np.median(step_s)) if len(step_s) else 1.0
    if _USUAL_S[0] <= median_s <= _USUAL_S[1]:
        return
    likely = [name for name, factor in _OTHER_UNITS.items() if _LIKELY_S[0] <= median_s * factor <= _LIKELY_S[1]]
    more = (
        f", as if they were written in a unit {likely[0]} than that of their column; name the column for its unit: "
        f"{', '.join(_TIMES)}"
        if likely
        else ""
    )
    yield f"half of the steps take {'more' if median_s > 1 else 'less'} than {median_s:.3g} s, which is unusual{more}"


def _from_record(frame: pd.DataFrame) -> _Steps:
    decodes, prefills, context = _whole(frame, "dec"), _whole(frame, "pf"), _whole(frame, "dctx") + _whole(frame, "dec")
    shape = _shape(
        num_decode_seqs=decodes,
        decode_context_tokens=context,
        num_prefill_seqs=prefills,
        prefill_tokens=_whole(frame, "ptok"),
        prefill_context_tokens=_whole(frame, "pctx"),
        prefill_pairs=_whole(frame, "pairs") - context,
        num_sampled=decodes + prefills,
    )
    kept = shape.num_tokens > 0
    return _shape(*(values[kept] for values in shape)), _floats(frame, "step_ms")[kept] * 1e-3


def _from_sums(frame: pd.DataFrame) -> _Steps:
    decodes, prefills = _whole(frame, "num_decode_requests"), _whole(frame, "num_prefill_requests")
    tokens, context = _whole(frame, "sum_prefill_tokens"), _whole(frame, "sum_prefill_kv_tokens")
    variance = _floats(frame, "var_prefill_length") if "var_prefill_length" in frame.columns else np.zeros(len(frame))
    shape = _shape(
        num_decode_seqs=decodes,
        decode_context_tokens=_whole(frame, "sum_decode_kv_tokens"),
        num_prefill_seqs=prefills,
        prefill_tokens=tokens,
        prefill_context_tokens=context,
        prefill_pairs=_pairs_from_sums(prefills, tokens, context, variance),
        num_sampled=decodes + prefills,
    )
    return shape, _floats(frame, "latency_ms") * 1e-3


def _pairs_from_sums(
    prefills: NDArray[np.int64],
    tokens: NDArray[np.int64],
    context: NDArray[np.int64],
    variance: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Query-key pairs of chunks of which only sums are known.

    A chunk that takes its prompt from c to t computed tokens has t(t+1)/2 - c(c+1)/2 pairs.  The sum of t is known
    (new and cached tokens), that of t² follows from the variance of the lengths, and the context is taken to be of
    one chunk, as where vLLM goes on with a prompt that the last step's budget cut.  Exact for one chunk; the bounds
    are those of any division: all tokens in one chunk behind all the context, or equal chunks behind none.
    """
    count = np.maximum(prefills, 1)
    mean = (tokens + context) / count
    squares = count * (mean * mean + np.where(prefills > 1, variance, 0.0))
    pairs = (squares + tokens + context - context * (context + 1.0)) / 2
    least = tokens * (tokens / count + 1) / 2
    most = tokens * (context + (tokens + 1) / 2)
    return np.rint(np.clip(pairs, least, most)).astype(np.int64)


def _whole(frame: pd.DataFrame, column: str) -> NDArray[np.int64]:
    values = _floats(frame, column)
    whole = np.isfinite(values) & (values == np.rint(values))
    _refuse_rows(column, frame[column].to_numpy(), ~whole, "a whole number")
    too_large = np.abs(values) > _LARGEST_COUNT
    _refuse_rows(column, frame[column].to_numpy(), too_large, f"at most {_LARGEST_COUNT:,}")
    return values.astype(np.int64)


def _floats(frame: pd.DataFrame, column: str) -> NDArray[np.float64]:
    import pandas as pd

    try:
        values = pd.to_numeric(frame[column], errors="coerce").to_numpy(np.float64, na_value=np.nan)
    except (OverflowError, TypeError, ValueError):  # a whole number of hundreds of digits, a list, …
        raise StepTableError(f"{column} must hold numbers that fit 64 bits") from None
    _refuse_rows(column, frame[column].to_numpy(), np.isnan(values), "a number")
    return values


def _refuse_impossible(shapes: Any) -> None:
    """Refuse rows whose counts cannot be those of one step, such as tokens of chunks where there are none."""
    decodes, context, prefills, tokens, cached, pairs, sampled = shapes
    of_chunks = "at least num_prefill_seqs, and 0 where that is 0"
    _refuse_rows(
        "decode_context_tokens",
        context,
        (context < decodes) | ((decodes == 0) & (context > 0)),
        ("at least num_decode_seqs, as each reads its own new token, and 0 where that is 0"),
    )
    _refuse_rows("prefill_tokens", tokens, (tokens < prefills) | ((prefills == 0) & (tokens > 0)), of_chunks)
    _refuse_rows("prefill_context_tokens", cached, (prefills == 0) & (cached > 0), "0 without a chunk")
    most = tokens * (cached + (tokens + 1) / 2)
    _refuse_rows(
        "prefill_pairs",
        pairs,
        (pairs < tokens) | (pairs > most),
        ("at least prefill_tokens, and at most what one chunk behind all the context has"),
    )
    _refuse_rows("num_sampled", sampled, sampled > decodes + prefills, "at most the sequences of the step")


def _refuse_rows(name: str, values: NDArray[Any], bad: NDArray[np.bool_], allowed: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise StepTableError(f"row {row + 1}: {name} must be {allowed}, got {values[row]}")

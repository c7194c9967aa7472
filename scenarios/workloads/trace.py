"""A trace file in, a Workload out."""

from __future__ import annotations

import os
import stat
from typing import Any, Literal, get_args

from windtunnel.scenarios.workloads import azure, bench_serve, burstgpt, mooncake, native, sharegpt
from windtunnel.scenarios.workloads.detect import FORMATS, TraceFormat, detect_format
from windtunnel.scenarios.workloads.errors import OnBadRow, TraceError, check_on_bad_row
from windtunnel.scenarios.workloads.files import PathLike
from windtunnel.scenarios.workloads.rows import TraceRows, to_workload
from windtunnel.scenarios.workloads.timeunit import TimeUnit
from windtunnel.scenarios.workloads.transform import scale_rate, slice_time, truncate
from windtunnel.sim.workload import Workload

_OPTION_OF: dict[str, TraceFormat] = {
    "chunk_tokens": "mooncake",
    "trace_model": "burstgpt",
    "trace_run": "vllm-bench",
    "all_turns": "sharegpt",
}


def read_trace(
    path: PathLike,
    *,
    format: TraceFormat | Literal["auto"] = "auto",  # noqa: A002 - the word of the command line
    time_unit: TimeUnit | Literal["auto"] = "auto",
    start_s: float | None = None,
    duration_s: float | None = None,
    limit: int | None = None,
    rate_scale: float = 1.0,
    on_bad_row: OnBadRow = "error",
    max_backwards_s: float | None = None,
    chunk_tokens: int | None = None,
    trace_model: str | None = None,
    trace_run: int | None = None,
    all_turns: bool | None = None,
) -> Workload:
    """The requests of a trace file, as they came; the Workload's notes say all that reading it decided.

    The format is told by the content ("auto") or given; gzip files are unpacked.  Times of unknown unit are judged by
    their span ("auto") or given.  Requests are sorted by time and the first is due at 0.

    ``start_s`` and ``duration_s`` cut out a window in the trace's own time (its beginning becomes 0, so the first
    request of a window may be due a little later), ``limit`` takes the first requests of it, ``rate_scale`` then
    divides all gaps: 2.0 is twice the load.  Conversations are cut by their first request.

    A row that cannot be used raises TraceError with its line; ``on_bad_row="skip"`` leaves such rows out and notes how
    many, where and why.  With ``max_backwards_s`` a time that steps back further than that is such a row.

    For one format each: ``chunk_tokens`` (mooncake: size of hashed blocks), ``trace_model`` (burstgpt: only requests
    of this model), ``trace_run`` (vllm-bench: which result of a file, from 0), ``all_turns`` (sharegpt: whole
    conversations).

    Raises OSError as ``open`` does; TraceError for a file that is no such trace, a bad row, or nothing left to
    simulate; ValueError for an argument out of range or one that the format does not have.
    """
    _check(format, time_unit, on_bad_row, max_backwards_s)
    kind = detect_format(path) if format == "auto" else format
    options = {
        "chunk_tokens": chunk_tokens,
        "trace_model": trace_model,
        "trace_run": trace_run,
        "all_turns": all_turns,
    }
    whole = _whole(
        path,
        kind,
        on_bad_row,
        {name: value for name, value in options.items() if value is not None},
        None if time_unit == "auto" else time_unit,
        max_backwards_s,
    )
    window = slice_time(whole, start_s, duration_s)
    if len(window) == 0:
        last_s = int(whole.arrival_ns.max()) / 1e9
        raise TraceError(
            path,
            None,
            f"no request comes in the window asked for ({_window_words(start_s, duration_s)}): the trace has "
            f"{len(whole):,} requests from 0 to {last_s:,.3f} s",
        )
    return scale_rate(truncate(window, limit), rate_scale)


_KEPT_TRACES = 2
_kept: dict[tuple[object, ...], Workload] = {}


def _whole(
    path: PathLike,
    kind: TraceFormat,
    on_bad_row: OnBadRow,
    options: dict[str, Any],
    time_unit: TimeUnit | None,
    max_backwards_s: float | None,
) -> Workload:
    """The whole trace; the last ones are kept, since many runs in a row read the same, unless the file has changed."""
    found = os.stat(path)
    is_file = stat.S_ISREG(found.st_mode)
    stamp = (os.path.abspath(path), found.st_ino, found.st_mtime_ns, found.st_size)
    key = (stamp, kind, on_bad_row, tuple(options.items()), time_unit, max_backwards_s)
    if is_file and key in _kept:
        return _kept[key]
    rows = _read(path, kind, on_bad_row, options)
    whole = to_workload(rows, time_unit=time_unit, max_backwards_s=max_backwards_s, on_bad_row=on_bad_row)
    if is_file:
        while len(_kept) >= _KEPT_TRACES:
            del _kept[next(iter(_kept))]
        _kept[key] = whole
    return whole


def _window_words(start_s: float | None, duration_s: float | None) -> str:
    until = "to the end" if duration_s is None else f"for {duration_s:,g} s"
    return f"from {start_s or 0:,g} s {until}"


def _check(kind: str, time_unit: str, on_bad_row: str, max_backwards_s: float | None) -> None:
    if kind != "auto" and kind not in FORMATS:
        raise ValueError(f"format must be auto, {', '.join(FORMATS)}, got {kind!r}")
    if time_unit != "auto" and time_unit not in get_args(TimeUnit):
        raise ValueError(f"time_unit must be auto, {', '.join(get_args(TimeUnit))}, got {time_unit!r}")
    if max_backwards_s is not None and not max_backwards_s >= 0:
        raise ValueError(f"max_backwards_s must be at least 0, got {max_backwards_s}")
    check_on_bad_row(on_bad_row)


def _read(path: PathLike, kind: TraceFormat, on_bad_row: OnBadRow, options: dict[str, Any]) -> TraceRows:
    for name in options:
        if _OPTION_OF[name] != kind:
            raise ValueError(f"{name} belongs to {_OPTION_OF[name]} traces, this one is {kind}: leave it out")
    match kind:
        case "azure":
            return azure.read(path, on_bad_row=on_bad_row)
        case "mooncake":
            return mooncake.read(path, on_bad_row=on_bad_row, **options)
        case "burstgpt":
            return burstgpt.read(path, on_bad_row=on_bad_row, **options)
        case "sharegpt":
            return sharegpt.read(path, on_bad_row=on_bad_row, **options)
        case "vllm-bench":
            return bench_serve.read(path, on_bad_row=on_bad_row, **options)
        case "windtunnel":
            return native.read(path, on_bad_row=on_bad_row)

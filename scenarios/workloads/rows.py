"""What every reader hands over: the usable rows of one file, still in its order and its unit of time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from windtunnel.scenarios.workloads.cells import TimeArray
from windtunnel.scenarios.workloads.errors import BadRows, BoolArray, OnBadRow, TraceError, printable
from windtunnel.scenarios.workloads.files import PathLike
from windtunnel.scenarios.workloads.timeunit import TimeUnit, detect_time_unit, to_ns, unit_name
from windtunnel.sim.workload import IntArray, Segment, Workload

Content = tuple[tuple[Segment, ...], ...]

FOLLOWS_BAD = "the request that it follows is left out"


@dataclass(frozen=True, slots=True)
class TraceRows:
    """The rows of a trace that can be used, in the order of the file."""

    path: PathLike
    format: str
    lines: IntArray
    """Line of each row, from 1."""
    times: TimeArray | None
    """When each request came, in ``unit``; None where the format has no times.  Ignored for rows with ``previous``."""
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    unit: TimeUnit | None = None
    """Unit that the file itself fixes; None if it has to be given or judged."""
    usual_unit: TimeUnit | None = None
    """Unit that the format documents, where files with another are about."""
    max_tokens: IntArray | None = None
    priority: IntArray | None = None
    previous: IntArray | None = None
    """Row (of these) whose answer the request follows, or -1."""
    think_ns: IntArray | None = None
    content: Content | None = None
    num_streams: int = 0
    labels: tuple[str, ...] | None = None
    tenant: IntArray | None = None
    """Place of each row's tenant in ``tenants``."""
    tenants: tuple[str, ...] = ()
    max_concurrency: int | None = None
    from_start: bool = False
    """Times already count from the start of the run, so they are not shifted."""
    source: str | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lines)


def line_labels(lines: IntArray) -> tuple[str, ...]:
    """Names for requests that have none of their own: where they stand in their file."""
    return tuple(f"line {line}" for line in lines.tolist())


def to_workload(
    rows: TraceRows,
    *,
    time_unit: TimeUnit | None = None,
    max_backwards_s: float | None = None,
    on_bad_row: OnBadRow = "error",
) -> Workload:
    """The rows as a Workload: in nanoseconds, sorted by time, beginning at 0; the notes say what was done.

    ``time_unit`` None takes the file's own unit or judges it by the span.  Raises TraceError for a trace without
    rows and for a time that steps back more than ``max_backwards_s``; ValueError for a unit that the file fixes.
    """
    _not_empty(rows)
    due_ns, notes = _due_ns(rows, time_unit)
    if max_backwards_s is not None:
        keep, note = _forward_rows(rows, due_ns, max_backwards_s, on_bad_row)
        return _sorted_workload(pick(rows, keep), due_ns[keep], (*notes, *note))
    return _sorted_workload(rows, due_ns, notes)


def _not_empty(rows: TraceRows) -> None:
    if len(rows) == 0:
        left_out = " ".join(rows.notes)
        raise TraceError(rows.path, None, f"the trace has no usable request. {left_out}".rstrip())


def _due_ns(rows: TraceRows, time_unit: TimeUnit | None) -> tuple[IntArray, tuple[str, ...]]:
    if rows.times is None:
        return np.zeros(len(rows), np.int64), ()
    if rows.unit is not None and time_unit not in (None, rows.unit):
        raise ValueError(
            f"time_unit is {time_unit!r}, but the times of {Path(rows.path).name} ({rows.format}) say themselves that "
            f"they are in {unit_name(rows.unit)}: leave time_unit (--time-unit) out"
        )
    unit, note = rows.unit, ""
    if unit is None and time_unit is not None:
        unit, note = time_unit, f"Times read as {unit_name(time_unit)}, as given."
    if unit is None:
        unit, note = detect_time_unit(rows.times, rows.usual_unit)
    try:
        return to_ns(rows.times, unit), (note,) if note else ()
    except OverflowError as error:
        line = int(rows.lines[int(np.abs(rows.times).argmax())])
        raise TraceError(rows.path, line, f"{error}: give the right time_unit (--time-unit)") from None


def _forward_rows(
    rows: TraceRows, due_ns: IntArray, max_backwards_s: float, on_bad_row: OnBadRow
) -> tuple[IntArray, tuple[str, ...]]:
    bad = BadRows(rows.path, rows.lines.tolist())
    previous = np.full(len(rows), -1, np.int64) if rows.previous is None else rows.previous
    due = np.flatnonzero(previous < 0)
    back_s = (np.maximum.accumulate(due_ns[due]) - due_ns[due]) / 1e9
    for row, step_s in zip(due.tolist(), back_s.tolist(), strict=True):
        if step_s > max_backwards_s:
            bad.add(row, f"time steps back by {step_s:.6g} s, allowed are {max_backwards_s:g} s")
    for row in np.flatnonzero(previous >= 0).tolist():
        if int(previous[row]) in bad:
            bad.add(row, FOLLOWS_BAD)
    keep, note = bad.settle(on_bad_row)
    return np.flatnonzero(keep), note


def pick(rows: TraceRows, keep: IntArray) -> TraceRows:
    """Those rows only, in that order; a row that is followed by one of them must be among them."""
    if len(keep) == len(rows):
        return rows

    def column(values: IntArray | None) -> IntArray | None:
        return None if values is None else values[keep]

    return replace(
        rows,
        lines=rows.lines[keep],
        times=None if rows.times is None else rows.times[keep],
        num_prompt_tokens=rows.num_prompt_tokens[keep],
        num_output_tokens=rows.num_output_tokens[keep],
        max_tokens=column(rows.max_tokens),
        priority=column(rows.priority),
        previous=None if rows.previous is None else renumbered(rows.previous, keep),
        think_ns=column(rows.think_ns),
        content=None if rows.content is None else tuple(rows.content[row] for row in keep.tolist()),
        labels=None if rows.labels is None else tuple(rows.labels[row] for row in keep.tolist()),
        tenant=column(rows.tenant),
    )


def _sorted_workload(rows: TraceRows, due_ns: IntArray, notes: tuple[str, ...]) -> Workload:
    previous = np.full(len(rows), -1, np.int64) if rows.previous is None else rows.previous
    follows = previous >= 0
    roots = conversation_roots(previous)
    in_order = bool((np.diff(due_ns[~follows]) >= 0).all())
    order = np.arange(len(rows)) if in_order else np.argsort(due_ns[roots], kind="stable")
    note = () if in_order else (_order_note(rows, due_ns, follows),)
    first_ns = int(due_ns[~follows].min())
    if rows.from_start and first_ns < 0:
        line = int(rows.lines[~follows][due_ns[~follows].argmin()])
        raise TraceError(rows.path, line, "the arrival is negative, but times count from the start of the run here")
    arrival_ns = np.where(follows, -1, due_ns - (0 if rows.from_start else first_ns))
    max_tokens = rows.num_output_tokens if rows.max_tokens is None else rows.max_tokens
    zeros = np.zeros(len(rows), np.int64)
    return Workload(
        arrival_ns=arrival_ns[order],
        num_prompt_tokens=rows.num_prompt_tokens[order],
        num_output_tokens=rows.num_output_tokens[order],
        max_tokens=max_tokens[order],
        priority=(zeros if rows.priority is None else rows.priority)[order],
        previous=renumbered(previous, order),
        think_ns=(zeros if rows.think_ns is None else rows.think_ns)[order],
        content=None if rows.content is None else tuple(rows.content[i] for i in order.tolist()),
        num_streams=rows.num_streams,
        labels=None if rows.labels is None else _all_printable(tuple(rows.labels[i] for i in order.tolist())),
        max_concurrency=rows.max_concurrency,
        tenant=None if rows.tenant is None else rows.tenant[order],
        tenants=rows.tenants,
        source=printable(f"{Path(rows.path).name} ({rows.format})" if rows.source is None else rows.source),
        notes=_all_printable((*rows.notes, *notes, *note)),
    )


def _all_printable(texts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return tuple(map(printable, texts))
    return texts


def _order_note(rows: TraceRows, due_ns: IntArray, follows: BoolArray) -> str:
    due, lines = due_ns[~follows], rows.lines[~follows]
    back = np.flatnonzero(np.diff(due) < 0) + 1
    return (
        f"Requests were not in order of time ({len(back):,} steps back, the first at line {lines[back[0]]}): sorted, "
        "requests of the same time in the order of the file."
    )


def conversation_roots(previous: IntArray) -> IntArray:
    """For each row the first request of its conversation (itself if it follows none)."""
    roots = np.where(previous < 0, np.arange(len(previous)), previous)
    while True:
        further = roots[roots]
        if bool((further == roots).all()):
            return roots
        roots = further


def renumbered(previous: IntArray, order: IntArray) -> IntArray:
    """``previous`` of the rows picked by ``order``, as positions in that pick; every row followed must be in it."""
    place = np.full(len(previous) + 1, -1, np.int64)
    place[order] = np.arange(len(order))
    return place[previous[order]]

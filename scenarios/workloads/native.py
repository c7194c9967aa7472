"""windtunnel's own trace format: CSV with a header row, or one JSON object a line with the same names.

==================  =================================================================================================
``arrival_s``       When the request is due; or ``arrival_ms``, or ``arrival_ns`` (whole numbers).  Exactly one of
                    them.  Left empty for a request that waits for the answer to another.
``num_prompt_tokens``, ``num_output_tokens``
                    Lengths, at least 1.
``max_tokens``      Declared limit of output tokens (default: ``num_output_tokens``).
``priority``        Smaller is more urgent (default 0).
``request_id``      A name for reports (default: the line).
``tenant``          Whose request it is (default, where others have one: ``default``).
``session_id``      Turns of one conversation, in order.  The prompt of a turn contains all that was said before it.
                    A turn without an arrival follows the answer to the turn before.
``think_s``         The pause before such a turn; or ``think_ms``, ``think_ns`` (default 0).
``prefix_group``    Requests of one group begin with the same tokens,
``prefix_tokens``   as many as this (of two requests the smaller number).
``previous``        Instead of ``session_id``: number of the row (from 0) whose answer this request follows.
``content``         Instead of ``session_id`` and ``prefix_group``: the shared tokens as ``stream:end`` pairs, in CSV
                    ``0:512 3:1024``, in JSON ``[[0, 512], [3, 1024]]``; see ``sim.workload``.
==================  =================================================================================================

A file that ``write_workload`` made begins with a line that holds what belongs to no row (``# windtunnel-workload {…}``
in CSV, ``{"windtunnel_workload": {…}}`` in JSON lines); its times count from the start of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from windtunnel.scenarios.workloads.cells import TimeArray, integers, times, token_counts
from windtunnel.scenarios.workloads.errors import BadRows, OnBadRow, TraceError, brief, names, printable
from windtunnel.scenarios.workloads.files import PathLike, Table, parse_csv, parse_json_lines, read_text
from windtunnel.scenarios.workloads.rows import FOLLOWS_BAD, Content, TraceRows, line_labels, pick
from windtunnel.scenarios.workloads.timeunit import UNIT_NS, TimeUnit, to_ns
from windtunnel.sim.workload import IntArray, Segment, Workload

ARRIVALS: dict[str, TimeUnit] = {"arrival_s": "s", "arrival_ms": "ms", "arrival_ns": "ns"}
THINKS: dict[str, TimeUnit] = {"think_s": "s", "think_ms": "ms", "think_ns": "ns"}
COLUMNS = frozenset(
    (
        *ARRIVALS,
        *THINKS,
        "num_prompt_tokens",
        "num_output_tokens",
        "max_tokens",
        "priority",
        "request_id",
        "tenant",
        "session_id",
        "prefix_group",
        "prefix_tokens",
        "previous",
        "content",
    )
)

CSV_MARK = "# windtunnel-workload "
JSON_MARK = "windtunnel_workload"
VERSION = 1
DEFAULT_TENANT = "default"
"""Whose a request is that names no tenant where others do."""

_MAX = 2**62
_LONGEST_PAUSE_NS = 10**18


@dataclass(frozen=True, slots=True)
class Preamble:
    """What belongs to no row of a file that ``write_workload`` made."""

    source: str
    notes: tuple[str, ...]
    max_concurrency: int | None
    num_streams: int
    tenants: tuple[str, ...]


def read(path: PathLike, *, on_bad_row: OnBadRow = "error") -> TraceRows:
    """The rows of a trace in windtunnel's own format, CSV or JSON lines (told apart by the first character).

    Raises OSError; TraceError for a missing or misspelt column, columns that exclude each other, or a bad row.
    """
    text = read_text(path)
    made_by_us, table = _table(path, text)
    _check_columns(table)
    rows, keep, note = _rows(table, on_bad_row, () if made_by_us is None else made_by_us.tenants)
    notes = (*table.unused_note(COLUMNS), *note)
    if made_by_us is None:
        labels = rows.labels or line_labels(table.line_numbers)
        return pick(replace(rows, labels=labels, notes=notes), keep)
    return pick(
        replace(
            rows,
            from_start=True,
            source=made_by_us.source,
            max_concurrency=made_by_us.max_concurrency,
            num_streams=max(rows.num_streams, made_by_us.num_streams),
            notes=(*made_by_us.notes, *notes),
        ),
        keep,
    )


def _table(path: PathLike, text: str) -> tuple[Preamble | None, Table]:
    first, _, _ = text.lstrip().partition("\n")
    if first.startswith(CSV_MARK):
        return _preamble(path, first.removeprefix(CSV_MARK)), parse_csv(path, text)
    if first.startswith("{") and f'"{JSON_MARK}"' in first:
        try:
            inner = json.dumps(json.loads(first)[JSON_MARK])
        except (ValueError, KeyError, RecursionError) as error:
            raise TraceError(path, 1, f"the first line is damaged ({brief(error)})") from None
        return _preamble(path, inner), parse_json_lines(path, text, skip_lines=1)
    if first.startswith("{"):
        return None, parse_json_lines(path, text)
    return None, parse_csv(path, text)


def _preamble(path: PathLike, text: str) -> Preamble:
    try:
        values = json.loads(text)
        version = values["version"]
        result = Preamble(
            str(values["source"]),
            tuple(str(note) for note in values["notes"]),
            None if values["max_concurrency"] is None else _whole(values["max_concurrency"], 1),
            _whole(values["num_streams"], 0),
            tuple(str(name) for name in values.get("tenants", ())),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise TraceError(
            path, 1, f"the first line is damaged ({brief(error)}): delete it, or write the file again"
        ) from None
    if version != VERSION:
        raise TraceError(path, 1, f"the file has version {brief(version)} of the format, this program reads {VERSION}")
    return result


def _whole(value: Any, least: int) -> int:
    if type(value) is not int or not least <= value < _MAX:
        raise ValueError(f"{brief(value)} is no whole number of at least {least}")
    return value


def _check_columns(table: Table) -> None:
    given = {name.lower() for name in table.columns}
    for name in table.columns:
        near = get_close_matches(name.lower(), sorted(COLUMNS), 1, cutoff=0.8)
        if name.lower() not in COLUMNS and near and near[0] not in given:
            raise TraceError(
                table.path, table.header_line, f"there is no column {brief(name)}: do you mean {near[0]!r}?"
            )
    for exclusive in (tuple(ARRIVALS), tuple(THINKS), ("session_id", "previous"), ("session_id", "content")):
        both = [name for name in exclusive if name in given]
        if len(both) > 1:
            raise TraceError(table.path, table.header_line, f"{' and '.join(both)} exclude each other: keep one")
    if "prefix_group" in given and "content" in given:
        raise TraceError(table.path, table.header_line, "prefix_group and content exclude each other: keep one")
    if ("prefix_group" in given) != ("prefix_tokens" in given):
        raise TraceError(table.path, table.header_line, "prefix_group and prefix_tokens belong together: give both")


def _rows(table: Table, on_bad_row: OnBadRow, tenants: tuple[str, ...]) -> tuple[TraceRows, IntArray, tuple[str, ...]]:
    bad = table.bad
    prompt = token_counts("num_prompt_tokens", table.column("num_prompt_tokens"), bad)
    output = token_counts("num_output_tokens", table.column("num_output_tokens"), bad)
    max_tokens = _max_tokens(table, output)
    priority = _optional(table, "priority", lambda name, cells: integers(name, cells, bad, least=-_MAX, most=_MAX))
    arrival_name, unit, arrivals = _arrivals(table)
    has_arrival = _filled(arrivals)
    think_ns = _think_ns(table)
    previous = _previous(table, has_arrival)
    when = _times(arrival_name, arrivals, previous, bad)
    _check_arrivals(arrival_name, previous, has_arrival, think_ns, bad)
    content, num_streams = _content(table, prompt, output)
    tenant, tenants = _tenants(table, tenants, previous)
    _spread(previous, bad)
    keep, note = bad.settle(on_bad_row)
    labels = table.find("request_id")
    rows = TraceRows(
        table.path,
        "windtunnel",
        table.line_numbers,
        when,
        prompt,
        output,
        unit=unit,
        max_tokens=max_tokens,
        priority=priority,
        previous=previous,
        think_ns=think_ns,
        content=content,
        num_streams=num_streams,
        labels=None if labels is None else tuple("" if label is None else str(label) for label in labels),
        tenant=tenant,
        tenants=tenants,
    )
    return rows, np.flatnonzero(keep), note


def _tenants(table: Table, known: tuple[str, ...], previous: IntArray) -> tuple[IntArray | None, tuple[str, ...]]:
    """The tenants' places and names, those in ``known`` first, then as they come up in the file."""
    cells = table.find("tenant")
    if cells is None:
        return None, ()
    places = {name: place for place, name in enumerate(known)}
    named = [
        printable(str(cell)) if there else DEFAULT_TENANT for cell, there in zip(cells, _filled(cells), strict=True)
    ]
    tenant = np.array([places.setdefault(name, len(places)) for name in named], np.int64)
    for row in np.flatnonzero((previous >= 0) & (tenant != tenant[previous])).tolist():
        before = named[int(previous[row])]
        table.bad.add(row, f"its tenant is {brief(named[row])}, that of the turn before {brief(before)}")
    return tenant, tuple(places)


def _filled(cells: Sequence[Any]) -> list[bool]:
    return [cell is not None and cell != "" for cell in cells]


def _optional(
    table: Table, name: str, convert: Callable[[str, list[Any]], IntArray], default: Sequence[int] | None = None
) -> IntArray | None:
    """A column where empty cells take their default (0); None if the column is not there."""
    cells = table.find(name)
    if cells is None:
        return None
    neutral = [0] * len(cells) if default is None else default
    return convert(name, [cell if there else n for cell, there, n in zip(cells, _filled(cells), neutral, strict=True)])


def _max_tokens(table: Table, output: IntArray) -> IntArray | None:
    limits = _optional(table, "max_tokens", lambda name, cells: token_counts(name, cells, table.bad), output.tolist())
    if limits is not None:
        for row in np.flatnonzero(limits < output).tolist():
            table.bad.add(row, f"max_tokens is {limits[row]:,}, below num_output_tokens ({output[row]:,})")
    return limits


def _arrivals(table: Table) -> tuple[str, TimeUnit, list[Any]]:
    for name, unit in ARRIVALS.items():
        cells = table.find(name)
        if cells is not None:
            return name, unit, cells
    if not table.columns:
        return "arrival_ns", "ns", []
    raise TraceError(
        table.path,
        table.header_line,
        f"there is no column arrival_s, arrival_ms or arrival_ns; there are {names(table.columns)}",
    )


def _times(name: str, cells: Sequence[Any], previous: IntArray, bad: BadRows) -> TimeArray:
    follows = (previous >= 0).tolist()
    empty = "0" if any(isinstance(cell, str) for cell in cells) else 0
    filled = [empty if follow else cell for cell, follow in zip(cells, follows, strict=True)]
    return times(name, filled, bad)


def _think_ns(table: Table) -> IntArray | None:
    for name, unit in THINKS.items():
        cells = table.find(name)
        if cells is None:
            continue
        pauses = times(
            name, [cell if there else 0 for cell, there in zip(cells, _filled(cells), strict=True)], table.bad
        )
        for row in np.flatnonzero(pauses < 0).tolist():
            table.bad.add(row, f"{name} is {pauses[row]}, must be at least 0")
        for row in np.flatnonzero(pauses > _LONGEST_PAUSE_NS / UNIT_NS[unit]).tolist():
            table.bad.add(row, f"{name} is {pauses[row]}, far too long")
        pauses[(pauses < 0) | (pauses > _LONGEST_PAUSE_NS / UNIT_NS[unit])] = 0
        return to_ns(pauses, unit)
    return None


def _previous(table: Table, has_arrival: Sequence[bool]) -> IntArray:
    if table.find("session_id") is not None:
        return _turn_before(table.column("session_id"), has_arrival)
    cells = table.find("previous")
    previous = np.full(len(table.lines), -1, np.int64)
    if cells is None:
        return previous
    given = integers(
        "previous", [c if f else -1 for c, f in zip(cells, _filled(cells), strict=True)], table.bad, least=-1, most=_MAX
    )
    for row in np.flatnonzero(given >= np.arange(len(given))).tolist():
        table.bad.add(row, f"previous is {given[row]:,}, must name a row before this one, which is row {row:,}")
    return np.where(given < np.arange(len(given)), given, -1)


def _turn_before(sessions: Sequence[Any], has_arrival: Sequence[bool]) -> IntArray:
    last: dict[Hashable, int] = {}
    previous = np.full(len(sessions), -1, np.int64)
    for row, (session, due) in enumerate(zip(sessions, has_arrival, strict=True)):
        if session is None or session == "":
            continue
        if not due:
            previous[row] = last.get(_key(session), -1)
        last[_key(session)] = row
    return previous


def _key(cell: Any) -> Hashable:
    return cell if isinstance(cell, (str, int)) else json.dumps(cell, sort_keys=True)


def _check_arrivals(
    name: str, previous: IntArray, has_arrival: Sequence[bool], think_ns: IntArray | None, bad: BadRows
) -> None:
    for row in np.flatnonzero((previous >= 0) & np.array(has_arrival, np.bool_)).tolist():
        bad.add(row, f"{name} is given although the request follows row {previous[row]:,}: leave one of them empty")
    if think_ns is not None:
        for row in np.flatnonzero((previous < 0) & (think_ns > 0)).tolist():
            bad.add(row, "there is a think time, but the request has an arrival and follows no other")


def _spread(previous: IntArray, bad: BadRows) -> None:
    for row in np.flatnonzero(previous >= 0).tolist():
        if int(previous[row]) in bad:
            bad.add(row, FOLLOWS_BAD)


def _content(table: Table, prompt: IntArray, output: IntArray) -> tuple[Content | None, int]:
    cells = table.find("content")
    if cells is not None:
        return _given_content(cells, table.bad)
    groups, sessions = table.find("prefix_group"), table.find("session_id")
    if groups is None and sessions is None:
        return None, 0
    nothing: list[Any] = [None] * len(prompt)
    prefix_tokens = _optional(table, "prefix_tokens", lambda name, c: token_counts(name, c, table.bad, least=0))
    prefixes = np.zeros(len(prompt), np.int64) if prefix_tokens is None else prefix_tokens
    return _named_content(groups or nothing, prefixes, sessions or nothing, prompt, prompt + output, table.bad)


def _given_content(cells: Sequence[Any], bad: BadRows) -> tuple[Content, int]:
    known: dict[str, tuple[Segment, ...]] = {}
    content: list[tuple[Segment, ...]] = []
    for row, cell in enumerate(cells):
        segments = known.get(cell) if isinstance(cell, str) else None
        if segments is None:
            segments = _checked_segments(row, cell, bad)
            if isinstance(cell, str):
                known[cell] = segments
        content.append(segments)
    return tuple(content), 1 + max((stream for segments in content for stream, _ in segments), default=-1)


def _checked_segments(row: int, cell: Any, bad: BadRows) -> tuple[Segment, ...]:
    try:
        return _segments(cell)
    except (ValueError, TypeError):
        bad.add(row, f"content is {brief(cell)}, not pairs with rising ends such as 0:512 3:1024")
        return ()


def _segments(cell: Any) -> tuple[Segment, ...]:
    pairs = [pair.split(":") for pair in cell.split()] if isinstance(cell, str) else cell or ()
    if not all(type(number) in (int, str) for pair in pairs for number in pair):
        raise TypeError("not whole numbers")
    segments = tuple((int(stream), int(end)) for stream, end in pairs)
    ends = [end for _, end in segments]
    if not all(0 <= number < _MAX for segment in segments for number in segment) or ends != sorted(ends):
        raise ValueError("out of range")
    return segments


@dataclass(slots=True)
class _Session:
    stream: int
    prefix: tuple[Segment, ...]
    context_tokens: int


def _named_content(
    groups: Sequence[Any],
    prefixes: IntArray,
    sessions: Sequence[Any],
    prompt: IntArray,
    context: IntArray,
    bad: BadRows,
) -> tuple[Content, int]:
    streams: dict[tuple[str, Hashable], int] = {}
    open_sessions: dict[Hashable, _Session] = {}
    content: list[tuple[Segment, ...]] = []
    for row, (group, session) in enumerate(zip(groups, sessions, strict=True)):
        prefix = _prefix(row, group, int(prefixes[row]), int(prompt[row]), streams, bad)
        if session is None or session == "":
            content.append(prefix)
            continue
        known = open_sessions.get(_key(session))
        if known is None:
            known = _Session(streams.setdefault(("session", _key(session)), len(streams)), prefix, 0)
            open_sessions[_key(session)] = known
        _check_turn(row, known, prefix, int(prompt[row]), bad)
        known.context_tokens = int(context[row])
        content.append((*known.prefix, (known.stream, known.context_tokens)))
    return tuple(content), len(streams)


def _prefix(
    row: int, group: Any, tokens: int, prompt: int, streams: dict[tuple[str, Hashable], int], bad: BadRows
) -> tuple[Segment, ...]:
    if group is None or group == "" or tokens == 0:
        if tokens:
            bad.add(row, f"prefix_tokens is {tokens:,}, but there is no prefix_group")
        return ()
    if tokens > prompt:
        bad.add(row, f"prefix_tokens is {tokens:,}, more than num_prompt_tokens ({prompt:,})")
    return ((streams.setdefault(("group", _key(group)), len(streams)), tokens),)


def _check_turn(row: int, session: _Session, prefix: tuple[Segment, ...], prompt: int, bad: BadRows) -> None:
    if prefix != session.prefix:
        bad.add(row, "prefix_group and prefix_tokens differ from those of the turn before")
    if prompt < session.context_tokens:
        bad.add(
            row,
            f"num_prompt_tokens is {prompt:,}, but the conversation before this turn has {session.context_tokens:,} "
            "tokens and its prompt must contain it (without session_id nothing is shared)",
        )


def preamble(workload: Workload) -> dict[str, Any]:
    """What belongs to no row, for the first line of a file."""
    return {
        "version": VERSION,
        "source": workload.source,
        "notes": list(workload.notes),
        "max_concurrency": workload.max_concurrency,
        "num_streams": workload.num_streams,
        **({"tenants": list(workload.tenants)} if workload.tenants else {}),
    }

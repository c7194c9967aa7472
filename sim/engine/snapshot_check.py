"""What data must look like to be a snapshot: every field's kind and range, before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from windtunnel.sim.engine.blocks import PoolState
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import Progress
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.snapshot import PlanState, RecentRequest, RequestState, Snapshot

MOST_ROWS = 1_000_000
_LARGE = 1 << 53
_LATEST_NS = 1 << 62
"""146 years."""
_KEY = 1 << 64


class SnapshotError(ValueError):
    """Data that is no snapshot of a version that is known here, or contradicts itself."""


class Span(NamedTuple):
    """A whole number from ``low`` to ``high``."""

    low: int
    high: int = _LARGE
    may_be_none: bool = False


_COUNT, _TIME, _TIME_OR_NEVER, _SIGNED = Span(0), Span(0, _LATEST_NS), Span(-1, _LATEST_NS), Span(-_LARGE)
_TOP: Mapping[str, Span] = {
    "now_ns": _TIME,
    **dict.fromkeys(
        (
            *("clock", "num_steps_done", "num_decisions", "num_admitted", "max_running", "num_running"),
            "num_waiting",
        ),
        _COUNT,
    ),
}
_REQUEST: Mapping[str, Span] = {
    "arrival_ns": _TIME,
    "num_prompt_tokens": Span(1),
    "num_output_tokens": Span(1, may_be_none=True),
    "max_tokens": Span(1),
    "priority": _SIGNED,
    "status": Span(0, 6),
    "order": Span(-1),
    "stop_after": _COUNT,
    "may_emit": Span(1),
    "num_owed_tokens": _SIGNED,
    "num_computed_tokens": _COUNT,
    "span_start": _SIGNED,
    "scheduled_ns": _TIME_OR_NEVER,
    "first_token_ns": _TIME_OR_NEVER,
    **dict.fromkeys(
        (
            *("num_emitted", "num_start_tokens", "num_findable_blocks", "num_preemptions", "high_water_tokens"),
            *("num_recomputed_tokens", "num_cached_tokens", "num_resumed_cached_tokens", "num_resumed_query_tokens"),
            "num_emitted_tokens",
        ),
        _COUNT,
    ),
}
_RECENT: Mapping[str, Span] = {
    "arrival_ns": _TIME,
    "num_prompt_tokens": Span(1),
    "max_tokens": Span(1),
    "num_output_tokens": Span(0, may_be_none=True),
    "priority": _SIGNED,
}
_LIST_KEYS = ("known", "own_base", "num_shared_blocks", "may_look_up")


def check_data(value: Mapping[str, Any]) -> None:
    """Raises SnapshotError, with the place and what is allowed there, for a field that is missing, unknown or wrong."""
    names = ("schema", "version", *(each.name for each in fields(Snapshot)), "request_columns", "recent_columns")
    _has_exactly("the snapshot", value, names)
    for name, span in _TOP.items():
        check_whole(name, value[name], span)
    _flag("looks_at_each", value["looks_at_each"])
    _check_config(value["config"])
    places = Span(0, max(len(_list("requests", value["requests"])) - 1, 0))
    _wholes("prefilling", value["prefilling"], places)
    if len(set(value["prefilling"])) != len(value["prefilling"]):
        raise SnapshotError("prefilling must name each request once, but names one twice: take the snapshot anew")
    _check_rows("requests", value["requests"], value["request_columns"], RequestState._fields)
    for number, row in enumerate(value["requests"]):
        _check_request(f"requests[{number}]", dict(zip(RequestState._fields, row, strict=True)))
    _check_rows("recent", value["recent"], value["recent_columns"], RecentRequest._fields)
    for number, row in enumerate(value["recent"]):
        _check_recent(f"recent[{number}]", dict(zip(RecentRequest._fields, row, strict=True)))
    _check_pool(value["pool"])
    for number, plan in enumerate(_list("under_way", value["under_way"])):
        _check_plan(f"under_way[{number}]", plan, places)


def check_whole(place: str, value: object, span: Span) -> None:
    """Raises SnapshotError for what is no whole number of the span."""
    if value is None and span.may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise SnapshotError(f"{place} must be a whole number, got {_shown(value)}: take the snapshot anew")
    if not span.low <= value <= span.high:
        raise SnapshotError(
            f"{place} must be from {span.low:,} to {span.high:,}, got {_shown(value)}: take the snapshot anew"
        )


def _check_config(config: object) -> None:
    named = {each.name: each for each in fields(SchedulerConfig)}
    plain = _has_exactly("config", config, named)
    for name, each in named.items():
        place, value, kind = f"config.{name}", plain[name], str(each.type)
        if kind == "bool":
            _flag(place, value)
        elif kind == "str":
            _is(place, value, str, "text")
        elif kind == "float":
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SnapshotError(f"{place} must be a number, got {_shown(value)}: take the snapshot anew")
        else:
            check_whole(place, value, Span(-1, may_be_none="None" in kind))


def _check_request(place: str, row: Mapping[str, Any]) -> None:
    named = row["request_id"]
    if isinstance(named, bool) or not isinstance(named, int | str):
        raise SnapshotError(f"{place}.request_id must be a whole number or text, got {_shown(named)}")
    place = f"{place} (request {_shown(named)})"
    for name, span in _REQUEST.items():
        check_whole(f"{place}.{name}", row[name], span)
    _flag(f"{place}.is_decoding", row["is_decoding"])
    _wholes(f"{place}.block_ids", row["block_ids"], Span(1))
    _check_keys(f"{place}.keys", row["keys"])
    if row["progress"] is not None:
        numbers = [
            int(each) if isinstance(each, bool) else each for each in _list(f"{place}.progress", row["progress"])
        ]
        _wholes(f"{place}.progress", numbers, _SIGNED)
        if len(numbers) != len(Progress.__slots__):
            raise SnapshotError(f"{place}.progress must have {len(Progress.__slots__)} numbers, got {len(numbers)}")


def _check_keys(place: str, keys: object) -> None:
    if keys is None:
        return
    if isinstance(keys, Mapping) and "pieces" in keys:
        _has_exactly(place, keys, ("pieces",))
        _tuples(f"{place}.pieces", keys["pieces"], 2, Span(-_KEY, _KEY))
        if not keys["pieces"]:
            raise SnapshotError(f"{place}.pieces must not be empty: take the snapshot anew")
        return
    plain = _has_exactly(place, keys, _LIST_KEYS)
    _wholes(f"{place}.known", plain["known"], Span(-_KEY, _KEY))
    check_whole(f"{place}.own_base", plain["own_base"], Span(0, _KEY))
    check_whole(f"{place}.num_shared_blocks", plain["num_shared_blocks"], _COUNT)
    _flag(f"{place}.may_look_up", plain["may_look_up"])


def _check_recent(place: str, row: Mapping[str, Any]) -> None:
    for name, span in _RECENT.items():
        check_whole(f"{place}.{name}", row[name], span)
    _wholes(f"{place}.prefix_keys", row["prefix_keys"], Span(-_KEY, _KEY))


def _check_pool(pool: object) -> None:
    plain = _has_exactly("pool", pool, PoolState._fields)
    check_whole("pool.num_blocks", plain["num_blocks"], Span(2))
    check_whole("pool.num_ids", plain["num_ids"], Span(2))
    _flag("pool.caching", plain["caching"])
    _flag("pool.unhashed_first", plain["unhashed_first"])
    _wholes("pool.blank", plain["blank"], Span(1))
    for number, run in enumerate(_list("pool.runs", plain["runs"])):
        kind, blocks = _pair(f"pool.runs[{number}]", run)
        check_whole(f"pool.runs[{number}][0]", kind, Span(0, 2))
        _wholes(f"pool.runs[{number}][1]", blocks, Span(1))
    _tuples("pool.keys", plain["keys"], 2, Span(-_KEY, _KEY))
    _tuples("pool.extra_holders", plain["extra_holders"], 2, Span(1))


def _check_plan(place: str, plan: object, places: Span) -> None:
    plain = _has_exactly(place, plan, PlanState._fields)
    check_whole(f"{place}.number", plain["number"], _SIGNED)
    _wholes(f"{place}.shape", plain["shape"], _COUNT)
    if len(plain["shape"]) != len(StepShape._fields):
        raise SnapshotError(f"{place}.shape must have {len(StepShape._fields)} numbers, got {len(plain['shape'])}")
    for number, chunk in enumerate(_list(f"{place}.chunks", plain["chunks"])):
        where = f"{place}.chunks[{number}]"
        if len(_list(where, chunk)) != 5:
            raise SnapshotError(f"{where} must have 5 values, got {len(chunk)}: take the snapshot anew")
        check_whole(f"{where}[0]", chunk[0], places)
        _wholes(where, chunk[1:4], _COUNT)
        _flag(f"{where}[4]", chunk[4])
    _wholes(f"{place}.owed", plain["owed"], places)
    _wholes(f"{place}.padded", plain["padded"], places)
    _tuples(f"{place}.num_drafts", plain["num_drafts"], 2, _COUNT)
    _tuples(f"{place}.preemptions", plain["preemptions"], 5, _COUNT)


# -- kinds of values


def _has_exactly(place: str, value: object, names: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SnapshotError(f"{place} must be an object, got {_shown(value)}: take the snapshot anew")
    known = list(names)
    for name in known:
        if name not in value:
            raise SnapshotError(f"{place} is damaged: {name} is missing; take the snapshot anew")
    unknown = [name for name in value if name not in known]
    if unknown:
        raise SnapshotError(
            f"{place} has the unknown field {_shown(unknown[0])}; known are {', '.join(known)}: take the snapshot anew"
        )
    return value


def _check_rows(name: str, rows: object, columns: object, expected: Sequence[str]) -> None:
    if columns != list(expected):
        raise SnapshotError(f"the snapshot's {name} have the columns {_shown(columns)}, expected {list(expected)}")
    found = _list(name, rows)
    if len(found) > MOST_ROWS or any(not isinstance(row, list | tuple) or len(row) != len(expected) for row in found):
        raise SnapshotError(f"{name} must be at most {MOST_ROWS:,} rows of {len(expected)} values")


def _list(place: str, value: object) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise SnapshotError(f"the snapshot is damaged: {place} must be a list, got {_shown(value)}; take it anew")


def _pair(place: str, value: object) -> tuple[Any, Any]:
    found = _list(place, value)
    if len(found) != 2:
        raise SnapshotError(f"{place} must have 2 values, got {len(found)}: take the snapshot anew")
    return found[0], found[1]


def _wholes(place: str, values: object, span: Span) -> None:
    found = _list(place, values)
    for number, value in enumerate(found):
        if type(value) is not int or not span.low <= value <= span.high:
            check_whole(f"{place}[{number}]", value, span)


def _tuples(place: str, rows: object, width: int, span: Span) -> None:
    for number, row in enumerate(_list(place, rows)):
        where = f"{place}[{number}]"
        if len(_list(where, row)) != width:
            raise SnapshotError(f"{where} must have {width} values, got {len(row)}: take the snapshot anew")
        _wholes(where, row, span)


def _flag(place: str, value: object) -> None:
    _is(place, value, bool, "true or false")


def _is(place: str, value: object, kind: type, words: str) -> None:
    if not isinstance(value, kind):
        raise SnapshotError(f"{place} must be {words}, got {_shown(value)}: take the snapshot anew")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

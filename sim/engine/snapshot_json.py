"""Snapshots as JSON: over HTTP, in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from windtunnel.sim.engine.blocks import PoolState
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import STREAM_BITS, BlockKeys, ListedKeys, PrivateKeys, StreamKeys
from windtunnel.sim.engine.per_request import Progress
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.snapshot import OWN_STREAMS, PlanState, RecentRequest, RequestState, Snapshot

SCHEMA = "windtunnel.snapshot"
VERSION = 1
_MOST_ROWS = 1_000_000


class SnapshotError(ValueError):
    """Data that is no snapshot of a version that is known here, or contradicts itself."""


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot as plain data that ``from_json`` reads; keys that follow from tokens become running numbers.

    So nothing of what the requests say can be found in it.
    """
    number = _Numbers() if snapshot.has_content_keys else _same
    plain = {
        field.name: getattr(snapshot, field.name)
        for field in fields(snapshot)
        if field.name not in ("config", "requests", "pool", "under_way", "recent")
    }
    pool = snapshot.pool._asdict()
    pool["keys"] = [(block, number(key)) for block, key in snapshot.pool.keys]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        **plain,
        "config": asdict(snapshot.config),
        "pool": pool,
        "request_columns": list(RequestState._fields),
        "requests": [list(each._replace(keys=_keys_json(each.keys, number))) for each in snapshot.requests],
        "under_way": [each._asdict() for each in snapshot.under_way],
        "recent_columns": list(RecentRequest._fields),
        "recent": [
            list(each._replace(prefix_keys=[number(key) for key in each.prefix_keys])) for each in snapshot.recent
        ],
    }


def from_json(value: object) -> Snapshot:
    """The snapshot that ``to_json`` wrote.

    Raises SnapshotError, saying where, for data that is none, is of another version, or contradicts itself.
    """
    if not isinstance(value, Mapping) or value.get("schema") != SCHEMA:
        raise SnapshotError(f"this is no snapshot: it must be an object whose schema is {SCHEMA!r}")
    if value.get("version") != VERSION:
        raise SnapshotError(
            f"the snapshot has version {value.get('version')!r}, this windtunnel reads {VERSION}: take it anew"
        )
    try:
        snapshot = _snapshot(value)
        _check(snapshot)
    except SnapshotError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) and error.args else str(error)
        raise SnapshotError(f"the snapshot is damaged: {what}; take it anew") from error
    return snapshot


class _Numbers:
    """Running numbers below zero for keys that follow from tokens; those of ``ListedKeys``' own streams stay."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def __call__(self, key: int) -> int:
        if OWN_STREAMS << STREAM_BITS <= key < 1 << 63:
            return key
        return self._numbers.setdefault(key, -1 - len(self._numbers))


def _same(key: int) -> int:
    return key


def _keys_json(keys: BlockKeys | None, number: Callable[[int], int]) -> Any:
    if keys is None:
        return None
    if isinstance(keys, PrivateKeys | StreamKeys):
        return {"pieces": [list(piece) for piece in keys.pieces]}
    assert isinstance(keys, ListedKeys), "there are no other keys in a snapshot"
    return {
        "known": [number(key) for key in keys.known],
        "own_base": keys.own_base,
        "num_shared_blocks": keys.num_shared_blocks,
        "may_look_up": keys.may_look_up,
    }


def _keys(value: Any) -> BlockKeys | None:
    if value is None:
        return None
    if "pieces" in value:
        return StreamKeys.from_pieces(
            [(_whole("keys", behind), _whole("keys", base)) for behind, base in value["pieces"]]
        )
    return ListedKeys(
        _wholes("keys", value["known"]),
        _whole("own_base", value["own_base"]),
        _whole("num_shared_blocks", value["num_shared_blocks"]),
        may_look_up=bool(value["may_look_up"]),
    )


def _snapshot(value: Mapping[str, Any]) -> Snapshot:
    config_names = [field.name for field in fields(SchedulerConfig)]
    config = SchedulerConfig(**{name: value["config"][name] for name in config_names})
    whole = {
        name: _whole(name, value[name])
        for name in (
            *("now_ns", "clock", "num_steps_done", "num_decisions", "num_admitted", "max_running"),
            *("num_running", "num_waiting"),
        )
    }
    return Snapshot(
        config=config,
        looks_at_each=bool(value["looks_at_each"]),
        prefilling=_wholes("prefilling", value["prefilling"]),
        requests=[_request_state(row) for row in _rows(value, "requests", RequestState._fields)],
        pool=_pool_state(value["pool"]),
        under_way=[_plan_of_json(each) for each in value["under_way"]],
        recent=[_recent(row) for row in _rows(value, "recent", RecentRequest._fields)],
        **whole,
    )


def _rows(value: Mapping[str, Any], name: str, columns: Sequence[str]) -> list[Sequence[Any]]:
    given = value[f"{name[:-1] if name.endswith('s') else name}_columns"]
    if list(given) != list(columns):
        raise SnapshotError(f"the snapshot's {name} have the columns {given}, expected {list(columns)}")
    rows: list[Sequence[Any]] = value[name]
    if len(rows) > _MOST_ROWS or any(len(row) != len(columns) for row in rows):
        raise SnapshotError(f"{name} must be at most {_MOST_ROWS:,} rows of {len(columns)} values")
    return rows


def _request_state(row: Sequence[Any]) -> RequestState:
    state = RequestState(*row)
    if not isinstance(state.request_id, int | str):
        raise SnapshotError(f"request_id must be a whole number or text, got {state.request_id!r}")
    plain = {
        name: _whole(name, getattr(state, name))
        for name in RequestState._fields[1:25]
        if not (name == "num_output_tokens" and state.num_output_tokens is None) and name != "is_decoding"
    }
    progress = None if state.progress is None else tuple(map(int, _wholes("progress", map(int, state.progress))))
    return state._replace(
        **plain,
        is_decoding=bool(state.is_decoding),
        num_emitted_tokens=_whole("num_emitted_tokens", state.num_emitted_tokens),
        block_ids=_wholes("block_ids", state.block_ids),
        keys=_keys(state.keys),
        progress=progress,
    )


def _recent(row: Sequence[Any]) -> RecentRequest:
    state = RecentRequest(*row)
    numbers = {
        name: _whole(name, getattr(state, name))
        for name in RecentRequest._fields[:5]
        if getattr(state, name) is not None or name != "num_output_tokens"
    }
    return state._replace(**numbers, prefix_keys=_wholes("prefix_keys", state.prefix_keys))


def _pool_state(value: Mapping[str, Any]) -> PoolState:
    return PoolState(
        _whole("num_blocks", value["num_blocks"]),
        _whole("num_ids", value["num_ids"]),
        bool(value["caching"]),
        bool(value["unhashed_first"]),
        _wholes("blank", value["blank"]),
        [(_whole("kind", kind), _wholes("runs", run)) for kind, run in value["runs"]],
        [(_whole("block", block), _whole("key", key)) for block, key in value["keys"]],
        [(_whole("block", block), _whole("holders", num)) for block, num in value["extra_holders"]],
    )


def _plan_of_json(value: Mapping[str, Any]) -> PlanState:
    return PlanState(
        _whole("number", value["number"]),
        StepShape(*_wholes("shape", value["shape"])),
        [(*_wholes("chunks", chunk[:4]), bool(chunk[4])) for chunk in value["chunks"]],  # type: ignore[misc]
        _wholes("owed", value["owed"]),
        [(_whole("request", place), _whole("drafts", num)) for place, num in value["num_drafts"]],
        _wholes("padded", value["padded"]),
        [tuple(_wholes("preemptions", each)) for each in value["preemptions"]],  # type: ignore[misc]
    )


def _whole(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise SnapshotError(f"{name} must be a whole number, got {value!r}")


def _wholes(name: str, values: Iterable[Any]) -> list[int]:
    found = list(values)
    if all(type(value) is int for value in found):
        return found
    raise SnapshotError(f"{name} must hold whole numbers only")


def _check(snapshot: Snapshot) -> None:
    """What a scheduler takes for granted: statuses that fit the queues, and blocks that are held or free."""
    live, num = snapshot.num_running + snapshot.num_waiting, len(snapshot.requests)
    if not 0 <= snapshot.num_running <= live <= num or snapshot.num_waiting < 0:
        raise SnapshotError(
            f"{snapshot.num_running} running and {snapshot.num_waiting} waiting do not fit {num} requests"
        )
    for place, state in enumerate(snapshot.requests):
        expected = (1,) if place < snapshot.num_running else (0, 3) if place < live else (4, 5, 6)
        if state.status not in expected:
            raise SnapshotError(f"request {state.request_id} has status {state.status}, its place needs {expected}")
        if state.num_prompt_tokens < 1 or not 0 <= state.num_emitted_tokens <= state.may_emit:
            raise SnapshotError(f"request {state.request_id}: its numbers of tokens contradict each other")
        if snapshot.looks_at_each and place < live and len(state.progress or ()) != len(Progress.__slots__):
            raise SnapshotError(f"request {state.request_id}: progress must have {len(Progress.__slots__)} numbers")
    places = [*snapshot.prefilling]
    for plan in snapshot.under_way:
        places += [*plan.owed, *plan.padded, *(each[0] for each in (*plan.chunks, *plan.num_drafts))]
        places += [place for each in plan.preemptions for place in (each[0], each[4])]
    if any(not 0 <= place < num for place in places):
        raise SnapshotError(f"prefilling and under_way must name requests by their place, 0 to {num - 1}")
    _check_blocks(snapshot)


def _check_blocks(snapshot: Snapshot) -> None:
    pool = snapshot.pool
    free = [*pool.blank, *(block for _, run in pool.runs for block in run)]
    holders: dict[int, int] = {}
    for state in snapshot.requests:
        for block in state.block_ids:
            holders[block] = holders.get(block, 0) + 1
    known = {*free, *holders}
    if len(free) + len(holders) != pool.num_blocks - 1 or len(known) != pool.num_blocks - 1:
        raise SnapshotError(
            f"{len(free)} free and {len(holders)} held blocks are not the {pool.num_blocks - 1} usable ones of the pool"
        )
    if known and (min(known) < 1 or max(known) >= pool.num_ids):
        raise SnapshotError(f"block numbers must be from 1 to {pool.num_ids - 1}")
    if {block: num - 1 for block, num in holders.items() if num > 1} != dict(pool.extra_holders):
        raise SnapshotError("extra_holders contradicts the requests' blocks")
    if pool.num_blocks != snapshot.config.num_gpu_blocks or any(kind not in (0, 1, 2) for kind, _ in pool.runs):
        raise SnapshotError("the pool contradicts num_gpu_blocks, or has runs of an unknown kind")

"""Snapshots as JSON: over HTTP, in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from windtunnel.sim.engine.blocks import PoolState
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import STREAM_BITS, BlockKeys, ListedKeys, PrivateKeys, StreamKeys
from windtunnel.sim.engine.per_request import Progress
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.request import Status
from windtunnel.sim.engine.snapshot import OWN_STREAMS, PlanState, RecentRequest, RequestState, Snapshot
from windtunnel.sim.engine.snapshot_check import SnapshotError, check_data

__all__ = ["SCHEMA", "VERSION", "SnapshotError", "from_json", "to_json"]

SCHEMA = "windtunnel.snapshot"
VERSION = 1


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
        check_data(value)
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
        return StreamKeys.from_pieces([(behind, base) for behind, base in value["pieces"]])
    return ListedKeys(value["known"], value["own_base"], value["num_shared_blocks"], may_look_up=value["may_look_up"])


def _snapshot(value: Mapping[str, Any]) -> Snapshot:
    own = ("config", "requests", "pool", "under_way", "recent")
    return Snapshot(
        config=SchedulerConfig(**value["config"]),
        requests=[_request_state(row) for row in value["requests"]],
        pool=_pool_state(value["pool"]),
        under_way=[_plan_of_json(each) for each in value["under_way"]],
        recent=[RecentRequest(*row) for row in value["recent"]],
        **{field.name: value[field.name] for field in fields(Snapshot) if field.name not in own},
    )


def _request_state(row: Sequence[Any]) -> RequestState:
    state = RequestState(*row)
    progress = None if state.progress is None else tuple(map(int, state.progress))
    return state._replace(keys=_keys(state.keys), progress=progress)


def _pool_state(value: Mapping[str, Any]) -> PoolState:
    state = PoolState(**value)
    return state._replace(
        runs=[(kind, run) for kind, run in state.runs],
        keys=[(block, key) for block, key in state.keys],
        extra_holders=[(block, num) for block, num in state.extra_holders],
    )


def _plan_of_json(value: Mapping[str, Any]) -> PlanState:
    state = PlanState(**value)
    return state._replace(
        shape=StepShape(*state.shape),
        chunks=[tuple(chunk) for chunk in state.chunks],  # type: ignore[misc]
        num_drafts=[(place, num) for place, num in state.num_drafts],
        preemptions=[tuple(each) for each in state.preemptions],  # type: ignore[misc]
    )


def _check(snapshot: Snapshot) -> None:
    """What a scheduler takes for granted: statuses that fit the queues, and blocks that are held or free."""
    live, num = snapshot.num_running + snapshot.num_waiting, len(snapshot.requests)
    if not 0 <= snapshot.num_running <= live <= num or snapshot.num_waiting < 0:
        raise SnapshotError(
            f"{snapshot.num_running} running and {snapshot.num_waiting} waiting do not fit {num} requests"
        )
    names = [state.request_id for state in snapshot.live]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SnapshotError(f"request {twice} is in the queues twice: take the snapshot anew")
    for place, state in enumerate(snapshot.requests):
        expected = (1,) if place < snapshot.num_running else (0, 3) if place < live else (4, 5, 6)
        if state.status not in expected:
            raise SnapshotError(f"request {state.request_id} has status {state.status}, its place needs {expected}")
        if place < live:
            _check_tokens(snapshot, state)
    if any(place >= snapshot.num_running for place in snapshot.prefilling):
        raise SnapshotError(f"prefilling must name running requests, 0 to {snapshot.num_running - 1}")
    for plan in snapshot.under_way:
        if any(place >= num for each in plan.preemptions for place in (each[0], each[4])):
            raise SnapshotError(f"the preemptions under way must name requests by their place, 0 to {num - 1}")
        if any(place >= num for place, _ in plan.num_drafts):
            raise SnapshotError(f"num_drafts must name requests by their place, 0 to {num - 1}")
    _check_blocks(snapshot)


def _check_tokens(snapshot: Snapshot, state: RequestState) -> None:
    """The request's numbers beside each other and beside its blocks."""
    name, size, held = f"request {state.request_id}", snapshot.config.block_size, len(state.block_ids)
    length = state.num_output_tokens
    if not state.num_emitted_tokens <= state.may_emit <= state.max_tokens or (
        length is not None and length < state.num_emitted_tokens
    ):
        raise SnapshotError(
            f"{name}: its numbers of tokens contradict each other: num_emitted_tokens {state.num_emitted_tokens}, "
            f"may_emit {state.may_emit}, max_tokens {state.max_tokens}, num_output_tokens {length}"
        )
    if snapshot.looks_at_each and state.progress is None:
        raise SnapshotError(f"{name}: progress must have {len(Progress.__slots__)} numbers")
    ahead = snapshot.config.num_lookahead_tokens + 2 * snapshot.config.num_speculative_tokens + 2
    most = -(-(state.num_computed_tokens + ahead) // size)
    if state.status == Status.RUNNING and not -(-state.num_computed_tokens // size) <= held <= most:
        raise SnapshotError(
            f"{name}: {held} blocks of config.block_size {size} do not hold its {state.num_computed_tokens} computed "
            "tokens; take the snapshot anew"
        )


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

"""The state of a running engine as plain data, from which a simulation goes on with the very same decisions.

A snapshot is taken between two decisions, on the thread that drives the scheduler.  It holds the queues in their
order, the progress of every request, the block pool with its free queue and prefix index, and the steps that are
decided and not over.  It holds no tokens: what of them the scheduler can tell apart are the keys of the KV blocks.
Left out is what no later decision depends on (a request's token times so far).

``restore`` makes a scheduler of it.  ``change`` then gives that scheduler other limits, as a what-if.
``sim.engine.snapshot_json`` writes and reads snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from windtunnel.sim.engine.blocks import BlockPool, PoolState
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import STREAM_BITS, BlockKeys, ListedKeys, PrivateKeys, StreamKeys
from windtunnel.sim.engine.per_request import PerRequestScheduler, Progress, SpeculativePlan
from windtunnel.sim.engine.plan import Chunk, Preemption, StepPlan, StepShape
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.engine.scheduler import Scheduler

OWN_STREAMS = 1 << 38
"""Streams from here on are those that ``ListedKeys`` go on with."""
CHANGEABLE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_gpu_blocks",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "policy",
    "watermark",
    "max_num_active_seqs",
    "max_num_scheduled_tokens",
    "scheduler_reserve_full_isl",
)
"""Fields of SchedulerConfig that ``change`` knows a meaning for in the middle of a run."""

MOST_BLOCKS = 1 << 22
"""Most ``num_gpu_blocks`` that ``change`` grows a pool to, or 16 times the pool it has, whichever is more."""
MOST_SEQS = 1 << 20
"""Most ``max_num_seqs`` that it takes."""
MOST_TOKENS = 1 << 24
"""Most tokens in a step's budget that it takes."""
OutputLength = Callable[["RequestState"], int]
"""How many output tokens a request will have had in all when it is over."""


class RequestState(NamedTuple):
    """A request of the engine, in numbers; names are those of ``Request``."""

    request_id: int | str
    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int | None
    """How long its answer will be in all where that is known; None in a live engine."""
    max_tokens: int
    priority: int
    status: int
    """``Status``."""
    order: int
    stop_after: int
    may_emit: int
    num_emitted: int
    """Output tokens so far; of one that decodes, those before it began to."""
    num_owed_tokens: int
    num_start_tokens: int
    num_computed_tokens: int
    is_decoding: bool
    span_start: int
    num_findable_blocks: int
    scheduled_ns: int
    first_token_ns: int
    num_preemptions: int
    high_water_tokens: int
    num_recomputed_tokens: int
    num_cached_tokens: int
    num_resumed_cached_tokens: int
    num_resumed_query_tokens: int
    num_emitted_tokens: int
    """Output tokens so far."""
    block_ids: Sequence[int]
    keys: BlockKeys | None
    progress: tuple[int, ...] | None
    """Bookkeeping of an engine that looks at every request in every step (``per_request.Progress``), in its order."""


class PlanState(NamedTuple):
    """A step that is decided and not over; requests are numbered by their place in the snapshot."""

    number: int
    shape: tuple[int, ...]
    chunks: Sequence[tuple[int, int, int, int, bool]]
    owed: Sequence[int]
    num_drafts: Sequence[tuple[int, int]]
    padded: Sequence[int]
    preemptions: Sequence[tuple[int, int, int, int, int]]
    """(victim, computed tokens, blocks, free blocks, for whom) as in ``Preemption``."""


class RecentRequest(NamedTuple):
    """A request that came not long ago: what further ones may look like."""

    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int
    num_output_tokens: int | None
    """None while it is not over."""
    priority: int
    prefix_keys: Sequence[int]
    """Keys of the full blocks at its prompt's beginning, as far as others may have the same."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine at one moment."""

    config: SchedulerConfig
    now_ns: int
    """On the engine's clock."""
    looks_at_each: bool
    """Whether its scheduler is a ``PerRequestScheduler``."""
    clock: int
    num_steps_done: int
    num_decisions: int
    num_admitted: int
    max_running: int
    num_running: int
    """The first of the requests run, in the order of admission; the next wait, in theirs; the last are over but still
    named by a step under way."""
    num_waiting: int
    prefilling: Sequence[int]
    requests: Sequence[RequestState]
    pool: PoolState
    under_way: Sequence[PlanState] = ()
    recent: Sequence[RecentRequest] = ()
    """Oldest first."""

    @property
    def live(self) -> Sequence[RequestState]:
        """The requests that run or wait."""
        return self.requests[: self.num_running + self.num_waiting]

    @property
    def has_content_keys(self) -> bool:
        """Whether its blocks are told apart by what they hold, not by streams that a workload named."""
        return any(isinstance(each.keys, ListedKeys) for each in self.requests) or any(
            not 0 <= key < OWN_STREAMS << STREAM_BITS for _, key in self.pool.keys
        )


def take_snapshot(
    scheduler: Scheduler,
    now_ns: int,
    *,
    under_way: Sequence[StepPlan] | None = None,
    recent: Sequence[RecentRequest] = (),
    are_lengths_known: bool = True,
) -> Snapshot:
    """The state of a scheduler that goes on unharmed; to be called between two decisions.

    ``under_way`` are its plans that are not committed, oldest first; a plain ``Scheduler`` knows them itself.
    ``are_lengths_known`` is False where nobody knows how long answers will be, so that a request's
    ``num_output_tokens`` is only the limit that it was sent with.

    Raises ValueError for a scheduler of another kind.
    """
    looks_at_each = isinstance(scheduler, PerRequestScheduler)
    if type(scheduler) is not Scheduler and not looks_at_each:
        raise ValueError(
            f"a {type(scheduler).__name__} cannot be put into a snapshot: only continuous batching (Scheduler, "
            "PerRequestScheduler) can"
        )
    plans = list(scheduler._under_way if under_way is None else under_way)
    requests = [*scheduler.running, *scheduler.waiting]
    places = {request: place for place, request in enumerate(requests)}
    _add_gone(plans, requests, places)
    return Snapshot(
        config=scheduler.config,
        now_ns=now_ns,
        looks_at_each=looks_at_each,
        clock=scheduler._num_steps if isinstance(scheduler, PerRequestScheduler) else scheduler.decoding.clock,
        num_steps_done=scheduler.num_steps_done,
        num_decisions=scheduler._num_decisions if isinstance(scheduler, PerRequestScheduler) else 0,
        num_admitted=scheduler._num_admitted,
        max_running=scheduler._max_running,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        prefilling=[places[request] for request in scheduler.prefilling],
        requests=[_state(scheduler, request, place, are_lengths_known) for request, place in places.items()],
        pool=scheduler.pool.state(),
        under_way=[_plan_state(plan, places) for plan in plans],
        recent=recent,
    )


def with_lengths(snapshot: Snapshot, lengths: Mapping[int | str, int]) -> Snapshot:
    """The snapshot with the output lengths that are known, by request id; the others stay as they are."""
    requests = [
        each._replace(num_output_tokens=lengths.get(each.request_id, each.num_output_tokens))
        for each in snapshot.requests
    ]
    return replace(snapshot, requests=requests)


def restore(
    snapshot: Snapshot, *, output_length: OutputLength | None = None, counts_from_zero: bool = False
) -> tuple[Scheduler, list[StepPlan]]:
    """A scheduler that decides as the one would that the snapshot is of, and its plans that are not committed.

    Its requests are new ones, in ``scheduler.requests()``.  ``output_length`` says how long each answer will be, at
    least one token longer than it is now; without it, what the snapshot knows, else the request's limit.  With
    ``counts_from_zero`` the steps are numbered from the oldest that is not over, so that a request's first step may
    be negative.

    Raises ValueError for an answer that would have ended before.
    """
    steps_back = snapshot.num_steps_done if counts_from_zero else 0
    scheduler = _PerRequest(snapshot.config) if snapshot.looks_at_each else Scheduler(snapshot.config)
    scheduler.pool = BlockPool.from_state(snapshot.pool)
    scheduler.num_steps_done = snapshot.num_steps_done - steps_back
    scheduler._num_admitted = snapshot.num_admitted
    scheduler._max_running = snapshot.max_running
    scheduler.decoding.clock = 0 if snapshot.looks_at_each else snapshot.clock - steps_back
    if isinstance(scheduler, PerRequestScheduler):
        scheduler._num_steps = snapshot.clock - steps_back
        scheduler._num_decisions = snapshot.num_decisions
    requests = [_request(state, output_length, steps_back) for state in snapshot.requests]
    for request, state in zip(requests, snapshot.requests, strict=True):
        if state.progress is not None and isinstance(scheduler, PerRequestScheduler):
            scheduler._progress[request] = _progress(state.progress)
    scheduler.running = dict.fromkeys(requests[: snapshot.num_running])
    for request in requests[snapshot.num_running : snapshot.num_running + snapshot.num_waiting]:
        scheduler.waiting.add(request)
    scheduler.prefilling = dict.fromkeys(requests[place] for place in snapshot.prefilling)
    plans = [_plan(state, requests, steps_back, snapshot.looks_at_each) for state in snapshot.under_way]
    if not snapshot.looks_at_each:
        scheduler._under_way.extend(plan for plan in plans if not plan.is_empty)
    for request, state in zip(requests, snapshot.requests, strict=True):
        if state.is_decoding:
            scheduler._join(request, request.span_start)
    return scheduler, plans


def change(scheduler: Scheduler, changes: Mapping[str, Any]) -> StepPlan:
    """Give a scheduler other limits from its next decision on; returns a plan with the preemptions that this took.

    No flag of vLLM can be changed while it serves, so this asks what would be if it could:

    - fewer seats (``max_num_seqs``, ``max_num_active_seqs``): who runs goes on, nobody is admitted until it fits;
    - fewer blocks (``num_gpu_blocks``): free blocks go first, in the order in which they would be handed out; then
      running requests are preempted as a shortage would preempt them, until the rest fits;
    - more blocks: new ones, blank, handed out after the blank ones that are there;
    - another ``policy``: the queue is sorted anew by priority, or stays in its order from now on served by arrival;
    - the token budgets, thresholds and the watermark hold from the next decision on.

    Raises ValueError for a field that has no meaning in mid-run, a value that SchedulerConfig refuses or that is above
    ``MOST_BLOCKS``, ``MOST_SEQS`` or ``MOST_TOKENS``, and a pool that a request of the engine could never fit.
    """
    unknown = [name for name in changes if name not in CHANGEABLE]
    if unknown:
        raise ValueError(
            f"{', '.join(map(str, unknown))} cannot change in the middle of a run; what can: {', '.join(CHANGEABLE)}. "
            "Simulate the others from the start"
        )
    _check_types(changes)
    _check_sizes(scheduler.config, changes)
    before, after = scheduler.config, replace(scheduler.config, **changes)
    _check_fits(scheduler, after)
    held_back = scheduler._max_running == 0
    scheduler.config = after
    scheduler._budget = min(
        after.max_num_batched_tokens, after.max_num_scheduled_tokens or after.max_num_batched_tokens
    )
    scheduler._max_running = 0 if held_back else after.max_num_active_seqs or after.max_num_seqs
    scheduler._mark = int(after.watermark * after.num_gpu_blocks)
    if before.policy != after.policy:
        _requeue(scheduler)
    plan: StepPlan = SpeculativePlan(0) if isinstance(scheduler, PerRequestScheduler) else StepPlan(0)
    _resize(scheduler, plan, after.num_gpu_blocks - before.num_gpu_blocks)
    return plan


# -- taking


def _add_gone(plans: Iterable[StepPlan], requests: list[Request], places: dict[Request, int]) -> None:
    """Requests that are over but take part in a step under way."""
    for plan in plans:
        preempted = (request for each in plan.preemptions for request in (each.request, each.for_request))
        chunked = (chunk.request for chunk in plan.chunks)
        for request in (*chunked, *plan.owed, *plan.num_drafts, *plan.padded, *preempted):
            if request not in places:
                places[request] = len(requests)
                requests.append(request)


def _state(scheduler: Scheduler, request: Request, place: int, are_lengths_known: bool) -> RequestState:
    emitted = scheduler.num_emitted_tokens(request)
    progress = scheduler._progress.get(request) if isinstance(scheduler, PerRequestScheduler) else None
    return RequestState(
        request.request_id,
        request.arrival_ns,
        request.num_prompt_tokens,
        request.stop_after if are_lengths_known else None,
        request.max_tokens,
        request.priority,
        int(request.status),
        request.order,
        request.stop_after,
        request.may_emit,
        request.num_emitted,
        request.num_owed_tokens,
        request.num_start_tokens,
        scheduler.num_computed_tokens(request),
        request.decoding,
        request.span_start,
        request.num_findable_blocks,
        request.scheduled_ns,
        request.first_token_ns,
        request.num_preemptions,
        request.high_water_tokens,
        request.num_recomputed_tokens,
        request.num_cached_tokens,
        request.num_resumed_cached_tokens,
        request.num_resumed_query_tokens,
        emitted,
        request.block_ids.copy(),
        _keys_state(request, place, (request.num_prompt_tokens + emitted) // scheduler.config.block_size),
        None if progress is None else tuple(getattr(progress, name) for name in Progress.__slots__),
    )


def _keys_state(request: Request, place: int, num_known_blocks: int) -> BlockKeys | None:
    keys = request.keys
    if keys is None or isinstance(keys, PrivateKeys | StreamKeys | ListedKeys):
        return keys  # these never change
    may_look_up = bool(getattr(keys, "may_look_up", True))
    if request.status > Status.PREEMPTED:
        return ListedKeys((), (OWN_STREAMS + place) << STREAM_BITS)
    known = tuple(keys.between(0, num_known_blocks))
    return ListedKeys(known, (OWN_STREAMS + place) << STREAM_BITS, keys.num_shared_blocks, may_look_up=may_look_up)


def _plan_state(plan: StepPlan, places: Mapping[Request, int]) -> PlanState:
    return PlanState(
        plan.number,
        tuple(plan.shape),
        [(places[chunk.request], *chunk[1:]) for chunk in plan.chunks],
        [places[request] for request in plan.owed],
        [(places[request], num) for request, num in plan.num_drafts.items()],
        [places[request] for request in plan.padded],
        [(places[each.request], *each[1:4], places[each.for_request]) for each in plan.preemptions],
    )


# -- restoring


class _PerRequest(PerRequestScheduler):
    """With requests that may not look for cached prefixes."""

    def _lookup(self, request: Request) -> list[int]:
        if isinstance(request.keys, ListedKeys) and not request.keys.may_look_up:
            return []
        return super()._lookup(request)


def _request(state: RequestState, output_length: OutputLength | None, steps_back: int) -> Request:
    request = Request(
        state.request_id,
        state.arrival_ns,
        state.num_prompt_tokens,
        state.max_tokens,
        state.max_tokens,
        state.priority,
        state.keys,
    )
    request.stop_after = request.num_output_tokens = _stop_after(state, output_length)
    request.may_emit = state.may_emit
    request.status = Status(state.status)
    request.order = state.order
    request.num_emitted = state.num_emitted
    request.num_owed_tokens = state.num_owed_tokens
    request.num_start_tokens = state.num_start_tokens
    request.base = state.num_computed_tokens
    request.span_start = state.span_start - steps_back
    request.num_findable_blocks = state.num_findable_blocks
    request.block_ids = list(state.block_ids)
    request.scheduled_ns = state.scheduled_ns
    request.first_token_ns = state.first_token_ns
    request.num_preemptions = state.num_preemptions
    request.high_water_tokens = state.high_water_tokens
    request.num_recomputed_tokens = state.num_recomputed_tokens
    request.num_cached_tokens = state.num_cached_tokens
    request.num_resumed_cached_tokens = state.num_resumed_cached_tokens
    request.num_resumed_query_tokens = state.num_resumed_query_tokens
    return request


def _stop_after(state: RequestState, output_length: OutputLength | None) -> int:
    if state.status > Status.PREEMPTED:
        return state.stop_after
    if output_length is None:
        return state.may_emit if state.num_output_tokens is None else state.num_output_tokens
    length = output_length(state)
    if not state.num_emitted_tokens < length <= state.may_emit:
        raise ValueError(
            f"request {state.request_id} has got {state.num_emitted_tokens} tokens and may get {state.may_emit}: its "
            f"answer cannot have {length}"
        )
    return length


def _progress(values: Sequence[int]) -> Progress:
    progress = Progress()
    for name, value in zip(Progress.__slots__, values, strict=True):
        setattr(progress, name, value)
    progress.is_chunk = bool(progress.is_chunk)
    return progress


def _plan(state: PlanState, requests: Sequence[Request], steps_back: int, looks_at_each: bool) -> StepPlan:
    plan: StepPlan = StepPlan(state.number - steps_back)
    if looks_at_each:
        plan = SpeculativePlan(state.number - steps_back)
        plan.num_drafts = {requests[place]: num for place, num in state.num_drafts}
        plan.padded = [requests[place] for place in state.padded]
    plan.shape = StepShape(*state.shape)
    plan.chunks = [Chunk(requests[chunk[0]], *chunk[1:]) for chunk in state.chunks]
    plan.owed = [requests[place] for place in state.owed]
    plan.preemptions = [
        Preemption(requests[each[0]], each[1], each[2], each[3], requests[each[4]]) for each in state.preemptions
    ]
    return plan


# -- changing


def _check_types(changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        kinds: dict[str, Any] = {"policy": str, "watermark": int | float}
        kind = kinds.get(name, bool if name in _FLAGS else int)
        is_none = value is None and name in ("max_num_active_seqs", "max_num_scheduled_tokens")
        if not is_none and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            words = {bool: "true or false", str: "text", int: "a whole number"}.get(kind, "a number")
            raise ValueError(f"{name} must be {words}, got {value!r}")


def _check_sizes(config: SchedulerConfig, changes: Mapping[str, Any]) -> None:
    """Values so large that nothing but memory would be spent on them are mistakes."""
    most = {
        "num_gpu_blocks": max(MOST_BLOCKS, 16 * config.num_gpu_blocks),
        "max_num_seqs": max(MOST_SEQS, config.max_num_seqs),
        "max_num_active_seqs": max(MOST_SEQS, config.max_num_seqs),
        "max_num_batched_tokens": max(MOST_TOKENS, config.max_num_batched_tokens),
        "max_num_scheduled_tokens": max(MOST_TOKENS, config.max_num_batched_tokens),
        "long_prefill_token_threshold": config.max_model_len,
    }
    least = {"num_gpu_blocks": 2, "long_prefill_token_threshold": 0}
    for name, value in changes.items():
        if name in most and value is not None and not least.get(name, 1) <= value <= most[name]:
            raise ValueError(
                f"{name} must be from {least.get(name, 1):,} to {most[name]:,} in this engine, got {value:,}: ask for "
                "a value in this range"
            )


_FLAGS = ("long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl")


def _check_fits(scheduler: Scheduler, config: SchedulerConfig) -> None:
    if config.num_gpu_blocks >= scheduler.config.num_gpu_blocks:
        return
    for request in scheduler.requests():
        longest = min(request.num_prompt_tokens + request.may_emit, config.max_model_len) - 1
        if longest > config.num_kv_tokens:
            raise ValueError(
                f"request {request.request_id} may grow to {longest} tokens, which {config.num_gpu_blocks} KV blocks "
                f"({config.num_kv_tokens} tokens) never hold: ask for at least "
                f"{-(-longest // config.block_size) + 1} num_gpu_blocks"
            )


def _requeue(scheduler: Scheduler) -> None:
    scheduler._by_priority = scheduler.config.policy == "priority"
    waiting = list(scheduler.waiting)
    scheduler.waiting = type(Scheduler(scheduler.config).waiting)()
    for request in waiting:
        scheduler.waiting.add(request)


def _resize(scheduler: Scheduler, plan: StepPlan, num_more: int) -> None:
    pool = scheduler.pool
    if num_more > 0:
        pool.extend(num_more)
        return
    while pool.num_free < -num_more:
        order = list(scheduler.running)
        victim = order[scheduler._victim_position(order)]
        _preempt(scheduler, plan, victim)
    pool.withdraw(-num_more)


def _preempt(scheduler: Scheduler, plan: StepPlan, victim: Request) -> None:
    if isinstance(scheduler, PerRequestScheduler):
        assert isinstance(plan, SpeculativePlan), "change made it for this scheduler"
        from windtunnel.sim.engine.per_request import _Budget

        scheduler._evict(plan, victim, _Budget(0, 0, 0), for_request=victim)
    else:
        scheduler._preempt(plan, victim, 0, victim)

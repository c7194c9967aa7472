"""Snapshots: a scheduler that is restored decides as the one that it was taken of."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import BlockKeys, PrivateKeys, StreamKeys, TokenKeys
from windtunnel.sim.engine.per_request import PerRequestScheduler, make_scheduler
from windtunnel.sim.engine.plan import Speculated, StepPlan
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.engine.snapshot import CHANGEABLE, Snapshot, change, restore, take_snapshot
from windtunnel.sim.engine.snapshot_json import SnapshotError, from_json, to_json
from windtunnel.sim.workload import Workload

STEP_NS = 5_000_000


class Twin:
    """A scheduler that is driven by hand, with as many steps under way as it allows."""

    def __init__(self, scheduler: Scheduler, under_way: list[StepPlan]) -> None:
        self.scheduler = scheduler
        self.under_way = under_way

    def step(self, now_ns: int) -> dict[str, Any]:
        """Decide once, and commit the oldest step if no more may be decided; what was decided."""
        scheduler = self.scheduler
        plan = scheduler.schedule(now_ns)
        decided = describe(scheduler, plan)
        self.under_way.append(plan)
        if len(self.under_way) >= scheduler.max_steps_under_way:
            oldest = self.under_way.pop(0)
            drafts = {request: (plan.number + num) % (num + 1) for request, num in oldest.num_drafts.items()}
            accepted = {r: 0 if r in oldest.padded else n for r, n in drafts.items()}
            proposed = {c.request: scheduler.config.num_speculative_tokens for c in oldest.chunks}
            speculated = Speculated(accepted, proposed) if scheduler.config.num_speculative_tokens else None
            decided["finished"] = [r.request_id for r in scheduler.commit(oldest, now_ns + STEP_NS, speculated)]
        return decided


def describe(scheduler: Scheduler, plan: StepPlan) -> dict[str, Any]:
    """All that a plan says, with the blocks that everybody holds and the free queue."""
    return {
        "number": plan.number,
        "shape": plan.shape,
        "chunks": [(c.request.request_id, *c[1:]) for c in plan.chunks],
        "grown": [r.request_id for r in plan.grown],
        "admissions": [(a.request.request_id, *a[1:]) for a in plan.admissions],
        "preemptions": [(p.request.request_id, *p[1:4], p.for_request.request_id) for p in plan.preemptions],
        "left_out": [r.request_id for r in plan.left_out],
        "drafts": [(r.request_id, n) for r, n in plan.num_drafts.items()],
        "scheduled": [(r.request_id, n) for r, n in scheduler.scheduled_tokens(plan).items()],
        "blocks": [(r.request_id, list(r.block_ids)) for r in scheduler.requests()],
        "tokens": [(r.request_id, scheduler.num_emitted_tokens(r)) for r in scheduler.requests()],
        "free": scheduler.pool.free_queue(),
        "num_keys": scheduler.pool.num_keys,
    }


def request_of(work: Workload, row: int, block_size: int, keys: str) -> Request:
    return Request(
        row,
        int(work.arrival_ns[row]),
        int(work.num_prompt_tokens[row]),
        int(work.num_output_tokens[row]),
        int(work.max_tokens[row]),
        int(work.priority[row]),
        keys_of(work, row, block_size, keys),
    )


INTERNED: dict[Any, int] = {}


def keys_of(work: Workload, row: int, block_size: int, kind: str) -> BlockKeys | None:
    content = work.content[row] if work.content is not None else ()
    own = work.num_streams + row
    if kind == "tokens":  # answers that are not written yet are taken for nobody else's
        ends = [min(end, int(work.num_prompt_tokens[row])) for _, end in content]

        def token(place: int) -> int:
            streams = [stream for (stream, _), end in zip(content, ends, strict=True) if place < end]
            return ((streams[0] if streams else own) << 32) + place

        return TokenKeys(token, block_size, INTERNED)
    return StreamKeys(content, own, block_size) if content else PrivateKeys(own)


@given(st.data())
def test_engine_and_restored_twin_take_the_same_decisions(data: st.DataObject) -> None:
    depth = data.draw(st.sampled_from(["sync", "sync", "async", "drafts", "pipeline"]))
    fixed: dict[str, Any] = {"async_scheduling": depth == "async"}
    if depth == "drafts":
        fixed |= {"num_speculative_tokens": 3, "spec_method": data.draw(st.sampled_from(["ngram", "eagle3"]))}
    if depth == "pipeline":
        fixed |= {"pipeline_parallel_size": 2, "async_scheduling": data.draw(st.booleans())}
    config = data.draw(scheduler_configs(**fixed))
    work = data.draw(workloads(config))
    kind = data.draw(st.sampled_from(["streams", "streams", "tokens"]))
    as_json = data.draw(st.booleans()) and kind == "streams"
    looks_at_each = data.draw(st.sampled_from([False, False, True]))
    engine = Twin(PerRequestScheduler(config) if looks_at_each else make_scheduler(config), [])
    moment = data.draw(st.integers(0, 60))
    twin: Twin | None = None
    due, now_ns = 0, 0
    for number in range(moment + 60):
        if due == len(work) and not engine.scheduler.num_requests and twin is not None:
            break
        while due < len(work) and work.arrival_ns[due] <= now_ns:
            engine.scheduler.add(request_of(work, due, config.block_size, kind))
            if twin is not None:
                twin.scheduler.add(request_of(work, due, config.block_size, kind))
            due += 1
        if number == moment:
            taken = take_snapshot(engine.scheduler, now_ns, under_way=engine.under_way)
            taken = through_json(taken) if as_json else taken
            twin = Twin(*restore(taken))
        if number == moment + 9 and engine.scheduler.num_requests:
            drop(engine.scheduler, twin)
        decided = engine.step(now_ns)
        if twin is not None:
            assert twin.step(now_ns) == decided
        now_ns += STEP_NS


def drop(engine: Scheduler, twin: Twin | None) -> None:
    """Abort the oldest request in both."""
    victim = next(engine.requests())
    engine.abort(victim)
    if twin is not None:
        twin.scheduler.abort(next(r for r in twin.scheduler.requests() if r.request_id == victim.request_id))


def through_json(snapshot: Snapshot) -> Snapshot:
    return from_json(json.loads(json.dumps(to_json(snapshot))))


def busy(num_steps: int = 6, num_requests: int = 6, **values: Any) -> Scheduler:
    """An engine of 40 blocks of 4 in which some requests decode, some compute chunks and some wait."""
    limits = {"num_gpu_blocks": 41, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    scheduler = Scheduler(SchedulerConfig(**{**limits, "max_model_len": 100, **values}))
    for number in range(num_requests):
        scheduler.add(Request(number, number, 12, 20, priority=-number, keys=PrivateKeys(number)))
    for step in range(num_steps):
        scheduler.commit(scheduler.schedule(step), step + 1)
    return scheduler


def test_a_snapshot_says_the_same_after_json() -> None:
    taken = take_snapshot(busy(), 5, are_lengths_known=False)
    assert to_json(through_json(taken)) == to_json(taken)


def test_the_engine_goes_on_unharmed() -> None:
    watched, alone = busy(), busy()
    for step in range(30):
        to_json(take_snapshot(watched, step))
        twin, _ = restore(take_snapshot(watched, step))
        for _ in range(3):
            twin.commit(twin.schedule(step), step + 1)
        plans = [scheduler.schedule(step) for scheduler in (watched, alone)]
        assert describe(watched, plans[0]) == describe(alone, plans[1])
        for scheduler, plan in zip((watched, alone), plans, strict=True):
            scheduler.commit(plan, step + 1)


def test_steps_can_be_counted_from_the_moment_of_the_snapshot() -> None:
    scheduler, _ = restore(take_snapshot(busy(num_steps=6), 6), counts_from_zero=True)
    assert scheduler.schedule(6).number == 0
    assert min(request.span_start for request in scheduler.running if request.decoding) < 0


def test_lengths_can_be_told() -> None:
    taken = take_snapshot(busy(), 6)
    scheduler, _ = restore(taken, output_length=lambda state: state.num_emitted_tokens + 1)
    first = next(iter(scheduler.running))
    assert first in scheduler.commit(scheduler.schedule(6), 7)


def test_an_answer_cannot_have_ended_before() -> None:
    with pytest.raises(ValueError, match=r"request 0 has got \d+ tokens and may get 20: its answer cannot have 1"):
        restore(take_snapshot(busy(), 6), output_length=lambda _: 1)


def test_keys_from_tokens_are_numbered_so_that_nothing_of_them_is_left() -> None:
    scheduler = busy(num_requests=0)
    tokens = [7919 + place for place in range(40)]
    for number in range(2):
        scheduler.add(Request(number, 0, 17, 20, keys=TokenKeys(tokens.__getitem__, 4, {})))
    scheduler.commit(scheduler.schedule(0), 1)
    text = to_json(take_snapshot(scheduler, 1))
    known = [row[list(text["request_columns"]).index("keys")]["known"] for row in text["requests"]]
    assert known == [[-1, -2, -3, -4], [-1, -2, -3, -4]]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda data: data.pop("schema"), "no snapshot"),
        (lambda data: data.update(version=99), "version 99"),
        (lambda data: data.pop("pool"), "pool is missing"),
        (lambda data: data.update(num_running="4"), "num_running must be a whole number"),
        (lambda data: data["pool"]["blank"].pop(), "not the 40 usable ones"),
        (lambda data: data.update(num_running=1), "status"),
        (lambda data: data.update(prefilling=[77]), r"prefilling.0. must be from 0 to \d+, got 77"),
        (lambda data: data["requests"][0].pop(), "rows of"),
        (lambda data: data["request_columns"].reverse(), "columns"),
        (lambda data: data["config"].update(max_num_seqs=0), "max_num_seqs must be at least 1"),
        (lambda data: data.update(requests=7), "damaged"),
        (lambda data: data["config"].update(block_size=1), r"request 0: \d+ blocks of config.block_size 1 do not hold"),
        (lambda data: data["config"].update(block_size=64), r"blocks of config.block_size 64 do not hold its \d+ comp"),
        (lambda data: data["config"].update(block_size="x"), "config.block_size must be a whole number, got 'x'"),
        (lambda data: data["config"].update(watermark=None), "config.watermark must be a number, got None"),
        (lambda data: data["config"].update(seats=3), "config has the unknown field 'seats'; known are max_num_seqs"),
        (lambda data: data.update(now_ns=2**70), "now_ns must be from 0 to 4,611,686,018,427,387,904, got 118059"),
        (lambda data: data.update(now_ns=-1), "now_ns must be from 0"),
        (lambda data: data.update(clock=-5), "clock must be from 0 .* got -5: take the snapshot anew"),
        (lambda data: data.update(looks_at_each=1), "looks_at_each must be true or false, got 1"),
        (lambda data: data.update(prefilling=[0, 0]), "prefilling must name each request once"),
        (lambda data: data.update(extra=1), "the snapshot has the unknown field 'extra'"),
        (lambda data: data["pool"].update(blank=[0]), r"pool.blank.0. must be from 1 to"),
        (lambda data: data["pool"].update(runs=[[7, [1]]]), r"pool.runs.0..0. must be from 0 to 2, got 7"),
        (lambda data: data["recent"].append([0, 5, 5, None, "a", []]), r"recent.0..priority must be a whole number"),
        (lambda data: data.update(under_way=[{}]), r"under_way.0. is damaged: number is missing"),
    ],
)
def test_damaged_snapshots_are_refused_with_the_place(damage: Any, complaint: str) -> None:
    data = json.loads(json.dumps(to_json(take_snapshot(busy(), 6))))
    damage(data)
    with pytest.raises(SnapshotError, match=complaint):
        from_json(data)


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("max_tokens", -3, r"requests.0. .request 0..max_tokens must be from 1 to 9,007,199,254,740,992, got -3"),
        ("may_emit", 0, "may_emit must be from 1"),
        ("may_emit", 10**6, "its numbers of tokens contradict each other: num_emitted_tokens"),
        ("num_output_tokens", -1, "num_output_tokens must be from 1"),
        ("num_computed_tokens", "7", "num_computed_tokens must be a whole number, got '7'"),
        ("priority", "high", "priority must be a whole number, got 'high'"),
        ("arrival_ns", None, "arrival_ns must be a whole number, got None"),
        ("is_decoding", "yes", "is_decoding must be true or false, got 'yes'"),
        ("keys", {"pieces": [[1]]}, r"keys.pieces.0. must have 2 values, got 1"),
        ("keys", {"known": []}, "keys is damaged: own_base is missing"),
        ("block_ids", [0], r"block_ids.0. must be from 1"),
        ("progress", [1, 2], "progress must have 7 numbers, got 2"),
        ("request_id", 1, "request 1 is in the queues twice"),
    ],
)
def test_junk_in_a_request_is_named_with_its_column(column: str, value: Any, complaint: str) -> None:
    data = json.loads(json.dumps(to_json(take_snapshot(busy(), 6))))
    data["requests"][0][data["request_columns"].index(column)] = value
    with pytest.raises(SnapshotError, match=complaint):
        from_json(data)


@given(st.data())
def test_whatever_is_in_a_snapshot_it_is_read_or_refused(data: st.DataObject) -> None:
    plain = json.loads(json.dumps(to_json(take_snapshot(busy(), 6))))
    junk = data.draw(st.sampled_from([None, True, -1, 2**70, 1.5, "x", [], {}, [[]], {"a": 1}, float("nan")]))
    part: Any = plain
    while True:
        places = list(part) if isinstance(part, dict) else range(len(part))
        place = data.draw(st.sampled_from(places))
        if not isinstance(part[place], dict | list) or not part[place] or data.draw(st.booleans()):
            break
        part = part[place]
    part[place] = junk
    try:
        restore(from_json(plain))
    except SnapshotError as error:
        assert "not supported between" not in str(error)  # noqa: PT017


def test_other_policies_are_refused() -> None:
    class Other(Scheduler):
        pass

    with pytest.raises(ValueError, match="a Other cannot be put into a snapshot"):
        take_snapshot(Other(SchedulerConfig()), 0)


# -- what if


def test_fewer_seats_let_the_running_go_on_and_admit_nobody() -> None:
    scheduler, _ = restore(take_snapshot(busy(num_requests=8), 6))
    running = list(scheduler.running)
    change(scheduler, {"max_num_seqs": 2})
    assert list(scheduler.running) == running
    for step in range(200):
        plan = scheduler.schedule(step)
        for admission in plan.admissions:
            assert len(scheduler.running) <= 2, admission
        scheduler.commit(plan, step + 1)
    assert scheduler.num_requests == 0


def test_more_blocks_are_handed_out_last_of_the_blank() -> None:
    scheduler, _ = restore(take_snapshot(busy(), 6))
    before = scheduler.pool.free_queue()
    change(scheduler, {"num_gpu_blocks": 51})
    assert scheduler.pool.free_queue() == [*before, *range(41, 51)]


def test_fewer_blocks_than_are_held_preempt_the_latest() -> None:
    scheduler, _ = restore(take_snapshot(busy(), 6))
    latest = list(scheduler.running)[-1]
    plan = change(scheduler, {"num_gpu_blocks": 12})
    assert plan.preemptions[0].request is latest
    held = sum(len(request.block_ids) for request in scheduler.running)
    assert scheduler.pool.num_free + held == 11
    for step in range(300):
        scheduler.commit(scheduler.schedule(step), step + 1)
    assert scheduler.num_requests == 0
    assert scheduler.pool.num_free == 11


def test_a_pool_that_shrank_grows_without_using_a_number_twice() -> None:
    scheduler, _ = restore(take_snapshot(busy(), 6))
    change(scheduler, {"num_gpu_blocks": 25})
    change(scheduler, {"num_gpu_blocks": 60})
    twin = through_json(take_snapshot(scheduler, 7))
    assert len(set(restore(twin)[0].pool.free_queue())) == scheduler.pool.num_free


def test_by_priority_from_now_on() -> None:
    scheduler, _ = restore(take_snapshot(busy(num_requests=9), 6))
    change(scheduler, {"policy": "priority"})
    urgent_first = [request.priority for request in scheduler.waiting]
    assert urgent_first == sorted(urgent_first)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"block_size": 32}, "block_size cannot change in the middle of a run; what can: max_num_seqs"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be a whole number, got 2.5"),
        ({"max_num_seqs": 17}, "max_num_batched_tokens .16. must be at least max_num_seqs .17."),
        ({"num_gpu_blocks": 4}, "request 0 may grow to 31 tokens, which 4 KV blocks"),
        ({"scheduler_reserve_full_isl": 1}, "must be true or false"),
        ({"watermark": "x"}, "watermark must be a number"),
        ({"watermark": float("nan")}, "watermark must be at least 0 and below 1"),
        (
            {"num_gpu_blocks": 10**12},
            "num_gpu_blocks must be from 2 to 4,194,304 in this engine, got 1,000,000,000,000",
        ),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks must be from 2 to"),
        ({"max_num_seqs": 10**9}, "max_num_seqs must be from 1 to 1,048,576"),
        ({"max_num_active_seqs": 10**9}, "max_num_active_seqs must be from 1 to"),
        ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens must be from 1 to 16,777,216"),
        ({"max_num_scheduled_tokens": 10**9}, "max_num_scheduled_tokens must be from 1 to 16,777,216"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be from 0"),
    ],
)
def test_changes_without_a_meaning_are_refused(changes: dict[str, Any], complaint: str) -> None:
    scheduler, _ = restore(take_snapshot(busy(), 6))
    with pytest.raises(ValueError, match=complaint):
        change(scheduler, changes)


def test_every_changeable_field_is_one_of_the_config() -> None:
    assert set(CHANGEABLE) <= set(SchedulerConfig.__dataclass_fields__)

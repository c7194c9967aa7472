"""Static and dynamic batching: laws, an independent model of the dispatch, and cases with known answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import workloads

from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.batch_queue import QueuePolicy
from windtunnel.sim.engine.batches import Batch, BatchExecution, BatchPlan, BatchScheduler
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.dynamic import DynamicConfig, DynamicScheduler
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.engine.static import StaticConfig, StaticScheduler
from windtunnel.sim.metrics.waste import dispatch_wait_ns, formation_wait_ns, mean_batch_size, slot_use, token_waste
from windtunnel.sim.records import Outcome, Records, table_columns
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import Workload, workload

MS = 1_000_000
COST = AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8)
STEP = ConstantCost(step_s=0.01)
TOGETHER, STREAMED = BatchExecution(), BatchExecution(answers="streamed")


def pool(num_gpu_blocks: int = 10_000, **changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_gpu_blocks": num_gpu_blocks, **changes})


@st.composite
def pools(draw: st.DrawFn) -> SchedulerConfig:
    """KV pools of which some hold only a few slots."""
    return SchedulerConfig(
        max_model_len=draw(st.sampled_from([64, 128, 400])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        num_gpu_blocks=draw(st.integers(30, 600)),
    )


@st.composite
def executions(draw: st.DrawFn, config: SchedulerConfig) -> BatchExecution:
    fits = config.max_model_len <= config.num_kv_tokens
    return BatchExecution(
        draw(st.sampled_from(["padded", "max_model_len"] if fits else ["padded"])),
        draw(st.sampled_from(["together", "streamed"])),
        draw(st.one_of(st.none(), st.integers(9, 300))),
    )


@st.composite
def statics(draw: st.DrawFn, config: SchedulerConfig) -> StaticScheduler:
    timeout_ns = draw(st.one_of(st.none(), st.integers(0, 60).map(lambda ms: ms * MS)))
    static = StaticConfig(draw(st.integers(1, 9)), timeout_ns, draw(executions(config)))
    return StaticScheduler(config, static)


@st.composite
def policies(draw: st.DrawFn) -> QueuePolicy:
    return QueuePolicy(
        draw(st.sampled_from([0, 0, 2, 5])),
        draw(st.sampled_from([0, 0, 3_000, 40_000])),
        draw(st.sampled_from(["REJECT", "DELAY"])),
    )


@st.composite
def dynamics(draw: st.DrawFn, config: SchedulerConfig, max_instances: int = 3) -> DynamicScheduler:
    size, levels = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    level = st.integers(1, max(levels, 1))
    dynamic = DynamicConfig(
        size,
        tuple(draw(st.lists(st.integers(1, size), max_size=3))),
        draw(st.sampled_from([0, 0, 1_000, 25_000])),
        draw(policies()),
        levels,
        draw(level) if levels else 0,
        tuple(draw(st.lists(st.tuples(level, policies()), max_size=2))) if levels else (),
        draw(st.integers(1, max_instances)),
        draw(executions(config)),
    )
    return DynamicScheduler(config, dynamic)


def batchers(config: SchedulerConfig) -> st.SearchStrategy[BatchScheduler]:
    return st.one_of(statics(config), dynamics(config))


# -- laws


@given(st.data())
def test_blocks_are_conserved_and_nobody_joins_or_leaves_a_batch(data: st.DataObject) -> None:
    """Step by step, with aborts in between."""
    config = data.draw(pools())
    scheduler = data.draw(batchers(config))
    coming = requests_of(data.draw(workloads(config)))
    alive: list[Request] = []
    members: dict[Batch, list[Request]] = {}
    dispatched: list[Request] = []
    for turn in range(120):
        now_ns = turn * 20 * MS
        while coming and coming[0].arrival_ns <= now_ns:
            request = coming.pop(0)
            try:
                scheduler.add(request)
            except ValueError:
                continue
            alive.append(request)
        if not coming:
            scheduler.end_of_input()
        plan = scheduler.schedule(now_ns)
        check_plan(scheduler, plan, members)
        dispatched += [admission.request for admission in plan.admissions]
        check_blocks(scheduler, dispatched)
        if alive and data.draw(st.integers(0, 12)) == 0:
            scheduler.abort(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
            check_blocks(scheduler, dispatched)
        scheduler.commit(plan, now_ns + 1)
        check_blocks(scheduler, dispatched)
        alive = [request for request in alive if request.status in (Status.WAITING, Status.RUNNING)]
        assert set(scheduler.requests()) == set(alive)
        assert scheduler.num_requests == len(alive)
    for request in alive:
        scheduler.abort(request)
    assert scheduler.pool.num_free == config.num_usable_blocks
    assert not scheduler.num_requests


def requests_of(work: Workload) -> list[Request]:
    columns = (work.arrival_ns, work.num_prompt_tokens, work.num_output_tokens, work.max_tokens, work.priority)
    return [Request(row, *values) for row, values in enumerate(zip(*(c.tolist() for c in columns), strict=True))]


def check_plan(scheduler: BatchScheduler, plan: BatchPlan, members: dict[Batch, list[Request]]) -> None:
    """A batch is as large as its slots, all of which every step of it computes, and no larger than allowed."""
    batch, shape = plan.batch, plan.shape
    if batch is None:
        assert plan.is_empty
        assert not scheduler.running
        return
    assert members.setdefault(batch, list(batch.requests)) == batch.requests
    assert len(batch.requests) <= scheduler.waiting.max_batch_size
    assert len(batch.requests) == shape.num_decode_seqs + shape.num_prefill_seqs
    assert shape.num_tokens <= scheduler.config.max_num_batched_tokens
    assert sum(chunk.num_tokens for chunk in plan.chunks) <= shape.prefill_tokens
    assert len(scheduler.running) <= scheduler.config.max_num_seqs


def check_blocks(scheduler: BatchScheduler, dispatched: list[Request]) -> None:
    held = Counter(block for request in dispatched for block in request.block_ids)
    free = scheduler.pool.free_queue()
    assert not held.keys() & set(free)
    assert set(held.values()) <= {1}
    assert len(held) + len(free) == scheduler.config.num_usable_blocks
    for request in scheduler.waiting:
        assert not request.block_ids


@given(st.data())
def test_requests_and_tokens_are_conserved_and_causes_precede_effects(data: st.DataObject) -> None:
    config = data.draw(pools())
    work = data.draw(workloads(config))
    records = run(work, config, COST, scheduler=data.draw(batchers(config)))
    table = records.requests
    assert not records.stalled
    assert table.request.tolist() == list(range(len(work)))
    assert np.isin(table.outcome, [Outcome.FINISHED, Outcome.REJECTED]).all()
    done = table.outcome == Outcome.FINISHED
    assert (table.num_output_tokens[done] == work.num_output_tokens[done]).all()
    assert (table.num_output_tokens[~done] == 0).all()
    assert (table.arrival_ns[done] <= table.scheduled_ns[done]).all()
    assert (table.scheduled_ns[done] < table.first_token_ns[done]).all()
    assert (table.first_token_ns[done] <= table.finish_ns[done]).all()
    assert (table.scheduled_ns[~done] == -1).all()
    check_waste(records)


def check_waste(records: Records) -> None:
    """Every computed token is of use, padding, or behind the end of an answer; slots yield tokens or do not."""
    waste, use = token_waste(records), slot_use(records)
    assert waste.computed_tokens == waste.useful_tokens + waste.padding_tokens + waste.straggler_tokens
    assert min(waste.padding_tokens, waste.straggler_tokens) >= 0
    assert use.output_tokens <= use.slot_steps
    (replica,) = records.replicas
    assert waste.padding_tokens == int(replica.steps.prefill_tokens.sum()) - sum(
        records.requests.num_prompt_tokens[records.requests.scheduled_ns >= 0].tolist()
    )


@given(st.data())
def test_nobody_waits_for_company_longer_than_the_delay_while_the_engine_is_idle(data: st.DataObject) -> None:
    config = data.draw(pools())
    work = data.draw(workloads(config))
    if data.draw(st.booleans()):
        scheduler: BatchScheduler = data.draw(dynamics(config, max_instances=1))
        limit_ns = scheduler.dynamic.max_queue_delay_microseconds * 1_000  # type: ignore[attr-defined]
    else:
        limit_ns = data.draw(st.integers(0, 60)) * MS
        scheduler = StaticScheduler(config, StaticConfig(4, limit_ns, data.draw(executions(config))))
    records = run(work, config, COST, scheduler=scheduler)
    assert (formation_wait_ns(records) <= limit_ns).all()
    assert (formation_wait_ns(records) >= 0).all()
    assert (formation_wait_ns(records) <= dispatch_wait_ns(records)).all()


@given(st.data())
def test_nobody_is_served_after_his_time_out_and_nobody_rejected_before_it(data: st.DataObject) -> None:
    config = pool()
    work = data.draw(workloads(config))
    timeout_us = data.draw(st.sampled_from([1, 1_000, 12_000]))
    dynamic = DynamicConfig(
        data.draw(st.integers(1, 4)),
        max_queue_delay_microseconds=data.draw(st.sampled_from([0, 5_000, 50_000])),
        default_queue_policy=QueuePolicy(default_timeout_microseconds=timeout_us),
    )
    table = run(work, config, COST, scheduler=DynamicScheduler(config, dynamic)).requests
    done = table.outcome == Outcome.FINISHED
    assert ((table.scheduled_ns - table.arrival_ns)[done] <= timeout_us * 1_000).all()
    assert ((table.finish_ns - table.arrival_ns)[~done] > timeout_us * 1_000).all()


@given(st.data())
def test_streaming_changes_when_answers_come_but_no_step(data: st.DataObject) -> None:
    config = data.draw(pools())
    work = data.draw(workloads(config))
    size, timeout = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([None, 0, 30 * MS]))
    together, streamed = (
        run(work, config, COST, scheduler=StaticScheduler(config, StaticConfig(size, timeout, execution)))
        for execution in (TOGETHER, STREAMED)
    )
    for name, column in table_columns(together.replicas[0].steps).items():
        if name not in ("num_running",):
            assert column.tolist() == getattr(streamed.replicas[0].steps, name).tolist()
    a, b = together.requests, streamed.requests
    assert (b.finish_ns <= a.finish_ns).all()
    assert (b.first_token_ns <= a.first_token_ns).all()
    done = a.outcome == Outcome.FINISHED
    assert (a.first_token_ns[done] == a.finish_ns[done]).all()
    for scheduled_ns in set(a.scheduled_ns[done].tolist()):
        batch = a.scheduled_ns == scheduled_ns
        assert len(set(a.finish_ns[batch].tolist())) == 1
        assert b.finish_ns[batch].max() == a.finish_ns[batch].max()


@given(st.data())
def test_streamed_tokens_lie_in_spans_one_a_step(data: st.DataObject) -> None:
    config = data.draw(pools())
    work = data.draw(workloads(config))
    execution = BatchExecution(answers="streamed")
    dynamic = DynamicConfig(
        data.draw(st.integers(1, 5)), instance_count=data.draw(st.integers(1, 3)), execution=execution
    )
    horizon_ns = data.draw(st.sampled_from([None, 150 * MS]))
    records = run(work, config, COST, scheduler=DynamicScheduler(config, dynamic), horizon_ns=horizon_ns)
    (replica,) = records.replicas
    got = np.bincount(replica.spans.request, replica.spans.count, len(work)).astype(int)
    table, end_ns = records.requests, replica.steps.end_ns
    assert got.tolist() == table.num_output_tokens.tolist()
    spans = replica.spans
    for row in (table.outcome == Outcome.FINISHED).nonzero()[0]:
        first, count = spans.first_step[spans.request == row], spans.count[spans.request == row]
        assert end_ns[first[0]] == table.first_token_ns[row]
        assert end_ns[first[-1] + count[-1] - 1] == table.finish_ns[row]


@given(st.data())
def test_the_same_arguments_give_the_same_records(data: st.DataObject) -> None:
    config = data.draw(pools())
    work = data.draw(workloads(config))
    dynamic = data.draw(dynamics(config)).dynamic
    first, second = (run(work, config, COST, scheduler=DynamicScheduler(config, dynamic)) for _ in range(2))
    for name, column in table_columns(first.requests).items():
        assert column.tobytes() == getattr(second.requests, name).tobytes()


# -- an independent model of the dispatch


@given(
    gaps=st.lists(st.sampled_from([0, 1, 5, 10, 35, 400]), min_size=1, max_size=20),
    outputs=st.lists(st.integers(1, 12), min_size=20, max_size=20),
    size=st.integers(1, 6),
    timeout_ms=st.one_of(st.none(), st.integers(0, 60)),
)
def test_static_batches_are_those_of_a_loop_over_arrivals(
    gaps: list[int], outputs: list[int], size: int, timeout_ms: int | None
) -> None:
    arrivals = (np.cumsum(gaps) * MS).tolist()
    outputs = outputs[: len(gaps)]
    timeout_ns = None if timeout_ms is None else timeout_ms * MS
    work = workload(arrivals, np.full(len(gaps), 10), outputs)
    table = run(work, pool(), STEP, scheduler=StaticScheduler(pool(), StaticConfig(size, timeout_ns))).requests
    dispatched, finished = naive_static(arrivals, outputs, size, timeout_ns)
    assert table.scheduled_ns.tolist() == dispatched
    assert table.finish_ns.tolist() == finished


def naive_static(
    arrivals: list[int], outputs: list[int], size: int, timeout_ns: int | None, step_ns: int = 10 * MS
) -> tuple[list[int], list[int]]:
    """When each request is dispatched and answered, batch after batch; a step takes ``step_ns``."""
    dispatched, finished, free_ns = [], [], 0
    while len(dispatched) < len(arrivals):
        rest = arrivals[len(dispatched) :]
        full_ns = rest[size - 1] if len(rest) >= size else None
        over_ns = arrivals[-1] if timeout_ns is None else rest[0] + timeout_ns
        wanted_ns = over_ns if full_ns is None else full_ns if timeout_ns is None else min(full_ns, over_ns)
        now_ns = max(free_ns, wanted_ns)
        batch = [at for at in rest if at <= now_ns][:size]
        longest = max(outputs[len(dispatched) :][: len(batch)])
        free_ns = now_ns + longest * step_ns
        dispatched += [now_ns] * len(batch)
        finished += [free_ns] * len(batch)
    return dispatched, finished


@given(
    gaps=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    outputs=st.lists(st.integers(1, 20), min_size=30, max_size=30),
)
def test_batches_of_one_are_a_single_server_queue(gaps: list[int], outputs: list[int]) -> None:
    """Lindley: the wait of the next is this one's wait and service, less the time between their arrivals."""
    arrivals, services = np.cumsum(gaps) * MS, np.array(outputs[: len(gaps)]) * 10 * MS
    work = workload(arrivals, np.full(len(gaps), 10), outputs[: len(gaps)])
    records = run(work, pool(), STEP, scheduler=StaticScheduler(pool(), StaticConfig(1)))
    waits = [0]
    for i in range(1, len(arrivals)):
        waits.append(max(0, waits[-1] + int(services[i - 1]) - int(arrivals[i] - arrivals[i - 1])))
    assert dispatch_wait_ns(records).tolist() == waits
    assert not formation_wait_ns(records).any()


# -- the shape of a batch's steps


def test_the_steps_of_a_batch_compute_all_slots_over_the_padded_context() -> None:
    shapes = shapes_of(StaticConfig(3), [(10, 2), (4, 3), (7, 1)])
    assert shapes == [
        StepShape(0, 0, 3, 30, 0, 3 * 55, 3),
        StepShape(3, 3 * 11, 0, 0, 0, 0, 3),
        StepShape(3, 3 * 12, 0, 0, 0, 0, 3),
    ]


def test_a_prompt_budget_splits_the_padded_prompts_by_columns() -> None:
    shapes = shapes_of(StaticConfig(3, execution=BatchExecution(max_prefill_tokens=14)), [(10, 1), (4, 1), (7, 1)])
    assert shapes == [
        StepShape(0, 0, 3, 12, 0, 3 * 10, 0),
        StepShape(0, 0, 3, 12, 12, 3 * (4 * 4 + 10), 0),
        StepShape(0, 0, 3, 6, 24, 3 * (2 * 8 + 3), 3),
    ]


def shapes_of(static: StaticConfig, requests: list[tuple[int, int]]) -> list[StepShape]:
    scheduler = StaticScheduler(pool(), static)
    for number, (prompt, output) in enumerate(requests):
        scheduler.add(Request(number, 0, prompt, output))
    shapes = []
    while scheduler.num_requests:
        plan = scheduler.schedule(0)
        shapes.append(plan.shape)
        scheduler.commit(plan, 1)
    return shapes


def test_chunks_list_the_prompts_without_their_padding() -> None:
    scheduler = StaticScheduler(pool(), StaticConfig(2, execution=BatchExecution(max_prefill_tokens=8)))
    for number, prompt in enumerate((10, 5)):
        scheduler.add(Request(number, 0, prompt, 1))
    seen = []
    for now in range(3):
        plan = scheduler.schedule(now)
        seen.append([(c.request.request_id, c.num_tokens, c.num_computed_tokens, c.samples) for c in plan.chunks])
        scheduler.commit(plan, now + 1)
    assert seen == [
        [(0, 4, 0, False)],
        [(0, 4, 4, False), (1, 3, 0, False)],
        [(0, 2, 8, True), (1, 2, 3, True)],
    ]


# -- memory


def test_kv_is_reserved_for_the_padded_prompt_and_the_largest_declared_answer() -> None:
    """Two slots of 40 + 31 - 1 = 70 tokens are 5 blocks each; a third would make it 15 of 12."""
    config = pool(13)
    scheduler = StaticScheduler(config, StaticConfig(3))
    for number, (prompt, declared) in enumerate([(40, 20), (10, 31), (5, 5)]):
        scheduler.add(Request(number, 0, prompt, 1, max_tokens=declared))
    plan = scheduler.schedule(0)
    assert plan.batch is not None
    assert [request.request_id for request in plan.batch.requests] == [0, 1]
    assert scheduler.pool.num_free == 12 - 2 * 5


def test_a_slot_may_reserve_max_model_len_instead() -> None:
    config = pool(13, max_model_len=64)
    scheduler = StaticScheduler(config, StaticConfig(8, 0, BatchExecution(kv_reserve="max_model_len")))
    for number in range(8):
        scheduler.add(Request(number, 0, 5, 1))
    plan = scheduler.schedule(0)
    assert plan.batch is not None
    assert len(plan.batch.requests) == 3
    assert scheduler.pool.num_free == 0


def test_blocks_stay_held_until_the_batch_ends_though_an_answer_is_given() -> None:
    config = pool(50)
    scheduler = StaticScheduler(config, StaticConfig(2, execution=STREAMED))
    for number, output in enumerate((1, 3)):
        scheduler.add(Request(number, 0, 16, output))
    free = []
    for now in range(3):
        plan = scheduler.schedule(now)
        finished = scheduler.commit(plan, now + 1)
        free.append((len(finished), scheduler.pool.num_free))
    assert free == [(1, 45), (0, 45), (1, 49)]


def test_a_request_that_the_pool_can_never_reserve_is_rejected_and_counted() -> None:
    config = pool(5)
    work = workload([0, 0], [30, 30], [2, 2], max_tokens=[40, 20])
    table = run(work, config, STEP, scheduler=StaticScheduler(config, StaticConfig(1))).requests
    assert table.outcome.tolist() == [Outcome.REJECTED, Outcome.FINISHED]


def test_the_last_token_of_an_answer_needs_no_room() -> None:
    scheduler = StaticScheduler(pool(3), StaticConfig(2))
    for number in range(2):
        scheduler.add(Request(number, 0, 16, 1))
    plan = scheduler.schedule(0)
    assert plan.batch is not None
    assert [len(request.block_ids) for request in plan.batch.requests] == [1, 1]


def test_requests_that_would_outgrow_max_model_len_together_are_kept_apart_where_it_is_reserved() -> None:
    for execution, expected in ((BatchExecution(kv_reserve="max_model_len"), 1), (BatchExecution(), 2)):
        scheduler = StaticScheduler(pool(max_model_len=64), StaticConfig(2, 0, execution))
        scheduler.add(Request(0, 0, 60, 4))
        scheduler.add(Request(1, 0, 4, 60))
        plan = scheduler.schedule(0)
        assert plan.batch is not None
        assert len(plan.batch.requests) == expected


# -- when a batch goes


def test_a_wait_for_company_ends_with_the_time_out_although_nothing_happens() -> None:
    work = workload([0, 7 * MS], [10, 10], [2, 2])
    records = run(work, pool(), STEP, scheduler=StaticScheduler(pool(), StaticConfig(4, 25 * MS)))
    assert records.requests.scheduled_ns.tolist() == [25 * MS, 25 * MS]
    assert formation_wait_ns(records).tolist() == [25 * MS, 18 * MS]


def test_the_rest_of_the_input_goes_as_a_smaller_batch() -> None:
    work = workload([0, 0, 0, 50 * MS, 60 * MS], np.full(5, 10), np.full(5, 2))
    table = run(work, pool(), STEP, scheduler=StaticScheduler(pool(), StaticConfig(3))).requests
    assert table.scheduled_ns.tolist() == [0, 0, 0, 60 * MS, 60 * MS]


def test_a_client_that_never_fills_a_batch_waits_for_ever() -> None:
    work = workload(np.zeros(6), np.full(6, 10), np.full(6, 2), max_concurrency=2)
    records = run(work, pool(), STEP, scheduler=StaticScheduler(pool(), StaticConfig(4)))
    assert records.stalled
    assert (records.requests.outcome == Outcome.UNFINISHED).all()
    served = run(work, pool(), STEP, scheduler=StaticScheduler(pool(), StaticConfig(4, 5 * MS)))
    assert not served.stalled
    assert mean_batch_size(served) == 2.0


@pytest.mark.parametrize(
    ("num_waiting", "age_us", "delay_us", "expected"),
    [
        (3, 0, 0, 3),  # no preferred size can be made: what there is goes
        (7, 0, 0, 4),  # the largest preferred one
        (9, 0, 0, 8),
        (20, 0, 0, 8),
        (3, 99, 100, 0),  # wait for company
        (3, 100, 100, 3),  # long enough
        (5, 0, 100, 4),
        (9, 100, 100, 9),  # the delay is over: as it is, up to max_batch_size
        (20, 100, 100, 16),
    ],
)
def test_preferred_sizes_and_the_delay_decide_what_goes(
    num_waiting: int, age_us: int, delay_us: int, expected: int
) -> None:
    """Triton's documentation, "Preferred Batch Sizes" and "Delayed Batching", with sizes 4 and 8 of at most 16."""
    scheduler = DynamicScheduler(pool(), DynamicConfig(16, (4, 8), delay_us))
    for number in range(num_waiting):
        scheduler.add(Request(number, 0, 10, 5))
    plan = scheduler.schedule(age_us * 1_000)
    assert (len(plan.batch.requests) if plan.batch is not None else 0) == expected


def test_a_request_that_completes_a_preferred_size_sends_the_batch_at_once() -> None:
    work = workload([0, MS, 2 * MS], np.full(3, 10), np.full(3, 5))
    dynamic = DynamicConfig(8, (3,), 50_000)
    table = run(work, pool(), STEP, scheduler=DynamicScheduler(pool(), dynamic)).requests
    assert table.scheduled_ns.tolist() == [2 * MS] * 3


def test_a_full_queue_rejects_on_arrival() -> None:
    dynamic = DynamicConfig(2, default_queue_policy=QueuePolicy(max_queue_size=2))
    work = workload([0, MS, MS, MS, MS], np.full(5, 10), np.full(5, 5))
    table = run(work, pool(), STEP, scheduler=DynamicScheduler(pool(), dynamic)).requests
    assert table.outcome.tolist() == [Outcome.FINISHED] * 3 + [Outcome.REJECTED] * 2
    assert table.finish_ns[3:].tolist() == [MS, MS]


def test_a_time_out_rejects_although_nothing_else_happens() -> None:
    policy = QueuePolicy(default_timeout_microseconds=3_000)
    dynamic = DynamicConfig(8, max_queue_delay_microseconds=10_000, default_queue_policy=policy)
    table = run(workload([0], [10], [5]), pool(), STEP, scheduler=DynamicScheduler(pool(), dynamic)).requests
    assert table.outcome.tolist() == [Outcome.REJECTED]
    assert table.finish_ns.tolist() == [3 * MS + 1]


def test_a_rejected_request_makes_room_at_the_client() -> None:
    policy = QueuePolicy(default_timeout_microseconds=3_000)
    dynamic = DynamicConfig(8, (2,), 10_000, policy)
    work = workload([0, 0, 0], np.full(3, 10), np.full(3, 5), max_concurrency=1)
    table = run(work, pool(), STEP, scheduler=DynamicScheduler(pool(), dynamic)).requests
    assert (table.outcome == Outcome.REJECTED).all()
    assert table.arrival_ns.tolist() == [0, 3 * MS + 2, 6 * MS + 4]


def test_a_time_out_takes_effect_between_the_steps_of_a_batch_that_runs() -> None:
    policy = QueuePolicy(default_timeout_microseconds=15_000)
    work = workload([0, 0, 0], np.full(3, 10), [10, 5, 5], max_concurrency=2)
    dynamic = DynamicConfig(1, default_queue_policy=policy)
    table = run(work, pool(), STEP, scheduler=DynamicScheduler(pool(), dynamic)).requests
    assert table.outcome.tolist() == [Outcome.FINISHED, Outcome.REJECTED, Outcome.REJECTED]
    assert table.finish_ns.tolist() == [100 * MS, 20 * MS, 40 * MS]
    assert table.arrival_ns.tolist() == [0, 0, 20 * MS + 1]


@pytest.mark.parametrize("execution", [TOGETHER, STREAMED])
def test_a_client_gets_its_answer_when_it_is_given(execution: BatchExecution) -> None:
    work = workload([0, 0, 0], np.full(3, 10), [4, 2, 3], max_concurrency=1)
    static = StaticConfig(2, 0, execution)
    table = run(work, pool(), STEP, scheduler=StaticScheduler(pool(), static)).requests
    assert table.finish_ns.tolist() == [40 * MS, 60 * MS + 1, 90 * MS + 2]
    assert table.arrival_ns.tolist() == [0, 40 * MS + 1, 60 * MS + 2]


def test_a_delayed_request_goes_behind_those_that_are_in_time_and_before_the_next_delayed() -> None:
    policy = QueuePolicy(default_timeout_microseconds=5_000, timeout_action="DELAY")
    dynamic = DynamicConfig(1, default_queue_policy=policy)
    work = workload([0, MS, 18 * MS, 19 * MS], np.full(4, 10), np.full(4, 2))
    table = run(work, pool(), STEP, scheduler=DynamicScheduler(pool(), dynamic)).requests
    assert table.scheduled_ns.tolist() == [0, 40 * MS, 20 * MS, 60 * MS]


def test_urgent_levels_go_first_and_a_priority_that_is_no_level_has_the_default_one() -> None:
    dynamic = DynamicConfig(1, priority_levels=3, default_priority_level=2)
    work = workload([0, 1, 2, 3, 4], np.full(5, 10), np.full(5, 1), priority=[1, 3, 0, 1, 7])
    table = run(work, pool(), STEP, scheduler=DynamicScheduler(pool(), dynamic)).requests
    assert np.argsort(table.scheduled_ns).tolist() == [0, 3, 2, 4, 1]


def test_instances_take_turns_step_by_step() -> None:
    dynamic = DynamicConfig(1, instance_count=2)
    work = workload([0, 0, 0], np.full(3, 10), [2, 2, 1])
    table = run(work, pool(), STEP, scheduler=DynamicScheduler(pool(), dynamic)).requests
    assert table.finish_ns.tolist() == [30 * MS, 40 * MS, 50 * MS]


# -- aborts


def test_an_aborted_request_leaves_its_slot_to_the_batch() -> None:
    scheduler = StaticScheduler(pool(), StaticConfig(2, execution=TOGETHER))
    long, short = Request("long", 0, 10, 50), Request("short", 0, 10, 1)
    for request in (long, short):
        scheduler.add(request)
    scheduler.commit(scheduler.schedule(0), 1)
    scheduler.abort(long)
    assert scheduler.pool.num_free < scheduler.config.num_usable_blocks
    plan = scheduler.schedule(1)
    assert plan.shape.num_decode_seqs == 2
    assert scheduler.commit(plan, 2) == [short]  # nobody lacks a token any more
    assert scheduler.pool.num_free == scheduler.config.num_usable_blocks


def test_a_complete_answer_that_is_aborted_before_it_is_given_does_not_end_the_batch() -> None:
    scheduler = StaticScheduler(pool(), StaticConfig(3))
    requests = [Request(number, 0, 10, output) for number, output in enumerate((1, 2, 3))]
    for request in requests:
        scheduler.add(request)
    scheduler.commit(scheduler.schedule(0), 1)
    scheduler.abort(requests[0])
    assert scheduler.commit(scheduler.schedule(1), 2) == []
    assert scheduler.commit(scheduler.schedule(2), 3) == requests[1:]


def test_a_batch_of_aborted_requests_ends() -> None:
    scheduler = StaticScheduler(pool(), StaticConfig(2))
    requests = [Request(number, 0, 10, 50) for number in range(2)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule(0)
    scheduler.abort(requests[0])
    scheduler.abort(requests[1])  # while its step runs
    assert scheduler.commit(plan, 1) == []
    assert scheduler.pool.num_free == scheduler.config.num_usable_blocks
    assert scheduler.schedule(2).is_empty


# -- what is known


def makespan_s(work: Workload, size: int, static: bool) -> float:
    config = pool(100_000, max_num_seqs=size, max_num_batched_tokens=100_000)
    scheduler = StaticScheduler(config, StaticConfig(size)) if static else None
    return int(run(work, config, STEP, scheduler=scheduler).requests.finish_ns.max()) / 1e9


def test_one_straggler_in_eight_leaves_a_fifth_of_the_slots_in_use() -> None:
    """The efficiency of static batching is the sum of the lengths over slots times the longest: 610 / 3200."""
    config = pool(100_000)
    work = workload(np.zeros(8), np.full(8, 16), [30] * 7 + [400])
    records = run(work, config, STEP, scheduler=StaticScheduler(config, StaticConfig(8)))
    use, waste = slot_use(records), token_waste(records)
    assert (use.output_tokens, use.slot_steps) == (610, 3200)
    assert use.efficiency == 610 / 3200
    assert waste.straggler_tokens == 3200 - 610
    assert waste.padding_tokens == 0
    assert use.slots_mean == 8.0
    assert use.output_throughput == pytest.approx(use.slot_throughput * 610 / 3200)


def test_continuous_batching_gains_at_most_the_inverse_of_that_efficiency() -> None:
    work = workload(np.zeros(8 * 60), np.full(8 * 60, 16), ([30] * 7 + [400]) * 60)
    gain = makespan_s(work, 8, static=True) / makespan_s(work, 8, static=False)
    assert 4.9 < gain <= 3200 / 610


def test_equal_lengths_gain_nothing() -> None:
    work = workload(np.zeros(80), np.full(80, 16), np.full(80, 50))
    assert makespan_s(work, 8, static=True) == makespan_s(work, 8, static=False)


def test_the_gain_grows_with_the_spread_of_the_lengths() -> None:
    rng, gains = np.random.default_rng(1), []
    for spread in (0.0, 0.25, 0.5, 0.75, 0.99):
        outputs = np.rint(100 * (1 + spread * rng.uniform(-1, 1, 1600))).astype(int)
        work = workload(np.zeros(1600), np.full(1600, 16), outputs)
        gains.append(makespan_s(work, 8, static=True) / makespan_s(work, 8, static=False))
    assert gains[0] == 1.0
    assert gains == sorted(gains)
    assert gains[-1] > 1.7  # the expected maximum of 8 uniform lengths is 1 + 0.99 * 7/9 of the mean


def test_a_saturated_batcher_obeys_littles_law() -> None:
    """1,000 in flight at 4,005.66 a second spend 249.6 ms each, almost all of it queueing; batches are full."""
    config, rate = pool(100_000), 4005.66
    work = workload(np.zeros(20_000), np.full(20_000, 1), np.full(20_000, 1), max_concurrency=1000)
    cost = ConstantCost(step_s=16 / rate)
    records = run(work, config, cost, scheduler=DynamicScheduler(config, DynamicConfig(16)))
    table = records.requests
    steady = slice(4_000, 16_000)
    latency_s = float((table.finish_ns - table.arrival_ns)[steady].mean()) / 1e9
    queue_s = float((table.scheduled_ns - table.arrival_ns)[steady].mean()) / 1e9
    assert latency_s == pytest.approx(1000 / rate, rel=0.01)
    assert queue_s / latency_s > 0.98
    assert mean_batch_size(records) == pytest.approx(16.0, abs=0.01)
    assert 20_000 / (int(table.finish_ns.max()) / 1e9) == pytest.approx(rate, rel=0.01)


def test_padding_is_what_shorter_prompts_lack() -> None:
    work = workload([0, 0, 0], [100, 10, 55], [1, 1, 1])
    records = run(work, pool(), STEP, scheduler=StaticScheduler(pool(), StaticConfig(3)))
    waste = token_waste(records)
    assert waste.padding_tokens == 300 - 165
    assert waste.wasted_share == pytest.approx(135 / 300)


@given(st.data())
def test_continuous_batching_pads_nothing_and_has_no_stragglers(data: st.DataObject) -> None:
    config = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=60,
        max_model_len=128,
        num_gpu_blocks=data.draw(st.integers(20, 60)),
        block_size=8,
    )
    records = run(data.draw(workloads(config)), config, COST)
    waste = token_waste(records)
    assert (waste.padding_tokens, waste.straggler_tokens) == (0, 0)
    assert waste.computed_tokens == waste.useful_tokens + waste.recomputed_tokens


# -- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StaticConfig(0), "batch_size must be at least 1, got 0"),
        (lambda: StaticConfig(1, -1), "batch_timeout_ns must be at least 0"),
        (lambda: BatchExecution(answers="later"), "answers must be one of together, streamed, got 'later'"),
        (lambda: BatchExecution(kv_reserve="all"), "kv_reserve must be one of padded, max_model_len"),
        (lambda: BatchExecution(max_prefill_tokens=0), "max_prefill_tokens must be at least 1"),
        (lambda: DynamicConfig(0), "max_batch_size must be at least 1"),
        (lambda: DynamicConfig(4, (8,)), r"preferred_batch_size must lie between 1 and max_batch_size \(4\), got 8"),
        (lambda: DynamicConfig(4, priority_levels=2), "default_priority_level must lie between 1 and priority_levels"),
        (lambda: DynamicConfig(4, priority_queue_policy=((1, QueuePolicy()),)), "names level 1"),
        (lambda: QueuePolicy(timeout_action="DROP"), "timeout_action must be one of REJECT, DELAY, got 'DROP'"),
        (lambda: QueuePolicy(max_queue_size=-1), "max_queue_size must be at least 0"),
        (lambda: StaticScheduler(pool(async_scheduling=True), StaticConfig(1)), "async_scheduling is True"),
        (
            lambda: StaticScheduler(pool(), StaticConfig(8, execution=BatchExecution(max_prefill_tokens=7))),
            r"max_prefill_tokens \(7\) must be at least the batch size \(8\)",
        ),
        (
            lambda: StaticScheduler(pool(9), StaticConfig(1, execution=BatchExecution(kv_reserve="max_model_len"))),
            r"one slot reserves max_model_len \(4,096 tokens\) and the KV pool holds 128",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_value(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_scheduler_must_be_new_and_made_for_the_same_pool() -> None:
    work = workload([0], [10], [5])
    with pytest.raises(ValueError, match="was made for num_gpu_blocks 50, the config says 10000"):
        run(work, pool(), STEP, scheduler=StaticScheduler(pool(50), StaticConfig(1)))
    used = StaticScheduler(pool(), StaticConfig(1))
    used.add(Request(0, 0, 10, 5))
    with pytest.raises(ValueError, match="already has 1 requests"):
        run(work, pool(), STEP, scheduler=used)

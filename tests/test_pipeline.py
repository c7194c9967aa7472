"""Pipeline parallelism in simulated time: cadences that can be told in advance, and steps that never overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import PerRequestScheduler, SpeculativePlan
from windtunnel.sim.engine.plan import Speculated, StepPlan
from windtunnel.sim.engine.request import Request
from windtunnel.sim.records import Records, table_columns
from windtunnel.sim.replica import RETRY_NS
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import Workload, workload

MS = 1_000_000
S = 1_000_000_000
STEP = ConstantCost(0.012)
STEP_NS = 12 * MS
COST = AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8)


def engine(num_stages: int, **changes: Any) -> SchedulerConfig:
    roomy = {"num_gpu_blocks": 50_000, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    return SchedulerConfig(**{**roomy, "pipeline_parallel_size": num_stages, **changes})


def alone(num_output_tokens: int) -> Workload:
    return workload([0], [20], [num_output_tokens])


def token_ends_ns(records: Records, row: int = 0) -> list[int]:
    """When a request got its tokens."""
    replica = records.replicas[0]
    mine = replica.spans.request == row
    spans = zip(replica.spans.first_step[mine].tolist(), replica.spans.count[mine].tolist(), strict=True)
    return [int(replica.steps.end_ns[step]) for first, count in spans for step in range(first, first + count)]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_a_lone_request_gets_a_token_a_pass_through_all_stages(num_stages: int) -> None:
    records = run(alone(10), engine(num_stages), STEP)
    assert token_ends_ns(records)[0] == STEP_NS
    pause_ns = RETRY_NS if num_stages > 1 else 0  # vLLM's loop has looked for more to do meanwhile, and found nothing
    assert set(np.diff(token_ends_ns(records)).tolist()) == {STEP_NS + pause_ns}


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_at_saturation_a_step_ends_every_stage_time(num_stages: int) -> None:
    work = workload(np.zeros(64), np.full(64, 20), np.full(64, 100))
    config = engine(num_stages, max_num_seqs=64, max_num_batched_tokens=320 // num_stages)
    ends_ns = run(work, config, STEP).replicas[0].steps.end_ns
    middle = ends_ns[len(ends_ns) // 4 : len(ends_ns) // 2]
    assert set(np.diff(middle).tolist()) == {STEP_NS // num_stages}


def test_a_full_pipeline_serves_as_many_times_more_as_it_has_stages() -> None:
    # waves of 16 requests in each of the micro-batches; one stage has a single wave at a time
    work = workload(np.zeros(64), np.full(64, 20), np.full(64, 100))
    took = [run(work, engine(n, max_num_batched_tokens=320), STEP).end_ns for n in (1, 4)]
    waves_of_16 = run(work, engine(1, max_num_seqs=16), STEP).end_ns
    assert waves_of_16 == 4 * 100 * STEP_NS
    assert took[1] < waves_of_16 / 3.5


@given(st.data())
def test_a_pipeline_of_one_stage_is_the_plain_engine(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs(async_scheduling=data.draw(st.booleans())))
    work = data.draw(workloads(config))
    plain = run(work, config, COST, horizon_ns=20 * S)
    one = run(work, config, COST, horizon_ns=20 * S, scheduler=PerRequestScheduler(config))
    assert plain.end_ns == one.end_ns
    for name, column in table_columns(plain.requests).items():
        assert column.tolist() == getattr(one.requests, name).tolist(), name
    for row in range(len(work)):
        assert token_ends_ns(plain, row) == token_ends_ns(one, row)
    for name in ("start_ns", "end_ns", "num_running", "num_waiting", "num_free_blocks", "num_preempted"):
        assert getattr(plain.replicas[0].steps, name).tolist() == getattr(one.replicas[0].steps, name).tolist(), name


@given(st.data())
def test_steps_follow_each_other_and_are_never_busier_than_the_clock(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(2, 4))
    config = data.draw(
        scheduler_configs(
            pipeline_parallel_size=num_stages,
            async_scheduling=data.draw(st.booleans()),
            use_v2_model_runner=data.draw(st.booleans()),
        )
    )
    work = data.draw(workloads(config))
    records = run(work, config, COST, horizon_ns=20 * S)
    steps = records.replicas[0].steps
    assert (steps.start_ns[1:] >= steps.end_ns[:-1]).all()
    assert (steps.end_ns >= steps.start_ns).all()  # the loop may see two ends at once
    assert int((steps.end_ns - steps.start_ns).sum()) <= records.end_ns
    table = records.requests
    finished = table.finish_ns >= 0
    assert (table.scheduled_ns >= table.arrival_ns)[finished].all()
    assert (table.first_token_ns > table.scheduled_ns)[finished].all()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(2, 4))
def test_steps_of_any_length_keep_their_order(lengths_ms: list[int], num_stages: int) -> None:
    """Steps of unequal length: a short one behind a long one leaves after it."""
    work = workload(
        np.arange(len(lengths_ms)) * MS, [length * 100 for length in lengths_ms], np.full(len(lengths_ms), 3)
    )
    records = run(work, engine(num_stages), AffineCost(1e-4, token_s=1e-5))
    assert (np.diff(records.replicas[0].steps.end_ns) > 0).all()
    assert (records.requests.outcome == 0).all()


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_with_async_scheduling_of_v2_a_request_decodes_every_so_many_steps(num_stages: int) -> None:
    config = engine(num_stages, async_scheduling=True, use_v2_model_runner=True)
    n = 8 * num_stages
    work = workload(np.zeros(n), np.full(n, 20), np.full(n, 60))
    records = run(work, replace(config, max_num_batched_tokens=160), STEP)  # prompts of eight requests a step
    spans = records.replicas[0].spans
    for row in range(n):
        mine = spans.request == row
        steps = [s for f, c in zip(spans.first_step[mine], spans.count[mine], strict=True) for s in range(f, f + c)]
        assert set(np.diff(steps).tolist()) == {num_stages}


def test_v2_keeps_a_pipeline_full_under_async_scheduling() -> None:
    n, num_stages = 32, 4
    work = workload(np.arange(n) * MS // 10, np.full(n, 20), np.full(n, 100))
    v1, v2 = (
        run(work, engine(num_stages, async_scheduling=True, use_v2_model_runner=is_v2), STEP) for is_v2 in (False, True)
    )
    ends_ns = v2.replicas[0].steps.end_ns
    assert np.median(np.diff(ends_ns)) == STEP_NS // num_stages
    assert (v1.requests.outcome == 0).all()


@pytest.mark.parametrize(
    ("is_async", "is_v2", "num_stages", "depth"),
    [(False, False, 1, 1), (True, False, 1, 2), (False, False, 3, 3), (True, False, 3, 3), (True, True, 3, 4)],
)
def test_so_many_steps_are_under_way_as_vllm_keeps(is_async: bool, is_v2: bool, num_stages: int, depth: int) -> None:
    config = engine(num_stages, async_scheduling=is_async, use_v2_model_runner=is_v2)
    assert config.max_steps_under_way == depth
    work = workload(np.zeros(40), np.full(40, 20), np.full(40, 5))
    scheduler = Counting(replace(config, max_num_batched_tokens=160))
    run(work, scheduler.config, STEP, scheduler=scheduler)
    assert scheduler.most_under_way == depth


class Counting(PerRequestScheduler):
    """Counts the steps that are decided and not done."""

    num_under_way = most_under_way = 0

    def schedule(self, now_ns: int) -> SpeculativePlan:
        plan = super().schedule(now_ns)
        self.num_under_way += not plan.is_empty
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        return plan

    def commit(self, plan: StepPlan, end_ns: int, speculated: Speculated | None = None) -> list[Request]:
        self.num_under_way -= 1
        return super().commit(plan, end_ns, speculated)


def test_a_stage_does_one_step_at_a_time() -> None:
    # chunks of 22 and 12 ms: the second is through the first stage at 17 ms and finds the other one busy until 22 ms
    config = engine(2, max_num_batched_tokens=200)
    records = run(workload([0], [300], [1]), config, AffineCost(base_s=0.002, token_s=1e-4))
    assert records.replicas[0].steps.start_ns.tolist() == [0, 22 * MS]
    assert records.replicas[0].steps.end_ns.tolist() == [22 * MS, 28 * MS]


def test_time_does_not_go_back_where_steps_are_shorter_than_the_loops_pause() -> None:
    # three stages: the step ends at 0.2 ms, but the loop sleeps until 1 ms and sees it then, as it admits the second
    work = workload([0, MS // 2, MS * 6 // 10], [20, 20, 20], [1, 2, 2])
    records = run(work, engine(3, max_num_seqs=2), ConstantCost(0.0002))
    table = records.requests
    assert table.finish_ns[0] == RETRY_NS
    assert table.scheduled_ns.tolist() == [0, RETRY_NS, RETRY_NS]


@given(st.data())
def test_nothing_is_decided_before_it_came(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    gaps_us = data.draw(st.lists(st.integers(0, 1500), min_size=n, max_size=n))
    outputs = data.draw(st.lists(st.integers(1, 6), min_size=n, max_size=n))
    work = workload(np.cumsum(gaps_us) * 1000, np.full(n, 20), outputs)
    is_async = data.draw(st.booleans())
    config = engine(data.draw(st.integers(1, 4)), max_num_seqs=data.draw(st.integers(1, 4)), async_scheduling=is_async)
    config = replace(config, use_v2_model_runner=is_async)
    records = run(work, config, ConstantCost(data.draw(st.sampled_from([1e-4, 4e-4, 2e-3]))))
    table = records.requests
    assert (table.scheduled_ns >= table.arrival_ns).all()
    assert (table.first_token_ns > table.scheduled_ns).all()
    for row in range(n):
        tokens_ns = token_ends_ns(records, row)
        assert tokens_ns == sorted(set(tokens_ns))
        assert (tokens_ns[0], tokens_ns[-1]) == (table.first_token_ns[row], table.finish_ns[row])


def test_the_busy_share_is_a_share() -> None:
    work = workload(np.zeros(64), np.full(64, 20), np.full(64, 100))
    for changes in ({}, {"async_scheduling": True, "use_v2_model_runner": True}):
        records = run(work, engine(4, max_num_batched_tokens=320, **changes), STEP)
        steps = records.replicas[0].steps
        share = float((steps.end_ns - steps.start_ns).sum()) / records.end_ns
        assert 0.9 < share <= 1.0


def test_an_abort_leaves_nothing_in_the_pipeline() -> None:
    work = replace(workload([0, 0, 0], [20, 30, 40], [500, 20, 20]), request_timeout_ns=400 * MS)
    for changes in ({}, {"async_scheduling": True}, {"async_scheduling": True, "use_v2_model_runner": True}):
        scheduler = PerRequestScheduler(engine(3, **changes))
        records = run(work, engine(3, **changes), STEP, scheduler=scheduler)
        assert records.requests.outcome.tolist() == [3, 0, 0]
        assert scheduler.num_requests == 0
        assert scheduler.pool.num_free == scheduler.config.num_usable_blocks

"""Preemption by swapping to the CPU: laws over both pools, and swap against recompute."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.cost.swap import SwapCost
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import StreamKeys
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.engine.swap import SwapConfig, SwapPlan, SwapScheduler
from windtunnel.sim.metrics.waste import token_waste
from windtunnel.sim.records import Outcome, Records, table_columns
from windtunnel.sim.simulate import run
from windtunnel.sim.simulated import SimExecutor
from windtunnel.sim.workload import Workload, workload

COST = AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8)
FAST = SwapCost(block_bytes=1 << 20, bytes_per_s=25e9)
HORIZON_NS = 4_000_000_000
MIB = 1 << 20


def swapped_run(
    work: Workload, config: SchedulerConfig, swap: SwapConfig, cost: Any = COST, link: SwapCost = FAST, **more: Any
) -> tuple[Records, SwapScheduler]:
    scheduler = SwapScheduler(config, swap)
    return run(work, config, cost, executor=SimExecutor(cost, link), scheduler=scheduler, **more), scheduler


@st.composite
def swaps(draw: st.DrawFn, config: SchedulerConfig, **fixed: Any) -> SwapConfig:
    values: dict[str, Any] = {
        "num_cpu_blocks": draw(st.sampled_from([0, 5, 40, 2_000])),
        "preemption_mode": draw(st.sampled_from(["swap", "swap", "recompute"])),
        "prefill_first": not config.enable_chunked_prefill and draw(st.booleans()),
    }
    return SwapConfig(**{**values, **fixed})


# -- laws


@given(st.data())
def test_blocks_are_conserved_over_both_pools(data: st.DataObject) -> None:
    """Step by step, with aborts in between: whoever is swapped out holds CPU blocks for all that he has computed."""
    config = data.draw(scheduler_configs())
    scheduler = SwapScheduler(config, data.draw(swaps(config)))
    coming = requests_of(data.draw(workloads(config)))
    alive: list[Request] = []
    for now in range(150):
        while coming and coming[0].arrival_ns <= now * 20_000_000:
            scheduler.add(coming[0])
            alive.append(coming.pop(0))
        plan = scheduler.schedule(now)
        check_plan(scheduler, plan)
        check_blocks(scheduler)
        if alive and data.draw(st.integers(0, 12)) == 0:
            scheduler.abort(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
            check_blocks(scheduler)
        if not plan.is_empty:
            done = scheduler.commit(plan, now)
            alive = [request for request in alive if request not in done]
            check_blocks(scheduler)
        assert set(scheduler.requests()) == set(alive)
        assert scheduler.num_requests == len(alive)
    for request in alive:
        scheduler.abort(request)
    assert scheduler.pool.num_free == config.num_usable_blocks
    assert scheduler.cpu_pool.num_free == scheduler.swap.num_cpu_blocks


def requests_of(work: Workload) -> list[Request]:
    assert work.content is not None
    return [
        Request(
            row,
            int(work.arrival_ns[row]),
            int(work.num_prompt_tokens[row]),
            int(work.num_output_tokens[row]),
            priority=int(work.priority[row]),
            keys=StreamKeys(work.content[row], work.num_streams + row, 4),
        )
        for row in range(len(work))
    ]


def check_blocks(scheduler: SwapScheduler) -> None:
    held = Counter(block for request in scheduler.running for block in request.block_ids)
    free = scheduler.pool.free_queue()
    assert len(free) == len(set(free)) == scheduler.pool.num_free
    assert not held.keys() & set(free)
    assert len(held) + len(free) == scheduler.config.num_usable_blocks
    for request in (*scheduler.swapped, *scheduler.waiting):
        assert not request.block_ids
    size = scheduler.config.block_size
    num_parked = sum(-(-scheduler.num_computed_tokens(request) // size) for request in scheduler.swapped)
    assert num_parked + scheduler.cpu_pool.num_free == scheduler.swap.num_cpu_blocks


def check_plan(scheduler: SwapScheduler, plan: SwapPlan) -> None:
    config = scheduler.config
    scheduled = {} if plan.is_empty else scheduler.scheduled_tokens(plan)
    assert sum(scheduled.values()) == plan.shape.num_tokens <= config.max_num_batched_tokens
    assert len(scheduler.running) <= config.max_num_seqs
    assert not (plan.preemptions and (plan.admissions or plan.swapped_in))
    assert not (plan.admissions and len(scheduler.swapped))  # nobody overtakes those who are on the CPU
    assert not set(plan.swapped_in) & set(plan.swapped_out)
    assert set(plan.swapped_in) <= scheduled.keys()
    for request in scheduled:
        assert scheduler.num_computed_tokens(request) <= len(request.block_ids) * config.block_size
    if scheduler.swap.prefill_first and plan.admissions:
        assert not plan.shape.num_decode_seqs
    assert all(request.status == Status.SWAPPED for request in plan.swapped_out)


@given(st.data())
def test_requests_and_tokens_are_conserved(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    work = data.draw(workloads(config))
    records, _ = swapped_run(work, config, data.draw(swaps(config)), horizon_ns=HORIZON_NS)
    (replica,) = records.replicas
    table = records.requests
    assert table.request.tolist() == list(range(len(work)))
    done = table.outcome == Outcome.FINISHED
    assert (table.num_output_tokens[done] == work.num_output_tokens[done]).all()
    got = np.bincount(replica.spans.request, replica.spans.count, len(work)).astype(int)
    assert got.tolist() == table.num_output_tokens.tolist()
    if done.all():
        computed = int(replica.steps.num_decode_seqs.sum() + replica.steps.prefill_tokens.sum())
        needed = int((table.num_prompt_tokens + table.num_output_tokens - 1).sum())
        lost = int(replica.preemptions.num_computed_tokens.sum())
        regained = int(table.num_resumed_cached_tokens.sum())
        assert computed == needed - int(table.num_cached_tokens.sum()) + lost - regained


@given(st.data())
def test_nothing_that_was_swapped_is_ever_computed_again(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    work = data.draw(workloads(config))
    swap = data.draw(swaps(config, num_cpu_blocks=10_000, preemption_mode="swap"))
    records, scheduler = swapped_run(work, config, swap, horizon_ns=HORIZON_NS)
    assert scheduler.num_recomputations == 0
    assert not records.requests.num_recomputed_tokens.any()
    waste = token_waste(records)
    if (records.requests.outcome == Outcome.FINISHED).all():
        assert waste.computed_tokens == waste.useful_tokens
        assert scheduler.num_swapped_in_blocks == scheduler.num_swapped_out_blocks


@given(st.data())
def test_recompute_mode_is_the_plain_scheduler(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    work = data.draw(workloads(config))
    swap = SwapConfig(100, preemption_mode="recompute")
    records, scheduler = swapped_run(work, config, swap, horizon_ns=HORIZON_NS)
    plain = run(work, config, COST, horizon_ns=HORIZON_NS)
    for kind in ("steps", "spans", "preemptions"):
        for name, column in table_columns(getattr(plain.replicas[0], kind)).items():
            assert column.tolist() == getattr(getattr(records.replicas[0], kind), name).tolist()
    assert plain.requests.finish_ns.tolist() == records.requests.finish_ns.tolist()
    assert scheduler.num_swapped_out_blocks == 0


@given(st.data())
def test_a_copy_only_makes_a_step_longer_by_its_own_time(data: st.DataObject) -> None:
    """Decisions do not depend on the link while nobody arrives in between."""
    config = data.draw(scheduler_configs())
    work = data.draw(workloads(config))
    work = workload(
        np.zeros(len(work)),
        work.num_prompt_tokens,
        work.num_output_tokens,
        max_tokens=work.max_tokens,
        priority=work.priority,
    )
    swap = SwapConfig(10_000)
    ends = []
    for bytes_per_s in (1e9, 2e9):
        cost, link = ConstantCost(step_s=0.01), SwapCost(1_000_000, bytes_per_s)
        records, scheduler = swapped_run(work, config, swap, cost, link, horizon_ns=10**13)
        steps = records.replicas[0].steps
        copied_ns = int((steps.end_ns - steps.start_ns).sum()) - 10_000_000 * len(steps)
        num_blocks = scheduler.num_swapped_in_blocks + scheduler.num_swapped_out_blocks
        assert copied_ns == num_blocks * round(1e15 / bytes_per_s)
        ends.append(len(steps))
    assert ends[0] == ends[1]


# -- cases


def pressed(num_requests: int = 2, output: int = 12) -> tuple[Workload, SchedulerConfig]:
    """Requests of 12 + 12 tokens in a pool of 7 blocks of 4: two of them grow out of it."""
    config = SchedulerConfig(
        num_gpu_blocks=8, block_size=4, max_num_seqs=2, max_model_len=64, enable_prefix_caching=False
    )
    return workload(np.arange(num_requests), np.full(num_requests, 12), np.full(num_requests, output)), config


def test_a_request_goes_to_the_cpu_and_comes_back_where_it_was() -> None:
    config = pressed()[1]
    scheduler = SwapScheduler(config, SwapConfig(10))
    first, second = Request("first", 0, 12, 12), Request("second", 1, 12, 12)
    scheduler.add(first)
    scheduler.add(second)
    seen = []
    while scheduler.num_requests:
        plan = scheduler.schedule(0)
        moved = [(r.request_id, "out") for r in plan.swapped_out] + [(r.request_id, "in") for r in plan.swapped_in]
        if moved:
            seen.append((plan.number, moved, plan.num_swapped_out_blocks, plan.num_swapped_in_blocks, plan.shape))
        scheduler.commit(plan, 1)
    # Both prompts are 3 blocks; with their second tokens both need a fourth, and there is one.  After 11 decodes the
    # first is done, and the second goes on with its 13th token.
    (out, back) = seen
    assert out[:4] == (1, [("second", "out")], 3, 0)
    assert out[4].num_decode_seqs == 1
    assert back[:4] == (12, [("second", "in")], 0, 3)
    assert (back[4].num_decode_seqs, back[4].decode_context_tokens, back[4].prefill_tokens) == (1, 13, 0)
    assert second.num_preemptions == 1
    assert second.num_recomputed_tokens == 0


def test_nobody_waiting_is_admitted_before_the_swapped_are_back() -> None:
    work, config = pressed(num_requests=3)
    records, _ = swapped_run(work, config, SwapConfig(10), ConstantCost(step_s=0.01))
    assert records.requests.finish_ns[1] < records.requests.finish_ns[2]
    preempted_ns = int(records.replicas[0].preemptions.time_ns[0])
    assert int(records.requests.scheduled_ns[2]) > preempted_ns
    assert int(records.requests.scheduled_ns[2]) >= int(records.requests.finish_ns[0])


def test_a_full_cpu_pool_makes_the_victim_recompute() -> None:
    work, config = pressed()
    records, scheduler = swapped_run(work, config, SwapConfig(2))
    assert scheduler.num_recomputations == 1
    assert scheduler.num_swapped_out_blocks == 0
    assert records.requests.num_recomputed_tokens.tolist() == [0, 12]


def test_a_swapped_request_can_be_aborted() -> None:
    config = pressed()[1]
    scheduler = SwapScheduler(config, SwapConfig(10))
    requests = [Request(row, row, 12, 12) for row in range(2)]
    for request in requests:
        scheduler.add(request)
    for now in range(2):
        scheduler.commit(scheduler.schedule(now), now)
    assert requests[1].status == Status.SWAPPED
    assert scheduler.load().num_waiting == 1
    scheduler.abort(requests[1])
    assert scheduler.cpu_pool.num_free == 10
    assert scheduler.num_requests == 1


def test_prefills_go_alone_when_they_go_first() -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=200, max_model_len=128, enable_chunked_prefill=False
    )
    work = workload([0, 25_000_000], [50, 60], [10, 10])
    records, _ = swapped_run(work, config, SwapConfig(0, prefill_first=True), ConstantCost(step_s=0.01))
    steps = records.replicas[0].steps
    assert steps.num_decode_seqs[:5].tolist() == [0, 1, 1, 0, 2]
    assert steps.prefill_tokens[:5].tolist() == [50, 0, 0, 60, 0]


def test_3500_tokens_of_qwen2_5_7b_are_191_mib_and_8_ms_each_way() -> None:
    link = SwapCost.of_model(load_model("Qwen/Qwen2.5-7B-Instruct"), 25e9, block_size=1)
    assert round(3500 * link.block_bytes / MIB) == 191
    assert link.copy_time_s(3500) == pytest.approx(8.03e-3, abs=0.01e-3)
    blocks = SwapCost.of_model(load_model("Qwen/Qwen2.5-7B-Instruct"), 25e9)
    assert blocks.copy_time_s(-(-3500 // 16)) == pytest.approx(8.04e-3, abs=0.01e-3)
    assert blocks.num_cpu_blocks(4 << 30) == (4 << 30) // (16 * 57_344)


def test_swapping_wins_over_a_fast_link_and_recomputing_over_a_slow_one() -> None:
    """Two runs that differ in nothing but the mode; a copy of one request costs 2 * 8 ms, or 100 times that."""
    rng = np.random.default_rng(3)
    config = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        max_model_len=8192,
        num_gpu_blocks=1600,
        enable_prefix_caching=False,
    )
    work = workload(np.zeros(48), rng.integers(2_000, 3_000, 48), rng.integers(400, 1_200, 48))
    cost = AffineCost(base_s=8e-3, token_s=2.5e-5)  # 3,500 tokens anew: 87 ms
    ends_s = {}
    for mode, bytes_per_s in (("recompute", 25e9), ("swap", 25e9), ("swap", 0.25e9)):
        link = SwapCost.of_model(load_model("Qwen/Qwen2.5-7B-Instruct"), bytes_per_s)
        records, scheduler = swapped_run(work, config, SwapConfig(20_000, preemption_mode=mode), cost, link)
        assert (records.requests.outcome == Outcome.FINISHED).all()
        assert records.requests.num_preemptions.sum() > 10
        assert scheduler.num_recomputations == 0 or mode == "recompute"
        ends_s[mode, bytes_per_s] = records.end_ns / 1e9
    assert ends_s["swap", 25e9] < ends_s["recompute", 25e9] < ends_s["swap", 0.25e9]


def test_copies_that_nobody_priced_are_refused() -> None:
    work, config = pressed()
    with pytest.raises(ValueError, match=r"a step swaps 3 KV blocks, but what that costs was not said"):
        run(work, config, COST, scheduler=SwapScheduler(config, SwapConfig(10)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SwapConfig(-1), "num_cpu_blocks must be at least 0, got -1"),
        (lambda: SwapConfig(1, preemption_mode="drop"), "preemption_mode must be one of swap, recompute, got 'drop'"),
        (
            lambda: SwapScheduler(SchedulerConfig(), SwapConfig(1, prefill_first=True)),
            "prefill_first computes prompts whole",
        ),
        (lambda: SwapScheduler(SchedulerConfig(async_scheduling=True), SwapConfig(1)), "async_scheduling is True"),
        (lambda: SwapCost(0, 1e9), "block_bytes must be above 0"),
        (lambda: SwapCost(1, float("inf")), "bytes_per_s must be above 0 and finite"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_value(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

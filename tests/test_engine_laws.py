"""Laws that every run obeys, whatever the engine and the workload."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import StreamKeys
from windtunnel.sim.engine.per_request import PerRequestScheduler
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.records import Outcome, Records, table_columns
from windtunnel.sim.simulate import RequestTooLarge, run
from windtunnel.sim.workload import Workload, workload

COST = AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8)
HORIZON_NS = 4_000_000_000


@given(st.data())
def test_blocks_are_conserved_and_held_as_often_as_they_are_listed(data: st.DataObject) -> None:
    """Step by step, with aborts in between: held or free, never both, and no more holders than lists."""
    config = data.draw(scheduler_configs())
    scheduler = Scheduler(config)
    waiting = requests_of(data.draw(workloads(config)))
    alive: list[Request] = []
    for now in range(150):
        while waiting and waiting[0].arrival_ns <= now * 20_000_000:
            scheduler.add(waiting[0])
            alive.append(waiting.pop(0))
        plan = scheduler.schedule(now)
        check_blocks(scheduler)
        check_plan(scheduler, plan)
        if alive and data.draw(st.integers(0, 12)) == 0:
            scheduler.abort(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
            check_blocks(scheduler)
        if not plan.is_empty:
            done = scheduler.commit(plan, now)
            alive = [request for request in alive if request not in done]
            check_blocks(scheduler)
    for request in alive:
        scheduler.abort(request)
    assert scheduler.pool.num_free == config.num_usable_blocks
    assert not scheduler.running
    assert not len(scheduler.waiting)


@given(st.data())
def test_an_answer_that_a_sampler_ends_leaves_the_same_decisions_as_one_of_known_length(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs(async_scheduling=data.draw(st.booleans())))
    kind = data.draw(st.sampled_from([Scheduler, PerRequestScheduler]))
    work = data.draw(workloads(config))
    lengths = dict(enumerate(work.num_output_tokens.tolist()))
    known = decisions(kind(config), requests_of(work), {})
    unknown = requests_of(work)
    for request in unknown:
        request.num_output_tokens = request.max_tokens
    assert decisions(kind(config), unknown, lengths) == known


def decisions(scheduler: Scheduler, waiting: list[Request], lengths: dict[int, int]) -> list[object]:
    """What 150 decisions came to, if answers end after these lengths as soon as their last token is seen."""
    log: list[object] = []
    under_way: list[tuple[StepPlan, list[Request]]] = []
    for now in range(150):
        while waiting and waiting[0].arrival_ns <= now * 20_000_000:
            scheduler.add(waiting.pop(0))
        plan = scheduler.schedule(now)
        scheduled = {} if plan.is_empty else scheduler.scheduled_tokens(plan)
        unfinished = {chunk.request for chunk in plan.chunks if not chunk.samples}
        if not plan.is_empty:
            under_way.append((plan, [request for request in scheduled if request not in unfinished]))
        log.append(({r.request_id: (n, tuple(r.block_ids)) for r, n in scheduled.items()}, plan.shape))
        log.append([(p.request.request_id, p.num_computed_tokens) for p in plan.preemptions])
        if under_way and (plan.is_empty or len(under_way) == scheduler.max_steps_under_way):
            oldest, yields = under_way.pop(0)
            for request in yields:
                num_tokens = scheduler.num_emitted_tokens(request) + 1
                if request.status <= Status.PREEMPTED and num_tokens == lengths.get(int(request.request_id)):
                    scheduler.end_after(request, num_tokens)
            log.append([request.request_id for request in scheduler.commit(oldest, now)])
    return [*log, scheduler.pool.free_queue()]


def requests_of(work: Workload) -> list[Request]:
    from windtunnel.sim.engine.keys import StreamKeys

    assert work.content is not None
    rows = range(len(work))
    return [
        Request(
            row,
            int(work.arrival_ns[row]),
            int(work.num_prompt_tokens[row]),
            int(work.num_output_tokens[row]),
            priority=int(work.priority[row]),
            keys=StreamKeys(work.content[row], work.num_streams + row, 4),
        )
        for row in rows
    ]


def check_blocks(scheduler: Scheduler) -> None:
    held = Counter(block for request in scheduler.running for block in request.block_ids)
    free = scheduler.pool.free_queue()
    assert len(free) == len(set(free)) == scheduler.pool.num_free
    assert not held.keys() & set(free)
    assert len(held) + len(free) == scheduler.config.num_usable_blocks
    assert 0 not in held
    assert 0 not in free
    for request in scheduler.waiting:
        assert not request.block_ids


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    config = scheduler.config
    scheduled = {} if plan.is_empty else scheduler.scheduled_tokens(plan)
    assert sum(scheduled.values()) == plan.shape.num_tokens <= config.max_num_batched_tokens
    assert len(scheduler.running) <= config.max_num_seqs
    assert not (plan.preemptions and plan.admissions)
    for request in scheduled:
        assert scheduler.num_computed_tokens(request) <= len(request.block_ids) * config.block_size


@given(st.data())
def test_requests_and_tokens_are_conserved_and_causes_precede_effects(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    work = data.draw(workloads(config))
    records = run(work, config, COST, horizon_ns=HORIZON_NS)
    table = records.requests
    assert table.request.tolist() == list(range(len(work)))
    done = table.outcome == Outcome.FINISHED
    assert (table.num_output_tokens[done] == work.num_output_tokens[done]).all()
    assert (table.due_ns[done] <= table.arrival_ns[done]).all()
    assert (table.arrival_ns[done] <= table.scheduled_ns[done]).all()
    assert (table.scheduled_ns[done] < table.first_token_ns[done]).all()
    assert (table.first_token_ns[done] <= table.finish_ns[done]).all()
    check_token_counts(records)
    check_computed_tokens(records)


def check_token_counts(records: Records) -> None:
    """Every output token lies in exactly one span, and the steps yield as many as were got."""
    (replica,) = records.replicas
    got = np.bincount(replica.spans.request, replica.spans.count, len(records.requests)).astype(int)
    assert got.tolist() == records.requests.num_output_tokens.tolist()


def check_computed_tokens(records: Records) -> None:
    """Tokens computed = prompt + output - 1 - what the cache had + what preemption lost; all of it once finished."""
    (replica,) = records.replicas
    table = records.requests
    if not (table.outcome == Outcome.FINISHED).all():
        return
    computed = int(replica.steps.num_decode_seqs.sum() + replica.steps.prefill_tokens.sum())
    needed = int((table.num_prompt_tokens + table.num_output_tokens - 1).sum())
    saved = int(table.num_cached_tokens.sum())
    lost = int(replica.preemptions.num_computed_tokens.sum())
    regained = int(table.num_resumed_cached_tokens.sum())
    assert computed == needed - saved + lost - regained


@given(st.data())
def test_the_engine_never_rests_while_it_could_work(data: st.DataObject) -> None:
    """Between two steps there is a pause only if no request was in the engine, or a preemption took all that ran."""
    config = data.draw(scheduler_configs())
    work = data.draw(workloads(config))
    records = run(work, config, COST, horizon_ns=HORIZON_NS)
    (replica,) = records.replicas
    table, retries = records.requests, set(replica.preemptions.time_ns.tolist())
    starts, ends = replica.steps.start_ns.tolist(), replica.steps.end_ns.tolist()
    for pause_from, pause_to in zip(ends[:-1], starts[1:], strict=True):
        if pause_from < pause_to and pause_from not in retries:
            inside = (table.arrival_ns < pause_to) & ((table.finish_ns > pause_from) | (table.finish_ns < 0))
            assert not inside.any()
            assert pause_to in table.arrival_ns


@given(st.data())
def test_the_same_arguments_give_the_same_records(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    work = data.draw(workloads(config))
    first, second = (run(work, config, COST, horizon_ns=HORIZON_NS) for _ in range(2))
    for name, column in table_columns(first.requests).items():
        assert column.tobytes() == table_columns(second.requests)[name].tobytes()
    for name, column in table_columns(first.replicas[0].steps).items():
        assert column.tobytes() == table_columns(second.replicas[0].steps)[name].tobytes()


def test_littles_law_holds_between_the_steps_and_the_requests() -> None:
    """Mean number in the engine, seen by the clock, is arrival rate times mean time in it, seen by the requests."""
    rng = np.random.default_rng(1)
    work = workload(
        (np.cumsum(rng.exponential(0.05, 800)) * 1e9).astype(np.int64),
        rng.integers(1, 300, 800),
        rng.integers(1, 60, 800),
    )
    records = run(work, SchedulerConfig(num_gpu_blocks=200), COST)
    table, steps = records.requests, records.replicas[0].steps
    held = (steps.end_ns - steps.start_ns) * (steps.num_running + steps.num_waiting)
    # A request that comes in mid-step is counted by the next step only.
    unseen = [
        int(steps.end_ns[np.searchsorted(steps.end_ns, at, side="left")] - at)
        for at in table.arrival_ns
        if steps.start_ns[np.searchsorted(steps.end_ns, at, side="left")] < at
    ]
    assert int(held.sum()) + sum(unseen) == int((table.finish_ns - table.arrival_ns).sum())


def test_one_request_at_a_time_is_an_m_d_1_queue() -> None:
    """With one seat and one-token answers the waiting time is Pollaczek-Khinchine's: rho * s / (2 (1 - rho)).

    Mean of 40 replications of 2,000 requests at rho = 0.7, within four standard errors.
    """
    service_s, rho, means = 0.01, 0.7, []
    for seed in range(40):
        gaps = np.random.default_rng(seed).exponential(service_s / rho, 2000)
        ones = np.ones(2000, np.int64)
        config = SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False)
        table = run(
            workload((np.cumsum(gaps) * 1e9).astype(np.int64), ones, ones), config, ConstantCost(step_s=service_s)
        ).requests
        means.append(float((table.scheduled_ns - table.arrival_ns)[200:].mean()) / 1e9)
    expected = rho * service_s / (2 * (1 - rho))
    assert abs(np.mean(means) - expected) < 4 * np.std(means) / np.sqrt(len(means))


def test_a_prompt_that_leaves_no_room_for_an_answer_is_rejected_and_counted() -> None:
    records = run(workload([0, 0], [64, 10], [5, 5]), SchedulerConfig(max_model_len=64, num_gpu_blocks=50), COST)
    assert records.requests.outcome.tolist() == [Outcome.REJECTED, Outcome.FINISHED]
    assert records.requests.num_output_tokens.tolist() == [0, 5]


def test_an_answer_ends_at_max_model_len() -> None:
    records = run(workload([0], [60], [20]), SchedulerConfig(max_model_len=64, num_gpu_blocks=50), COST)
    assert records.requests.num_output_tokens.tolist() == [4]


def test_a_request_that_can_never_fit_is_refused_before_anything_runs() -> None:
    with pytest.raises(RequestTooLarge, match=r"request 1 needs 13 KV blocks \(200 tokens\) but the cache has 9"):
        run(workload([0, 0], [10, 101], [1, 100]), SchedulerConfig(num_gpu_blocks=10, max_num_seqs=8), COST)


def test_an_engine_whose_only_runner_preempts_itself_tries_again() -> None:
    """Under priority the neediest may be the victim before anybody else was served: an empty step, not the end.

    The urgent one behind it then gets its blocks; a retry comes 1 ms later, as in vLLM's loop.
    """
    config = SchedulerConfig(
        num_gpu_blocks=8, block_size=4, max_num_seqs=2, max_model_len=64, policy="priority", enable_prefix_caching=False
    )
    work = workload([0, 1], [12, 9], [12, 12], priority=[1, 0])
    records = run(work, config, ConstantCost(step_s=0.01))
    (replica,) = records.replicas
    assert records.requests.outcome.tolist() == [Outcome.FINISHED] * 2
    assert records.requests.num_preemptions.tolist() == [1, 0]
    pauses = replica.steps.start_ns[1:] - replica.steps.end_ns[:-1]
    assert pauses.max() == 1_000_000
    assert not records.stalled


def test_requests_that_only_keep_preempting_each_other_end_the_run() -> None:
    """Admission by first chunk, priorities and a tiny pool: found by hypothesis; vLLM would go on for ever."""
    config = SchedulerConfig(
        max_num_seqs=5,
        max_num_batched_tokens=87,
        max_model_len=400,
        block_size=4,
        num_gpu_blocks=11,
        enable_prefix_caching=False,
        long_prefill_token_threshold=7,
        policy="priority",
        scheduler_reserve_full_isl=False,
    )
    work = workload(
        [0, 0, 0, 0, 0, 400_000_000],
        [16, 24, 15, 23, 24, 1],
        [14, 2, 4, 4, 8, 7],
        max_tokens=[14, 3, 4, 6, 11, 8],
        priority=[1, 3, 1, 3, 1, 3],
    )
    records = run(work, config, ConstantCost(step_s=0.003))
    assert records.stalled
    assert len(records.requests) == 6
    assert (records.requests.outcome == Outcome.UNFINISHED).any()
    check_token_counts(records)


def test_a_prompt_that_never_fits_waits_for_ever_as_in_vllm() -> None:
    scheduler = Scheduler(SchedulerConfig(num_gpu_blocks=10, max_num_seqs=8))
    scheduler.add(Request("large", 0, 200, 5))
    assert scheduler.schedule(0).is_empty
    assert len(scheduler.waiting) == 1


def test_a_horizon_leaves_the_rest_unfinished_with_what_it_had() -> None:
    records = run(
        workload([0, 0], [10, 10], [3, 50]), SchedulerConfig(), ConstantCost(step_s=0.01), horizon_ns=105_000_000
    )
    assert records.requests.outcome.tolist() == [Outcome.FINISHED, Outcome.UNFINISHED]
    assert records.requests.num_output_tokens.tolist() == [3, 10]
    assert records.end_ns == 105_000_000
    check_token_counts(records)


def test_a_client_limit_holds_requests_back_and_the_wait_is_not_in_ttft() -> None:
    work = workload([0, 0, 0], [10, 10, 10], [2, 2, 2], max_concurrency=1)
    table = run(work, SchedulerConfig(), ConstantCost(step_s=0.01)).requests
    assert table.due_ns.tolist() == [0, 0, 0]
    assert table.arrival_ns.tolist() == [0, 20_000_001, 40_000_002]
    assert (table.first_token_ns - table.arrival_ns).tolist() == [10_000_000] * 3


def test_a_follow_up_comes_after_the_answer_and_the_pause_and_finds_its_history_cached() -> None:
    work = workload(
        [0, -1],
        [40, 80],
        [10, 5],
        previous=[-1, 0],
        think_ns=[0, 1_000],
        content=(((0, 50),), ((0, 85),)),
        num_streams=1,
    )
    table = run(work, SchedulerConfig(block_size=16), ConstantCost(step_s=0.01)).requests
    assert table.arrival_ns.tolist() == [0, int(table.finish_ns[0]) + 1 + 1_000]
    assert table.num_cached_tokens.tolist() == [0, 48]  # 49 of 50 tokens were computed: three full blocks


def test_a_closed_loop_of_one_token_answers_takes_a_step_for_each() -> None:
    """Answers that come with the prefill reach the client at the end of that step, not before."""
    ones = [1] * 4
    work = workload([0] * 4, ones, ones, max_concurrency=1)
    table = run(work, SchedulerConfig(), ConstantCost(step_s=0.01)).requests
    assert table.arrival_ns.tolist() == [0, 10_000_001, 20_000_002, 30_000_003]


def test_a_request_s_own_tokens_are_nobody_else_s() -> None:
    """Stream 0 is shared by rows 1 and 2; row 0, which shares nothing, must not be taken for it."""
    work = workload([0, 10**9, 2 * 10**9], [64] * 3, [2] * 3, content=((), ((0, 64),), ((0, 64),)), num_streams=1)
    table = run(work, SchedulerConfig(), ConstantCost(step_s=0.01)).requests
    assert table.num_cached_tokens.tolist() == [0, 0, 48]


def test_blocks_that_stay_findable_are_seen_in_the_records() -> None:
    """While the second request runs, the first one's four full blocks are free and cached."""
    work = workload([0, 10**9], [64, 16], [2, 2])
    steps = run(work, SchedulerConfig(), ConstantCost(step_s=0.01)).replicas[0].steps
    assert steps.num_cached_blocks.tolist() == [0, 0, 4, 4]


def test_a_resumed_request_looks_up_its_prompt_and_its_output() -> None:
    config = SchedulerConfig(num_gpu_blocks=6, block_size=4, max_num_seqs=2, max_model_len=20)
    table = run(workload([0, 0], [8, 8], [8, 8]), config, ConstantCost(step_s=0.01)).requests
    assert table.num_preemptions.tolist() == [0, 1]
    assert table.num_resumed_query_tokens.tolist() == [0, 9]  # its eight prompt tokens and one of its answer


def test_executors_can_be_swapped_between_any_two_steps() -> None:
    """The state lives in the scheduler alone, so a run whose executor changes half-way decides the same."""

    class Alternating:
        def __init__(self) -> None:
            self.num_steps = 0

        def execute(self, plan: StepPlan) -> StepResult:
            self.num_steps += 1
            return StepResult(10_000_000)

    work = workload([0, 5_000_000, 30_000_000], [100, 50, 20], [20, 30, 10])
    config = SchedulerConfig(num_gpu_blocks=14, max_num_seqs=4)
    executor = Alternating()
    swapped = run(work, config, ConstantCost(step_s=0.01), executor=executor)
    assert executor.num_steps == len(swapped.replicas[0].steps)
    plain = run(work, config, ConstantCost(step_s=0.01))
    assert plain.requests.finish_ns.tolist() == swapped.requests.finish_ns.tolist()


def test_an_aborted_request_frees_its_blocks_at_once_in_every_state() -> None:
    scheduler = Scheduler(SchedulerConfig(num_gpu_blocks=20, max_num_seqs=2))
    running, waiting, preempted = Request("r", 0, 30, 9), Request("w", 0, 30, 9), Request("p", 0, 30, 9)
    for request in (running, waiting, preempted):
        scheduler.add(request)
    plan = scheduler.schedule(0)
    scheduler.abort(running)  # while its step runs
    assert scheduler.commit(plan, 1) == []
    assert running.status == Status.ABORTED
    assert running.num_emitted == 0
    scheduler.abort(preempted)
    scheduler.abort(waiting)
    scheduler.abort(waiting)  # twice does no harm
    assert scheduler.pool.num_free == 19
    assert scheduler.schedule(2).is_empty


def test_a_request_that_leaves_in_mid_step_leaves_its_findable_blocks_in_order() -> None:
    """Decided ahead (asynchronous scheduling), blocks of its output are findable before their tokens are known."""
    config = SchedulerConfig(
        max_num_seqs=2,
        num_gpu_blocks=40,
        block_size=1,
        max_model_len=64,
        max_num_batched_tokens=64,
        async_scheduling=True,
    )
    scheduler = Scheduler(config)
    request = Request(0, 0, 5, 20, keys=StreamKeys(((0, 25),), 1, 1))
    scheduler.add(request)
    under_way = [scheduler.schedule(0)]
    for _ in range(4):
        under_way.append(scheduler.schedule(0))
        scheduler.commit(under_way.pop(0), 1)
    scheduler.schedule(0)
    scheduler.abort(request)
    assert sorted(scheduler.pool.take(config.num_usable_blocks)) == list(range(1, 40))
    assert scheduler.pool.num_keys == 0

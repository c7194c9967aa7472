"""Clients that give up: when, what is left behind, and who comes next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.swap import SwapCost
from windtunnel.sim.engine.batch_queue import QueuePolicy
from windtunnel.sim.engine.batches import BatchExecution
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.dynamic import DynamicConfig, DynamicScheduler
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.protocols import SchedulerProtocol
from windtunnel.sim.engine.static import StaticConfig, StaticScheduler
from windtunnel.sim.engine.swap import SwapConfig, SwapScheduler
from windtunnel.sim.records import Outcome, Records
from windtunnel.sim.simulate import run
from windtunnel.sim.simulated import SimExecutor
from windtunnel.sim.speculation import Acceptance, Drafting
from windtunnel.sim.workload import Workload, workload

MS = 1_000_000
S = 1_000_000_000
STEP = ConstantCost(0.01)
FINISHED, ABORTED, REJECTED = int(Outcome.FINISHED), int(Outcome.ABORTED), int(Outcome.REJECTED)


def engine(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_gpu_blocks": 1_000, "max_num_seqs": 8, **changes})


def patient(timeout_ns: int, *rows: tuple[int, int, int], **more: Any) -> Workload:
    """Requests of (arrival_ns, prompt, output), each given up after ``timeout_ns``."""
    arrival, prompt, output = zip(*rows, strict=True)
    return workload(arrival, prompt, output, request_timeout_ns=timeout_ns, **more)


def served(
    work: Workload, scheduler: SchedulerProtocol | None = None, config: SchedulerConfig | None = None
) -> tuple[Records, SchedulerProtocol]:
    config = config or engine()
    scheduler = scheduler or make_scheduler(config)
    k = config.num_speculative_tokens
    drafting = Drafting(Acceptance.fixed(0.5, k), k) if k else None
    executor = SimExecutor(STEP, SwapCost(1000, 1e9), drafting)
    records = run(work, scheduler.config, STEP, scheduler=scheduler, executor=executor)
    return records, scheduler


def check_empty(scheduler: Any) -> None:
    """Nobody is left, and nothing is held."""
    assert scheduler.num_requests == 0
    assert scheduler.pool.num_free == scheduler.config.num_usable_blocks


def test_a_request_is_given_up_so_long_after_it_was_sent() -> None:
    records, scheduler = served(patient(45 * MS, (0, 20, 100), (7 * MS, 20, 2)))
    table = records.requests
    assert table.outcome.tolist() == [ABORTED, FINISHED]
    assert table.finish_ns.tolist() == [45 * MS, 30 * MS]
    assert table.num_output_tokens.tolist() == [4, 2]  # steps end at 10, 20, 30 and 40 ms
    assert table.first_token_ns.tolist() == [10 * MS, 20 * MS]
    check_empty(scheduler)


@pytest.mark.parametrize(
    ("timeout_ns", "outcome"), [(50 * MS - 1, ABORTED), (50 * MS, ABORTED), (50 * MS + 1, FINISHED)]
)
def test_an_answer_that_comes_a_nanosecond_later_is_too_late(timeout_ns: int, outcome: int) -> None:
    # the fifth token is made at 50 ms, and with the client 1 ns later
    records, scheduler = served(patient(timeout_ns, (0, 20, 5)))
    assert records.requests.outcome.tolist() == [outcome]
    assert records.requests.num_output_tokens.tolist() == [5 if outcome == FINISHED else 4]
    check_empty(scheduler)


def test_a_request_that_waits_is_given_up_without_a_token() -> None:
    records, scheduler = served(patient(35 * MS, (0, 20, 100), (5 * MS, 20, 100)), config=engine(max_num_seqs=1))
    table = records.requests
    assert table.outcome.tolist() == [ABORTED, ABORTED]
    assert table.finish_ns.tolist() == [35 * MS, 40 * MS]
    # the seat is free at 35 ms, but the step that runs until 40 ms is not broken off: nothing begins before
    assert table.num_output_tokens.tolist() == [3, 0]
    assert table.first_token_ns.tolist()[1] == -1
    check_empty(scheduler)


def test_time_runs_from_sending_not_from_being_due() -> None:
    # one place: the second is due at 0 and goes out 1 ns after the first was given up
    records, _ = served(patient(35 * MS, (0, 20, 100), (0, 20, 2), max_concurrency=1))
    table = records.requests
    assert table.due_ns.tolist() == [0, 0]
    assert table.arrival_ns.tolist() == [0, 35 * MS + 1]
    assert table.outcome.tolist() == [ABORTED, FINISHED]


def test_a_client_with_few_places_sends_the_next_after_it_gave_up() -> None:
    work = patient(25 * MS, *[(0, 20, 1000)] * 6, max_concurrency=2)
    table = served(work)[0].requests
    assert table.outcome.tolist() == [ABORTED] * 6
    assert table.arrival_ns.tolist() == [0, 0, *[25 * MS + 1] * 2, *[50 * MS + 2] * 2]


def test_a_turn_follows_one_that_was_given_up_as_it_follows_any_that_ended() -> None:
    work = workload(
        [0, -1, -1],
        [20, 20, 5000],
        [100, 2, 2],
        previous=[-1, 0, 1],
        think_ns=[0, 5 * MS, 0],
        request_timeout_ns=35 * MS,
    )
    table = served(work)[0].requests
    assert table.outcome.tolist() == [ABORTED, FINISHED, REJECTED]
    assert table.arrival_ns[1] == 35 * MS + 1 + 5 * MS
    assert table.arrival_ns[2] == table.finish_ns[1] + 1


def test_without_a_timeout_nobody_is_given_up() -> None:
    work = replace(patient(1, (0, 20, 300)), request_timeout_ns=None)
    assert served(work)[0].requests.outcome.tolist() == [FINISHED]


def test_the_run_ends_with_its_last_event_not_with_the_last_timeout() -> None:
    records, _ = served(patient(3600 * S, (0, 20, 3)))
    assert records.end_ns == 30 * MS


def test_everybody_gives_up_at_once_and_the_next_finds_an_empty_engine() -> None:
    rows = [(0, 100, 500)] * 20 + [(300 * MS, 10, 2)]
    records, scheduler = served(patient(200 * MS, *rows))
    assert records.requests.outcome.tolist() == [ABORTED] * 20 + [FINISHED]
    assert records.requests.finish_ns[20] == 320 * MS
    assert not records.stalled
    check_empty(scheduler)


def test_asynchronous_scheduling_drops_what_is_under_way() -> None:
    # at 45 ms the step until 50 ms runs and the one until 60 ms is decided
    config = engine(async_scheduling=True)
    records, scheduler = served(patient(45 * MS, (0, 20, 100), (0, 20, 5)), config=config)
    table = records.requests
    assert table.outcome.tolist() == [ABORTED, ABORTED]
    assert table.num_output_tokens.tolist() == [4, 4]
    assert records.end_ns <= 60 * MS
    check_empty(scheduler)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_drafts_and_pipelines_give_all_blocks_back(is_async: bool, num_stages: int) -> None:
    config = engine(
        num_speculative_tokens=3, spec_method="eagle3", async_scheduling=is_async, pipeline_parallel_size=num_stages
    )
    rows = [(i * 3 * MS, 30 + i, 10 + 20 * i) for i in range(12)]
    records, scheduler = served(patient(77 * MS, *rows), config=config)
    outcomes = set(records.requests.outcome.tolist())
    assert outcomes == {FINISHED, ABORTED}
    check_empty(scheduler)


# -- batches that run to completion


def test_a_slot_of_a_batch_is_held_until_the_batch_ends() -> None:
    config = engine()
    scheduler = StaticScheduler(config, StaticConfig(2, execution=BatchExecution(answers="streamed")))
    work = patient(45 * MS, (0, 20, 100), (0, 20, 3), (1 * MS, 20, 2))
    records, _ = served(work, scheduler)
    table = records.requests
    assert table.outcome.tolist() == [ABORTED, FINISHED, ABORTED]
    assert table.num_output_tokens.tolist() == [4, 3, 0]  # the third waited for the batch, whose last one left at 45 ms
    assert table.finish_ns.tolist() == [45 * MS, 30 * MS, 46 * MS]
    check_empty(scheduler)


def test_a_batch_whose_requests_are_all_given_up_makes_room_when_its_step_ends() -> None:
    scheduler = StaticScheduler(engine(), StaticConfig(2, execution=BatchExecution(answers="streamed")))
    work = patient(45 * MS, (0, 20, 100), (0, 20, 100), (30 * MS, 20, 2))
    table = served(work, scheduler)[0].requests
    assert table.outcome.tolist() == [ABORTED, ABORTED, FINISHED]
    assert table.scheduled_ns[2] == 50 * MS
    check_empty(scheduler)


def test_answers_that_come_together_are_lost_as_a_whole() -> None:
    scheduler = StaticScheduler(engine(), StaticConfig(2))
    table = served(patient(45 * MS, (0, 20, 100), (0, 20, 3)), scheduler)[0].requests
    assert table.outcome.tolist() == [ABORTED, ABORTED]
    assert table.num_output_tokens.tolist() == [0, 0]


def test_a_batch_that_waits_for_company_is_not_waited_for_by_those_who_left() -> None:
    # a third never comes: the end of the input would send the batch off, but both have left before
    scheduler = StaticScheduler(engine(), StaticConfig(3, batch_timeout_ns=60 * MS))
    table = served(patient(45 * MS, (0, 20, 2), (10 * MS, 20, 2), (500 * MS, 20, 2)), scheduler)[0].requests
    assert table.outcome.tolist() == [ABORTED, ABORTED, ABORTED]
    assert table.finish_ns.tolist() == [45 * MS, 55 * MS, 545 * MS]
    check_empty(scheduler)


def test_the_engines_patience_and_the_clients_are_told_apart() -> None:
    dynamic = DynamicConfig(1, default_queue_policy=QueuePolicy(default_timeout_microseconds=20_000))
    scheduler = DynamicScheduler(engine(), dynamic)
    table = served(patient(35 * MS, (0, 20, 100), (0, 20, 2)), scheduler)[0].requests
    assert table.outcome.tolist() == [ABORTED, REJECTED]
    check_empty(scheduler)


# -- swapping


def test_a_request_whose_cache_is_on_the_cpu_is_given_up_too() -> None:
    config = engine(num_gpu_blocks=12, block_size=4, enable_prefix_caching=False)
    scheduler = SwapScheduler(config, SwapConfig(40))
    work = patient(120 * MS, (0, 15, 25), (0, 15, 25))  # 11 blocks of 4 tokens hold 44 of the 2 x 39 in the end
    records, _ = served(work, scheduler)
    assert int(records.replicas[0].steps.num_swapped_out_blocks.sum()) > 0
    assert records.requests.outcome.tolist() == [ABORTED, ABORTED]
    assert scheduler.cpu_pool.num_free == 40
    check_empty(scheduler)


# -- engines that are stuck


def test_an_engine_that_was_stuck_goes_on_once_the_culprits_are_given_up() -> None:
    """Requests that only keep preempting each other (see the engine's laws), until their clients lose patience."""
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
        [0, 0, 0, 0, 0, 60 * S],
        [16, 24, 15, 23, 24, 1],
        [14, 2, 4, 4, 8, 7],
        max_tokens=[14, 3, 4, 6, 11, 8],
        priority=[1, 3, 1, 3, 1, 3],
    )
    step = ConstantCost(0.003)
    assert run(work, config, step).stalled
    scheduler = make_scheduler(config)
    records = run(replace(work, request_timeout_ns=30 * S), config, step, scheduler=scheduler)
    assert not records.stalled
    assert ABORTED in records.requests.outcome[:5]
    assert records.requests.outcome[5] == FINISHED
    assert records.requests.finish_ns[5] == 60 * S + 7 * 3 * MS
    check_empty(scheduler)


# -- any


@given(st.data())
def test_nobody_waits_longer_than_he_has_patience(data: st.DataObject) -> None:
    timeout_ns = data.draw(st.integers(1, 300 * MS))
    n = data.draw(st.integers(1, 15))
    lengths = st.lists(st.integers(1, 60), min_size=n, max_size=n)
    gaps_ms = data.draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
    work = workload(
        np.cumsum(gaps_ms) * MS,
        data.draw(lengths),
        data.draw(lengths),
        request_timeout_ns=timeout_ns,
        max_concurrency=data.draw(st.one_of(st.none(), st.integers(1, 3))),
    )
    config = engine(num_gpu_blocks=20, max_num_seqs=4, async_scheduling=data.draw(st.booleans()))
    records, scheduler = served(work, config=config)
    table = records.requests
    took_ns = table.finish_ns - table.arrival_ns
    is_aborted = table.outcome == ABORTED
    assert set(took_ns[is_aborted].tolist()) <= {timeout_ns}
    assert (took_ns[~is_aborted] < timeout_ns).all()
    without = run(replace(work, request_timeout_ns=None), config, STEP).requests
    if not is_aborted.any():
        assert table.finish_ns.tolist() == without.finish_ns.tolist()
    check_empty(scheduler)

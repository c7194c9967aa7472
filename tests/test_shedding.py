"""Requests that fail must show: in the offered rate, the verdict, the objectives and the work that was in vain."""

from __future__ import annotations

import numpy as np
import pytest

from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.static import StaticConfig
from windtunnel.sim.metrics import Summary, Verdict, summarize
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

MS = 1_000_000
STEP = ConstantCost(0.01)


def engine(**changes: int) -> SchedulerConfig:
    return SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 4096, "num_gpu_blocks": 10_000, **changes})


def twice_what_it_can() -> Workload:
    """Eight seats and 50 steps of 10 ms an answer serve 16 requests/s; 32/s are due for a minute."""
    due = np.arange(1920) * 1000 * MS // 32
    return workload(due, np.full(1920, 20), np.full(1920, 50))


def summary_of(work: Workload, system: System, **asked: object) -> Summary:
    return summarize(serve(work, system), work, **asked)  # type: ignore[arg-type]


def test_refused_requests_were_offered() -> None:
    limited = summary_of(twice_what_it_can(), System(engine(), STEP, max_num_queued_reqs=8), slo="ttft:p99<1s")
    assert limited.request_rate == pytest.approx(32, rel=0.01)
    assert limited.rejected == pytest.approx(960, rel=0.08)  # a seat is empty now and then
    assert limited.stability.verdict is Verdict.SHEDDING
    assert "refused" in limited.stability.reason


def test_a_percentile_of_all_requests_is_not_kept_by_refusing_half_of_them() -> None:
    limited = summary_of(twice_what_it_can(), System(engine(), STEP, max_num_queued_reqs=8), slo="ttft:p99<1s")
    (result,) = limited.slo
    assert result.measured is not None
    assert result.measured < 1000
    assert not result.passed
    assert "of the requests failed" in result.note
    median = summary_of(twice_what_it_can(), System(engine(), STEP, max_num_queued_reqs=8), slo="ttft:p25<1s")
    assert median.slo_passed


def test_prompts_that_can_never_be_served_are_no_load() -> None:
    n = 200
    prompts = np.where(np.arange(n) % 10 == 0, 5000, 20)
    work = workload(np.arange(n) * 1000 * MS, prompts, np.full(n, 5))
    found = summary_of(work, System(engine(max_model_len=4096), STEP, max_num_queued_reqs=100), slo="ttft:p99<1s")
    assert found.unservable == found.rejected == 20
    assert found.stability.verdict is Verdict.STABLE
    assert not found.slo_passed
    assert "all of them were refused because of max_model_len" in found.slo[0].note


def test_work_for_clients_that_gave_up_is_not_useful() -> None:
    work = workload(np.zeros(16), np.full(16, 20), np.full(16, 50), request_timeout_ns=300 * MS)
    found = summary_of(work, System(engine(), STEP))
    waste = found.waste
    assert found.aborted == 16
    assert waste.useful_tokens == 0
    assert waste.abandoned_tokens == waste.computed_tokens > 0
    assert waste.padding_tokens == waste.straggler_tokens == 0
    patient = summary_of(workload(np.zeros(16), np.full(16, 20), np.full(16, 50)), System(engine(), STEP))
    assert patient.waste.abandoned_tokens == 0
    assert patient.waste.useful_tokens == patient.waste.computed_tokens


def test_computed_tokens_add_up_in_batches_whose_clients_give_up() -> None:
    rng = np.random.default_rng(3)
    work = workload(
        np.sort(rng.integers(0, 2000, 60)) * MS,
        rng.integers(5, 60, 60),
        rng.integers(1, 60, 60),
        request_timeout_ns=700 * MS,
    )
    waste = summary_of(work, System(engine(), STEP, StaticConfig(4, 100 * MS))).waste
    parts = waste.useful_tokens + waste.padding_tokens + waste.straggler_tokens + waste.abandoned_tokens
    assert waste.computed_tokens == parts + waste.recomputed_tokens


def test_continuous_batching_waits_for_nobody() -> None:
    work = twice_what_it_can()
    assert summary_of(work, System(engine(), STEP)).formation_wait.count == 0
    assert summary_of(work, System(engine(), STEP, StaticConfig(8))).formation_wait.count == len(work)


def test_a_preempt_resume_loop_is_named_with_its_remedy() -> None:
    """Five prompts of 100,000 tokens where four fit, admitted as soon as their first chunk does (vLLM PR 37307)."""
    work = workload(np.zeros(5), np.full(5, 100_000), np.full(5, 1000))
    pool = {"num_gpu_blocks": 27_751, "max_num_batched_tokens": 8192, "max_model_len": 110_000}
    first_chunk = SchedulerConfig(**pool, enable_prefix_caching=False, scheduler_reserve_full_isl=False)  # type: ignore[arg-type]
    loop = summary_of(work, System(first_chunk, STEP))
    assert loop.preemption.num_preemptions > 100
    warning = next(text for text in loop.warnings if text.startswith("Preempt-resume loop"))
    assert "--scheduler-reserve-full-isl" in warning
    whole = summary_of(work, System(SchedulerConfig(**pool, enable_prefix_caching=False), STEP))  # type: ignore[arg-type]
    assert whole.preemption.num_preemptions == 0
    assert not any("reempt" in text for text in whole.warnings)

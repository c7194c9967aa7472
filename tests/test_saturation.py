"""The throughput of an engine that always has one more request waiting."""

from __future__ import annotations

import numpy as np
import pytest

from windtunnel.scenarios.saturation import saturating_sample, saturation_request_throughput
from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.simulate import run
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload


def config(**changes: int) -> SchedulerConfig:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "num_gpu_blocks": 10_000, **changes}
    return SchedulerConfig(**settings)  # type: ignore[arg-type]


def spaced(n: int, prompt: int = 100, output: int = 50, gap_ns: int = 10**9) -> Workload:
    return workload(np.arange(n) * gap_ns, np.full(n, prompt), np.full(n, output))


def test_one_seat_serves_one_request_after_the_other() -> None:
    # 50 output tokens are 50 steps of 10 ms: the prompt fits one step, which yields the first token
    assert pytest.approx(2.0) == saturation_request_throughput(
        spaced(20), System(config(max_num_seqs=1), ConstantCost(0.01))
    )


def test_n_seats_serve_n_times_as_many() -> None:
    wide = config(max_num_seqs=16, max_num_batched_tokens=100_000)
    assert pytest.approx(32.0, rel=0.02) == saturation_request_throughput(spaced(20), System(wide, ConstantCost(0.01)))


def test_the_rate_at_which_requests_come_does_not_matter() -> None:
    cost = AffineCost(0.005, 1e-5)
    slow, fast = spaced(300, gap_ns=10**9), spaced(300, gap_ns=10**6)
    assert saturation_request_throughput(slow, System(config(), cost)) == saturation_request_throughput(
        fast, System(config(), cost)
    )


def test_a_few_requests_tell_what_a_long_overload_shows() -> None:
    rng = np.random.default_rng(1)
    prompt, output = rng.integers(50, 800, 60), rng.integers(20, 400, 60)
    engine, cost = config(max_num_seqs=64, num_gpu_blocks=1000), AffineCost(0.005, 2e-5, 0.0, 1e-7)
    estimate = saturation_request_throughput(workload(np.arange(60) * 10**9, prompt, output), System(engine, cost))
    long = run(workload(np.zeros(6000), np.tile(prompt, 100), np.tile(output, 100)), engine, cost)
    finish_s = np.sort(long.requests.finish_ns) / 1e9
    truth = 4000 / (finish_s[4999] - finish_s[999])
    naive = 6000 / finish_s[-1]
    assert estimate == pytest.approx(truth, rel=0.03)
    assert naive < truth


def test_the_sample_keeps_the_engine_full_and_nothing_is_due_later() -> None:
    sample = saturating_sample(spaced(30), config(max_num_seqs=200, num_gpu_blocks=100_000))
    assert len(sample) >= 5 * 200
    assert not sample.arrival_ns.any()


def test_long_answers_need_fewer_requests() -> None:
    engine = config(max_num_seqs=4, num_gpu_blocks=100_000, max_model_len=50_000)
    short, long = (saturating_sample(spaced(30, output=output), engine) for output in (100, 20_000))
    assert len(short) == 1000 // 30 * 30 + 30
    assert 100 <= len(long) <= 150


def test_a_long_workload_is_sampled_from_end_to_end() -> None:
    n = 50_000
    ramp = workload(np.arange(n), np.linspace(10, 1000, n).astype(int), np.full(n, 10))
    sample = saturating_sample(ramp, config())
    assert len(sample) <= 1000
    assert float(sample.num_prompt_tokens.mean()) == pytest.approx(float(ramp.num_prompt_tokens.mean()), rel=0.01)


def test_repeated_requests_share_their_prefix_only_within_a_copy() -> None:
    content = (((0, 64),), ((0, 64), (1, 80)))
    two = workload([0, 1], [100, 100], [5, 5], content=content, num_streams=2)
    sample = saturating_sample(two, config())
    assert sample.content is not None
    assert content == sample.content[:2]
    assert sample.content[2:4] == (((2, 64),), ((2, 64), (3, 80)))
    assert sample.num_streams == 2 * (len(sample) // 2)


def test_turns_still_follow_their_answers_but_without_a_pause() -> None:
    talk = workload([0, -1], [100, 200], [5, 5], previous=[-1, 0], think_ns=[0, 10**9])
    sample = saturating_sample(talk, config())
    assert sample.previous[:4].tolist() == [-1, 0, -1, 2]
    assert not sample.think_ns.any()


def test_prompts_that_the_engine_refuses_do_not_count() -> None:
    mixed = workload([0, 1], [100, 5000], [50, 50])
    only = workload([0], [100], [50])
    engine, cost = config(max_model_len=1000), ConstantCost(0.01)
    assert saturation_request_throughput(only, System(engine, cost)) == saturation_request_throughput(
        mixed, System(engine, cost)
    )


def test_where_nothing_can_be_served_there_is_no_answer() -> None:
    refused = workload([0], [5000], [5])
    assert saturation_request_throughput(refused, System(config(max_model_len=1000), ConstantCost(0.01))) is None

"""Simulations whose steps a model computes: records as ever, tokens as the workload says, and an exact replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_replay import assert_equal
from tiny_model import VOCAB, logits_at_once, tiny_config, tiny_decoder, tiny_executor

from windtunnel.executor.real_steps import LiveRun, RealSteps, run_live
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.records import Outcome
from windtunnel.sim.replay import ReplayExecutor
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import Workload, workload

MODEL = tiny_decoder(tiny_config(num_hidden_layers=1))
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=96, block_size=4, num_gpu_blocks=97)
SMALL_POOL = replace(CONFIG, num_gpu_blocks=33)


def requests(num: int = 8, *, seed: int = 0, within_ns: int = 20_000_000) -> Workload:
    draw = np.random.default_rng(seed)
    arrival_ns = np.sort(draw.integers(0, within_ns, num))
    return workload(arrival_ns, draw.integers(10, 60, num), draw.integers(1, 36, num))


def conversations() -> Workload:
    """Two conversations of three turns behind one shared prefix of 20 tokens."""
    prompts, outputs = [30, 50, 70, 30, 50, 70], [10, 10, 10, 10, 10, 10]
    content = tuple(((0, 20), (1 + row // 3, prompts[row] + outputs[row])) for row in range(6))
    return workload(
        [0, -1, -1, 100, -1, -1],
        prompts,
        outputs,
        previous=[-1, 0, 1, -1, 3, 4],
        think_ns=[0, 1_000_000, 1_000_000, 0, 1_000_000, 1_000_000],
        content=content,
        num_streams=3,
    )


def live(load: Workload, config: SchedulerConfig = CONFIG, **options: object) -> LiveRun:
    executor = tiny_executor(config, MODEL, clock="cpu")
    try:
        return run_live(load, config, executor, **options)  # type: ignore[arg-type]
    finally:
        executor.close()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("pool", [CONFIG, SMALL_POOL], ids=["ample", "preempting"])
@pytest.mark.parametrize(
    "load", [requests(12), requests(12, within_ns=1), conversations()], ids=["spread", "at once", "conversations"]
)
def test_a_live_run_replays_to_the_last_nanosecond(load: Workload, pool: SchedulerConfig, caching: bool) -> None:
    config = replace(pool, enable_prefix_caching=caching)
    served = live(load, config)
    replay = ReplayExecutor(served.steps)
    assert_equal(served.records, run(load, config, ConstantCost(1.0), executor=replay))
    assert replay.num_left == 0
    assert (served.records.requests.outcome == Outcome.FINISHED).all()


def test_the_replayed_runs_include_preemptions_and_prefix_hits() -> None:
    config = replace(SMALL_POOL, enable_prefix_caching=True)
    assert live(requests(12, within_ns=1), config).records.requests.num_preemptions.sum() > 0
    assert live(conversations()).records.requests.num_cached_tokens[1] == 36, "the turn before, but for its last block"


def test_steps_last_as_long_as_they_were_measured() -> None:
    served = live(requests())
    steps = served.records.replicas[0].steps
    assert (steps.end_ns - steps.start_ns).tolist() == [step.step_ns for step in served.steps]
    assert steps.num_decode_seqs.tolist() == [step.shape.num_decode_seqs for step in served.steps]
    assert steps.prefill_tokens.tolist() == [step.shape.prefill_tokens for step in served.steps]


def test_answers_have_the_lengths_of_the_workload() -> None:
    load = requests()
    lengths = load.num_prompt_tokens + load.num_output_tokens
    assert [len(tokens) for tokens in live(load).token_ids] == lengths.tolist()


@pytest.mark.parametrize("pool", [CONFIG, SMALL_POOL], ids=["ample", "preempting"])
def test_answers_are_those_of_the_model(pool: SchedulerConfig) -> None:
    """Whatever the company, they are what the model says greedily (where no two logits nearly tie)."""
    load = requests(12, within_ns=1)
    served = live(load, pool)
    assert served.records.requests.num_preemptions.any() == (pool is SMALL_POOL)
    for tokens, num_prompt in zip(served.token_ids, load.num_prompt_tokens.tolist(), strict=True):
        logits = logits_at_once(MODEL, tokens)[num_prompt - 1 : -1]
        answer = torch.tensor(tokens[num_prompt:])
        chosen = logits.gather(1, answer[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < 1e-3


def test_prompts_begin_alike_as_far_as_the_workload_says() -> None:
    tokens = live(conversations()).token_ids
    first, other = tokens[:3], tokens[3:]
    assert [len(each) for each in first] == [40, 60, 80]
    assert first[1][:40] == first[0], "a turn holds prompt and answer of the one before"
    assert first[2][:60] == first[1]
    assert first[0][:20] == other[0][:20], "the prefix that all share"
    assert first[0][20:] != other[0][20:]


def test_prompts_depend_on_the_seed_alone() -> None:
    load = requests(3)
    prompts = [
        [each[:n] for each, n in zip(live(load, seed=seed).token_ids, load.num_prompt_tokens.tolist(), strict=True)]
        for seed in (0, 0, 1)
    ]
    assert prompts[0] == prompts[1] != prompts[2]
    assert all(0 <= token < VOCAB for prompt in prompts[0] for token in prompt)


def test_the_shadow_prices_every_step_beside_it() -> None:
    class ByTokens(ConstantCost):
        def step_time_s(self, shape: StepShape) -> float:
            return 1e-3 * shape.num_tokens

    served = live(requests(), shadow=ByTokens(1.0))
    assert served.predicted_s == [1e-3 * step.shape.num_tokens for step in served.steps]


def test_requests_that_the_client_gives_up_do_no_harm() -> None:
    load = replace(requests(12, within_ns=1), request_timeout_ns=2_000_000)
    served = live(load, SMALL_POOL)
    assert (served.records.requests.outcome == Outcome.ABORTED).any()
    assert (served.records.requests.outcome != Outcome.UNFINISHED).all()
    replay = ReplayExecutor(served.steps)
    assert_equal(served.records, run(load, SMALL_POOL, ConstantCost(1.0), executor=replay))


def test_a_horizon_leaves_the_rest_unfinished() -> None:
    served = live(requests(), horizon_ns=10_000_000)
    assert served.records.end_ns == 10_000_000
    assert (served.records.requests.outcome == Outcome.UNFINISHED).any()


def test_a_scheduler_that_decides_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="async_scheduling"):
        live(requests(1), replace(CONFIG, async_scheduling=True))


def test_an_executor_for_another_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_gpu_blocks is 97 for the scheduler but 33"):
        run_live(requests(1), CONFIG, tiny_executor(SMALL_POOL, MODEL))


def test_a_workload_that_the_tokens_were_not_made_for_is_refused() -> None:
    scheduler, executor = make_scheduler(CONFIG), tiny_executor(CONFIG, MODEL)
    steps = RealSteps(executor, scheduler, requests(2, seed=1))
    with pytest.raises(ValueError, match="is not in the workload"):
        run(requests(2), CONFIG, ConstantCost(1.0), executor=steps, scheduler=scheduler)
    executor.close()

"""Noise of step times: a function of seed, replica and step number, with mean 1."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from bundle import fitted
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.cost.bundled import load_bundled
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.statement import noise_sentence, sentences
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.noise import StepNoise
from windtunnel.sim.records import Records
from windtunnel.sim.rng import mixed
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

COST = fitted(sigma=0.1)
DECODE = StepShape(8, 8000, 0, 0, 0, 0, 8)
CONFIG = SchedulerConfig(num_gpu_blocks=512, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512)
numbers = st.integers(0, 10**9)
PINNED = [1.1075932245122997, 0.8750563033645483, 1.1450747370354604]


def load(num_requests: int = 40, gap_ns: int = 2_000_000) -> Workload:
    return workload([n * gap_ns for n in range(num_requests)], [64] * num_requests, [30] * num_requests)


def steps(records: Records, replica: int = 0) -> Any:
    table = records.replicas[replica].steps
    return table.end_ns - table.start_ns


def system(noise_seed: int | None, num_replicas: int = 1, **changes: Any) -> System:
    return System(CONFIG, changes.pop("cost", COST), noise_seed=noise_seed, num_replicas=num_replicas, **changes)


@given(numbers, st.integers(0, 1000), st.lists(numbers, min_size=1, max_size=20))
def test_a_steps_luck_depends_on_seed_replica_and_number_alone(seed: int, replica: int, order: list[int]) -> None:
    one, other = StepNoise(COST, seed, replica), StepNoise(COST, seed, replica)
    there = [one.factor(0.1, number) for number in order]
    back = [other.factor(0.1, number) for number in reversed(order)]
    assert there == back[::-1]
    assert all(factor > 0 and math.isfinite(factor) for factor in there)


@given(numbers, numbers)
def test_another_seed_replica_or_step_is_another_draw(seed: int, number: int) -> None:
    draws = {
        StepNoise(COST, seed, 0).factor(0.1, number),
        StepNoise(COST, seed + 1, 0).factor(0.1, number),
        StepNoise(COST, seed, 1).factor(0.1, number),
        StepNoise(COST, seed, 0).factor(0.1, number + 1),
    }
    assert len(draws) == 4


def test_the_draws_of_a_seed_stay_those_that_they_are() -> None:
    """Worked out once and written down: another mix of seed, replica and step would change everybody's runs."""
    draws = [StepNoise(COST, *of).factor(0.1, number) for of, number in (((0, 0), 0), ((0, 0), 1), ((7, 2), 10**6))]
    assert draws == pytest.approx(PINNED, rel=1e-9)


def test_noise_is_apart_from_what_else_is_drawn_from_the_seed() -> None:
    own = [StepNoise(COST, 3).factor(0.1, number) for number in range(100)]
    plain_key = mixed(mixed(3) ^ 0)
    chances = [((mixed(plain_key ^ number) >> 11) + 0.5) / (1 << 53) for number in range(100)]
    others = [math.exp(0.1 * (NormalDist().inv_cdf(chance) - 0.05)) for chance in chances]
    assert not set(own) & set(others)


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.4])
def test_the_factors_are_log_normal_with_mean_one(sigma: float) -> None:
    noise = StepNoise(COST, 3)
    factors = np.array([noise.factor(sigma, number) for number in range(20_000)])
    deviation = math.sqrt(math.expm1(sigma**2))
    assert factors.mean() == pytest.approx(1.0, abs=4 * deviation / math.sqrt(len(factors)))
    assert np.median(factors) == pytest.approx(math.exp(-(sigma**2) / 2), rel=0.02 * sigma + 1e-3)
    logs = np.log(factors) + sigma**2 / 2
    assert logs.std() == pytest.approx(sigma, rel=0.02)
    assert abs(np.corrcoef(logs[:-1], logs[1:])[0, 1]) < 4 / math.sqrt(len(factors))


def test_replicas_do_not_share_their_luck() -> None:
    logs = [np.log([StepNoise(COST, 0, k).factor(0.1, number) for number in range(5000)]) for k in (0, 1)]
    assert abs(np.corrcoef(logs[0], logs[1])[0, 1]) < 4 / math.sqrt(5000)


def test_a_sigma_of_nothing_adds_nothing() -> None:
    assert StepNoise(fitted(sigma=0.0), 1).extra_s(DECODE, 7) == 0.0


def test_a_noisy_step_is_the_prediction_times_its_factor() -> None:
    noise = StepNoise(COST, 1)
    expected_s = COST.step_time_s(DECODE) * noise.factor(COST.sigma(DECODE), 7)
    assert COST.step_time_s(DECODE) + noise.extra_s(DECODE, 7) == pytest.approx(expected_s)


@pytest.mark.parametrize(("seed", "replica"), [(-1, 0), (0, -1)])
def test_a_negative_place_is_refused(seed: int, replica: int) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        StepNoise(COST, seed, replica)


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    runs = [steps(serve(load(), system(seed))) for seed in (5, 5, 6)]
    assert runs[0].tolist() == runs[1].tolist()
    assert runs[0].tolist() != runs[2].tolist()


def test_noise_of_nothing_is_no_noise() -> None:
    quiet, noisy = (steps(serve(load(), system(seed))).tolist() for seed in (None, 5))
    still = steps(serve(load(), system(5, cost=fitted(sigma=0.0)))).tolist()
    assert still == quiet
    assert noisy != quiet


def test_a_steps_factor_does_not_depend_on_what_the_run_does() -> None:
    """Another arrival pattern groups other requests into step n; its luck is the same."""
    flat = fitted(sigma=0.2)
    noise = StepNoise(flat, 9)
    for gap_ns in (0, 3_000_000, 11_000_000):
        plain = serve(load(gap_ns=gap_ns), system(9, cost=flat))
        table = plain.replicas[0].steps
        for number in (0, 1, 17):
            shape = StepShape(
                int(table.num_decode_seqs[number]),
                int(table.decode_context_tokens[number]),
                int(table.num_prefill_seqs[number]),
                int(table.prefill_tokens[number]),
                0,
                0,
                0,
            )
            priced_s = float(flat.step_time_s(shape))  # but for sampled rows and pairs: at most 10 µs
            lasted_s = int(table.end_ns[number] - table.start_ns[number]) / 1e9
            assert lasted_s / priced_s == pytest.approx(noise.factor(0.2, number), rel=5e-3)


def test_each_replica_draws_its_own() -> None:
    records = serve(load(60), system(5, num_replicas=2, router="round_robin"))
    first, second = steps(records, 0), steps(records, 1)
    assert first[:20].tolist() != second[:20].tolist()


def test_busy_time_stays_that_of_the_prediction() -> None:
    sigma = 0.1
    cost = fitted(sigma=sigma)
    quiet = steps(serve(load(300, 0), system(None, cost=cost)))
    noisy = [steps(serve(load(300, 0), system(seed, cost=cost))).sum() for seed in range(4)]
    expected_spread = sigma / math.sqrt(4 * len(quiet))
    assert np.mean(noisy) / quiet.sum() == pytest.approx(1.0, abs=5 * expected_spread)


def test_a_cost_model_that_states_no_noise_has_none_to_give() -> None:
    with pytest.raises(ValueError, match="constant states no noise"):
        System(CONFIG, ConstantCost(step_s=0.01), noise_seed=1)
    assert replace(system(None), noise_seed=3).make_executor(2) is not None


def test_what_is_said_of_the_noise_depends_on_what_it_is() -> None:
    """Of a profile that was not measured itself, that it may be off as a whole is not in it."""
    borrowed = {
        "calibrated": True,
        "provenance": {"scatter": {"sigmas": {"decode": 0.02}, "rests_on": "steps do of B300"}},
    }
    said = noise_sentence(borrowed)
    assert "as steps do of B300 (noise); that the profile as a whole may be off is not in it" in said
    assert sentences(borrowed, has_noise=True)[-1] == said
    assert "noise adds nothing" in noise_sentence({"provenance": {"scatter": {"sigmas": {}, "rests_on": "not known"}}})
    assert "what the profile states" in noise_sentence(COST.describe())


def test_noise_of_a_composed_profile_does_not_scatter_by_how_far_it_may_be_off() -> None:
    cost = load_bundled("llama-3.1-8b-h100-sxm-tp1-bf16")
    noise, priced_s = StepNoise(cost, 0), cost.step_time_s(DECODE)
    drawn = np.array([priced_s + noise.extra_s(DECODE, number) for number in range(2000)]) / priced_s
    low_s, high_s = cost.interval_s(DECODE)
    assert 0.005 < drawn.std() < 0.05
    assert low_s / priced_s < np.percentile(drawn, 1)
    assert np.percentile(drawn, 99) < high_s / priced_s

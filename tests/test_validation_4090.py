"""Public live runs of vLLM 0.19 predicted from kernel tables; predictions are skipped where the tables are not here."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from conftest import SHARED

from benchmarks import validation_4090 as benchmark
from benchmarks.validation_4090 import PRO_6000_LLAMA, RTX_4090, LiveRun, Outcome, Times

PROFILES = SHARED / "kernels"
needs_profiles = pytest.mark.skipif(not (PROFILES / "v1_dense.parquet").is_file(), reason="needs the kernel profiles")


@cache
def prediction_of(run: LiveRun) -> benchmark.Prediction:
    return benchmark.first_prediction(PROFILES, run)


@cache
def predicted(run: LiveRun) -> Outcome:
    return benchmark.predict(run, prediction_of(run), benchmark.load_of(run))


def errors_of(run: LiveRun) -> dict[str, float]:
    figures = benchmark.compare(run, predicted(run))["figures"]
    return {line["figure"]: abs(line["error_percent"]) for line in figures}


def times(first_token_ms: list[float], last_token_ms: list[float], num_output_tokens: list[int]) -> Times:
    first, last = np.array(first_token_ms), np.array(last_token_ms)
    return Times(np.zeros(len(first)), np.zeros(len(first)), first, last, np.array(num_output_tokens, np.float64))


def test_the_table_of_requests_gives_the_published_latencies() -> None:
    found = benchmark.latencies(Times.live())
    assert found["TTFT"] == pytest.approx(RTX_4090.truth.ttft_ms, abs=0.051)
    assert found["TPOT"] == pytest.approx(RTX_4090.truth.tpot_ms, abs=0.051)
    assert found["E2EL"] == pytest.approx(RTX_4090.truth.e2el_ms, abs=0.051)


def test_the_loads_have_as_many_tokens_as_the_live_runs_counted() -> None:
    llama, qwen = benchmark.load_of(RTX_4090), benchmark.load_of(benchmark.PRO_6000_QWEN)
    assert (llama.num_prompt_tokens.sum(), llama.num_output_tokens.sum()) == (257_239, 195_753)
    assert (qwen.num_prompt_tokens.sum(), qwen.num_output_tokens.sum()) == (258_691, 199_486)


def test_requests_that_run_side_by_side_missed_no_step() -> None:
    step_ms = 20.0
    found = benchmark.estimated_stalls(times([step_ms, 3 * step_ms], [step_ms * 11, step_ms * 9], [11, 7]), step_ms)
    assert found == (0, 0)


def test_a_request_that_got_fewer_tokens_than_its_neighbour_missed_steps() -> None:
    found = benchmark.estimated_stalls(times([20.0, 20.0], [220.0, 220.0], [11, 7]), 20.0)
    assert found == (1, 4)


@needs_profiles
def test_a_pool_that_is_too_small_for_the_load_is_predicted_to_queue_and_preempt() -> None:
    outcome = predicted(RTX_4090)
    usage = 1.0 - outcome.records.replicas[0].steps.num_free_blocks / (RTX_4090.num_gpu_blocks or 1)
    assert float(np.median(usage)) > 0.9
    assert benchmark.peak_running(outcome.times) == pytest.approx(RTX_4090.truth.peak_running, rel=0.1)
    assert benchmark.peak_running(outcome.times) < RTX_4090.max_num_seqs // 4
    assert benchmark.queue_share(outcome.times) > 0.99
    assert benchmark.queue_share(Times.live()) > 0.99
    assert 100 < outcome.num_preemptions < 300


@needs_profiles
def test_the_pool_bound_run_is_predicted_within_6_percent_in_the_mean() -> None:
    errors = errors_of(RTX_4090)
    assert errors["makespan, s"] <= 4
    assert errors["throughput, tokens/s"] <= 4
    assert errors["TTFT mean, ms"] <= 6
    assert errors["TPOT mean, ms"] <= 4
    assert errors["E2EL mean, ms"] <= 5
    assert max(error for figure, error in errors.items() if figure.endswith("p90, ms")) <= 9
    assert max(error for figure, error in errors.items() if figure.endswith("p99, ms")) <= 9
    assert max(errors.values()) <= 15


@needs_profiles
def test_predicted_and_live_requests_miss_about_as_many_steps() -> None:
    shortest_ms = benchmark.shortest_step_ms(RTX_4090)
    live = benchmark.estimated_stalls(Times.live(), shortest_ms)
    simulated = benchmark.estimated_stalls(predicted(RTX_4090).times, shortest_ms)
    assert simulated.num_requests == pytest.approx(live.num_requests, rel=0.2)
    assert simulated.num_missed_steps == pytest.approx(live.num_missed_steps, rel=0.2)


@needs_profiles
def test_the_estimate_of_missed_steps_never_exceeds_what_a_simulation_missed() -> None:
    outcome = predicted(RTX_4090)
    estimated = benchmark.estimated_stalls(outcome.times, benchmark.shortest_step_ms(RTX_4090))
    known = benchmark.known_stalls(outcome.records)
    assert 0.6 * known.num_missed_steps <= estimated.num_missed_steps <= known.num_missed_steps


@needs_profiles
def test_a_load_of_shorter_requests_does_not_queue_on_the_same_engine() -> None:
    outcome = benchmark.predict(RTX_4090, prediction_of(RTX_4090), benchmark.generic_load(0))
    assert benchmark.latencies(outcome.times)["TTFT"][0] < 500


@needs_profiles
def test_the_run_that_lacks_seats_is_predicted_within_6_percent() -> None:
    outcome, errors = predicted(PRO_6000_LLAMA), errors_of(PRO_6000_LLAMA)
    assert benchmark.peak_running(outcome.times) == PRO_6000_LLAMA.max_num_seqs
    assert outcome.num_preemptions == 0
    assert benchmark.estimated_stalls(outcome.times, benchmark.shortest_step_ms(PRO_6000_LLAMA)) == (0, 0)
    assert errors["TPOT mean, ms"] <= 4
    assert errors["E2EL mean, ms"] <= 5
    assert max(errors.values()) <= 8

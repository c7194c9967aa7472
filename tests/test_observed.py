"""Observed runs: their metrics are those of vllm bench serve, and of the simulation, and files keep them."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.calibrate.live.imports import read_result
from windtunnel.calibrate.live.observed import (
    SERIES_COLUMNS,
    Ending,
    ObservedRun,
    SendReport,
    ServerCounts,
    ServerFacts,
    ServerSeries,
    observed_requests,
)
from windtunnel.calibrate.live.observed_file import load_observed, save_observed
from windtunnel.calibrate.live.observed_metrics import latency_sample, observed_from_records, observed_metrics
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.metrics.summary import summarize
from windtunnel.sim.simulate import run as simulate
from windtunnel.sim.workload import Workload, workload

MS = 1_000_000


def run_of(**columns: Any) -> ObservedRun:
    return ObservedRun("test", "made up", observed_requests(len(next(iter(columns.values()))), **columns))


def series_of(num_running: list[float]) -> ServerSeries:
    """Only the running requests are known."""
    unknown = dict.fromkeys(SERIES_COLUMNS, np.full(len(num_running), np.nan))
    known = {"time_ns": np.arange(len(num_running)), "num_running": np.array(num_running, np.float64)}
    return ServerSeries(**{**unknown, **known})


def busy_load() -> tuple[Workload, SchedulerConfig]:
    """More than the pool holds, so that requests wait and are preempted."""
    rng = np.random.default_rng(5)
    arrival = np.cumsum(rng.exponential(0.02, 60)) * 1e9
    load = workload(arrival.astype(np.int64), rng.integers(5, 90, 60), rng.integers(1, 70, 60))
    return load, SchedulerConfig(
        num_gpu_blocks=60, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200
    )


def test_metrics_are_the_aggregates_that_vllm_bench_computed_itself(shared: Path) -> None:
    path = shared / "live_vllm_cpu" / "formats" / "vllm_bench_serve_0.32.json"
    if not path.is_file():
        pytest.skip("no sample of vllm bench serve")
    stated = json.loads(path.read_text())
    ours = observed_metrics(read_result(path), (50, 90, 95, 99)).to_dict()
    compared = [key for key in stated if key in ours and isinstance(stated[key], int | float)]
    assert len(compared) > 35
    for key in compared:
        assert ours[key] == pytest.approx(stated[key], rel=1e-6), key


def test_a_simulated_run_measures_the_same_with_both_rulers() -> None:
    load, config = busy_load()
    records = simulate(load, config, ConstantCost(0.01))
    theirs = summarize(records, load).to_dict()
    ours = observed_metrics(observed_from_records(records, load)).to_dict()
    assert ours["preemptions"] > 0
    compared = [key for key, value in ours.items() if key in theirs and value is not None]
    assert {"mean_ttft_ms", "p99_itl_ms", "kv_usage_mean", "num_running_mean", "num_waiting_peak"} < set(compared)
    for key in compared:
        assert ours[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-6), key


def test_failed_requests_count_in_no_latency() -> None:
    run = run_of(
        send_ns=[0, 0, 0],
        ttft_ns=[10 * MS, 2 * MS, -1],
        e2el_ns=[30 * MS, -1, -1],
        num_output_tokens=[3, 1, 0],
        num_prompt_tokens=[5, 5, -1],
        ending=[Ending.FINISHED, Ending.BROKEN, Ending.UNREACHABLE],
    )
    metrics = observed_metrics(run)
    assert (metrics.completed, metrics.failed) == (1, 2)
    assert (metrics.ttft.count, metrics.ttft.mean_ms, metrics.tpot.mean_ms) == (1, 10, 10)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (5, 3)


def test_gaps_are_within_a_request() -> None:
    chunks = [np.array([10, 30, 60]), np.array([7]), np.array([5, 6])]
    run = run_of(send_ns=[0, 0, 0], chunks=chunks)
    assert latency_sample(run, "itl").values.tolist() == [1, 20, 30]


def test_what_is_not_known_is_none() -> None:
    metrics = observed_metrics(run_of(ttft_ns=[1, 2])).to_dict()
    known = {key for key, value in metrics.items() if value is not None}
    assert {"num_prompts", "completed", "failed", "mean_ttft_ms"} <= known
    assert not {"request_throughput", "duration", "mean_e2el_ms", "preemptions", "kv_usage_mean"} & known
    with pytest.raises(KeyError):
        latency_sample(run_of(ttft_ns=[1]), "other")


def test_a_gauge_holds_until_the_next_look() -> None:
    series = replace(series_of([4.0, 8.0, 2.0]), time_ns=np.array([-5, 2, 8]))
    run = replace(run_of(send_ns=[0], e2el_ns=[10]), series=series)
    assert observed_metrics(run).num_running_mean == pytest.approx((2 * 4 + 6 * 8 + 2 * 2) / 10)
    assert observed_metrics(run).num_running_peak == 8
    assert observed_metrics(run).num_waiting_mean is None


@given(st.lists(st.tuples(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), max_size=4)), max_size=5), st.data())
def test_a_saved_run_comes_back(rows: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    chunks = [np.cumsum(np.array(gaps, np.int64)) for _, gaps in rows]
    requests = observed_requests(
        len(rows),
        send_ns=[send for send, _ in rows],
        ending=data.draw(st.lists(st.sampled_from(Ending), min_size=len(rows), max_size=len(rows))),
        errors=tuple(data.draw(st.text(max_size=5)) for _ in rows),
        chunks=chunks,
        chunk_tokens=[np.array([data.draw(st.sampled_from((-1, 1, 3))) for _ in times], np.int64) for times in chunks],
    )
    run = ObservedRun(
        "test",
        "made up",
        requests,
        max_concurrency=3,
        request_rate=data.draw(st.sampled_from((None, 2.5, math.inf))),
        stated={"mean_ttft_ms": 1.5},
        series=data.draw(st.sampled_from((None, series_of([1.0, math.nan]), series_of([])))),
        counts=ServerCounts(num_preemptions=2),
        server=ServerFacts(model="m", config={"a": 1}),
        send_report=SendReport(0.1, 0.2, 0.3, 0.4, 5),
        notes=("a note",),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        save_observed(run, path)
        again = load_observed(path)
    assert_same(again, run)


def assert_same(one: Any, other: Any) -> None:
    """Equal, arrays within included."""
    if hasattr(one, "__dataclass_fields__"):
        for name in one.__dataclass_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", ":1: not a saved run"),
        (lambda text: "{}\n", ":1: not a saved run"),
        (lambda text: text.replace('"version":1', '"version":99'), "version 99 of the format"),
        (lambda text: "\n".join(text.split("\n")[:2]), "1 requests, 2 are announced"),
        (lambda text: text[:-10], ":3: not JSON"),
        (lambda text: text.replace('"source"', '"sauce"'), "not as windtunnel writes it"),
        (lambda text: text.replace('"due_ns":-1', '"due_ns":"x"', 1), "not as windtunnel writes it"),
        (lambda text: text + "[]\n", ":4: '\\[\\]' is not a JSON object"),
    ],
)
def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "run.jsonl"
    save_observed(run_of(send_ns=[1, 2]), path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=message):
        load_observed(path)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="send_ns has 1 entries, 2 are needed"):
        observed_requests(2, send_ns=[1])
    with pytest.raises(TypeError, match="no such columns of a request: sent_ns"):
        observed_requests(1, sent_ns=[1])

"""Measured, fitted and predicted in seconds on a tiny model: all of the benchmark's way, with room for a busy host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cpu_end_to_end import Outcome, Setup, as_plain, prove, report
from windtunnel.scenarios.workloads.lengths import Lognormal
from windtunnel.sim.cost.profile import load_profile, save_profile
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape

TINY = Setup(
    hidden=128,
    layers=2,
    vocab=512,
    num_requests=100,
    num_live_runs=2,
    grid="small",
    measure_budget_s=4.0,
    config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, num_gpu_blocks=65),
    prompt=Lognormal(24.0, 0.5, 4, 64),
    output=Lognormal(12.0, 0.5, 2, 48),
)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return prove(TINY)


def test_the_profile_foretells_the_busy_time_of_a_live_run(outcome: Outcome) -> None:
    assert abs(outcome.error_percent("busy time")) < 25.0
    assert abs(outcome.error_percent("request throughput")) < 25.0


def test_the_live_runs_replay_exactly(outcome: Outcome) -> None:
    assert outcome.is_replayed


def test_what_is_written_says_what_was_measured_and_where(outcome: Outcome, tmp_path: Path) -> None:
    told = json.loads(json.dumps(as_plain(outcome)))
    assert [row["metric"] for row in told["comparison"]][:3] == ["busy time", "request throughput", "makespan"]
    assert all(len(row["live"]) == 2 for row in told["comparison"])
    assert {line["regime"] for line in told["traffic_errors"]} >= {"all", "decode", "mixed"}
    assert told["machine"]["cpu"] in report(outcome)
    save_profile(outcome.cost, tmp_path / "profile.json")
    shape = StepShape(4, 100, 1, 16, 0, 136, 5)
    assert load_profile(tmp_path / "profile.json").step_time_s(shape) == outcome.cost.step_time_s(shape)
    said = load_profile(tmp_path / "profile.json").describe()["provenance"]
    assert said["clock"] == "cpu"
    assert said["stated_error"]["p50_percent"] == told["traffic_errors"][0]["p50_percent"]

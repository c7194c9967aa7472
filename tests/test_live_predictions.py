"""Live runs of a real vLLM: reading them, following their decisions, and predicting them from other runs."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import calibration_live as live
from windtunnel.calibrate.http_path import HttpPath
from windtunnel.calibrate.live_runs import (
    LiveRun,
    live_step_table,
    read_engine_config,
    read_live_run,
    run_figures,
)

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "live_vllm_cpu" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the live runs are not at hand")

CONFIG = {
    "num_gpu_blocks": 100,
    "block_size": 32,
    "max_num_seqs": 4,
    "max_num_scheduled_tokens": 64,
    "max_model_len": 1024,
    "prefix_caching": False,
    "chunked_prefill": True,
    "policy": "SchedulingPolicy.FCFS",
    "watermark": 0.0,
    "reserve_full_isl": True,
    "async_scheduling": False,
}
HOST_S = 0.0005


def write_run(folder: Path, *, num_requests: int = 3, pause_s: float = 1.0) -> Path:
    """Requests one after the other, of 8 tokens each: 3 come back, from steps 10 ms apart.

    The way in takes 4 ms (the API server has it after 2), the way out 3 ms, the first chunk one more.
    """
    folder.mkdir(parents=True)
    requests: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for number in range(num_requests):
        send_s, label = number * pause_s, f"r-{number}"
        begin_s = send_s + 0.004
        chunks_s = [0.004 + 0.010 + 0.003 + 0.001, 0.004 + 0.020 + 0.003, 0.004 + 0.030 + 0.003]
        requests.append({"id": label, "prompt_len": 8, "out_len": 3, "t_send": send_s, "chunk_t": chunks_s})
        events.append({"ev": "add", "t": begin_s - 0.001, "arr": send_s + 0.002, "id": label, "prompt": 8})
        for turn, (tokens, before) in enumerate(((8, 0), (1, 8), (1, 9))):
            row, at_s = len(steps), begin_s + 0.010 * turn
            events.append({"i": row, "t": at_s, "pre": [], "det": [[label, tokens, before]]})
            pairs = tokens * before + tokens * (tokens + 1) // 2
            steps.append(step_row(row, at_s, tokens, pairs, is_decode=turn > 0))
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requests))
    with gzip.open(folder / "sched.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(line) + "\n" for line in events))
    with (folder / "steps.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, steps[0].keys())
        writer.writeheader()
        writer.writerows(steps)
    (folder / "run.json").write_text(json.dumps({"mode": "open"}))
    (folder.parent / "engine_config.json").write_text(json.dumps(CONFIG))
    return folder


def step_row(row: int, at_s: float, tokens: int, pairs: int, *, is_decode: bool) -> dict[str, Any]:
    counts = {"i": row, "tok": tokens, "seqs": 1, "dec": int(is_decode), "pairs": pairs, "running": 1, "waiting": 0}
    times = {"exec_ms": 9.0, "sched_ms": 0.3, "upd_ms": 0.2, "gap_ms": 0.5}
    return {**counts, "t": at_s, "free_blocks": 98, "preempted": 0, **times}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "server" / "run")


@pytest.fixture
def run(folder: Path) -> LiveRun:
    return read_live_run(folder)


# ------------------------------------------------------------------ reading


def test_a_run_gives_arrivals_exact_lengths_and_limits(run: LiveRun) -> None:
    asked = run.workload()
    assert asked.arrival_ns.tolist() == [0, 1_000_000_000, 2_000_000_000]
    assert asked.num_prompt_tokens.tolist() == [8, 8, 8]
    assert asked.num_output_tokens.tolist() == [3, 3, 3]
    assert asked.max_concurrency is None
    assert (run.config.num_gpu_blocks, run.config.block_size, run.config.max_num_batched_tokens) == (100, 32, 64)
    assert run.config.scheduler_reserve_full_isl
    assert not run.config.enable_prefix_caching


def test_figures_at_client_and_engine_are_those_of_the_benchmark_of_vllm(run: LiveRun) -> None:
    client, engine = run.at_client(), run.at_engine()
    assert client.ttft.mean_s == pytest.approx(0.018)
    assert client.e2el.p95_s == pytest.approx(0.037)
    assert client.tpot.p50_s == pytest.approx((0.037 - 0.018) / 2)
    assert client.makespan_s == pytest.approx(2.037)
    assert engine.ttft.mean_s == pytest.approx(0.012)
    assert engine.tpot.mean_s == pytest.approx(0.010)
    assert (engine.num_steps, engine.num_preemptions) == (9, 0)


def test_a_chunk_of_several_tokens_gives_them_all_its_time(folder: Path) -> None:
    edit_request(folder, lambda line: {**line, "chunk_t": [0.02, 0.04], "chunk_n": [1, 3]})
    run = read_live_run(folder)
    assert run.client_tokens_s[0].tolist() == [0.02, 0.04, 0.04]


def test_steps_last_from_decision_to_decision_and_idle_pauses_are_left_out(run: LiveRun) -> None:
    assert np.isnan(run.intervals_s).tolist() == [False, False, True] * 3
    table = live_step_table([run])
    assert table.step_s == pytest.approx([0.010] * 6)
    assert table.shapes.num_prefill_seqs.tolist() == [1, 0] * 3
    assert run.over_s[2] == pytest.approx(run.begin_s[2] + 0.010)


def test_a_closed_loop_keeps_as_many_requests_under_way_as_the_client_did(folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps({"mode": "closed"}))
    asked = read_live_run(folder).workload()
    assert asked.max_concurrency == 1
    assert asked.arrival_ns.tolist() == [0, 0, 0]


def test_requests_of_one_token_have_no_tpot() -> None:
    figures = run_figures(np.array([0.0, 0.0]), (np.array([1.0]), np.array([1.0, 3.0])), 0, 2)
    assert figures.tpot.mean_s == 2.0


def test_percentiles_are_those_that_they_are_called() -> None:
    sends = np.zeros(21)
    figures = run_figures(sends, tuple(np.array([float(number)]) for number in range(21)), 0, 1)
    assert figures.e2el == pytest.approx((10.0, 10.0, 19.0))


def edit_request(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "requests.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(edit(json.loads(first))), *others]) + "\n")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt_len": 0}, "line 1: prompt_len must be a whole number of at least 1, got 0"),
        ({"out_len": 4}, "line 1: request 'r-0' asked for 4 tokens and got 3"),
        ({"out_len": 2.5}, "line 1: out_len must be a whole number"),
        ({"chunk_t": [0.3, 0.2, 0.1]}, "line 1: chunk_t must be seconds after t_send that never fall"),
        ({"chunk_t": []}, "asked for 3 tokens and got 0"),
        ({"chunk_n": [1, 2]}, "line 1: chunk_n must count the tokens"),
        ({"t_send": None}, "line 1: TypeError"),
        ({"error": "timeout"}, "request 'r-0' failed"),
        ({"id": "r-1"}, "two requests have the same id"),
        ({"id": "other"}, "sched.jsonl.gz, line 1: KeyError 'r-0'"),
    ],
)
def test_a_bad_request_names_its_file_and_line(folder: Path, change: dict[str, Any], told: str) -> None:
    edit_request(folder, lambda line: {**line, **change})
    with pytest.raises(ValueError, match=r"requests\.jsonl|sched\.jsonl") as caught:
        read_live_run(folder)
    assert told in str(caught.value)


def test_what_is_no_json_names_its_line(folder: Path) -> None:
    path = folder / "requests.jsonl"
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(ValueError, match=r"requests\.jsonl, line 4: not an object of JSON"):
        read_live_run(folder)


def test_no_requests_are_refused(folder: Path) -> None:
    (folder / "requests.jsonl").write_text("")
    with pytest.raises(ValueError, match="no requests in it"):
        read_live_run(folder)


def test_a_cut_off_record_of_the_scheduler_is_refused(folder: Path) -> None:
    path = folder / "sched.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"sched\.jsonl\.gz is not a whole gzip file"):
        read_live_run(folder)


def test_files_of_different_runs_are_refused(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "server" / "other", num_requests=2)
    (folder / "sched.jsonl.gz").write_bytes((other / "sched.jsonl.gz").read_bytes())
    with pytest.raises(ValueError, match="different run"):
        read_live_run(folder)


def test_a_mode_that_is_not_known_is_refused(folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps({"mode": "chaos"}))
    with pytest.raises(ValueError, match="mode must be one of open, closed, cohorts, got 'chaos'"):
        read_live_run(folder)


@pytest.mark.parametrize("name", ["requests.jsonl", "sched.jsonl.gz", "steps.csv", "run.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name.replace(".", r"\.")):
        read_live_run(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_gpu_blocks": "many"}, "num_gpu_blocks must be a whole number, got 'many'"),
        ({"reserve_full_isl": None}, "reserve_full_isl must be true or false, got None"),
        ({"watermark": "low"}, "watermark must be a number, got 'low'"),
        ({"policy": "SchedulingPolicy.LOTTERY"}, "policy must be one of fcfs, priority, got 'lottery'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_a_bad_setting_of_the_server_is_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "engine_config.json"
    path.write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ValueError, match=r"engine_config\.json") as caught:
        read_engine_config(path)
    assert told in str(caught.value)


# ------------------------------------------------------------------ the way between client and engine


def test_the_way_between_client_and_engine_is_found_again(run: LiveRun) -> None:
    path = HttpPath.of([run])
    assert path.first_in_s == pytest.approx([0.004])
    assert path.in_s == pytest.approx([0.004] * 2)
    assert path.server_in_s == pytest.approx([0.002] * 3)
    assert path.turn_s == 0.0
    assert path.out_s + path.out_per_token_s == pytest.approx(0.003)
    assert path.first_out_s == pytest.approx(0.001)
    seen_s = path.at_client(run.engine_tokens_s, run.token_steps)
    for seen, expected in zip(seen_s, run.client_tokens_s, strict=True):
        assert seen == pytest.approx(expected)


def test_requests_of_a_burst_come_a_turn_apart(run: LiveRun) -> None:
    at_once = replace(run, send_s=np.array([0.0, 0.001, 0.002]), arrival_s=np.array([0.010, 0.014, 0.018]))
    assert HttpPath.of([at_once]).turn_s == pytest.approx(0.004), "three requests have two turns between them"
    assert HttpPath.of([at_once, run]).turn_s == pytest.approx(0.004), "requests that came alone say nothing of turns"


def test_a_path_needs_a_request_that_finds_the_engine_idle(folder: Path, tmp_path: Path) -> None:
    lone = read_live_run(write_run(tmp_path / "server" / "lone", num_requests=1))
    with pytest.raises(ValueError, match="no request found the engine idle"):
        HttpPath.of([lone])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 2**32))
def test_requests_take_turns_and_none_comes_before_it_could(sends_ms: list[int], seed: int) -> None:
    path = HttpPath(np.array([0.02, 0.05]), np.array([0.003, 0.004]), np.array([0.001]), 0.002, 0.0, 0.0, 0.0)
    send_s = np.sort(np.array(sends_ms)) / 1e3
    arrival_s = path.at_engine(send_s, np.random.default_rng(seed))
    assert (np.diff(arrival_s) >= 0.002 - 1e-12).all()
    assert (arrival_s >= send_s + 0.003).all()
    assert arrival_s[0] - send_s[0] >= 0.02 - 1e-12


# ------------------------------------------------------------------ decisions and predictions


def test_decisions_of_a_run_are_followed_and_a_difference_is_told(run: LiveRun) -> None:
    assert live.compare_decisions(run) == live.Decisions("server/run", 9, 0, None)
    others = replace(
        run, num_scheduled_tokens=(*run.num_scheduled_tokens[:4], ((1, 2),), *run.num_scheduled_tokens[5:])
    )
    told = live.compare_decisions(others).first_difference
    assert told == "step 4: (request, tokens) ((1, 1),), recorded were ((1, 2),)"


@pytest.fixture(scope="module")
def outcome() -> live.Outcome:
    return live.run_study(DATA, live.PACED)


@needs_data
def test_live_runs_are_predicted_from_other_runs_of_the_server(outcome: live.Outcome) -> None:
    judged = [line for line in outcome.lines if line.limit_percent is not None]
    figures = {
        "makespan",
        "preemptions",
        *(f"{name} {of}" for name in ("TTFT", "TPOT", "E2EL") for of in ("mean", "p95")),
    }
    assert {(line.run, line.figure) for line in judged} == {
        (run, figure) for run in live.PACED.predicted for figure in figures
    }
    assert [line for line in judged if line.is_broken] == []
    assert next(line.live for line in judged if (line.run, line.figure) == ("QB2/e_preempt", "preemptions")) == 49


@needs_data
def test_decisions_equal_those_of_vllm_step_for_step(outcome: live.Outcome) -> None:
    assert [each.first_difference for each in outcome.decisions] == [None] * 6
    assert sum(each.num_steps for each in outcome.decisions) == 1542 + 846 + 579 + 1920 + 690 + 929


@needs_data
def test_steps_that_are_a_tenth_too_slow_break_the_limits(outcome: live.Outcome) -> None:
    learned = [read_live_run(DATA / name) for name in live.PACED.learned]
    slower = [replace(each, intervals_s=1.1 * each.intervals_s) for each in learned]
    run = read_live_run(DATA / "Q2/d_poisson50")
    lines = live.compare(run, live.predict(run, live.learn(slower, learned), num_simulations=2), is_judged=True)
    assert {line.figure for line in lines if line.is_broken} >= {"TTFT mean", "TPOT mean", "E2EL mean"}

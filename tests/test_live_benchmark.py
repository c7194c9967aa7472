"""What the benchmark of a live vLLM is made of, as far as it goes without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import live_vllm_cpu
from benchmarks.live import loads, plan, table
from benchmarks.live.judged import Row
from benchmarks.live.model import PACED, VOCAB_SIZE, make_model
from benchmarks.live.pace import Pace
from benchmarks.live.run_folder import read_run, write_run
from benchmarks.live.server import ROOT, ServerSetup
from benchmarks.live_vllm_cpu import PUBLISHED
from windtunnel.calibrate.live.observed import ObservedRun, observed_requests
from windtunnel.executor.vllm_plugin.recording import Added, StepDetail, StepLog, StepState, StepTimes
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.simulate import run as simulate
from windtunnel.sim.workload import Workload, workload

MS = 1_000_000


def simulated(name: str) -> Any:
    """A predicted workload of the quick plan, with the set law as step times."""
    study = plan.paced(quick=True)
    stage, job = next((stage, job) for stage in study.stages for job in stage.jobs if job.name == name)
    return simulate(job.load, plan.scheduler_config(stage.setup), study.rough_cost).replicas[0]


def test_each_predicted_workload_brings_out_what_it_is_for() -> None:
    moderate, overload = simulated("moderate").steps.num_waiting, simulated("overload").steps.num_waiting
    assert moderate.max() <= 3 < 10 < overload.max()
    assert len(simulated("preemptions").preemptions) >= 8
    bare = plan.bare(quick=True)
    (small,) = (stage for stage in bare.stages if stage.setup == plan.SMALL)
    (load, *_) = (job.load for job in small.jobs if job.name == "preemptions")
    assert len(simulate(load, plan.scheduler_config(plan.SMALL), bare.rough_cost).replicas[0].preemptions) >= 8


def test_shared_prefixes_save_prefill_and_are_evicted_from_the_pool_of_their_server() -> None:
    load = loads.shared_prefixes(100, 3.0)

    def prefilled(num_gpu_blocks: int) -> int:
        config = plan.scheduler_config(replace(plan.CACHING, num_gpu_blocks=num_gpu_blocks))
        steps = simulate(load, config, plan.paced(quick=False).rough_cost).replicas[0].steps
        return int(steps.prefill_tokens.sum())

    assert 1.3 * prefilled(2000) < prefilled(plan.CACHING.num_gpu_blocks) < 0.6 * load.num_prompt_tokens.sum()


def test_workloads_are_the_same_every_time() -> None:
    one, two = plan.paced(quick=False), plan.paced(quick=False)
    for stage, again in zip(one.stages, two.stages, strict=True):
        for job, other in zip(stage.jobs, again.jobs, strict=True):
            assert np.array_equal(job.load.arrival_ns, other.load.arrival_ns)
            assert np.array_equal(job.load.num_output_tokens, other.load.num_output_tokens)


def test_the_live_token_rate_stays_within_what_the_api_server_streams_without_delay() -> None:
    for study in (plan.paced(quick=False), plan.bare(quick=False)):
        for stage in study.stages:
            for job in stage.jobs:
                assert job.load.num_output_tokens.sum() / study.expected_s(stage, job) < 370


def test_a_study_can_be_cut_down_to_a_workload() -> None:
    cut = plan.paced(quick=True).only(["prefix caching"])
    assert [[job.name for job in stage.jobs] for stage in cut.stages] == [
        ["sequential", "closed loop", "burst"],
        ["prefix caching"],
    ]


def test_the_law_counts_tokens_requests_and_the_context_before_the_step() -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=100)],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[10, 20]),
        num_scheduled_tokens={"a": 50, "b": 1, "c": 1},
        total_num_scheduled_tokens=52,
    )
    assert Pace(base_ms=10, token_ms=0.5, seq_ms=2, context_ms=0.1).step_ns(output) == 55 * MS


def test_every_id_of_the_model_is_a_word(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = make_model(tmp_path / "m", PACED)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == json.loads((folder / "config.json").read_text())["vocab_size"]
    assert tokenizer.decode([5, 8191]) == "w5 w8191"


@pytest.mark.parametrize(("error", "limit", "is_broken"), [(1.9, 2.0, False), (-2.1, 2.0, True), (9.0, None, False)])
def test_a_limit_holds_in_both_directions(error: float, limit: float | None, is_broken: bool) -> None:
    assert Row("w", "makespan", 10.0, 0.0, 0.0, 10.0, 0.0, error, limit, 10.0).is_broken is is_broken
    assert Row("w", "makespan", 10.0, 0.0, 0.0, 10.0, 0.0, float("inf"), 2.0, 10.0).is_broken


def test_the_published_page_says_what_the_published_results_are() -> None:
    results = json.loads(PUBLISHED.with_suffix(".json").read_text(encoding="utf-8"))
    assert PUBLISHED.with_suffix(".md").read_text(encoding="utf-8") == table.page(results)
    judged = [row for row in results["studies"]["paced"]["rows"] if row["limit_percent"] is not None]
    assert {row["workload"] for row in judged} == set(plan.PREDICTED)
    assert all(row["is_broken"] == (abs(row["error_percent"]) > row["limit_percent"]) for row in judged)


def test_the_speed_about_a_run_is_that_of_the_learned_runs_next_to_it_on_its_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def done(server: str, speed: float, *, is_learned: bool) -> Any:
        run = SimpleNamespace(path=Path(server) / "run", speed=speed)
        return SimpleNamespace(run=run, job=SimpleNamespace(is_learned=is_learned))

    monkeypatch.setattr(live_vllm_cpu, "speed_factor", lambda run, _: run.speed)
    first, middle, last = (done("a", 9.0, is_learned=False) for _ in range(3))
    speeds = [done("a", 1.0, is_learned=True), done("a", 1.2, is_learned=True)]
    all_done = [done("b", 5.0, is_learned=True), first, speeds[0], middle, speeds[1], last]
    about: Any = live_vllm_cpu._speed_about
    assert [about(each.run, all_done, None) for each in (first, middle, last)] == pytest.approx([1.0, 1.1, 1.2])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system ends orphans on Linux only")
def test_a_server_does_not_outlive_a_benchmark_that_was_killed() -> None:
    code = (
        "import subprocess, sys; from benchmarks.live.server import dying_with_parent; "
        "child = subprocess.Popen(dying_with_parent([sys.executable, '-c', "
        "'import sys; print(1, flush=True); sys.stdin.read()'])); child.wait()"
    )
    ends, kept = os.pipe()  # the child holds the writing end: reading ends when it is gone
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=kept, stderr=subprocess.DEVNULL
    ) as parent:
        os.close(kept)
        with os.fdopen(ends, "rb") as output:
            assert output.readline() == b"1\n"
            parent.kill()
            assert output.read() == b""


# ------------------------------------------------------------------ client and recorder joined

START_NS = 1_000_000_000


def recording(path: Path) -> int:
    """A warm-up request, and a run of two that share a beginning; returns where the run begins."""
    setup = ServerSetup("test", num_gpu_blocks=65, enable_prefix_caching=True)
    header = {
        **{name: getattr(setup, name) for name in ("num_gpu_blocks", "block_size", "max_num_seqs", "max_model_len")},
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "policy": "fcfs",
        "watermark": 0.0,
        "scheduler_reserve_full_isl": True,
        "async_scheduling": False,
    }
    log = StepLog(path, header, flush_steps=1)
    step(log, START_NS - 50 * MS, [("cmpl-windtunnel-warm-up-0-0-ff", 8, 0)], StepShape(0, 0, 1, 8, 0, 36, 1))
    log.flush()
    end = path.stat().st_size
    first, second = "cmpl-windtunnel-0-0-aa", "cmpl-windtunnel-1-0-bb"
    step(
        log,
        START_NS + 5 * MS,
        [(first, 40, 0)],
        StepShape(0, 0, 1, 40, 0, 820, 1),
        Added(first, 40, START_NS, START_NS),
    )
    added = Added(second, 40, START_NS + 6 * MS, START_NS + 24 * MS)
    step(log, START_NS + 25 * MS, [(first, 1, 40), (second, 8, 32)], StepShape(1, 41, 1, 8, 32, 292, 2), added)
    step(log, START_NS + 45 * MS, [(second, 1, 40)], StepShape(1, 41, 0, 0, 0, 0, 1))
    log.close()
    return end


def step(log: StepLog, begin_ns: int, requests: list[tuple[str, int, int]], shape: StepShape, *added: Added) -> None:
    times = StepTimes(*(begin_ns + ms * MS for ms in (0, 1, 1, 17, 19)))
    log.write(times, shape, 0, StepState(len(requests), 0, 60, 0), 0, StepDetail(requests, [], list(added)))


def two_requests() -> Workload:
    content = (((0, 32),), ((0, 32),))
    return workload([0, 6 * MS], [40, 40], [2, 2], content=content, num_streams=1)


def seen(**more: Any) -> Any:
    requests = observed_requests(
        2,
        due_ns=[0, 6 * MS],
        send_ns=[0, 6 * MS],
        num_prompt_tokens_asked=[40, 40],
        num_output_tokens_asked=[2, 2],
        chunks=[np.array([26 * MS, 46 * MS]), np.array([40 * MS, 60 * MS])],
        chunk_tokens=[np.array([1, 1]), np.array([1, 1])],
        **more,
    )
    return SimpleNamespace(observed=ObservedRun("windtunnel live", "x", requests), start_ns=START_NS)


def test_a_run_is_joined_from_the_client_and_the_recorder(tmp_path: Path) -> None:
    after = recording(tmp_path / "steps.jsonl")
    run = write_run(tmp_path / "server" / "run", two_requests(), seen(), tmp_path / "steps.jsonl", after)
    assert run.num_scheduled_tokens == (((0, 40),), ((0, 1), (1, 8)), ((1, 1),))
    assert run.arrival_s.tolist() == [0.0, 0.006]
    assert run.engine_arrival_s.tolist() == [0.0, 0.024]
    assert np.round(run.begin_s, 9).tolist() == [0.005, 0.025, 0.045]
    assert run.config.num_gpu_blocks == 65
    assert run.config.enable_prefix_caching
    assert run.at_client().ttft.mean_s == pytest.approx(0.033)
    assert run.workload().content == two_requests().content
    again = read_run(run.path, two_requests())
    assert again.num_scheduled_tokens == run.num_scheduled_tokens


def test_a_failed_request_is_told_with_its_error(tmp_path: Path) -> None:
    after = recording(tmp_path / "steps.jsonl")
    failed = seen(ending=[0, 6], errors=("", "the stream ended early"))
    with pytest.raises(ValueError, match=r"1 of 2 requests failed, the first: the stream ended early"):
        write_run(tmp_path / "server" / "run", two_requests(), failed, tmp_path / "steps.jsonl", after)

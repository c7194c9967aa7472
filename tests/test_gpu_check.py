"""The GPU check runs from end to end at tiny sizes on a CPU, and its file says what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import kernel_check, model_check
from benchmarks.gpu.engine_check import Point, overhead
from benchmarks.gpu.points import NO_TIME, PointView
from benchmarks.gpu_check import _targets, _verdict
from benchmarks.kernels import silu_and_mul
from benchmarks.kernels.common import Bench, Row, Times, step_batch
from windtunnel.executor.devices import HostDevice
from windtunnel.executor.reference import TorchOps
from windtunnel.sim.engine.plan import StepShape

REPO_ROOT = Path(__file__).resolve().parent.parent
BENCH = Bench(HostDevice(), TorchOps(), dtype=torch.float32, tiny=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "benchmarks/gpu_check.py", *arguments]
    return subprocess.run(command, cwd=REPO_ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_dry_run_goes_through_all_sections_and_finds_nothing_wrong(tmp_path):
    done = run("--out", str(tmp_path / "new"), "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared with themselves" in done.stdout
    report = json.loads((tmp_path / "new" / "gpu_check.json").read_text())
    sections = report["sections"]
    assert report["dry_run"]
    assert report["operations"] == "TorchOps"
    assert report["verdict"] == {"failed": [], "wrong": [], "not done": []}
    assert report["card"]["torch"] == torch.__version__
    assert {name: told["status"] for name, told in sections.items()} == dict.fromkeys(
        ("ceilings", "kernels_right", "kernels", "model_right", "steps", "throughput", "autotune", "tensor_parallel"),
        "ok",
    )
    assert all(row["passed"] for name in ("kernels_right", "model_right") for row in sections[name]["result"])
    benched = {row["op"] for row in sections["kernels"]["result"]}
    assert {"attention_decode", "attention_prefill", "add_rms_norm", "rope_store", "sample", "linear"} <= benched
    grid = sections["steps"]["result"]["grid"]
    assert [row["is_graph"] for row in grid] == [True, True, False, False]
    assert [row["num_padded_tokens"] for row in grid] == [0, 1, 0, 0]
    for row in grid:
        assert set(row["shape"]) == set(StepShape._fields)
        assert 0 < row["device_s"]["p10"] <= row["device_s"]["median"] <= row["device_s"]["p90"]
        assert row["device_s"]["median"] < row["step_s"]["median"]
    assert sections["throughput"]["result"]["output_tokens_per_s"] > 0
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "gpu_check.json"], "no partial file is left"


def test_without_time_sections_are_skipped_and_told_and_it_is_no_success(tmp_path, capsys):
    assert gpu_check.Check(tmp_path, 0.0, BENCH).run() == gpu_check.INCOMPLETE
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {told["status"] for told in report["sections"].values()} == {"skipped"}
    assert report["verdict"]["not done"] == [f"section {name}" for name in report["sections"]]
    assert "NOT DONE: section kernels_right" in capsys.readouterr().out


def test_cases_and_kernels_without_time_are_told():
    rows = kernel_check.check(TorchOps(), torch.device("cpu"), tiny=True, more=lambda: False)
    skipped = [row["case"] for row in rows if "skipped" in row]
    assert skipped == [str(case) for case in kernel_check.TINY]
    sections = {
        "kernels_right": {"status": "ok", "result": rows},
        "kernels": {"status": "ok", "result": [{"op": "sample", "skipped": NO_TIME}]},
        "steps": {
            "status": "ok",
            "result": {"grid": [{"point": {"chunk": 9}, "skipped": "too large"}, {"point": {}, "skipped": NO_TIME}]},
        },
        "autotune": {"status": "ok", "result": {"tried": [{"skipped": NO_TIME}]}},
        "tensor_parallel": {"status": "ok", "result": [{"tp_size": 8, "skipped": NO_TIME}]},
    }
    verdict = _verdict(sections)
    assert verdict["not done"] == [
        *(f"kernels_right: all, {case}" for case in skipped),
        "kernels: sample",
        "steps: {}",
        "tensor_parallel: 8",
    ]
    assert not verdict["failed"]
    assert not verdict["wrong"]


def test_tiles_that_fail_are_a_failure_only_where_none_works():
    failed, fine = {"failed": "too much shared memory"}, {"median_s": 1e-3}
    decode, prefill = {"kernel": "decode", "shape": [8]}, {"kernel": "prefill", "shape": [8]}
    rows = [decode | failed, decode | fine, prefill | failed, prefill | {"skipped": NO_TIME}]
    sections = {"autotune": {"status": "ok", "result": {"tried": rows}}}
    assert _verdict(sections)["failed"] == ["all tiles of prefill [8]"]


def test_a_benchmark_that_crashes_is_a_failure(tmp_path, monkeypatch):
    def crash(bench: Bench) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(silu_and_mul, "bench", crash)
    monkeypatch.setattr(gpu_check, "KERNELS", (silu_and_mul,))
    assert gpu_check.Check(tmp_path, 60.0, BENCH).run() == gpu_check.WRONG
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["sections"]["kernels"]["status"] == "ok", "the other kernels would have been measured"
    assert report["verdict"]["failed"] == ["benchmark silu_and_mul"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path):
    done = run("--out", str(tmp_path))
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_failed_section_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    def fail(bench: Bench) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(gpu_check.card, "ceilings", fail)
    monkeypatch.setattr(gpu_check, "KERNELS", (silu_and_mul,))
    check = gpu_check.Check(tmp_path, 60.0, BENCH)
    assert check.run() == gpu_check.WRONG
    sections = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]
    assert sections["ceilings"]["status"] == "failed"
    assert "no such luck" in sections["ceilings"]["traceback"]
    assert [told["status"] for told in sections.values()].count("ok") == len(sections) - 1
    assert "share_of_copy" not in sections["kernels"]["result"][0], "shares need the ceilings"


class WrongOps(TorchOps):
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return 1.001 * super().silu_and_mul(x)

    def attention(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().attention(q, *args, **kwargs).roll(1, 0)


def test_wrong_kernels_are_found():
    rows = kernel_check.check(WrongOps(), torch.device("cpu"), tiny=True, more=lambda: True)
    assert {row["op"] for row in rows if not row["passed"]} == {"silu_and_mul", "attention"}


def test_a_wrong_model_is_found():
    claims = model_check.check(WrongOps(), HostDevice(), tiny=True)
    assert not any(claim["passed"] for claim in claims if "those of torch" in claim["claim"])
    wrong = _verdict({"model_right": {"status": "ok", "result": claims}})["wrong"]
    assert "model_right: logits in float32 are those of torch in float32" in wrong


def test_targets_are_judged_by_the_worst_shape():
    kernels = [
        {"op": "attention_decode", "shape": "32 x 2048, kv bfloat16", "share_of_copy": 0.9},
        {"op": "attention_decode", "shape": "64 x 2048, kv bfloat16", "share_of_copy": 0.8},
        {"op": "attention_decode", "shape": "64 x 2048, kv float8_e4m3fn", "share_of_copy": 0.1},
        {"op": "attention_prefill", "shape": "1 x 4096 behind 0, kv bfloat16", "share_of_matmul": 0.7},
        {"op": "rope_store", "skipped": "no time left"},
    ]
    grid = [{"is_graph": True, "host_overhead_s": {"median": value}} for value in (1e-4, 6e-4)]
    sections = {"kernels": {"result": kernels}, "steps": {"result": {"overhead": overhead(grid)}}}
    judged = {told["target"].split(":")[0].split(",")[0]: (told["value"], told["met"]) for told in _targets(sections)}
    assert judged == {
        "decode attention": (0.8, False),
        "prefill attention at 4k": (0.7, True),
        "RMSNorm of 8192 tokens": (None, False),
        "RoPE and store of 8192 tokens": (None, False),
        "host overhead of a decode step under graphs": (6e-4, False),
    }


def test_targets_that_nothing_was_measured_for_are_not_met():
    told = list(_targets({"kernels": {"status": "failed"}, "steps": {"status": "ok", "result": {"overhead": None}}}))
    assert len(told) == 5
    assert not any(target["met"] for target in told)


def test_a_row_tells_rates_and_shares():
    told = Row("copy", "1", Times(1e-3, 9e-4, 2e-3), 4_000_000, 2_000_000).told(8e9, 4e9)
    assert told["bytes_per_s"] == pytest.approx(4e9)
    assert told["share_of_copy"] == told["share_of_matmul"] == pytest.approx(0.5)


def test_a_point_has_the_shape_that_the_scheduler_would_tell():
    shape = Point(num_decodes=3, context=10, chunk=4, cached=6).shape
    assert shape == StepShape(3, 30, 1, 4, 6, 4 * 6 + 10, 4)


def test_batches_of_benchmarks_use_each_block_once_and_store_at_the_end_of_each_context():
    batch, num_blocks = step_batch([1, 1, 5], [17, 16, 20], 16, np.random.default_rng(0), torch.device("cpu"))
    used = [int(block) for row, count in zip(batch.block_tables, [2, 1, 2], strict=True) for block in row[:count]]
    assert sorted(used) == list(range(1, num_blocks))
    assert batch.positions.tolist() == [16, 15, 15, 16, 17, 18, 19]
    assert batch.num_decode_seqs == 2
    tables = batch.block_tables.tolist()
    assert batch.slots.tolist()[:3] == [tables[0][1] * 16, tables[1][0] * 16 + 15, tables[2][0] * 16 + 15]


def test_points_that_do_not_fit_the_cache_are_refused():
    with pytest.raises(ValueError, match="need 4 blocks, but the cache has 3"):
        PointView([17, 20], [[], []], 4, 16)

"""What a plan makes of a real start-up: where each figure is from, what cannot be, and what is learnt."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import windtunnel as wt
from windtunnel import memory_inputs
from windtunnel.cli.main import main
from windtunnel.memory_correction import correction_of
from windtunnel.reports.memory_figures import parts_of, waterfall
from windtunnel.sim.deployment.gpu import GIB, load_gpu
from windtunnel.sim.deployment.memory_plan import make_plan
from windtunnel.sim.deployment.memory_request import MeasuredPool, MemoryRequest
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.deployment.startup_log import read_startup_log
from windtunnel.sim.deployment.versions import profile

BLOCK = 16 * 131_072
"""Bytes of a block of Llama-3.1-8B."""
ENGINE = """\
(EngineCore pid=9) INFO 03-02 10:00:01 [core.py:97] Initializing a V1 LLM engine (v0.19.0) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, \
pipeline_parallel_size=1, data_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, seed=0
"""
WEIGHTS = "INFO 03-02 10:00:20 [gpu_model_runner.py:2653] Model loading took 14.99 GiB and 12.3 seconds\n"
AVAILABLE = "INFO 03-02 10:00:40 [gpu_worker.py:298] Available KV cache memory: {gib} GiB\n"
TOKENS = "INFO 03-02 10:00:40 [kv_cache_utils.py:1087] GPU KV cache size: {tokens:,} tokens\n"
CONCURRENCY = (
    "INFO 03-02 [kv_cache_utils.py:1091] Maximum concurrency for {length:,} tokens per request: {times:.2f}x\n"
)
BLOCKS = "(APIServer pid=1) DEBUG 03-02 [loggers.py:273] Engine 000: vllm cache_config_info with initialization after \
num_gpu_blocks is: {blocks}\n"
PARTS = """\
INFO 03-02 10:00:55 [gpu_worker.py:391] Free memory on device (78.68/79.19 GiB) on startup. Desired GPU memory \
utilization is (0.95, 75.23 GiB). Actual usage is 14.99 GiB for weight, 1.90 GiB for peak activation, 0.25 GiB for \
non-torch memory, and 0.85 GiB for CUDAGraph memory.
"""
SHARE = "(APIServer pid=1) INFO 03-02 [utils.py:233] non-default args: {'gpu_memory_utilization': 0.95}\n"
WHOLE = ENGINE + WEIGHTS + AVAILABLE.format(gib="58.08") + TOKENS.format(tokens=475_776) + PARTS
U28 = """\
(EngineCore pid=9) INFO 11-29 20:36:00 [kv_cache_utils.py:2327] GPU KV cache size: 245,840 tokens, Maximum concurrency \
for 2,304 tokens per request: 106.70x
(EngineCore pid=9) INFO 11-29 20:36:00 [gpu_worker.py:774] CUDA graph memory profiling is enabled (default since \
v0.21.0). The current --gpu-memory-utilization=0.6200 is equivalent to --gpu-memory-utilization=0.5413 without CUDA \
graph memory profiling. To maintain the same effective KV cache size as before, increase --gpu-memory-utilization to \
0.6987.
"""
METRICS = """\
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",gpu_memory_utilization="0.9",\
kv_cache_max_concurrency="52.734375",kv_cache_size_tokens="432000",num_gpu_blocks="27000"} 1.0
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0
"""


def written(folder: Path, text: str, name: str = "vllm.log") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def from_log(folder: Path, text: str, gpu: str | None = "h100", **settings: Any) -> wt.MemoryReport:
    return wt.memory_plan(gpu=gpu, from_log=written(folder, text), **settings)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["memory", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


# --- where figures are from


@pytest.mark.parametrize(
    ("lines", "available", "blocks", "origins"),
    [
        (TOKENS.format(tokens=474_304), 29_644 * BLOCK, 29_644, ("measured tokens", "measured tokens", "measured")),
        (BLOCKS.format(blocks=29_644), 29_644 * BLOCK, 29_644, ("measured blocks", "measured", "measured blocks")),
        (
            AVAILABLE.format(gib="57.90"),
            round(57.9 * GIB),
            round(57.9 * GIB) // BLOCK,
            ("measured", "measured bytes", "measured bytes"),
        ),
        (
            AVAILABLE.format(gib="57.90") + TOKENS.format(tokens=474_304),
            round(57.9 * GIB),
            29_644,
            ("measured", "measured tokens", "measured"),
        ),
    ],
    ids=["tokens", "blocks", "GiB", "GiB and tokens"],
)
def test_each_figure_says_what_it_is_from(
    lines: str, available: int, blocks: int, origins: tuple[str, str, str], tmp_path: Path
) -> None:
    found = from_log(tmp_path, SHARE + ENGINE + lines)
    made = found.to_dict()
    assert made["available_kv_cache_bytes"] == available
    assert made["num_gpu_blocks"] == blocks
    shown = made["origins"]
    assert tuple(shown[key] for key in ("available_kv_cache_bytes", "num_gpu_blocks", "kv_cache_tokens")) == origins
    assert {shown[key] for key in ("weights_bytes", "activation_bytes", "cudagraph_bytes")} == {"formula"}
    assert "formula, with rotary tables" in found.text()
    word = "measured: " if origins[0] == "measured" else f"from the {origins[0]}: "
    [line] = [
        line for line in found.text().splitlines() if line.strip().startswith("available for KV") and "log" in line
    ]
    assert f"{word}{tmp_path}/vllm.log" in line
    page = tmp_path / "plan.html"
    found.report(page)
    assert f"{word}{tmp_path}/vllm.log" in page.read_text("utf-8")


def test_measured_parts_take_the_place_of_the_formula_s(tmp_path: Path) -> None:
    made = from_log(tmp_path, WHOLE).to_dict()
    assert made["weights_bytes"] == round(14.99 * GIB)
    assert made["activation_bytes"] == round(1.9 * GIB)
    assert made["non_torch_bytes"] == round(0.25 * GIB)
    assert made["cudagraph_bytes"] == round(0.85 * GIB)
    measured = {name for name, origin in made["origins"].items() if origin == "measured"}
    assert measured >= {"weights_bytes", "activation_bytes", "non_torch_bytes", "cudagraph_bytes", "total_bytes"}
    assert made["comparison"]["activation_bytes"]["formula"] != made["activation_bytes"]


def test_a_given_number_of_blocks_leaves_what_is_available_to_the_formula() -> None:
    made = wt.memory_plan("llama-3.1-8b", "h100", num_gpu_blocks_override=100)
    assert made.to_dict()["origins"]["available_kv_cache_bytes"] == "formula"
    assert made.to_dict()["origins"]["num_gpu_blocks"] == "given"
    assert "blocks; num_gpu_blocks_override makes it 100" in made.text()


def test_blocks_and_tokens_tell_the_block_size(tmp_path: Path) -> None:
    found = from_log(tmp_path, SHARE + ENGINE + TOKENS.format(tokens=474_304) + BLOCKS.format(blocks=14_822))
    assert (found.settings["block_size"], found.kv_cache_tokens) == (32, 474_304)
    assert found.to_dict()["available_kv_cache_bytes"] == 14_822 * 2 * BLOCK


@given(
    model=st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "gemma-3-27b", "qwen3.5-35b-a3b", "deepseek-v2-lite"]),
    engine=st.sampled_from(["vllm-0.11", "vllm-0.19", "vllm-0.21", "vllm-0.32"]),
    length=st.integers(100, 9000),
    blocks=st.integers(700, 40_000),
)
def test_the_blocks_behind_logged_tokens_log_the_same_tokens(model: str, engine: str, length: int, blocks: int) -> None:
    request = MemoryRequest(load_model(model), load_gpu("b300"), profile(engine), max_model_len=length)
    logged = make_plan(_measured(request, MeasuredPool("log", num_gpu_blocks=blocks))).kv_cache_tokens
    read = make_plan(_measured(request, MeasuredPool("log", kv_cache_tokens=logged, max_model_len=length)))
    assert read.kv_cache_tokens == logged
    assert read.num_gpu_blocks <= blocks


def _measured(request: MemoryRequest, pool: MeasuredPool) -> MemoryRequest:
    from dataclasses import replace

    return replace(request, measured=pool)


# --- the parts add up


@given(
    lines=st.sampled_from([AVAILABLE.format(gib="{gib:.2f}"), "{tokens}", "{blocks}"]),
    gib=st.floats(1, 60),
    with_parts=st.booleans(),
    engine=st.sampled_from(["0.19.0", "0.32.0"]),
)
def test_the_parts_of_a_measured_plan_add_up_to_the_byte(
    lines: str, gib: float, with_parts: bool, engine: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    blocks = int(gib * GIB) // BLOCK
    told = lines.format(gib=gib, tokens=TOKENS.format(tokens=16 * blocks), blocks=BLOCKS.format(blocks=blocks))
    text = ENGINE.replace("0.19.0", engine) + told + (PARTS if with_parts else "")
    made = from_log(tmp_path_factory.getbasetemp(), text)
    plain = made.to_dict()
    inside = plain["cudagraph_bytes"] if plain["cudagraph_inside_budget"] else 0
    parts = [plain[f"{name}_bytes"] for name in ("weights", "activation", "non_torch", "unexplained")]
    assert sum(parts) + inside + plain["available_kv_cache_bytes"] == plain["requested_bytes"]
    plan = made.judged.plan
    assert sum(part.num_bytes for part in parts_of(plan)) == plan.total_bytes
    assert ("unexplained" in made.text()) == (plan.unexplained_bytes != 0)


def test_a_correction_is_the_unexplained_part_of_a_corrected_plan() -> None:
    given = wt.memory_plan("llama-3.1-8b", "h100")
    learnt = correction_of(given.judged.plan.request, given.judged.plan, -2 * GIB, "a log")
    made = wt.memory_plan("llama-3.1-8b", "h100", correction=learnt)
    plain = made.to_dict()
    assert plain["unexplained_bytes"] == 2 * GIB
    assert plain["origins"]["available_kv_cache_bytes"] == "formula, corrected"
    assert sum(part.num_bytes for part in parts_of(made.judged.plan)) == made.judged.plan.total_bytes


def test_nothing_is_unexplained_by_the_formula_alone() -> None:
    for more in ({}, {"kv_cache_memory_bytes": "16GiB"}, {"num_gpu_blocks_override": 1000}):
        made = wt.memory_plan("llama-3.1-8b", "h100", max_model_len=4096, **more)
        assert made.to_dict()["unexplained_bytes"] == 0
        assert sum(part.num_bytes for part in parts_of(made.judged.plan)) == made.judged.plan.total_bytes


# --- the length, and a formula that is wrong


def test_u28_the_length_of_the_logged_concurrency_is_taken_and_equal_lengths_are_compared(tmp_path: Path) -> None:
    found = from_log(tmp_path, U28, "b200", model="llama-3.1-8b")
    assert found.settings["max_model_len"] == 2304
    assert (found.num_gpu_blocks, found.kv_cache_tokens) == (15_365, 245_840)
    assert round(found.max_concurrency, 2) == 106.70
    measured, formula = found.comparison["max_concurrency"]
    tokens, formula_tokens = found.comparison["kv_cache_tokens"]
    assert measured == 106.70
    assert tokens is not None
    assert formula / measured == pytest.approx(formula_tokens / tokens, rel=1e-3)


def test_u28_a_formula_that_is_far_off_is_a_warning_with_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path, U28)
    arguments = ["--model", "llama-3.1-8b", "--gpu", "b200", "--from-log", log]
    code, shown, _ = run(capsys, *arguments)
    assert code == 0
    assert shown.splitlines()[0].endswith(": ok, with a warning")
    assert "WARNING: The formula does not fit this server" in shown
    graphs = (0.62 - 0.5413) * load_gpu("b200").memory_bytes / GIB
    assert f"{graphs:.2f} GiB" in shown, "the estimate of the graphs that the log tells"
    assert "another process" in shown
    assert "tensor_parallel_size (1 is taken)" in " ".join(shown.split())
    made = json.loads(run(capsys, *arguments, "--json")[1])
    assert made["formula_check"]["is_within_interval"] is False
    assert made["formula_check"]["measured_bytes"] == 15_365 * BLOCK
    assert len(made["formula_check"]["candidates"]) >= 3
    page = tmp_path / "plan.html"
    run(capsys, *arguments, "--html", page, "-q")
    assert "The formula does not fit this server" in page.read_text("utf-8")


def test_a_start_up_as_expected_needs_no_warning(tmp_path: Path) -> None:
    found = from_log(tmp_path, WHOLE)
    assert found.warnings == ()
    assert found.formula_check is not None
    assert found.formula_check.is_within


def test_a_concurrency_of_another_length_is_not_compared(tmp_path: Path) -> None:
    text = SHARE + ENGINE + TOKENS.format(tokens=474_304) + CONCURRENCY.format(length=4096, times=115.8)
    found = from_log(tmp_path, text)
    assert found.settings["max_model_len"] == 8192
    assert "max_concurrency" not in found.comparison
    assert any("4,096" in note for note in found.notes)


def test_a_start_up_that_failed_does_not_start_though_its_cache_was_sized(tmp_path: Path) -> None:
    oom = "ERROR Capturing CUDA graphs\nERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    found = from_log(tmp_path, WHOLE + oom)
    assert found.verdict == "does_not_start"
    assert "out of memory" in found.reason
    assert "does not see why that start-up failed" in found.text()


def test_figures_that_do_not_go_together_are_a_warning(tmp_path: Path) -> None:
    found = from_log(tmp_path, SHARE + ENGINE + AVAILABLE.format(gib="57.90") + BLOCKS.format(blocks=10_000))
    assert any("not the 57.90 GiB" in warning for warning in found.warnings)


# --- what a real start-up shows

HEALTHY = """\
(APIServer pid=1) INFO 06-10 09:59:01 [api_server.py:1839] vLLM API server version 0.11.0
(APIServer pid=1) INFO 06-10 09:59:01 [utils.py:233] non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', \
'max_model_len': 8192, 'gpu_memory_utilization': 0.95, 'enable_prefix_caching': False}
(EngineCore_DP0 pid=12) INFO 06-10 10:00:00 [gpu_model_runner.py:2653] Model loading took 14.9889 GiB and 3.97 seconds
(EngineCore_DP0 pid=12) INFO 06-10 10:00:20 [gpu_worker.py:298] Available KV cache memory: 58.11 GiB
(EngineCore_DP0 pid=12) INFO 06-10 10:00:20 [kv_cache_utils.py:1087] GPU KV cache size: 476,000 tokens
"""
CAPTURED = "(EngineCore_DP0 pid=12) INFO [gpu_model_runner.py:3480] Graph capturing finished in 5 secs, took 0.79 GiB\n"
READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
SERVED = (
    "(APIServer pid=1) INFO 06-10 10:01:26 [loggers.py:127] Engine 000: Avg prompt throughput: 6102.8 tokens/s, Avg "
    "generation throughput: 1221.7 tokens/s, Running: 259 reqs, Waiting: 535 reqs, GPU KV cache usage: 82.3%, Prefix "
    "cache hit rate: 32.2%\n"
)
OUT_OF_MEMORY = "ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (CAPTURED, "shows CUDA graphs captured (line 6)."),
        (READY, "shows the server up (line 6)."),
        (CAPTURED + READY + SERVED, "shows CUDA graphs captured (line 6) and requests running (line 7)."),
    ],
    ids=["captured", "ready", "served"],
)
def test_a_start_up_that_went_well_is_ok_whatever_the_formula_makes_of_its_parts(
    more: str, words: str, tmp_path: Path
) -> None:
    found = from_log(tmp_path, HEALTHY + more)
    plan = found.judged.plan
    assert plan.consumed_bytes + plan.kv_cache_bytes > plan.requested_bytes, "the formula has too much for it"
    assert found.verdict == "ok"
    assert found.reason.startswith(f"{tmp_path}/vllm.log {words}")
    assert found.judged.remedies == ()
    assert "--gpu-memory-utilization 0.95 " in found.serve_command
    assert plan.margin_bytes == plan.free_bytes - plan.requested_bytes - plan.graphs_outside_bytes
    budget = waterfall(plan).layout["shapes"][1]
    assert budget["x0"] == (plan.total_bytes - plan.free_bytes + plan.requested_bytes) / GIB
    pool = next(part for part in parts_of(plan) if part.name == "KV cache")
    before = sum(part.num_bytes for part in parts_of(plan)[: parts_of(plan).index(pool)])
    assert before + pool.num_bytes <= budget["x0"] * GIB + 1
    assert budget["x0"] * GIB - before - pool.num_bytes < 0.01 * GIB, "it ends where the budget does, but for rounding"


def test_a_server_that_runs_is_ok_though_the_estimates_leave_nothing(tmp_path: Path) -> None:
    text = (HEALTHY + CAPTURED + SERVED).replace("0.95", "0.99").replace("58.11", "61.20").replace("476,000", "501,000")
    found = from_log(tmp_path, text)
    assert found.judged.plan.margin_bytes < 0
    assert found.verdict == "ok"
    assert re.search(
        r"left on the card +– +not known: by the estimates 0\.\d\d GiB too little, but it runs", found.text()
    )


def test_a_start_up_that_nobody_saw_the_end_of_is_judged_by_what_is_left(tmp_path: Path) -> None:
    text = HEALTHY.replace("0.95", "0.99").replace("58.11", "61.20").replace("476,000", "501,000")
    found = from_log(tmp_path, text)
    assert found.verdict == "unsafe"
    assert found.judged.remedies


def test_memory_that_ran_out_later_makes_it_unsafe(tmp_path: Path) -> None:
    found = from_log(tmp_path, HEALTHY + CAPTURED + SERVED + OUT_OF_MEMORY)
    assert found.verdict == "unsafe"
    assert "It started, and ran out of memory later." in found.reason
    assert "line 8: out of memory. Tried to allocate 2.00 GiB." in found.reason
    assert "ran out while it ran: lower gpu_memory_utilization" in " ".join(found.text().split())
    assert not any("Tried to allocate" in note for note in found.notes)


def test_little_that_is_measured_to_be_left_is_a_note(tmp_path: Path) -> None:
    for free, told in (("78.68", False), ("76.10", True)):
        found = from_log(tmp_path, WHOLE.replace("78.68", free) + SERVED)
        assert found.verdict == "ok"
        assert any("By the measured figures" in note for note in found.notes) is told
        assert found.to_dict()["origins"]["oom_margin_bytes"] == "measured"


def test_a_server_that_the_plan_would_refuse_is_ok_with_a_warning(tmp_path: Path) -> None:
    text = HEALTHY.replace("'max_model_len': 8192", "'max_model_len': 600000") + CAPTURED + READY
    found = from_log(tmp_path, text)
    assert found.verdict == "ok"
    assert any("would not start, though this server did (" in warning for warning in found.warnings)


def test_the_error_of_a_failed_start_up_is_printed_once_with_one_full_stop(tmp_path: Path) -> None:
    error = (
        "ERROR 06-10 10:00:20 [core.py:1] RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 "
        "dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.\n"
    )
    found = from_log(tmp_path, HEALTHY + CAPTURED + error)
    assert found.verdict == "does_not_start"
    shown = " ".join(found.text().split())
    assert shown.count("when warming up sampler") == 1
    assert "the engine. The plan itself" in shown
    what_if = from_log(tmp_path, HEALTHY + CAPTURED + error, gpu_memory_utilization=0.8)
    shown = " ".join(what_if.text().split())
    assert shown.count("when warming up sampler") == 1
    assert "WARNING: The start-up that was read failed." in shown
    assert ".." not in shown.replace("...", "")


def test_an_error_that_the_plan_foresees_word_for_word_is_not_said_twice(tmp_path: Path) -> None:
    error = (
        "ValueError: Free memory on device (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 19.84 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
    )
    found = from_log(tmp_path, ENGINE + error, gpu=None)
    assert " ".join(found.text().split()).count("Free memory on device") == 1
    assert found.warnings == (f"The start-up that was read failed just so ({tmp_path}/vllm.log, line 2).",)


# --- a release that is not known

OLDER = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",gpu_memory_utilization="0.9",'
    'num_gpu_blocks="27300",swap_space="4"} 1.0\n'
)


def from_metrics(folder: Path, text: str, **settings: Any) -> wt.MemoryReport:
    path = written(folder, text, "metrics")
    return wt.memory_plan(settings.pop("model", "llama-3.1-8b"), "h100", from_metrics=path, **settings)


def test_metrics_whose_labels_are_those_of_older_releases_are_planned_with_one(tmp_path: Path) -> None:
    found = from_metrics(tmp_path, OLDER)
    assert found.judged.plan.request.version.name == "vllm-0.17"
    [note] = [note for note in found.notes if "release" in note]
    assert "its labels are those of 0.9 to 0.17: vllm-0.17 is taken; give --engine" in note
    newer = from_metrics(tmp_path, METRICS)
    assert newer.judged.plan.request.version.name == "vllm-0.32"
    assert any("those of 0.24 and later: vllm-0.32 is taken" in note for note in newer.notes)


def test_a_release_that_is_given_is_no_what_if_and_needs_no_note(tmp_path: Path) -> None:
    found = from_metrics(tmp_path, OLDER, engine="vllm-0.12")
    assert found.judged.plan.source == "measured"
    assert found.judged.plan.request.version.name == "vllm-0.12"
    assert not any("the release of vLLM" in note for note in found.notes)


def test_a_log_without_its_release_says_so(tmp_path: Path) -> None:
    found = from_log(tmp_path, TOKENS.format(tokens=42_656) + SERVED, model="llama-3.1-8b")
    assert any("does not tell the release of vLLM: vllm-0.32 is taken" in note for note in found.notes)
    assert not any("release" in note for note in from_log(tmp_path, HEALTHY).notes)


def test_the_tokens_of_blocks_are_those_of_the_model_dense_or_not(tmp_path: Path) -> None:
    dense = from_metrics(tmp_path, OLDER)
    assert dense.kv_cache_tokens == 27_300 * 16
    assert not any("hybrid" in note or "kinds" in note for note in dense.notes)
    hybrid = from_metrics(tmp_path, OLDER.replace("27300", "9100"), model="gpt-oss-20b")
    assert hybrid.num_gpu_blocks == 9100
    assert hybrid.kv_cache_tokens == 9100 // 2 * 16, "two groups of layers share the blocks"
    assert hybrid.to_dict()["origins"]["kv_cache_tokens"] == "measured blocks"
    assert "kv_cache_tokens" not in hybrid.comparison


def test_metrics_are_those_of_a_server_that_runs(tmp_path: Path) -> None:
    found = from_metrics(tmp_path, OLDER.replace("27300", "28500"))
    assert found.verdict == "ok"
    assert found.reason.startswith(f"{tmp_path}/metrics has the metrics of a server that runs.")


# --- corrections


@pytest.mark.parametrize(
    "lines", [TOKENS.format(tokens=400_000), BLOCKS.format(blocks=25_000)], ids=["tokens", "blocks"]
)
def test_a_correction_is_learnt_from_tokens_or_blocks(
    lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, kept = written(tmp_path, SHARE + ENGINE + lines), tmp_path / "ours.json"
    assert run(capsys, "--gpu", "h100", "--from-log", log, "--save-correction", kept)[0] == 0
    asked: dict[str, Any] = {"engine": "vllm-0.19.0", "max_model_len": 8192, "gpu_memory_utilization": 0.95}
    plain = wt.memory_plan("llama-3.1-8b", "h100", **asked)
    learnt = json.loads(kept.read_text("utf-8"))
    assert learnt["correction_bytes"] == 25_000 * BLOCK - plain.judged.plan.available_kv_cache_bytes
    corrected = wt.memory_plan("llama-3.1-8b", "h100", correction=kept, **asked)
    assert corrected.num_gpu_blocks == 25_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"correction_bytes": 10**18}, "must lie within"),
        ({"correction_bytes": -(10**18)}, "must lie within"),
        ({"correction_bytes": 20 * GIB}, "at most are left beside the weights"),
        ({"model": "Qwen/Qwen3-32B"}, "model Qwen/Qwen3-32B (here meta-llama/Llama-3.1-8B-Instruct)"),
        ({"gpu": "L4"}, "gpu L4 (here H100-SXM)"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2 (here 1)"),
        ({"gpu_memory_bytes": 40 * GIB}, "a card of 40.00 GiB"),
    ],
)
def test_a_correction_of_another_deployment_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learnt = from_log(tmp_path, WHOLE).profile() | change
    kept = written(tmp_path, json.dumps(learnt), "ours.json")
    code, _, error = run(capsys, "--model", "llama-3.1-8b", "--gpu", "h100", "--correction", kept)
    assert code == 2
    assert words in error
    assert "--save-correction" in error, "the remedy"


def test_a_correction_of_another_release_is_told(tmp_path: Path) -> None:
    learnt = from_log(tmp_path, WHOLE).profile()
    made = wt.memory_plan("llama-3.1-8b", "h100", correction=learnt, engine="vllm-0.32")
    assert any("learnt with engine vllm-0.19.0 (here vllm-0.32)" in note for note in made.notes)


def test_a_correction_replaces_a_correction_and_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, kept = written(tmp_path, WHOLE), tmp_path / "ours.json"
    arguments = ["--gpu", "h100", "--from-log", log, "--save-correction"]
    assert run(capsys, *arguments, kept)[0] == 0
    assert run(capsys, *arguments, kept)[0] == 0
    for name, text in (("notes.txt", "my notes"), ("config.json", '{"a": 1}'), ("empty", "")):
        other = written(tmp_path, text, name)
        code, shown, error = run(capsys, *arguments, other)
        assert (code, shown) == (2, "")
        assert "is no correction" in error
        assert other.read_text("utf-8") == text
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_nothing_is_learnt_from_a_cache_whose_size_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given_bytes = SHARE.replace("'gpu_memory_utilization': 0.95", "'kv_cache_memory_bytes': 10737418240")
    log = written(tmp_path, given_bytes + ENGINE + TOKENS.format(tokens=81_920))
    kept = tmp_path / "ours.json"
    code, _, error = run(capsys, "--gpu", "h100", "--from-log", log, "--save-correction", kept)
    assert code == 2
    assert "nothing to learn" in error or "no measured KV cache to learn from" in error
    assert not kept.exists()


# --- what cannot be


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        (ENGINE + AVAILABLE.format(gib="57.90"), ["--gpu", "l4"], ("line 2", "57.90 GiB", "L4 has 22.03 GiB")),
        (ENGINE + BLOCKS.format(blocks=29_644), ["--gpu", "l4"], ("29,644 blocks of 2,097,152 bytes", "L4 has 22.03")),
        (ENGINE + AVAILABLE.format(gib="15.00"), ["--gpu", "l4"], ("beside weights of 14.99 GiB", "L4 has 22.03 GiB")),
        (WHOLE, ["--gpu", "l4"], ("79.19 GiB", "--gpu L4 has 22.03 GiB", "H100-SXM")),
        (WHOLE, ["--gpu-memory-gib", "40"], ("79.19 GiB", "--gpu-memory-gib is 40")),
        (
            WHOLE,
            ["--gpu", "h100", "--model", "qwen3-32b"],
            ("line 1", "Llama-3.1-8B", "qwen3-32b", "Leave --model out"),
        ),
        (
            ENGINE + AVAILABLE.format(gib="999999999999"),
            ["--gpu", "h100"],
            ("line 2", "999,999,999,999.00 GiB", "16,384"),
        ),
        (ENGINE + TOKENS.format(tokens=10**12), ["--gpu", "h100"], ("line 2", "H100-SXM has 79.19 GiB")),
        (WHOLE.replace("(78.68/79.19", "(78.68/99999.00"), ["--gpu", "h100"], ("99,999.00 GiB", "16,384")),
        (WHOLE.replace("0.95,", "1.95,"), ["--gpu", "h100"], ("vllm.log, line", "gpu_memory_utilization", "1.95")),
    ],
)
def test_a_start_up_that_cannot_have_been_is_refused(
    text: str, flags: list[str], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown, error = run(capsys, *flags, "--from-log", written(tmp_path, text))
    assert (code, shown) == (2, "")
    for word in words:
        assert word in error


def test_a_model_that_has_the_same_shapes_is_the_same_model(tmp_path: Path) -> None:
    found = from_log(tmp_path, WHOLE, model="meta-llama/Llama-3.1-8B")
    assert found.judged.plan.source == "measured"
    unknown = from_log(
        tmp_path, WHOLE.replace("meta-llama/Llama-3.1-8B-Instruct", "/models/ours"), model="llama-3.1-8b"
    )
    assert any("'/models/ours', which is taken to be llama-3.1-8b" in note for note in unknown.notes)


def test_an_unknown_model_of_a_log_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path, WHOLE.replace("meta-llama/Llama-3.1-8B-Instruct", "/models/ours"))
    code, _, error = run(capsys, "--gpu", "h100", "--from-log", log)
    assert code == 2
    assert "line 1" in error
    assert "give --model" in error


def test_another_release_than_the_log_s_is_a_what_if(tmp_path: Path) -> None:
    found = from_log(tmp_path, WHOLE, engine="vllm-0.32")
    assert found.judged.plan.source == "formula"
    assert any(note.startswith("What if: not as the measured server had it: engine") for note in found.notes)
    same = from_log(tmp_path, WHOLE, engine="vllm-0.19")
    assert same.judged.plan.source == "measured"


def test_a_sweep_over_a_log_reads_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, reads = written(tmp_path, WHOLE), 0
    opened = Path.open

    def counted(path: Path, *how: Any, **more: Any) -> Any:
        nonlocal reads
        reads += path == log
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", counted)
    sweep = wt.memory_sweep(gpu="h100", from_log=log, gpu_memory_utilization=[0.85, 0.9, 0.95])
    assert reads == 1
    assert [point.report.judged.plan.source for point in sweep.points if point.report] == [
        "formula",
        "formula",
        "measured",
    ]


def test_a_log_of_v0_without_its_release_is_planned_with_one_that_has_v0(tmp_path: Path) -> None:
    text = "INFO 04-25 10:00:36 [executor_base.py:112] # cuda blocks: 1926, # CPU blocks: 2048\n"
    found = from_log(tmp_path, text, "rtx-3090", model="llama-3.2-1b")
    assert found.judged.plan.request.uses_v0_engine
    assert (found.num_gpu_blocks, found.kv_cache_tokens) == (1926, 1926 * 16)
    assert any("of the V0 engine, of a release that is not known" in note for note in found.notes)


# --- digits


def test_u25_the_budget_of_a_failed_start_is_the_logged_one(tmp_path: Path) -> None:
    error = (
        "ValueError: Free memory on device (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 19.84 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
    )
    found = from_log(tmp_path, ENGINE + error, gpu=None)
    assert error[12:].strip() in found.reason
    assert "gpu_memory_utilization can be 0.896 at most" in found.reason
    assert f"{found.judged.plan.requested_bytes / GIB:.2f}" == "19.84"
    assert f"{found.judged.plan.total_bytes / GIB:.2f}" == "22.05"


@given(total=st.integers(4 * GIB, 300 * GIB), share=st.integers(30, 99))
def test_the_logged_budget_comes_back_to_the_displayed_digit(
    total: int, share: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    requested = math.ceil(total * (share / 100))
    free, logged = f"{total / GIB - 0.5:.2f}", f"{requested / GIB:.2f}"
    line = (
        f"INFO [gpu_worker.py:391] Free memory on device ({free}/{total / GIB:.2f} GiB) on startup. Desired GPU memory "
        f"utilization is ({share / 100}, {logged} GiB). Actual usage is 1.00 GiB for weight.\n"
    )
    path = written(tmp_path_factory.getbasetemp(), ENGINE + line, "digits.log")
    gib = memory_inputs.read_log_settings(path).settings["gpu_memory_gib"]
    assert f"{gib:.2f}" == f"{total / GIB:.2f}"
    assert f"{math.ceil(round(gib * GIB) * (share / 100)) / GIB:.2f}" == logged


# --- metrics by address


class _Server(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, str]] = {  # noqa: RUF012 -- read only
        "/metrics": (200, METRICS),
        "/": (404, '{"detail":"Not Found"}'),
        "/page": (200, "<html>hello</html>"),
    }

    def do_GET(self) -> None:
        code, text = self.answers[self.path]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the base class's word
        """Nothing to stderr."""


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_metrics_of_a_running_server_are_read(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "--gpu", "h100", "--from-metrics", f"{address}/metrics", "--json")
    assert code == 0
    made = json.loads(shown)
    assert (made["num_gpu_blocks"], made["kv_cache_tokens"]) == (27_000, 432_000)
    assert made["settings"]["max_model_len"] == 8192, "432,000 tokens are 52.734375 requests of so many"
    assert made["origins"]["available_kv_cache_bytes"] == "measured blocks"


@pytest.mark.parametrize(
    ("path", "words"),
    [("/", ("answered 404", "/metrics")), ("/page", ("no series of vLLM",))],
)
def test_an_address_without_metrics_is_told(
    path: str, words: tuple[str, ...], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, "--gpu", "h100", "--from-metrics", address + path)
    assert code == 3
    assert address + path in error, "no slash is lost"
    for word in words:
        assert word in error


def test_a_server_that_refuses_or_does_not_answer_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_inputs, "TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        slow = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        code, _, error = run(capsys, "--gpu", "h100", "--from-metrics", slow)
        assert code == 3
        assert "no whole answer within 0.2 s" in error
    code, _, error = run(capsys, "--gpu", "h100", "--from-metrics", slow)
    assert code == 3
    assert "cannot be reached (Connection refused)" in error
    code, _, error = run(capsys, "--gpu", "h100", "--from-metrics", "ftp://host/metrics")
    assert code == 3
    assert "must begin with http:// or https://" in error


# --- long logs


def test_a_start_up_among_many_foreign_lines_is_read_with_its_place() -> None:
    foreign = '10.0.0.1 - - "GET /a HTTP/1.1" 200 "a model version of nothing"\n' * 5000
    alone, among = read_startup_log(WHOLE, name="x"), read_startup_log(foreign + WHOLE + foreign, name="x")
    assert among.lines == {name: line + 5000 for name, line in alone.lines.items()}
    assert among.available_kv_cache_bytes == alone.available_kv_cache_bytes
    pieces = (foreign[start : start + 6400] for start in range(0, len(foreign), 6400))
    with pytest.raises(ValueError, match="no line of vLLM's start-up in it"):
        read_startup_log(pieces, name="x")

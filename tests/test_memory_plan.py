"""The memory planner: budget, verdict, remedies, what-ifs and its command."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.memory_settings import several
from windtunnel.reports.memory_figures import waterfall
from windtunnel.reports.memory_text import row_words
from windtunnel.sim.deployment.gpu import GIB, load_gpu
from windtunnel.sim.deployment.memory import plan_memory
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, OK, RESERVE_BYTES, UNSAFE, make_plan
from windtunnel.sim.deployment.memory_request import MeasuredPool, MemoryRequest
from windtunnel.sim.deployment.model import load_model, model_from_config
from windtunnel.sim.deployment.refusal import RefusedByVllm
from windtunnel.sim.deployment.versions import profile

JSON_KEYS = {
    "verdict",
    "reason",
    "kv_cache_tokens",
    "num_gpu_blocks",
    "max_concurrency",
    "available_kv_cache_bytes",
    "weights_bytes",
    "activation_bytes",
    "non_torch_bytes",
    "cudagraph_bytes",
    "interval_90",
    "assumptions",
}
WIDE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 1_048_576,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def plan(model: str = "llama-3.1-8b", gpu: str = "h100", **settings: Any) -> wt.MemoryReport:
    return wt.memory_plan(model, gpu, **settings)


# --- start-ups that people reported


def test_u01_sixteen_gib_of_a_gb200_hold_what_vllm_logged() -> None:
    found = plan("qwen2.5-7b", "b200", kv_cache_memory_bytes="16GiB", max_model_len=8192, max_num_seqs=256)
    assert (found.kv_cache_tokens, found.num_gpu_blocks) == (299_584, 18_724)
    assert 128 * 3500 / found.kv_cache_tokens == pytest.approx(1.50, abs=0.005)


def test_u02_four_long_requests_fill_a_pool_of_444_000_tokens() -> None:
    found = plan(num_gpu_blocks_override=444_000 // 16, mean_tokens=101_000)
    assert found.users is not None
    assert int(found.users.real) == 4


def test_u05_a_pool_of_77_088_tokens_runs_72_requests_and_not_256() -> None:
    found = plan("qwen2.5-7b", "a10g", num_gpu_blocks_override=4818, max_model_len=8192, mean_tokens=1056)
    assert found.users is not None
    assert found.kv_cache_tokens == 77_088
    assert found.judged.plan.kv_cache_bytes / GIB == pytest.approx(4.117, abs=0.0005)
    assert found.users.running == 72


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "desired", "most"), [(22.05, 19.77, "19.84", "0.896"), (79.15, 59.32, "71.24", "0.749")]
)
def test_u25_too_little_free_memory_is_refused_in_vllm_s_words(
    total_gib: float, free_gib: float, desired: str, most: str
) -> None:
    total = round((float(desired) + 0.004) / 0.9, 4) if total_gib == 22.05 else total_gib
    found = wt.memory_plan(
        "llama-3.2-1b", gpu_memory_gib=total, free_memory_gib=free_gib, gpu_memory_utilization=0.9, max_model_len=4096
    )
    assert found.verdict == DOES_NOT_START
    words = f"Free memory on device ({free_gib}/{total_gib} GiB) on startup is less than desired GPU memory utilization"
    assert f"{words} (0.9, {desired} GiB)." in found.reason
    assert f"gpu_memory_utilization can be {most} at most" in found.reason


@given(total=st.integers(20 * GIB, 200 * GIB), share=st.integers(60, 99), free=st.floats(0.5, 1.0))
def test_u25_it_fails_exactly_if_less_is_free_than_asked_for(total: int, share: int, free: float) -> None:
    gpu = replace(load_gpu("h100"), memory_bytes=total)
    free_bytes = round(total * free)
    request = MemoryRequest(
        load_model("llama-3.2-1b"),
        gpu,
        gpu_memory_utilization=share / 100,
        free_memory_bytes=free_bytes,
        max_model_len=2048,
    )
    refused = plan_memory(request, with_remedies=False).judgement.cause == "free_memory_below_desired"
    assert refused == (free_bytes < math.ceil(total * share / 100))


@pytest.mark.parametrize(("blocks", "tokens", "logged"), [(15_365, 245_840, 106.7), (48_118, 769_888, 334.2)])
def test_u28_both_pools_of_the_b200_have_the_logged_concurrency(blocks: int, tokens: int, logged: float) -> None:
    found = plan(gpu="b200", num_gpu_blocks_override=blocks, max_model_len=2304, engine="vllm-0.21")
    assert found.kv_cache_tokens == tokens
    assert round(found.max_concurrency, 1) == logged


def test_u28_the_equivalent_utilization_is_what_vllm_logs() -> None:
    made = plan(gpu="b200", gpu_memory_utilization=0.62).judged.plan
    graphs = round((0.62 - 0.5413) * made.total_bytes)
    made = replace(made, overheads=replace(made.overheads, cudagraph_bytes=graphs))
    assert made.equivalent_gpu_memory_utilization == 0.5413
    assert made.suggested_gpu_memory_utilization == 0.6987
    assert plan(enforce_eager=True).judged.plan.equivalent_gpu_memory_utilization is None


def rtx_3090(max_model_len: int, **more: Any) -> wt.MemoryReport:
    return plan(gpu="rtx-3090", engine="vllm-0.8", v0=True, max_model_len=max_model_len, **more)


def test_u32_blocks_and_concurrency_are_those_of_the_3090_s_log() -> None:
    found = rtx_3090(20_000, num_gpu_blocks_override=1952)
    assert round(found.max_concurrency, 2) == 1.56
    assert found.judged.plan.kv_cache_bytes / GIB == pytest.approx(3.8125)
    assert found.judged.plan.num_cpu_blocks == 2048
    short = rtx_3090(29_000, num_gpu_blocks_override=1478)
    assert short.verdict == DOES_NOT_START
    words = "The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache"
    assert f"{words} (23648)." in short.reason


def test_u32_a_longer_context_fits_where_a_shorter_one_does_not() -> None:
    """Above 32,768 tokens V0 cuts prompts, so that the profile run is smaller."""
    verdicts = [rtx_3090(length).verdict for length in (20_000, 29_000, 35_000)]
    assert verdicts[0] == OK
    assert verdicts[1] == DOES_NOT_START
    assert verdicts[2] != DOES_NOT_START
    fixed = next(remedy for remedy in rtx_3090(29_000).judged.remedies if remedy.flag == "enable_chunked_prefill")
    assert fixed.kv_cache_tokens > 29_000


def test_u34_the_largest_length_that_fits_is_named() -> None:
    model = model_from_config(WIDE, "wide")
    assert model.kv_bytes_per_token(8) == 24_576
    found = wt.memory_plan(
        model, "h100", engine="vllm-0.11", tensor_parallel_size=8, kv_cache_memory_bytes=round(9.97 * GIB)
    )
    assert "max seq len (1048576), (24.00 GiB KV cache is needed" in found.reason
    assert "available KV cache memory (9.97 GiB). " in found.reason
    assert "the estimated maximum model length is 435584." in found.reason


def test_u37_half_of_an_mha_model_on_two_t4() -> None:
    """V1 needs compute capability 8.0, so that V0 runs on a T4."""
    asked: dict[str, Any] = {"tensor_parallel_size": 2, "num_gpu_blocks_override": 507, "max_model_len": 16_384}
    found = wt.memory_plan("deepseek-coder-6.7b", gpu_memory_gib=14.74, engine="vllm-0.8", v0=True, **asked)
    assert found.verdict == DOES_NOT_START
    assert found.kv_cache_tokens == 8112
    assert found.judged.plan.kv_bytes_per_token == 262_144
    assert found.judged.plan.kv_cache_bytes / GIB == pytest.approx(1.98, abs=0.005)
    words = "max seq len (16384) is larger than the maximum number of tokens that can be stored in KV cache (8112)"
    assert words in found.reason


def test_u39_more_sequences_than_state_blocks_are_refused_with_the_number_to_use() -> None:
    asked: dict[str, Any] = {"max_model_len": 132_000, "gpu_memory_utilization": 0.9, "max_num_seqs": 1024}
    found = plan("qwen3.5-27b", "h200", num_gpu_blocks_override=969, **asked)
    assert found.verdict == DOES_NOT_START
    assert found.reason.startswith("max_num_seqs (1024) exceeds available Mamba cache blocks (969).")
    fewer = next(remedy for remedy in found.judged.remedies if remedy.flag == "max_num_seqs")
    assert fewer.value == 969
    assert plan("qwen3.5-27b", "h200", num_gpu_blocks_override=969, enforce_eager=True, **asked).verdict == OK
    assert plan("qwen3.5-27b", "h200", num_gpu_blocks_override=969, engine="vllm-0.19", **asked).verdict == OK


def test_u42_more_requests_run_than_the_logged_concurrency() -> None:
    found = plan(num_gpu_blocks_override=2360, max_model_len=8192, mean_tokens=800)
    assert found.users is not None
    assert round(found.max_concurrency, 2) == 4.61
    assert found.users.running == 47, "the maintainer's rough answer was 46"


def test_u44_max_num_seqs_caps_what_the_memory_would_hold() -> None:
    found = plan(max_num_seqs=256, mean_tokens=100)
    assert found.users is not None
    assert found.users.running == 256 < found.users.real


def test_u72_a_user_of_a_small_qwen_takes_a_28th_of_what_was_thought() -> None:
    found = plan("qwen2.5-7b", "l4", mean_tokens=3072, max_model_len=8192)
    assert found.users is not None
    assert found.users.bytes_per_user == 3072 * 57_344 == 168 * 2**20


def test_u73_real_users_are_fewer_than_the_ideal_arithmetic_says() -> None:
    found = plan(gpu="a100-80", gpu_memory_utilization=0.9, max_model_len=16_384, mean_tokens=10_000)
    assert found.users is not None
    assert 64_000_000_000 // found.judged.plan.kv_bytes_per_token == 488_281
    assert found.users.ideal > 48.8
    assert 43 < found.users.real < 47


def test_u90_an_fp8_cache_holds_twice_as_much() -> None:
    asked: dict[str, Any] = {"gpu": "a100-80", "engine": "vllm-0.26", "kv_cache_memory_bytes": 48_735 * 16 * 73_728}
    asked |= {"gpu_memory_utilization": 0.9, "max_model_len": 32_768}
    assert plan("qwen3-8b", **asked).kv_cache_tokens == 389_872
    assert plan("qwen3-8b", **asked, kv_cache_dtype="fp8").kv_cache_tokens == 779_760
    assert asked["kv_cache_memory_bytes"] / GIB == pytest.approx(53.54, abs=0.005)


# --- the budget


@given(
    model=st.sampled_from(["llama-3.1-8b", "qwen3-32b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3.5-35b-a3b"]),
    gpu=st.sampled_from(["h100", "h200", "a100-80", "l40s"]),
    share=st.floats(0.3, 0.98),
    engine=st.sampled_from(["vllm-0.11", "vllm-0.19", "vllm-0.21", "vllm-0.32"]),
    length=st.integers(256, 32_768),
)
def test_the_parts_add_up_and_the_pool_fits_into_what_is_available(
    model: str, gpu: str, share: float, engine: str, length: int
) -> None:
    made = plan(model, gpu, gpu_memory_utilization=share, engine=engine, max_model_len=length).judged.plan
    graphs = made.cudagraph_bytes if made.graphs_inside else 0
    parts = made.weights_bytes + made.activation_bytes + made.non_torch_bytes + graphs
    assert made.requested_bytes - parts == made.available_kv_cache_bytes
    assert made.graphs_inside == profile(engine).cuda_graphs_inside_utilization
    if made.num_gpu_blocks:
        assert 0 <= made.available_kv_cache_bytes - made.kv_cache_bytes < max(made.layout.block_bytes)
    low, high = made.interval_90
    assert low <= made.kv_cache_tokens <= high


def test_the_tightest_stage_of_a_pipeline_decides() -> None:
    made = plan("qwen3-32b", "l40s", pipeline_parallel_size=3).judged.plan
    assert len(made.stages) == 3
    assert made.num_gpu_blocks == min(stage.num_blocks for stage in made.stages)
    assert len({stage.weights_bytes for stage in made.stages}) > 1


def test_experts_are_spread_over_replicas_and_each_has_its_pool() -> None:
    alone = plan("qwen3-30b-a3b", "h100", max_model_len=8192)
    two = plan("qwen3-30b-a3b", "h100", max_model_len=8192, data_parallel_size=2, enable_expert_parallel=True)
    assert two.judged.plan.weights_bytes < 0.6 * alone.judged.plan.weights_bytes
    assert two.kv_cache_tokens > alone.kv_cache_tokens
    assert two.to_dict()["num_gpus"] == 2


def test_offloaded_weights_leave_their_room_to_the_cache() -> None:
    more = plan(cpu_offload_gb=4).judged.plan.available_kv_cache_bytes - plan().judged.plan.available_kv_cache_bytes
    assert more == 4 * GIB


def test_host_memory_is_told_by_what_takes_it() -> None:
    found = plan(tensor_parallel_size=2, data_parallel_size=2, cpu_offload_gb=4, kv_offloading_size=64)
    assert found.host_memory == {
        "offloaded_weights_bytes": 4 * GIB,
        "swap_bytes": 0,
        "kv_offloading_bytes": 32 * GIB,
        "num_gpus": 4,
        "total_bytes": 4 * 4 * GIB + 2 * 64 * GIB,
    }
    assert found.num_gpu_blocks == plan(tensor_parallel_size=2, data_parallel_size=2, cpu_offload_gb=4).num_gpu_blocks
    text = " ".join(found.text().split())
    assert "offloaded KV 32.00 GiB kv_offloading_size over the ranks of an engine" in text
    assert "in all 144.00 GiB for 4 GPUs" in text
    assert "--cpu-offload-gb 4 --kv-offloading-size 64" in found.serve_command
    assert "Host memory" not in plan().text()


def test_no_more_is_offloaded_than_there_are_weights() -> None:
    found = plan(cpu_offload_gb=100)
    assert (
        found.host_memory["offloaded_weights_bytes"]
        == plan().judged.plan.weights_bytes - found.judged.plan.weights_bytes
    )
    assert found.host_memory["total_bytes"] < 16 * GIB


def test_only_the_v0_engine_takes_swap_space() -> None:
    asked: dict[str, Any] = {"engine": "vllm-0.9", "tensor_parallel_size": 2}
    assert plan(**asked, v0=True).host_memory["total_bytes"] == 2 * 4 * GIB, "its default is 4 GiB for each GPU"
    assert plan(**asked, v0=True, swap_space=8).host_memory["swap_bytes"] == 8 * GIB
    idle = plan(**asked, swap_space=8)
    assert idle.host_memory["total_bytes"] == 0
    assert "V1 takes none of the 8 GiB of swap_space" in idle.text()


def test_the_recommended_command_keeps_what_was_given() -> None:
    found = plan(dtype="float32", disable_hybrid_kv_cache_manager=True, max_model_len=8192)
    for flag in ("--dtype float32", "--disable-hybrid-kv-cache-manager", "--max-model-len 8192"):
        assert flag in found.serve_command


def test_adapters_take_rank_times_both_sides_of_every_linear_layer() -> None:
    """Per layer of Llama-3.1-8B: q, o, k, v, gate, up and down with their inputs; embedding and head once each."""
    attention = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    sides = 32 * (attention + 3 * (4096 + 14_336)) + 2 * (128_256 + 4096)
    taken = {
        rank: plan(enable_lora=True, max_loras=4, max_lora_rank=rank).judged.plan.weights_bytes for rank in (16, 64)
    }
    without = plan().judged.plan.weights_bytes
    assert {rank: held - without for rank, held in taken.items()} == {rank: 4 * rank * sides * 2 for rank in (16, 64)}
    split = plan(enable_lora=True, tensor_parallel_size=4).judged.plan.weights_bytes
    assert split < plan(enable_lora=True).judged.plan.weights_bytes


def test_a_larger_budget_costs_kv_tokens() -> None:
    """U19: 2,048 instead of 8,192 tokens a step freed memory for the cache."""
    asked: dict[str, Any] = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.95, "max_model_len": 4096}
    small, large = (
        plan("llama-3.3-70b", "a100-80", max_num_batched_tokens=budget, max_num_seqs=256, **asked).kv_cache_tokens
        for budget in (2048, 16_384)
    )
    assert small > large


def test_auto_takes_the_longest_context_that_fits() -> None:
    found = plan(gpu="l4", max_model_len="auto")
    length = found.settings["max_model_len"]
    assert 0 < length < 131_072
    assert plan(gpu="l4", max_model_len=length).verdict != DOES_NOT_START
    assert plan(gpu="l4", max_model_len=length + 1).verdict == DOES_NOT_START
    assert plan(max_model_len=-1).settings["max_model_len"] == 131_072


@pytest.mark.parametrize(("engine", "reserves"), [("vllm-0.28", False), ("vllm-0.29", True)])
def test_the_null_block_counts_as_the_release_has_it(engine: str, reserves: bool) -> None:
    found = plan(num_gpu_blocks_override=512, max_model_len=8192, engine=engine)
    assert (found.verdict == DOES_NOT_START) == reserves


SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "memory" / "startups.csv"


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared start-up logs")
def test_tokens_and_concurrency_follow_from_logged_bytes_for_every_kind_of_model() -> None:
    """Within the two decimals of the bytes; with several ranks the smallest pool counts, of which one is logged."""
    hybrids = compared = 0
    for row in csv.DictReader(SHARED.read_text("utf-8").splitlines()):
        request = _request_of(row)
        if request is None:
            continue
        logged = float(row["kv_avail_gib"])
        pools = [MeasuredPool("log", round((logged + rounding) * GIB)) for rounding in (-0.0051, 0.0051)]
        low, high = (make_plan(replace(request, measured=pool)) for pool in pools)
        slack = 0.9998 if request.num_gpus > 1 else 1.0
        assert low.kv_cache_tokens * slack <= float(row["kv_tokens"]) <= high.kv_cache_tokens, row["source"]
        if row["max_conc"]:
            concurrency = float(row["max_conc"])
            assert slack * low.max_concurrency - 0.01 <= concurrency <= high.max_concurrency + 0.01, row["source"]
        compared += 1
        hybrids += low.layout.is_hybrid
    assert compared >= 65
    assert hybrids >= 2


def _request_of(row: dict[str, str]) -> MemoryRequest | None:
    """The deployment of a start-up; None where the row does not tell enough."""
    if not (row["kv_tokens"] and row["kv_avail_gib"] and row["tp"]) or row["pp"] not in ("1.0", ""):
        return None
    try:
        model, version = load_model(row["model"]), profile(re.split(r"[+]|[.]dev", row["vllm_version"])[0])
    except ValueError:
        return None
    if row["dtype"] == "float32":
        model = replace(model, dtype="float32")

    def whole(key: str) -> int | None:
        return int(float(row[key])) if row[key] else None

    return MemoryRequest(
        model,
        load_gpu("h200"),
        version,
        tensor_parallel_size=whole("tp") or 1,
        max_model_len=whole("max_model_len"),
        max_num_batched_tokens=whole("max_num_batched_tokens"),
        kv_cache_dtype="fp8" if row["kv_dtype"].startswith("fp8") else "auto",
        enable_prefix_caching={"True": True, "False": False}.get(row["prefix_caching"]),
        allows_long_max_model_len=True,
    )


# --- verdicts


def test_graphs_beside_the_budget_make_a_large_share_unsafe() -> None:
    old = plan(engine="vllm-0.19", gpu_memory_utilization=0.985, max_model_len=8192)
    new = plan(engine="vllm-0.32", gpu_memory_utilization=0.985, max_model_len=8192)
    assert (old.verdict, old.judged.judgement.cause) == (UNSAFE, "sampler_warm_up")
    assert "the warm-up of the sampler on 1,024 sequences" in old.reason
    assert new.verdict == OK
    safe = next(remedy for remedy in old.judged.remedies if remedy.flag == "gpu_memory_utilization")
    assert safe.value < 0.985
    assert plan(engine="vllm-0.19", gpu_memory_utilization=safe.value, max_model_len=8192).verdict == OK


def test_a_plan_is_unsafe_when_the_estimate_may_be_too_high_for_one_request() -> None:
    made = plan(gpu="l4", max_model_len="auto").judged.plan
    low, high = made.interval_blocks
    needs = made.layout.blocks_of_request
    between, below = (low + made.num_gpu_blocks) // 2 * 16, (low - 2) * 16
    assert low < needs(between) < made.num_gpu_blocks <= high
    assert plan(gpu="l4", max_model_len=between).judged.judgement.cause == "small_pool"
    assert plan(gpu="l4", max_model_len=below).verdict == OK


def test_a_given_pool_that_leaves_little_is_unsafe_and_one_too_large_runs_out_of_memory() -> None:
    made = plan(kv_cache_memory_bytes="1GiB", max_model_len=1024).judged.plan
    largest = GIB + made.margin_bytes
    tight = plan(kv_cache_memory_bytes=largest - RESERVE_BYTES // 2, max_model_len=1024)
    over = plan(kv_cache_memory_bytes=largest + 2**24, max_model_len=1024)
    assert tight.verdict == UNSAFE
    assert over.verdict == DOES_NOT_START
    assert "CUDA out of memory" in over.reason
    fixed = next(remedy for remedy in over.judged.remedies if remedy.flag == "kv_cache_memory_bytes")
    assert plan(kv_cache_memory_bytes=fixed.value, max_model_len=1024).verdict == OK


def test_nothing_left_is_told_with_the_words_of_the_release() -> None:
    asked: dict[str, Any] = {"gpu": "h100", "gpu_memory_utilization": 0.2, "max_model_len": 4096}
    for engine, aside in (("vllm-0.11", False), ("vllm-0.32", True)):
        found = plan(engine=engine, **asked)
        assert found.reason.startswith("No available memory for the cache blocks. Try increasing")
        assert ("on the CPU backend" in found.reason) == aside


def test_a_context_beyond_the_model_s_own_is_refused_unless_allowed() -> None:
    found = plan("qwen2.5-7b", max_model_len=100_000)
    assert found.reason.startswith("User-specified max_model_len (100000) is greater than the derived max_model_len")
    assert plan("qwen2.5-7b", max_model_len=100_000, allows_long_max_model_len=True).verdict == OK


# --- remedies

STUCK: list[dict[str, Any]] = [
    {"model": "llama-3.3-70b", "gpu": "h100", "tensor_parallel_size": 2, "max_model_len": 16_384},
    {"model": "llama-3.1-8b", "gpu": "l4"},
    {"model": "llama-3.1-8b", "gpu": "h100", "gpu_memory_utilization": 0.2, "max_model_len": 4096},
    {"model": "gpt-oss-120b", "gpu": "h100"},
    {"model": "qwen3.5-27b", "gpu": "h100", "max_model_len": 131_072},
    {"model": "qwen3-32b", "gpu": "l40s", "engine": "vllm-0.19"},
    {"model": "llama-3.1-8b", "gpu": "h100", "gpu_memory_utilization": 0.999},
    {"model": "llama-3.1-8b", "gpu": "h100", "kv_cache_memory_bytes": 4 * GIB, "max_model_len": 65_536},
    {"model": "llama-3.1-8b", "gpu": "h100", "num_gpu_blocks_override": 100, "max_model_len": 8192},
]


@pytest.mark.parametrize("asked", STUCK, ids=lambda asked: f"{asked['model']}-{asked['gpu']}")
def test_every_remedy_alone_makes_it_start(asked: dict[str, Any]) -> None:
    found = wt.memory_plan(**asked)
    assert found.verdict == DOES_NOT_START
    assert found.judged.remedies
    for remedy in found.judged.remedies:
        mended = wt.memory_plan(**{**asked, remedy.flag: remedy.value})
        assert mended.verdict == remedy.verdict != DOES_NOT_START
        assert mended.kv_cache_tokens == remedy.kv_cache_tokens
        assert remedy.cost


def test_the_remedies_are_the_smallest_changes() -> None:
    asked = {"model": "llama-3.3-70b", "gpu": "h100", "tensor_parallel_size": 2, "max_model_len": 16_384}
    values = {remedy.flag: remedy.value for remedy in wt.memory_plan(**asked).judged.remedies}
    smaller = {
        "max_model_len": values["max_model_len"] + 1,
        "gpu_memory_utilization": round(values["gpu_memory_utilization"] - 0.01, 2),
        "max_num_batched_tokens": 2 * values["max_num_batched_tokens"],
    }
    for flag, value in smaller.items():
        assert wt.memory_plan(**{**asked, flag: value}).verdict != OK, flag
    assert values["tensor_parallel_size"] == 4


def test_a_plan_that_is_well_needs_no_remedy() -> None:
    assert plan().verdict == OK
    assert plan().judged.remedies == ()


def test_the_recommended_command_starts() -> None:
    found = plan("llama-3.3-70b")
    assert found.serve_command == "vllm serve meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 4"
    assert make_plan(found.recommended).num_gpu_blocks > 0


# --- what-ifs


def test_a_range_holds_its_last_value() -> None:
    assert several("gpu_memory_utilization", "0.80:0.98:0.02")[-1] == 0.98
    assert len(several("gpu_memory_utilization", "0.80:0.98:0.02")) == 10
    assert several("max_model_len", "8k,32K,auto") == [8000, 32_768, "auto"]
    assert several("max_num_seqs", "64:256:64") == [64, 128, 192, 256]
    assert several("tensor_parallel_size", "1,2,4") == [1, 2, 4]


def test_a_sweep_has_every_combination_and_equals_the_single_plans() -> None:
    sweep = wt.memory_sweep("llama-3.3-70b", "h100", tensor_parallel_size="2,4", kv_cache_dtype=["auto", "fp8"])
    assert sweep.axes == ("tensor_parallel_size", "kv_cache_dtype")
    assert [point.verdict for point in sweep.points] == [DOES_NOT_START, DOES_NOT_START, OK, OK]
    for point in sweep.points:
        assert point.report is not None
        alone = plan("llama-3.3-70b", **point.values)
        assert point.report.kv_cache_tokens == alone.kv_cache_tokens
    assert not sweep.is_infeasible
    assert list(sweep.table["num_gpus"]) == [2, 2, 4, 4]


def test_a_combination_that_vllm_refuses_is_a_row_that_does_not_start() -> None:
    sweep = wt.memory_sweep("llama-3.1-8b", "h100", tensor_parallel_size="1,3")
    assert [point.verdict for point in sweep.points] == [OK, DOES_NOT_START]
    assert "tensor_parallel_size 3" in sweep.points[1].error
    with pytest.raises(RefusedByVllm, match="tensor_parallel_size 3"):
        plan(tensor_parallel_size=3)


def test_a_sweep_tells_what_its_single_plans_tell_and_of_which_rows(tmp_path: Path) -> None:
    asked: dict[str, list[Any]] = {"engine": ["vllm-0.19", "vllm-0.32"], "max_model_len": [8192, 131_072]}
    sweep = wt.memory_sweep("llama-3.1-8b", ["h100", "l4"], **asked)
    told = " ".join(sweep.text().split())
    page = tmp_path / "sweep.html"
    sweep.report(page)
    shown = page.read_text("utf-8")
    for number, point in enumerate(sweep.points, 1):
        alone = wt.memory_plan("llama-3.1-8b", **point.values)
        about = [note for note in sweep.notes if str(number) in _rows(note)]
        assert {note.partition(": ")[2] for note in about} == set(alone.notes)
    assert [_rows(note) for note in sweep.notes] == [["3", "4"], ["5", "6"], ["7", "8"]]
    for note in sweep.notes:
        assert f"note: {note}" in told
        assert note in shown
    assert "Why some do not start - row 6: To serve" in told
    assert "row 8: To serve" in shown


def _rows(note: str) -> list[str]:
    """The numbers of the rows that a note begins with."""
    spans = re.match(r"rows? ([\d, -]+): ", note)
    assert spans is not None, note
    rows: list[str] = []
    for span in spans[1].split(", "):
        first, _, last = span.partition("-")
        rows += map(str, range(int(first), int(last or first) + 1))
    return rows


def test_a_note_of_every_row_names_none() -> None:
    sweep = wt.memory_sweep("llama-3.1-8b", "l4", max_model_len=[2048, 4096])
    [note] = sweep.notes
    assert note.startswith("Not measured: L4 ")


@given(st.sets(st.integers(1, 60), min_size=1).map(sorted))
def test_rows_are_named_in_short_and_without_loss(numbers: list[int]) -> None:
    assert _rows(f"{row_words(numbers)}: x") == [str(number) for number in numbers]


def test_more_memory_never_holds_less() -> None:
    sweep = wt.memory_sweep("llama-3.1-8b", "h100", gpu_memory_utilization="0.5:0.95:0.05")
    tokens = [point.report.kv_cache_tokens for point in sweep.points if point.report]
    assert tokens == sorted(tokens)
    assert len(tokens) == 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_memory_utilization": "0.9:0.8:0.1"}, "must go up"),
        ({"gpu_memory_utilization": "a:b:c"}, "must be a range FIRST:LAST:STEP"),
        ({"max_num_seqs": "1:100000:1"}, "more than 500"),
        ({"max_num_seqs": "1:400:1", "tensor_parallel_size": "1,2,4,8,16,32,64"}, "more than 2,000"),
        ({"max_num_seqs": "1,,2"}, "empty value"),
        ({"max_num_seq": 5}, "nearest: max_num_seqs"),
    ],
)
def test_bad_ranges_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wt.memory_sweep("llama-3.1-8b", "h100", **settings)


# --- a real server

LOG = """\
INFO 03-02 10:00:01 [core.py:97] Initializing a V1 LLM engine (v0.19.0) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, \
pipeline_parallel_size=1, data_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
INFO 03-02 10:00:20 [gpu_model_runner.py:2653] Model loading took 14.99 GiB and 12.3 seconds
INFO 03-02 10:00:40 [gpu_worker.py:298] Available KV cache memory: 57.90 GiB
INFO 03-02 10:00:40 [kv_cache_utils.py:1087] GPU KV cache size: 474,304 tokens
INFO 03-02 10:00:40 [kv_cache_utils.py:1091] Maximum concurrency for 8,192 tokens per request: 57.90x
INFO 03-02 10:00:55 [gpu_worker.py:391] Free memory on device (78.68/79.19 GiB) on startup. Desired GPU memory \
utilization is (0.95, 75.23 GiB). Actual usage is 14.99 GiB for weight, 1.90 GiB for peak activation, 0.25 GiB for \
non-torch memory, and 0.85 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with \
`--kv-cache-memory=60000000000` to fit into requested memory, or `--kv-cache-memory=63000000000` to fully utilize gpu \
memory. Current kv cache memory in use is 62171120435 bytes.
"""
METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",gpu_memory_utilization="0.9",\
num_gpu_blocks="27000"} 1.0
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text(LOG, "utf-8")
    return path


def test_the_pool_of_a_log_overrides_the_formula_and_the_difference_is_told(log: Path) -> None:
    found = wt.memory_plan(gpu="h100", from_log=log)
    assert (found.kv_cache_tokens, found.num_gpu_blocks) == (474_304, 474_304 // 16)
    assert found.judged.plan.source == "measured"
    assert found.judged.plan.request.version.name == "vllm-0.19.0"
    assert found.settings["gpu_memory_utilization"] == 0.95
    measured, formula = found.comparison["kv_cache_tokens"]
    assert measured == 474_304
    assert formula == pytest.approx(474_304, rel=0.01)
    assert "Beside the real start-up" in found.text()


def test_another_setting_than_the_log_s_corrects_the_formula(log: Path) -> None:
    learnt = wt.memory_plan(gpu="h100", from_log=log).profile()["correction_bytes"]
    asked: dict[str, Any] = {"engine": "vllm-0.19", "max_model_len": 8192, "gpu_memory_gib": 79.19}
    changed = wt.memory_plan(gpu="h100", from_log=log, gpu_memory_utilization=0.9)
    plain = plan(gpu_memory_utilization=0.9, **asked).judged.plan
    assert changed.judged.plan.source == "formula"
    assert changed.judged.plan.available_kv_cache_bytes == plain.available_kv_cache_bytes + learnt
    assert any("gpu_memory_utilization" in note for note in changed.notes)


def test_a_saved_correction_is_applied_to_later_plans(log: Path, tmp_path: Path) -> None:
    kept = tmp_path / "ours.json"
    assert main(["memory", "--from-log", str(log), "--gpu", "h100", "--save-correction", str(kept), "-q"]) == 0
    learnt = json.loads(kept.read_text("utf-8"))["correction_bytes"]
    asked: dict[str, Any] = {"engine": "vllm-0.19.0", "max_model_len": 8192}
    corrected, plain = plan(correction=kept, **asked), plan(**asked)
    gained = corrected.judged.plan.available_kv_cache_bytes - plain.judged.plan.available_kv_cache_bytes
    assert gained == learnt != 0


def test_the_blocks_of_metrics_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(METRICS, "utf-8")
    found = plan(from_metrics=path)
    assert (found.num_gpu_blocks, found.kv_cache_tokens) == (27_000, 432_000)


def test_a_command_line_gives_the_settings_and_flags_override_them() -> None:
    line = "vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 2 --gpu-memory-utilization=0.8 --max-model-len 16K"
    found = wt.memory_plan(gpu="h100", from_deployment=line)
    assert found.settings["tensor_parallel_size"] == 2
    assert found.settings["max_model_len"] == 16_384
    assert wt.memory_plan(gpu="h100", from_deployment=line, max_model_len=8192).settings["max_model_len"] == 8192


# --- the command

MODEL = ["memory", "--model", "llama-3.1-8b"]


def test_the_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--gpu", "h100", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made) >= JSON_KEYS
    assert set(made["interval_90"]) == {"low", "high"}
    assert made["verdict"] == OK
    assert made["kv_cache_tokens"] == plan().kv_cache_tokens


def test_explain_shows_the_arithmetic_that_gives_the_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--gpu", "h100", "--explain"]) == 0
    shown = capsys.readouterr().out
    made = plan().judged.plan
    assert f"blocks = {made.available_kv_cache_bytes:,} // 2,097,152 = {made.num_gpu_blocks:,}" in shown
    assert all(text.split()[0] in shown for text in plan().to_dict()["assumptions"])


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--gpu", "h100"], 0),
        (["--gpu", "h100", "--engine", "vllm-0.19", "--gpu-memory-utilization", "0.985"], 0),
        (["--gpu", "l4"], 4),
        (["--gpu", "h100,l4"], 0),
        (["--gpu", "l4", "--gpu-memory-utilization", "0.90,0.92"], 4),
        (["--gpu", "h100", "--from-log", "nothing.log"], 3),
    ],
)
def test_the_exit_code_says_whether_it_starts(flags: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, *flags]) == code
    assert capsys.readouterr().err.count("error: ") == (code == 3)


BROKEN: list[tuple[list[str], str]] = [
    (["--gpu", "h1000"], "unknown GPU 'h1000'; nearest: H100-SXM"),
    (["--gpu", "h100", "--gpu-memory-utilization", "90"], "gpu_memory_utilization must lie in (0, 1], got 90"),
    (["--gpu", "h100", "--gpu-memory-utilization", "90%"], "--gpu-memory-utilization: '90%' must be a share"),
    (["--gpu-memory-gib", "24GB"], "24 GB = 22.3517 GiB, so write 22.3517"),
    (["--gpu-memory-gib", "24gb"], "--gpu-memory-gib: '24gb' must be a plain number of GiB"),
    (["--gpu-memory-gib", "24GiB"], "write 24"),
    (["--gpu-memory-gib", "24576MiB"], "24576 MiB = 24 GiB, so write 24"),
    (["--gpu-memory-gib", "24,24g"], "'24g' must be a plain number"),
    (["--gpu-memory-gib", "0.5"], "must be at least 1 GiB"),
    (["--gpu", "h100", "--free-memory-gib", "70gib"], "--free-memory-gib: '70gib' must be a plain number"),
    (["--gpu", "h100", "--free-memory-gib", "0"], "--free-memory-gib: 0.0 must be a number of GiB above 0"),
    (["--gpu", "h100", "--cpu-offload-gb", "4GB"], "4 GB = 3.72529 GiB, so write 3.72529"),
    (["--gpu", "h100", "--swap-space", "4g"], "--swap-space: '4g' must be a plain number of GiB"),
    (["--gpu", "h100", "--kv-offloading-size", "8GiB"], "--kv-offloading-size: '8GiB' must be a plain number"),
    (["--gpu", "h100", "--kv-offloading-size", "0"], "--kv-offloading-size: 0.0 must be a number of GiB above 0"),
    (["--gpu", "h100", "--kv-cache-memory", "16gb"], "16GB is 16 * 10**9 bytes; write 16GB"),
    (["--gpu", "h100", "--kv-cache-memory", "16"], "is 16 bytes, less than one block"),
    (["--gpu", "h100", "--kv-cache-memory", "16"], "write 16GiB"),
    (["--gpu", "h100", "--kv-cache-memory-bytes", "16 gigs"], "16GiB is 16 * 2**30 bytes, 16GB is 16 * 10**9"),
    (["--gpu", "h100", "--kv-cache-dtype", "fp4"], "kv_cache_dtype must be one of auto"),
    (["--gpu", "h100", "--engine", "vllm-0.33"], "unknown engine"),
    (["--gpu", "h100", "--max-loras", "4"], "no effect without --enable-lora"),
    (["--gpu", "h100", "--enable-lora", "--max-lora-rank", "17"], "max_lora_rank must be one of"),
    (["--gpu", "h100", "--mean-tokens", "none"], "--mean-tokens"),
    (["--gpu", "h100", "--free-memory-gib", "90"], "must not exceed"),
    ([], "no GPU: give --gpu"),
    # one of several values
    (["--gpu", "h100,foo"], "--gpu: unknown GPU 'foo'; known: "),
    (["--gpu", "h100,h1000"], "--gpu: unknown GPU 'h1000'; nearest: H100-SXM"),
    (["--gpu", "h100", "--engine", "vllm-0.19,vllm-9"], "--engine: unknown engine 'vllm-9'; nearest: "),
    (
        ["--gpu", "h100", "--gpu-memory-utilization", "0.9:1.2:0.1"],
        "gpu_memory_utilization must lie in (0, 1], got 1.1",
    ),
    (["--gpu", "h100", "--dtype", "bfloat16,foo"], "--dtype: 'foo' must be one of auto"),
    (["--gpu", "h100", "--kv-cache-dtype", "auto,fp4"], "kv_cache_dtype must be one of auto"),
    (["--gpu", "h100", "-tp", "1,0"], "--tensor-parallel-size: 0 must be at least 1"),
    (["--gpu", "h100", "--max-model-len", "8k,8q"], "--max-model-len: '8q' must be a whole number"),
    (["--gpu", "h100", "--enable-lora", "--max-lora-rank", "16,17"], "max_lora_rank must be one of"),
    (["--gpu", "h100", "--usage-context", "api_server,me"], "usage_context must be one of api_server, llm_class"),
    (["--gpu", "h100,l4", "--free-memory-gib", "70"], "must not exceed what L4 has in all (22.03 GiB)"),
]
REFUSED: list[tuple[list[str], list[str], str]] = [
    (["-tp", "3"], ["-tp", "1,3"], "choose one of 1, 2, 4, 8, 16"),
    (
        ["-tp", "3"],
        ["-tp", "1,3"],
        "Total number of attention heads (32) must be divisible by tensor parallel size (3).",
    ),
    (["--pp", "33"], ["--pp", "1,33"], "pipeline_parallel_size must lie in [1, 32]"),
    (["--swap-space", "4"], ["--swap-space", "4", "--engine", "vllm-0.17,vllm-0.32"], "it went with vLLM 0.18"),
    (["--v0"], ["--v0", "--engine", "vllm-0.9,vllm-0.32"], "has no V0 engine"),
    (
        ["--max-num-batched-tokens", "64", "--max-num-seqs", "128"],
        ["--max-num-batched-tokens", "64,2048", "--max-num-seqs", "128"],
        "greater than or equal to",
    ),
    (
        ["--engine", "vllm-0.10", "--kv-offloading-size", "8"],
        ["--engine", "vllm-0.10,vllm-0.32", "--kv-offloading-size", "8"],
        "kv_offloading_size is no option of vLLM 0.10",
    ),
]
"""What vLLM refuses: the flags alone, the same among others that start, and the words."""


@pytest.mark.parametrize(("alone", "among", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_vllm_refuses_is_told_alone_and_among_others_and_ends_with_4(
    alone: list[str], among: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*MODEL, "--gpu", "h100", "--max-model-len", "8k"]
    assert main([*asked, *alone]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 1
    assert words in captured.err
    assert main([*asked, *among, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert sorted(point["verdict"] for point in points) == [DOES_NOT_START, OK]
    assert any(words in point["reason"] for point in points)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["-tp", "3,5"], 4),
        (["-tp", "1,3"], 0),
        (["--gpu-memory-utilization", "0.1,0.2"], 4),
        (["--gpu-memory-utilization", "0.1,0.9"], 0),
    ],
)
def test_a_table_ends_with_4_only_if_none_of_its_plans_starts(
    flags: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MODEL, "--gpu", "h100", *flags]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "Why some do not start" in captured.out


@pytest.mark.parametrize(("flags", "words"), BROKEN, ids=lambda value: value[:30] if isinstance(value, str) else None)
def test_a_broken_setting_gives_one_clear_error(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MODEL, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 1
    assert words in captured.err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"num_hidden_layers": None}, 2, "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "magic"}}, 2, "magic"),
        ({"architectures": ["MagicForCausalLM"]}, 2, "MagicForCausalLM"),
        ({"num_key_value_heads": 7}, 2, "num_key_value_heads"),
    ],
)
def test_a_broken_config_gives_one_clear_error(
    change: dict[str, Any], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {key: value for key, value in {**WIDE, **change}.items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), "utf-8")
    assert main(["memory", "--model", str(path), "--gpu", "h100"]) == code
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 1
    assert words in captured.err
    assert str(path) in captured.err, "the file as it was given"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.json", None, "no such file"),
        ("gone/config.json", None, "no such file"),
        ("config.json", "", "line 1: not valid JSON"),
        ("config.json", "{'a': 1}", "line 1: not valid JSON"),
        ("config.json", "[1]", "holds list"),
        (".", None, "no config.json in this folder"),
    ],
)
def test_a_model_s_file_that_is_missing_or_broken_is_unreadable(
    name: str, content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content, "utf-8")
    assert main(["memory", "--model", str(path), "--gpu", "h100"]) == 3
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("error: ")) == ("", 1)
    assert f"--model: {path}" in captured.err
    assert words in captured.err


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ("m/config.json", "m"),
        ("./m/config.json", "m"),
        ("m", "m"),
        ("./m", "./m"),
        ("m/other.json", "m"),
        ("config.json", "."),
    ],
)
def test_a_config_s_plan_is_called_and_served_as_it_was_given(
    given: str, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    for name in ("config.json", "m/config.json", "m/other.json"):
        (tmp_path / name).write_text(json.dumps(WIDE), "utf-8")
    made = wt.memory_plan(given, "h100", dtype="float16", tensor_parallel_size=8)
    assert made.serve_command.startswith(f"vllm serve {served} ")
    assert "--dtype float16" in made.serve_command
    assert made.text().startswith(f"{given} on 8 x ")
    assert made.to_dict()["model"] == given


def test_a_path_in_the_home_folder_is_served_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(WIDE), "utf-8")
    made = wt.memory_plan("~/config.json", "h100", tensor_parallel_size=8)
    assert made.serve_command.startswith(f"vllm serve {tmp_path} "), "a shell does not expand a quoted ~"


TEN: list[tuple[dict[str, Any], list[str], int, tuple[str, ...]]] = [
    (
        {"num_hidden_layers": None},
        [],
        2,
        ("model", "lacks num_hidden_layers", "take the model's own, whole config.json"),
    ),
    ({"num_hidden_layers": "many"}, [], 2, ("num_hidden_layers", "'many'", "at least 1")),
    ({"num_key_value_heads": 7}, [], 2, ("num_attention_heads (64)", "multiple of", "num_key_value_heads (7)")),
    ({}, ["-tp", "3"], 4, ("tensor_parallel_size 3", "64 attention heads", "choose one of 1, 2, 4, 8, 16")),
    ({"quantization_config": {"quant_method": "magic"}}, [], 2, ("quantisation magic", "modelled: fp8, awq, gptq")),
    ({}, ["--num-gpu-blocks-override", "-5"], 2, ("--num-gpu-blocks-override: -5", "at least 1")),
    ({}, ["--gpu-memory-utilization", "92"], 2, ("got 92", "(0, 1]", "give 0.92")),
    ({}, ["--gpu-memory-gib", "80GB"], 2, ("'80GB'", "plain number of GiB", "so write 74.5058")),
    ({}, ["--kv-cache-memory", "16gb"], 2, ("'16gb'", "16GiB is 16 * 2**30 bytes", "write 16GB")),
    ({}, ["--gpu", "h1000"], 2, ("unknown GPU 'h1000'", "nearest: H100-SXM", "windtunnel gpus lists all")),
]


@pytest.mark.parametrize(("change", "flags", "code", "words"), TEN, ids=lambda value: str(value)[:40])
def test_ten_broken_deployments_give_one_error_with_value_range_and_remedy(
    change: dict[str, Any],
    flags: list[str],
    code: int,
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**WIDE, **change}.items() if value is not None}), "utf-8")
    assert main(["memory", "--model", str(path), "--gpu", "h100", *flags]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 1
    assert all(word in captured.err for word in words), captured.err


def test_a_negative_pool_is_a_verdict_with_the_numbers_and_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--gpu", "h100", "--gpu-memory-utilization", "0.1", "--max-model-len", "4096"]) == 4
    captured = capsys.readouterr()
    assert captured.err == ""
    text = " ".join(captured.out.split())
    assert "does not start No available memory for the cache blocks." in text
    assert re.search(r"Of the 7.92 GiB that gpu_memory_utilization allows, .* GiB too much", text)
    assert re.search(r"Each of these alone would help set gpu_memory_utilization to 0\.\d+ ok", text)


def test_the_installed_command_ends_with_the_code_and_one_line_of_error() -> None:
    command = [sys.executable, "-m", "windtunnel", *MODEL, "--gpu", "h100,h1000"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (made.returncode, made.stdout) == (2, "")
    assert made.stderr.startswith("error: ")
    assert "--gpu: unknown GPU 'h1000'; nearest: H100-SXM" in made.stderr.splitlines()[0]


def test_it_imports_neither_torch_nor_plotly_nor_pandas() -> None:
    code = (
        "import sys; from windtunnel.cli.main import main; code = main(sys.argv[1:]);"
        "print(code, [name for name in ('torch', 'plotly', 'pandas', 'scipy') if name in sys.modules])"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, *MODEL, "--gpu", "h100"], capture_output=True, text=True, check=True
    )
    assert made.stdout.splitlines()[-1] == "0 []"


def refused(read: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as info:  # noqa: PT011 -- the message is looked at
        read()
    return str(info.value)


def test_the_pages_hold_their_figures_and_need_no_network(tmp_path: Path) -> None:
    single, sweep = tmp_path / "plan.html", tmp_path / "sweep.html"
    plan("llama-3.3-70b", mean_tokens=2000).report(single)
    made = wt.memory_sweep("llama-3.1-8b", "h100", gpu_memory_utilization="0.8:0.98:0.06", kv_cache_dtype="auto,fp8")
    made.report(sweep)
    for path, names in ((single, ["waterfall"]), (sweep, ["tokens", "concurrency", "margin", "waterfall"])):
        page = path.read_text("utf-8")
        data = page.split('id="figures">')[1].split("</script>")[0]
        assert [drawn["name"] for drawn in json.loads(data)] == names
        assert "default-src 'none'" in page
        assert 'src="http' not in page
    fall = json.loads(single.read_text("utf-8").split('id="figures">')[1].split("</script>")[0])[0]
    assert any("weights" in name for name in fall["data"][0]["y"])


@pytest.mark.parametrize("asked", [{}, {"gpu_memory_utilization": 0.99}, {"engine": "vllm-0.19"}])
def test_words_at_the_lines_of_the_waterfall_are_in_nobody_s_way(asked: dict[str, Any]) -> None:
    drawn = waterfall(wt.memory_plan("llama-3.1-8b", "h100", **asked).judged.plan)
    top, num_bars = drawn.layout["yaxis"]["range"][1], len(drawn.data[0]["y"])
    words = drawn.layout["annotations"]
    assert [word["text"] for word in words] == ["total", "budget ends"]
    assert all(word["xanchor"] == "right" for word in words), "the edge cuts nothing off"
    assert all(top <= word["y"] <= -1 for word in words), "above the first bar, half of which is above its middle, 0"
    assert words[0]["y"] != words[1]["y"], "the lines can be close together"
    assert all(line["y0"] == num_bars - 0.5 for line in drawn.layout["shapes"])


def test_the_waterfall_fills_the_card() -> None:
    from windtunnel.reports.memory_figures import parts_of

    for engine in ("vllm-0.19", "vllm-0.32"):
        made = plan(engine=engine).judged.plan
        short = made.total_bytes - sum(part.num_bytes for part in parts_of(made))
        assert 0 <= short < GIB / 200, "less than a block is not drawn"


def test_a_simulation_says_why_it_cannot_price_a_model_whose_memory_it_can_plan() -> None:
    assert plan("qwen3.5-35b-a3b", "h200").verdict == OK
    message = refused(lambda: wt.simulate("chat-8b-h100", model="qwen3.5-35b-a3b", gpu="h200"))
    assert "cannot derive step times" in message
    assert "its memory can be planned" in message


@pytest.mark.parametrize(
    "flags",
    [
        ["--gpu-memory-utilization", "nan:1:0.1"],
        ["--gpu-memory-utilization", "0.8:0.9:nan"],
        ["--gpu-memory-utilization", "0.5:inf:0.1"],
        ["--gpu-memory-utilization", "0:1e999999999:1e-999999"],
        ["--gpu-memory-gib", "1:nan:3"],
        ["--gpu-memory-gib", "1e300"],
        ["--gpu-memory-gib", "85899345920"],
        ["--cpu-offload-gb", "1e300"],
        ["--engine", "vllm-0.8", "--v0", "--swap-space", "1e300"],
    ],
)
def test_numbers_that_no_card_has_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--model", "llama-3.1-8b", "--gpu", "h100", *flags]) == 2
    assert "bug in windtunnel" not in capsys.readouterr().err


def test_no_output_takes_the_place_of_what_it_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vllm.log").write_text("INFO GPU KV cache size: 42,656 tokens\n")
    before = Path("vllm.log").read_text()
    arguments = ["memory", "--model", "llama-3.1-8b", "--gpu", "h100", "--from-log", "vllm.log"]
    assert main([*arguments, "--save-correction", "vllm.log"]) == 2
    assert main([*arguments, "--html", "x", "--save-correction", "x"]) == 2
    assert "name" in capsys.readouterr().err
    assert Path("vllm.log").read_text() == before


def test_folders_of_outputs_are_made_but_only_for_something_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*MODEL, "--gpu", "h1000", "--html", "pages/deep/a.html"]) == 2
    assert not Path("pages").exists()
    outputs = ["--html", "pages/deep/a.html", "--save-correction", "learnt/ours.json", "-q"]
    assert main(["memory", "--gpu", "h100", "--from-log", str(log), *outputs]) == 0
    assert Path("pages/deep/a.html").read_text("utf-8").casefold().startswith("<!doctype html>")
    assert "correction_bytes" in json.loads(Path("learnt/ours.json").read_text())
    Path("file").write_text("")
    capsys.readouterr()
    assert main([*MODEL, "--gpu", "h100", "--html", "file/a.html"]) == 2
    assert "file is a file, not a folder" in capsys.readouterr().err

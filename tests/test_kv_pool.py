"""The KV pool: exact where arithmetic decides, close to real start-ups, and helpful when it does not start."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.deployment.gpu import GIB, GpuSpec, load_gpu
from windtunnel.sim.deployment.memory import InfeasibleDeployment, KvPool, kv_pool, num_kv_blocks
from windtunnel.sim.deployment.model import ModelSpec, load_model, model_from_config
from windtunnel.sim.deployment.versions import profile

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
STARTUPS = SHARED / "memory" / "startups.csv"
B300_RUNS = SHARED / "steps" / "vllm_b300_runs.csv"


def pool(model: str | ModelSpec = "llama-3.1-8b", gpu: str | GpuSpec = "h100", **changes: Any) -> KvPool:
    settings: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024, "max_model_len": 8192, **changes}
    spec = load_model(model) if isinstance(model, str) else model
    return kv_pool(spec, load_gpu(gpu) if isinstance(gpu, str) else gpu, **settings)


def test_sixteen_gib_hold_what_vllm_logged_for_qwen() -> None:
    found = pool("qwen2.5-7b", kv_cache_memory_bytes=16 * GIB)
    assert (found.num_gpu_blocks, found.kv_cache_tokens) == (18_724, 299_584)
    assert found.source == "kv_cache_memory_bytes"


def test_a_3090_s_pool_gives_the_logged_concurrency() -> None:
    found = pool(gpu="rtx-3090", max_model_len=20_000, kv_cache_memory_bytes=1952 * 16 * 131_072)
    assert found.num_gpu_blocks == 1952
    assert round(found.max_concurrency, 2) == 1.56


def test_a_context_longer_than_the_pool_names_vllm_s_words_and_the_length_that_fits() -> None:
    with pytest.raises(
        InfeasibleDeployment, match=r"To serve at least one request with the model's max seq len \(29000\), \(3\.54 GiB"
    ) as info:
        pool(gpu="rtx-3090", max_model_len=29_000, num_gpu_blocks_override=1478)
    assert "the estimated maximum model length is 23632." in str(info.value), "the null block holds nothing"
    assert "raise num_gpu_blocks_override to 1814" in str(info.value)
    assert pool(gpu="rtx-3090", max_model_len=29_000, num_gpu_blocks_override=1814).num_gpu_blocks == 1814
    assert info.value.largest_max_model_len == 1477 * 16


def test_a_million_tokens_need_24_gib_where_each_takes_24_kib() -> None:
    wide = replace(load_model("qwen3-30b-a3b"), name="wide", num_key_value_heads=8, max_model_len=1_048_576)
    assert wide.kv_bytes_per_token(8) == 24_576
    settings: dict[str, Any] = {"tensor_parallel_size": 8, "max_model_len": 1_048_576}
    with pytest.raises(InfeasibleDeployment, match=r"\(24\.00 GiB KV cache is needed.* \(9\.97 GiB\)") as info:
        pool(wide, kv_cache_memory_bytes=round(9.97 * GIB), **settings)
    assert info.value.largest_max_model_len == pytest.approx(435_600, abs=32)
    enough = int(re.findall(r"raise kv_cache_memory_bytes to (\d+)", str(info.value))[0])
    assert pool(wide, kv_cache_memory_bytes=enough, **settings).num_gpu_blocks == 65_537
    with pytest.raises(InfeasibleDeployment):
        pool(wide, kv_cache_memory_bytes=enough - 1, **settings)


@pytest.mark.parametrize("block_size", [16, 128])
def test_the_message_of_a_context_that_is_a_little_too_long_does_not_contradict_itself(block_size: int) -> None:
    """Within the null block: 659 blocks are usable, and lengths up to 660 blocks must not be told that they fit."""
    tight: dict[str, Any] = {"tensor_parallel_size": 2, "block_size": block_size}
    with pytest.raises(InfeasibleDeployment) as info:
        pool("llama-3.3-70b", max_model_len=100_000, **tight)
    largest = info.value.largest_max_model_len
    for length in (largest + 1, largest + block_size, largest + 2 * block_size):
        with pytest.raises(InfeasibleDeployment) as info:
            pool("llama-3.3-70b", max_model_len=length, **tight)
        said = str(info.value)
        asked = int(re.findall(r"max seq len \((\d+)\)", said)[0])
        stored = int(re.findall(r"maximum model length is (\d+)\.", said)[0])
        needed, there = (float(size) for size in re.findall(r"\(([\d.]+) GiB", said))
        blocks = re.findall(r"takes ([\d,]+) blocks, .* has ([\d,]+)\.", said)[0]
        assert asked == length > stored == largest
        assert int(blocks[0].replace(",", "")) > int(blocks[1].replace(",", ""))
        assert needed > there
    assert pool("llama-3.3-70b", max_model_len=largest, **tight).num_gpu_blocks * block_size == largest + block_size


def test_a_pool_of_507_blocks_is_too_small_for_16k() -> None:
    with pytest.raises(InfeasibleDeployment, match="maximum model length is 8096"):
        pool("deepseek-coder-6.7b", tensor_parallel_size=2, max_model_len=16_384, num_gpu_blocks_override=507)


def test_a_user_s_3072_tokens_take_168_mib_of_a_small_qwen() -> None:
    assert 3072 * load_model("qwen2.5-7b").kv_bytes_per_token() == 168 * 2**20


def test_the_bytes_add_up() -> None:
    found = pool()
    parts = found.weights_bytes + found.activation_bytes + found.non_torch_bytes + found.cuda_graphs_bytes
    assert found.requested_bytes == math.ceil(found.total_bytes * 0.92)
    assert found.kv_bytes == found.requested_bytes - parts
    assert 0 <= found.kv_bytes - found.kv_cache_tokens * found.kv_bytes_per_token < 16 * found.kv_bytes_per_token


def test_an_8b_on_an_80_gb_card_keeps_about_58_gib() -> None:
    found = pool(gpu_memory_utilization=0.95, enforce_eager=True)
    assert found.kv_bytes / GIB == pytest.approx(58.11, abs=0.05)


def test_a_70b_does_not_fit_one_card_and_the_remedy_starts() -> None:
    with pytest.raises(InfeasibleDeployment, match="CUDA out of memory") as info:
        pool("llama-3.3-70b")
    size = info.value.smallest_tensor_parallel_size
    assert size is not None
    assert pool("llama-3.3-70b", tensor_parallel_size=size).num_gpu_blocks > 0
    assert f"raise tensor_parallel_size to {size}" in str(info.value)
    assert "lower max_model_len" not in str(info.value)


def test_the_remedies_of_a_long_context_start_and_nothing_more_would() -> None:
    tight = {"gpu": "l4", "max_num_batched_tokens": 2048, "max_num_seqs": 256, "gpu_memory_utilization": 0.9}
    with pytest.raises(InfeasibleDeployment, match="set kv_cache_dtype to fp8") as info:
        pool(max_model_len=40_000, **tight)
    largest = info.value.largest_max_model_len
    assert pool(max_model_len=largest, **tight).num_gpu_blocks > 0
    with pytest.raises(InfeasibleDeployment):
        pool(max_model_len=largest + 1, **tight)


def test_what_determined_the_pool_is_said() -> None:
    assert pool().source == "formula"
    assert any("estimate" in sentence for sentence in pool().assumptions)
    override = pool(num_gpu_blocks_override=1000)
    assert (override.num_gpu_blocks, override.source) == (1000, "num_gpu_blocks_override")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_memory_utilization": 1.2}, r"gpu_memory_utilization must lie in \(0, 1\], got 1.2"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes must be at least 1, got -1"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool(**changes)


@given(
    utilization=st.floats(0.5, 0.97),
    budget=st.integers(512, 16_384),
    seqs=st.integers(1, 1024),
    block_size=st.sampled_from([8, 16, 32, 128]),
)
def test_more_memory_or_less_work_space_never_costs_blocks(
    utilization: float, budget: int, seqs: int, block_size: int
) -> None:
    settings: dict[str, Any] = {
        "gpu_memory_utilization": utilization,
        "max_num_batched_tokens": budget,
        "max_num_seqs": seqs,
        "block_size": block_size,
    }
    blocks = pool(**settings).num_gpu_blocks
    assert pool(**settings | {"gpu_memory_utilization": utilization + 0.02}).num_gpu_blocks >= blocks
    assert pool(**settings | {"max_num_batched_tokens": budget + 512}).num_gpu_blocks <= blocks
    assert pool(**settings | {"max_num_seqs": seqs + 64}).num_gpu_blocks <= blocks
    fp8 = pool(**settings, kv_cache_dtype="fp8").num_gpu_blocks
    assert fp8 in (2 * blocks, 2 * blocks + 1)


@given(kv_bytes=st.integers(0, 200 * GIB), tensor_parallel_size=st.sampled_from([1, 2, 4, 8]))
def test_blocks_are_the_most_that_fit(kv_bytes: int, tensor_parallel_size: int) -> None:
    model = load_model("llama-3.1-8b")
    blocks = num_kv_blocks(model, kv_bytes, tensor_parallel_size=tensor_parallel_size)
    page = 16 * model.kv_bytes_per_token(tensor_parallel_size)
    assert blocks * page <= kv_bytes < (blocks + 1) * page


def _dense_startups() -> list[tuple[dict[str, str], ModelSpec, GpuSpec, dict[str, Any]]]:
    """Unquantised start-ups of bundled models on cards of the table, with what the pool they logged depends on."""
    with STARTUPS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["kv_avail_gib"] and row["kv_tokens"] and row["tp"]]
    found = []
    for row in rows:
        if row["quant"] or row["pp"] != "1.0":
            continue
        try:
            model, gpu = load_model(row["model"]), load_gpu(row["gpu"])
        except ValueError:
            continue
        if model.layers:
            continue
        model = replace(model, dtype="float32") if row["dtype"] == "float32" else model
        fp8 = row["kv_dtype"].startswith("fp8")
        split = {"tensor_parallel_size": int(float(row["tp"])), "kv_cache_dtype": "fp8" if fp8 else "auto"}
        found.append((row, model, gpu, split))
    return found


@pytest.mark.skipif(not STARTUPS.exists(), reason="needs the shared start-up logs")
def test_blocks_follow_from_the_logged_bytes() -> None:
    """Exact to the two digits that logs print; with several ranks the smallest pool counts, of which one is logged."""
    compared = 0
    for row, model, _, split in _dense_startups():
        low, high = (
            num_kv_blocks(model, round((float(row["kv_avail_gib"]) + rounding) * GIB), **split)
            for rounding in (-0.0051, 0.0051)
        )
        other_ranks = 0.9998 if split["tensor_parallel_size"] > 1 else 1.0
        assert low * other_ranks <= float(row["kv_tokens"]) / 16 <= high, row["source"]
        compared += 1
    assert compared >= 50


@pytest.mark.skipif(not STARTUPS.exists(), reason="needs the shared start-up logs")
def test_the_estimated_pool_is_near_that_of_real_start_ups() -> None:
    """Versions 0.18 and 0.19 on NVIDIA cards, whose graphs were outside the budget."""
    errors = []
    for row, model, gpu, split in _dense_startups():
        if not "0.18" <= row["vllm_version"] < "0.20" or gpu.name == "MI300X":
            continue
        found = kv_pool(
            model,
            gpu,
            gpu_memory_utilization=float(row["gmu"]),
            max_num_batched_tokens=8192,
            max_num_seqs=1024,
            max_model_len=2048,
            version=profile(".".join(row["vllm_version"].split(".")[:2])),
            **split,
        )
        errors.append(abs(found.kv_cache_tokens / float(row["kv_tokens"]) - 1))
    errors.sort()
    assert len(errors) >= 30
    assert errors[len(errors) // 2] < 0.002
    assert errors[-2] < 0.006
    assert errors[-1] < 0.05  # a 72B on two cards, where 3 GiB are left


@pytest.mark.skipif(not B300_RUNS.exists(), reason="needs the shared step logs")
def test_blocks_of_a_model_and_card_that_nothing_was_fitted_to() -> None:
    """Qwen3-32B on one to eight B300, vLLM 0.20.1, graphs inside the budget: within 0.5 % of the blocks it had."""
    with B300_RUNS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        found = pool(
            "qwen3-32b",
            "b300",
            tensor_parallel_size=int(row["tp"]),
            gpu_memory_utilization=float(row["gpu_memory_utilization"]),
            max_num_batched_tokens=int(row["max_num_batched_tokens_live"]),
            max_num_seqs=int(row["max_num_seqs_live"]),
            max_model_len=int(row["max_model_len"]),
            version=profile("0.20.1"),
        )
        assert found.num_gpu_blocks == pytest.approx(int(row["total_kv_blocks"]), rel=0.005)
    assert [int(row["tp"]) for row in rows] == [1, 2, 4, 8]


def test_a_model_of_many_experts_reserves_their_work_space() -> None:
    dense = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    eight, one = (
        pool(model_from_config(dense | {"num_experts_per_tok": count}, "moe")).activation_bytes for count in (8, 1)
    )
    assert eight - one == 7 * 2 * 8192 * 2048 * 2

"""Models of every family against what vLLM builds for them, and against real start-ups."""

from __future__ import annotations

import copy
import csv
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO_ROOT
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.cost.profile import load_profile, save_profile
from windtunnel.sim.cost.roofline import RooflineCost
from windtunnel.sim.deployment.families import ARCHITECTURES
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.hf_config import WRAPPERS, model_from_config
from windtunnel.sim.deployment.kv_layout import KvLayout, kv_layout
from windtunnel.sim.deployment.model import ModelSpec, UnsupportedModel, bundled_models, load_model
from windtunnel.sim.deployment.model_spec import layers_of_stage

GIB = 2**30
VLLM = json.loads((REPO_ROOT / "tests" / "golden" / "vllm_memory.json").read_text())
MODELS_JSON = REPO_ROOT / "sim" / "deployment" / "models.json"
STARTUPS = REPO_ROOT.parent / "shared" / "memory" / "startups.csv"
CONFIGS: dict[str, dict[str, Any]] = {
    entry["id"]: entry["config"] for entry in json.loads(MODELS_JSON.read_text())["models"]
}


@cache
def unquantised(name: str) -> ModelSpec:
    return model_from_config(without_quantisation(CONFIGS[name]), name, dtype="bfloat16")


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    bare = {key: value for key, value in config.items() if key != "quantization_config"}
    if "text_config" in bare:
        bare["text_config"] = without_quantisation(bare["text_config"])
    return bare


def recorded_weights() -> dict[str, list[list[Any]]]:
    by_model: dict[str, list[list[Any]]] = {}
    for name, *row in VLLM["weights"][1:]:
        by_model.setdefault(name, []).append(row)
    return by_model


@pytest.mark.parametrize("name", recorded_weights())
def test_every_rank_holds_the_bytes_that_vllm_allocates(name: str) -> None:
    model = unquantised(name)
    for tensor, pipeline, rank, experts, weights, rotary in recorded_weights()[name]:
        held = model.weight_bytes(
            tensor, pipeline_parallel_size=pipeline, pipeline_rank=rank, expert_parallel=bool(experts)
        )
        assert (held, model.rotary_cache_bytes()) == (weights, rotary), (tensor, pipeline, rank, experts)


@pytest.mark.parametrize("row", VLLM["layouts"][1:], ids=lambda row: f"{row[0]}-tp{row[1]}")
def test_groups_blocks_and_concurrency_are_those_of_vllm(row: list[Any]) -> None:
    name, size, block_size, in_flight, prefix_caching, num_blocks, tokens, concurrency, groups = row
    model = replace(unquantised(name), state_bytes=(0, 4))  # recorded on the CPU platform
    layout = kv_layout(
        model,
        tensor_parallel_size=size,
        block_size=16 if "latent attention" in str(model.layer_kinds()) else 32,
        max_num_batched_tokens=in_flight,
        max_concurrent_batches=1,
        enable_prefix_caching=prefix_caching,
    )
    blocks = layout.num_blocks(400 * GIB)
    assert layout.block_size == block_size
    assert (blocks, layout.logged_tokens(blocks, 32_768)) == (num_blocks, tokens)
    assert layout.max_concurrency(blocks, 32_768) == concurrency
    ours = [(group.num_layers, group.block_size, group.page_bytes) for group in layout.groups]
    theirs = [(layers, block, page) for layers, block, page in groups]
    if len({page for _, _, page in ours}) == len({page for _, _, page in theirs}) == 1 < len(groups):
        assert sorted(ours) == sorted(theirs)
    assert sum(layers for layers, _, _ in ours) == sum(layers for layers, _, _ in theirs)


SIZES_OF_NAMES = {
    "deepseek-ai/DeepSeek-V3": (671, 37),
    "deepseek-ai/DeepSeek-R1": (671, 37),
    "moonshotai/Kimi-K2-Instruct": (1000, 32),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (80, 3),
    "Qwen/Qwen3.5-35B-A3B": (35, 3),
    "Qwen/Qwen3.5-122B-A10B": (122, 10),
    "Qwen/Qwen3.5-397B-A17B": (397, 17),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": (480, 35),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (109, 17),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (400, 17),
    "MiniMaxAI/MiniMax-M2.5": (230, 10),
    "zai-org/GLM-4.5": (355, 32),
    "zai-org/GLM-4.5-Air": (106, 12),
    "zai-org/GLM-5": (744, 40),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.2),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (120, 12),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (550, 55),
    "ibm-granite/granite-4.0-h-small": (32, 9),
    "ibm-granite/granite-4.0-h-tiny": (7, 1.4),
    "google/gemma-4-26B-A4B": (26, 4),
    "XiaomiMiMo/MiMo-V2-Flash": (309, 15),
}


@pytest.mark.parametrize(("name", "billions"), SIZES_OF_NAMES.items())
def test_total_and_active_parameters_are_those_in_the_name(name: str, billions: tuple[float, float]) -> None:
    """Cards round, and some leave the embeddings out of what is active."""
    total, active = billions
    model = load_model(name)
    tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size / 1e9
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.03)
    assert model.num_active_parameters / 1e9 - tables <= 1.1 * active
    assert model.num_active_parameters / 1e9 >= 0.9 * active


@pytest.mark.parametrize("name", bundled_models())
def test_every_bundled_model_splits_and_has_a_cache(name: str) -> None:
    model = load_model(name)
    for size in model.tensor_parallel_sizes(8):
        layout = kv_layout(model, tensor_parallel_size=size)
        assert layout.num_blocks(80 * GIB) > 1
        assert model.weight_bytes(size) > 0


def test_latent_attention_is_kept_whole_by_every_gpu() -> None:
    deepseek = load_model("deepseek-v3")
    assert {deepseek.kv_bytes_per_token(size) for size in (1, 2, 8, 16)} == {61 * (512 + 64) * 2}


def test_heads_fewer_than_gpus_are_replicated_in_every_layer() -> None:
    gemma = load_model("gemma-3-4b")
    assert gemma.kv_bytes_per_token(4) == gemma.kv_bytes_per_token(8)


def test_a_profile_of_a_multimodal_model_is_read_back_as_it_was(tmp_path: Path) -> None:
    cost = RooflineCost(load_model("qwen3-vl-2b"), load_gpu("h100"))
    save_profile(cost, tmp_path / "profile.json")
    again = load_profile(tmp_path / "profile.json")
    assert isinstance(again, RooflineCost)
    assert again.model == cost.model


def test_stages_of_a_pipeline_hold_the_layers_that_vllm_gives_them() -> None:
    assert [layers_of_stage(80, rank, 3) for rank in range(3)] == [(0, 27), (27, 54), (54, 80)]
    assert [layers_of_stage(61, rank, 4) for rank in range(4)] == [(0, 15), (15, 30), (30, 46), (46, 61)]
    with pytest.raises(ValueError, match=r"pipeline_parallel_size must lie in \[1, 2\] .*got 3"):
        layers_of_stage(2, 0, 3)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gemma-3-27b", "nemotron-3-nano"])
def test_no_layer_of_a_pipeline_is_lost_or_held_twice(name: str) -> None:
    model = replace(unquantised(load_model(name).name), on_every_stage=(), towers=())
    stages = [model.weight_bytes(1, pipeline_parallel_size=4, pipeline_rank=rank) for rank in range(4)]
    again = model.embedding_bytes() if model.tie_word_embeddings else 0
    assert sum(stages) == model.weight_bytes() + again


def test_experts_are_shared_out_whole_or_in_columns_over_all_engines() -> None:
    model = unquantised("Qwen/Qwen3-30B-A3B")
    shared = model.weight_bytes(2, data_parallel_size=4)
    assert shared == model.weight_bytes(2, data_parallel_size=4, expert_parallel=True)
    experts = model.num_moe_layers * model.num_experts * model.expert_bytes()
    assert model.weight_bytes(2) - shared == experts // 2 - experts // 8


def test_experts_that_engines_cannot_share_evenly_are_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"Qwen3-30B-A3B: .*768.* 5 GPUs.*expert_parallel"):
        load_model("qwen3-30b-a3b").weight_bytes(1, data_parallel_size=5)


def test_a_split_that_a_hybrid_model_does_not_allow_names_those_it_does() -> None:
    with pytest.raises(ValueError, match=r"Llama-4-Scout.* tensor_parallel_size 3.*choose one of 1, 2, 4, 8"):
        load_model("llama-4-scout").weight_bytes(3)
    with pytest.raises(ValueError, match=r"gemma-2-2b.* tensor_parallel_size 16.*choose one of 1, 2, 4, 8"):
        load_model("gemma-2-2b").kv_bytes_per_token(16)


def test_what_the_weights_leave_out_is_named() -> None:
    assert "prediction layers (num_nextn_predict_layers = 1)" in load_model("deepseek-v3").not_counted[0]
    scout = copy.deepcopy(CONFIGS["meta-llama/Llama-4-Scout-17B-16E-Instruct"])
    del scout["vision_config"]
    assert model_from_config(scout, "scout").not_counted == ("vision tower",)
    gemma = copy.deepcopy(CONFIGS["google/gemma-3-4b-it"])
    gemma["audio_config"] = {"hidden_size": 1024}
    assert model_from_config(gemma, "gemma").not_counted == ("audio tower",)


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma-3-27b", "qwen3.5-27b", "gpt-oss-20b", "glm-4.5-air"])
def test_step_times_of_other_layers_are_refused_with_what_is_possible(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"roofline cannot derive step times, because .*memory can be planned"):
        RooflineCost(load_model(name), load_gpu("h200"))


def test_mixed_precisions_are_planned_but_not_priced() -> None:
    kept = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}
    llama = {**CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]}
    mixed = model_from_config({**llama, "quantization_config": kept}, "mixed")
    plain = model_from_config({**llama, "quantization_config": {"quant_method": "fp8"}}, "plain")
    assert mixed.weight_bytes() - plain.weight_bytes() == 4096 * 14_336
    with pytest.raises(UnsupportedModel, match="mixes precisions"):
        RooflineCost(mixed, load_gpu("h100"))


LINEAR = {"targets": ["Linear"]}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
SOME_KEPT = ["lm_head", r"re:.*layers\.[01]\.mlp.*", "model.layers.2.self_attn.o_proj"]


def compressed(weights: dict[str, Any], ignore: list[str] | None = None) -> dict[str, Any]:
    group = {**LINEAR, "weights": weights, "input_activations": {"num_bits": 8} if weights["num_bits"] == 8 else None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ignore or ["lm_head"],
    }


VLLM_QUANTISED = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, 2_554_667_008, 638_722_048),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 2_554_667_008, 638_722_048),
    ({"quant_method": "fp8"}, 2_973_835_408, 743_514_256),
    (compressed(FP8), 2_974_523_464, 743_784_520),
    (compressed(INT8), 2_974_523_464, 743_784_520),
    (compressed(INT8, SOME_KEPT), 3_343_343_688, 835_952_712),
    (compressed(INT4), 2_551_259_464, 637_870_408),
]
"""Bytes of all parameters that vLLM 0.32.0 creates for Llama-3.1-8B with four layers, on one GPU and on one of four."""


@pytest.mark.parametrize(("quantisation", "alone", "of_four"), VLLM_QUANTISED)
def test_quantised_layers_take_what_vllm_allocates(quantisation: dict[str, Any], alone: int, of_four: int) -> None:
    """But for the scales of whole tensors: a few numbers a layer."""
    llama = {**CONFIGS["meta-llama/Llama-3.1-8B-Instruct"], "num_hidden_layers": 4}
    model = model_from_config({**llama, "quantization_config": quantisation}, "llama")
    for size, allocated in ((1, alone), (4, of_four)):
        assert 0 <= allocated - model.weight_bytes(size) < 4 * 100


def test_only_the_experts_of_gpt_oss_are_quantised_and_their_kernels_pad_them() -> None:
    model = load_model("gpt-oss-20b")
    experts = 24 * 32 * (3 * 2944 * 3072 * 17 // 32)  # 2880 wide and deep, padded to multiples of 128 and 256
    others = unquantised("openai/gpt-oss-20b").weight_bytes() - 24 * 32 * 3 * 2880 * 2880 * 2
    assert model.weight_bytes() == experts + others


def test_a_quantised_head_is_counted_where_modelopt_does_not_exclude_it() -> None:
    llama = CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]
    both = [
        model_from_config({**llama, "quantization_config": {"quant_method": "modelopt", **how}}, "llama").weight_bytes()
        for how in ({"quant_algo": "FP8"}, {"quant_algo": "FP8", "exclude_modules": ["lm_head"]})
    ]
    assert both[1] - both[0] == 128_256 * 4096


def test_auto_follows_the_kv_cache_that_the_checkpoint_asks_for() -> None:
    model = load_model("nvidia/Llama-3.3-70B-Instruct-FP8")
    assert model.kv_bytes_per_token() == model.kv_bytes_per_token(1, "fp8")
    assert model.kv_bytes_per_token(1, "bfloat16") == 2 * model.kv_bytes_per_token()


def test_a_dequantised_projection_of_latent_attention_is_kept_beside_the_quantised_one() -> None:
    model = load_model("deepseek-v3")
    bare = replace(model, weight_format=None)
    stored = sum(
        parameter.num_elements
        for layer in model.decoder_layers
        for parameter in layer.parameters(model.hidden_size)
        if parameter.keeps_copy
    )
    assert stored == 61 * 128 * (128 + 128) * 512
    assert model.weight_bytes() < bare.weight_bytes() / 2 + 2 * stored + 2 * GIB


def test_multimodal_models_of_a_plain_decoder_are_priced_like_it() -> None:
    seeing, blind = load_model("qwen3-vl-8b"), load_model("qwen3-8b")
    assert seeing.weight_bytes() - blind.weight_bytes() == sum(p.num_elements for p in seeing.towers) * 2
    assert RooflineCost(seeing, load_gpu("h100"))._line == RooflineCost(blind, load_gpu("h100"))._line


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-ai/DeepSeek-V3", {"qk_rope_head_dim": None}, "the config lacks qk_rope_head_dim"),
        ("deepseek-ai/DeepSeek-V3", {"n_routed_experts": -1}, "n_routed_experts must be .* at least 1, got -1"),
        ("deepseek-ai/DeepSeek-V3", {"num_experts_per_tok": 300}, r"\(300\) exceeds num_experts \(256\)"),
        ("deepseek-ai/DeepSeek-V3", {"hidden_size": float("nan")}, "hidden_size must be a whole number.*got nan"),
        ("openai/gpt-oss-20b", {"attention_chunk_size": 128}, "chunked local attention .*is not modelled"),
        ("openai/gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 24 layers"),
        ("openai/gpt-oss-20b", {"num_key_value_heads": 5}, r"\(64\) must be a multiple"),
        (
            "nvidia/Nemotron-H-56B-Base-8K",
            {"hybrid_override_pattern": "MX"},
            "hybrid_override_pattern must have one of",
        ),
        ("nvidia/Nemotron-H-56B-Base-8K", {"hybrid_override_pattern": None}, "lacks hybrid_override_pattern"),
        ("nvidia/Nemotron-H-56B-Base-8K", {"mamba_ssm_cache_dtype": "int3"}, "state's dtype must be one of"),
        ("ai21labs/AI21-Jamba-1.5-Mini", {"attn_layer_period": 0}, "attn_layer_period must be .* at least 1, got 0"),
        ("google/gemma-3-27b-it", {"text_config": {"hidden_size": 64}}, "lacks"),
        ("google/gemma-3-27b-it", {"vision_config": {"hidden_size": 64}}, "vision_config: the config lacks"),
        ("google/gemma-2-2b-it", {"partial_rotary_factor": 3}, r"partial_rotary_factor must lie in \[0, 1\], got 3"),
    ],
)
def test_a_broken_config_is_one_clear_error(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^broken.*({message})"):
        model_from_config({**copy.deepcopy(CONFIGS[name]), **changes}, "broken")


ODD = st.sampled_from(
    [None, True, False, "x", "", -1, 0, 1, 3, 1.5, [], {}, [[]], [1], ["x"], {"a": 1}, 10**30, float("nan"), 2**31]
)


@st.composite
def odd_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A bundled config but for some values, at any depth, of another kind, or some that are missing."""
    made: dict[str, Any] = json.loads(json.dumps(CONFIGS[draw(st.sampled_from(list(CONFIGS)))]))
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = made
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], (dict, list)) and holder[key] and draw(st.booleans()):
                holder = holder[key]
                continue
            if isinstance(holder, dict) and len(holder) > 1 and draw(st.booleans()):
                del holder[key]
            else:
                holder[key] = copy.deepcopy(draw(ODD))
            break
    return made


@given(odd_configs(), st.sampled_from([1, 2, 3, 8]))
def test_an_odd_config_is_planned_or_refused_by_name(odd: dict[str, Any], size: int) -> None:
    try:
        model = model_from_config(odd, "odd")
        layout = kv_layout(model, tensor_parallel_size=size)
    except ValueError as error:
        said = str(error)
    else:
        said = "odd"
        assert model.weight_bytes(size) > 0
        assert layout.num_blocks(GIB) >= 0
    assert said.startswith("odd")
    assert len(said) < 500


def test_every_architecture_has_a_place_in_the_table_of_limits() -> None:
    text = (REPO_ROOT / "docs" / "limits.md").read_text()
    for architecture in (*ARCHITECTURES, *WRAPPERS):
        assert f"`{architecture}`" in text, architecture


MEASURED = {
    "RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic": "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic",
    "redhatai/Llama-3.3-70B-Instruct-quantized.w8a8": "RedHatAI/Llama-3.3-70B-Instruct-quantized.w8a8",
    "RedHatAI/Qwen2.5-7B-Instruct-fp8-dynamic": "RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic",
    "microsoft/phi-4": "microsoft/phi-4",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "ibm-granite/granite-3.3-8b-instruct": "ibm-granite/granite-3.3-8b-instruct",
}
"""Models of the recorded start-ups under the names that we know them by, where these differ or deserve mention."""


def startups() -> Iterator[tuple[ModelSpec, dict[str, str]]]:
    known = {name.casefold() for name in CONFIGS}
    with STARTUPS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = MEASURED.get(row["model"], row["model"])
            if name.casefold() in known and row["tp"] and row["pp"] in ("", "1.0"):
                config = dict(CONFIGS[name]) if name in CONFIGS else {}
                if row["quant"] == "fp8" and name.startswith("meta-llama"):
                    config["quantization_config"] = {"quant_method": "fp8"}
                yield model_from_config(config, name, dtype=row["dtype"] or "auto"), row


needs_startups = pytest.mark.skipif(not STARTUPS.is_file(), reason="recorded start-ups are not at hand")


@needs_startups
def test_weights_are_what_real_start_ups_logged() -> None:
    errors = []
    for model, row in startups():
        if row["weights_gib"] and "Ministral-3-14B-Reasoning" not in row["model"]:  # whose tower is not shared out
            logged = float(row["weights_gib"])
            held = model.weight_bytes(int(float(row["tp"]))) + model.rotary_cache_bytes()
            errors.append(abs(held / GIB - logged) / logged)
    errors.sort()
    assert len(errors) > 60
    assert errors[len(errors) // 2] < 0.002
    assert errors[-1] < 0.025


@needs_startups
def test_logged_tokens_follow_from_the_logged_bytes() -> None:
    """Exact to the two digits that logs print, hybrid models included."""
    outside, count = [], 0
    for model, row in startups():
        if row["kv_avail_gib"] and row["kv_tokens"] and row["max_model_len"]:
            layout = layout_of(model, row)
            available, length = float(row["kv_avail_gib"]) * GIB, int(float(row["max_model_len"]))
            low, high = (
                layout.logged_tokens(layout.num_blocks(int(available + part * GIB)), length, by_concurrency=False)
                for part in (-0.0051, 0.0051)
            )
            count += 1
            other_ranks = 0.9998 if row["tp"] != "1.0" else 1.0  # the smallest pool counts, of which one is logged
            if not low * other_ranks <= float(row["kv_tokens"]) <= high:
                outside.append((row["model"], row["kv_tokens"], low, high))
    assert count > 60
    assert not outside


def layout_of(model: ModelSpec, row: dict[str, str]) -> KvLayout:
    return kv_layout(
        model,
        tensor_parallel_size=int(float(row["tp"])),
        kv_cache_dtype=row["kv_dtype"] or "auto",
        max_concurrent_batches=1,
        enable_prefix_caching=row["prefix_caching"] != "False",
    )


def test_the_bundled_configs_hold_only_what_is_read(tmp_path: Path) -> None:
    """They stay small: no token ids, no code references."""
    assert os.path.getsize(MODELS_JSON) < 200_000
    for config in CONFIGS.values():
        assert not {"auto_map", "eos_token_id", "transformers_version"} & set(config)

"""What models weigh: counts against published ones, sharding, and the refusal to guess."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.deployment.model import (
    ModelSpec,
    UnsupportedModel,
    bundled_models,
    load_model,
    model_from_config,
    other_names,
)

GIB = 2**30

PUBLISHED_PARAMETERS = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-405B-Instruct": 405_853_388_800,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "microsoft/phi-4": 14_659_507_200,
    "facebook/opt-125m": 125_239_296,
    "google/gemma-7b-it": 8_537_680_896,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-2-27b-it": 27_227_128_320,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-4b-it": 4_300_079_472,
    "google/gemma-3-12b-it": 12_187_325_040,
    "google/gemma-3-27b-it": 27_432_406_640,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 15_706_484_224,
    "deepseek-ai/DeepSeek-V2.5": 235_741_434_880,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 108_641_793_536,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 401_583_781_376,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "mistralai/Mistral-7B-Instruct-v0.1": 7_241_732_096,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 24_011_361_280,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
    "mistralai/Codestral-22B-v0.1": 22_247_282_688,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "microsoft/Phi-3.5-mini-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-128k-instruct": 13_960_238_080,
    "ai21labs/AI21-Jamba-1.5-Mini": 51_570_323_328,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
    "allenai/OLMoE-1B-7B-0924-Instruct": 6_919_161_856,
    "CohereLabs/c4ai-command-r-08-2024": 32_296_476_672,
    "CohereLabs/c4ai-command-r7b-12-2024": 8_028_033_024,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen/Qwen2.5-VL-72B-Instruct": 73_410_777_344,
}


def config(**changes: Any) -> dict[str, Any]:
    """A small Llama-like config."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
        **changes,
    }


def spec(**changes: Any) -> ModelSpec:
    return model_from_config(config(**changes), "small")


@pytest.mark.parametrize(("name", "published"), PUBLISHED_PARAMETERS.items())
def test_the_parameter_count_is_the_published_one(name: str, published: int) -> None:
    assert load_model(name).num_parameters == published


def test_every_bundled_model_loads_by_its_id() -> None:
    assert len(bundled_models()) >= 70
    assert [load_model(name).name for name in bundled_models()] == bundled_models()


def test_a_mixture_of_experts_counts_the_experts_a_token_visits() -> None:
    mixtral = load_model("mixtral-8x7b")
    one_expert_per_layer = 3 * 4096 * 14336
    assert mixtral.num_parameters - mixtral.num_active_parameters == 32 * 6 * one_expert_per_layer


def test_short_names_ids_and_any_case_name_the_same_model() -> None:
    names = ("llama-3.1-8b", "Llama-3.1-8B", "META-LLAMA/llama-3.1-8b-instruct", "meta-llama/Meta-Llama-3.1-8B")
    assert {load_model(name).name for name in names} == {"meta-llama/Llama-3.1-8B-Instruct"}


def test_an_unknown_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'llama-3.1-9b'.*Llama-3.1-8B"):
        load_model("llama-3.1-9b")


def test_a_stranger_s_repository_is_not_taken_for_the_original() -> None:
    with pytest.raises(ValueError, match="unknown model"):
        load_model("someone/Llama-3.1-8B")


def test_a_path_to_the_config_or_to_its_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config()))
    assert load_model(str(folder)) == load_model(str(folder / "config.json"))
    assert load_model(str(folder)).name == "tiny-llama"
    for name in ("a.json", "b.json"):
        (folder / name).write_text((folder / "config.json").read_text("utf-8"), "utf-8")
    assert [load_model(str(folder / name)).name for name in ("a.json", "b.json")] == ["a", "b"]


def test_broken_json_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n"hidden_size": 64,\n}')
    with pytest.raises(ValueError, match=r"config\.json, line [23]: not valid JSON"):
        load_model(str(path))


def test_a_quantisation_file_beside_the_config_is_not_overlooked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
    fp8 = load_model(str(tmp_path))
    assert fp8.weight_bytes() < spec().weight_bytes()
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}))
    assert load_model(str(tmp_path)).weight_bytes() < fp8.weight_bytes()
    beside.write_text(json.dumps({"quantization": {"quant_algo": "INT2", "exclude_modules": ["lm_head"]}}))
    with pytest.raises(UnsupportedModel, match="INT2"):
        load_model(str(tmp_path))


def test_missing_and_impossible_values_are_named() -> None:
    lacking = {key: value for key, value in config().items() if key != "num_hidden_layers"}
    with pytest.raises(ValueError, match="small: the config lacks num_hidden_layers"):
        model_from_config(lacking, "small")
    with pytest.raises(ValueError, match="hidden_size must be a whole number of at least 1, got -64"):
        spec(hidden_size=-64)
    with pytest.raises(ValueError, match=r"num_attention_heads \(8\) must be a multiple"):
        spec(num_key_value_heads=3)
    with pytest.raises(ValueError, match="dtype must be one of"):
        spec(torch_dtype="float8")


def test_what_the_config_leaves_out_takes_hugging_face_s_default() -> None:
    sparse = {key: value for key, value in config().items() if key not in ("num_key_value_heads", "torch_dtype")}
    model = model_from_config(sparse, "small")
    assert model.num_key_value_heads == model.num_attention_heads
    assert model.head_dim == 64 // 8
    assert model.dtype == "bfloat16"


def test_both_spellings_of_dtype_are_read_and_float32_runs_in_bfloat16() -> None:
    newer = {key: value for key, value in config().items() if key != "torch_dtype"} | {"dtype": "float16"}
    assert model_from_config(newer, "small").dtype == "float16"
    assert spec(torch_dtype="float32").dtype == "bfloat16"
    assert model_from_config(config(), "small", dtype="float32").weight_bytes() == 2 * spec().weight_bytes()


def test_a_nested_text_config_is_followed() -> None:
    inner = {key: value for key, value in config().items() if key != "torch_dtype"}
    nested = {"architectures": ["Wrapper"], "torch_dtype": "float16", "text_config": inner}
    assert model_from_config(nested, "small") == spec(torch_dtype="float16")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "conv"]}, "layers of type conv"),
        ({"mamba_d_state": 128}, "Mamba"),
        ({"index_topk": 2048}, "sparse attention"),
        (
            {"architectures": ["DeepseekV4ForCausalLM"]},
            r"DeepseekV4ForCausalLM is not modelled \(attention to compressed",
        ),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "encoder"),
        ({"architectures": [], "model_type": "mamba3"}, "mamba3"),
        ({"quantization_config": {"quant_method": "torchao"}}, "quantisation torchao"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "3 bits"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "load_in_4bit"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}, "quantized_layers"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}},
            "KV cache in NVFP4",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        spec(**changes)


def test_a_sliding_window_that_never_binds_is_no_reason_to_refuse() -> None:
    assert spec(sliding_window=1024, use_sliding_window=False) == spec()
    assert spec(sliding_window=2048) == spec()


def test_the_default_context_follows_the_rope_scaling() -> None:
    assert spec(rope_scaling={"type": "linear", "factor": 4.0}).max_model_len == 8192
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert spec(rope_scaling=yarn).max_model_len == 4096
    assert spec(rope_scaling={"rope_type": "llama3", "factor": 8.0}).max_model_len == 2048
    assert load_model("llama-3.1-8b").max_model_len == 131_072


@pytest.mark.parametrize(
    ("name", "tensor_parallel_size", "dtype", "expected"),
    [
        ("llama-3.1-8b", 1, "auto", 131_072),
        ("llama-3.1-8b", 1, "fp8", 65_536),
        ("qwen2.5-7b", 1, "auto", 57_344),
        ("llama-3.3-70b", 1, "auto", 327_680),
        ("llama-3.3-70b", 4, "auto", 81_920),
        ("deepseek-coder-6.7b", 2, "auto", 262_144),
        ("qwen3-30b-a3b", 8, "auto", 2 * 48 * 1 * 128 * 2),
    ],
)
def test_kv_bytes_per_token_are_those_of_one_gpu(
    name: str, tensor_parallel_size: int, dtype: str, expected: int
) -> None:
    assert load_model(name).kv_bytes_per_token(tensor_parallel_size, dtype) == expected


def test_an_unknown_kv_dtype_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of auto, .*got 'fp4'"):
        spec().kv_bytes_per_token(1, "fp4")


def test_a_size_that_does_not_divide_the_heads_names_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size 3.*choose one of 1, 2, 4, 8"):
        spec().weight_bytes(3)


@pytest.mark.parametrize(
    ("name", "tensor_parallel_size", "logged_gib"),
    [
        ("llama-3.1-8b", 1, 14.99),
        ("llama-3.1-8b", 2, 7.51),
        ("llama-3.1-8b", 4, 3.77),
        ("llama-3.3-70b", 4, 32.89),
        ("codellama-7b", 1, 12.56),
        ("qwen3-8b", 4, 3.82),
        ("qwen3-30b-a3b", 4, 14.25),
    ],
)
def test_weights_with_the_rotary_table_are_what_vllm_logs(
    name: str, tensor_parallel_size: int, logged_gib: float
) -> None:
    model = load_model(name)
    loaded = model.weight_bytes(tensor_parallel_size) + model.rotary_cache_bytes()
    assert loaded / GIB == pytest.approx(logged_gib, abs=0.006)


def test_eight_bit_weights_leave_embeddings_and_head_in_bf16() -> None:
    int8 = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}}},
        "ignore": ["lm_head"],
    }
    llama = {
        **config(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "quantization_config": int8,
    }
    model = model_from_config(llama, "w8a8")
    assert (model.weight_bytes() + model.rotary_cache_bytes()) / GIB == pytest.approx(8.49, abs=0.006)
    assert model.num_parameters == 8_030_261_248
    assert model.weight_format is not None
    assert model.weight_format.gemm_dtype == "int8"


def test_four_bit_weights_carry_their_scales() -> None:
    awq = spec(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    linear = awq.dense_linear_parameters()
    assert awq.dense_linear_bytes() == linear // 2 + linear // 128 * 20 // 8
    assert awq.weight_format is not None
    assert awq.weight_format.gemm_dtype == "bf16"


@given(
    heads_per_kv=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    layers=st.integers(1, 4),
    tied=st.booleans(),
    experts=st.sampled_from([0, 4]),
)
def test_splitting_never_adds_weight_to_a_gpu_nor_loses_any(
    heads_per_kv: int, kv_heads: int, layers: int, tied: bool, experts: int
) -> None:
    changes: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = spec(
        architectures=["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"],
        num_hidden_layers=layers,
        num_attention_heads=heads_per_kv * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        tie_word_embeddings=tied,
        **(changes if experts else {}),
    )
    assert model.weight_bytes(1) == model.num_parameters * 2
    sizes = model.tensor_parallel_sizes()
    held = [model.weight_bytes(size) for size in sizes]
    assert held == sorted(held, reverse=True)
    cached = [model.kv_bytes_per_token(size) for size in sizes]
    assert cached == sorted(cached, reverse=True)
    for size, weights, cache in zip(sizes, held, cached, strict=True):
        assert size * weights >= model.weight_bytes(1)
        assert size * cache >= model.kv_bytes_per_token(1)
        if size <= kv_heads:
            assert size * cache == model.kv_bytes_per_token(1)


QUANTISED: list[dict[str, Any]] = [
    {},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
    {"quantization_config": {"quant_method": "gptq", "bits": 8}},
    {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {}}},
        }
    },
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}},
    {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    {"sliding_window": 1024, "layer_types": ["full_attention"] * 2, "text_config": None, "torch_dtype": "float16"},
]
ODD = st.sampled_from(
    [None, True, "x", "", -1, 0, 1.5, [], {}, [[]], [1], {"a": 1}, 10**30, float("nan"), float("inf")]
)


@st.composite
def odd_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config that is valid but for some values, at any depth, of another kind."""
    made: dict[str, Any] = json.loads(json.dumps(config(**draw(st.sampled_from(QUANTISED)))))
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = made
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], (dict, list)) and holder[key] and draw(st.booleans()):
                holder = holder[key]
                continue
            holder[key] = copy.deepcopy(draw(ODD))  # it may be changed further
            break
    return made


@given(odd_configs())
def test_an_odd_config_is_modelled_or_refused_by_name(odd: dict[str, Any]) -> None:
    try:
        model = model_from_config(odd, "odd")
    except ValueError as error:
        said = str(error)
    else:
        said = "odd"
        assert model.weight_bytes() > 0 < model.kv_bytes_per_token()
    assert said.startswith("odd")
    assert len(said) < 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be a whole number of at least 1, got '32'"),
        ({"hidden_size": 10**12}, "hidden_size must be a whole number of at most 2,147,483,647, got 1000000000000"),
        ({"rope_scaling": [4.0]}, r"rope_scaling must be a table, got \[4.0\]"),
        ({"rope_scaling": {"type": "linear", "factor": "much"}}, "rope scaling: factor must be a finite number"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list, got 'LlamaForCausalLM'"),
        ({"quantization_config": ["fp8"]}, "quantization_config must be a table"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, "x"]}},
            "weight_block_size must be",
        ),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^small(, quantisation|,)?:? {message}"):
        model_from_config(config(**changes), "small")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5000, b"[1]", b"{", b""])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^.*config\.json(:|, line 1:) "):
        load_model(str(tmp_path))


def test_every_name_of_a_bundled_model_leads_to_it() -> None:
    for name in bundled_models():
        others = other_names(name)
        assert others
        for other in others:
            assert load_model(other).name == name
    assert other_names("meta-llama/Llama-3.1-8B-Instruct")[0] == "llama-3.1-8b"

"""What releases of vLLM differ in when they size the KV cache.

Numbers called "of vLLM" are what ``v1/core/kv_cache_utils.py`` of that release's source distribution returned for these
layers, 20 GiB a GPU, max_model_len 30,001 and max_num_batched_tokens 4,096.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from conftest import REPO_ROOT

import windtunnel as wt
from windtunnel.memory_correction import correction_of
from windtunnel.sim.deployment.gpu import GIB, load_gpu
from windtunnel.sim.deployment.kv_layout import LATEST_LAYOUT, kv_layout
from windtunnel.sim.deployment.layers import Attention, State
from windtunnel.sim.deployment.memory import InfeasibleDeployment, JudgedPlan, kv_pool, plan_memory
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, OK, UNSAFE, MemoryPlan, StageMemory, make_plan
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.memory_rules import MemoryRules, layout_rules, memory_rules
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.deployment.model_spec import ModelSpec, UnsupportedModel
from windtunnel.sim.deployment.overheads import estimate_overheads
from windtunnel.sim.deployment.versions import profile

DATA = json.loads((REPO_ROOT / "sim" / "deployment" / "versions.json").read_text())
SCOUT, NANO = "meta-llama/Llama-4-Scout-17B-16E-Instruct", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"


def request(model: str | ModelSpec, engine: str, **settings: Any) -> MemoryRequest:
    spec = load_model(model) if isinstance(model, str) else model
    asked = {"max_model_len": 30_001, "max_num_batched_tokens": 4096, "max_num_seqs": 64, **settings}
    return MemoryRequest(spec, load_gpu("b200"), profile(engine), allows_long_max_model_len=True, **asked)


def with_bytes(plan: MemoryPlan, available: int) -> MemoryPlan:
    """The plan as if so much were left for the KV cache on each GPU."""
    stages = tuple(StageMemory(0, available, available // block) for block in plan.layout.block_bytes)
    return replace(
        plan,
        stages=stages,
        available_kv_cache_bytes=available,
        num_gpu_blocks=plan.layout.num_blocks(available),
        source="formula",
    )


def judged(model: str, engine: str, gpu: str = "h100", **settings: Any) -> JudgedPlan:
    return plan_memory(MemoryRequest(load_model(model), load_gpu(gpu), profile(engine), **settings))


# --- groups of unlike layers


@pytest.mark.parametrize(
    ("model", "engine", "blocks", "tokens", "concurrency"),
    [
        ("gemma-3-27b", "0.8.4", 2642, 42_272, 1.41),
        ("gemma-3-27b", "0.9.0.1", 2642, 42_272, 1.41),
        ("gemma-3-27b", "0.9.2", 16_384, 37_440, 4.31),
        ("gemma-3-27b", "0.20.2", 16_384, 129_283, 4.31),
        ("mistral-7b-instruct-v0.1", "0.8.4", 10_240, 163_840, 5.46),
        ("mistral-7b-instruct-v0.1", "0.9.2", 10_240, 163_840, 19.96),
        ("gpt-oss-120b", "0.10.2", 36_408, 291_264, 17.01),
        ("gpt-oss-120b", "0.20.2", 36_408, 510_171, 17.01),
        (SCOUT, "0.9.2", 6826, 109_216, 3.64),
        (SCOUT, "0.10.0", 27_306, 109_216, 6.53),
        (SCOUT, "0.10.2", 6826, 109_216, 3.64),
        (SCOUT, "0.14.1", 27_306, 109_216, 6.53),
        (NANO, "0.10.2", 999, 162_688, 33.30),
        (NANO, "0.20.2", 999, 999_033, 33.30),
    ],
)
def test_pools_of_unlike_layers_are_those_of_vllm(
    model: str, engine: str, blocks: int, tokens: int, concurrency: float
) -> None:
    plan = with_bytes(make_plan(request(model, engine)), 20 * GIB)
    assert (plan.num_gpu_blocks, plan.kv_cache_tokens) == (blocks, tokens)
    assert round(plan.max_concurrency, 2) == concurrency


def test_before_0_8_3_a_window_is_kept_in_full_even_where_all_layers_have_one() -> None:
    """0.8.2 has no SlidingWindowSpec; 0.8.3 counts a request by its window."""
    model = "mistral-7b-instruct-v0.1"
    old, new = (make_plan(request(model, engine)).layout for engine in ("0.8.2", "0.8.3"))
    assert old.needed_bytes(30_001, 0) == -(-30_001 // 16) * old.block_bytes[0]
    assert new.needed_bytes(30_001, 0) == (-(-(4095 + 4096) // 16) + 1) * new.block_bytes[0]


@pytest.mark.parametrize("model", ["gemma-2-9b", SCOUT, "mistral-7b-instruct-v0.1"])
def test_v0_keeps_every_layer_in_full(model: str) -> None:
    plan = make_plan(request(model, "0.10.2", uses_v0_engine=True))
    assert [group.kind for group in plan.layout.groups] == ["full"]
    assert plan.layout.block_bytes[0] == 16 * plan.request.model.kv_bytes_per_token()


@pytest.mark.parametrize(
    ("full", "windows", "engine", "num_groups", "in_the_largest"),
    [
        (6, 5, "0.11.2", 3, 5),
        (6, 5, "0.12.0", 2, 6),
        (11, 8, "0.17.1", 3, 8),
        (11, 8, "0.18.0", 2, 11),
    ],
)
def test_kinds_of_about_as_many_layers_are_padded_instead_of_split(
    full: int, windows: int, engine: str, num_groups: int, in_the_largest: int
) -> None:
    """By less than a factor of 1.25 since 0.12, of 1.5 since 0.18 (``_get_kv_cache_groups_uniform_page_size``)."""
    gemma = load_model("gemma-2-9b")
    seen = {bool(layer.mixer.sliding_window): layer for layer in gemma.layers if isinstance(layer.mixer, Attention)}
    model = replace(gemma, num_layers=full + windows, layers=(seen[False],) * full + (seen[True],) * windows)
    layout = make_plan(request(model, engine)).layout
    assert len(layout.groups) == num_groups
    assert max(group.num_layers for group in layout.groups) == in_the_largest


def uneven(kv_heads: int) -> ModelSpec:
    """Half of the layers with other KV heads than the rest."""
    llama = load_model("llama-3.1-8b")
    layer = llama.decoder_layers[0]
    assert isinstance(layer.mixer, Attention)
    other = replace(layer, mixer=replace(layer.mixer, num_kv_heads=kv_heads))
    return replace(llama, layers=(layer,) * 16 + (other,) * 16)


def test_layers_of_different_sizes_share_a_group_since_0_11() -> None:
    with pytest.raises(UnsupportedModel, match=r"cannot lay out a cache before 0\.11"):
        make_plan(request(uneven(4), "0.10.2"))
    assert make_plan(request(uneven(4), "0.11.0")).layout.block_bytes == (16 * 2 * 128 * 2 * 16 * (8 + 4),)


def windowed(kv_heads: int) -> ModelSpec:
    """Layers with a window and other KV heads beside full attention."""
    model = uneven(kv_heads)
    return replace(
        model,
        layers=tuple(
            replace(layer, mixer=replace(layer.mixer, sliding_window=1024))
            if isinstance(layer.mixer, Attention) and layer.mixer.num_kv_heads == kv_heads
            else layer
            for layer in model.layers
        ),
    )


def test_pages_of_different_sizes_are_made_equal_since_0_12_and_0_24() -> None:
    """``unify_kv_cache_spec_page_size``: longer blocks since 0.12.0 where sizes divide, padding since 0.24.0."""
    model = load_model("llama-3.1-8b")
    assert model.num_key_value_heads == 8
    for heads, refused, taken in ((4, "0.11.2", "0.12.0"), (16, "0.11.2", "0.12.0")):
        with pytest.raises(UnsupportedModel, match="cannot lay out a cache before"):
            make_plan(request(windowed(heads), refused))
        assert make_plan(request(windowed(heads), taken)).layout.is_hybrid
    odd = replace(windowed(4), layers=_with_head_dim(windowed(4), 96))
    with pytest.raises(UnsupportedModel, match=r"cannot lay out a cache before 0\.24"):
        make_plan(request(odd, "0.23.0"))
    assert make_plan(request(odd, "0.24.0")).layout.is_hybrid


def _with_head_dim(model: ModelSpec, head_dim: int) -> tuple[Any, ...]:
    return tuple(
        replace(layer, mixer=replace(layer.mixer, head_dim=head_dim, num_kv_heads=8))
        if isinstance(layer.mixer, Attention) and layer.mixer.sliding_window
        else layer
        for layer in model.layers
    )


def test_a_disabled_manager_cannot_hold_states_beside_attention() -> None:
    words = "Hybrid KV cache manager is disabled but failed to convert the KV cache specs to one unified type"
    with pytest.raises(UnsupportedModel, match=words):
        kv_layout(load_model(NANO), disable_hybrid_kv_cache_manager=True)
    merged = kv_layout(load_model("gemma-2-9b"), disable_hybrid_kv_cache_manager=True)
    assert [group.kind for group in merged.groups] == ["full"]


# --- states


def test_models_with_states_run_on_v0_until_0_10_2() -> None:
    """``_is_v1_supported_oracle`` of 0.10.1.1 falls back for "Mamba"; 0.10.2 has no such line."""
    old, new = request(NANO, "0.10.1.1"), request(NANO, "0.10.2")
    assert old.runs_on_v0
    assert not new.runs_on_v0
    assert not request("llama-3.1-8b", "0.10.1.1").runs_on_v0


def test_v0_keeps_the_states_of_max_num_seqs_sequences_beside_the_blocks() -> None:
    model = load_model(NANO)
    plan = make_plan(request(NANO, "0.10.1"))
    states = sum(sum(layer.mixer.state_elements(1)) for layer in model.decoder_layers if isinstance(layer.mixer, State))
    without = estimate_overheads(
        model,
        load_gpu("b200"),
        version=profile("0.10.1"),
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        max_model_len=1,
    )
    assert plan.activation_bytes - without.activation_bytes == 64 * states * 2
    assert plan.max_state_sequences is None
    assert [group.kind for group in plan.layout.groups] == ["full"]
    assert any("states of 64 sequences" in text for text in plan.overheads.assumptions)


def test_prefix_caching_of_states_is_a_default_since_0_28() -> None:
    """0.26 and 0.27 support it and leave it off: ``is_prefix_caching_supported and not is_hybrid``."""
    defaults = {
        engine: make_plan(request(NANO, engine)).settings.enable_prefix_caching for engine in ("0.26", "0.27", "0.28")
    }
    assert defaults == {"0.26": False, "0.27": False, "0.28": True}


@pytest.mark.parametrize(("engine", "verdict"), [("0.17", OK), ("0.18", OK), ("0.19", OK), ("0.20", DOES_NOT_START)])
def test_only_since_0_20_are_more_sequences_than_state_blocks_refused(engine: str, verdict: str) -> None:
    found = judged("qwen3.5-27b", engine, "h200", max_model_len=32_768, num_gpu_blocks_override=300, max_num_seqs=512)
    assert found.verdict == verdict
    text = wt.memory_plan(
        "qwen3.5-27b", "h200", engine=engine, max_model_len=32_768, num_gpu_blocks_override=300, max_num_seqs=512
    ).text()
    assert ("max_num_seqs cannot be more" in text) == (verdict == DOES_NOT_START)


# --- the start-up check


def test_the_check_of_0_13_sums_layers_where_0_19_counts_whole_groups() -> None:
    """gemma-3-1b has 4 full and 22 sliding layers: six groups of four, two layers of which are padding."""
    old, new = (make_plan(request("gemma-3-1b", engine)).layout for engine in ("0.13.0", "0.19.0"))
    assert old.block_bytes == new.block_bytes
    page = old.block_bytes[0] // 4
    full, window = -(-30_001 // 16), -(-(511 + 4096) // 16) + 1
    assert old.needed_bytes(30_001, 0) == (4 * full + 22 * window) * page
    assert new.needed_bytes(30_001, 0) == (full + 6 * window) * 4 * page


def test_0_14_to_0_16_check_the_layers_of_all_stages_on_each() -> None:
    needed = {
        engine: make_plan(request("llama-3.1-8b", engine, pipeline_parallel_size=2)).layout.needed_bytes(30_001, 0)
        for engine in ("0.13", "0.14", "0.16", "0.17", "0.32")
    }
    one_stage = -(-30_001 // 16) * 16 * 65_536
    assert needed == {
        "0.13": one_stage,
        "0.14": 2 * one_stage,
        "0.16": 2 * one_stage,
        "0.17": one_stage,
        "0.32": one_stage,
    }


def test_v0_divides_its_blocks_by_the_stages_of_a_pipeline() -> None:
    """``raise_if_cache_size_invalid`` of 0.8.4 and 0.9.2: block_size * (num_gpu_blocks // pipeline_parallel_size)."""
    plan = make_plan(request("llama-3.1-8b", "0.9.2", uses_v0_engine=True, pipeline_parallel_size=2))
    assert plan.blocks_needed(32_000) == 4000
    assert plan.holds(4000, 32_000)
    assert not plan.holds(3999, 32_000)


def test_v0_has_no_null_block() -> None:
    made = {
        "V0": wt.memory_plan("llama-3.1-8b", "h100", engine="vllm-0.9", v0=True, max_model_len=8192, mean_tokens=1600),
        "0.8.2": wt.memory_plan("llama-3.1-8b", "h100", engine="vllm-0.8.2", max_model_len=8192, mean_tokens=1600),
        "0.8.3": wt.memory_plan("llama-3.1-8b", "h100", engine="vllm-0.8.3", max_model_len=8192, mean_tokens=1600),
    }
    for name, found in made.items():
        assert found.users is not None
        null = int(name == "0.8.3")
        assert ("null block" in found.text()) == bool(null)
        assert found.users.real == (found.num_gpu_blocks - null) / 100


@pytest.mark.parametrize(("engine", "largest"), [("0.8.5", False), ("0.9.0", False), ("0.9.1", True)])
def test_the_length_that_fits_is_named_since_0_9_1(engine: str, largest: bool) -> None:
    """0.8.4 to 0.9.0.1 end the sentence before the number: their f-string stands on a line of its own."""
    reason = judged("llama-3.1-8b", engine, "l4").reason
    assert reason.startswith("To serve at least one request with the models's max seq len (131072)")
    assert ("the estimated maximum model length is" in reason) == largest


# --- num_gpu_blocks_override


def remedy(found: JudgedPlan, flag: str) -> Any:
    return next(each for each in found.remedies if each.flag == flag)


def test_an_override_larger_than_the_card_is_lowered() -> None:
    found = judged("llama-3.1-8b", "0.32", num_gpu_blocks_override=90_000)
    assert (found.verdict, found.judgement.cause) == (DOES_NOT_START, "out_of_memory_kv_cache")
    lower = remedy(found, "num_gpu_blocks_override")
    assert lower.text == f"lower num_gpu_blocks_override to {lower.value}"
    assert lower.verdict == OK
    assert judged("llama-3.1-8b", "0.32", num_gpu_blocks_override=lower.value).verdict == OK
    assert judged("llama-3.1-8b", "0.32", num_gpu_blocks_override=lower.value + 1).verdict == UNSAFE


def test_an_override_smaller_than_one_request_is_raised() -> None:
    found = judged("llama-3.1-8b", "0.32", num_gpu_blocks_override=100)
    assert (found.verdict, found.judgement.cause) == (DOES_NOT_START, "max_model_len_exceeds_kv_cache")
    assert remedy(found, "num_gpu_blocks_override").text == "raise num_gpu_blocks_override to 8193"
    assert remedy(found, "max_model_len").value == 99 * 16


@pytest.mark.parametrize("engine", ["0.12.0", "0.20.0"])
def test_before_0_20_1_a_small_override_starts_but_holds_no_long_request(engine: str) -> None:
    """Until then ``get_kv_cache_configs`` compares one request with the memory, not with the override."""
    found = judged("llama-3.1-8b", engine, num_gpu_blocks_override=100)
    assert (found.verdict, found.judgement.cause) == (UNSAFE, "small_override")
    assert remedy(found, "num_gpu_blocks_override").text == "raise num_gpu_blocks_override to 8193"  # one is null
    short = judged("llama-3.1-8b", engine, "l4", num_gpu_blocks_override=9000)
    assert short.judgement.cause in ("out_of_memory_kv_cache", "max_model_len_exceeds_kv_cache")
    assert judged("llama-3.1-8b", "0.20.1", num_gpu_blocks_override=100).verdict == DOES_NOT_START


def test_0_9_1_only_logs_the_override() -> None:
    """``get_num_blocks`` of 0.9.1 returns what it computed."""
    asked: dict[str, Any] = {"num_gpu_blocks_override": 5000, "max_model_len": 8192}
    assert judged("llama-3.1-8b", "0.9.1", **asked).plan.source == "formula"
    for engine in ("0.9.0", "0.9.2"):
        assert judged("llama-3.1-8b", engine, **asked).plan.num_gpu_blocks == 5000


def test_the_row_of_what_is_available_says_what_the_override_makes_of_it() -> None:
    found = wt.memory_plan("llama-3.1-8b", "h100", num_gpu_blocks_override=9000)
    blocks = found.judged.plan.memory_blocks
    assert f"formula: {blocks:,} blocks; num_gpu_blocks_override makes it 9,000" in found.text()


# --- pipelines


def test_a_token_takes_the_layers_of_one_stage() -> None:
    whole = wt.memory_plan("llama-3.3-70b", "h100", tensor_parallel_size=4).judged.plan
    half = wt.memory_plan("llama-3.3-70b", "h100", tensor_parallel_size=4, pipeline_parallel_size=2).judged.plan
    assert (whole.kv_bytes_per_token, half.kv_bytes_per_token) == (81_920, 40_960)
    assert half.kv_cache_bytes == half.num_gpu_blocks * 16 * half.kv_bytes_per_token
    assert half.num_gpu_blocks == min(stage.num_blocks for stage in half.stages)


def test_uneven_stages_each_count_their_own_layers() -> None:
    model = replace(load_model("llama-3.1-8b"), num_layers=31)
    sizes = [model.kv_bytes_per_token(pipeline_parallel_size=2, pipeline_rank=rank) for rank in (0, 1)]
    assert sum(sizes) == model.kv_bytes_per_token() == 31 * 4096
    assert sizes == [16 * 4096, 15 * 4096]


# --- block sizes


@pytest.mark.parametrize(
    ("engine", "size", "allowed"),
    [
        ("0.8", 8, "one of 16, 32, 64, 128 in"),
        ("0.11.0", 256, "one of 16, 32, 64, 128 in"),
        ("0.11.1", 48, "one of 16, 32, 64, 128, 256 in"),
        ("0.17", 7, "one of 16, 32, 64, 128, 256 in"),
        ("0.18", 7, "a multiple of 16 in"),
        ("0.32", 40, "a multiple of 16 in"),
    ],
)
def test_a_block_size_that_the_release_does_not_take_names_those_that_it_takes(
    engine: str, size: int, allowed: str
) -> None:
    with pytest.raises(ValueError, match=rf"block_size must be {allowed} vLLM {engine}, got {size}; nearest: "):
        make_plan(request("llama-3.1-8b", engine, block_size=size))


@pytest.mark.parametrize(("engine", "size"), [("0.8", 128), ("0.11.1", 256), ("0.18", 48), ("0.32", 272)])
def test_a_block_size_that_the_release_takes_is_planned(engine: str, size: int) -> None:
    assert make_plan(request("llama-3.1-8b", engine, block_size=size)).block_size == size


# --- architectures


@pytest.mark.parametrize(
    ("model", "engine", "since"),
    [("gpt-oss-20b", "0.10.0", "0.10.1"), ("qwen3-8b", "0.8.3", "0.8.4"), ("qwen3.5-27b", "0.16", "0.17.0")],
)
def test_a_release_without_such_a_model_refuses_it_in_vllm_s_words(model: str, engine: str, since: str) -> None:
    found = judged(model, engine)
    architecture = found.plan.request.model.architecture
    assert found.verdict == DOES_NOT_START
    assert found.reason.startswith(f"Model architectures ['{architecture}'] are not supported for now.")
    assert f"vLLM has it since {since}:" in found.reason
    assert found.remedies == ()
    assert judged(model, since).judgement.cause != found.judgement.cause


def test_a_model_that_is_gone_names_the_last_release_that_had_it() -> None:
    bamba = replace(load_model("granite-4.0-h-tiny"), architecture="BambaForCausalLM")
    found = plan_memory(MemoryRequest(bamba, load_gpu("h100"), profile("0.24")))
    assert found.reason.startswith("Model architecture BambaForCausalLM was supported in vLLM until v0.23.0")
    kept = plan_memory(MemoryRequest(bamba, load_gpu("h100"), profile("0.23")))
    assert kept.verdict != DOES_NOT_START


def test_where_a_registry_was_not_read_nothing_is_claimed() -> None:
    """0.15.0 and 0.15.1 have no source distribution: GLM-5 came after 0.14.1 and is in 0.16.0."""
    assert profile("0.14.1").architecture_since("GlmMoeDsaForCausalLM") == "0.16.0"
    assert profile("0.15.1").architecture_since("GlmMoeDsaForCausalLM") is None


def test_a_simulation_may_run_a_model_by_the_rules_of_an_older_release() -> None:
    asked: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "version": profile("0.9")}
    gpt = load_model("gpt-oss-20b")
    assert kv_pool(gpt, load_gpu("h100"), max_model_len=8192, **asked).num_gpu_blocks > 0
    with pytest.raises(InfeasibleDeployment):
        kv_pool(gpt, load_gpu("l4"), max_model_len=131_072, gpu_memory_utilization=0.6, **asked)


# --- the data


def test_every_rule_has_a_value_from_the_first_release_on() -> None:
    names = {field.name for field in fields(MemoryRules)}
    assert set(DATA["memory"]["start"]) == names
    for change in DATA["memory"]["changes"]:
        assert change["release"] in DATA["releases"]
        assert set(change["set"]) <= names
        before = memory_rules(profile(DATA["releases"][DATA["releases"].index(change["release"]) - 1]))
        for name in change["set"]:
            assert getattr(memory_rules(profile(change["release"])), name) != getattr(before, name), (change, name)


def test_architectures_name_neighbouring_releases() -> None:
    releases, unread = DATA["releases"], {"0.15.0", "0.15.1"}
    for last_without, first in DATA["architectures"].values():
        between = releases[releases.index(last_without) + 1 : releases.index(first)]
        assert set(between) <= unread


def test_the_latest_release_has_the_rules_that_a_layout_has_by_itself() -> None:
    assert layout_rules(profile("vllm"), "LlamaForCausalLM") == LATEST_LAYOUT


# --- estimates that a verdict must not hang on


@pytest.mark.parametrize(
    ("model", "gpu", "size", "share"), [("qwen2.5-0.5b", "t4", 2, 0.92), ("llama-3.1-8b", "rtx-4090", 4, 0.95)]
)
def test_several_cards_without_nvlink_are_not_refused_for_what_nccl_takes_on_an_h100(
    model: str, gpu: str, size: int, share: float
) -> None:
    found = judged(model, "0.32", gpu, tensor_parallel_size=size, gpu_memory_utilization=share)
    assert (found.verdict, round(found.plan.total_bytes / GIB - found.plan.free_bytes / GIB, 2)) == (OK, 0.63)


def test_a_share_that_only_some_start_ups_left_free_is_unsafe_and_one_that_none_did_is_refused() -> None:
    def at(share: float, **given: Any) -> JudgedPlan:
        return judged("llama-3.1-8b", "0.32", "rtx-4090", tensor_parallel_size=4, gpu_memory_utilization=share, **given)

    low, high = at(0.9).plan.free_interval
    total = at(0.9).plan.total_bytes
    assert [round((total - free) / GIB, 2) for free in (high, low)] == [0.39, 0.96]
    for share, verdict, cause in (
        (high / total + 1e-4, DOES_NOT_START, "free_memory_below_desired"),
        (high / total - 1e-4, UNSAFE, "free_memory_unsure"),
        (low / total + 1e-4, UNSAFE, "free_memory_unsure"),
    ):
        assert (at(share).verdict, at(share).judgement.cause) == (verdict, cause)
    assert remedy(at(0.97), "gpu_memory_utilization").verdict == OK
    assert at(0.97, free_memory_bytes=round(0.96 * total)).verdict == DOES_NOT_START
    assert at(0.97, free_memory_bytes=total).verdict == OK


def test_nccl_comes_before_the_look_at_the_free_memory_since_0_11() -> None:
    in_use = [
        judged("llama-3.1-8b", engine, tensor_parallel_size=2).plan.total_bytes
        - judged("llama-3.1-8b", engine, tensor_parallel_size=2).plan.free_bytes
        for engine in ("0.10.2", "0.11.0")
    ]
    assert [round(used / GIB, 2) for used in in_use] == [0.51, 1.53]


def test_replicas_of_a_dense_model_set_up_no_common_communicator() -> None:
    dense, shared = (judged(name, "0.32", data_parallel_size=8) for name in ("llama-3.1-8b", "gpt-oss-20b"))
    assert dense.plan.free_bytes - shared.plan.free_bytes == round(1.53 * GIB) - round(0.51 * GIB)


@pytest.mark.parametrize(
    ("model", "engine", "gpu", "settings"),
    [
        (
            "llama-4-scout",
            "0.11.0",
            "h200",
            {"tensor_parallel_size": 8, "gpu_memory_utilization": 0.35, "max_model_len": 2**20},
        ),
        ("gpt-oss-20b", "0.10.2", "rtx-4090", {"disable_hybrid_kv_cache_manager": True}),
    ],
)
def test_a_pool_that_starts_without_holding_one_request_is_unsafe(
    model: str, engine: str, gpu: str, settings: dict[str, Any]
) -> None:
    found = judged(model, engine, gpu, **settings)
    assert (found.verdict, found.judgement.cause) == (UNSAFE, "request_exceeds_pool")
    assert found.plan.max_concurrency < 1
    longest, layout = found.plan.longest_request(), found.plan.layout
    assert layout.blocks_of_request(longest) < found.plan.num_gpu_blocks  # one of which is the null block
    assert layout.blocks_of_request(longest + 1) >= found.plan.num_gpu_blocks
    assert f"The longest that does has {longest:,} tokens" in found.reason
    shorter = remedy(found, "max_model_len").value
    assert shorter <= longest
    for length, verdict in ((shorter, OK), (shorter + 1, UNSAFE)):
        assert judged(model, engine, gpu, **{**settings, "max_model_len": length}).verdict == verdict


@pytest.mark.parametrize(
    ("gpu", "spread", "used", "most"),
    [("l4", 0.43, 0.5, 0.56), ("mi300x", 5.98, 0.33, 0.61), ("h100", 0.43, 0.51, 0.53)],
)
def test_graphs_beside_the_budget_need_the_spread_of_real_start_ups(
    gpu: str, spread: float, used: float, most: float
) -> None:
    """0.43 and 5.98 GiB: 95 of 100 start-ups of models left out of the fit (``margins.json``)."""
    needed = (spread**2 + (most - used) ** 2) ** 0.5 * GIB
    asked: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 64}
    plan = judged("llama-3.1-8b", "0.19.0", gpu, **asked).plan
    fits = plan.free_bytes - plan.graphs_outside_bytes
    for more, verdict in ((-1, OK), (1, UNSAFE)):
        share = (fits - needed + more * 2**21) / plan.total_bytes
        found = judged("llama-3.1-8b", "0.19.0", gpu, gpu_memory_utilization=share, **asked)
        assert found.verdict == verdict
        assert found.plan.margin_spread_bytes == pytest.approx(needed, abs=2**20)
    eager = judged("llama-3.1-8b", "0.19.0", gpu, gpu_memory_utilization=share, enforce_eager=True, **asked)
    assert eager.verdict == OK


def test_the_first_step_that_runs_out_beside_the_graphs_is_named() -> None:
    """The capture has the activations' part of the budget to itself; the sampler's warm-up needs it back."""

    def at(left_gib: float, seqs: int) -> str:
        plan = judged("llama-3.1-8b", "0.19.0", max_num_seqs=seqs, max_model_len=4096).plan
        share = (plan.free_interval.low - plan.cudagraph_bytes - left_gib * GIB) / plan.total_bytes
        asked: dict[str, Any] = {"max_num_seqs": seqs, "max_model_len": 4096, "gpu_memory_utilization": share}
        return judged("llama-3.1-8b", "0.19.0", **asked).judgement.cause

    activation = judged("llama-3.1-8b", "0.19.0", max_num_seqs=1024, max_model_len=4096).plan.activation_bytes / GIB
    assert activation > 1.71  # 1,024 rows of 128,256 logits, 14 bytes each
    assert at(0.40, 1024) == "graphs_outside"
    assert at(0.43 + 1.70 - activation, 1024) == "sampler_warm_up"
    assert at(0.40, 8) == "graphs_outside"


def test_a_correction_never_gives_the_cache_a_part_of_the_weights_place() -> None:
    plain = judged("llama-3.1-8b", "0.32").plan
    parts = plain.consumed_bytes - plain.weights_bytes
    found = judged("llama-3.1-8b", "0.32", correction_bytes=parts + GIB)
    assert (found.verdict, found.judgement.cause) == (UNSAFE, "overcorrected")
    assert found.plan.available_kv_cache_bytes == plain.requested_bytes - plain.weights_bytes
    assert found.plan.interval_blocks.high == found.plan.num_gpu_blocks
    assert found.plan.overcorrection_bytes == GIB
    assert found.remedies == ()


def test_a_correction_leaves_the_logits_of_a_step_their_place() -> None:
    plain = judged("llama-3.1-8b", "0.32").plan
    logits = 1024 * 128_256 * (2 + 4)  # max_num_seqs rows, in bfloat16 and in float32
    parts = plain.consumed_bytes - plain.weights_bytes
    for correction, verdict in ((parts - logits, OK), (parts - logits + 1, UNSAFE)):
        assert judged("llama-3.1-8b", "0.32", correction_bytes=correction).verdict == verdict


def test_a_correction_from_other_settings_is_less_sure() -> None:
    same = judged("llama-3.1-8b", "0.32", correction_bytes=GIB // 2)
    other = judged("llama-3.1-8b", "0.32", correction_bytes=GIB // 2, correction_differs=("engine",))
    widths = [found.plan.interval_blocks.high - found.plan.interval_blocks.low for found in (same, other)]
    assert widths[1] / widths[0] == pytest.approx(2**0.5, rel=1e-3)
    assert other.plan.num_gpu_blocks == same.plan.num_gpu_blocks
    beyond = -2 * same.plan.overheads.error_bytes[0]
    assert judged("llama-3.1-8b", "0.32", correction_bytes=beyond // 4).verdict == OK
    twice: dict[str, Any] = {"correction_bytes": beyond * 3 // 4, "correction_differs": ("engine",)}
    assert judged("llama-3.1-8b", "0.32", **twice).judgement.cause == "overcorrected"


def learnt(**other: Any) -> dict[str, Any]:
    """What a server with the defaults of 0.32, or ``other`` settings, taught."""
    plan = judged("llama-3.1-8b", "0.32").plan
    return {**correction_of(plan.request, plan, GIB // 4, "a.log"), **other}


@pytest.mark.parametrize(
    ("other", "wider"),
    [
        ({}, False),
        ({"gpu_memory_utilization": 0.8, "kv_cache_dtype": "fp8"}, False),
        ({"engine": "vllm-0.19.0"}, True),
        ({"enforce_eager": True}, True),
        ({"max_num_batched_tokens": 2048, "max_num_seqs": 64}, True),
    ],
)
def test_only_what_the_estimate_depends_on_makes_a_correction_less_sure(other: dict[str, Any], wider: bool) -> None:
    plan = judged("llama-3.1-8b", "0.32", correction_bytes=GIB // 4).plan
    made = wt.memory_plan("llama-3.1-8b", "h100", correction=learnt(**other))
    corrected = made.judged.plan
    widths = [each.interval_blocks.high - each.interval_blocks.low for each in (plan, corrected)]
    assert widths[1] / widths[0] == pytest.approx(2**0.5 if wider else 1.0, rel=1e-3)
    assert corrected.request.correction_differs == (tuple(other) if wider else ())
    assert any("1.41 times as wide" in text for text in made.assumptions) == wider


def test_what_v0_taught_is_refused_for_v1() -> None:
    with pytest.raises(ValueError, match=r"learnt with v0 True .here False., which must be the same"):
        wt.memory_plan("llama-3.1-8b", "h100", engine="vllm-0.9", correction=learnt(v0=True))


# --- remedies


_UNWELL: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama-3.3-70b", "0.32", "h100", {"tensor_parallel_size": 2, "max_model_len": 16_384}),
    ("llama-3.1-8b", "0.32", "l4", {"max_model_len": 32_000}),
    ("llama-3.1-8b", "0.19.0", "l4", {"gpu_memory_utilization": 0.96, "max_model_len": 8192}),
    ("qwen3-32b", "0.32", "h100", {"max_model_len": 36_000}),
]
_STEPS = {"gpu_memory_utilization": 0.001, "max_num_batched_tokens": 256, "max_model_len": 1, "max_num_seqs": 1}


@pytest.mark.parametrize(("model", "engine", "gpu", "settings"), _UNWELL)
def test_a_remedy_is_the_smallest_change_that_is_ok_or_that_starts_where_none_is(
    model: str, engine: str, gpu: str, settings: dict[str, Any]
) -> None:
    found = judged(model, engine, gpu, **settings)
    assert found.verdict != OK
    checked = 0
    for each in found.remedies:
        if each.flag not in _STEPS:
            continue
        before = getattr(found.plan.settings, each.flag)
        back = _STEPS[each.flag] if each.value < before else -_STEPS[each.flag]
        verdicts = []
        for value in (each.value, round(each.value + back, 4)):
            try:
                verdicts.append(judged(model, engine, gpu, **{**settings, each.flag: value}).verdict)
            except ValueError:  # a budget or a context that vLLM refuses
                verdicts.append(DOES_NOT_START)
        assert verdicts[0] == each.verdict
        assert verdicts[1] != OK if each.verdict == OK else verdicts[1] == DOES_NOT_START
        checked += 1
    assert checked


def test_a_smaller_change_that_merely_starts_stands_in_the_cost() -> None:
    asked: dict[str, Any] = {"tensor_parallel_size": 2, "max_model_len": 16_000}
    fewer = remedy(judged("llama-3.3-70b", "0.32", **asked), "max_num_seqs")
    found = re.search(r"([\d,]+) starts, too, but is unsafe", fewer.cost)
    assert found is not None
    starts = int(found[1].replace(",", ""))
    verdicts = [judged("llama-3.3-70b", "0.32", max_num_seqs=seqs, **asked).verdict for seqs in (starts, starts + 1)]
    assert verdicts == [UNSAFE, DOES_NOT_START]
    assert fewer.value < starts


def test_nothing_is_left_on_a_card_that_does_not_hold_the_weights() -> None:
    found = judged("llama-4-maverick", "0.8.5", tensor_parallel_size=8)
    assert found.judgement.cause == "out_of_memory_weights"
    assert found.plan.margin_bytes == (
        found.plan.free_bytes - found.plan.consumed_bytes - found.plan.graphs_outside_bytes
    )
    assert found.plan.margin_bytes < 0

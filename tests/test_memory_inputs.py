"""What a memory plan takes and refuses: options by release, types by card, windows by config, deployments by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli.main import main
from windtunnel.memory import MemoryReport, memory_plan, memory_sweep
from windtunnel.memory_settings import request_of, serve_settings
from windtunnel.reports.memory_figures import parts_of
from windtunnel.scenarios.deployments import read_deployment
from windtunnel.scenarios.deployments.options import options
from windtunnel.scenarios.deployments.settings import SETTINGS
from windtunnel.scenarios.deployments.write import serve_command
from windtunnel.sim.deployment.card_checks import check_card
from windtunnel.sim.deployment.gpu import bundled_gpus, load_gpu
from windtunnel.sim.deployment.hf_config import model_from_config
from windtunnel.sim.deployment.kv_dtypes import KV_DTYPE_SINCE, PLANNED
from windtunnel.sim.deployment.layers import Attention
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.deployment.model_spec import UnsupportedModel
from windtunnel.sim.deployment.refusal import RefusedByVllm
from windtunnel.sim.deployment.versions import profile, profile_names

Run = Callable[..., tuple[int, str]]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SMALL = "qwen2.5-1.5b"


def plan(model: str = "llama-3.1-8b", gpu: str = "h100", **settings: Any) -> MemoryReport:
    return memory_plan(model, gpu, **settings)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command: its exit code, and all that it prints on one line."""

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["memory", *arguments])
        shown = capsys.readouterr()
        return code, " ".join((shown.out + shown.err).split())

    return run


# --- options by release

_GIVEN: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "gpu_memory_utilization": 0.8,
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "kv_cache_dtype": "fp8",
    "dtype": "float16",
    "block_size": 32,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "kv_cache_memory_bytes": "8GiB",
    "num_gpu_blocks_override": 1000,
    "swap_space": 2,
    "cpu_offload_gb": 1,
    "kv_offloading_size": 1,
    "enable_lora": True,
    "disable_hybrid_kv_cache_manager": True,
}


@pytest.mark.parametrize("engine", [*profile_names(), "vllm-0.8.0", "vllm-0.8.2", "vllm-0.9.0", "vllm-0.11.0"])
def test_every_option_is_written_for_the_release_or_refused_by_it(engine: str) -> None:
    """The command line of a plan needs nothing that the plan itself did not ask the release for."""
    release = profile(engine).release
    for name, value in _GIVEN.items():
        settings = {"model": "llama-3.1-8b", "gpu": "h100", "engine": engine, name: value}
        option = options()[name.replace("_", "-")]
        if option.exists_in(release):
            request, _ = request_of(settings)
            assert f"--{option.name}" in serve_command(serve_settings(request), version=engine).replace("--no-", "--")
        else:
            with pytest.raises(RefusedByVllm, match=rf"{name} is no option of vLLM .*it (came|went) with vLLM"):
                request_of(settings)


def test_a_refused_option_names_the_patch_release_that_brought_it() -> None:
    with pytest.raises(
        RefusedByVllm, match=r"data_parallel_size is no option of vLLM 0\.8\.0: it came with vLLM 0\.8\.3"
    ):
        plan(engine="vllm-0.8.0", data_parallel_size=2)


def test_an_option_that_a_release_lacks_is_a_row_that_does_not_start(run: Run) -> None:
    sweep = memory_sweep("llama-3.1-8b", "h100", engine="vllm-0.8,vllm-0.11", disable_hybrid_kv_cache_manager=True)
    assert [point.verdict for point in sweep.points] == ["does_not_start", "ok"]
    code, said = run(
        "--model", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm-0.8", "--disable-hybrid-kv-cache-manager"
    )
    assert code == 4
    assert "disable_hybrid_kv_cache_manager is no option of vLLM 0.8" in said


def test_expert_parallelism_needs_experts() -> None:
    with pytest.raises(RefusedByVllm, match="Number of experts in the model must be greater than 0 when expert"):
        plan(enable_expert_parallel=True)
    assert plan("qwen3-30b-a3b", enable_expert_parallel=True).verdict == "ok"
    assert plan("deepseek-v3", "h200", tensor_parallel_size=8, enable_expert_parallel=True).verdict == "ok"


def test_the_sizes_that_split_a_model_go_up_to_its_heads() -> None:
    assert load_model("llama-3.1-8b").tensor_parallel_sizes() == [1, 2, 4, 8, 16, 32]
    assert load_model("deepseek-v3").tensor_parallel_sizes() == [1, 2, 4, 8, 16, 32, 64, 128]
    assert load_model("deepseek-v3").tensor_parallel_sizes(16) == [1, 2, 4, 8, 16]
    with pytest.raises(RefusedByVllm, match="choose one of 1, 2, 4, 8, 16, 32 "):
        plan(tensor_parallel_size=64)


# --- types of the KV cache


def test_there_is_one_list_of_kv_cache_types() -> None:
    assert SETTINGS["kv_cache_dtype"].choices == tuple(KV_DTYPE_SINCE)
    assert set(PLANNED) <= set(KV_DTYPE_SINCE)


def test_a_kv_cache_type_is_planned_or_refused_for_what_it_is() -> None:
    for engine, name in product(("vllm-0.8", "vllm-0.12", "vllm-0.32"), KV_DTYPE_SINCE):
        if not profile(engine).is_at_least(KV_DTYPE_SINCE[name]):
            with pytest.raises(RefusedByVllm, match=f"kv_cache_dtype {name} is unknown to vLLM"):
                plan(engine=engine, kv_cache_dtype=name)
        elif name in PLANNED:
            assert plan(engine=engine, kv_cache_dtype=name).kv_cache_tokens > 0
        else:
            with pytest.raises(UnsupportedModel, match=f"{name}: vLLM takes it, and its bytes are not modelled"):
                plan(engine=engine, kv_cache_dtype=name)


@pytest.mark.parametrize(("name", "code"), [("int8", 2), ("float32", 2), ("nvfp4", 2), ("fp8", 0)])
def test_what_no_release_takes_ends_with_2(name: str, code: int, run: Run) -> None:
    assert run("--model", "llama-3.1-8b", "--gpu", "h100", "--kv-cache-dtype", name)[0] == code


def test_what_a_later_release_takes_ends_with_4(run: Run) -> None:
    assert run("--model", "llama-3.1-8b", "--gpu", "h100", "--kv-cache-dtype", "nvfp4", "--engine", "vllm-0.19")[0] == 4


# --- types by card


def test_every_card_of_nvidia_has_its_compute_capability() -> None:
    unknown = [name for name in bundled_gpus() if load_gpu(name).compute_capability is None]
    assert all(name.startswith("MI") for name in unknown)
    known = {
        "v100": (7, 0),
        "t4": (7, 5),
        "a100": (8, 0),
        "a10g": (8, 6),
        "l40s": (8, 9),
        "h100": (9, 0),
        "b200": (10, 0),
    }
    assert {name: load_gpu(name).compute_capability for name in known} == known


@pytest.mark.parametrize("gpu", ["t4", "v100"])
def test_bfloat16_is_refused_on_old_cards_and_auto_falls_back(gpu: str) -> None:
    with pytest.raises(
        RefusedByVllm, match=r"compute capability of at least 8\.0\. Your .* has compute capability 7\."
    ):
        plan(SMALL, gpu, dtype="bfloat16")
    planned = plan(SMALL, gpu)
    assert planned.settings["dtype"] == "float16"
    assert any("falls back to float16" in note for note in planned.notes)
    assert "--dtype" not in planned.serve_command
    assert plan(SMALL, gpu, dtype="half").serve_command.endswith("--dtype float16")


def test_before_0_9_1_auto_did_not_fall_back() -> None:
    with pytest.raises(RefusedByVllm, match="Bfloat16 is only supported"):
        plan(SMALL, "t4", engine="vllm-0.9.0")
    old = plan(SMALL, "t4", engine="vllm-0.9.1")
    assert old.settings["dtype"] == "float16"
    assert old.judged.plan.request.runs_on_v0
    assert any("on its V0 engine" in note for note in old.notes)


def test_a_given_dtype_stays_in_the_command_line() -> None:
    assert plan(dtype="bfloat16").serve_command.endswith("--dtype bfloat16")
    assert plan(dtype="float16").serve_command.endswith("--dtype float16")
    assert "--dtype" not in plan(dtype="auto").serve_command


def test_a_card_known_by_its_memory_alone_is_not_judged() -> None:
    assert memory_plan(SMALL, gpu_memory_gib=14.56, dtype="bfloat16").verdict != "does_not_start"


def test_an_fp8_cache_needs_fp8_units() -> None:
    with pytest.raises(RefusedByVllm, match="FP8 KV cache is not supported by the Triton attention backend on T4"):
        plan(SMALL, "t4", kv_cache_dtype="fp8")
    with pytest.raises(RefusedByVllm, match="bfloat16 KV cache is not supported on T4"):
        plan(SMALL, "t4", kv_cache_dtype="bfloat16")
    assert any("needs the FlashInfer backend" in note for note in plan(gpu="a100", kv_cache_dtype="fp8").notes)
    assert not any("FlashInfer" in note for note in plan(kv_cache_dtype="fp8").notes)


@pytest.mark.parametrize(
    ("model", "gpu", "engine", "least"),
    [
        ("gpt-oss-20b", "t4", "vllm-0.32", 80),
        ("Qwen/Qwen3-8B-FP8", "v100", "vllm-0.32", 75),
        ("Qwen/Qwen3-8B-FP8", "t4", "vllm-0.12", 80),
        ("Qwen/Qwen3-8B-FP8", "t4", "vllm-0.32", None),
        ("Qwen/Qwen3-8B-FP8", "a100", "vllm-0.8.5", None),
    ],
)
def test_quantised_weights_need_a_card_that_takes_them(model: str, gpu: str, engine: str, least: int | None) -> None:
    request, _ = request_of({"model": model, "gpu": gpu, "engine": engine})
    if least is None:
        check_card(request)
    else:
        with pytest.raises(RefusedByVllm, match=rf"Minimum capability: {least}\. Current capability: 7[05]\."):
            check_card(request)


# --- windows by config

_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 32768,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_TYPES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Cohere2ForCausalLM": "cohere2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "GptOssForCausalLM": "gpt_oss",
    "Starcoder2ForCausalLM": "starcoder2",
}
_OF_THE_WHOLE = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral")
"""Models whose layers ask for no window of their own, so that vLLM gives one to all or to none."""


def windows(architecture: str, **changes: Any) -> list[int]:
    config = {**_SHAPE, **_EXPERTS, "architectures": [architecture], "model_type": _TYPES[architecture], **changes}
    model = model_from_config(config, "x")
    mixers = [layer.mixer for layer in model.decoder_layers]
    return [mixer.sliding_window if isinstance(mixer, Attention) else -1 for mixer in mixers]


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_window_that_nothing_switches_on_is_none(architecture: str) -> None:
    assert windows(architecture, sliding_window=1024) == [0] * 8
    assert windows(architecture, sliding_window=1024, use_sliding_window=False) == [0] * 8


def test_a_window_that_is_switched_on_is_there() -> None:
    on = {"sliding_window": 1024, "use_sliding_window": True}
    assert windows("Qwen3MoeForCausalLM", **on) == [1024] * 8
    assert windows("Qwen2ForCausalLM", **on, max_window_layers=0) == [1024] * 8
    assert windows("Qwen2ForCausalLM", **on) == [0] * 8
    with pytest.raises(UnsupportedModel, match="Sliding window for some but all layers is not supported"):
        windows("Qwen2ForCausalLM", **on, max_window_layers=4)


def _of_transformers() -> Iterator[tuple[str, dict[str, Any]]]:
    on = {"sliding_window": 1024, "use_sliding_window": True}
    for architecture in _TYPES:
        yield architecture, {}
        yield architecture, {"sliding_window": None}
        yield architecture, {"sliding_window": 1024}
        yield architecture, {**on, "max_window_layers": 0}
        yield architecture, {**on, "max_window_layers": 8}


def test_windows_are_those_of_the_config_classes_of_transformers() -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    for architecture, changes in _of_transformers():
        kind = _TYPES[architecture]
        made = auto.CONFIG_MAPPING[kind](**_SHAPE, **changes)
        kinds, size = getattr(made, "layer_types", None), getattr(made, "sliding_window", None) or 0
        if kinds is None or (kind in _OF_THE_WHOLE and len(set(kinds)) > 1):
            expected = [size if kinds is None else 0] * 8
        else:
            expected = [size if each == "sliding_attention" else 0 for each in kinds]
        assert windows(architecture, **changes) == expected, (architecture, changes)


@pytest.mark.parametrize("wrong", [{}, [], "full_attention", False, ["full_attention"] * 7])
def test_layer_types_of_another_shape_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"x: layer_types (must be a list|is empty|has 7 entries)"):
        windows("Qwen3ForCausalLM", layer_types=wrong)


def test_a_switch_that_is_text_is_refused() -> None:
    with pytest.raises(ValueError, match="use_sliding_window must be true or false, got 'false'"):
        windows("Qwen2ForCausalLM", sliding_window=1024, use_sliding_window="false")


def test_an_unknown_rope_type_is_refused_and_changes_no_context() -> None:
    config = {**_SHAPE, "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ValueError, match="Unknown RoPE scaling type foo; it must be one of default, linear"):
        model_from_config({**config, "rope_scaling": {"rope_type": "foo", "factor": 2}}, "x")
    linear = model_from_config({**config, "rope_scaling": {"type": "linear", "factor": 2}}, "x")
    assert linear.max_model_len == 65536


# --- deployments

_COMPOSE = f"""\
services:
  a:
    image: vllm/vllm-openai:v0.9.2
    command: --model {LLAMA} --max-num-seqs 8
    environment: {{VLLM_USE_V1: "0"}}
  b:
    image: rocm/vllm:v0.11.0
    entrypoint: vllm serve
    command: {LLAMA} --runner pooling --enforce-eager false
"""


@pytest.fixture
def compose(tmp_path: Path) -> Path:
    path = tmp_path / "compose.yml"
    path.write_text(_COMPOSE, encoding="utf-8")
    return path


def test_one_of_several_servers_is_chosen_behind_the_file(compose: Path, run: Run) -> None:
    code, said = run("--gpu", "h100", "--from-deployment", str(compose))
    assert code == 2
    assert f"holds 2 deployments: choose one as {compose}#NAME, by its name: a, b" in said
    report = memory_plan(gpu="h100", from_deployment=f"{compose}#a")
    assert report.judged.plan.settings.max_num_seqs == 8
    assert read_deployment(f"{compose}#b").name == "b"
    code, said = run("--gpu", "h100", "--from-deployment", f"{compose}#c")
    assert (code, "holds no deployment 'c'; there are a, b" in said) == (2, True)


def test_a_file_whose_own_name_has_a_number_sign_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "run#1.sh"
    path.write_text(f"vllm serve {LLAMA}\n", encoding="utf-8")
    assert read_deployment(str(path)).settings["model"] == LLAMA


def test_no_report_is_written_over_the_file_of_a_chosen_server(compose: Path, run: Run) -> None:
    code, _ = run("--gpu", "h100", "--from-deployment", f"{compose}#a", "--html", str(compose))
    assert code == 2
    assert compose.read_text(encoding="utf-8") == _COMPOSE


@pytest.mark.parametrize(
    "source",
    [
        f"docker run -e VLLM_USE_V1=0 vllm/vllm-openai:v0.9.2 --model {LLAMA}",
        f"docker run --env VLLM_USE_V1=0 vllm/vllm-openai:v0.9.2 --model {LLAMA}",
        f"VLLM_USE_V1=0 vllm serve {LLAMA}",
        f"export VLLM_USE_V1=0\nvllm serve {LLAMA}",
    ],
)
def test_the_older_engine_is_planned_where_the_environment_asks_for_it(source: str) -> None:
    old = memory_plan(gpu="h100", engine="vllm-0.9.2", from_deployment=source)
    assert old.judged.plan.request.runs_on_v0
    assert old.judged.plan.num_cpu_blocks == 2048
    assert "VLLM_USE_V1=0: the V0 engine of vLLM 0.9.2 is planned." in old.notes
    new = memory_plan(gpu="h100", engine="vllm-0.19", from_deployment=source)
    assert not new.judged.plan.request.runs_on_v0
    assert sum("VLLM_USE_V1=0" in note for note in new.notes) == 1
    assert any("vLLM 0.19 has V1 only" in note for note in new.notes)
    with pytest.raises(RefusedByVllm, match="Using V1 AsyncLLMEngine, but envs"):
        memory_plan(gpu="h100", engine="vllm-0.11.0", from_deployment=source)


def test_manifests_and_compose_files_ask_for_the_older_engine_too(compose: Path, tmp_path: Path) -> None:
    pod = tmp_path / "pod.yml"
    pod.write_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: v\n"
        f"    image: vllm/vllm-openai:v0.10.2\n    args: [--model, {LLAMA}]\n"
        '    env: [{name: VLLM_USE_V1, value: "0"}]\n',
        encoding="utf-8",
    )
    for source in (f"{compose}#a", str(pod)):
        assert memory_plan(gpu="h100", from_deployment=source).judged.plan.request.runs_on_v0


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--calculate-kv-scales", "--calculate-kv-scales is gone since vLLM 0.28.0, which refuses to start"),
        ("--enforce-eager false", "vLLM refuses a value for --enforce-eager: write --no-enforce-eager"),
        ("--trust-remote-code true", "vLLM refuses a value for --trust-remote-code"),
        ("'--max-model-len 8192'", "'--max-model-len 8192' is one argument; vLLM refuses it"),
        ("--max-model-length-x 8", "--max-model-length-x is no flag of vLLM"),
    ],
)
def test_what_keeps_a_server_from_starting_is_a_warning(flags: str, warning: str) -> None:
    report = memory_plan(gpu="h100", from_deployment=f"vllm serve {LLAMA} {flags}")
    assert any(warning in told for told in report.warnings)
    assert not any(warning in told for told in report.notes)
    assert report.text().splitlines()[0].endswith(": ok, with a warning")
    assert any(warning in told for told in json.loads(json.dumps(report.to_dict()))["warnings"])


def test_numbers_that_kubernetes_refuses_are_a_warning(tmp_path: Path) -> None:
    pod = tmp_path / "pod.yml"
    pod.write_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: v\n"
        f"    image: vllm/vllm-openai:v0.19.0\n    args: [--model, {LLAMA}, --gpu-memory-utilization, 0.8]\n",
        encoding="utf-8",
    )
    report = memory_plan(gpu="h100", from_deployment=str(pod))
    assert report.judged.plan.settings.gpu_memory_utilization == 0.8
    assert any("0.8 in args is no text, which Kubernetes refuses" in told for told in report.warnings)


def test_a_value_that_an_old_release_takes_is_no_refusal() -> None:
    source = f"docker run vllm/vllm-openai:v0.8.4 --model {LLAMA} --enable-chunked-prefill=false"
    assert read_deployment(source).refusals == ()
    newer = read_deployment(source.replace("0.8.4", "0.9.2"))
    assert any("vLLM refuses a value for --enable-chunked-prefill since 0.8.5" in told for told in newer.refusals)


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("rocm/vllm:v0.11.0", "vllm-0.11.0"),
        ("rocm/vllm:rocm6.4.1_vllm_0.9.1_20250702", "vllm-0.9.1"),
        ("public.ecr.aws/deep-learning-containers/vllm:0.11.0-gpu-py312", "vllm-0.11.0"),
        ("vllm/vllm-openai:v0.10.2-x86_64", "vllm-0.10.2"),
        ("nvcr.io/nvidia/vllm:25.09-py3", None),
        ("vllm/vllm-openai:latest", None),
        ("ghcr.io/llm-d/llm-d-cuda:v0.3.0", None),
    ],
)
def test_a_tag_tells_the_release_or_a_note_says_that_it_does_not(image: str, release: str | None) -> None:
    found = read_deployment(f"docker run --entrypoint vllm {image} serve {LLAMA}")
    assert found.engine_version == release
    assert any("does not tell vLLM's release: give --engine" in note for note in found.notes) == (release is None)


def test_a_server_of_embeddings_is_told_to_be_planned_as_one_of_text() -> None:
    for flags in ("--runner pooling", "--task embed", "--convert classify"):
        notes = read_deployment(f"vllm serve {LLAMA} {flags}").notes
        assert any("the plan is that of a server that generates" in note for note in notes)
    assert not any("generates" in note for note in read_deployment(f"vllm serve {LLAMA} --runner generate").notes)


def test_the_line_of_a_plan_for_v0_picks_v0_when_it_is_read_again() -> None:
    plan = memory_plan("llama-3.1-8b", "h100", engine="vllm-0.9", v0=True)
    assert plan.serve_command.startswith("VLLM_USE_V1=0 vllm serve ")
    again = memory_plan(gpu="h100", engine="vllm-0.9", from_deployment=plan.serve_command)
    assert (
        again.num_gpu_blocks
        == plan.num_gpu_blocks
        != memory_plan("llama-3.1-8b", "h100", engine="vllm-0.9").num_gpu_blocks
    )


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"model": "llama-3.3-70b", "gpu": "h100", "kv_cache_memory_bytes": "16GiB", "max_model_len": "8k"}, 4),
        ({"model": "qwen3.5-27b", "gpu": "l40s", "num_gpu_blocks_override": 500}, 2),
        (
            {
                "model": "gemma-3-27b",
                "gpu": "l40s",
                "engine": "vllm-0.14",
                "kv_cache_memory_bytes": "4GiB",
                "max_model_len": 8192,
            },
            2,
        ),
    ],
)
def test_more_gpus_are_a_remedy_where_the_pool_is_given_and_the_weights_do_not_fit(
    settings: dict[str, Any], size: int
) -> None:
    plan = memory_plan(**settings)
    remedy = next(remedy for remedy in plan.judged.remedies if remedy.flag == "tensor_parallel_size")
    assert (remedy.value, remedy.verdict) == (size, "ok")
    assert memory_plan(**settings, tensor_parallel_size=size).verdict == "ok"


@pytest.mark.parametrize(
    ("model", "gpu", "free", "length"), [("llama-3.1-8b", "h100", 40, 8192), ("qwen2.5-7b", "l40s", 30, 2048)]
)
def test_beside_a_large_neighbour_the_largest_share_that_is_ok_is_found(
    model: str, gpu: str, free: int, length: int
) -> None:
    plan = memory_plan(model, gpu, free_memory_gib=free, max_model_len=length)
    assert plan.verdict == "does_not_start"
    remedy = next(remedy for remedy in plan.judged.remedies if remedy.flag == "gpu_memory_utilization")
    assert remedy.verdict == "ok"

    def verdict(share: float) -> str:
        return memory_plan(model, gpu, free_memory_gib=free, max_model_len=length, gpu_memory_utilization=share).verdict

    assert verdict(remedy.value) == "ok"
    assert verdict(round(remedy.value + 0.001, 3)) != "ok"


def test_what_does_not_fit_is_missing_in_the_figure_as_in_the_table() -> None:
    plan = memory_plan("llama-3.3-70b", "h100").judged.plan
    missing = parts_of(plan)[-1]
    assert missing.name == "missing"
    assert missing.num_bytes == plan.margin_bytes < 0

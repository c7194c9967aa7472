"""Activations, non-torch memory and CUDA graphs: what the source says, and what real start-ups say."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from typing import Any

import pytest
from conftest import REPO_ROOT
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.calibrate.memory_fit import Evaluation, evaluate, fitted_data, table
from windtunnel.calibrate.startups import Unusable, read_rows, start_up, usable
from windtunnel.sim.deployment.gpu import GIB, load_gpu
from windtunnel.sim.deployment.kv_layout import V0_LAYOUT, kv_layout
from windtunnel.sim.deployment.memory_rules import memory_rules
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.deployment.overheads import Overheads, estimate_overheads
from windtunnel.sim.deployment.profile_run import bytes_per_logit, expert_buffers_bytes, num_captured_sizes
from windtunnel.sim.deployment.versions import profile

ROWS = read_rows()
OVERHEADS_JSON = REPO_ROOT / "sim" / "deployment" / "overheads.json"
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
B300_RUNS = REPO_ROOT.parent / "shared" / "steps" / "vllm_b300_runs.csv"


def overheads(model: str = "llama-3.1-8b", gpu: str = "h100", version: str = "vllm-0.19", **changes: Any) -> Overheads:
    settings = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024, "max_model_len": 8192, **changes}
    return estimate_overheads(load_model(model), load_gpu(gpu), version=profile(version), **settings)


def in_budget(found: Overheads) -> int:
    return found.activation_bytes + found.non_torch_bytes + found.cudagraph_bytes * found.cudagraph_inside


def test_activations_fell_with_0_17_when_sampling_no_longer_sorted() -> None:
    """5.64 and 2.2 GiB were logged for this model."""
    before, after = (overheads("qwen2.5-7b", version=name).activation_bytes / GIB for name in ("0.16", "0.17"))
    assert before == pytest.approx(5.64, abs=0.1)
    assert after == pytest.approx(2.21, abs=0.05)


def test_a_logit_costs_what_the_sampler_holds_of_it() -> None:
    half = load_model("llama-3.1-8b")
    full = replace(half, dtype="float32")
    sorting, masking = profile("vllm-0.16"), profile("vllm-0.17")
    assert [bytes_per_logit(half, version) for version in (sorting, masking)] == [38, 14]
    assert [bytes_per_logit(full, version) for version in (sorting, masking)] == [36, 12]


def test_communication_takes_two_gib_more_since_0_17() -> None:
    alone, several = (overheads(tensor_parallel_size=size).non_torch_bytes / GIB for size in (1, 4))
    earlier = overheads(version="0.16", tensor_parallel_size=4).non_torch_bytes / GIB
    assert alone == pytest.approx(0.25, abs=0.05)
    assert several == pytest.approx(2.13, abs=0.1)
    assert earlier == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize(
    ("gpu", "version", "inside"),
    [("h100", "0.19", False), ("h100", "0.20", True), ("mi300x", "0.24", False), ("mi300x", "0.26", True)],
)
def test_graphs_enter_the_budget_with_the_release_that_estimates_them(gpu: str, version: str, inside: bool) -> None:
    found = overheads(gpu=gpu, version=version)
    assert found.cudagraph_inside is inside
    assert found.cudagraph_bytes > 0
    assert ("beside gpu_memory_utilization" in " ".join(found.assumptions)) is not inside


def test_eager_execution_has_no_graphs_and_changes_nothing_else() -> None:
    graphs, eager = overheads(version="0.20"), overheads(version="0.20", enforce_eager=True)
    assert eager.cudagraph_bytes == 0
    assert in_budget(graphs) - in_budget(eager) == graphs.cudagraph_bytes


@pytest.mark.parametrize(
    ("model", "gpu", "version", "copies"),
    [
        ("qwen3-30b-a3b", "h100", "0.19", 2),
        ("qwen3-30b-a3b", "h100", "0.20", 0),
        ("qwen3-30b-a3b", "h100", "0.23", 2),
        ("qwen3-30b-a3b", "b200", "0.19", 2),
        ("qwen3-30b-a3b", "b200", "0.20", 0),
        ("qwen3-30b-a3b-fp8", "h100", "0.19", 2),
        ("gpt-oss-20b", "h100", "0.19", 0),
        ("llama-3.1-8b", "h100", "0.19", 0),
    ],
)
def test_experts_keep_two_copies_of_each_routed_token_unless_their_kernel_does_not(
    model: str, gpu: str, version: str, copies: int
) -> None:
    spec = load_model(model)
    kept = expert_buffers_bytes(spec, load_gpu(gpu), profile(version), 1, 8192)
    assert kept == copies * 8192 * spec.num_experts_per_tok * spec.hidden_size * 2


def test_replicas_that_share_experts_hold_a_communicator_and_the_tokens_of_all() -> None:
    """Blackwell keeps no buffers, so that the routed copies count where they are more than the sampler's logits."""

    def found(replicas: int, seqs: int = 1024) -> Overheads:
        settings = {"data_parallel_size": replicas, "expert_parallel": True, "max_num_seqs": seqs}
        return overheads("qwen3-30b-a3b", "b300", "0.20", **settings)

    alone, two, eight = (found(replicas) for replicas in (1, 2, 8))
    assert two.non_torch_bytes == eight.non_torch_bytes
    assert 0.5 * GIB < two.non_torch_bytes - alone.non_torch_bytes < 1.5 * GIB
    assert two.activation_bytes == alone.activation_bytes
    tokens = 8 * 8192
    fixed = found(16, 8).activation_bytes - 2 * (found(16, 8).activation_bytes - found(8, 8).activation_bytes)
    model = load_model("qwen3-30b-a3b")
    copies = 2 * model.num_experts_per_tok + 2
    assert eight.activation_bytes - fixed == pytest.approx(tokens * copies * model.hidden_size * 2, abs=2)
    assert "the experts on 65,536 tokens of all replicas" in eight.assumptions[0]


def test_kept_buffers_of_experts_are_those_of_the_tokens_of_all_replicas() -> None:
    model = load_model("qwen3-30b-a3b")
    alone, four = (overheads("qwen3-30b-a3b", data_parallel_size=size, expert_parallel=True) for size in (1, 4))
    buffers = expert_buffers_bytes(model, load_gpu("h100"), profile("0.19"), 1, 8192)
    assert four.activation_bytes - alone.activation_bytes == 3 * buffers


@pytest.mark.parametrize(
    ("version", "tokens"), [("0.11", 32_768), ("0.12", 16_384), ("0.17", 16_384), ("0.18", 65_536)]
)
def test_experts_worked_in_chunks_before_0_18(version: str, tokens: int) -> None:
    model, gpu = load_model("qwen3-30b-a3b"), load_gpu("h100")
    one, eight = (
        overheads("qwen3-30b-a3b", version=version, data_parallel_size=size, expert_parallel=True) for size in (1, 8)
    )
    buffers = [expert_buffers_bytes(model, gpu, profile(version), 1, each) for each in (8192, tokens)]
    assert eight.activation_bytes - one.activation_bytes == buffers[1] - buffers[0]


def test_replicas_of_a_dense_model_are_engines_of_their_own() -> None:
    assert overheads(data_parallel_size=8) == overheads()


@pytest.mark.parametrize(
    ("seqs", "budget", "sizes"), [(1024, 8192, 51), (256, 2048, 51), (128, 2048, 35), (4, 2048, 4), (1, 2048, 2)]
)
def test_as_many_sizes_are_captured_as_vllm_lists(seqs: int, budget: int, sizes: int) -> None:
    assert num_captured_sizes(seqs, budget) == sizes


@given(
    model=st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "nemotron-3-nano", "ministral-3-14b", "deepseek-v2-lite"]),
    version=st.sampled_from(["0.8", "0.16", "0.19", "0.20", "0.32"]),
    gpu=st.sampled_from(["h100", "b200", "mi300x", "l4"]),
    size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 32_768),
    seqs=st.integers(1, 2048),
)
def test_more_work_never_takes_less_memory(
    model: str, version: str, gpu: str, size: int, budget: int, seqs: int
) -> None:
    def settings(budget: int, seqs: int) -> Overheads:
        limits = {"max_num_batched_tokens": budget, "max_num_seqs": seqs, "tensor_parallel_size": size}
        return overheads(model, gpu, version, **limits)

    found = settings(budget, seqs)
    low, high = found.error_bytes
    assert low <= 0 <= high
    assert min(found.activation_bytes, found.non_torch_bytes, found.cudagraph_bytes) > 0
    for more in (settings(2 * budget, seqs), settings(budget, 2 * seqs)):
        assert more.activation_bytes >= found.activation_bytes
        assert more.cudagraph_bytes >= found.cudagraph_bytes
        assert more.non_torch_bytes == found.non_torch_bytes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpu": "rtx-3090"}, "RTX-3090 (measured:"),
        ({"version": "vllm-0.32"}, "vLLM 0.32 (measured: 0.8 to 0.20)"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size 16"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "pipelines of tensor-parallel groups"),
        ({"model": "qwen3-30b-a3b", "data_parallel_size": 16}, "data_parallel_size 16 (measured: 2, 4, 8"),
        ({"model": "qwen3-30b-a3b", "gpu": "mi300x", "data_parallel_size": 2}, "on NVIDIA cards"),
        ({"model": "qwen3-30b-a3b-fp8", "data_parallel_size": 2}, "data-parallel replicas of quantised experts"),
    ],
)
def test_outside_of_what_was_measured_the_interval_is_wider_and_the_reason_named(
    changes: dict[str, Any], named: str
) -> None:
    known, found = overheads(), overheads(**changes)
    assert not known.is_extrapolated
    assert found.is_extrapolated
    assert named in found.assumptions[-1]
    per_root = [(each.error_bytes[1] - each.error_bytes[0]) / in_budget(each) ** 0.5 for each in (known, found)]
    assert per_root[1] == pytest.approx(2 * per_root[0], rel=1e-6)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "max_model_len", *PARALLEL_SIZES])
def test_values_below_one_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be at least 1, got 0"):
        overheads(**{name: 0})


def test_impossible_splits_and_unknown_cache_types_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be split over tensor_parallel_size 3"):
        overheads(tensor_parallel_size=3)
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of"):
        overheads(kv_cache_dtype="fp3")


def test_three_quarters_of_the_start_ups_say_enough_and_the_others_why_not() -> None:
    found, reasons = usable(ROWS)
    assert len(found) + len(reasons) == len(ROWS) == 216
    assert len(found) >= 160
    assert all(reasons.values())


def test_a_start_up_is_laid_out_by_the_rules_of_its_own_release() -> None:
    """0.20.0 logs its tokens by groups, 0.20.1 by concurrency."""
    found = {each.row: each for each in usable(ROWS)[0]}
    assert {each.version for each in found.values() if each.version.startswith("vllm-0.20")} == {
        "vllm-0.20.0",
        "vllm-0.20.1",
    }
    for each in found.values():
        rules = memory_rules(each.setting.version).layout if ROWS[each.row]["vllm_version"] else V0_LAYOUT
        assert each.layouts.rules == rules
    hybrid = next(each for each in found.values() if each.version == "vllm-0.20.0" and each.layouts.is_hybrid)
    assert hybrid.tokens_in(hybrid.overhead_bytes) == pytest.approx(hybrid.logged, rel=0.01)


def test_a_start_up_without_a_model_is_no_use() -> None:
    with pytest.raises(Unusable, match="the model is not named"):
        start_up(0, {**ROWS[0], "model": ""})


def test_noted_arguments_count_more_than_the_column() -> None:
    row = next(row for row in ROWS if row["vllm_version"] == "0.20.0" and "gpu-memory-utilization: 0.92" in row["note"])
    assert row["gmu"] == "0.9"
    assert start_up(0, row).requested_bytes == pytest.approx(0.92 * load_gpu("h200").memory_bytes, abs=2)


def test_the_logged_parts_add_up_to_what_the_pool_leaves() -> None:
    found, _ = usable(ROWS)
    whole = [each for each in found if each.is_fitted and each.activation_bytes and len(each.weights_bytes) == 1]
    assert len(whole) > 25
    for each in whole:
        assert each.activation_bytes is not None
        assert each.non_torch_bytes is not None
        parts = each.activation_bytes + each.non_torch_bytes
        assert each.overhead_bytes == pytest.approx(parts, abs=0.025 * GIB), each.source


@pytest.fixture(scope="module")
def evaluations() -> list[Evaluation]:
    return evaluate(ROWS)


@pytest.mark.slow
def test_pools_of_models_left_out_are_predicted_within_the_bounds(evaluations: list[Evaluation]) -> None:
    """The acceptance: median 2 %, 90th percentile 6 %, coverage 85 %; also with every situation counted once."""
    for line in table(evaluations)[-2:]:
        assert line.median_error <= 0.02
        assert line.p90_error <= 0.06
        assert line.coverage >= 0.85


@pytest.mark.slow
def test_replicas_of_a_model_left_out_are_predicted_as_well_as_one_engine(evaluations: list[Evaluation]) -> None:
    replicas = [found for found in evaluations if found.num_replicas > 1]
    assert len(replicas) == 6
    assert all(found.covered and abs(found.error) < 0.0025 for found in replicas)


@pytest.mark.slow
def test_the_package_holds_what_the_fit_gives() -> None:
    shipped, fitted = json.loads(OVERHEADS_JSON.read_text()), json.loads(json.dumps(fitted_data(ROWS)))
    assert shipped["measured"] == {
        **fitted["measured"],
        "error_scale": pytest.approx(fitted["measured"]["error_scale"], abs=0.005),
    }
    for name, value in fitted["constants"].items():
        assert shipped["constants"][name] == pytest.approx(value, abs=0.02 if name.startswith("hidden") else 4 * 2**20)


@pytest.mark.skipif(not B300_RUNS.is_file(), reason="recorded runs are not at hand")
def test_a_model_that_no_constant_has_seen_is_predicted_on_b300() -> None:
    model, gpu = load_model("qwen3-32b"), load_gpu("b300")
    with B300_RUNS.open(encoding="utf-8") as file:
        runs = [row for row in csv.DictReader(file) if row["model"] == "Qwen/Qwen3-32B"]
    assert len(runs) >= 4
    for run in runs:
        size = int(run["tp"])
        found = overheads("qwen3-32b", "b300", run["vllm_version"], tensor_parallel_size=size)
        weights = model.weight_bytes(size) + model.rotary_cache_bytes()
        left = int(gpu.memory_bytes * float(run["gpu_memory_utilization"])) - weights - in_budget(found)
        blocks = kv_layout(model, tensor_parallel_size=size).num_blocks(left)
        assert blocks == pytest.approx(int(run["total_kv_blocks"]), rel=0.005), run["run"]

"""Composed step times against measured ones; skipped where the tables are not at hand."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks import calibration_kernels as benchmark
from benchmarks.calibration_b300 import SIZES, b300_table
from windtunnel.calibrate.aiconfigurator import installed_systems, read_tables
from windtunnel.calibrate.host import NO_HOST, host_of_others, learn_host, learned_host
from windtunnel.calibrate.kernel_attention import fit_attention
from windtunnel.calibrate.kernel_tables import read_profiled
from windtunnel.calibrate.operators import OperatorModel
from windtunnel.sim.deployment.model import load_model

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
PROFILES = SHARED / "kernels"
STEPS = SHARED / "steps" / "vllm_b300_qwen3_32b_sweep.parquet"

cached_tables = cache(read_tables)

needs_profiles = pytest.mark.skipif(not (PROFILES / "v1_dense.parquet").is_file(), reason="needs the kernel profiles")
needs_tables = pytest.mark.skipif(installed_systems() is None, reason="needs aiconfigurator-core")
needs_steps = pytest.mark.skipif(not STEPS.is_file(), reason="needs the recorded steps")


@needs_profiles
def test_mixed_steps_left_out_of_the_fit_are_within_6_percent() -> None:
    name = "meta-llama/Llama-3.1-8B"
    tables = read_profiled(PROFILES, "RTX 4090", name)
    assert tables.attention is not None
    fitted, left_out = benchmark.split_mixed(tables.attention, 0)
    mixed = (fitted["chunk"] > 0) & (fitted["num_decodes"] > 0)
    with_mixed, _ = benchmark.left_out_errors(tables, name, 1, fit_attention(fitted), left_out)
    without, _ = benchmark.left_out_errors(tables, name, 1, fit_attention(fitted.take(~mixed)), left_out)
    assert with_mixed.median_percent <= 2
    assert with_mixed.p90_percent <= 6
    assert without.median_percent <= 6


@needs_tables
@needs_steps
def test_real_steps_on_b300_are_composed_within_8_percent_at_the_median() -> None:
    tables, model = cached_tables("B300"), load_model("Qwen3-32B")
    comparisons = {}
    for size in SIZES:
        steps = b300_table(STEPS, size)
        composed = OperatorModel(model, "B300", size, tables, host=NO_HOST)
        comparisons[size] = composed.beside(steps.shapes, steps.step_s)
    found, kept = learn_host(comparisons, "again"), learned_host()
    assert astuple(found)[:-1] == pytest.approx(astuple(kept)[:-1], rel=1e-3, abs=1e-9)
    for size, each in comparisons.items():
        tested = host_of_others(comparisons, size, "the others")
        assert np.median(np.abs(each.with_host_s(tested) / each.step_s - 1.0)) <= 0.08
        if size == 1:
            continue
        prompts, unslowed = each.shapes.num_prefill_seqs > 0, replace(tested, clocks_share=0.0)
        with_clocks, without = (
            np.abs(each.with_host_s(host) / each.step_s - 1.0)[prompts] for host in (tested, unslowed)
        )
        assert np.median(with_clocks) < np.median(without), "what one card shows holds for several"


@needs_tables
@needs_profiles
def test_two_makers_tables_of_one_card_compose_to_like_prefills() -> None:
    name = "Qwen/Qwen3-32B"
    model = load_model("Qwen3-32B")
    theirs = read_profiled(PROFILES, "RTX PRO 6000", name)
    assert theirs.attention is not None
    chunks = theirs.attention.where(num_decodes=0, prefix=0)
    assert chunks is not None
    shapes = benchmark.shape_of(chunks)
    profiled = OperatorModel(model, "RTX PRO 6000", 1, theirs, host=NO_HOST).step_times_s(shapes)
    composed = OperatorModel(model, "RTX PRO 6000", 1, read_tables("RTX PRO 6000"), host=NO_HOST).step_times_s(shapes)
    assert composed == pytest.approx(profiled, rel=0.1)


@needs_tables
@pytest.mark.parametrize("gpu", ["H100", "H200", "A100-80GB", "L40S", "B200"])
@pytest.mark.parametrize(
    "name", ["Llama-3.1-8B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-32B", "Llama-3.3-70B-Instruct"]
)
def test_bundled_models_are_composed_near_measured_shapes(gpu: str, name: str) -> None:
    tables, model = cached_tables(gpu), load_model(name)
    for size in (size for size in (1, 2, 4, 8) if size in model.tensor_parallel_sizes(8)):
        described = OperatorModel(model, gpu, size, tables, host=learned_host()).describe()
        assert all(each["nearest_measured_ratio"] <= 2 for each in described["gemm_shapes"].values())

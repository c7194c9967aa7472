"""The profiles that come with the package: what is listed is there, is physical, and claims no more than is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO_ROOT
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.calibrate import bundle
from windtunnel.calibrate.distil import Limits, Scatter, designed_shapes
from windtunnel.sim.cost.bundled import (
    INDEX,
    PROFILES,
    BundledProfile,
    bundled_profiles,
    find_bundled,
    largest_steps,
    load_bundled,
)
from windtunnel.sim.cost.profile import ProfileError
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.engine.plan import StepShape

ALL = bundled_profiles()
NAMES = [each.name for each in ALL]
COMPOSED = [each for each in ALL if each.source == "composed"]
B300_STEPS = REPO_ROOT.parent / "shared" / "steps" / "vllm_b300_qwen3_32b_sweep.parquet"
SMALL_DECODES = [StepShape(n, context * n, 0, 0, 0, 0, n) for n in (1, 4, 16, 64) for context in (128, 1024, 4096)]
PROMPTS = [StepShape(0, 0, 1, n, 0, n * (n + 1) // 2, 1) for n in (256, 1024, 4096, 8192)]


def seconds(profile: BundledProfile, shapes: list[StepShape]) -> Any:
    return np.array([profile.load().step_time_s(shape) for shape in shapes])


def by_deployment() -> dict[tuple[str, str | None, int], BundledProfile]:
    return {(each.model, each.gpu, each.tensor_parallel_size): each for each in COMPOSED}


# --- the folder


def test_the_index_is_that_of_the_files(tmp_path: Path) -> None:
    for path in PROFILES.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bundle.write_index(tmp_path)
    assert (tmp_path / INDEX.name).read_text() == INDEX.read_text()


def test_every_profile_is_small_and_named_after_what_it_is_of() -> None:
    for each in ALL:
        assert each.path.stat().st_size < 12_000, each.name
        if each.gpu is not None:
            assert each.name == bundle.profile_name(
                load_model(each.model), load_gpu(each.gpu), each.tensor_parallel_size
            )


def test_every_wanted_deployment_has_a_profile() -> None:
    assert {case.name for case in bundle.cases()} <= set(NAMES)
    assert {each.model for each in COMPOSED} == {load_model(name).name for name in bundle.MODELS}
    assert {each.gpu for each in COMPOSED} == set(bundle.GPUS)


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_loads_and_says_what_it_rests_on(name: str) -> None:
    cost = load_bundled(name)
    told = cost.evidence.provenance
    assert told["licence"] if "licence" in told else told["source"] == "measured"
    assert told["statement"]
    assert told["stated_error"]["rests_on"] if told["source"] == "composed" else cost.evidence.errors


def test_composed_profiles_claim_no_measured_steps() -> None:
    for each in COMPOSED:
        evidence = each.load().evidence
        assert evidence.errors == ()
        assert each.statement.startswith("composed from kernel tables, not measured end to end")
        has_links = each.gpu == "L40S" and each.tensor_parallel_size > 1
        assert ("reach each other at" in each.statement) == has_links
        if each.stated_error["p50_percent"] is not None:
            assert "doubled, as no step of this profile's own card was compared" in each.stated_error["rests_on"]
        assert all(bin_.num_steps == 0 for bin_ in evidence.noise)


def test_composed_profiles_state_at_least_twice_what_was_seen_where_real_steps_are_known() -> None:
    seen = json.loads(bundle.COMPOSITION_FILE.read_text())["errors"]
    for each in (each for each in COMPOSED if each.stated_error["p50_percent"] is not None):
        for key in ("p50_percent", "p90_percent"):
            assert each.stated_error[key] >= 2.0 * max(row[key] for row in seen), (each.name, key)


def test_intervals_of_composed_profiles_are_as_wide_as_the_stated_error() -> None:
    for each in COMPOSED:
        source = each.load().evidence.provenance["stated_error"]["source"]["p90_percent"] / 100.0
        for bin_ in each.load().evidence.noise:
            assert bin_.low <= 1.0 / (1.0 + source) - 1.0 + 1e-3, each.name
            assert bin_.high >= 1.0 / (1.0 - source) - 1.0 - 1e-3, each.name


def test_distilling_lost_little() -> None:
    for each in COMPOSED:
        lost = each.load().evidence.provenance["stated_error"]["distillation"]["all"]
        assert lost["p50_percent"] <= 2.0, each.name
        assert lost["p90_percent"] <= 6.0, each.name


def test_noise_of_composed_profiles_is_the_scatter_of_real_steps() -> None:
    known = bundle.real_scatter()
    recorded = [load_bundled(f"qwen3-32b-b300-tp{size}-bf16") for size in bundle.SIZES]
    assert known.sigmas == pytest.approx(Scatter.of(recorded, "again").sigmas)
    for each in COMPOSED:
        for bin_ in each.load().evidence.noise:
            assert bin_.sigma == known.sigma(bin_.regime)
            assert bin_.sigma < 0.06


def test_profiles_of_many_cards_on_pcie_claim_no_error() -> None:
    """Their all-reduces take most of a step, and those of the next host may take a sixth."""
    for each in COMPOSED:
        on_host = load_gpu(each.gpu or "").link.startswith("PCIe") and each.tensor_parallel_size > 1
        told = each.load().evidence.provenance["stated_error"]
        assert ("otherwise" in told) == on_host, each.name
        assert (each.stated_error["p50_percent"] is None) == (on_host and each.tensor_parallel_size > 2), each.name
        if on_host:
            assert f"how {each.tensor_parallel_size} cards on PCIe 4.0 x16 reach each" in each.stated_error["rests_on"]


def test_the_index_says_how_large_steps_may_be() -> None:
    for each in ALL:
        assert each.largest_steps == largest_steps(each.load().evidence.domain)
    recorded = find_bundled("qwen3-32b", "b300", 1)
    assert recorded is not None
    assert recorded.largest_steps["num_decode_seqs"] == 32


def test_the_documentation_shows_what_there_is(tmp_path: Path) -> None:
    there = bundle.DOCUMENTATION.read_text(encoding="utf-8")
    again = tmp_path / "again.md"
    again.write_text(there.replace(bundle.markdown_table(), "old"), encoding="utf-8")
    bundle.write_documentation(again)
    assert again.read_text(encoding="utf-8") == there
    again.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold <!-- table: profiles -->"):
        bundle.write_documentation(again)


# --- physics


@given(st.sampled_from(ALL), st.integers(0, 1000), st.tuples(*[st.integers(0, 3000)] * 7))
def test_more_work_never_costs_less(profile: BundledProfile, seed: int, rises: tuple[int, ...]) -> None:
    few = designed_shapes(Limits(300, 20_000, 9000, 400_000), seed=seed, num_random=4)
    few = StepShape(*(values[seed % 11 :: 11] for values in few))
    more: Any = StepShape(*(values + rise for values, rise in zip(few, rises, strict=True)))
    cost = profile.load()
    assert (cost.step_time_s(more) >= cost.step_time_s(few)).all()


def pairs(slower: str, faster: str) -> Iterator[tuple[BundledProfile, BundledProfile]]:
    known = by_deployment()
    for (model, gpu, size), profile in known.items():
        if gpu == slower and (model, faster, size) in known:
            yield profile, known[model, faster, size]


@pytest.mark.parametrize(
    ("slower", "faster"), [("A100-80GB-SXM", "H100-SXM"), ("H100-SXM", "H200"), ("H200", "B200"), ("L40S", "H100-SXM")]
)
def test_decodes_are_faster_on_the_card_with_more_bandwidth(slower: str, faster: str) -> None:
    compared = list(pairs(slower, faster))
    assert len(compared) >= 8
    for slow, fast in compared:
        assert (seconds(fast, SMALL_DECODES) <= 1.03 * seconds(slow, SMALL_DECODES)).all(), (slow.name, fast.name)


@pytest.mark.parametrize(("slower", "faster"), [("A100-80GB-SXM", "H100-SXM"), ("L40S", "H100-SXM"), ("H200", "B200")])
def test_prompts_are_faster_on_the_card_with_more_flops(slower: str, faster: str) -> None:
    for slow, fast in pairs(slower, faster):
        assert (seconds(fast, PROMPTS) < seconds(slow, PROMPTS)).all(), (slow.name, fast.name)


def doubled() -> Iterator[tuple[BundledProfile, BundledProfile]]:
    """Profiles of a deployment on NVLink and of the same one on twice the cards."""
    known = {(each.model, each.gpu, each.tensor_parallel_size): each for each in ALL}
    for (model, gpu, size), profile in known.items():
        double = known.get((model, gpu, 2 * size))
        if double is not None and gpu is not None and load_gpu(gpu).link.startswith("NVLink"):
            yield profile, double


def test_twice_the_cards_on_nvlink_are_never_slower_beyond_what_is_stated() -> None:
    compared = list(doubled())
    assert len(compared) >= 40
    for few, many in compared:
        error = min(0.05, *(each.stated_error["p50_percent"] / 100.0 for each in (few, many)))
        inside = [
            shape
            for shape in (*SMALL_DECODES, *PROMPTS)
            if not any(each.load().extrapolates(shape) for each in (few, many))
        ]
        assert len(inside) >= 8
        assert (seconds(many, inside) <= (1.0 + error) * seconds(few, inside)).all(), many.name


def test_large_prompts_gain_from_twice_the_cards_on_nvlink_but_never_all_of_it() -> None:
    for few, many in doubled():
        ratio = seconds(many, PROMPTS[2:3]) / seconds(few, PROMPTS[2:3])
        assert (ratio > 0.5).all(), many.name
        assert (ratio < 0.95).all(), many.name


def test_twice_the_cards_are_never_twice_as_fast_in_small_decodes() -> None:
    compared = 0
    for few, many in doubled():
        one_s, two_s = seconds(few, SMALL_DECODES[:3]), seconds(many, SMALL_DECODES[:3])
        assert (two_s > 0.5 * one_s).all(), many.name
        if few.tensor_parallel_size <= 2 and load_model(few.model).num_parameters > 2e10:
            assert (two_s < one_s).all(), many.name
            compared += 1
    assert compared >= 8


def test_no_decode_is_faster_than_reading_the_weights_and_no_prompt_than_its_flops() -> None:
    for each in ALL:
        if each.gpu is None:
            continue
        model, gpu, size = load_model(each.model), load_gpu(each.gpu), each.tensor_parallel_size
        read_s = (model.dense_linear_bytes(size) + model.embedding_bytes(size)) / gpu.hbm_bandwidth_bytes_per_s
        assert (seconds(each, SMALL_DECODES) > read_s).all(), each.name
        flops = [2 * model.dense_linear_parameters(size) * shape.prefill_tokens for shape in PROMPTS]
        assert (seconds(each, PROMPTS) > np.array(flops) / gpu.bf16_flops_per_s).all(), each.name


def test_a_step_takes_at_most_ten_times_what_the_peaks_allow() -> None:
    """Units: a profile in milliseconds, or of a tenth of the layers, would not pass both this and the last test."""
    for each in ALL:
        if each.gpu is None or (each.gpu == "L40S" and each.tensor_parallel_size > 1):
            continue
        model, gpu, size = load_model(each.model), load_gpu(each.gpu), each.tensor_parallel_size
        read_s = (model.dense_linear_bytes(size) + model.embedding_bytes(size)) / gpu.hbm_bandwidth_bytes_per_s
        assert seconds(each, SMALL_DECODES[:1])[0] < 10 * read_s + 5e-3, each.name


# --- finding one


def test_a_profile_is_found_by_any_name_of_its_parts() -> None:
    one = find_bundled("llama-3.1-8b", "h100", 2)
    assert one is not None
    assert one == find_bundled("meta-llama/Llama-3.1-8B-Instruct", "H100-SXM", 2, "bfloat16", "auto")
    assert one == find_bundled("Llama-3.1-8B-Instruct", "NVIDIA H100 80GB", 2, "bf16", "bfloat16")
    assert (one.model, one.gpu, one.tensor_parallel_size) == ("meta-llama/Llama-3.1-8B-Instruct", "H100-SXM", 2)


@pytest.mark.parametrize(
    "wanted",
    [
        ("llama-3.1-8b", "h100", 3),
        ("llama-3.1-8b", "h100", 1, "float16"),
        ("llama-3.1-8b", "h100", 1, "auto", "fp8"),
        ("llama-3.1-8b", "t4", 1),
        ("nobody/nothing", "h100", 1),
        ("llama-3.1-8b", "no such card", 1),
    ],
)
def test_what_there_is_not_is_not_found(wanted: tuple[Any, ...]) -> None:
    assert find_bundled(*wanted) is None


def test_real_steps_come_before_composed_ones() -> None:
    found = find_bundled("qwen3-32b", "b300", 4)
    assert found is not None
    assert found.source == "recorded"


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ValueError, match=r"no bundled profile 'llama-3.1-8b-h100'; nearest: llama-3.1-8b-h100-sxm-tp"):
        load_bundled("llama-3.1-8b-h100")
    assert load_bundled(NAMES[0].upper()) is load_bundled(NAMES[0])


def test_a_damaged_profile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ALL[0].path.read_text().replace('"base_s": ', '"base_s": 1', 1)
    (tmp_path / ALL[0].path.name).write_text(text)
    monkeypatch.setattr("windtunnel.sim.cost.bundled.PROFILES", tmp_path)
    with pytest.raises(ProfileError, match="checksum"):
        ALL[0].load()


# --- building


def test_a_profile_of_a_processor_can_be_dropped_into_the_folder(tmp_path: Path) -> None:
    from windtunnel.calibrate.fit import Form, StepTimeFit
    from windtunnel.calibrate.step_tables import StepTable
    from windtunnel.sim.cost.profile import save_profile

    shapes = designed_shapes(Limits(16, 512, 256, 4000), num_random=10)
    told = {"source": "measured", "statement": "measured here", "model": "own", "dtype": "float32", "cpu": "some CPU"}
    table = StepTable(shapes, 1e-3 + 1e-4 * shapes.num_tokens)
    save_profile(StepTimeFit(form=Form()).fit(table, provenance=told), tmp_path / "own-cpu.json")
    (entry,) = bundle.write_index(tmp_path)["profiles"]
    assert (entry["name"], entry["gpu"], entry["device"], entry["source"]) == ("own-cpu", None, "some CPU", "measured")
    assert entry["stated_error"]["p90_percent"] is not None
    assert "held" not in BundledProfile(**entry).statement


def test_a_profile_that_does_not_say_what_it_is_of_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    from windtunnel.sim.cost.fitted import FittedCost
    from windtunnel.sim.cost.profile import save_profile

    cost = ALL[0].load()
    save_profile(FittedCost(cost.parameters, replace(cost.evidence, provenance={"model": "x"})), tmp_path / "x.json")
    with pytest.raises(ValueError, match="must hold source, statement, dtype"):
        bundle.write_index(tmp_path)


def test_composing_again_gives_the_bundled_profile() -> None:
    pytest.importorskip("aiconfigurator_core")
    case = next(case for case in bundle.cases(["llama-3.1-8b"], ["H100-SXM"]) if case.tensor_parallel_size == 2)
    again, known = bundle.compose(case), load_bundled(case.name)
    shapes = designed_shapes(Limits(256, 8192, 8192, 300_000), seed=4, num_random=50)
    assert again.step_time_s(shapes) == pytest.approx(known.step_time_s(shapes), rel=1e-3)
    assert again.evidence.provenance["stated_error"] == known.evidence.provenance["stated_error"]


@pytest.mark.skipif(not B300_STEPS.exists(), reason="the steps on B300 are not here")
def test_fitting_again_gives_the_bundled_profile() -> None:
    again, known = bundle.fit_b300(B300_STEPS, 4), load_bundled("qwen3-32b-b300-tp4-bf16")
    shapes = designed_shapes(Limits(128, 4096, 2048, 300_000), seed=4, num_random=50)
    assert again.step_time_s(shapes) == pytest.approx(known.step_time_s(shapes), rel=1e-3)
    assert known.evidence.errors[0].p50_percent < 2.5


def test_only_what_there_is_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"no such composed profile: nothing; there are .*llama-3.1-8b-h100-sxm-tp1"):
        bundle.main(["--only", "nothing"])


def test_the_index_is_json_that_lists_each_profile_once() -> None:
    listed = [each["name"] for each in json.loads(INDEX.read_text())["profiles"]]
    assert listed == sorted(set(listed))
    assert len(listed) == len(list(PROFILES.glob("*.json"))) - 1

"""Transfer: a profile of one card, model or split as one of another, by roofline ratios."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.calibrate.distil import Limits, Scatter, SourceError, designed_shapes, distil
from windtunnel.calibrate.transfer import (
    ERRORS_FILE,
    TransferError,
    changes,
    evaluate,
    evaluate_on_real_steps,
    transfer,
    transfer_errors,
    transferred_s,
)
from windtunnel.sim.cost.bundled import bundled_profiles
from windtunnel.sim.cost.features import Curve
from windtunnel.sim.cost.fitted import Domain, Evidence, FittedCost, NoiseBin
from windtunnel.sim.cost.roofline import RooflineCost
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.engine.plan import StepShape

LIMITS = Limits(max_num_seqs=128, max_model_len=8192, max_num_batched_tokens=4096, num_kv_tokens=150_000)
MODEL = load_model("llama-3.1-8b")
H100 = ("llama-3.1-8b", "h100", 1)
SHAPES = designed_shapes(LIMITS, seed=5, num_random=60)


def roofline(model: str, gpu: str, size: int) -> RooflineCost:
    return RooflineCost(load_model(model), load_gpu(gpu), size)


def made(model: str, gpu: str, size: int) -> FittedCost:
    return distil(
        roofline(model, gpu, size).step_time_s,
        LIMITS,
        provenance={"source": "composed", "kv_cache_dtype": "auto", "engine": "vLLM 0.32"},
        extra_error=SourceError(4.0, 9.0, "steps of a like card"),
        scatter=Scatter({"decode": 0.02}, "steps of a like card do"),
    )


@pytest.fixture(scope="module")
def of_h100() -> FittedCost:
    return made(*H100)


def errors(cost: Any, truth: Any) -> Any:
    return np.abs(cost.step_time_s(SHAPES) / truth.step_time_s(SHAPES) - 1.0)


def test_a_transfer_to_itself_is_the_profile_itself(of_h100: FittedCost) -> None:
    same = transfer(of_h100, H100, ("meta-llama/Llama-3.1-8B-Instruct", "H100-SXM", 1), limits=LIMITS)
    assert np.median(errors(same, of_h100)) < 0.002
    assert errors(same, of_h100).max() < 0.03
    assert same.evidence.provenance["stated_error"]["source"]["p90_percent"] == pytest.approx(9.0, abs=0.5)


@pytest.mark.parametrize(
    "target",
    [("llama-3.1-8b", "h200", 1), ("llama-3.1-8b", "l40s", 1), ("llama-3.1-8b", "h100", 4), ("qwen3-32b", "h100", 2)],
)
def test_where_every_card_reaches_the_same_share_of_its_peaks_a_transfer_is_right(
    of_h100: FittedCost, target: tuple[str, str, int]
) -> None:
    moved = transfer(of_h100, H100, target, limits=LIMITS)
    assert np.median(errors(moved, roofline(*target))) < 0.03
    assert np.percentile(errors(moved, roofline(*target)), 90) < 0.08


def test_what_a_card_misses_of_its_peaks_is_kept(of_h100: FittedCost) -> None:
    """A source that takes half as long again as its roofline in all its card does is transferred as such a one."""
    start, end = roofline(*H100), roofline("llama-3.1-8b", "a100", 1)
    moved = transferred_s(_slowed(of_h100, 1.5), start, end, SHAPES)
    plain = transferred_s(of_h100, start, end, SHAPES)
    assert np.median(moved / plain) == pytest.approx(1.5, rel=0.1)
    assert (moved > 1.3 * plain).all()


def _slowed(cost: FittedCost, factor: float) -> FittedCost:
    changes: dict[str, Any] = {}
    for each in fields(cost.parameters):
        value = getattr(cost.parameters, each.name)
        if isinstance(value, Curve):
            changes[each.name] = Curve(value.knots, [factor * seconds for seconds in value.seconds])
        elif each.name.endswith("_s"):
            changes[each.name] = factor * value
    return FittedCost(replace(cost.parameters, **changes), cost.evidence)


@given(
    st.sampled_from(["hbm_bandwidth_bytes_per_s", "bf16_flops_per_s", "link_bytes_per_s"]),
    st.floats(1.0, 20.0),
    st.sampled_from([1, 2, 8]),
)
@settings(max_examples=15)
def test_a_faster_card_is_never_slower(field: str, factor: float, size: int) -> None:
    if not _SOURCE:
        _SOURCE.append(made(*H100))
    start, card = roofline(*H100), load_gpu("a100")
    faster = replace(card, **{field: factor * getattr(card, field)})
    few = StepShape(*(values[::7] for values in SHAPES))
    slow_s, fast_s = (transferred_s(_SOURCE[0], start, RooflineCost(MODEL, gpu, size), few) for gpu in (card, faster))
    assert (fast_s <= slow_s * (1 + 1e-12)).all()


_SOURCE: list[FittedCost] = []


def test_intervals_are_wider_than_those_of_the_source(of_h100: FittedCost) -> None:
    moved = transfer(of_h100, H100, ("llama-3.1-8b", "a100", 2))
    for shape in (StepShape(16, 16_000, 0, 0, 0, 0, 16), StepShape(0, 0, 1, 2048, 0, 2048 * 2049 // 2, 1)):
        own, other = of_h100.noise_bin(shape), moved.noise_bin(shape)
        assert other.low < own.low
        assert other.high > own.high
        assert other.sigma == own.sigma, "a systematic error is no scatter"
    stated = moved.evidence.provenance["stated_error"]
    of_kind = transfer_errors()["gpu+tensor_parallel_size"]
    assert stated["p90_percent"] >= 9.0 + of_kind.p90_percent
    assert str(of_kind.num_pairs) in stated["rests_on"]


def test_a_transferred_profile_says_that_it_is_one(of_h100: FittedCost) -> None:
    told = transfer(of_h100, H100, ("qwen2.5-7b", "l40s", 1)).evidence.provenance
    assert told["source"] == "transferred"
    assert told["statement"] == (
        "transferred from meta-llama/Llama-3.1-8B-Instruct on 1 x H100-SXM to Qwen/Qwen2.5-7B-Instruct on 1 x L40S by "
        "roofline ratios, not measured there"
    )
    assert (told["model"], told["gpu"], told["tensor_parallel_size"]) == ("Qwen/Qwen2.5-7B-Instruct", "L40S", 1)
    assert told["transferred_from"]["provenance"]["source"] == "composed"


def test_the_domain_stays_that_of_the_source(of_h100: FittedCost) -> None:
    moved = transfer(of_h100, H100, ("qwen2.5-7b", "h200", 1))
    for regime, box in moved.evidence.domain.boxes.items():
        own = of_h100.evidence.domain.boxes[regime]
        assert all(box[name][1] <= own[name][1] for name in ("num_decode_seqs", "num_tokens", "decode_context_tokens"))


def test_a_source_that_states_no_error_is_refused() -> None:
    silent = distil(roofline(*H100).step_time_s, LIMITS, provenance={})
    with pytest.raises(ValueError, match="states no error against real steps"):
        transfer(silent, H100, ("llama-3.1-8b", "h200", 1))


def test_errors_of_the_sources_own_held_out_steps_count_where_none_are_stated(of_h100: FittedCost) -> None:
    from windtunnel.sim.cost.fitted import ErrorLine

    line = ErrorLine("all", 40, 40, 3.0, 2.0, 7.0, 9.0, 0.0, 90.0)
    evidence = Evidence(of_h100.evidence.domain, of_h100.evidence.noise, errors=(line,))
    moved = transfer(FittedCost(of_h100.parameters, evidence), H100, ("llama-3.1-8b", "h200", 1))
    assert moved.evidence.provenance["stated_error"]["p90_percent"] >= 7.0 + transfer_errors()["gpu"].p90_percent


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (("qwen2.5-7b", "h100", 8), "8"),
        (("llama-3.1-8b", "h999", 1), "unknown GPU"),
        (("nothing", "h100", 1), "nothing"),
    ],
)
def test_a_target_that_cannot_be_is_refused(of_h100: FittedCost, target: tuple[str, str, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        transfer(of_h100, H100, target)


@pytest.mark.parametrize(
    ("source", "target"), [(H100, ("llama-3.1-8b", "l40s", 4)), (("llama-3.1-8b", "l40s", 8), H100)]
)
def test_nothing_is_transferred_where_rooflines_know_nothing_of_the_links(
    of_h100: FittedCost, source: tuple[str, str, int], target: tuple[str, str, int]
) -> None:
    with pytest.raises(ValueError, match=r"more than two cards on PCIe 4.0 x16"):
        transfer(of_h100, source, target)


def test_what_changes_is_named() -> None:
    start = roofline(*H100)
    assert changes(start, start) == "nothing"
    assert changes(start, roofline("qwen3-32b", "h200", 1)) == "gpu+model"
    assert changes(start, roofline("llama-3.1-8b", "h100", 2)) == "tensor_parallel_size"


def test_the_table_of_errors_is_that_of_the_bundled_profiles() -> None:
    """Rebuilt profiles without a rebuilt table, or the reverse, are seen here."""
    table = json.loads(ERRORS_FILE.read_text(encoding="utf-8"))
    written = [TransferError(**row) for row in (*table["errors"], *table["on_real_steps"])]
    found = (*evaluate(), *evaluate_on_real_steps())
    assert [row.changed for row in found] == [row.changed for row in written]
    for ours, theirs in zip(found, written, strict=True):
        assert ours.num_pairs == theirs.num_pairs
        assert ours[2:6] == pytest.approx(theirs[2:6], abs=0.11)


def test_every_kind_of_transfer_was_tried() -> None:
    kinds = {"gpu", "model", "tensor_parallel_size", "gpu+model", "gpu+tensor_parallel_size"}
    kinds |= {"model+tensor_parallel_size", "gpu+model+tensor_parallel_size"}
    assert set(transfer_errors()) == kinds
    assert all(row.num_pairs >= 10 and row.p50_percent <= row.p90_percent for row in transfer_errors().values())


def test_a_composed_profile_of_a_like_card_comes_near_real_steps() -> None:
    """B300 is B200 with more memory and flops; its steps were recorded from a real vLLM."""
    row = transfer_errors("on_real_steps")["B200 to B300"]
    assert row.num_pairs == 4
    assert row.p50_percent <= 6.0
    assert row.p90_percent <= 12.0


def test_a_pair_of_profiles_without_common_steps_is_no_evidence() -> None:
    one = next(each for each in bundled_profiles() if each.gpu == "H200")
    assert evaluate([one]) == ()


def test_a_profile_that_refuses_steps_can_be_transferred(of_h100: FittedCost) -> None:
    box = Domain.of(StepShape(*(np.array([value]) for value in (4, 400, 0, 0, 0, 0, 4))))  # type: ignore[arg-type]
    strict = FittedCost(
        of_h100.parameters,
        Evidence(box, (NoiseBin("decode", 4, 0.01, -0.02, 0.02, 50),), provenance=of_h100.evidence.provenance),
        refuse_outside=True,
    )
    assert float(transfer(strict, H100, ("llama-3.1-8b", "h200", 1), limits=LIMITS).step_time_s(SHAPES).max()) > 0.0

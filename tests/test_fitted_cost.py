"""The fitted cost model: its physics, its domain and its file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel import simulate
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.features import Curve, graph_sizes, regime_of
from windtunnel.sim.cost.fitted import (
    Domain,
    ErrorLine,
    Evidence,
    FittedCost,
    FittedParameters,
    NoiseBin,
    OutsideDomain,
    extrapolation_warning,
)
from windtunnel.sim.cost.profile import ProfileError, load_profile, save_profile
from windtunnel.sim.engine.plan import StepShape

PARAMETERS = FittedParameters(
    base_s=4e-3,
    tokens=Curve((0, 32, 1024, 8192), (0.0, 1e-4, 1.6e-2, 0.11)),
    decode_seqs=Curve((0, 64), (0.0, 2e-4)),
    decode_context=Curve((0, 8192, 65536), (0.0, 3e-4, 8e-4)),
    prefill_s=2e-4,
    prefill_seq_s=5e-5,
    pair_s=8e-10,
    prefill_context_s=3e-8,
    sampled_s=1e-6,
    mixed_s=1e-4,
    mixed_seq_s=2e-6,
    eager_s=3e-4,
    graph_sizes=graph_sizes(512),
)
BOX = {
    "num_decode_seqs": (1, 64),
    "decode_context_tokens": (1, 65536),
    "num_prefill_seqs": (0, 0),
    "prefill_tokens": (0, 0),
    "prefill_context_tokens": (0, 0),
    "prefill_pairs": (0, 0),
    "num_sampled": (1, 64),
    "num_tokens": (1, 64),
}
NOISE = (NoiseBin("decode", 8, 0.01, -0.02, 0.03, 50), NoiseBin("decode", 64, 0.02, -0.05, 0.04, 50))
EVIDENCE = Evidence(
    Domain({"decode": BOX}),
    NOISE,
    (ErrorLine("all", 100, 20, 1.25, 1.0, 2.5, 5.0, -0.1, 91.0),),
    memory={"extra_gib": 0.25},
    provenance={"gpu": "B300", "tp": 4},
)
COST = FittedCost(PARAMETERS, EVIDENCE)
DECODE = StepShape(8, 8000, 0, 0, 0, 0, 8)

counts = st.integers(0, 9000)
seconds = st.floats(0, 1e-2, allow_subnormal=False)


@st.composite
def curves(draw: Callable[..., Any]) -> Curve:
    knots = (0, *sorted(draw(st.sets(st.integers(1, 10_000), min_size=1, max_size=6))))
    rises = draw(st.lists(seconds, min_size=len(knots) - 1, max_size=len(knots) - 1))
    return Curve(knots, [0.0, *np.cumsum(rises).tolist()])


@st.composite
def costs(draw: Callable[..., Any]) -> FittedCost:
    numbers = {name: draw(seconds) for name in ("prefill_s", "prefill_seq_s", "mixed_s", "mixed_seq_s", "eager_s")}
    parameters = FittedParameters(
        base_s=draw(st.floats(1e-6, 1e-2)),
        tokens=draw(curves()),
        decode_seqs=draw(curves()),
        decode_context=draw(curves()),
        pair_s=draw(st.floats(0, 1e-8)),
        prefill_context_s=draw(st.floats(0, 1e-6)),
        sampled_s=draw(st.floats(0, 1e-5)),
        graph_sizes=draw(st.sampled_from([(), (1, 2, 4, 8, 16), graph_sizes(512)])),
        **numbers,
    )
    return FittedCost(parameters, EVIDENCE)


@given(costs(), st.lists(counts, min_size=7, max_size=7), st.integers(0, 6), st.integers(1, 5000))
def test_more_of_anything_never_costs_less(cost: FittedCost, values: list[int], grown: int, by: int) -> None:
    more = [value + by * (place == grown) for place, value in enumerate(values)]
    assert cost.step_time_s(StepShape(*more)) >= cost.step_time_s(StepShape(*values)) > 0


@given(costs(), st.lists(st.lists(counts, min_size=7, max_size=7), min_size=1, max_size=20))
def test_arrays_cost_what_their_elements_do_to_the_bit(cost: FittedCost, rows: list[list[int]]) -> None:
    together: Any = StepShape(*np.array(rows).T)
    one_by_one = [cost.step_time_s(StepShape(*row)) for row in rows]
    assert cost.step_time_s(together).tolist() == one_by_one
    assert cost.extrapolates(together).tolist() == [cost.extrapolates(StepShape(*row)) for row in rows]


def test_a_step_costs_the_sum_of_its_terms() -> None:
    shape = StepShape(4, 8192, 2, 1020, 100, 600_000, 5)
    terms = [4e-3, 1.6e-2 + 3e-4, 2e-4 * 4 / 64, 3e-4, 2e-4, 2 * 5e-5, 600_000 * 8e-10, 100 * 3e-8, 1e-4, 8e-6, 5e-6]
    assert COST.step_time_s(shape) == pytest.approx(sum(terms), rel=1e-12)


def test_batches_are_padded_to_the_next_graph() -> None:
    def time_s(tokens: int) -> float:
        return float(COST.step_time_s(StepShape(0, 0, 1, tokens, 0, 0, 0)))

    assert time_s(241) == time_s(248) < time_s(249)
    assert time_s(513) - time_s(512) > PARAMETERS.eager_s


def test_the_graph_sizes_are_those_of_vllm() -> None:
    sizes = graph_sizes(512)
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-2:] == (496, 512)
    assert {248, 256, 272} <= set(sizes)
    assert 264 not in sizes
    assert graph_sizes(20) == (1, 2, 4, 8, 16)
    assert len(sizes) == 51


def test_a_curve_goes_on_no_flatter_than_its_mean() -> None:
    curve = Curve((0, 10, 20), (0.0, 1.0, 1.0))
    assert curve.at(15) == 1.0
    assert curve.at(40) == pytest.approx(2.0)


@given(st.lists(curves(), min_size=1, max_size=4), st.integers(0, 9000))
def test_a_mean_of_curves_is_the_mean_of_their_values_as_far_as_all_are_known(many: list[Curve], amount: int) -> None:
    mean = Curve.mean(many)
    within = min(amount, min(curve.knots[-1] for curve in many))
    assert mean.at(within) == pytest.approx(sum(curve.at(within) for curve in many) / len(many), rel=1e-9, abs=1e-15)
    assert mean.at(amount + 1) >= mean.at(amount)


@pytest.mark.parametrize(
    ("knots", "values", "message"),
    [
        ((0, 5), (0.0,), "as many seconds as knots"),
        ((1, 5), (0.0, 1.0), "begin with 0 s at 0"),
        ((0, 5, 5), (0.0, 1.0, 1.0), "must rise, got 5 behind 5"),
        ((0, 5), (0.0, -1.0), "never fall, got -1.0 behind 0.0"),
        ((0, 5), (0.0, float("nan")), "never fall"),
        ((0, 5.5), (0.0, 1.0), "whole numbers"),
        ((0, 5), (0.0, "1"), "must be numbers"),
    ],
)
def test_a_curve_that_could_fall_is_refused(knots: Any, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(knots, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pair_s": -1e-9}, "pair_s must be at least 0"),
        ({"base_s": 0.0}, "base_s must be above 0"),
        ({"sampled_s": "1"}, "sampled_s must be a number"),
        ({"tokens": [1]}, "tokens must be a curve"),
        ({"graph_sizes": (4, 2)}, "graph_sizes must be whole numbers that rise"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PARAMETERS, **change)


def test_what_was_not_measured_is_flagged_with_the_reason() -> None:
    assert not COST.extrapolates(DECODE)
    large = DECODE._replace(num_decode_seqs=65, num_sampled=65)
    assert COST.extrapolates(large)
    assert "num_decode_seqs 65 is outside of 1 to 64" in COST.evidence.domain.reasons(large)
    assert COST.evidence.domain.reasons(StepShape(0, 0, 1, 8, 0, 36, 1)) == ("no prefill step was measured",)


@given(st.tuples(*(st.integers(max(0, BOX[name][0] - 1), BOX[name][1] + 1) for name in StepShape._fields)))
def test_a_step_is_held_exactly_if_nothing_speaks_against_it(values: tuple[int, ...]) -> None:
    shape, domain = StepShape(*values), COST.evidence.domain
    assert domain.holds(shape) == (not domain.reasons(shape)) == (not bool(domain.outside(shape)))


def test_a_run_beyond_the_domain_is_told_of() -> None:
    run = simulate(model="llama-3.1-8b", gpu="h100", num_requests=3, input=8, output=5, arrival="constant:rate=1")
    tables = [replica.steps for replica in run.records.replicas]
    every_step = {"num_tokens": (1, 99), "decode_context_tokens": (0, 99), "prefill_tokens": (0, 99)}
    whole = {name: every_step.get(name, (0, 9)) for name in BOX}
    wide = Domain(dict.fromkeys(("decode", "prefill", "mixed"), whole))
    assert extrapolation_warning(FittedCost(PARAMETERS, replace(EVIDENCE, domain=wide)), tables) is None
    assert extrapolation_warning(ConstantCost(1.0), tables) is None
    told = extrapolation_warning(COST, tables)
    assert told is not None
    assert re.match(r"3 of 15 steps \(\d+% of the time\) lie outside of what the profile was measured at", told)


def test_extrapolation_can_be_refused() -> None:
    strict = FittedCost(PARAMETERS, EVIDENCE, refuse_outside=True)
    assert strict.step_time_s(DECODE) == COST.step_time_s(DECODE)
    outside = DECODE._replace(decode_context_tokens=65537)
    with pytest.raises(OutsideDomain, match="decode_context_tokens 65537 is outside of 1 to 65536"):
        strict.step_time_s(outside)
    many: Any = StepShape(*np.array([DECODE, outside]).T)
    with pytest.raises(OutsideDomain):
        strict.step_time_s(many)


def test_the_domain_is_the_box_of_each_regime() -> None:
    rows: Any = StepShape(*np.array([DECODE, DECODE._replace(decode_context_tokens=9000), (0, 0, 1, 9, 0, 45, 1)]).T)
    domain = Domain.of(rows)
    assert list(domain.boxes) == ["decode", "prefill"]
    assert domain.boxes["decode"]["decode_context_tokens"] == (8000, 9000)
    assert not domain.outside(rows).any()


def test_intervals_follow_the_regime_and_size() -> None:
    time_s = COST.step_time_s(DECODE)
    assert COST.interval_s(DECODE) == (time_s * 0.98, time_s * 1.03)
    assert COST.noise_bin(DECODE._replace(num_decode_seqs=9)) == NOISE[1]
    assert COST.noise_bin(DECODE._replace(num_decode_seqs=999)) == NOISE[1]
    mixed = StepShape(1, 1, 1, 1, 0, 1, 2)
    assert regime_of(mixed) == "mixed"
    assert COST.noise_bin(mixed) == NOISE[1], "the widest, where nothing was measured"


@given(costs())
def test_a_profile_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, cost: FittedCost) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    save_profile(cost, path)
    loaded = load_profile(path)
    assert isinstance(loaded, FittedCost)
    assert (loaded.parameters, loaded.evidence) == (cost.parameters, cost.evidence)
    assert loaded.describe() == cost.describe()
    written = path.read_bytes()
    save_profile(loaded, path)
    assert path.read_bytes() == written


def test_a_profile_can_be_read_by_people(tmp_path: Path) -> None:
    save_profile(COST, tmp_path / "profile.json")
    text = (tmp_path / "profile.json").read_text()
    assert '"knots": [0, 32, 1024, 8192]' in text
    assert json.loads(text)["provenance"] == {"gpu": "B300", "tp": 4}
    assert json.loads(text)["memory"] == {"extra_gib": 0.25}


@pytest.mark.parametrize(
    ("edit", "resealed", "message"),
    [
        (lambda p: p["parameters"].update(base_s=1e-3), False, "checksum .* does not fit the content"),
        (lambda p: p.update(schema_version=9), False, "schema_version 9 is not known, .* the newer windtunnel"),
        (lambda p: p.pop("schema_version"), False, "lacks schema_version"),
        (lambda p: p.pop("checksum"), False, "lacks checksum"),
        (lambda p: p.pop("domain"), False, "lacks domain"),
        (lambda p: p["parameters"].pop("pair_s"), True, "parameters lacks pair_s"),
        (lambda p: p["parameters"].update(pair_s=-1.0), True, "pair_s must be at least 0"),
        (lambda p: p["parameters"]["tokens"].update(knots=[0, 3]), True, "as many seconds as knots"),
        (lambda p: p["parameters"].update(tokens=3), True, "parameters.tokens must be an object"),
        (lambda p: p["domain"]["decode"].update(num_tokens=[1]), True, "two whole numbers"),
        (lambda p: p["domain"].update(sleep={}), True, "regimes are decode, prefill, mixed, got 'sleep'"),
        (lambda p: p.update(noise=[]), True, "at least one bin of noise"),
        (lambda p: p["noise"][0].update(sigma="wide"), True, "noise.sigma must be a number"),
        (lambda p: p["noise"][0].update(sigma=1000.0), True, "sigma of a noise bin must be at most 5, got 1000.0"),
        (lambda p: p["errors"][0].pop("num_steps"), True, "errors lacks num_steps"),
        (lambda p: p.update(calibrated=False), True, "calibrated must be true"),
    ],
)
def test_a_profile_that_is_not_ours_or_not_whole_is_refused(
    edit: Callable[[Any], Any], resealed: bool, message: str, tmp_path: Path
) -> None:
    from windtunnel.sim.cost.profile import _checksum

    path = tmp_path / "profile.json"
    save_profile(COST, path)
    profile = json.loads(path.read_text())
    edit(profile)
    if resealed:
        profile["checksum"] = _checksum(profile)
    path.write_text(json.dumps(profile))
    with pytest.raises(ProfileError, match=message) as info:
        load_profile(path)
    assert str(path) in str(info.value)


def test_the_layout_of_a_profile_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(COST, path)
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert load_profile(path).step_time_s(DECODE) == COST.step_time_s(DECODE)


def test_the_error_is_stated_in_a_line() -> None:
    assert COST.describe()["error"] == (
        "median 1.0 %, nine of ten within 2.5 %, on 100 steps of shapes left out of the fit"
    )

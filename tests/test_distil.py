"""Distilling: a profile from any function that prices steps, what it keeps of it and what it states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.calibrate.distil import Limits, Otherwise, Scatter, SourceError, designed_shapes, distil
from windtunnel.sim.cost.features import graph_sizes, regimes_of
from windtunnel.sim.cost.fitted import FittedCost, NoiseBin
from windtunnel.sim.cost.roofline import RooflineCost
from windtunnel.sim.cost.statement import statement_of
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.engine.plan import StepShape

LIMITS = Limits(max_num_seqs=256, max_model_len=16_384, max_num_batched_tokens=8192, num_kv_tokens=300_000)
H100 = RooflineCost(load_model("llama-3.1-8b"), load_gpu("h100"))
ERROR = SourceError(6.0, 15.0, "12 steps of a like card")
SCATTER = Scatter({"decode": 0.01, "prefill": 0.04}, "12 steps of a like card do")
ORIGIN = {"source": "composed"}


@pytest.fixture(scope="module")
def profile() -> FittedCost:
    return distil(H100.step_time_s, LIMITS, provenance=ORIGIN, extra_error=ERROR, scatter=SCATTER)


def arrays(*rows: StepShape) -> Any:
    return StepShape(*np.array(rows, np.int64).T)


def test_a_profile_prices_shapes_that_it_has_not_seen_as_the_function_does(profile: FittedCost) -> None:
    fresh = designed_shapes(LIMITS, seed=77)
    errors = np.abs(profile.step_time_s(fresh) / H100.step_time_s(fresh) - 1.0)
    assert np.median(errors) < 0.02
    assert np.percentile(errors, 90) < 0.06


def test_padding_to_cuda_graphs_is_kept() -> None:
    sizes = np.array(graph_sizes(512))

    def padded_s(shape: Any) -> Any:
        tokens = np.asarray(shape.num_tokens)
        padded = np.where(tokens <= 512, sizes[np.minimum(np.searchsorted(sizes, tokens), len(sizes) - 1)], tokens)
        return 4e-3 + 2e-5 * padded

    cost = distil(padded_s, LIMITS, provenance=ORIGIN)
    assert cost.parameters.graph_sizes[:4] == (1, 2, 4, 8)
    of_nine, of_sixteen = (StepShape(n, 100 * n, 0, 0, 0, 0, n) for n in (9, 16))
    assert cost.step_time_s(of_nine) == pytest.approx(cost.step_time_s(of_sixteen), rel=0.01)


def test_the_same_arguments_give_the_same_profile(profile: FittedCost) -> None:
    again = distil(H100.step_time_s, LIMITS, provenance=ORIGIN, extra_error=ERROR, scatter=SCATTER)
    assert (again.parameters, again.evidence) == (profile.parameters, profile.evidence)


def test_intervals_hold_the_error_of_the_source_on_both_sides(profile: FittedCost) -> None:
    """Real steps that the function misses by up to its 90th percentile lie inside."""
    for shape in (StepShape(8, 8000, 0, 0, 0, 0, 8), StepShape(0, 0, 1, 512, 0, 131_328, 1)):
        priced_s = float(profile.step_time_s(shape))
        low_s, high_s = profile.interval_s(shape)
        assert low_s <= priced_s / 1.15
        assert high_s >= priced_s / 0.85


def test_noise_is_the_scatter_of_real_steps_and_not_how_far_the_profile_may_be_off(profile: FittedCost) -> None:
    sigmas = {each.regime: each.sigma for each in profile.evidence.noise}
    assert (sigmas["decode"], sigmas["prefill"]) == (0.01, 0.04)
    assert sigmas["mixed"] == sigmas["outside"] == 0.04, "regimes that were not seen scatter as the widest"
    assert profile.evidence.provenance["scatter"]["rests_on"] == SCATTER.rests_on
    assert all(each.high - each.low > 6 * each.sigma for each in profile.evidence.noise)


def test_scatter_that_is_not_known_is_no_noise() -> None:
    cost = distil(H100.step_time_s, LIMITS, provenance=ORIGIN, extra_error=ERROR)
    assert {each.sigma for each in cost.evidence.noise} == {0.0}
    assert "not known" in cost.evidence.provenance["scatter"]["rests_on"]
    assert Scatter.carried(cost) is None


def test_scatter_of_fits_is_the_mean_of_theirs_by_the_steps_behind_it(profile: FittedCost) -> None:
    few, many = (NoiseBin("decode", 8, sigma, -0.1, 0.1, num_steps) for sigma, num_steps in ((0.05, 10), (0.01, 30)))
    wide = NoiseBin("outside", 8, 0.5, -0.9, 0.9, 30)
    fits = [
        FittedCost(profile.parameters, replace(profile.evidence, noise=bins, provenance={}))
        for bins in ((few, wide), (many,))
    ]
    assert Scatter.of(fits, "they do").sigmas == {"decode": pytest.approx(0.02)}
    carried = Scatter.carried(fits[0])
    assert carried is not None
    assert carried.sigmas == {"decode": 0.05}
    assert Scatter.carried(profile) == SCATTER


@pytest.mark.parametrize(
    ("sigmas", "rests_on", "what"),
    [
        ({"decode": -0.1}, "x", "at least 0"),
        ({}, "x", "at least one regime"),
        ({"decode": 0.1}, " ", "rests_on must say"),
    ],
)
def test_a_scatter_that_is_none_is_refused(sigmas: dict[str, float], rests_on: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Scatter(sigmas, rests_on)


def test_other_prices_that_may_be_right_widen_the_interval_and_the_stated_error(profile: FittedCost) -> None:
    cost = _with_other_prices(0.8, 1.25)
    stated = cost.evidence.provenance["stated_error"]
    assert stated["otherwise"]["p90_percent"] == pytest.approx(25.0, abs=0.1)
    own = profile.evidence.provenance["stated_error"]
    assert stated["p90_percent"] == pytest.approx(own["p90_percent"] + 25.0, abs=0.2)
    assert "links of other hosts" in stated["rests_on"]
    for mine, wide in zip(profile.evidence.noise, cost.evidence.noise, strict=True):
        assert 1.0 + wide.low == pytest.approx(0.8 * (1.0 + mine.low))
        assert 1.0 + wide.high == pytest.approx(1.25 * (1.0 + mine.high))


def test_an_error_beyond_all_use_is_stated_as_not_known() -> None:
    cost = _with_other_prices(0.3, 1.0)
    stated = cost.evidence.provenance["stated_error"]
    assert (stated["p50_percent"], stated["p90_percent"]) == (None, None)
    assert "links of other hosts, with which steps take from 0.3 to 1 times as long" in stated["rests_on"]
    told = statement_of(cost.describe())
    assert told is not None
    assert told.error.startswith("not known: links of other hosts")
    assert cost.interval_s(StepShape(8, 8000, 0, 0, 0, 0, 8))[0] < 0.31 * H100.step_time_s(
        StepShape(8, 8000, 0, 0, 0, 0, 8)
    )


def _with_other_prices(*factors: float) -> FittedCost:
    def priced(factor: float) -> Any:
        return lambda shapes: factor * H100.step_time_s(shapes)

    otherwise = Otherwise(tuple(map(priced, factors)), "links of other hosts")
    return distil(H100.step_time_s, LIMITS, provenance=ORIGIN, extra_error=ERROR, scatter=SCATTER, otherwise=otherwise)


def test_no_error_of_real_steps_is_claimed(profile: FittedCost) -> None:
    assert profile.evidence.errors == ()
    assert {each.num_steps for each in profile.evidence.noise} == {0}
    stated = profile.evidence.provenance["stated_error"]
    distilled = stated["distillation"]["all"]
    assert stated["p90_percent"] == pytest.approx(15.0 + distilled["p90_percent"], abs=0.06)
    assert stated["p50_percent"] == pytest.approx(6.0 + distilled["p50_percent"], abs=0.06)
    assert stated["rests_on"] == "12 steps of a like card"
    assert "not real steps" in stated["distillation"]["against"]


def test_a_source_of_unknown_error_states_none() -> None:
    stated = distil(H100.step_time_s, LIMITS, provenance=ORIGIN).evidence.provenance["stated_error"]
    assert (stated["p50_percent"], stated["p90_percent"]) == (None, None)
    assert stated["rests_on"] == "no real step was compared"


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_more_work_never_costs_less_even_where_the_function_falls(seed: int) -> None:
    rng = np.random.default_rng(seed)
    few, rises = designed_shapes(LIMITS, seed=seed, num_random=5), rng.integers(0, 3000, 7)
    more: Any = StepShape(*(values + rise for values, rise in zip(few, rises, strict=True)))
    assert (_erratic().step_time_s(more) >= _erratic().step_time_s(few)).all()


_MADE: list[FittedCost] = []


def _erratic() -> FittedCost:
    """From prices that fall and rise by turns."""
    if not _MADE:
        limits = Limits(64, 2048, 2048, 40_000)
        _MADE.append(distil(lambda shape: 1e-3 * (2.0 + np.sin(shape.num_tokens / 7.0)), limits, provenance=ORIGIN))
    return _MADE[0]


@given(
    st.integers(1, 600),
    st.integers(32, 40_000),
    st.integers(16, 20_000),
    st.integers(600, 1_000_000),
    st.integers(0, 9),
)
@settings(max_examples=25)
def test_designed_steps_are_ones_that_the_engine_could_do(
    seats: int, length: int, tokens: int, kv_tokens: int, seed: int
) -> None:
    limits = Limits(seats, length, tokens, kv_tokens)
    shape = designed_shapes(limits, seed=seed, num_random=20)
    assert (shape.num_tokens >= 1).all()
    assert (shape.num_tokens <= tokens).all()
    assert (shape.num_decode_seqs + shape.num_prefill_seqs <= seats).all()
    assert (shape.decode_context_tokens >= shape.num_decode_seqs).all()
    assert (shape.decode_context_tokens <= shape.num_decode_seqs * length).all()
    assert (shape.prefill_tokens + shape.prefill_context_tokens <= shape.num_prefill_seqs * length).all()
    assert (shape.decode_context_tokens + shape.prefill_context_tokens + shape.prefill_tokens <= kv_tokens).all()
    assert (shape.num_sampled <= shape.num_decode_seqs + shape.num_prefill_seqs).all()
    most = shape.prefill_tokens * (shape.prefill_context_tokens + (shape.prefill_tokens + 1) / 2)
    assert (shape.prefill_pairs >= shape.prefill_tokens).all()
    assert (shape.prefill_pairs <= most).all()


def test_designed_steps_reach_every_regime_and_the_limits() -> None:
    shape = designed_shapes(LIMITS)
    assert set(regimes_of(shape)) == {0, 1, 2}
    assert shape.num_decode_seqs.max() == LIMITS.max_num_seqs
    assert shape.num_tokens.max() == LIMITS.max_num_batched_tokens
    assert shape.prefill_context_tokens.max() > 0.5 * LIMITS.max_model_len
    assert shape.decode_context_tokens.max() > 0.5 * LIMITS.num_kv_tokens


def test_limits_of_a_profile_are_those_of_its_domain(profile: FittedCost) -> None:
    limits = Limits.of_domain(profile.evidence.domain)
    assert limits.max_num_seqs == 256
    assert limits.max_num_batched_tokens == 8192
    assert limits.num_kv_tokens <= LIMITS.num_kv_tokens
    assert limits.within(Limits(4, 100, 64, 1000)) == Limits(4, 100, 64, 1000)


@pytest.mark.parametrize(
    ("values", "what"),
    [((0, 1, 16, 1), "max_num_seqs .* at least 1, got 0"), ((1, 1, 8, 1), "max_num_batched_tokens .* 16, got 8")],
)
def test_limits_out_of_range_are_refused(values: tuple[int, int, int, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Limits(*values)


@pytest.mark.parametrize(
    ("error", "what"),
    [((9.0, 3.0, "x"), "got 9.0 and 3.0"), ((5.0, 95.0, "x"), "95.0"), ((1.0, 2.0, " "), "rests_on must say")],
)
def test_an_error_that_is_none_is_refused(error: tuple[float, float, str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        SourceError(*error)


def test_prices_that_are_not_positive_are_refused() -> None:
    with pytest.raises(ValueError, match="the time must be above 0"):
        distil(lambda shape: 0.0 * shape.num_tokens, LIMITS, provenance=ORIGIN)

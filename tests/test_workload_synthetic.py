"""Drawn workloads: arrivals, lengths and pauses have the distributions they name, and a seed fixes them."""

from __future__ import annotations

import math
import time
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.scenarios.workloads import (
    AtOnce,
    Constant,
    Empirical,
    Exponential,
    ExponentialPause,
    Fixed,
    FixedPause,
    Gamma,
    Geometric,
    Lognormal,
    LognormalPause,
    OnOff,
    Poisson,
    Prefixes,
    Quantiles,
    Ramp,
    Sessions,
    Uniform,
    arrivals_from,
    durations_from,
    lengths_from,
    prefixes_from,
    sessions_from,
    synthetic_workload,
    with_arrivals,
    with_max_concurrency,
)
from windtunnel.scenarios.workloads.specs import shown
from windtunnel.sim.rng import stream
from windtunnel.sim.workload import Workload

SECOND = 10**9


def draw(lengths: Any, n: int = 200_000, seed: int = 0) -> Any:
    return lengths.sample(stream(seed, "test"), n)


def due(arrivals: Any, n: int = 200_000, seed: int = 0) -> Any:
    return arrivals.sample_ns(stream(seed, "test"), n)


def assert_mean(values: Any, mean: float) -> None:
    """The sample's mean lies within five standard errors of the mean that was asked for."""
    error = float(np.std(values)) / math.sqrt(len(values))
    assert abs(float(np.mean(values)) - mean) < 5 * error + 1e-9


def columns(workload: Workload) -> dict[str, Any]:
    values = {field.name: getattr(workload, field.name) for field in fields(workload)}
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}


# Random streams


def test_a_stream_is_the_same_each_time_and_another_one_under_another_name() -> None:
    first = stream(7, "workload", "arrivals").random(4).tolist()
    assert stream(7, "workload", "arrivals").random(4).tolist() == first
    others = [
        stream(8, "workload", "arrivals"),
        stream(7, "arrivals", "workload"),
        stream(7, "workloadarrivals"),
        stream(7, "workload", "arrivals", 0),
        stream(7, "workload"),
        stream(7),
    ]
    assert all(other.random(4).tolist() != first for other in others)
    assert stream(7, 1).random() != stream(7, "1").random()


def test_a_stream_gives_the_same_numbers_on_every_machine() -> None:
    """Pinned: a change here changes every seeded result."""
    assert stream(0, "workload", "arrivals").bit_generator.random_raw(2).tolist() == [
        2113582556242767647,
        14365264854644816755,
    ]


def test_a_stream_refuses_negative_seeds_and_unclear_names() -> None:
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        stream(-1)
    with pytest.raises(TypeError):
        stream(0, 1.5)  # type: ignore[arg-type]


def test_streams_are_not_correlated() -> None:
    a, b = (stream(3, "replica", number).random(100_000) for number in (0, 1))
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 5 / math.sqrt(100_000)


# Lengths


@pytest.mark.parametrize(
    ("lengths", "mean"),
    [
        (Fixed(17), 17),
        (Uniform(10, 30), 20),
        (Uniform.around(1000, 0.2), 1000),
        (Lognormal(512, 0.8), 512),
        (Lognormal(512, 1.5), 512),
        (Lognormal(300, std=450), 300),
        (Exponential(256), 256),
        (Geometric(6), 6),
        (Geometric(1), 1),
        (Quantiles.of({"0": 100, "1": 300}), 200),
        (Quantiles.of({0: 100, "p50": 200, 1: 1000}), 375),
        (Empirical((5, 5, 20)), 10),
    ],
)
def test_a_distribution_has_the_mean_it_names(lengths: Any, mean: float) -> None:
    values = draw(lengths)
    assert values.dtype == np.int64
    assert values.min() >= 1
    assert_mean(values, mean)


def test_a_lognormal_has_the_spread_it_names() -> None:
    assert float(np.log(draw(Lognormal(5000, 0.8))).std()) == pytest.approx(0.8, rel=0.01)
    assert float(draw(Lognormal(5000, std=2500)).std()) == pytest.approx(2500, rel=0.02)


def test_a_uniform_reaches_both_ends() -> None:
    assert sorted(set(draw(Uniform(3, 6), 1000).tolist())) == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("tokens", "ratio", "low", "high"),
    [(1000, 0.0, 1000, 1000), (1024, 0.2, 819, 1229), (3, 0.9, 1, 6), (1, 0.5, 1, 2), (100, 0.1, 90, 111)],
)
def test_a_range_ratio_is_that_of_the_random_dataset(tokens: int, ratio: float, low: int, high: int) -> None:
    """Computed in floats there, too: 100 · 1.1 is a little more than 110."""
    assert Uniform.around(tokens, ratio) == Uniform(low, high)


def test_percentiles_alone_begin_at_one_token_and_continue_their_last_line() -> None:
    made = lengths_from({"dist": "quantiles", "p50": 200, "p90": 600, "p99": 1500})
    assert made == Quantiles(((0.0, 1.0), (0.5, 200.0), (0.9, 600.0), (0.99, 1500.0), (1.0, 1600.0)))
    values = draw(made)
    assert (int(values.min()), int(values.max())) == (1, 1600)
    assert [float(np.quantile(values, share)) for share in (0.5, 0.9, 0.99)] == pytest.approx(
        [200, 600, 1500], rel=0.02
    )
    assert lengths_from({"dist": "quantiles", "p50": 5}) == Quantiles(((0.0, 1.0), (0.5, 5.0), (1.0, 9.0)))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("fixed:tokens=12", lengths_from),
        ("uniform:low=1,high=9", lengths_from),
        ("lognormal:mean=512,sigma=0.8,max=8192", lengths_from),
        ("lognormal:mean=512.5,min=3,std=100", lengths_from),
        ("geometric:mean=4", lengths_from),
        ("quantiles:p0=1,p50=200,p99.9=4000,p100=9000", lengths_from),
        ("gamma:rate=2,burstiness=0.5,rescale=true", arrivals_from),
        ("poisson:rate=inf", arrivals_from),
        ("at_once", arrivals_from),
        ("on_off:rate=2,on_s=60,off_s=0.5,off_rate=1", arrivals_from),
        ("ramp:start_rate=1,end_rate=2,strategy=exponential", arrivals_from),
        ("fixed:seconds=3", durations_from),
        ("exponential:mean_s=2", durations_from),
    ],
)
def test_a_specification_is_shown_as_it_may_be_written(text: str, read: Any) -> None:
    assert shown(read(text)) == text
    assert read(shown(read(text))) == read(text)


def test_quantiles_come_out_as_they_went_in() -> None:
    given_points = {0.5: 200, 0.9: 900, 0.99: 4000, 1.0: 9000}
    values = draw(Quantiles.of(given_points))
    for share, tokens in given_points.items():
        assert float(np.quantile(values, share)) == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize("kind", [Lognormal(100, 1.0, 50, 150), Exponential(100, 50, 150), Geometric(100, 50, 150)])
def test_clipping_keeps_to_the_bounds(kind: Any) -> None:
    values = draw(kind, 10_000)
    assert (int(values.min()), int(values.max())) == (50, 150)


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        (12, Fixed(12)),
        ({"dist": "fixed", "tokens": 12}, Fixed(12)),
        ({"dist": "uniform", "low": 1, "high": 9}, Uniform(1, 9)),
        ({"dist": "uniform", "tokens": 100, "range_ratio": 0.25}, Uniform(75, 125)),
        ({"dist": "lognormal", "mean": 512, "sigma": 0.8, "min": 1, "max": 8192}, Lognormal(512, 0.8, 1, 8192)),
        ({"dist": "lognormal", "mean": 512, "std": 100.5}, Lognormal(512, std=100.5)),
        ({"dist": "exponential", "mean": 9.5, "max": 20}, Exponential(9.5, maximum=20)),
        ({"dist": "geometric", "mean": 4}, Geometric(4)),
        ({"dist": "quantiles", "quantiles": {"p50": 20, "1": 90}}, Quantiles(((0, 1), (0.5, 20.0), (1.0, 90.0)))),
        ({"dist": "quantiles", "quantiles": [[1, 90], [0.5, 20]]}, Quantiles(((0, 1), (0.5, 20.0), (1.0, 90.0)))),
        ({"dist": "quantiles", "p50": 20, "p100": 90}, Quantiles(((0, 1), (0.5, 20.0), (1.0, 90.0)))),
        ({"dist": "quantiles", "p50": 20, "min": 5, "max": 90}, Quantiles(((0, 5), (0.5, 20.0), (1.0, 90.0)))),
        ({"dist": "quantiles", "p0": 5, "p99.9": 20, "max": 90}, Quantiles(((0, 5), (0.999, 20.0), (1.0, 90.0)))),
        ({"dist": "empirical", "values": [3, 1, 2]}, Empirical((3, 1, 2))),
        ("1k", Fixed(1000)),
        ("uniform:low=1,high=9", Uniform(1, 9)),
        ("lognormal:mean=2k,sigma=0.5,max=8K", Lognormal(2000, 0.5, 1, 8192)),
    ],
)
def test_a_length_is_made_from_plain_values(spec: Any, made: Any) -> None:
    assert lengths_from(spec) == made
    assert lengths_from(made) is made


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"dist": "lognorm", "mean": 5},
            r"prompt: unknown dist 'lognorm' \(do you mean 'lognormal'\?\).*fixed, uniform",
        ),
        ({"mean": 5}, "prompt: the key 'dist' is missing"),
        ({"dist": "lognormal", "mean": 5, "sigm": 1}, r"prompt: lognormal has no 'sigm' \(do you mean 'sigma'\?\)"),
        ({"dist": "lognormal", "sigma": 1}, "prompt: lognormal needs mean"),
        ({"dist": "lognormal", "mean": 5}, "either sigma or std"),
        ({"dist": "lognormal", "mean": 5, "sigma": 1, "std": 1}, "either sigma or std"),
        ({"dist": "lognormal", "mean": 0, "sigma": 1}, "mean must be a finite number above 0"),
        ({"dist": "lognormal", "mean": 5, "sigma": -1}, "sigma must be a finite number of at least 0"),
        ({"dist": "lognormal", "mean": 5, "sigma": 1, "min": 0}, "min must be a whole number of at least 1"),
        ({"dist": "exponential", "mean": 5, "min": 9, "max": 8}, "max must be a whole number of at least 9"),
        ({"dist": "exponential", "mean": float("inf")}, "mean must be a finite number above 0"),
        ({"dist": "geometric", "mean": 0.5}, "mean must be a finite number of at least 1"),
        ({"dist": "fixed", "tokens": 1.5}, "tokens must be a whole number of at least 1"),
        ({"dist": "uniform", "low": 5, "high": 4}, "high must be a whole number of at least 5"),
        ({"dist": "uniform", "low": 5}, "either low and high or tokens and range_ratio"),
        ({"dist": "uniform", "tokens": 5, "range_ratio": 1}, "range_ratio must be a number of at least 0 and below 1"),
        ({"dist": "quantiles"}, "no quantile is given, write for example p50 = 200"),
        ({"dist": "quantiles", "p50": 5, "p99": 4}, "must not fall"),
        ({"dist": "quantiles", "p50": 5, "p101": 6}, "a name from p0 to p100, got 'p101'"),
        ({"dist": "quantiles", "p50": 0}, "p50 must be a number of at least 1"),
        ({"dist": "quantiles", "p50": 5, "max": 9, "p100": 9}, "max and the quantile 1 say the same thing twice"),
        ({"dist": "quantiles", "p50": 5, "quantiles": 5}, "quantiles must be pairs"),
        ({"dist": "quantiles", "median": 5}, "quantiles has no 'median' .*, it has quantiles, min, max, p50, p99, …"),
        ({"dist": "fixed", "tokens": 10**20}, "tokens must be .* and at most 2,147,483,647, got 1000"),
        ({"dist": "lognormal", "mean": "2x", "sigma": 1}, "mean must be a finite number above 0, got '2x'"),
        ({"dist": ["fixed"]}, r"unknown dist \['fixed'\]"),
        ({"dist": "quantiles", "quantiles": {"p50": 5, "1": 4}}, "must not fall"),
        ({"dist": "quantiles", "quantiles": {"p50": 5, "0.5": 5, "1": 6}}, "must rise"),
        ({"dist": "quantiles", "quantiles": {"median": 5, "1": 6}}, "a number from 0 to 1 or a name from p0 to p100"),
        ({"dist": "empirical", "values": []}, "at least one"),
        ({"dist": "empirical", "values": [1, 0]}, "at least 1"),
        (0, "tokens must be a whole number of at least 1"),
        ("many", "unknown dist 'many', must be one of fixed"),
        ("uniform:low", "'low' has no value"),
        (1.5, "must be a number of tokens or a table"),
        (True, "must be a number of tokens or a table"),
    ],
)
def test_a_length_that_is_none_says_what_is_allowed(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^prompt: .*{message.removeprefix('prompt: ')}"):
        lengths_from(spec, "prompt")


# Arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    gaps_s = np.diff(due(Gamma(8, burstiness)), prepend=0) / SECOND
    assert_mean(gaps_s, 1 / 8)
    assert float(gaps_s.std() / gaps_s.mean()) == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)


def test_poisson_is_gamma_with_burstiness_one() -> None:
    assert due(Poisson(8), 1000).tolist() == due(Gamma(8, 1.0), 1000).tolist()


@pytest.mark.parametrize("arrivals", [Poisson(8, rescale=True), Gamma(8, 0.3, rescale=True), Constant(8)])
def test_rescaled_arrivals_end_when_the_rate_says(arrivals: Any) -> None:
    times = due(arrivals, 1000)
    assert times[-1] == 125 * SECOND


def test_rescaling_keeps_the_pattern_as_vllm_does() -> None:
    plain, rescaled = due(Gamma(8, 0.5), 500), due(Gamma(8, 0.5, rescale=True), 500)
    factor = 500 / 8 / (plain[-1] / SECOND)
    assert np.abs(rescaled - plain * factor).max() <= 2


def test_constant_arrivals_are_exact() -> None:
    assert due(Constant(4), 4).tolist() == [SECOND // 4, SECOND // 2, 3 * SECOND // 4, SECOND]
    assert due(Gamma(4, math.inf), 4).tolist() == due(Constant(4), 4).tolist()


@pytest.mark.parametrize("arrivals", [AtOnce(), Poisson(math.inf), Gamma(math.inf), Constant(math.inf)])
def test_an_infinite_rate_sends_all_at_once(arrivals: Any) -> None:
    assert due(arrivals, 5).tolist() == [0] * 5


def test_bursts_have_both_rates() -> None:
    times_s = due(OnOff(rate=20, on_s=3, off_s=7, off_rate=2), 100_000) / SECOND
    cycle = times_s % 10
    cycles = times_s[-1] / 10
    assert int((cycle < 3).sum()) == pytest.approx(60 * cycles, rel=0.03)
    assert int((cycle >= 3).sum()) == pytest.approx(14 * cycles, rel=0.03)
    in_burst = np.diff(times_s[cycle < 3])
    assert float(np.median(in_burst)) == pytest.approx(math.log(2) / 20, rel=0.05)


def test_nothing_comes_while_a_burst_is_off() -> None:
    cycle = due(OnOff(rate=20, on_s=3, off_s=7), 10_000) / SECOND % 10
    assert float(cycle.max()) <= 3 + 1e-6


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: Any) -> None:
    gaps_s = np.diff(due(Ramp(2, 50, strategy, math.inf), 101), prepend=0) / SECOND
    middle = {"linear": 26, "exponential": 10}[strategy]
    assert [1 / gaps_s[0], 1 / gaps_s[50], 1 / gaps_s[100]] == pytest.approx([2, middle, 50], rel=1e-6)
    drawn = due(Ramp(2, 50, strategy), 100_000) / SECOND
    exact = due(Ramp(2, 50, strategy, math.inf), 100_000) / SECOND
    assert float(drawn[-1]) == pytest.approx(float(exact[-1]), rel=0.02)


ARRIVALS = st.one_of(
    st.builds(Gamma, st.floats(0.1, 1000), st.floats(0.1, 10), st.booleans()),
    st.builds(Constant, st.floats(0.1, 1000)),
    st.builds(OnOff, st.floats(0.1, 100), st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 100)),
    st.builds(Ramp, st.floats(0.1, 100), st.floats(0.1, 100), st.sampled_from(["linear", "exponential"])),
)


@given(ARRIVALS, st.integers(0, 200), st.integers(0, 2**40))
def test_arrivals_never_fall_and_a_seed_fixes_them(arrivals: Any, n: int, seed: int) -> None:
    times = due(arrivals, n, seed)
    assert len(times) == n
    assert times.dtype == np.int64
    assert bool((np.diff(times, prepend=0) >= 0).all())
    assert times.tolist() == due(arrivals, n, seed).tolist()


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        (2, Poisson(2)),
        (math.inf, Poisson(math.inf)),
        ({"process": "poisson", "rate": 2.5, "rescale": True}, Poisson(2.5, True)),
        ({"process": "gamma", "rate": 2, "burstiness": 0.5}, Gamma(2, 0.5)),
        ({"process": "constant", "rate": 2}, Constant(2)),
        ({"process": "at_once"}, AtOnce()),
        ({"process": "on_off", "rate": 2, "on_s": 1, "off_s": 9}, OnOff(2, 1, 9)),
        ({"process": "ramp", "start_rate": 1, "end_rate": 2, "strategy": "exponential"}, Ramp(1, 2, "exponential")),
        ("inf", Poisson(math.inf)),
        ("on_off:rate=2,on_s=1m,off_s=500ms", OnOff(2, 60, 0.5)),
    ],
)
def test_arrivals_are_made_from_plain_values(spec: Any, made: Any) -> None:
    assert arrivals_from(spec) == made


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (0, "rate must be a number above 0"),
        ({"process": "poison", "rate": 1}, "do you mean 'poisson'"),
        ({"process": "poisson", "burstiness": 1}, "poisson has no 'burstiness'"),
        ({"process": "gamma", "rate": 1, "burstiness": 0}, "burstiness must be a number above 0"),
        ({"process": "on_off", "rate": 1, "on_s": 0, "off_s": 1}, "on_s must be a finite number above 0"),
        ({"process": "ramp", "start_rate": 0, "end_rate": 1}, "start_rate must be a finite number above 0"),
        ({"process": "ramp", "start_rate": 1, "end_rate": 1, "strategy": "cubic"}, "strategy must be"),
        ({"process": "poisson", "rate": 1, "rescale": "yes"}, "rescale must be true or false, got 'yes'"),
        ({"process": "poisson", "rate": math.nan}, "rate must be a number above 0, got nan"),
        ("fast", "unknown process 'fast', must be one of poisson"),
        ([], "must be a rate or a table"),
    ],
)
def test_arrivals_that_are_none_say_what_is_allowed(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"arrivals: .*{message}"):
        arrivals_from(spec)


def test_a_rate_too_small_for_the_clock_is_refused() -> None:
    with pytest.raises(ValueError, match="292 years"):
        due(Constant(1e-9), 100)


# Pauses


@pytest.mark.parametrize("pause", [FixedPause(2.5), ExponentialPause(2.5), LognormalPause(2.5, 1.0)])
def test_a_pause_has_the_mean_it_names(pause: Any) -> None:
    assert_mean(pause.sample_ns(stream(0, "t"), 200_000) / SECOND, 2.5)


def test_a_pause_is_made_from_plain_values() -> None:
    assert durations_from(3) == FixedPause(3)
    assert durations_from({"dist": "exponential", "mean_s": 2}) == ExponentialPause(2)
    assert durations_from({"dist": "lognormal", "mean_s": 2, "sigma": 1}) == LognormalPause(2, 1)
    assert durations_from("90s") == FixedPause(90)
    assert durations_from("exponential:mean_s=2m") == ExponentialPause(120)
    for spec, message in (
        (-1, "seconds must be"),
        ({"dist": "exp"}, "unknown dist 'exp'"),
        ("long", "unknown dist 'long'"),
        ([], "a table"),
    ):
        with pytest.raises(ValueError, match=f"think time: .*{message}"):
            durations_from(spec)  # type: ignore[arg-type]


# Whole workloads


def test_a_workload_has_the_columns_it_was_asked_for() -> None:
    made = synthetic_workload(
        1000, 10, Lognormal(512, 0.8), {"dist": "geometric", "mean": 64}, seed=3, max_concurrency=8
    )
    assert len(made) == 1000
    assert made.content is None
    assert made.max_concurrency == 8
    assert made.max_tokens.tolist() == made.num_output_tokens.tolist()
    assert "seed 3" in made.notes[0]
    assert "input lognormal:mean=512,sigma=0.8;" in made.notes[0]


KINDS: dict[str, dict[str, Any]] = {
    "independent": {},
    "prefixes": {"prefixes": Prefixes(7, Uniform(10, 50), "zipf", share=0.7)},
    "sessions": {"sessions": Sessions(Geometric(3), ExponentialPause(2))},
    "all": {
        "prefixes": {"num_prefixes": 3, "prefix_tokens": 100},
        "sessions": {"turns": 4, "think": 1.0, "max_context_tokens": 2000},
        "priorities": {0: 1, 5: 3},
        "max_tokens": 100,
    },
}


def make(kind: str, n: int = 500, seed: int = 1, **changes: Any) -> Workload:
    arguments: dict[str, Any] = {"arrivals": Poisson(5), "prompt": Lognormal(200, 0.7), "output": Geometric(50)}
    return synthetic_workload(n, **{**arguments, **KINDS[kind], **changes}, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_a_workload(kind: str) -> None:
    assert columns(make(kind)) == columns(make(kind))
    assert columns(make(kind, seed=2)) != columns(make(kind))
    assert len(make(kind)) == 500


@pytest.mark.parametrize("kind", ["independent", "prefixes", "sessions"])
def test_changing_one_quantity_leaves_the_others(kind: str) -> None:
    plain = make(kind)
    assert make(kind, arrivals=Poisson(50)).num_prompt_tokens.tolist() == plain.num_prompt_tokens.tolist()
    assert make(kind, prompt=99).num_output_tokens.tolist() == plain.num_output_tokens.tolist()
    assert make(kind, prompt=99).arrival_ns.tolist() == plain.arrival_ns.tolist()


def test_quantities_are_drawn_independently_of_each_other() -> None:
    n = 20_000
    sessions = Sessions(Uniform(1, 20), ExponentialPause(1), num_sessions=n)
    made = synthetic_workload(
        None, Poisson(1), Uniform(1, 999), Uniform(1, 999), seed=0, prefixes=Prefixes(20, 1), sessions=sessions
    )
    first = np.flatnonzero(made.previous < 0)
    assert made.content is not None
    drawn = np.array(
        [
            np.diff(first, append=len(made)),
            [made.content[row][0][0] for row in first.tolist()],
            made.num_prompt_tokens[first],
            made.num_output_tokens[first],
            np.diff(made.arrival_ns[first], prepend=0),
        ],
        dtype=float,
    )
    off_diagonal = np.corrcoef(drawn) - np.eye(len(drawn))
    assert float(np.abs(off_diagonal).max()) < 5 / math.sqrt(n)


def test_a_declared_limit_cuts_answers_and_says_so() -> None:
    cut = make("independent", max_tokens=40)
    free = make("independent")
    assert cut.max_tokens.tolist() == [40] * 500
    assert cut.num_output_tokens.tolist() == np.minimum(free.num_output_tokens, 40).tolist()
    assert f"{int((free.num_output_tokens > 40).sum())} answers cut to max_tokens = 40." in cut.notes


def test_priorities_are_drawn_by_weight() -> None:
    drawn = make("independent", n=20_000, priorities={-1: 1, 4: 3, 9: 0}).priority
    assert sorted(set(drawn.tolist())) == [-1, 4]
    assert float((drawn == 4).mean()) == pytest.approx(0.75, abs=0.02)
    whole = make("all", n=2000)
    follows = whole.previous >= 0
    assert whole.priority[follows].tolist() == whole.priority[whole.previous[follows]].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "num_requests must be a whole number of at least 1"),
        ({"n": None}, "num_requests must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be a whole number"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1"),
        ({"priorities": {1: -1}}, "weight of priority 1"),
        ({"priorities": {1: 0}}, "must not all be 0"),
        ({"prompt": "long"}, "prompt: "),
        ({"prefixes": {"num_prefixes": 0, "prefix_tokens": 5}}, "prefixes: num_prefixes"),
        ({"prefixes": {"num_prefixes": 1}}, "^prefixes: missing prefix_tokens$"),
        (
            {"sessions": {"turns": 2, "thinks": 1}},
            r"^sessions: there is no key 'thinks' \(do you mean 'think'\?\), it has turns, think, ",
        ),
        ({"sessions": Sessions(2, num_sessions=5)}, "either num_requests or num_sessions"),
        ({"sessions": Sessions(2, max_context_tokens=3)}, "no first turn fits max_context_tokens = 3"),
    ],
)
def test_a_workload_that_cannot_be_drawn_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("independent", **changes)


def test_specifications_of_groups_are_checked() -> None:
    assert prefixes_from({"num_prefixes": 2, "prefix_tokens": 5, "popularity": "zipf"}) == Prefixes(2, 5, "zipf")
    assert sessions_from({"turns": 5, "think": 1.5}) == Sessions(5, 1.5)
    for made, message in (
        (lambda: Prefixes(2, 0), "prefix_tokens"),
        (lambda: Prefixes(2, 5, "normal"), "popularity"),  # type: ignore[arg-type]
        (lambda: Prefixes(2, 5, share=1.5), "share must be a number of at least 0 and at most 1, got 1.5"),
        (lambda: Sessions("two"), "turns"),  # type: ignore[arg-type]
        (lambda: Sessions(2, -1.0), "think"),
    ):
        with pytest.raises(ValueError, match=message):
            made()


def test_other_arrivals_can_be_put_under_the_same_requests() -> None:
    made = make("sessions")
    moved = with_arrivals(made, Constant(2), seed=0)
    first = made.previous < 0
    assert moved.num_prompt_tokens.tolist() == made.num_prompt_tokens.tolist()
    assert np.diff(moved.arrival_ns[first]).tolist() == [SECOND // 2] * (int(first.sum()) - 1)
    assert moved.arrival_ns[~first].tolist() == made.arrival_ns[~first].tolist()
    assert "constant:rate=2" in moved.notes[-1]


def test_a_limit_of_requests_in_flight_can_be_set_and_lifted() -> None:
    limited = with_max_concurrency(make("independent"), 4)
    assert limited.max_concurrency == 4
    assert with_max_concurrency(limited, None).max_concurrency is None
    assert with_max_concurrency(limited, 4) is limited
    with pytest.raises(ValueError, match="max_concurrency must be at least 1"):
        with_max_concurrency(limited, 0)


@pytest.mark.slow
def test_a_million_requests_are_drawn_in_seconds() -> None:
    """Loose on purpose, for busy machines: a loop over requests in the distributions would take far longer."""
    start_s = time.process_time()
    made = synthetic_workload(
        1_000_000,
        Gamma(10, 0.5, rescale=True),
        Lognormal(512, 0.8),
        Lognormal(256, 0.8),
        seed=0,
        prefixes=Prefixes(9, 64),
    )
    assert time.process_time() - start_s < 5
    assert len(made) == 1_000_000

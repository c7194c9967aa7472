"""Comparisons: who leads, where curves cross, and how runs are planned, run, told and saved."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from html import escape
from itertools import pairwise
from math import isclose, log, sqrt
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import assume, given
from hypothesis import strategies as st

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.comparison import compare_runs
from windtunnel.comparison_plan import SHORT_FLAGS, plan_comparison, summary_keys
from windtunnel.reports.comparison_answer import answer, changed, failures, relation_words, times
from windtunnel.reports.comparison_figures import comparison_figures, has_waste, work_figure
from windtunnel.reports.comparison_html import write_html
from windtunnel.reports.comparison_text import WIDTH, run_columns, run_table, shown_keys, variant_table
from windtunnel.rundir import RunUnreadable, to_json
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.load import Override
from windtunnel.sim.metrics.comparison import (
    TIE,
    ComparedRun,
    ComparedRuns,
    ComparisonAxis,
    Relation,
    are_level,
    length_axis,
    metric,
    numeric_axis,
    relate,
    with_capacity,
)

KEY = "output_throughput"
LATENCY = "mean_e2el_ms"

SMALL = """\
schema_version = 1
name = "small"
description = "forty requests"
teaches = "Fewer seats make a queue."

[deployment]
num_gpu_blocks_override = 200

[engine]
max_num_seqs = 8
max_num_batched_tokens = 512
max_model_len = 1024

[workload]
num_requests = 40
input = "uniform:low=10,high=300"
output = 20
request_rate = 5

[cost]
kind = "constant"
step_s = "10ms"
"""

ASKED = """
[compare]
variants = { two = { max_num_seqs = 2 }, eight = {} }
axis = "request_rate"
values = [2, 40]
metrics = ["mean_e2el_ms"]
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with small.toml in it."""
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SMALL, "utf-8")
    return tmp_path


def curves(
    values: dict[str, list[float | None]],
    positions: list[float] | None = None,
    key: str = KEY,
    verdict: str = "stable",
    **more: Any,
) -> ComparedRuns:
    """Runs of these variants with these values of one metric, along an axis x; None is infeasible."""
    num = len(next(iter(values.values())))
    axis = None
    if num > 1 or positions is not None:
        words = tuple(f"{x:g}" for x in positions or range(num))
        axis = ComparisonAxis("x", words, "x", None if positions is None else tuple(positions))
    runs = tuple(
        ComparedRun(name, place, None, "no room") if own[place] is None
        else ComparedRun(name, place, {key: own[place], "stability": verdict, **more})
        for place in range(num) for name, own in values.items()
    )  # fmt: skip
    return ComparedRuns(tuple(values), axis, runs, (key,), next(iter(values)))


def related(runs: ComparedRuns, key: str = KEY) -> Relation:
    return relate(runs, key, *runs.variants[:2])


# --- crossings


@given(
    st.floats(1, 9), st.floats(10, 50), st.floats(-2, 2), st.floats(-2, 2),
    st.lists(st.integers(0, 100), min_size=2, max_size=8, unique=True),
)  # fmt: skip
def test_straight_lines_cross_where_they_meet(
    at: float, height: float, slope: float, other: float, places: list[int]
) -> None:
    """Exactly, however far the runs are apart."""
    xs = [1.0 + 8.5 * place / 100 for place in sorted(places)]
    values = {"a": [height + slope * (x - at) for x in xs], "b": [height + other * (x - at) for x in xs]}
    assume(min(map(min, values.values())) > 1.2)
    assume(max(map(max, values.values())) < 50)
    found = related(curves(values, xs)).crossings  # type: ignore[arg-type]
    clear = [x for x, a, b in zip(xs, *values.values(), strict=True) if not are_level(a, b)]
    if any(x < at for x in clear) and any(x > at for x in clear):
        assert [isclose(each.at, at, rel_tol=1e-6) and isclose(each.value, height, rel_tol=1e-6) for each in found] == [
            True
        ]
    else:
        assert found == ()


curve = st.lists(st.sampled_from([1.0, 1.005, 1.1, 2.0, 30.0, 100.0]), min_size=2, max_size=7)


@given(curve, curve, st.sampled_from([1.3, 3.0]))
def test_there_are_as_many_crossings_as_changes_of_lead(first: list[float], second: list[float], step: float) -> None:
    num = min(len(first), len(second))
    xs = [step**k for k in range(num)]
    relation = related(curves({"a": [*first[:num]], "b": [*second[:num]]}, xs))
    leads = ["a" if a > b else "b" for a, b in zip(first, second, strict=False) if abs(a - b) > TIE * max(a, b)]
    assert [(each.ahead_before, each.ahead_after) for each in relation.crossings] == [
        turn for turn in pairwise(leads) if turn[0] != turn[1]
    ]
    assert relation.num_level == num - len(leads)
    assert relation.ahead == (leads[0] if len(set(leads)) == 1 else None)
    for each in relation.crossings:
        assert each.between[0] <= each.at * (1 + 1e-9)
        assert each.at <= each.between[1] * (1 + 1e-9)
        assert min(*first, *second) * (1 - 1e-9) <= each.value <= max(*first, *second) * (1 + 1e-9)
        assert min(each.advantage_before, each.advantage_after) > 1 + TIE


@given(curve, curve)
def test_it_does_not_matter_which_variant_comes_first(first: list[float], second: list[float]) -> None:
    num = min(len(first), len(second))
    xs = [float(k) for k in range(1, num + 1)]
    one = related(curves({"a": [*first[:num]], "b": [*second[:num]]}, xs))
    other = related(curves({"b": [*second[:num]], "a": [*first[:num]]}, xs))
    assert (one.ahead, one.advantages, one.num_level) == (other.ahead, other.advantages, other.num_level)
    for left, right in zip(one.crossings, other.crossings, strict=True):
        assert isclose(left.at, right.at, rel_tol=1e-9)
        assert (left.between, left.ahead_before, left.ahead_after) == (
            right.between,
            right.ahead_before,
            right.ahead_after,
        )


def test_a_difference_within_one_percent_is_a_tie_and_no_crossing() -> None:
    noise = related(curves({"a": [100, 100.9, 99.2, 100], "b": [100.9, 100, 100, 99.1]}, [1, 2, 3, 4]))
    assert (noise.crossings, noise.ahead, noise.num_level) == ((), None, 4)


def test_lines_that_run_together_for_a_while_cross_where_they_first_meet() -> None:
    (crossing,) = related(curves({"a": [10, 20, 30, 50], "b": [20, 20, 30, 40]}, [1, 2, 3, 4])).crossings
    assert (crossing.at, crossing.between) == (2.0, (1.0, 4.0))


def test_runs_are_compared_in_the_order_of_the_axis_whatever_order_they_were_given_in() -> None:
    (crossing,) = related(curves({"a": [40, 10, 25], "b": [20, 20, 20]}, [4, 1, 2.5])).crossings
    assert (crossing.ahead_before, crossing.ahead_after, crossing.at) == ("b", "a", 2.0)


def test_an_axis_over_a_decade_is_read_logarithmically() -> None:
    (crossing,) = related(curves({"a": [10, 30], "b": [30, 10]}, [1, 100])).crossings
    assert isclose(crossing.at, 10.0)
    (near,) = related(curves({"a": [10, 30], "b": [30, 10]}, [1, 9])).crossings
    assert isclose(near.at, 5.0)


def test_values_far_apart_are_interpolated_as_they_are_drawn_by_their_ratios() -> None:
    (crossing,) = related(curves({"a": [1, 100], "b": [10, 10]}, [1, 3])).crossings
    assert isclose(crossing.at, 2.0)
    assert isclose(crossing.value, 10.0)


def test_a_shorter_latency_is_ahead() -> None:
    runs = curves({"a": [100, 400], "b": [200, 200]}, [1, 2], LATENCY)
    (crossing,) = related(runs, LATENCY).crossings
    assert (crossing.ahead_before, crossing.ahead_after) == ("a", "b")
    assert (crossing.advantage_before, crossing.advantage_after) == (2.0, 2.0)


def test_without_a_crossing_the_leader_and_the_range_of_its_lead_are_told() -> None:
    runs = curves({"static": [200, 900], "continuous": [200, 180]}, [1, 2], LATENCY)
    relation = related(runs, LATENCY)
    assert (relation.ahead, relation.advantages) == ("continuous", (1.0, 5.0))
    assert runs.axis is not None
    assert relation_words(runs.axis, relation) == (
        "Mean E2EL: no crossing, continuous is ahead of static or level with it at every value of x, by up to 5x."
    )


def test_a_crossing_of_latencies_beside_an_overloaded_run_is_marked() -> None:
    def crossing(key: str, verdict: str) -> bool:
        return related(curves({"a": [100, 400], "b": [200, 200]}, [1, 2], key, verdict), key).crossings[0].is_hopeless

    assert crossing(LATENCY, "overloaded")
    assert not crossing(LATENCY, "stable")
    assert not crossing(KEY, "overloaded")


def test_an_infeasible_run_is_left_out_of_the_curve() -> None:
    relation = related(curves({"a": [10, None, 30], "b": [20, 20, 20]}, [1, 2, 3]))
    assert (relation.num_compared, relation.crossings[0].at) == (2, 2.0)


def test_categories_have_a_leader_but_no_crossings() -> None:
    runs = curves({"a": [10, 30], "b": [20, 20]})
    assert related(runs).crossings == ()
    assert runs.axis is not None
    assert relation_words(runs.axis, related(runs)) == (
        "Which of a and b is ahead in output token throughput depends on x."
    )


# --- axes


def test_a_setting_that_is_a_number_makes_a_numeric_axis() -> None:
    assert numeric_axis("k", ["1k", "2k"], [1000, 2000]).positions == (1000.0, 2000.0)
    for numbers in ([1, "two"], [1, None], [True, False], [2, 2], [{"dist": "fixed"}, 3]):
        assert numeric_axis("k", ["a", "b"], numbers).positions is None


def test_a_place_at_infinity_is_in_the_table_but_not_on_the_curve() -> None:
    axis = numeric_axis("request_rate", ["2", "∞", "1"], [2, float("inf"), 1])
    assert axis.order == [2, 0]
    runs = curves({"a": [10, 99, 30], "b": [20, 1, 20]}, [2, float("inf"), 1])
    (crossing,) = related(runs).crossings
    assert crossing.at == 1.5
    assert "Infinity" not in json.dumps([figure.for_page() for figure in comparison_figures(runs, [related(runs)])])


def test_distributions_of_equal_mean_stand_at_their_spread_and_others_at_their_mean() -> None:
    spread = length_axis("output", ["a", "b"], "output", [(100.0, 0.0), (110.0, 55.0)])
    assert (spread.label, spread.positions) == ("spread of output lengths (CV)", (0.0, 0.5))
    means = length_axis("output", ["a", "b"], "output", [(100.0, 0.0), (300.0, 30.0)])
    assert (means.label, means.positions) == ("mean output length (tokens)", (100.0, 300.0))
    assert length_axis("output", ["a", "b"], "output", [(100.0, 0.0), None]).positions is None


def test_the_spread_of_lengths_is_measured_from_the_workload(small: Path) -> None:
    values = [20, "uniform:low=10,high=30", "exponential:mean=20"]
    compared = wt.compare("small.toml", axis="output", values=values, num_requests=400)
    axis = compared.runs.axis
    assert axis is not None
    assert axis.label == "spread of output lengths (CV)"
    uniform_cv = sqrt((21**2 - 1) / 12) / 20  # of whole numbers from 10 to 30
    assert axis.positions == pytest.approx((0.0, uniform_cv, 1.0), abs=0.1)


# --- words


@pytest.mark.parametrize(
    ("key", "label", "better"),
    [
        ("mean_e2el_ms", "Mean E2EL (ms)", "lower"),
        ("p99.9_ttft_ms", "P99.9 TTFT (ms)", "lower"),
        ("mean_batch_formation_wait_ms", "Mean batch formation wait (ms)", "lower"),
        ("output_throughput", "Output token throughput (tok/s)", "higher"),
        ("slot_efficiency", "Tokens per slot and step", "higher"),
        ("mean_prefill_batch_size", "Mean prompts per batch", ""),
        ("something_new", "Something new", ""),
    ],
)
def test_metrics_are_called_as_the_summary_calls_them(key: str, label: str, better: str) -> None:
    assert (metric(key).label, metric(key).better) == (label, better)


def test_every_metric_of_ours_is_a_number_of_the_summary() -> None:
    from windtunnel.sim.metrics.comparison import _METRICS

    known = {*summary_keys((99,)), *summary_keys((99,), of_fleet=True)}
    assert [key for key in _METRICS if key not in known] == []


def test_changes_and_ratios_have_the_digits_that_they_need() -> None:
    assert [changed(value) for value in (None, 0.0, 0.0001, -0.123, 0.5, 23.4)] == [
        "", "=", "≈ 0 %", "-12.3 %", "+50.0 %", "x 24.4",
    ]  # fmt: skip
    assert [times(value) for value in (0.5, 0.97, 1.03, 2.14, 23.4)] == ["0.5x", "0.97x", "1.03x", "2.1x", "23x"]


def test_changes_are_counted_from_the_baseline_at_the_same_place() -> None:
    runs = curves({"a": [10, 20], "b": [15, 5]}, [1, 2])
    assert [runs.change(run, KEY) for run in runs.runs] == [None, 0.5, None, -0.75]
    zero = curves({"a": [0, 0], "b": [15, 0]}, [1, 2])
    assert [zero.change(zero.run("b", place), KEY) for place in (0, 1)] == [None, 0.0]


def test_the_leader_is_told_with_what_the_others_have() -> None:
    said = answer(curves({"a": [100], "b": [250], "c": [251]}), [])
    assert said.headline == "c and b are level in output token throughput."
    assert said.sentences == ("Highest output token throughput: c and b, 251 tok/s; a 0.4x that.",)


def test_an_overloaded_run_leads_in_no_latency() -> None:
    runs = curves({"a": [100], "b": [250]}, key=LATENCY)
    hopeless = ComparedRun("a", 0, {LATENCY: 100.0, "stability": "overloaded"})
    runs = ComparedRuns(runs.variants, None, (hopeless, runs.runs[1]), (LATENCY,), "a")
    said = answer(runs, [])
    assert said.sentences[0] == "Lowest mean E2EL: b, 250 ms; a (overloaded) 100 ms."
    assert said.sentences[1].startswith("Overloaded: a. Latencies there describe the length of the run")


def test_the_headline_is_the_crossing_or_who_is_never_behind() -> None:
    crossed = curves({"a": [10, 30], "b": [20, 20]}, [1, 2])
    assert answer(crossed, [related(crossed)]).headline == "a and b cross at x ≈ 1.5 (output token throughput)."
    led = curves({"a": [10, 30], "b": [20, 60]}, [1, 2])
    assert answer(led, [related(led)]).headline == (
        "b is never behind over x in output token throughput (up to 2x ahead)."
    )
    level = curves({"a": [10, 30], "b": [10, 30]}, [1, 2])
    assert answer(level, [related(level)]).headline == "All are level in output token throughput at every value of x."


def test_one_variant_along_an_axis_is_told_where_it_is_best() -> None:
    runs = curves({"a": [10, 30, 20]}, [1, 2, 3])
    said = answer(runs, [])
    assert said.headline == "x: best output token throughput at 2."
    assert said.sentences == ("Output token throughput: highest at 2 (30 tok/s), lowest at 1 (10 tok/s).",)


def test_among_many_variants_leaders_and_clear_crossings_are_told_not_every_pair() -> None:
    values: dict[str, list[float | None]] = {"a": [10, 30], "b": [20, 20], "c": [5, 5], "d": [5.2, 4.9]}
    runs = curves(values, [1, 2])
    sentences = answer(runs, list(runs.relations())).sentences
    assert sentences[0] == "Output token throughput: b at 1; a at 2."
    assert [sentence for sentence in sentences if "cross at" in sentence] == [
        "a and b cross at x ≈ 1.5 (output token throughput): b is ahead below (by up to 2x), a above (by up to 1.5x)."
    ]


# --- what may not lead


def side_by_side(metrics: tuple[str, ...], positions: list[float] | None = None, /, **runs: Any) -> ComparedRuns:
    """Runs of these summaries (one a variant, or a list along request_rate); without a verdict they are stable."""
    own = {name: made if isinstance(made, list) else [made] for name, made in runs.items()}
    axis = numeric_axis("request_rate", [f"{x:g}" for x in positions], positions) if positions else None
    places = range(len(positions) if positions else 1)
    made = [ComparedRun(name, place, {"stability": "stable", **own[name][place]}) for place in places for name in own]
    return ComparedRuns(tuple(own), axis, tuple(made), metrics, next(iter(own)))


def open_loop(throughput: float, rho: float | None = 0.5, **more: Any) -> dict[str, Any]:
    """A run at 10 requests/s."""
    rate = {"offered_request_rate": 10.0, "utilisation": rho, "num_prompts": 100, "failed": 0, "max_concurrency": None}
    return {**rate, KEY: throughput, LATENCY: 100.0, **more}


def told(runs: ComparedRuns) -> list[str]:
    said = answer(runs, list(runs.relations()))
    return [said.headline, *said.sentences]


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_run_leads_in_a_latency_only_if_hardly_any_request_failed(failed: int, others: int) -> None:
    fast = {LATENCY: 10.0, "num_prompts": 1000, "failed": failed}
    slow = {LATENCY: 90.0, "num_prompts": 1000, "failed": others}
    runs = side_by_side((LATENCY,), fast=fast, slow=slow)
    leaders = [run.variant for run in runs.leaders(LATENCY)]
    assert leaders == (["fast"] if failed <= 10 else ["slow"] if others <= 10 else [])
    relation = relate(runs, LATENCY, "fast", "slow")
    assert relation.ahead == (leaders[0] if leaders and leaders != ["slow"] else None)
    assert relation.num_compared + relation.num_undecided == 1


def test_a_latency_of_a_run_that_lost_requests_is_told_without_a_ratio() -> None:
    q300 = {LATENCY: 10.0, "num_prompts": 1000, "failed": 560, "rejected": 560, "stability": "shedding"}
    runs = side_by_side((LATENCY,), q300=q300, patient={LATENCY: 90.0, "num_prompts": 1000, "failed": 0})
    assert told(runs)[:2] == [
        "patient leads in mean E2EL.",
        "Lowest mean E2EL: patient, 90 ms; q300 (56 % failed) 10 ms.",
    ]
    assert list(failures(runs)) == [
        "q300: 56 % of the requests did not finish (rejected); its latencies are those of the others."
    ]
    assert [run.verdict for run in runs.runs] == ["shedding", "stable"]
    both = side_by_side((LATENCY,), a=q300, b={LATENCY: 90.0, "stability": "overloaded"})
    assert told(both)[1] == "Nobody leads in mean E2EL: a (56 % failed) 10 ms and b (overloaded) 90 ms."


def test_requests_too_long_for_every_variant_are_counted_against_none() -> None:
    base = {"num_prompts": 100, "failed": 5, "unservable": 5}
    runs = side_by_side((LATENCY,), a={LATENCY: 10.0, **base}, b={LATENCY: 20.0, **base, "failed": 9, "unservable": 9})
    assert [run.variant for run in runs.leaders(LATENCY)] == ["a"]
    assert [runs.is_doubtful(run) for run in runs.runs] == [False, True]


def test_a_run_too_short_to_show_its_overload_is_marked_like_an_overloaded_one() -> None:
    short = {LATENCY: 10.0, "stability": "too_short", "utilisation": 1.4}
    runs = side_by_side((LATENCY,), short=short, fits={LATENCY: 20.0, "stability": "too_short", "utilisation": 0.4})
    assert [run.variant for run in runs.leaders(LATENCY)] == ["fits"]
    (bars,) = comparison_figures(runs, [])[0].data
    assert bars["marker"]["pattern"]["shape"] == ["/", ""]
    assert "Too short, but more is offered than can be served: short." in " ".join(told(runs))


def test_where_all_serve_what_is_offered_throughput_leads_nothing_and_capacity_does() -> None:
    runs = side_by_side((KEY, LATENCY), a=open_loop(900), b=open_loop(990, 0.25))
    assert told(runs) == [
        "All are level in mean E2EL.",
        "Lowest mean E2EL: a and b, 100 ms.",
        "Both serve what is offered: output token throughput cannot tell them apart.",
    ]
    assert runs.change(runs.run("b"), KEY) is None
    assert with_capacity(runs) == (KEY, "capacity", LATENCY)
    with_it = side_by_side(with_capacity(runs), a=open_loop(900), b=open_loop(990, 0.25))
    assert told(with_it)[0] == "b leads in capacity, a and b are level in mean E2EL."
    assert "Highest capacity: b, 40 req/s; a 0.5x that." in told(with_it)


def test_without_a_capacity_throughput_is_left_out_with_the_reason() -> None:
    runs = side_by_side((KEY,), a=open_loop(900, None), b=open_loop(990, None))
    assert with_capacity(runs) == (KEY,)
    assert told(runs) == [
        "All serve what is offered.",
        "Both serve what is offered: output token throughput cannot tell them apart; their capacity would, but it is "
        "not known (saturation = true measures it).",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"stability": "overloaded"}, {"stability": "backlogged"}, {"stability": "shedding"}, {"failed": 5},
        {"stability": "too_short", "utilisation": 1.2}, {"max_concurrency": 8}, {"offered_request_rate": None},
    ],
)  # fmt: skip
def test_throughput_counts_where_one_does_not_keep_up_or_no_rate_is_offered(other: dict[str, Any]) -> None:
    runs = side_by_side((KEY,), a=open_loop(900, **other), b=open_loop(990))
    assert told(runs)[0] == "b leads in output token throughput."
    assert runs.change(runs.run("b"), KEY) == pytest.approx(0.1)


def test_goodput_follows_the_offered_rate_where_the_same_share_is_good() -> None:
    key = "request_goodput"
    runs = side_by_side(
        (key,), a=open_loop(1, **{key: 9.0, "goodput_share": 1}), b=open_loop(1, **{key: 9.9, "goodput_share": 1})
    )
    assert told(runs)[0] == "All are level in request goodput."
    runs = side_by_side(
        (key,), a=open_loop(1, **{key: 5.0, "goodput_share": 0.5}), b=open_loop(1, **{key: 9.9, "goodput_share": 1})
    )
    assert told(runs)[0] == "b leads in request goodput."


def test_goodput_of_an_overloaded_run_leads_nothing() -> None:
    key = "request_goodput"
    good = {key: 20.0, "stability": "overloaded"}
    runs = side_by_side((key,), a=good, b={key: 10.0}, c={key: 2.0})
    assert told(runs)[:2] == [
        "b leads in request goodput.",
        "Highest request goodput: b, 10 req/s; c 0.2x that, a (overloaded) 20 req/s.",
    ]


def test_goodput_along_a_load_is_best_where_it_is_highest() -> None:
    key = "request_goodput"
    runs = side_by_side(
        (key,),
        [5, 10],
        a=[open_loop(1, **{key: rate, "goodput_share": 1.0, "offered_request_rate": rate}) for rate in (5.0, 10.0)],
    )
    assert told(runs)[0] == "Keeps up to request_rate 10, the highest tried; best request goodput at 10."


def test_throughput_of_one_variant_along_a_load_is_what_is_offered() -> None:
    runs = side_by_side((KEY,), [5, 10], a=[open_loop(500.0), open_loop(700.0, stability="overloaded")])
    assert told(runs)[:2] == [
        "Keeps up to request_rate 5, overloaded from 10 on.",
        "Output token throughput: what is offered at 5; 700 tok/s at 10.",
    ]


def loads(*latencies: float, overloaded_from: int = 99) -> list[dict[str, Any]]:
    return [
        {LATENCY: value, "stability": "overloaded" if place >= overloaded_from else "stable"}
        for place, value in enumerate(latencies)
    ]


def test_along_a_load_the_headline_is_how_far_each_keeps_up_and_no_ratio_is_of_an_overload() -> None:
    runs = side_by_side((LATENCY,), [1, 2, 4], a=loads(10, 20, 50), b=loads(15, 9000, 99000, overloaded_from=1))
    assert told(runs)[:2] == [
        "a keeps up to request_rate 4, the highest tried; b is overloaded from 2 on.",
        "Mean E2EL: no crossing, a is ahead of b at every value of request_rate, by 1.5x.",
    ]
    alone = side_by_side((LATENCY,), [1, 2, 4], b=loads(15, 9000, 99000, overloaded_from=1))
    assert told(alone)[0] == "Keeps up to request_rate 1, overloaded from 2 on."


def test_never_behind_is_said_of_all_metrics_that_are_shown_or_of_none() -> None:
    def run(throughput: float, latency: float) -> dict[str, Any]:
        return {KEY: throughput, LATENCY: latency}

    first, second = [run(10, 50), run(10, 50)], [run(20, 40), run(20, 60)]
    runs = side_by_side((KEY, LATENCY), [1, 2], a=first, b=second)
    assert told(runs)[0] == (
        "b is ahead or level in output token throughput at every value of request_rate; "
        "a and b cross at request_rate ≈ 1.5 (mean E2EL)."
    )
    better = side_by_side((KEY, LATENCY), [1, 2], a=first, b=[run(20, 40), run(20, 40)])
    assert told(better)[0] == (
        "b is never behind over request_rate in output token throughput (up to 2x ahead) and mean E2EL (up to 1.25x "
        "ahead)."
    )


def test_one_variant_is_best_from_where_it_is_level_with_the_best() -> None:
    runs = curves({"a": [10, 10.05, 10, 90]}, [4, 3, 2, 1], LATENCY)
    assert told(runs) == [
        "x: best mean E2EL from 2 up.",
        "Mean E2EL: lowest from 2 up (10.1 ms), highest at 1 (90 ms).",
    ]
    assert told(curves({"a": [10, 10, 90]}, [1, 2, 3], LATENCY))[0] == "x: best mean E2EL up to 2."
    assert told(curves({"a": [90, 10, 10, 90]}, [1, 2, 3, 4], LATENCY))[0] == "x: best mean E2EL from 2 to 3."
    assert told(curves({"a": [10, 90, 10, 90]}, [1, 2, 3, 4], LATENCY))[0] == "x: best mean E2EL at 1 and 3."


# --- running


def test_each_run_is_what_simulate_makes_of_its_overrides(small: Path) -> None:
    compared = wt.compare(
        "small.toml", {"two": {"max_num_seqs": 2}, "slow": {"cost": {"kind": "constant", "step_s": "20ms"}}},
        axis="request_rate", values=[2, 40], seed=3, output=10,
    )  # fmt: skip
    for run in compared.runs.runs:
        own = {"two": {"max_num_seqs": 2}, "slow": {"cost": "constant:step_s=20ms"}}[run.variant]
        alone = wt.simulate("small.toml", seed=3, output=10, request_rate=[2, 40][run.place], **own)
        assert run.summary == alone.summary
    assert [(run.variant, run.place) for run in compared.runs.runs] == [
        ("two", 0), ("slow", 0), ("two", 1), ("slow", 1),
    ]  # fmt: skip


def test_the_scenario_says_what_is_compared(small: Path) -> None:
    Path("asked.toml").write_text(SMALL + ASKED, "utf-8")
    compared = wt.compare("asked.toml")
    assert (compared.runs.variants, compared.runs.metrics) == (("two", "eight"), ("mean_e2el_ms",))
    assert compared.runs.axis is not None
    assert compared.runs.axis.positions == (2.0, 40.0)
    assert compared.to_dict()["scenario"]["teaches"] == "Fewer seats make a queue."


def test_settings_that_differ_are_those_of_the_variants_not_of_the_axis(small: Path) -> None:
    Path("asked.toml").write_text(SMALL + ASKED, "utf-8")
    told = wt.compare("asked.toml").to_dict()
    assert [(each["key"], each["values"]) for each in told["differing_settings"]] == [
        ("max_num_seqs", {"two": (2,), "eight": (8,)})
    ]
    assert "request_rate" not in [each["key"] for each in told["common_settings"]]


def test_other_variants_are_another_question_without_the_scenarios_axis(small: Path) -> None:
    Path("asked.toml").write_text(SMALL + ASKED, "utf-8")

    def planned(**given: Any) -> list[tuple[str, Any]]:
        plan = plan_comparison("asked.toml", **given)
        return [(run.variant, run.overrides.get("request_rate")) for run in plan.runs]

    assert planned(variants={"one": {"max_num_seqs": 1}}) == [("one", None)]
    assert planned(variants={"one": {}}, axis="request_rate") == [("one", 2), ("one", 40)]
    assert planned(axis="request_rate", values=[7]) == [("two", 7), ("eight", 7)]
    assert planned(axis="") == [("two", None), ("eight", None)]


def test_setting_what_the_scenario_varies_for_all_runs_leaves_no_axis(small: Path) -> None:
    Path("asked.toml").write_text(SMALL + ASKED, "utf-8")
    assert wt.compare("asked.toml", request_rate=9).runs.axis is None


def test_paths_in_a_scenario_are_relative_to_it(small: Path) -> None:
    Path("sub").mkdir()
    Path("sub/trace.csv").write_text("arrival_s,num_prompt_tokens,num_output_tokens\n0,10,3\n1,10,3\n", "utf-8")
    variants = '\n[compare.variants]\ntraced = { trace = "trace.csv" }\ndrawn = {}\n'
    Path("sub/small.toml").write_text(SMALL + variants, "utf-8")
    compared = wt.compare("sub/small.toml")
    assert [run.number("num_prompts") for run in compared.runs.runs] == [2, 40]


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bytes(small: Path) -> None:
    Path("asked.toml").write_text(SMALL + ASKED, "utf-8")
    told: list[tuple[int, int]] = []
    alone = wt.compare("asked.toml", progress=lambda done, total: told.append((done, total)))
    shared = wt.compare("asked.toml", jobs=3)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert to_json(alone.to_dict()) == to_json(shared.to_dict())
    assert alone.text() == shared.text()
    alone.report("alone.html")
    shared.report("shared.html")
    assert Path("alone.html").read_bytes() == Path("shared.html").read_bytes()


def test_an_infeasible_variant_stays_with_its_reason(small: Path) -> None:
    compared = wt.compare("small.toml", {"fits": {}, "long": {"max_model_len": "100k"}})
    assert [run.verdict for run in compared.runs.runs] == ["stable", "infeasible"]
    assert not compared.is_infeasible
    assert "larger than the maximum number of tokens" in compared.to_dict()["runs"][1]["infeasible"]
    assert "Infeasible: long: max seq len (100000)" in " ".join(compared.text().split())
    assert compared.table["output_throughput"].notna().tolist() == [True, False]


def test_a_variant_that_vllm_refuses_stays_with_its_reason_unless_it_refuses_all(small: Path) -> None:
    refused = {"long_prefill_token_threshold": 2000}
    compared = wt.compare("small.toml", {"fits": {}, "no": refused})
    assert [run.verdict for run in compared.runs.runs] == ["stable", "not possible"]
    assert "Not possible: no: " in compared.text()
    assert compared.to_dict()["runs"][1]["verdict"] == "not possible"
    with pytest.raises(ScenarioError, match="long_prefill_token_threshold"):
        wt.compare("small.toml", {"no": refused})


def test_heads_that_cannot_be_split_are_no_reason_to_stop() -> None:
    plan = plan_comparison("chat-8b-h100", {"tp1": {}, "tp3": {"tp": 3}}, overrides={"num_prompts": Override(10, "")})
    first, second = plan.check()
    assert first is None
    assert second is not None
    assert (second.verdict, "cannot be split" in second.reason) == ("not possible", True)


def test_a_name_that_does_not_exist_is_a_mistake_not_a_result() -> None:
    with pytest.raises(ScenarioError, match="unknown GPU 'H1000'"):
        plan_comparison("chat-8b-h100", {"a": {}, "b": {"gpu": "H1000"}}).check()


def test_flags_and_their_short_names_are_keys_too(small: Path) -> None:
    def settings(**given: Any) -> dict[str, Any]:
        return plan_comparison("small.toml", {"a": given}).runs[0].overrides

    assert settings(tp=2, dp=2, pp=1, rate=3) == {
        "tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 1, "request_rate": 3,
    }  # fmt: skip
    assert settings(engine="vllm-0.9", num_prompts=7) == {"engine_version": "vllm-0.9", "num_requests": 7}
    assert settings(engine={"max_num_seqs": 3}) == {"engine": {"max_num_seqs": 3}}
    assert plan_comparison("small.toml", axis="rate", values=[1, 2]).axis == "request_rate"
    with pytest.raises(ScenarioError, match="variant 'a': request_rate is set twice, the second time as rate"):
        settings(request_rate=2, rate=3)


def test_the_short_names_are_those_of_the_flags_of_simulate() -> None:
    from windtunnel.cli.simulate import simulate
    from windtunnel.scenarios.flags import KEY_OF_PARAMETER

    app = typer.Typer()
    app.command()(simulate)
    others = {
        opt.removeprefix("--"): KEY_OF_PARAMETER.get(param.name, param.name)
        for param in typer.main.get_command(app).params
        for opt in param.opts[1:]
        if opt.startswith("--") and param.name != "output"
    }
    assert others == SHORT_FLAGS


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_num_sqs", "max_num_seqs"), ("concurrency", "max_concurrency"), ("seqs", "max_num_seqs"),
        ("tensor_parallel", "tensor_parallel_size"), ("num_prompt", "num_prompts"),
        ("gpu_memory", "gpu_memory_utilization"),
    ],
)  # fmt: skip
def test_an_unknown_setting_names_the_one_that_was_meant(small: Path, name: str, meant: str) -> None:
    with pytest.raises(ScenarioError, match=f"unknown setting '{name}'; did you mean '{meant}'"):
        plan_comparison("small.toml", {"a": {name: 1}})


def test_nothing_that_no_run_is_set_by_is_suggested(small: Path) -> None:
    with pytest.raises(ScenarioError, match=r"unknown setting 'variant' \(windtunnel schema"):
        plan_comparison("small.toml", {"a": {"variant": 1}})


def test_requests_that_failed_are_in_every_table_and_in_the_warnings(small: Path) -> None:
    variants = {"all": {}, "few": {"max_num_queued_reqs": 5}}
    compared = wt.compare("small.toml", variants, axis="request_rate", values=[2, 90])
    shares = [run.number("failed_share") for run in compared.runs.runs]
    failed = [(run.number("failed") or 0) / 40 for run in compared.runs.runs]
    assert shares == failed
    assert failed[3] > 0.01 > failed[1] == 0
    assert "Failed (%)" in compared.text()
    assert f"WARNING: few: {100 * failed[3]:.0f} % of the requests did not finish at request_rate 90 (rejected)" in (
        " ".join(compared.text().split())
    )
    assert compared.to_dict()["warnings"][0].startswith("few: ")
    assert compared.to_dict()["runs"][3]["derived"]["failed_share"] == failed[3]
    assert compared.table["failed_share"].tolist() == failed
    compared.report("failed.html")
    assert Path("failed.html").read_text("utf-8").count("Failed (%)") > 1
    flat = wt.compare("small.toml", variants, request_rate=90)
    assert re.search(r"^Failed \(%\) +0.00 +\d", flat.text(), re.MULTILINE)
    assert "Failed" not in wt.compare("small.toml", {"a": {}, "b": {}}).text()


def test_the_capacity_is_the_rate_at_which_the_same_system_is_full(small: Path) -> None:
    compared = wt.compare("small.toml", {"two": {"max_num_seqs": 2}, "eight": {}})
    runs = [wt.simulate("small.toml", max_num_seqs=seats) for seats in (2, 8)]
    assert [run.number("capacity") for run in compared.runs.runs] == pytest.approx(
        [run.saturation_request_throughput for run in runs]
    )
    assert "capacity" in compared.runs.metrics
    assert "metric-capacity" in [figure.name for figure in comparison_figures(compared.runs, [])]


def test_all_gpus_are_counted_in_the_header() -> None:
    compared = wt.compare("chat-8b-h100", {"dp2": {"dp": 2}, "pp2": {"tp": 2, "pp": 2}}, num_requests=30)
    assert compared.text().startswith("chat-8b-h100: meta-llama/Llama-3.1-8B-Instruct on 2 x H100-SXM / 4 x H100-SXM\n")


def test_what_is_wrong_with_a_later_run_is_found_before_the_first_is_run(small: Path) -> None:
    told: list[int] = []
    with pytest.raises(ScenarioError, match="axis output: output: unknown dist 'gamma'"):
        wt.compare(
            "small.toml", axis="output", values=[20, "gamma:mean=20"], progress=lambda done, total: told.append(done)
        )
    assert told == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing to compare: give variants"),
        ({"variants": {"a": {"max_num_sqs": 3}}}, "variant 'a': unknown setting 'max_num_sqs'; .* 'max_num_seqs'"),
        ({"variants": {"a": {"max_num_seqs": 0}}}, "variant 'a': max_num_seqs = 0 in .engine. must be at least 1"),
        ({"variants": {"a": {"values": [3]}}}, "variant 'a': values is no setting of a run"),
        ({"variants": {"a": {"output": 3}}, "axis": "output", "values": [1]}, "variant 'a' sets output, which"),
        ({"axis": "output"}, "the axis output has no values"),
        ({"values": [3]}, "values without an axis"),
        ({"axis": "outptu", "values": [3]}, "axis: unknown setting 'outptu'; did you mean 'output'"),
        ({"axis": "output", "values": [3], "output": 4}, "output is varied along the axis and set to 4"),
        ({"variants": {"a": {}}, "metrics": ["mean_e2e_ms"]}, "unknown metric 'mean_e2e_ms'.* 'mean_e2el_ms'"),
        ({"variants": {"a": {}}, "metrics": ["slo_passed"]}, "unknown metric 'slo_passed'"),
        ({"variants": {"abc": {}}, "baseline": "abd"}, "no variant 'abd' to count from; did you mean abc"),
    ],
)  # fmt: skip
def test_a_comparison_that_makes_no_sense_is_refused(small: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        wt.compare("small.toml", **given)


def test_no_processes_are_no_comparison(small: Path) -> None:
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        wt.compare("small.toml", {"a": {}}, jobs=0)


def test_without_a_p99_the_highest_percentile_is_compared(small: Path) -> None:
    compared = wt.compare("small.toml", {"a": {}, "b": {}}, percentiles=[50, 90])
    assert compared.runs.metrics == ("output_throughput", "capacity", "mean_e2el_ms", "p90_ttft_ms", "p90_itl_ms")
    assert "P90 E2EL (ms)" in compared.text()


def test_the_table_has_a_row_for_each_run_with_its_place(small: Path) -> None:
    table = wt.compare(
        "small.toml", {"two": {"max_num_seqs": 2}, "eight": {}}, axis="request_rate", values=[2, 4]
    ).table
    assert table[["variant", "axis", "value", "position"]].to_numpy().tolist() == [
        [name, "request_rate", word, position]
        for word, position in (("2", 2.0), ("4", 4.0))
        for name in ("two", "eight")
    ]
    assert (table["completed"] == 40).all()


# --- text


def test_the_text_has_verdict_calibration_and_changes_for_every_variant(small: Path) -> None:
    text = wt.compare("small.toml", {"eight": {}, "one": {"max_num_seqs": 1}}).text()
    assert "Cost model: constant, uncalibrated" in text
    assert re.search(r"^Verdict +stable +\w+$", text, re.MULTILINE)
    row = re.search(r"^Mean E2EL \(ms\) +([\d,.]+) +([\d,.]+) +\+([\d,.]+) %$", text, re.MULTILINE)
    assert row is not None
    base, own, change = (float(part.replace(",", "")) for part in row.groups())
    assert isclose(change, 100 * (own / base - 1), rel_tol=0.01)
    row = re.search(r"^Mean TTFT \(ms\) +([\d,.]+) +([\d,.]+) +x ([\d,.]+)$", text, re.MULTILINE)
    assert row is not None
    base, own, factor = (float(part.replace(",", "")) for part in row.groups())
    assert isclose(factor, own / base, rel_tol=0.01)
    assert text.endswith("Changes are against eight.\n")


def test_waste_that_no_run_has_gets_no_row() -> None:
    base = {LATENCY: 5.0, "stability": "stable", "completed": 3, "preemptions": 0, "padding_tokens": 0}
    runs = [ComparedRun("a", 0, base), ComparedRun("b", 0, {**base, "straggler_tokens": 7, "slot_efficiency": None})]
    keys = shown_keys(ComparedRuns(("a", "b"), None, tuple(runs), (LATENCY,), "a"))
    assert keys == ["completed", LATENCY, "preemptions", "straggler_tokens"]


def test_many_variants_are_broken_into_blocks_that_fit(small: Path) -> None:
    text = wt.compare("small.toml", {f"variant number {k}": {"max_num_seqs": k} for k in range(1, 9)}).text()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("Verdict ") > 1


def test_five_variants_stay_in_one_table_without_their_changes(small: Path) -> None:
    text = wt.compare("small.toml", {f"{k} seats": {"max_num_seqs": k} for k in (1, 2, 4, 8, 16, 32)}).text()
    assert text.count("Verdict ") == 1
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.endswith("Changes from 1 seats are left out for want of room; --html and --json have them.\n")


def test_asked_for_metrics_stand_beside_their_kind() -> None:
    summary = {"stability": "stable", "completed": 3, "mean_ttft_ms": 1.0, "p50_ttft_ms": 1.0, "mean_e2el_ms": 2.0}
    runs = curves({"a": [1], "b": [2]}, key="p50_ttft_ms", **summary)
    assert shown_keys(runs) == ["completed", "mean_ttft_ms", "p50_ttft_ms", "mean_e2el_ms"]


def test_slots_that_all_yield_a_token_in_every_step_get_no_column() -> None:
    runs = curves({"a": [1, 2], "b": [3, 4]}, [1, 2], slot_efficiency=0.999)
    assert "slot_efficiency" not in run_columns(runs)
    drafts = curves({"a": [1, 2], "b": [3, 4]}, [1, 2], slot_efficiency=2.87)
    heads, rows = run_table(drafts)
    assert rows[0][heads.index("Tokens per slot and step")].value == "2.87"


def test_what_the_scenario_teaches_is_said_first_of_its_own_question_only(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("asked.toml").write_text(SMALL + ASKED, "utf-8")

    def says_so(*flags: str) -> bool:
        assert main(["compare", "asked.toml", *flags]) == 0
        return "Fewer seats make a queue.\n\n" in capsys.readouterr().out

    assert says_so()
    assert not says_so("--quiet")
    assert not says_so("--variant", "a; max_num_seqs=3")


def test_objectives_are_counted(small: Path) -> None:
    compared = wt.compare("small.toml", {"a": {}, "b": {}}, slo={"objectives": ["ttft:p99<1ms", "failed<1"]})
    _, rows = variant_table(compared.runs)
    assert [cell.value for cell in rows[-1]] == ["Objectives kept", "1 of 2", "1 of 2"]


def test_markdown_has_the_answer_and_the_table(small: Path) -> None:
    text = wt.compare("small.toml", {"a": {}, "b|c": {"max_num_seqs": 1}}).markdown()
    assert text.startswith("### small\n\n**a leads in ")
    assert "|  | a (baseline) | b/c |" in text
    assert "uncalibrated" in text


# --- figures and pages


def waste(**tokens: int) -> dict[str, int]:
    names = ("useful", "recomputed", "padding", "straggler", "rejected_draft")
    made = {f"{name}_tokens": tokens.get(name, 0) for name in names}
    return {**made, "computed_tokens": sum(made.values())}


def test_the_work_of_a_run_adds_up_to_what_it_computed() -> None:
    summaries = [waste(useful=10, padding=5), waste(useful=10, straggler=7, recomputed=1)]
    runs = tuple(ComparedRun(name, 0, {KEY: 1.0, **made}) for name, made in zip("ab", summaries, strict=True))
    figure = work_figure(ComparedRuns(("a", "b"), None, runs, (KEY,), "a"))
    assert [sum(trace["x"][k] for trace in figure.data) for k in (0, 1)] == [15, 18]
    assert {trace["name"] for trace in figure.data} >= {"useful", "padding"}
    assert "rejected drafts" not in {trace["name"] for trace in figure.data}


def test_without_waste_there_is_no_figure_of_it() -> None:
    runs = curves({"a": [1], "b": [2]}, **waste(useful=10))
    assert not has_waste(runs)
    assert [figure.name for figure in comparison_figures(runs, [])] == [f"metric-{KEY}"]


def test_crossings_are_marked_on_the_lines() -> None:
    runs = curves({"a": [10, 30], "b": [30, 10]}, [1, 100])
    (figure,) = comparison_figures(runs, [related(runs)])
    *lines, marks = figure.data
    assert [line["name"] for line in lines] == ["a", "b"]
    assert (marks["x"], marks["y"]) == ([10.0], [20.0])
    (label,) = figure.layout["annotations"]
    assert (label["text"], label["x"], label["y"]) == ("≈ 10", log(10, 10), 20)


def test_latencies_of_overloaded_runs_are_drawn_open_and_hatched() -> None:
    (line,) = comparison_figures(curves({"a": [10, 30]}, [1, 2], LATENCY, "overloaded"), [])[0].data
    assert line["marker"]["symbol"] == ["circle-open"] * 2
    (bars,) = comparison_figures(curves({"a": [10], "b": [3]}, None, LATENCY, "overloaded"), [])[0].data
    assert bars["marker"]["pattern"]["shape"] == ["/", "/"]


def test_labels_of_the_axis_do_not_overlap() -> None:
    (figure,) = comparison_figures(curves({"a": [1, 2, 3], "b": [3, 2, 1]}, [0, 0.01, 1]), [])
    assert figure.layout["xaxis"]["ticktext"] == ["", "0.01", "1"]
    assert figure.layout["xaxis"]["tickvals"] == [0, 0.01, 1]


def test_what_the_answer_says_is_not_said_again_further_down(small: Path) -> None:
    compared = wt.compare("small.toml", {"two": {"max_num_seqs": 2}, "eight": {}}, axis="request_rate", values=[2, 40])
    compared.report("page.html")
    page = Path("page.html").read_text("utf-8")
    said = answer(compared.runs, compared.relations)
    assert [page.count(escape(sentence)) for sentence in said.sentences] == [1] * len(said.sentences)
    assert 'class="answer tone-none"' in page


def test_names_are_drawn_as_they_are_written() -> None:
    """plotly would read markup in them."""
    figures = [
        *comparison_figures(curves({"<i>a</i>": [10, 30], "b": [30, 10]}, [1, 2]), []),
        *comparison_figures(curves({"<i>a</i>": [10], "b": [30]}), []),
    ]
    drawn = json.dumps([figure.data for figure in figures])
    assert drawn.count("&lt;i&gt;a&lt;/i&gt;") == 2
    assert "<i>" not in drawn


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Policies with a long and a wicked name, along an axis, with waste and a crossing."""
    folder = tmp_path_factory.mktemp("page")
    scenario = folder / "small.toml"
    scenario.write_text(SMALL.replace("output = 20", 'output = "uniform:low=1,high=60"'), "utf-8")
    variants = {
        "<b>bold & beautiful</b></script>": {"batching": "static:batch_size=4,batch_timeout=100ms"},
        "a name that is so long that it must be broken over several lines wherever it stands": {},
    }
    wt.compare(scenario, variants, axis="request_rate", values=[1, 4, 16]).report(folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def test_the_page_is_whole_offline_and_escaped(page: str) -> None:
    assert "default-src 'none'" in page
    assert page.count("plotly.js v") == 1
    assert "<b>bold" not in page
    assert page.count("</script>") == 3
    assert not re.search(r'(src|href)="(?!#)', page.partition("<script>")[0])
    assert "Fewer seats make a queue." in page
    assert ">uncalibrated<" in page


def test_every_figure_has_its_place(page: str) -> None:
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert data is not None
    names = [figure["name"] for figure in json.loads(data[1])]
    assert names[-1] == "work"
    assert [f'id="plot-{name}"' in page for name in names] == [True] * len(names)


def test_settings_that_differ_stand_apart_from_those_in_common(page: str) -> None:
    differ = page[page.index('id="settings"') : page.index('id="how"')]
    common = page[page.index('id="how"') : page.index('id="glossary"')]
    assert ">batch_size<" in differ
    assert ">max_num_seqs<" not in differ
    assert ">max_num_seqs<" in common
    assert ">request_rate<" not in common


def test_a_page_without_any_run_is_still_made(small: Path) -> None:
    wt.compare("small.toml", {"a": {"max_model_len": "100k"}}).report("none.html")
    assert "No variant can be run." in Path("none.html").read_text("utf-8")


def test_more_variants_than_fit_side_by_side_become_rows(small: Path) -> None:
    compared = wt.compare("small.toml", {f"v{k}": {"max_num_seqs": k} for k in range(1, 8)})
    write_html("many.html", compared.runs, compared.relations, compared.context)
    assert '<th scope="col">Variant</th>' in Path("many.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_every_figure_is_drawn_and_nothing_sticks_out(page: str, width: int, tmp_path: Path) -> None:
    probe = """<script>addEventListener("load", () => { dispatchEvent(new Event("beforeprint")); setTimeout(() => {
      const out = [...document.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1);
      parent.postMessage({drawn: [...document.querySelectorAll(".plot")].every((e) => e.querySelector(".main-svg")),
        out: out.filter((e) => !e.closest(".skip")).map((e) => e.tagName + "." + e.className)}, "*"); }, 1500); });
      addEventListener("error", (e) => parent.postMessage({error: e.message}, "*"));</script></body>"""
    (tmp_path / "page.html").write_text(page.replace("</body>", probe), encoding="utf-8")
    (tmp_path / "frame.html").write_text(
        f'<body><iframe src="page.html" style="width:{width}px;height:3000px;border:0"></iframe><pre id="said"></pre>'
        '<script>addEventListener("message", (e) => said.append(JSON.stringify(e.data) + "\\n"))</script></body>'
    )
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
            "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=15000",
            "--allow-file-access-from-files", "--window-size=1400,3000", "--dump-dom",
            f"file://{tmp_path / 'frame.html'}",
        ],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said is not None
    assert [json.loads(line) for line in said[1].strip().splitlines()] == [{"drawn": True, "out": []}]


# --- saved runs


def save(folder: str, **overrides: Any) -> None:
    wt.simulate("small.toml", **overrides).save(folder)


def test_saved_runs_are_compared_by_their_folders(small: Path) -> None:
    save("runs/a")
    save("runs/b", max_num_seqs=1)
    compared = compare_runs(["runs/a", "runs/b"], baseline="b")
    assert compared.runs.variants == ("a", "b")
    assert [run.summary for run in compared.runs.runs] == [
        json.loads(Path(f"runs/{name}/summary.json").read_text("utf-8")) for name in "ab"
    ]
    assert [each["key"] for each in compared.to_dict()["differing_settings"]] == ["max_num_seqs"]
    assert compared.to_dict()["warnings"] == []


def test_folders_of_one_name_are_told_apart_by_their_paths(small: Path) -> None:
    save("x/run")
    save("y/run", seed=1)
    assert compare_runs(["x/run", "y/run"]).runs.variants == ("x/run", "y/run")
    with pytest.raises(ScenarioError, match="x/run names the same run twice"):
        compare_runs(["x/run", "x/run"])


def test_runs_of_different_workloads_are_compared_with_a_warning(small: Path) -> None:
    save("a")
    save("b", output=9)
    assert compare_runs(["a", "b"]).text().count("WARNING: The runs have different workloads") == 1


def test_runs_with_different_objectives_are_compared_with_a_warning(small: Path) -> None:
    save("a", slo={"objectives": ["ttft:p99<1s"]})
    save("b", slo={"objectives": ["ttft:p99<2s"]})
    assert compare_runs(["a", "b"]).text().count("WARNING: The runs have different objectives") == 1


def test_what_is_no_run_or_only_one_is_refused(small: Path) -> None:
    save("a")
    save("b")
    with pytest.raises(ScenarioError, match="one run is no comparison"):
        compare_runs(["a"])
    with pytest.raises(RunUnreadable, match=r"no run in small\.toml"):
        compare_runs(["a", "small.toml"])
    Path("b/summary.json").write_text("{", "utf-8")
    with pytest.raises(RunUnreadable, match="the run in b cannot be read"):
        compare_runs(["a", "b"])


# --- the command


def test_the_command_compares_what_its_flags_name(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "compare",
        "small.toml",
        "--variant",
        "one; max_num_seqs=1",
        "--variant",
        "all",
        "--set",
        "num_prompts=20",
    ]
    assert main([*command, "--json", "--csv", "out/runs.csv", "--html", "out/page.html"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert [(each["name"], each["overrides"]) for each in told["variants"]] == [
        ("one", {"max_num_seqs": 1}), ("all", {}),
    ]  # fmt: skip
    assert [run["summary"]["completed"] for run in told["runs"]] == [20, 20]
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["1 of 2", "2 of 2"]
    with Path("out/runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["completed"]) for row in rows] == [("one", "20"), ("all", "20")]
    assert float(rows[0]["mean_e2el_ms"]) == told["runs"][0]["summary"]["mean_e2el_ms"]
    assert Path("out/page.html").stat().st_size > 4e6


def test_policies_are_variants_of_their_own_name(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["continuous", "static:batch_size=4,batch_timeout=100ms"]
    assert main(["compare", "small.toml", *(part for name in policies for part in ("--batching", name)), "-q"]) == 0
    out, err = capsys.readouterr()
    assert "Straggler tokens" in out or "Padding tokens" in out
    assert err == ""


@pytest.mark.parametrize(
    ("over", "values"),
    [
        ("output=5,10,20", [5, 10, 20]),
        ("output-len=5; uniform:low=1,high=9", [5, "uniform:low=1,high=9"]),
        ("max_num_batched_tokens=1k,2k", ["1k", "2k"]),
        ("request_rate=0.5,inf", [0.5, "inf"]),
        ("--rate=0.5,2", [0.5, 2]),
        ("engine=vllm-0.9,vllm-0.10", ["vllm-0.9", "vllm-0.10"]),
        ("enable_prefix_caching=true,false", [True, False]),
        ('output={dist="fixed", tokens=3}; 4', [{"dist": "fixed", "tokens": 3}, 4]),
        ("objectives=ttft:p99<500ms,itl:p99<50ms", [["ttft:p99<500ms"], ["itl:p99<50ms"]]),
    ],
)
def test_values_of_the_axis_are_separated_and_typed(
    small: Path, capsys: pytest.CaptureFixture[str], over: str, values: list[Any]
) -> None:
    assert main(["compare", "small.toml", "--over", over, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == values


def test_a_dry_run_lists_the_runs_and_runs_nothing(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "small.toml", "--variant", "a", "--variant", "max_model_len=100k", "--over", "output=5,6"]
    assert main([*command, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[5:7]] == [
        ["1", "a", "output", "=", "5"],
        ["2", "max_model_len=100k", "max_model_len", "=", "100k,", "output", "=", "5"],
    ]
    assert [line[:42] for line in lines[9:]] == [
        "run 2 (max_model_len=100k) is infeasible: ", "run 4 (max_model_len=100k) is infeasible: ",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["small.toml"], 2, "nothing to compare"),
        (["small.toml", "--variant", "a; max_num_sqs=3"], 2, "did you mean 'max_num_seqs'"),
        (["small.toml", "--variant", "a", "--variant", "a"], 2, "two variants are called 'a'"),
        (["small.toml", "--variant", "a, b"], 2, "'b' must read KEY=VALUE"),
        (["small.toml", "--variant", ";"], 2, "is empty"),
        (["small.toml", "--over", "output="], 2, "must read KEY=VALUE,VALUE"),
        (["small.toml", "--variant", "a", "--json", "--markdown"], 2, "give one of them"),
        (["small.toml", "--variant", "a", "--html", "."], 2, "it is a folder; name a file"),
        (["nosuch.toml", "--variant", "a"], 3, "no scenario file nosuch.toml"),
        (["small.toml", "small.toml"], 2, "small.toml is no folder of a saved run"),
        (["small.toml", "--variant", "a; max_model_len=100k"], 4, ""),
    ],
)
def test_the_exit_code_says_what_went_wrong(
    small: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(["compare", *arguments]) == code
    out, err = capsys.readouterr()
    assert message in err
    if code == 4:
        assert "No variant can be run." in out


def test_saved_runs_cannot_be_run_again(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("a")
    save("b", max_num_seqs=1)
    assert main(["compare", "a", "b"]) == 0
    assert "Changes are against a." in capsys.readouterr().out
    assert main(["compare", "a", "b", "--variant", "c"]) == 2
    assert "saved runs are compared as they are" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_without_a_traceback(small: Path) -> None:
    long = SMALL.replace("num_requests = 40", "num_requests = 3_000").replace("request_rate = 5", "request_rate = 50")
    Path("long.toml").write_text(long, "utf-8")
    variants = [part for seats in range(1, 9) for part in ("--variant", f"max_num_seqs={seats}")]
    command = [sys.executable, "-m", "windtunnel", "compare", "long.toml", "--jobs", "2", *variants]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    first = process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert first.startswith("1 of 8: max_num_seqs=1")
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in rest


@pytest.mark.slow
def test_processes_end_when_the_one_that_they_work_for_is_gone(small: Path) -> None:
    long = SMALL.replace("num_requests = 40", "num_requests = 3_000").replace("request_rate = 5", "request_rate = 50")
    Path("long.toml").write_text(long, "utf-8")
    variants = [part for seats in range(1, 9) for part in ("--variant", f"max_num_seqs={seats}")]
    command = [sys.executable, "-m", "windtunnel", "compare", "long.toml", "--jobs", "2", *variants]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    process.stderr.readline()
    process.kill()
    process.communicate(timeout=60)  # it ends only when nobody holds stderr any more


@pytest.mark.parametrize(
    "arguments",
    [
        ["small.toml", "--over", "max_num_seqs=1,2", "--html", "same.x", "--csv", "same.x"],
        ["small.toml", "--over", "max_num_seqs=1,2", "--html", "small.toml"],
        ["a", "b", "--csv", "a/summary.json"],
        ["a", "./a"],
        ["a", "b", "a/"],
    ],
)
def test_results_take_the_place_of_nothing_that_they_are_made_from(
    small: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    save("a")
    save("b", max_num_seqs=1)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert main(["compare", *arguments]) == 2
    assert "error: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_names_that_are_no_text_are_written_as_escapes(small: Path) -> None:
    names = ["--variant", "a\udcff; max_num_seqs=1", "--variant", "b"]
    assert main(["compare", "small.toml", *names, "--html", "x.html", "--csv", "x.csv", "-q"]) == 0
    assert "a\\udcff" in Path("x.csv").read_text("utf-8")
    assert "a\\udcff" in Path("x.html").read_text("utf-8")


@pytest.mark.parametrize("value", ["[" * 50_000, "1" * 6_000])
def test_values_that_cannot_be_read_are_complained_of(
    small: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    assert main(["compare", "small.toml", "--over", f"max_num_seqs={value}"]) == 2
    assert "bug in windtunnel" not in capsys.readouterr().err

"""Comparisons with replications: means, paired differences with intervals, and what is noise."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.comparison import Comparison, compare_runs
from windtunnel.reports.comparison_answer import from_to, within
from windtunnel.reports.comparison_figures import comparison_figures
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.sim.metrics.comparison import ComparedRun, ComparedRuns, difference, replicated

SCENARIO: dict[str, Any] = {
    "name": "small",
    "seed": 5,
    "deployment": {"num_gpu_blocks_override": 400, "gpu": "H100-SXM"},
    "engine": {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512},
    "workload": {
        "num_requests": 60,
        "input": {"dist": "uniform", "low": 20, "high": 200},
        "output": {"dist": "uniform", "low": 20, "high": 120},
        "request_rate": 12,
    },
    "cost": {"kind": "affine", "base_s": "8ms", "token_s": "20us"},
    "run": {"saturation": False},
}
VARIANTS = {"few": {"max_num_seqs": 4}, "many": {}, "same": {"max_num_seqs": 16}}
METRICS = ("p99_ttft_ms", "mean_itl_ms", "output_throughput")


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return wt.compare(SCENARIO, VARIANTS, metrics=METRICS, reps=6)


def run_of(values: list[float], variant: str = "a", key: str = "mean_ttft_ms") -> ComparedRun:
    summaries = [{"stability": "stable", key: value, "slo": []} for value in values]
    return replicated(variant, 0, summaries)


# --- means and verdicts


def test_numbers_are_means_over_the_seeds(compared: Comparison) -> None:
    assert compared.seeds == (5, 6, 7, 8, 9, 10)
    single = [wt.simulate(SCENARIO, seed=seed, max_num_seqs=4).summary for seed in compared.seeds]
    few = compared.runs.run("few")
    for key in METRICS:
        assert few.number(key) == pytest.approx(np.mean([each[key] for each in single]))
        assert few.values(key) == [each[key] for each in single]


def test_one_replication_is_as_without() -> None:
    plain, one = (wt.compare(SCENARIO, VARIANTS, metrics=METRICS, **own) for own in ({}, {"reps": 1}))
    assert one.to_dict() == plain.to_dict()
    assert one.text() == plain.text()
    assert one.seeds == ()
    assert "replications" not in one.to_dict()


def test_processes_share_the_replications_and_change_nothing(compared: Comparison) -> None:
    assert wt.compare(SCENARIO, VARIANTS, metrics=METRICS, reps=6, jobs=2).to_dict() == compared.to_dict()


def test_the_worst_verdict_counts_and_is_told() -> None:
    summaries = [{"stability": word, "slo": [], "x": 1.0} for word in ("stable", "overloaded", "too_short")]
    assert replicated("a", 0, summaries).verdict == "overloaded"
    assert replicated("a", 0, [summaries[2], summaries[0]]).verdict == "stable", "too short is no verdict"


def test_an_objective_is_kept_if_it_is_kept_every_time() -> None:
    def summary(measured: float, passed: bool) -> dict[str, Any]:
        return {"stability": "stable", "slo": [{"objective": "o", "measured": measured, "passed": passed}], "x": 1}

    merged = replicated(
        "a", 0, [summary(1.0, True) | {"slo_passed": True}, summary(3.0, False) | {"slo_passed": False}]
    )
    assert merged.summary is not None
    assert merged.summary["slo"] == [{"objective": "o", "measured": 2.0, "passed": False}]
    assert merged.summary["slo_passed"] is False


def test_a_number_that_some_replication_lacks_has_no_interval() -> None:
    run = run_of([1.0, 2.0, 3.0])
    lacking = replace(run, replications=(*run.replications, {"stability": "stable", "mean_ttft_ms": None}))
    assert lacking.values("mean_ttft_ms") == []
    assert lacking.interval("mean_ttft_ms") is None


# --- differences


def test_differences_are_taken_seed_against_seed() -> None:
    first, second = run_of([100.0, 200.0, 300.0]), run_of([110.0, 220.0, 330.0], "b")
    found = difference("mean_ttft_ms", first, second)
    assert found is not None
    assert found.absolute.mean == pytest.approx(20.0)
    assert found.share is not None
    assert (found.share.mean, found.share.low, found.share.high) == pytest.approx((0.1, 0.1, 0.1))
    assert not found.is_noise


def test_what_may_be_chance_is_noise_and_level() -> None:
    first, second = run_of([100.0, 110.0, 90.0, 105.0]), run_of([104.0, 100.0, 96.0, 103.0], "b")
    found = difference("mean_ttft_ms", first, second)
    assert found is not None
    assert found.is_noise
    runs = ComparedRuns(("a", "b"), None, (first, second), ("mean_ttft_ms",), "a")
    assert [run.variant for run in runs.leaders("mean_ttft_ms")] == ["b", "a"], "level: both lead"


def test_a_sure_difference_decides_where_a_single_run_would_call_it_level() -> None:
    first, second = run_of([1000.0, 1001.0, 999.0]), run_of([1008.0, 1009.0, 1007.0], "b")
    runs = ComparedRuns(("a", "b"), None, (first, second), ("mean_ttft_ms",), "a")
    assert [run.variant for run in runs.leaders("mean_ttft_ms")] == ["a"]
    tiny = run_of([1002.0, 1003.0, 1001.0], "b")
    runs = replace(runs, runs=(first, tiny))
    assert len(runs.leaders("mean_ttft_ms")) == 2, "sure, but too small to matter"


pairs = st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=2, max_size=12)


@given(pairs, st.floats(0.01, 100))
def test_a_share_does_not_depend_on_the_unit(values: list[tuple[float, float]], unit: float) -> None:
    first, second = ([pair[k] for pair in values] for k in (0, 1))
    found = difference("mean_ttft_ms", run_of(first), run_of(second, "b"))
    scaled = difference("mean_ttft_ms", run_of([v * unit for v in first]), run_of([v * unit for v in second], "b"))
    assert found is not None
    assert scaled is not None
    assert found.share is not None
    assert scaled.share is not None
    assert scaled.share.mean == pytest.approx(found.share.mean, abs=1e-9)
    assert scaled.share.half_width == pytest.approx(found.share.half_width, rel=1e-6, abs=1e-9)
    assert found.share.low <= found.share.mean <= found.share.high or found.share.half_width < 1e-12


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    """b is 1.2 times a with noise of its own, a varies by a third: 95 % of the intervals hold 0.2."""
    rng, held, num = np.random.default_rng(11), 0, 400
    for _ in range(num):
        base = rng.gamma(9, 10, 8)
        found = difference(
            "mean_ttft_ms", run_of(base.tolist()), run_of((1.2 * base + rng.normal(0, 5, 8)).tolist(), "b")
        )
        assert found is not None
        assert found.share is not None
        held += not found.share.excludes(0.2)
    assert 0.92 <= held / num <= 0.98


def test_over_a_zero_there_is_no_share_but_a_difference() -> None:
    found = difference("preemptions", run_of([0.0, 0.0], key="preemptions"), run_of([5.0, 5.0], "b", "preemptions"))
    assert found is not None
    assert found.share is None
    assert not found.is_noise
    assert (within(found), from_to(found)) == ("", "+5 (+5 to +5)")


def test_runs_of_unequal_replications_are_not_paired() -> None:
    assert difference("mean_ttft_ms", run_of([1.0, 2.0]), run_of([1.0, 2.0, 3.0], "b")) is None
    assert difference("mean_ttft_ms", run_of([1.0, 2.0]), ComparedRun("b", 0, {"mean_ttft_ms": 1.0})) is None


# --- reports


def test_variants_that_are_the_same_are_level(compared: Comparison) -> None:
    many, same = compared.runs.run("many"), compared.runs.run("same")
    found = difference("p99_ttft_ms", many, same)
    assert found is not None
    assert (found.absolute.mean, found.is_noise) == (0.0, True)
    assert "many and same are level" in compared.text() or "many and same" in compared.text()


def test_the_text_has_means_and_intervals(compared: Comparison) -> None:
    text = " ".join(compared.text().split())
    assert "many against few, with 95 % intervals: P99 TTFT -" in text
    assert "Numbers are means of 6 replications (seeds 5 to 10)" in text
    assert " ±" in text


def test_markdown_and_html_tell_the_same(compared: Comparison, tmp_path: Path) -> None:
    compared.report(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    for text in (compared.markdown(), page):
        assert "many against few, with 95 % intervals" in text
        assert "Numbers are means of 6 replications (seeds 5 to 10)" in text
    assert 'id="plot-differences"' in page


def test_the_figure_draws_each_difference_with_its_interval(compared: Comparison) -> None:
    drawn = comparison_figures(compared.runs, compared.relations)
    first = drawn[0]
    assert first.name == "differences"
    many, same = first.data
    assert (many["name"], same["name"]) == ("many", "same")
    found = compared.runs.difference(compared.runs.run("many"), "p99_ttft_ms")
    assert found is not None
    assert found.share is not None
    assert many["x"][0] == pytest.approx(100 * found.share.mean, rel=1e-3)
    assert many["error_x"]["array"][0] == pytest.approx(100 * found.share.half_width, rel=1e-3)
    assert [symbol.endswith("-open") for symbol in many["marker"]["symbol"]] == [
        bool(each and each.is_noise)
        for each in (compared.runs.difference(compared.runs.run("many"), k) for k in METRICS)
    ]


def test_the_json_has_intervals_of_means_and_of_differences(compared: Comparison) -> None:
    told = compared.to_dict()
    assert told["replications"] == {"seeds": [5, 6, 7, 8, 9, 10], "confidence": 0.95}
    few, many, _ = told["runs"]
    assert few["differences"] == {}
    mean = few["intervals"]["p99_ttft_ms"]
    assert mean["low"] < mean["mean"] < mean["high"]
    change = many["differences"]["p99_ttft_ms"]
    assert change["mean"] == pytest.approx(many["summary"]["p99_ttft_ms"] - few["summary"]["p99_ttft_ms"])
    assert change["share"]["mean"] == pytest.approx(many["changes"]["p99_ttft_ms"])
    assert change["is_noise"] is False
    assert json.dumps(told["runs"], allow_nan=False)


def test_the_table_has_a_row_for_each_replication(compared: Comparison, tmp_path: Path) -> None:
    compared.to_csv(tmp_path / "a.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text(encoding="utf-8"))))
    assert len(rows) == len(compared.table) == 18
    assert [(row["variant"], row["replication"], row["seed"]) for row in rows[:7]] == [
        *(("few", str(k), str(5 + k)) for k in range(6)),
        ("many", "0", "5"),
    ]


def test_along_an_axis_the_curves_have_bars() -> None:
    made = wt.compare(
        SCENARIO, {"few": {"max_num_seqs": 4}, "many": {}}, axis="request_rate", values=[8, 12], reps=3, metrics=METRICS
    )
    drawn = comparison_figures(made.runs, made.relations)
    assert [figure.name for figure in drawn] == [f"metric-{key}" for key in METRICS]
    assert all(len(trace["error_y"]["array"]) == 2 for trace in drawn[0].data[:2])
    assert "many against few at request_rate 8, with 95 % intervals" in " ".join(made.text().split())


def test_replications_that_cannot_differ_are_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,num_prompt_tokens,num_output_tokens\n" + "".join(f"{k},100,20\n" for k in range(20)))
    made = wt.compare({**SCENARIO, "workload": {"trace": str(trace)}}, {"few": {"max_num_seqs": 4}, "many": {}}, reps=2)
    assert any("All replications are alike" in text for text in made.context.common.warnings)


def test_the_seed_is_not_varied_twice() -> None:
    with pytest.raises(ScenarioError, match="replications vary the seed"):
        wt.compare(SCENARIO, {"a": {"seed": 1}, "b": {"seed": 2}}, reps=2)
    with pytest.raises(ScenarioError, match="replications must be 1 to 10,000, got 0"):
        wt.compare(SCENARIO, VARIANTS, reps=0)


# --- saved runs


def saved(folder: Path, **given: Any) -> str:
    wt.simulate(SCENARIO, **given).save(folder)
    return str(folder)


def test_saved_runs_of_several_seeds_are_paired(tmp_path: Path, compared: Comparison) -> None:
    folders = [saved(tmp_path / f"few-seed{seed}", seed=seed, max_num_seqs=4) for seed in (5, 6, 7)]
    folders += [saved(tmp_path / f"many-seed{seed}", seed=seed) for seed in (7, 5, 6, 8)]
    made = compare_runs(folders, metrics=METRICS)
    assert made.runs.variants == ("few", "many")
    assert made.seeds == (5, 6, 7)
    for name in ("few", "many"):
        assert made.runs.run(name).values("p99_ttft_ms") == compared.runs.run(name).values("p99_ttft_ms")[:3]
    assert "many against few, with 95 % intervals" in made.text()


def test_saved_runs_without_a_partner_are_compared_one_by_one(tmp_path: Path) -> None:
    folders = [saved(tmp_path / f"few-{seed}", seed=seed, max_num_seqs=4) for seed in (5, 6)]
    folders.append(saved(tmp_path / "many-5", seed=5))
    made = compare_runs(folders)
    assert made.runs.variants == ("few-5", "few-6", "many-5")
    assert made.seeds == ()


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (("few-seed0", "few-seed1"), "few"),
        (("64-s0", "64-s1"), "64"),
        (("run_10", "run_11"), "run"),
        (("a", "b"), "a"),
        (("7", "8"), "7"),
    ],
)
def test_a_group_is_called_by_what_its_folders_share(tmp_path: Path, names: tuple[str, str], shared: str) -> None:
    folders = [saved(tmp_path / name, seed=seed, max_num_seqs=4) for seed, name in enumerate(names)]
    folders += [saved(tmp_path / f"other-{seed}", seed=seed) for seed in (0, 1)]
    assert compare_runs(folders).runs.variants == (shared, "other")


# --- the command


def test_the_command_runs_replications(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", "chat-8b-h100", "--variant", "a; max_num_seqs=16", "--variant", "b; max_num_seqs=64"]
    asked += ["--set", "num_prompts=40", "--set", "saturation=false", "--reps", "3", "--seed", "2"]
    assert main([*asked, "--dry-run"]) == 0
    assert "replications of each run: 3, seeds 2 to 4" in capsys.readouterr().out
    assert main(asked) == 0
    out, told = capsys.readouterr()
    assert "b against a, with 95 % intervals" in " ".join(out.split())
    assert "1 of 2: a:" in told
    assert "(3 replications)" in told


def test_saved_runs_are_not_replicated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [saved(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    assert main(["compare", *folders, "--reps", "3"]) == 2
    assert "saved runs are compared as they are" in capsys.readouterr().err


def test_more_replications_never_change_the_first_ones() -> None:
    few = [wt.compare(SCENARIO, VARIANTS, metrics=METRICS, reps=reps).runs.run("few") for reps in (2, 3)]
    for shorter, longer in pairwise(few):
        assert longer.values("p99_ttft_ms")[: len(shorter.replications)] == shorter.values("p99_ttft_ms")

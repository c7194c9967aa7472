"""``sweep`` and ``sensitivity`` as a whole, on a scheduler with constant steps: points, seeds, folders, reports."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import windtunnel as wt
from windtunnel.reports.sweep_answer import answer, least_share
from windtunnel.reports.sweep_data import SweptAxis, SweptPoint, fall, paired
from windtunnel.reports.sweep_figures import MOST_MAPS, sweep_figures
from windtunnel.reports.sweep_influence import Influence, Influences, Sensed, influence_answer
from windtunnel.sweeping.context import report_context
from windtunnel.sweeping.sweep import Sweep
from windtunnel.trials import make_trial, run_trial

TINY: dict[str, Any] = {
    "name": "tiny",
    "deployment": {"num_gpu_blocks_override": 65},
    "engine": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512},
    "workload": {"num_requests": 30, "request_rate": 20, "input": 64, "output": 32},
    "cost": {"kind": "constant", "step_s": "10ms"},
    "run": {"saturation": False},
}


def swept(vary: dict[str, Any], **more: Any) -> Sweep:
    return wt.sweep(TINY, vary, **{"jobs": 1, "reps": 2, **more})


def test_a_point_is_what_simulate_makes_of_its_settings_and_seed() -> None:
    found = swept({"max_num_seqs": [2, 8]}, seed=5).runs
    for row in found.to_dict("records"):
        alone = wt.simulate(TINY, seed=row["seed"], max_num_seqs=row["max_num_seqs"]).summary
        assert row["p99_ttft_ms"] == alone["p99_ttft_ms"]
    assert found.seed.tolist() == [5, 6, 5, 6]


def test_all_points_serve_the_same_requests_run_by_run() -> None:
    """Common random numbers: what differs at a seed is the setting's doing."""
    found = swept({"max_num_seqs": [2, 4, 8]}, reps=3, input="exponential:mean=64,max=200").runs
    tokens = found.pivot(index="seed", columns="max_num_seqs", values="total_input_tokens")
    assert (tokens.nunique(axis=1) == 1).all()
    assert tokens[2].nunique() == 3


def test_changes_are_paired_and_their_interval_is_shorter_than_that_of_the_means() -> None:
    found = swept({"max_num_seqs": [4, 3]}, reps=8, input="exponential:mean=64,max=200", baseline={"max_num_seqs": 4})
    row = found.points.iloc[1]
    runs = found.runs.pivot(index="seed", columns="max_num_seqs", values="p99_ttft_ms")
    assert row.p99_ttft_ms_change == pytest.approx((runs[3] - runs[4]).mean())
    assert row.p99_ttft_ms_change_high - row.p99_ttft_ms_change_low < row.p99_ttft_ms_high - row.p99_ttft_ms_low


def test_counts_with_units_are_numbers_in_the_tables() -> None:
    assert swept({"max_num_batched_tokens": "1k,2K"}).runs.max_num_batched_tokens.unique().tolist() == [1000, 2048]


def test_the_same_setting_in_other_words_is_one_point() -> None:
    assert swept({"max_num_batched_tokens": "1k,1000,2k"}).runs.point.unique().tolist() == [1, 2]
    drawn = swept({"max_num_seqs": "random:1:3"}, samples=12, reps=1).runs.max_num_seqs
    assert sorted(drawn) == [1, 2, 3]


def test_what_is_looked_at_once_is_said(tmp_path: Path) -> None:
    found = swept({"max_num_batched_tokens": "1k,1000,2k,2k"}, reps=1)
    assert found.swept.context.notes[:2] == (
        "max_num_batched_tokens 1k,1000,2k,2k: 1 of 4 values comes to the same as another and is left out.",
        "1 of 3 points comes to the same as another and is left out.",
    )
    found.report(tmp_path / "a.html")
    assert "1 of 3 points comes to the same" in (tmp_path / "a.html").read_text()
    side_by_side = swept({"max_num_seqs": [2, 2, 4], "request_rate": [10, 20, 20]}, reps=1, zip=True)
    assert len(side_by_side.swept.points) == 3
    assert not any("left out" in note for note in side_by_side.swept.context.notes)


def test_the_scenarios_own_gpu_is_the_baseline_by_whatever_name() -> None:
    given = {"model": "llama-3.1-8b", "gpu": "h100-sxm", "num_requests": 5, "input": 64, "output": 8, "jobs": 1}
    own = given.pop("gpu")
    for name in (own, "h100"):
        found = wt.sweep("chat-8b-h100", {"gpu": ["l40s", name]}, reps=1, **given)
        assert found.swept.baseline is not None
        assert found.swept.baseline.settings == {"gpu": "H100-SXM"}
    named = wt.sweep("chat-8b-h100", {"gpu": "l40s,h100"}, reps=1, baseline={"gpu": "L40S"}, **given)
    assert named.swept.baseline is not None
    assert named.swept.baseline.settings == {"gpu": "L40S"}


@pytest.mark.parametrize("vary", [{"gpu": "L4,no-such-gpu"}, {"model": ["meta-llama/Llama-3.1-8B-Instruct", "none"]}])
def test_what_is_not_there_is_found_before_anything_runs(vary: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown"):
        wt.sweep("chat-8b-h100", vary, jobs=1, reps=1, folder=tmp_path / "kept", num_requests=5)
    assert not (tmp_path / "kept").exists()


def test_the_number_that_decides_is_in_the_table_whatever_else_is_asked_for() -> None:
    found = swept({"max_num_seqs": [1, 8]}, metrics=["p99_ttft_ms"], goodput="ttft:500", reps=1)
    assert found.swept.best_by == "request_goodput"
    assert found.swept.shown() == ["p99_ttft_ms", "request_goodput"]


def test_single_runs_claim_nothing_about_noise_but_that_it_is_not_known() -> None:
    text = re.sub(r"\s+", " ", swept({"max_num_seqs": [8, 16, 17]}, reps=1).text())
    assert text.count("noise") == text.count("so that noise is not known") == 1
    assert "differs by less than 1 %" in text
    assert "preemptions hardly change" in re.sub(
        r"\s+", " ", swept({"max_num_seqs": [2, 16]}, metrics=["preemptions"], best_by="p99_ttft_ms").text()
    )


def test_kept_in_all_of_few_runs_is_no_promise_and_the_answer_says_how_much_it_is() -> None:
    """Were 54.9 % of all runs good, five good ones in a row would be as rare as 1 in 20."""
    drawn = {"input": "exponential:mean=64,max=99", "slo": "ttft:p99<10s"}
    text = re.sub(r"\s+", " ", swept({"max_num_seqs": [8, 16]}, reps=5, **drawn).text())
    assert "in all 5 replications: with 95 % confidence at least 55 % of such runs do" in text
    assert least_share(5) ** 5 == pytest.approx(0.05)
    assert round(100 * least_share(5)) == 55
    assert "confidence" not in swept({"max_num_seqs": [8, 16]}, reps=1, **drawn).text()


def test_what_may_change_is_not_said_to_stay() -> None:
    """Two runs tell little: a change of many times may be noise, which is no proof that nothing changes."""
    scattered = {"input": "exponential:mean=64,max=450", "num_requests": 12}
    found = swept({"max_num_seqs": [6, 16]}, metrics=["p99_ttft_ms"], best_by="p99_ttft_ms", **scattered)
    first, last = found.swept.points
    change = paired(first, last, "p99_ttft_ms")
    assert change is not None
    assert not change.excludes(0)
    assert abs(change.mean) > 0.02 * (first.mean("p99_ttft_ms") or 0.0)
    assert "P99 TTFT changes within noise only" in re.sub(r"\s+", " ", found.text())


def test_settings_that_tie_are_named_in_the_headline() -> None:
    def all_alike(high: float) -> Influences:
        both = tuple(Influence(axis, 2.0, low, high) for axis, low in (("a", 1.0), ("b", 0.5)))
        return Influences("p99_ttft_ms", 1.0, (*both, Influence("c", 0.1, 0.0, 0.2)), 8, None)

    def headline(found: Influences) -> str:
        axes = tuple(SweptAxis(name, "1:2", ("1", "2"), True, False, True) for name in "abc")
        point = SweptPoint(1, {}, {}, {}, ({},))
        context = swept({"max_num_seqs": [8]}, reps=1).swept.context
        return influence_answer(Sensed(context, "", "morris", axes, {}, {}, (found,), (point,), (0,), 8)).headline

    assert headline(all_alike(3.0)) == "a and b matter most for P99 TTFT, and cannot be told apart."


def test_a_map_marks_where_objectives_are_missed_so_that_bright_is_not_taken_for_good(tmp_path: Path) -> None:
    vary = {"max_num_seqs": [1, 2, 16], "request_rate": [5, 10, 20]}
    found = swept(vary, reps=1, slo="ttft:p99<500ms")
    found.report(tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text()
    missed = sum(1 for point in found.swept.points if not point.holds)
    assert 0 < missed < 9
    assert "† misses objectives." in page
    assert "†" not in figures_of(swept(vary, reps=1))
    assert figures_of(found).count('†"') == missed * MOST_MAPS


def figures_of(found: Sweep) -> str:
    return json.dumps([figure.for_page() for figure in sweep_figures(found.swept)], ensure_ascii=False)


def test_a_load_that_is_too_much_in_a_run_too_short_to_show_it_is_not_called_overloaded() -> None:
    base = swept({"max_num_seqs": [8, 16]}, reps=1).swept
    runs = [
        {**base.points[0].runs[0], "verdict": verdict, "stability": verdict, "utilisation": 1.4}
        for verdict in ("too short", "overloaded")
    ]
    points = tuple(replace(point, runs=(run,)) for point, run in zip(base.points, runs, strict=True))
    said = " ".join(answer(replace(base, points=points)).risks)
    assert "At max_num_seqs 8 more comes in than can be served" in said
    assert "max_num_seqs 16 is overloaded" in said


def test_only_what_falls_to_nothing_falls_by_all_of_it() -> None:
    assert [fall(share) for share in (0.5, 0.994, 0.9951, 0.99999, 1.0)] == [
        "50 %",
        "99 %",
        "99.5 %",
        "99.9 %",
        "100 %",
    ]


def test_a_point_that_cannot_run_stays_in_the_table_with_the_reason() -> None:
    found = swept({"num_gpu_blocks_override": [3, 65]})
    bad, good = found.points.to_dict("records")
    assert "block" in bad["infeasible"]
    assert pd.isna(good["infeasible"])
    assert not found.is_infeasible
    assert bad["infeasible"].split(".")[0] in re.sub(r"\s+", " ", found.text())
    assert found.best is not None
    assert found.best.point.settings == {"num_gpu_blocks_override": 65}


def test_that_a_point_does_not_start_is_found_out_once_for_all_seeds(tmp_path: Path) -> None:
    """And says the same of each seed as its own run would."""
    told: list[tuple[int, int]] = []
    found = swept(
        {"num_gpu_blocks_override": [3, 65]},
        reps=3,
        folder=tmp_path / "kept",
        progress=lambda done, total: told.append((done, total)),
    )
    kept = (tmp_path / "kept" / "results" / "results.jsonl").read_text().splitlines()[1:]
    assert len(kept) == 1 + 3
    assert told[-1] == (6, 6)
    bad = found.swept.points[0]
    assert [run["seed"] for run in bad.runs] == [0, 1, 2]
    for run in bad.runs:
        assert run == run_trial(make_trial(TINY, {"num_gpu_blocks_override": 3}, seed=run["seed"]).argument)
    again = swept({"num_gpu_blocks_override": [3, 65]}, reps=3, folder=tmp_path / "kept", resume=True)
    assert again.to_dict() == found.to_dict()
    assert (tmp_path / "kept" / "results" / "results.jsonl").read_text().splitlines()[1:] == kept


def test_what_only_some_seeds_draw_is_found_out_for_each() -> None:
    """Whether all requests are too long hangs on those that are drawn: the first of these seeds has no other."""
    drawn = {"input": "exponential:mean=140,max=400", "num_requests": 2}
    found = swept({"max_model_len": [100, 512]}, reps=2, seed=1, **drawn)
    assert [run["infeasible"] is None for run in found.swept.points[0].runs] == [False, True]


def test_a_point_at_which_every_request_is_refused_does_not_end_the_sweep() -> None:
    found = swept({"max_model_len": [32, 512]}, reps=1)
    assert "refuses every one" in found.swept.points[0].infeasible
    assert found.swept.points[0].verdicts == ("not possible",)
    assert not found.swept.points[1].infeasible


def test_the_baseline_is_the_point_with_the_scenarios_own_values() -> None:
    base = swept({"max_num_seqs": [4, 16, 64]}).swept.baseline
    assert base is not None
    assert base.settings == {"max_num_seqs": 16}


def test_a_baseline_that_is_no_point_is_refused() -> None:
    with pytest.raises(wt.ScenarioError, match="fits 0 points"):
        swept({"max_num_seqs": [4, 16]}, baseline={"max_num_seqs": 5})


def test_a_replayed_trace_is_run_once_and_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,64,16\n2024-05-10 00:00:01,64,16\n")
    scenario = {**TINY, "workload": {"trace": str(trace)}}
    found = wt.sweep(scenario, {"max_num_seqs": [1, 2]}, jobs=1)
    assert len(found.swept.seeds) == 1
    assert "The trace is replayed as it is" in found.text()
    twice = wt.sweep(scenario, {"max_num_seqs": [1, 2]}, jobs=1, reps=2)
    assert "All replications of a point are the same" in re.sub(r"\s+", " ", twice.text())


def test_the_knee_of_seats_is_found_where_the_queue_goes_away() -> None:
    found = swept({"max_num_seqs": [1, 2, 3, 4, 6, 8, 10, 12]}, reps=5, num_requests=60, request_rate=6, output=64)
    knees = {knee.key: knee.point.settings["max_num_seqs"] for knee in found.knees}
    assert knees["p99_ttft_ms"] in (3, 4)
    assert all(knee.is_tested for knee in found.knees)


def test_objectives_decide_what_is_best() -> None:
    found = swept({"max_num_seqs": [1, 8]}, slo="ttft:p99<500ms")
    assert found.slo_passed
    assert found.best is not None
    assert found.best.is_under_slo
    assert found.best.point.settings == {"max_num_seqs": 8}
    none = swept({"max_num_seqs": [1, 2]}, slo="ttft:p99<1ms")
    assert none.best is None
    assert none.slo_passed is False
    assert "No point keeps the objectives (ttft:p99<1ms)" in none.text()


@pytest.mark.parametrize(
    ("vary", "more", "message"),
    [
        ({}, {}, "nothing is varied"),
        ({"seed": [1, 2]}, {}, "--reps"),
        ({"objectives": ["ttft:p99<1s", "ttft:p99<2s"]}, {}, "how runs are judged"),
        ({"goodput": ["ttft:100", "ttft:200"]}, {}, "how runs are judged"),
        ({"max_num_seqs": [1, 2]}, {"max_num_seqs": 4}, "drop one of them"),
        ({"max_num_seqs": [1, 2], "name": ["a"]}, {}, "no setting of a run"),
        ({"max_num_seqs": [1, 0]}, {}, "at least 1"),
        ({"max_num_seqs": [1, 2]}, {"metrics": ["p99_ttf_ms"]}, "did you mean 'p99_ttft_ms'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    vary: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(wt.ScenarioError, match=re.escape(message)):
        swept(vary, **more)


def test_where_gpus_have_a_price_every_answer_has_the_cost() -> None:
    given = {"model": "llama-3.1-8b", "gpu": "l40s", "num_requests": 40, "input": 128, "output": 32}
    found = wt.sweep(None, {"max_num_seqs": [4, 32]}, reps=1, jobs=1, gpu_hour=0.86, currency="EUR", **given)
    assert "Cost per million output tokens (EUR)" in found.markdown()
    rates = found.points.output_throughput
    assert found.points.cost_per_million_output_tokens.tolist() == pytest.approx(
        (0.86 / 3600 / rates * 1e6).tolist(), rel=0.02
    )
    unpriced = wt.sweep(None, {"max_num_seqs": [4]}, reps=1, jobs=1, **given)
    assert "cost" not in unpriced.markdown().lower().replace("cost model", "")


def test_what_preemptions_take_is_said() -> None:
    found = swept({"num_gpu_blocks_override": [33, 65]}, reps=1, num_requests=60, request_rate=100, max_num_seqs=8)
    assert (found.points.preemptions > 0).any()
    assert re.search(r"Preemptions take most at .* prefill tokens computed again", re.sub(r"\s+", " ", found.text()))


# --- folders


def test_a_folder_holds_tables_and_reports_that_say_the_same(tmp_path: Path) -> None:
    found = swept({"max_num_seqs": [2, 8]}, folder=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("points.csv", "report.html", "report.md", "results", "runs.csv", "runs.parquet", "sweep.json"),
    ]
    told = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert told["best"]["settings"] == dict(found.best.point.settings) if found.best else None
    csv, parquet = pd.read_csv(tmp_path / "out" / "runs.csv"), pd.read_parquet(tmp_path / "out" / "runs.parquet")
    assert len(csv) == len(parquet) == len(told["runs"]) == 4
    assert csv.p99_ttft_ms.tolist() == parquet.p99_ttft_ms.tolist() == [run["p99_ttft_ms"] for run in told["runs"]]


def test_a_folder_is_not_written_over_unless_it_is_to_be_resumed(tmp_path: Path) -> None:
    swept({"max_num_seqs": [2]}, folder=tmp_path / "out")
    with pytest.raises(wt.OutputError, match="--resume"):
        swept({"max_num_seqs": [2]}, folder=tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(wt.OutputError, match=r"thesis\.tex"):
        swept({"max_num_seqs": [2]}, folder=tmp_path / "other", resume=True)


def test_resuming_runs_only_what_is_missing(tmp_path: Path) -> None:
    swept({"max_num_seqs": [2, 4]}, folder=tmp_path / "out")
    kept = (tmp_path / "out" / "results" / "results.jsonl").read_bytes()
    more = swept({"max_num_seqs": [2, 4, 8]}, folder=tmp_path / "out", resume=True, reps=3)
    grown = (tmp_path / "out" / "results" / "results.jsonl").read_bytes()
    assert grown.startswith(kept)
    assert grown.count(b"\n") - kept.count(b"\n") == 9 - 4
    assert more.runs.equals(swept({"max_num_seqs": [2, 4, 8]}, reps=3).runs)


def test_progress_is_told_of_every_run() -> None:
    told: list[tuple[int, int]] = []
    swept({"max_num_seqs": [2, 4]}, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


# --- reports


def test_a_report_shows_all_effects_in_one_figure_that_shares_its_axis(tmp_path: Path) -> None:
    found = swept({"num_gpu_blocks_override": "5:65:10"}, reps=2, max_num_seqs=8)
    found.report(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    effects = next(each for each in figures if each["name"] == "effects")
    axes = [key for key in effects["layout"] if key.startswith("yaxis")]
    assert len(axes) == len(found.swept.shown()) >= 5
    assert "xaxis2" not in effects["layout"]
    assert {trace.get("xaxis", "x") for trace in effects["data"]} == {"x"}
    assert 'http-equiv="Content-Security-Policy"' in page
    assert "num_gpu_blocks_override" in page


def test_the_same_sweep_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        swept({"max_num_seqs": [2, 8]}, folder=tmp_path / name)
    for path in (tmp_path / "a").glob("*.*"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_two_settings_make_maps_and_drawn_ones_clouds(tmp_path: Path) -> None:
    def names(found: Sweep) -> list[str]:
        found.report(tmp_path / "a.html")
        told = (tmp_path / "a.html").read_text().split('id="figures">')[1].split("</script>")[0]
        return [each["name"] for each in json.loads(told)]

    grid = swept({"max_num_seqs": [2, 4, 8], "request_rate": [5, 10, 20]}, reps=1)
    assert "map-output_throughput" in names(grid)
    drawn = swept({"max_num_seqs": "random:2:16", "request_rate": "random:5:20"}, reps=1, samples=8)
    assert [name for name in names(drawn) if name.startswith("effects")] == [
        "effects-max_num_seqs",
        "effects-request_rate",
    ]


def test_markdown_has_a_row_for_each_point_and_marks_the_best() -> None:
    lines = swept({"max_num_seqs": [1, 8]}).markdown().splitlines()
    rows = [line for line in lines if line.startswith(("| 1 |", "| 2 |"))]
    assert len(rows) == 2
    assert "**best" in rows[1]


def test_steps_outside_of_a_profile_are_told_once_for_all_runs() -> None:
    """A sentence a run would bury the others."""
    outside = "{} of 900 steps ({}% of the time) lie outside of what the profile was measured at: their times …"
    warnings = [outside.format(8, 1), f"{outside.format(600, 67)}\nmax_model_len is long", None]
    runs = [{"cost_model": "fitted", "warnings": text} for text in warnings]
    said = report_context("x", None, runs, ["max_num_seqs"], [0]).warnings
    assert said[0].startswith("2 of 3 runs took steps outside of what their profile was measured at, for up to 67 %")
    assert said[1:] == ("max_model_len is long",)
    little = report_context("x", None, [{"cost_model": "fitted", "warnings": outside.format(1, 0)}], [], [0]).warnings
    assert "for less than 1 % of the time" in little[0]


# --- sensitivity


def test_the_setting_that_makes_the_queue_matters_most_by_every_method() -> None:
    ranges = {"max_num_seqs": "1:4", "long_prefill_token_threshold": "256:512"}
    for method, samples in (("oat", None), ("morris", 6), ("sobol", 16)):
        found = wt.sensitivity(TINY, ranges, method=method, samples=samples, jobs=1, metrics=["p99_ttft_ms"])
        first, second = found.table.to_dict("records")
        assert (first["setting"], first["is_leader"]) == ("max_num_seqs", True), method
        assert second["influence"] == pytest.approx(0, abs=1e-9), method
        assert "max_num_seqs matters most for P99 TTFT" in found.text()


def test_one_at_a_time_keeps_all_others_at_the_scenarios_own_values() -> None:
    found = wt.sensitivity(
        TINY, {"max_num_seqs": [2, 16], "request_rate": "10:30"}, method="oat", jobs=1, reps=2, metrics=["p99_ttft_ms"]
    )
    settings = [tuple(point.settings.values()) for point in found.sensed.points]
    assert settings == [(16, 20), (2, 20), (16, 10), (16, 30)]
    swing = found.table.set_index("setting").loc["max_num_seqs"]
    runs = found.runs[found.runs.request_rate == 20].pivot(index="seed", columns="max_num_seqs", values="p99_ttft_ms")
    assert swing.influence == pytest.approx((runs[2] - runs[16]).mean())


def test_points_that_cannot_run_are_left_out_of_an_analysis_and_counted() -> None:
    ranges = {"num_gpu_blocks_override": [4, 33, 65], "max_num_seqs": "1:4"}
    found = wt.sensitivity(TINY, ranges, method="sobol", samples=32, jobs=1, metrics=["p99_ttft_ms"])
    assert 0 < found.sensed.num_infeasible < len(found.sensed.points)
    assert found.sensed.found[0].num_rows < 32
    assert "left out" in re.sub(r"\s+", " ", found.text())


def test_an_analysis_is_kept_in_a_folder_and_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        wt.sensitivity(TINY, {"max_num_seqs": "1:4", "request_rate": "5:20"}, samples=4, jobs=1, folder=tmp_path / name)
    for path in (tmp_path / "a").glob("*.*"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    told = json.loads((tmp_path / "a" / "sensitivity.json").read_text())
    assert told["method"] == "morris"
    assert np.isfinite([row["low"] for row in told["influences"]]).all()


@pytest.mark.parametrize(
    ("method", "ranges", "more", "message"),
    [
        ("best", {"max_num_seqs": "1:4"}, {}, "oat, sobol, morris"),
        ("sobol", {"max_num_seqs": "1:4"}, {}, "two or more"),
        ("sobol", {"max_num_seqs": "1:4", "request_rate": "5:9"}, {"samples": 12}, "8 or 16"),
        ("oat", {"max_num_seqs": [4]}, {}, "one value only"),
        ("oat", {"max_num_seqs": "1:4"}, {"samples": 3}, "--samples"),
    ],
)
def test_an_analysis_that_makes_no_sense_is_refused(
    method: str, ranges: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        wt.sensitivity(TINY, ranges, method=method, jobs=1, **more)

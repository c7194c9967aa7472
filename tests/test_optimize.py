"""``optimize`` as a whole, on a scheduler with constant steps: the answer, its confirmation, folders and reports."""

from __future__ import annotations

import csv
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import windtunnel as wt
from windtunnel.optimizing.optimize import Optimum
from windtunnel.reports.sweep_data import are_level

pytest.importorskip("optuna")

TINY: dict[str, Any] = {
    "name": "tiny",
    "deployment": {"num_gpu_blocks_override": 65, "data_parallel_size": 3},
    "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 512},
    "workload": {"num_requests": 40, "request_rate": 12, "input": "exponential:mean=64,max=200", "output": 32},
    "cost": {"kind": "constant", "step_s": "10ms"},
    "run": {"saturation": False},
    "slo": {"objectives": ["ttft:p99<400ms"], "goodput": ["ttft:400"]},
}
SPACE: dict[str, Any] = {
    "max_num_seqs": [1, 2, 3, 4, 6, 8, 12, 16],
    "num_gpu_blocks_override": [17, 33, 65],
    "data_parallel_size": [1, 2, 3],
}


def optimized(tune: dict[str, Any] | None = None, **more: Any) -> Optimum:
    return wt.optimize(TINY, SPACE if tune is None else tune, **{"jobs": 1, "reps": 3, **more})


@cache
def searched() -> Optimum:
    """The search of the whole space, for all who only look at it."""
    return optimized(seed=7)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


# --- the answer


def test_it_finds_the_best_of_the_grid_or_one_level_with_it_in_fewer_simulations() -> None:
    grid = wt.sweep(TINY, SPACE, jobs=1, reps=3, seed=7, best_by="request_goodput_per_gpu")
    found = searched()
    assert grid.best is not None
    assert found.settings is not None
    own = next(point for point in grid.swept.points if dict(point.settings) == found.settings)
    assert own.holds
    assert are_level(grid.best.point, own, "request_goodput_per_gpu")
    of_grid = len(grid.runs)
    of_search = found.optimized.num_search + found.optimized.num_after
    assert of_grid == 8 * 3 * 3 * 3
    assert of_search < of_grid / 2


def test_all_of_a_small_space_is_tried_once_and_never_again() -> None:
    found = optimized({"max_num_seqs": [2, 4, 8], "data_parallel_size": [1, 3]})
    tried = [each.point.settings for each in found.optimized.tried]
    assert len(tried) == 6
    assert len({tuple(settings.values()) for settings in tried}) == 6
    assert "all combinations have been tried" in found.optimized.stop


def test_the_scenarios_own_settings_come_first_and_are_what_the_gain_is_counted_from() -> None:
    found = searched()
    first = found.optimized.tried[0]
    assert first.origin == "scenario"
    assert dict(first.point.settings) == {"max_num_seqs": 4, "num_gpu_blocks_override": 65, "data_parallel_size": 3}
    confirmation = found.optimized.confirmation
    assert confirmation is not None
    assert confirmation.start is not None
    gain = confirmation.gain("goodput_per_gpu_hour")
    assert gain is not None
    pairs = zip(
        confirmation.winner.values("goodput_per_gpu_hour"),
        confirmation.start.values("goodput_per_gpu_hour"),
        strict=True,
    )
    assert gain.mean == pytest.approx(sum(a - b for a, b in pairs) / 3)
    assert gain.low > 0


def test_own_settings_outside_of_what_is_searched_are_held_against_but_never_the_answer() -> None:
    found = optimized({"max_num_seqs": [2, 8], "data_parallel_size": [3, 2]})
    start = found.optimized.start
    assert not start.in_space
    assert not start.is_candidate
    assert found.settings is not None
    assert found.settings["max_num_seqs"] in (2, 8)


def test_the_confirmed_numbers_are_those_of_simulate_on_seeds_that_the_search_has_not_seen() -> None:
    found = searched()
    confirmation = found.optimized.confirmation
    assert confirmation is not None
    assert set(confirmation.seeds).isdisjoint(found.optimized.seeds)
    for seed, run in zip(confirmation.seeds, confirmation.winner.runs, strict=True):
        alone = wt.simulate(TINY, seed=seed, **(found.settings or {})).summary
        assert run["request_goodput"] == alone["request_goodput"]


def test_a_knob_that_buys_nothing_goes_back_to_the_default() -> None:
    """A long prompt's threshold above every prompt changes nothing."""
    found = optimized({"long_prefill_token_threshold": [0, 300, 400], "data_parallel_size": [1, 2]})
    assert found.settings is not None
    assert found.settings["long_prefill_token_threshold"] == 0


def test_the_steps_of_the_walk_add_up_to_the_gain() -> None:
    found = searched()
    walk, confirmation = found.optimized.walk, found.optimized.confirmation
    assert walk
    assert confirmation is not None
    gain = confirmation.gain("goodput_per_gpu_hour")
    assert gain is not None
    assert sum(step.change.mean for step in walk if step.change) == pytest.approx(gain.mean)
    changed = {key for step in walk for key in step.changes}
    start = found.optimized.start.point.settings
    assert changed == {key for key, value in (found.settings or {}).items() if start[key] != value}


def test_a_deployment_that_misses_an_objective_gets_no_second_run() -> None:
    for each in searched().optimized.tried[1:]:
        if each.point.runs and each.excess > 0 and "run 1" in each.dropped:
            assert len(each.point.runs) == 1
            assert each.point.runs[0]["slo_passed"] is False
            break
    else:
        pytest.fail("no deployment missed its objective at once: the space is too easy for this test")


# --- where there is no answer


def test_where_no_deployment_keeps_the_objectives_the_nearest_is_named_with_what_it_misses() -> None:
    found = optimized({"max_num_seqs": [1, 2, 4], "data_parallel_size": [1, 2]}, slo="ttft:p99<1ms")
    assert found.settings is None
    assert found.slo_passed is False
    nearest = found.optimized.nearest
    assert nearest is not None
    assert nearest.excess == min(each.excess for each in found.optimized.tried if each.in_space)
    assert "No deployment keeps the objectives (ttft:p99<1ms)" in squeezed(found.text())
    assert "misses ttft:p99<1ms by" in squeezed(found.text())


def test_deployments_that_do_not_start_are_failed_trials_with_the_reason() -> None:
    found = optimized({"max_num_seqs": [2, 8], "num_gpu_blocks_override": [3, 65], "data_parallel_size": [2, 3]})
    failed = [each for each in found.optimized.tried if each.point.infeasible]
    assert len(failed) == 4
    assert all("block" in each.point.infeasible for each in failed)
    assert found.settings is not None
    assert found.settings["num_gpu_blocks_override"] == 65
    assert "4 deployments" in found.text()


def test_a_space_of_which_nothing_starts_is_infeasible() -> None:
    tight = {**TINY, "deployment": {"num_gpu_blocks_override": 4, "data_parallel_size": 1}}
    found = wt.optimize(tight, {"num_gpu_blocks_override": [3, 4]}, jobs=1, reps=2)
    assert found.is_infeasible
    assert found.settings is None
    assert "Nothing of this starts" in found.text()


def test_a_space_that_does_not_start_is_infeasible_even_if_the_scenario_does() -> None:
    found = optimized({"num_gpu_blocks_override": [3, 4]}, reps=2)
    assert found.is_infeasible
    assert re.search(r"Nothing of this starts: .*block", squeezed(found.text()))


def test_a_scenario_that_is_better_than_all_that_is_searched_is_to_be_kept() -> None:
    endless = {**TINY, "slo": {"goodput": ["ttft:400"]}}
    found = wt.optimize(endless, {"max_num_seqs": [1]}, jobs=1, reps=3, request_rate=40)
    confirmation = found.optimized.confirmation
    assert confirmation is not None
    gain = confirmation.gain("goodput_per_gpu_hour")
    assert gain is not None
    assert gain.high < 0
    assert "Keep the settings as they are: they are better than all that was searched" in squeezed(found.text())
    assert "Set max_num_seqs" not in found.text()


def test_an_answer_with_less_than_the_scenario_is_not_to_be_set_even_within_the_noise() -> None:
    """Two runs have an interval so wide that it shows nothing."""
    endless = {**TINY, "slo": {"goodput": ["ttft:400"]}}
    found = wt.optimize(endless, {"max_num_seqs": [3]}, jobs=1, reps=2, request_rate=90)
    confirmation = found.optimized.confirmation
    assert confirmation is not None
    gain = confirmation.gain("goodput_per_gpu_hour")
    assert gain is not None
    assert gain.mean < 0 < gain.high
    assert "Keep the settings as they are: nothing that was searched is shown to be better" in squeezed(found.text())


def test_a_number_that_no_run_has_is_not_called_unsafe() -> None:
    found = optimized({"max_num_seqs": [2, 4]}, wanted="p99_itl_ms", output=1, reps=1)
    assert found.settings is None
    assert "unsafe" not in found.text()
    assert "tells its P99 ITL" in squeezed(found.text())


def test_an_answer_that_does_not_keep_up_is_not_praised() -> None:
    one = {**TINY["deployment"], "data_parallel_size": 1}
    endless = {**TINY, "deployment": one, "slo": {"goodput": ["ttft:400"]}}
    found = wt.optimize(endless, {"max_num_seqs": [1, 4, 6]}, jobs=1, reps=2, request_rate=90)
    said = squeezed(found.text())
    assert "it does not keep up with this load" in said
    assert "It is overloaded in 2 of 2 runs" in said


def test_a_run_too_short_to_show_that_its_queue_grows_is_known_by_the_load_that_saturates_it() -> None:
    found = wt.optimize(
        "chat-8b-h100", {"max_num_seqs": [256]}, jobs=1, reps=1, num_requests=100, request_rate=90, objectives=[]
    )
    assert found.optimized.winner is not None
    run = found.optimized.winner.runs[0]
    assert run["verdict"] == "too_short"
    assert run["utilisation"] > 1
    assert "It is overloaded in 1 of 1 run:" in squeezed(found.text())


def test_a_queue_that_grows_is_not_told_as_a_share_of_a_limit_that_was_not_reached() -> None:
    found = optimized({"max_num_seqs": [1]}, reps=2, slo="ttft:p99<3600s", request_rate=40)
    said = squeezed(found.text())
    assert "does not keep up with the load" in said
    assert "of its limit" not in said


@pytest.mark.parametrize("trials", [5, 64])
def test_a_space_that_was_tried_in_full_is_said_to_be(trials: int) -> None:
    found = optimized({"max_num_seqs": [2, 8], "data_parallel_size": [2, 3]}, reps=1, trials=trials)
    assert sum(each.in_space for each in found.optimized.tried) == 4
    assert "all combinations have been tried" in squeezed(found.text())


def test_a_trace_is_not_said_to_be_confirmed_on_other_requests(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{0.05 * k:.2f},{20 + k},16" for k in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    fixed = {**TINY, "workload": {"trace": str(trace)}}
    found = wt.optimize(fixed, {"max_num_seqs": [2, 8]}, jobs=1, slo="ttft:p99<60s")
    said = squeezed(found.text())
    assert "other seeds serve the same requests" in said
    assert "fresh" not in said


def test_a_start_that_cannot_run_is_no_hindrance() -> None:
    tight = {**TINY, "deployment": {"num_gpu_blocks_override": 4, "data_parallel_size": 2}}
    found = wt.optimize(tight, {"num_gpu_blocks_override": [4, 65]}, jobs=1, reps=2)
    assert found.settings == {"num_gpu_blocks_override": 65}
    assert "do not start" in squeezed(found.text())


# --- what is wanted


def test_a_price_makes_it_goodput_per_dollar() -> None:
    found = optimized({"data_parallel_size": [1, 2]}, gpu_price=2.0)
    target = found.optimized.target
    assert (target.key, target.unit) == ("goodput_per_dollar", "requests/USD")
    run = found.optimized.tried[0].point.runs[0]
    assert run["goodput_per_dollar"] == pytest.approx(run["request_goodput"] * 3600 / (2.0 * 3))


def test_any_number_of_a_run_can_be_wanted() -> None:
    least = optimized({"max_num_seqs": [2, 4, 16]}, wanted="p99_ttft_ms")
    assert least.optimized.target.better == "lower"
    assert least.settings is not None
    trials = least.trials.dropna(subset=["p99_ttft_ms"])
    own = trials[trials.max_num_seqs == least.settings["max_num_seqs"]].p99_ttft_ms.iloc[0]
    assert own <= 1.01 * trials.p99_ttft_ms.min()
    with pytest.raises(wt.ScenarioError, match="neither good nor bad"):
        optimized({"max_num_seqs": [2, 4]}, wanted="kv_usage_peak")
    most = optimized({"max_num_seqs": [2, 4]}, wanted="+kv_usage_peak")
    assert most.optimized.target.better == "higher"


@pytest.mark.parametrize(
    ("tune", "more", "message"),
    [
        ({"seed": [1, 2]}, {}, "no setting of a deployment"),
        ({"max_num_seqs": [1, 2]}, {"max_num_seqs": 4}, "drop one of them"),
        ({"max_num_seqs": [1, 0]}, {}, "at least 1"),
        ({"max_num_seqs": [1, 2]}, {"wanted": "p99_ttf_ms"}, "did you mean 'p99_ttft_ms'"),
        ({"request_rate": [1, 2]}, {"at": "capacity"}, "cannot be tuned at capacity"),
        ({"request_rate": [1, 2]}, {}, "all deployments must serve alike"),
        ({"output": [16, 32]}, {}, "all deployments must serve alike"),
        ({"gpu_hour": [1, 2]}, {}, "no setting of a deployment"),
        ({"objectives": ["ttft:p99<1s"]}, {}, "no setting of a deployment"),
        ({"max_num_seqs": [1, 2]}, {"gpu_price": 0}, "price of 0"),
        ({"max_num_seqs": [1, 2]}, {"at": "night"}, "load or capacity"),
        ({"max_num_seqs": [1, 2]}, {"trials": 0}, "trials must be 1"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    tune: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        optimized(tune, **more)


# --- the same bytes


def saved(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    small = {"max_num_seqs": [2, 4, 8], "data_parallel_size": [1, 2, 3]}
    optimized(small, folder=tmp_path / "one", jobs=1, reps=2)
    optimized(small, folder=tmp_path / "two", jobs=2, reps=2)
    assert saved(tmp_path / "one") == saved(tmp_path / "two")


def test_a_search_that_was_stopped_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int) -> None:
        if done == 9:
            raise Stop

    small = {"max_num_seqs": [2, 4, 8], "data_parallel_size": [1, 2, 3]}
    whole, part = tmp_path / "whole", tmp_path / "part"
    optimized(small, folder=whole)
    with pytest.raises(Stop):
        optimized(small, folder=part, progress=stop)
    assert [path.name for path in part.iterdir()] == ["results"]
    optimized(small, folder=part, resume=True)
    assert saved(part) == saved(whole)
    with pytest.raises(wt.OutputError, match="--resume"):
        optimized(small, folder=part)


# --- what it writes


def test_a_folder_holds_tables_reports_and_a_scenario_that_say_the_same(tmp_path: Path) -> None:
    found = searched()
    found.save(tmp_path / "out")
    assert sorted(saved(tmp_path / "out")) == [
        *("optimize.json", "report.html", "report.md", "runs.csv", "runs.parquet", "scenario.toml", "trials.csv"),
    ]
    told = json.loads((tmp_path / "out" / "optimize.json").read_text())
    assert told["settings"] == found.settings
    assert len(told["trials"]) == len(found.optimized.tried)
    with (tmp_path / "out" / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows if row["is_answer"] == "True"] == [str(found.optimized.winner.number)]  # type: ignore[union-attr]
    frame = pd.read_parquet(tmp_path / "out" / "runs.parquet")
    assert len(frame) == len(found.runs)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "http://" not in page.split("<script")[0]
    names = re.findall(r'<(?:section|div|h2|script)[^>]* id="([^"]+)"', page)
    assert len(names) == len(set(names))


def test_the_scenario_file_is_the_answer(tmp_path: Path) -> None:
    found = searched()
    found.save_scenario(tmp_path / "best.toml")
    confirmation = found.optimized.confirmation
    assert confirmation is not None
    again = wt.simulate(tmp_path / "best.toml", seed=confirmation.seeds[0]).summary
    assert again["p99_ttft_ms"] == confirmation.winner.runs[0]["p99_ttft_ms"]
    assert again["num_replicas"] == (found.settings or {})["data_parallel_size"]


def test_text_markdown_and_html_have_the_answer_and_the_walk() -> None:
    found = searched()
    for text in (found.text(), found.markdown()):
        assert "max_num_seqs" in text
        assert "The grid of all values has 72 deployments and would take 216 simulations" in squeezed(text)
        for step in found.optimized.walk:
            assert all(after in text for _, after in step.changes.values())

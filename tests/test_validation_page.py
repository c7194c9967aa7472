"""The published page and the README's table of validations: only what was measured, and what is missing is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.validation_page import BEGIN, END, INPUTS, gathered, readme_table, renew_table, shortened
from windtunnel.calibrate.memory_fit import Evaluation
from windtunnel.reports.validation_page import write_validation_page

DATES = {**dict.fromkeys(INPUTS, "2026-01-02"), "memory": "2026-01-03"}


def live_study(
    *, error_percent: float = 1.5, paced: bool = True, repeats: int = 1, difference: str | None = None
) -> Any:
    row = {
        "workload": "moderate",
        "figure": "TTFT mean",
        "live": 0.2,
        "live_spread": 0.01,
        "predicted": 0.203,
        "error_percent": error_percent,
        "limit_percent": 4.0,
        "is_broken": abs(error_percent) > 4.0,
    }
    tail = {**row, "figure": "TTFT p95", "error_percent": 6.5, "limit_percent": 8.0, "is_broken": False}
    steps = {**row, "figure": "steps", "limit_percent": None, "is_broken": False}
    decided = {"run": "moderate", "num_steps": 1234, "num_preemptions": 3, "num_same": 1234 - (difference is not None)}
    return {
        "date": "2026-02-03, 04:05 UTC",
        "versions": "vLLM 0.32.0, torch 2.13.0",
        "pace": {"base_ms": 30.0} if paced else None,
        "num_repeats": repeats,
        "rows": [row, tail, steps],
        "decisions": [{**decided, "first_difference": difference}],
    }


def fork() -> dict[str, Any]:
    lines = [
        {"name": name, "known": {"error_percent": 10.0}, "unknown": {"error_percent": -20.0}}
        for name in (
            *("request_throughput", "ttft_mean_ms", "tpot_mean_ms", "e2el_mean_ms", "running_mean", "kv_usage_mean"),
            "num_preemptions",
        )
    ]
    moment = {"time_s": 3.0, "is_exact_with_true_step_times": True, "metrics": lines}
    machine = {"date": "2026-04-05T06:07:08+00:00"}
    return {"machine": machine, "load": 0.75, "horizon_s": 30.0, "num_futures": 10, "moments": [moment, moment]}


def public_run() -> dict[str, Any]:
    figures = [
        {"figure": "makespan, s", "live": 180.0, "predicted": 189.0, "error_percent": 5.0},
        {"figure": "TPOT mean, ms", "live": 40.0, "predicted": 38.0, "error_percent": -5.0},
    ]
    told = {"about": "kernel tables", "num_preemptions": 7, "figures": figures}
    predictions = [
        {**told, "label": "composed", "is_hindsight": False},
        {**told, "label": "other", "is_hindsight": True},
    ]
    return {"engine": "vllm-0.19", "runs": [{"name": "Card, Model", "predictions": predictions}]}


def start_up(*, logged: int = 1000, planned: int = 990) -> Evaluation:
    return Evaluation(
        row=0,
        source="a log",
        family="some family",
        version="vllm-0.19",
        gpu="H100",
        kind="dense",
        situation=("some family",),
        logged=logged,
        predicted=planned,
        low=900,
        high=1100,
        residual_bytes=0.0,
        weights_logged=False,
        num_replicas=1,
    )


def content_of(*evaluations: Evaluation, **inputs: Any) -> dict[str, Any]:
    content: dict[str, Any] = shortened(gathered(inputs, evaluations, DATES))
    return content


def live(**options: Any) -> dict[str, Any]:
    return {"studies": {"paced": live_study(**options)}}


def page_of(tmp_path: Path, content: dict[str, Any]) -> str:
    path = tmp_path / "validation.html"
    write_validation_page(path, content, version="1.2.3")
    return path.read_text(encoding="utf-8")


def figures_in(html: str) -> dict[str, Any]:
    found = re.search(r'id="figures">(.*?)</script>', html)
    return {figure["name"]: figure for figure in json.loads(found[1])} if found else {}


def test_without_any_input_there_is_no_row_and_every_input_is_named_as_missing(tmp_path: Path) -> None:
    content = content_of()
    html = page_of(tmp_path, content)
    assert content["rows"] == []
    assert figures_in(html) == {}
    assert all(f"{name}.json" in html for name in INPUTS)
    assert "No judged live run was at hand." in html


def test_a_live_study_gives_a_row_with_its_date_its_worst_errors_and_its_decisions() -> None:
    rows = {row["subject"]: row for row in content_of(live_vllm_cpu=live())["rows"]}
    row = rows["live server, paced steps"]
    assert (row["when"], row["n"]) == ("2026-02-03", "1 run")
    assert row["error"] == "means 1.5 %, p95 6.5 %"
    assert row["decisions"] == "same in 1,234 steps"
    assert rows["scheduler, live servers' steps"]["error"] == "none differs"


def test_how_far_live_runs_are_apart_is_said_only_if_there_was_more_than_one() -> None:
    def spread(repeats: int) -> Any:
        studies = {"bare": live_study(paced=False, repeats=repeats)}
        rows = {row["subject"]: row for row in content_of(live_vllm_cpu={"studies": studies})["rows"]}
        return rows["live server, bare CPU steps"]["spread"]

    assert spread(1) == ""
    assert spread(3) == "5.0 %"


def test_what_a_study_notes_of_its_failed_runs_is_on_the_page(tmp_path: Path) -> None:
    study = {**live_study(), "notes": ["Two runs were made.", "", "- A, overload: TTFT mean -6.7 %"]}
    html = page_of(tmp_path, content_of(live_vllm_cpu={"studies": {"paced": study}}))
    assert "Two runs were made. A, overload: TTFT mean -6.7 %" in html


def test_a_figure_out_of_its_limit_or_a_decision_that_differs_is_said_first(tmp_path: Path) -> None:
    good = page_of(tmp_path, content_of(live_vllm_cpu=live()))
    assert "All 2 figures of 1 live workload are within their limits." in good
    assert "tone-good" in good
    broken = page_of(tmp_path, content_of(live_vllm_cpu=live(error_percent=-9.25)))
    assert "1 of 2 figures of 1 live workload are within their limits." in broken
    assert "Out of its limit: TTFT mean of moderate" in broken
    assert "-9.2 %" in broken
    differs = page_of(tmp_path, content_of(live_vllm_cpu=live(difference="step 7: <two> tokens")))
    assert "1 of 1 live run differ" in differs
    assert "step 7: &lt;two&gt; tokens" in differs
    assert 'class="answer tone-good"' not in differs


def test_the_steps_of_all_schedulers_are_summed_and_their_differences_counted() -> None:
    own = {"vllm": "0.32.0", "steps": 1000, "differences": []}
    older = {"num_releases": 24, "steps": 234, "different": 2, "different_by_rules_not_reproduced": 15}
    (row,) = content_of(**{"differential": own, "older-releases": older})["rows"]
    assert (row["truth"], row["n"]) == ("vLLM 0.32 and 24 older", "1,234 steps")
    assert row["error"] == "2 cases differ; 15 cases by named rules"


def test_latencies_are_drawn_in_milliseconds_with_their_number(tmp_path: Path) -> None:
    html = page_of(tmp_path, content_of(live_vllm_cpu=live(), validation_4090=public_run()))
    scatter = {trace.get("name"): trace for trace in figures_in(html)["scatter"]["data"]}
    assert scatter["vLLM on CPU, paced"]["x"] == pytest.approx([200.0, 200.0])
    assert scatter["public GPU runs"]["y"] == pytest.approx([38.0])
    assert "n = 3 latencies: vLLM on CPU, paced 2, public GPU runs 1" in html
    assert scatter["±4 %"]["y"][0] == pytest.approx(1.04 * scatter["±4 %"]["x"][0])


def test_what_was_changed_after_the_fact_is_marked_and_is_not_in_the_table(tmp_path: Path) -> None:
    content = content_of(validation_4090=public_run())
    (row,) = content["rows"]
    assert (row["truth"], row["error"]) == ("vLLM 0.19, Card, Model", "makespan 5.0 %, means 5.0 %")
    html = page_of(tmp_path, content)
    assert html.count("after the fact") == 1
    assert "from kernel tables, are off by up to 5.0 % (Card, Model)." in html


def test_forks_count_what_is_exact_and_draw_both_kinds(tmp_path: Path) -> None:
    content = content_of(fork=fork(), fork_near_saturation=fork())
    (row,) = content["rows"]
    assert (row["n"], row["decisions"]) == ("4 moments", "4 of 4 exact with true step times")
    assert row["error"] == "means: half within 10 %, all 10 %"
    known, drawn = figures_in(page_of(tmp_path, content))["forks"]["data"]
    assert set(known["x"]) == {10.0}
    assert set(drawn["x"]) == {-20.0}
    assert len(known["x"]) == 4 * 6


def test_start_ups_are_judged_by_their_absolute_errors() -> None:
    content = content_of(start_up(planned=990), start_up(planned=1030))
    (row,) = content["rows"]
    assert row["n"] == "2 start-ups"
    assert row["error"].startswith("median 2.00 %")
    assert row["error"].endswith("worst 3 %")


def test_the_readme_keeps_all_but_its_table(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"# before\n\n{BEGIN}\nold row\n{END}\n\nafter\n", encoding="utf-8")
    rows = content_of(start_up())["rows"]
    renew_table(path, rows)
    once = path.read_text(encoding="utf-8")
    table = "\n".join(readme_table(rows))
    assert once == f"# before\n\n{BEGIN}\n{table}\n{END}\n\nafter\n"
    renew_table(path, rows)
    assert path.read_text(encoding="utf-8") == once


def test_a_readme_without_a_place_for_the_table_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    for text in ("nothing", f"{END} {BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="has no place for the table: write"):
            renew_table(path, [])
        assert path.read_text(encoding="utf-8") == text


def test_the_same_content_gives_the_same_bytes_and_names_from_files_are_escaped(tmp_path: Path) -> None:
    public = public_run()
    public["runs"][0]["name"] = "<script>alert(1)</script>"
    content = content_of(start_up(), live_vllm_cpu=live(), validation_4090=public, fork=fork())
    html = page_of(tmp_path, content)
    assert "<script>alert" not in html
    assert html == page_of(tmp_path, content)


def test_what_is_no_number_becomes_nothing() -> None:
    assert shortened({"a": [float("inf"), 1.234567, float("nan")]}) == {"a": [None, 1.2346, None]}

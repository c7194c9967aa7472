"""The published page of predicted beside measured step times: what it says, and that it says what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.calibration_page import _group
from windtunnel.calibrate.step_tables import StepTable
from windtunnel.reports.calibration_page import MISSING, write_calibration_page
from windtunnel.sim.engine.plan import StepShape

NOTHING: dict[str, Any] = {name: {MISSING: f"no {name} here"} for name in ("b300", "live", "kernels", "cpu", "bundled")}


def group(name: str, num_steps: int = 12) -> dict[str, Any]:
    """Half of the steps decode, half are prompts; all are predicted a tenth too long."""
    steps = np.arange(1, num_steps + 1)
    prompts = np.arange(num_steps) % 2
    nothing = np.zeros(num_steps, np.int64)
    decodes, tokens = steps * (1 - prompts), steps * prompts
    pairs = tokens * (tokens + 1) // 2
    columns: Any = [decodes, 10 * decodes, prompts, tokens, nothing, pairs, decodes + prompts]
    table = StepTable(StepShape(*columns), 0.01 * steps.astype(np.float64))
    return _group(name, table, 1.1 * table.step_s, np.ones(num_steps, bool))


def live_part(*, error_percent: float = 1.0) -> dict[str, Any]:
    line = {
        "run": "S/run",
        "where": "client",
        "figure": "TTFT mean",
        "live": 0.1,
        "predicted": 0.101,
        "spread": 0.001,
        "error_percent": error_percent,
        "limit_percent": 4.0,
        "is_broken": abs(error_percent) > 4.0,
    }
    decisions = [{"run": "S/run", "num_steps": 1234, "num_preemptions": 5, "first_difference": None}]
    study = {"predicted": ["S/run"], "learned": ["S/other"]}
    paced = {
        "study": study,
        "limits_percent": {"makespan": 2.0, "mean": 4.0, "p95": 8.0, "preemptions": 10.0},
        "num_simulations": 20,
        "http_path_ms": {"in_ms": 3.9, "first_in_ms": 26.0, "turn_ms": 0.9, "out_ms": 3.0, "out_per_token_ms": 0.15},
        "lines": [line, {**line, "where": "engine", "limit_percent": None, "is_broken": False}],
        "decisions": decisions,
    }
    return {"paced": paced, "bare": {"study": study, "lines": [], "decisions": []}, "groups": [group("S/run")]}


def b300_part() -> list[dict[str, Any]]:
    division = {"median_percent": 1.25, "p90_percent": 7.0, "covered_percent": 90.0}
    size = {"tensor_parallel_size": 4, "num_steps_in_table": 300, "divisions": [division, division]}
    return [{**group("B300, TP 4"), **size}]


def written(tmp_path: Path, **parts: Any) -> str:
    path = tmp_path / "calibration.html"
    write_calibration_page(path, {**NOTHING, **parts}, version="1.2.3")
    return path.read_text(encoding="utf-8")


def figures_in(html: str) -> dict[str, Any]:
    found = re.search(r'id="figures">(.*?)</script>', html)
    return {figure["name"]: figure for figure in json.loads(found[1])} if found else {}


def test_parts_that_are_missing_say_so(tmp_path: Path) -> None:
    html = written(tmp_path)
    for name in NOTHING:
        assert f"no {name} here" in html
    assert figures_in(html) == {}


def test_all_figures_are_within_their_limits_or_the_page_begins_with_those_that_are_not(tmp_path: Path) -> None:
    assert "All 1 figures of 1 live runs are within their limits." in written(tmp_path, live=live_part())
    broken = written(tmp_path, live=live_part(error_percent=-5.0))
    assert "1 of 1 figures of 1 live runs are outside of their limits." in broken
    assert "tone-bad" in broken


def test_steps_are_drawn_by_regime_with_their_number(tmp_path: Path) -> None:
    html = written(tmp_path, b300=b300_part(), live=live_part())
    assert "n = 24 of 24 steps" in html
    assert "n = decode 12, prefill 12, mixed 0 steps" in html
    scatter = figures_in(html)["scatter"]["data"]
    assert {trace["name"]: len(trace["x"]) for trace in scatter if trace["mode"] == "markers"} == {
        "decode": 12,
        "prefill": 12,
        "mixed": 0,
    }
    boxes = {trace["name"]: trace for trace in figures_in(html)["residuals"]["data"]}
    assert boxes["decode"]["median"] == pytest.approx([10.0, 10.0])


def test_divisions_of_b300_are_counted_against_what_is_wanted(tmp_path: Path) -> None:
    html = written(tmp_path, b300=b300_part())
    assert "1.25 % (1.25 %)" in html
    assert "0 of 2" in html
    assert "2 of 2" in html


def test_errors_of_composed_steps_are_named_by_the_way_to_them(tmp_path: Path) -> None:
    errors = {"num_steps": 1234, "median_percent": 4.567, "p90_percent": 20.0, "bias_percent": -3.5}
    card = {"gpu": "RTX-4090", "model": "maker/some-model", "tensor_parallel_size": 2, "no_host": errors}
    html = written(tmp_path, kernels={"left_out": [card], "real_steps": {"by_size": {"8": errors}}, "release": "0.12"})
    for text in ("RTX-4090, some-model, TP 2: no host", "TP 8", "1,234", "4.57 %", "-3.50 %", "left out of the fit"):
        assert text in html


def test_bundled_profiles_state_their_error_or_that_none_was_measured(tmp_path: Path) -> None:
    profile = {"name": "m-h100-tp1", "gpu": "h100", "device": "H100", "tensor_parallel_size": 1, "source": "composed"}
    known = {**profile, "stated_error": {"p50_percent": 3.25, "p90_percent": 9.0, "rests_on": "steps of a like card"}}
    unknown = {**profile, "name": "other", "stated_error": {"p50_percent": None, "p90_percent": None}}
    html = written(tmp_path, bundled={"profiles": [known, unknown]})
    for text in ("2 profiles come with windtunnel", "3.2 %", "steps of a like card", "other"):
        assert text in html


def test_names_from_files_are_escaped_and_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    errors = {"num_steps": 1, "median_percent": 1.0, "p90_percent": 1.0, "bias_percent": 1.0}
    content = {"kernels": {"<script>alert(1)</script>": errors}, "live": live_part()}
    html = written(tmp_path, **content)
    assert "<script>alert" not in html
    assert html == written(tmp_path, **content)


def test_a_group_of_many_steps_is_thinned_out_and_keeps_both_ends() -> None:
    points = group("many", num_steps=2000)["points"]
    assert len(points["measured_ms"]) <= 300
    assert (min(points["measured_ms"]), max(points["measured_ms"])) == pytest.approx((10.0, 20_000.0))

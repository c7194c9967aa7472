"""``windtunnel optimize`` from the command line: flags, outputs and exit codes; and searches of real deployments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.optimizing import measuring
from windtunnel.optimizing.measuring import excesses, uses_of
from windtunnel.optimizing.question import make_question
from windtunnel.optimizing.rates import estimated_rate
from windtunnel.reports.optimize_data import Target, is_level
from windtunnel.reports.sweep_data import SweptPoint
from windtunnel.sim.metrics.slo import parse_slos

pytest.importorskip("optuna")

SCENARIO = """\
schema_version = 1
name = "tiny"
[deployment]
num_gpu_blocks_override = 65
[engine]
max_num_seqs = 4
max_num_batched_tokens = 512
max_model_len = 512
[workload]
num_requests = 30
request_rate = 10
input = 64
output = 32
[cost]
kind = "constant"
step_s = "10ms"
[run]
saturation = false
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(SCENARIO)
    return str(path)


def run(*arguments: str) -> int:
    return main(["optimize", *arguments, "-q", "-j", "1"])


def test_the_command_prints_the_answer_and_writes_what_is_asked_for(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, best = tmp_path / "o.html", tmp_path / "best.toml"
    asked = ("--tune", "max_num_seqs=2,8", "--slo", "ttft:p99<2s", "--reps", "2", "--html", str(html))
    assert run(scenario, *asked, "--save-scenario", str(best), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"] == {"max_num_seqs": 8}
    assert html.stat().st_size > 100_000
    assert wt.simulate(best).summary["completed"] == 30


def test_the_exit_code_says_whether_the_objectives_are_kept_and_whether_anything_starts(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scenario, "--tune", "max_num_seqs=2,8", "--slo", "ttft:p99<1ms", "--reps", "2") == 99
    assert "misses" in capsys.readouterr().out
    assert run(scenario, "--tune", "num_gpu_blocks_override=2,3", "--set", "max_num_seqs=2", "--reps", "2") in (0, 4)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tune", "max_num_seqs"), "must read KEY=SPEC"),
        (("--tune", "max_num_seqs=2,4", "--tune", "max_num_seqs=8"), "tuned twice"),
        (("--tune", "max_num_seqs=2,4", "--resume"), "-o DIR"),
        (("--tune", "max_num_seqs=2,4", "--json", "--markdown"), "give one of them"),
        (("--tune", "max_num_seqs=2,4", "--at", "night"), "load or capacity"),
        (("--tune", "max_num_seqs=2,4", "--gpu-price", "2", "--set", "gpu_hour=1"), "say the same"),
    ],
)
def test_usage_errors_are_told_with_exit_code_2(
    scenario: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scenario, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_optuna_the_error_names_the_extra(
    scenario: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert run(scenario, "--tune", "max_num_seqs=2,4") == 2
    assert "windtunnel[optimize]" in capsys.readouterr().err


def test_the_command_starts_without_loading_optuna(scenario: str) -> None:
    code = (
        "import sys; from windtunnel.cli.main import main; "
        f"main(['optimize', {scenario!r}, '--tune', 'max_num_seqs=2,4', '--dry-run']); "
        "sys.exit('optuna' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# --- the usual knobs


def test_the_usual_knobs_are_those_with_step_times_of_one_kind() -> None:
    question = make_question("chat-8b-h100", {})
    values = {knob.key: knob.values for knob in question.knobs}
    assert values["tensor_parallel_size"] == (1, 2, 4, 8)
    assert "kv_cache_dtype" not in values
    assert any("fp8" in note for note in question.notes)
    for knob in question.knobs:
        assert knob.own in knob.values
        assert knob.default in knob.values


def test_a_formula_knows_all_sizes_and_types() -> None:
    question = make_question("chat-8b-h100", {}, overrides={"cost": "roofline"})
    values = {knob.key: knob.values for knob in question.knobs}
    assert values["kv_cache_dtype"] == ("auto", "fp8")


def test_values_with_units_are_numbers() -> None:
    question = make_question("chat-8b-h100", {"max_num_batched_tokens": "2K,8k"})
    assert question.knobs[0].values == (2048, 8000)


def test_percentiles_of_the_objectives_are_measured() -> None:
    question = make_question("chat-8b-h100", {"max_num_seqs": [2, 4]}, overrides={"objectives": ["ttft:p99.9<1s"]})
    assert 99.9 in (question.base.scenario.run.percentiles or ())


# --- how much of a limit is used


@pytest.mark.parametrize(
    ("objective", "run", "use"),
    [
        ("ttft:p99<500ms", {"p99_ttft_ms": 250.0}, 0.5),
        ("goodput>=99%", {"goodput_share": 0.98}, 2.0),
        ("request_throughput>10", {"request_throughput": 20.0}, 0.5),
        ("kv_usage:peak<80%", {"kv_usage_peak": 0.4}, 0.5),
        ("failed<2%", {"failed": 1, "num_prompts": 100}, 0.5),
    ],
)
def test_the_use_of_a_limit_is_1_at_the_limit(objective: str, run: dict[str, Any], use: float) -> None:
    assert uses_of(run, parse_slos(objective)) == {objective: pytest.approx(use)}


def test_an_objective_that_counts_as_missed_is_never_kept() -> None:
    """An overloaded run misses its objectives whatever was measured."""
    objectives = parse_slos("ttft:p99<500ms")
    run = {"p99_ttft_ms": 250.0, "slo_missed": "ttft:p99<500ms"}
    assert excesses(run, objectives)["ttft:p99<500ms"] > 0


def test_a_rate_is_where_the_use_crosses_1() -> None:
    assert estimated_rate([(1.0, 0.5), (4.0, 2.0)]) == pytest.approx(2.0)
    assert estimated_rate([(1.0, 0.5), (4.0, float("inf"))]) == pytest.approx(2.0)
    assert estimated_rate([(1.0, 0.2), (4.0, 0.4)]) == 4.0
    assert estimated_rate([(1.0, 1.5), (4.0, 2.0)]) == 0.0


# --- at capacity


def test_at_capacity_goodput_is_the_rate_that_keeps_the_objectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server with constant steps: with more seats it carries more, and the more the more seats."""
    for settings in (measuring.COARSE, measuring.FINE):
        monkeypatch.setitem(settings, "num_requests", 400)
        monkeypatch.setitem(settings, "replications", 4)
        monkeypatch.setitem(settings, "precision", 0.2)
    path = tmp_path / "tiny.toml"
    path.write_text(SCENARIO)
    found = wt.optimize(
        path, {"max_num_seqs": [4, 8]}, at="capacity", slo="ttft:p99<500ms", jobs=1, reps=1, seed=3, output=16
    )
    assert found.settings == {"max_num_seqs": 8}
    few, many = (
        next(each.point for each in found.optimized.tried if each.point.settings["max_num_seqs"] == seats)
        for seats in (4, 8)
    )
    assert (many.mean("goodput") or 0) > 1.5 * (few.mean("goodput") or 0) > 0
    assert "largest rate that keeps the objectives" in " ".join(found.text().split())


def point(*values: float, low: float | None = None, high: float | None = None) -> SweptPoint:
    bounds = {} if low is None else {"holds_up_to": low, "fails_from": high}
    return SweptPoint(1, {}, {}, {}, tuple({"goodput": value, "max_rate": value, **bounds} for value in values))


@pytest.mark.parametrize(
    ("first", "second", "level"),
    [
        (point(100, 100, 100), point(100.5, 100.5, 100.5), True),
        (point(100, 104, 96), point(104, 99, 103), True),  # 2 %, within noise
        (point(100, 101, 102), point(103, 104, 105), False),  # 3 %, each time
        (point(100, 100), point(150, 101), False),  # two runs say nothing, which is no sign that it is level
        (point(20.0, low=19, high=21), point(20.8, low=20, high=22), True),
        (point(20.0, low=19.9, high=20.2), point(20.8, low=20.6, high=21), False),
    ],
)
def test_level_is_what_is_close_not_what_is_unknown(first: SweptPoint, second: SweptPoint, level: bool) -> None:
    target = Target("goodput", "goodput", "req/s", "higher")
    assert is_level(first, second, target) is level
    assert is_level(second, first, target) is level


def test_no_output_takes_the_place_of_what_is_read_or_kept(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, folder = tmp_path / "trace.csv", tmp_path / "out"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,8,8\n")
    tune = ("--tune", "max_num_seqs=2,4")
    assert run(scenario, *tune, "--csv", scenario) == 2
    assert run(scenario, *tune, "--set", f"trace={trace}", "--csv", str(trace)) == 2
    assert run(scenario, *tune, "-o", str(folder), "--csv", str(folder / "runs.csv")) == 2
    assert run(scenario, *tune, "-o", str(folder), "--html", str(folder / "results" / "x.html")) == 2
    assert "it is read for that" in (said := capsys.readouterr().err)
    assert "writes its own there" in said
    assert Path(scenario).read_text() == SCENARIO
    assert trace.read_text().startswith("TIMESTAMP")
    assert not folder.exists()


def test_the_error_of_the_profile_is_held_against_the_head_room() -> None:
    found = wt.optimize(
        "chat-8b-h100", {"max_num_seqs": [64, 128]}, jobs=1, reps=1, num_requests=60, request_rate=2, slo="ttft:p99<60s"
    )
    said = " ".join(found.text().split())
    assert "nine of ten by up to 28 %: less than the head-room of" in said


def test_without_optuna_no_folder_is_left_behind(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert run(scenario, "--tune", "max_num_seqs=2,4", "-o", str(tmp_path / "out")) == 2
    assert "pip install" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

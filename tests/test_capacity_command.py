"""``windtunnel capacity``: its outputs, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from windtunnel.capacity.decide import Status
from windtunnel.capacity.html import _curve
from windtunnel.capacity.max_rate import max_rate
from windtunnel.cli.main import main

SCENARIO = """\
name = "small"

[deployment]
num_gpu_blocks_override = 2000

[engine]
max_num_seqs = 32
max_num_batched_tokens = 512
max_model_len = 2048

[workload]
input = { dist = "uniform", low = 50, high = 300 }
output = { dist = "uniform", low = 5, high = 40 }
request_rate = 5.0

[cost]
kind = "constant"
step_s = "10ms"

[slo]
objectives = ["ttft:p90<60ms"]
"""
QUICK = ("--num-requests", "150", "--reps", "8", "--precision", "0.2", "-j", "1", "-q")


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["capacity", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_answer_its_interval_and_what_binds_are_printed(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, scenario, *QUICK)
    assert (code, err) == (0, "")
    assert re.match(r"About [\d.]+ requests/s within ttft:p90<60ms\n", out)
    assert "each with 95 % confidence, so plan with no more than" in out
    assert re.search(r"Binds: max_num_\w+ \(", out)
    assert "uncalibrated: their error is not known" in out


def test_json_says_the_same_and_each_rate_is_in_it(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, scenario, *QUICK, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["holds_up_to"] <= told["max_rate"] <= told["fails_from"]
    assert told["outcome"] == "found"
    statuses = [row["status"] for row in told["rates"]]
    assert {"holds", "fails"} <= set(statuses)
    assert [row["rate"] for row in told["rates"]] == sorted(row["rate"] for row in told["rates"])


def test_markdown_and_html_hold_the_answer(scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "reports" / "capacity.html"
    code, out, _ = run(capsys, scenario, *QUICK, "--markdown", "--html", str(page))
    assert code == 0
    assert out.startswith("### Capacity of small\n\n**About ")
    html = page.read_text()
    answer = out.split("**")[1]
    assert answer.replace("<", "&lt;") in html
    assert 'id="plot-curve-0"' in html
    assert f"windtunnel capacity {scenario} --slo" in html
    assert "http://" not in html.split("<script")[0]


def test_progress_goes_to_stderr_rate_by_rate(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys, scenario, *QUICK[:-1], "--json")
    assert len(err.splitlines()) == len(json.loads(out)["rates"])


def test_an_objective_that_no_load_keeps_ends_with_99(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, scenario, *QUICK, "--slo", "ttft:p50<5ms")
    assert code == 99
    assert out.startswith("No rate is within ttft:p50<5ms\n")


def test_what_chance_leaves_open_ends_with_6(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Four runs say nothing with a confidence of 99.99 %."""
    code, out, _ = run(capsys, scenario, *QUICK, "--reps", "4", "--confidence", "0.9999")
    assert code == 6
    assert out.startswith("No answer for ttft:p90<60ms\n")
    assert "the bounds stay on both sides of the limit: give more replications" in out


def test_runs_that_are_too_short_end_with_6(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a rate was shown to hold is told, though the lowest that fails is not known."""
    lengths = ("--set", 'output={dist="lognormal",mean=60,sigma=2.5,max=1500}')
    code, out, _ = run(capsys, scenario, *QUICK, *lengths, "--slo", "e2el:mean<2s", "--reps", "4")
    assert code == 6
    assert re.match(r"At least [\d.]+ requests/s within e2el:mean<2s\n", out)
    assert "are too short: requests take up to" in out


def test_close_to_saturation_there_is_an_answer(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, scenario, *QUICK, "--slo", "ttft:p50<60s", "--json")
    found = json.loads(out)
    assert (code, found["outcome"], found["max_rate"]) == (0, "near_saturation", None)
    assert found["holds_up_to"] > 0


def test_a_report_is_not_written_over_what_is_read(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,num_prompt_tokens,num_output_tokens\n0,10,5\n1,10,5\n")
    before = Path(scenario).read_text()
    for arguments in (("--html", scenario), ("--set", f"trace={trace}", "--html", str(trace))):
        code, out, err = run(capsys, scenario, *QUICK, *arguments)
        assert (code, out) == (2, "")
        assert "it is read for that; name another file" in err
    assert Path(scenario).read_text() == before
    assert trace.read_text().startswith("arrival_s")


def test_each_curve_marks_the_rates_at_which_its_own_objective_holds(scenario: str) -> None:
    found = max_rate(
        scenario, objectives="ttft:p50<900ms ttft:p90<60ms", num_requests=200, replications=8, precision=0.2, seed=3
    )
    loose, tight = (_curve(found, number, slo) for number, slo in enumerate(found.objectives))
    assert found.outcome == "found"
    fails = [row.status is Status.FAILS and row.verdict.overloaded_share < 0.5 for row in found.rows]
    assert any(fails)
    for figure, is_broken in ((loose, False), (tight, True)):
        symbols = [symbol for symbol, failed in zip(figure.data[0]["marker"]["symbol"], fails, strict=True) if failed]
        assert ("x" in symbols) is is_broken


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slo", "preemptions==0"), "cannot bound the load"),
        (("--slo", "ttft:p99.9<1s"), "too few for p99.9"),
        (("--set", "max_concurrency=4"), "adapts to the server"),
        (("--set", "max_num_seqs"), "must read KEY=VALUE"),
        (("--set", "max_num_seqs=2", "--set", "max_num_seqs=4"), "set twice"),
        (("--set", "objectives=ttft:p99<1s", "--slo", "ttft:p99<1s"), "say the same"),
        (("--json", "--markdown"), "give one of them"),
        (("--confidence", "0.4"), "confidence"),
    ],
)
def test_what_cannot_be_answered_is_a_usage_error(
    arguments: tuple[str, ...], message: str, scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, scenario, *QUICK, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_without_any_objective_the_remedy_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bare.toml"
    path.write_text(SCENARIO.partition("[slo]")[0])
    code, _, err = run(capsys, str(path), *QUICK)
    assert code == 2
    assert "--slo" in err

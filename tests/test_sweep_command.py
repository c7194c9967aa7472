"""``windtunnel sweep``: flags, exit codes, outputs; and what is left of a sweep whose processes are killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import REPO_ROOT

from windtunnel.cli.main import main

TINY = """
schema_version = 1
name = "tiny"
deployment = { num_gpu_blocks_override = 65 }
engine = { max_num_seqs = 16, max_num_batched_tokens = 512, max_model_len = 512 }
workload = { num_requests = 30, request_rate = 20, input = 64, output = 32 }
cost = { kind = "constant", step_s = "10ms" }
run = { saturation = false }
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def test_the_command_prints_the_answer_and_a_row_a_point(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", tiny, "--vary", "max_num_seqs=2,8", "--reps", "2", "-j", "1"]) == 0
    out, err = capsys.readouterr()
    assert "Varied: max_num_seqs, 2 to 8 (2 values)." in out
    assert "← best" in out
    assert err == ""


def test_the_command_that_repeats_a_sweep_does(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["sweep", tiny, "--vary", "max_num_seqs=2,8", "--reps", "2", "--set", "input=exponential:mean=64,max=99"]
    assert main([*given, "--seed", "3", "-j", "1", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*shlex.split(first["command"])[1:], "-j", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_what_is_looked_at_once_is_said_on_stderr(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["sweep", tiny, "--vary", "max_num_seqs=2,8,2", "--reps", "1", "-j", "1"]
    assert main(given) == 0
    assert capsys.readouterr().err == (
        "max_num_seqs 2,8,2: 1 of 3 values comes to the same as another and is left out.\n"
    )
    assert main([*given, "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*given, "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 1


def test_a_dry_run_lists_the_points_and_runs_nothing(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", tiny, "--vary", "tp=1,2", "--vary", "max_num_seqs=log:1:64:7", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "points: 14, 5 runs each: 70 simulations" in out
    assert out.rstrip().splitlines()[-1].split() == ["14", "2", "64"]


def test_exit_codes_say_what_came_out(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["sweep", tiny, "--reps", "1", "-j", "1", "--vary"]
    assert main([*common, "num_gpu_blocks_override=2,3"]) == 4
    assert main([*common, "max_num_seqs=1,2", "--slo", "ttft:p99<1ms"]) == 99
    assert main([*common, "max_num_seqs=8,16", "--slo", "ttft:p99<10s"]) == 0
    capsys.readouterr()
    for bad in ("max_num_seqs", "max_num_seqs=", "max_num_seqs=5:1:1", "max_num_seqz=1,2", "max_num_seqs=0,1"):
        assert main([*common, bad]) == 2, bad
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "flags",
    [
        ["--resume"],
        ["--json", "--markdown"],
        ["--parquet", "a.csv"],
        ["--html", "a", "--csv", "a"],
        ["--set", "max_num_seqs"],
        ["--slo", "ttft:p99<1s", "--set", "slo=ttft:p99<2s"],
        ["--sensitivity", "oat", "--best", "output_throughput"],
        ["--sensitivity", "oat", "--sampling", "random"],
        ["--sensitivity", "guess"],
        ["--samples", "4"],
        ["--seed", "1", "--set", "seed=2"],
    ],
)
def test_flags_that_make_no_sense_are_usage_errors(
    tiny: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", tiny, "--vary", "max_num_seqs=1,2", "-j", "1", *flags]) == 2
    assert "windtunnel sweep" in capsys.readouterr().err


def test_files_are_written_where_they_are_asked_for(tiny: str, tmp_path: Path) -> None:
    paths = {flag: tmp_path / "made" / name for flag, name in (("--html", "a.html"), ("--csv", "a.csv"))}
    paths["--parquet"] = tmp_path / "a.parquet"
    flags = [word for flag, path in paths.items() for word in (flag, str(path))]
    assert main(["sweep", tiny, "--vary", "max_num_seqs=1,2", "--reps", "1", "-j", "1", "-q", *flags]) == 0
    assert all(path.stat().st_size > 100 for path in paths.values())


@pytest.mark.parametrize("command", ["simulate", "sweep", "compare", "optimize"])
def test_no_output_takes_the_place_of_a_trace_that_the_scenario_names(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "day.csv"
    trace.write_text("arrival_s,num_prompt_tokens,num_output_tokens\n0,64,8\n1,64,8\n")
    before = trace.read_bytes()
    scenario = tmp_path / "day.toml"
    scenario.write_text(TINY.replace("workload = {", 'workload = { trace = "day.csv" }\nunused = {').split("unused")[0])
    more = {"sweep": ["--vary", "max_num_seqs=1,2"], "compare": ["--batching", "continuous"]}.get(command, [])
    assert main([command, str(scenario), *more, "--html", str(trace)]) == 2
    assert "is read for that" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_no_output_takes_the_place_of_a_trace_that_is_varied(tmp_path: Path, tiny: str) -> None:
    trace = tmp_path / "day.csv"
    trace.write_text("arrival_s,num_prompt_tokens,num_output_tokens\n0,64,8\n")
    assert main(["sweep", tiny, "--vary", f"trace={trace}", "--csv", str(trace), "-q"]) == 2
    assert trace.stat().st_size < 100


def test_no_output_takes_the_place_of_results_that_are_kept(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    common = ["sweep", tiny, "--vary", "max_num_seqs=1,2", "--reps", "1", "-j", "1", "-q"]
    assert main([*common, "-o", str(folder)]) == 0
    kept = kept_lines(folder)
    for place in ("results/results.jsonl", "results/lock"):
        assert main([*common, "--csv", str(folder / place)]) == 2, place
    for place in ("results/new.csv", "points.csv", "report.html"):
        assert main([*common, "-o", str(folder), "--resume", "--csv", str(folder / place)]) == 2, place
    assert "writes its own there" in capsys.readouterr().err
    assert kept_lines(folder) == kept
    assert main([*common, "-o", str(folder), "--resume", "--csv", str(folder / "mine.csv")]) == 0


def test_resuming_with_another_scenario_says_that_nothing_was_of_use(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["sweep", tiny, "--vary", "max_num_seqs=1,2", "--reps", "1", "-j", "1", "-o", str(tmp_path / "kept")]
    assert main(common) == 0
    assert main([*common, "--resume"]) == 0
    assert "none of the" not in capsys.readouterr().err
    Path(tiny).write_text(TINY.replace("input = 64", "input = 65"))
    assert main([*common, "--resume"]) == 0
    assert "none of the 2 results" in capsys.readouterr().err


def test_sensitivity_says_which_setting_matters(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    ranges = ["--vary", "max_num_seqs=1:4", "--vary", "long_prefill_token_threshold=256:512"]
    assert main(["sweep", tiny, *ranges, "--sensitivity", "morris", "--samples", "4", "-j", "1"]) == 0
    assert "max_num_seqs matters most for" in capsys.readouterr().out


# --- the documentation


def documented(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (REPO_ROOT / "docs" / "sweep.md").read_text(), re.DOTALL)


def test_the_commands_of_the_documentation_can_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = "".join(documented("sh")).replace("\\\n", " ").splitlines()
    plain = [shlex.split(line)[1:] for line in lines if "--sensitivity" not in line]
    assert len(plain) == 3
    assert [main([*words, "--dry-run"]) for words in plain] == [0] * 3
    from windtunnel.cli.settings import read_specs
    from windtunnel.sweeping.sensitivity import plan_sensitivity

    for words in (shlex.split(line) for line in lines if "--sensitivity" in line):
        specs = (value for flag, value in pairwise(words) if flag == "--vary")
        vary = read_specs(specs, "--vary", said="varied")
        assert plan_sensitivity(words[2], vary, method="morris").num_runs == 16 * (len(vary) + 1)


def test_the_python_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = documented("python")
    names: dict[str, object] = {}
    exec(text.replace("reps=2", "reps=2, jobs=1, saturation=False").replace("samples=4", "samples=4, jobs=1"), names)
    assert (tmp_path / "dial.html").exists()


# --- killed in the middle

VARY = ["--vary", "max_num_seqs=1:20:1", "--set", "num_prompts=300", "--reps", "2"]
NUM_RUNS = 40


def start(tiny: str, folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "windtunnel", "sweep", tiny, *VARY, "-o", str(folder), "-j", "2", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kept_lines(folder: Path) -> list[bytes]:
    path = folder / "results" / "results.jsonl"
    return path.read_bytes().splitlines(keepends=True)[1:] if path.exists() else []


def wait_for(folder: Path, number: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while len(kept_lines(folder)) < number:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.*"))}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the children in /proc")
def test_nothing_that_was_finished_is_lost_when_processes_are_killed(tiny: str, tmp_path: Path) -> None:
    whole = start(tiny, tmp_path / "whole", "-j", "1")
    assert whole.wait(120) == 0

    torn = start(tiny, tmp_path / "torn")
    wait_for(tmp_path / "torn", 5, torn)
    os.kill(workers_of(torn.pid)[0], signal.SIGKILL)
    wait_for(tmp_path / "torn", 15, torn)
    left = workers_of(torn.pid)
    torn.kill()
    torn.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < deadline, "workers outlive whoever started them"
        time.sleep(0.05)
    kept = [line for line in kept_lines(tmp_path / "torn") if line.endswith(b"\n")]
    assert 15 <= len(kept) < NUM_RUNS

    resumed = start(tiny, tmp_path / "torn", "--resume")
    assert resumed.wait(120) == 0
    now = kept_lines(tmp_path / "torn")
    assert now[: len(kept)] == kept, "what was finished is kept as it was"
    assert len(now) == NUM_RUNS, "and nothing is run twice"
    assert outputs(tmp_path / "torn") == outputs(tmp_path / "whole")

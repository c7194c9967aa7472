"""The command line: what it prints where, and how it exits."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from windtunnel import __version__
from windtunnel.cli.main import COMMANDS, main
from windtunnel.cli.output import progress_line
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model import load_model

SMALL = """\
schema_version = 1
name = "small"

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


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with small.toml in it."""
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SMALL, "utf-8")
    return tmp_path


def windtunnel(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "windtunnel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"windtunnel {__version__}\n"


def test_help_names_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["-h"], []):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        for name, command in COMMANDS.items():
            assert re.search(rf"^  {name} +{re.escape(command.summary)}", shown, re.MULTILINE), name
        for code in ("0 ok", "2 usage", "3 unreadable", "4 infeasible", "99 SLO", "130 interrupted"):
            assert code in " ".join(shown.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Examples?:\n +windtunnel ", shown)
    assert "\b" not in shown


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_start_is_quick_and_imports_nothing_heavy(arguments: list[str]) -> None:
    heavy = ("torch", "plotly", "pandas", "scipy", "pyarrow", "pydantic", "numpy", "simpy", "rich")
    code = (
        "import sys, time; from windtunnel.cli.main import main; code = main(sys.argv[1:]); "
        f"print(code, time.process_time(), *[name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    exit_code, cpu_s, *loaded = done.stderr.split()
    assert (exit_code, loaded) == ("0", [])
    assert float(cpu_s) < 0.5


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulat"]) == 2
    assert capsys.readouterr().err.startswith("error: no command 'simulat'; did you mean 'simulate'?\n")
    assert main(["sim"]) == 2
    assert "did you mean 'simulate'?" in capsys.readouterr().err


def test_an_unknown_flag_names_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--max-num-seq", "4"]) == 2
    captured = capsys.readouterr()
    assert "--max-num-seqs" in captured.err
    assert captured.out == ""


def test_results_go_to_stdout_and_the_rest_to_stderr(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small.toml", "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["completed"] == 40
    assert summary["cost_model_calibrated"] is False
    assert "Drawn with seed 0" in captured.err
    assert main(["simulate", "small.toml", "--json", "--quiet"]) == 0
    assert capsys.readouterr() == (captured.out, "")


def test_the_table_is_that_of_vllm_bench_serve_and_says_what_is_not_calibrated(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "small.toml"]) == 0
    shown = capsys.readouterr().out
    assert "Serving Benchmark Result" in shown
    assert re.search(r"Successful requests: +40\b", shown)
    assert re.search(r"P99 TTFT \(ms\): +\d+\.\d\d\b", shown)
    assert "calibrated" in shown.lower()


def test_the_same_command_prints_and_writes_the_same_bytes(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs, folders = [], []
    for name in ("a", "b"):
        assert main(["simulate", "small.toml", "--seed", "7", "-o", name, "--html", f"{name}.html"]) == 0
        outputs.append(capsys.readouterr().out)
        folders.append({path.name: path.read_bytes() for path in Path(name).iterdir()})
    assert outputs[0] == outputs[1]
    assert folders[0] == folders[1]
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()


def test_the_progress_of_a_process_does_not_change_the_bytes(small: Path) -> None:
    runs = [windtunnel("simulate", "small.toml", env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "2")]
    assert [run.returncode for run in runs] == [0, 0]
    assert runs[0].stdout == runs[1].stdout


def test_flags_override_the_file_with_dashes_or_underscores(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", "small.toml", "--max_num_seqs=2", "--no_enable_prefix_caching", "--dry-run", "--json"]) == 0
    )
    settings = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)["settings"]}
    assert (settings["max_num_seqs"]["value"], settings["max_num_seqs"]["source"]) == (2, "--max-num-seqs")
    assert settings["enable_prefix_caching"]["value"] is False
    assert settings["enable_prefix_caching"]["source"] == "--no-enable-prefix-caching"
    assert settings["block_size"]["source"].startswith("vLLM 0.32 default")
    assert settings["max_model_len"]["source"] == "small.toml:10"


def test_flags_alone_are_a_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--model llama-3.1-8b --gpu h100 -tp 2 --max-num-batched-tokens 16k --num-prompts 20 --request-rate 5"
    assert (
        main(
            ["simulate", *flags.split(), "--input-len", "lognormal:mean=512,sigma=0.8", "--output-len", "64", "--json"]
        )
        == 0
    )
    summary = json.loads(capsys.readouterr().out)
    assert (summary["completed"], summary["model_id"]) == (20, "meta-llama/Llama-3.1-8B-Instruct")
    assert summary["total_output_tokens"] == 20 * 64


def test_a_dry_run_shows_sources_and_memory_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["simulate", "chat-8b-h100", "--max-num-seqs", "64", "--cost", "roofline", "--dry-run", "-o", "run"]) == 0
    )
    shown = capsys.readouterr().out
    assert re.search(r"max_num_seqs +64 +--max-num-seqs\n", shown)
    assert re.search(r"gpu +H100-SXM +chat-8b-h100\.toml:\d+\n", shown)
    assert re.search(r"max_num_batched_tokens +8,192 +vLLM 0\.32 default for ", shown)
    assert re.search(r"max_model_len +131,072 +longest context of meta-llama/", shown)
    assert re.search(r"KV blocks +[\d,]+ +of 16 tokens", shown)
    assert "(uncalibrated: compare settings before you rely on absolute times)" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_quiet_dry_run_shows_no_remarks(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small.toml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "\nnote: Drawn with seed 0" in shown
    assert main(["simulate", "small.toml", "--dry-run", "-q"]) == 0
    assert capsys.readouterr() == (shown[: shown.index("\nnote: ")].rstrip("\n") + "\n", "")


def test_what_a_short_name_stands_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "3", "--input-len", "9", "--output-len", "9"]
    assert main(["simulate", "--model", "llama-3.1-8b", "--gpu", "a100", *flags, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "note: Model llama-3.1-8b is meta-llama/Llama-3.1-8B-Instruct." in shown
    assert "note: GPU a100 is taken as A100-80GB-SXM (there are also A100-40GB-SXM, A100-40GB-PCIe, " in shown
    assert main(["simulate", "chat-8b-h100", "--gpu", "h100-sxm5", "--dry-run"]) == 0
    assert "note: GPU h100-sxm5 is taken as H100-SXM.\n" in capsys.readouterr().out
    assert main(["simulate", "chat-8b-h100", "--dry-run"]) == 0
    assert "is taken as" not in capsys.readouterr().out


def test_objectives_of_a_flag_replace_those_of_the_scenario_and_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--slo", "ttft:p99<9s", "--num-prompts", "20", "--no-saturation"]
    assert main(["simulate", "chat-8b-h100", *flags]) == 0
    assert "--slo replaces the scenario's own objectives: ttft:p99<500ms, itl:p99<50ms\n" in capsys.readouterr().err
    assert main(["simulate", "--help"]) == 0
    assert "take the place of the scenario's" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "why"),
    [(["--max-concurrency", "4"], "at most 4 requests are in flight"), (["--request-rate", "inf"], "at once")],
)
def test_a_saturation_that_says_nothing_is_not_measured_and_it_is_told(
    small: Path, flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "small.toml", *flags, "--saturation", "-q", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["utilisation"] is None
    assert captured.err.startswith("warning: saturation was asked for but is not measured")
    assert why in captured.err
    assert main(["simulate", "small.toml", *flags, "-q", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_folders_of_outputs_are_made(small: Path) -> None:
    assert main(["simulate", "small.toml", "-q", "-o", "runs/a/b", "--html", "runs/pages/b.html"]) == 0
    assert main(["simulate", "small.toml", "-q", "--html", "here.html", "-o", "here"]) == 0
    assert main(["report", "runs/a/b", "--html", "late/r/b.html"]) == 0
    assert main(["trace", "runs/a/b", "-o", "traces/b.json"]) == 0
    case = {"config": {"num_gpu_blocks": 16}, "requests": [{"id": "a", "prompt_len": 50, "output_len": 2}]}
    Path("case.json").write_text(json.dumps(case))
    assert main(["decisions", "case.json", "-o", "decided/d.jsonl"]) == 0
    assert json.loads(Path("decided/d.jsonl").read_text().splitlines()[-1])["type"] == "summary"
    assert (
        Path("runs/pages/b.html").read_bytes() == Path("late/r/b.html").read_bytes() == Path("here.html").read_bytes()
    )
    assert json.loads(Path("traces/b.json").read_text())["traceEvents"]


def test_folders_are_made_only_when_there_is_something_to_write(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("windtunnel.reports.html.write_html", full)
    assert main(["simulate", "small.toml", "-q", "--html", "runs/deep/b.html"]) == 2
    assert capsys.readouterr().err == "error: cannot write runs/deep/b.html: No space left on device\n"
    assert [path.name for path in small.iterdir()] == ["small.toml"]


def test_records_are_written_as_csv_on_request(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small.toml", "-q", "-o", "run", "--records-format", "csv"]) == 0
    printed = capsys.readouterr().out
    header, first, *rest = Path("run/requests.csv").read_text().splitlines()
    assert header.replace('"', "").startswith("request,label,outcome,outcome_name,")
    assert first.startswith('0,,0,"finished",')
    assert len(rest) == 39
    assert main(["report", "run"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["simulate", "small.toml", "-q", "-o", "run"]) == 0
    assert not list(Path("run").glob("*.csv")), "a run is in one format"


def test_a_missed_objective_exits_with_99_and_still_reports(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small.toml", "--slo", "ttft:p99<1ms", "-o", "run"]) == 99
    assert "ttft:p99<1ms" in capsys.readouterr().out
    assert json.loads(Path("run/summary.json").read_text())["slo_passed"] is False
    assert main(["simulate", "small.toml", "--slo", "ttft:p99<60s", "--slo", "preemptions==0"]) == 0


def test_goodput_limits_are_counted(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small.toml", "--goodput", "ttft:500", "--goodput", "tpot:5", "--json", "-q"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["goodput_limits"] == "ttft:500 tpot:5"
    assert summary["num_good_requests"] == 0


def test_a_saved_run_reports_what_the_simulation_reported(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small.toml", "-o", "run", "--html", "direct.html"]) == 0
    printed = capsys.readouterr().out
    assert main(["report", "run", "--html", "later.html"]) == 0
    assert main(["report", "run"]) == 0
    assert capsys.readouterr().out.endswith(printed)
    assert Path("direct.html").read_text() == Path("later.html").read_text()
    page = Path("later.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?https?:", page), "the page must work offline"


def test_a_report_in_markdown_goes_to_stdout(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small.toml", "-o", "run", "-q"]) == 0
    capsys.readouterr()
    assert main(["report", "run", "--markdown"]) == 0
    assert re.search(r"^\|.*\|$", capsys.readouterr().out, re.MULTILINE)


def test_a_saved_run_becomes_a_perfetto_trace(small: Path) -> None:
    assert main(["simulate", "small.toml", "-o", "run"]) == 0
    assert main(["trace", "run", "-o", "trace.json"]) == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert len(events) > 40


def test_a_part_of_a_run_becomes_a_trace_and_what_is_left_out_is_told(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "small.toml", "-o", "run", "-q"]) == 0
    assert main(["trace", "run", "-o", "all.json"]) == 0
    capsys.readouterr()
    assert main(["trace", "run", "-o", "part.json", "--start", "1s", "--end", "2s"]) == 0
    assert re.fullmatch(r"left out: \d+ steps and \d+ requests\n", capsys.readouterr().err)
    assert len(Path("part.json").read_text()) < len(Path("all.json").read_text())
    assert main(["trace", "run", "-o", "part.json", "--start", "soon"]) == 2
    assert "--start soon" in capsys.readouterr().err


def test_lists_are_printed_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    for name, known in (
        ("models", "meta-llama/Llama-3.1-8B-Instruct"),
        ("gpus", "H100-SXM"),
        ("scenarios", "chat-8b-h100"),
    ):
        assert main([name]) == 0
        assert re.search(rf"^{known} ", capsys.readouterr().out, re.MULTILINE)
        assert main([name, "--json"]) == 0
        assert known in [row["name"] for row in json.loads(capsys.readouterr().out)]


def test_lists_show_a_short_name_and_every_name_works(capsys: pytest.CaptureFixture[str]) -> None:
    for name, load, short in (("models", load_model, "llama-3.1-8b"), ("gpus", load_gpu, "h100")):
        assert main([name]) == 0
        assert re.search(rf"^\S+ +{re.escape(short)} ", capsys.readouterr().out, re.MULTILINE)
        assert main([name, "--json"]) == 0
        for row in json.loads(capsys.readouterr().out):
            for other in filter(None, [row["name"], row["short_name"], *row["other_names"]]):
                assert load(other).name == row["name"], other  # type: ignore[operator]
    assert main(["gpus", "--json"]) == 0
    assert "a100-80" in {name for row in json.loads(capsys.readouterr().out) for name in row["other_names"]}


def test_the_schema_is_json_or_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert "workload" in json.loads(capsys.readouterr().out)["properties"]
    assert main(["schema", "--markdown"]) == 0
    assert "| `popularity` | `uniform`, `zipf`" in capsys.readouterr().out


def test_a_terminal_without_unicode_is_no_error(small: Path) -> None:
    done = windtunnel("schema", "--markdown", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "whole number \\u2265 1" in done.stdout


def test_a_request_of_a_trace_is_found_by_its_own_name(small: Path) -> None:
    Path("trace.csv").write_text("request_id,arrival_s,num_prompt_tokens,num_output_tokens\nmine,0,10,5\nyours,1,9,1\n")
    assert main(["simulate", "small.toml", "-q", "--trace", "trace.csv", "-o", "run", "--records-format", "csv"]) == 0
    with Path("run/requests.csv").open() as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["mine", "yours"]
    assert rows["mine"]["outcome_name"] == "finished"
    assert float(rows["mine"]["tpot_s"]) == pytest.approx(0.01)
    assert rows["yours"]["tpot_s"] == ""


def test_names_of_files_that_are_no_text_are_no_error(small: Path) -> None:
    scenario, trace = os.fsdecode(b"small\xff.toml"), os.fsdecode(b"trace\xfe.csv")
    try:
        Path(scenario).write_text(SMALL.replace('name = "small"\n', ""))
    except OSError:
        pytest.skip("the file system takes text only")
    Path(trace).write_text("request_id,arrival_s,num_prompt_tokens,num_output_tokens\na,0,10,5\n")
    assert main(["simulate", scenario, "--trace", trace, "-q", "-o", "run", "--html", "report.html"]) == 0
    assert main(["report", "run", "--html", "later.html"]) == 0
    assert main(["trace", "run", "-o", "trace.json"]) == 0
    assert Path("report.html").read_bytes() == Path("later.html").read_bytes()
    settings = json.loads(Path("run/scenario.resolved.json").read_text())["settings"]
    assert {"key": "trace", "section": "workload", "source": "--trace", "value": "trace\\udcfe.csv"} in settings


def test_options_of_one_trace_format_are_flags(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"input_lens": [10], "output_lens": [5], "endpoint_type": "vllm"}
    Path("bench.json").write_text("".join(json.dumps({**result, "input_lens": [n]}) + "\n" for n in (10, 30)))
    Path("chat.json").write_text(
        json.dumps([{"conversations": [{"from": who, "num_tokens": 7} for who in ("human", "gpt") * 3]}])
    )
    Path("burst.csv").write_text("Timestamp,Model,Request tokens,Response tokens\n1,A,5,6\n2,B,7,8\n")
    Path("moon.jsonl").write_text('{"timestamp": 0, "input_length": 30, "output_length": 5, "hash_ids": [1]}\n')
    for flags, expected in (
        (["bench.json", "--trace-run", "1"], {"num_requests": 1, "max": 30}),
        (["chat.json", "--all-turns"], {"num_requests": 3, "max": 35}),
        (["burst.csv", "--trace-model", "B"], {"num_requests": 1, "max": 7}),
        (["moon.jsonl", "--chunk-tokens", "16"], {"num_requests": 1, "max": 30}),
    ):
        assert main(["workload", *flags, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert {"num_requests": facts["num_requests"], "max": facts["prompt_tokens"]["max"]} == expected
        assert main(["simulate", "small.toml", "--trace", *flags, "-q", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["completed"] == expected["num_requests"]
    assert "Hashed blocks taken as 16 tokens, as given." in facts["notes"]


def test_a_trace_is_described(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"2023-11-16 18:15:{second:02}.5,{100 + second},{10}\n" for second in range(20))
    Path("trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert main(["workload", "trace.csv"]) == 0
    assert re.search(r"^num_requests +20$", capsys.readouterr().out, re.MULTILINE)
    assert main(["workload", "trace.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"]["max"] == 119


def test_a_trace_is_replayed_in_part_and_faster(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"2023-11-16 18:{second // 60:02}:{second % 60:02}.5,100,10\n" for second in range(0, 300, 2))
    Path("trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    flags = ["--trace", "trace.csv", "--start", "1m", "--duration", "100s", "--rate-scale", "4", "--json"]
    assert main(["simulate", "small.toml", *flags]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["completed"] == 50
    assert summary["request_rate"] == pytest.approx(2.0)
    assert "--trace replaces the scenario's own workload" in captured.err


def test_a_reader_that_leaves_early_is_no_error(small: Path) -> None:
    script = f"set -o pipefail; {sys.executable} -m windtunnel schema | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_but_no_bug(small: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "windtunnel", "schema"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "cannot write the output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_called_like_a_bundled_scenario_does_not_hide_it(small: Path) -> None:
    Path("preemption-storm").mkdir()
    assert main(["simulate", "preemption-storm", "--dry-run", "--quiet"]) == 0


def interrupted(process: subprocess.Popen[str]) -> str:
    """What it says on Ctrl-C; asked again where Python lost the signal, as it does in a finaliser."""
    for _ in range(12):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=5)[1]
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    raise AssertionError("it does not end on Ctrl-C")


def test_ctrl_c_ends_with_130_and_leaves_nothing_behind(small: Path) -> None:
    long = SMALL.replace("num_requests = 40", "num_requests = 2000000")
    Path("long.toml").write_text(long)
    command = [sys.executable, "-m", "windtunnel", "simulate", "long.toml", "-o", "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()  # the first remark comes right before the simulation begins, which takes minutes
    with process:
        err = interrupted(process)
    assert process.returncode == 130
    assert "error: interrupted" in err
    assert "Traceback" not in err
    assert sorted(path.name for path in small.iterdir()) == ["long.toml", "small.toml"]


def test_a_bug_of_ours_is_one_line_unless_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr("windtunnel.cli.lists.schema", broken)
    monkeypatch.delenv("WINDTUNNEL_DEBUG", raising=False)
    assert main(["schema"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ZeroDivisionError: no such luck (this is a bug in windtunnel")
    assert len(err.splitlines()) == 1
    monkeypatch.setenv("WINDTUNNEL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["schema"])


def test_the_progress_bar_estimates_what_is_left() -> None:
    line = progress_line("simulating", 250, 1000, elapsed_s=2.0, width=8)
    assert line == "simulating  [##......]  25%  250 of 1,000 requests, 6 s left"
    assert "left" not in progress_line("simulating", 0, 1000, elapsed_s=1.0)
    assert progress_line("simulating", 1, 100, elapsed_s=2.0).endswith("3 min 18 s left")


def test_the_progress_bar_is_for_terminals_only(small: Path) -> None:
    assert "simulating" not in windtunnel("simulate", "small.toml").stderr


def test_completion_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    done = windtunnel(
        "--show-completion", "bash", env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    )
    assert done.returncode == 0
    assert "_WINDTUNNEL_COMPLETE" in done.stdout

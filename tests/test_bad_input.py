"""Bad input, through the command line: one clear error, the right exit code, nothing half-written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from windtunnel.cli.main import main

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD_ROW = "2023-11-16 18:15:46.6805900,374,44\n"
SCENARIO = """\
name = "bad"
[deployment]
num_gpu_blocks_override = 100
[engine]
max_num_seqs = 8
max_num_batched_tokens = 512
max_model_len = 1024
[workload]
num_requests = 5
input = 100
output = 10
request_rate = 5
[cost]
kind = "constant"
step_s = "10ms"
"""
HARDWARE = ["--model", "llama-3.1-8b", "--gpu", "h100"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDTUNNEL_DEBUG", raising=False)
    Path("scenario.toml").write_text(SCENARIO)
    return tmp_path


class Refusal:
    """Runs a command that must fail, and what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str]:
        before = snapshot()
        code = main([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        assert captured.out == "", "results only where there are results"
        assert captured.err.startswith("error: ")
        assert captured.err.count("error: ") == 1
        assert "Traceback" not in captured.err
        assert "bug in windtunnel" not in captured.err
        assert snapshot() == before, "nothing may be half-written"
        return code, captured.err.removeprefix("error: ").rstrip("\n")


def snapshot() -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(Path().rglob("*"))}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(capsys)


def trace(text: str) -> list[str]:
    Path("trace.csv").write_text(text)
    return ["simulate", "scenario.toml", "--trace", "trace.csv", "-o", "run"]


def test_a_missing_trace(refused: Refusal) -> None:
    code, message = refused("simulate", "scenario.toml", "--trace", "nowhere.csv", "-o", "run")
    assert (code, message) == (3, "cannot read trace nowhere.csv: No such file or directory")


def test_a_missing_scenario(refused: Refusal) -> None:
    code, message = refused("simulate", "nowhere.toml", "-o", "run")
    assert code == 3
    assert message.startswith("no scenario file nowhere.toml")


@pytest.mark.parametrize("command", [["workload", "nowhere.csv"], ["decisions", "nowhere.json"], ["report", "nowhere"]])
def test_a_missing_file_of_other_commands(refused: Refusal, command: list[str]) -> None:
    code, message = refused(*command)
    assert code == 3
    assert "nowhere" in message


def test_a_wrong_column(refused: Refusal) -> None:
    code, message = refused(*trace("TIMESTAMP,ContextTokens,OutputTokens\n" + GOOD_ROW))
    assert code == 3
    assert message.startswith("trace.csv:1: there is no column 'GeneratedTokens'")


def test_negative_tokens(refused: Refusal) -> None:
    code, message = refused(*trace(HEADER + GOOD_ROW + "2023-11-16 18:15:50.0,-374,44\n"))
    assert code == 3
    assert message.startswith("trace.csv:3: ")
    assert "-374" in message


def test_an_unknown_key(refused: Refusal) -> None:
    Path("scenario.toml").write_text(SCENARIO.replace("max_num_seqs", "max_num_seq"))
    code, message = refused("simulate", "scenario.toml", "-o", "run")
    assert code == 2
    assert message == "scenario.toml:5: unknown key 'max_num_seq' in [engine]; did you mean 'max_num_seqs'?"


def test_prompts_that_are_all_longer_than_max_model_len(refused: Refusal) -> None:
    code, message = refused("simulate", "scenario.toml", "--input-len", "2000", "-o", "run")
    assert code == 2
    assert message.startswith("scenario.toml:7: all 5 prompts have max_model_len (1,024) tokens or more")
    assert "raise max_model_len to 2,001" in message


def test_a_prompt_that_no_max_model_len_helps_is_not_told_to_raise_it(refused: Refusal) -> None:
    flags = [*HARDWARE, "--num-prompts", "3", "--output-len", "5"]
    code, message = refused("simulate", *flags, "--input-len", "200000")
    assert code == 2
    assert "raise max_model_len" not in message
    assert "take a model with a longer context than meta-llama/Llama-3.1-8B-Instruct (131,072 tokens)" in message
    code, message = refused("simulate", *flags, "--input-len", "20000", "--max-model-len", "20000")
    assert "raise max_model_len to 20,001" in message


def test_a_max_model_len_beyond_the_model_s_own_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*HARDWARE, "--num-prompts", "3", "--output-len", "5", "--input-len", "9"]
    assert main(["simulate", *flags, "--max-model-len", "200000", "-q", "--json"]) == 0
    assert "warning: max_model_len (200,000) is more than the longest context" in capsys.readouterr().err


def test_a_prompt_of_a_trace_that_is_longer_than_max_model_len_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([*trace(HEADER + GOOD_ROW + "2023-11-16 18:15:50.0,2000,44\n" + "2023-11-16 18:15:51.0,1000,44\n"), "-q"])
        == 0
    )
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "1 of 3 prompts have max_model_len (1,024) tokens or more and are rejected" in warnings[0]
    assert "1 of 3 requests reach max_model_len (1,024) before their output ends" in warnings[1]
    assert "(longest: 1,044)" in warnings[1]


def test_a_budget_below_max_num_seqs(refused: Refusal) -> None:
    code, message = refused("simulate", "scenario.toml", "--max-num-batched-tokens", "4", "-o", "run")
    assert code == 2
    assert "max_num_batched_tokens (4) must be at least max_num_seqs (8)" in message
    assert "max_num_batched_tokens is from --max-num-batched-tokens" in message
    assert "max_num_seqs is from scenario.toml:5" in message


def test_a_request_that_is_larger_than_the_kv_pool(refused: Refusal) -> None:
    code, message = refused("simulate", "scenario.toml", "--num-gpu-blocks-override", "50", "-o", "run")
    assert code == 4
    assert "max seq len (1024) is larger than the maximum number of tokens that can be stored in KV cache" in message
    assert "lower max_model_len to 784 or less, or raise num_gpu_blocks_override to 65" in message


def test_a_model_that_does_not_fit_its_gpu(refused: Refusal) -> None:
    code, message = refused("simulate", "chat-8b-h100", "--gpu", "l4", "-o", "run")
    assert code == 4
    assert "max_model_len" in message


def test_an_slo_that_cannot_be_read(refused: Refusal) -> None:
    code, message = refused("simulate", "scenario.toml", "--slo", "ttft:p99<<500ms", "-o", "run")
    assert code == 2
    assert message.startswith("--slo: cannot read objective 'ttft:p99<<500ms'")
    assert "Examples: ttft:p99<500ms" in message


def test_an_empty_trace(refused: Refusal) -> None:
    for text in ("", HEADER):
        code, message = refused(*trace(text))
        assert code == 3
        assert message.startswith("trace.csv")


def test_a_window_without_requests(refused: Refusal) -> None:
    code, message = refused(*trace(HEADER + GOOD_ROW), "--start", "1h")
    assert code == 3
    assert "no request comes in the window" in message


def test_an_output_that_cannot_be_written_is_known_before_the_simulation(
    refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windtunnel.api.execute", lambda *_, **__: pytest.fail("it was simulated"))
    Path("full").mkdir()
    Path("full/thesis.tex").write_text("mine")
    for arguments, words in (
        (["-o", "scenario.toml"], "it is a file; name a folder"),
        (["-o", "scenario.toml/run"], "scenario.toml is a file, not a folder"),
        (["-o", "full"], "not empty and holds no earlier run"),
        (["--html", "scenario.toml/report.html"], "scenario.toml is a file, not a folder"),
        (["--html", "full"], "it is a folder; name a file"),
        (["-o", "runs/1", "--html", "runs/1"], "give them different names"),
        (["-o", "runs/1", "--html", "runs"], "give them different names"),
        (["--records-format", "csv"], "give -o DIR too"),
        (["--records-format", "xlsx", "-o", "run"], "'xlsx' is neither parquet nor csv"),
    ):
        code, message = refused("simulate", "scenario.toml", *arguments)
        assert code == 2
        assert words in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(refused: Refusal) -> None:
    Path("locked").mkdir(mode=0o500)
    code, message = refused("simulate", "scenario.toml", "-o", "locked/run")
    assert code == 2
    assert "Permission denied" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h1000"], "--gpu: unknown GPU 'h1000'; nearest: H100"),
        (["--model", "llama-3.1-9b"], "--model: "),
        (["--block-size", "0"], "--block-size: block_size = '0' in [engine] must be at least 1"),
        (["--max-model-len", "8q"], "must be a whole number such as 8192, 16k (16,000) or 16K (16,384)"),
        (["--cost", "constant"], "--cost: missing 'step_s' in [cost]"),
        (["--cost", "constant:step_s=0"], "--cost: step_s = 0 in [cost] must be above 0"),
        (["--goodput", "itl:5"], "--goodput: cannot read objective"),
        (["--slo", "goodput>=99%"], "--slo: an objective on goodput needs to know what is good"),
        (["--input-len", "lognormal:mean=5"], "--input-len: input: give either sigma or std"),
        (["--input-len", "lognormal:mean=5,sigm=1"], "--input-len: input: lognormal has no 'sigm'"),
        (["--input-len", "99999999999"], "--input-len: input: tokens must be a whole number of at least 1 and at most"),
        (["--input-len", "quantiles:p50=20,p90=10"], "--input-len: input: tokens of quantiles must not fall"),
        (["--arrival", "poison:rate=5"], "--arrival: arrival: unknown process 'poison' (do you mean 'poisson'?)"),
        (["--kv-cache-dtype", "fp4"], "--kv-cache-dtype: kv_cache_dtype = 'fp4' in [deployment] must be one of 'auto'"),
        (
            ["--trace", "t.csv", "--format", "parquet"],
            "--format: format = 'parquet' in [workload] must be one of 'auto'",
        ),
        (["--request-rate", "0"], "--request-rate: request_rate = '0' in [workload] must be a number of requests"),
        (["--rate-scale", "2"], "--rate-scale: unknown key 'rate_scale' in [workload]; it needs a trace"),
        (["--trace", "scenario.toml", "--num-prompts", "5"], "a trace brings its own lengths and arrivals"),
        (["--horizon", "-5"], "--horizon: horizon = '-5' in [run] must be a duration"),
        (["--scheduling-policy", "lifo"], "must be one of 'fcfs' or 'priority'"),
        (["--long-prefill-token-threshold", "2000"], "must not exceed max_model_len (1024)"),
        (["--no-enable-chunked-prefill"], "without chunked prefill max_num_batched_tokens (512) must be at least"),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_what_is_allowed(
    refused: Refusal, arguments: list[str], words: str
) -> None:
    code, message = refused("simulate", "scenario.toml", *arguments)
    assert code == 2
    assert words in message


def test_lengths_that_are_missing_are_asked_for_by_their_flags(refused: Refusal) -> None:
    code, message = refused("simulate", *HARDWARE, "--request-rate", "10")
    assert code == 2
    assert message.splitlines()[0].startswith("flags: missing 'input' in [workload]: give --input-len ")
    assert "missing 'output' in [workload]: give --output-len " in message


def test_no_message_speaks_python(refused: Refusal) -> None:
    """What stands on the command line is called as it is called there."""
    Path("conv.jsonl").write_text(
        '{"timestamp": 5, "input_length": 100, "output_length": 5, "hash_ids": [1, 2, 3]}\n' * 2
    )
    Path("bench.json").write_text('{"input_lens": [1], "output_lens": [1], "endpoint_type": "vllm"}\n' * 2)
    messages = [
        refused(*trace(HEADER + GOOD_ROW + "2023-11-16 18:15:50.0,-374,44\n"))[1],
        refused("simulate", "scenario.toml", "--gpu", "h1000")[1],
        refused("simulate", "scenario.toml", "--model", "llama-9")[1],
        refused("workload", "bench.json")[1],
        refused("workload", "conv.jsonl", "--chunk-tokens", "0")[1],
        refused("workload", "conv.jsonl", "--chunk-tokens", "64")[1],
        refused(*trace(HEADER + GOOD_ROW), "--start", "1h")[1],
    ]
    for message in messages:
        assert not re.search(r"\w\(\)|\bpass \w|None\b|\w=[\"'\d…]", message), message
    assert "(--on-bad-row skip)" in messages[0]
    assert "(windtunnel gpus lists all)" in messages[1]
    assert "windtunnel models lists all" in messages[2]
    assert "choose one with trace_run (--trace-run)" in messages[3]
    assert "from 3,600 s to the end" in messages[6]


@pytest.mark.parametrize("arguments", [["workload", "bin"], ["decisions", "bin"], ["simulate", "bin"]])
def test_a_binary_file_is_unreadable(refused: Refusal, arguments: list[str]) -> None:
    Path("bin").write_bytes(bytes(range(255, 0, -1)) * 12)
    code, message = refused(*arguments)
    assert code == 3
    assert "bin" in message


@pytest.mark.parametrize("flags", [["--model", "./bin"], ["--cost", "profile:path=bin"], ["--trace", "bin"]])
def test_a_binary_file_in_a_scenario_is_unreadable(refused: Refusal, flags: list[str]) -> None:
    Path("bin").write_bytes(bytes(range(255, 0, -1)) * 12)
    code, message = refused("simulate", "scenario.toml", *flags)
    assert code == 3
    assert "bin" in message
    assert "not UTF-8 text" in message


def test_a_workload_that_does_not_fit_the_memory_is_no_bug(refused: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 7.28 TiB")

    monkeypatch.setattr("windtunnel.api.execute", full)
    code, message = refused("simulate", "scenario.toml", "-q")
    assert code == 2
    assert message == "not enough memory: Unable to allocate 7.28 TiB; ask for fewer requests (--num-prompts, --limit)"


def test_flags_that_do_not_make_a_scenario(refused: Refusal) -> None:
    code, message = refused("simulate", "--input-len", "10", "--output-len", "10", "--gpu", "h100")
    assert code == 2
    assert "no model: give --model" in message
    code, message = refused("simulate", *HARDWARE)
    assert code == 2
    assert "missing 'workload'" in message


def test_a_profile_or_case_that_is_none(refused: Refusal) -> None:
    Path("bad.json").write_text('{"schema_version": 1}')
    code, message = refused("simulate", "scenario.toml", "--cost", "profile:path=bad.json")
    assert code == 3
    assert message.startswith("bad.json: the profile lacks kind")
    code, message = refused("decisions", "bad.json")
    assert code == 3
    assert "config" in message


def test_a_folder_that_holds_no_run(refused: Refusal) -> None:
    Path("empty").mkdir()
    for command in (["report", "empty", "--html", "a.html"], ["trace", "empty", "-o", "a.json"]):
        code, message = refused(*command)
        assert code == 3
        assert "no run in empty" in message


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--batching", "static:batch_size=9223372036854775808"], 2, "must be at most 10^15"),
        (["--batching", "static:batch_size=10000000"], 2, "must be at least 1 and at most 1e+06"),
        (
            ["--batching", "dynamic:max_batch_size=2,priority_levels=1000000,default_priority_level=1"],
            2,
            "at most 10000",
        ),
        (["--batching", "static:batch_size=2,batch_timeout=1e300"], 2, "at most 10^9 seconds"),
        (["--request-timeout", "1e300"], 2, "at most 10^9 seconds"),
        (["--dp", "1000000"], 2, "at least 1 and at most 4096"),
        (["--pp", "100000"], 2, "at least 1 and at most 1024"),
        (["--speculative-config", "ngram:num_speculative_tokens=9007199254740992,acceptance=0.7"], 2, "at most 10^15"),
        (["--num-gpu-blocks-override", "99999999999999999999"], 2, "at most 10^15"),
        (["--num-gpu-blocks-override", "10000000000"], 2, "at least 2 and at most 5e+07"),
        (["-q", "--cost", "constant:step_s=900000000"], 2, "passes 292 years"),
        (["--trace", "~nobody-of-that-name/trace.csv"], 3, "~nobody-of-that-name"),
        (["--cost", "profile:path=~nobody-of-that-name/p.json"], 3, "~nobody-of-that-name"),
    ],
)
def test_what_no_machine_could_run_is_refused_at_once(
    arguments: list[str], code: int, expected: str, refused: Refusal
) -> None:
    found, message = refused("simulate", "scenario.toml", *arguments)
    assert found == code
    assert expected in message


def test_a_config_pbtxt_that_is_nested_for_ever_is_unreadable(refused: Refusal) -> None:
    Path("deep.pbtxt").write_text("a {" * 2000 + "}" * 2000)
    code, message = refused("simulate", "scenario.toml", "--batching", "dynamic:config=deep.pbtxt")
    assert code == 3
    assert "nested more than 100 deep" in message


@pytest.mark.parametrize("change", ["hardware", "metadata", "workload", "objectives", "windtunnel_version"])
def test_a_run_whose_settings_were_changed_is_unreadable(
    change: str, refused: Refusal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "scenario.toml", "-o", "run", "-q"]) == 0
    capsys.readouterr()
    file = Path("run/scenario.resolved.json")
    resolved = json.loads(file.read_text())
    del resolved[change]
    file.write_text(json.dumps(resolved))
    for command in (["report", "run", "--html", "x.html"], ["trace", "run", "-o", "x.json"]):
        code, message = refused(*command)
        assert code == 3
        assert "simulate it again" in message.replace("simulate\n", "simulate ")

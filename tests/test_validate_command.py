"""``windtunnel validate``, its three ways in: a server that runs, a result that exists, and our own engine."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import Asked, answer_well, head, scripted
from serving import limits, serving
from validation_builders import (
    CONFIG,
    FLAGS,
    bench_result,
    requests,
    setup,
    write_bench,
    write_metrics,
    write_recording,
)

import windtunnel.validation
from windtunnel.api import load_run
from windtunnel.calibrate.attribution import AdjustedCost
from windtunnel.calibrate.live.client import Progress, late_note
from windtunnel.calibrate.live.imports import read_result
from windtunnel.calibrate.live.observed import SendReport
from windtunnel.cli.errors import EXIT_INTERRUPTED, EXIT_SLO_BREACHED, EXIT_UNREADABLE, EXIT_USAGE
from windtunnel.cli.main import main
from windtunnel.sim.workload import workload
from windtunnel.validation import validate
from windtunnel.validation_inputs import ValidationError, _with_rows

FORMATS = Path(__file__).resolve().parents[1].parent / "shared" / "live_vllm_cpu" / "formats"
QUICK = ("-q", "--no-attribution")


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def errors(answer: dict[str, Any]) -> dict[str, float]:
    return {f"{each['metric']}:{each['statistic']}": each["error"] for each in answer["errors"]}


# --- a result that exists


def test_a_result_of_the_same_deployment_is_predicted_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = write_bench(tmp_path / "bench.json", setup().observed())
    exact = "throughput<0.1% ttft<0.1% tpot<0.1% itl<0.1% e2el<0.1% makespan<0.1%"
    assert main(["validate", "--bench", str(bench), *FLAGS, "--json", "-q", "--max-error", exact]) == 0
    answer = told(capsys)
    assert answer["passed"] is True
    assert answer["num_requests"] == 80
    assert answer["attribution"]["effects"] == []


def test_a_missed_limit_has_an_exit_code_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = setup(cost=AdjustedCost(setup().system.cost, factor=1.2))
    bench = write_bench(tmp_path / "bench.json", slower.observed())
    flags = ["validate", "--bench", str(bench), *FLAGS, *QUICK]
    assert main([*flags, "--max-error", "tpot:mean<30%"]) == 0
    assert main([*flags, "--max-error", "tpot:mean<30% e2el:mean<3%"]) == EXIT_SLO_BREACHED
    out = capsys.readouterr().out
    assert "The prediction misses 1 of 2 limits." in out
    assert "(limit 3.0 %)" in out


def test_the_pool_that_the_servers_metrics_tell_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = replace(CONFIG, num_gpu_blocks=61)
    bench = write_bench(tmp_path / "bench.json", setup(config=small).observed())
    metrics = write_metrics(tmp_path / "metrics.txt", small)
    flags = ["validate", "--bench", str(bench), "--metrics", str(metrics), *FLAGS, "--json", "-q"]
    assert main([*flags, "--max-error", "ttft<0.1% e2el<0.1%"]) == 0
    assert any("960 KV tokens (61 blocks of 16)" in note and "4,800" in note for note in told(capsys)["assumptions"])


def test_a_pool_that_is_not_as_planned_is_found_to_blame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = replace(CONFIG, num_gpu_blocks=61)
    bench = write_bench(tmp_path / "bench.json", setup(config=small).observed())
    metrics = write_metrics(tmp_path / "metrics.txt", small)
    flags = ["validate", "--bench", str(bench), "--metrics", str(metrics), *FLAGS, "--as-planned", "--json", "-q"]
    assert main(flags) == 0
    answer = told(capsys)
    assert answer["causes"][0].startswith("The live server had 960 KV tokens (61 blocks of 16), the plan said 4,800")
    (effect,) = [each for each in answer["attribution"]["effects"] if each["ingredient"] == "KV pool"]
    assert effect["explained"]["mean_e2el_ms"] == pytest.approx(1.0, abs=0.01)


def test_a_log_tells_the_limits_of_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = replace(CONFIG, num_gpu_blocks=61, max_num_seqs=8)
    bench = write_bench(tmp_path / "bench.json", setup(config=served).observed())
    log = tmp_path / "vllm.log"
    log.write_text(
        "INFO 11-29 12:00:00 [utils.py:233] non-default args: {'model': 'tiny', 'max_model_len': 512, "
        "'max_num_seqs': 8, 'max_num_batched_tokens': 256, 'block_size': 16, 'num_gpu_blocks_override': 61}\n"
        "INFO 11-29 12:00:01 [kv_cache_utils.py:1229] GPU KV cache size: 976 tokens\n"
    )
    flags = ["validate", "--bench", str(bench), "--log", str(log), *FLAGS, "--json", *QUICK]
    assert main([*flags, "--max-error", "ttft<0.1% e2el<0.1%"]) == 0
    assert any(str(log) in note and "max_num_seqs 8" in note for note in told(capsys)["assumptions"])


def test_a_recording_finds_the_step_times_to_blame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = setup(cost=AdjustedCost(setup().system.cost, factor=1.2))
    bench = write_bench(tmp_path / "bench.json", slower.observed())
    recording = write_recording(tmp_path / "steps.jsonl", slower)
    assert main(["validate", "--bench", str(bench), "--recording", str(recording), *FLAGS, "--json", "-q"]) == 0
    answer = told(capsys)
    assert "1.2 times as long" in answer["causes"][0]
    assert not answer["attribution"]["effects"][-1]["is_inferred"]


def test_a_hidden_cap_of_the_client_is_found_to_blame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = requests(gap_s=0.01)
    capped = setup(replace(load, max_concurrency=5)).observed()
    bench = write_bench(tmp_path / "bench.json", replace(capped, max_concurrency=None))
    assert main(["validate", "--bench", str(bench), *FLAGS, "--json", "-q"]) == 0
    answer = told(capsys)
    assert any("the client was capped, never more than 5 in flight" in cause for cause in answer["causes"])


def test_a_stated_limit_of_the_client_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capped = setup(requests(gap_s=0.01, max_concurrency=5)).observed()
    bench = write_bench(tmp_path / "bench.json", capped, max_concurrency=5)
    flags = ["validate", "--bench", str(bench), *FLAGS, "--json", *QUICK]
    assert main([*flags, "--max-error", "ttft<1% e2el<1% throughput<1%"]) == 0


def without_requests(path: Path, **more: Any) -> Path:
    result = bench_result(setup().observed(), **more)
    kept = {key: value for key, value in result.items() if not isinstance(value, list) and value is not None}
    path.write_text(json.dumps(kept))
    return path


def test_of_aggregates_it_is_said_what_was_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = without_requests(tmp_path / "bench.json")
    assert main(["validate", "--bench", str(bench), *FLAGS, "--json", *QUICK]) == 0
    notes = " ".join(told(capsys)["assumptions"])
    assert re.search(r"every prompt is taken to have \d+ tokens and every answer \d+, the means", notes)
    assert "arrivals are drawn (Poisson, 20 requests/s, seed 0)" in notes


def test_the_workload_behind_aggregates_may_be_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = without_requests(tmp_path / "bench.json")
    workload = ("--num-prompts", "40", "--input-len", "100", "--output-len", "20", "--request-rate", "20")
    assert main(["validate", "--bench", str(bench), *FLAGS, *workload, "--json", *QUICK]) == 0
    answer = told(capsys)
    assert answer["num_requests"] == 40
    assert any("those of the scenario are simulated" in note for note in answer["assumptions"])


def test_aggregates_without_a_rate_are_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = without_requests(tmp_path / "bench.json", request_rate=None)
    assert main(["validate", "--bench", str(bench), *FLAGS, *QUICK]) == EXIT_USAGE
    assert "--save-detailed" in capsys.readouterr().err


def test_requests_that_failed_are_left_out_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench_result(setup().observed())
    for row in (3, 4):
        result["errors"][row], result["output_lens"][row] = "boom", 0
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(result))
    assert main(["validate", "--bench", str(path), *FLAGS, "--json", *QUICK]) == 0
    answer = told(capsys)
    assert answer["num_requests"] == 78
    assert any(note.startswith("2 of 80 requests are left out") for note in answer["assumptions"])


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = setup(requests(30), cost=AdjustedCost(setup().system.cost, factor=1.2))
    bench = write_bench(tmp_path / "bench.json", slower.observed())
    outputs = []
    for number in range(2):
        page = tmp_path / f"{number}.html"
        assert main(["validate", "--bench", str(bench), *FLAGS, "-q", "--html", str(page)]) == 0
        outputs.append((capsys.readouterr().out, page.read_bytes()))
    assert outputs[0] == outputs[1]


@pytest.mark.skipif(not FORMATS.is_dir(), reason="the sample results are not at hand")
@pytest.mark.parametrize("name", ["vllm_bench_serve_0.32.json", "guidellm_0.8.1.json.gz"])
def test_results_of_real_load_generators_are_compared(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--cost", "affine:base_s=11ms,token_s=30us", "--num-gpu-blocks-override", "4000")
    assert main(["validate", "--bench", str(FORMATS / name), *flags, "--json", *QUICK]) == 0
    answer = told(capsys)
    live = answer["live"][0]
    assert answer["num_requests"] == live["completed"] > 0
    assert {"ttft:mean", "tpot:p95", "e2el:p99", "throughput:output"} <= errors(answer).keys()


# --- a server that runs


SERVER = limits(max_num_seqs=8, max_num_batched_tokens=128, num_gpu_blocks=200, block_size=16, max_model_len=600)
LOADED = ("--num-prompts", "16", "--request-rate", "20", "--input-len", "30", "--output-len", "uniform:low=8,high=16")


@pytest.fixture(scope="module")
def url() -> Any:
    with serving(SERVER, step_s=0.05, config={"vocab_size": 1000, "eos_token_id": 999}) as served:
        yield served.url


def client(url: str) -> list[str]:
    own = ["--endpoint", url, "--max-token-id", "900", "--num-warmups", "1", "--scrape-interval", "0.1"]
    return ["validate", *own, "--max-num-seqs", "8", "--max-num-batched-tokens", "128", *LOADED]


def test_a_server_whose_steps_are_known_is_predicted(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most of a request's time is steps of 50 ms; the limits leave room for a machine that has much else to do."""
    folder, page = tmp_path / "out", tmp_path / "page.html"
    flags = [*client(url), "--cost", "constant:step_s=50ms", "-o", str(folder), "--html", str(page), "--json", "-q"]
    assert main([*flags, "--max-error", "throughput<50% tpot:mean<50% e2el:mean<60%"]) == 0
    answer = told(capsys)
    assert answer["num_failed"] == 0
    assert any("3,184 KV tokens (200 blocks of 16)" in note for note in answer["assumptions"])
    assert answer["live"][0]["total_output_tokens"] == answer["simulated"]["total_output_tokens"]
    assert "running:over_time" in errors(answer)
    assert json.loads((folder / "validation.json").read_text())["passed"] is True
    assert len(read_result(folder / "live-1.jsonl").requests) == 16
    assert len(load_run(folder / "simulated").requests) == 16
    assert "The prediction holds" in page.read_text("utf-8")


def test_step_times_that_are_far_too_short_are_told_from_the_live_run(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*client(url), "--cost", "constant:step_s=10ms", "--json", "-q", "--max-error", "tpot:mean<50%"]) == 99
    answer = told(capsys)
    assert errors(answer)["tpot:mean"] < -0.6
    (effect,) = [each for each in answer["attribution"]["effects"] if each["is_inferred"]]
    assert effect["explained"]["mean_tpot_ms"] > 0.8


def test_a_pool_that_the_server_does_not_have_is_found_to_blame(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--as-planned", "--num-gpu-blocks-override", "900", "--max-model-len", "600", "--no-async-scheduling"]
    assert main([*client(url), *flags, "--cost", "constant:step_s=50ms", "--json", "-q"]) == 0
    effects = told(capsys)["attribution"]["effects"]
    assert any("3,184 KV tokens (200 blocks of 16), the plan said 14,384" in each["swap"] for each in effects)


def test_repeats_show_the_spread_of_live_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*client(url), "--cost", "constant:step_s=50ms", "--repeats", "2", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "2 runs of 16 requests" in out
    assert "Live spread" in out


def test_requests_that_are_too_long_for_the_server_are_refused_before_any_is_sent(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cost", "constant:step_s=50ms", "--input-len", "595"]
    assert main([*client(url), *flags, *QUICK]) == EXIT_USAGE
    assert "the server's max_model_len is 600" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cost", "constant:step_s=50ms", "--num-gpu-blocks-override", "900"]
    assert main([*client("http://127.0.0.1:9"), *flags, *QUICK]) == EXIT_UNREADABLE
    assert "http://127.0.0.1:9 does not say which model it serves" in capsys.readouterr().err


async def _every_other_fails(asked: Asked, writer: asyncio.StreamWriter) -> None:
    if asked.row % 2:
        body = b'{"error": "boom"}'
        writer.write(head(500, content_type="application/json", transfer_encoding="", content_length=str(len(body))))
        writer.write(body)
        return
    await answer_well(asked, writer, 0.005)


async def _more_than_asked_for(asked: Asked, writer: asyncio.StreamWriter) -> None:
    await answer_well(asked._replace(body={**asked.body, "max_tokens": asked.body["max_tokens"] + 7}), writer, 0.005)


SCRIPTED = ("--cost", "constant:step_s=5ms", "--num-gpu-blocks-override", "900", "--max-model-len", "600", *LOADED)


def test_requests_that_a_server_failed_are_left_out_and_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(_every_other_fails) as served:
        flags = ["validate", "--endpoint", served.url, "--num-warmups", "0", "-o", str(tmp_path / "out")]
        assert main([*flags, *SCRIPTED, "--json", *QUICK]) == 0
    answer = told(capsys)
    assert answer["causes"][0].startswith("8 of 16 requests failed (status 500: boom). They are left out")
    assert (answer["num_requests"], answer["num_failed"]) == (8, 8)
    assert answer["simulated"]["completed"] == answer["live"][0]["completed"] == 8
    assert abs(errors(answer)["throughput:requests"]) < 0.3
    assert len(read_result(tmp_path / "out" / "live-1.jsonl").requests) == 16


def test_a_turn_whose_turn_before_failed_comes_when_it_was_due() -> None:
    load = workload([0, -1, 10, -1], [8] * 4, [4] * 4, previous=[-1, 0, -1, 2], think_ns=[0, 5, 0, 5])
    kept, rows = _with_rows(load, np.array([1, 2, 3]), np.array([0, 700, 10, 400]))
    assert rows.tolist() == [2, 3, 1]
    assert kept.arrival_ns.tolist() == [10, -1, 700]
    assert kept.previous.tolist() == [-1, 0, -1]
    assert kept.think_ns.tolist() == [0, 5, 0]


def test_more_tokens_than_asked_for_are_told_as_a_cause(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(_more_than_asked_for) as served:
        assert main(["validate", "--endpoint", served.url, "--num-warmups", "0", *SCRIPTED, "--json", "-q"]) == 0
    causes = told(capsys)["causes"]
    assert any("answers had" in cause.lower() and "were asked for" in cause for cause in causes), causes


def test_a_server_that_takes_connections_and_never_answers_is_named_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["validate", "--endpoint", url, "--max-seconds", "0.3", *SCRIPTED, *QUICK]) == EXIT_UNREADABLE
    assert f"{url} does not answer: its model and metrics were not told within 0.3 s" in capsys.readouterr().err


def test_a_server_that_answers_no_request_has_the_same_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await _every_other_fails(Asked(asked.method, asked.path, {"x-request-id": "w-1"}, asked.body), writer)

    with scripted(fail) as served:
        assert main(["validate", "--endpoint", served.url, "--num-warmups", "0", *SCRIPTED, *QUICK]) == EXIT_UNREADABLE
    assert "not one of 16 requests was answered" in capsys.readouterr().err


def test_an_interrupted_live_run_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = windtunnel.validation_inputs.run_live
    monkeypatch.setattr(
        windtunnel.validation_inputs, "run_live", lambda *a, **more: replace(real(*a, **more), was_interrupted=True)
    )
    with scripted(answer_well) as served:
        assert main(["validate", "--endpoint", served.url, "--num-warmups", "0", *SCRIPTED, *QUICK]) == EXIT_INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


def test_a_long_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(windtunnel.validation_inputs._Told, "every_s", 0.0)
    tell = windtunnel.validation_inputs._Told(heard.append)
    tell(Progress(0.0, 16, 0, 0, 0, 0, 0))
    tell(Progress(31.4, 16, 9, 3, 4, 2, 50))
    assert heard == [
        "waiting for the answers to warm-up requests",
        "31 s: 4 of 16 requests finished, 2 failed, 3 in flight",
    ]


def test_live_runs_of_an_earlier_validation_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    with scripted(answer_well) as served:
        flags = ["validate", "--endpoint", served.url, "--num-warmups", "0", *SCRIPTED, *QUICK, "-o", str(folder)]
        assert main([*flags, "--repeats", "2"]) == 0
        (folder / "live-notes.jsonl").write_text("")
        assert main(flags) == 0
    capsys.readouterr()
    assert sorted(path.name for path in folder.glob("live-*")) == ["live-1.jsonl", "live-notes.jsonl"]


def test_a_client_that_was_late_in_each_run_is_told_of_once() -> None:
    runs = []
    for late_s in (0.012, 0.034):
        report = SendReport(0.0, late_s, late_s, 0.0, 1)
        runs.append(replace(setup().observed(), send_report=report, notes=(late_note(report), "Another note.")))
    notes = list(windtunnel.validation._notes_of(runs))
    assert notes[0].startswith("In 2 of 2 live runs, here the worst: The client sent late: 99 % within 34.0 ms")
    assert notes[1:] == ["Another note."] * 2


# --- our own engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    from tiny_model import tiny_config

    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=1)))
    return folder


def executor(model: Path) -> list[str]:
    flags = ["validate", "--model", str(model), "--executor", "torch", "--clock", "cpu", "--num-prompts", "16"]
    limits_of_it = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "256"]
    return [
        *flags,
        *limits_of_it,
        "--request-rate",
        "100",
        "--input-len",
        "uniform:low=8,high=60",
        "--output-len",
        "12",
    ]


def test_our_own_engine_is_compared_with_steps_that_were_measured_before(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*executor(model), "--json", "-q"]) == 0
    answer = told(capsys)
    assert any("step times are fitted to" in note and "seed 1" in note for note in answer["assumptions"])
    assert any("steps are decided alike, and every token comes at the same nanosecond" in x for x in answer["causes"])
    assert answer["live"][0]["total_output_tokens"] == 16 * 12


def test_our_own_engine_is_compared_with_a_cost_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of a whole second are far from what such a small model takes."""
    assert main([*executor(model), "--cost", "constant:step_s=1s", "--json", "-q"]) == 0
    answer = told(capsys)
    assert errors(answer)["tpot:mean"] > 10
    (effect,) = answer["attribution"]["effects"]
    assert effect["ingredient"] == "step times"
    assert effect["explained"]["mean_e2el_ms"] == pytest.approx(1.0, abs=0.05)


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], EXIT_USAGE, "give one of endpoint (a running server), bench (a result) and executor"),
        (["--endpoint", "http://a:1", "--executor", "torch"], EXIT_USAGE, "got endpoint and executor"),
        (["--bench", "missing.json"], EXIT_UNREADABLE, "missing.json"),
        (["--bench", "text.txt"], EXIT_UNREADABLE, "text.txt"),
        (["--bench", "text.txt", "--repeats", "2"], EXIT_USAGE, "leave repeats out"),
        (["--executor", "torch", "--log", "vllm.log"], EXIT_USAGE, "log belongs to a result that exists"),
        (["--executor", "warp", *FLAGS], EXIT_USAGE, "executor must be torch or triton, got 'warp'"),
        (
            ["--executor", "torch", *FLAGS, *LOADED],
            EXIT_USAGE,
            "an executor computes a model: give one (--model FOLDER)",
        ),
        (["--bench", "x.json", "--max-error", "speed<4%"], EXIT_USAGE, "there is no metric 'speed'"),
        (["--bench", "x.json", "--html", "."], EXIT_USAGE, "it is a folder"),
        (["--endpoint", "ftp://a", *FLAGS], EXIT_USAGE, "ftp://a"),
        (["--endpoint", "http://a:1", "--api-endpoint", "/v2"], EXIT_USAGE, "endpoint '/v2' is not known"),
    ],
)
def test_what_is_asked_for_wrongly_is_told(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text('{"hello": "there"}')
    assert main(["validate", *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_folder_that_holds_other_things_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    assert main(["validate", "--bench", "x.json", "-o", str(tmp_path)]) == EXIT_USAGE
    assert "not empty" in capsys.readouterr().err


def test_the_same_from_python(tmp_path: Path) -> None:
    bench = write_bench(tmp_path / "bench.json", setup(requests(20)).observed())
    settings = {"num_gpu_blocks_override": 301, "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512}
    cost = {"kind": "affine", "base_s": "8ms", "token_s": "20us"}
    done = validate(
        bench=bench, max_error="ttft<1%", attributes=False, cost=cost, enable_prefix_caching=False, **settings
    )
    assert isinstance(done, windtunnel.validation.Validation)
    assert done.passed
    assert "The prediction holds." in done.text()
    with pytest.raises(ValidationError, match="there is no metric 'speed'"):
        validate(bench=bench, max_error="speed<1%")

"""Results of other load generators: what is taken from them, what stays unknown, and errors that name the place."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.calibrate.live.imports import read_result, read_results
from windtunnel.calibrate.live.metrics import add_saved_metrics
from windtunnel.calibrate.live.observed import Ending, ObservedRun
from windtunnel.calibrate.live.observed_file import save_observed
from windtunnel.calibrate.live.observed_metrics import latency_sample, observed_metrics
from windtunnel.calibrate.live.reading import UnreadableResult

MS = 1_000_000
S = 1_000_000_000


def written(folder: Path, value: Any, name: str = "result.json") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def bench(**changes: Any) -> dict[str, Any]:
    """A detailed result of vllm bench serve: two good requests and one that failed."""
    result: dict[str, Any] = {
        "date": "20260101-000000",
        "model_id": "m",
        "num_prompts": 3,
        "request_rate": "inf",
        "max_concurrency": 2,
        "duration": 4.0,
        "completed": 2,
        "failed": 1,
        "request_throughput": 0.5,
        "output_throughput": 1.25,
        "mean_ttft_ms": 150.0,
        "median_ttft_ms": 150.0,
        "p99_ttft_ms": 199.0,
        "input_lens": [10, 20, 30],
        "output_lens": [3, 4, 0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.01, 0.02], [0.3], []],
        "latencies": [0.13, 0.5, 0.0],
        "start_times": [1000.0, 1000.5, 1001.0],
        "queue_times": [0.0, 0.5, 0.25],
        "errors": ["", "", "Service Unavailable"],
    }
    return {key: value for key, value in {**result, **changes}.items() if value != "left out"}


# -- vllm bench serve


def test_a_detailed_result_has_every_request(tmp_path: Path) -> None:
    run = read_result(written(tmp_path, bench()))
    table = run.requests
    assert run.source == "vllm bench serve"
    assert (run.request_rate, run.max_concurrency, run.duration_ns) == (math.inf, 2, 4 * S)
    assert run.server.model == "m"
    assert table.ending.tolist() == [Ending.FINISHED, Ending.FINISHED, Ending.FAILED]
    assert table.errors[2] == "Service Unavailable"
    assert table.due_ns.tolist() == [0, 0, S * 3 // 4]
    assert table.send_ns.tolist() == [0, S // 2, S]
    assert table.ttft_ns.tolist() == [100 * MS, 200 * MS, -1]
    assert table.e2el_ns.tolist() == [130 * MS, 500 * MS, -1]
    assert table.chunk_times_of(0).tolist() == [100 * MS, 110 * MS, 130 * MS]
    assert table.chunk_tokens.tolist() == [1, 1, 1, -1, -1]  # two chunks with four tokens between them
    assert observed_metrics(run).tpot.mean_ms == pytest.approx((15 + 100) / 2)


def test_without_save_detailed_the_stated_aggregates_are_the_metrics(tmp_path: Path) -> None:
    lists = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
    run = read_result(written(tmp_path, bench(**dict.fromkeys(lists, "left out"))))
    metrics = observed_metrics(run)
    assert len(run.requests) == 0
    assert (metrics.completed, metrics.request_throughput, metrics.duration_s) == (2, 0.5, 4.0)
    assert (metrics.ttft.mean_ms, metrics.ttft.percentile_ms(50), metrics.ttft.percentile_ms(99)) == (150, 150, 199)
    assert metrics.ttft.percentile_ms(90) is None
    assert metrics.e2el.mean_ms is None
    assert any("without --save-detailed" in note for note in run.notes)


def test_older_results_lack_times_that_stay_unknown(tmp_path: Path) -> None:
    lists = dict.fromkeys(("latencies", "start_times", "queue_times", "errors"), "left out")
    run = read_result(written(tmp_path, bench(**lists)))
    assert (run.requests.send_ns == -1).all()
    assert run.requests.e2el_ns.tolist() == [130 * MS, 500 * MS, -1]  # TTFT plus all gaps
    assert run.requests.ending.tolist() == [Ending.FINISHED, Ending.FINISHED, Ending.FAILED]
    assert run.makespan_ns is None
    assert observed_metrics(run).request_throughput == pytest.approx(2 / 4)
    assert len(run.notes) == 2


def test_a_start_that_was_never_taken_is_not_the_beginning(tmp_path: Path) -> None:
    run = read_result(written(tmp_path, bench(start_times=[1000.0, 1000.5, 0.0])))
    assert run.requests.send_ns.tolist() == [0, S // 2, -1]


def test_a_median_ttft_of_zero_is_kept_for_whoever_explains_it(tmp_path: Path) -> None:
    run = read_result(written(tmp_path, bench(ttfts=[0.0, 0.0, 0.0])))
    assert observed_metrics(run).ttft.median_ms == 0


def test_appended_results_are_several_runs(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(bench(model_id=model)) for model in ("a", "b"))
    path = written(tmp_path, text)
    assert [run.server.model for run in read_results(path)] == ["a", "b"]
    assert read_result(path, run=1).server.model == "b"
    with pytest.raises(UnreadableResult, match=r"2 runs are in it, choose one by its number: 0: .*model_id a"):
        read_result(path)
    with pytest.raises(UnreadableResult, match="there is no run 2, the file holds runs 0 to 1"):
        read_result(path, run=2)


def test_sglangs_names_become_vllms(tmp_path: Path) -> None:
    result = {"request_throughput": 2.0, "mean_ttft_ms": 5.0, "mean_e2e_latency_ms": 70.0, "request_rate": math.inf}
    run = read_result(written(tmp_path, result))
    assert run.source == "sglang bench_serving"
    assert run.request_rate == math.inf
    assert observed_metrics(run).e2el.mean_ms == 70


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttfts": [0.1]}, r"result.json:1: ttfts: 1 entries, input_lens has 3"),
        ({"ttfts": [0.1, "x", 0]}, r"result.json:1: ttfts\[1\]: 'x' is not a number"),
        ({"ttfts": [0.1, -1, 0]}, r"ttfts\[1\]: -1 is below 0"),
        ({"latencies": [0.1, 1e12, 0]}, r"latencies\[1\]: 1000000000000.0 is too long a time: is the unit right"),
        ({"itls": [[0.1, None], [], "x"]}, r"itls\[2\]: 'x' is not a list"),
        ({"itls": [[0.1, True], [], []]}, r"itls\[0\]\[1\]: 'True' is not a number"),
        ({"input_lens": [1.5, 2, 3]}, r"input_lens\[0\]: 1.5 is not a whole number"),
        ({"output_lens": {"a": 1}}, r"output_lens: .* is not a list"),
        ({"request_rate": "fast"}, r"request_rate: 'fast' is not a rate"),
        ({"max_concurrency": "many"}, r"max_concurrency: 'many' is not a number"),
        ({"duration": -1.0}, r"duration: -1.0 s is below 0"),
    ],
)
def test_a_malformed_result_is_refused_with_its_place(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnreadableResult, match=message):
        read_results(written(tmp_path, bench(**changes)))


# -- guidellm


def guidellm(**changes: Any) -> dict[str, Any]:
    def request(start: float, first: float, last: float, **values: Any) -> dict[str, Any]:
        return {
            "prompt_tokens": 10,
            "output_tokens": 5,
            "request_latency": last - start + 0.25,
            "time_to_first_token_ms": (first - start) * 1e3,
            "time_per_output_token_ms": (last - start) / 5 * 1e3,
            "inter_token_latency_ms": (last - first) / 4 * 1e3,
            "info": {"timings": {"targeted_start": start - 0.5, "request_start": start, "last_token_iteration": last}},
            **values,
        }

    benchmark = {
        "config": {"strategy": {"type_": "poisson", "rate": 2.0}, "backend": {"model": "m"}},
        "start_time": 1_700_000_000.0,
        "end_time": 1_700_000_008.0,
        "requests": {
            "successful": [request(1_700_000_002.0, 1_700_000_003.0, 1_700_000_005.0)],
            "incomplete": [request(1_700_000_001.0, 1_700_000_001.5, 1_700_000_001.5, output_tokens=1)],
            "errored": None,
        },
        "metrics": {"request_totals": {"successful": 1, "total": 2}},
    }
    return {"metadata": {"version": 2, "guidellm_version": "0.8.1"}, "benchmarks": [{**benchmark, **changes}]}


def test_guidellms_words_are_not_taken_for_vllms(tmp_path: Path) -> None:
    run = read_result(written(tmp_path, guidellm()))
    metrics = observed_metrics(run)
    assert (run.source, run.request_rate, run.server.model) == ("guidellm 0.8.1", 2.0, "m")
    assert run.requests.ending.tolist() == [Ending.CUT_OFF, Ending.FINISHED]
    assert run.requests.due_ns.tolist() == [0, S]
    assert run.requests.send_ns.tolist() == [S // 2, S * 3 // 2]
    assert metrics.e2el.mean_ms == pytest.approx(3000)  # to the last token, not to the end of the request
    assert metrics.tpot.mean_ms == pytest.approx(500)  # and not its time_per_output_token_ms of 600
    assert metrics.itl.mean_ms is None
    assert metrics.duration_s == 8


def test_a_sample_of_requests_gives_no_throughput_of_its_own(tmp_path: Path) -> None:
    metrics = {
        "request_totals": {"successful": 100, "total": 100},
        "requests_per_second": {"successful": {"mean": 12.5}},
        "time_to_first_token_ms": {"successful": {"mean": 30.0, "percentiles": {"p99": 90.0}}},
        "request_latency": {"successful": {"mean": 2.0}},
    }
    run = read_result(written(tmp_path, guidellm(metrics=metrics)))
    found = observed_metrics(run)
    assert (found.completed, found.failed, found.request_throughput) == (100, 0, 12.5)
    assert (found.ttft.mean_ms, found.ttft.percentile_ms(99), found.e2el.mean_ms) == (30, 90, 2000)
    assert any("a sample of 1 of 100" in note for note in run.notes)


def test_a_sweep_is_several_runs_and_a_broken_one_names_its_request(tmp_path: Path) -> None:
    result = guidellm()
    result["benchmarks"].append({**guidellm()["benchmarks"][0], "config": {"strategy": {"type_": "synchronous"}}})
    first, second = read_results(written(tmp_path, result))
    assert (first.max_concurrency, second.max_concurrency) == (None, 1)
    result["benchmarks"][1]["requests"]["successful"][0]["prompt_tokens"] = "ten"
    with pytest.raises(UnreadableResult, match=r"benchmarks\[1\].requests.successful\[0\].prompt_tokens: 'ten'"):
        read_results(written(tmp_path, result))
    with pytest.raises(UnreadableResult, match="benchmarks: the list is empty"):
        read_results(written(tmp_path, {"benchmarks": []}))


def test_the_sample_of_guidellm_agrees_with_its_own_aggregates(shared: Path) -> None:
    path = shared / "live_vllm_cpu" / "formats" / "guidellm_0.8.1.json.gz"
    if not path.is_file():
        pytest.skip("no sample of guidellm")
    stated = json.loads(gzip.decompress(path.read_bytes()))["benchmarks"][0]["metrics"]
    run = read_result(path)
    metrics = observed_metrics(run)
    assert metrics.completed == 30
    ttft = stated["time_to_first_token_ms"]["successful"]
    assert metrics.ttft.mean_ms == pytest.approx(ttft["mean"], rel=1e-6)
    assert metrics.ttft.median_ms == pytest.approx(ttft["median"], rel=0.02)  # it rounds to an order statistic
    assert metrics.total_output_tokens == stated["output_token_count"]["successful"]["total_sum"]
    assert metrics.request_throughput == pytest.approx(stated["requests_per_second"]["successful"]["mean"], rel=1e-3)
    tokens = run.requests.num_output_tokens - 1
    per_token = float(np.dot(latency_sample(run, "tpot").values.mean(), tokens.sum()) / tokens.sum())
    assert per_token == pytest.approx(stated["inter_token_latency_ms"]["successful"]["mean"] * MS, rel=1e-3)


# -- aiperf and genai-perf


def record(start_ns: int, **values: Any) -> dict[str, Any]:
    metrics = {
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "output_sequence_length": {"value": 3, "unit": "tokens"},
        "time_to_first_token": {"value": 250.0, "unit": "ms"},
        "request_latency": {"value": 0.3, "unit": "s"},
        "inter_chunk_latency": {"value": [20.0, 30.0], "unit": "ms"},
    }
    metadata = {"request_start_ns": start_ns, "request_end_ns": start_ns + 310 * MS, "benchmark_phase": "profiling"}
    return {"metadata": metadata, "metrics": metrics, "error": None, **values}


def test_aiperfs_records_are_requests(tmp_path: Path) -> None:
    warm = record(5)
    warm["metadata"]["benchmark_phase"] = "warmup"
    failed = record(S, error={"code": 500, "type": "HTTP", "message": "overloaded"}, metrics={})
    text = "\n".join(json.dumps(each) for each in (warm, failed, record(S // 2)))
    run = read_result(written(tmp_path, text, "profile_export.jsonl"))
    assert run.source == "aiperf"
    assert run.requests.send_ns.tolist() == [0, S // 2]
    assert run.requests.ending.tolist() == [Ending.FINISHED, Ending.FAILED]
    assert run.requests.errors[1] == "HTTP: overloaded"
    assert run.requests.chunk_times_of(0).tolist() == [250 * MS, 270 * MS, 300 * MS]
    assert run.requests.chunk_tokens.tolist() == [1, 1, 1]
    assert observed_metrics(run).tpot.mean_ms == pytest.approx(25)
    assert run.notes == ("1 requests of the warm-up are left out.",)


def test_a_value_without_a_known_unit_is_refused(tmp_path: Path) -> None:
    broken = record(0)
    broken["metrics"]["time_to_first_token"]["unit"] = "ticks"
    text = json.dumps(record(0)) + "\n" + json.dumps(broken)
    with pytest.raises(UnreadableResult, match=r"result.json:2: metrics.time_to_first_token.unit: 'ticks' is no unit"):
        read_results(written(tmp_path, text))
    del broken["metrics"]["time_to_first_token"]["value"]
    with pytest.raises(UnreadableResult, match="it has no value"):
        read_results(written(tmp_path, json.dumps(broken)))


@pytest.mark.parametrize("under_records", [False, True])
def test_aiperfs_aggregates_are_read_where_they_are(tmp_path: Path, under_records: bool) -> None:
    blocks = {
        "time_to_first_token": {"unit": "ms", "avg": 40.0, "p50": 38.0, "p99": 90.0},
        "inter_token_latency": {"unit": "ms", "avg": 9.0},
        "request_latency": {"unit": "s", "avg": 2.0},
        "request_throughput": {"unit": "requests/sec", "avg": 4.5},
        "request_count": {"unit": "requests", "avg": 100},
    }
    result = {"records": blocks} if under_records else blocks
    metrics = observed_metrics(read_result(written(tmp_path, {**result, "input_config": {}})))
    assert (metrics.ttft.mean_ms, metrics.ttft.median_ms, metrics.ttft.percentile_ms(99)) == (40, 38, 90)
    assert (metrics.tpot.mean_ms, metrics.itl.mean_ms, metrics.e2el.mean_ms) == (9, None, 2000)
    assert (metrics.completed, metrics.failed, metrics.request_throughput) == (100, None, 4.5)


def test_genai_perfs_raw_export_has_times_and_no_tokens(tmp_path: Path) -> None:
    requests = [
        {
            "timestamp": 1000 + at,
            "response_timestamps": [1000 + at + 50, 1000 + at + 80, 1000 + at + 81],
            "response_outputs": [{"response": "data: {}"}, {"response": "data: {}"}, {"response": "data: [DONE]"}],
        }
        for at in (0, 7)
    ]
    result = {"experiments": [{"experiment": {"mode": "concurrency", "value": 4}, "requests": requests}]}
    run = read_result(written(tmp_path, result))
    assert run.max_concurrency == 4
    assert run.requests.send_ns.tolist() == [0, 7]
    assert run.requests.chunk_times_of(1).tolist() == [50, 80]
    assert (run.requests.num_output_tokens == -1).all()
    assert observed_metrics(run).output_throughput is None
    result["experiments"][0]["requests"][1]["response_timestamps"][0] = 3
    with pytest.raises(UnreadableResult, match=r"requests\[1\].response_timestamps: a response came before"):
        read_result(written(tmp_path, result))


# -- tables

LLMPERF = """ttft_s,end_to_end_latency_s,inter_token_latency_s,number_input_tokens,number_output_tokens,error_code,error
0.5,2.5,0.02,550,101,,
0,0,0,550,0,429,Too many requests
"""


def test_llmperfs_table_is_read(tmp_path: Path) -> None:
    run = read_result(written(tmp_path, LLMPERF, "llmperf.csv"))
    metrics = observed_metrics(run)
    assert run.source == "LLMPerf"
    assert (metrics.completed, metrics.failed) == (1, 1)
    assert run.requests.errors[1] == "Too many requests"
    assert (metrics.ttft.mean_ms, metrics.e2el.mean_ms, metrics.tpot.mean_ms) == (500, 2500, 20)
    assert metrics.request_throughput is None
    assert any("inter_token_latency is not used" in note for note in run.notes)


def test_llmperfs_json_is_the_same_as_its_table(tmp_path: Path) -> None:
    rows = [
        {"error_code": None, "error_msg": "", "ttft_s": 0.5, "end_to_end_latency_s": 2.5, "number_output_tokens": 101},
        {"error_code": 429, "error_msg": "Too many requests", "ttft_s": 0, "end_to_end_latency_s": 0},
    ]
    run = read_result(written(tmp_path, rows))
    assert observed_metrics(run).tpot.mean_ms == pytest.approx(20)
    assert run.requests.ending.tolist() == [Ending.FINISHED, Ending.FAILED]


def test_other_tables_need_units_in_their_columns(tmp_path: Path) -> None:
    run = read_result(written(tmp_path, "start_ms;ttft_ms;latency_s\n1000;20;0.5\n1500;30;0.5\n", "t.csv"))
    assert run.requests.send_ns.tolist() == [0, S // 2]
    assert run.requests.ttft_ns.tolist() == [20 * MS, 30 * MS]
    for text, message in [
        ("ttft,latency_s\n1,2\n", "t.csv:1: column 'ttft' does not say its unit: name it ttft_s or ttft_ms"),
        ("a,b\n1,2\n", "no column of latencies among a, b"),
        ("ttft_s,latency_s\n1\n", "t.csv:2: 1 cells, the header has 2"),
        ("ttft_s\nsoon\n", "t.csv:2: ttft_s: 'soon' is not a number"),
        ("ttft_s\n-1\n", "t.csv:2: ttft_s: -1.0 is below 0"),
        ("ttft_s\n", "the table has no rows"),
    ]:
        with pytest.raises(UnreadableResult, match=message):
            read_result(written(tmp_path, text, "t.csv"))


# -- files in general


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ('{"a": 1}', "result.json:1: not a result that is known here \\(keys: a\\)"),
        ('{"a": 1', "result.json:1: not JSON"),
        ('{"a": 1}\n{"b"', "result.json:2: not JSON"),
        ("[1, 2]", "a result is a JSON object, this is '1'"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UnreadableResult, match=message):
        read_result(written(tmp_path, text))


def test_damaged_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(gzip.compress(b"{}")[:-4])
    with pytest.raises(UnreadableResult, match="gzip data is damaged"):
        read_result(path)
    path.write_bytes(b'{\n"\xff"}')
    with pytest.raises(UnreadableResult, match=r"x.json:2: not UTF-8 text"):
        read_result(path)


def test_packed_results_and_our_own_are_read_too(tmp_path: Path) -> None:
    packed = tmp_path / "result.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(bench()).encode()))
    run = read_result(packed)
    save_observed(run, tmp_path / "saved.jsonl")
    again = read_result(tmp_path / "saved.jsonl")
    assert observed_metrics(again) == observed_metrics(run)


def test_saved_metrics_add_what_the_server_was(tmp_path: Path) -> None:
    run: ObservedRun = read_result(written(tmp_path, bench()))
    text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="2589",engine="0"} 1.0\nvllm:num_requests_running 0\n'
    found = add_saved_metrics(run, text, name="dump.txt")
    assert (found.server.num_gpu_blocks, found.server.block_size, found.server.model) == (2589, 16, "m")
    assert found.series is None
    point = [[10, "0.5"], [20, "0.75"]]
    series = [{"metric": {"__name__": "vllm:gpu_cache_usage_perc"}, "values": point}]
    answer = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}})
    with_series = add_saved_metrics(run, answer, name="prometheus.json")
    assert with_series.series is not None
    assert with_series.series.kv_usage.tolist() == [0.5, 0.75]

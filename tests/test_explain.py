"""``explain``: the planted cause comes first, a healthy run has no finding, and the numbers of real reports."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explain_cases import PLANTED, healthy, healthy_open, kv_pool, of_rows, with_columns

from windtunnel.api import simulate
from windtunnel.calibrate.explain import Explanation, Facts, Severity, describe, explain, explain_together
from windtunnel.calibrate.explain_sources import add_server_log, facts_of_records
from windtunnel.calibrate.live.imports import read_result
from windtunnel.calibrate.live.observed import (
    SERIES_COLUMNS,
    Ending,
    ObservedRun,
    ServerCounts,
    ServerFacts,
    ServerSeries,
    observed_requests,
)
from windtunnel.calibrate.live.observed_file import save_observed
from windtunnel.calibrate.live.observed_metrics import observed_from_records
from windtunnel.cli.main import main
from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.simulate import run as simulate_one
from windtunnel.sim.workload import workload

S = 1_000_000_000
MS = 1_000_000


def bench(**aggregates: Any) -> ObservedRun:
    """What ``vllm bench serve`` saves without --save-detailed."""
    rate, limit = aggregates.pop("request_rate", None), aggregates.pop("max_concurrency", None)
    stated = {"completed": aggregates.get("num_prompts", 0.0), **aggregates}
    return ObservedRun(
        "vllm bench serve", "bench.json", observed_requests(0), request_rate=rate, max_concurrency=limit, stated=stated
    )


def kinds(explained: Explanation) -> list[str]:
    return [finding.kind for finding in explained.findings]


# --- planted causes and healthy runs


@pytest.mark.parametrize("kind", PLANTED)
def test_the_planted_cause_is_the_first_finding(kind: str) -> None:
    case = PLANTED[kind](3)
    first = explain(case.run, case.facts).findings[0]
    assert first.kind == kind
    assert any(sign.isdigit() for sign in first.sentence)
    assert first.knob
    assert all(value is None or value == value for value in first.evidence.values() if not isinstance(value, list))


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_has_no_finding(seed: int) -> None:
    explained = explain(healthy(seed).run)
    assert explained.findings == ()
    assert (explained.verdict, explained.worst) == ("no fault found", None)


def test_findings_are_ordered_by_severity_and_then_by_weight() -> None:
    case = kv_pool(2)
    hit = np.arange(len(case.run.requests)) % 10 == 0
    broken = with_columns(case.run, ending=np.where(hit, int(Ending.FAILED), case.run.requests.ending))
    explained = explain(broken)
    assert kinds(explained)[:2] == ["failed", "kv_pool"]
    ranks = [finding.rank for finding in explained.findings]
    assert ranks == sorted(ranks, reverse=True)


def test_the_knob_that_is_named_helps() -> None:
    """Seats as advised: nothing waits any more, and nothing is found."""
    load = workload(np.zeros(240, np.int64), [400] * 240, [100] * 240, max_concurrency=24)
    config = SchedulerConfig(max_num_seqs=8, num_gpu_blocks=4096, max_num_batched_tokens=2048)
    cost = AffineCost(0.01, token_s=2e-5)
    found = explain(observed_from_records(simulate_one(load, config, cost), load)).findings[0]
    assert found.kind == "seats"
    advised = int(found.knob.split()[1])
    again = simulate_one(load, replace(config, max_num_seqs=advised), cost)
    assert kinds(explain(observed_from_records(again, load))) == []


# --- reports from the field, with their numbers


@pytest.mark.parametrize(
    ("rate", "served", "mean_s", "expected"),
    [(2, 1.99, 1.18, []), (5, 4.93, 3.1, []), (10, 5.91, 37.62, ["overload"])],
)
def test_u47_an_open_loop_beyond_capacity_is_overload(
    rate: float, served: float, mean_s: float, expected: list[str]
) -> None:
    result = bench(
        num_prompts=1000,
        request_rate=rate,
        duration=1000 / served,
        request_throughput=served,
        mean_e2el_ms=mean_s * 1e3,
    )
    explained = explain(result)
    assert kinds(explained) == expected
    if expected:
        numbers = explained.findings[0].evidence
        assert numbers["rho"] == pytest.approx(1.69, abs=0.01)
        assert numbers["queue_wait_s"] + 3.1 == pytest.approx(mean_s, rel=0.01)


U49 = {
    "num_prompts": 1000,
    "request_rate": math.inf,
    "duration": 306.78,
    "request_throughput": 3.26,
    "mean_ttft_ms": 146_800.0,
    "p99_ttft_ms": 286_000.0,
}
PERIODIC = (
    "INFO 05-07 10:{minute:02d}:00 [loggers.py:111] Engine 000: Avg prompt throughput: 700.0 tokens/s, Avg generation "
    "throughput: 650.0 tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: {usage}%, "
    "Prefix cache hit rate: 0.1%\n"
)


def test_u49_a_pure_queue_before_32_seats_names_the_seats_and_not_the_dtype() -> None:
    explained = explain(bench(**U49), Facts(max_num_seqs=32))
    assert kinds(explained)[0] == "seats"
    assert "--max-num-seqs 64" in explained.findings[0].knob
    assert "dtype" in explained.findings[0].sentence
    assert kinds(explain(bench(**U49)))[0] == "burst"


def test_u49_the_log_alone_shows_the_seats() -> None:
    lines = [PERIODIC.format(minute=i, running=32, waiting=968 - 190 * i, usage=21.5) for i in range(6)]
    run = add_server_log(bench(**U49), "".join(lines), name="vllm.log")
    first = explain(run).findings[0]
    assert first.kind == "seats"
    assert first.evidence["max_num_seqs"] == 32
    assert first.evidence["kv_usage_while_waiting"] == pytest.approx(0.215)


def test_u44_more_in_flight_than_max_num_seqs() -> None:
    lines = [PERIODIC.format(minute=i, running=256, waiting=256, usage=40.0) for i in range(6)]
    run = add_server_log(bench(num_prompts=5000, max_concurrency=512), "".join(lines), name="vllm.log")
    assert kinds(explain(run)) == ["seats"]


def lens(run: ObservedRun, number: int = 200) -> ObservedRun:
    """The same run, its prompts drawn with one seed."""
    return of_rows(run, np.arange(number))


def test_u63_a_second_run_with_the_same_seed_is_faster_because_of_the_cache() -> None:
    first = replace(lens(healthy_open(1).run), max_concurrency=None, name="first.json", server=ServerFacts())
    unknown = np.full(len(first.requests), -1)
    first = with_columns(first, num_cached_tokens=unknown)
    table = first.requests
    second = replace(with_columns(first, ttft_ns=table.ttft_ns // 49 + 1), name="second.json")
    one, two = explain_together([first, second])
    assert kinds(one) == []
    assert kinds(two)[0] == "warm_cache"
    assert two.findings[0].evidence["ttft_ratio"] == pytest.approx(1 / 49, rel=0.01)
    other = with_columns(second, num_prompt_tokens=table.num_prompt_tokens[::-1].copy())
    assert "warm_cache" not in kinds(explain_together([first, other])[1])


@pytest.mark.parametrize("gain", [1.86, 1.59, 1.76, 1.25])
def test_u63_aggregates_of_two_runs_with_one_seed(gain: float) -> None:
    first = bench(
        num_prompts=400, max_concurrency=8, request_throughput=2.0, duration=200.0, total_input_tokens=409_600.0
    )
    stated = {**first.stated, "request_throughput": 2.0 * gain, "duration": 200.0 / gain}
    explained = explain_together([first, replace(first, stated=stated)])
    assert [kinds(each) for each in explained] == [[], ["warm_cache"]]
    assert explained[1].findings[0].evidence["throughput_ratio"] == pytest.approx(gain)


def test_u63_workers_that_share_a_seed_hit_the_cache_in_92_9_percent() -> None:
    counts = ServerCounts(prefix_hit_tokens=929, prefix_query_tokens=1000)
    run = replace(bench(num_prompts=1000, request_throughput=2.0, duration=500.0), counts=counts)
    assert kinds(explain(run, Facts(shared_prefix_share=0.0))) == ["warm_cache"]
    assert kinds(explain(run, Facts(shared_prefix_share=0.9))) == []
    assert any("92.9 %" in remark or "93 %" in remark for remark in explain(run).remarks)


def test_u63_a_ttft_that_no_prefill_reaches() -> None:
    run = bench(
        num_prompts=200,
        duration=100.0,
        request_throughput=2.0,
        total_input_tokens=200 * 16_384.0,
        median_ttft_ms=60.0,
        mean_ttft_ms=62.0,
        median_itl_ms=45.0,
    )
    assert kinds(explain(run)) == ["warm_cache"]
    assert kinds(explain(run, Facts(max_prefill_tokens_per_s=60_000))) == ["warm_cache"]
    assert kinds(explain(run, Facts(max_prefill_tokens_per_s=300_000))) == []


def u68(*, knows_due: bool) -> ObservedRun:
    """A mock server of 0.19 s behind 4 places, 40 requests at 40/s."""
    due = np.arange(40) * S // 40
    free, send = [0] * 4, []
    for at in due.tolist():
        place = int(np.argmin(free))
        send.append(max(at, free[place]))
        free[place] = send[-1] + 190 * MS
    requests = observed_requests(
        40,
        due_ns=due if knows_due else send,
        send_ns=send,
        ttft_ns=[190 * MS] * 40,
        e2el_ns=[190 * MS] * 40,
        num_prompt_tokens=[8] * 40,
        num_output_tokens=[1] * 40,
    )
    return ObservedRun("vllm bench serve", "u68", requests, max_concurrency=4, request_rate=40.0)


@pytest.mark.parametrize("knows_due", [True, False])
def test_u68_the_wait_at_the_clients_limit_is_added_back(knows_due: bool) -> None:
    first = explain(u68(knows_due=knows_due)).findings[0]
    assert first.kind == "hidden_queue"
    assert first.evidence["client_wait_s"] == pytest.approx(0.45, abs=0.05)  # 0.45 is the fluid's
    assert first.evidence["mean_ttft_s"] == pytest.approx(0.19)


def test_u78_a_median_ttft_of_zero_makes_the_result_invalid() -> None:
    result = bench(
        num_prompts=1000,
        request_rate=math.inf,
        duration=97.65,
        request_throughput=10.24,
        output_throughput=441.8,
        total_output_tokens=43_142.0,
        mean_ttft_ms=21_000.0,
        median_ttft_ms=0.0,
    )
    first = explain(result).findings[0]
    assert (first.kind, first.severity) == ("empty_streams", Severity.INVALID)
    assert first.evidence["output_tokens_per_request"] == pytest.approx(43, abs=0.5)


def test_u82_34_5_requests_were_really_in_flight_and_not_384() -> None:
    result = bench(output_throughput=192.44 * 8, mean_tpot_ms=1000 / 44.59, max_concurrency=384, num_prompts=3840)
    explained = explain(result)
    assert kinds(explained) == ["few_in_flight"]
    first = explained.findings[0]
    assert first.evidence["in_flight"] == pytest.approx(34.5, abs=0.05)
    assert "34.5" in first.title
    assert "44.59" in first.sentence


def served_from(places: int, number: int = 1280) -> ObservedRun:
    """Answers of 0.8 to 1.2 s behind so many places."""
    takes = np.random.default_rng(0).integers(800 * MS, 1200 * MS, number)
    free, send = np.zeros(places, np.int64), []
    for length in takes.tolist():
        place = int(free.argmin())
        send.append(int(free[place]))
        free[place] += length
    requests = observed_requests(
        number,
        send_ns=send,
        due_ns=send,
        ttft_ns=np.full(number, 40 * MS),
        e2el_ns=takes,
        num_prompt_tokens=np.full(number, 100),
        num_output_tokens=np.full(number, 50),
    )
    return ObservedRun("guidellm", "u87", requests)


def test_u87_128_asked_for_and_exactly_100_in_flight() -> None:
    capped = explain(replace(served_from(100), max_concurrency=128)).findings[0]
    assert capped.kind == "client_cap"
    assert capped.evidence["peak_in_flight"] == 100
    assert kinds(explain(replace(served_from(128), max_concurrency=128))) == []


def test_u87_half_a_request_a_second_and_14_running_is_littles_law() -> None:
    result = bench(num_prompts=900, request_rate=0.5, duration=1828.0, request_throughput=0.4923, mean_e2el_ms=28_000.0)
    explained = explain(result)
    assert kinds(explained) == []
    assert explained.measures["in_flight"] == pytest.approx(14, abs=0.5)


def test_u94_the_queue_is_long_because_the_batch_is_at_16() -> None:
    result = bench(num_prompts=72_262, max_concurrency=1000, request_throughput=4005.66, mean_e2el_ms=247.6)
    facts = Facts(queue_s=0.2427, compute_s=0.0016, mean_batch_size=72_262 / 4_518)
    first = explain(result, facts).findings[0]
    assert first.kind == "batch_cap"
    assert "max_batch_size above 16" in first.knob
    assert first.evidence["in_flight"] == pytest.approx(991.8, abs=0.1)
    assert explain(result, replace(facts, queue_s=0.0005)).findings == ()


def test_u02_the_fifth_long_prompt_is_admitted_by_its_first_chunk_for_ever() -> None:
    config = SchedulerConfig(
        num_gpu_blocks=444_000 // 16 + 1,
        max_num_batched_tokens=8192,
        max_model_len=101_000,
        enable_prefix_caching=False,
        scheduler_reserve_full_isl=False,
    )
    load = workload(np.zeros(5, np.int64), [100_000] * 5, [1000] * 5)
    records = simulate_one(load, config, AffineCost(0.01, token_s=5e-5))
    explained = explain(observed_from_records(records, load), facts_of_records(records))
    assert kinds(explained)[0] == "preempt_loop"
    assert explained.findings[0].evidence["recomputed_per_useful_token"] > 8
    assert "--scheduler-reserve-full-isl" in explained.findings[0].knob
    kept = simulate_one(load, replace(config, scheduler_reserve_full_isl=True), AffineCost(0.01, token_s=5e-5))
    assert "preempt_loop" not in kinds(explain(observed_from_records(kept, load), facts_of_records(kept)))


# --- single rules


def steady(number: int = 200, **columns: Any) -> ObservedRun:
    """One request every 100 ms, each served in a second at 20 ms a token."""
    send = np.arange(number) * 100 * MS
    base: dict[str, Any] = {
        "send_ns": send,
        "due_ns": send,
        "ttft_ns": np.full(number, 50 * MS),
        "e2el_ns": np.full(number, 1030 * MS),
        "num_prompt_tokens": np.full(number, 300),
        "num_output_tokens": np.full(number, 50),
    }
    return ObservedRun("test", "steady", observed_requests(number, **{**base, **columns}))


def test_a_steady_run_by_hand_is_healthy() -> None:
    assert kinds(explain(steady())) == []


def test_times_that_run_backwards() -> None:
    table = steady().requests
    assert kinds(explain(steady(due_ns=table.send_ns + 500 * MS)))[0] == "clock"
    swapped = steady(ttft_ns=table.e2el_ns, e2el_ns=table.e2el_ns - 200 * MS)
    assert "clock" in kinds(explain(swapped))


def test_a_rate_that_was_not_sent() -> None:
    assert kinds(explain(replace(steady(), request_rate=5.0))) == ["rate_missed"]
    assert kinds(explain(replace(steady(), request_rate=10.0))) == []


def test_somebody_else_on_the_server() -> None:
    run = replace(steady(), counts=ServerCounts(num_requests_finished=260))
    assert kinds(explain(run)) == ["other_load"]
    assert kinds(explain(replace(run, counts=ServerCounts(num_requests_finished=201)))) == []


def test_more_in_flight_than_the_client_let_in_is_a_contradiction() -> None:
    result = bench(num_prompts=1000, duration=100.0, request_throughput=10.0, mean_e2el_ms=3000.0, max_concurrency=16)
    assert kinds(explain(result)) == ["contradiction"]
    assert kinds(explain(replace(result, max_concurrency=32))) == []


def test_littles_law_a_thousand_times_off_is_a_unit() -> None:
    result = bench(num_prompts=1000, duration=100.0, request_throughput=10.0, mean_e2el_ms=1.6, max_concurrency=16)
    assert kinds(explain(result)) == ["units"]


def test_several_tokens_in_a_chunk() -> None:
    chunk_times = [np.arange(10) * 100 * MS + 50 * MS for _ in range(200)]
    run = steady(chunks=chunk_times, e2el_ns=np.full(200, 950 * MS))
    explained = explain(run)
    assert kinds(explained) == ["chunks"]
    assert explained.findings[0].evidence["tokens_per_chunk"] == 5


def test_answers_shorter_than_asked() -> None:
    assert kinds(explain(steady(num_output_tokens_asked=np.full(200, 100)))) == ["short_answers"]


def test_requests_cut_off_by_the_end_of_the_run() -> None:
    ending = np.where(np.arange(200) >= 180, int(Ending.CUT_OFF), int(Ending.FINISHED))
    assert kinds(explain(steady(ending=ending))) == ["interrupted"]


def test_swapped_requests_are_named() -> None:
    columns: dict[str, Any] = dict.fromkeys(SERIES_COLUMNS, np.full(3, np.nan))
    columns |= {"num_running": np.full(3, 39.0), "num_waiting": np.zeros(3), "num_swapped": np.full(3, 129.0)}
    series = ServerSeries(time_ns=np.arange(3) * 10 * S, **columns)
    explained = explain(replace(steady(), series=series))
    assert kinds(explained) == ["swapped"]
    assert explained.findings[0].evidence["num_swapped_peak"] == 129


def test_what_could_not_be_checked_is_said() -> None:
    missing = explain(bench(num_prompts=500, duration=10.0, request_throughput=50.0)).not_checked
    assert any("single requests" in text for text in missing)
    assert any("gauges" in text for text in missing)
    assert not any("max_num_seqs" in text for text in explain(steady(), Facts(max_num_seqs=8)).not_checked)


def test_an_empty_result_is_no_crash() -> None:
    assert explain(ObservedRun("test", "empty", observed_requests(0))).verdict == "no fault found"


def test_measures_are_said_with_their_units() -> None:
    assert describe("ttft_s", 0.05) == "50 ms"
    assert describe("finished_requests_per_s", 2.5) == "2.5"
    assert describe("kv_usage_peak", 0.5) == "50 %"


def test_a_log_over_midnight_and_of_two_engines_keeps_its_order() -> None:
    text = "".join(
        f"INFO 05-07 {clock} [loggers.py:111] Engine 00{engine}: Avg prompt throughput: 1.0 tokens/s, Avg generation "
        f"throughput: 1.0 tokens/s, Running: {10 + engine} reqs, Waiting: 1 reqs, GPU KV cache usage: 5{engine}.0%\n"
        for clock in ("23:59:50", "00:00:00", "00:00:10")
        for engine in (0, 1)
    )
    series = add_server_log(steady(), text, name="log").series
    assert series is not None
    assert series.time_ns.tolist() == [0, 10 * S, 20 * S]
    assert series.num_running.tolist() == [21, 21, 21]
    assert series.kv_usage.tolist() == [0.51, 0.51, 0.51]


# --- the command


def detailed(path: Path) -> Path:
    """A detailed result of vllm bench serve in which half of the answers failed."""
    number = 200
    result = {
        "request_rate": 10.0,
        "duration": 21.0,
        "num_prompts": number,
        "completed": number // 2,
        "request_throughput": number / 2 / 21.0,
        "output_throughput": number / 2 * 50 / 21.0,
        "input_lens": [300] * number,
        "output_lens": [50, 0] * (number // 2),
        "ttfts": [0.05, 0.0] * (number // 2),
        "itls": [[0.02] * 49, []] * (number // 2),
        "latencies": [1.03, 0.0] * (number // 2),
        "start_times": [1000 + i * 0.1 for i in range(number)],
        "errors": ["", "Connection refused"] * (number // 2),
    }
    path.write_text(json.dumps(result))
    return path


def test_the_command_prints_numbered_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = detailed(tmp_path / "bench.json")
    assert main(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "1. [invalid] 50 % of the requests failed" in text
    assert "Connection refused" in text
    assert "-> find the errors' cause" in text
    assert max(len(line) for line in text.splitlines()[1:]) <= 100


def test_the_command_as_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = detailed(tmp_path / "bench.json")
    assert main(["explain", str(path), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert [finding["kind"] for finding in result["findings"]] == kinds(explain(read_result(path)))
    assert main(["explain", str(path), "--markdown"]) == 0
    assert "1. **50 % of the requests failed** (invalid)." in capsys.readouterr().out


@pytest.mark.parametrize(("least", "code"), [("invalid", 99), ("weak", 99)])
def test_fail_on_gives_exit_code_99(tmp_path: Path, least: str, code: int) -> None:
    path = detailed(tmp_path / "bench.json")
    assert main(["explain", str(path), "--fail-on", least]) == code
    healthy_file = tmp_path / "run.jsonl"
    save_observed(steady(), healthy_file)
    assert main(["explain", str(healthy_file), "--fail-on", least]) == 0


def test_the_command_reads_a_simulated_run_and_its_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = simulate(
        workload={"num_requests": 200, "arrival": "at_once", "input": 400, "output": 100, "max_concurrency": 24},
        cost={"kind": "constant", "step_s": "10ms"},
        max_num_seqs=8,
        max_model_len=2048,
        num_gpu_blocks_override=4096,
    )
    run.save(tmp_path / "run")
    assert main(["explain", str(tmp_path / "run")]) == 0
    assert "1. [limit] max_num_seqs binds: 8 run, the others wait" in capsys.readouterr().out


def test_the_command_takes_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_observed(bench_run(), tmp_path / "run.jsonl")
    (tmp_path / "vllm.log").write_text(
        "".join(PERIODIC.format(minute=i, running=32, waiting=500, usage=20.0) for i in range(4))
    )
    arguments = ["explain", str(tmp_path / "run.jsonl"), "--log", str(tmp_path / "vllm.log")]
    assert main(arguments) == 0
    assert "max_num_seqs binds: 32 run" in capsys.readouterr().out
    (tmp_path / "vllm.log").write_text("nothing of vLLM\n")
    assert main(arguments) == 3
    assert "no line of vLLM" in capsys.readouterr().err


def bench_run() -> ObservedRun:
    return steady(number=300)


def test_an_unreadable_result_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main(["explain", str(tmp_path / "x.json")]) == 3
    assert "not a result" in capsys.readouterr().err
    assert main(["explain", str(tmp_path)]) == 3


# --- one look at the server's counters, pools that are only told, first requests that were slow


def unseen(run: ObservedRun) -> ObservedRun:
    """As the client alone sees it."""
    cached = np.full(len(run.requests), -1)
    bare = replace(run, server=ServerFacts(), counts=ServerCounts(), series=None)
    return with_columns(bare, num_cached_tokens=cached)


def test_a_known_pool_is_enough_to_find_that_it_binds() -> None:
    case = kv_pool(2)
    server = case.run.server
    assert server.num_gpu_blocks is not None
    assert server.block_size is not None
    pool = (server.num_gpu_blocks - 1) * server.block_size
    run = unseen(case.run)
    assert "kv_pool" not in kinds(explain(run))
    found = explain(run, Facts(kv_cache_tokens=pool, shared_prefix_share=0.0))
    finding = next(each for each in found.findings if each.kind == "kv_pool")
    assert f"The pool of {pool:,} tokens is too small" in finding.sentence
    assert finding.evidence["peak_demand_tokens"] >= 0.9 * pool
    assert "kv_pool" not in kinds(explain(run, Facts(kv_cache_tokens=20 * pool, shared_prefix_share=0.0)))


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_that_is_large_enough_is_no_finding(seed: int) -> None:
    case = healthy(seed)
    flying = explain(case.run).measures["in_flight_peak"]
    most = int(flying * (case.run.requests.num_prompt_tokens + case.run.requests.num_output_tokens).max() * 1.2)
    assert explain(unseen(case.run), Facts(kv_cache_tokens=most)).findings == ()


METRICS = """# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{model_name="m",engine="0"} %d
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{model_name="m",engine="0"} 1000
vllm:prefix_cache_hits_total{model_name="m",engine="0"} 250
"""


def test_a_counter_since_the_start_bounds_the_preemptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, metrics = tmp_path / "run.json", tmp_path / "metrics.txt"
    save_observed(unseen(healthy_open(2).run), saved)
    number = len(healthy_open(2).run.requests)
    for counted, said in ((number, "preemptions since it started"), (0, "no request since it started")):
        metrics.write_text(METRICS % counted)
        assert main(["explain", str(saved), "--metrics", str(metrics)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert said in out
        assert "Since the server started 25 % of the prompt tokens came from the prefix cache" in out
        assert ("[weak] the KV pool may bind" in out) == (counted > 0)
        assert "the server's gauges over time (one look at /metrics has none;" in out
        assert "(--metrics, --log)" not in out


def test_a_counter_that_may_be_of_earlier_runs_is_no_limit() -> None:
    run = unseen(healthy_open(2).run)
    found = explain(run, Facts(counted_since_start={"num_preemptions": 500}))
    assert [(each.kind, each.severity) for each in found.findings] == [("kv_pool", Severity.WEAK)]
    large = Facts(counted_since_start={"num_preemptions": 500}, kv_cache_tokens=10**9)
    assert explain(run, large).findings == ()


def test_an_answer_in_one_piece_is_no_matter_of_units() -> None:
    run = unseen(healthy_open(2).run)
    table = run.requests
    whole = replace(
        run,
        requests=replace(
            table,
            ttft_ns=table.e2el_ns - 1000,
            chunk_ns=np.zeros(0, np.int64),
            chunk_tokens=np.zeros(0, np.int64),
            chunk_offsets=np.zeros(len(table) + 1, np.int64),
        ),
        stated={"mean_itl_ms": 12.0},
    )
    assert kinds(explain(whole)) == ["not_streamed"]


def test_a_first_request_that_alone_was_slow_is_remarked() -> None:
    run = unseen(healthy_open(2).run)
    assert "cold start" not in " ".join(explain(run).remarks)
    first = int(np.argmin(run.requests.send_ns))
    slow = np.zeros(len(run.requests), np.int64)
    slow[first] = 6 * S
    table = run.requests
    moved = np.repeat(slow, np.diff(table.chunk_offsets))
    later = with_columns(
        run, ttft_ns=table.ttft_ns + slow, e2el_ns=table.e2el_ns + slow, chunk_ns=table.chunk_ns + moved
    )
    explained = explain(later)
    assert any("a cold start, which raises mean TTFT by" in each for each in explained.remarks) or kinds(explained) == [
        "cold_start"
    ]
    assert kinds(explained) in ([], ["cold_start"])

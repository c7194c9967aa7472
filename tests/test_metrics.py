"""Metrics: the definitions of ``vllm bench serve``, weighted statistics, objectives, and the stability verdict."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from built_records import (
    MS,
    UNFINISHED,
    AffineStepCost,
    S,
    columns,
    pressed_engine,
    queue_at,
    single_server,
    token_records,
    with_requests,
    workload_of,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.deployment.memory import InfeasibleDeployment
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.metrics import GoodputLimits, Slo, SloSyntaxError, Summary, Verdict, parse_slos, summarize
from windtunnel.sim.metrics.latency import (
    expanded_inter_token_latencies,
    inter_token_latencies,
    max_concurrent_requests,
    peak_in_flight,
    peak_tokens_per_second,
    request_latencies,
)
from windtunnel.sim.metrics.load import in_flight, level_over_time
from windtunnel.sim.metrics.sample import sample, weighted_sample
from windtunnel.sim.metrics.stability import judge
from windtunnel.sim.records import (
    DraftTable,
    Outcome,
    PreemptionTable,
    Records,
    ReplicaRecords,
    RequestTable,
    SpanTable,
    StepTable,
    empty_table,
)
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import Workload, workload

PERCENTS = (0, 1, 25, 50, 90, 99, 99.9, 100)


# --- weighted statistics equal numpy's on the expanded list


@given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 7)), max_size=40))
def test_weighted_statistics_equal_those_of_the_expanded_list(pairs: list[tuple[int, int]]) -> None:
    values = np.array([value for value, _ in pairs], np.int64)
    weights = np.array([weight for _, weight in pairs], np.int64)
    expanded = np.repeat(values, weights)
    weighted = weighted_sample(values, weights)
    assert weighted.count == len(expanded)
    if not len(expanded):
        assert (weighted.mean(), weighted.median(), weighted.std(), weighted.percentile(9)) == (None,) * 4
        return
    assert weighted.mean() == expanded.mean()
    assert weighted.median() == np.median(expanded)
    assert weighted.std() == pytest.approx(expanded.std(), rel=1e-12, abs=1e-6)
    assert [weighted.percentile(percent) for percent in PERCENTS] == np.percentile(expanded, PERCENTS).tolist()


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=60), st.floats(0, 100))
def test_unweighted_statistics_equal_numpys(values: list[float], percent: float) -> None:
    assert sample(values).percentile(percent) == np.percentile(values, percent)
    assert sample(values).median() == np.median(values)
    assert sample(values).mean() == pytest.approx(np.mean(values), rel=1e-12)


def test_a_percentile_outside_0_to_100_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 100, got 101"):
        sample([1]).percentile(101)


def test_huge_sums_do_not_overflow() -> None:
    weighted = weighted_sample(np.array([10**12, 2 * 10**12]), np.array([10**10, 10**10]))
    assert weighted.mean() == pytest.approx(1.5e12)


# --- gaps between tokens


@given(st.data())
def test_pooled_token_gaps_equal_those_of_expanded_tokens(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    records = run(data.draw(workloads(config)), config, AffineStepCost(3e-3, 1.7e-5), horizon_ns=20 * S)
    gaps = [gap for gaps in naive_gaps(records) for gap in gaps]
    pooled = inter_token_latencies(records)
    assert np.repeat(pooled.values, pooled.weights).tolist() == sorted(gaps)


@given(st.data())
def test_a_request_gets_a_token_for_every_gap_and_one_more(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    records = run(data.draw(workloads(config)), config, AffineStepCost(3e-3), horizon_ns=20 * S)
    listed = expanded_inter_token_latencies(records)
    latencies = request_latencies(records)
    for row, ttft, e2el in zip(latencies.rows, latencies.ttft_ns, latencies.e2el_ns, strict=True):
        assert len(listed[row]) == records.requests.num_output_tokens[row] - 1
        assert ttft / S + sum(listed[row]) == pytest.approx(e2el / S)


def naive_gaps(records: Records) -> list[list[int]]:
    """Gaps of each finished request, from its tokens one by one."""
    times: dict[int, list[int]] = {}
    for replica in records.replicas:
        for request, first, count in zip(
            replica.spans.request, replica.spans.first_step, replica.spans.count, strict=True
        ):
            times.setdefault(int(request), []).extend(replica.steps.end_ns[first : first + count].tolist())
    done = records.requests.request[records.requests.outcome == Outcome.FINISHED]
    return [np.diff(sorted(times[int(request)])).tolist() for request in done]


def test_a_stall_between_two_spans_is_one_gap() -> None:
    records = token_records((0, [0, 1, 5]))
    assert inter_token_latencies(records).values.tolist() == [10 * MS, 40 * MS]


def test_token_gaps_of_unfinished_requests_do_not_count() -> None:
    records = token_records((0, [0, 1, 2]), (0, [3, 5]))
    cut = with_requests(records, outcome=np.array([Outcome.FINISHED, UNFINISHED]))
    assert inter_token_latencies(cut).values.tolist() == [10 * MS, 10 * MS]


# --- vllm bench serve


def records_of_bench_result(result: dict) -> Records:
    """Records with the times of a detailed result: every token is a step of its own."""
    starts = np.array(result["start_times"])
    starts = np.rint((starts - starts.min()) * 1e9).astype(np.int64)
    times = [
        start + np.rint(np.cumsum([ttft, *itls]) * 1e9).astype(np.int64)
        for start, ttft, itls in zip(starts, result["ttfts"], result["itls"], strict=True)
    ]
    ends = np.unique(np.concatenate(times))
    spans = [(row, int(step), 1) for row, of in enumerate(times) for step in np.searchsorted(ends, of)]
    table = RequestTable(
        **columns(
            len(times),
            due_ns=starts,
            arrival_ns=starts,
            scheduled_ns=starts,
            first_token_ns=[of[0] for of in times],
            finish_ns=[of[-1] for of in times],
            num_prompt_tokens=result["input_lens"],
            num_output_tokens=result["output_lens"],
        )
    )
    state = {name: np.zeros(len(ends), np.int64) for name in StepTable.__dataclass_fields__}
    state |= {"start_ns": np.concatenate(([0], ends[:-1])), "end_ns": ends}
    replica = ReplicaRecords(
        StepTable(**state),
        SpanTable(*np.array(spans, np.int64).T),
        empty_table(PreemptionTable),
        empty_table(DraftTable),
        100,
        16,
        8,
        64,
    )
    return Records(table, (replica,), int(ends[-1]))


def test_a_real_result_of_vllm_is_recomputed_from_its_lists(shared: Path) -> None:
    result = json.loads((shared / "live_vllm_cpu" / "formats" / "vllm_bench_serve_0.32.json").read_text())
    records = records_of_bench_result(result)
    ours = summarize(records, workload_of(records)).to_dict(detailed=records)
    exact = ("num_prompts", "completed", "failed", "total_input_tokens", "total_output_tokens")
    for key in (*exact, "max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "max_concurrency"):
        assert ours[key] == result[key], key
    latencies = [key for key in result if key.endswith("_ms")]
    assert len(latencies) == 4 * 7
    for key in latencies:
        assert ours[key] == pytest.approx(result[key], rel=1e-6), key
    # vLLM's clock also runs before the first sending and after the last token
    assert ours["duration"] == pytest.approx(result["duration"], rel=0.002)
    scale = result["duration"] / ours["duration"]
    for key in ("request_throughput", "output_throughput", "total_token_throughput"):
        assert ours[key] == pytest.approx(result[key] * scale, rel=1e-9), key
    for key in ("input_lens", "output_lens", "errors"):
        assert ours[key] == result[key], key
    for key in ("ttfts", "latencies"):
        assert ours[key] == pytest.approx(result[key], abs=1e-6), key
    assert [len(gaps) for gaps in ours["itls"]] == [len(gaps) for gaps in result["itls"]]


def test_the_result_has_every_key_of_vllm_in_its_order(shared: Path) -> None:
    result = json.loads((shared / "live_vllm_cpu" / "formats" / "vllm_bench_serve_0.32.json").read_text())
    records = records_of_bench_result(result)
    ours = summarize(records, workload_of(records)).to_dict(detailed=records)
    assert [key for key in ours if key in result] == list(result)


def test_the_result_is_plain_json_without_nan() -> None:
    for records, load in (
        queue_at(0.5, 40, 1),
        (replace(token_records((0, [0])), replicas=()), workload([0], [1], [1])),
    ):
        written = json.dumps(summarize(records, load, goodput="ttft:5").to_dict(detailed=records), allow_nan=False)
        assert json.loads(written)["date"] is None


def test_one_output_token_has_no_tpot_and_counts_as_zero_for_goodput() -> None:
    records = token_records((0, [0]), (0, [1, 3]))
    summary = summarize(records, workload_of(records), goodput="tpot:10")
    assert (summary.tpot.count, summary.tpot.mean_ms) == (1, 20.0)
    assert summary.goodput is not None
    assert summary.goodput.num_good_requests == 1


def test_goodput_counts_requests_within_all_limits_per_second_of_the_run() -> None:
    records = token_records((0, [0, 1]), (0, [1, 2]), (0, [9, 10, 11]))
    summary = summarize(records, workload_of(records), goodput="ttft:20 e2el:30")
    assert summary.goodput is not None
    assert summary.goodput.num_good_requests == 2
    assert summary.goodput.request_goodput == pytest.approx(2 / 0.12)
    assert summary.goodput.good_share == pytest.approx(2 / 3)


def test_buckets_of_one_second_are_counted_from_the_first_sending() -> None:
    # sent at 0.5 s; tokens at 1.4 s (bucket 0) and at 1.5, 1.6 … s (bucket 1)
    records = token_records((S // 2, list(range(13, 26))), step_ns=S // 10)
    assert peak_tokens_per_second(records) == 10


@given(st.lists(st.tuples(st.integers(0, 5 * S), st.integers(1, 3 * S)), min_size=1, max_size=30))
def test_concurrency_is_what_a_loop_over_the_requests_counts(lives: list[tuple[int, int]]) -> None:
    lives.sort()
    sent = np.array([start for start, _ in lives])
    done = sent + np.array([length for _, length in lives])
    records = with_requests(single_server(sent, done - sent)[0], finish_ns=done)
    buckets: Counter[int] = Counter()
    for start, end in zip(sent, done, strict=True):
        buckets.update(range((start - sent.min()) // S, (end - sent.min()) // S + 1))
    assert max_concurrent_requests(records) == max(buckets.values())
    at_once = max(sum(start <= instant < end for start, end in zip(sent, done, strict=True)) for instant in sent)
    assert peak_in_flight(sent, done) == at_once <= max_concurrent_requests(records)


def test_a_request_that_ends_as_another_begins_is_not_in_flight_with_it() -> None:
    assert peak_in_flight(np.array([0, 10, 20]), np.array([10, 20, 30])) == 1


def test_a_request_that_ends_on_a_full_second_counts_in_the_next_bucket_as_vllm_has_it() -> None:
    # vLLM 0.32 counts int(start) to int(end), both included
    records = token_records((0, [9]), (S + S // 2, [19]), step_ns=S // 10)
    assert max_concurrent_requests(records) == 2


def test_duration_runs_from_the_first_sending_to_the_last_finish() -> None:
    records = token_records((30 * MS, [5]), (40 * MS, [7, 8]))
    assert summarize(records, workload_of(records)).duration_s == pytest.approx(0.06)


def test_a_percentile_of_too_few_requests_is_pointed_out() -> None:
    few, enough = (summarize(*queue_at(0.3, num, 1)).warnings for num in (60, 200))
    assert any("P99 over 60 requests" in warning and "at least 100 requests" in warning for warning in few)
    assert enough == ()


def test_failed_requests_are_named_and_left_out_of_latencies() -> None:
    records = token_records((0, [0, 1]), (0, [2, 3]), (0, [5]))
    outcomes = np.array([Outcome.FINISHED, Outcome.REJECTED, Outcome.ABORTED])
    summary = summarize(with_requests(records, outcome=outcomes), workload_of(records))
    assert (summary.completed, summary.failed, summary.rejected, summary.aborted) == (1, 2, 1, 1)
    assert summary.total_output_tokens == 2
    assert summary.e2el.count == 1
    assert any("2 of 3 requests did not finish (1 rejected, 1 aborted, 0 unfinished)" in w for w in summary.warnings)
    detail = summary.to_dict(detailed=with_requests(records, outcome=outcomes))
    assert detail["errors"] == ["", "rejected", "aborted"]
    assert detail["output_lens"] == [2, 0, 0]


def test_an_empty_run_has_no_numbers_rather_than_zeros() -> None:
    records = with_requests(token_records((0, [0])), outcome=np.array([UNFINISHED]))
    summary = summarize(records, workload_of(records), slo="ttft:p99<1s")
    assert summary.ttft.mean_ms is None
    assert (summary.slo[0].measured, summary.slo_passed) == (None, False)


# --- load, KV cache, preemption


def test_in_flight_by_littles_law_equals_the_time_average() -> None:
    records, load = queue_at(0.8, 500, 3)
    stats = summarize(records, load).load
    assert stats.in_flight_mean == pytest.approx(stats.in_flight_by_littles_law)
    times, level = level_over_time(*in_flight(records))
    assert stats.in_flight_mean == pytest.approx(np.dot(level[:-1], np.diff(times)) / (times[-1] - times[0]))


def test_the_busy_share_of_a_stable_queue_is_its_utilisation() -> None:
    records, load = queue_at(0.6, 20_000, 5)
    summary = summarize(records, load, saturation_request_throughput=100.0)
    assert summary.load.busy_share == pytest.approx(0.6, abs=0.02)
    assert summary.load.utilisation == pytest.approx(0.6, abs=0.02)


def test_there_is_no_utilisation_without_a_saturation_throughput_and_the_summary_says_why() -> None:
    load = summarize(*queue_at(0.6, 50, 5)).load
    assert load.utilisation is None
    assert "saturation throughput is not known" in load.utilisation_note


def test_kv_usage_counts_idle_time_as_empty_and_cached_blocks_apart() -> None:
    state = {name: np.zeros(2, np.int64) for name in StepTable.__dataclass_fields__}
    state |= {"start_ns": np.array([0, 10 * MS]), "end_ns": np.array([5 * MS, 20 * MS])}
    state |= {"num_free_blocks": np.array([80, 40]), "num_cached_blocks": np.array([0, 20])}
    steps = StepTable(**state)
    records = token_records((0, [0]))
    replica = replace(records.replicas[0], steps=steps)
    done = replace(with_requests(records, finish_ns=np.array([20 * MS])), replicas=(replica,), end_ns=20 * MS)
    kv = summarize(done, workload_of(done)).kv
    assert kv.usage_mean == pytest.approx((5 * 0.2 + 10 * 0.6) / 20)
    assert kv.usage_mean_busy == pytest.approx((5 * 0.2 + 10 * 0.6) / 15)
    assert kv.usage_peak == pytest.approx(0.6)
    assert kv.cached_usage_peak == pytest.approx(0.8)


def test_preemptions_are_summed_and_recomputed_tokens_are_a_share_of_all_prefill() -> None:
    load, config = pressed_engine()
    records = run(load, config, AffineStepCost())
    stats = summarize(records, load).preemption
    assert stats.num_preemptions == len(records.replicas[0].preemptions) > 0
    assert stats.num_preempted_requests == len(np.unique(records.replicas[0].preemptions.request))
    prefilled = int(records.replicas[0].steps.prefill_tokens.sum())
    assert stats.recomputed_share == pytest.approx(stats.recomputed_prefill_tokens / prefilled)
    assert prefilled >= int(load.num_prompt_tokens.sum())


def test_the_prefix_hit_rate_is_given_with_and_without_resumed_requests() -> None:
    records = token_records((0, [0, 1]), (0, [2, 3]))
    hit = with_requests(
        records,
        num_prompt_tokens=np.array([100, 100]),
        num_cached_tokens=np.array([0, 80]),
        num_resumed_cached_tokens=np.array([0, 96]),
        num_resumed_query_tokens=np.array([0, 100]),
    )
    cache = summarize(hit, workload_of(hit)).prefix_cache
    assert (cache.hit_rate, cache.hit_rate_with_resumed) == (0.4, pytest.approx(176 / 300))


def test_without_prefix_caching_there_is_no_hit_rate() -> None:
    assert summarize(*queue_at(0.5, 40, 1)).prefix_cache.hit_rate is None


# --- objectives


@pytest.mark.parametrize(
    ("text", "metric", "statistic", "comparison", "limit", "unit"),
    [
        ("ttft:p99<500ms", "ttft", "p99", "<", 500, "ms"),
        ("ttft:p(95)<500", "ttft", "p95", "<", 500, "ms"),
        ("e2el:mean<=2s", "e2el", "mean", "<=", 2000, "ms"),
        ("itl:p99.9<50ms", "itl", "p99.9", "<", 50, "ms"),
        ("queue_time:max < 1.5 min", "queue_time", "max", "<", 90_000, "ms"),
        ("goodput>=99%", "goodput", None, ">=", 99, "%"),
        ("goodput>4.5/s", "goodput", None, ">", 4.5, "/s"),
        ("preemptions==0", "preemptions", None, "==", 0, ""),
        ("failed<1%", "failed", None, "<", 1, "%"),
        ("kv_usage:peak<95%", "kv_usage", "peak", "<", 95, "%"),
        ("output_throughput>3000", "output_throughput", None, ">", 3000, "/s"),
    ],
)
def test_an_objective_is_read(
    text: str, metric: str, statistic: str | None, comparison: str, limit: float, unit: str
) -> None:
    assert Slo.parse(text) == Slo(text, metric, statistic, comparison, limit, unit)


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("ttfb:p99<500ms", 0, "unknown metric 'ttfb', did you mean 'ttft'"),
        ("ttft<500ms", 4, "ttft needs a statistic, for example ttft:p99"),
        ("ttft:p101<500ms", 5, "a percentile must be from 0 to 100"),
        ("ttft:p9x<500ms", 5, "unknown statistic 'p9x'"),
        ("ttft:p99 500ms", 9, "expected one of <= >="),
        ("ttft:p99<fast", 9, "expected a number"),
        ("ttft:p99<500msec", 12, "unit 'msec' does not fit ttft, which takes us, ms, s or min"),
        ("preemptions:p99==0", 11, "preemptions is one number"),
        ("goodput>=99", 11, "which takes % or /s"),
        ("kv_usage:p99<5%", 9, "unknown statistic 'p99' of kv_usage"),
        ("", 0, "it is empty"),
    ],
)
def test_a_bad_objective_shows_the_place_and_what_is_allowed(text: str, place: int, problem: str) -> None:
    with pytest.raises(SloSyntaxError, match="An objective is METRIC") as caught:
        Slo.parse(text) if " " in text else parse_slos(text)
    assert problem in str(caught.value)
    assert caught.value.position == place
    lines = str(caught.value).splitlines()
    assert lines[1:3] == [f"  {text}", f"  {' ' * place}^"]


def test_objectives_may_be_separated_by_commas_or_spaces_and_hold_spaces_around_operators() -> None:
    together = parse_slos("ttft:p99 < 500ms, itl:p95<50ms  preemptions == 0")
    assert [slo.text for slo in together] == ["ttft:p99<500ms", "itl:p95<50ms", "preemptions==0"]


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("ttft:500 itl:50", 9, "unknown goodput metric 'itl'"),
        ("ttft:fast", 5, "ttft needs :MILLISECONDS"),
        ("ttft", 4, "ttft needs :MILLISECONDS"),
        ("ttft:5 ttft:6", 7, "ttft is given twice"),
        ("", 0, "no goodput limit is given"),
    ],
)
def test_bad_goodput_limits_show_the_place(text: str, place: int, problem: str) -> None:
    with pytest.raises(SloSyntaxError) as caught:
        GoodputLimits.parse(text)
    assert (caught.value.position, problem in str(caught.value)) == (place, True)


def test_goodput_limits_are_read_as_vllm_writes_them() -> None:
    assert GoodputLimits.parse("ttft:500 tpot:50 e2el:2000") == GoodputLimits(500, 50, 2000)
    assert GoodputLimits.parse(["ttft:500", "e2el:2000.5"]) == GoodputLimits(500, None, 2000.5)


def test_an_objective_is_checked_against_the_exact_percentile() -> None:
    records = token_records(*((0, [step]) for step in range(100)))
    summary = summarize(records, workload_of(records), slo="ttft:p99.5<994.9ms ttft:p99.5<995.1ms", percentiles=(50,))
    expected = float(np.percentile(np.arange(1, 101) * 10.0, 99.5))
    assert [result.measured for result in summary.slo] == pytest.approx([expected, expected])
    assert [result.passed for result in summary.slo] == [False, True]


def test_objectives_on_counts_shares_and_rates_are_measured_in_their_unit() -> None:
    load, config = pressed_engine()
    text = "preemptions==0 failed<=0% goodput>=0% output_throughput>1 kv_usage:peak>90% goodput>0/s busy_share<=100%"
    results = summarize(run(load, config, AffineStepCost()), load, slo=text, goodput="ttft:1000").slo
    assert [result.passed for result in results] == [False, True, True, True, True, True, True]
    by_text = {result.slo.text: result.measured for result in results}
    assert by_text["preemptions==0"] > 0
    assert by_text["failed<=0%"] == 0
    assert 90 < by_text["kv_usage:peak>90%"] <= 100


def test_a_goodput_objective_without_limits_is_refused() -> None:
    with pytest.raises(ValueError, match="needs goodput limits: add for example --goodput"):
        summarize(*queue_at(0.5, 40, 1), slo="goodput>=99%")


# --- stability


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("rho", "allowed"),
    [
        (0.3, {Verdict.STABLE}),
        (0.5, {Verdict.STABLE}),
        (0.7, {Verdict.STABLE, Verdict.BACKLOGGED}),
        (0.9, {Verdict.STABLE, Verdict.BACKLOGGED}),
        (1.1, {Verdict.OVERLOADED}),
        (1.3, {Verdict.OVERLOADED}),
    ],
)
def test_the_verdict_follows_the_utilisation_of_a_queue(rho: float, allowed: set[Verdict], seed: int) -> None:
    assert judge(*queue_at(rho, 3000, seed)).verdict in allowed


def test_a_queue_at_capacity_is_seldom_called_overloaded() -> None:
    verdicts = Counter(judge(*queue_at(1.0, 1000, seed)).verdict for seed in range(60))
    assert verdicts[Verdict.OVERLOADED] <= 0.15 * 60


@pytest.mark.parametrize("rho", [1.1, 1.2])
def test_even_a_short_run_beyond_a_known_capacity_is_not_called_stable(rho: float) -> None:
    for seed in range(20):
        assert judge(*queue_at(rho, 200, seed), saturation_request_throughput=100).verdict is not Verdict.STABLE


def test_a_batch_that_hides_a_small_excess_is_too_short_to_tell() -> None:
    # nobody waits and all take the same time, but a tenth more is said to come than can be served
    n = 80
    arrival = np.arange(n) * 50 * MS
    records = with_requests(single_server(arrival, np.full(n, MS))[0], finish_ns=arrival + S)
    records = replace(records, end_ns=int(arrival[-1]) + S)
    assert judge(records, workload_of(records)).verdict is Verdict.STABLE
    assert judge(records, workload_of(records), saturation_request_throughput=25).verdict is Verdict.STABLE
    unsure = judge(records, workload_of(records), saturation_request_throughput=18.8)
    assert unsure.verdict is Verdict.TOO_SHORT
    assert "18.80/s can be served at saturation" in unsure.reason
    # with ten times the excess it would have shown: then what was seen counts, not what was computed
    assert judge(records, workload_of(records), saturation_request_throughput=5).verdict is Verdict.STABLE


def test_a_system_that_still_fills_up_is_too_short_to_tell_and_not_overloaded() -> None:
    # nobody waits, but every request lives longer than the one before: a batch that grows and slows down
    n = 2000
    arrival = np.arange(n) * 50 * MS
    records = with_requests(
        single_server(arrival, np.full(n, MS))[0], finish_ns=arrival + 5 * S + np.arange(n) * 20 * MS
    )
    stability = judge(replace(records, end_ns=int(records.requests.finish_ns.max())), workload_of(records))
    assert (stability.verdict, stability.queue_share) == (Verdict.TOO_SHORT, 0)
    assert "hardly any request waited" in stability.reason
    assert "still filling up" in stability.reason


@pytest.mark.parametrize("num_requests", [500, 2000, 4000])
@pytest.mark.parametrize("seed", range(3))
def test_an_engine_with_seats_and_blocks_for_all_is_never_overloaded(seed: int, num_requests: int) -> None:
    # 92 % of the engine's capacity: its batch takes minutes to reach its size, and nothing ever waits
    config = SchedulerConfig(
        max_num_seqs=1000,
        max_num_batched_tokens=2000,
        max_model_len=1024,
        num_gpu_blocks=40_000,
        enable_prefix_caching=False,
    )
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(S / 9, num_requests)).astype(np.int64)
    load = workload(arrival, [16] * num_requests, rng.geometric(1 / 256, num_requests).clip(1, 900))
    stability = judge(run(load, config, AffineStepCost(0.010, 0.0004)), load)
    assert stability.queue_share < 0.01
    assert stability.verdict in (Verdict.STABLE, Verdict.TOO_SHORT)
    if num_requests == 2000 and seed == 0:
        assert (stability.verdict, "still filling up" in stability.reason) == (Verdict.TOO_SHORT, True)


def queue_with_rates(*parts: tuple[float, int], seed: int = 1) -> tuple[Records, Workload]:
    """One server of 100 requests/s to which so many requests come at each of the rates, one after the other."""
    rng = np.random.default_rng(seed)
    gaps = np.concatenate([rng.exponential(S / rate, number) for rate, number in parts])
    return single_server(np.cumsum(gaps).astype(np.int64), np.full(len(gaps), 10 * MS))


@pytest.mark.parametrize("seed", range(5))
def test_a_peak_that_is_worked_off_while_requests_still_come_is_a_backlog_and_named(seed: int) -> None:
    # 10 s of calm, 20 s with half as much again as can be served, then 50 s in which the queue shrinks
    records, load = queue_with_rates((80, 800), (150, 3000), (60, 1500), seed=seed)
    stability = judge(records, load)
    assert stability.verdict is Verdict.BACKLOGGED
    assert stability.queue_peak == pytest.approx(1000, rel=0.2)
    assert stability.queue_peak_s == pytest.approx(30, abs=2)
    assert stability.queue_at_last_arrival < stability.queue_peak / 2
    told = re.fullmatch(
        r"more came at the peak than could be served: from ([\d.]+) s to ([\d.]+) s after the first request "
        r"([\d.]+) requests/s were due and the queue grew to ([\d,]+); (.*)",
        stability.reason,
    )
    assert told is not None
    assert float(told[1]) == pytest.approx(11, abs=2)
    assert float(told[2]) == pytest.approx(stability.queue_peak_s, abs=0.05)
    assert float(told[3]) == pytest.approx(150, rel=0.1)
    assert told[4] == f"{stability.queue_peak:,}"
    left = stability.queue_at_last_arrival
    gone = left <= 0.1 * stability.queue_peak
    assert told[5] == ("it was worked off" if gone else f"{left:,} were left") + (
        " before the last request came" if gone else " when the last request came"
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_peak_from_which_the_queue_has_hardly_fallen_is_an_overload(seed: int) -> None:
    stability = judge(*queue_with_rates((80, 800), (150, 3000), (95, 500), seed=seed))
    assert stability.verdict is Verdict.OVERLOADED
    assert f"the queue grew to {stability.queue_at_last_arrival:,} requests" in stability.reason


@pytest.mark.slow
def test_the_azure_conversations_four_times_as_fast_are_overloaded_at_their_peak_only(shared: Path) -> None:
    from windtunnel.api import simulate

    def verdict_of(**part: str) -> str:
        trace = shared / "traces" / "AzureLLMInferenceTrace_conv.csv"
        run = simulate(
            trace=str(trace), model="llama-3.1-8b", gpu="h100", rate_scale=4, cost={"kind": "roofline"}, **part
        )
        return run.statistics.stability.verdict.value

    assert verdict_of() == "backlogged"
    assert verdict_of(duration="20m") == "overloaded"  # only the way up to the peak
    assert verdict_of(start="40m", duration="19m") == "stable"


def test_a_rising_rate_that_is_served_in_the_same_time_is_no_overload() -> None:
    rate_per_s = np.linspace(100, 2000, 20_000)
    arrival = np.cumsum(S / rate_per_s).astype(np.int64)
    records = with_requests(single_server(arrival, np.full(len(arrival), 1000))[0], finish_ns=arrival + S)
    assert judge(replace(records, end_ns=int(arrival[-1]) + S), workload_of(records)).verdict is Verdict.STABLE


def test_a_swinging_level_is_no_growth_even_if_its_middle_rises() -> None:
    # the base rises from 100 to 200 requests, and every other bucket a part of the requests stays much longer
    time_s = np.arange(20_000) / 100
    is_long = ((time_s // 10) % 2 == 1) & (np.arange(20_000) % 5 < 2)
    lives_s = 1 + time_s / 200 + np.where(is_long, 5, 0)
    arrival = (time_s * S).astype(np.int64)
    gone = arrival + (lives_s * S).astype(np.int64)
    records = with_requests(single_server(arrival, np.full(20_000, 1000))[0], finish_ns=gone)
    stability = judge(replace(records, end_ns=int(gone.max())), workload_of(records))
    assert stability.backlog_growth is not None
    assert stability.backlog_growth > 70
    assert stability.verdict is Verdict.STABLE


def test_a_burst_in_the_middle_that_is_worked_off_is_no_overload() -> None:
    calm, burst = np.arange(1000) * 40 * MS, 15 * S + np.arange(400) * MS
    arrival = np.sort(np.concatenate((calm, burst)))
    assert judge(*single_server(arrival, np.full(len(arrival), 10 * MS))).verdict is not Verdict.OVERLOADED


def test_a_run_cut_by_a_horizon_is_judged_by_what_it_saw() -> None:
    records, load = queue_at(1.5, 3000, 2)
    horizon = int(records.requests.due_ns[2000])
    late = records.requests.finish_ns > horizon
    cut = with_requests(
        records,
        outcome=np.where(late, UNFINISHED, Outcome.FINISHED),
        finish_ns=np.where(late, -1, records.requests.finish_ns),
        first_token_ns=np.where(late, -1, records.requests.first_token_ns),
        scheduled_ns=np.where(records.requests.scheduled_ns > horizon, -1, records.requests.scheduled_ns),
        arrival_ns=np.where(records.requests.arrival_ns > horizon, -1, records.requests.arrival_ns),
    )
    summary = summarize(replace(cut, end_ns=horizon), load)
    assert summary.stability.verdict is Verdict.OVERLOADED
    assert summary.stability.queue_at_last_arrival > 500
    assert summary.completed + summary.unfinished == 3000
    assert summary.duration_s == pytest.approx((horizon - records.requests.arrival_ns[0]) / S)


def test_few_requests_or_a_short_window_are_too_short() -> None:
    assert judge(*queue_at(0.5, 12, 1)).verdict is Verdict.TOO_SHORT
    arrival = np.arange(100) * 100 * MS
    records = with_requests(single_server(arrival, np.full(100, MS))[0], finish_ns=arrival + 60 * S)
    stability = judge(replace(records, end_ns=70 * S), workload_of(records))
    assert stability.verdict is Verdict.TOO_SHORT
    assert "one takes 60 s" in stability.reason
    single = judge(*queue_at(0.5, 1, 1))
    assert single.reason == "1 request is too few to tell, at least 30 are needed"


def test_requests_all_due_at_once_are_a_backlog() -> None:
    stability = judge(*single_server(np.zeros(200, np.int64), np.full(200, 10 * MS)))
    assert (stability.verdict, stability.offered_request_rate) == (Verdict.BACKLOGGED, None)
    assert "latencies are those of one burst" in stability.reason


def test_in_a_closed_loop_the_wait_at_the_client_shows_the_overload() -> None:
    records, load = queue_at(1.3, 2000, 4)
    start = records.requests.scheduled_ns  # the client sends one at a time: nothing ever waits at the server
    held = with_requests(records, arrival_ns=start)
    quiet = replace(held.replicas[0].steps, num_waiting=np.zeros(2000, np.int64))
    held = replace(held, replicas=(replace(held.replicas[0], steps=quiet),))
    summary = summarize(held, workload(load.arrival_ns, [10] * 2000, [1] * 2000, max_concurrency=1))
    assert summary.stability.verdict is Verdict.OVERLOADED
    assert "counting the wait at the client's limit" in summary.stability.reason
    assert summary.e2el.max_ms == 10
    assert summary.e2el_including_client_queue.max_ms > 1000
    assert any("Requests waited" in warning and "at the client" in warning for warning in summary.warnings)


def test_a_closed_loop_that_always_has_work_is_stable() -> None:
    n, service = 400, np.full(400, 10 * MS)
    records, _ = single_server(np.zeros(n, np.int64), service)
    held = with_requests(records, arrival_ns=records.requests.scheduled_ns)
    quiet = replace(held.replicas[0].steps, num_waiting=np.zeros(n, np.int64))
    held = replace(held, replicas=(replace(held.replicas[0], steps=quiet),))
    stability = judge(held, workload([0] * n, [10] * n, [1] * n, max_concurrency=1))
    assert (stability.verdict, "closed loop" in stability.reason) == (Verdict.STABLE, True)


def test_a_stalled_run_says_so() -> None:
    records = replace(with_requests(token_records((0, [0])), outcome=np.array([UNFINISHED])), stalled=True)
    summary = summarize(records, workload_of(records))
    assert summary.stability.verdict is Verdict.STALLED
    assert any("can never be scheduled" in warning for warning in summary.warnings)


def test_overload_is_in_the_warnings() -> None:
    summary = summarize(*queue_at(1.3, 2000, 1))
    assert not summary.stability.is_steady
    assert any(warning.startswith("OVERLOADED") for warning in summary.warnings)


def test_no_objective_on_latency_or_goodput_is_kept_while_overloaded() -> None:
    text = "ttft:p50<60min e2el:mean<60min goodput>=1% goodput>=1/s ttft:p99<1ms failed<=1% request_throughput>1"
    summary = summarize(*queue_at(1.3, 2000, 1), slo=text, goodput="ttft:3600000")
    assert summary.goodput is not None
    assert summary.goodput.good_share == 1
    assert [result.passed for result in summary.slo] == [False] * 5 + [True] * 2
    assert [result.note for result in summary.slo] == ["not a steady state: overloaded"] * 5 + [""] * 2
    assert summary.slo_passed is False
    assert any("no objective on latency or goodput counts as kept" in warning for warning in summary.warnings)
    calm = summarize(*queue_at(0.5, 2000, 1), slo=text, goodput="ttft:3600000")
    assert [result.passed for result in calm.slo] == [True] * 4 + [False] + [True] * 2


def test_no_objective_on_latency_is_kept_in_a_stalled_run() -> None:
    records = with_requests(token_records((0, [0]), (0, [1])), outcome=np.array([Outcome.FINISHED, UNFINISHED]))
    summary = summarize(replace(records, stalled=True), workload_of(records), slo="ttft:p99<60min")
    assert (summary.slo[0].measured, summary.slo_passed) == (10.0, False)
    assert summary.slo[0].note == "not a steady state: stalled"


def test_the_rate_is_the_measured_one_and_metadata_may_say_what_was_configured() -> None:
    records, load = queue_at(0.5, 400, 1)
    summary = summarize(records, load)
    result = summary.to_dict()
    due = records.requests.due_ns
    assert result["offered_request_rate"] == pytest.approx(399 * S / (due[-1] - due[0]))
    assert (result["request_rate"], result["burstiness"]) == (result["offered_request_rate"], None)
    told = summary.to_dict(metadata={"request_rate": 50.0, "burstiness": 1.0})
    assert (told["request_rate"], told["burstiness"]) == (50.0, 1.0)
    assert told["offered_request_rate"] == result["offered_request_rate"]
    at_once = summarize(*single_server(np.zeros(40, np.int64), np.full(40, MS))).to_dict()
    assert (at_once["request_rate"], at_once["offered_request_rate"]) == ("inf", None)


# --- scale


@pytest.mark.slow
def test_a_long_run_is_summarised_without_a_list_of_its_tokens() -> None:
    import tracemalloc

    rng, n, num_steps = np.random.default_rng(0), 200_000, 600_000
    end = np.cumsum(rng.integers(5 * MS, 30 * MS, num_steps))
    start = np.concatenate(([0], end[:-1]))
    first = np.sort(rng.integers(10, num_steps - 3000, n))
    count = np.minimum(rng.lognormal(5.2, 0.8, n).astype(np.int64) + 1, 2500)
    table = RequestTable(
        **columns(
            n,
            due_ns=start[first - 5],
            arrival_ns=start[first - 5],
            scheduled_ns=start[first - 2],
            first_token_ns=end[first],
            finish_ns=end[first + count - 1],
            num_output_tokens=count,
        )
    )
    state = {name: np.zeros(num_steps, np.int64) for name in StepTable.__dataclass_fields__}
    spans = SpanTable(np.arange(n), first, count)
    replica = ReplicaRecords(
        StepTable(**state | {"start_ns": start, "end_ns": end}),
        spans,
        empty_table(PreemptionTable),
        empty_table(DraftTable),
        100,
        16,
        8,
        64,
    )
    records = Records(table, (replica,), int(end[-1]))
    load = workload_of(records)
    tracemalloc.start()
    summary = summarize(records, load)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert summary.itl.count == int((count - 1).sum()) > 40_000_000
    assert peak_bytes < 400 * 2**20 / 5


def engine_run(num_requests: int, rate_per_s: float, max_concurrency: int | None = None) -> Summary:
    """One seat and steps of 10 ms: 100 one-token requests per second at most."""
    due_ns = np.arange(num_requests) * round(1e9 / rate_per_s)
    ones = np.ones(num_requests, np.int64)
    work = workload(due_ns, ones, ones, max_concurrency=max_concurrency)
    records = run(work, SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False), ConstantCost(step_s=0.01))
    return summarize(records, work)


def test_a_burst_is_no_steady_state() -> None:
    summary = engine_run(500, 50_000)
    assert summary.stability.is_burst
    assert not summary.stability.is_steady


def test_a_client_limit_below_the_rate_asked_for_is_an_overload() -> None:
    assert engine_run(2_000, 1_000, max_concurrency=1).stability.verdict is Verdict.OVERLOADED


def test_a_floor_under_what_was_never_there_does_not_pass() -> None:
    ones = np.ones(50, np.int64)
    work = workload(np.arange(50) * 10**8, ones, ones)
    records = run(work, SchedulerConfig(enable_prefix_caching=False), ConstantCost(step_s=0.01))
    assert not summarize(records, work, slo="prefix_cache_hit_rate>=50%").slo_passed


def test_a_run_over_years_needs_no_more_memory_than_a_short_one() -> None:
    """Two requests, thirty years apart: buckets of a second are kept only where something happened."""
    work = workload([0, 10**18], [10, 10], [5, 5])
    summary = summarize(run(work, SchedulerConfig(), ConstantCost(step_s=0.01)), work)
    assert (summary.max_output_tokens_per_s, summary.max_concurrent_requests) == (5, 1)


def test_errors_survive_the_way_between_processes() -> None:
    with pytest.raises(SloSyntaxError) as caught:
        Slo.parse("ttft:p99<")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (SloSyntaxError, str(caught.value))
    error = InfeasibleDeployment("it does not fit", 10, None)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.largest_max_model_len) == ("it does not fit", 10)

"""Reports: the text table, the answer and its reasons in words, the figures' data, and the HTML file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import chromium
import numpy as np
import pytest
from built_records import (
    MS,
    UNFINISHED,
    AffineStepCost,
    S,
    pressed_engine,
    queue_at,
    single_server,
    token_records,
    with_requests,
    workload_of,
)
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.reports.answer import answer
from windtunnel.reports.causes import (
    Causes,
    WaitCause,
    often,
    prefill_work,
    shares_of_queue_time,
    shares_of_waiting,
    slow_gaps,
    wait_causes,
    worst_requests,
)
from windtunnel.reports.context import ReportContext, ResolvedValue
from windtunnel.reports.figures import MAX_RAW_STEPS, NUM_BUCKETS, Figure, _envelope, figures, time_axis
from windtunnel.reports.files import atomic_writer
from windtunnel.reports.glossary import GLOSSARY
from windtunnel.reports.html import NUM_SHOWN, write_html
from windtunnel.reports.page import masthead, write_page
from windtunnel.reports.text import measured_value, render_text
from windtunnel.reports.values import facts_of, plain, rows_of
from windtunnel.reports.words import count, digits, milliseconds, percent, plural, seconds, verb
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.metrics import Slo, SloResult, Summary, summarize
from windtunnel.sim.metrics.latency import expanded_inter_token_latencies
from windtunnel.sim.records import Outcome, PreemptionTable, Records, StepTable
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import workload

CONTEXT = ReportContext(
    title="a <run> & its name",
    model="Llama-3.1-8B",
    gpu="1 x H100",
    engine="vLLM 0.32",
    cost_model="roofline",
    cost={"name": "roofline", "assumed": "</script><b>", "factors": {"host_s": 0.001, "gemm_flops": 0.75}},
    resolved=(
        ResolvedValue("engine", "max_num_seqs", 256, "default of vLLM 0.32"),
        ResolvedValue("workload", "request_rate", 50.0, "run.toml:12"),
        ResolvedValue("workload", "input", {"dist": "lognormal", "mean": 512, "sigma": 0.9}, "run.toml:13"),
    ),
    seed=7,
    version="0.1.0",
    workload={
        "num_requests": 80,
        "duration_s": 2770.0200000000004,
        "request_rate_per_s": 9.998858955158179,
        "max_concurrency": None,
        "prompt_tokens": {"mean": 515.3754, "p50": 341.0, "p99": 2770.0200000000004, "total": 2576877},
    },
    notes=("unit of time: <ms>",),
    warnings=("watch <out>",),
)


@pytest.fixture(scope="module")
def pressed() -> tuple[Records, Summary]:
    load, config = pressed_engine()
    records = run(load, config, AffineStepCost())
    return records, summarize(records, load, slo="ttft:p99<1ms itl:p50<60min", goodput="ttft:500")


@pytest.fixture(scope="module")
def page(pressed: tuple[Records, Summary], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(path, *pressed, CONTEXT)
    return path.read_text(encoding="utf-8")


# --- text


def test_the_table_has_the_rows_of_vllm_bench_serve_in_its_order() -> None:
    records, load = queue_at(0.5, 200, 1)
    lines = render_text(summarize(records, load, percentiles=(99,)), CONTEXT).splitlines()
    start = lines.index("============ Serving Benchmark Result ============")
    labels = [line[:40].rstrip() if ":" in line else line.strip("-") for line in lines[start + 1 :]]
    assert labels[: labels.index("P99 E2EL (ms):") + 1] == [
        "Successful requests:",
        "Failed requests:",
        "Request rate configured (RPS):",
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Output token throughput (tok/s):",
        "Peak output token throughput (tok/s):",
        "Peak concurrent requests:",
        "Total token throughput (tok/s):",
        "Time to First Token",
        "Mean TTFT (ms):",
        "Median TTFT (ms):",
        "P99 TTFT (ms):",
        "Time per Output Token (excl. 1st token)",
        "Mean TPOT (ms):",
        "Median TPOT (ms):",
        "P99 TPOT (ms):",
        "Inter-token Latency",
        "Mean ITL (ms):",
        "Median ITL (ms):",
        "P99 ITL (ms):",
        "End-to-end Latency",
        "Mean E2EL (ms):",
        "Median E2EL (ms):",
        "P99 E2EL (ms):",
    ]


def test_only_a_configured_rate_is_called_so() -> None:
    summary = summarize(*queue_at(0.5, 200, 1))
    told = render_text(summary, CONTEXT)
    assert re.search(r"^Request rate configured \(RPS\): +50\.00", told, re.MULTILINE)
    measured = rf"^Request rate offered, measured \(RPS\): +{summary.request_rate:.2f}"
    assert re.search(measured, told[told.index("Scheduler") :], re.MULTILINE)
    for context in (None, replace(CONTEXT, resolved=()), replace(CONTEXT, resolved=(at_once(),))):
        unknown = render_text(summary, context)
        assert "configured" not in unknown
        assert unknown.index("Request rate offered, measured") < unknown.index("Benchmark duration")


def at_once() -> ResolvedValue:
    return ResolvedValue("workload", "request_rate", float("inf"), "vllm bench serve default")


def test_values_stand_where_vllm_puts_them_with_two_decimals() -> None:
    records = token_records((0, [0, 1, 2]), (0, [3, 5]))
    text = render_text(summarize(records, workload_of(records)))
    assert "Successful requests:                     2         \n" in text
    assert "Benchmark duration (s):                  0.06      \n" in text
    assert "Mean ITL (ms):                           13.33     \n" in text


def test_the_header_names_the_cost_model_and_says_uncalibrated(pressed: tuple[Records, Summary]) -> None:
    text = render_text(pressed[1], CONTEXT)
    assert "Cost model: roofline, uncalibrated" in text
    assert "Engine: vLLM 0.32 (simulated)" in text
    assert "Cost model: roofline, measured" in render_text(pressed[1], replace(CONTEXT, evidence="measured"))
    text = render_text(pressed[1], replace(CONTEXT, evidence="composed"))
    assert "Cost model: roofline, composed, not measured" in text
    assert "calibrated" not in text


def test_warnings_come_last(pressed: tuple[Records, Summary]) -> None:
    lines = render_text(pressed[1], CONTEXT).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("WARNING"))
    assert lines[first] == "WARNING: watch <out>"
    assert lines[first - 1] == "=" * 50
    assert all(line.startswith(("WARNING: ", " " * 9)) for line in lines[first:])


def test_an_overloaded_run_says_so_before_any_latency() -> None:
    text = render_text(summarize(*queue_at(1.3, 2000, 1)))
    assert text.index("OVERLOADED") < text.index("Not a steady state") < text.index("Time to First Token")
    assert "OVERLOADED" not in render_text(summarize(*queue_at(0.5, 2000, 1)))


def test_what_was_not_measured_is_a_dash() -> None:
    records = with_requests(token_records((0, [0])), outcome=np.array([UNFINISHED]))
    text = render_text(summarize(records, workload_of(records)))
    assert re.search(r"^Mean TTFT \(ms\): +–$", text, re.MULTILINE)


def test_objectives_show_what_was_measured(pressed: tuple[Records, Summary]) -> None:
    text = render_text(pressed[1])
    assert re.search(r"^ttft:p99<1ms +FAIL  [\d,.]+ s \(not a steady state: one burst\)$", text, re.MULTILINE)
    assert re.search(r"^itl:p50<60min +PASS  10 ms \(not a steady state: one burst\)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("ttft:p99<500ms", 920.39, "920 ms"),
        ("ttft:p99<500ms", 4_342_353.44, "72.4 min"),
        ("ttft:p99<500ms", 500.0004, "500.0004 ms"),
        ("ttft:p99<=500ms", 500.0, "500 ms"),
        ("goodput>=99%", 98.9999, "98.9999 %"),
        ("goodput>=99%", 95.06, "95.1 %"),
        ("output_throughput>3000", 2511.47, "2,511/s"),
        ("output_throughput>3000", 2999.9, "2,999.9/s"),
        ("preemptions==0", 1167.0, "1,167"),
    ],
)
def test_what_was_measured_is_short_but_never_looks_like_the_limit(text: str, value: float, shown: str) -> None:
    slo = Slo.parse(text)
    assert measured_value(SloResult(slo, value, slo.holds(value))) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.4213, "0.421 ms"), (87.5, "87.5 ms"), (999.6, "1.00 s"), (1240, "1.24 s"), (6e5, "10.0 min")],
)
def test_durations_have_the_unit_that_suits_them(value: float | None, text: str) -> None:
    assert milliseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.087, "87 ms"), (1.24, "1.24 s"), (60.0, "60 s"), (880.4, "14.7 min"), (3540.0, "59 min"), (15_120.0, "4.2 h")],
)
def test_durations_in_sentences_have_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text


@given(st.floats(1e-9, 1e15), st.integers(1, 9))
def test_numbers_are_rounded_without_an_exponent(value: float, num_digits: int) -> None:
    shown = digits(value, num_digits)
    assert re.fullmatch(r"[\d,]+(\.\d*[1-9])?", shown)
    assert float(shown.replace(",", "")) == pytest.approx(value, rel=0.51 * 10 ** (1 - num_digits))


def test_one_thing_is_not_many() -> None:
    assert (plural(1, "step"), plural(1200, "step")) == ("1 step", "1,200 steps")
    assert (verb(1, "is", "are"), verb(0, "is", "are")) == ("is", "are")
    assert [often(times) for times in (1, 2, 3)] == ["once", "twice", "3 times"]


def test_shares_and_counts_are_short() -> None:
    assert (percent(0.0312), percent(0.4), percent(None)) == ("3.1 %", "40 %", "–")
    assert (percent(0.0), percent(0.00004), percent(1.0)) == ("0 %", "0.004 %", "100 %")
    assert (count(0.0031), count(0.0)) == ("0.0031", "0")
    assert (count(3953.06), count(7.718), count(12.0), count(134.91)) == ("3,953", "7.72", "12", "134.9")


# --- causes and answer


def seats_short() -> tuple[Records, Summary]:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, num_gpu_blocks=2000)
    load = workload(np.arange(60) * 20 * MS, [20] * 60, [30] * 60)
    records = run(load, config, AffineStepCost())
    return records, summarize(records, load)


def budget_short() -> Records:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=64, max_model_len=2048, num_gpu_blocks=5000)
    return run(workload([0] * 60, [600] * 60, [2] * 60), config, AffineStepCost())


def blocks_short() -> Records:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=256, num_gpu_blocks=40)
    return run(workload([0] * 60, [100] * 60, [100] * 60), config, AffineStepCost())


def test_the_reason_for_waiting_is_what_was_used_up() -> None:
    assert next(iter(shares_of_waiting(seats_short()[0]))) is WaitCause.SEATS
    assert next(iter(shares_of_waiting(blocks_short()))) is WaitCause.KV_CACHE
    assert next(iter(shares_of_waiting(budget_short()))) is WaitCause.BUDGET


def test_shares_of_waiting_add_up_to_one(pressed: tuple[Records, Summary]) -> None:
    shares = shares_of_waiting(pressed[0])
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


def test_the_causes_of_chosen_requests_are_those_of_the_steps_in_which_they_waited(
    pressed: tuple[Records, Summary],
) -> None:
    records = pressed[0]
    table, steps, causes = records.requests, records.replicas[0].steps, wait_causes(records.replicas[0])
    rows = np.arange(3, len(table), 7)
    spent = dict.fromkeys(WaitCause, 0)
    for row in rows.tolist():
        for start, end, cause in zip(steps.start_ns.tolist(), steps.end_ns.tolist(), causes.tolist(), strict=True):
            overlap = min(end, int(table.scheduled_ns[row])) - max(start, int(table.arrival_ns[row]))
            spent[WaitCause(cause)] += max(overlap, 0)
    spent[WaitCause.KV_CACHE] += spent.pop(WaitCause.PREEMPTION)
    shares = shares_of_queue_time(records, rows)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares == pytest.approx({cause: ns / sum(spent.values()) for cause, ns in spent.items() if ns})
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


@pytest.mark.parametrize("limit_ms", [5, 10, 15, 1000, 10_000])
def test_slow_gaps_are_those_of_the_expanded_tokens(pressed: tuple[Records, Summary], limit_ms: int) -> None:
    records = pressed[0]
    gaps_ms = np.concatenate([np.array(gaps) for gaps in expanded_inter_token_latencies(records)]) * 1000
    slow = slow_gaps(records, limit_ms * 1e6)
    assert (slow.num_gaps, slow.num_slow) == (len(gaps_ms), int((gaps_ms > limit_ms + 1e-6).sum()))
    assert 0 <= slow.stalled_share + slow.prefill_share <= 1 + 1e-9
    if limit_ms == 15:  # every step takes 10 ms, so that only a stall can be longer
        assert (slow.stalled_share, slow.prefill_tokens) == (1, None)


def test_slow_gaps_name_the_prompts_in_their_steps() -> None:
    # a step of 100 prompt tokens takes 60 ms, one that only decodes 10 ms and a little
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, num_gpu_blocks=500)
    load = workload([0, 300 * MS, 600 * MS], [100] * 3, [80] * 3)
    records = run(load, config, AffineStepCost(0.01, 0.0005))
    slow = slow_gaps(records, 30 * MS)
    assert (slow.num_slow, slow.prefill_share, slow.prefill_tokens) == (3, 1, 100)
    summary = summarize(records, load, slo="itl:max<30ms")
    assert any(
        sentence == "3 of 237 gaps between tokens (1.3 %) took more than 30 ms: all of these in steps that computed "
        "prompts, too (100 tokens on average)."
        for sentence in answer(records, summary).sentences
    )


def test_a_step_that_leaves_nothing_waiting_has_no_reason(pressed: tuple[Records, Summary]) -> None:
    replica = pressed[0].replicas[0]
    assert ((wait_causes(replica) == WaitCause.STEP) == (replica.steps.num_waiting == 0)).all()


def test_the_reason_of_a_slow_request_names_its_queue_prefill_preemption_and_length(
    pressed: tuple[Records, Summary],
) -> None:
    records = pressed[0]
    causes, table = Causes(records), records.requests
    said = {row: causes.why(row) for row in range(len(table))}
    for row, text in said.items():
        if table.num_preemptions[row] and "preempted" in text:
            assert f"{int(table.num_recomputed_tokens[row]):,} tokens recomputed" in text
        assert ("preempted" not in text) or table.num_preemptions[row] > 0
    assert any("preempted" in text and "without a token" in text for text in said.values())
    assert any("output tokens at" in text for text in said.values())


def test_a_request_that_waited_says_how_long_and_for_what() -> None:
    records, _ = seats_short()
    row = int(worst_requests(records, "ttft", 1)[0])
    queued = (records.requests.scheduled_ns - records.requests.arrival_ns)[row]
    assert Causes(records).why(row).startswith(f"queued {milliseconds(queued / MS)}: all max_num_seqs seats were taken")


def test_a_stall_is_not_counted_into_the_time_per_token() -> None:
    # three tokens 10 ms apart, a stall of 500 ms, two tokens 10 ms apart
    records = with_requests(
        token_records((0, [0, 1, 2, 52, 53])), num_preemptions=np.array([1]), num_recomputed_tokens=np.array([12])
    )
    said = Causes(records).why(0)
    assert said == "preempted once: 12 tokens recomputed, 500 ms without a token"
    slow = with_requests(
        token_records((0, [0, 1, 2, 3, 8, 9])), num_preemptions=np.array([1]), num_recomputed_tokens=np.array([12])
    )
    assert "6 output tokens at 10 ms each took 40 ms" in Causes(slow).why(0)


def beside_a_long_prompt(*, late_ns: int = 0) -> Records:
    """Three requests: a long answer that decodes, then a prompt of 4,459 tokens and one of 166, both at 100 ms."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8192, max_model_len=8192, num_gpu_blocks=2000)
    load = workload([0, 100 * MS, 100 * MS + late_ns], [16, 4459, 166], [400, 20, 163])
    return run(load, config, AffineStepCost(0.005, 25e-6))


def test_the_time_until_the_first_token_is_explained_by_what_else_its_step_computed() -> None:
    records = beside_a_long_prompt()
    causes, table = Causes(records), records.requests
    took = milliseconds((table.first_token_ns - table.scheduled_ns)[2] / MS)
    assert causes.why_first_token(2).startswith(
        f"prefill of 166 prompt tokens took {took} over 1 step with 4,459 prompt tokens of others"
    )
    assert "output tokens" in causes.why(2)
    assert "output tokens" not in causes.why_first_token(2)
    work = prefill_work(records, np.array([2]))
    assert work is not None
    assert (work.own_tokens, work.other_tokens) == (166, 4459)


def test_a_request_that_came_during_a_long_step_is_told_what_that_computed() -> None:
    said = Causes(beside_a_long_prompt(late_ns=20 * MS)).why_first_token(2)
    assert re.match(
        r"queued [\d.]+ ms: the step in progress had to end first, it computed 4,459 prompt tokens of others$",
        said,
    )


def test_every_time_until_the_first_token_is_told_by_waiting_and_prefill_alone(
    pressed: tuple[Records, Summary],
) -> None:
    records = pressed[0]
    causes = Causes(records)
    for row in range(len(records.requests)):
        said = causes.why_first_token(row)
        assert said.startswith(("queued", "prefill of"))
        assert "output tokens" not in said
        assert "without a token" not in said


def test_a_preemption_before_the_first_token_is_part_of_the_prefill() -> None:
    records = with_requests(
        token_records((0, [30, 31])),
        scheduled_ns=np.array([0]),
        num_preemptions=np.array([2]),
        num_recomputed_tokens=np.array([17]),
    )
    lost = PreemptionTable(
        *(np.array(column) for column in ([50 * MS, 310 * MS], [5, 31], [0, 0], [12, 5], *[[1, 1]] * 3))
    )
    records = replace(records, replicas=(replace(records.replicas[0], preemptions=lost),))
    assert Causes(records).why_first_token(0) == (
        "prefill of 10 prompt tokens took 310 ms over 31 steps: preempted once, it lost 12 computed tokens and waited "
        "again"
    )


def test_a_request_without_a_token_says_so() -> None:
    records = with_requests(token_records((0, [0, 1])), outcome=np.array([UNFINISHED]), first_token_ns=np.array([-1]))
    assert Causes(records).why_first_token(0).endswith("(without a token until the end of the run)")


def test_rejected_unsent_and_unfinished_requests_have_a_reason_of_their_own() -> None:
    records = token_records((0, [0]), (0, [1]), (0, [2, 3]))
    records = with_requests(
        records,
        outcome=np.array([Outcome.REJECTED, UNFINISHED, UNFINISHED]),
        arrival_ns=np.array([0, -1, 0]),
        finish_ns=np.array([0, -1, -1]),
    )
    causes = Causes(records)
    assert causes.why(0) == "rejected on arrival"
    assert causes.why(1).startswith("never sent")
    assert causes.why(2).endswith("(unfinished at the end of the run)")


def test_worst_requests_are_the_slowest_and_unfinished_ones_count() -> None:
    records = token_records((0, [0]), (0, [9]), (0, [5]))
    assert worst_requests(records, "e2el", 2).tolist() == [1, 2]
    cut = with_requests(
        records,
        outcome=np.array([UNFINISHED, 0, 0]),
        finish_ns=np.array([-1, *records.requests.finish_ns[1:]]),
    )
    assert worst_requests(replace(cut, end_ns=S), "e2el", 1).tolist() == [0]


def test_the_answer_says_whether_it_keeps_up_and_what_was_short(pressed: tuple[Records, Summary]) -> None:
    stable = queue_at(0.4, 500, 1)
    said = answer(stable[0], summarize(*stable))
    assert (said.headline.startswith("Stable: it keeps up with"), said.tone) == (True, "good")
    over = queue_at(1.4, 1500, 1)
    assert answer(over[0], summarize(*over)).headline.startswith("Overloaded:")
    burst = single_server(np.zeros(200, np.int64), np.full(200, 10 * MS))
    assert answer(burst[0], summarize(*burst)).headline == "One burst: 200 requests at once took 2.00 s."
    short = " ".join(answer(*seats_short()).sentences)
    assert "because all max_num_seqs seats were taken (2)" in short
    assert "No request was preempted." in short
    told = " ".join(answer(*pressed).sentences)
    stats = pressed[1].preemption
    assert f"{stats.num_preemptions} preemptions hit {stats.num_preempted_requests} requests" in told
    assert "1 of 2 objectives missed: ttft:p99<1ms" in told


def rush_hour() -> tuple[Records, Any]:
    """Calm but for one moment in which 30 requests come at once to 8 seats, so that 2 % of all wait for one."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=256, num_gpu_blocks=2000)
    arrival = np.sort(np.concatenate((np.arange(970) * 100 * MS, np.full(30, 40 * S))))
    load = workload(arrival, [20] * 1000, [20] * 1000)
    return run(load, config, AffineStepCost()), load


def test_the_cause_of_a_missed_percentile_is_found_although_most_requests_never_waited() -> None:
    records, load = rush_hour()
    summary = summarize(records, load, slo="ttft:p99<100ms ttft:p50<100ms")
    assert [result.passed for result in summary.slo] == [False, True]
    assert summary.queue_time.median_ms == 0
    said = answer(records, summary)
    text = " ".join(said.sentences)
    over = (records.requests.first_token_ns - records.requests.arrival_ns) > 100 * MS
    waited = (records.requests.scheduled_ns - records.requests.arrival_ns)[over].mean() / MS
    assert (
        f"The {over.sum()} requests over the limit of ttft:p99<100ms waited {milliseconds(waited)} in the queue" in text
    )
    assert "all of it because all max_num_seqs seats were taken (8); at least" in text
    assert "of the KV cache stayed free" in text
    assert "Hardly anything waited" not in text
    assert said.tone == "bad"


def test_the_slowest_are_explained_when_no_objective_is_missed() -> None:
    records, load = rush_hour()
    text = " ".join(answer(records, summarize(records, load)).sentences)
    assert re.search(r"The 10 requests with the longest TTFT \(1\.0 % of all\) waited .* seats were taken \(8\)", text)
    calm = workload(np.arange(1000) * 100 * MS, [20] * 1000, [20] * 1000)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=256, num_gpu_blocks=2000)
    records = run(calm, config, AffineStepCost())
    assert "Hardly anything waited in the queue" in " ".join(answer(records, summarize(records, calm)).sentences)


def test_requests_that_miss_a_limit_without_waiting_are_told_what_their_steps_computed() -> None:
    records = beside_a_long_prompt()
    summary = summarize(records, workload_of(records), slo="ttft:max<50ms")
    expected = (
        r"The 2 requests over the limit of ttft:max<50ms .*; the steps until their first token computed 2,312 prompt "
        r"tokens of their own and 2,312 of others on average\."
    )
    assert any(re.fullmatch(expected, sentence) for sentence in answer(records, summary).sentences)


def test_a_missed_objective_is_in_the_headline_which_is_good_news_no_more() -> None:
    records, load = queue_at(0.4, 500, 1)
    missed = answer(records, summarize(records, load, slo="ttft:p99<1ms"))
    assert re.fullmatch(r"It keeps up with [\d.]+ requests/s, but it misses ttft:p99<1ms\.", missed.headline)
    assert missed.tone == "bad"
    for text, words in (
        ("ttft:p99<1ms e2el:p99<1h", "but it misses ttft:p99<1ms."),
        ("ttft:p99<1ms e2el:p99<1ms", "but it misses both objectives."),
        ("ttft:p99<1ms e2el:p99<1ms failed<=0%", "but it misses 2 of 3 objectives."),
        ("ttft:p99<1ms e2el:p99<1ms failed>1%", "but it misses all 3 objectives."),
    ):
        text = text.replace("1h", "60min")
        assert answer(records, summarize(records, load, slo=text)).headline.endswith(words)
    backlog = queue_at(0.97, 3000, 1)
    assert answer(backlog[0], summarize(*backlog, slo="ttft:p99<1ms")).headline.startswith("Backlogged: ")
    assert answer(backlog[0], summarize(*backlog, slo="ttft:p99<1ms")).headline.endswith(
        ", and it misses ttft:p99<1ms."
    )
    assert answer(backlog[0], summarize(*backlog)).tone == "note"


def test_a_good_number_of_an_overloaded_run_is_not_called_kept() -> None:
    records, load = queue_at(1.3, 2000, 1)
    summary = summarize(records, load, slo="ttft:p99<60min")
    assert re.search(r"^ttft:p99<60min +FAIL  [\d.]+ s \(not a steady state: overloaded\)$", render_text(summary), re.M)
    told = " ".join(answer(records, summary).sentences)
    assert re.search(r"1 of 1 objective missed: .* \(measured [\d.]+ s, but not a steady state: overloaded\)", told)


def test_an_overload_at_the_peak_is_told_in_the_answer() -> None:
    rng = np.random.default_rng(1)
    gaps = np.concatenate([rng.exponential(S / rate, n) for rate, n in ((80, 800), (150, 3000), (60, 1500))])
    records, load = single_server(np.cumsum(gaps).astype(np.int64), np.full(len(gaps), 10 * MS))
    said = answer(records, summarize(records, load))
    assert (said.headline, said.tone) == ("Backlogged: at the peak more came than it could serve.", "note")
    assert said.sentences[0].startswith("More came at the peak than could be served: from ")


def test_no_setting_is_advised_that_no_run_has_tried(pressed: tuple[Records, Summary]) -> None:
    for records, summary in (pressed, seats_short()):
        text = " ".join(answer(records, summary).sentences)
        assert not re.search(r"\b(try|can help|should|increase|raise|lower)\b", text)
    assert re.search(
        r"The KV cache holds about \d+ requests of full length; up to \d+ ran at once\.",
        " ".join(answer(*pressed).sentences),
    )


# --- figures


def step_table(start: np.ndarray, end: np.ndarray) -> StepTable:
    state = {name: np.zeros(len(start), np.int64) for name in StepTable.__dataclass_fields__}
    return StepTable(**state | {"start_ns": start, "end_ns": end})


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=25),
    st.integers(1, 12),
)
def test_intervals_keep_the_mean_over_time_and_the_extremes(parts: list[tuple[int, int, int]], num: int) -> None:
    gaps, lengths, values = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    end = np.cumsum(gaps + lengths)
    start = end - lengths
    edges = np.linspace(0, int(end[-1]), num + 1)
    mean, low, high = _envelope(step_table(start, end), values.astype(float), edges)
    for k in range(num):
        fine = np.linspace(edges[k], edges[k + 1], 2001)
        middle = (fine[1:] + fine[:-1]) / 2
        inside = np.searchsorted(end, middle, "right")
        level = np.where(middle >= start[inside], values[inside], 0)
        assert mean[k] == pytest.approx(level.mean(), abs=0.02)
        assert low[k] <= level.min()
        assert high[k] >= level.max()
    assert high.max() == values.max()
    assert (mean * np.diff(edges)).sum() == pytest.approx((values * lengths).sum())


def test_few_steps_are_drawn_exactly_and_many_as_intervals_with_a_note() -> None:
    few, many = queue_at(0.8, MAX_RAW_STEPS, 1), queue_at(0.8, 5 * MAX_RAW_STEPS, 1)
    exact = next(figure for figure in figures(few[0], summarize(*few)) if figure.name == "queue")
    assert len(exact.data[0]["x"]) >= MAX_RAW_STEPS
    assert "intervals" not in exact.caption
    thinned = next(figure for figure in figures(many[0], summarize(*many)) if figure.name == "queue")
    assert all(len(trace["x"]) <= 2 * NUM_BUCKETS for trace in thinned.data)
    assert f"{5 * MAX_RAW_STEPS:,} steps are drawn as {NUM_BUCKETS} intervals" in thinned.caption


def test_every_preemption_is_marked(pressed: tuple[Records, Summary]) -> None:
    kv = next(figure for figure in figures(*pressed) if figure.name == "kv")
    marks = next(trace for trace in kv.data if trace["name"].startswith("preemptions"))
    assert sum(marks["customdata"]) == pressed[1].preemption.num_preemptions


def figure_of(records: Records, summary: Summary, name: str) -> Figure:
    return next(figure for figure in figures(records, summary) if figure.name == name)


def test_distributions_show_the_limits_of_the_objectives(pressed: tuple[Records, Summary]) -> None:
    ttft = figure_of(*pressed, "cdf-ttft")
    assert len(ttft.layout["shapes"]) == 1
    assert ttft.layout["annotations"][0]["text"] == "p99 < 0.001 s"
    assert ttft.data[0]["y"][-1] == 100


def test_the_values_of_percentiles_stand_on_ground_of_their_own_so_that_no_limit_crosses_them() -> None:
    records, load = queue_at(0.6, 500, 1)
    ttft = figure_of(records, summarize(records, load, slo="ttft:p99<40ms"), "cdf-ttft")
    labels = [label for label in ttft.layout["annotations"] if label["text"].startswith("P")]
    assert [label["y"] for label in labels] == [50, 99]
    assert all(label["bgcolor"] == "@paper" for label in labels)
    assert not any("text" in trace.get("mode", "") for trace in ttft.data)
    x = [
        float(np.percentile((records.requests.first_token_ns - records.requests.arrival_ns) / MS, p)) for p in (50, 99)
    ]
    shown = [10 ** label["x"] if ttft.layout["xaxis"].get("type") == "log" else label["x"] for label in labels]
    assert shown == pytest.approx(x)


def test_one_outlier_does_not_squeeze_a_distribution_into_a_corner() -> None:
    # gaps of 10 ms, and a single one of 200 ms
    steps = [*range(50), *range(69, 99)]
    squeezed, plain_one = token_records((0, steps)), token_records((0, list(range(80))))
    axis = figure_of(squeezed, summarize(squeezed, workload_of(squeezed)), "cdf-itl").layout["xaxis"]
    assert axis["type"] == "log"
    assert {"10", "20", "50", "100", "200"} <= set(axis["ticktext"])
    axis = figure_of(plain_one, summarize(plain_one, workload_of(plain_one)), "cdf-itl").layout["xaxis"]
    assert "type" not in axis


def test_the_largest_steps_have_a_scale_of_their_own(pressed: tuple[Records, Summary]) -> None:
    tokens = figure_of(*pressed, "tokens")
    below = [trace["name"] for trace in tokens.data if trace.get("yaxis", "y") == "y"]
    above = [trace["name"] for trace in tokens.data if trace.get("yaxis") == "y2"]
    assert (below, above) == (["decode", "prefill"], ["largest step", "budget (256)"])
    assert tokens.layout["yaxis"]["domain"][1] < tokens.layout["yaxis2"]["domain"][0]


def test_a_bar_of_preemptions_says_one_request_or_several() -> None:
    records = with_requests(
        token_records((0, [0]), (0, [1]), (0, [2]), (0, [3])), num_preemptions=np.array([0, 1, 2, 2])
    )
    said = figure_of(records, summarize(records, workload_of(records)), "preemptions")
    assert said.data[0]["hovertext"] == ["1 request was preempted once", "2 requests were preempted twice"]
    assert said.caption == "1 request never lost its blocks and is not drawn."


def test_axes_have_units(pressed: tuple[Records, Summary]) -> None:
    for figure in figures(*pressed):
        if figure.name not in ("preemptions",):
            both = figure.layout["xaxis"]["title"] + figure.layout["yaxis"]["title"]
            assert re.search(r"\((s|ms|min|h|%|% of usable)\)", both), figure.name


def test_the_time_axis_takes_the_unit_of_the_run() -> None:
    records = token_records((0, [0]))
    units = [time_axis(replace(records, end_ns=seconds * S)).unit for seconds in (60, 1200, 40_000)]
    assert units == ["s", "min", "h"]


def test_figures_of_an_empty_run_are_drawn_empty() -> None:
    records = replace(with_requests(token_records((0, [0])), outcome=np.array([UNFINISHED])), replicas=())
    for figure in figures(records, summarize(records, workload_of(records))):
        json.dumps(figure.for_page(), allow_nan=False)


# --- html


class Tags(HTMLParser):
    """Collects what a page refers to, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.opened: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        given = dict(attrs)
        self.links += [given[name] or "" for name in ("src", "href", "data", "action") if name in given]
        self.ids += [given["id"] or ""] if "id" in given else []


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert all(link.startswith("#") for link in tags.links)
    assert {link[1:] for link in tags.links} <= set(tags.ids)
    assert not {"link", "img", "iframe"} & set(tags.opened)
    assert "default-src 'none'" in page
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_holds_plotly_once_and_is_small(page: str) -> None:
    assert page.count("plotly.js v") == 1
    assert len(page.encode()) < 8_000_000


def test_text_from_outside_is_escaped(page: str) -> None:
    assert "a &lt;run&gt; &amp; its name" in page
    assert "watch &lt;out&gt;" in page
    assert "unit of time: &lt;ms&gt;" in page
    for raw in ("<run>", "<out>", "<ms>", "</script><b>"):
        assert raw not in page
    assert page.count("</script>") == 3


def test_labels_of_requests_are_escaped(pressed: tuple[Records, Summary], tmp_path: Path) -> None:
    labels = tuple(f"<img src=x{row}>" for row in range(len(pressed[0].requests)))
    write_html(tmp_path / "a.html", *pressed, replace(CONTEXT, labels=labels))
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "&lt;img src=x" in text
    assert "<img" not in text


def test_the_first_screen_gives_verdict_key_numbers_objectives_and_calibration(
    page: str, pressed: tuple[Records, Summary]
) -> None:
    top = page[: page.index("<nav")]
    for text in ("uncalibrated", "TTFT, median", "KV usage, peak", "Preemptions", "✗ missed", "✓ kept", "Verdict"):
        assert text in top
    assert pressed[1].stability.verdict.replace("_", " ") in top


def test_settings_are_shown_with_their_source(page: str) -> None:
    assert "default of vLLM 0.32" in page
    assert "max_num_seqs" in page


def test_facts_have_few_digits_and_units_and_no_braces(page: str) -> None:
    how = page[page.index('id="how"') : page.index('id="numbers"')]
    assert not re.search(r"\d\.\d{6,}", how)
    assert not re.search(r"[{}]", how)
    for text in ("46.2 min", "10.00 /s", "mean 515.4, p50 341, p99 2,770, total 2,576,877", "Max concurrency"):
        assert (text in how) == (text != "Max concurrency")  # what is None is left out
    assert "dist lognormal, mean 512, sigma 0.9" in how
    assert "factors.host_s" in how
    assert "1 ms" in how


def test_values_are_written_as_people_do() -> None:
    assert [plain(value) for value in (None, True, 8192, 0.92, 1e-6, [90.0, 99.0], "a", {"mean": 2.5})] == [
        "–", "yes", "8,192", "0.92", "0.000001", "90, 99", "a", "mean 2.5",
    ]  # fmt: skip
    assert facts_of({"num_steps": 7, "x_share": 0.0123, "busy_s": 90.0, "none": None}) == [
        ("Steps", "7"), ("X share", "1.2 %"), ("Busy", "90 s"),
    ]  # fmt: skip
    assert list(rows_of({"a": {"b_s": 3e-6}, "c": 1})) == [("a.b_s", "3 µs"), ("c", "1")]


def test_of_the_worst_requests_a_few_are_shown_and_the_others_folded(page: str) -> None:
    worst = page[page.index('id="worst"') : page.index('id="how"')]
    for table in worst.split("<h3>")[1:]:
        shown, folded = table.split("<details>")
        assert shown.count('data-name="Request"') == NUM_SHOWN
        assert folded.count('data-name="Request"') == 15
        assert "15 more rows" in folded
    assert "Where the time until its first token went" in worst


def test_numbers_that_look_alike_or_odd_are_in_the_glossary() -> None:
    words = dict(GLOSSARY)
    for text, entry in {
        "Peak running": "Three peaks",
        "Peak in flight": "Three peaks",
        "Peak concurrent": "Three peaks",
        "one decoding request keeps an engine busy": "Busy",
        "reaches 100 %": "KV usage incl. cached",
        "between ramp-up and drain": "Utilisation (rho)",
        "every turn counts": "Request rate configured, offered",
    }.items():
        assert text in words[entry]


def test_every_figure_has_a_place_and_a_description(page: str, pressed: tuple[Records, Summary]) -> None:
    data = re.search(r'id="figures">(.*?)</script>', page)
    assert data is not None
    assert "<" not in data[1]
    drawn = json.loads(data[1])
    assert [figure["name"] for figure in drawn] == [*(figure.name for figure in figures(*pressed)), "stalls"]
    for figure in drawn:
        assert re.search(rf'id="plot-{figure["name"]}" role="img" tabindex="0" aria-label="[^"]+"', page)


def test_a_page_without_figures_carries_no_script_and_does_not_say_so(tmp_path: Path) -> None:
    path = tmp_path / "bare.html"
    write_page(path, "T", ["<p>all</p>"], skip_to="all", head=masthead("a < b", "<b>what</b>"), foot="By me & you.")
    html = path.read_text(encoding="utf-8")
    assert "<script" not in html
    assert '<h1>a &lt; b</h1>\n<p class="what"><b>what</b></p>' in html
    assert html.endswith("<footer><p>By me &amp; you.</p></footer>\n</body>\n</html>\n")


def test_a_page_whose_body_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def body() -> Iterator[str]:
        yield "<p>"
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_page(tmp_path / "half.html", "T", body(), skip_to="all", head=(), foot="")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(chromium.EXECUTABLE is None, reason="needs chromium")
def test_figures_are_drawn_as_they_come_near_and_follow_the_theme(page: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    strokes = "[...document.querySelectorAll('#plot-kv .js-line')].map((each) => getComputedStyle(each).stroke)"
    num_drawn = "document.querySelectorAll('.plot:has(.main-svg)').length"
    with chromium.page() as browser:
        browser.look(1280, 900)
        browser.open(f"file://{path}")
        for scheme, blue in (("light", "rgb(0, 114, 178)"), ("dark", "rgb(86, 180, 233)")):
            browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.wait(f"{strokes}.includes({json.dumps(blue)})")
        near, there = browser.run(num_drawn), browser.run("document.querySelectorAll('.plot').length")
        assert 0 < near < there
        browser.run("dispatchEvent(new Event('beforeprint'))")
        browser.wait(f"{num_drawn} === {there}")
        assert browser.problems == []


def test_a_run_without_preemptions_or_finished_requests_still_makes_a_page(tmp_path: Path) -> None:
    records = with_requests(token_records((0, [0])), outcome=np.array([UNFINISHED]))
    for name, (made, load) in {"a": queue_at(0.4, 100, 1), "b": (records, workload_of(records))}.items():
        write_html(tmp_path / f"{name}.html", made, summarize(made, load), ReportContext())
        assert 'href="#preemptions"' not in (tmp_path / f"{name}.html").read_text(encoding="utf-8")


def test_the_same_run_gives_the_same_page(pressed: tuple[Records, Summary], page: str, tmp_path: Path) -> None:
    write_html(tmp_path / "again.html", *pressed, CONTEXT)
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_a_long_run_stays_below_eight_megabytes(tmp_path: Path) -> None:
    records, load = queue_at(0.9, 60_000, 1)
    write_html(tmp_path / "long.html", records, summarize(records, load), CONTEXT)
    assert (tmp_path / "long.html").stat().st_size < 6_000_000


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_every_figure_is_drawn_and_nothing_sticks_out(page: str, width: int, tmp_path: Path) -> None:
    probe = """<script>addEventListener("load", () => { dispatchEvent(new Event("beforeprint")); setTimeout(() => {
      const out = [...document.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1);
      parent.postMessage({width: innerWidth, scroll: document.documentElement.scrollWidth,
        drawn: document.querySelectorAll(".plot .main-svg").length > 0 &&
          [...document.querySelectorAll(".plot")].every((e) => e.querySelector(".main-svg")),
        out: out.filter((e) => !e.closest(".skip")).map((e) => e.tagName + "." + e.className)}, "*"); }, 1500); });
      addEventListener("error", (e) => parent.postMessage({error: e.message}, "*"));</script></body>"""
    (tmp_path / "page.html").write_text(page.replace("</body>", probe), encoding="utf-8")
    (tmp_path / "frame.html").write_text(
        f'<body><iframe src="page.html" style="width:{width}px;height:3000px;border:0"></iframe><pre id="said"></pre>'
        '<script>addEventListener("message", (e) => said.append(JSON.stringify(e.data) + "\\n"))</script></body>'
    )
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
            "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=15000",
            "--allow-file-access-from-files", "--window-size=1400,3000", "--dump-dom",
            f"file://{tmp_path / 'frame.html'}",
        ],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said is not None
    found: list[dict[str, Any]] = [json.loads(line) for line in said[1].replace("&gt;", ">").strip().splitlines()]
    assert found == [{"width": width, "scroll": found[0]["scroll"], "drawn": True, "out": []}]
    assert found[0]["scroll"] <= width


# --- files


def test_a_failed_write_leaves_neither_the_file_nor_a_piece_of_it(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old")
    with pytest.raises(TypeError), atomic_writer(tmp_path / "old.txt") as file:
        file.writelines(["half", 1])  # type: ignore[list-item]
    assert [path.name for path in tmp_path.iterdir()] == ["old.txt"]
    assert (tmp_path / "old.txt").read_text() == "old"


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"cannot write .*nowhere/a\.html"),
        atomic_writer(tmp_path / "nowhere" / "a.html"),
    ):
        pass


def test_reports_import_neither_plotly_nor_pandas_nor_scipy() -> None:
    code = (
        "import sys, windtunnel.reports.html, windtunnel.reports.text, windtunnel.reports.perfetto\n"
        "print(sorted({'plotly', 'pandas', 'scipy', 'pyarrow', 'pydantic', 'simpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_link_is_written_through_and_a_pipe_is_left_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with atomic_writer(tmp_path / "link") as file:
        file.write("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "x"
    with atomic_writer("/dev/null") as file:
        file.write("x")
    assert Path("/dev/null").is_char_device()

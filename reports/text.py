"""The summary as text: the table of ``vllm bench serve``, row by row, and behind it what that does not show."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from textwrap import wrap

from windtunnel.reports.context import ReportContext
from windtunnel.reports.economics import cost_rows, pair_words, preemption_rows
from windtunnel.reports.fleet import fleet_lines, fleet_rows
from windtunnel.reports.tenants import text_table
from windtunnel.reports.transfers import transfer_rows
from windtunnel.reports.words import NOTHING, count, digits, milliseconds
from windtunnel.sim.metrics import LatencyStats, SloResult, Summary, Verdict
from windtunnel.sim.metrics.summary import SpeculationStats, percent_word

WIDTH = 50
LABEL_WIDTH = 40
OFFERED_RATE = "Request rate offered, measured (RPS):"
"""vLLM reports the rate that its client was configured with; a trace or a conversation has only one to measure."""

LATENCY_SECTIONS = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)
CLIENT_SECTIONS = (
    ("client_queue_time", "Client Queue Time", "Client-side Queueing"),
    ("e2el_including_client_queue", "E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
)


def render_text(summary: Summary, context: ReportContext | None = None) -> str:
    """The whole text report, ending in a newline.

    Rows, their order, labels and two decimals are those of ``vllm bench serve`` 0.32, so that what greps one greps
    the other; then come our own sections, and last of all the warnings.  Where nothing was measured stands a dash.
    """
    configured = configured_request_rate(context) if context else None
    lines = list(header(context)) if context else []
    lines += [*_bench_block(summary, configured), *_own_sections(summary, configured, context or ReportContext())]
    lines.append("=" * WIDTH)
    warnings = (*(context.warnings if context else ()), *summary.warnings)
    for warning in warnings:
        lines += wrap(f"WARNING: {warning}", 100, subsequent_indent="         ")
    return "\n".join(lines) + "\n"


def configured_request_rate(context: ReportContext) -> float | None:
    """The finite request rate that the client was told to keep; None if none was (a trace, all at once)."""
    for setting in context.resolved:
        if (setting.section, setting.key) != ("workload", "request_rate"):
            continue
        if isinstance(setting.value, int | float) and isfinite(setting.value):
            return float(setting.value)
    return None


def header(context: ReportContext) -> Iterator[str]:
    """What was simulated, on which engine and cost model, from which seed: a line each."""
    what = " on ".join(part for part in (context.model, context.gpu) if part)
    yield f"{context.title}: {what}" if what else context.title
    if context.engine:
        yield f"Engine: {context.engine} (simulated)"
    if context.cost_model:
        yield f"Cost model: {context.cost_model}, {context.calibration}{_advice(context)}"
    for sentence in context.calibrated_by:
        yield from wrap(sentence, 100, initial_indent="  ", subsequent_indent="    ")
    origin = [f"seed {context.seed}"] if context.seed is not None else []
    origin += [f"windtunnel {context.version}"] if context.version else []
    if origin:
        yield ", ".join(origin)


def _advice(context: ReportContext) -> str:
    return "" if context.calibrated else " -- absolute times are estimates, not measurements"


def _bench_block(summary: Summary, configured_rate: float | None) -> Iterator[str]:
    yield _rule(" Serving Benchmark Result ", "=")
    yield _row("Successful requests:", summary.completed)
    yield _row("Failed requests:", summary.failed)
    if summary.max_concurrency is not None:
        yield _row("Maximum request concurrency:", summary.max_concurrency)
    if configured_rate is not None:
        yield _row("Request rate configured (RPS):", configured_rate)
    elif summary.request_rate is not None:
        yield _row(OFFERED_RATE, summary.request_rate)
    yield _row("Benchmark duration (s):", summary.duration_s)
    yield _row("Total input tokens:", summary.total_input_tokens)
    yield _row("Total generated tokens:", summary.total_output_tokens)
    yield _row("Request throughput (req/s):", summary.request_throughput)
    if summary.goodput is not None:
        yield _row("Request goodput (req/s):", summary.goodput.request_goodput)
    yield _row("Output token throughput (tok/s):", summary.output_throughput)
    yield _row("Peak output token throughput (tok/s):", summary.max_output_tokens_per_s)
    if summary.max_output_tokens_per_s < (summary.output_throughput or 0.0):
        yield "  (as vLLM: tokens that come at once count as one)"
    yield _row("Peak concurrent requests:", float(summary.max_concurrent_requests))
    yield _row("Total token throughput (tok/s):", summary.total_token_throughput)
    yield from _latencies(summary)
    if summary.speculation is not None:
        yield from _speculation(summary.speculation)


def _transfers(summary: Summary) -> Iterator[str]:
    if summary.transfers is not None:
        yield _rule("Prefill to decode", "-")
        yield from (_row(f"{label}:", value).rstrip() for label, value in transfer_rows(summary.transfers))


def _tenants(summary: Summary) -> Iterator[str]:
    if summary.tenants is None:
        return
    yield _rule("Tenants", "-")
    yield _row("Jain's index while they compete:", summary.tenants.jain_index)
    yield from text_table(summary)


def _fleet(summary: Summary) -> Iterator[str]:
    if summary.fleet is None:
        return
    yield _rule("Fleet", "-")
    yield from (_row(f"{label}:", value).rstrip() for label, value in fleet_rows(summary.fleet))
    yield from fleet_lines(summary)


def _latencies(summary: Summary) -> Iterator[str]:
    if not summary.stability.is_steady:
        yield from _not_steady(summary.stability.verdict)
    sections = LATENCY_SECTIONS + (CLIENT_SECTIONS if summary.max_concurrency is not None else ())
    for name, short, title in sections:
        yield _rule(title, "-")
        yield from _latency_rows(short, getattr(summary, name))


def _not_steady(verdict: Verdict) -> Iterator[str]:
    yield _rule(verdict.upper().replace("_", " "), "!")
    yield from wrap("Not a steady state: the latencies below depend on how long this run was.", WIDTH)


def _latency_rows(short: str, stats: LatencyStats) -> Iterator[str]:
    yield _row(f"Mean {short} (ms):", stats.mean_ms)
    yield _row(f"Median {short} (ms):", stats.median_ms)
    for percent, value in stats.percentiles_ms:
        yield _row(f"P{percent_word(percent)} {short} (ms):", value)


def _speculation(stats: SpeculationStats) -> Iterator[str]:
    yield _rule("Speculative Decoding", "-")
    yield _row("Acceptance rate (%):", _percent(stats.acceptance_rate))
    yield _row("Acceptance length:", stats.acceptance_length)
    yield _row("Drafts:", stats.num_drafts)
    yield _row("Draft tokens:", stats.draft_tokens)
    yield _row("Accepted tokens:", stats.accepted_tokens)
    yield "Per-position acceptance (%):"
    for position, rate in enumerate(stats.per_position_rates):
        yield _row(f"  Position {position}:", 100 * rate)


NUM_PAIRS = 3
"""Pairs of victim and beneficiary in the text."""


def _own_sections(summary: Summary, configured_rate: float | None, context: ReportContext) -> Iterator[str]:
    load, kv, preemption, cache = summary.load, summary.kv, summary.preemption, summary.prefix_cache
    yield _rule("Scheduler", "-")
    if configured_rate is not None:
        yield _row(OFFERED_RATE, summary.request_rate)
    yield _row("Mean queue time (ms):", summary.queue_time.mean_ms)
    for percent, value in summary.queue_time.percentiles_ms[-1:]:
        yield _row(f"P{percent_word(percent)} queue time (ms):", value)
    yield _row("Steps:", load.num_steps)
    yield _row("Busy (% of time):", _percent(load.busy_share))
    yield _row("Mean batch size:", load.batch_size_mean)
    one = ", of one replica" if load.num_replicas > 1 else ""
    yield _row(f"Peak running requests{one}:", load.num_running_peak)
    yield _row("Mean waiting requests:", load.num_waiting_mean)
    yield _row(f"Peak waiting requests{one}:", load.num_waiting_peak)
    yield _row("Mean requests in flight:", load.in_flight_mean)
    yield _row("In flight by Little's law:", load.in_flight_by_littles_law)
    yield _row("Peak requests in flight at one instant:", summary.peak_concurrent_requests)
    yield _row("Utilisation (rho):", load.utilisation)
    yield _rule("KV cache", "-")
    yield _row("Mean KV usage (%):", _percent(kv.usage_mean))
    yield _row("Peak KV usage (%):", _percent(kv.usage_peak))
    yield _row("Peak KV usage incl. cached (%):", _percent(kv.cached_usage_peak))
    yield _row("Preemptions:", preemption.num_preemptions)
    yield _row("Preempted requests:", preemption.num_preempted_requests)
    yield _row("Most preemptions of one request:", preemption.max_preemptions_per_request)
    yield _row("Recomputed prefill tokens:", preemption.recomputed_prefill_tokens)
    yield _row("Recomputed share of prefill (%):", _percent(preemption.recomputed_share))
    yield _row("Prefix cache hit rate (%):", _percent(cache.hit_rate))
    yield _row("Prefix hit rate incl. resumed (%):", _percent(cache.hit_rate_with_resumed))
    yield from _work(summary)
    yield from _transfers(summary)
    yield from _tenants(summary)
    yield from _fleet(summary)
    yield from _economics(summary, context)
    yield from _objectives(summary)
    yield _rule("Stability", "-")
    yield _row("Verdict:", summary.stability.verdict.value)
    yield from wrap(summary.stability.reason, WIDTH)


def _work(summary: Summary) -> Iterator[str]:
    """What became of the computed tokens; rows of waste that this policy does not know are left out."""
    waste, swap = summary.waste, summary.swap
    given_up = "Abandoned by their clients:" if summary.fleet is None else "Of requests given up or lost:"
    yield _rule("Work", "-")
    yield _row("Computed tokens:", waste.computed_tokens)
    yield _row("Wasted share of them (%):", _percent(waste.wasted_share))
    for label, amount in (
        ("Recomputed tokens:", waste.recomputed_tokens),
        ("Padding tokens:", waste.padding_tokens),
        ("Straggler tokens:", waste.straggler_tokens),
        ("Rejected draft tokens:", waste.rejected_draft_tokens),
        (given_up, waste.abandoned_tokens),
        ("KV blocks swapped out:", swap.swapped_out_blocks),
        ("KV blocks swapped in:", swap.swapped_in_blocks),
    ):
        if amount:
            yield _row(label, amount)
    if waste.padding_tokens or waste.straggler_tokens:
        yield _row("Tokens per slot and step:", summary.slots.efficiency)
        yield _row("Mean slots held:", summary.slots.slots_mean)
        yield _row("Mean prompts per batch:", summary.prefill_batch_size)
        yield _row("Mean batch formation wait (ms):", summary.formation_wait.mean_ms)


def _economics(summary: Summary, context: ReportContext) -> Iterator[str]:
    """Cost and energy where a price or a power was given, and what preemptions cost where there were any."""
    stats = summary.economics
    for title, rows in (("Cost and energy", cost_rows(stats)), ("What preemptions cost", preemption_rows(stats))):
        shown = [_row(f"{label}:", value).rstrip() for label, value in rows]
        yield from [_rule(title, "-"), *shown] if shown else []
    if stats.preemption is not None:
        yield "Most lost:"
        yield from (f"  {pair_words(pair, context.label)}" for pair in stats.preemption.pairs[:NUM_PAIRS])


def _objectives(summary: Summary) -> Iterator[str]:
    if summary.goodput is None and not summary.slo:
        return
    yield _rule("Objectives", "-")
    if summary.goodput is not None:
        yield _row(f"Good requests (%) [{summary.goodput.limits}]:", _percent(summary.goodput.good_share))
    for result in summary.slo:
        yield f"{result.slo.text:<{LABEL_WIDTH - 6}} {'PASS' if result.passed else 'FAIL'}  {measured(result)}"


def measured(result: SloResult) -> str:
    """What was measured for an objective, with its unit and what restricts it."""
    return f"{measured_value(result)}{f' ({result.note})' if result.note else ''}"


def measured_value(result: SloResult) -> str:
    """What was measured for an objective, with its unit, and with as many digits as tell it from the limit."""
    value, limit = result.measured, result.slo.limit
    if value is None:
        return NOTHING
    shown = _in_unit(value, result.slo.unit)
    if value == limit or shown != _in_unit(limit, result.slo.unit):
        return shown
    return f"{digits(value, 9)} {result.slo.unit}".replace(" /s", "/s").rstrip()


def _in_unit(value: float, unit: str) -> str:
    match unit:
        case "ms":
            return milliseconds(value)
        case "%":
            return f"{digits(value)} %"
    return f"{count(value)}{unit}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _rule(title: str, fill: str) -> str:
    return f"{title:{fill}^{WIDTH}}"


def _row(label: str, value: float | int | str | None) -> str:
    shown = NOTHING if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{LABEL_WIDTH}} {shown:<10}".rstrip() if value is None else f"{label:<{LABEL_WIDTH}} {shown:<10}"

"""The answer of a run in a few sentences: did it keep up, what did clients see, what was scarce, what to try."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from windtunnel.reports.causes import CAUSE_WORDS, WaitCause, shares_of_waiting
from windtunnel.reports.text import measured_value
from windtunnel.reports.words import count, milliseconds, percent, plural
from windtunnel.sim.metrics import Summary, Verdict
from windtunnel.sim.records import Records

NOTEWORTHY_WAIT_SHARE = 0.1
"""Mean queue time over mean E2EL from which on the queue is worth a sentence."""


class Answer(NamedTuple):
    """A headline and the sentences below it."""

    headline: str
    sentences: tuple[str, ...]


def answer(records: Records, summary: Summary) -> Answer:
    """What a reader wants to know first."""
    sentences = (_latencies(summary), _objectives(summary), _scarcity(records, summary), _preemptions(records, summary))
    return Answer(_headline(summary), tuple(sentence for sentence in sentences if sentence))


def _headline(summary: Summary) -> str:
    stability = summary.stability
    offered = f"{count(summary.request_rate)} requests/s" if summary.request_rate else "all requests at once"
    clients = plural(summary.max_concurrency or 0, "client")
    match stability.verdict:
        case Verdict.STABLE if summary.max_concurrency is not None:
            return f"Stable: {clients} in a closed loop are served as fast as they ask."
        case Verdict.STABLE:
            return f"Stable: it keeps up with {offered}."
        case Verdict.BACKLOGGED if summary.request_rate is None and summary.max_concurrency is not None:
            return f"Backlogged: {clients} ask for more at once than the engine can run."
        case Verdict.BACKLOGGED if summary.request_rate is None:
            return (
                f"One burst: {summary.num_prompts:,} requests at once took {milliseconds(1000 * summary.duration_s)}."
            )
        case Verdict.BACKLOGGED:
            return f"Backlogged: it keeps up with {offered}, but not without a queue."
        case Verdict.OVERLOADED:
            return f"Overloaded: {offered} come in, {count(stability.completion_rate)}/s get done."
        case Verdict.STALLED:
            return "Stalled: the queue's first request can never be scheduled."
    return "Too short to say whether it keeps up."


def _latencies(summary: Summary) -> str:
    if not summary.completed:
        return "No request finished."
    first, gap = summary.ttft, summary.itl
    high = summary.percentiles[-1] if summary.percentiles else None
    text = f"Half of the requests had their first token within {milliseconds(first.median_ms)}"
    if high is not None:
        text += f", {high:g} % within {milliseconds(first.percentile_ms(high))}"
    text += f", then a token every {milliseconds(gap.mean_ms)}" if gap.count else ""
    return f"{text}. In a longer run these would be higher." if not summary.stability.is_steady else f"{text}."


def _objectives(summary: Summary) -> str:
    if not summary.slo:
        return ""
    missed = [result for result in summary.slo if not result.passed]
    if not missed:
        return {1: "The objective is kept.", 2: "Both objectives are kept."}.get(
            len(summary.slo), f"All {len(summary.slo)} objectives are kept."
        )
    listed = ", ".join(f"{result.slo.text} (measured {measured_value(result)})" for result in missed)
    return f"{len(missed)} of {plural(len(summary.slo), 'objective')} missed: {listed}."


def _scarcity(records: Records, summary: Summary) -> str:
    queued, total = summary.queue_time.mean_ms, summary.e2el.mean_ms
    shares = shares_of_waiting(records)
    if not shares or not queued or not total or queued < NOTEWORTHY_WAIT_SHARE * total:
        return "Hardly anything waited in the queue: neither seats, KV blocks nor the token budget were short."
    cause, share = next(iter(shares.items()))
    text = f"Requests waited {milliseconds(queued)} in the queue on average, {percent(share)} of it because "
    text += CAUSE_WORDS[cause]
    if cause is WaitCause.SEATS and summary.kv.usage_peak is not None and summary.kv.usage_peak < 0.9:
        seats = max(replica.max_num_seqs for replica in records.replicas)
        free = percent(1 - summary.kv.usage_peak)
        return f"{text} ({seats:,}); at least {free} of the KV cache stayed free, so a higher max_num_seqs can help."
    return f"{text}."


def _preemptions(records: Records, summary: Summary) -> str:
    stats = summary.preemption
    if not stats.num_preemptions:
        return "No request was preempted."
    text = (
        f"{plural(stats.num_preemptions, 'preemption')} hit {plural(stats.num_preempted_requests, 'request')}: "
        f"{stats.recomputed_prefill_tokens:,} tokens were computed twice, {percent(stats.recomputed_share)} of all "
        "prefill work."
    )
    fits = requests_that_fit(records)
    if fits and summary.load.num_running_peak > fits:
        text += (
            f" The KV cache holds about {plural(fits, 'request')} of full length, up to "
            f"{summary.load.num_running_peak:,} ran at once: try a larger cache, or max_num_seqs near {fits:,}."
        )
    return text


def requests_that_fit(records: Records) -> int:
    """How many requests of mean final length (prompt and output) the KV cache of one replica holds."""
    table = records.requests
    served = table.first_token_ns >= 0
    if not served.any() or not records.replicas:
        return 0
    final_tokens = float(np.mean(table.num_prompt_tokens[served] + table.num_output_tokens[served]))
    return int(min(replica.num_usable_blocks * replica.block_size for replica in records.replicas) / final_tokens)

"""Why a result is as it is: checks of any run, measured or simulated, and findings with the knob to turn.

``docs/explain.md`` lists every finding with its rule and thresholds.  What the checks rest on is Little's law (in
flight = throughput x latency), the fluid queue beyond capacity, the definitions of ``vllm bench serve``, and vLLM's
order of admission: a seat, then KV blocks, then a share of the step's token budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from windtunnel.calibrate import explain_measurement, explain_server
from windtunnel.calibrate.explain_evidence import Evidence
from windtunnel.calibrate.explain_types import Explanation, Facts, Finding, Severity
from windtunnel.calibrate.live.observed import ObservedRun
from windtunnel.sim.metrics.words import count, digits, percent, seconds

__all__ = ["Explanation", "Facts", "Finding", "Severity", "explain", "explain_together"]

SAME_PROMPTS_TTFT = 0.6
"""TTFT of a later run with the same prompts over that of an earlier one, at the same load or more, that says cache."""
SAME_PROMPTS_THROUGHPUT = 1.25


def explain(run: ObservedRun, facts: Facts | None = None) -> Explanation:
    """Every finding on a run, the most important first; ``facts`` are what is known besides the result.

    Findings that make the numbers invalid come before those that mislead, then limits of the server, then weak spots;
    within each the one that touches more comes first.
    """
    evidence = Evidence(run, facts or Facts())
    checks = (*explain_measurement.CHECKS, *explain_server.CHECKS)
    found = [finding for check in checks if (finding := check(evidence)) is not None]
    return Explanation(
        name=run.name,
        source=run.source,
        findings=_ordered(found),
        measures=_measures(evidence),
        remarks=tuple(_remarks(evidence)),
        not_checked=tuple(_not_checked(evidence)),
    )


def explain_together(runs: Sequence[ObservedRun], facts: Sequence[Facts] | Facts | None = None) -> list[Explanation]:
    """``explain`` for each run, and what only several show: prompts that an earlier run left in the cache.

    The runs are taken to be in the order in which they were made, on one server that was not restarted.
    """
    given = [facts or Facts()] * len(runs) if facts is None or isinstance(facts, Facts) else list(facts)
    explained = [explain(run, each) for run, each in zip(runs, given, strict=True)]
    for later in range(1, len(runs)):
        finding = next(
            (found for earlier in range(later) if (found := _same_prompts(runs[earlier], runs[later])) is not None),
            None,
        )
        if finding is not None:
            others = [each for each in explained[later].findings if each.kind != finding.kind]
            explained[later] = replace(explained[later], findings=_ordered([finding, *others]))
    return explained


def _ordered(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.rank, reverse=True))


def _same_prompts(earlier: ObservedRun, later: ObservedRun) -> Finding | None:
    """The same prompts again, and faster: the same seed, and a prefix cache that still holds them."""
    before, after = Evidence(earlier, Facts()), Evidence(later, Facts())
    if not _has_same_prompts(before, after):
        return None
    load = (before.limit or before.finite_rate or 0.0, after.limit or after.finite_rate or 0.0)
    if load[1] < load[0]:
        return None
    ttft = (before.mean_s("ttft"), after.mean_s("ttft"))
    rate = (before.throughput, after.throughput)
    faster = bool(ttft[0] and ttft[1] and ttft[1] <= SAME_PROMPTS_TTFT * ttft[0])
    more = bool(load[0] == load[1] and rate[0] and rate[1] and rate[1] >= SAME_PROMPTS_THROUGHPUT * rate[0])
    if not faster and not more:
        return None
    told = [f"TTFT fell from {seconds(ttft[0] or 0)} to {seconds(ttft[1] or 0)}"] if faster else []
    told += [f"throughput rose by {percent((rate[1] or 0) / (rate[0] or 1) - 1)}"] if more else []
    return Finding(
        "warm_cache",
        Severity.INVALID,
        1.0,
        "the same prompts as in an earlier run, still in the prefix cache",
        f"The prompts have the same lengths in the same order as those of {earlier.name}, and {' and '.join(told)} "
        "though the load is no lower: one seed made both, and the prefix cache held them.",
        "use another --seed for every run, restart the server between runs, or measure with --no-enable-prefix-caching",
        {
            "earlier": earlier.name,
            "ttft_ratio": ttft[1] / ttft[0] if ttft[0] and ttft[1] else None,
            "throughput_ratio": rate[1] / rate[0] if rate[0] and rate[1] else None,
        },
    )


def _has_same_prompts(before: Evidence, after: Evidence) -> bool:
    """Whether one run's prompt lengths are the other's, in order; without single requests, whether totals agree."""
    if before.has_requests and after.has_requests:
        one, other = before.table.num_prompt_tokens, after.table.num_prompt_tokens
        number = min(len(one), len(other))
        return number >= 8 and bool((one[:number] == other[:number]).all() and (one[:number] > 0).all())
    one_total, other_total = before.metrics.total_input_tokens, after.metrics.total_input_tokens
    return bool(one_total) and one_total == other_total and before.metrics.completed == after.metrics.completed


def _measures(evidence: Evidence) -> dict[str, float | int | str | None]:
    """What the checks computed on the way; None where it is not known."""
    ttft, e2el, wait = evidence.mean_s("ttft"), evidence.mean_s("e2el"), evidence.mean_s("client_queue_time")
    verdict = evidence.stability
    return {
        "requests": evidence.num_requests,
        "completed": evidence.metrics.completed,
        "failed": evidence.num_failed,
        "duration_s": evidence.metrics.duration_s,
        "asked_requests_per_s": evidence.finite_rate,
        "offered_requests_per_s": verdict.offered_request_rate if verdict else None,
        "finished_requests_per_s": evidence.throughput,
        "max_concurrency": evidence.limit,
        "in_flight": evidence.in_flight,
        "in_flight_peak": evidence.metrics.peak_concurrent_requests,
        "decoding": evidence.decoding,
        "client_queue_s": wait,
        "ttft_s": ttft,
        "decode_s": e2el - ttft if e2el is not None and ttft is not None else None,
        "e2el_s": e2el,
        "waiting_mean": evidence.metrics.num_waiting_mean,
        "running_mean": evidence.metrics.num_running_mean,
        "kv_usage_peak": evidence.metrics.kv_usage_peak,
        "preemptions": evidence.metrics.preemptions,
        "prefix_cache_hit_rate": evidence.hit_rate,
        "stability": verdict.verdict.value if verdict else None,
    }


def _remarks(evidence: Evidence) -> Iterator[str]:
    """Where the latency goes, and trade-offs that are a choice and no fault."""
    ttft, e2el = evidence.mean_s("ttft"), evidence.mean_s("e2el")
    if ttft is not None and e2el:
        decode = e2el - ttft
        wait = evidence.mean_s("client_queue_time") or 0.0
        held = f"{seconds(wait)} at the client, " if wait > 0.01 * e2el else ""
        usual = evidence.percentile_s("ttft", 5.0)
        split = f" (an unhindered one takes {seconds(usual)}; the rest is queue and others' steps)" if usual else ""
        cause = "the model's step time, not the scheduler" if decode > 0.8 * e2el else "the scheduler's part is large"
        if evidence.facts.queue_s is None:
            yield (
                f"Of a request's time {held}{seconds(ttft)} pass until its first token{split} and {seconds(decode)} in "
                f"decoding ({percent(decode / e2el)} of E2EL): {cause}."
            )
    if evidence.in_flight is not None:
        limit = f" of at most {evidence.limit:,}" if evidence.limit else ""
        yield f"Throughput x E2EL = {digits(evidence.in_flight)} requests in flight{limit} (Little's law)."
    tail, middle = evidence.percentile_s("itl", 99.0), evidence.percentile_s("itl", 50.0)
    if tail and middle and tail > 5 * middle and tail > 0.1:
        yield (
            f"ITL p99 ({seconds(tail)}) is {digits(tail / middle, 2)} times the median: steps with prompts in them. A "
            "smaller --max-num-batched-tokens shortens them, and lengthens TTFT."
        )
    if (cold := explain_measurement.cold_first_request(evidence)) is not None:
        yield cold
    yield from _since_start(evidence)
    if evidence.hit_rate is not None and evidence.facts.shared_prefix_share is None and evidence.hit_rate >= 0.05:
        yield (
            f"{percent(evidence.hit_rate)} of the prompt tokens came from the prefix cache; is that what the workload "
            "shares? (--shared-prefix-share checks it)"
        )


def _since_start(evidence: Evidence) -> Iterator[str]:
    """What one look at the server's counters says."""
    at_most, counted = explain_server.preemptions_at_most(evidence), evidence.facts.counted_since_start or {}
    if at_most == 0:
        yield "The server has preempted no request since it started, so none in this run."
    elif at_most is not None:
        yield (
            f"The server counts {at_most:,} preemptions since it started: no more than that fell into this run. A "
            "range query of Prometheus (--metrics) would say how many."
        )
    asked, hits = counted.get("prefix_query_tokens", 0), counted.get("prefix_hit_tokens", 0)
    if asked and evidence.hit_rate is None:
        yield f"Since the server started {percent(hits / asked)} of the prompt tokens came from the prefix cache."


def _not_checked(evidence: Evidence) -> Iterator[str]:
    """What is missing, and for which checks."""
    if not evidence.has_requests:
        yield "single requests (vllm bench serve --save-detailed): growth of the queue, client limits, cold start"
    elif not len(evidence.timed):
        yield "when requests were sent: growth of the queue, client limits, requests in flight over time"
    elif not len(evidence.late_ns):
        yield "when requests were due: late sending and the wait at the client"
    looked_once = evidence.facts.counted_since_start is not None
    if evidence.waiting is None:
        source = (
            "one look at /metrics has none; a range query of Prometheus, --log" if looked_once else "--metrics, --log"
        )
        yield f"the server's gauges over time ({source}): whether seats or KV blocks were short"
    if evidence.max_num_seqs is None:
        yield "max_num_seqs (--max-num-seqs): whether all seats were taken"
    if evidence.budget is None:
        yield "max_num_batched_tokens (--max-num-batched-tokens): whether it is too small"
    if evidence.hit_rate is None and evidence.facts.max_prefill_tokens_per_s is None:
        source = "a range query of Prometheus, --log" if looked_once else "--metrics, --log"
        yield f"prefix cache hits ({source}) or the fastest prefill (--max-prefill): whether the cache was warm"


def describe(measure: str, value: float | int | str) -> str:
    """A measure as people read it."""
    if isinstance(value, str):
        return value
    if measure.endswith("_s") and not measure.endswith("_per_s"):
        return seconds(float(value))
    if measure.endswith(("usage_peak", "hit_rate")):
        return percent(float(value))
    return count(float(value)) if float(value).is_integer() else digits(float(np.round(value, 6)))

"""The summary of a run: what ``vllm bench serve`` reports, under its names, and what it does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.sim.metrics.economics import Economics, Rates, economics
from windtunnel.sim.metrics.fleet import FleetStats, PoolStats, fleet_stats, held_ns, replica_rates
from windtunnel.sim.metrics.latency import (
    NS_PER_S,
    RequestLatencies,
    expanded_inter_token_latencies,
    inter_token_latencies,
    max_concurrent_requests,
    peak_in_flight,
    peak_tokens_per_second,
    request_latencies,
)
from windtunnel.sim.metrics.load import (
    KvStats,
    LoadStats,
    in_flight,
    kv_stats,
    load_stats,
    per_second,
    ratio,
    utilisation,
)
from windtunnel.sim.metrics.sample import LatencyStats, Sample, latency_stats, sample
from windtunnel.sim.metrics.slo import GoodputLimits, Slo, SloResult, parse_slos
from windtunnel.sim.metrics.stability import Stability, Verdict, judge
from windtunnel.sim.metrics.tenants import TENANT_KEYS, TenantsSummary, TenantStats, tenants_summary
from windtunnel.sim.metrics.transfers import TransferStats, transfer_stats
from windtunnel.sim.metrics.waste import SlotUse, TokenWaste, formation_wait_ns, mean_batch_size, slot_use, token_waste
from windtunnel.sim.metrics.words import percent as in_percent
from windtunnel.sim.metrics.words import plural, seconds
from windtunnel.sim.records import IntArray, Outcome, Records, is_unservable
from windtunnel.sim.workload import Workload

SCHEMA_VERSION = 1
"""Of our own keys in the JSON; raised when one changes its meaning."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many requests kept all given limits (``vllm bench serve --goodput``)."""

    limits: GoodputLimits
    num_good_requests: int
    request_goodput: float | None
    """Good requests per second."""
    good_share: float | None
    """Good requests over all requests, failed and unfinished ones included."""


@dataclass(frozen=True, slots=True)
class PreemptionStats:
    """What preemption by recomputation cost."""

    num_preemptions: int
    num_preempted_requests: int
    max_preemptions_per_request: int
    recomputed_prefill_tokens: int
    """Tokens computed again because a preemption had thrown them away."""
    recomputed_share: float | None
    """Those over all prefill tokens computed."""


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Tokens looked up in and found by the prefix cache."""

    query_tokens: int
    """Prompt tokens at first admissions, as vLLM counts since PR 25787."""
    hit_tokens: int
    hit_rate: float | None
    """None if no prefix was ever kept: caching is off."""
    query_tokens_with_resumed: int
    """Re-admissions after preemption counted too."""
    hit_tokens_with_resumed: int
    hit_rate_with_resumed: float | None


@dataclass(frozen=True, slots=True)
class SwapStats:
    """KV blocks copied between GPU and CPU."""

    swapped_out_blocks: int
    swapped_in_blocks: int


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """How drafts fared, as ``vllm bench serve`` reports it."""

    num_drafts: int
    """Drafts that were verified."""
    draft_tokens: int
    accepted_tokens: int
    per_position_rates: tuple[float, ...]
    """Share of all drafts whose first, second, … token held."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over draft tokens."""
        return ratio(self.accepted_tokens, self.draft_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a verified draft yields on average, the model's own included."""
        return 1 + self.accepted_tokens / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything about a run in a few hundred numbers.  Latencies are those of the finished requests."""

    num_prompts: int
    completed: int
    failed: int
    """All that did not finish: rejected, aborted or unfinished."""
    rejected: int
    unservable: int
    """Those of the rejected whose prompts leave no room for an answer within max_model_len, whatever the load."""
    aborted: int
    unfinished: int
    stalled: bool
    duration_s: float
    """From the first sending to the last finish; to the end of the run if a request did not finish."""
    total_input_tokens: int
    """Prompt tokens of finished requests."""
    total_output_tokens: int
    """Output tokens of finished requests."""
    request_throughput: float | None
    output_throughput: float | None
    total_token_throughput: float | None
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    """Most requests in a 1-second bucket, as vLLM 0.32 counts: at least ``peak_concurrent_requests``."""
    peak_concurrent_requests: int
    """Most requests in flight at one instant."""
    request_rate: float | None
    """Offered: requests due per second, measured from the first to the last; None if all are due at once.

    Where turns of a conversation follow answers it counts turns, whatever rate conversations begin at.
    """
    max_concurrency: int | None
    percentiles: tuple[float, ...]
    ttft: LatencyStats
    tpot: LatencyStats
    itl: LatencyStats
    e2el: LatencyStats
    queue_time: LatencyStats
    """In the engine: from arrival to the first step."""
    client_queue_time: LatencyStats
    """At the client, before sending, under a limit on requests in flight."""
    e2el_including_client_queue: LatencyStats
    goodput: Goodput | None
    slo: tuple[SloResult, ...]
    preemption: PreemptionStats
    economics: Economics
    """What the run cost, and what preemptions took of it."""
    kv: KvStats
    load: LoadStats
    prefix_cache: PrefixCacheStats
    waste: TokenWaste
    slots: SlotUse
    formation_wait: LatencyStats
    """The part of a request's wait in which its engine computed nothing, because it waited for company."""
    prefill_batch_size: float | None
    """Prompts that a step computes together, mean over the steps that compute any."""
    swap: SwapStats
    speculation: SpeculationStats | None
    """None without speculative decoding."""
    tenants: TenantsSummary | None
    """None without tenants."""
    transfers: TransferStats | None
    """None without prefill and decode roles."""
    fleet: FleetStats | None
    """None for the replicas of one server."""
    stability: Stability
    warnings: tuple[str, ...]
    """What a reader must know before believing a number."""

    @property
    def slo_passed(self) -> bool | None:
        """Whether every objective was kept; None if none was set."""
        return all(result.passed for result in self.slo) if self.slo else None

    def to_dict(self, *, detailed: Records | None = None, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The result under the keys of ``vllm bench serve --save-result``, in its order, then ours.

        ``detailed`` adds the lists of one entry a request (in seconds, 0 for a failed request), as
        ``--save-detailed`` does; ``metadata`` sets top-level keys such as ``model_id``.  ``date`` is null: the same
        seed must give the same bytes.  Where nothing was measured the value is null (vLLM writes 0).

        ``request_rate`` and ``burstiness`` are what vLLM's client was configured with.  Records do not know that: the
        former is the rate at which requests were due, as measured (``"inf"`` if all at once; also under
        ``offered_request_rate``, then null), the latter null, unless ``metadata`` sets them.
        """
        return _to_dict(self, detailed, metadata or {})


def summarize(
    records: Records,
    workload: Workload,
    *,
    slo: str | Iterable[str | Slo] | None = None,
    goodput: str | Iterable[str] | GoodputLimits | None = None,
    saturation_request_throughput: float | None = None,
    percentiles: Sequence[float] = (50, 90, 95, 99),
    rates: Rates | Sequence[Rates] | None = None,
    currency: str = "",
    tenant_weights: Mapping[str, float] | None = None,
    tenants_alone: Mapping[str, Mapping[str, float | None]] | None = None,
) -> Summary:
    """Summary of a run.

    ``slo`` takes objectives (``Slo``) or their text (``ttft:p99<500ms``), ``goodput`` limits or vLLM's text
    (``ttft:500 tpot:50``), ``saturation_request_throughput`` the requests/s at which the same system is full (then
    rho is known), ``rates`` price and power of the GPUs of each replica, or of all replicas alike.
    ``tenant_weights`` are those of the gateway (1 for others), ``tenants_alone`` what each tenant saw
    with the server to itself (``sim.metrics.tenants``).

    Raises SloSyntaxError for text that cannot be read, ValueError for a percentile outside 0 … 100, a saturation
    throughput that is not positive, or a goodput objective without goodput limits.
    """
    if saturation_request_throughput is not None and saturation_request_throughput <= 0:
        raise ValueError(f"saturation_request_throughput must be above 0, got {saturation_request_throughput}")
    slos, limits = _slos(slo), _limits(goodput)
    if limits is None and any(objective.metric == "goodput" for objective in slos):
        raise ValueError("an objective on goodput needs goodput limits: add for example --goodput 'ttft:500 tpot:50'")
    samples = _Samples(request_latencies(records), inter_token_latencies(records))
    table = records.requests
    start_ns, end_ns = _window(records)
    duration_ns = end_ns - start_ns
    outcomes = np.bincount(table.outcome, minlength=len(Outcome)).tolist()
    completed = outcomes[Outcome.FINISHED]
    rows = samples.latencies.rows
    inputs, outputs = int(table.num_prompt_tokens[rows].sum()), int(table.num_output_tokens[rows].sum())
    stability = judge(records, workload, saturation_request_throughput=saturation_request_throughput)
    throughput, e2el = per_second(completed, duration_ns), latency_stats(samples["e2el"], percentiles)
    littles_law = None
    if throughput is not None and e2el.mean_ms is not None and completed == len(table):
        littles_law = throughput * e2el.mean_ms / 1000
    rho = utilisation(
        stability.offered_request_rate, saturation_request_throughput, workload.max_concurrency is not None
    )
    summary = Summary(
        num_prompts=len(table),
        completed=completed,
        failed=len(table) - completed,
        rejected=outcomes[Outcome.REJECTED],
        unservable=int(is_unservable(records).sum()),
        aborted=outcomes[Outcome.ABORTED],
        unfinished=outcomes[Outcome.UNFINISHED],
        stalled=records.stalled,
        duration_s=duration_ns / NS_PER_S,
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        request_throughput=throughput,
        output_throughput=per_second(outputs, duration_ns),
        total_token_throughput=per_second(inputs + outputs, duration_ns),
        max_output_tokens_per_s=peak_tokens_per_second(records),
        max_concurrent_requests=max_concurrent_requests(records),
        peak_concurrent_requests=peak_in_flight(*in_flight(records)),
        request_rate=_offered_rate(records, stability),
        max_concurrency=workload.max_concurrency,
        percentiles=tuple(percentiles),
        ttft=latency_stats(samples["ttft"], percentiles),
        tpot=latency_stats(samples["tpot"], percentiles),
        itl=latency_stats(samples["itl"], percentiles),
        e2el=e2el,
        queue_time=latency_stats(samples["queue_time"], percentiles),
        client_queue_time=latency_stats(samples["client_queue_time"], percentiles),
        e2el_including_client_queue=latency_stats(samples["e2el_including_client_queue"], percentiles),
        goodput=None if limits is None else _goodput(samples.latencies, limits, len(table), duration_ns),
        slo=(),
        preemption=_preemption(records),
        economics=_economics(records, (start_ns, end_ns), rates, currency),
        kv=kv_stats(records, start_ns, end_ns),
        load=load_stats(records, start_ns, end_ns, littles_law=littles_law, utilisation=rho),
        prefix_cache=_prefix_cache(records),
        waste=token_waste(records),
        slots=slot_use(records),
        formation_wait=latency_stats(sample(formation_wait_ns(records)), percentiles),
        prefill_batch_size=mean_batch_size(records),
        swap=_swap(records),
        speculation=_speculation(records),
        transfers=transfer_stats(records, start_ns, end_ns, percentiles),
        tenants=tenants_summary(
            records, workload, goodput=limits, weights=tenant_weights, alone=tenants_alone, percentiles=percentiles
        ),
        fleet=fleet_stats(records, start_ns, end_ns, percentiles),
        stability=stability,
        warnings=(),
    )
    if summary.fleet is not None:
        summary = replace(summary, load=replace(summary.load, num_replicas=summary.fleet.num_ready_peak))
    summary = replace(summary, slo=tuple(_check(objective, summary, samples) for objective in slos))
    return replace(summary, warnings=tuple(_warnings(summary)))


class _Samples:
    """The samples behind the statistics, each sorted once, by the name of the metric; in nanoseconds."""

    def __init__(self, latencies: RequestLatencies, itl: Sample) -> None:
        self.latencies = latencies
        self._made = {"itl": itl}

    def __getitem__(self, metric: str) -> Sample:
        if metric not in self._made:
            self._made[metric] = self._make(metric)
        return self._made[metric]

    def _make(self, metric: str) -> Sample:
        of = self.latencies
        match metric:
            case "ttft":
                return sample(of.ttft_ns)
            case "tpot":
                return sample(of.tpot_ns[of.has_tpot])
            case "e2el":
                return sample(of.e2el_ns)
            case "queue_time":
                return sample(of.queue_ns)
            case "client_queue_time":
                return sample(of.client_queue_ns)
            case "e2el_including_client_queue":
                return sample(of.e2el_ns + of.client_queue_ns)
        raise KeyError(metric)


def _economics(
    records: Records, window: tuple[int, int], rates: Rates | Sequence[Rates] | None, currency: str
) -> Economics:
    """What the run cost; a fleet's replicas are paid for as long as they are there, each pool's at its own price."""
    if records.fleet is None:
        return economics(records, window[1] - window[0], rates, currency=currency)
    held, own = held_ns(records, *window), replica_rates(records.fleet)
    paid = economics(records, held, own, currency=currency)
    hours = (window[1] - window[0]) / NS_PER_S / 3600
    gpus_ns = sum(time * each.num_gpus for time, each in zip(held, own, strict=True))
    mean_gpus = ratio(gpus_ns, window[1] - window[0]) or 0.0
    return replace(
        paid,
        num_gpus=round(mean_gpus) if abs(mean_gpus - round(mean_gpus)) < 1e-9 * mean_gpus else mean_gpus,
        cost_per_hour=None if paid.cost is None else ratio(paid.cost, hours),
    )


def _slos(given: str | Iterable[str | Slo] | None) -> tuple[Slo, ...]:
    if given is None:
        return ()
    found: list[Slo] = []
    for item in [given] if isinstance(given, str) else given:
        found += [item] if isinstance(item, Slo) else parse_slos(item)
    return tuple(found)


def _limits(given: str | Iterable[str] | GoodputLimits | None) -> GoodputLimits | None:
    if given is None or isinstance(given, GoodputLimits):
        return given
    texts = [given] if isinstance(given, str) else list(given)
    return GoodputLimits.parse(texts) if texts else None


def _window(records: Records) -> tuple[int, int]:
    """From the first sending to the last end of a request; to the end of the run if one is still open."""
    table = records.requests
    sent = table.arrival_ns[table.arrival_ns >= 0]
    start_ns = int(sent.min()) if len(sent) else 0
    is_open = bool((table.outcome == Outcome.UNFINISHED).any())
    end_ns = records.end_ns if is_open else int(table.finish_ns.max(initial=start_ns))
    return start_ns, max(end_ns, start_ns)


def _goodput(latencies: RequestLatencies, limits: GoodputLimits, num_requests: int, duration_ns: int) -> Goodput:
    good = np.ones(len(latencies.rows), np.bool_)
    for limit_ms, values_ns in (
        (limits.ttft_ms, latencies.ttft_ns),
        (limits.tpot_ms, latencies.tpot_ns),
        (limits.e2el_ms, latencies.e2el_ns),
    ):
        if limit_ms is not None:
            good &= values_ns <= limit_ms * 1e6
    num_good = int(good.sum())
    return Goodput(limits, num_good, per_second(num_good, duration_ns), ratio(num_good, num_requests))


def _preemption(records: Records) -> PreemptionStats:
    counts, recomputed = records.requests.num_preemptions, int(records.requests.num_recomputed_tokens.sum())
    prefilled = sum(int(replica.steps.prefill_tokens.sum()) for replica in records.replicas)
    return PreemptionStats(
        num_preemptions=int(counts.sum()),
        num_preempted_requests=int((counts > 0).sum()),
        max_preemptions_per_request=int(counts.max(initial=0)),
        recomputed_prefill_tokens=recomputed,
        recomputed_share=ratio(recomputed, prefilled),
    )


def _prefix_cache(records: Records) -> PrefixCacheStats:
    table = records.requests
    admitted = table.scheduled_ns >= 0
    queries = int(table.num_prompt_tokens[admitted].sum())
    hits = int(table.num_cached_tokens[admitted].sum())
    all_queries = queries + int(table.num_resumed_query_tokens.sum())
    all_hits = hits + int(table.num_resumed_cached_tokens.sum())
    was_used = all_hits > 0 or any(bool(replica.steps.num_cached_blocks.any()) for replica in records.replicas)
    return PrefixCacheStats(
        query_tokens=queries,
        hit_tokens=hits,
        hit_rate=ratio(hits, queries) if was_used else None,
        query_tokens_with_resumed=all_queries,
        hit_tokens_with_resumed=all_hits,
        hit_rate_with_resumed=ratio(all_hits, all_queries) if was_used else None,
    )


def _swap(records: Records) -> SwapStats:
    steps = [replica.steps for replica in records.replicas]
    return SwapStats(
        sum(int(table.num_swapped_out_blocks.sum()) for table in steps),
        sum(int(table.num_swapped_in_blocks.sum()) for table in steps),
    )


def _speculation(records: Records) -> SpeculationStats | None:
    longest = max((len(replica.drafts) for replica in records.replicas), default=0)
    if not longest:
        return None
    verified, accepted = np.zeros(longest, np.int64), np.zeros(longest, np.int64)
    for drafts in (replica.drafts for replica in records.replicas):
        verified[: len(drafts)] += drafts.num_verified
        accepted[: len(drafts)] += drafts.num_accepted
    num_drafts = int(verified[0])
    rates = tuple((accepted / num_drafts).tolist()) if num_drafts else ()
    return SpeculationStats(num_drafts, int(verified.sum()), int(accepted.sum()), rates)


def _check(slo: Slo, summary: Summary, samples: _Samples) -> SloResult:
    measured = _measure(slo, summary, samples)
    if measured is None:
        # a latency that no request could have (no gap between tokens) breaks no promise; no finished request does,
        # and so does a floor under what was never there
        passed = summary.completed > 0 and summary.failed == 0 and slo.unit == "ms"
        return SloResult(slo, None, passed, "nothing to measure")
    is_promise = not (summary.stability.is_hopeless and _depends_on_the_end(slo)) and not _fails_too_often(slo, summary)
    return SloResult(slo, measured, slo.holds(measured) and is_promise, _note(slo, summary))


def _offered_rate(records: Records, stability: Stability) -> float | None:
    """Requests due per second, those that can never be served too, which stability and utilisation know nothing of."""
    if not is_unservable(records).any():
        return stability.offered_request_rate
    due = records.requests.due_ns
    due = due[(due >= 0) & (due <= records.end_ns)]
    return per_second(len(due) - 1, int(np.ptp(due))) if len(due) > 1 else None


def _failed_share(summary: Summary) -> float:
    """Share of the requests that never had their answer, for whatever reason."""
    return ratio(summary.failed, summary.num_prompts) or 0.0


def _fails_too_often(slo: Slo, summary: Summary) -> bool:
    """Whether more requests failed than the statistic leaves room for: each is later than any limit."""
    return slo.unit == "ms" and 100 * _failed_share(summary) > slo.room_percent


def _depends_on_the_end(slo: Slo) -> bool:
    """Whether a longer run of an overloaded system would measure something else, and worse."""
    return slo.unit == "ms" or slo.metric == "goodput"


def _note(slo: Slo, summary: Summary) -> str:
    if _depends_on_the_end(slo) and not summary.stability.is_steady:
        stability = summary.stability
        is_burst = stability.is_burst and stability.verdict is Verdict.BACKLOGGED
        state = "one burst" if is_burst else stability.verdict.replace("_", " ")
        return f"not a steady state: {state}"
    if _fails_too_often(slo, summary):
        room = f"{slo.statistic} of all requests leaves room for {slo.room_percent:g} %"
        return f"{in_percent(_failed_share(summary))} of the requests failed, {room}{_of_max_model_len(summary)}"
    if slo.unit == "ms" and summary.failed:
        return f"over the {summary.completed:,} finished requests only"
    return ""


def _of_max_model_len(summary: Summary) -> str:
    """How many of the failed requests no load is to blame for, and the remedy."""
    if not summary.unservable:
        return ""
    many = "all of them" if summary.unservable == summary.failed else f"{summary.unservable:,} of {summary.failed:,}"
    return f"; {many} were refused because of max_model_len: raise it, or leave those rows out"


def _measure(slo: Slo, summary: Summary, samples: _Samples) -> float | None:
    """What the objective is about, in its unit."""
    match slo.unit:
        case "ms":
            value = _statistic(samples[slo.metric], slo)
            return None if value is None else value / 1e6
        case "%":
            value = _shares(summary)[slo.metric if slo.statistic is None else f"{slo.metric}:{slo.statistic}"]
            return None if value is None else 100 * value
        case "/s" if slo.metric == "goodput":
            return summary.goodput.request_goodput if summary.goodput else None
        case "/s":
            rate: float | None = getattr(summary, slo.metric)
            return rate
    return float(_counts(summary)[slo.metric])


def _statistic(of: Sample, slo: Slo) -> float | None:
    if slo.percent is not None:
        return of.percentile(slo.percent)
    match slo.statistic:
        case "mean":
            return of.mean()
        case "median":
            return of.median()
        case "std":
            return of.std()
        case "min":
            return of.percentile(0)
    return of.percentile(100)


def _shares(summary: Summary) -> dict[str, float | None]:
    return {
        "goodput": summary.goodput.good_share if summary.goodput else None,
        "failed": ratio(summary.failed, summary.num_prompts),
        "prefix_cache_hit_rate": summary.prefix_cache.hit_rate,
        "kv_usage:mean": summary.kv.usage_mean,
        "kv_usage:peak": summary.kv.usage_peak,
        "kv_cached_usage:mean": summary.kv.cached_usage_mean_busy,
        "kv_cached_usage:peak": summary.kv.cached_usage_peak,
        "busy_share": summary.load.busy_share,
    }


def _counts(summary: Summary) -> dict[str, int]:
    return {
        "preemptions": summary.preemption.num_preemptions,
        "preempted_requests": summary.preemption.num_preempted_requests,
        "max_preemptions_per_request": summary.preemption.max_preemptions_per_request,
        "recomputed_prefill_tokens": summary.preemption.recomputed_prefill_tokens,
        "failed": summary.failed,
        "rejected": summary.rejected,
        "unfinished": summary.unfinished,
    }


def _warnings(summary: Summary) -> list[str]:
    stability, found = summary.stability, []
    if stability.is_hopeless:
        found.append(f"{stability.verdict.upper()}: {stability.reason}. {_what_latencies_are(summary)}")
    if stability.verdict is Verdict.TOO_SHORT:
        found.append(f"Too short for a verdict: {stability.reason}.")
    if summary.failed:
        found.append(
            f"{summary.failed:,} of {plural(summary.num_prompts, 'request')} did not finish "
            f"({summary.rejected:,} rejected, {summary.aborted:,} aborted, {summary.unfinished:,} unfinished"
            f"{_lost(summary)}); "
            "latencies leave them out and may look better than what clients saw."
        )
    missed = 0 if summary.fleet is None else summary.fleet.num_missed_faults
    if missed:
        found.append(
            f"{plural(missed, 'fault')} of the fleet did not happen: the run was over by then, or there was no "
            "replica to crash.  Remedies: an earlier time, more requests."
        )
    found += _preemption_warnings(summary.preemption)
    too_fine = [percent for percent in summary.percentiles if 0 < summary.completed * (1 - percent / 100) < 1]
    if too_fine:
        over = f"P{percent_word(too_fine[0])} over {plural(summary.completed, 'request')}"
        found.append(
            f"{over} is hardly more than the largest value; take at least {round(100 / (100 - too_fine[0])):,} "
            "requests, better ten times as many."
        )
    waited_ms, e2el_ms = summary.client_queue_time.mean_ms, summary.e2el.mean_ms
    if waited_ms and e2el_ms and waited_ms > 0.1 * e2el_ms:
        found.append(
            f"Requests waited {seconds(waited_ms / 1000)} at the client on average before they were sent; as in vllm "
            "bench serve TTFT and E2EL leave that out (see Client Queue Time)."
        )
    return found


def _lost(summary: Summary) -> str:
    lost = 0 if summary.fleet is None else summary.fleet.num_lost_requests
    return f", {lost:,} lost with their replica" if lost else ""


LOOP_PREEMPTIONS = 10
"""Preemptions of one request from which on it is said to go in circles: admitted, thrown out, admitted again."""
CASCADE_SHARE = 0.3
"""Share of recomputation in all prefill work from which on it is worth a warning."""


def _preemption_warnings(preemption: PreemptionStats) -> Iterator[str]:
    if preemption.recomputed_share is None or preemption.recomputed_share < CASCADE_SHARE:
        return
    is_loop = preemption.max_preemptions_per_request >= LOOP_PREEMPTIONS
    loop = f"; one request was preempted {preemption.max_preemptions_per_request:,} times" if is_loop else ""
    yield (
        f"{'Preempt-resume loop' if is_loop else 'Preemption cascade'}: "
        f"{plural(preemption.num_preemptions, 'preemption')}{loop}; {100 * preemption.recomputed_share:.0f} % of the "
        "prefill work computes again what a preemption threw away.  Remedies: admit only prompts that fit whole "
        "(--scheduler-reserve-full-isl, vLLM's default since 0.19), leave blocks free at admission (--watermark 0.02 "
        "to 0.1), fewer requests at once (--max-num-seqs), a larger KV cache."
    )


def _what_latencies_are(summary: Summary) -> str:
    if summary.stability.verdict is Verdict.STALLED:
        return "The latencies are those of the requests that came through."
    text = "The latencies describe this run's length, not a steady state: a longer run would show higher ones"
    kept = any(_depends_on_the_end(result.slo) and result.measured is not None for result in summary.slo)
    return f"{text}, so no objective on latency or goodput counts as kept." if kept else f"{text}."


LATENCY_KEYS = ("ttft", "tpot", "itl", "e2el")
CLIENT_LATENCY_KEYS = ("client_queue_time", "e2el_including_client_queue")


def _to_dict(summary: Summary, detailed: Records | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": None,
        "endpoint_type": "windtunnel",
        "backend": "windtunnel",
        "label": None,
        "model_id": None,
        "tokenizer_id": None,
        "num_prompts": summary.num_prompts,
        "request_rate": "inf" if summary.request_rate is None else summary.request_rate,
        "burstiness": None,
        "max_concurrency": summary.max_concurrency,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.goodput.request_goodput if summary.goodput else None,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
    }
    if detailed is not None:
        result |= _details(detailed)
    result |= {
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
        "rtfx": 0.0,
    }
    for name in LATENCY_KEYS:
        result |= _latency_keys(name, getattr(summary, name))
    if summary.max_concurrency is not None:
        for name in CLIENT_LATENCY_KEYS:
            result |= _latency_keys(name, getattr(summary, name))
    if summary.speculation is not None:
        result |= _speculation_keys(summary.speculation)
    return result | _our_keys(summary) | dict(metadata)


def _speculation_keys(stats: SpeculationStats) -> dict[str, Any]:
    """vLLM's keys; its acceptance rate is in percent."""
    rate = stats.acceptance_rate
    return {
        "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
        "spec_decode_acceptance_length": stats.acceptance_length,
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_draft_tokens": stats.draft_tokens,
        "spec_decode_accepted_tokens": stats.accepted_tokens,
        "spec_decode_per_position_acceptance_rates": list(stats.per_position_rates),
    }


def _our_keys(summary: Summary) -> dict[str, Any]:
    stability = summary.stability
    return {
        "windtunnel_schema_version": SCHEMA_VERSION,
        "offered_request_rate": summary.request_rate,
        "servable_request_rate": summary.stability.offered_request_rate,
        **_latency_keys("queue_time", summary.queue_time),
        "rejected": summary.rejected,
        "unservable": summary.unservable,
        "aborted": summary.aborted,
        "unfinished": summary.unfinished,
        "stalled": summary.stalled,
        "peak_concurrent_requests": summary.peak_concurrent_requests,
        "mean_in_flight_requests": summary.load.in_flight_mean,
        "littles_law_in_flight_requests": summary.load.in_flight_by_littles_law,
        "num_good_requests": summary.goodput.num_good_requests if summary.goodput else None,
        "goodput_share": summary.goodput.good_share if summary.goodput else None,
        "goodput_limits": str(summary.goodput.limits) if summary.goodput else None,
        "preemptions": summary.preemption.num_preemptions,
        "num_preempted_requests": summary.preemption.num_preempted_requests,
        "max_preemptions_per_request": summary.preemption.max_preemptions_per_request,
        "recomputed_prefill_tokens": summary.preemption.recomputed_prefill_tokens,
        "recomputed_prefill_share": summary.preemption.recomputed_share,
        **_economics_keys(summary.economics),
        "kv_usage_mean": summary.kv.usage_mean,
        "kv_usage_mean_busy": summary.kv.usage_mean_busy,
        "kv_usage_peak": summary.kv.usage_peak,
        "kv_cached_usage_mean_busy": summary.kv.cached_usage_mean_busy,
        "kv_cached_usage_peak": summary.kv.cached_usage_peak,
        "num_usable_kv_blocks": summary.kv.num_usable_blocks,
        "num_replicas": summary.load.num_replicas,
        "num_steps": summary.load.num_steps,
        "busy_share": summary.load.busy_share,
        "batch_size_mean": summary.load.batch_size_mean,
        "batch_size_peak": summary.load.batch_size_peak,
        "tokens_per_step_mean": summary.load.tokens_per_step_mean,
        "num_running_mean": summary.load.num_running_mean,
        "num_running_peak": summary.load.num_running_peak,
        "num_waiting_mean": summary.load.num_waiting_mean,
        "num_waiting_peak": summary.load.num_waiting_peak,
        "utilisation": summary.load.utilisation,
        "utilisation_note": summary.load.utilisation_note,
        "prefix_cache_queries": summary.prefix_cache.query_tokens,
        "prefix_cache_hits": summary.prefix_cache.hit_tokens,
        "prefix_cache_hit_rate": summary.prefix_cache.hit_rate,
        "prefix_cache_queries_with_resumed": summary.prefix_cache.query_tokens_with_resumed,
        "prefix_cache_hits_with_resumed": summary.prefix_cache.hit_tokens_with_resumed,
        "prefix_cache_hit_rate_with_resumed": summary.prefix_cache.hit_rate_with_resumed,
        "computed_tokens": summary.waste.computed_tokens,
        "useful_tokens": summary.waste.useful_tokens,
        "recomputed_tokens": summary.waste.recomputed_tokens,
        "padding_tokens": summary.waste.padding_tokens,
        "straggler_tokens": summary.waste.straggler_tokens,
        "rejected_draft_tokens": summary.waste.rejected_draft_tokens,
        "abandoned_tokens": summary.waste.abandoned_tokens,
        "wasted_token_share": summary.waste.wasted_share,
        "slot_steps": summary.slots.slot_steps,
        "slot_efficiency": summary.slots.efficiency,
        "slots_mean": summary.slots.slots_mean,
        "slot_throughput": summary.slots.slot_throughput,
        **_latency_keys("batch_formation_wait", summary.formation_wait),
        "mean_prefill_batch_size": summary.prefill_batch_size,
        "swapped_out_blocks": summary.swap.swapped_out_blocks,
        "swapped_in_blocks": summary.swap.swapped_in_blocks,
        **({} if summary.tenants is None else _tenant_keys(summary.tenants)),
        **({} if summary.transfers is None else _transfer_keys(summary.transfers)),
        **({} if summary.fleet is None else _fleet_keys(summary.fleet)),
        "stability": stability.verdict.value,
        "stability_reason": stability.reason,
        "steady_state": stability.is_steady,
        "stability_numbers": {
            field.name: _plain(getattr(stability, field.name))
            for field in fields(stability)
            if field.name not in ("verdict", "reason")
        },
        "slo": [_slo_keys(result) for result in summary.slo],
        "slo_passed": summary.slo_passed,
        "warnings": list(summary.warnings),
    }


def _economics_keys(stats: Economics) -> dict[str, Any]:
    """Cost and energy of the run, and of its preemptions; null where no price, no power or no record says it."""
    return {
        "num_gpus": stats.num_gpus,
        "gpu_seconds": stats.gpu_seconds,
        "busy_gpu_seconds": stats.busy_gpu_seconds,
        "prefill_gpu_seconds": stats.prefill_gpu_seconds,
        "decode_gpu_seconds": stats.decode_gpu_seconds,
        "gpu_seconds_per_million_tokens": stats.gpu_seconds_per_million_tokens,
        "currency": stats.currency or None,
        "cost_per_hour": stats.cost_per_hour,
        "run_cost": stats.cost,
        "cost_per_request": stats.cost_per_request,
        "cost_per_million_tokens": stats.cost_per_million_tokens,
        "cost_per_million_output_tokens": stats.cost_per_million_output_tokens,
        "input_cost_per_million_tokens": stats.input_cost_per_million_tokens,
        "output_cost_per_million_tokens": stats.output_cost_per_million_tokens,
        "energy_kwh": stats.energy_kwh,
        "energy_kwh_per_million_tokens": stats.energy_kwh_per_million_tokens,
        "energy_joules_per_output_token": stats.energy_joules_per_output_token,
        **_preemption_cost_keys(stats),
    }


def _preemption_cost_keys(stats: Economics) -> dict[str, Any]:
    """The same keys with and without preemptions: amounts are then 0, and shares of what was not there null."""
    own, stalls = stats.preemption, stats.preemption.stalls if stats.preemption else None
    is_priced, has_power = stats.cost is not None, stats.energy_kwh is not None
    return {
        "lost_tokens": own.lost_tokens if own else 0,
        "lost_blocks": own.lost_blocks if own else 0,
        "preemptions_before_first_token": own.num_before_first_token if own else 0,
        "preemptions_of_itself": own.num_of_itself if own else 0,
        "recomputed_gpu_seconds": own.recomputed_gpu_seconds if own else 0.0,
        "recomputed_busy_share": own.recomputed_busy_share if own else 0.0,
        "recomputed_cost": own.recomputed_cost if own else 0.0 if is_priced else None,
        "recomputed_energy_kwh": own.recomputed_energy_kwh if own else 0.0 if has_power else None,
        "stalled_gaps": stalls.num_stalled if stalls else 0,
        "stall_s": stalls.stall_s if stalls else 0.0,
        "mean_stall_ms": stalls.stall_mean_ms if stalls else None,
        "max_stall_ms": stalls.stall_max_ms if stalls else None,
        "p99_itl_without_stalls_ms": stalls.p99_without_stalls_ms if stalls else None,
        "p99_itl_without_preemption_ms": stalls.p99_without_preemption_ms if stalls else None,
        "preemption_share_of_p99_itl": stalls.p99_share if stalls else None,
        "slow_gaps_stalled_share": stalls.slow_stalled_share if stalls else None,
        "slow_gaps_recomputing_share": stalls.slow_recomputing_share if stalls else None,
        "worst_evictions": [asdict(pair) for pair in own.pairs] if own else [],
        "worst_victims": [asdict(victim) for victim in own.victims] if own else [],
    }


def _tenant_keys(of: TenantsSummary) -> dict[str, Any]:
    """All of each tenant, and the numbers once more under keys of their own, for comparisons and sweeps."""
    each = {tenant.name: _keys_of_tenant(tenant) for tenant in of.tenants}
    flat = {
        f"tenant_{name}_{key}": value
        for name, keys in each.items()
        for key, value in keys.items()
        if not isinstance(value, str | dict)
    }
    evictions = [list(row) for row in of.evictions]
    return {"tenants": list(each.values()), "tenant_evictions": evictions, "tenants_jain_index": of.jain_index, **flat}


def _keys_of_tenant(tenant: TenantStats) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(tenant, name) for name in TENANT_KEYS}
    for name in (*LATENCY_KEYS, "queue_time"):
        plain |= _latency_keys(name, getattr(tenant, name))
    alone = None if tenant.alone is None else dict(tenant.alone)
    return plain | {"alone": alone, "slowdown": tenant.slowdown, "ttft_slowdown": tenant.ttft_slowdown}


def _transfer_keys(of: TransferStats) -> dict[str, Any]:
    return {
        "kv_transfers": of.num_transfers,
        "kv_transfer_bytes": of.num_bytes,
        "busiest_kv_link_share": of.busiest_link_share,
        **_latency_keys("kv_seat_wait", of.seat_wait),
        **_latency_keys("kv_link_wait", of.link_wait),
        **_latency_keys("kv_copy", of.copy),
        **_latency_keys("kv_hand_over", of.hand_over),
    }


def _fleet_keys(of: FleetStats) -> dict[str, Any]:
    plain = [item.name for item in fields(PoolStats) if item.name not in ("ttft", "e2el")]
    pools = [
        {name: getattr(pool, name) for name in plain}
        | _latency_keys("ttft", pool.ttft)
        | _latency_keys("e2el", pool.e2el)
        for pool in of.pools
    ]
    return {
        "router": of.router,
        "lost": of.num_lost_requests,
        "sends_to_dead": of.num_unheard_stays,
        "requests_sent_to_dead": of.num_unheard_requests,
        "time_at_dead_s": of.time_at_dead_s,
        "lost_stays": of.num_lost_stays,
        "lost_output_tokens": of.lost_output_tokens,
        "retried_requests": of.num_retried_requests,
        "crashes": of.num_crashes,
        "missed_faults": of.num_missed_faults,
        "replica_hours": of.replica_hours,
        "gpu_hours": of.gpu_hours,
        "ready_replicas_mean": of.num_ready_mean,
        "ready_replicas_peak": of.num_ready_peak,
        "ready_replicas_min": of.num_ready_min,
        "request_imbalance": of.request_imbalance,
        "router_known_prefix_share": of.known_prefix_share,
        "waited_at_gateway": of.num_waited,
        **_latency_keys("gateway_wait", of.gateway_wait),
        "fleet": {
            "on_crash": of.on_crash,
            "pools": pools,
            "replicas": [asdict(replica) for replica in of.replicas],
            "scalings": [asdict(scaling) for scaling in of.scalings],
        },
    }


def _slo_keys(result: SloResult) -> dict[str, Any]:
    slo = result.slo
    return {
        "objective": slo.text,
        "metric": slo.metric,
        "statistic": slo.statistic,
        "operator": slo.operator,
        "limit": slo.limit,
        "unit": slo.unit,
        "measured": result.measured,
        "passed": result.passed,
        "note": result.note,
    }


def _latency_keys(name: str, stats: LatencyStats) -> dict[str, float | None]:
    keys = {f"mean_{name}_ms": stats.mean_ms, f"median_{name}_ms": stats.median_ms, f"std_{name}_ms": stats.std_ms}
    return keys | {f"p{percent_word(percent)}_{name}_ms": value for percent, value in stats.percentiles_ms}


def percent_word(percent: float) -> str:
    """The percentile as vLLM writes it: 99, 99.9."""
    return str(int(percent)) if int(percent) == percent else str(percent)


def _plain(value: Any) -> Any:
    """JSON has no infinity."""
    return None if isinstance(value, float) and not isfinite(value) else value


def _details(records: Records) -> dict[str, list[Any]]:
    """Lists of one entry a request, in the order of the workload; times in seconds, 0 where there is none."""
    table = records.requests
    finished = table.outcome == Outcome.FINISHED
    return {
        "input_lens": table.num_prompt_tokens.tolist(),
        "output_lens": np.where(finished, table.num_output_tokens, 0).tolist(),
        "ttfts": _seconds(table.first_token_ns - table.arrival_ns, finished),
        "itls": [
            gaps if done else []
            for gaps, done in zip(expanded_inter_token_latencies(records), finished.tolist(), strict=True)
        ],
        "latencies": _seconds(table.finish_ns - table.arrival_ns, finished),
        "start_times": _seconds(table.arrival_ns, table.arrival_ns >= 0),
        "queue_times": _seconds(table.arrival_ns - table.due_ns, table.arrival_ns >= 0),
        "generated_texts": [""] * len(table),
        "errors": ["" if outcome == Outcome.FINISHED else Outcome(outcome).name.lower() for outcome in table.outcome],
    }


def _seconds(times_ns: IntArray, there: npt.NDArray[np.bool_]) -> list[float]:
    return list((np.where(there, times_ns, 0) / NS_PER_S).tolist())

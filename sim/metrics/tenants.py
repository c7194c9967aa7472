"""Who got what: latencies, tokens and fairness by tenant.

Fairness is judged while tenants compete.  The time from the first to the last moment at which requests of two tenants
wait is cut into equal parts; in each in which that happens, the tokens that all tenants got are there to be shared.
The weighted max-min fair part of a tenant is then compared with what it got: a tenant that asks for little is entitled
to all of it, and what it leaves goes to the others by weight.  A request asks for all of its tokens when it is sent, so
whoever asks for little gets somewhat less than 1 even from a fair server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from windtunnel.sim.metrics.latency import (
    NS_PER_S,
    BoolArray,
    FloatArray,
    RequestLatencies,
    by_request,
    inter_token_latencies,
    request_latencies,
    tokens_per_step,
)
from windtunnel.sim.metrics.load import per_second, ratio
from windtunnel.sim.metrics.sample import LatencyStats, latency_stats, sample
from windtunnel.sim.metrics.slo import GoodputLimits
from windtunnel.sim.records import IntArray, Outcome, Records, RequestTable
from windtunnel.sim.workload import Workload

MAX_PARTS = 20
PART_SERVICES = 5
"""Fairness is judged in at most ``MAX_PARTS`` parts of the contended time, each at least so many times as long as a
request takes from its first step to its end: shorter ones show when tokens come, not who gets them."""
ALONE_KEYS = ("mean_ttft_ms", "p99_ttft_ms", "mean_e2el_ms", "p99_e2el_ms")
"""What is known of a tenant that has the server to itself."""
TENANT_KEYS = (
    "name",
    "weight",
    "num_requests",
    "completed",
    "rejected",
    "aborted",
    "unfinished",
    "served_tokens",
    "token_share",
    "request_throughput",
    "output_throughput",
    "num_good_requests",
    "good_share",
    "num_preemptions",
    "contended_s",
    "fair_share_ratio",
)
"""Fields of ``TenantStats`` that go into JSON as they are."""


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant's part of a run.  Latencies are those of its finished requests."""

    name: str
    weight: float
    num_requests: int
    completed: int
    rejected: int
    """By the gateway's limits (HTTP 429) or by the server."""
    aborted: int
    unfinished: int
    served_tokens: int
    """Prompts that were computed and output tokens that came."""
    token_share: float | None
    """Of all served tokens."""
    request_throughput: float | None
    output_throughput: float | None
    num_good_requests: int | None
    """Requests that kept the goodput limits; None without limits."""
    good_share: float | None
    ttft: LatencyStats
    tpot: LatencyStats
    itl: LatencyStats
    e2el: LatencyStats
    queue_time: LatencyStats
    """From sending to the first step: at the gateway and in the engine."""
    num_preemptions: int
    contended_s: float
    """How long its requests waited while another tenant's waited too."""
    fair_share_ratio: float | None
    """Tokens that it got over what was fair, while tenants competed: below 1 it got too little."""
    alone: Mapping[str, float | None] | None
    """Latencies with the server to itself (``ALONE_KEYS``); None if that was not measured."""

    @property
    def slowdown(self) -> float | None:
        """Mean E2EL over what it is when the tenant is alone: what the others cost it."""
        alone_ms = None if self.alone is None else self.alone.get("mean_e2el_ms")
        return None if not alone_ms or self.e2el.mean_ms is None else self.e2el.mean_ms / alone_ms

    @property
    def ttft_slowdown(self) -> float | None:
        """Mean TTFT over what it is when the tenant is alone."""
        alone_ms = None if self.alone is None else self.alone.get("mean_ttft_ms")
        return None if not alone_ms or self.ttft.mean_ms is None else self.ttft.mean_ms / alone_ms


@dataclass(frozen=True, slots=True)
class TenantsSummary:
    """All tenants of a run, in the order of the workload."""

    tenants: tuple[TenantStats, ...]
    jain_index: float | None
    """Of the tokens that each tenant got over what was fair, mean over the time in which tenants competed: 1 is fair,
    1/n is one tenant taking all.

    None if fewer than two tenants ever waited at once.  Source: Jain, Chiu, Hawe, DEC-TR-301 (1984).
    """
    evictions: tuple[tuple[int, ...], ...]
    """Preemptions by tenant: a row for whose request lost its blocks, a column for whose request needed them."""


def jain_index(values: Sequence[float]) -> float | None:
    """(sum x)² / (n · sum x²): 1 if all are equal, 1/n if one has everything; None for fewer than two or only zeros."""
    squares = sum(value * value for value in values)
    if len(values) < 2 or not squares:
        return None
    return sum(values) ** 2 / (len(values) * squares)


def tenants_summary(
    records: Records,
    workload: Workload,
    *,
    goodput: GoodputLimits | None = None,
    weights: Mapping[str, float] | None = None,
    alone: Mapping[str, Mapping[str, float | None]] | None = None,
    percentiles: Sequence[float] = (50, 90, 95, 99),
) -> TenantsSummary | None:
    """What each tenant got; None for a workload without tenants."""
    if workload.tenant is None:
        return None
    weights, alone = weights or {}, alone or {}
    table = records.requests
    of_row = workload.tenant[table.request]
    served = served_tokens(table)
    heavy = [weights.get(name, 1.0) for name in workload.tenants]
    contention = _contention(records, workload, of_row, heavy)
    tenants = []
    for place, name in enumerate(workload.tenants):
        part = _Part(records, name, of_row == place, heavy[place], alone.get(name))
        contended = (contention.contended_s[place], contention.share(place))
        tenants.append(_stats(part, served, contended, goodput, percentiles))
    return TenantsSummary(tuple(tenants), contention.jain(), _evictions(records, workload))


def served_tokens(table: RequestTable) -> IntArray:
    """Tokens that each request got: its prompt once that is computed, and its answer's."""
    prompts: IntArray = np.where(table.first_token_ns >= 0, table.num_prompt_tokens, 0)
    return prompts + table.num_output_tokens


@dataclass(frozen=True, slots=True)
class _Part:
    records: Records
    name: str
    mine: BoolArray
    """By row of the request table."""
    weight: float
    alone: Mapping[str, float | None] | None


def _stats(
    part: _Part,
    served: IntArray,
    contended: tuple[float, float | None],
    goodput: GoodputLimits | None,
    percentiles: Sequence[float],
) -> TenantStats:
    records, mine = part.records, part.mine
    table = records.requests
    outcomes = np.bincount(table.outcome[mine], minlength=len(Outcome)).tolist()
    latencies = request_latencies(records)
    own = mine[latencies.rows]
    duration_ns = _duration_ns(records)
    tokens = int(served[mine].sum())
    completed = outcomes[Outcome.FINISHED]
    good = None if goodput is None else _num_good(latencies, own, goodput)
    chosen = mine & (table.outcome == Outcome.FINISHED)
    outputs = int(table.num_output_tokens[chosen].sum())
    return TenantStats(
        name=part.name,
        weight=part.weight,
        num_requests=int(mine.sum()),
        completed=completed,
        rejected=outcomes[Outcome.REJECTED],
        aborted=outcomes[Outcome.ABORTED],
        unfinished=outcomes[Outcome.UNFINISHED],
        served_tokens=tokens,
        token_share=ratio(tokens, int(served.sum())),
        request_throughput=per_second(completed, duration_ns),
        output_throughput=per_second(outputs, duration_ns),
        num_good_requests=good,
        good_share=None if good is None else ratio(good, int(mine.sum())),
        ttft=latency_stats(sample(latencies.ttft_ns[own]), percentiles),
        tpot=latency_stats(sample(latencies.tpot_ns[own & latencies.has_tpot]), percentiles),
        itl=latency_stats(inter_token_latencies(records, chosen), percentiles),
        e2el=latency_stats(sample(latencies.e2el_ns[own]), percentiles),
        queue_time=latency_stats(sample(latencies.queue_ns[own]), percentiles),
        num_preemptions=int(table.num_preemptions[mine].sum()),
        contended_s=contended[0],
        fair_share_ratio=contended[1],
        alone=part.alone,
    )


def _duration_ns(records: Records) -> int:
    """From the first sending to the last end of a request, or to the end of the run if one is still open."""
    table = records.requests
    sent = table.arrival_ns[table.arrival_ns >= 0]
    start_ns = int(sent.min()) if len(sent) else 0
    is_open = bool((table.outcome == Outcome.UNFINISHED).any())
    return max(0, (records.end_ns if is_open else int(table.finish_ns.max(initial=start_ns))) - start_ns)


def _num_good(latencies: RequestLatencies, own: BoolArray, limits: GoodputLimits) -> int:
    good = own.copy()
    for limit_ms, values_ns in (
        (limits.ttft_ms, latencies.ttft_ns),
        (limits.tpot_ms, latencies.tpot_ns),
        (limits.e2el_ms, latencies.e2el_ns),
    ):
        if limit_ms is not None:
            good &= values_ns <= limit_ms * 1e6
    return int(good.sum())


# -- while several wait


@dataclass(frozen=True, slots=True)
class _Contention:
    """What tenants asked for and got in the parts of the run in which several of them waited."""

    served: FloatArray
    """Tokens by tenant and part."""
    fair: FloatArray
    """What a fair server would have given them."""
    contended_s: list[float]

    def share(self, place: int) -> float | None:
        """Tokens that a tenant got over what was fair, over all parts."""
        return ratio(float(self.served[place].sum()), float(self.fair[place].sum()))

    def jain(self) -> float | None:
        """Mean over the parts of Jain's index of got over fair, among those that asked for something."""
        found = []
        for got, fair in zip(self.served.T, self.fair.T, strict=True):
            index = jain_index((got[fair > 0] / fair[fair > 0]).tolist())
            found += [] if index is None else [index]
        return sum(found) / len(found) if found else None


def _contention(records: Records, workload: Workload, of_row: IntArray, weights: Sequence[float]) -> _Contention:
    waits = [_merged_waits(records, of_row == place) for place in range(len(weights))]
    times = np.unique(np.concatenate([edges for wait in waits for edges in wait]))
    waiting = [_is_waiting(times, *wait) for wait in waits]
    several = np.sum(waiting, axis=0) >= 2
    lasts_ns = np.diff(times, append=times[-1:])
    contended_s = [int(lasts_ns[own & several].sum()) / NS_PER_S for own in waiting]
    begin, end = _parts(times, several, _mean_service_ns(records.requests))
    served = np.zeros((len(weights), len(begin)))
    asked = np.zeros_like(served)
    for place in range(len(weights)):
        mine = of_row == place
        before, after = served_until(records, mine, begin), served_until(records, mine, end)
        served[place] = after - before
        asked[place] = _asked_until(records, workload, mine, end) - before
    fair = np.array(
        [fair_shares(*part, weights) for part in zip(served.sum(0).tolist(), asked.T.tolist(), strict=True)]
    )
    return _Contention(served, fair.reshape(len(begin), len(weights)).T, contended_s)


def fair_shares(total: float, asked: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Weighted max-min fair parts of a total: nobody gets more than it asked, and what it leaves goes to the others.

    Source of the rule: Bertsekas, Gallager, "Data Networks" (1992), section 6.5.2, with weights.
    """
    parts = [0.0] * len(asked)
    open_places = sorted(range(len(asked)), key=lambda i: asked[i] / weights[i])
    rest = total
    for position, place in enumerate(open_places):
        level = rest / sum(weights[i] for i in open_places[position:])
        parts[place] = min(asked[place], level * weights[place])
        rest -= parts[place]
    return parts


def _mean_service_ns(table: RequestTable) -> float:
    """Mean time from the first step to the end of those that finished."""
    done = table.outcome == Outcome.FINISHED
    return float((table.finish_ns - table.scheduled_ns)[done].mean()) if bool(done.any()) else 0.0


def _parts(times: IntArray, several: BoolArray, service_ns: float) -> tuple[IntArray, IntArray]:
    """Begins and ends of the parts that count: of the equal ones from the first contention to the last."""
    inside = np.flatnonzero(several)
    if not len(inside):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first_ns, last_ns = int(times[inside[0]]), int(times[min(inside[-1] + 1, len(times) - 1)])
    num_parts = min(MAX_PARTS, max(1, int((last_ns - first_ns) / (PART_SERVICES * service_ns)))) if service_ns else 1
    edges = np.linspace(first_ns, last_ns, num_parts + 1).astype(np.int64)
    first = np.searchsorted(times, edges[:-1], "right") - 1
    behind = np.searchsorted(times, edges[1:], "left")
    counts = np.concatenate(([0], np.cumsum(several)))
    has = (counts[behind] > counts[np.maximum(first, 0)]) & (edges[1:] > edges[:-1])
    return edges[:-1][has], edges[1:][has]


def _is_waiting(times: IntArray, start: IntArray, end: IntArray) -> BoolArray:
    """Whether one of these intervals that do not meet holds the time from each instant to the next."""
    change = np.zeros(len(times), np.int64)
    change[np.searchsorted(times, start)] += 1
    change[np.searchsorted(times, end)] -= 1
    return np.cumsum(change) > 0


def _merged_waits(records: Records, mine: BoolArray) -> tuple[IntArray, IntArray]:
    """Starts and ends of the times in which at least one of these requests had been sent and not begun."""
    table = records.requests
    rows = mine & (table.arrival_ns >= 0)
    start = table.arrival_ns[rows]
    begun, gone = table.scheduled_ns[rows], table.finish_ns[rows]
    end = np.where(begun >= 0, begun, np.where(gone >= 0, gone, records.end_ns))
    waited = end > start
    order = np.argsort(start[waited], kind="stable")
    start, end = start[waited][order], end[waited][order]
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    begins = np.append(True, start[1:] > reach[:-1])
    return start[begins], reach[np.append(begins[1:], True)]


def _asked_until(records: Records, workload: Workload, mine: BoolArray, times_ns: IntArray) -> FloatArray:
    """Tokens of the requests that were sent by these times; of those refused or given up only what they got."""
    table = records.requests
    is_open = table.outcome == Outcome.UNFINISHED
    whole = workload.num_prompt_tokens[table.request] + workload.num_output_tokens[table.request]
    tokens = np.where(is_open, whole, served_tokens(table))
    rows = mine & (table.arrival_ns >= 0)
    return _sum_until(table.arrival_ns[rows], tokens[rows], times_ns)


def served_until(records: Records, mine: BoolArray, times_ns: IntArray) -> FloatArray:
    """Tokens that these requests had got by these times: prompts with their first token, answers step by step."""
    table = records.requests
    rows = mine & (table.first_token_ns >= 0)
    total = _sum_until(table.first_token_ns[rows], table.num_prompt_tokens[rows], times_ns)
    chosen = by_request(records, mine)
    for replica in records.replicas:
        total = total + _sum_until(replica.steps.end_ns, tokens_per_step(replica, chosen), times_ns)
    return total


def _sum_until(at_ns: IntArray, amounts: IntArray, times_ns: IntArray) -> FloatArray:
    order = np.argsort(at_ns, kind="stable")
    sums = np.concatenate(([0], np.cumsum(amounts[order])))
    return sums[np.searchsorted(at_ns[order], times_ns, "right")].astype(np.float64)


def _evictions(records: Records, workload: Workload) -> tuple[tuple[int, ...], ...]:
    num = len(workload.tenants)
    counts = np.zeros((num, num), np.int64)
    assert workload.tenant is not None
    for replica in records.replicas:
        lost = replica.preemptions
        np.add.at(counts, (workload.tenant[lost.request], workload.tenant[lost.for_request]), 1)
    return tuple(tuple(row) for row in counts.tolist())

"""One simulation of a deployment, and of it just the numbers that objectives ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from windtunnel.capacity.binding import time_shares
from windtunnel.sim.fleet.fleet import Fleet
from windtunnel.sim.metrics.latency import NS_PER_S, FloatArray, inter_token_latencies, request_latencies
from windtunnel.sim.metrics.load import kv_stats, ratio
from windtunnel.sim.metrics.sample import NS_PER_MS, Sample, sample
from windtunnel.sim.metrics.slo import LATENCIES, GoodputLimits, Slo
from windtunnel.sim.metrics.stability import Verdict, judge
from windtunnel.sim.records import IntArray, Outcome, Records, is_unservable
from windtunnel.sim.rng import mixed
from windtunnel.sim.simulate import serve
from windtunnel.sim.speculation import Drafting
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload

RAMP_SHARE = 0.3
"""Share of the requests, from the first on, that are served but not counted: the system begins empty."""
NUM_SERVICES = 1.0
"""So many services (90th percentile of the time from a request's first step to its last) are left out at least at the
beginning, and one at the end."""
CONVERSATIONS_PERCENT = 95
"""So many of a hundred conversations may be over before the first request is counted: the load has come to what it is
meant to be, but for what the few longest ones still add."""
NEVER_MS = 1e15
"""In place of the latency of a request that was refused or given up: later than any limit."""

_UP = ("<", "<=")
_DOWN = (">", ">=")


def check_objectives(objectives: Sequence[Slo], goodput: GoodputLimits | None) -> None:
    """Raise ValueError for objectives that say nothing about how much load a deployment carries.

    They must get worse as the load rises, and have a value in a steady state, whatever the length of the run: latencies
    (not their extremes), goodput and failures as shares, KV usage and busy share from above.
    """
    if not objectives:
        raise ValueError("there is no objective to keep: give one, such as ttft:p99<500ms (--slo)")
    for slo in objectives:
        problem = _problem(slo, goodput)
        if problem:
            raise ValueError(f"objective {slo.text} cannot bound the load: {problem}")


def _problem(slo: Slo, goodput: GoodputLimits | None) -> str:
    if slo.unit == "ms":
        if slo.statistic in ("min", "max") or slo.percent in (0.0, 100.0):
            return f"the {slo.statistic} depends on how many requests one looks at: take a percentile, such as p99.9"
        return "" if slo.operator in _UP else f"a latency is bounded from above: write < or <=, not {slo.operator}"
    if slo.metric == "goodput":
        if slo.unit != "%":
            return "goodput per second rises with the load: ask for a share, such as goodput>=99%"
        if goodput is None:
            return "it needs to know what is good: give goodput limits too, such as ttft:500"
        if slo.limit >= 100:
            return "whether all are good depends on how many requests one looks at: ask for a share, such as 99.9%"
        return "" if slo.operator in _DOWN else f"goodput is bounded from below: write >= or >, not {slo.operator}"
    if slo.metric == "failed" and slo.unit == "":
        return "a count grows with the length of the run: ask for a share, such as failed<1%"
    if slo.metric == "failed" and slo.limit <= 0:
        return "whether none fails depends on how many requests one looks at: ask for a share, such as failed<0.1%"
    if slo.statistic == "peak":
        return "the peak depends on how long one looks: take kv_usage:mean"
    if slo.metric in ("failed", "kv_usage", "kv_cached_usage", "busy_share"):
        return "" if slo.operator in _UP else f"{slo.metric} is bounded from above: write < or <=, not {slo.operator}"
    return f"{slo.metric} does not get worse with the load, or grows with the length of the run"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one simulation says about the objectives; plain numbers, so that it travels between processes."""

    measured: tuple[FloatArray | float | None, ...]
    """For each objective its counted values in ms, ascending (percentiles), or one number in its unit; None if there
    was nothing to measure.  Long samples of gaps between tokens come as distinct values, see ``weights``."""
    weights: tuple[IntArray | None, ...]
    """How often each of those values occurs, where more than once."""
    verdict: str
    """``sim.metrics.stability.Verdict``."""
    num_requests: int
    num_counted: int
    """Requests that came after the ramp and before the end's emptying."""
    offered_rate: float | None
    """Requests per second that came."""
    shares: Mapping[str, float]
    """Share of the counted time under each limit, as ``binding.time_shares``."""
    service_s: float
    """90th percentile of the time from a request's first step to its last; of conversations, how long they last."""
    num_preemptions: int
    noise: float
    """Squared coefficients of variation of the gaps and of the work, summed: how rough the traffic is (1 is M/D/1)."""
    num_unservable: int = 0
    """Counted requests that were refused because of max_model_len: at any rate they would be."""

    @property
    def is_overloaded(self) -> bool:
        """Whether the queue grew without bound, or nothing could move."""
        return self.verdict in (Verdict.OVERLOADED, Verdict.STALLED)

    @property
    def is_short(self) -> bool:
        """Whether the run ended while the system was still filling up, or little was left to count."""
        return self.verdict == Verdict.TOO_SHORT or self.num_counted < self.num_requests / 4

    def sample(self, number: int) -> Sample | None:
        """The counted values of an objective, in ms."""
        values, weights = self.measured[number], self.weights[number]
        if not isinstance(values, np.ndarray):
            return None
        return Sample(values, None if weights is None else np.cumsum(weights))

    def to_plain(self) -> dict[str, Any]:
        """As plain data that JSON can hold."""
        return {
            "measured": [each.tolist() if isinstance(each, np.ndarray) else each for each in self.measured],
            "weights": [None if each is None else each.tolist() for each in self.weights],
            "verdict": str(self.verdict),
            "num_requests": self.num_requests,
            "num_counted": self.num_counted,
            "offered_rate": self.offered_rate,
            "shares": dict(self.shares),
            "service_s": self.service_s,
            "num_preemptions": self.num_preemptions,
            "noise": self.noise,
            "num_unservable": self.num_unservable,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Evaluation:
        """What ``to_plain`` made."""
        measured = tuple(np.asarray(each, np.float64) if isinstance(each, list) else each for each in plain["measured"])
        weights = tuple(None if each is None else np.asarray(each, np.int64) for each in plain["weights"])
        return cls(**{**plain, "measured": measured, "weights": weights})


class Evaluator:
    """A deployment that is asked again and again: prepared once, it serves workloads and measures objectives.

    Raises ValueError for objectives that ``check_objectives`` refuses.
    """

    def __init__(self, served: System | Fleet, objectives: Sequence[Slo], goodput: GoodputLimits | None = None) -> None:
        check_objectives(objectives, goodput)
        if isinstance(served, Fleet) and not served.is_steady:
            raise ValueError(
                "a fleet with an autoscaler or with faults has no steady state, so no largest rate: fix its number of "
                "replicas and leave faults out, or simulate its day as it is"
            )
        self.served = served
        self.objectives = tuple(objectives)
        self.goodput = goodput

    def evaluate(
        self, workload: Workload, *, seed: int = 0, ramp: bool = True, saturation_rate: float | None = None
    ) -> Evaluation:
        """Serve the workload and measure the objectives over the requests that met a system in its usual state.

        Those of the ramp, while the system fills up from empty, are left out, and those at the end, beside which it
        empties; ``ramp=False`` counts all.  ``seed`` is that of noise and drafts, where there are any;
        ``saturation_rate`` (requests per second) helps to tell overload in short runs.

        Raises RequestTooLarge as ``serve``.
        """
        records = serve(workload, self._seeded(seed))
        service_ns = _service_ns(records, workload)
        counted, start_ns, end_ns = _counted(records, workload, service_ns, ramp)
        seen = _only(records, counted)
        measured, weights = [], []
        for slo in self.objectives:
            values, times = self._measure(slo, seen, counted, start_ns, end_ns)
            measured.append(values)
            weights.append(times)
        verdict = judge(records, workload, saturation_request_throughput=saturation_rate)
        return Evaluation(
            measured=tuple(measured),
            weights=tuple(weights),
            verdict=verdict.verdict.value,
            num_requests=len(workload),
            num_counted=int(counted.sum()),
            offered_rate=verdict.offered_request_rate,
            shares=time_shares(records, self.served, start_ns, end_ns),
            service_s=service_ns / NS_PER_S,
            num_preemptions=int(records.requests.num_preemptions.sum()),
            noise=traffic_noise(workload),
            num_unservable=int((counted & is_unservable(records)).sum()),
        )

    def _seeded(self, seed: int) -> System | Fleet:
        """The same with the scatter of its steps and the luck of its drafts drawn anew."""
        if isinstance(self.served, System):
            return _seeded(self.served, seed)
        pools = tuple(replace(pool, system=_seeded(pool.system, seed)) for pool in self.served.pools)
        return replace(self.served, pools=pools)

    def _measure(
        self, slo: Slo, seen: Records, counted: np.ndarray, start_ns: int, end_ns: int
    ) -> tuple[FloatArray | float | None, IntArray | None]:
        if slo.metric in LATENCIES:
            of = _latencies(seen, slo.metric)
            if slo.percent is None and slo.statistic != "median":
                return _of_the_others(of, slo, seen, counted), None
            return _with_failures(of, slo, seen, counted)
        if slo.metric == "goodput":
            assert self.goodput is not None
            share = ratio(_num_good(seen, self.goodput), int(counted.sum()))
        elif slo.metric == "failed":
            share = ratio(int(_failed(seen, counted).sum()), int(counted.sum()))
        else:
            share = _load_share(slo, seen, start_ns, end_ns)
        return (None if share is None else 100 * share), None


def _seeded(system: System, seed: int) -> System:
    drafting = system.drafting
    if system.noise_seed is not None:
        system = replace(system, noise_seed=mixed(system.noise_seed ^ seed) >> 1)
    if drafting is None:
        return system
    fresh = Drafting(drafting.acceptance, drafting.num_speculative_tokens, drafting.cost, mixed(seed) >> 1)
    return replace(system, drafting=fresh)


def _service_ns(records: Records, workload: Workload) -> float:
    """How long nine of ten requests are in the works at most, from their first step on, of those that finished.

    The wait before it is left out on purpose: a window that depended on the queue would be chosen by what it measures.
    Of conversations it is how long nearly all of them last: so long it takes until as many are under way as will be.
    """
    if bool((workload.previous >= 0).any()):
        return _conversation_ns(records, workload)
    table = records.requests
    done = (table.outcome == Outcome.FINISHED) & (table.scheduled_ns >= 0)
    services = (table.finish_ns - table.scheduled_ns)[done]
    return float(np.percentile(services, 90)) if len(services) else 0.0


def _conversation_ns(records: Records, workload: Workload) -> float:
    from windtunnel.scenarios.workloads.rows import conversation_roots

    roots, table = conversation_roots(workload.previous), records.requests
    ends = table.due_ns[roots]
    np.maximum.at(ends, roots, table.finish_ns)
    spans = (ends - table.due_ns)[(workload.previous < 0) & (table.due_ns >= 0)]
    return float(np.percentile(spans, CONVERSATIONS_PERCENT)) if len(spans) else 0.0


def _counted(records: Records, workload: Workload, service_ns: float, ramp: bool) -> tuple[np.ndarray, int, int]:
    """Which requests are counted, and between which times the system is looked at.

    The load is what it is meant to be only while new conversations still begin.
    """
    table = records.requests
    there = table.due_ns >= 0
    is_first = workload.previous < 0
    due = np.sort(table.due_ns[there & is_first])
    if not len(due):
        return there, 0, records.end_ns
    first, last = int(due[0]), int(due[-1])
    if not ramp:
        return there, first, max(last, first + 1)
    begin = max(int(due[int(RAMP_SHARE * len(due))]), first + int(NUM_SERVICES * service_ns))
    end = last if not bool(is_first.all()) else max(last - int(service_ns), begin + 1)
    end = max(end, begin + 1)
    return there & (table.due_ns >= begin) & (table.due_ns <= end), begin, end


def _only(records: Records, counted: np.ndarray) -> Records:
    """The same run, in which only counted requests finished: latencies are taken over those."""
    table = records.requests
    outcome = np.where(counted | (table.outcome != Outcome.FINISHED), table.outcome, np.int64(Outcome.ABORTED))
    return replace(records, requests=replace(table, outcome=outcome))


def _latencies(seen: Records, metric: str) -> Sample:
    if metric == "itl":
        return inter_token_latencies(seen)
    of = request_latencies(seen)
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
    return sample(of.e2el_ns + of.client_queue_ns)


def _with_failures(
    of: Sample, slo: Slo, seen: Records, counted: np.ndarray
) -> tuple[FloatArray | None, IntArray | None]:
    """The values in ms, and one that is later than any limit for each request that never had its answer.

    Gaps between tokens know no such request: they are those of the finished ones, and all later than any limit where
    more requests failed than the statistic leaves room for.
    """
    values = of.values / NS_PER_MS
    num_failed = int(_failed(seen, counted).sum())
    if slo.metric == "itl":
        if len(values) and 100 * num_failed > slo.room_percent * int(counted.sum()):
            values = np.full_like(values, NEVER_MS)
    elif num_failed:
        values = np.concatenate((values, np.full(num_failed, NEVER_MS)))
    if not len(values):
        return None, None
    return values, None if of.ranks is None else of.weights


def _of_the_others(of: Sample, slo: Slo, seen: Records, counted: np.ndarray) -> float | None:
    """Mean or standard deviation in ms of those that had their answer; later than any limit where too few had one."""
    num_failed = int(_failed(seen, counted).sum())
    if 100 * num_failed > slo.room_percent * int(counted.sum()):
        return NEVER_MS
    value = of.mean() if slo.statistic == "mean" else of.std()
    return None if value is None else value / NS_PER_MS


def counted_values(
    records: Records, workload: Workload, objectives: Sequence[Slo], goodput: GoodputLimits | None, *, ramp: bool
) -> tuple[list[float | None], int] | None:
    """What objectives on latencies and goodput measure, each in its unit (None for other objectives), and over how
    many requests; None where these are so few that the run is too short to leave any out.

    With ``ramp``, for a load that is steady, over the requests that met the system in its usual state: those of the
    ramp, and those beside which it empties, are left out; else over all.  A request that never had its answer has a
    latency of ``NEVER_MS``.
    """
    counted, _, _ = _counted(records, workload, _service_ns(records, workload), ramp)
    num_counted = int(counted.sum())
    if num_counted < len(workload) / 4:
        return None
    seen = _only(records, counted)
    return [_counted_value(slo, goodput, seen, counted) for slo in objectives], num_counted


def _counted_value(slo: Slo, goodput: GoodputLimits | None, seen: Records, counted: np.ndarray) -> float | None:
    if slo.metric == "goodput" and goodput is not None and slo.unit == "%":
        share = ratio(_num_good(seen, goodput), int(counted.sum()))
        return None if share is None else 100 * share
    if slo.metric not in LATENCIES:
        return None
    of = _latencies(seen, slo.metric)
    if slo.percent is None and slo.statistic != "median":
        return _of_the_others(of, slo, seen, counted)
    values, weights = _with_failures(of, slo, seen, counted)
    if values is None:
        return None
    found = Sample(values, None if weights is None else np.cumsum(weights))
    return found.median() if slo.percent is None else found.percentile(slo.percent)


def _failed(seen: Records, counted: np.ndarray) -> np.ndarray:
    failed: np.ndarray = counted & (seen.requests.outcome != Outcome.FINISHED)
    return failed


def _num_good(seen: Records, limits: GoodputLimits) -> int:
    of = request_latencies(seen)
    good = np.ones(len(of.rows), np.bool_)
    for limit_ms, values_ns in (
        (limits.ttft_ms, of.ttft_ns),
        (limits.tpot_ms, of.tpot_ns),
        (limits.e2el_ms, of.e2el_ns),
    ):
        if limit_ms is not None:
            good &= values_ns <= limit_ms * NS_PER_MS
    return int(good.sum())


def _load_share(slo: Slo, seen: Records, start_ns: int, end_ns: int) -> float | None:
    if slo.metric == "busy_share":
        busy_ns = sum(
            float((np.minimum(steps.end_ns, end_ns) - np.maximum(steps.start_ns, start_ns)).clip(min=0).sum())
            for steps in (replica.steps for replica in seen.replicas)
        )
        return busy_ns / max(end_ns - start_ns, 1) / len(seen.replicas)
    stats = kv_stats(seen, start_ns, end_ns)
    if slo.metric == "kv_usage":
        return stats.usage_mean
    return stats.cached_usage_mean_busy


def traffic_noise(workload: Workload) -> float:
    """ca² + cs²: variation of the gaps between arrivals, and of the work, as far as lengths tell it."""
    due = workload.arrival_ns[workload.previous < 0]
    work = max(_square_cv(workload.num_prompt_tokens), _square_cv(workload.num_output_tokens))
    return _square_cv(np.diff(due)) + work


def _square_cv(values: IntArray) -> float:
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.var()) / mean**2 if mean > 0 else 0.0

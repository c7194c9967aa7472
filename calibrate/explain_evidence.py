"""What the checks of ``explain`` look at: quantities of a run, each computed once and None where it is not known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from windtunnel.calibrate.explain_types import Facts
from windtunnel.calibrate.live.observed import NS_PER_S, Ending, FloatArray, ObservedRun
from windtunnel.calibrate.live.observed_metrics import ObservedMetrics, observed_metrics
from windtunnel.sim.metrics.load import level_over_time
from windtunnel.sim.metrics.sample import weighted_sum
from windtunnel.sim.metrics.stability import Stability, judge
from windtunnel.sim.records import IntArray, Outcome, Records, RequestTable
from windtunnel.sim.workload import workload

FULL_POOL = 0.9
"""KV usage from which on the pool counts as full: the next prompt or block hardly fits."""
ENOUGH_KNOWN = 0.9
"""Share of the requests of which a time must be known to reason from it."""
MOST_GAPS = 200_000
"""Gaps between tokens that are looked at; more are thinned out evenly."""
SEATS_TAKEN = 0.97
"""Share of max_num_seqs from which on the seats count as taken."""
_LOOKS = 2000
"""Times, evenly over the run, at which the demand on the pool is looked at."""
_PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0)


class Level(NamedTuple):
    """How many requests were in some state from each time until the next."""

    times_ns: IntArray
    level: IntArray

    def held_ns(self, start_ns: int, end_ns: int) -> FloatArray:
        """How long each level held within a window."""
        times = np.clip(np.append(self.times_ns, max(end_ns, int(self.times_ns[-1]))), start_ns, end_ns)
        held: FloatArray = np.diff(times).astype(np.float64)
        return held


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Time between tokens as a line over the number of requests that decode: ``fixed_s + num * each_s``."""

    fixed_s: float
    each_s: float

    def doubling_gain(self, num_seqs: float) -> float:
        """How many times as many tokens a second come if twice as many requests decode at once."""
        step, twice = self.fixed_s + num_seqs * self.each_s, self.fixed_s + 2 * num_seqs * self.each_s
        return 2 * step / twice if twice > 0 else 2.0


@dataclass(frozen=True, slots=True)
class ServerWaiting:
    """What the server's gauges show while requests waited; means weighted with the number waiting and the time."""

    waiting_mean: float
    """Over the run."""
    running_mean: float
    running_peak: float
    running_while_waiting: float
    running_cap: float
    """The number of running requests that held for longest while requests waited."""
    share_at_cap: float
    """Share of the request-seconds of waiting in which that many ran, within 3 %."""
    usage_while_waiting: float | None
    share_with_full_pool: float | None
    """Share of the request-seconds of waiting in which the pool was full."""
    usage_peak: float | None

    @property
    def waiting_share(self) -> float:
        """Share of the time in the server that requests wait."""
        whole = self.waiting_mean + self.running_mean
        return self.waiting_mean / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """KV tokens of the requests that decode, over time, beside the pool: what would be held if none were preempted."""

    peak_tokens: float
    """Most at one time."""
    full_share: float
    """Share of the run in which they are ``FULL_POOL`` of the pool or more."""
    over_share: float
    """Share in which they are more than the whole pool, so that some had been preempted."""
    waiting_share: float
    """Share of the request-seconds in flight in which a request had no token yet while the pool was full, less the
    TTFT of the unhindered (5th percentile)."""
    decoding_while_full: float
    """Mean number of requests that had their first token and not their last, while it was full."""


class Evidence:
    """A run, what is known besides it, and what follows from both."""

    def __init__(self, run: ObservedRun, facts: Facts) -> None:
        self.run = run
        self.facts = facts
        self.table = run.requests
        self.metrics: ObservedMetrics = observed_metrics(run, _PERCENTILES)
        self.stated = run.stated
        self.has_requests = len(self.table) > 0

    # What was asked for.

    @cached_property
    def rate(self) -> float | None:
        """Requests a second that the client was to send; None is not known, infinity all at once."""
        return self.facts.request_rate if self.facts.request_rate is not None else self.run.request_rate

    @property
    def finite_rate(self) -> float | None:
        """The same where it is a rate."""
        return self.rate if self.rate is not None and 0 < self.rate < math.inf else None

    @cached_property
    def limit(self) -> int | None:
        """Most requests in flight that the client was asked for."""
        return self.facts.max_concurrency or self.run.max_concurrency or None

    @cached_property
    def max_num_seqs(self) -> int | None:
        """Seats of all engines."""
        seats = self.facts.max_num_seqs or self.run.server.max_num_seqs
        return seats * self.num_engines if seats else None

    @property
    def num_engines(self) -> int:
        """Engines behind the address; one if that is not known."""
        return self.run.server.num_engines or 1

    @property
    def budget(self) -> int | None:
        """Token budget of a step."""
        return self.facts.max_num_batched_tokens or self.run.server.max_num_batched_tokens

    @cached_property
    def kv_tokens(self) -> int | None:
        """KV pool of one engine, in tokens."""
        server = self.run.server
        if self.facts.kv_cache_tokens or server.kv_cache_tokens:
            return self.facts.kv_cache_tokens or server.kv_cache_tokens
        return (server.num_gpu_blocks - 1) * server.block_size if server.num_gpu_blocks and server.block_size else None

    @cached_property
    def has_sessions(self) -> bool:
        """Whether requests follow answers, so that the load adapts to the server without a limit of the client."""
        return bool((self.table.previous >= 0).any())

    # What came of it, in seconds and requests.

    def mean_s(self, name: str) -> float | None:
        """Mean of one latency (``ttft``, ``tpot``, ``itl``, ``e2el``, ``client_queue_time``)."""
        mean_ms: float | None = getattr(self.metrics, name).mean_ms
        return None if mean_ms is None else mean_ms / 1e3

    def percentile_s(self, name: str, percent: float) -> float | None:
        """A percentile of one latency."""
        value = getattr(self.metrics, name).percentile_ms(percent)
        return None if value is None else value / 1e3

    @property
    def num_requests(self) -> int | None:
        """Requests in the result; None if it does not say."""
        return self.metrics.num_prompts if self.metrics.num_prompts is not None else self.metrics.completed

    @property
    def throughput(self) -> float | None:
        """Finished requests a second."""
        return self.metrics.request_throughput

    @cached_property
    def in_flight(self) -> float | None:
        """Requests in flight by Little's law: throughput x mean E2EL."""
        e2el = self.mean_s("e2el")
        return None if e2el is None or self.throughput is None else self.throughput * e2el

    @cached_property
    def decoding(self) -> float | None:
        """Requests that get tokens at a time: output throughput x mean TPOT, by Little's law for tokens."""
        tpot, tokens = self.mean_s("tpot"), self.metrics.output_throughput
        return None if tpot is None or tokens is None else tokens * tpot

    @property
    def mean_prompt_tokens(self) -> float | None:
        """Mean prompt of the finished requests."""
        total, completed = self.metrics.total_input_tokens, self.metrics.completed
        return total / completed if total is not None and completed else None

    @property
    def mean_output_tokens(self) -> float | None:
        """Mean answer of the finished requests."""
        total, completed = self.metrics.total_output_tokens, self.metrics.completed
        return total / completed if total is not None and completed else None

    # The requests over time.

    @cached_property
    def ended_ns(self) -> IntArray:
        """When each request left, from the start of the run; -1 where that is not known."""
        lasted = np.maximum(self.table.e2el_ns, self.table.end_ns)
        return np.where((self.table.send_ns >= 0) & (lasted >= 0), self.table.send_ns + lasted, -1)

    @cached_property
    def timed(self) -> IntArray:
        """Rows whose sending and end are known, in order of sending; none unless that is nearly all that were sent."""
        sent = self.table.send_ns >= 0
        known = sent & (self.ended_ns >= 0)
        if not known.any() or known.sum() < ENOUGH_KNOWN * (sent | self.table.is_finished).sum():
            return np.zeros(0, np.int64)
        rows = np.flatnonzero(known)
        ordered: IntArray = rows[np.argsort(self.table.send_ns[rows], kind="stable")]
        return ordered

    @cached_property
    def level(self) -> Level | None:
        """Requests in flight over time."""
        if not len(self.timed):
            return None
        return Level(*level_over_time(self.table.send_ns[self.timed], self.ended_ns[self.timed]))

    @cached_property
    def late_ns(self) -> IntArray:
        """How much later than due each finished request was sent; empty where nearly none has both times."""
        table = self.table
        known = table.is_finished & (table.due_ns >= 0) & (table.send_ns >= 0)
        if known.sum() < ENOUGH_KNOWN * max(int(table.is_finished.sum()), 1):
            return np.zeros(0, np.int64)
        late: IntArray = (table.send_ns - table.due_ns)[known]
        return late

    @cached_property
    def due_window_ns(self) -> int | None:
        """From the first to the last request due."""
        due = self.table.due_ns[self.table.due_ns >= 0]
        return int(due.max() - due.min()) if len(due) else None

    @cached_property
    def is_spread(self) -> bool:
        """Whether requests were due over time, and not all at once (in a twentieth of the run or less)."""
        makespan = self.run.makespan_ns
        return self.due_window_ns is not None and makespan is not None and self.due_window_ns > 0.05 * makespan

    @cached_property
    def stability(self) -> Stability | None:
        """The verdict on queue and backlog, from when requests were due, got their first token, and ended.

        None unless nearly all of these times are known.  A request counts as started with its first token, since a
        client cannot see when the scheduler took it.
        """
        rows = self.timed
        first = np.where(self.table.ttft_ns >= 0, self.table.send_ns + self.table.ttft_ns, -1)
        if not len(rows) or (first[rows] >= 0).sum() < ENOUGH_KNOWN * len(rows):
            return None
        due = np.where(self.table.due_ns >= 0, self.table.due_ns, self.table.send_ns)
        rows = rows[np.argsort(due[rows], kind="stable")]
        number = np.arange(len(rows))
        nothing = np.zeros(len(rows), np.int64)
        outputs = np.maximum(self.table.num_output_tokens[rows], 1)
        prompts = np.maximum(self.table.num_prompt_tokens[rows], 1)
        outcome = np.where(self.table.is_finished[rows], int(Outcome.FINISHED), int(Outcome.ABORTED))
        requests = RequestTable(
            request=number,
            outcome=outcome,
            replica=nothing,
            due_ns=due[rows],
            arrival_ns=self.table.send_ns[rows],
            scheduled_ns=first[rows],
            first_token_ns=first[rows],
            finish_ns=self.ended_ns[rows],
            num_prompt_tokens=prompts,
            num_output_tokens=outputs,
            **dict.fromkeys(_COUNTED, nothing),
        )
        records = Records(requests, (), int(self.ended_ns[rows].max()))
        return judge(records, workload(due[rows].clip(min=0), prompts, outputs, max_concurrency=self.limit))

    @property
    def is_sharing_known(self) -> bool:
        """Whether it is known how much of the prompts shares blocks with others."""
        told = self.hit_rate is not None or self.facts.shared_prefix_share is not None
        return told or self.run.server.enable_prefix_caching is False

    @cached_property
    def pool_demand(self) -> PoolDemand | None:
        """What the requests must have held of the KV pool; None unless the pool and nearly all times are known.

        From its first token to its end a request holds its prompt, less the share that came from the prefix cache, and
        its answer so far, which is taken to grow evenly.
        """
        rows, pool = self.timed, self.kv_tokens
        if pool is not None and len(rows):
            rows = rows[self.table.is_finished[rows] & (self.table.ttft_ns[rows] >= 0)]
        if pool is None or len(rows) < ENOUGH_KNOWN * max(len(self.timed), 1) or not len(rows):
            return None
        sent, ended = self.table.send_ns[rows], self.ended_ns[rows]
        first = np.minimum(sent + self.table.ttft_ns[rows], ended)
        shared = max(self.hit_rate or 0.0, self.facts.shared_prefix_share or 0.0)
        prompts = np.maximum(self.table.num_prompt_tokens[rows], 0) * (1.0 - shared)
        speed = np.maximum(self.table.num_output_tokens[rows], 0) / np.maximum(ended - first, 1)
        at = np.linspace(float(sent.min()), float(ended.max()), _LOOKS)
        begun, left, come = (np.argsort(times, kind="stable") for times in (first, ended, sent))

        def sums(order: IntArray, times: IntArray, values: FloatArray) -> FloatArray:
            so_far = np.concatenate(([0.0], np.cumsum(values[order])))
            found: FloatArray = so_far[np.searchsorted(times[order], at, "right")]
            return found

        ones = np.ones(len(rows))
        number = sums(begun, first, ones) - sums(left, ended, ones)
        late = np.minimum(sent + np.percentile(first - sent, 5.0).astype(np.int64), first)
        waiting = sums(np.argsort(late, kind="stable"), late, ones) - sums(begun, first, ones)
        in_flight = float((sums(come, sent, ones) - sums(left, ended, ones)).sum())
        grown = at * (sums(begun, first, speed) - sums(left, ended, speed))
        grown -= sums(begun, first, speed * first) - sums(left, ended, speed * first)
        held = sums(begun, first, prompts) - sums(left, ended, prompts) + grown
        tokens = pool * self.num_engines
        full = held >= FULL_POOL * tokens
        return PoolDemand(
            peak_tokens=float(held.max()),
            full_share=float(full.mean()),
            over_share=float((held > tokens).mean()),
            waiting_share=float(waiting[full].sum() / in_flight) if in_flight else 0.0,
            decoding_while_full=float(number[full].mean()) if full.any() else 0.0,
        )

    # Tokens.

    @cached_property
    def _gaps(self) -> tuple[IntArray, IntArray]:
        """Gaps between tokens of one finished request, and when each began; thinned out evenly if there are many."""
        table = self.table
        row = np.repeat(np.arange(len(table)), np.diff(table.chunk_offsets))
        at = table.send_ns[row] + table.chunk_ns
        inside = np.flatnonzero((row[1:] == row[:-1]) & table.is_finished[row[1:]] & (table.send_ns[row[1:]] >= 0))
        inside = inside[:: max(len(inside) // MOST_GAPS, 1)]
        gaps: IntArray = (at[1:] - at[:-1])[inside]
        return gaps, at[inside]

    @cached_property
    def step_curve(self) -> StepCurve | None:
        """Time of a decode step over the number of requests that decode in it; None where too little varies.

        From the gaps that hold nobody's first token, so that no prompt was completed in them: their medians for equal
        numbers of decoding requests, and a line through them.
        """
        gaps, start = self._gaps
        if len(gaps) < 200:
            return None
        done = self.table.is_finished & (self.table.send_ns >= 0) & (self.table.ttft_ns >= 0)
        first = np.sort((self.table.send_ns + self.table.ttft_ns)[done])
        last = np.sort(self.table.finish_ns[done])
        began = np.searchsorted(first, start, "right")
        plain = began == np.searchsorted(first, start + gaps, "right")
        num = (began - np.searchsorted(last, start, "right")) / self.num_engines
        num, times = num[plain], gaps[plain] / NS_PER_S
        if not len(num) or num.max() < 1.5 * max(num.min(), 1):
            return None
        edges = np.unique(np.geomspace(max(num.min(), 1), num.max() + 1, 13))
        bins = np.digitize(num, edges)
        points = [
            (num[bins == b].mean(), np.median(times[bins == b])) for b in np.unique(bins) if (bins == b).sum() >= 8
        ]
        if len(points) < 3:
            return None
        x, y = np.array(points).T
        slope, _ = np.polyfit(x, y, 1)
        slope = max(float(slope), 0.0)
        return StepCurve(max(float((y - slope * x).mean()), 0.0), slope)

    @cached_property
    def short_and_full_step_s(self) -> tuple[float, float] | None:
        """The 5th and the 90th percentile of the gaps: steps with hardly any, and with much, of other prompts."""
        gaps, _ = self._gaps
        if len(gaps) < 50:
            return None
        low, high = np.percentile(gaps, (5, 90)) / NS_PER_S
        return float(low), float(high)

    # The server's word.

    @cached_property
    def waiting(self) -> ServerWaiting | None:
        """What the gauges show while requests waited; None without gauges of running and waiting."""
        series = self.run.series
        if series is None or len(series) < 2:
            return None
        known = ~np.isnan(series.num_running) & ~np.isnan(series.num_waiting)
        if known.sum() < 2:
            return None
        times, running, waiting = series.time_ns[known], series.num_running[known], series.num_waiting[known]
        usage = series.kv_usage[known]
        held = np.diff(times, append=times[-1]).astype(np.float64)
        whole = float(held.sum())
        busy = held * (running > 0)
        if whole <= 0 or not busy.any():
            return None
        weight = held * waiting
        total = float(weight.sum())
        mean = np.average(running, weights=weight) if total else float(running.max())
        cap = _weighted_mode(running, weight) if total else float(running.max())
        has_usage = bool((~np.isnan(usage)).any())
        usage = np.nan_to_num(usage)
        return ServerWaiting(
            waiting_mean=total / whole,
            running_mean=weighted_sum(held, running) / whole,
            running_peak=float(running.max()),
            running_while_waiting=float(mean),
            running_cap=cap,
            share_at_cap=float(weight[np.abs(running - cap) <= 0.03 * cap].sum() / total) if total else 0.0,
            usage_while_waiting=float(np.average(usage, weights=weight)) if total and has_usage else None,
            share_with_full_pool=float(weight[usage >= FULL_POOL].sum() / total) if total and has_usage else None,
            usage_peak=float(usage.max()) if has_usage else None,
        )

    @cached_property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were found in the prefix cache: the server's counters, else its answers."""
        if self.metrics.prefix_cache_hit_rate is not None:
            return self.metrics.prefix_cache_hit_rate
        known = self.table.is_finished & (self.table.num_cached_tokens >= 0) & (self.table.num_prompt_tokens > 0)
        if not known.any():
            return None
        return float(self.table.num_cached_tokens[known].sum() / self.table.num_prompt_tokens[known].sum())

    @cached_property
    def num_failed(self) -> int | None:
        """Requests that ended otherwise than finished, for a reason that is not the end of the run."""
        if not self.has_requests:
            return self.metrics.failed
        cut = (self.table.ending == Ending.UNSENT) | (self.table.ending == Ending.CUT_OFF)
        return int((~self.table.is_finished & ~cut).sum())


_COUNTED = (
    "priority",
    "num_preemptions",
    "num_recomputed_tokens",
    "num_cached_tokens",
    "num_resumed_cached_tokens",
    "num_resumed_query_tokens",
)


def _weighted_mode(values: FloatArray, weights: FloatArray) -> float:
    """The whole number that carries the most weight."""
    levels, inverse = np.unique(values, return_inverse=True)
    return float(levels[int(np.bincount(inverse, weights).argmax())])

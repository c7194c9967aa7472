"""Metrics of an ObservedRun as ``vllm bench serve`` defines them, and the same of a simulated run.

Source of the definitions: ``vllm/benchmarks/serve.py`` of vLLM 0.32 (Apache-2.0): TPOT is (E2EL - TTFT) / (output
tokens - 1) over requests with more than one; ITL pools the gaps between successive chunks of all finished requests;
throughputs are sums over the run's duration; percentiles interpolate linearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windtunnel.calibrate.live.observed import (
    NS_PER_S,
    Ending,
    FloatArray,
    ObservedRun,
    ServerCounts,
    ServerFacts,
    ServerSeries,
    observed_requests,
)
from windtunnel.sim.metrics.latency import expanded_inter_token_latencies, peak_in_flight
from windtunnel.sim.metrics.load import kv_usage, ratio
from windtunnel.sim.metrics.sample import LatencyStats, Sample, latency_stats, sample, weighted_sum
from windtunnel.sim.metrics.summary import percent_word
from windtunnel.sim.records import IntArray, Outcome, Records
from windtunnel.sim.workload import Workload

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
LATENCIES = ("ttft", "tpot", "itl", "e2el", "client_queue_time")


@dataclass(frozen=True, slots=True)
class ObservedMetrics:
    """What a run came to; None where the source does not tell.  Latencies are those of the finished requests."""

    num_prompts: int | None
    completed: int | None
    failed: int | None
    duration_s: float | None
    total_input_tokens: int | None
    total_output_tokens: int | None
    request_throughput: float | None
    output_throughput: float | None
    total_token_throughput: float | None
    max_output_tokens_per_s: float | None
    max_concurrent_requests: int | None
    peak_concurrent_requests: int | None
    ttft: LatencyStats
    tpot: LatencyStats
    itl: LatencyStats
    e2el: LatencyStats
    client_queue_time: LatencyStats
    preemptions: int | None
    prefix_cache_hit_rate: float | None
    kv_usage_mean: float | None
    """Of the samples taken during the run."""
    kv_usage_peak: float | None
    num_running_mean: float | None
    num_running_peak: float | None
    num_waiting_mean: float | None
    num_waiting_peak: float | None

    def to_dict(self) -> dict[str, float | None]:
        """Flat, under the keys that ``vllm bench serve`` and a simulated ``Summary`` use (``mean_ttft_ms`` …)."""
        flat: dict[str, float | None] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, LatencyStats):
                flat |= _latency_keys(name, value)
            else:
                flat["duration" if name == "duration_s" else name] = value
        return flat


def observed_metrics(run: ObservedRun, percentiles: Sequence[float] = PERCENTILES) -> ObservedMetrics:
    """Metrics of a run, from its requests; of a run without requests, the aggregates that its source states.

    Raises ValueError for a percentile outside 0 … 100.
    """
    return _from_requests(run, percentiles) if len(run.requests) else _from_stated(run, percentiles)


def latency_sample(run: ObservedRun, name: str) -> Sample:
    """All values of one latency in nanoseconds: ttft, tpot, itl, e2el or client_queue_time; empty if none is known.

    Raises KeyError for another name.
    """
    table = run.requests
    done = table.is_finished
    match name:
        case "ttft":
            return sample(table.ttft_ns[done & (table.ttft_ns >= 0)])
        case "e2el":
            return sample(table.e2el_ns[done & (table.e2el_ns >= 0)])
        case "tpot":
            known = done & (table.ttft_ns >= 0) & (table.e2el_ns >= 0) & (table.num_output_tokens > 1)
            return sample((table.e2el_ns - table.ttft_ns)[known] / (table.num_output_tokens[known] - 1))
        case "itl":
            return sample(_gaps(run))
        case "client_queue_time":
            known = done & (table.due_ns >= 0) & (table.send_ns >= 0)
            return sample((table.send_ns - table.due_ns)[known])
    raise KeyError(name)


def observed_from_records(records: Records, workload: Workload, name: str = "simulated") -> ObservedRun:
    """A simulated run in the form of an observed one, so that both are measured with the same ruler.

    Its series has a point at each step's start and end of the first replica only if there is one; with several the
    series is left out.  Makes one number a token.
    """
    table = records.requests
    ending = np.array(_ENDINGS, np.int64)[table.outcome]
    ending[(table.outcome == Outcome.UNFINISHED) & (table.arrival_ns < 0)] = Ending.UNSENT
    sent = table.arrival_ns >= 0
    ttft = np.where(sent & (table.first_token_ns >= 0), table.first_token_ns - table.arrival_ns, -1)
    e2el = np.where(ending == Ending.FINISHED, table.finish_ns - table.arrival_ns, -1)
    chunks = [
        np.cumsum([first, *(np.rint(np.array(gaps) * NS_PER_S))]).astype(np.int64) if first >= 0 else _NOTHING
        for first, gaps in zip(ttft.tolist(), expanded_inter_token_latencies(records), strict=True)
    ]
    requests = observed_requests(
        len(table),
        due_ns=table.due_ns,
        send_ns=table.arrival_ns,
        ready_ns=table.arrival_ns,
        ttft_ns=ttft,
        e2el_ns=e2el,
        end_ns=e2el,
        num_prompt_tokens_asked=table.num_prompt_tokens,
        num_output_tokens_asked=workload.num_output_tokens[table.request],
        num_prompt_tokens=table.num_prompt_tokens,
        num_output_tokens=table.num_output_tokens,
        num_cached_tokens=table.num_cached_tokens,
        previous=workload.previous[table.request],
        ending=ending,
        chunks=chunks,
    )
    first = records.replicas[0] if records.replicas else None
    return ObservedRun(
        source="windtunnel simulation",
        name=name,
        requests=requests,
        max_concurrency=workload.max_concurrency,
        series=_simulated_series(records),
        counts=ServerCounts(
            num_preemptions=int(table.num_preemptions.sum()),
            num_steps=sum(len(replica.steps) for replica in records.replicas),
            prefix_hit_tokens=int(table.num_cached_tokens.sum()),
            prefix_query_tokens=int(table.num_prompt_tokens[table.scheduled_ns >= 0].sum()),
        ),
        server=ServerFacts(
            num_gpu_blocks=None if first is None else first.num_usable_blocks + 1,
            block_size=None if first is None else first.block_size,
            max_num_seqs=None if first is None else first.max_num_seqs,
            max_num_batched_tokens=None if first is None else first.max_num_batched_tokens,
            max_model_len=None if first is None else first.max_model_len or None,
            num_engines=len(records.replicas),
        ),
    )


_NOTHING = np.zeros(0, np.int64)
_ENDING_OF = {
    Outcome.FINISHED: Ending.FINISHED,
    Outcome.UNFINISHED: Ending.CUT_OFF,
    Outcome.REJECTED: Ending.REFUSED,
    Outcome.ABORTED: Ending.TIMED_OUT,
    Outcome.LOST: Ending.BROKEN,
}
_ENDINGS = [int(_ENDING_OF[outcome]) for outcome in Outcome]


def _from_requests(run: ObservedRun, percentiles: Sequence[float]) -> ObservedMetrics:
    table = run.requests
    done = table.is_finished
    inputs, outputs = _total(table.num_prompt_tokens[done]), _total(table.num_output_tokens[done])
    duration_ns = run.duration_ns or run.makespan_ns
    duration_s = None if duration_ns is None else duration_ns / NS_PER_S
    completed = int(done.sum())
    window = _window(run)
    series = run.series
    return ObservedMetrics(
        num_prompts=len(table),
        completed=completed,
        failed=len(table) - completed,
        duration_s=duration_s,
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        request_throughput=_rate(completed, duration_s),
        output_throughput=_rate(outputs, duration_s),
        total_token_throughput=_rate(None if inputs is None or outputs is None else inputs + outputs, duration_s),
        max_output_tokens_per_s=_peak_tokens_per_s(run),
        max_concurrent_requests=_max_concurrent(run),
        peak_concurrent_requests=_peak_in_flight(run),
        **{name: latency_stats(latency_sample(run, name), percentiles) for name in LATENCIES},
        preemptions=run.counts.num_preemptions,
        prefix_cache_hit_rate=_hit_rate(run.counts),
        kv_usage_mean=_mean(series, "kv_usage", window),
        kv_usage_peak=_peak(series, "kv_usage", window),
        num_running_mean=_mean(series, "num_running", window),
        num_running_peak=_peak(series, "num_running", window),
        num_waiting_mean=_mean(series, "num_waiting", window),
        num_waiting_peak=_peak(series, "num_waiting", window),
    )


def _from_stated(run: ObservedRun, percentiles: Sequence[float]) -> ObservedMetrics:
    stated = run.stated
    window = _window(run)
    series = run.series

    def count(key: str) -> int | None:
        value = stated.get(key)
        return None if value is None else round(value)

    return ObservedMetrics(
        num_prompts=count("num_prompts"),
        completed=count("completed"),
        failed=count("failed"),
        duration_s=stated.get("duration"),
        total_input_tokens=count("total_input_tokens"),
        total_output_tokens=count("total_output_tokens"),
        request_throughput=stated.get("request_throughput"),
        output_throughput=stated.get("output_throughput"),
        total_token_throughput=stated.get("total_token_throughput"),
        max_output_tokens_per_s=stated.get("max_output_tokens_per_s"),
        max_concurrent_requests=count("max_concurrent_requests"),
        peak_concurrent_requests=None,
        **{name: _stated_latency(run, name, percentiles) for name in LATENCIES},
        preemptions=run.counts.num_preemptions,
        prefix_cache_hit_rate=_hit_rate(run.counts),
        kv_usage_mean=_mean(series, "kv_usage", window),
        kv_usage_peak=_peak(series, "kv_usage", window),
        num_running_mean=_mean(series, "num_running", window),
        num_running_peak=_peak(series, "num_running", window),
        num_waiting_mean=_mean(series, "num_waiting", window),
        num_waiting_peak=_peak(series, "num_waiting", window),
    )


def _stated_latency(run: ObservedRun, name: str, percentiles: Sequence[float]) -> LatencyStats:
    """A percentile that the source does not state is None, except that the median is also the 50th."""
    stated = run.stated
    median = stated.get(f"median_{name}_ms", stated.get(f"p50_{name}_ms"))
    known = {percent: stated.get(f"p{percent_word(percent)}_{name}_ms") for percent in percentiles}
    mean = stated.get(f"mean_{name}_ms")
    return LatencyStats(
        count=0 if mean is None and median is None else round(stated.get("completed", 0)),
        mean_ms=mean,
        median_ms=median,
        std_ms=stated.get(f"std_{name}_ms"),
        min_ms=stated.get(f"min_{name}_ms"),
        max_ms=stated.get(f"max_{name}_ms"),
        percentiles_ms=tuple(
            (percent, median if value is None and percent == 50 else value) for percent, value in known.items()
        ),
    )


def _latency_keys(name: str, stats: LatencyStats) -> dict[str, float | None]:
    keys = {f"mean_{name}_ms": stats.mean_ms, f"median_{name}_ms": stats.median_ms, f"std_{name}_ms": stats.std_ms}
    return keys | {f"p{percent_word(percent)}_{name}_ms": value for percent, value in stats.percentiles_ms}


def _gaps(run: ObservedRun) -> IntArray:
    """Gaps between successive chunks of the same finished request."""
    table = run.requests
    counts = np.diff(table.chunk_offsets)
    row = np.repeat(np.arange(len(table)), counts)
    wanted = table.is_finished[row]
    times, row = table.chunk_ns[wanted], row[wanted]
    same = row[1:] == row[:-1]
    gaps: IntArray = np.diff(times)[same]
    return gaps


def _total(column: IntArray) -> int | None:
    """The sum; None where one is not known."""
    return None if bool((column < 0).any()) else int(column.sum())


def _rate(amount: float | None, duration_s: float | None) -> float | None:
    return amount / duration_s if amount is not None and duration_s else None


def _sent_and_finished(run: ObservedRun) -> tuple[IntArray, IntArray] | None:
    table = run.requests
    done = table.is_finished
    sent, finish = table.send_ns[done], table.finish_ns[done]
    if not len(sent) or bool((finish < 0).any()):
        return None
    return sent, finish


def _peak_tokens_per_s(run: ObservedRun) -> float | None:
    """Most tokens of finished requests in one second counted from the first sending; None without token times.

    A chunk whose number of tokens is not known counts as one token, as vLLM counts every chunk.
    """
    table = run.requests
    times = _sent_and_finished(run)
    if times is None or not len(table.chunk_ns):
        return None
    row = np.repeat(np.arange(len(table)), np.diff(table.chunk_offsets))
    wanted = table.is_finished[row]
    second = (table.send_ns[row] + table.chunk_ns - int(times[0].min()))[wanted] // NS_PER_S
    tokens = np.where(table.chunk_tokens < 0, 1, table.chunk_tokens)[wanted]
    _, bucket = np.unique(second, return_inverse=True)
    return float(np.bincount(bucket, weights=tokens).max(initial=0))


def _max_concurrent(run: ObservedRun) -> int | None:
    """As ``sim.metrics.latency.max_concurrent_requests``: in 1-second buckets, each request in all that it touches."""
    times = _sent_and_finished(run)
    if times is None:
        return None
    sent, finish = times
    origin = int(sent.min())
    return peak_in_flight((sent - origin) // NS_PER_S, (finish - origin) // NS_PER_S + 1)


def _peak_in_flight(run: ObservedRun) -> int | None:
    """Most requests in flight at one instant, until their last token, failed ones included as long as they lasted."""
    table = run.requests
    lasted = np.maximum(table.e2el_ns, table.end_ns)
    sent = table.send_ns >= 0
    if not sent.any() or bool((lasted[sent] < 0).any()):
        return None
    return peak_in_flight(table.send_ns[sent], (table.send_ns + lasted)[sent])


def _hit_rate(counts: ServerCounts) -> float | None:
    if counts.prefix_hit_tokens is None or counts.prefix_query_tokens is None:
        return None
    return ratio(counts.prefix_hit_tokens, counts.prefix_query_tokens)


def _window(run: ObservedRun) -> tuple[int, int]:
    """The time over which series are averaged: first sending to last token, else all of the series."""
    sent, finish = run.requests.send_ns, run.requests.finish_ns
    sent, finish = sent[sent >= 0], finish[finish >= 0]
    if len(sent) and len(finish):
        return int(sent.min()), int(finish.max())
    times = run.series.time_ns if run.series is not None else _NOTHING
    return (int(times[0]), int(times[-1])) if len(times) else (0, 0)


def _held(series: ServerSeries, name: str, window: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """Known values and how long each held within the window: until the next sample."""
    column: FloatArray = getattr(series, name)
    known = ~np.isnan(column)
    times = np.clip(series.time_ns[known], *window)
    return column[known], np.diff(times, append=window[1]).astype(np.float64)


def _mean(series: ServerSeries | None, name: str, window: tuple[int, int]) -> float | None:
    if series is None:
        return None
    values, held = _held(series, name, window)
    return ratio(weighted_sum(values, held), float(held.sum()))


def _peak(series: ServerSeries | None, name: str, window: tuple[int, int]) -> float | None:
    if series is None:
        return None
    values, held = _held(series, name, window)
    return float(values[held > 0].max()) if bool((held > 0).any()) else None


def _simulated_series(records: Records) -> ServerSeries | None:
    """A point at each step, and one of zeros where an engine then had nothing to do."""
    if len(records.replicas) != 1 or not len(records.replicas[0].steps):
        return None
    steps = records.replicas[0].steps
    idle = np.append(steps.start_ns[1:] > steps.end_ns[:-1], True)
    times = np.concatenate((steps.start_ns, steps.end_ns[idle]))
    order = np.argsort(times, kind="stable")
    preempted = np.cumsum(steps.num_preempted)

    def over_time(busy: FloatArray | IntArray, at_rest: FloatArray | IntArray | float = 0.0) -> FloatArray:
        rest = np.broadcast_to(np.asarray(at_rest, np.float64), idle.shape)[idle]
        both: FloatArray = np.concatenate((np.asarray(busy, np.float64), rest))
        return both[order]

    unknown = np.full(len(times), np.nan)
    return ServerSeries(
        time_ns=times[order],
        num_running=over_time(steps.num_running),
        num_waiting=over_time(steps.num_waiting),
        num_swapped=unknown,
        kv_usage=over_time(kv_usage(records.replicas[0])[0]),
        num_preemptions=over_time(preempted, preempted),
        prefix_query_tokens=unknown,
        prefix_hit_tokens=unknown,
        generation_tokens=unknown,
        prompt_tokens=unknown,
    )

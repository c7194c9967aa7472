"""What the replicas were busy with over time: KV usage, queue, batch; and its means and peaks.

A step's state holds from its start to its end.  Between steps a replica is idle: no request runs there and no block
is held, so gaps count as zero in means over the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windtunnel.sim.metrics.latency import NS_PER_S, FloatArray
from windtunnel.sim.metrics.sample import weighted_sum
from windtunnel.sim.records import IntArray, Records, ReplicaRecords, StepTable


@dataclass(frozen=True, slots=True)
class KvStats:
    """How full the KV cache was, as shares (0 … 1) of the usable blocks of all replicas."""

    usage_mean: float | None
    """Active: blocks that requests hold, 1 - free/usable as vLLM's ``kv_cache_usage_perc``; mean over the run."""
    usage_mean_busy: float | None
    """The same while steps ran."""
    usage_peak: float | None
    """Largest of any replica."""
    cached_usage_mean_busy: float | None
    """Active plus free blocks that still hold a findable prefix, while steps ran.  vLLM's gauge leaves them out."""
    cached_usage_peak: float | None
    num_usable_blocks: int
    """Of all replicas together."""


@dataclass(frozen=True, slots=True)
class LoadStats:
    """How much there was to do, and how much was done at once."""

    num_steps: int
    busy_share: float
    """Share of the run in which a step ran, averaged over replicas."""
    batch_size_mean: float | None
    """Requests computed in a step, mean over the time that steps ran."""
    batch_size_peak: int
    tokens_per_step_mean: float | None
    """Tokens computed in a step, mean over steps."""
    num_running_mean: float | None
    """Running requests of all replicas, mean over the run."""
    num_running_peak: int
    """Of one replica."""
    num_waiting_mean: float | None
    """Requests that a step's decision left waiting, mean over the run."""
    num_waiting_peak: int
    """Of one replica."""
    in_flight_mean: float | None
    """Requests sent and not ended, mean over the run; failed and unfinished ones included."""
    in_flight_by_littles_law: float | None
    """Request throughput times mean E2EL: the same if all requests finish; None if one did not."""
    utilisation: float | None
    """rho: offered request rate over the saturation throughput."""
    utilisation_note: str
    """Why there is no rho, or what it is made of."""
    num_replicas: int = 1


def kv_usage(replica: ReplicaRecords) -> tuple[FloatArray, FloatArray]:
    """Shares of the usable blocks that were active, and active or cached, in each step."""
    usable = max(replica.num_usable_blocks, 1)
    active = 1.0 - replica.steps.num_free_blocks / usable
    return active, active + replica.steps.num_cached_blocks / usable


def batch_size(steps: StepTable) -> IntArray:
    """Requests computed in each step."""
    return steps.num_decode_seqs + steps.num_prefill_seqs


def num_tokens(steps: StepTable) -> IntArray:
    """Tokens computed in each step."""
    return steps.num_decode_seqs + steps.prefill_tokens


def level_over_time(start_ns: IntArray, end_ns: IntArray) -> tuple[IntArray, IntArray]:
    """How many intervals [start, end) hold an instant: the times at which that changes, and the level from there on."""
    times = np.concatenate((start_ns, end_ns))
    change = np.concatenate((np.ones(len(start_ns), np.int64), np.full(len(end_ns), -1, np.int64)))
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(change[order])
    last_of_its_time = np.append(times[1:] != times[:-1], True) if len(times) else np.zeros(0, np.bool_)
    return times[last_of_its_time], level[last_of_its_time]


def in_flight(records: Records) -> tuple[IntArray, IntArray]:
    """When each request that reached an engine was sent and when it ended (the run's end if it did not)."""
    table = records.requests
    sent = table.arrival_ns >= 0
    finish = table.finish_ns[sent]
    return table.arrival_ns[sent], np.where(finish < 0, records.end_ns, finish)


def kv_stats(records: Records, start_ns: int, end_ns: int) -> KvStats:
    """KV usage between two times."""
    blocks = np.array([replica.num_usable_blocks for replica in records.replicas], np.float64)
    active_ns, cached_ns, busy_ns, peaks, cached_peaks = 0.0, 0.0, 0.0, [], []
    for replica, weight in zip(records.replicas, blocks, strict=True):
        duration = durations(replica.steps, start_ns, end_ns)
        active, cached = kv_usage(replica)
        active_ns += weight * weighted_sum(active, duration)
        cached_ns += weight * weighted_sum(cached, duration)
        busy_ns += weight * float(duration.sum())
        if len(active):
            peaks.append(float(active.max()))
            cached_peaks.append(float(cached.max()))
    total_ns = float(blocks.sum()) * (end_ns - start_ns)
    if records.fleet is not None:
        total_ns = weighted_sum(blocks, np.array(present_ns(records, start_ns, end_ns)))
    return KvStats(
        usage_mean=ratio(active_ns, total_ns),
        usage_mean_busy=ratio(active_ns, busy_ns),
        usage_peak=max(peaks, default=None),
        cached_usage_mean_busy=ratio(cached_ns, busy_ns),
        cached_usage_peak=max(cached_peaks, default=None),
        num_usable_blocks=int(blocks.sum()),
    )


def load_stats(
    records: Records,
    start_ns: int,
    end_ns: int,
    *,
    littles_law: float | None,
    utilisation: tuple[float | None, str],
) -> LoadStats:
    """Queue, batch and busy time between two times."""
    span_ns = end_ns - start_ns
    batch_ns, running_ns, waiting_ns, busy_ns, num_steps, tokens = 0.0, 0.0, 0.0, 0.0, 0, 0
    peaks = {"batch": 0, "running": 0, "waiting": 0}
    for steps in (replica.steps for replica in records.replicas):
        duration, batch = durations(steps, start_ns, end_ns), batch_size(steps)
        batch_ns += weighted_sum(batch, duration)
        running_ns += weighted_sum(steps.num_running, duration)
        waiting_ns += weighted_sum(steps.num_waiting, duration)
        busy_ns += float(duration.sum())
        num_steps += len(steps)
        tokens += int(num_tokens(steps).sum())
        for name, column in (("batch", batch), ("running", steps.num_running), ("waiting", steps.num_waiting)):
            peaks[name] = max(peaks[name], int(column.max(initial=0)))
    sent, ended = in_flight(records)
    alive_ns = float(np.clip(ended, start_ns, end_ns).sum() - np.clip(sent, start_ns, end_ns).sum())
    return LoadStats(
        num_steps=num_steps,
        busy_share=ratio(busy_ns, sum(present_ns(records, start_ns, end_ns))) or 0.0,
        batch_size_mean=ratio(batch_ns, busy_ns),
        batch_size_peak=peaks["batch"],
        tokens_per_step_mean=ratio(tokens, num_steps),
        num_running_mean=ratio(running_ns, span_ns),
        num_running_peak=peaks["running"],
        num_waiting_mean=ratio(waiting_ns, span_ns),
        num_waiting_peak=peaks["waiting"],
        in_flight_mean=ratio(alive_ns, span_ns),
        in_flight_by_littles_law=littles_law,
        utilisation=utilisation[0],
        utilisation_note=utilisation[1],
        num_replicas=len(records.replicas),
    )


def utilisation(
    offered_rate: float | None, saturation_rate: float | None, closed_loop: bool
) -> tuple[float | None, str]:
    """rho and a sentence on it.  Rates in requests per second; both must be known and the arrivals open."""
    if saturation_rate is None:
        return None, "the saturation throughput is not known (run the same requests all at once to measure it)"
    if closed_loop:
        return None, "in a closed loop the load adapts to the server, so there is no offered rate of its own"
    if offered_rate is None:
        return None, "all requests were due at once, so there is no offered rate"
    rho = offered_rate / saturation_rate
    return rho, f"{offered_rate:,.2f} requests/s offered, {saturation_rate:,.2f}/s at saturation"


def present_ns(records: Records, start_ns: int, end_ns: int) -> list[int]:
    """How long each replica was there between two times: ready, or finishing what it had."""
    if records.fleet is None:
        return [end_ns - start_ns] * len(records.replicas)
    lives = records.fleet.lives
    gone = np.where(lives.gone_ns < 0, end_ns, lives.gone_ns)
    there = np.where(lives.ready_ns < 0, 0, np.minimum(gone, end_ns) - np.maximum(lives.ready_ns, start_ns))
    return [int(time) for time in there.clip(min=0)]


def durations(steps: StepTable, start_ns: int, end_ns: int) -> IntArray:
    """Length of the part of each step that lies between two times."""
    length: IntArray = np.minimum(steps.end_ns, end_ns) - np.maximum(steps.start_ns, start_ns)
    return length.clip(min=0)


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None when there is no whole."""
    return part / whole if whole else None


def per_second(amount: float, duration_ns: int) -> float | None:
    """Amount per second; None over no time."""
    return amount * NS_PER_S / duration_ns if duration_ns else None

"""What happened between two moments of a run: the same numbers for a forecast, a simulation and a live engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windtunnel.sim.records import IntArray, Outcome, Records, ReplicaRecords

FloatArray = npt.NDArray[np.float64]
Metrics = Mapping[str, float | None]
"""By name; None where there was nothing to measure."""

UNITS = {
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "num_arrived": "requests",
    "num_finished": "requests",
    **{f"{name}_{stat}_ms": "ms" for name in ("ttft", "tpot", "e2el") for stat in ("mean", "p50", "p90", "p99")},
    "num_preemptions": "preemptions",
    "running_mean": "requests",
    "waiting_mean": "requests",
    "waiting_max": "requests",
    "kv_usage_mean": "share",
    "kv_usage_max": "share",
    "busy": "share",
    "running_end": "requests",
    "waiting_end": "requests",
}
"""Of each metric, in the order of reports."""

_NS_PER_S = 1_000_000_000


class Seen(NamedTuple):
    """What one engine did, as columns: requests, then steps.  Times are on the engine's clock, -1 is never."""

    arrival_ns: IntArray
    first_token_ns: IntArray
    finish_ns: IntArray
    """-1 for one that did not finish, or was dropped."""
    num_output_tokens: IntArray
    start_ns: IntArray
    end_ns: IntArray
    num_running: IntArray
    """While the step ran, as the two that follow: as it was decided, before it was booked."""
    num_waiting: IntArray
    kv_usage: FloatArray
    """Share of the usable KV blocks that requests held."""
    num_tokens: IntArray
    """Output tokens that came at its end."""
    num_preempted: IntArray


def seen_in(records: Records) -> Seen:
    """The columns of a run on one engine.  Raises ValueError for one of several."""
    if len(records.replicas) != 1:
        raise ValueError(f"a window looks at one engine, the run has {len(records.replicas)}: take them one by one")
    table, replica = records.requests, records.replicas[0]
    steps = replica.steps
    return Seen(
        table.arrival_ns,
        table.first_token_ns,
        np.where(table.outcome == Outcome.FINISHED, table.finish_ns, -1),
        table.num_output_tokens,
        steps.start_ns,
        steps.end_ns,
        steps.num_running,
        steps.num_waiting,
        1.0 - steps.num_free_blocks / replica.num_usable_blocks,
        _tokens_of_steps(replica),
        steps.num_preempted,
    )


def window_metrics(seen: Seen, begin_ns: int, end_ns: int) -> dict[str, float | None]:
    """The metrics of ``UNITS`` for what happened after ``begin_ns`` and up to ``end_ns``.

    Latencies are those of vLLM's benchmark, counted where they end: TTFT of requests whose first token came in the
    window, TPOT and E2EL of those that finished in it.  Means over time weigh a step by its length in the window; while
    no step runs, nothing runs or waits.  Raises ValueError for a window that does not end after it begins.
    """
    if end_ns <= begin_ns:
        raise ValueError(f"the window must end after it begins, got {begin_ns} to {end_ns} ns")
    duration_s = (end_ns - begin_ns) / _NS_PER_S
    ended = (begin_ns < seen.end_ns) & (seen.end_ns <= end_ns)
    first = (begin_ns < seen.first_token_ns) & (seen.first_token_ns <= end_ns)
    last = (begin_ns < seen.finish_ns) & (seen.finish_ns <= end_ns)
    several = last & (seen.num_output_tokens > 1)
    arrived = (begin_ns < seen.arrival_ns) & (seen.arrival_ns <= end_ns)
    decode_ns = (seen.finish_ns - seen.first_token_ns)[several]
    return {
        "request_throughput": float(last.sum()) / duration_s,
        "output_throughput": float(seen.num_tokens[ended].sum()) / duration_s,
        "num_arrived": float(arrived.sum()),
        "num_finished": float(last.sum()),
        **_latency("ttft", (seen.first_token_ns - seen.arrival_ns)[first]),
        **_latency("tpot", decode_ns / (seen.num_output_tokens[several] - 1)),
        **_latency("e2el", (seen.finish_ns - seen.arrival_ns)[last]),
        "num_preemptions": float(seen.num_preempted[(begin_ns <= seen.start_ns) & (seen.start_ns < end_ns)].sum()),
        **_levels(seen, begin_ns, end_ns),
    }


def with_state_of(seen: Seen, other: Seen, begin_ns: int, num_steps: int) -> Seen:
    """``seen``, with what ``other`` says of running, waiting and KV usage in the first steps that end after then.

    An engine that decides ahead notes its state when it decides a step, so that of the ``num_steps`` steps which are
    under way at ``begin_ns`` belongs to earlier moments, which nobody knows who begins there.
    """
    mine = np.flatnonzero(seen.end_ns > begin_ns)[:num_steps]
    theirs = np.flatnonzero(other.end_ns > begin_ns)[:num_steps]
    num = min(len(mine), len(theirs))
    columns = {}
    for name in ("num_running", "num_waiting", "kv_usage"):
        column = getattr(seen, name).copy()
        column[mine[:num]] = getattr(other, name)[theirs[:num]]
        columns[name] = column
    return seen._replace(**columns)


def _latency(name: str, values_ns: npt.NDArray[np.float64] | IntArray) -> dict[str, float | None]:
    if not len(values_ns):
        return {f"{name}_{stat}_ms": None for stat in ("mean", "p50", "p90", "p99")}
    p50, p90, p99 = np.percentile(values_ns, (50, 90, 99)) / 1e6
    return {
        f"{name}_mean_ms": float(np.mean(values_ns)) / 1e6,
        f"{name}_p50_ms": float(p50),
        f"{name}_p90_ms": float(p90),
        f"{name}_p99_ms": float(p99),
    }


def _levels(seen: Seen, begin_ns: int, end_ns: int) -> dict[str, float | None]:
    length_ns = np.clip(seen.end_ns, begin_ns, end_ns) - np.clip(seen.start_ns, begin_ns, end_ns)
    inside, duration_ns = length_ns > 0, end_ns - begin_ns

    def mean(values: IntArray | FloatArray) -> float:
        return float((values * length_ns).sum() / duration_ns)

    def most(values: IntArray | FloatArray) -> float:
        return float(values[inside].max(initial=0))

    is_busy_at_end = bool(inside.any()) and int(seen.end_ns[inside][-1]) >= end_ns
    return {
        "running_mean": mean(seen.num_running),
        "waiting_mean": mean(seen.num_waiting),
        "waiting_max": most(seen.num_waiting),
        "kv_usage_mean": mean(seen.kv_usage),
        "kv_usage_max": most(seen.kv_usage),
        "busy": float(length_ns.sum() / duration_ns),
        "running_end": float(seen.num_running[inside][-1]) if is_busy_at_end else 0.0,
        "waiting_end": float(seen.num_waiting[inside][-1]) if is_busy_at_end else 0.0,
    }


def _tokens_of_steps(replica: ReplicaRecords) -> IntArray:
    num_steps, spans = len(replica.steps), replica.spans
    change = np.zeros(num_steps + 1, np.int64)
    np.add.at(change, np.clip(spans.first_step, 0, num_steps), 1)
    np.add.at(change, np.clip(spans.first_step + spans.count, 0, num_steps), -1)
    return np.cumsum(change)[:num_steps]

"""How many requests per second a deployment can serve at most: the yardstick of the utilisation.

The same requests are served once more with all of them due at time 0, so that the engine never lacks work.  Two parts
of such a run say nothing about a steady state and are left out:

* the ramp-up: all seats fill at once, so the first wave finishes late and then all together.  Counting starts when as
  many requests have finished as ever ran at once, when that wave has left.
* the drain: once nothing waits any more, seats stay empty and the rest finishes at an ever lower rate.  Counting ends
  when the last waiting request is admitted.

In between every finished request makes room for one that waits, which is what saturation means.  On samples of the
size chosen here the rate lay within 3 % of that of 20,000 requests, for engines bound by seats, by KV blocks and by
both; requests over makespan was 5 to 25 % too low there.  Where this window holds too little (few requests, or so many
seats that nothing ever waits), there is no answer, rather than a wrong one.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from windtunnel.sim.engine.batch_queue import QueuePolicy
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.dynamic import DynamicConfig
from windtunnel.sim.fleet.fleet import Fleet
from windtunnel.sim.records import Outcome, Records
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import Batching, System
from windtunnel.sim.workload import IntArray, Segment, Workload

NS_PER_S = 1_000_000_000
MIN_SAMPLE, MAX_SAMPLE = 1_000, 4_000
_WAVES = 5
"""The sample holds so many times the requests that run at once: one wave ramps up, one drains, three are counted."""
MAX_STEPS = 50_000
"""About so many steps the sample may take, unless fewer would give no answer: long outputs need fewer requests."""
MIN_COUNTED = 50
"""Fewer finished requests than this in the window are no answer: their rate would be off by more than about 14 %."""


def saturation_request_throughput(workload: Workload, system: System | Fleet) -> float | None:
    """Requests per second that the system finishes when there is always one more waiting, or None if that cannot be
    told from these requests.

    One replica is measured, with no limit on how many wait and how long; all together do that many times as much.
    Of a fleet it is what the replicas of all its pools do that are there at the start; one with an autoscaler has no
    such number, and neither has one of prefill and decode replicas.  Deterministic: the sample is chosen by position,
    not drawn.
    """
    if isinstance(system, Fleet):
        return _of_fleet(workload, system)
    alone = replace(
        system,
        num_replicas=1,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        gateway=None,
        batching=_patient(system.batching),
    )
    sample = saturating_sample(workload, alone.make_scheduler().config)
    rate = _rate(sample, alone) if len(sample) else None
    return None if rate is None else rate * system.num_replicas


_MOST_KNOWN = 10_000
_known: dict[bytes, float | None] = {}
"""Rates by what they were measured with: many runs in a row differ in nothing but when their requests come."""


def _rate(sample: Workload, alone: System) -> float | None:
    try:
        key = sha256(pickle.dumps((sample, alone))).digest()
    except Exception:  # a cost model of somebody's own need not be fit for it
        return steady_throughput(serve(sample, alone))
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = steady_throughput(serve(sample, alone))
    return _known[key]


def _of_fleet(workload: Workload, fleet: Fleet) -> float | None:
    if fleet.has_roles or any(pool.autoscaler is not None for pool in fleet.pools):
        return None
    total = 0.0
    for pool in fleet.pools:
        rate = saturation_request_throughput(workload, pool.system)
        if rate is None:
            return None
        total += rate
    return total


def _patient(batching: Batching | None) -> Batching | None:
    """The same policy, whose queue refuses nobody."""
    if not isinstance(batching, DynamicConfig):
        return batching
    return replace(batching, default_queue_policy=QueuePolicy(), priority_queue_policy=())


def steady_throughput(records: Records) -> float | None:
    """Finished requests per second between ramp-up and drain of a run whose requests were all due at time 0."""
    finish_ns = np.sort(records.requests.finish_ns[records.requests.outcome == Outcome.FINISHED])
    steps = records.replicas[0].steps
    waited = np.flatnonzero(steps.num_waiting)
    if not len(waited):
        return None
    start_ns = _at(finish_ns, int(steps.num_running.max()))
    end_ns = int(steps.end_ns[waited[-1]])
    counted = int(np.searchsorted(finish_ns, end_ns, "right") - np.searchsorted(finish_ns, start_ns, "right"))
    return counted * NS_PER_S / (end_ns - start_ns) if counted >= MIN_COUNTED else None


def _at(sorted_ns: IntArray, index: int) -> int:
    return int(sorted_ns[min(index, len(sorted_ns)) - 1]) if len(sorted_ns) else 0


def saturating_sample(workload: Workload, config: SchedulerConfig) -> Workload:
    """Requests of the workload, in order, enough to keep the engine full for some time, all due at time 0.

    Requests that share nothing are taken at even spacing from the whole workload; others from its beginning, so that
    they keep their neighbours.  A short workload is repeated; what its requests share, copies do not share again.
    """
    served = np.flatnonzero(workload.num_prompt_tokens < config.max_model_len)
    if not len(served):
        return _take(workload, served, 0)
    size = _sample_size(workload, served, config)
    linked = workload.content is not None or bool((workload.previous >= 0).any())
    if len(served) > size:
        rows = served[:size] if linked else served[np.linspace(0, len(served) - 1, size).astype(np.int64)]
        return _take(workload, rows, 1)
    return _take(workload, served, -(-size // len(served)))


def _sample_size(workload: Workload, rows: IntArray, config: SchedulerConfig) -> int:
    """So many waves of the requests that run at once: those that have a seat and, on average, KV blocks."""
    mean_output = float(workload.num_output_tokens[rows].mean())
    resident_tokens = float(workload.num_prompt_tokens[rows].mean()) + mean_output / 2
    seats = min(config.max_num_seqs, config.max_num_active_seqs or config.max_num_seqs)
    running = min(seats, config.num_kv_tokens / resident_tokens)
    wanted = min(max(_WAVES * running, MIN_SAMPLE), MAX_SAMPLE)
    affordable = MAX_STEPS * running / mean_output
    return int(max(min(wanted, affordable), 2 * (running + MIN_COUNTED)))


def _take(workload: Workload, rows: IntArray, num_copies: int) -> Workload:
    """Those rows, ``num_copies`` times one after the other, due at time 0 and with no pause between turns."""
    n = len(rows)
    new_row = np.full(len(workload) + 1, -1, np.int64)  # the extra place maps "follows none" to itself
    new_row[rows] = np.arange(n)
    previous = new_row[workload.previous[rows]]
    copies = [np.where(previous < 0, -1, previous + copy * n) for copy in range(num_copies)]
    columns: dict[str, Any] = {
        name: np.tile(getattr(workload, name)[rows], num_copies)
        for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens", "priority")
    }
    return replace(
        workload,
        **columns,
        arrival_ns=np.zeros(n * num_copies, np.int64),
        previous=np.concatenate(copies) if copies else np.zeros(0, np.int64),
        think_ns=np.zeros(n * num_copies, np.int64),
        content=_copied_content(workload, rows, num_copies),
        num_streams=workload.num_streams * max(num_copies, 1),
        labels=None,
        tenant=None if workload.tenant is None else np.tile(workload.tenant[rows], num_copies),
        max_concurrency=None,
        request_timeout_ns=None,
        notes=(),
    )


def _copied_content(workload: Workload, rows: IntArray, num_copies: int) -> tuple[tuple[Segment, ...], ...] | None:
    if workload.content is None:
        return None
    content, step = workload.content, workload.num_streams
    return tuple(
        tuple((stream + copy * step, end) for stream, end in content[row])
        for copy in range(num_copies)
        for row in rows.tolist()
    )

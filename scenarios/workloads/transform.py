"""Workloads made from workloads: a window, the first requests, another rate, another limit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from windtunnel.scenarios.workloads.arrivals import Arrivals
from windtunnel.scenarios.workloads.rows import conversation_roots, renumbered
from windtunnel.scenarios.workloads.specs import shown
from windtunnel.sim.rng import stream
from windtunnel.sim.workload import IntArray, Workload


def scale_rate(workload: Workload, factor: float) -> Workload:
    """The same requests with all gaps between arrivals divided by ``factor``: 2.0 is twice the load.

    Think times stay, they are the users' own.  Raises ValueError unless the factor is positive and finite.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"rate_scale must be above 0 and finite, got {factor}: 2 is twice the load, 0.5 half of it")
    if factor == 1:
        return workload
    due = workload.previous < 0
    if bool((workload.arrival_ns[due] / factor >= 2**63).any()):
        raise ValueError(f"rate_scale {factor:g} stretches the trace beyond 292 years: use a larger factor")
    scaled = np.rint(workload.arrival_ns / factor).astype(np.int64)
    return replace(
        workload,
        arrival_ns=np.where(due, scaled, workload.arrival_ns),
        notes=(*workload.notes, f"Arrivals scaled: {factor:g} times the rate (gaps divided by {factor:g})."),
    )


def slice_time(workload: Workload, start_s: float | None = None, duration_s: float | None = None) -> Workload:
    """The requests due in [start_s, start_s + duration_s), counted from the start of the window.

    A conversation belongs to the window in which its first request is due, with all its turns.  None is the beginning
    and the end.  The result may be empty.  Raises ValueError for a negative start or a duration not above 0.
    """
    if start_s is not None and not (start_s >= 0 and math.isfinite(start_s)):
        raise ValueError(f"start_s must be at least 0, got {start_s}")
    if duration_s is not None and not duration_s > 0:
        raise ValueError(f"duration_s must be above 0, got {duration_s}")
    if start_s is None and duration_s is None:
        return workload
    start_ns = min(round((start_s or 0.0) * 1e9), 2**62)
    due_ns = workload.arrival_ns[conversation_roots(workload.previous)]
    inside = due_ns >= start_ns
    if duration_s is not None and math.isfinite(duration_s):
        inside &= due_ns < start_ns + round(duration_s * 1e9)
    kept = take(workload, np.flatnonzero(inside))
    until = "to the end" if duration_s is None else f"for {duration_s:,g} s"
    return replace(
        kept,
        arrival_ns=np.where(kept.previous < 0, kept.arrival_ns - start_ns, kept.arrival_ns),
        notes=(
            *workload.notes,
            f"Window from {start_s or 0:,g} s {until}: {len(kept):,} of {len(workload):,} requests; it begins at 0.",
        ),
    )


def truncate(workload: Workload, num_requests: int | None) -> Workload:
    """The first ``num_requests`` rows; None is all.  Raises ValueError for less than 1."""
    if num_requests is None or num_requests >= len(workload) > 0:
        return workload
    if num_requests < 1:
        raise ValueError(f"limit must be at least 1, got {num_requests}")
    kept = take(workload, np.arange(min(num_requests, len(workload))))
    return replace(kept, notes=(*workload.notes, f"First {len(kept):,} of {len(workload):,} requests."))


def with_max_concurrency(workload: Workload, max_concurrency: int | None) -> Workload:
    """The same requests behind a client that lets at most so many be in flight; None lifts the limit.

    Raises ValueError for less than 1.
    """
    if max_concurrency == workload.max_concurrency:
        return workload
    note = (
        "No limit of requests in flight."
        if max_concurrency is None
        else f"At most {max_concurrency:,} requests in flight."
    )
    return replace(workload, max_concurrency=max_concurrency, notes=(*workload.notes, note))


def with_arrivals(workload: Workload, arrivals: Arrivals, seed: int) -> Workload:
    """The same requests in the same order, due at the times of another arrival process.

    Requests that follow another keep doing so.  Uses the stream ("workload", "arrivals") of the seed.
    """
    due = np.flatnonzero(workload.previous < 0)
    arrival_ns = workload.arrival_ns.copy()
    arrival_ns[due] = arrivals.sample_ns(stream(seed, "workload", "arrivals"), len(due))
    return replace(workload, arrival_ns=arrival_ns, notes=(*workload.notes, f"Arrivals replaced: {shown(arrivals)}."))


def take(workload: Workload, rows: IntArray) -> Workload:
    """Those rows, ascending; every row that one of them follows must be among them."""
    if len(rows) == len(workload):
        return workload
    return replace(
        workload,
        arrival_ns=workload.arrival_ns[rows],
        num_prompt_tokens=workload.num_prompt_tokens[rows],
        num_output_tokens=workload.num_output_tokens[rows],
        max_tokens=workload.max_tokens[rows],
        priority=workload.priority[rows],
        previous=renumbered(workload.previous, rows),
        think_ns=workload.think_ns[rows],
        content=None if workload.content is None else tuple(workload.content[row] for row in rows.tolist()),
        labels=None if workload.labels is None else tuple(workload.labels[row] for row in rows.tolist()),
        tenant=None if workload.tenant is None else workload.tenant[rows],
    )

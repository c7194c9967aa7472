"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, in Chrome's JSON format.

Every replica is a process: a track of its steps, counters (KV usage, running and waiting requests, tokens per step) and
an instant for every preemption.  Every request is a group of nested slices on a track of its own: queued, prefill,
decode, and what a preemption cost.  The format: "Trace Event Format" (Chromium project); times are microseconds from
the start of the run, written with three decimals so that no nanosecond is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windtunnel.reports.context import ReportContext
from windtunnel.reports.files import atomic_writer
from windtunnel.sim.metrics.load import kv_usage, num_tokens
from windtunnel.sim.records import IntArray, Outcome, Records, ReplicaRecords

CHUNK_ROWS = 8192
"""Rows turned into Python numbers at a time."""
REQUESTS_PID_OFFSET = 1000
"""Requests of replica r belong to process r + 1 + this, so that their tracks stand below those of the steps."""


@dataclass(frozen=True, slots=True)
class TraceStats:
    """What a trace holds, and what was left out of it."""

    num_events: int
    num_steps: int
    num_requests: int
    num_steps_left_out: int
    num_requests_left_out: int


class _Window(NamedTuple):
    start_ns: int
    end_ns: int
    limit: int


def write_trace(
    path: str | Path,
    records: Records,
    context: ReportContext | None = None,
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    limit: int | None = None,
) -> TraceStats:
    """Write the trace of a run, or of the part from ``start_s`` to ``end_s`` (seconds from the start of the run).

    ``limit`` is the largest number of steps a replica, and of requests, that are written: the first in that part.
    What is left out is counted in the answer.  Events are written one by one, so a long run needs no more memory.

    Raises ValueError for a part that is empty or a limit below 1, OSError if the file cannot be written.
    """
    window = _window(records, start_s, end_s, limit)
    context = context or ReportContext()
    events = 0
    with atomic_writer(path) as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        file.write(json.dumps(_origin(context)))
        file.write(',"traceEvents":[\n')
        for number, event in enumerate(_events(records, context, window)):
            file.write(f",\n{event}" if number else event)
            events += 1
        file.write("\n]}\n")
    all_steps = sum(len(replica.steps) for replica in records.replicas)
    steps = sum(len(_chosen_steps(replica, window)) for replica in records.replicas)
    requests = len(_chosen_requests(records, window))
    return TraceStats(events, steps, requests, all_steps - steps, len(records.requests) - requests)


def _window(records: Records, start_s: float, end_s: float | None, limit: int | None) -> _Window:
    end_ns = records.end_ns + 1 if end_s is None else round(end_s * 1e9)
    if not 0 <= start_s * 1e9 < end_ns:
        raise ValueError(f"the part from {start_s} s to {end_ns / 1e9} s is empty: the end must lie behind the start")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    return _Window(round(start_s * 1e9), end_ns, limit if limit is not None else 2**62)


def _origin(context: ReportContext) -> dict[str, Any]:
    return {
        "title": context.title,
        "model": context.model,
        "gpu": context.gpu,
        "engine": context.engine,
        "cost_model": f"{context.cost_model} ({context.calibration})",
        "seed": context.seed,
        "windtunnel": context.version,
    }


def _events(records: Records, context: ReportContext, window: _Window) -> Iterator[str]:
    for number, replica in enumerate(records.replicas):
        yield from _names(number)
        yield from _steps(number, replica, window)
        yield from _preemptions(number, replica, context, window)
    yield from _requests(records, context, window)


def _names(number: int) -> Iterator[str]:
    steps, requests = number + 1, number + 1 + REQUESTS_PID_OFFSET
    for pid, name in ((steps, f"replica {number}"), (requests, f"requests of replica {number}")):
        yield _event("M", name="process_name", pid=pid, args={"name": name})
        yield _event("M", name="process_sort_index", pid=pid, args={"sort_index": pid})
    yield _event("M", name="thread_name", pid=steps, tid=1, args={"name": "steps"})


# --- steps


def _steps(number: int, replica: ReplicaRecords, window: _Window) -> Iterator[str]:
    """A slice for every step, and the counters as they were while it ran; zero once the replica falls idle."""
    steps, pid = replica.steps, number + 1
    chosen = _chosen_steps(replica, window)
    active, cached = kv_usage(replica)
    tokens = num_tokens(steps)
    for low in range(chosen.start, chosen.stop, CHUNK_ROWS):
        part = slice(low, min(low + CHUNK_ROWS, chosen.stop))
        columns = (
            steps.start_ns, steps.end_ns, steps.num_decode_seqs, steps.num_prefill_seqs, steps.prefill_tokens,
            steps.num_free_blocks, steps.num_running, steps.num_waiting, tokens, steps.num_preempted,
        )  # fmt: skip
        rows = zip(*(column[part].tolist() for column in columns), strict=True)
        usages = zip(active[part].tolist(), cached[part].tolist(), strict=True)
        for index, (row, (used, kept)) in enumerate(zip(rows, usages, strict=True), start=low):
            start, end, decodes, prefills, prefill_tokens, free, running, waiting, batch, preempted = row
            args = (
                f'{{"step":{index},"tokens":{batch},"decode_seqs":{decodes},"prefill_seqs":{prefills},'
                f'"prefill_tokens":{prefill_tokens},"free_blocks":{free},"preempted":{preempted}}}'
            )
            yield (
                f'{{"ph":"X","name":"{_kind(decodes, prefills)}","cat":"step","pid":{pid},"tid":1,'
                f'"ts":{_us(start)},"dur":{_us(end - start)},"args":{args}}}'
            )
            yield from _counters(
                pid, start, f"{100 * used:.2f}", f"{100 * max(kept - used, 0):.2f}", running, waiting, batch
            )
            if index + 1 == len(steps) or int(steps.start_ns[index + 1]) > end:
                yield from _counters(pid, end, "0", "0", 0, 0, 0)


def _chosen_steps(replica: ReplicaRecords, window: _Window) -> range:
    steps = replica.steps
    first = int(np.searchsorted(steps.end_ns, window.start_ns, "right"))
    behind = int(np.searchsorted(steps.start_ns, window.end_ns, "left"))
    return range(first, max(first, min(behind, first + window.limit)))


def _kind(num_decode_seqs: int, num_prefill_seqs: int) -> str:
    if num_prefill_seqs and num_decode_seqs:
        return "mixed"
    return "prefill" if num_prefill_seqs else "decode"


def _counters(
    pid: int, time_ns: int, active: str, cached: str, running: int, waiting: int, tokens: int
) -> Iterator[str]:
    head = f'{{"ph":"C","pid":{pid},"ts":{_us(time_ns)}'
    yield f'{head},"name":"KV usage (%)","args":{{"active":{active},"cached":{cached}}}}}'
    yield f'{head},"name":"running","args":{{"requests":{running}}}}}'
    yield f'{head},"name":"waiting","args":{{"requests":{waiting}}}}}'
    yield f'{head},"name":"tokens per step","args":{{"tokens":{tokens}}}}}'


def _preemptions(number: int, replica: ReplicaRecords, context: ReportContext, window: _Window) -> Iterator[str]:
    table = replica.preemptions
    inside = np.flatnonzero((table.time_ns >= window.start_ns) & (table.time_ns < window.end_ns))
    for k in inside[: window.limit].tolist():
        victim, needy = int(table.request[k]), int(table.for_request[k])
        args = {
            "request": context.label(victim),
            "for": context.label(needy),
            "tokens_lost": int(table.num_computed_tokens[k]),
            "blocks_given_back": int(table.num_blocks[k]),
            "free_blocks": int(table.num_free_blocks[k]),
        }
        name = f"preempted {context.label(victim)}"
        yield _event(
            "i", name=name, cat="preemption", pid=number + 1, tid=1, ts=int(table.time_ns[k]), s="t", args=args
        )


# --- requests


def _requests(records: Records, context: ReportContext, window: _Window) -> Iterator[str]:
    stalls = _Stalls(records)
    rows = _chosen_requests(records, window)
    for row, end_ns in zip(rows.tolist(), _ends(records)[rows].tolist(), strict=True):
        yield from _request(records, row, end_ns, stalls, context)


def _chosen_requests(records: Records, window: _Window) -> IntArray:
    arrival = records.requests.arrival_ns
    inside = (arrival >= 0) & (_ends(records) >= window.start_ns) & (arrival < window.end_ns)
    rows: IntArray = np.flatnonzero(inside)[: window.limit]
    return rows


def _ends(records: Records) -> IntArray:
    finish = records.requests.finish_ns
    return np.where(finish < 0, records.end_ns, finish)


def _request(records: Records, row: int, end_ns: int, stalls: _Stalls, context: ReportContext) -> Iterator[str]:
    """An outer slice from arrival to end, and inside it one slice a phase, without gap or overlap."""
    table = records.requests
    pid = max(int(table.replica[row]), 0) + 1 + REQUESTS_PID_OFFSET
    track = {"cat": "request", "id": row, "pid": pid, "tid": 1}
    args = {
        "prompt_tokens": int(table.num_prompt_tokens[row]),
        "output_tokens": int(table.num_output_tokens[row]),
        "cached_tokens": int(table.num_cached_tokens[row]),
        "preemptions": int(table.num_preemptions[row]),
        "recomputed_tokens": int(table.num_recomputed_tokens[row]),
        "outcome": Outcome(int(table.outcome[row])).name.lower(),
    }
    start_ns, name = int(table.arrival_ns[row]), f"request {context.label(row)}"
    yield _event("b", **track, name=name, ts=start_ns, args=args)
    for phase, low, high in _phases(records, row, end_ns, stalls):
        yield _event("b", **track, name=phase, ts=low)
        yield _event("e", **track, name=phase, ts=high)
    yield _event("e", **track, name=name, ts=end_ns)


def _phases(records: Records, row: int, end_ns: int, stalls: _Stalls) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of the phases of one request, in order; none is empty."""
    table = records.requests
    now, scheduled, first = (int(of[row]) for of in (table.arrival_ns, table.scheduled_ns, table.first_token_ns))
    admitted = end_ns if scheduled < 0 else scheduled
    if now < admitted:
        yield "queued", now, admitted
    now = admitted
    for lost_ns, back_ns in (*stalls.of(row, end_ns), (end_ns, end_ns)):
        if now < first <= lost_ns:
            yield "prefill", now, first
            now = first
        if now < lost_ns:
            yield ("decode" if 0 <= first <= now else "prefill"), now, lost_ns
        if lost_ns < back_ns:
            yield "preempted", lost_ns, back_ns
        now = back_ns


class _Stalls:
    """For each request when it was preempted and when it got its next token."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._preemptions = [_by_request(r.preemptions.request, r.preemptions.time_ns) for r in records.replicas]
        self._tokens = [_by_request(r.spans.request, r.spans.first_step) for r in records.replicas]

    def of(self, row: int, end_ns: int) -> list[tuple[int, int]]:
        """(preempted, next token) pairs in order; a preemption before the next token belongs to the same pair."""
        table = self._records.requests
        if not table.num_preemptions[row]:
            return []
        replica, request = max(int(table.replica[row]), 0), int(table.request[row])
        lost = _slice(*self._preemptions[replica], request)
        resumed = self._records.replicas[replica].steps.end_ns[_slice(*self._tokens[replica], request)]
        pairs: list[tuple[int, int]] = []
        for time_ns in lost.tolist():
            if pairs and time_ns < pairs[-1][1]:
                continue
            after = int(np.searchsorted(resumed, time_ns, "right"))
            pairs.append((time_ns, int(resumed[after]) if after < len(resumed) else end_ns))
        return pairs


def _by_request(request: IntArray, values: IntArray) -> tuple[IntArray, IntArray]:
    order = np.lexsort((values, request))
    return request[order], values[order]


def _slice(requests: IntArray, values: IntArray, request: int) -> IntArray:
    low, high = np.searchsorted(requests, request, "left"), np.searchsorted(requests, request, "right")
    return values[low:high]


# --- writing


def _event(ph: str, *, ts: int | None = None, **fields: Any) -> str:
    """One event; ``ts`` in nanoseconds."""
    time = "" if ts is None else f',"ts":{_us(ts)}'
    return f'{{"ph":"{ph}",{json.dumps(fields, separators=(",", ":"))[1:-1]}{time}}}'


def _us(time_ns: int) -> str:
    """Nanoseconds as microseconds with three decimals, without going through a float."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"

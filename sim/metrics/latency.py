"""Latencies of requests and tokens as ``vllm bench serve`` defines them, in nanoseconds.

Source of the definitions: ``vllm/benchmarks/serve.py`` of vLLM 0.32 (Apache-2.0), re-stated in each docstring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windtunnel.sim.metrics.sample import Sample, weighted_sample
from windtunnel.sim.records import IntArray, Outcome, Records, ReplicaRecords

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RequestLatencies:
    """Latencies of the finished requests, one row each, in the order of the request table."""

    rows: IntArray
    """Their rows in the request table."""
    ttft_ns: IntArray
    """First token after sending."""
    tpot_ns: FloatArray
    """(E2EL - TTFT) / (output tokens - 1); 0 for a single output token, which statistics leave out."""
    e2el_ns: IntArray
    """Last token after sending."""
    queue_ns: IntArray
    """Start of the first step that ran any of it, after sending."""
    client_queue_ns: IntArray
    """How long a client-side limit held it back before it was sent; in none of the others."""
    num_output_tokens: IntArray

    @property
    def has_tpot(self) -> BoolArray:
        """Rows whose TPOT is defined: those with more than one output token."""
        return self.num_output_tokens > 1


def request_latencies(records: Records) -> RequestLatencies:
    """Latencies of all requests that finished."""
    table = records.requests
    rows = np.flatnonzero(table.outcome == Outcome.FINISHED)
    arrival, outputs = table.arrival_ns[rows], table.num_output_tokens[rows]
    ttft, e2el = table.first_token_ns[rows] - arrival, table.finish_ns[rows] - arrival
    return RequestLatencies(
        rows=rows,
        ttft_ns=ttft,
        tpot_ns=np.where(outputs > 1, (e2el - ttft) / np.maximum(outputs - 1, 1), 0.0),
        e2el_ns=e2el,
        queue_ns=table.scheduled_ns[rows] - arrival,
        client_queue_ns=arrival - table.due_ns[rows],
        num_output_tokens=outputs,
    )


def inter_token_latencies(records: Records, rows: BoolArray | None = None) -> Sample:
    """All gaps between successive tokens of one request, pooled over the finished requests.

    ``rows`` marks the rows of the request table that count; all that finished if it is not given.

    A gap inside a span is the time between the ends of two successive steps, and occurs once for every span that
    covers both: no list of tokens is made.  A gap between two spans of one request is a stall by preemption.
    """
    values, weights = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    chosen = finished_by_request(records) if rows is None else by_request(records, rows)
    for replica in records.replicas:
        first, last, request = spans_of(replica, chosen)
        num_steps = len(replica.steps)
        covering = np.cumsum(np.bincount(first, minlength=num_steps) - np.bincount(last, minlength=num_steps))
        stalls = stall_gaps(replica.steps.end_ns, first, last, request)
        values += [np.diff(replica.steps.end_ns), stalls]
        weights += [covering[:-1], np.ones(len(stalls), np.int64)]
    return weighted_sample(np.concatenate(values), np.concatenate(weights))


def stall_gaps(step_end_ns: IntArray, first_step: IntArray, last_step: IntArray, request: IntArray) -> IntArray:
    """Gaps between the spans that follow one another in the same request, ordered by request and step."""
    order = np.lexsort((first_step, request))
    first, last, request = first_step[order], last_step[order], request[order]
    follows = request[1:] == request[:-1]
    gaps: IntArray = step_end_ns[first[1:][follows]] - step_end_ns[last[:-1][follows]]
    return gaps


def tokens_per_step(replica: ReplicaRecords, finished: BoolArray) -> IntArray:
    """Tokens that finished requests got at the end of each step; ``finished`` is indexed by request number."""
    first, last, _ = spans_of(replica, finished)
    num_steps = len(replica.steps)
    change = np.bincount(first, minlength=num_steps + 1) - np.bincount(last + 1, minlength=num_steps + 1)
    return np.cumsum(change)[:num_steps]


def peak_tokens_per_second(records: Records) -> float:
    """Most tokens in one of the 1-second buckets that are counted from the first sending of a finished request.

    Only tokens of finished requests count, as in ``max_output_tokens_per_s`` of ``vllm bench serve``.
    """
    finished = finished_by_request(records)
    sent = records.requests.arrival_ns[records.requests.outcome == Outcome.FINISHED]
    if not len(sent):
        return 0.0
    nothing = np.zeros(0, np.int64)
    start_ns, seconds, counts = int(sent.min()), [nothing], [nothing]
    for replica in records.replicas:
        tokens = tokens_per_step(replica, finished)
        there = np.flatnonzero(tokens)
        seconds.append((replica.steps.end_ns[there] - start_ns) // NS_PER_S)
        counts.append(tokens[there])
    # Only the seconds in which anything came are kept: a trace may span years.
    _, bucket = np.unique(np.concatenate(seconds), return_inverse=True)
    return float(np.bincount(bucket, weights=np.concatenate(counts)).max(initial=0))


def max_concurrent_requests(records: Records) -> int:
    """Most finished requests alive in one of the 1-second buckets, as vLLM 0.32 counts them.

    A request counts in every bucket that it touches, so short requests that never met can count together;
    ``peak_in_flight`` is the true maximum (later versions of vLLM report that one under the same name).
    """
    finished = records.requests.outcome == Outcome.FINISHED
    sent, done = records.requests.arrival_ns[finished], records.requests.finish_ns[finished]
    if not len(sent):
        return 0
    first = (sent - sent.min()) // NS_PER_S
    last = (done - sent.min()) // NS_PER_S
    return peak_in_flight(first, last + 1)


def peak_in_flight(start_ns: IntArray, end_ns: IntArray) -> int:
    """Most of the half-open intervals [start, end) that hold one and the same instant."""
    if not len(start_ns):
        return 0
    started = np.sort(start_ns)
    ended = np.searchsorted(np.sort(end_ns), started, side="right")
    return int((np.arange(1, len(started) + 1) - ended).max())


def expanded_inter_token_latencies(records: Records) -> list[list[float]]:
    """For every request the list of its gaps in seconds: what ``itls`` of a detailed result holds.

    Makes one number a token; meant for export only.
    """
    gaps: list[list[float]] = [[] for _ in range(len(records.requests))]
    row_of = row_by_request(records)
    for replica in records.replicas:
        spans, end_ns = replica.spans, replica.steps.end_ns
        order = np.lexsort((spans.first_step, spans.request))
        previous_request, previous_end = -1, 0
        for request, first, count in zip(
            spans.request[order].tolist(), spans.first_step[order].tolist(), spans.count[order].tolist(), strict=True
        ):
            ends = end_ns[first : first + count]
            if request == previous_request:
                ends = np.concatenate(([previous_end], ends))
            gaps[row_of[request]] += (np.diff(ends) / NS_PER_S).tolist()
            previous_request, previous_end = request, int(ends[-1])
    return gaps


def row_by_request(records: Records) -> IntArray:
    """Row of the request table for a request number; -1 where there is none."""
    request = records.requests.request
    rows = np.full(int(request.max(initial=-1)) + 1, -1, np.int64)
    rows[request] = np.arange(len(request))
    return rows


def finished_by_request(records: Records) -> BoolArray:
    """Whether a request finished, by its number."""
    return by_request(records, records.requests.outcome == Outcome.FINISHED)


def by_request(records: Records, rows: BoolArray) -> BoolArray:
    """Marks of rows of the request table as marks of request numbers."""
    table = records.requests
    chosen = np.zeros(int(table.request.max(initial=-1)) + 1, np.bool_)
    chosen[table.request] = rows
    return chosen


def spans_of(replica: ReplicaRecords, chosen: BoolArray) -> tuple[IntArray, IntArray, IntArray]:
    """First step, last step and request of the spans whose request is chosen."""
    spans = replica.spans
    keep = chosen[spans.request] & (spans.count > 0)
    first = spans.first_step[keep]
    return first, first + spans.count[keep] - 1, spans.request[keep]

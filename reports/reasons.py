"""What the requests waited for that missed an objective, or were the slowest; and what made tokens come late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from windtunnel.reports.causes import (
    CAUSE_WORDS,
    WaitCause,
    prefill_work,
    shares_of_queue_time,
    shares_of_waiting,
    slow_gaps,
)
from windtunnel.reports.words import count, milliseconds, nanoseconds, percent, plural
from windtunnel.sim.metrics import SloResult
from windtunnel.sim.metrics.latency import RequestLatencies, request_latencies
from windtunnel.sim.metrics.load import kv_usage
from windtunnel.sim.records import IntArray, Records

NOTEWORTHY_SHARE = 0.1
"""Queue time over the latency that holds it from which on the queue is worth a sentence."""
MOST_OF_IT = 0.9
TAIL_SHARE = 0.01
"""The requests with the longest times to the first token whose causes are looked at where no objective is missed."""


class _Focus(NamedTuple):
    """The requests whose causes are told, and what they are called."""

    rows: IntArray
    who: str
    latency: str
    """Word for the latency that is too high."""
    queued_ns: IntArray
    latency_ns: IntArray

    @property
    def queue_share(self) -> float:
        """The wait in the engine's queue as a share of that latency."""
        return float(self.queued_ns.sum() / max(self.latency_ns.sum(), 1))


def waiting(records: Records, missed: Sequence[SloResult]) -> Iterator[str]:
    """What was short: for the requests over a missed limit if there are any, else for all, else for the slowest."""
    latencies = request_latencies(records)
    told = [focus for result in _one_for_each_metric(missed) if (focus := _over_limit(latencies, result)) is not None]
    if told:
        yield from (_told(records, focus) for focus in told)
        return
    everybody, slowest = _everybody(latencies), _slowest(latencies)
    if everybody.queue_share >= NOTEWORTHY_SHARE and (shares := shares_of_waiting(records)):
        cause, share = next(iter(shares.items()))
        yield (
            f"Requests waited {nanoseconds(float(everybody.queued_ns.mean()))} in the queue on average, "
            f"{_part(share)} of it because {_cause(records, cause)}."
        )
    elif _is_short(records, slowest):
        yield _told(records, slowest)
    else:
        yield "Hardly anything waited in the queue: neither seats, KV blocks nor the token budget were short."


_METRICS = {"ttft": "TTFT", "e2el": "E2EL", "queue_time": "queue time"}


def _one_for_each_metric(missed: Sequence[SloResult]) -> list[SloResult]:
    """The missed upper limits, the lowest of each metric that waiting is a part of."""
    limits = [result for result in missed if result.slo.metric in _METRICS and result.slo.operator.startswith("<")]
    lowest = {result.slo.metric: result for result in sorted(limits, key=lambda result: -result.slo.limit)}
    return [lowest[metric] for metric in _METRICS if metric in lowest]


def _over_limit(latencies: RequestLatencies, result: SloResult) -> _Focus | None:
    """The finished requests over the limit of a missed objective."""
    values = {"ttft": latencies.ttft_ns, "e2el": latencies.e2el_ns, "queue_time": latencies.queue_ns}[result.slo.metric]
    over = values > result.slo.limit * 1e6
    if not over.any():
        return None
    who = f"The {plural(int(over.sum()), 'request')} over the limit of {result.slo.text}"
    return _Focus(latencies.rows[over], who, _METRICS[result.slo.metric], latencies.queue_ns[over], values[over])


def _everybody(latencies: RequestLatencies) -> _Focus:
    return _Focus(latencies.rows, "Requests", "E2EL", latencies.queue_ns, latencies.e2el_ns)


def _slowest(latencies: RequestLatencies) -> _Focus:
    number = round(TAIL_SHARE * len(latencies.rows))
    slowest = np.argsort(-latencies.ttft_ns, kind="stable")[:number]
    who = f"The {plural(number, 'request')} with the longest TTFT ({percent(TAIL_SHARE)} of all)"
    return _Focus(latencies.rows[slowest], who, "TTFT", latencies.queue_ns[slowest], latencies.ttft_ns[slowest])


def _is_short(records: Records, focus: _Focus) -> bool:
    """Whether these requests waited noticeably for something other than the end of the step in progress."""
    if focus.queue_share < NOTEWORTHY_SHARE:
        return False
    return next(iter(shares_of_queue_time(records, focus.rows)), WaitCause.STEP) is not WaitCause.STEP


def _told(records: Records, focus: _Focus) -> str:
    """How much of their latency these requests waited and why, and what took the rest."""
    causes, share = shares_of_queue_time(records, focus.rows), focus.queue_share
    of_it = "" if focus.latency == "queue time" else f" ({percent(share)} of their {focus.latency})"
    if share < NOTEWORTHY_SHARE or not causes:
        return f"{focus.who} hardly waited in the queue{of_it}{_rest(records, focus)}."
    cause, part = next(iter(causes.items()))
    waited = nanoseconds(float(focus.queued_ns.mean()))
    return (
        f"{focus.who} waited {waited} in the queue{' on average' if len(focus.rows) > 1 else ''}{of_it}, "
        f"{_part(part)} of it because {_cause(records, cause)}{_rest(records, focus) if share < MOST_OF_IT else ''}."
    )


def _rest(records: Records, focus: _Focus) -> str:
    """What took the part of the latency that is not waiting."""
    if focus.latency == "E2EL":
        tokens = float(records.requests.num_output_tokens[focus.rows].mean())
        return f"; their answers have {count(round(tokens))} tokens on average"
    work = prefill_work(records, focus.rows) if focus.latency == "TTFT" else None
    if work is None:
        return ""
    return (
        f"; the steps until their first token computed {count(round(work.own_tokens))} prompt tokens of their own and "
        f"{count(round(work.other_tokens))} of others on average"
    )


def _part(share: float) -> str:
    return "all" if share >= 0.995 else percent(share)


def _cause(records: Records, cause: WaitCause) -> str:
    if cause is not WaitCause.SEATS:
        return CAUSE_WORDS[cause]
    seats = max(replica.max_num_seqs for replica in records.replicas)
    used = max(float(kv_usage(replica)[0].max(initial=0)) for replica in records.replicas)
    free = f"; at least {percent(1 - used)} of the KV cache stayed free" if used < MOST_OF_IT else ""
    return f"{CAUSE_WORDS[cause]} ({seats:,}){free}"


def slow_tokens(records: Records, missed: Sequence[SloResult]) -> str:
    """What made the gaps long that a missed objective on ITL or TPOT does not allow; empty if none is missed."""
    limits = [
        result.slo.limit
        for result in missed
        if result.slo.metric in ("itl", "tpot") and result.slo.operator.startswith("<")
    ]
    slow = slow_gaps(records, min(limits) * 1e6) if limits else None
    if slow is None or not slow.num_slow:
        return ""
    text = (
        f"{slow.num_slow:,} of {slow.num_gaps:,} gaps between tokens ({percent(slow.num_slow / slow.num_gaps)}) took "
        f"more than {milliseconds(min(limits))}"
    )
    reasons = []
    if slow.prefill_tokens is not None:
        reasons.append(
            f"{_part(slow.prefill_share)} of these in steps that computed prompts, too "
            f"({count(round(slow.prefill_tokens))} tokens on average)"
        )
    if slow.stalled_share:
        reasons.append(f"{_part(slow.stalled_share)} of these because the request was preempted")
    return f"{text}: {', '.join(reasons)}." if reasons else f"{text}, all in steps that only decode."

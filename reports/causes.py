"""Why requests waited, were slow or were preempted: read off the records, said in words."""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property

import numpy as np

from windtunnel.reports.words import count, nanoseconds, percent, plural
from windtunnel.sim.metrics.load import num_tokens
from windtunnel.sim.records import IntArray, Outcome, Records, ReplicaRecords

LOW_FREE_SHARE = 0.25
"""A waiting request whose blocks are free all the same is held back by the pool only if less than this is free."""


class WaitCause(IntEnum):
    """What kept a step from admitting the requests that it left waiting."""

    STEP = 0
    """Nothing: the request came while a step ran, and the next one took it."""
    SEATS = 1
    PREEMPTION = 2
    KV_CACHE = 3
    BUDGET = 4


CAUSE_WORDS = {
    WaitCause.STEP: "the step in progress had to end first",
    WaitCause.SEATS: "all max_num_seqs seats were taken",
    WaitCause.PREEMPTION: "nothing is admitted in a step that preempts",
    WaitCause.KV_CACHE: "too few KV blocks were free",
    WaitCause.BUDGET: "the step's token budget was spent",
}


def wait_causes(replica: ReplicaRecords) -> IntArray:
    """For each step what kept it from admitting more (``WaitCause``); STEP where nothing was left waiting.

    vLLM admits the queue's head as long as there are seats, tokens of budget and blocks, and nothing at all in a step
    that preempted; so the first of these that was used up is the reason.
    """
    steps = replica.steps
    scarce = steps.num_free_blocks < LOW_FREE_SHARE * replica.num_usable_blocks
    causes = np.where(
        scarce & (num_tokens(steps) < replica.max_num_batched_tokens), WaitCause.KV_CACHE, WaitCause.BUDGET
    )
    causes[steps.num_preempted > 0] = WaitCause.PREEMPTION
    causes[steps.num_running >= replica.max_num_seqs] = WaitCause.SEATS
    causes[steps.num_waiting == 0] = WaitCause.STEP
    return causes.astype(np.int64)


def shares_of_waiting(records: Records) -> dict[WaitCause, float]:
    """Shares of all the time that requests were left waiting (request-seconds), by cause, largest first.

    Waiting because a step preempted counts as waiting for KV blocks: that is why it preempted.
    """
    spent = dict.fromkeys(WaitCause, 0.0)
    for replica in records.replicas:
        causes, steps = wait_causes(replica), replica.steps
        weights = (steps.end_ns - steps.start_ns) * steps.num_waiting.astype(np.float64)
        for cause, total in enumerate(np.bincount(causes, weights, minlength=len(WaitCause)).tolist()):
            spent[WaitCause(cause)] += total
    spent[WaitCause.KV_CACHE] += spent.pop(WaitCause.PREEMPTION)
    whole = sum(spent.values())
    shares = {cause: total / whole for cause, total in spent.items() if total > 0} if whole else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


class Causes:
    """Says for single requests where their time went."""

    def __init__(self, records: Records) -> None:
        self._records = records

    @cached_property
    def _causes(self) -> list[IntArray]:
        return [wait_causes(replica) for replica in self._records.replicas]

    @cached_property
    def _spans(self) -> list[tuple[IntArray, IntArray, IntArray]]:
        """Request, first and last step of all spans, by request and step, one entry a replica."""
        ordered = []
        for spans in (replica.spans for replica in self._records.replicas):
            order = np.lexsort((spans.first_step, spans.request))
            first = spans.first_step[order]
            ordered.append((spans.request[order], first, first + spans.count[order] - 1))
        return ordered

    def why(self, row: int) -> str:
        """Where the time of a request went: the parts that took the most first, in one sentence."""
        table = self._records.requests
        if table.outcome[row] == Outcome.REJECTED:
            return "rejected on arrival"
        if table.arrival_ns[row] < 0:
            return "never sent: the run ended before its turn"
        parts = [*self._client(row), *self._queue(row), *self._prefill(row), *self._stalls(row), *self._decode(row)]
        total = max(sum(time_ns for time_ns, _ in parts), 1)
        told = [text for time_ns, text in sorted(parts, key=lambda part: -part[0]) if time_ns >= 0.1 * total]
        return "; ".join(told or [text for _, text in parts[:1]]) + self._ending(row)

    def _ending(self, row: int) -> str:
        outcome = Outcome(int(self._records.requests.outcome[row]))
        return "" if outcome is Outcome.FINISHED else f" ({outcome.name.lower()} at the end of the run)"

    def _client(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        held_ns = int(table.arrival_ns[row] - table.due_ns[row])
        return [(held_ns, f"held {nanoseconds(held_ns)} at the client's limit")] if held_ns > 0 else []

    def _queue(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        start, end = int(table.arrival_ns[row]), self._time(int(table.scheduled_ns[row]))
        if end <= start:
            return []
        replica = max(int(table.replica[row]), 0)
        steps, causes = self._records.replicas[replica].steps, self._causes[replica]
        low, high = np.searchsorted(steps.end_ns, start, "right"), np.searchsorted(steps.start_ns, end, "left")
        overlap = _overlap(steps.start_ns[low:high], steps.end_ns[low:high], start, end)
        by_cause = np.bincount(causes[low:high], overlap, minlength=len(WaitCause))
        main = WaitCause(int(by_cause.argmax()))
        share = by_cause[main] / max(by_cause.sum(), 1)
        most = "" if share > 0.9 else f" ({percent(share)} of that)"
        return [(end - start, f"queued {nanoseconds(end - start)}: {CAUSE_WORDS[main]}{most}")]

    def _prefill(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        start, end = int(table.scheduled_ns[row]), self._time(int(table.first_token_ns[row]))
        if start < 0:
            return []
        steps = self._records.replicas[max(int(table.replica[row]), 0)].steps
        num_steps = int(np.searchsorted(steps.start_ns, end, "left") - np.searchsorted(steps.start_ns, start, "left"))
        cached = int(table.num_cached_tokens[row])
        known = f", {cached:,} of them cached" if cached else ""
        prompt = f"{int(table.num_prompt_tokens[row]):,} prompt tokens{known}"
        return [(end - start, f"prefill of {prompt} took {nanoseconds(end - start)} over {plural(num_steps, 'step')}")]

    def _stalls(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        times = int(table.num_preemptions[row])
        if not times:
            return []
        gaps = self._gaps(row)
        stalled_ns, lost = int(gaps.sum()), int(table.num_recomputed_tokens[row])
        silent = f", {nanoseconds(stalled_ns)} without a token" if stalled_ns else ", before its first token"
        often = "once" if times == 1 else f"{times} times"
        return [(max(stalled_ns, 1), f"preempted {often}: {lost:,} tokens recomputed{silent}")]

    def _decode(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        num_tokens_out, first = int(table.num_output_tokens[row]), int(table.first_token_ns[row])
        if num_tokens_out < 2 or first < 0:
            return []
        gaps = self._gaps(row)
        flowing_ns = self._time(int(table.finish_ns[row])) - first - int(gaps.sum())
        each = nanoseconds(flowing_ns / max(num_tokens_out - 1 - len(gaps), 1))
        return [(flowing_ns, f"{count(num_tokens_out)} output tokens at {each} each took {nanoseconds(flowing_ns)}")]

    def _gaps(self, row: int) -> IntArray:
        """Time between the last token before and the first after each preemption."""
        number, replica = int(self._records.requests.request[row]), max(int(self._records.requests.replica[row]), 0)
        request, first, last = self._spans[replica]
        low, high = np.searchsorted(request, number, "left"), np.searchsorted(request, number, "right")
        end_ns = self._records.replicas[replica].steps.end_ns
        gaps: IntArray = end_ns[first[low + 1 : high]] - end_ns[last[low : high - 1]] if high > low else end_ns[:0]
        return gaps

    def _time(self, time_ns: int) -> int:
        return self._records.end_ns if time_ns < 0 else time_ns


def _overlap(start_ns: IntArray, end_ns: IntArray, low: int, high: int) -> IntArray:
    length: IntArray = np.minimum(end_ns, high) - np.maximum(start_ns, low)
    return length.clip(min=0)


def worst_requests(records: Records, by: str, limit: int) -> IntArray:
    """Rows of the requests with the largest ``e2el`` or ``ttft``, largest first.

    A request that never got so far counts with the time until the run's end: it is no better for that.
    """
    table = records.requests
    reached = table.finish_ns if by == "e2el" else table.first_token_ns
    sent = np.flatnonzero((table.arrival_ns >= 0) & (table.outcome != Outcome.REJECTED))
    taken = np.where(reached[sent] < 0, records.end_ns, reached[sent]) - table.arrival_ns[sent]
    order = np.argsort(-taken, kind="stable")[:limit]
    rows: IntArray = sent[order]
    return rows

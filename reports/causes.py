"""Why requests waited, were slow or were preempted: read off the records, said in words."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from windtunnel.reports.words import count, nanoseconds, percent, plural
from windtunnel.sim.metrics.latency import BoolArray, FloatArray, stall_gaps
from windtunnel.sim.metrics.load import num_tokens
from windtunnel.sim.metrics.sample import weighted_sum
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
    return _shares(spent)


def shares_of_queue_time(records: Records, rows: IntArray) -> dict[WaitCause, float]:
    """Shares of the time that these requests spent in the engine's queue, by cause, largest first.

    Besides what ``shares_of_waiting`` knows there is the step in progress when a request came.
    """
    table, spent = records.requests, dict.fromkeys(WaitCause, 0.0)
    for number, replica in enumerate(records.replicas):
        here = rows[(table.replica[rows] == number) & (table.arrival_ns[rows] >= 0)]
        until = np.where(table.scheduled_ns[here] < 0, records.end_ns, table.scheduled_ns[here])
        causes = wait_causes(replica)
        for cause in WaitCause:
            passed = _Passed(replica, causes == cause)
            spent[cause] += float((passed.until(until) - passed.until(table.arrival_ns[here])).sum())
    return _shares(spent)


def _shares(spent: Mapping[WaitCause, float]) -> dict[WaitCause, float]:
    """Waiting because a step preempted counts as waiting for KV blocks: that is why it preempted."""
    merged = {cause: total for cause, total in spent.items() if cause is not WaitCause.PREEMPTION}
    merged[WaitCause.KV_CACHE] += spent[WaitCause.PREEMPTION]
    whole = sum(merged.values())
    shares = {cause: total / whole for cause, total in merged.items() if total > 0} if whole else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


class _Passed:
    """How much time has passed in the chosen steps of a replica, at any time."""

    def __init__(self, replica: ReplicaRecords, chosen: BoolArray) -> None:
        steps = replica.steps
        done = np.cumsum(np.where(chosen, steps.end_ns - steps.start_ns, 0))
        self._times = np.column_stack((steps.start_ns, steps.end_ns)).ravel()
        self._done = np.column_stack((np.concatenate(([0], done[:-1])) if len(done) else done, done)).ravel()

    def until(self, time_ns: IntArray) -> FloatArray:
        """In nanoseconds."""
        if not len(self._times):
            return np.zeros(len(time_ns))
        passed: FloatArray = np.interp(time_ns, self._times, self._done)
        return passed


class _Moved(NamedTuple):
    """A prompt's cache that went from one replica to another."""

    sender: int
    prefilled_ns: int
    end_ns: int


class PrefillWork(NamedTuple):
    """What the steps computed in which requests had their prompts computed, means per request."""

    own_tokens: float
    other_tokens: float
    """Prompt tokens of other requests."""


def prefill_work(records: Records, rows: IntArray) -> PrefillWork | None:
    """Prompt tokens that the steps from the start to the first token of these requests computed; None for none."""
    table = records.requests
    rows = rows[(table.first_token_ns[rows] >= 0) & (table.num_preemptions[rows] == 0)]
    if not len(rows):
        return None
    own = table.num_prompt_tokens[rows] - table.num_cached_tokens[rows]
    both = np.zeros(len(rows), np.int64)
    for number, replica in enumerate(records.replicas):
        here = table.replica[rows] == number
        first, behind = _steps_until_first_token(records, replica, rows[here])
        computed = np.concatenate(([0], np.cumsum(replica.steps.prefill_tokens)))
        both[here] = computed[behind] - computed[first]
    return PrefillWork(float(own.mean()), float((both - own).clip(min=0).mean()))


def _steps_until_first_token(records: Records, replica: ReplicaRecords, rows: IntArray) -> tuple[IntArray, IntArray]:
    """The step that started each of these requests, and the one behind the step that gave its first token."""
    table, start_ns = records.requests, replica.steps.start_ns
    reached = np.where(table.first_token_ns[rows] < 0, records.end_ns, table.first_token_ns[rows])
    return np.searchsorted(start_ns, table.scheduled_ns[rows], "left"), np.searchsorted(start_ns, reached, "left")


class SlowGaps(NamedTuple):
    """The gaps between tokens that were longer than a limit, and what made them so."""

    num_gaps: int
    """All gaps between tokens, of all requests."""
    num_slow: int
    stalled_share: float
    """Share of the slow ones that were the stall of a preempted request."""
    prefill_share: float
    """Share of the slow ones whose step computed prompts, too."""
    prefill_tokens: float | None
    """Prompt tokens in such a step, mean over those gaps."""


def slow_gaps(records: Records, limit_ns: float) -> SlowGaps:
    """Looks at the gaps between the tokens of all requests, finished or not."""
    num, slow, stalled, mixed, tokens = 0, 0, 0, 0, 0.0
    for replica in records.replicas:
        steps, spans = replica.steps, replica.spans
        first, last = spans.first_step, spans.first_step + spans.count - 1
        covering = np.cumsum(np.bincount(first, minlength=len(steps)) - np.bincount(last, minlength=len(steps)))[:-1]
        is_slow = np.diff(steps.end_ns) > limit_ns
        prefill = steps.prefill_tokens[1:]
        stalls = stall_gaps(steps.end_ns, first, last, spans.request)
        num += int(covering.sum()) + len(stalls)
        stalled += int((stalls > limit_ns).sum())
        slow += int(covering[is_slow].sum())
        mixed += int(covering[is_slow & (prefill > 0)].sum())
        tokens += weighted_sum(covering[is_slow], prefill[is_slow])
    all_slow = slow + stalled
    return SlowGaps(
        num, all_slow, stalled / max(all_slow, 1), mixed / max(all_slow, 1), tokens / mixed if mixed else None
    )


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
        before = [*self._client(row), *self._router(row), *self._queue(row)]
        parts = [*before, *self._prefill(row), *self._stalls(row), *self._decode(row)]
        return _largest(parts) + self._ending(row)

    def why_first_token(self, row: int) -> str:
        """Where the time from sending a request to its first token went, the larger part first.

        The wait at the client, and all that came after the first token, are not part of it.
        """
        table = self._records.requests
        if table.arrival_ns[row] < 0 or table.outcome[row] == Outcome.REJECTED:
            return self.why(row)
        ending = "" if table.first_token_ns[row] >= 0 else " (without a token until the end of the run)"
        return _largest([*self._router(row), *self._queue(row), *self._prefill(row)]) + ending

    def _ending(self, row: int) -> str:
        outcome = Outcome(int(self._records.requests.outcome[row]))
        if outcome is Outcome.LOST:
            return " (lost with its replica)"
        return "" if outcome is Outcome.FINISHED else f" ({outcome.name.lower()} at the end of the run)"

    def _client(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        held_ns = int(table.arrival_ns[row] - table.due_ns[row])
        return [(held_ns, f"held {nanoseconds(held_ns)} at the client's limit")] if held_ns > 0 else []

    def _router(self, row: int) -> list[tuple[int, str]]:
        """What a fleet's request spent before its replica, and at replicas that went away."""
        came = int(self._records.requests.arrival_ns[row])
        sent = self._sent_ns(row)
        if sent is None:
            return []
        if not len(sent):
            waited_ns = self._time(int(self._records.requests.finish_ns[row])) - came
            return [(waited_ns, f"waited {nanoseconds(waited_ns)} at the router")]
        waited_ns, lost_ns = int(sent[0]) - came, int(sent[-1] - sent[0])
        parts = [(waited_ns, f"waited {nanoseconds(waited_ns)} at the router")] if waited_ns else []
        if len(sent) > 1 and self._moved(row) is None:
            lost = f"lost {nanoseconds(lost_ns)} with {plural(len(sent) - 1, 'replica')} that went away"
            parts.append((lost_ns, lost))
        return parts

    def _sent_ns(self, row: int) -> IntArray | None:
        """When the router handed the request to each of its replicas; None without a fleet."""
        fleet = self._records.fleet
        if fleet is None:
            return None
        times: IntArray = fleet.stays.sent_ns[fleet.stays.request == self._records.requests.request[row]]
        return times

    def _moved(self, row: int) -> _Moved | None:
        """How the request's cache went from a prefill to a decode replica; None if it did not."""
        table = None if self._records.fleet is None else self._records.fleet.transfers
        if table is None:
            return None
        found = np.flatnonzero(table.request == self._records.requests.request[row])
        if not len(found):
            return None
        at = int(found[0])
        return _Moved(int(table.sender[at]), int(table.prefilled_ns[at]), self._time(int(table.end_ns[at])))

    def _queue(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        start, end = int(table.arrival_ns[row]), self._time(int(table.scheduled_ns[row]))
        sent, moved = self._sent_ns(row), self._moved(row)
        if sent is not None:
            start = int(sent[-1 if moved is None else 0]) if len(sent) else end
        if end <= start:
            return []
        replica = max(int(table.replica[row]), 0) if moved is None else moved.sender
        steps, causes = self._records.replicas[replica].steps, self._causes[replica]
        low, high = np.searchsorted(steps.end_ns, start, "right"), np.searchsorted(steps.start_ns, end, "left")
        overlap = _overlap(steps.start_ns[low:high], steps.end_ns[low:high], start, end)
        by_cause = np.bincount(causes[low:high], overlap, minlength=len(WaitCause))
        main = WaitCause(int(by_cause.argmax()))
        share = by_cause[main] / max(by_cause.sum(), 1)
        most = "" if share > 0.9 else f" ({percent(share)} of that)"
        computed = int(steps.prefill_tokens[low:high].sum()) if main is WaitCause.STEP else 0
        held = f", it computed {plural(computed, 'prompt token')} of others" if computed else ""
        return [(end - start, f"queued {nanoseconds(end - start)}: {CAUSE_WORDS[main]}{most}{held}")]

    def _prefill(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        start, end = int(table.scheduled_ns[row]), self._time(int(table.first_token_ns[row]))
        if start < 0:
            return []
        cached = int(table.num_cached_tokens[row])
        known = f", {cached:,} of them cached," if cached else ""
        prompt = f"{plural(int(table.num_prompt_tokens[row]), 'prompt token')}{known}"
        moved = self._moved(row)
        if moved is not None:
            computed_ns, came_ns = moved.prefilled_ns - start, moved.end_ns - moved.prefilled_ns
            return [
                (computed_ns, f"prefill of {prompt} took {nanoseconds(computed_ns)}"),
                (came_ns, f"its cache took {nanoseconds(came_ns)} to get to the decode replica"),
            ]
        told = f"prefill of {prompt} took {nanoseconds(end - start)} over {self._steps_of_prefill(row)}"
        return [(end - start, told)]

    def _steps_of_prefill(self, row: int) -> str:
        """The steps until the first token, and what else they computed or what went wrong."""
        table = self._records.requests
        replica = self._records.replicas[max(int(table.replica[row]), 0)]
        first, behind = _steps_until_first_token(self._records, replica, np.array([row]))
        steps = slice(int(first[0]), int(behind[0]))
        number = plural(steps.stop - steps.start, "step")
        lost, times = self._lost_before_first_token(row)
        if times:
            return f"{number}: preempted {often(times)}, it lost {plural(lost, 'computed token')} and waited again"
        if table.first_token_ns[row] < 0:
            return number
        own = int(table.num_prompt_tokens[row] - table.num_cached_tokens[row])
        others = int(replica.steps.prefill_tokens[steps].sum()) - own
        decodes = int(replica.steps.num_decode_seqs[steps].max(initial=0))
        also = [f"{plural(others, 'prompt token')} of others"] if others > 0 else []
        also += [f"{decodes:,} decoding"] if decodes and not also else []
        return f"{number} with {also[0]}" if also else number

    def _lost_before_first_token(self, row: int) -> tuple[int, int]:
        """Computed tokens lost by preemptions before the first token, and how many those were."""
        table = self._records.requests
        if not table.num_preemptions[row]:
            return 0, 0
        lost = self._records.replicas[max(int(table.replica[row]), 0)].preemptions
        mine = (lost.request == table.request[row]) & (lost.time_ns < self._time(int(table.first_token_ns[row])))
        return int(lost.num_computed_tokens[mine].sum()), int(mine.sum())

    def _stalls(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        times = int(table.num_preemptions[row])
        if not times:
            return []
        gaps = self._gaps(row)
        stalled_ns, lost = int(gaps.sum()), int(table.num_recomputed_tokens[row])
        silent = f", {nanoseconds(stalled_ns)} without a token" if stalled_ns else ", before its first token"
        return [(max(stalled_ns, 1), f"preempted {often(times)}: {plural(lost, 'token')} recomputed{silent}")]

    def _decode(self, row: int) -> list[tuple[int, str]]:
        table = self._records.requests
        num_tokens_out, first = int(table.num_output_tokens[row]), int(table.first_token_ns[row])
        if num_tokens_out < 2 or first < 0:
            return []
        gaps = self._gaps(row)
        flowing_ns = self._time(int(table.finish_ns[row])) - first - int(gaps.sum())
        each = nanoseconds(flowing_ns / max(num_tokens_out - 1 - len(gaps), 1))
        told = f"{count(num_tokens_out)} output tokens at {each} each took {nanoseconds(flowing_ns)}"
        return [(flowing_ns, told)]

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


def _largest(parts: list[tuple[int, str]]) -> str:
    """What took at least a tenth of the time, the longest first."""
    total = max(sum(time_ns for time_ns, _ in parts), 1)
    told = [text for time_ns, text in sorted(parts, key=lambda part: -part[0]) if time_ns >= 0.1 * total]
    return "; ".join(told or [text for _, text in parts[:1]])


def often(times: int) -> str:
    """``once``, ``twice``, ``3 times``."""
    return {1: "once", 2: "twice"}.get(times, f"{times:,} times")


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

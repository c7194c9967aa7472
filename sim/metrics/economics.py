"""What a run cost: GPU time, money and energy, and what preemptions took of all that.

**Time of prompts and of decodes.**  A step with both is divided by difference: ``StepTable.decode_only_ns`` is what its
decodes alone would have taken by the cost model, and the rest is what the prompt chunks made it longer by.  Reading the
weights and launching the kernels are thus the decodes' where there are any.  Where nobody priced the steps, they are
divided by tokens.

**Time of recomputation.**  Of a step's chunks the tokens that had been computed before take their share of the chunks'
time by number.

**Money and energy** are GPU time by the user's price and watts.  The price is paid from the first sending to the last
end, whether a GPU computes or waits; nothing is assumed where none was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windtunnel.sim.metrics.latency import NS_PER_S, BoolArray, finished_by_request, spans_of
from windtunnel.sim.metrics.load import ratio
from windtunnel.sim.metrics.sample import NS_PER_MS, Sample, weighted_sample
from windtunnel.sim.records import IntArray, Outcome, Records, ReplicaRecords, StepTable

FloatArray = npt.NDArray[np.float64]

S_PER_HOUR = 3600
J_PER_KWH = 3_600_000
MILLION = 1_000_000
LARGEST_RATE = 1e12
"""Of a price or a power; whatever is counted with it stays a number."""
TAIL_PERCENT = 99.0
"""The percentile of ITL whose gap is explained."""
NUM_WORST = 10
"""Rows of the tables of who evicted whom."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the GPUs of one replica cost and draw, as the user gave it.

    Raises ValueError for a count below 1, a number that is not from 0 to ``LARGEST_RATE``, one of the two powers
    without the other, and an idle power above the busy one.
    """

    num_gpus: int = 1
    gpu_hour: float | None = None
    """Price of one GPU for an hour; None is not known."""
    idle_watts: float | None = None
    """Power of one GPU while no step runs."""
    busy_watts: float | None = None
    """Power of one GPU while a step runs."""

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ValueError(f"num_gpus must be at least 1, got {self.num_gpus}")
        for name in ("gpu_hour", "idle_watts", "busy_watts"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= LARGEST_RATE:
                raise ValueError(f"{name} must be a number from 0 to {LARGEST_RATE:g}, got {value!r}")
        if (self.idle_watts is None) != (self.busy_watts is None):
            given, lacking = ("busy", "idle") if self.idle_watts is None else ("idle", "busy")
            raise ValueError(
                f"{given}_watts was given without {lacking}_watts: energy needs both (of one GPU; the data sheet's "
                "power limit is the most that busy_watts can be)"
            )
        if self.idle_watts is not None and self.busy_watts is not None and self.idle_watts > self.busy_watts:
            raise ValueError(f"idle_watts ({self.idle_watts:g}) must be at most busy_watts ({self.busy_watts:g})")


@dataclass(frozen=True, slots=True)
class EvictionPair:
    """Who lost its blocks for whom, over the whole run."""

    request: int
    """The victim's row in the workload."""
    for_request: int
    """Row of the request that needed the blocks; the victim's own where it was its own."""
    num_preemptions: int
    lost_tokens: int
    """Computed tokens that were thrown away."""
    lost_blocks: int
    """KV blocks that were given back."""


@dataclass(frozen=True, slots=True)
class Victim:
    """What preemptions did to one request."""

    request: int
    """Row in the workload."""
    num_preemptions: int
    lost_tokens: int
    recomputed_tokens: int
    """Less than was lost where prefix caching found some of it again, or the request did not come back."""
    stall_s: float
    """Time between two of its tokens in which it sat preempted or was computed again; 0 for one that lost its blocks
    before its first token."""


@dataclass(frozen=True, slots=True)
class ItlStalls:
    """The gaps between tokens of finished requests, and what preemptions did to them.

    A gap that holds a preemption lasts from the token before it to the token after the recomputation.  Its *stall* is
    what lies behind the end of the step in whose decision the request was preempted: there its token would have come.
    Recomputations also make the steps longer in which others decode.  *Without preemptions* is the same run with both
    taken out, and else unchanged; what a scheduler that preempts less would do instead, only a run with it says.
    """

    num_gaps: int
    num_stalled: int
    """Gaps that hold a preemption."""
    stall_s: float
    """Sum of the stalls."""
    stall_mean_ms: float | None
    stall_max_ms: float | None
    p99_ms: float | None
    p99_without_stalls_ms: float | None
    """The same with the requests' own stalls taken out."""
    p99_without_preemption_ms: float | None
    """The same with recomputations taken out of the steps, too; None where their time is not known."""
    num_slow: int
    """Gaps above ``p99_ms``."""
    slow_stalled_share: float | None
    """Those of them that hold a preemption of their own request."""
    slow_recomputing_share: float | None
    """Those of them that hold no preemption, but a step that computed again what others had lost."""

    @property
    def p99_share(self) -> float | None:
        """The part of ``p99_ms`` that is gone without preemptions."""
        if not self.p99_ms or self.p99_without_preemption_ms is None:
            return None
        return 1.0 - self.p99_without_preemption_ms / self.p99_ms


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """What preemptions cost."""

    lost_tokens: int
    """Computed tokens that were thrown away."""
    lost_blocks: int
    num_before_first_token: int
    """Preemptions of requests that had no token yet: they make TTFT longer, not ITL."""
    num_of_itself: int
    """Preemptions by which a request made room for itself."""
    recomputed_gpu_seconds: float | None
    """GPU time in which lost tokens were computed again; None where the records do not tell."""
    recomputed_busy_share: float | None
    """That over the GPU time in which steps ran."""
    recomputed_cost: float | None
    recomputed_energy_kwh: float | None
    """At ``busy_watts``."""
    stalls: ItlStalls
    pairs: tuple[EvictionPair, ...]
    """Those that lost the most tokens, at most ``NUM_WORST``."""
    victims: tuple[Victim, ...]
    """The requests that lost the most tokens, at most ``NUM_WORST``."""


@dataclass(frozen=True, slots=True)
class Economics:
    """What a run cost; money and energy are None without a price and without watts."""

    num_gpus: float
    """Of all replicas; the mean over the run where they come and go."""
    gpu_seconds: float
    """Time that GPUs were held, from the first sending to the last end."""
    busy_gpu_seconds: float
    """Those in which a step ran."""
    prefill_gpu_seconds: float | None
    """Those that prompt chunks took; None where steps were not priced."""
    decode_gpu_seconds: float | None
    currency: str
    """Empty without a price."""
    cost_per_hour: float | None
    """Of all GPUs."""
    cost: float | None
    """Of the run."""
    prefill_cost_share: float | None
    """Share of the busy time's cost that prompt chunks took."""
    energy_kwh: float | None
    num_requests: int
    """Finished ones, as the tokens below are theirs: what failed is paid for by them."""
    input_tokens: int
    """Prompt tokens, cached ones included."""
    output_tokens: int
    preemption: PreemptionCost | None
    """None if nothing was preempted."""

    @property
    def gpu_seconds_per_million_tokens(self) -> float | None:
        """GPU time held, over input and output tokens."""
        return _each(self.gpu_seconds, (self.input_tokens + self.output_tokens) / MILLION)

    @property
    def cost_per_request(self) -> float | None:
        """Of each finished request."""
        return _each(self.cost, self.num_requests)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Blended: all cost over input and output tokens alike."""
        return _each(self.cost, (self.input_tokens + self.output_tokens) / MILLION)

    @property
    def cost_per_million_output_tokens(self) -> float | None:
        """All cost over output tokens alone."""
        return _each(self.cost, self.output_tokens / MILLION)

    @property
    def input_cost_per_million_tokens(self) -> float | None:
        """The prompt chunks' part of the cost, by the time that they took, over input tokens; idle time goes along."""
        share = self.prefill_cost_share
        return None if self.cost is None or share is None else _each(self.cost * share, self.input_tokens / MILLION)

    @property
    def output_cost_per_million_tokens(self) -> float | None:
        """The rest of the cost over output tokens."""
        share = self.prefill_cost_share
        return (
            None if self.cost is None or share is None else _each(self.cost * (1 - share), self.output_tokens / MILLION)
        )

    @property
    def energy_kwh_per_million_tokens(self) -> float | None:
        """Over input and output tokens."""
        return _each(self.energy_kwh, (self.input_tokens + self.output_tokens) / MILLION)

    @property
    def energy_joules_per_output_token(self) -> float | None:
        """All energy over output tokens."""
        return None if self.energy_kwh is None else _each(self.energy_kwh * J_PER_KWH, self.output_tokens)


def _each(amount: float | None, number: float) -> float | None:
    return None if amount is None else ratio(amount, number)


def economics(
    records: Records,
    held_ns: int | Sequence[int],
    rates: Rates | Sequence[Rates] | None = None,
    *,
    currency: str = "",
) -> Economics:
    """What the run cost.

    ``held_ns`` is how long the GPUs were paid for, and ``rates`` what they cost: of all replicas alike, or of each;
    without rates a replica is one GPU without a price.  Raises ValueError if there are not as many of either as
    replicas.
    """
    each = _for_each(rates, len(records.replicas))
    held = [held_ns] * len(each) if isinstance(held_ns, int) else list(held_ns)
    if len(held) != len(each):
        raise ValueError(f"held_ns must have one entry for each of the {len(each)} replicas, got {len(held)}")
    bills = [
        _Bill.of(replica.steps, own, time_ns)
        for replica, own, time_ns in zip(records.replicas, each, held, strict=True)
    ]
    prices = [own.gpu_hour for own in each]
    is_priced = bool(prices) and None not in prices
    finished = records.requests.outcome == Outcome.FINISHED
    busy_s = sum(bill.busy_s for bill in bills)
    return Economics(
        num_gpus=sum(own.num_gpus for own in each),
        gpu_seconds=sum(bill.held_s for bill in bills),
        busy_gpu_seconds=busy_s,
        prefill_gpu_seconds=_sum([bill.prefill_s for bill in bills]),
        decode_gpu_seconds=_sum([_less(bill.busy_s, bill.prefill_s) for bill in bills]),
        currency=currency if is_priced else "",
        cost_per_hour=_sum([_times(own.gpu_hour, own.num_gpus) for own in each]) if is_priced else None,
        cost=_sum([bill.cost for bill in bills]) if is_priced else None,
        prefill_cost_share=_prefill_share(bills, each),
        energy_kwh=_sum([bill.energy_kwh for bill in bills]) if bills else None,
        num_requests=int(finished.sum()),
        input_tokens=int(records.requests.num_prompt_tokens[finished].sum()),
        output_tokens=int(records.requests.num_output_tokens[finished].sum()),
        preemption=_preemption_cost(records, bills, busy_s),
    )


def _for_each(rates: Rates | Sequence[Rates] | None, num_replicas: int) -> list[Rates]:
    if rates is None or isinstance(rates, Rates):
        return [rates or Rates()] * num_replicas
    if len(rates) != num_replicas:
        raise ValueError(f"rates must have one entry for each of the {num_replicas} replicas, got {len(rates)}")
    return list(rates)


class _Bill(NamedTuple):
    """GPU-seconds, money and energy of one replica."""

    held_s: float
    busy_s: float
    prefill_s: float | None
    recomputed_s: float | None
    cost: float | None
    energy_kwh: float | None
    recomputed_cost: float | None
    recomputed_kwh: float | None

    @classmethod
    def of(cls, steps: StepTable, rates: Rates, held_ns: int) -> _Bill:
        """The bill of a replica that was held for so long."""
        gpus, price = rates.num_gpus, rates.gpu_hour
        held_s = gpus * held_ns / NS_PER_S
        busy_s = gpus * int((steps.end_ns - steps.start_ns).sum()) / NS_PER_S
        prefill, again = prefill_ns(steps), recomputed_ns(steps)
        prefill_s = None if prefill is None else gpus * float(prefill.sum()) / NS_PER_S
        again_s = None if again is None else gpus * float(again.sum()) / NS_PER_S
        energy_kwh = None
        if rates.busy_watts is not None and rates.idle_watts is not None:
            idle_s = max(held_s - busy_s, 0.0)
            energy_kwh = (busy_s * rates.busy_watts + idle_s * rates.idle_watts) / J_PER_KWH
        return cls(
            held_s,
            busy_s,
            prefill_s,
            again_s,
            _times(price, held_s / S_PER_HOUR),
            energy_kwh,
            None if again_s is None else _times(price, again_s / S_PER_HOUR),
            None if again_s is None else _times(rates.busy_watts, again_s / J_PER_KWH),
        )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _less(whole: float, part: float | None) -> float | None:
    return None if part is None else whole - part


def _sum(values: Sequence[float | None]) -> float | None:
    """Their sum; None if one of them is not known."""
    known = [value for value in values if value is not None]
    return float(sum(known)) if len(known) == len(values) else None


def _prefill_share(bills: Sequence[_Bill], rates: Sequence[Rates]) -> float | None:
    """Prompt chunks' share of the busy time, each replica's by its price (all alike where there is none)."""
    has_price = all(own.gpu_hour for own in rates)
    weights = [own.gpu_hour or 0.0 if has_price else 1.0 for own in rates]
    prefill_s = _sum([_times(bill.prefill_s, weight) for bill, weight in zip(bills, weights, strict=True)])
    return (
        None if prefill_s is None else ratio(prefill_s, sum(b.busy_s * w for b, w in zip(bills, weights, strict=True)))
    )


# --- time within steps


def prefill_ns(steps: StepTable) -> IntArray | None:
    """What the prompt chunks of each step made it longer by; None where steps were not priced."""
    if (steps.decode_only_ns < 0).any():
        return None
    longer: IntArray = steps.end_ns - steps.start_ns - steps.decode_only_ns
    return longer


def recomputed_ns(steps: StepTable) -> IntArray | None:
    """The time in each step in which tokens were computed again; None where that was not recorded."""
    if (steps.recomputed_tokens < 0).any():
        return None
    chunks_ns = prefill_ns(steps)
    if chunks_ns is None:
        num_tokens = np.maximum(steps.num_decode_seqs + steps.prefill_tokens, 1)
        chunks_ns = (steps.end_ns - steps.start_ns) * (steps.prefill_tokens / num_tokens)
    share = steps.recomputed_tokens / np.maximum(steps.prefill_tokens, 1)
    again: IntArray = np.rint(chunks_ns * np.minimum(share, 1.0)).astype(np.int64)
    return again


# --- preemptions


def _preemption_cost(records: Records, bills: Sequence[_Bill], busy_s: float) -> PreemptionCost | None:
    log = eviction_log(records)
    if not len(log.request):
        return None
    gaps = itl_gaps(records)
    again_s = _sum([bill.recomputed_s for bill in bills])
    return PreemptionCost(
        lost_tokens=int(log.lost_tokens.sum()),
        lost_blocks=int(log.lost_blocks.sum()),
        num_before_first_token=sum(_num_before_first_token(replica) for replica in records.replicas),
        num_of_itself=int((log.request == log.for_request).sum()),
        recomputed_gpu_seconds=again_s,
        recomputed_busy_share=None if again_s is None else ratio(again_s, busy_s),
        recomputed_cost=_sum([bill.recomputed_cost for bill in bills]),
        recomputed_energy_kwh=_sum([bill.recomputed_kwh for bill in bills]),
        stalls=itl_stalls(gaps),
        pairs=worst_pairs(log),
        victims=_worst_victims(records, log, gaps),
    )


def _num_before_first_token(replica: ReplicaRecords) -> int:
    """Preemptions that no step with a token of the victim came before; one may be under way when it is decided."""
    table, spans = replica.preemptions, replica.spans
    never = len(replica.steps) + 1
    size = max(int(table.request.max(initial=-1)), int(spans.request.max(initial=-1))) + 1
    first_step = np.full(size, never, np.int64)
    np.minimum.at(first_step, spans.request, np.where(spans.count > 0, spans.first_step, never))
    return int((first_step[table.request] >= table.step).sum())


@dataclass(frozen=True, slots=True)
class EvictionLog:
    """One row a preemption of any replica, in order of time: who lost what for whom, and how full the cache was."""

    replica: IntArray
    time_ns: IntArray
    step: IntArray
    request: IntArray
    """Who was preempted, as its row in the workload."""
    number: IntArray
    """How often it had been preempted with this time: 1 for the first."""
    for_request: IntArray
    """Who needed the blocks; the victim where it was its own."""
    lost_tokens: IntArray
    """Computed tokens that were thrown away; 0 where they went to the CPU."""
    lost_blocks: IntArray
    usage_before: FloatArray
    """Share of the KV blocks that requests held, right before."""
    usage_after: FloatArray

    def __len__(self) -> int:
        return len(self.request)


def eviction_log(records: Records) -> EvictionLog:
    """Every preemption of a run."""
    parts: list[tuple[npt.NDArray[np.generic], ...]] = []
    for number, replica in enumerate(records.replicas):
        table, usable = replica.preemptions, max(replica.num_usable_blocks, 1)
        parts.append(
            (
                np.full(len(table), number, np.int64),
                table.time_ns,
                table.step,
                table.request,
                np.zeros(len(table), np.int64),
                table.for_request,
                table.num_computed_tokens,
                table.num_blocks,
                1.0 - (table.num_free_blocks - table.num_blocks) / usable,
                1.0 - table.num_free_blocks / usable,
            )
        )
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0, np.int64)] * 10
    order = np.lexsort((np.arange(len(columns[0])), columns[0], columns[1]))
    columns = [column[order] for column in columns]
    columns[4] = _occurrences(columns[3])
    return EvictionLog(*columns)


def _occurrences(values: IntArray) -> IntArray:
    """Which occurrence of its value each entry is, from 1."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(ordered) else np.zeros(0, np.int64)
    counts = np.arange(len(ordered)) - np.repeat(starts, np.diff(np.append(starts, len(ordered)))) + 1
    numbers = np.empty(len(values), np.int64)
    numbers[order] = counts
    return numbers


def worst_pairs(log: EvictionLog, number: int = NUM_WORST) -> tuple[EvictionPair, ...]:
    """The pairs of victim and beneficiary that lost the most tokens, then the most blocks."""
    pairs, which = np.unique(np.stack((log.request, log.for_request)), axis=1, return_inverse=True)
    which = which.reshape(-1)
    times, tokens, blocks = (
        np.bincount(which),
        _total(log.lost_tokens, which, pairs.shape[1]),
        _total(log.lost_blocks, which, pairs.shape[1]),
    )
    order = np.lexsort((pairs[1], pairs[0], -blocks, -tokens))[:number]
    return tuple(
        EvictionPair(*(int(value) for value in (*pairs[:, k], times[k], tokens[k], blocks[k]))) for k in order.tolist()
    )


def _total(values: IntArray, which: IntArray, number: int) -> IntArray:
    total = np.zeros(number, np.int64)
    np.add.at(total, which, values)
    return total


def _worst_victims(records: Records, log: EvictionLog, gaps: ItlGaps) -> tuple[Victim, ...]:
    size = int(records.requests.request.max(initial=-1)) + 1
    times, lost = np.bincount(log.request, minlength=size), _total(log.lost_tokens, log.request, size)
    stalled_ns = _total(gaps.stall_ns[gaps.is_stalled], gaps.request[gaps.is_stalled], size)
    again = np.zeros(size, np.int64)
    again[records.requests.request] = records.requests.num_recomputed_tokens
    victims = np.flatnonzero(times)
    order = victims[np.lexsort((victims, -times[victims], -lost[victims]))][:NUM_WORST]
    return tuple(
        Victim(int(k), int(times[k]), int(lost[k]), int(again[k]), float(stalled_ns[k]) / NS_PER_S) for k in order
    )


# --- gaps between tokens


@dataclass(frozen=True, slots=True)
class ItlGaps:
    """The gaps between tokens of finished requests, equal ones together, and what preemptions did to each."""

    measured_ns: IntArray
    stall_ns: IntArray
    """The part in which the request sat preempted or was computed again."""
    recomputing_ns: IntArray
    """What else of it was computing again what others had lost; all 0 where that is not known."""
    is_stalled: BoolArray
    """Whether it holds a preemption of its own request."""
    request: IntArray
    """Whose gap it is; -1 where several requests have it."""
    weights: IntArray
    """How many gaps it is."""
    knows_recomputing: bool

    def measured(self) -> Sample:
        """As they were."""
        return weighted_sample(self.measured_ns, self.weights)

    def without_stalls(self) -> Sample:
        """With the requests' own stalls taken out."""
        return weighted_sample(self.measured_ns - self.stall_ns, self.weights)

    def without_preemption(self) -> Sample | None:
        """With recomputations taken out of the steps as well; None where their time is not known."""
        if not self.knows_recomputing:
            return None
        return weighted_sample(self.measured_ns - self.stall_ns - self.recomputing_ns, self.weights)


def itl_gaps(records: Records) -> ItlGaps:
    """All gaps between tokens; measured, they are those of ``inter_token_latencies``."""
    finished = finished_by_request(records)
    parts = [part for replica in records.replicas for part in _gaps_of(replica, finished)]
    none = np.zeros(0, np.int64)
    empty = _Gaps(none, none, none, np.zeros(0, np.bool_), none, none)
    joined = _Gaps(*(np.concatenate(column) for column in zip(empty, *parts, strict=True)))
    known = all(bool((replica.steps.recomputed_tokens >= 0).all()) for replica in records.replicas)
    return ItlGaps(*joined, knows_recomputing=known)


class _Gaps(NamedTuple):
    measured_ns: IntArray
    stall_ns: IntArray
    recomputing_ns: IntArray
    is_stalled: BoolArray
    request: IntArray
    weights: IntArray


def _gaps_of(replica: ReplicaRecords, finished: BoolArray) -> tuple[_Gaps, _Gaps]:
    """Of one replica: the gaps between successive steps, and those between spans."""
    steps = replica.steps
    again = recomputed_ns(steps)
    again_ns = np.zeros(len(steps), np.int64) if again is None else again
    first, last, request = spans_of(replica, finished)
    covering = np.cumsum(np.bincount(first, minlength=len(steps)) - np.bincount(last, minlength=len(steps)))
    num_inner = max(len(steps) - 1, 0)
    inner = _Gaps(
        np.diff(steps.end_ns),
        np.zeros(num_inner, np.int64),
        again_ns[1:],
        np.zeros(num_inner, np.bool_),
        np.full(num_inner, -1, np.int64),
        covering[:-1],
    )
    order = np.lexsort((first, request))
    first, last, request = first[order], last[order], request[order]
    follows = request[1:] == request[:-1]
    before, after, whose = last[:-1][follows], first[1:][follows], request[1:][follows]
    stopped = _preempted_in(replica, whose, before, after)
    is_stalled = stopped >= 0
    resumes = np.where(is_stalled, stopped, after)  # the step at whose end its next token would have come
    done_ns = np.cumsum(again_ns)
    between = _Gaps(
        steps.end_ns[after] - steps.end_ns[before],
        steps.end_ns[after] - steps.end_ns[resumes],
        done_ns[resumes] - done_ns[before],
        is_stalled,
        whose,
        np.ones(len(whose), np.int64),
    )
    return inner, between


def _preempted_in(replica: ReplicaRecords, request: IntArray, before: IntArray, after: IntArray) -> IntArray:
    """Step of the first preemption of each request behind ``before`` and up to ``after``; -1 where there is none."""
    table, width = replica.preemptions, len(replica.steps) + 2
    if not len(table) or not len(request):
        return np.full(len(request), -1, np.int64)
    keys = np.sort(table.request * width + np.minimum(table.step, width - 1))
    place = np.searchsorted(keys, request * width + before + 1)
    found = keys[np.minimum(place, len(keys) - 1)] - request * width
    is_there = (place < len(keys)) & (found > before) & (found <= after)
    return np.where(is_there, found, -1)


def itl_stalls(gaps: ItlGaps) -> ItlStalls:
    """What preemptions did to the gaps between tokens, and to their 99th percentile."""
    measured, stalled = gaps.measured(), gaps.is_stalled
    without = gaps.without_preemption()
    high_ns = measured.percentile(TAIL_PERCENT)
    slow = gaps.measured_ns > (high_ns or 0.0)
    num_slow = int(gaps.weights[slow].sum()) if measured.count else 0
    total_ns, num_stalled = int(gaps.stall_ns[stalled].sum()), int(stalled.sum())
    recomputing = slow & ~stalled & (gaps.recomputing_ns > 0)
    return ItlStalls(
        num_gaps=measured.count,
        num_stalled=num_stalled,
        stall_s=total_ns / NS_PER_S,
        stall_mean_ms=ratio(total_ns / NS_PER_MS, num_stalled),
        stall_max_ms=float(gaps.stall_ns[stalled].max()) / NS_PER_MS if num_stalled else None,
        p99_ms=_ms(high_ns),
        p99_without_stalls_ms=_ms(gaps.without_stalls().percentile(TAIL_PERCENT)),
        p99_without_preemption_ms=None if without is None else _ms(without.percentile(TAIL_PERCENT)),
        num_slow=num_slow,
        slow_stalled_share=ratio(int(gaps.weights[slow & stalled].sum()), num_slow),
        slow_recomputing_share=ratio(int(gaps.weights[recomputing].sum()), num_slow)
        if gaps.knows_recomputing
        else None,
    )


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / NS_PER_MS

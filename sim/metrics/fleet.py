"""What a fleet did: per pool and replica, over time, and what crashes and scaling came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windtunnel.sim.fleet.records import Death, Fate, FleetRecords, LifeTable
from windtunnel.sim.metrics.economics import Rates
from windtunnel.sim.metrics.latency import NS_PER_S, BoolArray
from windtunnel.sim.metrics.load import durations, kv_usage, level_over_time, present_ns, ratio
from windtunnel.sim.metrics.sample import LatencyStats, latency_stats, sample, weighted_sum
from windtunnel.sim.records import IntArray, Outcome, Records

S_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One replica's part.  Shares and means are over the time in which it took or finished requests."""

    replica: int
    """Its number in the records."""
    pool: str
    place: int
    """Its place in the pool: one that takes over after a crash has the same."""
    ordered_s: float
    """From the start of the run."""
    ready_s: float | None
    """None if it never was."""
    gone_s: float | None
    """None where it was there to the end."""
    death: str
    """``none``, ``crash`` or ``scaled_down``."""
    num_requests: int
    """Requests that were sent there while it lived."""
    num_finished: int
    num_lost: int
    """Requests that it took along when it went."""
    num_unheard: int
    """Requests that were sent there when it was dead and the router had not noticed."""
    output_tokens: int
    """Of the requests that finished there."""
    busy_share: float | None
    """Share of the time in which a step ran."""
    num_running_mean: float | None
    num_waiting_mean: float | None
    kv_usage_mean: float | None
    kv_usage_peak: float | None
    num_preemptions: int
    prefix_cache_hit_rate: float | None
    """Prompt tokens found in its cache, over those of the requests that ended there; None if nothing was admitted."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The replicas of one pool together."""

    pool: str
    gpu: str
    num_replicas_ever: int
    num_ready_start: int
    num_ready_mean: float | None
    num_ready_peak: int
    replica_hours: float
    """Paid for: from when each was ordered until it was gone."""
    gpu_hours: float
    num_requests: int
    """Requests that were sent to living ones."""
    request_share: float | None
    """Share of all those that were."""
    num_finished: int
    num_lost: int
    busy_share: float | None
    kv_usage_mean: float | None
    kv_usage_peak: float | None
    num_preemptions: int
    prefix_cache_hit_rate: float | None
    ttft: LatencyStats
    """Of the requests that finished there."""
    e2el: LatencyStats
    cost: float | None
    """None without a price."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """An autoscaler changed the number of replicas."""

    time_s: float
    pool: str
    before: int
    after: int
    value: float
    """The metric per replica that it saw."""


@dataclass(frozen=True, slots=True)
class FleetStats:
    """A fleet over the run, from the first sending to the last end."""

    router: str
    on_crash: str
    pools: tuple[PoolStats, ...]
    replicas: tuple[ReplicaStats, ...]
    scalings: tuple[Scaling, ...]
    num_ready_mean: float | None
    num_ready_peak: int
    num_ready_min: int
    """Fewest replicas that took requests at an instant, after the first did."""
    replica_hours: float
    gpu_hours: float
    num_crashes: int
    num_missed_faults: int
    """Faults that did not happen: all was over by then, or there was no replica to crash."""
    num_unheard_stays: int
    """Times that a request was sent to a replica that was dead already, which the router had not noticed."""
    num_unheard_requests: int
    """Requests to which that happened."""
    time_at_dead_s: float
    """Request-seconds at dead replicas: until a request was refused, its client gave up or the router noticed."""
    num_lost_stays: int
    """Times that a request lost its replica."""
    num_retried_requests: int
    """Requests that were sent to a replica more than once."""
    num_lost_requests: int
    """Requests that were lost for good."""
    lost_output_tokens: int
    """Tokens that requests had got from replicas that went away."""
    num_waited: int
    """Requests that waited at the gateway before their first replica."""
    gateway_wait: LatencyStats
    """From sending until a replica got it (the first one), of all that were handed out."""
    request_imbalance: float | None
    """Requests per ready second of the replica with the most, over the mean of all; 1 is even."""
    known_prefix_share: float | None
    """Share of the prompts' blocks that the router believed cached where it sent them; None if it did not ask."""


def fleet_stats(records: Records, start_ns: int, end_ns: int, percentiles: Sequence[float]) -> FleetStats | None:
    """The fleet's part in a run between two times; None for records of no fleet."""
    fleet = records.fleet
    if fleet is None:
        return None
    stays, lives = fleet.stays, fleet.lives
    replicas = tuple(_replica(records, fleet, number, start_ns, end_ns) for number in range(len(lives)))
    first = _first_stays(fleet)
    waited_ns = stays.sent_ns[first] - records.requests.arrival_ns[stays.request[first]]
    ready_mean, ready_peak, ready_min = _ready(lives, np.ones(len(lives), np.bool_), start_ns, end_ns)
    paid_ns = held_ns(records, start_ns, end_ns)
    unheard = stays.fate == Fate.UNHEARD
    gpus = [fleet.pools[pool].num_gpus for pool in lives.pool.tolist()]
    return FleetStats(
        router=fleet.router,
        on_crash=fleet.on_crash,
        pools=tuple(
            _pool(records, fleet, number, replicas, (start_ns, end_ns), percentiles)
            for number in range(len(fleet.pools))
        ),
        replicas=replicas,
        scalings=_scalings(fleet),
        num_ready_mean=ready_mean,
        num_ready_peak=ready_peak,
        num_ready_min=ready_min,
        replica_hours=_hours(sum(paid_ns)),
        gpu_hours=_hours(sum(time * count for time, count in zip(paid_ns, gpus, strict=True))),
        num_crashes=int((lives.death == Death.CRASH).sum()),
        num_missed_faults=fleet.num_missed_faults,
        num_unheard_stays=int(unheard.sum()),
        num_unheard_requests=len(np.unique(stays.request[unheard])),
        time_at_dead_s=_dead_ns(fleet, records.end_ns) / NS_PER_S,
        num_lost_stays=int((stays.fate == Fate.LOST).sum()),
        num_retried_requests=_num_retried(fleet),
        num_lost_requests=int((records.requests.outcome == Outcome.LOST).sum()),
        lost_output_tokens=int(stays.num_output_tokens[stays.fate == Fate.LOST].sum()),
        num_waited=int((waited_ns > 0).sum()),
        gateway_wait=latency_stats(sample(waited_ns), percentiles),
        request_imbalance=_imbalance(records, start_ns, end_ns),
        known_prefix_share=_known_share(records, fleet),
    )


def held_ns(records: Records, start_ns: int, end_ns: int) -> list[int]:
    """How long each replica was paid for within two times: from when it was ordered until it was gone."""
    if records.fleet is None:
        return [end_ns - start_ns] * len(records.replicas)
    lives = records.fleet.lives
    gone = np.where(lives.gone_ns < 0, end_ns, lives.gone_ns)
    held = np.minimum(gone, end_ns) - np.maximum(lives.ordered_ns, start_ns)
    return [int(time) for time in held.clip(min=0)]


def replica_rates(fleet: FleetRecords) -> list[Rates]:
    """What the GPUs of each replica cost and draw."""
    of_pool = [Rates(facts.num_gpus, facts.gpu_hour, facts.idle_watts, facts.busy_watts) for facts in fleet.pools]
    return [of_pool[pool] for pool in fleet.lives.pool.tolist()]


def _replica(records: Records, fleet: FleetRecords, number: int, start_ns: int, end_ns: int) -> ReplicaStats:
    lives, own = fleet.lives, records.replicas[number]
    there_ns = present_ns(records, start_ns, end_ns)[number]
    duration, (active, _) = durations(own.steps, start_ns, end_ns), kv_usage(own)
    fates = fleet.stays.fate[fleet.stays.replica == number]
    ready_ns, gone_ns = int(lives.ready_ns[number]), int(lives.gone_ns[number])
    table = records.requests
    finished = (table.replica == number) & (table.outcome == Outcome.FINISHED)
    return ReplicaStats(
        replica=number,
        pool=fleet.pools[int(lives.pool[number])].name,
        place=int(lives.place[number]),
        ordered_s=int(lives.ordered_ns[number]) / NS_PER_S,
        ready_s=None if ready_ns < 0 else ready_ns / NS_PER_S,
        gone_s=None if gone_ns < 0 else gone_ns / NS_PER_S,
        death=Death(int(lives.death[number])).name.lower(),
        num_requests=int((fates != Fate.UNHEARD).sum()),
        num_finished=int((fates == Fate.FINISHED).sum()),
        num_lost=int((fates == Fate.LOST).sum()),
        num_unheard=int((fates == Fate.UNHEARD).sum()),
        output_tokens=int(table.num_output_tokens[finished].sum()),
        busy_share=ratio(float(duration.sum()), there_ns),
        num_running_mean=ratio(weighted_sum(own.steps.num_running, duration), there_ns),
        num_waiting_mean=ratio(weighted_sum(own.steps.num_waiting, duration), there_ns),
        kv_usage_mean=ratio(weighted_sum(active, duration), there_ns),
        kv_usage_peak=float(active.max()) if len(active) else None,
        num_preemptions=len(own.preemptions),
        prefix_cache_hit_rate=_hit_rate(records, table.replica == number),
    )


def _pool(
    records: Records,
    fleet: FleetRecords,
    number: int,
    replicas: Sequence[ReplicaStats],
    window: tuple[int, int],
    percentiles: Sequence[float],
) -> PoolStats:
    lives, stays, table, facts = fleet.lives, fleet.stays, records.requests, fleet.pools[number]
    mine = lives.pool == number
    numbers = np.flatnonzero(mine)
    there_ns, held = present_ns(records, *window), held_ns(records, *window)
    own = [replicas[each] for each in numbers.tolist()]
    served = np.isin(table.replica, numbers)
    done = served & (table.outcome == Outcome.FINISHED)
    heard = stays.fate != Fate.UNHEARD
    sent = int(np.isin(stays.replica[heard], numbers).sum())
    mean, peak, _ = _ready(lives, mine, *window)
    gpu_hours = facts.num_gpus * _hours(sum(held[each] for each in numbers.tolist()))
    weights = [there_ns[each] for each in numbers.tolist()]

    def averaged(values: list[float | None]) -> float | None:
        known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
        return ratio(sum(value * weight for value, weight in known), sum(weights))

    return PoolStats(
        pool=facts.name,
        gpu=facts.gpu,
        num_replicas_ever=len(numbers),
        num_ready_start=int((mine & (lives.ready_ns == 0)).sum()),
        num_ready_mean=mean,
        num_ready_peak=peak,
        replica_hours=gpu_hours / facts.num_gpus,
        gpu_hours=gpu_hours,
        num_requests=sent,
        request_share=ratio(sent, int(heard.sum())),
        num_finished=sum(each.num_finished for each in own),
        num_lost=sum(each.num_lost for each in own),
        busy_share=averaged([each.busy_share for each in own]),
        kv_usage_mean=averaged([each.kv_usage_mean for each in own]),
        kv_usage_peak=max([each.kv_usage_peak for each in own if each.kv_usage_peak is not None], default=None),
        num_preemptions=sum(each.num_preemptions for each in own),
        prefix_cache_hit_rate=_hit_rate(records, served),
        ttft=latency_stats(sample((table.first_token_ns - table.arrival_ns)[done]), percentiles),
        e2el=latency_stats(sample((table.finish_ns - table.arrival_ns)[done]), percentiles),
        cost=None if facts.gpu_hour is None else facts.gpu_hour * gpu_hours,
    )


def _hit_rate(records: Records, chosen: BoolArray) -> float | None:
    table = records.requests
    admitted = (table.scheduled_ns >= 0) & chosen
    return ratio(int(table.num_cached_tokens[admitted].sum()), int(table.num_prompt_tokens[admitted].sum()))


def _num_retried(fleet: FleetRecords) -> int:
    """Requests that came to more than one replica, but for prefill replicas that handed them on."""
    ended_there = fleet.stays.fate != Fate.PREFILLED
    return int((np.bincount(fleet.stays.request[ended_there]) > 1).sum())


def _dead_ns(fleet: FleetRecords, end_ns: int) -> int:
    """Time that requests spent at replicas after those had died."""
    stays, gone_ns = fleet.stays, fleet.lives.gone_ns[fleet.stays.replica]
    until_ns = np.where(stays.ended_ns < 0, end_ns, stays.ended_ns)
    return int((until_ns - np.maximum(stays.sent_ns, gone_ns))[gone_ns >= 0].clip(min=0).sum())


def _first_stays(fleet: FleetRecords) -> IntArray:
    """Row of each handed-out request's first stay."""
    _, first = np.unique(fleet.stays.request, return_index=True)
    return first.astype(np.int64)


def ready_over_time(lives: LifeTable, chosen: BoolArray, end_ns: int) -> tuple[IntArray, IntArray]:
    """When the number of the chosen replicas that take requests changes, and what it is from there on."""
    was_ready = (lives.ready_ns >= 0) & chosen
    ends = np.where(lives.draining_ns >= 0, lives.draining_ns, lives.gone_ns)
    ends = np.where(ends < 0, end_ns, np.minimum(ends, end_ns))[was_ready]
    return level_over_time(np.minimum(lives.ready_ns[was_ready], ends), ends)


def _ready(lives: LifeTable, chosen: BoolArray, start_ns: int, end_ns: int) -> tuple[float | None, int, int]:
    """Mean, most and fewest of the chosen replicas that took requests between two times."""
    times, level = ready_over_time(lives, chosen, end_ns)
    if not len(times):
        return 0.0, 0, 0
    bounds = np.append(times, end_ns).clip(start_ns, end_ns)
    lasted = np.diff(bounds)
    there = level[lasted > 0]
    return (
        ratio(weighted_sum(level, lasted), end_ns - start_ns),
        int(there.max(initial=0)),
        int(there.min()) if len(there) else 0,
    )


def _scalings(fleet: FleetRecords) -> tuple[Scaling, ...]:
    table = fleet.scalings
    changed = np.flatnonzero(table.num_chosen != table.num_wanted).tolist()
    return tuple(
        Scaling(
            int(table.time_ns[row]) / NS_PER_S,
            fleet.pools[int(table.pool[row])].name,
            int(table.num_wanted[row]),
            int(table.num_chosen[row]),
            int(table.value_milli[row]) / 1000,
        )
        for row in changed
    )


def _imbalance(records: Records, start_ns: int, end_ns: int) -> float | None:
    assert records.fleet is not None, "fleet_stats asks"
    there = np.array(present_ns(records, start_ns, end_ns), np.float64)
    stays = records.fleet.stays
    counts = np.bincount(stays.replica[stays.fate != Fate.UNHEARD], minlength=len(there))
    rates = counts[there > 0] / there[there > 0]
    return ratio(float(rates.max(initial=0.0)), float(rates.mean())) if len(rates) else None


def _known_share(records: Records, fleet: FleetRecords) -> float | None:
    known = fleet.stays.num_known_blocks
    if not len(known) or int(known.max()) < 0:
        return None
    tokens = known.clip(min=0) * fleet.router_block_tokens
    return ratio(int(tokens.sum()), int(records.requests.num_prompt_tokens[fleet.stays.request].sum()))


def _hours(time_ns: float) -> float:
    return time_ns / NS_PER_S / S_PER_HOUR

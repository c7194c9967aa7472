"""Whether a load holds: what replications together say about the objectives, with a stated confidence.

A load *holds* if, for every objective, the one-sided confidence bound on the bad side still keeps the limit, and the
system was not overloaded.  It *fails* if for one of them the bound on the good side breaks it, or the system was
overloaded in at least half of the replications: above capacity a latency says how long the run was, and no bound on it
is worth anything.  Else it is *undecided*: more replications may tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import copysign, inf, isfinite, log
from typing import Any

from windtunnel.capacity.binding import LIMITS, Binding, binding_of
from windtunnel.capacity.evaluate import NEVER_MS, Evaluation
from windtunnel.sim.metrics.replications import Interval, mean_interval, percentile_interval
from windtunnel.sim.metrics.slo import OPERATORS, Slo

MOST_OVERLOADED = 0.1
"""Share of replications that may look overloaded while a load still holds: the verdict is sometimes wrong."""
SKEWNESS = 2.0
"""Assumed of the means that replications measure: a queue is long in few of them and short in most, as exponential
values are.

Without it a rate whose objective lies exactly at its limit was said to hold in 8 to 19 % of 1,500 decisions on M/D/1
and M/M/1 queues at rho = 0.7 to 0.9, where 5 % are allowed; with it in 2 to 7 %.
"""
SHARE_SKEWNESS = 0.5
"""The same of the share of requests above a percentile, whose error is taken where the share is what it must be: with 2
no rate above the true one was said to hold in 320 searches on M/M/1 queues, with this in 2.5 % of them (5 % are
allowed), and the intervals are about an eighth shorter."""
_MANY = 1e4
"""More than there are replications: where one of so many has NEVER_MS, their mean is still beyond any real latency."""
OVERLOADED = 0.5
"""Share of replications that look overloaded from which on a load fails."""


class Status(StrEnum):
    """What replications say about a load or an objective."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    """The bounds lie on both sides of the limit."""
    TOO_SHORT = "too_short"
    """The runs ended before the system had reached a steady state."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An objective at one load: the estimate over all replications and its one-sided bounds."""

    slo: Slo
    estimate: float | None
    """In the objective's unit; None if there was nothing to measure; inf where so many requests had no answer."""
    low: float
    """Lower one-sided bound; -inf where unknown."""
    high: float
    """Upper one-sided bound; inf where unknown."""
    status: Status

    @property
    def margin(self) -> float:
        """Estimate over limit, above 1 where the objective is broken; of goodput, the share that is missed."""
        if self.estimate is None:
            return 0.0
        if self.slo.metric == "goodput":
            return _over(100 - self.estimate, 100 - self.slo.limit)
        return _over(self.estimate, self.slo.limit)

    def to_plain(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {
            "objective": self.slo.text,
            "limit": self.slo.limit,
            "unit": self.slo.unit,
            "estimate": _plain(self.estimate),
            "low": _plain(self.low),
            "high": _plain(self.high),
            "status": self.status.value,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """What replications at one load say, all objectives together."""

    status: Status
    measured: tuple[Measured, ...]
    num_replications: int
    num_requests: int
    """Of each replication."""
    num_counted: int
    """Requests counted, of all replications."""
    overloaded_share: float
    """Share of the replications in which the queue grew without bound."""
    binding: Binding
    service_s: float
    """90th percentile of the time from first step to last, mean over replications."""
    num_preemptions: int
    """Of all replications."""
    unservable_share: float = 0.0
    """Share of the counted requests that were refused because of max_model_len."""

    @property
    def refuses_too_many(self) -> Slo | None:
        """The objective that fails at any rate, since too many requests do not fit max_model_len; None without one."""
        broken = (each.slo for each in self.measured if each.status is Status.FAILS)
        return next((slo for slo in broken if 100 * self.unservable_share > room_percent(slo)), None)

    @property
    def margin(self) -> float:
        """The largest margin of any objective."""
        return max(each.margin for each in self.measured)

    @property
    def worst(self) -> Measured:
        """The objective that is closest to its limit, or furthest beyond."""
        return max(self.measured, key=lambda each: each.margin)


def decide(evaluations: Sequence[Evaluation], objectives: Sequence[Slo], confidence: float) -> Verdict:
    """What these replications say about a load, each bound with one-sided ``confidence``."""
    measured = tuple(_measured(evaluations, number, slo, confidence) for number, slo in enumerate(objectives))
    num = len(evaluations)
    overloaded = sum(each.is_overloaded for each in evaluations) / num
    shares = {name: sum(each.shares[name] for each in evaluations) / num for name in LIMITS}
    return Verdict(
        status=_status(evaluations, measured, overloaded),
        measured=measured,
        num_replications=num,
        num_requests=evaluations[0].num_requests,
        num_counted=sum(each.num_counted for each in evaluations),
        overloaded_share=overloaded,
        binding=binding_of(shares),
        service_s=sum(each.service_s for each in evaluations) / num,
        num_preemptions=sum(each.num_preemptions for each in evaluations),
        unservable_share=sum(each.num_unservable for each in evaluations)
        / max(sum(each.num_counted for each in evaluations), 1),
    )


def room_percent(slo: Slo) -> float:
    """So many of a hundred requests may be refused before the objective is missed, whatever becomes of the others."""
    if slo.unit == "ms":
        return slo.room_percent
    if slo.metric == "goodput":
        return 100 - slo.limit
    return slo.limit if slo.metric == "failed" else 100.0


def _status(evaluations: Sequence[Evaluation], measured: Sequence[Measured], overloaded: float) -> Status:
    if overloaded >= OVERLOADED:
        return Status.FAILS
    if sum(each.is_short for each in evaluations) > len(evaluations) / 2:
        return Status.TOO_SHORT
    if any(each.status is Status.FAILS for each in measured):
        return Status.FAILS
    if all(each.status is Status.HOLDS for each in measured) and overloaded <= MOST_OVERLOADED:
        return Status.HOLDS
    return Status.UNDECIDED


def _measured(evaluations: Sequence[Evaluation], number: int, slo: Slo, confidence: float) -> Measured:
    interval = _interval(evaluations, number, slo, confidence)
    if interval is None:  # no request could have it (no gap between tokens): that breaks no promise
        done = any(each.num_counted for each in evaluations)
        return Measured(slo, None, -inf, inf, Status.HOLDS if done else Status.UNDECIDED)
    keeps = OPERATORS[slo.operator]
    worst, best = (interval.low, interval.high) if slo.metric == "goodput" else (interval.high, interval.low)
    if keeps(worst, slo.limit):
        status = Status.HOLDS
    elif not keeps(best, slo.limit):
        status = Status.FAILS
    else:
        status = Status.UNDECIDED
    return Measured(slo, _finite(interval.mean), _finite(interval.low), _finite(interval.high), status)


def _interval(evaluations: Sequence[Evaluation], number: int, slo: Slo, confidence: float) -> Interval | None:
    two_sided = 2 * confidence - 1
    samples = [found for each in evaluations if (found := each.sample(number)) is not None]
    if samples:
        percent = 50.0 if slo.percent is None else slo.percent
        return percentile_interval(samples, percent, two_sided, skewness=SHARE_SKEWNESS)
    values = [value for each in evaluations if isinstance(value := each.measured[number], float)]
    if not values:
        return None
    skewness = -SKEWNESS if slo.metric == "goodput" else SKEWNESS
    interval = mean_interval(values, two_sided, skewness=skewness)
    return interval if slo.unit != "%" else _of_share(interval, slo, evaluations, confidence)


def _of_share(found: Interval, slo: Slo, evaluations: Sequence[Evaluation], confidence: float) -> Interval:
    """The interval of a share in percent, which no chance takes beyond 0 and 100.

    Where no request was bad the replications do not differ, and still the share may be as large as leaves so many
    requests without a bad one with the probability that the bound may be wrong: -ln(1 - confidence) over their number.
    """
    low, high = max(found.low, 0.0), min(found.high, 100.0)
    unseen = -100 * log(1 - confidence) / max(sum(each.num_counted for each in evaluations), 1)
    if slo.metric == "goodput":
        low = max(min(low, 100 - unseen), 0.0)
    elif slo.metric == "failed":
        high = min(max(high, unseen), 100.0)
    return replace(found, low=low, high=high)


def _finite(value: float) -> float:
    """A latency that stands for requests without an answer is infinite."""
    return copysign(inf, value) if abs(value) >= NEVER_MS / _MANY else value


def _over(value: float, limit: float) -> float:
    if limit > 0:
        return value / limit
    return inf if value > 0 else 1.0


def _plain(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None

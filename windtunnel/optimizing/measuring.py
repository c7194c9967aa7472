"""What one trial of a search comes to: a simulation at the scenario's load, or the largest rate that it keeps up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from windtunnel.optimizing.capacity_job import FUNCTION, SECONDS_AN_HOUR, CapacityTrial, ToBeat
from windtunnel.optimizing.question import CAPACITY, Question
from windtunnel.sim.metrics.slo import LATENCIES, Slo
from windtunnel.trials.trial import trial_of
from windtunnel.workers import Job

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded

COARSE = {"replications": 4, "num_requests": 1_000, "precision": 0.1}
"""How a rate is searched for while the field is large."""
FINE = {"replications": 4, "num_requests": 1_000, "precision": 0.05}
"""The same with each of several seeds for those that may win, for the confirmation and for the walk.

Of so many simulations in all, more seeds of fewer replications each leave the shorter interval.
"""
BEYOND = 12
"""Requests beyond a percentile that all replications together have at least."""
COUNTED_SHARE = 0.7
"""Of the requests of a run; the first ones find the system empty."""
MISSED = 0.01
"""By how much an objective that was missed counts as missed at least."""


def job_of(
    question: Question,
    loaded: Loaded,
    seed: int,
    *,
    is_fine: bool,
    around: float | None = None,
    to_beat: ToBeat | None = None,
) -> Job:
    """The job of one run of a deployment with one seed; the hints are those of a search at capacity."""
    seeded = replace(loaded, scenario=loaded.scenario.model_copy(update={"seed": seed}))
    job = trial_of(seeded)
    if question.at != CAPACITY:
        return job
    settings = capacity_settings(question.objectives, is_fine=is_fine)
    return Job(FUNCTION, CapacityTrial(job.argument, settings, around, to_beat, not is_fine))


def capacity_settings(objectives: Sequence[Slo], *, is_fine: bool) -> dict[str, float]:
    """How a rate is searched for, with requests enough for the percentiles and shares of the objectives."""
    from windtunnel.capacity.search import rare_share

    own = dict(FINE if is_fine else COARSE)
    tails = [share for slo in objectives if (share := rare_share(slo))]
    needed = max((BEYOND / tail for tail in tails), default=0.0)
    counted = own["replications"] * COUNTED_SHARE
    return {**own, "num_requests": max(own["num_requests"], ceil(needed / counted))}


# --- numbers that are made of a run's


def completed(question: Question, run: Mapping[str, Any]) -> dict[str, Any]:
    """The run with what the search judges by: goodput, goodput per money or GPU-hour, use of the limits, head-room."""
    if run.get("infeasible"):
        return dict(run)
    goodput = _goodput(question, run)
    cost, gpus = _number(run.get("cost_per_hour")), _number(run.get("num_gpus"))
    uses = uses_of(run, question.objectives)
    made: dict[str, Any] = {
        "goodput": goodput,
        "goodput_per_dollar": _per_hour(goodput, cost),
        "goodput_per_gpu_hour": _per_hour(goodput, gpus),
    }
    if uses:
        made["worst_use"] = max(uses.values())
        made["worst_objective"] = max(uses, key=lambda text: uses[text])
    elif _number(run.get("worst_use")) is None:
        made["worst_use"] = _number(run.get("utilisation")) if question.at != CAPACITY else None
        made["worst_objective"] = "utilisation" if made["worst_use"] is not None else None
    if run.get("below_rate") is not None:
        made |= _bounds(made, run)
    use = made.get("worst_use", _number(run.get("worst_use")))
    made["headroom"] = None if use is None or question.at == CAPACITY else 1 - use
    return {**run, **made}


def _goodput(question: Question, run: Mapping[str, Any]) -> float | None:
    """Good requests per second; where no limits say what is good, finished ones; at capacity the largest rate."""
    if question.at == CAPACITY:
        return _number(run.get("max_rate"))
    return _number(run.get("request_goodput" if question.has_limits else "request_throughput"))


def _bounds(made: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, float | None]:
    """What the target's numbers are below, under keys of their own: a bound is never a number that was measured."""
    below = _number(run.get("below_rate"))
    cost, gpus = _number(run.get("cost_per_hour")), _number(run.get("num_gpus"))
    assert made["goodput"] is None
    return {
        "goodput_below": below,
        "goodput_per_dollar_below": _per_hour(below, cost),
        "goodput_per_gpu_hour_below": _per_hour(below, gpus),
    }


def _per_hour(rate: float | None, whole: float | None) -> float | None:
    return None if rate is None or not whole else rate * SECONDS_AN_HOUR / whole


def _number(value: Any) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return float(value) if is_one else None


def excesses(run: Mapping[str, Any], objectives: Sequence[Slo]) -> dict[str, float]:
    """By how much of its limit each objective is missed; 0 or less where it is kept."""
    missed = {text.strip() for text in str(run.get("slo_missed") or "").split(",")}
    uses = uses_of(run, objectives)
    found = {}
    for slo in objectives:
        over = uses.get(slo.text, _number(run.get("worst_use")) or 1.0) - 1
        found[slo.text] = max(over, MISSED) if slo.text in missed else min(over, 0.0)
    return found


def uses_of(run: Mapping[str, Any], objectives: Sequence[Slo]) -> dict[str, float]:
    """The share of each objective's limit that is used; those of which a run does not tell the number are left out."""
    found = {}
    for slo in objectives:
        measured = _measured(run, slo)
        use = None if measured is None else use_of_limit(measured, slo)
        if use is not None:
            found[slo.text] = max(use, _use_by_failures(run, slo))
    return found


def _use_by_failures(run: Mapping[str, Any], slo: Slo) -> float:
    """Failed requests over those that a limit on a latency leaves room for, where there are more; else 0.

    Each of them is later than any limit, which the latencies of the others do not show.
    """
    whole, failed = _number(run.get("num_prompts")), _number(run.get("failed"))
    if slo.metric not in LATENCIES or not whole or not failed:
        return 0.0
    use = 100 * failed / whole / max(slo.room_percent, MISSED)
    return use if use > 1 else 0.0


def _measured(run: Mapping[str, Any], slo: Slo) -> float | None:
    """What the run has for an objective, in its unit."""
    if slo.metric in LATENCIES:
        return _number(run.get(f"{slo.statistic}_{slo.metric}_ms"))
    if slo.metric == "goodput":
        key, scale = ("goodput_share", 100) if slo.unit == "%" else ("request_goodput", 1)
    elif slo.metric == "failed":
        whole, failed = _number(run.get("num_prompts")), _number(run.get("failed"))
        if slo.unit == "%":
            return None if failed is None or not whole else 100 * failed / whole
        return failed
    else:
        names = {"preempted_requests": "num_preempted_requests"}
        statistic = f"_{slo.statistic}" if slo.statistic else ""
        key, scale = f"{names.get(slo.metric, slo.metric)}{statistic}", 100 if slo.unit == "%" else 1
    value = _number(run.get(key))
    return None if value is None else value * scale


def use_of_limit(measured: float | None, slo: Slo) -> float | None:
    """1 is at the limit.  Of a share that must be large it is what lacks to 100 %, over what may lack."""
    if measured is None or not isfinite(measured):
        return None
    if slo.operator in ("<", "<="):
        return measured / slo.limit if slo.limit > 0 else 1 + measured
    if slo.operator in (">", ">="):
        if slo.unit == "%" and slo.limit < 100:
            return (100 - measured) / (100 - slo.limit)
        return slo.limit / measured if measured > 0 else 1 + slo.limit
    return None

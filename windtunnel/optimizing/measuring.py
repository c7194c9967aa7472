"""What one trial of a search comes to: a simulation at the scenario's load, or the largest rate that it keeps up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.optimizing.question import CAPACITY, Question
from windtunnel.sim.metrics.slo import LATENCIES, Slo
from windtunnel.trials.files import digest
from windtunnel.trials.trial import Trial, trial_of
from windtunnel.workers import Job

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded

SECONDS_AN_HOUR = 3600
COARSE = {"replications": 4, "num_requests": 1_000, "precision": 0.1}
"""How a rate is searched for while the field is large."""
FINE = {"replications": 8, "num_requests": 1_000, "precision": 0.1}
"""The same for those that may win, for the confirmation and for the walk."""
FUNCTION = "windtunnel.optimizing.measuring:run_capacity"
BEYOND = 12
"""Requests beyond a percentile that all replications together have at least."""
COUNTED_SHARE = 0.7
"""Of the requests of a run; the first ones find the system empty."""
OVERLOADED = 0.5
"""Share of overloaded replications from which on a rate counts as too high."""
MISSED = 0.01
"""By how much an objective that was missed counts as missed at least."""


@dataclass(frozen=True, slots=True)
class CapacityTrial:
    """A deployment whose largest rate is to be found."""

    trial: Trial
    settings: dict[str, float]

    def identity(self) -> dict[str, Any]:
        """All that the result depends on."""
        return {**self.trial.identity(), "settings": self.settings}


def job_of(question: Question, loaded: Loaded, seed: int, *, is_fine: bool) -> Job:
    """The job of one run of a deployment with one seed."""
    seeded = replace(loaded, scenario=loaded.scenario.model_copy(update={"seed": seed}))
    job = trial_of(seeded)
    if question.at != CAPACITY:
        return job
    return Job(FUNCTION, CapacityTrial(job.argument, capacity_settings(question.objectives, is_fine=is_fine)))


def capacity_settings(objectives: Sequence[Slo], *, is_fine: bool) -> dict[str, float]:
    """How a rate is searched for, with requests enough for the percentiles and shares of the objectives."""
    from windtunnel.capacity.search import rare_share

    own = dict(FINE if is_fine else COARSE)
    tails = [share for slo in objectives if (share := rare_share(slo))]
    needed = max((BEYOND / tail for tail in tails), default=0.0)
    counted = own["replications"] * COUNTED_SHARE
    return {**own, "num_requests": max(own["num_requests"], ceil(needed / counted))}


def run_capacity(asked: CapacityTrial) -> dict[str, Any]:
    """The largest rate at which a deployment keeps its objectives, as a flat dict as ``run_trial`` gives one.

    ``max_rate`` is the estimate; where there is none what was shown to hold, and where nothing was, for want of runs,
    where the estimates of single rates cross the limit; 0 where they do nowhere.  Raises as ``max_rate`` does, and
    ScenarioUnreadable for files that have changed.
    """
    from windtunnel.capacity.max_rate import max_rate
    from windtunnel.scenarios.load import load_scenario
    from windtunnel.trials import Obstacle, resolved_or_obstacle

    trial = asked.trial
    _check_unchanged(trial)
    resolved = resolved_or_obstacle(load_scenario(trial.scenario))
    if isinstance(resolved, Obstacle):
        return {"verdict": resolved.verdict, "infeasible": resolved.reason, "num_simulations": 0}
    found = max_rate(
        resolved,
        replications=int(asked.settings["replications"]),
        num_requests=int(asked.settings["num_requests"]),
        precision=asked.settings["precision"],
    )
    rate = found.rate or found.low or estimated_rate([(row.rate, _tightest(row)) for row in found.rows])
    at = found.row_at_the_limit
    worst = at.verdict.worst
    pool, rates = resolved.kv_pool, resolved.rates
    return {
        "verdict": "stable" if rate else "no rate holds",
        "infeasible": None,
        "seed": resolved.seed,
        "num_gpus": resolved.num_gpus,
        "kv_cache_tokens": None if pool is None else pool.kv_cache_tokens,
        "oom_margin_bytes": None if pool is None else pool.oom_margin_bytes,
        "memory_verdict": None if pool is None else pool.verdict,
        "max_rate": rate,
        "holds_up_to": found.low,
        "fails_from": found.high,
        "utilisation": found.utilisation,
        "saturation_rate": found.saturation_rate,
        "binding": found.binding,
        "limiting": None if found.limiting is None else found.limiting.text,
        "outcome": found.outcome,
        "cost_per_hour": None if rates.gpu_hour is None else rates.gpu_hour * resolved.num_gpus,
        "slo_passed": bool(rate),
        "slo_missed": None if rate else worst.slo.text,
        "worst_use": _use(worst.estimate, worst.slo),
        "num_simulations": found.num_simulations,
        "num_simulated_requests": found.num_simulated_requests,
        **_of_cost(resolved),
    }


def _tightest(row: Any) -> float:
    """The use of the tightest limit at a rate, by the estimates; infinite where the queue grows without bound."""
    margin: float = row.verdict.margin
    return inf if row.verdict.overloaded_share >= OVERLOADED else margin


def estimated_rate(uses: Sequence[tuple[float, float]]) -> float:
    """Where the use of a limit crosses 1, by interpolation in logarithms between rates; 0 if it does so nowhere.

    ``uses`` has pairs of a rate and a use, by rate.  Where all lie below 1 the highest rate is taken.
    """
    below = 0.0
    used = 0.0
    for rate, use in uses:
        if use > 1:
            if not below:
                return 0.0
            share = 0.5 if not isfinite(use) or used <= 0 else log(1 / used) / log(use / used)
            return float(below * (rate / below) ** share)
        below, used = rate, use
    return below


def _of_cost(resolved: Any) -> dict[str, Any]:
    told = resolved.describe()["metadata"]
    return {
        key: value for key, value in told.items() if key.startswith(("cost_model", "step_time")) or key == "model_id"
    }


def _check_unchanged(trial: Trial) -> None:
    from windtunnel.scenarios.errors import ScenarioUnreadable

    for path, known in trial.digests.items():
        try:
            is_same = digest(Path(path)) == known
        except OSError as error:
            raise ScenarioUnreadable(f"cannot read {path}: {error.strerror or error}") from error
        if not is_same:
            raise ScenarioUnreadable(f"{path} has changed since this work began: start it again")


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
    use = made.get("worst_use", _number(run.get("worst_use")))
    made["headroom"] = None if use is None or question.at == CAPACITY else 1 - use
    return {**run, **made}


def _goodput(question: Question, run: Mapping[str, Any]) -> float | None:
    """Good requests per second; where no limits say what is good, finished ones; at capacity the largest rate."""
    if question.at == CAPACITY:
        return _number(run.get("max_rate"))
    return _number(run.get("request_goodput" if question.has_limits else "request_throughput"))


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
        use = None if measured is None else _use(measured, slo)
        if use is not None:
            found[slo.text] = use
    return found


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


def _use(measured: float | None, slo: Slo) -> float | None:
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

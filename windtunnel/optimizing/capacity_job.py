"""A job of a search at capacity: the largest rate of a deployment, or that it stays below what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.optimizing.rates import Below, KeptSimulations, RateFinder, use_of
from windtunnel.reports.optimize_data import NEVER_LEVEL
from windtunnel.reports.sweep_data import GIB, LEVEL
from windtunnel.trials.files import digest
from windtunnel.trials.trial import Trial

if TYPE_CHECKING:
    from windtunnel.scenarios.resolve import Resolved

FUNCTION = "windtunnel.optimizing.capacity_job:run_capacity"
SECONDS_AN_HOUR = 3600


@dataclass(frozen=True, slots=True)
class ToBeat:
    """The best so far, for a deployment that is worth searching only if it may take its place."""

    value: float
    """Of the target, which must be goodput, per what it is paid with: larger is better."""
    per: str
    """``cost_per_hour``, ``num_gpus``, or empty for goodput itself."""
    cost: float
    """An hour's price of the best, or its GPUs where no price is given."""
    is_priced: bool
    num_away: int
    """Settings of the best that are not vLLM's default."""
    own_num_away: int
    """The same of the deployment."""
    oom_margin_gib: float
    """Memory that the best leaves."""

    def needed(self, per: float, cost: float, oom_margin_gib: float) -> float:
        """The rate that a deployment needs to take the place of the best, in requests per second.

        Of two that are level the cheaper, simpler or safer one counts.  So one that is preferred then needs what the
        best has less the 5 % within which two may be level, and one that is not needs 1 % more.
        """
        own = (cost, self.own_num_away, -oom_margin_gib)
        is_preferred = own < (self.cost, self.num_away, -self.oom_margin_gib)
        value = self.value * (1 - NEVER_LEVEL if is_preferred else 1 + LEVEL)
        return value * per / SECONDS_AN_HOUR if self.per else value


@dataclass(frozen=True, slots=True)
class CapacityTrial:
    """A deployment whose largest rate is to be found."""

    trial: Trial
    settings: dict[str, float]
    around: float | None = None
    """Requests per second of each GPU near which the rate is expected; None if nobody knows."""
    to_beat: ToBeat | None = None
    is_alone: bool = True
    """Whether this seed must tell by itself how far off its rate may be; where there are several, they do."""

    def identity(self) -> dict[str, Any]:
        """All that the result depends on."""
        told = None if self.to_beat is None else asdict(self.to_beat)
        own = {"settings": self.settings, "around": self.around, "to_beat": told, "is_alone": self.is_alone}
        return {**self.trial.identity(), **own}


def run_capacity(asked: CapacityTrial) -> dict[str, Any]:
    """The largest rate at which a deployment keeps its objectives, as a flat dict as ``run_trial`` gives one.

    ``max_rate`` is where the estimates meet the limit; the largest rate that is tried where they nowhere do, 0 where
    they break it in an idle system.  A deployment that stays below the rate that it needs has None, that rate as
    ``below_rate``, and why under ``below_why``.  Raises as ``capacity.max_rate`` does, and ScenarioUnreadable for files
    that have changed.
    """
    from windtunnel.capacity.evaluate import Evaluator
    from windtunnel.capacity.sampling import source_of
    from windtunnel.capacity.search import Settings
    from windtunnel.scenarios.load import load_scenario
    from windtunnel.trials import Obstacle, resolved_or_obstacle

    _check_unchanged(asked.trial)
    resolved = resolved_or_obstacle(load_scenario(asked.trial.scenario))
    if isinstance(resolved, Obstacle):
        return {"verdict": resolved.verdict, "infeasible": resolved.reason, "num_simulations": 0}
    evaluator = Evaluator(resolved.served, resolved.slo, resolved.goodput)
    simulations = KeptSimulations(evaluator, source_of(resolved), resolved.seed)
    settings = Settings(
        max_replications=int(asked.settings["replications"]),
        num_requests=int(asked.settings["num_requests"]),
        precision=asked.settings["precision"],
    )
    finder = RateFinder(simulations, settings)
    needed = None if asked.to_beat is None else _needed(asked.to_beat, resolved)
    below = None if needed is None else finder.below(needed)
    around = None if asked.around is None else asked.around * resolved.num_gpus
    found = _of_rate(finder, around, asked.is_alone) if below is None else _of_bound(below)
    return {
        **_of_deployment(resolved),
        **found,
        "num_simulations": simulations.num_run,
        "num_simulated_requests": simulations.num_simulated,
        **_of_cost(resolved),
    }


def _needed(to_beat: ToBeat, resolved: Resolved) -> float | None:
    """None where the deployment tells no price to relate a rate to."""
    hour = _cost_per_hour(resolved)
    per = {"cost_per_hour": hour, "num_gpus": float(resolved.num_gpus)}.get(to_beat.per, 1.0)
    cost = hour if to_beat.is_priced else float(resolved.num_gpus)
    if not per or cost is None:
        return None
    margin = None if resolved.kv_pool is None else resolved.kv_pool.oom_margin_bytes
    return to_beat.needed(per, cost, (margin or 0) / GIB)


def _cost_per_hour(resolved: Resolved) -> float | None:
    return None if resolved.rates.gpu_hour is None else resolved.rates.gpu_hour * resolved.num_gpus


def _of_deployment(resolved: Resolved) -> dict[str, Any]:
    pool = resolved.kv_pool
    return {
        "infeasible": None,
        "seed": resolved.seed,
        "num_gpus": resolved.num_gpus,
        "kv_cache_tokens": None if pool is None else pool.kv_cache_tokens,
        "oom_margin_bytes": None if pool is None else pool.oom_margin_bytes,
        "memory_verdict": None if pool is None else pool.verdict,
        "cost_per_hour": _cost_per_hour(resolved),
    }


def _of_bound(below: Below) -> dict[str, Any]:
    return {
        "verdict": "below what it needs",
        "max_rate": None,
        "below_rate": below.rate,
        "below_why": below.why,
        "slo_passed": None,
        "slo_missed": None,
    }


def _of_rate(finder: RateFinder, around: float | None, is_alone: bool) -> dict[str, Any]:
    from windtunnel.optimizing.measuring import use_of_limit

    found = finder.find(around)
    rate = found.rate or 0.0
    at = next((row for row in found.rows if use_of(row) > 1), found.rows[-1])
    worst = at.verdict.worst
    return {
        "verdict": "stable" if rate else "no rate holds",
        "max_rate": rate,
        "below_rate": None,
        "below_why": None,
        **({"holds_up_to": found.low, "fails_from": found.high} if is_alone else {}),
        "utilisation": rate / found.saturation_rate if found.saturation_rate and rate else None,
        "saturation_rate": found.saturation_rate,
        "binding": at.verdict.binding.name,
        "limiting": worst.slo.text if use_of(at) > 1 else None,
        "outcome": found.outcome,
        "slo_passed": bool(rate),
        "slo_missed": None if rate else worst.slo.text,
        "worst_use": use_of_limit(worst.estimate, worst.slo),
    }


def _of_cost(resolved: Resolved) -> Mapping[str, Any]:
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

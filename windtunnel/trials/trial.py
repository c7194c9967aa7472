"""One simulation as a job of ``Workers``: ``make_trial`` says what is to be simulated, ``run_trial`` does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.trials.files import digest, with_absolute_paths
from windtunnel.trials.obstacle import Obstacle, resolved_or_obstacle
from windtunnel.workers.jobs import Job

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded
    from windtunnel.scenarios.resolve import Resolved
    from windtunnel.scenarios.schema import Scenario

FUNCTION = "windtunnel.trials.trial:run_trial"
_WORDS = ("name", "description", "teaches", "schema_version", "compare", "plan")
"""Of a scenario what no number depends on."""
_TOLD = ("date", "label", "tokenizer_id", "endpoint_type", "backend", "scenario", "rtfx", "windtunnel_schema_version")
"""Keys of the summary that say nothing about the run, or not the same for equal runs."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be simulated, as plain data that means the same in every process on this machine."""

    scenario: dict[str, Any]
    """Sections and seed, with absolute paths."""
    digests: dict[str, str]
    """Of the files that it names, by path."""
    origin: str
    sources: tuple[tuple[tuple[str | int, ...], str], ...]
    """Where the scenario and its keys came from, for complaints."""
    overridden: tuple[tuple[str | int, ...], ...]

    def identity(self) -> dict[str, Any]:
        """All that the result depends on."""
        return {"scenario": self.scenario, "digests": self.digests}


def make_trial(
    scenario: str | Path | Mapping[str, Any] | Scenario | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
) -> Job:
    """The job of simulating a scenario, given as for ``simulate``, with these keys or sections changed.

    Trials that say the same in other words (a file, a table, overrides) are the same job.  ``seed`` wins over the
    scenario's and the overrides'; None leaves it to them.

    Raises ScenarioError or ScenarioUnreadable for what cannot be read or has unknown keys; whether the deployment is
    possible, and whether its files can be read, is only found out when the job is done.
    """
    from windtunnel.scenarios.load import Override, load_scenario

    given = {**(overrides or {}), **({} if seed is None else {"seed": seed})}
    return trial_of(load_scenario(scenario, {key: Override(value, f"{key}=") for key, value in given.items()}))


def trial_of(loaded: Loaded) -> Job:
    """The job of simulating a scenario that is loaded already."""
    said = loaded.scenario.model_dump(exclude_unset=True, exclude=set(_WORDS))
    table, digests = with_absolute_paths(loaded, said)
    sources = tuple((path, source) for path, source in loaded.sources.items() if path[:1] != ("compare",))
    overridden = tuple(sorted(loaded.overridden, key=str))
    return Job(FUNCTION, Trial(table, digests, loaded.origin, sources, overridden))


def run_trial(trial: Trial) -> dict[str, Any]:
    """Simulate, and tell what came out as a flat dict of text, numbers, true, false and None.

    First come keys of ours: ``verdict`` (that of the run's stability, or ``infeasible`` or ``not possible``),
    ``infeasible`` (why, or None), ``seed``, ``num_gpus``, and of the memory plan ``num_gpu_blocks``,
    ``kv_cache_tokens`` with the bounds of its interval (90 %), ``oom_margin_bytes`` (what stays free on the card) with
    ``oom_margin_spread_bytes`` (by how much that may be too high) and ``memory_verdict``; None where it is not known.
    Then comes every single value of the summary under its own key, ``slo_missed`` (the objectives that were missed, or
    None) and ``warnings`` (one a line, or None).  A deployment that is not possible has no summary.

    Raises ScenarioError, ScenarioUnreadable, TraceError, ProfileError or UnsupportedModel as ``resolve`` does.
    """
    from windtunnel.api import execute

    _check_unchanged(trial)
    found = resolved_or_obstacle(_loaded(trial))
    if isinstance(found, Obstacle):
        seed = trial.scenario.get("seed") or 0
        return {"verdict": found.verdict, "infeasible": found.reason, "seed": seed, **_of_deployment(None)}
    run = execute(found)
    head = {"verdict": run.summary["stability"], "infeasible": None, "seed": found.seed, **_of_deployment(found)}
    return {**head, **_scalars(run.summary), "warnings": "\n".join(run.resolved["warnings"]) or None}


def _check_unchanged(trial: Trial) -> None:
    from windtunnel.scenarios.errors import ScenarioUnreadable

    for path, known in trial.digests.items():
        try:
            is_same = digest(Path(path)) == known
        except OSError as error:
            raise ScenarioUnreadable(f"cannot read {path}: {error.strerror or error}") from error
        if not is_same:
            raise ScenarioUnreadable(f"{path} has changed since this work began: start it again")


def _loaded(trial: Trial) -> Loaded:
    from windtunnel.scenarios.load import load_scenario

    loaded = load_scenario(trial.scenario)
    return replace(
        loaded, origin=trial.origin, sources=dict(trial.sources), overridden=frozenset(map(tuple, trial.overridden))
    )


def _of_deployment(resolved: Resolved | None) -> dict[str, Any]:
    pool = None if resolved is None else resolved.kv_pool
    low, high = (None, None) if pool is None else pool.kv_cache_tokens_90
    return {
        "num_gpus": None if resolved is None else resolved.num_gpus,
        "num_gpu_blocks": None if resolved is None else resolved.config.num_gpu_blocks,
        "kv_cache_tokens": None if pool is None else pool.kv_cache_tokens,
        "kv_cache_tokens_low": low,
        "kv_cache_tokens_high": high,
        "oom_margin_bytes": None if pool is None else pool.oom_margin_bytes,
        "oom_margin_spread_bytes": None if pool is None else pool.oom_margin_spread_bytes,
        "memory_verdict": None if pool is None else pool.verdict,
    }


def _scalars(summary: Mapping[str, Any]) -> dict[str, Any]:
    missed = [each["objective"] for each in summary["slo"] if not each["passed"]]
    single = {
        key: _plain(value)
        for key, value in summary.items()
        if key not in _TOLD and (value is None or isinstance(value, str | int | float))
    }
    return {**single, "slo_missed": ", ".join(missed) or None}


def _plain(value: str | float | None) -> str | float | None:
    """What JSON has: no NaN, and infinity as vLLM writes it."""
    if not isinstance(value, float) or isfinite(value):
        return value
    return None if isnan(value) else "inf" if value > 0 else "-inf"

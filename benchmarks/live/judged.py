"""Live and predicted figures side by side, and the limits that they are held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.calibration_live import LIMITS_PERCENT as LATENCY_LIMITS_PERCENT
from benchmarks.calibration_live import Profile
from windtunnel.calibrate.live_runs import LiveRun, RunFigures, live_step_table, run_figures, simulated_tokens_s
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.rng import stream
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System

SEED = 0
LIMITS_PERCENT = {**LATENCY_LIMITS_PERCENT, "throughput": LATENCY_LIMITS_PERCENT["makespan"]}
"""Largest errors with paced steps, by the kind of figure: makespan and throughput 2, means 4, 95th percentiles 8,
preemptions 10."""


class Row(NamedTuple):
    """One figure of one workload, at the client; times in seconds, throughput in output tokens a second."""

    workload: str
    figure: str
    live: float
    """Mean of the live runs."""
    live_spread: float
    """From the smallest to the largest of them; 0 for a single run."""
    live_interval: float | None
    """Half width of the interval around ``live`` in which one more live run would be with 95 % (Student's t; None for a
    single run)."""
    predicted: float
    """Mean of the simulations, each with the times at which a live run's client sent."""
    simulated_sd: float
    """Of the simulations."""
    error_percent: float
    limit_percent: float | None
    """None for what is shown and not judged."""
    at_own_speed: float
    """The prediction with all steps longer or shorter by one factor, that by which the steps of the live run itself
    were: what a machine that was slower or faster meanwhile explains of the error.  Not a prediction, and not judged.
    """

    @property
    def is_broken(self) -> bool:
        return self.limit_percent is not None and not abs(self.error_percent) <= self.limit_percent


def judge(
    workload: str,
    runs: Sequence[LiveRun],
    profile: Profile,
    *,
    is_paced: bool,
    num_simulations: int,
    speeds: Sequence[float] | None = None,
) -> list[Row]:
    """Rows of a workload that ran live one or more times.

    ``speeds``: how many times as long as those of the profile steps lasted about each run, seen on other runs; None
    takes the profile as it is.  Paced steps are held to ``LIMITS_PERCENT``.  Bare ones to the live spread: a prediction
    may be no farther from the mean of the live runs than these are from each other.
    """
    numbers = range(num_simulations)
    live = [dict(_figures(run, run.at_client())) for run in runs]
    about = speeds if speeds is not None else [1.0] * len(runs)
    own_speeds = [speed_factor(run, profile.cost) for run in runs]
    simulated, own = (
        [_simulated(run, profile, n, speed) for run, speed in zip(runs, factors, strict=True) for n in numbers]
        for factors in (about, own_speeds)
    )
    return [_row(workload, name, (live, simulated, own), is_paced) for name in live[0]]


def speed_factor(run: LiveRun, cost: FittedCost) -> float:
    """Time of all steps of the live run, in units of what the cost model says of the same steps."""
    table = live_step_table([run])
    return float(table.step_s.sum() / np.asarray(cost.step_time_s(table.shapes)).sum())


def _simulated(run: LiveRun, profile: Profile, number: int, speed: float) -> dict[str, float]:
    """The client's figures of one simulation, in which steps last ``speed`` times as long as in the profile."""
    rng = stream(SEED, "way to the engine", number)
    load = run.workload_at(profile.path.at_engine(run.send_s, rng))
    records = serve(load, System(run.config, _Scaled(profile.cost, speed), noise_seed=number))
    made_s, steps = simulated_tokens_s(records)
    replica = records.replicas[0]
    counts = (len(replica.preemptions), len(replica.steps))
    return dict(_figures(run, run_figures(run.send_s, profile.path.at_client(made_s, steps), *counts)))


class _Scaled(FittedCost):
    """A fitted cost model whose steps last ``factor`` times as long."""

    def __init__(self, cost: FittedCost, factor: float) -> None:
        super().__init__(cost.parameters, cost.evidence)
        self._factor = factor

    def step_time_s(self, shape: StepShape) -> Any:
        return self._factor * super().step_time_s(shape)


def _row(workload: str, name: str, figures: Sequence[Sequence[dict[str, float]]], is_paced: bool) -> Row:
    seen, told, own = (np.array([each[name] for each in some]) for some in figures)
    mean, predicted, spread = float(seen.mean()), float(told.mean()), float(np.ptp(seen))
    limit = LIMITS_PERCENT.get(name.rpartition(" ")[2])
    if not is_paced and limit is not None:
        limit = _percent(spread, mean)
    return Row(
        workload=workload,
        figure=name,
        live=mean,
        live_spread=spread,
        live_interval=_half_interval(seen),
        predicted=predicted,
        simulated_sd=float(told.std()),
        error_percent=_percent(predicted - mean, mean),
        limit_percent=limit,
        at_own_speed=float(own.mean()),
    )


def _half_interval(values: NDArray[np.float64]) -> float | None:
    """Of the 95 % prediction interval for one more value of the same normal distribution."""
    from scipy.stats import t

    num = len(values)
    if num < 2:
        return None
    return float(t.ppf(0.975, num - 1) * values.std(ddof=1) * np.sqrt(1.0 + 1.0 / num))


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else (0.0 if not part else float("inf"))


def _figures(run: LiveRun, figures: RunFigures) -> Iterator[tuple[str, float]]:
    yield "throughput", float(run.num_output_tokens.sum()) / figures.makespan_s
    yield "makespan", figures.makespan_s
    for name in ("ttft", "tpot", "e2el"):
        for statistic, value_s in getattr(figures, name)._asdict().items():
            yield f"{name.upper()} {statistic.removesuffix('_s')}", value_s
    yield "preemptions", figures.num_preemptions
    yield "steps", figures.num_steps

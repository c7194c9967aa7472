"""What goes wrong in a fleet, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.protocols import Executor
from windtunnel.sim.records import IntArray, StepTable
from windtunnel.sim.simulated import SimExecutor


@dataclass(frozen=True, slots=True)
class Crash:
    """A replica dies at ``at_ns``: the step that it computes is lost, and so are its cache and its requests.

    With ``restart_after_ns`` a new one, with an empty cache, takes its place so long after; None is never.
    ``place`` counts the places of the pool from 0; a crash that finds nobody there does nothing.
    """

    pool: str
    place: int
    at_ns: int
    restart_after_ns: int | None = None

    def __post_init__(self) -> None:
        _check_place(self.place)
        _at_least("at_ns", self.at_ns, 0)
        if self.restart_after_ns is not None:
            _at_least("restart_after_ns", self.restart_after_ns, 1)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Steps that a place of the pool begins from ``start_ns`` until before ``end_ns`` take ``factor`` times as long.

    The place is slow (a hot GPU, a noisy neighbour), so a replica that restarts there is, too.
    """

    pool: str
    place: int
    start_ns: int
    end_ns: int | None
    """None is until the end of the run."""
    factor: float

    def __post_init__(self) -> None:
        _check_place(self.place)
        _at_least("start_ns", self.start_ns, 0)
        if self.end_ns is not None and self.end_ns <= self.start_ns:
            raise ValueError(f"end_ns must be above start_ns ({self.start_ns}), got {self.end_ns}")
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"factor must be a number above 0, got {self.factor}")


Fault = Crash | Slowdown


class SlowedExecutor:
    """An executor whose steps take ``factor`` times as long."""

    def __init__(self, executor: Executor, factor: float) -> None:
        self.executor = executor
        self.factor = factor
        self._steps = range(0)

    @property
    def steps(self) -> range:
        """Numbers of the steps that it ran; one that a crash cut off may be among them."""
        return self._steps

    def execute(self, plan: StepPlan) -> StepResult:
        """As the executor's own, longer or shorter; never below 1 ns."""
        result = self.executor.execute(plan)
        self._steps = range(self._steps.start if self._steps else plan.number, plan.number + 1)
        return result._replace(step_ns=max(1, round(result.step_ns * self.factor)))


class SlowedPrices(SimExecutor):
    """Prices parts of steps that were run as slowly as the replica was then."""

    def __init__(self, executor: SimExecutor, slowed: Iterable[SlowedExecutor], num_steps: int) -> None:
        """``slowed`` ran some of the replica's ``num_steps`` steps, ``executor`` all others."""
        super().__init__(executor.cost, executor.swap, executor.drafting)
        self._factors: npt.NDArray[np.float64] = np.ones(num_steps)
        for each in slowed:
            self._factors[each.steps.start : each.steps.stop] = each.factor

    def decode_times_ns(self, steps: StepTable, rows: IntArray) -> IntArray:
        """As ``SimExecutor.decode_times_ns``, each by the factor of its step."""
        times_ns: IntArray = np.rint(super().decode_times_ns(steps, rows) * self._factors[rows]).astype(np.int64)
        return times_ns


def _check_place(place: int) -> None:
    if place < 0:
        raise ValueError(f"place must be at least 0 (the places of a pool are counted from 0), got {place}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")

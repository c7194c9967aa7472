"""The shadow: a real executor runs each step, and a cost model prices it beside, so that drift shows while it serves.

Steps are priced many at once, when some have come together or somebody looks; a step costs the engine an append.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from windtunnel.executor.batch import EngineView
from windtunnel.executor.engine import RealExecutor
from windtunnel.sim.cost.evidence import evidence_of
from windtunnel.sim.cost.features import REGIMES, regimes_of
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.engine.protocols import CostModel, Executor

WINDOW_STEPS = 2_000
"""Latest steps that ratio and errors speak of."""
_FLUSH_STEPS = 256
_NS = 1e-9
_ALL = "all"

FloatArray = npt.NDArray[np.float64]


class DriftLine(NamedTuple):
    """How the prediction does on the latest steps of one regime."""

    regime: str
    """``all``, ``decode``, ``prefill`` or ``mixed``."""
    num_steps: int
    ratio: float
    """Predicted over measured time, both summed: above 1 the model is too slow."""
    bias_percent: float
    """The same as a deviation."""
    p50_percent: float
    """Median of the absolute errors of single steps."""
    p90_percent: float
    extrapolated_share: float
    """Steps outside of what the model was fitted to, 0 to 1; 0 for a model that does not know."""
    num_steps_in_all: int
    """Since the beginning, as the two that follow."""
    measured_s: float
    predicted_s: float

    @property
    def ratio_in_all(self) -> float:
        """Predicted over measured time since the beginning."""
        return self.predicted_s / self.measured_s if self.measured_s else 1.0


class Drift:
    """Predicted beside measured step times, over a rolling window and since the beginning.

    ``take`` is for one thread; anybody may look.  Raises ValueError for a window of less than one step.
    """

    def __init__(self, cost: CostModel, window_steps: int = WINDOW_STEPS) -> None:
        if window_steps < 1:
            raise ValueError(f"the window must hold at least 1 step, got {window_steps}")
        self.cost = cost
        self._fresh: deque[tuple[StepShape, int]] = deque()  # measured and not priced yet
        self._lock = threading.Lock()
        self._window: deque[tuple[int, float, float, bool]] = deque(maxlen=window_steps)
        self._num_steps = [0] * len(REGIMES)
        self._measured_s = [0.0] * len(REGIMES)
        self._predicted_s = [0.0] * len(REGIMES)

    def take(self, shape: StepShape, step_ns: int) -> None:
        """A step that was run."""
        self._fresh.append((shape, step_ns))
        if len(self._fresh) >= _FLUSH_STEPS:
            self._price()

    def lines(self) -> tuple[DriftLine, ...]:
        """A line for all steps, then one for each regime that occurred; none before the first step."""
        self._price()
        with self._lock:
            rows, totals = list(self._window), self._totals()
        if not rows:
            return ()
        regimes, predicted, measured, outside = (np.array(column) for column in zip(*rows, strict=True))
        found = [self._line(_ALL, predicted, measured, outside, totals[_ALL])]
        for number, regime in enumerate(REGIMES):
            own = regimes == number
            if own.any():
                found.append(self._line(regime, predicted[own], measured[own], outside[own], totals[regime]))
        return tuple(found)

    def line(self, regime: str = _ALL) -> DriftLine | None:
        """That of one regime; None if no such step is in the window."""
        return next((each for each in self.lines() if each.regime == regime), None)

    def corrected(self) -> CostModel:
        """The cost model with all its times divided by the ratio of the latest steps; itself before the first."""
        line = self.line()
        return self.cost if line is None else ScaledCost(self.cost, 1.0 / line.ratio)

    def _totals(self) -> dict[str, tuple[int, float, float]]:
        columns = zip(self._num_steps, self._measured_s, self._predicted_s, strict=True)
        totals = dict(zip(REGIMES, columns, strict=True))
        return {**totals, _ALL: (sum(self._num_steps), sum(self._measured_s), sum(self._predicted_s))}

    @staticmethod
    def _line(
        regime: str, predicted: FloatArray, measured: FloatArray, outside: FloatArray, totals: tuple[int, float, float]
    ) -> DriftLine:
        errors = 100.0 * np.abs(predicted / measured - 1.0)
        middle, ninety = np.percentile(errors, (50, 90))
        ratio = float(predicted.sum() / measured.sum())
        return DriftLine(
            regime,
            len(measured),
            ratio,
            100.0 * (ratio - 1.0),
            float(middle),
            float(ninety),
            float(np.mean(outside)),
            *totals,
        )

    def _price(self) -> None:
        with self._lock:
            steps = [self._fresh.popleft() for _ in range(len(self._fresh))]
            if not steps:
                return
            columns: list[Any] = list(np.array([shape for shape, _ in steps], np.int64).T)
            shapes = StepShape(*columns)
            measured = np.array([step_ns for _, step_ns in steps]) * _NS
            predicted = np.broadcast_to(self.cost.step_time_s(shapes), measured.shape)
            regimes = regimes_of(shapes)
            outside = self._extrapolates(shapes, len(steps))
            rows = (regimes.tolist(), predicted.tolist(), measured.tolist(), outside.tolist())
            self._window.extend(zip(*rows, strict=True))
            for number in range(len(REGIMES)):
                own = regimes == number
                self._num_steps[number] += int(own.sum())
                self._measured_s[number] += float(measured[own].sum())
                self._predicted_s[number] += float(predicted[own].sum())

    def _extrapolates(self, shapes: StepShape, num: int) -> npt.NDArray[np.bool_]:
        knows = getattr(self.cost, "extrapolates", None)
        return np.zeros(num, bool) if knows is None else np.asarray(knows(shapes), bool)


class ScaledCost:
    """A cost model whose times are all ``factor`` times those of another, as on a machine that is slower throughout.

    Raises ValueError for a factor that is not above 0.
    """

    def __init__(self, cost: CostModel, factor: float) -> None:
        if not 0.0 < factor < float("inf"):
            raise ValueError(f"the factor must be above 0 and finite, got {factor}")
        self.name = f"{cost.name} x {factor:.4g}"
        self.calibrated = cost.calibrated
        self._cost = cost
        self._factor = factor

    def step_time_s(self, shape: StepShape) -> Any:
        """Seconds for a step, or for each of many."""
        return self._cost.step_time_s(shape) * self._factor

    def describe(self) -> dict[str, Any]:
        """What the other says of itself, and the factor."""
        return {**self._cost.describe(), "name": self.name, "factor": self._factor}


class ShadowExecutor:
    """An ``Executor`` that lets another one run the steps and notes what the cost model says of each.

    All else that is asked of it goes to the real one.
    """

    def __init__(self, real: Executor, cost: CostModel, *, window_steps: int = WINDOW_STEPS) -> None:
        self.real = real
        self.drift = Drift(cost, window_steps)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the step for real."""
        result = self.real.execute(plan)
        self.drift.take(plan.shape, result.step_ns)
        return result

    def __getattr__(self, name: str) -> Any:
        if name == "real":  # not set yet, in a copy
            raise AttributeError(name)
        return getattr(self.real, name)


class _ComputingShadow(ShadowExecutor):
    """Over an executor that computes a model."""

    def adopt(self, view: EngineView) -> int:
        """Let the real executor work for this engine from now on."""
        assert isinstance(self.real, RealExecutor), "shadowed() made it for one"
        return self.real.adopt(view)


def shadowed(real: Executor, cost: CostModel, *, window_steps: int = WINDOW_STEPS) -> ShadowExecutor:
    """The executor with a shadow; it computes a model if the given one does."""
    kind = _ComputingShadow if isinstance(real, RealExecutor) else ShadowExecutor
    return kind(real, cost, window_steps=window_steps)


class ShadowMetrics:
    """Drift in Prometheus' terms, by executor and regime; names are listed in ``docs/fork.md``."""

    def __init__(self, drifts: Mapping[str, Drift]) -> None:
        """``drifts`` by the name of the executor; it may grow."""
        self._drifts = drifts

    def collect(self) -> Iterator[Any]:
        """The families, as ``prometheus_client`` registries ask for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ["executor", "regime"]
        steps = CounterMetricFamily("windtunnel_shadow_steps", "Steps that were priced beside.", labels=labels)
        measured = CounterMetricFamily("windtunnel_shadow_measured_seconds", "What those steps took.", labels=labels)
        predicted = CounterMetricFamily(
            "windtunnel_shadow_predicted_seconds", "What the cost model says of those steps.", labels=labels
        )
        ratio = GaugeMetricFamily(
            "windtunnel_shadow_ratio", "Predicted over measured time of the latest steps.", labels=labels
        )
        error = GaugeMetricFamily(
            "windtunnel_shadow_error_percent",
            "Absolute error of single steps among the latest.",
            labels=[*labels, "quantile"],
        )
        outside = GaugeMetricFamily(
            "windtunnel_shadow_extrapolated_share", "Latest steps outside of the model's domain, 0-1.", labels=labels
        )
        info = GaugeMetricFamily(
            "windtunnel_shadow_info", "The cost model.", labels=["executor", "cost", "calibrated", "evidence"]
        )
        for executor, drift in list(self._drifts.items()):
            cost, evidence = drift.cost, evidence_of(drift.cost.describe())
            info.add_metric([executor, cost.name, str(cost.calibrated).lower(), evidence], 1)
            for line in drift.lines():
                own = [executor, line.regime]
                steps.add_metric(own, line.num_steps_in_all)
                measured.add_metric(own, line.measured_s)
                predicted.add_metric(own, line.predicted_s)
                ratio.add_metric(own, line.ratio)
                error.add_metric([*own, "0.5"], line.p50_percent)
                error.add_metric([*own, "0.9"], line.p90_percent)
                outside.add_metric(own, line.extrapolated_share)
        yield from (steps, measured, predicted, ratio, error, outside, info)

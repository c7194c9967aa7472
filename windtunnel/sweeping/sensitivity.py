"""Which setting matters most: ``sensitivity`` varies all of them over ranges and says what depends on which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windtunnel.reports.sweep_data import SweptPoint, measure, paired
from windtunnel.reports.sweep_influence import METHODS, Influence, Influences, Sensed, no_bounds
from windtunnel.reports.values import plain
from windtunnel.rundir import to_json, writing
from windtunnel.sim.metrics.comparison import TIE
from windtunnel.sim.rng import stream
from windtunnel.sweeping.analysis import swept_axes, swept_points
from windtunnel.sweeping.axes import Axis, Draw, make_axis
from windtunnel.sweeping.context import command_of, describe, own_settings, report_context
from windtunnel.sweeping.dials import PLANNED, dial_of
from windtunnel.sweeping.indices import (
    FloatArray,
    morris_design,
    morris_effects,
    sobol_design,
    sobol_indices,
)
from windtunnel.sweeping.plan import (
    PlannedPoint,
    check_words,
    design_notes,
    load_base,
    planned_points,
    renamed,
    replications,
    shown_metrics,
)
from windtunnel.sweeping.running import How, prepared, run_points
from windtunnel.sweeping.sweep import SCHEMA_VERSION, Progress, counter, with_objectives

if TYPE_CHECKING:
    import pandas as pd

    from windtunnel.scenarios.load import Loaded

DEFAULT_ROWS = {"oat": 0, "sobol": 64, "morris": 16}
"""Base points, or trajectories."""
MOST_RUNS = 200_000
_OF_SATURATION = ("utilisation", "capacity")
"""Numbers that take a second simulation a run, which is left out where they are not asked for."""


@dataclass(frozen=True, slots=True)
class SensitivityPlan:
    """All runs of a sensitivity analysis."""

    scenario: Any
    base: Loaded
    method: str
    axes: tuple[Axis, ...]
    shares: FloatArray
    """sobol, morris: the points as shares of the ranges, one a row."""
    base_values: dict[str, Any]
    """oat: what stays while one setting moves."""
    points: tuple[PlannedPoint, ...]
    seeds: tuple[int, ...]
    num_rows: int
    common: dict[str, Any]
    metrics: tuple[str, ...]
    vary: dict[str, Any]
    notes: tuple[str, ...]
    """As those of a sweep."""

    @property
    def num_runs(self) -> int:
        """Simulations that it takes."""
        return len(self.points) * len(self.seeds)


def sensitivity(
    scenario: Any = None,
    vary: Mapping[str, Any] | None = None,
    *,
    method: str = "morris",
    samples: int | None = None,
    reps: int | None = None,
    seed: int | None = None,
    slo: str | Iterable[str] | None = None,
    goodput: str | Iterable[str] | None = None,
    metrics: Iterable[str] = (),
    jobs: int | None = None,
    ray: str | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **overrides: Any,
) -> Sensitivity:
    """Vary several settings of a scenario over ranges and say which matters most for which number.

    ``vary`` maps settings to ranges (``"0.7:0.95"``, ``"lograndom:1:64"``) or lists, as ``sweep`` takes them.
    ``method`` is "oat" (one at a time from the scenario's own values: cheap, blind for interactions), "morris"
    (``samples`` trajectories of one more point than there are settings: a ranking, 16 if not given) or "sobol"
    (``samples`` base points, a power of two, with two more points than there are settings each: shares of the variance,
    64 if not given).  ``reps`` runs are averaged at each point: 1, or for "oat" as ``sweep``.  The rest is as there.

    Points that cannot run are left out with all that is compared with them.  Raises ValueError for unknown methods and
    designs that are too large, and as ``sweep``.

    >>> found = sensitivity("chat-8b-h100", {"max_num_seqs": "32:512", "request_rate": "5:30"})  # doctest: +SKIP
    >>> found.table  # doctest: +SKIP
    """
    plan = plan_sensitivity(
        scenario,
        vary or {},
        method=method,
        samples=samples,
        reps=reps,
        seed=seed,
        metrics=metrics,
        overrides=with_objectives(overrides, slo, goodput),
    )
    tell = None if progress is None else counter(progress, plan.num_runs)
    with prepared(jobs, ray=ray, folder=None if folder is None else Path(folder), resume=resume, tell=tell) as how:
        found = execute_sensitivity(plan, how)
        if folder is not None:
            found.save(folder)
    return found


# --- the design


def plan_sensitivity(
    scenario: Any,
    vary: Mapping[str, Any],
    *,
    method: str,
    samples: int | None = None,
    reps: int | None = None,
    seed: int | None = None,
    metrics: Iterable[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> SensitivityPlan:
    """The runs that ``sensitivity`` would do.  Raises as it does."""
    if method not in METHODS:
        raise ValueError(f"the method must be one of {', '.join(METHODS)}, got {method!r}")
    axes = tuple(make_axis(name, spec, bare_range=True) for name, spec in vary.items())
    _check_axes(axes, method)
    common = renamed(overrides or {})
    base = load_base(scenario, axes, common, seed)
    first_seed = base.scenario.seed or 0
    number = _num_rows(method, samples, axes)
    base_values = _base_values(axes, base) if method == "oat" else {}
    shares = _shares(method, len(axes), number, first_seed)
    combos = _one_at_a_time(axes, base_values) if method == "oat" else _drawn(axes, shares, on_grid=method == "morris")
    usual = [key for key in dial_of([axis.key for axis in axes]).metrics if key not in (*PLANNED, *_OF_SATURATION)]
    shown = shown_metrics(base.scenario, tuple(metrics), usual)
    if base.scenario.run.saturation is None and not set(shown) & set(_OF_SATURATION):
        common["saturation"] = False
    points = planned_points(scenario, axes, tuple(combos), common)
    check_words(axes, points)
    num_reps = replications(points[0], reps)[0] if method == "oat" or reps is not None else 1
    if len(points) * num_reps > MOST_RUNS:
        raise ValueError(f"{len(points) * num_reps:,} runs are more than {MOST_RUNS:,}: take fewer --samples or --reps")
    return SensitivityPlan(
        scenario,
        base,
        method,
        axes,
        shares,
        base_values,
        points,
        tuple(first_seed + k for k in range(num_reps)),
        number,
        common,
        shown,
        dict(vary),
        tuple(design_notes(axes, len(points), len(points))),
    )


def _check_axes(axes: Sequence[Axis], method: str) -> None:
    for axis in axes:
        if axis.draw is None and len(axis.values) < 2:
            raise ValueError(f"{axis.key} has one value only: give a range (LOW:HIGH) or several values")
    if method != "oat" and len(axes) < 2:
        raise ValueError(f"{method} tells settings from each other: vary two or more, or take --sensitivity oat")


def _num_rows(method: str, samples: int | None, axes: Sequence[Axis]) -> int:
    if method == "oat":
        if samples is not None:
            raise ValueError("--samples has no meaning one at a time: each setting goes through its values or ends")
        return 0
    number = samples or DEFAULT_ROWS[method]
    points = number * (len(axes) + (2 if method == "sobol" else 1))
    if points > MOST_RUNS:
        raise ValueError(f"{points:,} points are more than {MOST_RUNS:,}: take fewer --samples")
    return number


def _shares(method: str, num_axes: int, number: int, seed: int) -> FloatArray:
    """The points of a design as shares of the ranges, one a row; none one at a time."""
    if method == "oat":
        return np.zeros((0, num_axes))
    design = sobol_design if method == "sobol" else morris_design
    return design(num_axes, number, stream(seed, "sweep", method))


def _drawn(axes: Sequence[Axis], shares: FloatArray, *, on_grid: bool) -> Iterator[tuple[Any, ...]]:
    for row in shares.tolist():
        yield tuple(axis.as_draw.at(share, on_grid=on_grid) for axis, share in zip(axes, row, strict=True))


def _base_values(axes: Sequence[Axis], base: Loaded) -> dict[str, Any]:
    """The scenario's own values, where they are among those asked for; else those in the middle."""
    own = own_settings(describe([base]))
    return {axis.key: _base_value(axis, own.get(axis.key)) for axis in axes}


def _base_value(axis: Axis, own: Any) -> Any:
    draw = axis.as_draw
    if draw.choices:
        return next((value for value in draw.choices if value == own), draw.choices[len(draw.choices) // 2])
    is_inside = isinstance(own, int | float) and not isinstance(own, bool) and draw.low <= own <= draw.high
    return own if is_inside else draw.at(0.5)


def _one_at_a_time(axes: Sequence[Axis], base: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The base, then for each setting all others of its values, or the ends of its range."""
    yield tuple(base[axis.key] for axis in axes)
    for axis in axes:
        for value in _values_of(axis.as_draw):
            if value != base[axis.key]:
                yield tuple(value if each is axis else base[each.key] for each in axes)


def _values_of(draw: Draw) -> tuple[Any, ...]:
    return draw.choices or (draw.at(0.0), draw.at(1.0))


# --- what came out


def execute_sensitivity(plan: SensitivityPlan, how: How) -> Sensitivity:
    """Run what was planned, and look at it."""
    runs = run_points(plan.points, plan.seeds, how)
    points = swept_points(plan.points, runs)
    feasible = [planned.loaded for planned, point in zip(plan.points, points, strict=True) if not point.infeasible]
    described = describe([plan.base, *feasible[:1]])
    keys = [axis.key for axis in plan.axes]
    sensed = Sensed(
        context=report_context(
            plan.base.scenario.name, described, [run for own in runs for run in own], keys, plan.seeds, plan.notes
        ),
        description=plan.base.scenario.description,
        method=plan.method,
        axes=swept_axes(plan.axes, plan.points),
        ranges={axis.key: _range_words(axis.as_draw) for axis in plan.axes},
        base={key: value if isinstance(value, str) else plain(value) for key, value in plan.base_values.items()},
        found=tuple(_all_influences(plan, points)),
        points=points,
        seeds=plan.seeds,
        num_rows=plan.num_rows,
        command=command_of(plan.scenario, plan.vary, _options(plan), plan.common),
    )
    return Sensitivity(sensed)


def _range_words(draw: Draw) -> str:
    if draw.choices:
        return ", ".join(value if isinstance(value, str) else plain(value) for value in draw.choices)
    ends = f"{plain(draw.at(0.0))} to {plain(draw.at(1.0))}"
    return f"{ends}, equal ratios equally likely" if draw.is_log else ends


def _options(plan: SensitivityPlan) -> dict[str, Any]:
    return {
        "sensitivity": plan.method,
        "samples": plan.num_rows or None,
        "reps": len(plan.seeds),
        "seed": plan.seeds[0] or None,
    }


def _all_influences(plan: SensitivityPlan, points: Sequence[SweptPoint]) -> Iterator[Influences]:
    """For each number that the points have."""
    of: Callable[..., Influences | None] = {"oat": _by_oat, "sobol": _by_sobol, "morris": _by_morris}[plan.method]
    for key in plan.metrics:
        found = of(plan, points, key)
        if found is not None:
            yield found


def _outputs(points: Sequence[SweptPoint], key: str) -> FloatArray:
    means = [point.mean(key) for point in points]
    return np.array([np.nan if mean is None else mean for mean in means], np.float64)


def _noise_share(points: Sequence[SweptPoint], key: str) -> float | None:
    """Variance of a point's mean that is due to its draws, over the variance of the means; None for one replication."""
    values = [point.values(key) for point in points if len(point.values(key)) > 1]
    if not values:
        return None
    within = float(np.mean([np.var(each, ddof=1) / len(each) for each in values]))
    total = float(np.var([np.mean(each) for each in values]))
    return min(within / total, 1.0) if total > 0 else None


def _by_sobol(plan: SensitivityPlan, points: Sequence[SweptPoint], key: str) -> Influences | None:
    outputs = _outputs(points, key)
    try:
        found = sobol_indices(outputs, len(plan.axes), stream(plan.seeds[0], "sweep", "bootstrap", key))
    except ValueError:
        return None
    made = [
        Influence(axis.key, max(total.value, 0.0), total.low, total.high, first=(first.value, first.low, first.high))
        for axis, first, total in zip(plan.axes, found.first, found.total, strict=True)
    ]
    return _ranked(plan, points, key, float(np.nanmean(outputs)), made, found.num_rows)


def _by_morris(plan: SensitivityPlan, points: Sequence[SweptPoint], key: str) -> Influences | None:
    outputs = _outputs(points, key)
    try:
        found = morris_effects(plan.shares, outputs, stream(plan.seeds[0], "sweep", "bootstrap", key))
    except ValueError:
        return None
    made = [
        Influence(axis.key, size.value, size.low, size.high, mean=mean.value, spread=spread.value)
        for axis, size, mean, spread in zip(plan.axes, found.mean_absolute, found.mean, found.spread, strict=True)
    ]
    return _ranked(plan, points, key, float(np.nanmean(outputs)), made, found.num_rows)


def _by_oat(plan: SensitivityPlan, points: Sequence[SweptPoint], key: str) -> Influences | None:
    base = points[0]
    if base.mean(key) is None:
        return None
    made = []
    for axis in plan.axes:
        own = [base, *(point for point in points[1:] if _differs_only(point, base, axis.key))]
        made.append(_swing(axis.key, [point for point in own if point.values(key)], key))
    return _ranked(plan, points, key, base.mean(key) or 0.0, made, len(points))


def _differs_only(point: SweptPoint, base: SweptPoint, key: str) -> bool:
    return all((point.settings[other] != base.settings[other]) == (other == key) for other in base.settings)


def _swing(axis: str, points: Sequence[SweptPoint], key: str) -> Influence:
    """The largest change between two values of a setting, run against run of the same seed."""
    by_number = sorted(points, key=lambda point: point.mean(key) or 0.0)
    change = paired(by_number[0], by_number[-1], key)
    assert change is not None, "points without the number are left out"
    ordered = sorted(points, key=lambda point: (point.positions[axis] is None, point.positions[axis] or 0.0))
    ends = tuple((point.words[axis], point.mean(key) or 0.0) for point in ordered)
    low, high = (change.low, change.high) if change.num > 1 else no_bounds()
    return Influence(axis, change.mean, low, high, ends=ends)


def _ranked(
    plan: SensitivityPlan,
    points: Sequence[SweptPoint],
    key: str,
    base: float,
    made: Iterable[Influence],
    num_rows: int,
) -> Influences:
    ranked = tuple(sorted(made, key=lambda each: -each.value))
    if plan.method != "sobol" and ranked and ranked[0].value <= TIE * abs(base) and measure(key).unit != "":
        ranked = tuple(each._replace(value=0.0) for each in ranked)
    return Influences(key, base, ranked, num_rows, _noise_share(points, key))


class Sensitivity:
    """Which settings matter for which numbers: a table, and reports made from it."""

    def __init__(self, sensed: Sensed) -> None:
        self.sensed = sensed
        """All of it, as reports read it."""

    @property
    def is_infeasible(self) -> bool:
        """Whether no point can run at all."""
        return all(point.infeasible for point in self.sensed.points)

    @property
    def slo_passed(self) -> bool | None:
        """None: an analysis is about what depends on what, not about what is good enough."""
        return None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What must be known before the numbers are believed."""
        return self.sensed.context.warnings

    @property
    def table(self) -> pd.DataFrame:
        """One row for each number and setting: its influence with bounds, and its rank."""
        import pandas as pd

        return pd.DataFrame(list(self.rows()))

    @property
    def runs(self) -> pd.DataFrame:
        """One row a run: its settings and all numbers of its summary."""
        import pandas as pd

        from windtunnel.reports.sweep_table import run_rows

        return pd.DataFrame(list(run_rows(self.sensed.points, self.sensed.seeds)))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of ``table`` as dicts, all with the same keys."""
        for found in self.sensed.found:
            for rank, each in enumerate(found.ranked, 1):
                first = each.first or (None, None, None)
                yield {
                    "metric": found.key,
                    "setting": each.axis,
                    "rank": rank,
                    "influence": each.value,
                    "low": each.low if np.isfinite(each.low) else None,
                    "high": each.high if np.isfinite(each.high) else None,
                    "first_order": first[0],
                    "first_order_low": first[1],
                    "first_order_high": first[2],
                    "mean_effect": each.mean,
                    "spread": each.spread,
                    "is_leader": each in found.leaders,
                }

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, in a fixed order."""
        from windtunnel.reports.sweep_influence import influence_answer

        sensed, said, shared = self.sensed, influence_answer(self.sensed), self.sensed.context
        return {
            "schema_version": SCHEMA_VERSION,
            "windtunnel_version": shared.version,
            "scenario": {"name": shared.title, "description": sensed.description},
            "command": sensed.command or None,
            "method": sensed.method,
            "ranges": dict(sensed.ranges),
            "base": dict(sensed.base),
            "seeds": list(sensed.seeds),
            "num_points": len(sensed.points),
            "num_infeasible": sensed.num_infeasible,
            "num_rows": sensed.num_rows,
            "answer": {"headline": said.headline, "sentences": [*said.sentences, *said.risks]},
            "cost_model": {
                "name": shared.cost_model,
                "calibrated": shared.calibrated,
                "evidence": shared.evidence,
                "says": [*shared.calibrated_by],
            },
            "warnings": list(shared.warnings),
            "influences": list(self.rows()),
        }

    def text(self) -> str:
        """The answer, and a table for each number."""
        from windtunnel.reports.sweep_influence_text import render_text

        return render_text(self.sensed)

    def markdown(self) -> str:
        """The same as Markdown."""
        from windtunnel.reports.sweep_influence_text import render_markdown

        return render_markdown(self.sensed)

    def report(self, path: str | Path) -> None:
        """Write one self-contained HTML file with a tornado for each number.  Raises OutputError."""
        from windtunnel.reports.sweep_influence_html import write_html

        with writing(Path(path)):
            write_html(path, self.sensed)

    def to_csv(self, path: str | Path) -> None:
        """Write one row a run with all of its numbers.  Raises OutputError if it cannot be written."""
        from windtunnel.reports.sweep_table import run_rows, write_table

        with writing(Path(path)):
            write_table(path, list(run_rows(self.sensed.points, self.sensed.seeds)))

    def to_parquet(self, path: str | Path) -> None:
        """The same as Parquet; the name must end in .parquet or .pq.  Raises ValueError for another one."""
        if Path(path).suffix.lower() not in (".parquet", ".pq"):
            raise ValueError(f"{path} must end in .parquet or .pq")
        self.to_csv(path)

    def save(self, folder: str | Path) -> None:
        """Write everything into a folder: sensitivity.json, tables, report.html and report.md.  Raises OutputError."""
        from windtunnel.reports.files import atomic_writer
        from windtunnel.reports.sweep_table import write_table

        place = Path(folder)
        self.to_csv(place / "runs.csv")
        self.to_parquet(place / "runs.parquet")
        with writing(place / "influences.csv"):
            write_table(place / "influences.csv", list(self.rows()))
        self.report(place / "report.html")
        for name, text in (("report.md", self.markdown()), ("sensitivity.json", f"{to_json(self.to_dict())}\n")):
            with writing(place / name), atomic_writer(place / name) as file:
                file.write(text)

    def __repr__(self) -> str:
        return f"<Sensitivity of {self.sensed.context.title}: {', '.join(axis.key for axis in self.sensed.axes)}>"

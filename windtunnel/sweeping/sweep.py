"""What-if: ``sweep`` simulates a scenario at many settings, a ``Sweep`` holds what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.reports.sweep_data import Best, Knee, Swept, SweptPoint
from windtunnel.rundir import to_json, writing
from windtunnel.sweeping.analysis import (
    baseline_point,
    best_point,
    default_best_by,
    is_deterministic,
    knees,
    swept_axes,
    swept_points,
)
from windtunnel.sweeping.context import command_of, describe, own_settings, report_context
from windtunnel.sweeping.plan import SweepPlan, is_fixed, plan_sweep
from windtunnel.sweeping.running import How, Tell, prepared, run_points
from windtunnel.workers import Done

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
Progress = Callable[[int, int], None]


def sweep(
    scenario: Any = None,
    vary: Mapping[str, Any] | None = None,
    *,
    zip: bool = False,  # noqa: A002 -- the flag's name
    samples: int | None = None,
    sampling: str = "lhs",
    reps: int | None = None,
    seed: int | None = None,
    slo: str | Iterable[str] | None = None,
    goodput: str | Iterable[str] | None = None,
    metrics: Iterable[str] = (),
    best_by: str | None = None,
    baseline: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **overrides: Any,
) -> Sweep:
    """Simulate a scenario at many settings, several times each, and say what they do and which are best.

    ``vary`` maps settings to their values: a list, or text as ``--vary`` takes it (``"0.80:0.98:0.02"``, ``"2k,4k"``,
    ``"log:1:64:7"``, ``"random:0.8:0.98"``).  Lists make a grid, or go side by side with ``zip``; what is random is
    drawn in ``samples`` points, by Latin hypercube ("lhs"), "sobol" or "random".

    Each point is run with ``reps`` seeds from ``seed`` on, the same at all points, so that differences are those of
    the settings and not of the requests drawn: 5, or 1 where a trace is replayed and nothing is drawn.  ``slo`` and
    ``goodput`` replace the scenario's objectives; the best point is the one that keeps them in all replications and
    has most of ``best_by`` (goodput where limits are set, else output throughput; per GPU where points differ in
    GPUs).  ``baseline`` names the point that differences are counted from, by its settings.

    ``jobs`` processes share the work (all CPUs if None), or a Ray cluster; the result is the same.  In ``folder`` each
    run is kept as soon as it is finished, and ``resume`` goes on from there; so do other sweeps, whose runs may be the
    same.  ``overrides`` hold for all points.

    A point that vLLM would not start stays in the table, with the reason.  Raises ValueError for specifications that
    cannot be read, ScenarioError, TraceError or UnsupportedModel as ``simulate`` does, and OutputError for a folder.

    >>> found = sweep("chat-8b-h100", {"gpu_memory_utilization": "0.80:0.98:0.02"})  # doctest: +SKIP
    >>> found.points[["gpu_memory_utilization", "p99_ttft_ms", "oom_margin_gib"]]  # doctest: +SKIP
    """
    common = with_objectives(overrides, slo, goodput)
    plan = plan_sweep(
        scenario,
        vary or {},
        is_zipped=zip,
        samples=samples,
        sampling=sampling,
        reps=reps,
        seed=seed,
        metrics=metrics,
        best_by=best_by,
        baseline=baseline,
        overrides=common,
    )
    tell = None if progress is None else counter(progress, plan.num_runs)
    with prepared(jobs, ray=ray, folder=None if folder is None else Path(folder), resume=resume, tell=tell) as how:
        found = execute_plan(plan, how)
        if folder is not None:
            found.save(folder)
    return found


def with_objectives(
    overrides: Mapping[str, Any], slo: str | Iterable[str] | None, goodput: str | Iterable[str] | None
) -> dict[str, Any]:
    """Overrides together with objectives that are given beside them."""
    made = dict(overrides)
    for key, given in (("objectives", slo), ("goodput", goodput)):
        if given is not None:
            made[key] = [given] if isinstance(given, str) else list(given)
    return made


def counter(progress: Progress, total: int) -> Tell:
    """What tells a callback how many runs are through."""
    done = 0

    def tell(one: Done) -> None:
        nonlocal done
        del one
        done += 1
        progress(done, total)

    return tell


def execute_plan(plan: SweepPlan, how: How) -> Sweep:
    """Run what was planned, and look at it."""
    runs = run_points(plan.points, plan.seeds, how)
    points = swept_points(plan.points, runs)
    described = describe((plan.base, *_loaded_of_feasible(plan, points)))
    own = own_settings(described)
    objectives = tuple(plan.points[0].loaded.scenario.slo.objectives)
    by = plan.best_by or default_best_by(points)
    swept = Swept(
        context=report_context(
            plan.base.scenario.name,
            described,
            [run for own_runs in runs for run in own_runs],
            [axis.key for axis in plan.axes],
            plan.seeds,
            plan.notes,
        ),
        description=plan.base.scenario.description,
        axes=swept_axes(plan.axes, plan.points),
        points=points,
        seeds=plan.seeds,
        metrics=tuple(dict.fromkeys((*plan.metrics, *([by] if any(point.values(by) for point in points) else ())))),
        trade=plan.trade,
        objectives=objectives,
        best_by=by,
        baseline=baseline_point(plan, points, own),
        best=best_point(points, by, objectives),
        knees=(),
        is_deterministic=is_deterministic(points),
        is_fixed=is_fixed(plan.points[0].loaded.scenario),
        is_zipped=plan.is_zipped,
        command=command_of(plan.scenario, plan.vary, _options(plan), plan.common),
        overrides=plan.common,
    )
    return Sweep(replace(swept, knees=tuple(knees(swept))))


def _loaded_of_feasible(plan: SweepPlan, points: tuple[SweptPoint, ...]) -> list[Any]:
    """The scenario of the first point that ran."""
    return [planned.loaded for planned, point in zip(plan.points, points, strict=True) if not point.infeasible][:1]


def _options(plan: SweepPlan) -> dict[str, Any]:
    return {
        "zip": plan.is_zipped,
        "samples": plan.samples,
        "sampling": plan.sampling if plan.samples is not None and plan.sampling != "lhs" else None,
        "reps": len(plan.seeds),
        "seed": plan.seeds[0] or None,
        "best": plan.best_by,
    }


class Sweep:
    """What a sweep found: tables, the best point and the knees, and reports made from them."""

    def __init__(self, swept: Swept) -> None:
        self.swept = swept
        """All of it, as reports read it."""

    @property
    def best(self) -> Best | None:
        """The best point under the objectives; None if no point keeps them."""
        return self.swept.best

    @property
    def knees(self) -> tuple[Knee, ...]:
        """Where curves along the axis have a knee that is distinct beyond noise."""
        return self.swept.knees

    @property
    def is_infeasible(self) -> bool:
        """Whether no point can run at all."""
        return not self.swept.feasible

    @property
    def slo_passed(self) -> bool | None:
        """Whether some point keeps all objectives in all replications; None if none were set."""
        return any(point.holds for point in self.swept.points) if self.swept.objectives else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What must be known before the numbers are believed."""
        return self.swept.context.warnings

    @property
    def runs(self) -> pd.DataFrame:
        """One row a run: its settings, replication and seed, and all numbers of its summary."""
        import pandas as pd

        from windtunnel.reports.sweep_table import run_rows

        return pd.DataFrame(list(run_rows(self.swept.points, self.swept.seeds)))

    @property
    def points(self) -> pd.DataFrame:
        """One row a point: means, intervals and paired differences to the baseline of the numbers shown."""
        import pandas as pd

        from windtunnel.reports.sweep_table import point_rows

        return pd.DataFrame(list(point_rows(self.swept)))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, in a fixed order: what ``windtunnel sweep --json`` prints."""
        from windtunnel.reports.sweep_answer import answer
        from windtunnel.reports.sweep_table import point_rows, run_rows

        swept, said, shared = self.swept, answer(self.swept), self.swept.context
        return {
            "schema_version": SCHEMA_VERSION,
            "windtunnel_version": shared.version,
            "scenario": {"name": shared.title, "description": swept.description},
            "command": swept.command or None,
            "axes": [
                {"key": axis.key, "asked": axis.text, "values": list(axis.words), "is_drawn": axis.is_drawn}
                for axis in swept.axes
            ],
            "overrides": dict(swept.overrides),
            "seeds": list(swept.seeds),
            "objectives": list(swept.objectives),
            "answer": {"headline": said.headline, "sentences": list(said.sentences)},
            "best": _best(swept.best),
            "baseline": None if swept.baseline is None else swept.baseline.number,
            "knees": [_knee(knee) for knee in swept.knees],
            "cost_model": {
                "name": shared.cost_model,
                "calibrated": shared.calibrated,
                "evidence": shared.evidence,
                "says": [*shared.calibrated_by],
            },
            "warnings": list(shared.warnings),
            "metrics": swept.shown(),
            "points": list(point_rows(swept)),
            "runs": list(run_rows(swept.points, swept.seeds)),
        }

    def text(self) -> str:
        """The answer and a table of one row a point."""
        from windtunnel.reports.sweep_text import render_text

        return render_text(self.swept)

    def markdown(self) -> str:
        """The same as Markdown, for issues and pull requests."""
        from windtunnel.reports.sweep_text import render_markdown

        return render_markdown(self.swept)

    def report(self, path: str | Path) -> None:
        """Write one HTML file with the figures; it needs nothing else and works offline.

        Raises OutputError if it cannot be written.
        """
        from windtunnel.reports.sweep_html import write_html

        with writing(Path(path)):
            write_html(path, self.swept)

    def to_csv(self, path: str | Path) -> None:
        """Write one row a run with all of its numbers.  Raises OutputError if it cannot be written."""
        self._write_runs(path)

    def to_parquet(self, path: str | Path) -> None:
        """The same as Parquet; the name must end in .parquet or .pq.  Raises ValueError for another one."""
        if Path(path).suffix.lower() not in (".parquet", ".pq"):
            raise ValueError(f"{path} must end in .parquet or .pq")
        self._write_runs(path)

    def _write_runs(self, path: str | Path) -> None:
        from windtunnel.reports.sweep_table import run_rows, write_table

        with writing(Path(path)):
            write_table(path, list(run_rows(self.swept.points, self.swept.seeds)))

    def save(self, folder: str | Path) -> None:
        """Write everything into a folder: sweep.json, runs and points as tables, report.html and report.md.

        The same runs give the same bytes, however often the sweep was stopped and resumed.  Raises OutputError.
        """
        from windtunnel.reports.files import atomic_writer
        from windtunnel.reports.sweep_table import point_rows, write_table

        place = Path(folder)
        self.to_csv(place / "runs.csv")
        self.to_parquet(place / "runs.parquet")
        with writing(place / "points.csv"):
            write_table(place / "points.csv", list(point_rows(self.swept)))
        self.report(place / "report.html")
        for name, text in (("report.md", self.markdown()), ("sweep.json", f"{to_json(self.to_dict())}\n")):
            with writing(place / name), atomic_writer(place / name) as file:
                file.write(text)

    def __repr__(self) -> str:
        varied = ", ".join(axis.key for axis in self.swept.axes)
        return f"<Sweep of {self.swept.context.title}: {len(self.swept.points):,} points over {varied}>"


def _best(best: Best | None) -> dict[str, Any] | None:
    if best is None:
        return None
    return {
        "point": best.point.number,
        "settings": dict(best.point.settings),
        "by": best.by,
        "value": best.point.mean(best.by),
        "is_under_slo": best.is_under_slo,
        "level_with": [point.number for point in best.level],
        "tie_break": best.tie_break or None,
    }


def _knee(knee: Knee) -> dict[str, Any]:
    return {
        "metric": knee.key,
        "curve": knee.curve or None,
        "point": knee.point.number,
        "settings": dict(knee.point.settings),
        "distance": knee.distance,
        "first_in_a_replication": knee.low,
        "last_in_a_replication": knee.high,
        "is_tested": knee.is_tested,
    }

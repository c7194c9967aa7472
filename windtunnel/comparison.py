"""Several variants on one workload, side by side: ``compare`` runs them, a ``Comparison`` holds what came out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.comparison_plan import (
    ComparisonPlan,
    PlannedRun,
    baseline_of,
    check_metrics,
    default_metrics,
    number_keys,
    plan_comparison,
    refusal,
)
from windtunnel.rundir import RESOLVED_FILE, SUMMARY_FILE, RunUnreadable, writing
from windtunnel.sim.metrics.comparison import (
    CONFIDENCE,
    DERIVED,
    ComparedRun,
    ComparedRuns,
    ComparisonAxis,
    Crossing,
    Difference,
    Relation,
    length_axis,
    metric,
    numeric_axis,
    replicated,
    with_capacity,
)
from windtunnel.trials.obstacle import Obstacle, resolved_or_obstacle
from windtunnel.workers import Workers

if TYPE_CHECKING:
    import pandas as pd

    from windtunnel.comparison_context import Told
    from windtunnel.reports.comparison_answer import ComparisonContext
    from windtunnel.scenarios.schema import Scenario

Progress = Callable[[int, int], None]
RunDone = Callable[[PlannedRun, ComparedRun], None]

LENGTH_WORDS = {"output": "output", "input": "prompt"}
"""Keys of the workload whose values may be distributions, and what they are lengths of."""


def compare(
    scenario: str | Path | Mapping[str, Any] | Scenario | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    axis: str | None = None,
    values: Iterable[Any] = (),
    metrics: Iterable[str] = (),
    baseline: str | None = None,
    jobs: int = 1,
    reps: int = 1,
    seed: int | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> Comparison:
    """Run variants of a scenario on the same workload, at each value of an axis if there is one, and compare them.

    ``variants`` names them, each with overrides as ``simulate`` takes them; ``axis`` is the key of a setting that is
    set to each of ``values`` in turn ("" for none); ``metrics`` are the keys of the JSON summary that the answer, the
    curves and their crossings are about.  What is not given comes from the scenario's [compare], but its axis only
    together with its variants, or by name.  ``overrides`` hold for all runs.  Changes are counted from ``baseline``,
    the first variant if it is not given.  ``jobs`` processes share the work; the result is the same for any number.
    ``reps`` runs each with so many seeds, the same for all, from ``seed`` on: numbers are then means, differences have
    intervals from pairs of the same seed, and those that may be chance count as none.
    ``progress(done, total)`` is called after every run.

    A variant that vLLM would not start, or whose requests do not fit, stays in the comparison, with the reason.  Raises
    ScenarioError, TraceError or UnsupportedModel as ``simulate`` does, ScenarioError also if there is nothing to
    compare, or nothing that vLLM would start.

    >>> compared = compare("chat-8b-h100", {"64": {"max_num_seqs": 64}, "256": {}})  # doctest: +SKIP
    >>> compared.table["output_throughput"]  # doctest: +SKIP
    """
    from windtunnel.scenarios.load import Override

    given = {"seed": seed, **overrides}
    common = {key: Override(value, f"{key}=") for key, value in given.items() if value is not None}
    plan = plan_comparison(
        scenario, variants, axis=axis, values=values, metrics=metrics, baseline=baseline, overrides=common, reps=reps
    )
    done = 0

    def tell(planned: PlannedRun, run: ComparedRun) -> None:
        nonlocal done
        del planned, run
        done += 1
        if progress is not None:
            progress(done, len(plan.runs))

    return execute_plan(plan, jobs=jobs, tell=tell)


# --- running it


def execute_plan(plan: ComparisonPlan, *, jobs: int = 1, tell: RunDone | None = None) -> Comparison:
    """Run what was planned, in so many processes; ``tell`` is called for each run in order."""
    results: list[list[_Result]] = []
    with Workers(jobs) as workers:
        plan.check()
        each = [plan.with_seeds(planned) for planned in plan.runs]
        done = workers.call("windtunnel.comparison:run_planned", [one for group in each for one in group])
        for planned, group in zip(plan.runs, each, strict=True):
            results.append([next(done) for _ in group])
            if tell is not None:
                tell(planned, _compared(planned.variant, planned.place, results[-1]))
    return _comparison(plan, results)


@dataclass(frozen=True, slots=True)
class _Result:
    """What is kept of a run: all but its records."""

    summary: dict[str, Any] | None
    described: dict[str, Any]
    """As ``Resolved.describe``; empty if the deployment is infeasible."""
    lengths: dict[str, tuple[float, float]]
    """Mean and standard deviation of the tokens of its requests, by the workload's keys."""
    infeasible: str = ""
    is_contradiction: bool = False


def run_planned(planned: PlannedRun) -> _Result:
    """One run of a comparison, in whatever process."""
    from windtunnel.api import execute

    resolved = resolved_or_obstacle(planned.loaded)
    if isinstance(resolved, Obstacle):
        return _Result(None, {}, {}, *resolved)
    run = execute(resolved)
    columns = {"output": resolved.workload.num_output_tokens, "input": resolved.workload.num_prompt_tokens}
    lengths = {key: (float(tokens.mean()), float(tokens.std())) for key, tokens in columns.items() if len(tokens)}
    return _Result(run.summary, run.resolved, lengths)


def _compared(variant: str, place: int, results: Sequence[_Result]) -> ComparedRun:
    """A run, or the mean of its replications; not possible if one of them is not."""
    refused = next((result for result in results if result.summary is None), None)
    if refused is not None:
        return ComparedRun(variant, place, None, refused.infeasible, refused.is_contradiction)
    summaries = [result.summary for result in results if result.summary is not None]
    return ComparedRun(variant, place, summaries[0]) if len(summaries) == 1 else replicated(variant, place, summaries)


def _comparison(plan: ComparisonPlan, replications: Sequence[Sequence[_Result]]) -> Comparison:
    from windtunnel.comparison_context import Told

    runs = tuple(
        _compared(planned.variant, planned.place, group) for planned, group in zip(plan.runs, replications, strict=True)
    )
    results = [group[0] for group in replications]
    compared = ComparedRuns(tuple(plan.variants), _made_axis(plan, results), runs, plan.metrics, plan.baseline)
    compared = replace(compared, metrics=with_capacity(compared))
    described = [result.described for result in results]
    told = Told(plan.scenario.name, plan.scenario.description, plan.scenario.teaches)
    return Comparison(compared, described, told, plan.variants, seeds=plan.seeds)


def _made_axis(plan: ComparisonPlan, results: Sequence[_Result]) -> ComparisonAxis | None:
    """Numeric where the setting is a number, or where lengths of requests can be measured."""
    if plan.axis is None:
        return None
    values = [plan.value_words(place) for place in range(len(plan.values))]
    step = len(plan.variants)
    numbers = [_setting(planned.loaded.scenario, plan.axis) for planned in plan.runs[::step]]
    made = numeric_axis(plan.axis, values, numbers)
    if made.positions is not None or plan.axis not in LENGTH_WORDS:
        return made
    lengths = [
        next((result.lengths[plan.axis] for result in results[start : start + step] if result.lengths), None)
        for start in range(0, len(results), step)
    ]
    return length_axis(plan.axis, values, LENGTH_WORDS[plan.axis], lengths)


def _setting(scenario: Scenario, key: str) -> Any:
    from windtunnel.scenarios.load import override_path

    value: Any = scenario
    for part in override_path(key):
        value = getattr(value, part, None)
    return value


# --- saved runs


def compare_runs(
    folders: Sequence[str | Path], *, metrics: Iterable[str] = (), baseline: str | None = None
) -> Comparison:
    """Compare runs that ``Run.save`` or ``windtunnel simulate -o`` wrote; each is called by its folder.

    Runs that differ in nothing but their seed are replications of one variant, if there are several variants of which
    all have two seeds in common.

    Raises RunUnreadable for a folder that holds no run, ScenarioError for unknown metrics or names and for fewer than
    two runs.
    """
    if len(folders) < 2:
        raise refusal(
            f"one run is no comparison: name two or more folders, got {', '.join(map(str, folders)) or 'none'}"
        )
    real = [Path(folder).resolve() for folder in folders]
    for folder, place in zip(folders, real, strict=True):
        if real.count(place) > 1:
            raise refusal(f"{folder} names the same run twice: a run cannot be compared with itself")
    saved = {name: _read_saved(Path(folder)) for name, folder in zip(_names(folders), folders, strict=True)}
    found = dict.fromkeys(key for result in saved.values() for key in number_keys(result.summary or {}))
    known = [*found, *DERIVED]
    wanted = tuple(dict.fromkeys(metrics))
    check_metrics(wanted, known)
    groups, seeds = _replications({name: (result,) for name, result in saved.items()})
    runs = tuple(_compared(name, 0, results) for name, results in groups.items())
    first = baseline_of(baseline, tuple(groups))
    compared = ComparedRuns(tuple(groups), None, runs, wanted or default_metrics(known), first)
    compared = replace(compared, metrics=with_capacity(compared))
    described = [results[0].described for results in groups.values()]
    from windtunnel.comparison_context import Told

    scenarios = dict.fromkeys(each["scenario"]["name"] for each in described)
    told = Told(", ".join(scenarios), "", "")
    return Comparison(compared, described, told, {name: {} for name in groups}, are_saved=True, seeds=seeds)


_Groups = Mapping[str, tuple[_Result, ...]]


def _replications(single: _Groups) -> tuple[_Groups, tuple[int, ...]]:
    """The runs by what they have in common but the seed, with the seeds of all; as they were if that makes no pairs."""
    alike: dict[str, dict[int, tuple[str, _Result]]] = {}
    for name, (result,) in single.items():
        of_setting = alike.setdefault(_settings_but_seed(result), {})
        if result.described["seed"] in of_setting:
            return single, ()
        of_setting[result.described["seed"]] = (name, result)
    seeds = sorted(set.intersection(*(set(each) for each in alike.values())))
    if len(alike) < 2 or len(seeds) < 2:
        return single, ()
    names = [_common_name([name for name, _ in each.values()]) for each in alike.values()]
    if len(set(names)) < len(names):
        names = [next(iter(each.values()))[0] for each in alike.values()]
    groups = {name: tuple(each[seed][1] for seed in seeds) for name, each in zip(names, alike.values(), strict=True)}
    return groups, tuple(seeds)


def _settings_but_seed(result: _Result) -> str:
    settings = [
        (entry["section"], entry["key"], entry["value"])
        for entry in result.described["settings"]
        if (entry["section"], entry["key"]) != ("scenario", "seed")
    ]
    return json.dumps([settings, result.described["windtunnel_version"]], sort_keys=True)


def _common_name(names: Sequence[str]) -> str:
    """What the names begin with, without the beginning of a number and what joins it to the rest."""
    shared = re.sub(r"\d*$", "", _shared_beginning(names))
    return re.sub(r"[-_. ]+(seed|rep|[sr])?[-_. ]*$", "", shared) or names[0]


def _shared_beginning(names: Sequence[str]) -> str:
    letters = takewhile(lambda each: len(set(each)) == 1, zip(*names, strict=False))
    return "".join(each[0] for each in letters)


def is_run(folder: str | Path) -> bool:
    """Whether a saved run lies there."""
    return (Path(folder) / RESOLVED_FILE).is_file()


def _names(folders: Sequence[str | Path]) -> list[str]:
    """The folders' own names; whole paths where two are called the same, numbered where even these are."""
    short = [Path(folder).resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise refusal(f"the same run twice: {next(name for name in names if names.count(name) > 1)}")
    return names


def _read_saved(folder: Path) -> _Result:
    """Summary and settings of a run; its tables are left where they are.  Raises RunUnreadable."""
    if not is_run(folder):
        raise RunUnreadable(
            f"no run in {folder}: it has no {RESOLVED_FILE}; write one with windtunnel simulate -o {folder}"
        )
    try:
        described = json.loads((folder / RESOLVED_FILE).read_text("utf-8"))
        summary = json.loads((folder / SUMMARY_FILE).read_text("utf-8"))
        _ = described["scenario"]["name"], described["settings"], described["metadata"], summary["stability"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunUnreadable(f"the run in {folder} cannot be read ({error}): simulate it again") from error
    return _Result(summary, described, {})


# --- what came out


class Comparison:
    """Summaries of several runs side by side: a table, the crossings of their curves, and reports made from them."""

    def __init__(
        self,
        runs: ComparedRuns,
        described: Sequence[Mapping[str, Any]],
        told: Told,
        overrides: Mapping[str, Mapping[str, Any]],
        *,
        are_saved: bool = False,
        seeds: Sequence[int] = (),
    ) -> None:
        self.runs = runs
        """The runs with their summaries, by place on the axis and there by variant."""
        self._described = described
        self._told = told
        self._overrides = overrides
        self._are_saved = are_saved
        self.seeds = tuple(seeds)
        """Of the replications behind each run; empty for one."""

    @cached_property
    def relations(self) -> tuple[Relation, ...]:
        """What holds between each two variants in each metric: who is ahead, by how much, and where they cross."""
        return tuple(self.runs.relations())

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """Where the curves of two variants cross along a numeric axis."""
        return tuple(crossing for relation in self.relations for crossing in relation.crossings)

    @property
    def is_infeasible(self) -> bool:
        """Whether no variant can run at all."""
        return all(run.summary is None for run in self.runs.runs)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a run: variant, value and position on the axis, and all that its summary has in single values.

        Of several replications each is a row, with its number and its seed.
        """
        import pandas as pd

        return pd.DataFrame(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``table`` as dicts, all with the same keys."""
        each = [row for run in self.runs.runs for row in self._single(run)]
        flat = [{**_flat(run.summary or {}), **_derived(run)} for run, _ in each]
        keys = dict.fromkeys(key for of_run in flat for key in of_run)
        return [
            {**self._place(run), **seed, **{key: of_run.get(key) for key in keys}}
            for (run, seed), of_run in zip(each, flat, strict=True)
        ]

    def _single(self, run: ComparedRun) -> list[tuple[ComparedRun, dict[str, int | None]]]:
        """A run, or its replications one by one."""
        if not self.seeds:
            return [(run, {})]
        if not run.replications:
            return [(run, {"replication": None, "seed": None})]
        return [
            (ComparedRun(run.variant, run.place, summary), {"replication": number, "seed": seed})
            for number, (seed, summary) in enumerate(zip(self.seeds, run.replications, strict=True))
        ]

    def _place(self, run: ComparedRun) -> dict[str, Any]:
        axis = self.runs.axis
        row: dict[str, Any] = {"variant": run.variant}
        if axis is not None:
            position = None if axis.positions is None else axis.positions[run.place]
            row |= {"axis": axis.key, "value": axis.values[run.place], "position": position}
        return {**row, "verdict": run.verdict, "infeasible": run.infeasible or None}

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, in a fixed order."""
        from windtunnel.reports.comparison_answer import answer

        context, said = self.context, answer(self.runs, self.relations)
        return {
            "scenario": {"name": self._told.name, "description": self._told.description, "teaches": self._told.teaches},
            "windtunnel_version": context.common.version,
            "seed": context.common.seed,
            "cost_model": context.common.cost_model,
            "cost_model_calibrated": context.common.calibrated,
            "cost_model_evidence": context.common.evidence,
            "answer": [said.headline, *said.sentences],
            "variants": [
                {"name": name, "baseline": name == self.runs.baseline, "overrides": dict(self._overrides[name])}
                for name in self.runs.variants
            ],
            "axis": None if self.runs.axis is None else asdict(self.runs.axis),
            **({"replications": {"seeds": list(self.seeds), "confidence": CONFIDENCE}} if self.seeds else {}),
            "metrics": [{**asdict(metric(key)), "label": metric(key).label} for key in self.runs.metrics],
            "runs": [self._run_dict(run) for run in self.runs.runs],
            "relations": [asdict(relation) for relation in self.relations],
            "differing_settings": [asdict(setting) for setting in context.differing],
            "common_settings": [setting._asdict() for setting in context.common.resolved],
            "warnings": list(context.common.warnings),
        }

    def _run_dict(self, run: ComparedRun) -> dict[str, Any]:
        changes = {key: self.runs.change(run, key) for key in self.runs.metrics}
        chance = self._chance(run) if self.seeds else {}
        return {**self._place(run), "changes": changes, **chance, "derived": _derived(run), "summary": run.summary}

    def _chance(self, run: ComparedRun) -> dict[str, Any]:
        """Of every number the interval of its mean, and of its difference from the baseline's."""
        keys = [*number_keys(run.summary or {}), *DERIVED]
        intervals = {key: found.to_dict() for key in keys if (found := run.interval(key)) is not None}
        differences = {key: self.runs.difference(run, key) for key in keys}
        told = {key: _difference_dict(found) for key, found in differences.items() if found is not None}
        return {"intervals": intervals, "differences": told}

    @cached_property
    def context(self) -> ComparisonContext:
        """What reports say besides the numbers: what was simulated, which settings are common and which differ."""
        from windtunnel.comparison_context import comparison_context

        return comparison_context(self._told, self.runs, self._described, self._overrides, self._are_saved, self.seeds)

    def text(self, *, with_purpose: bool = False) -> str:
        """The answer, and the runs as a table; before them, if asked for, what the scenario teaches."""
        from windtunnel.reports.comparison_text import render_text

        return render_text(self.runs, self.relations, self.context, with_purpose=with_purpose)

    def markdown(self) -> str:
        """The same as Markdown, for issues and pull requests."""
        from windtunnel.reports.comparison_text import render_markdown

        return render_markdown(self.runs, self.relations, self.context)

    def report(self, path: str | Path) -> None:
        """Write one HTML file with the curves and the table; it needs nothing else and works offline.

        Folders that are missing are made.  Raises OutputError if it cannot be written.
        """
        from windtunnel.reports.comparison_html import write_html

        with writing(Path(path)):
            write_html(path, self.runs, self.relations, self.context)

    def to_csv(self, path: str | Path) -> None:
        """Write ``table`` as CSV.  Raises OutputError if it cannot be written."""
        import csv

        from windtunnel.reports.files import atomic_writer

        rows = self.rows()
        with writing(Path(path)), atomic_writer(path) as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def __repr__(self) -> str:
        axis = "" if self.runs.axis is None else f" at {len(self.runs.axis.values)} values of {self.runs.axis.key}"
        return f"<Comparison {self._told.name}: {', '.join(self.runs.variants)}{axis}>"


def _difference_dict(found: Difference) -> dict[str, Any]:
    return {
        **found.absolute.to_dict(),
        "share": None if found.share is None else found.share.to_dict(),
        "is_noise": found.is_noise,
    }


def _derived(run: ComparedRun) -> dict[str, float | None]:
    """What is made of the numbers of a summary."""
    return {key: run.number(key) for key in DERIVED}


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if not isinstance(value, dict | list)}

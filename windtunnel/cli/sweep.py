"""``windtunnel sweep``: what settings do, which are best, and which matter most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import usage_errors
from windtunnel.cli.output import emit, note, warn
from windtunnel.cli.panels import flag
from windtunnel.cli.results import (
    check_files,
    check_is_parquet,
    check_one_form,
    exit_as,
    print_result,
    tell_written,
)
from windtunnel.cli.settings import read_overrides, read_setting, read_specs, words_in

if TYPE_CHECKING:
    from windtunnel.sweeping.plan import SweepPlan
    from windtunnel.sweeping.running import How
    from windtunnel.sweeping.sensitivity import Sensitivity, SensitivityPlan
    from windtunnel.sweeping.sweep import Sweep
    from windtunnel.workers import Progress

PlanT = TypeVar("PlanT", "SweepPlan", "SensitivityPlan")
FoundT = TypeVar("FoundT", "Sweep", "Sensitivity")
_WHAT, _JUDGE, _RUN, _OUTPUT = "What is varied", "What is looked at", "Run", "Output"


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What is written, and how the result is printed."""

    as_json: bool
    markdown: bool
    html: Path | None
    csv: Path | None
    parquet: Path | None
    folder: Path | None
    quiet: bool

    @property
    def files(self) -> dict[str, Path | None]:
        """By their flags, those that are not asked for as None."""
        return {"--html": self.html, "--csv": self.csv, "--parquet": self.parquet}


def sweep(
    scenario: Annotated[str | None, options.scenario_argument()] = None,
    vary: Annotated[
        list[str] | None,
        flag(
            _WHAT,
            "--vary",
            metavar="KEY=SPEC",
            help="A setting and its values: FIRST:LAST:STEP, A,B,C, log:FIRST:LAST:HOW_MANY (or lin:), random:LOW:HIGH "
            "(or lograndom:), choice:A,B,C; repeat it.",
        ),
    ] = None,
    zip_: Annotated[
        bool, flag(_WHAT, "--zip", help="Lists side by side, first with first, instead of every combination.")
    ] = False,
    samples: Annotated[
        int | None,
        flag(
            _WHAT,
            "--samples",
            metavar="N",
            min=1,
            help="Points drawn from random ranges, 32 by default; with --sensitivity: base points (sobol, 64) or "
            "trajectories (morris, 16).",
        ),
    ] = None,
    sampling: Annotated[
        str, flag(_WHAT, "--sampling", metavar="lhs|sobol|random", help="How they are drawn: lhs if not given.")
    ] = "lhs",
    settings: Annotated[
        list[str] | None,
        flag(_WHAT, "--set", metavar="KEY=VALUE", help="A setting for all points; repeat it."),
    ] = None,
    sensitivity: Annotated[
        str | None,
        flag(
            _JUDGE,
            "--sensitivity",
            metavar="oat|sobol|morris",
            help="Say which setting matters most: one at a time, by Sobol indices or by Morris' elementary effects.",
        ),
    ] = None,
    slo: Annotated[list[str] | None, options.slo(_JUDGE)] = None,
    goodput: Annotated[list[str] | None, options.goodput(_JUDGE)] = None,
    metric: Annotated[
        list[str] | None,
        flag(_JUDGE, "--metric", metavar="KEY", help="What tables and figures show: a key of --json; repeat it."),
    ] = None,
    best: Annotated[
        str | None,
        flag(
            _JUDGE,
            "--best",
            metavar="KEY",
            help="What the best point has most (or least) of: goodput, else output throughput, if not given.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        flag(_JUDGE, "--baseline", metavar="KEY=VALUE;...", help="The point that changes are counted from."),
    ] = None,
    reps: Annotated[
        int | None,
        flag(
            _RUN,
            "--reps",
            metavar="N",
            min=1,
            help="Runs of each point, the same seeds at all: 5, or 1 where nothing is drawn (or --sensitivity).",
        ),
    ] = None,
    seed: Annotated[int | None, options.first_seed(_RUN)] = None,
    jobs: Annotated[int | None, options.jobs(_RUN)] = None,
    ray: Annotated[str | None, options.ray(_RUN)] = None,
    dry_run: Annotated[bool, flag(_RUN, "--dry-run", help="List the points; run nothing.")] = False,
    output: Annotated[Path | None, options.kept_in(_OUTPUT)] = None,
    resume: Annotated[
        bool, flag(_OUTPUT, "--resume", help="Go on with the sweep in -o: what is finished is not run again.")
    ] = False,
    as_json: Annotated[bool, options.json_for_table(_OUTPUT)] = False,
    markdown: Annotated[bool, options.markdown_for_table(_OUTPUT)] = False,
    html: Annotated[Path | None, options.html_file(_OUTPUT)] = None,
    csv: Annotated[Path | None, options.csv_of_runs(_OUTPUT)] = None,
    parquet: Annotated[Path | None, options.parquet(_OUTPUT)] = None,
    quiet: Annotated[bool, options.quiet(_OUTPUT)] = False,
) -> None:
    """What if: simulate a scenario at many settings, several times each, with the same requests at all of them.

    Shows what the settings do, where that stops (the knee) and the best point under the objectives; with --sensitivity
    which setting matters most.  KEY is any key of a scenario file (windtunnel schema --markdown) or its flag's name.
    Points that vLLM would not start stay in the table.  The exit code is 4 if no point starts, 99 if none keeps the
    objectives.

    \b
    Examples:
      windtunnel sweep memory-dial --vary gpu_memory_utilization=0.80:0.98:0.02 --html sweep.html
      windtunnel sweep token-budget --vary max_num_batched_tokens=2k,4k,8k,16k
      windtunnel sweep chat-8b-h100 --vary max_num_seqs=log:8:256:6 --vary request_rate=10,20,30 -o night --resume
      windtunnel sweep chat-8b-h100 --vary gpu_memory_utilization=0.7:0.95 --vary max_num_seqs=32:512
                       --vary max_num_batched_tokens=2k:16k --sensitivity morris
    """
    outputs = _Outputs(as_json, markdown, html, csv, parquet, output, quiet)
    varied = read_specs(vary or (), "--vary", said="varied")
    overrides = _overrides(settings or (), slo, goodput, seed)
    _check_outputs(outputs, (scenario, *words_in(varied), *words_in(overrides)), resume=resume)
    asked: dict[str, Any] = {
        "scenario": scenario,
        "vary": varied,
        "samples": samples,
        "reps": reps,
        "seed": seed,
        "metrics": metric or (),
        "overrides": overrides,
    }
    doing = _Doing(jobs, ray, outputs, resume)
    with usage_errors():
        if sensitivity is not None:
            drawn = "" if sampling == "lhs" else sampling
            _refuse_with_sensitivity(zip=zip_, sampling=drawn, best=best, baseline=baseline, dry_run=dry_run)
            _finish(_sensitivity(sensitivity, asked, doing), outputs)
            return
        plan = _plan(asked, is_zipped=zip_, sampling=sampling, best=best, baseline=baseline)
        if dry_run:
            emit(_plan_text(plan, as_json=as_json))
            return
        _finish(_sweep(plan, doing), outputs)


# --- what was asked


def _overrides(
    settings: Iterable[str], slo: list[str] | None, goodput: list[str] | None, seed: int | None
) -> dict[str, Any]:
    found = read_overrides(settings, {"--slo": ("objectives", slo), "--goodput": ("goodput", goodput)})
    if seed is not None and "seed" in found:
        raise typer.BadParameter("--seed and --set seed say the same: drop one of them")
    return found


def _plan(
    asked: dict[str, Any], *, is_zipped: bool, sampling: str, best: str | None, baseline: str | None
) -> SweepPlan:
    from windtunnel.sweeping.plan import plan_sweep

    settings = () if baseline is None else baseline.split(";")
    return plan_sweep(
        **asked,
        is_zipped=is_zipped,
        sampling=sampling,
        best_by=best,
        baseline=dict(read_setting(text, "--baseline") for text in settings) or None,
    )


def _refuse_with_sensitivity(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise typer.BadParameter(
                "has no meaning with --sensitivity: leave one of them out", param_hint=f"--{name.replace('_', '-')}"
            )


def _check_outputs(outputs: _Outputs, inputs: Sequence[str | None], *, resume: bool) -> None:
    check_one_form(as_json=outputs.as_json, markdown=outputs.markdown)
    if resume and outputs.folder is None:
        raise typer.BadParameter("which sweep? Name its folder with -o DIR", param_hint="--resume")
    check_files(outputs.files, inputs)
    check_is_parquet(outputs.parquet)
    if outputs.folder is not None:
        from windtunnel.sweeping.running import check_folder, check_is_no_part

        check_folder(outputs.folder, resume=resume)
        for path in outputs.files.values():
            if path is not None:
                check_is_no_part(outputs.folder, path)


# --- doing it


@dataclass(frozen=True, slots=True)
class _Doing:
    """Who does the runs, and where they are kept."""

    jobs: int | None
    ray: str | None
    outputs: _Outputs
    resume: bool

    @contextmanager
    def prepared(self, num_runs: int) -> Iterator[tuple[How, Progress]]:
        """What runs are done by, and the line that tells how many are through."""
        from windtunnel.sweeping.running import prepared
        from windtunnel.workers import Progress

        with (
            Progress(num_runs, label="simulations", quiet=self.outputs.quiet) as progress,
            prepared(self.jobs, ray=self.ray, folder=self.outputs.folder, resume=self.resume, tell=progress) as how,
        ):
            yield how, progress


def _sweep(plan: SweepPlan, doing: _Doing) -> Sweep:
    from windtunnel.sweeping.sweep import execute_plan

    _tell_of_plan((plan.why_reps, *plan.notes), doing.outputs)
    return _carried_out(plan, execute_plan, doing)


def _sensitivity(method: str, asked: dict[str, Any], doing: _Doing) -> Sensitivity:
    from windtunnel.sweeping.sensitivity import execute_sensitivity, plan_sensitivity

    plan = plan_sensitivity(method=method, **asked)
    _tell_of_plan(plan.notes, doing.outputs)
    return _carried_out(plan, execute_sensitivity, doing)


def _carried_out(plan: PlanT, execute: Callable[[PlanT, How], FoundT], doing: _Doing) -> FoundT:
    with doing.prepared(plan.num_runs) as (how, progress):
        with _telling_of_what_is_kept(how, progress, doing):
            found = execute(plan, how)
        progress.close()
        if doing.outputs.folder is not None:
            found.save(doing.outputs.folder)
    return found


# --- telling


def _tell_of_plan(notes: Iterable[str], outputs: _Outputs) -> None:
    if not outputs.quiet:
        for text in filter(None, notes):
            note(text)


@contextmanager
def _telling_of_what_is_kept(how: How, progress: Progress, doing: _Doing) -> Iterator[None]:
    """Say what of a resumed sweep is of no use any more, as whoever resumes does not expect it."""
    store, outputs = how.store, doing.outputs
    if store is None or not doing.resume or outputs.quiet:
        yield
        return
    if store.num_outdated:
        note(f"{store.num_outdated:,} results in {outputs.folder} are of another version of windtunnel: done again")
    if store.num_damaged:
        note(f"{store.num_damaged:,} results in {outputs.folder} are damaged: done again")
    num_kept = len(store)
    yield
    if num_kept and not progress.num_cached:
        progress.close()
        note(
            f"none of the {num_kept:,} results that {outputs.folder} held is of these runs: the scenario, its files or "
            "what is varied is another"
        )


def _plan_text(plan: SweepPlan, *, as_json: bool) -> str:
    from windtunnel.cli.dry_run import table
    from windtunnel.rundir import to_json

    if as_json:
        return to_json(
            {
                "scenario": plan.base.scenario.name,
                "axes": [{"key": axis.key, "asked": axis.text} for axis in plan.axes],
                "seeds": list(plan.seeds),
                "metrics": list(plan.metrics),
                "points": [point.settings for point in plan.points],
                "notes": list(plan.notes),
            }
        )
    rows = [(str(number), *point.words.values()) for number, point in enumerate(plan.points, 1)]
    lines = [
        f"scenario: {plan.base.scenario.name}",
        f"points: {len(plan.points):,}, {len(plan.seeds):,} runs each: {plan.num_runs:,} simulations",
        f"metrics: {', '.join(plan.metrics)}",
        *plan.notes,
        "",
    ]
    return "\n".join([*lines, *table([("point", *(axis.key for axis in plan.axes)), *rows])])


def _finish(found: Sweep | Sensitivity, outputs: _Outputs) -> None:
    """Write and print; raises typer.Exit(4) if nothing starts, (99) if no point keeps the objectives."""
    for path, write in ((outputs.html, found.report), (outputs.csv, found.to_csv), (outputs.parquet, found.to_parquet)):
        if path is not None:
            write(path)
    tell_written((*outputs.files.values(), outputs.folder), quiet=outputs.quiet)
    print_result(found, as_json=outputs.as_json, markdown=outputs.markdown)
    if outputs.as_json:
        for text in found.warnings:
            warn(text)
    exit_as(found)

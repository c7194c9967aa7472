"""``windtunnel sweep``: what settings do, which are best, and which matter most."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli.errors import EXIT_INFEASIBLE, EXIT_INTERNAL, EXIT_SLO_BREACHED, exit_code
from windtunnel.cli.output import emit, note, warn
from windtunnel.cli.panels import flag

if TYPE_CHECKING:
    from windtunnel.sweeping.plan import SweepPlan
    from windtunnel.sweeping.running import How
    from windtunnel.sweeping.sensitivity import Sensitivity
    from windtunnel.sweeping.sweep import Sweep
    from windtunnel.workers import Progress

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


def sweep(
    scenario: Annotated[
        str | None,
        typer.Argument(metavar="SCENARIO", help="A scenario file, or the name of a bundled one.", show_default=False),
    ] = None,
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
    slo: Annotated[
        list[str] | None,
        flag(_JUDGE, "--slo", metavar="'ttft:p99<500ms'", help="An objective, in place of the scenario's; repeat it."),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        flag(_JUDGE, "--goodput", metavar="'ttft:500'", help="A limit on each request in ms; repeat it."),
    ] = None,
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
    seed: Annotated[int | None, flag(_RUN, "--seed", metavar="N", min=0, help="The first seed.")] = None,
    jobs: Annotated[
        int | None,
        flag(_RUN, "--jobs", "-j", metavar="N", min=1, help="Processes that share the work: all CPUs; same results."),
    ] = None,
    ray: Annotated[
        str | None,
        flag(_RUN, "--ray", metavar="auto|ADDRESS|local:N", help="Let a Ray cluster do the work; same results."),
    ] = None,
    dry_run: Annotated[bool, flag(_RUN, "--dry-run", help="List the points; run nothing.")] = False,
    output: Annotated[
        Path | None,
        flag(
            _OUTPUT,
            "--output",
            "-o",
            metavar="DIR",
            help="Keep each run there as soon as it is finished; in the end all tables and reports, too.",
        ),
    ] = None,
    resume: Annotated[
        bool, flag(_OUTPUT, "--resume", help="Go on with the sweep in -o: what is finished is not run again.")
    ] = False,
    as_json: Annotated[bool, flag(_OUTPUT, "--json", help="Print JSON in place of the table.")] = False,
    markdown: Annotated[bool, flag(_OUTPUT, "--markdown", help="Print Markdown in place of the table.")] = False,
    html: Annotated[
        Path | None, flag(_OUTPUT, "--html", metavar="FILE", help="Write one self-contained HTML file.")
    ] = None,
    csv: Annotated[
        Path | None, flag(_OUTPUT, "--csv", metavar="FILE", help="Write one row a run with all of its numbers.")
    ] = None,
    parquet: Annotated[Path | None, flag(_OUTPUT, "--parquet", metavar="FILE", help="The same as Parquet.")] = None,
    quiet: Annotated[bool, flag(_OUTPUT, "--quiet", "-q", help="No progress and no remarks on stderr.")] = False,
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
    varied = _varied(vary or ())
    overrides = _overrides(settings or (), slo, goodput, seed)
    _check_outputs(outputs, (scenario, *_named(varied, overrides)), resume=resume)
    asked: dict[str, Any] = {
        "scenario": scenario,
        "vary": varied,
        "samples": samples,
        "reps": reps,
        "seed": seed,
        "metrics": metric or (),
        "overrides": overrides,
    }
    try:
        if sensitivity is not None:
            drawn = "" if sampling == "lhs" else sampling
            _refuse_with_sensitivity(zip=zip_, sampling=drawn, best=best, baseline=baseline, dry_run=dry_run)
            _finish(_sensitivity(sensitivity, asked, jobs, ray, outputs, resume=resume), outputs)
            return
        from windtunnel.sweeping.plan import plan_sweep

        plan = plan_sweep(
            **asked,
            is_zipped=zip_,
            sampling=sampling,
            best_by=best,
            baseline=None if baseline is None else dict(map(_setting, baseline.split(";"))),
        )
        if dry_run:
            emit(_plan_text(plan, as_json=as_json))
            return
        _finish(_run(plan, jobs, ray, outputs, resume=resume), outputs)
    except ValueError as error:
        raise error if exit_code(error) != EXIT_INTERNAL else typer.BadParameter(str(error)) from None


# --- what was asked


def _varied(texts: Iterable[str]) -> dict[str, str]:
    from windtunnel.sweeping.axes import parse_vary

    found: dict[str, str] = {}
    for text in texts:
        try:
            key, spec = parse_vary(text)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--vary") from None
        if key in found:
            raise typer.BadParameter(f"{key} is varied twice: put all of its values into one", param_hint="--vary")
        found[key] = spec
    return found


def _setting(text: str) -> tuple[str, Any]:
    from windtunnel.sweeping.axes import read_value

    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise typer.BadParameter(f"{text!r} must read KEY=VALUE", param_hint="--set, --baseline")
    return key.strip().lstrip("-").replace("-", "_"), read_value(value.strip())


def _named(varied: Mapping[str, str], overrides: Mapping[str, Any]) -> Iterator[str]:
    """Whatever may be a file that runs read: words among values."""
    for spec in varied.values():
        yield from (part.strip() for part in re.split("[,;]", spec.removeprefix("choice:")))
    yield from (value for value in overrides.values() if isinstance(value, str))


def _overrides(
    settings: Iterable[str], slo: list[str] | None, goodput: list[str] | None, seed: int | None
) -> dict[str, Any]:
    from windtunnel.comparison_plan import setting_key

    found: dict[str, Any] = {}
    for key, value in map(_setting, settings):
        key = setting_key(key, value)
        if key in found:
            raise typer.BadParameter(f"{key} is set twice: drop one of them", param_hint="--set")
        found[key] = value
    if seed is not None and "seed" in found:
        raise typer.BadParameter("--seed and --set seed say the same: drop one of them")
    for key, option, given in (("objectives", "--slo", slo), ("goodput", "--goodput", goodput)):
        if given:
            if key in found:
                raise typer.BadParameter(f"{option} and --set {key} say the same: drop one of them")
            found[key] = given
    return found


def _refuse_with_sensitivity(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise typer.BadParameter(
                "has no meaning with --sensitivity: leave one of them out", param_hint=f"--{name.replace('_', '-')}"
            )


def _check_outputs(outputs: _Outputs, inputs: Sequence[str | None], *, resume: bool) -> None:
    from windtunnel.rundir import check_can_write_file

    if outputs.as_json and outputs.markdown:
        raise typer.BadParameter("give one of them", param_hint="--json, --markdown")
    if resume and outputs.folder is None:
        raise typer.BadParameter("which sweep? Name its folder with -o DIR", param_hint="--resume")
    given = [path for path in (outputs.html, outputs.csv, outputs.parquet) if path is not None]
    for path in given:
        check_can_write_file(path, inputs=inputs)
    if len({path.resolve() for path in given}) < len(given):
        raise typer.BadParameter("two outputs have the same name: give them different ones")
    if outputs.parquet is not None and outputs.parquet.suffix.lower() not in (".parquet", ".pq"):
        raise typer.BadParameter(f"{outputs.parquet} must end in .parquet or .pq", param_hint="--parquet")
    if outputs.folder is not None:
        from windtunnel.sweeping.running import check_folder, check_is_no_part

        check_folder(outputs.folder, resume=resume)
        for path in given:
            check_is_no_part(outputs.folder, path)


# --- doing it


def _run(plan: SweepPlan, jobs: int | None, ray: str | None, outputs: _Outputs, *, resume: bool) -> Sweep:
    from windtunnel.sweeping.running import prepared
    from windtunnel.sweeping.sweep import execute_plan
    from windtunnel.workers import Progress

    if plan.why_reps and not outputs.quiet:
        note(plan.why_reps)
    with (
        Progress(plan.num_runs, label="simulations", quiet=outputs.quiet) as progress,
        prepared(jobs, ray=ray, folder=outputs.folder, resume=resume, tell=progress) as how,
    ):
        with _telling_of_what_is_kept(how, progress, outputs, resume=resume):
            found = execute_plan(plan, how)
        progress.close()
        if outputs.folder is not None:
            found.save(outputs.folder)
    return found


def _sensitivity(
    method: str, asked: dict[str, Any], jobs: int | None, ray: str | None, outputs: _Outputs, *, resume: bool
) -> Sensitivity:
    from windtunnel.sweeping.running import prepared
    from windtunnel.sweeping.sensitivity import execute_sensitivity, plan_sensitivity
    from windtunnel.workers import Progress

    plan = plan_sensitivity(method=method, **asked)
    with (
        Progress(plan.num_runs, label="simulations", quiet=outputs.quiet) as progress,
        prepared(jobs, ray=ray, folder=outputs.folder, resume=resume, tell=progress) as how,
    ):
        with _telling_of_what_is_kept(how, progress, outputs, resume=resume):
            found = execute_sensitivity(plan, how)
        progress.close()
        if outputs.folder is not None:
            found.save(outputs.folder)
    return found


# --- telling


@contextmanager
def _telling_of_what_is_kept(how: How, progress: Progress, outputs: _Outputs, *, resume: bool) -> Iterator[None]:
    """Say what of a resumed sweep is of no use any more, as whoever resumes does not expect it."""
    store = how.store
    if store is None or not resume or outputs.quiet:
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
            }
        )
    rows = [(str(number), *point.words.values()) for number, point in enumerate(plan.points, 1)]
    lines = [
        f"scenario: {plan.base.scenario.name}",
        f"points: {len(plan.points):,}, {len(plan.seeds):,} runs each: {plan.num_runs:,} simulations",
        f"metrics: {', '.join(plan.metrics)}",
        "",
    ]
    return "\n".join([*lines, *table([("point", *(axis.key for axis in plan.axes)), *rows])])


def _finish(found: Sweep | Sensitivity, outputs: _Outputs) -> None:
    """Write and print; raises typer.Exit(4) if nothing starts, (99) if no point keeps the objectives."""
    from windtunnel.rundir import to_json

    if outputs.html is not None:
        found.report(outputs.html)
    if outputs.csv is not None:
        found.to_csv(outputs.csv)
    if outputs.parquet is not None:
        found.to_parquet(outputs.parquet)
    written = [path for path in (outputs.html, outputs.csv, outputs.parquet, outputs.folder) if path is not None]
    if written and not outputs.quiet:
        note(f"wrote {', '.join(map(str, written))}")
    if outputs.as_json:
        emit(to_json(found.to_dict()))
        for text in found.warnings:
            warn(text)
    else:
        emit((found.markdown() if outputs.markdown else found.text()).rstrip("\n"))
    if found.is_infeasible:
        raise typer.Exit(EXIT_INFEASIBLE)
    if found.slo_passed is False:
        raise typer.Exit(EXIT_SLO_BREACHED)

"""``windtunnel optimize``: the settings with most goodput per dollar under the objectives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import EXIT_INFEASIBLE, EXIT_INTERNAL, EXIT_SLO_BREACHED, exit_code
from windtunnel.cli.output import emit, note, warn
from windtunnel.cli.panels import flag

if TYPE_CHECKING:
    from windtunnel.optimizing.optimize import Optimum
    from windtunnel.optimizing.question import Question

_WHAT, _JUDGE, _RUN, _OUTPUT = "What is turned", "What is wanted", "Run", "Output"


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What is written, and how the result is printed."""

    as_json: bool
    markdown: bool
    html: Path | None
    csv: Path | None
    parquet: Path | None
    scenario: Path | None
    folder: Path | None
    quiet: bool

    @property
    def files(self) -> list[Path]:
        """The files that are asked for."""
        return [path for path in (self.html, self.csv, self.parquet, self.scenario) if path is not None]


def optimize(
    scenario: Annotated[str | None, options.scenario_argument()] = None,
    tune: Annotated[
        list[str] | None,
        flag(
            _WHAT,
            "--tune",
            metavar="KEY=SPEC",
            help="A setting and its values, in place of the usual ones: A,B,C, FIRST:LAST:STEP, "
            "log:FIRST:LAST:HOW_MANY, or a range LOW:HIGH, lograndom:LOW:HIGH; repeat it.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        flag(_WHAT, "--set", metavar="KEY=VALUE", help="A setting for all deployments; repeat it."),
    ] = None,
    wanted: Annotated[
        str,
        flag(
            _JUDGE,
            "--for",
            metavar="KEY",
            help="goodput_per_dollar if not given (per GPU-hour without a price), goodput, cost, or a key of simulate "
            "--json, with + or - before it where neither way is good in itself.",
        ),
    ] = "goodput_per_dollar",
    at: Annotated[
        str,
        flag(
            _JUDGE,
            "--at",
            metavar="load|capacity",
            help="The scenario's own load if not given, or the largest rate that keeps the objectives.",
        ),
    ] = "load",
    slo: Annotated[list[str] | None, options.slo(_JUDGE)] = None,
    goodput: Annotated[list[str] | None, options.goodput(_JUDGE)] = None,
    gpu_price: Annotated[
        float | None,
        flag(_JUDGE, "--gpu-price", metavar="PRICE", min=0, help="Of one GPU for an hour, in place of the scenario's."),
    ] = None,
    trials: Annotated[
        int | None, flag(_RUN, "--trials", metavar="N", min=1, help="Deployments that are tried at most: 64.")
    ] = None,
    reps: Annotated[
        int | None,
        flag(
            _RUN,
            "--reps",
            metavar="N",
            min=1,
            help="Runs of a deployment that may win, and of the answer on fresh seeds: 5 (capacity 8, traces 1).",
        ),
    ] = None,
    seed: Annotated[int | None, options.first_seed(_RUN)] = None,
    jobs: Annotated[int | None, options.jobs(_RUN)] = None,
    ray: Annotated[str | None, options.ray(_RUN)] = None,
    dry_run: Annotated[bool, flag(_RUN, "--dry-run", help="List the knobs; run nothing.")] = False,
    output: Annotated[Path | None, options.kept_in(_OUTPUT)] = None,
    resume: Annotated[
        bool, flag(_OUTPUT, "--resume", help="Go on with the search in -o: what is finished is not run again.")
    ] = False,
    as_json: Annotated[bool, options.json_for_text(_OUTPUT)] = False,
    markdown: Annotated[bool, options.markdown_for_text(_OUTPUT)] = False,
    html: Annotated[Path | None, options.html_file(_OUTPUT)] = None,
    csv: Annotated[Path | None, options.csv_of_runs(_OUTPUT)] = None,
    parquet: Annotated[Path | None, options.parquet(_OUTPUT)] = None,
    save_scenario: Annotated[
        Path | None,
        flag(_OUTPUT, "--save-scenario", metavar="FILE", help="Write the answer as a scenario that simulate runs."),
    ] = None,
    force: Annotated[bool, options.force_scenario(_OUTPUT)] = False,
    quiet: Annotated[bool, options.quiet(_OUTPUT)] = False,
) -> None:
    """Search the settings of a deployment for goodput per dollar under its objectives, in far fewer runs than a grid.

    Prints the vllm serve line, what it gains over the scenario's own settings on fresh seeds, and which setting buys
    how much; what buys nothing is back at vLLM's default.  Without --tune the usual knobs are turned, as far as step
    times are known for them.  At the scenario's load goodput cannot exceed what is asked for: deployments that are
    level are ranked by cost, then by head-room.  The exit code is 4 if nothing starts, 99 if no deployment keeps the
    objectives.

    \b
    Examples:
      windtunnel optimize memory-dial --gpu-price 1.79 --html best.html
      windtunnel optimize chat-8b-h100 --at capacity --tune max_num_seqs=64,128,256 --tune tensor_parallel_size=1,2
      windtunnel optimize token-budget --slo 'itl:p99<100ms' --for goodput --tune max_num_batched_tokens=1k:16k
      windtunnel optimize chat-8b-h100 --set num_requests=1000 -o night -j 8 --resume
    """
    outputs = _Outputs(as_json, markdown, html, csv, parquet, save_scenario, output, quiet)
    tuned, overrides = _tuned(tune or ()), _overrides(settings or (), slo, goodput, gpu_price)
    _check_outputs(outputs, (scenario, *_named(tuned, overrides)), resume=resume, force=force)
    try:
        from windtunnel.optimizing.question import make_question

        question = make_question(
            scenario,
            tuned,
            wanted=wanted,
            at=at,
            trials=trials,
            reps=reps,
            seed=seed,
            overrides=overrides,
        )
        if dry_run:
            emit(_question_text(question, as_json=as_json))
            return
        _finish(_run(question, jobs, ray, outputs, resume=resume), outputs)
    except ValueError as error:
        raise error if exit_code(error) != EXIT_INTERNAL else typer.BadParameter(str(error)) from None


# --- what was asked


def _tuned(texts: Iterable[str]) -> dict[str, str]:
    from windtunnel.sweeping.axes import parse_vary

    found: dict[str, str] = {}
    for text in texts:
        try:
            key, spec = parse_vary(text)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--tune") from None
        if key in found:
            raise typer.BadParameter(f"{key} is tuned twice: put all of its values into one", param_hint="--tune")
        found[key] = spec
    return found


def _overrides(
    settings: Iterable[str], slo: list[str] | None, goodput: list[str] | None, gpu_price: float | None
) -> dict[str, Any]:
    from windtunnel.comparison_plan import setting_key
    from windtunnel.sweeping.axes import read_value

    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"{text!r} must read KEY=VALUE", param_hint="--set")
        given = read_value(value.strip())
        key = setting_key(name.strip().lstrip("-").replace("-", "_"), given)
        if key in found:
            raise typer.BadParameter(f"{key} is set twice: drop one of them", param_hint="--set")
        found[key] = given
    flags: tuple[tuple[str, str, Any], ...] = (
        ("objectives", "--slo", slo or None),
        ("goodput", "--goodput", goodput or None),
        ("gpu_hour", "--gpu-price", gpu_price),
    )
    for key, option, value in flags:
        if value is not None:
            if key in found:
                raise typer.BadParameter(f"{option} and --set {key} say the same: drop one of them")
            found[key] = value
    return found


def _named(told: Any, *more: Any) -> Iterator[str]:
    """Whatever may be a file that runs read: words among values."""
    if isinstance(told, str):
        yield from (part.strip() for part in re.split("[,;]", told.removeprefix("choice:")))
    elif isinstance(told, Mapping):
        yield from _named(None, *told.values())
    elif isinstance(told, list | tuple):
        yield from _named(None, *told)
    for each in more:
        yield from _named(each)


def _check_outputs(outputs: _Outputs, inputs: Sequence[str | None], *, resume: bool, force: bool) -> None:
    from windtunnel.rundir import check_can_write_file, check_can_write_scenario

    if outputs.as_json and outputs.markdown:
        raise typer.BadParameter("give one of them", param_hint="--json, --markdown")
    if resume and outputs.folder is None:
        raise typer.BadParameter("which search? Name its folder with -o DIR", param_hint="--resume")
    for path in outputs.files:
        check_can_write_file(path, inputs=inputs)
    if outputs.scenario is not None:
        check_can_write_scenario(outputs.scenario, force=force)
    if len({path.resolve() for path in outputs.files}) < len(outputs.files):
        raise typer.BadParameter("two outputs have the same name: give them different ones")
    if outputs.parquet is not None and outputs.parquet.suffix.lower() not in (".parquet", ".pq"):
        raise typer.BadParameter(f"{outputs.parquet} must end in .parquet or .pq", param_hint="--parquet")
    if outputs.folder is not None:
        from windtunnel.optimizing.running import check_folder, check_is_no_part

        check_folder(outputs.folder, resume=resume)
        for path in outputs.files:
            check_is_no_part(outputs.folder, path)


# --- doing it


def _run(question: Question, jobs: int | None, ray: str | None, outputs: _Outputs, *, resume: bool) -> Optimum:
    from windtunnel.optimizing.optimize import execute
    from windtunnel.optimizing.search import check_optuna
    from windtunnel.sweeping.running import prepared
    from windtunnel.workers import Progress

    check_optuna()
    with (
        Progress(label="runs", quiet=outputs.quiet) as progress,
        prepared(jobs, ray=ray, folder=outputs.folder, resume=resume, tell=progress) as how,
    ):
        found = execute(question, how)
        progress.close()
        if outputs.folder is not None:
            found.save(outputs.folder)
    return found


# --- telling


def _question_text(question: Question, *, as_json: bool) -> str:
    from windtunnel.cli.dry_run import table
    from windtunnel.rundir import to_json

    if as_json:
        return to_json(
            {
                "scenario": question.base.scenario.name,
                "for": question.target.key,
                "at": question.at,
                "knobs": [
                    {
                        "key": knob.key,
                        "asked": knob.text,
                        "values": list(knob.values),
                        "own": knob.own,
                        "default": knob.default,
                    }
                    for knob in question.knobs
                ],
                "objectives": [slo.text for slo in question.objectives],
                "num_combinations": question.num_combinations,
                "trials": question.num_trials,
                "seeds": list(question.seeds),
                "notes": list(question.notes),
            }
        )
    rows = [
        (
            knob.key,
            ", ".join(map(str, knob.values)) or knob.text,
            "–" if knob.own is None else str(knob.own),
            "–" if knob.default is None else str(knob.default),
        )
        for knob in question.knobs
    ]
    number = question.num_combinations
    grid = "a range, so that there is no grid" if number is None else f"{number:,} combinations"
    lines = [
        f"scenario: {question.base.scenario.name}",
        f"for: {question.target.label}, at {'capacity' if question.at == 'capacity' else 'its own load'}",
        f"objectives: {', '.join(slo.text for slo in question.objectives) or 'none'}",
        f"deployments: {question.num_trials:,} at most, of {grid}; up to {len(question.seeds):,} runs each",
        *question.notes,
        "",
    ]
    return "\n".join([*lines, *table([("knob", "values", "scenario", "vLLM default"), *rows])])


def _finish(found: Optimum, outputs: _Outputs) -> None:
    """Write and print; raises typer.Exit(4) if nothing starts, (99) if no deployment keeps the objectives."""
    from windtunnel.rundir import to_json

    if outputs.html is not None:
        found.report(outputs.html)
    if outputs.csv is not None:
        found.to_csv(outputs.csv)
    if outputs.parquet is not None:
        found.to_parquet(outputs.parquet)
    written = [path for path in outputs.files if path != outputs.scenario]
    if outputs.scenario is not None and found.optimized.scenario_toml:
        found.save_scenario(outputs.scenario)
        written.append(outputs.scenario)
    if outputs.folder is not None:
        written.append(outputs.folder)
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
